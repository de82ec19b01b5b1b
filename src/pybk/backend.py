"""Where ledgers live, as the manager and its handles see it: a store of this process, or a cluster of bookies.

One set of handles serves both; what they need of a backend is written down here and nowhere else.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from pybk.config import StoreConfig
from pybk.digest import EntryDigest
from pybk.entry import EntryBatch
from pybk.errors import PybkError
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.group_commit import Completion
from pybk.health import Health
from pybk.keys import KeyRing, LedgerKeys
from pybk.ledger import LedgerMetadata
from pybk.metadata.registration import BookieRegistration
from pybk.metrics import Metrics
from pybk.seal import LedgerSeal
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.log.admission import Admission


class BackendIdentity(NamedTuple):
    """The identity of a store or cluster, and the scrypt parameters with which its passwords become keys."""

    store_id: bytes
    salt: bytes
    scrypt_cost: int


class Replicated(NamedTuple):
    """What ``LedgerManager.replicate`` did.

    Attributes:
        ledgers: Ledgers looked at.
        fragments: Fragments that are complete again.
        left: What could not be done, one reason each: fragments that have no end yet, or too few bookies.
    """

    ledgers: int
    fragments: int
    left: tuple[str, ...]


class Quorums(NamedTuple):
    """How a ledger is replicated."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int


class AppendLog(Protocol):
    """What makes appended entries durable, in commits; ``pybk.storage.log.log.Log`` has the meaning of each call.

    Threads: any.
    """

    @property
    def error(self) -> PybkError | None:
        """Why it takes nothing more, or None."""

    @property
    def outstanding_bytes(self) -> int:
        """Bytes staged and not yet durable."""

    @property
    def admission(self) -> Admission:
        """The queue of appends that wait for admission."""

    def stage(
        self,
        descriptor: LedgerDescriptor,
        first_entry_id: int,
        sizes: array[int],
        parts: Sequence[bytes | memoryview],
        *,
        nbytes: int,
        base_length: int,
        overhead: int,
        wanted: bool,
    ) -> Completion | None:
        """Stage entries; None when too much is outstanding. The caller holds ``descriptor.lock``."""

    def stage_entry(
        self,
        descriptor: LedgerDescriptor,
        entry_id: int,
        prefix: bytes,
        payload: bytes,
        base_length: int,
        overhead: int,
        wanted: bool,
    ) -> Completion | None:
        """Stage one entry; None when too much is outstanding. The caller holds ``descriptor.lock``."""

    def wait(self, completion: Completion) -> None:
        """Return when ``completion`` is done, doing the work meanwhile if nobody does."""

    def when_done(self, completion: Completion, callback: Callable[[], None]) -> None:
        """Have ``callback`` called by a background thread once ``completion`` is done."""

    def kick(self) -> None:
        """See to it that what is staged and wanted gets done although nobody waits."""

    def flush(self) -> None:
        """Return when everything staged before the call is durable; raises if it could not be made so."""


class LedgerBackend(Protocol):
    """Where ledgers live. ``LedgerManager`` and the handles document which call raises which error.

    Threads: any.
    """

    @property
    def config(self) -> StoreConfig:
        """Settings."""

    @property
    def metrics(self) -> Metrics:
        """Where what handles do is counted."""

    @property
    def read_only(self) -> bool:
        """Whether nothing can be changed here."""

    @property
    def changes_by_password(self) -> bool:
        """Whether a ledger is deleted and moved by those alone who know its password."""

    @property
    def ended(self) -> bool:
        """Whether reading is over."""

    @property
    def where(self) -> str:
        """Names the backend in messages."""

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that opened it."""

    @property
    def identity(self) -> BackendIdentity:
        """What keys are derived with."""

    @property
    def key_ring(self) -> KeyRing:
        """Derives ledger keys from passwords, with ``identity``; it keeps the result of scrypt for the next ledger."""

    @property
    def is_cluster(self) -> bool:
        """Whether the ledgers lie on the bookies of a cluster, and not in a store of this process."""

    @property
    def feature_level(self) -> FeatureLevel:
        """The level whose formats are written here; it may rise while the backend is in use."""

    def check_usable(self) -> None:
        """Raise unless it may be used."""

    def check_writable(self) -> None:
        """Raise unless it may be used and changed."""

    def close(self) -> None:
        """Wait for what is outstanding and let go of everything."""

    def health(self) -> Health:
        """Return how it is."""

    def catch_up(self) -> None:
        """See what others did since."""

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def quorums(self, asked: tuple[int | None, int | None, int | None]) -> Quorums:
        """Return ensemble size, write quorum and ack quorum of a new ledger, of which some were asked for."""

    def verifier(self, keys: LedgerKeys) -> bytes:
        """Return what metadata keeps of a ledger's keys, so that a password can be checked."""

    def new_ledger_id(self) -> int:
        """Return a ledger id that was never given before."""

    def new_creation_sequence(self) -> int:
        """Return the next creation sequence."""

    def create(self, metadata: LedgerMetadata) -> LedgerDescriptor:
        """Create a ledger; durable on return."""

    def descriptor(self, ledger_id: int) -> LedgerDescriptor:
        """Return a ledger's descriptor."""

    def unlock(self, descriptor: LedgerDescriptor, keys: LedgerKeys, seal: LedgerSeal) -> None:
        """Have a ledger's keys used for what is done with this descriptor, and for the seal when it is closed."""

    def log_of(self, descriptor: LedgerDescriptor) -> AppendLog:
        """Return what makes this ledger's appends durable."""

    def recover(self, descriptor: LedgerDescriptor) -> None:
        """Fence the writer, establish the end and close the ledger; a closed one stays as it is."""

    def close_ledger(self, descriptor: LedgerDescriptor) -> None:
        """Close a ledger behind everything staged so far, as its writer."""

    def reseal(self, descriptor: LedgerDescriptor, sealed: LedgerMetadata) -> None:
        """Record the seal of a closed ledger, unless its end has changed since it was checked; durable on return."""

    def force(self, descriptor: LedgerDescriptor) -> int:
        """Make everything pushed so far durable and confirmed; return the last add confirmed."""

    def delete(self, descriptor: LedgerDescriptor) -> None:
        """Delete a ledger; durable on return."""

    def move(self, descriptor: LedgerDescriptor, tier: StorageHint) -> None:
        """Move a ledger to another tier; done on return.

        Raises:
            CorruptError: Damaged entries stay where they are; everything else was moved.
        """

    def move_all(self, descriptors: Iterable[LedgerDescriptor], tier: StorageHint) -> None:
        """Move ledgers to another tier, given in ascending order of their ids; done on return.

        A backend may look at all of the iterable or at a part of it at a time.
        """

    def replicate(self, what: int | str) -> Replicated:
        """Copy what lost bookies held of a ledger, or of all ledgers that a bookie is missing from."""

    def metadata(self, ledger_id: int) -> LedgerMetadata:
        """Return a ledger's metadata as of now."""

    def ledgers(self, after: int = -1) -> Iterator[LedgerMetadata]:
        """Yield the metadata of all ledgers with an id above ``after``, ascending."""

    def confirmed(self, ledger_id: int) -> tuple[int, int | None] | None:
        """Return the last add confirmed of a ledger, and its payload bytes up to there if they are known.

        Returns:
            None if only bookies know.
        """

    def bookies(self) -> list[BookieRegistration]:
        """Return the bookies that are available, by name."""

    def look(self, descriptor: LedgerDescriptor, *, follows: bool = False) -> None:
        """See how far a ledger has come, and whether it was closed or deleted.

        Args:
            descriptor: The ledger.
            follows: The caller waits for more entries and is notified of them, so an entry that is not visible yet may
                be returned later.
        """

    # ---- entries -------------------------------------------------------------------------------------------------

    def read_verified(
        self, descriptor: LedgerDescriptor, first: int, last: int, max_bytes: int, *, digest: EntryDigest, direct: bool
    ) -> EntryBatch:
        """Return entries ``first`` to at most ``last``, at least one, about ``max_bytes``, each verified."""

    def locate(self, descriptor: LedgerDescriptor, entry_id: int) -> tuple[memoryview, int, int] | None:
        """Return a buffer, start and end of one entry, if there is a short way to it; None: ``read_verified``."""

    def write_buffered(self, descriptor: LedgerDescriptor) -> None:
        """Write what appends to a ledger have buffered, without confirming it."""

    def check_space(self) -> None:
        """Raise while nothing is taken for want of space."""

    def wait_for_admission(self, descriptor: LedgerDescriptor) -> None:
        """Return when an append that found too much outstanding may try again."""

    def checkpoint(self) -> None:
        """Bring everything durable to its tier and free what is dead."""
