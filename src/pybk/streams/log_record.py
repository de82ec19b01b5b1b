"""Records of logs of both sorts, as they are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import Final, NamedTuple

from pybk.errors import LogSealedError
from pybk.manager.handle import Handle
from pybk.streams.format import Headers, Position, Records, decode_attributes
from pybk.threads.call_threads import asyncio_form


class WalRecord(NamedTuple):
    """One record of a write-ahead log.

    Attributes:
        lsn: Its log sequence number, from 1 up, without gaps.
        data: The application's bytes.
        time_ns: The event time that the application gave, nanoseconds since 1970; None for none.
    """

    lsn: int
    data: bytes
    time_ns: int | None


class LogRecord(NamedTuple):
    """One record of a named log.

    Attributes:
        position: Its place in the log.
        data: The application's bytes.
        time_ns: Its event time, nanoseconds since 1970: the time that the application gave, or else the time of the
            append.
        txid: Its transaction id; None for none.
        key: Its key; None for none.
        headers: Its headers, pairs of a name and bytes.
    """

    position: Position
    data: bytes
    time_ns: int
    txid: int | None
    key: bytes | None
    headers: Headers

    @property
    def seq(self) -> int:
        """Its sequence number."""
        return self.position.seq


class RecordSource(Handle):
    """A source of a log's records, which returns several or one at a time, and can be iterated."""

    __slots__ = ()

    @abstractmethod
    def read_many(self, most: int, timeout: float | None = None) -> list[LogRecord]:
        """Return the next records, at least one and at most ``most``; an empty list if none came in time."""

    read_many_async = asyncio_form(read_many, own_thread=True)

    def read(self, timeout: float | None = None) -> LogRecord | None:
        """Return the next record, None if none came in time; arguments and errors as for ``read_many``."""
        for record in self.read_many(1, timeout):
            return record
        return None

    async def read_async(self, timeout: float | None = None) -> LogRecord | None:
        """Read as ``read`` does, without blocking the event loop."""
        for record in await self.read_many_async(1, timeout):
            return record
        return None

    def __iter__(self) -> Iterator[LogRecord]:
        """Yield records as ``read`` returns them, until the log is sealed and all its records were returned."""
        with suppress(LogSealedError):
            while (record := self.read()) is not None:
                yield record

    async def __aiter__(self) -> AsyncIterator[LogRecord]:
        """Yield records as ``__iter__`` does, without blocking the event loop."""
        with suppress(LogSealedError):
            while (record := await self.read_async()) is not None:
                yield record


_new_position: Final = partial(tuple.__new__, Position)
_new_record: Final = partial(tuple.__new__, LogRecord)
_new_wal_record: Final = partial(tuple.__new__, WalRecord)
"""They make tuples three times as fast as the named tuples' own constructors."""


def wal_records(records: Records) -> Iterator[WalRecord]:
    """Yield records one by one, each with a copy of its data."""
    lsns = range(records.first_seq, records.first_seq + len(records.starts))
    times = repeat(None) if records.times is None else [None if time < 0 else time for time in records.times.tolist()]
    return map(_new_wal_record, zip(lsns, records.data(), times))  # noqa: B905  # ``repeat`` has no end


def log_records(records: Records, *, name: str) -> Iterator[LogRecord]:
    """Yield records one by one, each with a copy of its data.

    Args:
        records: The records; all are complete.
        name: The log's, for errors.

    Raises:
        CorruptError: A record's key and headers are damaged.
    """
    entries, slots = records.places()
    seqs = range(records.first_seq, records.first_seq + len(records.starts))
    positions = map(_new_position, zip(repeat(records.segment), entries.tolist(), slots.tolist(), seqs))
    times = repeat(0) if records.times is None else records.times.tolist()
    txids = repeat(None) if records.txids is None else [None if each < 0 else each for each in records.txids.tolist()]
    if records.attributed is None:
        nothing = repeat(None), repeat(())
        return map(_new_record, zip(positions, records.data(), times, txids, *nothing))  # noqa: B905
    return _with_attributes(zip(positions, records.data(), times, txids, records.attributed.tolist()), name)  # noqa: B905


def _with_attributes(
    records: Iterator[tuple[Position, bytes, int, int | None, bool]], name: str
) -> Iterator[LogRecord]:
    """Take the key and headers of each record that has them off its data."""
    for position, data, time_ns, txid, attributed in records:
        key: bytes | None = None
        headers: Headers = ()
        rest = data
        if attributed:
            key, headers, rest = decode_attributes(data, where=f"record {position} of log {name!r}")
        yield LogRecord(position, rest, time_ns, txid, key, headers)
