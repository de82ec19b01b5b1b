"""The recent changes of an LMDB metadata store: the keys that each change wrote or removed.

Each change rewrites the *tail*, a row with the keys of up to ``BLOCK`` last changes. Its row follows that of the number
of the last change, so it costs a change no further page of the file. When a block of ``BLOCK`` numbers is complete, the
tail is copied to the row of the block, in a ring of ``BLOCKS`` rows. So nothing needs clearing, and a reader that knows
the number of the last change it has seen reads the keys of the later ones.

The numbers in the rows show whether a reader has missed changes. It misses some if more changes came than the ring
holds, or if the rows lack a change: one with more keys than fit is left out, and processes of older versions of pybk
leave out all changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

from pybk.errors import CorruptError
from pybk.metadata import lmdb_rows as rows
from pybk.storage.io.lmdb_environment import ReadTransaction, WriteTransaction

BLOCK: Final = 16
"""The number of changes of a block."""

BLOCKS: Final = 1024
"""The number of blocks that are kept."""

_TAIL: Final = b"d"
_BLOCK_ROW: Final = b"e"
_SLOT: Final = Struct(">H")
_HEADER: Final = Struct(">QQ")
_BETWEEN_KEYS: Final = b"\0\0"
_BETWEEN_CHANGES: Final = b"\0\0\0"
"""A separator that no key contains: no name in a key is empty, so a key has no two NUL in a row and none at its end."""

_BYTES_MAX: Final = 1900
"""The limit on the bytes of a row's keys, because LMDB keeps larger values in pages of their own."""


class _Changes(NamedTuple):
    """The keys of successive changes.

    Attributes:
        first: The number of the first one.
        last: The number of the last one; ``first - 1`` for none.
        keys: Their keys.
    """

    first: int
    last: int
    keys: bytes

    def since(self, number: int) -> list[str]:
        """Return the keys of the changes from a number on."""
        if self.last < number:
            return []
        changes = self.keys.split(_BETWEEN_CHANGES)[number - self.first :]
        return [rows.key_of(key) for change in changes if change for key in change.split(_BETWEEN_KEYS)]


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

    def put_changes(self, number: int) -> None:
        """Write the keys of this transaction's change, by its number."""
        keys = _BETWEEN_KEYS.join([name[1:] for name in self._names])
        tail = _read(self._transaction, _TAIL)
        if tail is None or tail.last != number - 1 or number % BLOCK == 0 or len(tail.keys) + len(keys) > _BYTES_MAX:
            tail = _Changes(number, number, keys)
        else:
            joined = keys if tail.last < tail.first else tail.keys + _BETWEEN_CHANGES + keys
            tail = _Changes(tail.first, number, joined)
        if len(keys) > _BYTES_MAX:
            tail = _Changes(number + 1, number, b"")
        body = _HEADER.pack(tail.first, tail.last) + tail.keys
        rows.put(self._transaction, _TAIL, body)
        if number % BLOCK == BLOCK - 1:
            rows.put(self._transaction, _block_row(number), body)


def changed_keys(transaction: ReadTransaction, after: int, last: int) -> list[str] | None:
    """Return the keys that changes have written or removed, with repetitions.

    Args:
        transaction: A read transaction.
        after: The number of the change before the first one of interest.
        last: The number of the last change that the transaction sees.

    Returns:
        The keys; None if the keys of some changes are not known.
    """
    if not 0 <= last - after <= BLOCK * BLOCKS:
        return None
    keys: list[str] = []
    number = after + 1
    while number <= last:
        whole = number - number % BLOCK + BLOCK - 1
        found = _read(transaction, _TAIL if whole > last else _block_row(whole))
        if found is None or found.first > number or found.last != min(whole, last):
            return None
        keys += found.since(number)
        number = found.last + 1
    return keys


def _block_row(number: int) -> bytes:
    """Return the name of the row of a change's block."""
    return _BLOCK_ROW + _SLOT.pack(number // BLOCK % BLOCKS)


def _read(transaction: ReadTransaction, name: bytes) -> _Changes | None:
    """Return the changes of a row; None if there is no such row or it is damaged."""
    try:
        body = rows.get(transaction, name)
    except CorruptError:
        return None
    if body is None or len(body) < _HEADER.size:
        return None
    first, last = _HEADER.unpack_from(body)
    return _Changes(first, last, body[_HEADER.size :])
