"""The rows of an LMDB metadata store: values, leases, sessions, and the number of the last change.

LMDB's pages have no checksums, so a row's data is ``CRC32C u32 | body``. The CRC covers the row's name and the body.
``docs/reference/metadata.md`` lists the rows; ``lmdb_changes`` has those of the recent changes.
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
        created: The number of the change that created the key.
        version: The number of the change that gave it this value.
        session: The session that holds the lease, 0 for a value without a lease.
        value: The value.
    """

    created: int
    version: int
    session: int
    value: bytes


class Session(NamedTuple):
    """A session.

    Attributes:
        number: The number of the change that began it.
        slot: Its slot in the host file.
        timeout_ms: Its lease time, milliseconds.
    """

    number: int
    slot: int
    timeout_ms: int


def node_name(key: str) -> bytes:
    """Return the row name of a key."""
    # NUL sorts before all other bytes, so the keys below a key follow it directly.
    return _NODE + checked_key(key).encode().replace(b"/", b"\0")


def is_node(name: bytes) -> bool:
    """Return whether a row's name is that of a key."""
    return name[:1] == _NODE


def key_of(name: bytes) -> str:
    """Return the key of a row name without its first byte."""
    return name.replace(b"\0", b"/").decode(errors="backslashreplace")


def get(transaction: ReadTransaction, name: bytes) -> bytes | None:
    """Return a row's body, None if there is no such row; raises CorruptError for a wrong checksum."""
    data = transaction.get(name)
    return None if data is None else _checked(name, data)


def put(transaction: WriteTransaction, name: bytes, body: bytes) -> None:
    """Write a row."""
    transaction.put(name, _CRC.pack(crc32c(body, crc32c(name))) + body)


def last_number(transaction: ReadTransaction) -> int:
    """Return the number of the last change, 0 before the first."""
    body = get(transaction, _COUNTER)
    return 0 if body is None else int(_unpack(_NUMBER, _COUNTER, body)[0])


def put_last_number(transaction: WriteTransaction, number: int) -> None:
    """Write the number of the last change."""
    put(transaction, _COUNTER, _NUMBER.pack(number))


def get_value(transaction: ReadTransaction, name: bytes) -> StoredValue | None:
    """Return a key's value, None if it has none."""
    body = get(transaction, name)
    if body is None:
        return None
    created, version, session = _unpack(_HEADER, name, body)
    return StoredValue(created, version, session, body[_HEADER.size :])


def all_values(transaction: ReadTransaction) -> Iterator[tuple[str, StoredValue]]:
    """Yield every key and its value, in the order of their rows."""
    for name, data in transaction.items(_NODE, bytes([_NODE[0] + 1])):
        body = _checked(name, data)
        created, version, session = _unpack(_HEADER, name, body)
        stored = StoredValue(created, version, session, body[_HEADER.size :])
        yield name[len(_NODE) :].replace(b"\0", b"/").decode(errors="backslashreplace"), stored


def put_value(transaction: WriteTransaction, name: bytes, stored: StoredValue) -> None:
    """Write a key's value, and its lease if it has a session."""
    put(transaction, name, _HEADER.pack(*stored[:3]) + stored.value)
    if stored.session:
        transaction.put(_LEASE + _NUMBER.pack(stored.session) + name, b"")


def delete_value(transaction: WriteTransaction, name: bytes, session: int) -> None:
    """Remove a key's value, and its lease if it has a session."""
    transaction.delete(name)
    if session:
        transaction.delete(_LEASE + _NUMBER.pack(session) + name)


def children(transaction: ReadTransaction, name: bytes) -> Iterator[tuple[str, int]]:
    """Yield the names directly below a key, each with the change that created it, 0 for a name without a value."""
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
    """Return a session, None if it was removed."""
    body = get(transaction, _SESSION + _NUMBER.pack(number))
    return None if body is None else Session(number, *_unpack(_SESSION_BODY, _SESSION + _NUMBER.pack(number), body))


def put_session(transaction: WriteTransaction, session: Session) -> None:
    """Write a session's row."""
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
        raise CorruptError(f"row {name!r} has a wrong checksum")
    return body


def _unpack(layout: Struct, name: bytes, body: bytes) -> tuple[Any, ...]:
    """Unpack the beginning of a row's body.

    Raises:
        CorruptError: The body is shorter.
    """
    if len(body) < layout.size:
        raise CorruptError(f"row {name!r} has {len(body)} bytes, and needs {layout.size}; restore the metadata store")
    return layout.unpack_from(body)
