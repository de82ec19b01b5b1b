"""``LogWriter``: appends records to a named log."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from pybk.errors import OutOfOrderError, UsageError
from pybk.manager.arguments import whole_from
from pybk.manager.handle import where_called
from pybk.streams.appender import RecordFuture, pieces_of, record_data
from pybk.streams.format import (
    ITEM_EXTRA_BYTES,
    NO_VALUE,
    Highest,
    Item,
    Position,
    encode_attributes,
    encode_items,
    item_bytes,
)
from pybk.streams.group_members import LogMember
from pybk.streams.list_record import ListRecord
from pybk.streams.list_writer import ListWriter
from pybk.streams.named_list import RecordWriter
from pybk.streams.retention import RetentionKeeper
from pybk.streams.subscription_lag import SubscriptionLag
from pybk.threads.call_threads import asyncio_form
from pybk.values import INT64_MAX


class NewRecord(NamedTuple):
    """A record to append.

    Attributes:
        data: The application's bytes.
        txid: Its transaction id, from 0 up; None for none.
        key: Its key, at most 4 KiB; None for none.
        headers: At most 64 pairs of a name and bytes, 64 KiB in all.
        time_ns: Its event time, nanoseconds since 1970; None for the time of the append.
    """

    data: bytes
    txid: int | None = None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes]] = ()
    time_ns: int | None = None


def item_of(record: NewRecord, data_bytes_max: int) -> Item:
    """Return a record as it is written.

    Raises:
        UsageError: It is not valid, or has more than ``data_bytes_max`` bytes of data, key and headers.
    """
    attributes = encode_attributes(record.key, record.headers)
    return Item(
        record_data(record.data, data_bytes_max, len(attributes)),
        time.time_ns() if record.time_ns is None else _int64(record.time_ns, "time_ns"),
        NO_VALUE if record.txid is None else _int64(record.txid, "txid"),
        attributes,
    )


class LogWriter(RecordWriter[bytes | NewRecord, list[Position]]):
    """The writer of a log, until it is closed or another writer takes the log over; made by ``Log.writer``.

    Threads: any. Appends of all threads share syncs. Signal handlers must not append.
    """

    def __init__(self, writer: ListWriter, highest: Highest, *, ordered_txids: bool) -> None:
        """Use ``Log.writer`` instead."""
        self._writer = writer
        self._keeper = RetentionKeeper(writer)
        self._lag = SubscriptionLag(writer)
        self._data_bytes_max = writer.steps.data_bytes_max - ITEM_EXTRA_BYTES
        self._order = _Order(writer.steps.name, highest, strict=ordered_txids)
        writer.on_repair = self._order.repaired
        weakref.finalize(self, writer.close_dropped).atexit = False

    def __repr__(self) -> str:
        """Name the log and the epoch."""
        return f"<LogWriter of {self._writer.steps.name!r}, epoch {self.epoch}>"

    @property
    def epoch(self) -> int:
        """The number of the take-over by which this writer has the log."""
        return self._writer.appender.epoch

    @property
    def last_seq(self) -> int:
        """The sequence number of the last appended record, durable or not; without records, one below the first."""
        return self._writer.appender.next_seq - 1

    @property
    def last_txid(self) -> int | None:
        """The highest transaction id of all records that were ever appended to the log; None for none."""
        txid = self._order.highest.txid
        return None if txid == NO_VALUE else txid

    # ---- appending -----------------------------------------------------------------------------------------------

    def append(
        self,
        data: bytes,
        *,
        txid: int | None = None,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        time_ns: int | None = None,
    ) -> Position:
        """Append one record and wait until it is durable.

        Args:
            data: 0 to ``max_entry_bytes`` - 48 bytes, less the bytes of key and headers.
            txid: As in ``NewRecord``.
            key: As in ``NewRecord``.
            headers: As in ``NewRecord``.
            time_ns: As in ``NewRecord``.

        Returns:
            Its position.

        Raises:
            OutOfOrderError: The transaction id is below that of an earlier record; nothing was appended.
            PybkError: As ``WriteAheadLog.append``.

        Durability: On return it is on disk; in a cluster, on the disks of an ack quorum. Readers see it then.
        Cost: One synced write, shared by all threads that append meanwhile.
        """
        batch = _One(self._order, self._item(NewRecord(data, txid, key, headers, time_ns)))
        return self._writer.result_of(self._writer.append_batch(batch, kick=False))

    def append_async(
        self,
        data: bytes,
        *,
        txid: int | None = None,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        time_ns: int | None = None,
        wait: bool = True,
    ) -> RecordFuture[Position]:
        """Append one record without waiting for it to be durable; arguments and errors are those of ``append``.

        If ``max_outstanding_bytes`` are not durable yet, it waits until some are; without ``wait`` it raises
        TooManyRequestsError instead, with nothing done.

        Returns:
            A future of the position: ``result()``, ``add_done_callback``, or ``await`` it.
        """
        batch = _One(self._order, self._item(NewRecord(data, txid, key, headers, time_ns)))
        return self._writer.append_batch(batch, kick=True, wait=wait)

    async def append_coro(
        self,
        data: bytes,
        *,
        txid: int | None = None,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        time_ns: int | None = None,
    ) -> Position:
        """Append one record and wait until it is durable, without blocking the event loop.

        Appends of one loop are made in the order in which their coroutines first run. Once the coroutine has begun,
        cancelling it ends the wait, but not the append. Arguments and errors are those of ``append``.
        """
        return await self._writer.append_coro(
            _One(self._order, self._item(NewRecord(data, txid, key, headers, time_ns)))
        )

    def _writing(self) -> ListWriter:
        return self._writer

    def _batch(self, records: Iterable[bytes | NewRecord]) -> _Many:
        try:
            given = list(records)
        except TypeError:
            raise UsageError(f"records is {records!r:.50}; it takes an iterable of bytes or NewRecord") from None
        items = [self._item(each if isinstance(each, NewRecord) else NewRecord(each)) for each in given]
        if not items:
            raise UsageError("a transaction without records has no position; append at least one")
        return _Many(self._order, items)

    def _item(self, record: NewRecord) -> Item:
        return item_of(record, self._data_bytes_max)

    # ---- the end -------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """End the log for good and close the writer: the log can be read, but takes no more records.

        Raises:
            LogFencedError, IllegalOperationError, PybkError: As for ``Log.close``.
        """
        where_called("LogWriter.seal()", of_log=True)
        self._keeper.close()
        self._writer.close(seal=True)

    seal_async = asyncio_form(seal, own_thread=True)

    def close(self) -> None:
        """Wait for outstanding appends, close the segment, and release the log; errors as for ``Log.close``.

        A second call does nothing, or completes one that was interrupted. A writer that is dropped without a close is
        closed in the background, with a ResourceWarning.
        """
        where_called("LogWriter.close()", of_log=True)
        self._keeper.close()
        self._writer.close()

    def _has_unreported_failures(self) -> bool:
        return self._writer.appender.has_unreported_failures

    def _group_member(self) -> LogMember[Item]:
        def item(data: bytes, **options: Any) -> Item:
            try:
                return self._item(NewRecord(data, **options))
            except TypeError as error:
                raise UsageError(f"options of a record are txid, key, headers and time_ns: {error}") from None

        return LogMember(self._writer, item, partial(_Many, self._order))


class _Order:
    """The order of the transaction ids of a log, and its highest values. Guarded by the lock of the appender.

    Args:
        name: The log's.
        highest: The highest values of all records so far.
        strict: Refuse a transaction id that is below one before.

    Attributes:
        highest: The highest values of all records that were appended.
        bound: No lower than those of all records that are in the log. Entries say this: an append that was interrupted
            may be there, and a search passes over records only if these values are too low.
    """

    def __init__(self, name: str, highest: Highest, *, strict: bool) -> None:
        self._name = name
        self._strict = strict
        self.highest = highest
        self.bound = highest

    def repaired(self, record: ListRecord) -> None:
        """Forget records that were refused; nothing is appended meanwhile."""
        self.highest = self.bound = record.highest

    def after(self, items: Iterable[Item]) -> Highest:
        """Return the highest values up to the last of some records, which come next.

        Raises:
            OutOfOrderError: A transaction id is below one before.
        """
        time_ns, txid = self.highest
        for item in items:
            if item.txid < txid and item.txid != NO_VALUE and self._strict:
                raise OutOfOrderError(
                    f"transaction id {item.txid} is below {txid}, that of a record before it in log {self._name!r}; "
                    "give ids that do not fall, or open the writer with ordered_txids=False",
                    txid=item.txid,
                    last=txid,
                )
            time_ns, txid = max(time_ns, item.time_ns), max(txid, item.txid)
        return Highest(time_ns, txid)

    def pass_by(self, items: Sequence[Item]) -> Highest:
        """Return the bound before some records, and raise it to the bound after them."""
        before = self.bound
        self.bound = Highest(
            max(before.time_ns, *(item.time_ns for item in items)), max(before.txid, *(item.txid for item in items))
        )
        return before


class _Many:
    """Records that are appended as one transaction; appending them returns their positions."""

    def __init__(self, order: _Order, items: Sequence[Item]) -> None:
        self._order = order
        self._items = items
        self._pieces: list[Sequence[Item]] = []
        self._highest = order.highest

    @property
    def records(self) -> int:
        """The number of records."""
        return len(self._items)

    def encode(self, seq: int) -> list[bytes]:
        """Return entries of about 64 KiB."""
        self._highest = self._order.after(self._items)
        self._pieces = pieces_of(self._items, [item_bytes(item) for item in self._items])
        entries = []
        for number, piece in enumerate(self._pieces, 1):
            entries.append(encode_items(seq, piece, self._order.pass_by(piece), more=number < len(self._pieces)))
            seq += len(piece)
        return entries

    def staged(self, seq: int, segment: int, entry: int) -> list[Position]:
        """Return their positions."""
        self._order.highest = self._highest
        positions = []
        for number, piece in enumerate(self._pieces, entry):
            positions += [Position(segment, number, slot, seq + slot) for slot in range(len(piece))]
            seq += len(piece)
        return positions


class _One:
    """One record; appending it returns its position."""

    records = 1

    def __init__(self, order: _Order, item: Item) -> None:
        self._order = order
        self._item = item
        self._highest = order.highest

    def encode(self, seq: int) -> list[bytes]:
        """Return its entry."""
        items = (self._item,)
        self._highest = self._order.after(items)
        return [encode_items(seq, items, self._order.pass_by(items))]

    def staged(self, seq: int, segment: int, entry: int) -> Position:
        """Return its position."""
        self._order.highest = self._highest
        return Position(segment, entry, 0, seq)


def _int64(value: object, name: str) -> int:
    return whole_from(value, 0, name, "a number", INT64_MAX)
