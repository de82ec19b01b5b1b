"""The records of a metadata tree in LMDB: keys, leases, sessions, and the number of changes made so far.

LMDB's pages have no checksums, so each record is ``CRC32C u32 | body``; the CRC covers the record's name, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from pybk.errors import CorruptError
from pybk.metadata.store import checked_key
from pybk.storage.io.lmdb_environment import ReadTransaction, WriteTransaction

FORMAT_NAME: Final = b"f"

_COUNTER: Final = b"c"
_LEASE: Final = b"l"
_NODE: Final = b"n"
_SESSION: Final = b"s"
_SESSIONS_END: Final = b"t"

_CRC: Final = Struct(">I")
_NUMBER: Final = Struct(">Q")
_HEADER: Final = Struct(">QQQ")
_SESSION_BODY: Final = Struct(">II")


class StoredValue(NamedTuple):
    """A key's value as it is stored.

    Attributes:
        created: The number of the change that made the key.
        version: The number of the change that gave it this value.
        session: The session that it ends with, 0 for none.
        value: The value.
    """

    created: int
    version: int
    session: int
    value: bytes


class Session(NamedTuple):
    """A session: the change that began it, its slot in the host's file, and its timeout."""

    number: int
    slot: int
    timeout_ms: int


def node_name(key: str) -> bytes:
    """Return the name of a key's record."""
    # NUL sorts before everything, so that what stands below a key stands right behind it.
    return _NODE + checked_key(key).encode().replace(b"/", b"\0")


def get(transaction: ReadTransaction, name: bytes) -> bytes | None:
    """Return what a record says, having checked it; None if there is none."""
    data = transaction.get(name)
    return None if data is None else _checked(name, data)


def put(transaction: WriteTransaction, name: bytes, body: bytes) -> None:
    """Write a record."""
    transaction.put(name, _CRC.pack(crc32c(body, crc32c(name))) + body)


def last_number(transaction: ReadTransaction) -> int:
    """Return the number of the last change."""
    body = get(transaction, _COUNTER)
    return 0 if body is None else int(_unpack(_NUMBER, _COUNTER, body)[0])


def put_last_number(transaction: WriteTransaction, number: int) -> None:
    """Write the number of the last change."""
    put(transaction, _COUNTER, _NUMBER.pack(number))


def get_value(transaction: ReadTransaction, name: bytes) -> StoredValue | None:
    """Return a key's record."""
    body = get(transaction, name)
    if body is None:
        return None
    created, version, session = _unpack(_HEADER, name, body)
    return StoredValue(created, version, session, body[_HEADER.size :])


def put_value(transaction: WriteTransaction, name: bytes, record: StoredValue) -> None:
    """Write a key's record, and its lease if it has a session."""
    put(transaction, name, _HEADER.pack(*record[:3]) + record.value)
    if record.session:
        transaction.put(_LEASE + _NUMBER.pack(record.session) + name, b"")


def delete_value(transaction: WriteTransaction, name: bytes, session: int) -> None:
    """Remove a key's record, and its lease if it has a session."""
    transaction.delete(name)
    if session:
        transaction.delete(_LEASE + _NUMBER.pack(session) + name)


def children(transaction: ReadTransaction, name: bytes) -> Iterator[tuple[str, int]]:
    """Yield the names right below a key, and the change that made each, 0 for those that are no values themselves."""
    prefix = name + b"\0"
    at, stop = prefix, name + b"\x01"
    while True:
        for below, data in transaction.items(at, stop):
            child, nested, _ = below[len(prefix) :].partition(b"\0")
            if nested:
                yield child.decode(errors="backslashreplace"), 0
                at = prefix + child + b"\x01"
                break
            yield child.decode(errors="backslashreplace"), _unpack(_HEADER, below, _checked(below, data))[0]
        else:
            return


def sessions(transaction: ReadTransaction) -> list[Session]:
    """Return all sessions."""
    return [
        Session(_unpack(_NUMBER, name, name[1:])[0], *_unpack(_SESSION_BODY, name, _checked(name, data)))
        for name, data in transaction.items(_SESSION, _SESSIONS_END)
    ]


def get_session(transaction: ReadTransaction, number: int) -> Session | None:
    """Return a session, None if it has ended."""
    body = get(transaction, _SESSION + _NUMBER.pack(number))
    return None if body is None else Session(number, *_unpack(_SESSION_BODY, _SESSION + _NUMBER.pack(number), body))


def put_session(transaction: WriteTransaction, session: Session) -> None:
    """Begin a session."""
    put(transaction, _SESSION + _NUMBER.pack(session.number), _SESSION_BODY.pack(session.slot, session.timeout_ms))


def end_session(transaction: WriteTransaction, number: int) -> None:
    """Remove a session and its leases."""
    prefix = _LEASE + _NUMBER.pack(number)
    leases = [name for name, _ in transaction.items(prefix, _LEASE + _NUMBER.pack(number + 1))]
    for lease in leases:
        transaction.delete(lease[len(prefix) :])
        transaction.delete(lease)
    transaction.delete(_SESSION + _NUMBER.pack(number))


def _checked(name: bytes, data: bytes) -> bytes:
    body = data[_CRC.size :]
    if data[: _CRC.size] != _CRC.pack(crc32c(body, crc32c(name))):
        raise CorruptError(f"record {name!r} is not what was written")
    return body


def _unpack(layout: Struct, name: bytes, body: bytes) -> tuple[Any, ...]:
    """Unpack the beginning of a record's body.

    Raises:
        CorruptError: The body is shorter.
    """
    if len(body) < layout.size:
        raise CorruptError(
            f"record {name!r} has {len(body)} bytes, and needs {layout.size}; restore the metadata store"
        )
    return layout.unpack_from(body)
