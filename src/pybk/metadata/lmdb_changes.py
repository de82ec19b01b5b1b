"""The recent changes of an LMDB metadata store: which keys each of them wrote or removed.

They are a ring of ``RING`` rows, written in the transaction of the change: the row of a change is that of its number
modulo ``RING``, and holds the number and the keys. So the ring needs no clearing, and a reader that knows the number of
the last change it has seen reads the rows of the later ones. It has missed changes if a row has another number: if more
than ``RING`` changes came in between, or if a process wrote no row. Processes of older versions of pybk write none, and
no row is written for a change of so many keys that they do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final

from pybk.errors import CorruptError
from pybk.metadata import lmdb_rows as rows
from pybk.storage.io.lmdb_environment import ReadTransaction, WriteTransaction

RING: Final = 1 << 14
"""How many changes are kept."""

_CHANGE: Final = b"d"
_SLOT: Final = Struct(">H")
_NUMBER: Final = Struct(">Q")
_BETWEEN: Final = b"\0\0"
"""Stands between two keys; no key has it, as no name in a key is empty."""

_KEYS_BYTES_MAX: Final = 1024
"""Limit on the keys of one row: LMDB keeps larger values in pages of their own."""


class NotedWrites:
    """A write transaction that notes the keys whose values are written or removed; see ``WriteTransaction``.

    Args:
        transaction: The transaction.
    """

    __slots__ = ("_names", "_transaction")

    def __init__(self, transaction: WriteTransaction) -> None:
        self._transaction = transaction
        self._names: dict[bytes, None] = {}

    def get(self, key: bytes) -> bytes | None:
        """See ``ReadTransaction.get``."""
        return self._transaction.get(key)

    def floor(self, key: bytes) -> tuple[bytes, bytes] | None:
        """See ``ReadTransaction.floor``."""
        return self._transaction.floor(key)

    def items(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """See ``ReadTransaction.items``."""
        return self._transaction.items(start, stop)

    def put(self, key: bytes, value: bytes) -> None:
        """See ``WriteTransaction.put``."""
        if rows.is_node(key):
            self._names[key] = None
        self._transaction.put(key, value)

    def delete(self, key: bytes) -> bool:
        """See ``WriteTransaction.delete``."""
        if rows.is_node(key):
            self._names[key] = None
        return self._transaction.delete(key)

    def put_row(self, number: int) -> None:
        """Write the row of the change that this transaction is, by its number."""
        keys = _BETWEEN.join(name[1:] for name in self._names)
        if len(keys) <= _KEYS_BYTES_MAX:
            rows.put(self._transaction, _row_name(number), _NUMBER.pack(number) + keys)


def changed_keys(transaction: ReadTransaction, after: int, last: int) -> list[str] | None:
    """Return the keys that changes have written or removed, with repetitions.

    Args:
        transaction: A read transaction.
        after: The number of the change before the first one of interest.
        last: The number of the last change that the transaction sees.

    Returns:
        The keys; None if the keys of some changes are not known.
    """
    if not 0 <= last - after <= RING:
        return None
    keys: list[str] = []
    number = after
    while number < last:
        # The rows from that of the next change to the end of the ring, or to the last change.
        count = min(last - number, RING - (number + 1) % RING)
        first, final = _row_name(number + 1), _row_name(number + count)
        stop = number + count
        for name, data in transaction.items(first, final + b"\0"):
            number += 1
            names = _names_in(name, data, number)
            if names is None:
                return None
            keys += names
        if number != stop:
            return None
    return keys


def _row_name(number: int) -> bytes:
    return _CHANGE + _SLOT.pack(number % RING)


def _names_in(name: bytes, data: bytes, number: int) -> list[str] | None:
    """Return the keys in the row of a change, None if this is the row of another change or is damaged."""
    try:
        body = rows.checked_body(name, data)
    except CorruptError:
        return None
    if name != _row_name(number) or body[: _NUMBER.size] != _NUMBER.pack(number):
        return None
    found = body[_NUMBER.size :]
    return [rows.key_of(each) for each in found.split(_BETWEEN)] if found else []
