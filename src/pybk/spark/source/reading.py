"""Reading of entries as Arrow batches in a task."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from mmap import mmap
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from pyspark.sql.datasource import InputPartition

from pybk.deferral import LateModule
from pybk.errors import EntryUnknownError, NoSuchLedgerError
from pybk.spark.connection import Connection, connection, task_connection
from pybk.spark.places import of_member
from pybk.spark.source.arrow_columns import number_ranges, numbered_rows
from pybk.spark.source.columns import LedgerColumns, LedgerRows
from pybk.spark.source.planning import EntryRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pybk.ledger.entry import EntryBatch
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.manager.ledger_reader import LedgerReader
    from pybk.spark.options import SourceOptions
    from pybk.spark.sink import manifest
else:
    manifest = LateModule("pybk.spark.sink.manifest")  # only a task whose ledger was merged needs it

LATE_SECONDS: Final = 10.0
"""The longest wait of a task, in seconds, until it sees the entries or records that the planner saw."""

_CONFIRMED_LOOK_SECONDS: Final = 0.05

_BATCH_SHARE: Final = 0.5
"""The part of a whole batch from which on rows are handed over.

A read takes as many bytes as the batch lacks, so one that ends before that has ended its ledger. A batch that waited
until it is whole would end with reads of ever fewer bytes.
"""

ROWS_SHARE: Final = 1 / 1024
"""The least part of a whole batch that rows of one ledger count for: they refer to its metadata and its buffer.

So a batch has the rows of 512 ledgers at most, and with ``SPARE_BYTES`` some 32 MiB besides their entries.
"""

SPARE_BYTES: Final = 64 << 10
"""The most bytes besides entries that each buffer of a batch has, unless the entries have more."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LedgerPartition(InputPartition):
    """The entries that one task reads.

    Attributes:
        entry_ranges: The entries, in order.
    """

    entry_ranges: tuple[EntryRange, ...]


def lost_ledgers_error(ledger_ids: Iterable[int]) -> NoSuchLedgerError:
    """Return the error for ledgers that were to be read and do not exist."""
    names = ", ".join(map(str, ledger_ids))
    return NoSuchLedgerError(
        f"ledger {names:.200} was deleted or never existed, so it cannot be read; option failOnDataLoss=false leaves "
        "out such ledgers"
    )


def read_ranges(
    options: SourceOptions, schema: StructType, entry_ranges: Iterable[EntryRange]
) -> Iterator[pa.RecordBatch]:
    """Read and verify entries; those of which only columns are wanted that are known without that are not read.

    Args:
        options: The options of the read.
        schema: The columns to return.
        entry_ranges: The entries; all of them are confirmed.

    Returns:
        Batches of about ``options.batch_bytes``, in order.

    Raises:
        NoSuchLedgerError: A ledger was deleted, and ``fail_on_data_loss`` is set.
        DigestMismatchError, CorruptError: An entry differs from the one that was written, or is missing.
        EntryUnknownError: The bookies that have an entry do not answer.
        UnauthorizedError: The password is not that of a ledger.
        LedgerUnsealedError, SealMismatchError: A seal is required, and a ledger has none or one that does not match.
    """
    columns = LedgerColumns(schema)
    forming = _FormingBatch(options.batch_bytes)
    with OpenLedgers(options, task_connection(options.where)) as ledgers:
        for entry_range in entry_ranges:
            for rows, share in _read_range(options, columns, forming, ledgers, entry_range):
                forming.add(rows, share)
                if forming.share >= _BATCH_SHARE:
                    yield columns.batch(forming.take())
    if forming.share:
        yield columns.batch(forming.take())


class _FormingBatch:
    """Rows that become one batch, of one ledger or of several small ones.

    Args:
        most: The most bytes of a batch, about.

    Attributes:
        share: The part of a whole batch that they are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: list[LedgerRows] = []
        self.share = 0.0

    @property
    def missing_bytes(self) -> int:
        """The bytes that the batch lacks, at least 1."""
        return max(1, int(self._most * (1 - self.share)))

    def add(self, rows: LedgerRows, share: float) -> None:
        """Add rows, and the part of a whole batch that they are."""
        self._rows.append(rows if rows.entries is None else rows._replace(entries=_without_spare(rows.entries)))
        self.share += max(share, ROWS_SHARE)

    def take(self) -> list[LedgerRows]:
        """Return the rows, and begin anew."""
        rows, self._rows, self.share = self._rows, [], 0.0
        return rows


def _without_spare(entries: EntryBatch) -> EntryBatch:
    """Return entries in a buffer that has few other bytes: in one of their own, if theirs has many.

    A batch that waits for more rows keeps the buffers of all, and a tier may return a record of some MiB for a single
    entry of it. The map of a file takes no memory.
    """
    used = int(entries.sizes.sum())
    if len(entries.buffer) - used <= max(used, SPARE_BYTES) or isinstance(entries.buffer.obj, mmap):
        return entries
    return deepcopy(entries)  # which has their own bytes alone


def _read_range(
    options: SourceOptions,
    columns: LedgerColumns,
    forming: _FormingBatch,
    ledgers: OpenLedgers,
    entry_range: EntryRange,
) -> Iterator[tuple[LedgerRows, float]]:
    """Read and verify the entries of one range, wherever they are moved meanwhile.

    Args:
        options: The options of the read.
        columns: The columns wanted.
        forming: The batch that takes what is yielded.
        ledgers: Opens the ledgers.
        entry_range: The range.

    Yields:
        Rows, and the part of a whole batch that they are.
    """
    left = entry_range
    while len(left):
        try:
            reader = ledgers.reader(left)
            shift, last = left.shift, left.last + left.shift
            is_member = left.stored_in != left.ledger_id
            metadata = of_member(reader.metadata, left.ledger_id) if is_member else reader.metadata
            other_bytes = columns.ledger_bytes(metadata)
            if not columns.of_entries:
                yield from _numbered(metadata, left, other_bytes)
                return
            while len(left):
                first, most = left.first + shift, forming.missing_bytes
                upto = min(last, first + most // other_bytes) if other_bytes else last
                entries = reader.read_batch(first, max_bytes=most, last=upto)
                ids = entries.entry_ids - shift
                left = left.part(int(ids[-1]) + 1, left.last)
                nbytes = int(entries.sizes.sum()) + other_bytes * len(ids)
                yield LedgerRows(metadata, ids, entries), nbytes / options.batch_bytes
        except NoSuchLedgerError as error:
            moved = ledgers.moved(left)
            if moved is None:
                if options.fail_on_data_loss:
                    raise lost_ledgers_error([left.ledger_id]) from error
                logger.warning(
                    "ledger %d does not exist; entries %d to %d are left out", left.ledger_id, left.first, left.last
                )
                return
            left = moved


def _numbered(metadata: LedgerMetadata, left: EntryRange, other_bytes: int) -> Iterator[tuple[LedgerRows, float]]:
    """Yield rows of entries that are not read, and the part of a whole batch that they are."""
    rows = numbered_rows(other_bytes)
    for low, high in number_ranges(left.first, left.last, rows):
        ids = np.arange(low, high + 1)
        yield LedgerRows(metadata, ids, None), len(ids) / rows


class OpenLedgers:
    """Opens the ledgers that have the entries of ranges.

    The one opened last stays open until another one is, because the next range may be of a member of the same merged
    ledger. The end of its ``with`` closes it.

    Args:
        options: The options of the read.
        found: The connection.

    Threads: one.
    """

    def __init__(self, options: SourceOptions, found: Connection) -> None:
        self._found: Final = found
        self._given: Final = options.given.read()
        self._require_seal: Final = options.require_seal
        self._reader: LedgerReader | None = None
        self._sinks: dict[str, manifest.FollowedSink] = {}
        """The sinks of ledgers that were looked for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def reader(self, entry_range: EntryRange) -> LedgerReader:
        """Return a reader of the ledger that has a range of entries, which are confirmed.

        Raises:
            NoSuchLedgerError: It was deleted, or never existed.
            PybkError: As ``read_ranges``.
        """
        ledger_id, last = entry_range.stored_in, entry_range.last + entry_range.shift
        if self._reader is None or self._reader.ledger_id != ledger_id:
            self._close()
            self._reader = self._found.manager.open_ledger(
                ledger_id,
                password=self._given.password,
                secret=self._given.secret,
                recover=False,
                require_seal=self._require_seal,
            )
        _wait_for(self._reader, last)
        return self._reader

    def moved(self, entry_range: EntryRange) -> EntryRange | None:
        """Return a range whose ledger does not exist at the place where a merge has put it; None if none has.

        Cost: If a sink wrote it, a read of the record of the sink, unless it was read for another range and says more.
        """
        self._close()
        planned, metadata = entry_range.place, self._found.metadata
        if planned is None or metadata is None:
            return None
        app = planned.sink
        sink = self._sinks.get(app)
        if sink is None or sink.place(entry_range.ledger_id) == planned:
            sink = self._sinks[app] = sink or manifest.FollowedSink(self._found, app)
            sink.update(manifest.read_sinks(metadata, [app])[app])
        place = sink.place(entry_range.ledger_id)
        return None if place == planned else replace(entry_range, place=place)


def _wait_for(reader: LedgerReader, last: int) -> None:
    """Wait until this process knows that an entry is confirmed.

    Bookies get the last add confirmed one after the other, and a store's readers see it when they poll, so the planner
    may have seen a later one than this process.
    """
    deadline = time.monotonic() + LATE_SECONDS
    while reader.last_add_confirmed < last and not reader.is_closed and time.monotonic() < deadline:
        time.sleep(_CONFIRMED_LOOK_SECONDS)
        reader.read_last_add_confirmed()
    if reader.last_add_confirmed < last:
        raise EntryUnknownError(
            f"ledger {reader.ledger_id} was confirmed up to entry {last} when this was planned, and "
            f"{LATE_SECONDS:.0f} s later the bookies that answer know of {reader.last_add_confirmed}; start the "
            f"missing bookies, or call open_ledger({reader.ledger_id}, recover=True) if its writer is gone"
        )


def payload_bytes(options: SourceOptions, entry_range: EntryRange) -> int:
    """Return the payload bytes of a range of entries, from the lengths in two of them.

    Raises:
        NoSuchLedgerError: The ledger was deleted.
        PybkError: As ``read_ranges``.

    Cost: Two reads. Waits up to 10 s if this process does not yet know that the entries are confirmed.
    """
    with OpenLedgers(options, connection(options.where)) as ledgers:
        while True:
            try:
                reader, shift = ledgers.reader(entry_range), entry_range.shift
                before, last = (
                    next(reader.read(entry_id, entry_id)).length if entry_id >= 0 else 0
                    for entry_id in (entry_range.first + shift - 1, entry_range.last + shift)
                )
                return last - before
            except NoSuchLedgerError:
                moved = ledgers.moved(entry_range)
                if moved is None:
                    raise
                entry_range = moved
