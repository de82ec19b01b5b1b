"""Cold segments as a tier: immutable files, on the HDD devices or, for entries packed out of log files, on NVMe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from pybk.deferral import np
from pybk.errors import CorruptError, PybkError
from pybk.flags import StorageHint
from pybk.storage.format.cold_segment import ColdSegment, ColdSegmentWriter, salvage_rows
from pybk.storage.format.record import RECORD_HEADER_BYTES, RunLocations, decode_header
from pybk.storage.tiers.file_tier import FileTier
from pybk.storage.tiers.tier import COLD, DumpRow, FileDamage, Run, TierFiles, TierStore, TierWriter, dumped_record

if TYPE_CHECKING:
    from pybk.config import StoreConfig
    from pybk.storage.format.index_rows import FileRow


class ColdTier(FileTier):
    """Cold segments; those of the hint HDD may be compressed."""

    kind: ClassVar[str] = COLD
    hints: ClassVar[frozenset[StorageHint]] = frozenset({StorageHint.NVME, StorageHint.HDD})
    files_are_merged: ClassVar[bool] = True
    is_written_by_moves: ClassVar[bool] = True

    def size_is_known(self, hint: StorageHint, config: StoreConfig) -> bool:
        """Return whether the records are not compressed."""
        return hint is not StorageHint.HDD or config.cold_compression is None

    def writer(self, store: TierStore, hint: StorageHint) -> TierWriter:
        """Return a writer that begins another segment whenever one is full."""
        return _SegmentsWriter(store, hint)

    def rows(self, files: TierFiles, row: FileRow) -> RunLocations:
        """Return the rows of the footer; without a sound footer, the records up to the first damaged header."""
        path = files.volumes.path_of(row)
        try:
            return ColdSegment(files.fs, path, files.store_id, row.file_id).rows
        except CorruptError:
            return salvage_rows(files.fs, path, files.store_id, row.file_id)

    def check(self, files: TierFiles, row: FileRow) -> Iterator[FileDamage]:
        """Yield the damage of any byte of the segment."""
        path = files.volumes.path_of(row)
        for error in ColdSegment(files.fs, path, files.store_id, row.file_id).verify():
            yield FileDamage(str(error), path, error.offset)

    def dump(self, files: TierFiles, row: FileRow) -> Iterator[DumpRow]:
        """Yield what is wrong with the footer, and the records; of each record only the header is read."""
        path = files.volumes.path_of(row)
        try:
            rows: RunLocations = ColdSegment(files.fs, path, files.store_id, row.file_id).rows
        except PybkError as error:
            yield {"what": "problem", "message": str(error)}
            rows = salvage_rows(files.fs, path, files.store_id, row.file_id)
        data = files.fs.view(path)
        for offset in rows["offset"].tolist():
            files.volumes.populate(data, offset, offset + RECORD_HEADER_BYTES)
            yield dumped_record(decode_header(data, offset, where=path), offset)

    def all_record_bytes(self, store: TierStore, row: FileRow) -> int | None:
        """Return the bytes of all records, by the footer: headers and padding leave much of a segment of short ones."""
        segment = ColdSegment(store.fs, store.volumes.path_of(row), store.store_id, row.file_id)
        return int(segment.rows["body"].astype(np.int64).sum()) + RECORD_HEADER_BYTES * len(segment.rows)


class _SegmentsWriter(TierWriter):
    """Writes one cold segment after the other."""

    def __init__(self, store: TierStore, hint: StorageHint) -> None:
        self._store = store
        self._hint = hint
        self._compression = store.config.cold_compression if hint is StorageHint.HDD else None
        self._open: tuple[FileRow, ColdSegmentWriter] | None = None
        self._rows: list[FileRow] = []

    def add(self, ledger_id: int, first: int, sizes: list[int], parts: Sequence[bytes | memoryview]) -> Run:
        """Write a record to the open segment, or to a new one if it does not fit."""
        need = sum(sizes) + 4 * len(sizes) + RECORD_HEADER_BYTES
        return self._segment_for(need).add(ledger_id, first, sizes, parts)

    def add_body(self, ledger_id: int, first: int, count: int, body: bytes) -> Run:
        """Write a record in its stored form."""
        return self._segment_for(len(body) + RECORD_HEADER_BYTES).add_body(ledger_id, first, count, body)

    def _segment_for(self, need: int) -> ColdSegmentWriter:
        """Return the open segment, or a new one if a record of so many bytes does not fit it."""
        if self._open is not None and not self._open[1].fits(need):
            self._finish_segment()
        if self._open is None:
            volumes = self._store.volumes
            row = volumes.new_file(COLD, self._hint)
            segment = ColdSegmentWriter(
                self._store.fs,
                volumes.path_of(row),
                self._store.store_id,
                row.file_id,
                compression=self._compression,
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
