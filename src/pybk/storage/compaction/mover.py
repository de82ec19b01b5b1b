"""The mover: reads records, checks them, writes them packed to the target tier, and syncs.

Checkpoint, compaction and tier moves select the entries, and this module moves them. It does not change the index: the
caller commits the new runs, and only then drops the old ones.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from pybk.errors import CorruptError, PybkError, StorageError, StorageRefusedError
from pybk.flags import StorageHint
from pybk.storage.format.index_rows import FileRow
from pybk.storage.format.log_file import (
    LOCATION_COMPRESSED,
    RunLocations,
    entry_ends,
    location_dtype,
)
from pybk.storage.store_reader import locate_entries
from pybk.storage.tiers import Loaded, ReservedFile
from pybk.storage.volumes import tier_for, tier_of_kind

if TYPE_CHECKING:
    from pybk.storage.live_store import LiveStore

logger = logging.getLogger(__name__)

MOVED_LEDGERS_MAX: Final = 1024
MOVED_BYTES_MAX: Final = 64 << 20
"""The most bytes that are moved together, with one commit of the index; 16 MiB of them are in memory at a time."""

PORTION_BYTES: Final = 16 << 20
"""Bound on the bytes that are read at a time."""

Piece = tuple[int, list[int], list[bytes | memoryview]]
"""The entries that become one record: the first entry id, their sizes, and the parts of their bytes."""

_NAMED_MAX: Final = 10
"""An error about records that were not moved names so many places; the log names all."""


class Unmoved(NamedTuple):
    """Records of one ledger in one file that a mover did not move, because they cannot be read.

    Attributes:
        ledger_id: The ledger.
        path: The file, or the LMDB environment of the SSD tier.
        records: The number of records.
        problem: The problem of the first of them.
    """

    ledger_id: int
    path: str
    records: int
    problem: str


class UnmovedError(CorruptError):
    """A move did not move damaged records; it moved all others.

    Attributes:
        unmoved: Each ledger and file that has such records.
    """

    def __init__(self, unmoved: Sequence[Unmoved], tier: StorageHint) -> None:
        found = sorted(unmoved)
        named = "; ".join(
            f"ledger {one.ledger_id}: {one.records} records in {one.path} ({one.problem})" for one in found[:_NAMED_MAX]
        )
        more = f"; and {len(found) - _NAMED_MAX} more, which the log names" if len(found) > _NAMED_MAX else ""
        super().__init__(
            f"damaged records were not moved to {tier.value}, everything else was: {named}{more}; restore the file "
            "from a backup and move the ledger again, or delete the ledger",
            path=found[0].path,
        )
        self.unmoved = tuple(found)


class Mover:
    """Packs entries of many ledgers into one tier.

    Call ``move`` in order of ledger and entry, then ``finish``; or ``abort``. Ledgers of one ``Mover`` share its files.

    Threads: one.

    Attributes:
        unmoved: The records that ``move`` did not move because they cannot be read, summed up for each ledger and file;
            by ledger id and path.
    """

    def __init__(
        self,
        store: LiveStore,
        hint: StorageHint,
        *,
        when_full: bool = False,
        reserved: ReservedFile | None = None,
    ) -> None:
        self._store = store
        tier = tier_for(hint)
        self._block_bytes = tier.block_bytes(store.config)
        self.writer = tier.writer(store, hint, when_full=when_full, reserved=reserved)
        """Writes to the tier."""
        self.unmoved: dict[tuple[int, str], Unmoved] = {}

    def move(self, ledger_id: int, runs: RunLocations) -> RunLocations:
        """Write the entries of some runs, all in one file, to the target.

        Returns:
            The new runs of the same entries, in order. Records that are damaged or cannot be read are not moved: their
            old runs are returned, because reading them has to raise CorruptError still, and ``unmoved`` names them.

        Raises:
            StorageFullError, OSError: The target has no space or failed; call ``abort``.

        Cost: Memory for about 16 MiB of entries, and more if compressed records have entries longer than a block.
        """
        if len(runs) == 1 and self.may_copy(runs[0].item()):
            return self._copy(ledger_id, runs)
        moved = [part for portion in self._portions(runs) for part in self._move(ledger_id, portion)]
        return moved[0] if len(moved) == 1 else np.concatenate(moved)

    def may_copy(self, run: tuple[int, ...]) -> bool:
        """Return whether a record can be copied unchanged to the target: plain, dense, and a block at most."""
        _, count, stride, _, _, body_bytes, flags = run
        return not flags & LOCATION_COMPRESSED and (stride == 1 or count == 1) and body_bytes <= self._block_bytes

    def _copy(self, ledger_id: int, runs: RunLocations) -> RunLocations:
        """Copy one record unchanged to the target; otherwise as ``move``.

        A small ledger is one record, for which ``move`` would cost ten times as much.
        """
        loaded = self._load(ledger_id, runs)
        if not isinstance(loaded, Loaded):
            self._keep(ledger_id, runs, loaded)
            return runs
        _, problem = self._store.sound_locations(ledger_id, loaded)
        if problem is not None:
            self._keep(ledger_id, runs, problem)
            return runs
        first, count, _, _, _, body_bytes, _ = runs[0].item()
        start = int(loaded.body_starts[0])
        body = bytes(loaded.buffer[start : start + body_bytes])
        if count > 1:
            entry_ends(memoryview(body), count, where=f"ledger {ledger_id} from entry {first}, to be moved")
        run = self.writer.add_body(ledger_id, first, count, body)
        return np.array([run], location_dtype())

    def _portions(self, runs: RunLocations) -> Iterator[RunLocations]:
        """Cut runs into portions that may be in memory at once, unpacked."""
        # A run does not say how much a compressed record unpacks to: about a block, unless an entry is longer.
        packed = (runs["flags"] & LOCATION_COMPRESSED) != 0
        sizes = np.where(packed, np.maximum(runs["body"], self._store.config.cold_block_bytes), runs["body"])
        ends = np.cumsum(sizes.astype(np.int64))
        low = 0
        while low < len(runs):
            before = int(ends[low - 1]) if low else 0
            high = max(low + 1, int(np.searchsorted(ends, before + PORTION_BYTES, side="right")))
            yield runs[low:high]
            low = high

    def _move(self, ledger_id: int, runs: RunLocations) -> Iterator[RunLocations]:
        """Move a portion and yield its new runs.

        The records of a portion are loaded together. A damaged one can prevent loading the others, so the portion is
        halved then.
        """
        waiting = [runs]
        while waiting:
            part = waiting.pop()
            found = self._load(ledger_id, part)
            if isinstance(found, Loaded):
                yield self._pack(ledger_id, part, found)
            elif len(part) > 1 and isinstance(found, CorruptError):
                middle = len(part) // 2
                waiting += [part[middle:], part[:middle]]
            else:
                self._keep(ledger_id, part, found)
                yield part

    def _pack(self, ledger_id: int, runs: RunLocations, loaded: Loaded) -> RunLocations:
        """Write the sound ones of some loaded records to the target."""
        sound = np.ones(len(runs), np.bool_)
        if not (runs["flags"] & LOCATION_COMPRESSED).any():  # a compressed record was checked when it was unpacked
            sound, problem = self._store.sound_locations(ledger_id, loaded)
            if problem is not None:
                self._keep(ledger_id, runs[~sound], problem)
        moved: list[tuple[int, ...]] = []
        for low, high, good in _stretches(sound):
            if good:
                part = loaded._replace(runs=loaded.runs[low:high], body_starts=loaded.body_starts[low:high])
                moved += [self.writer.add(ledger_id, *piece) for piece in self._pieces(part)]
            else:
                moved += [tuple(run) for run in runs[low:high].tolist()]
        return np.array(moved, location_dtype())

    def _load(self, ledger_id: int, runs: RunLocations) -> Loaded | StorageError:
        """Return the plain bodies of some records, or the reason why they cannot be read."""
        try:
            return self._store.load(ledger_id, runs)
        except StorageRefusedError:
            raise
        except StorageError as error:
            return error

    def _keep(self, ledger_id: int, runs: RunLocations, problem: PybkError) -> None:
        """Note records that cannot be read and are not moved; logged once for each ledger and file.

        A record that the store knows to be lost is not noted, because the loss was recorded when it was accepted.
        """
        volumes = self._store.volumes
        file_id = int(runs["file"][0])
        row = volumes.rows[file_id]
        path = volumes.path_of(row)
        volumes.let_go(file_id)
        runs = runs[~_known_lost(runs, row)]
        if not len(runs):
            return
        found = self.unmoved.get((ledger_id, path))
        if found is None:
            logger.error("entries of ledger %d in %s stay where they are: %s", ledger_id, path, problem)
            found = Unmoved(ledger_id, path, 0, str(problem))
        self.unmoved[ledger_id, path] = found._replace(records=found.records + len(runs))

    def _pieces(self, loaded: Loaded) -> Iterator[Piece]:
        """Cut the entries of some records into pieces of consecutive ids and of the target's block size.

        Entries that lie one after the other, as those of a record do, are one part of their piece.
        """
        block_bytes = self._block_bytes
        ids, offsets, sizes = locate_entries(loaded.buffer, loaded.runs, loaded.body_starts, where="a record to move")
        ends = np.cumsum(sizes)
        jumps = [*(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
        stops = offsets + sizes
        gaps = (np.flatnonzero(offsets[1:] != stops[:-1]) + 1).tolist()  # entries that do not lie behind the one before
        low = 0
        while low < len(ids):
            before = int(ends[low - 1]) if low else 0
            high = max(low + 1, int(np.searchsorted(ends, before + block_bytes, side="right")))
            high = min(high, jumps[bisect_right(jumps, low)])
            edges = [low, *gaps[bisect_right(gaps, low) : bisect_left(gaps, high)], high]
            starts, lasts = offsets[edges[:-1]].tolist(), stops[np.array(edges[1:]) - 1].tolist()
            parts: list[bytes | memoryview] = [loaded.buffer[a:b] for a, b in zip(starts, lasts, strict=True)]
            yield int(ids[low]), sizes[low:high].tolist(), parts
            low = high

    def finish(self) -> list[FileRow]:
        """Sync the written files; return the rows of new and changed files, which the caller puts in the index."""
        return self.writer.finish()

    def abort(self) -> None:
        """Remove the written files; records that were put in LMDB stay there unused until they are put again."""
        self.writer.abort()


def _known_lost(runs: RunLocations, row: FileRow) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which records of a file the store knows to be lost, ``(r,)`` bool.

    A rebuild writes a compressed record without a body for lost entries; a salvage records the length of a cut file in
    the index, so a record beyond that end is lost.
    """
    lost: np.ndarray[tuple[int], np.dtype[np.bool_]] = (runs["body"] == 0) & (
        (runs["flags"] & LOCATION_COMPRESSED) != 0
    )
    return lost | tier_of_kind(row.kind).beyond_end(runs, row)


def _stretches(sound: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Iterator[tuple[int, int, bool]]:
    """Yield (low, high, value) of stretches of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(sound)) + 1).tolist(), len(sound)]
    for low, high in pairwise(edges):
        yield low, high, bool(sound[low])
