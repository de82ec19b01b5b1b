"""Tiers of files: records that lie at an offset in a log file or cold segment, and are read through a map of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from pybk.deferral import np
from pybk.errors import CorruptError, PybkError, UsageError
from pybk.flags import StorageHint
from pybk.storage import format as layouts
from pybk.storage.format.index_rows import FileRow
from pybk.storage.format.log_file import LOCATION_COMPRESSED, RECORD_HEADER_BYTES, RunLocations, decode_header
from pybk.storage.io.filesystem import CHUNK_BYTES, Mapped
from pybk.storage.tiers import (
    COLD,
    LOG,
    DumpRow,
    FileDamage,
    Loaded,
    LocationWords,
    ReadStore,
    ReservedFile,
    Run,
    Tier,
    TierFiles,
    TierStore,
    TierVolumes,
    TierWriter,
    checked_record,
    dumped_record,
)

if TYPE_CHECKING:
    from pybk.config import StoreConfig
    from pybk.storage.format.index_rows import FileRow

_GAP_BYTES: Final = 64 << 10


class FileTier(Tier):
    """A tier whose records lie at ``RunLocation.offset`` in a file, as log files and cold segments have them."""

    def load(
        self,
        store: ReadStore,
        ledger_id: int,
        runs: RunLocations,
        *,
        direct: bool = False,
        check: bool = False,
        bytes_max: int = 1 << 62,
    ) -> Loaded:
        """Return the map of the file, or a copy of the part of it that has the records; unpack compressed records."""
        file_id = int(runs["file"][0])
        volumes = store.volumes
        base = 0
        if direct:
            base, end = span(runs)
            buffer = volumes.read_direct(file_id, base, end)
        elif store.fs.populates and not volumes.is_reused(file_id):
            mapped = volumes.mapped(file_id)
            buffer = mapped.view
            _populate(volumes, mapped, runs)
        else:
            base, end = span(runs)
            buffer = volumes.read(file_id, base, end)
        if (runs["flags"] & LOCATION_COMPRESSED).any():
            return _unpacked(volumes.root, ledger_id, runs, buffer, base, bytes_max)
        starts = runs["offset"].astype(np.int64) - base
        if check:
            for start, run in zip(starts.tolist(), runs, strict=True):
                checked_record(buffer, start, ledger_id, int(run["first"]), file_id, volumes.root)
        return Loaded(buffer, runs, starts + RECORD_HEADER_BYTES)

    def plain_record(
        self, store: ReadStore, ledger_id: int, words: LocationWords
    ) -> tuple[memoryview, LocationWords] | None:
        """Return the map of the file."""
        try:
            if not store.fs.populates or store.volumes.is_reused(words[2] >> 32):
                return None
            return store.volumes.view(words[2] >> 32), words
        except (KeyError, FileNotFoundError):
            return None

    def stored_record(self, files: TierFiles, ledger_id: int, run: Run) -> tuple[memoryview, int]:
        """Return the map of the file, the record populated."""
        _, _, _, offset, file_id, body_bytes, _ = run
        data = files.volumes.view(file_id)
        files.volumes.populate(data, offset, offset + RECORD_HEADER_BYTES + body_bytes)
        return data, offset


def _populate(volumes: TierVolumes, mapped: Mapped, runs: RunLocations) -> None:
    """Bring some records of a mapped file into memory, and few other bytes; raises as ``Volumes.populate``."""
    start, stop = span(runs)
    if stop - start <= CHUNK_BYTES:
        volumes.populate(mapped.view, start, stop)
    elif stop - start <= CHUNK_BYTES * len(runs):
        volumes.populate_once(mapped, start, stop)
    elif not mapped.is_populated(start, stop):
        for low, high in spans(runs):
            volumes.populate_once(mapped, low, high)


def _unpacked(root: str, ledger_id: int, runs: RunLocations, buffer: memoryview, base: int, bytes_max: int) -> Loaded:
    """Unpack records one after the other; the runs then carry the sizes of the plain bodies."""
    bodies: list[bytes | memoryview] = []
    left = bytes_max
    for run in runs:
        if bodies and left <= 0:
            break
        start = int(run["offset"]) - base
        header, body = checked_record(buffer, start, ledger_id, int(run["first"]), int(run["file"]), root)
        bodies.append(layouts.decompress(header, body))
        left -= len(bodies[-1])
    sizes = np.array([len(body) for body in bodies], np.int64)
    plain = runs[: len(bodies)].copy()
    plain["body"] = sizes
    return Loaded(memoryview(b"".join(bodies)), plain, np.cumsum(sizes) - sizes)


class LogTier(FileTier):
    """Log files. The log writes them; ``repair`` reads them by commits, because a whole commit proves its records."""

    kind: ClassVar[str] = LOG
    mixes_hints: ClassVar[bool] = True

    def rows(self, files: TierFiles, row: FileRow) -> RunLocations:
        """Raise UsageError, because records of a log file are found through its commits: ``inspection.file_rows``."""
        raise UsageError(f"{files.volumes.path_of(row)} is a log file; find its records through its commits")


class ColdTier(FileTier):
    """Cold segments; those of the hint HDD may be compressed."""

    kind: ClassVar[str] = COLD
    hints: ClassVar[frozenset[StorageHint]] = frozenset({StorageHint.NVME, StorageHint.HDD})
    files_are_merged: ClassVar[bool] = True
    is_written_by_moves: ClassVar[bool] = True

    def size_is_known(self, hint: StorageHint, config: StoreConfig) -> bool:
        """Return whether the records are not compressed."""
        return hint is not StorageHint.HDD or config.cold_compression is None

    def writer(
        self, store: TierStore, hint: StorageHint, *, when_full: bool = False, reserved: ReservedFile | None = None
    ) -> TierWriter:
        """Return a writer that begins another segment whenever one is full."""
        return _SegmentsWriter(store, hint, reserved)

    def rows(self, files: TierFiles, row: FileRow) -> RunLocations:
        """Return the rows of the footer; without a sound footer, the records up to the first damaged header."""
        path = files.volumes.path_of(row)
        try:
            return layouts.ColdSegment(files.fs, path, files.store_id, row.file_id).rows
        except CorruptError:
            return layouts.salvage_rows(files.fs, path, files.store_id, row.file_id)

    def check(self, files: TierFiles, row: FileRow) -> Iterator[FileDamage]:
        """Yield the damage of any byte of the segment."""
        path = files.volumes.path_of(row)
        for error in layouts.ColdSegment(files.fs, path, files.store_id, row.file_id).verify():
            yield FileDamage(str(error), path, error.offset)

    def dump(self, files: TierFiles, row: FileRow) -> Iterator[DumpRow]:
        """Yield the damage of the footer, and the records; of each record only the header is read."""
        path = files.volumes.path_of(row)
        try:
            rows: RunLocations = layouts.ColdSegment(files.fs, path, files.store_id, row.file_id).rows
        except PybkError as error:
            yield {"what": "problem", "message": str(error)}
            rows = layouts.salvage_rows(files.fs, path, files.store_id, row.file_id)
        data = files.fs.view(path)
        for offset in rows["offset"].tolist():
            files.volumes.populate(data, offset, offset + RECORD_HEADER_BYTES)
            yield dumped_record(decode_header(data, offset, where=path), offset)

    def all_record_bytes(self, store: TierStore, row: FileRow) -> int | None:
        """Return the bytes of all records, by the footer: headers and padding leave much of a segment of short ones."""
        segment = layouts.ColdSegment(store.fs, store.volumes.path_of(row), store.store_id, row.file_id)
        return int(segment.rows["body"].astype(np.int64).sum()) + RECORD_HEADER_BYTES * len(segment.rows)


class _SegmentsWriter(TierWriter):
    """Writes one cold segment after the other, or a single one to a reserved file."""

    def __init__(self, store: TierStore, hint: StorageHint, reserved: ReservedFile | None) -> None:
        self._store = store
        self._hint = hint
        self._reserved = reserved
        self._compression = store.config.cold_compression if hint is StorageHint.HDD else None
        self._open: tuple[FileRow, layouts.ColdSegmentWriter] | None = None
        self._rows: list[FileRow] = []

    def add(self, ledger_id: int, first: int, sizes: list[int], parts: Sequence[bytes | memoryview]) -> Run:
        """Write a record to the open segment, or to a new one if it does not fit."""
        need = sum(sizes) + 4 * len(sizes) + RECORD_HEADER_BYTES
        return self._segment_for(need).add(ledger_id, first, sizes, parts)

    def add_body(self, ledger_id: int, first: int, count: int, body: bytes) -> Run:
        """Write a record in its stored form."""
        return self._segment_for(len(body) + RECORD_HEADER_BYTES).add_body(ledger_id, first, count, body)

    def _segment_for(self, need: int) -> layouts.ColdSegmentWriter:
        """Return the open segment, or a new one if a record of so many bytes does not fit it."""
        if self._open is not None and not self._open[1].fits(need):
            self._finish_segment()
        if self._open is None:
            volumes, reserved = self._store.volumes, self._reserved
            row = volumes.new_file(COLD, self._hint)
            if reserved is not None:
                row = row._replace(directory=reserved.directory)
            segment = layouts.ColdSegmentWriter(
                self._store.fs,
                volumes.path_of(row),
                self._store.store_id,
                row.file_id,
                compression=self._compression,
                reserved=None if reserved is None else reserved.path,
            )
            self._open = row, segment
        return self._open[1]

    def _finish_segment(self) -> None:
        assert self._open is not None
        row, segment = self._open
        segment.finish()
        volumes = self._store.volumes
        row = row._replace(bytes=self._store.fs.file_bytes(volumes.path_of(row)))
        self._rows.append(row)
        volumes.add(row)
        self._open = None

    def finish(self) -> list[FileRow]:
        """Finish and sync the open segment; return the rows of all segments."""
        if self._open is not None:
            self._finish_segment()
        return list(self._rows)

    def abort(self) -> None:
        """Remove all segments."""
        rows, self._rows = self._rows, []
        opened, self._open = self._open, None
        if opened is not None:
            opened[1].abort()
        for row in rows:
            self._store.volumes.drop(row.file_id)


def span(runs: RunLocations) -> tuple[int, int]:
    """Return the first byte of the first record of one file, and the end of the last."""
    starts = runs["offset"].tolist()  # quicker than numpy's reductions for the few records of most batches
    last = max(starts)
    return min(starts), last + int(runs["body"][starts.index(last)]) + RECORD_HEADER_BYTES


def spans(runs: RunLocations) -> list[tuple[int, int]]:
    """Return ranges of one file that cover all its records, joined across gaps of up to 64 KiB: (first byte, end)."""
    starts = runs["offset"].astype(np.int64)
    ends = starts + runs["body"] + RECORD_HEADER_BYTES
    if len(runs) == 1:
        return [(int(starts[0]), int(ends[0]))]
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    cuts = np.flatnonzero(starts[1:] - ends[:-1] > _GAP_BYTES) + 1
    lows = starts[np.concatenate(([0], cuts))].tolist()
    highs = ends[np.concatenate((cuts - 1, [len(ends) - 1]))].tolist()
    return list(zip(lows, highs, strict=True))
