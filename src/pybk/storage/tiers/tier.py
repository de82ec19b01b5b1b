"""The interface of a storage tier: how entries that are moved are written, and how their files are freed.

A tier keeps records in files of one kind (``FileRow.kind``). The mover asks the registry for the tier that takes a
storage hint and writes through its ``TierWriter``; compaction asks the tier of a file how its space is freed. Adding a
tier means one module that implements ``Tier``, and one line in ``registry.TIERS``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from pybk.errors import UsageError
from pybk.storage.format.record import RECORD_HEADER_BYTES, RunLocations

if TYPE_CHECKING:
    from pybk.config import StoreConfig
    from pybk.feature_level import FeatureLevel
    from pybk.flags import StorageHint
    from pybk.storage.format.index_rows import FileRow
    from pybk.storage.io.filesystem import FileSystem
    from pybk.storage.io.lmdb_environment import Environment
    from pybk.storage.volumes import Volumes

Run = tuple[int, ...]
"""A row of ``LOCATION_DTYPE``: where a record lies."""


class TierStore(Protocol):
    """The parts of a live store that tiers use."""

    fs: FileSystem
    config: StoreConfig
    store_id: bytes
    feature_level: FeatureLevel
    volumes: Volumes
    entries: Mapping[int, Environment]


class TierWriter(ABC):
    """Writes records of many ledgers to one tier, in order of ledger and entry; then ``finish``, or ``abort``.

    Nothing is durable before ``finish`` returns. Every method raises StorageFullError or OSError if the tier takes no
    more; call ``abort`` then.

    Threads: one.
    """

    @abstractmethod
    def add(self, ledger_id: int, first: int, sizes: list[int], parts: Sequence[bytes | memoryview]) -> Run:
        """Write consecutive encoded entries as one record; return where it lies.

        Args:
            ledger_id: The ledger.
            first: Id of the first entry.
            sizes: Bytes of each entry.
            parts: The entries, in order.
        """

    @abstractmethod
    def add_body(self, ledger_id: int, first: int, count: int, body: bytes) -> Run:
        """Write a record whose plain body exists already and was checked; return where it lies."""

    @abstractmethod
    def finish(self) -> list[FileRow]:
        """Sync everything; return the rows of files made or changed, which the caller puts in the index."""

    @abstractmethod
    def abort(self) -> None:
        """Remove the files that were written; nothing names them."""


class Tier(ABC):
    """One kind of files that entries lie in. Instances have no state.

    Attributes:
        kind: The ``FileRow.kind`` of its files.
        hints: The storage hints whose moved entries are written here.
        files_are_freed_whole: Whether a file is unlinked once nothing lives in it and packed when little does;
            otherwise records are freed one by one.
        mixes_hints: Whether a file holds entries of ledgers of any hint, so that packing sends each to its own tier.
        files_are_merged: Whether small files are packed together once there are many.
        is_written_by_moves: Whether moves make its files, so that a move that fails removes them.
    """

    kind: ClassVar[str]
    hints: ClassVar[frozenset[StorageHint]] = frozenset()
    files_are_freed_whole: ClassVar[bool] = True
    mixes_hints: ClassVar[bool] = False
    files_are_merged: ClassVar[bool] = False
    is_written_by_moves: ClassVar[bool] = False

    def block_bytes(self, config: StoreConfig) -> int:
        """Return the entry bytes that a record gets, unless one entry alone is longer."""
        return config.cold_block_bytes

    def size_is_known(self, hint: StorageHint, config: StoreConfig) -> bool:
        """Return whether the space that records take is known before they are written."""
        return True

    def writer(self, store: TierStore, hint: StorageHint) -> TierWriter:
        """Return a writer of entries with a storage hint, one of ``hints``."""
        raise UsageError(f"files of kind {self.kind} are not written by moves")

    def beyond_end(self, runs: RunLocations, row: FileRow) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which records end beyond the size that the index has for their file, ``(r,)`` bool."""
        beyond: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            runs["offset"].astype(np.int64) + RECORD_HEADER_BYTES + runs["body"] > row.bytes
        )
        return beyond

    def all_record_bytes(self, store: TierStore, row: FileRow) -> int | None:
        """Return the bytes of all records of a file, live or not; None if that is near its size.

        Raises:
            CorruptError: The file is damaged.
        """
        return None
