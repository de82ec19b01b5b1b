"""Rows of the index: the bytes of its keys and values.

This file defines layouts and does not use LMDB; ``index/index.py`` reads and changes them. See
``docs/reference/format.md``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from pybk.deferral import np
from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.ledger.ledger_metadata import LedgerMetadata, PolicyMetadata
from pybk.storage.format.log_file import LOCATION_BYTES, RunLocations, location_dtype

INDEX_FORMAT: Final = 1
PAGE_LOCATIONS_MAX: Final = 1024
"""Most run locations in one page."""

CHAIN_HEAD: Final = -1
CHAIN_TAIL: Final = (1 << 63) - 1
"""Ids of the sentinel rows at both ends of the chain of ledgers; ledger ids lie between them."""

MARK_KEY: Final = b"M"
LAST_KEY: Final = b"\xff"
"""Greater than every key."""

REMEDY: Final = "run `pybk store rebuild-index` on the store to make the index again from the files"

_SIGN: Final = 1 << 63
_ONE_ID: Final = struct.Struct(">cQ")
_TWO_IDS: Final = struct.Struct(">cQQ")
_ENTRIES_KEY: Final = struct.Struct(">QQ")
_VALUE: Final = struct.Struct("<HHIQ")
_LINKS: Final = struct.Struct("<qq")
_STATE: Final = struct.Struct("<qqq")
_SHARE: Final = struct.Struct("<q")
_NAMED: Final = struct.Struct("<H?5x")


def damaged(problem: str) -> CorruptError:
    """Return the error for an index that is damaged or contradicts itself."""
    return CorruptError(f"{problem}; {REMEDY}")


class LedgerRow(NamedTuple):
    """A ledger as of the last checkpoint; its metadata may be newer, if it was moved since.

    ``last_entry_id`` is the last entry whose location is in the index, -1 for none. ``length`` counts payload
    bytes up to that entry.
    """

    metadata: LedgerMetadata
    last_entry_id: int
    last_add_confirmed: int
    length: int


class EncodedLedger(NamedTuple):
    """A ledger's encoded row, for a new catalog; ``version`` is the version of the metadata in ``state``."""

    ledger_id: int
    version: int
    state: bytes


class FileRow(NamedTuple):
    """A file that holds entries: ``kind`` is log, cold or entries, ``directory`` the directory's index in its tier."""

    file_id: int
    kind: str
    tier: str
    directory: int
    bytes: int


class CheckpointMark(NamedTuple):
    """The state of the whole store at a checkpoint; ids and numbers named ``next_`` were not used yet.

    ``store_id`` is 32 hex digits. Replay starts with the log file ``first_log_file_id``. The catalog is sound up to
    ``catalog_bytes``.
    """

    store_id: str
    first_log_file_id: int
    next_lsn: int
    durable_lsn: int
    next_file_id: int
    next_ledger_id: int
    next_creation_sequence: int
    catalog_file_id: int
    catalog_bytes: int


class NamedRow(NamedTuple):
    """A named record: ``version`` is the LSN of the commit that wrote it, ``value`` is None for a deleted one."""

    name: str
    version: int
    value: bytes | None


class Totals(NamedTuple):
    """The numbers of rows in the index; ``metadata_bytes`` is the sum over its ledgers."""

    ledgers: int
    metadata_bytes: int
    files: int
    named: int = 0


class FileUse(NamedTuple):
    """A file, the number of ledgers with entries in it, and the bytes of their records in it."""

    row: FileRow
    ledgers: int
    live_bytes: int


class ChainRow(NamedTuple):
    """A row of the chain of ledgers: the ids of its neighbours, and the encoded rest."""

    previous: int
    next: int
    state: bytes


# ---- keys --------------------------------------------------------------------------------------------------------


def ledger_key(ledger_id: int) -> bytes:
    """Return the key of a ledger's row; ``ledger_id`` lies in ``CHAIN_HEAD`` .. ``CHAIN_TAIL``, as everywhere here."""
    return _ONE_ID.pack(b"L", ledger_id + _SIGN)


def page_key(ledger_id: int, first_entry_id: int) -> bytes:
    """Return the key of the page of run locations whose first entry this is."""
    return _TWO_IDS.pack(b"P", ledger_id + _SIGN, first_entry_id + _SIGN)


def file_key(file_id: int) -> bytes:
    """Return the key of a file's row."""
    return _ONE_ID.pack(b"F", file_id + _SIGN)


def share_key(file_id: int, ledger_id: int) -> bytes:
    """Return the key of a ledger's share of a file."""
    return _TWO_IDS.pack(b"X", file_id + _SIGN, ledger_id + _SIGN)


def named_key(name: str) -> bytes:
    """Return the key of a named record's row."""
    return b"N" + name.encode()


def entries_key(ledger_id: int, first_entry_id: int) -> bytes:
    """Return the key of a record in an entries environment."""
    return _ENTRIES_KEY.pack(ledger_id + _SIGN, first_entry_id + _SIGN)


def key_ids(key: bytes) -> tuple[int, ...]:
    """Return the ids in a key of the index.

    Raises:
        CorruptError: It is not a key of the index.
    """
    if len(key) == _ONE_ID.size:
        return (_ONE_ID.unpack(key)[1] - _SIGN,)
    if len(key) == _TWO_IDS.size:
        _, one, two = _TWO_IDS.unpack(key)
        return one - _SIGN, two - _SIGN
    raise damaged(
        f"the index has a key of {len(key)} bytes, {key[:20].hex()}; keys have 1, {_ONE_ID.size} or "
        f"{_TWO_IDS.size} bytes"
    )


# ---- values ------------------------------------------------------------------------------------------------------


def encode_value(key: bytes, body: bytes) -> bytes:
    """Add format and checksum to the body of a value; the checksum covers the key, too."""
    kind = key[0]
    return _VALUE.pack(INDEX_FORMAT, kind, len(body), xxh3_64_intdigest(body, xxh3_64_intdigest(key) ^ kind)) + body


def decode_value(key: bytes, value: bytes) -> bytes:
    """Return the body of a value.

    Raises:
        CorruptError: It is damaged, or was stored under another key.
        UnsupportedFormatError: It is sound but of another format.
    """
    if len(value) >= _VALUE.size:
        version, kind, size, checksum = _VALUE.unpack_from(value)
        body = value[_VALUE.size :]
        if size == len(body) and kind == key[0] and checksum == xxh3_64_intdigest(body, xxh3_64_intdigest(key) ^ kind):
            if version != INDEX_FORMAT:
                raise UnsupportedFormatError(
                    f"index key {key.hex()} has format {version}; this pybk reads {INDEX_FORMAT}; "
                    f"open the store with the pybk that wrote it, or {REMEDY}"
                )
            return body
    raise damaged(f"index key {key.hex()} has a value of {len(value)} bytes that is damaged or another key's")


def encode_state(row: LedgerRow) -> bytes:
    """Encode a ledger's row without its links; also the body of a ledger record in the catalog."""
    return _STATE.pack(row.last_entry_id, row.last_add_confirmed, row.length) + row.metadata.encode()


def state_metadata_bytes(state: bytes) -> int:
    """Return the bytes of metadata in an encoded row."""
    return len(state) - _STATE.size


def state_last_entry_id(state: bytes) -> int:
    """Return the last checkpointed entry of an encoded row."""
    last: int = _STATE.unpack_from(state)[0]
    return last


def decode_state(ledger_id: int, state: bytes, *, where: str) -> LedgerRow:
    """Decode a ledger's row.

    Raises:
        CorruptError: It is too short, or its metadata is damaged or another ledger's.
        UnsupportedFormatError: The metadata is of another format.
    """
    if len(state) < _STATE.size:
        raise CorruptError(
            f"{where}: the row of ledger {ledger_id} has {len(state)} bytes, at least {_STATE.size} belong there"
        )
    last, confirmed, length = _STATE.unpack_from(state)
    metadata = LedgerMetadata.decode(state[_STATE.size :], where=where)
    if metadata.ledger_id != ledger_id:
        raise CorruptError(f"{where}: the row of ledger {ledger_id} has the metadata of ledger {metadata.ledger_id}")
    return LedgerRow(metadata, last, confirmed, length)


def decode_summary(ledger_id: int, state: bytes, *, where: str) -> PolicyMetadata:
    """Decode the part of a ledger's row that a tier policy needs; CorruptError if it is another ledger's."""
    summary = PolicyMetadata.decode(state[_STATE.size :], where=where)
    if summary.ledger_id != ledger_id:
        raise CorruptError(f"{where}: the row of ledger {ledger_id} has the metadata of ledger {summary.ledger_id}")
    return summary


def encode_chain_row(key: bytes, link: ChainRow) -> bytes:
    """Return the value of a row of the chain."""
    return encode_value(key, _LINKS.pack(link.previous, link.next) + link.state)


def decode_chain_row(key: bytes, value: bytes) -> ChainRow:
    """Decode the value of a row of the chain; raises as ``decode_value`` does."""
    body = decode_value(key, value)
    if len(body) < _LINKS.size:
        raise damaged(f"index key {key.hex()} has a ledger row of {len(body)} bytes")
    previous, following = _LINKS.unpack_from(body)
    return ChainRow(previous, following, body[_LINKS.size :])


def decode_page(key: bytes, value: bytes) -> RunLocations:
    """Decode a page: 1 to ``PAGE_LOCATIONS_MAX`` run locations, read-only; raises as ``decode_value`` does."""
    body = decode_value(key, value)
    count, rest = divmod(len(body), LOCATION_BYTES)
    if rest or not 0 < count <= PAGE_LOCATIONS_MAX:
        raise damaged(
            f"index key {key.hex()} has a page of {len(body)} bytes; expected 1 to {PAGE_LOCATIONS_MAX} locations of "
            f"{LOCATION_BYTES} bytes"
        )
    return np.frombuffer(body, location_dtype())


def encode_share(key: bytes, share: int) -> bytes:
    """Return the value of a ledger's share of a file, in bytes."""
    return encode_value(key, _SHARE.pack(share))


def decode_share(key: bytes, value: bytes) -> int:
    """Decode a ledger's share of a file, in bytes; raises as ``decode_value`` does."""
    body = decode_value(key, value)
    if len(body) != _SHARE.size:
        raise damaged(f"index key {key.hex()} has a share of {len(body)} bytes, not {_SHARE.size}")
    share: int = _SHARE.unpack(body)[0]
    return share


def encode_use(key: bytes, use: FileUse) -> bytes:
    """Return the value of a file's row."""
    return encode_value(key, dump_json({**use.row._asdict(), "ledgers": use.ledgers, "live_bytes": use.live_bytes}))


def decode_use(key: bytes, value: bytes) -> FileUse:
    """Decode the value of a file's row; raises as ``decode_value`` does."""
    where = f"index key {key.hex()} ({REMEDY})"
    fields = load_json(decode_value(key, value), where=where)
    return FileUse(
        file_row(fields, where=where), _number(fields, "ledgers", where), _number(fields, "live_bytes", where)
    )


def encode_named(row: NamedRow) -> bytes:
    """Return the body of a named record: the size of its name, whether it has a value, the name, the value."""
    name = row.name.encode()
    return _NAMED.pack(len(name), row.value is not None) + name + (row.value or b"")


def decode_named(version: int, body: bytes, *, where: str) -> NamedRow:
    """Decode the body of a named record; CorruptError if it is not one."""
    try:
        size, present = _NAMED.unpack_from(body)
        name = body[_NAMED.size : _NAMED.size + size]
        value = body[_NAMED.size + size :]
        if len(name) != size or (value and not present):
            raise ValueError(f"{len(body)} bytes")
        return NamedRow(name.decode(), version, value if present else None)
    except (struct.error, ValueError) as error:
        raise CorruptError(f"{where}: no named record: {error}; restore the file from a backup") from error


def encode_named_value(key: bytes, row: NamedRow) -> bytes:
    """Return the value of a named record's row in the index."""
    return encode_value(key, _SHARE.pack(row.version) + (row.value or b""))


def decode_named_value(key: bytes, value: bytes) -> NamedRow:
    """Decode the value of a named record's row in the index; raises as ``decode_value`` does."""
    body = decode_value(key, value)
    if len(body) < _SHARE.size:
        raise damaged(f"index key {key.hex()} has a named record of {len(body)} bytes")
    return NamedRow(key[1:].decode("utf-8", "replace"), _SHARE.unpack_from(body)[0], body[_SHARE.size :])


def encode_mark(mark: CheckpointMark, totals: Totals) -> bytes:
    """Return the value of ``MARK_KEY``."""
    counts = totals._asdict()
    if not totals.named:  # a store of level BASE has none, and its first version does not know the field
        del counts["named"]
    return encode_value(MARK_KEY, dump_json({**mark._asdict(), **counts}))


def decode_mark(value: bytes) -> tuple[CheckpointMark, Totals]:
    """Decode the value of ``MARK_KEY``; raises as ``decode_value`` does."""
    where = f"the index's mark ({REMEDY})"
    fields = load_json(decode_value(MARK_KEY, value), where=where)
    fields.setdefault("named", 0)
    return decode_mark_fields(fields, where=where), Totals._make(
        _number(fields, name, where) for name in Totals._fields
    )


# ---- JSON --------------------------------------------------------------------------------------------------------


def dump_json(fields: Mapping[str, Any]) -> bytes:
    """Encode the fields of a value deterministically."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def load_json(data: bytes, *, where: str) -> dict[str, Any]:
    """Decode the fields of a value; CorruptError if it is not a JSON object."""
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise CorruptError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CorruptError(f"{where}: JSON, but not an object")
    return fields


def decode_mark_fields(fields: Mapping[str, Any], *, where: str) -> CheckpointMark:
    """Return the mark among the fields of a value; CorruptError if it is not whole."""
    return CheckpointMark(
        _text(fields, "store_id", where), *(_number(fields, name, where) for name in CheckpointMark._fields[1:])
    )


def file_row(fields: Mapping[str, Any], *, where: str) -> FileRow:
    """Return the file's row among the fields of a value; CorruptError if it is not whole."""
    return FileRow(
        _number(fields, "file_id", where),
        _text(fields, "kind", where),
        _text(fields, "tier", where),
        _number(fields, "directory", where),
        _number(fields, "bytes", where),
    )


def _number(fields: Mapping[str, Any], name: str, where: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 0:
        raise CorruptError(f"{where}: {name} is {value!r}, not a whole number")
    return value


def _text(fields: Mapping[str, Any], name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise CorruptError(f"{where}: {name} is {value!r}, not a string")
    return value
