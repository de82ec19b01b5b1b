"""Records of a named log, as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Final, NamedTuple

from pybk.streams.format import Headers, Position, Records, decode_attributes


class LogRecord(NamedTuple):
    """One record.

    Attributes:
        position: Where it lies in the log.
        data: The application's bytes.
        time_ns: Its event time, nanoseconds since 1970: the one that it was given, else when it was appended.
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


_new_position: Final = partial(tuple.__new__, Position)
_new_record: Final = partial(tuple.__new__, LogRecord)
"""They make tuples faster than the named tuples' own constructors."""


def log_records(records: Records, *, name: str) -> Iterator[LogRecord]:
    """Yield records one by one, each with a copy of its data.

    Args:
        records: All complete.
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
