"""Records of a write-ahead log, as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Final, NamedTuple

from pybk.streams.format import Records


class WalRecord(NamedTuple):
    """One record.

    Attributes:
        lsn: Its log sequence number, from 1 up, without gaps.
        data: The application's bytes.
        time_ns: The event time that the application gave, nanoseconds since 1970; None for none.
    """

    lsn: int
    data: bytes
    time_ns: int | None


_new_record: Final = partial(tuple.__new__, WalRecord)
"""Makes a record of a tuple; the named tuple's own constructor takes three times as long."""


def wal_records(records: Records) -> Iterator[WalRecord]:
    """Yield records one by one, each with a copy of its data."""
    lsns = range(records.first_seq, records.first_seq + len(records.starts))
    times = repeat(None) if records.times is None else [None if time < 0 else time for time in records.times.tolist()]
    return map(_new_record, zip(lsns, records.data(), times))  # noqa: B905  # ``repeat`` has no end
