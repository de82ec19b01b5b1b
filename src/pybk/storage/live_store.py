"""The parts of a live store that its background jobs use.

The store owns the jobs, and the jobs work on the store. This interface stands between the two; so the modules of this
package can be read, and imported, without the store's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pybk.config import StoreConfig
from pybk.errors import PybkError
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.metrics import Metrics
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.format.cookie import Cookie
from pybk.storage.format.log_file import RunLocations
from pybk.storage.index.index import Index
from pybk.storage.io.failures import Troubles
from pybk.storage.io.filesystem import FileSystem
from pybk.storage.io.lmdb_environment import Environment
from pybk.storage.log.log import Log
from pybk.storage.named_records import NamedRecords
from pybk.storage.preallocation import LogFileSupply, PackReserve
from pybk.storage.tiers import Loaded
from pybk.storage.volumes import Volumes


class LiveStore(Protocol):
    """The part of a store that checkpoints, compaction, the tier policy and the scheduler use."""

    fs: FileSystem
    config: StoreConfig
    cookie: Cookie
    store_id: bytes
    feature_level: FeatureLevel
    volumes: Volumes
    index: Index
    entries: Mapping[int, Environment]
    named: NamedRecords
    metrics: Metrics
    troubles: Troubles
    log: Log
    supply: LogFileSupply
    pack_reserve: PackReserve
    next_ledger_id: int
    next_creation_sequence: int

    @property
    def tail_bytes(self) -> int:
        """Bytes of log since the last checkpoint."""

    def load(self, ledger_id: int, runs: RunLocations) -> Loaded:
        """Return the plain bodies of some records of one file."""

    def sound_locations(self, ledger_id: int, loaded: Loaded) -> tuple[npt.NDArray[np.bool_], PybkError | None]:
        """Return which loaded records are sound, and the problem of the first that is not."""

    def descriptor(self, ledger_id: int) -> LedgerDescriptor:
        """Return a ledger's descriptor; raise NoSuchLedgerError if the ledger does not exist."""

    def take_dirty(self) -> dict[int, LedgerDescriptor]:
        """Return the ledgers that changed since the last checkpoint, by id."""

    def clean(self, descriptors: Sequence[LedgerDescriptor]) -> None:
        """Forget that ledgers changed, unless they changed again since their rows were made for the index."""

    def moved(self, ledger_id: int) -> None:
        """Drop the cached locations of a ledger's entries."""

    def tail_checked(self, tail_bytes: int) -> None:
        """Subtract log that a checkpoint has taken over from ``tail_bytes``."""

    def change_bytes(self) -> int:
        """Return the bytes that a checkpoint made now would change in the index at most."""

    def wants_checkpoint(self) -> bool:
        """Return whether a checkpoint is due."""

    def check_space(self) -> None:
        """Raise StorageFullError while the store refuses entries because space is short."""

    def restore_reserve(self) -> None:
        """Allocate what the reserved space lacks; StorageRefusedError or OSError if that is impossible."""

    def space_checked(self) -> None:
        """Refuse or accept appends according to the scheduler's ``full``."""

    def release_dead_readers(self) -> None:
        """Free the slots of killed readers in LMDB."""

    def move_all(self, descriptors: Iterable[LedgerDescriptor], tier: StorageHint) -> None:
        """Move ledgers to another tier."""
