"""Keys, headers and data of many records at once: where they lie in the buffer, without an object for each record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from pybk.errors import CorruptError
from pybk.ledger.entry import gather
from pybk.streams.format import NO_KEY, Int64s, Records

if TYPE_CHECKING:
    import numpy.typing as npt

_COUNTS: Final = np.dtype([("key", "<u2"), ("headers", "<u2")])
_LENGTHS: Final = np.dtype([("name", "<u2"), ("value", "<u4")])


class Pieces(NamedTuple):
    """Pieces of a buffer.

    Attributes:
        starts: The start of each, ``(n,)`` int64, bytes.
        sizes: The size of each, ``(n,)`` int64, bytes.
    """

    starts: Int64s
    sizes: Int64s


class RecordParts(NamedTuple):
    """The parts of some records, as pieces of their buffer.

    Attributes:
        keys: The key of each record; empty for a record without one.
        has_key: Whether a record has a key, ``(n,)`` bool.
        header_counts: The number of headers of each record, ``(n,)`` int64.
        header_names: The name of each header, in the order of the records and of the headers of each.
        header_values: The value of each header, likewise.
        data: The application's bytes of each record.
    """

    keys: Pieces
    has_key: npt.NDArray[np.bool_]
    header_counts: Int64s
    header_names: Pieces
    header_values: Pieces
    data: Pieces


def record_parts(records: Records, *, where: str) -> RecordParts:
    """Locate the keys, the headers and the data of records; no byte is copied.

    Args:
        records: All complete.
        where: Names the log in errors.

    Raises:
        CorruptError: The key and headers of a record are damaged.
    """
    starts, ends = records.starts, records.ends
    count = len(starts)
    keys = Pieces(starts, np.zeros(count, np.int64))
    has_key, header_counts = np.zeros(count, np.bool_), np.zeros(count, np.int64)
    if records.attributed is None:
        none = Pieces(np.empty(0, np.int64), np.empty(0, np.int64))
        return RecordParts(keys, has_key, header_counts, none, none, Pieces(starts, ends - starts))
    which = np.flatnonzero(records.attributed)
    walk = _Walk(records, which, where)
    key_sizes, header_counts[which] = walk.counts()
    has_key[which] = key_sizes != NO_KEY
    key_sizes = np.where(key_sizes == NO_KEY, 0, key_sizes)
    keys = Pieces(starts.copy(), keys.sizes)
    keys.starts[which], keys.sizes[which] = walk.skip(key_sizes), key_sizes
    names, values = walk.headers(header_counts[which])
    data_starts = starts.copy()
    data_starts[which] = walk.at
    return RecordParts(keys, has_key, header_counts, names, values, Pieces(data_starts, ends - data_starts))


class _Walk:
    """A walk over the bytes before the data of some records, all of them at once.

    Args:
        records: The records.
        which: The indices of those that have a key and headers, ascending.
        where: Names the log in errors.

    Attributes:
        at: The next byte of each, ``(m,)`` int64.
    """

    def __init__(self, records: Records, which: Int64s, where: str) -> None:
        self._buffer = records.buffer
        self._first_seq = records.first_seq
        self._which = which
        self._where = where
        self.at = records.starts[which]
        self._ends = records.ends[which]

    def counts(self) -> tuple[Int64s, Int64s]:
        """Return the size of the key of each, or ``NO_KEY``, and the number of its headers."""
        found = gather(self._buffer, self.skip(_COUNTS.itemsize), _COUNTS.itemsize).view(_COUNTS)
        return found["key"].astype(np.int64), found["headers"].astype(np.int64)

    def headers(self, counts: Int64s) -> tuple[Pieces, Pieces]:
        """Return the names and the values of the headers, of which each has as many as ``counts`` says."""
        firsts = np.cumsum(counts) - counts
        names, values = (Pieces(*np.zeros((2, int(counts.sum())), np.int64)) for _ in range(2))
        for number in range(int(counts.max(initial=0))):
            having = counts > number
            starts = self.skip(np.where(having, _LENGTHS.itemsize, 0))[having]
            lengths = gather(self._buffer, starts, _LENGTHS.itemsize).view(_LENGTHS)
            place = firsts[having] + number
            for pieces, part in ((names, "name"), (values, "value")):
                sizes = np.zeros(len(counts), np.int64)
                sizes[having] = lengths[part]
                pieces.starts[place] = self.skip(sizes)[having]
                pieces.sizes[place] = sizes[having]
        return names, values

    def skip(self, sizes: Int64s | int) -> Int64s:
        """Return the next byte of each, and continue after some.

        Raises:
            CorruptError: A record has fewer.
        """
        before = self.at
        self.at = before + sizes
        if (self.at > self._ends).any():
            index = int(self._which[np.argmax(self.at > self._ends)])
            raise CorruptError(f"{self._where}: the key and headers of record {self._first_seq + index} are damaged")
        return before
