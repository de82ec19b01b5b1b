"""The bytes of a cluster's values in the metadata store: a header, a MAC and a payload.

A value of format 1 is ``format u8 | kind u8 | MAC size u8 | token (16) | MAC | payload``; it is written below feature
level SEALS. A value of format 2 is ``format u8 | kind u8 | MAC size u8 | reserved u8 | key epoch u32 | token (16) | MAC
| payload``. The token is random and new for each change, so a writer recognises its own value. The MAC is HMAC-SHA256
with the cluster's metadata key over the header, the key of the value in the store and the payload; a cluster without a
secret has no MACs. The key epoch names the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from struct import Struct
from typing import Any, Final, TypeVar

from pybk.errors import (
    CorruptError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataVersionError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.feature_level import FeatureLevel
from pybk.metadata.cas import settle
from pybk.metadata.store import MetadataStore, Node

VALUE_FORMAT_BASE: Final = 1
VALUE_FORMAT: Final = 2
KEY_EPOCH: Final = 0
"""The epoch of a cluster's first secret, the only one so far; a value of another epoch is refused."""

TOKEN_BYTES: Final = 16
MAC_BYTES: Final = 32

_HEADER_BASE: Final = Struct(f">BBB{TOKEN_BYTES}s")
_HEADER: Final = Struct(f">BBBBI{TOKEN_BYTES}s")
_SIZE: Final = Struct(">I")
_LABELS: Final = {VALUE_FORMAT_BASE: b"pybk metadata value 1\0", VALUE_FORMAT: b"pybk metadata value 2\0"}

T = TypeVar("T")


class ValueKind(IntEnum):
    """The kind of a value, as written; ``docs/metadata.md`` lists the payloads."""

    CLUSTER = 1
    IDS = 2
    LEDGER = 3
    DELETED = 4
    COOKIE = 5
    BOOKIE = 6
    LOCK = 7
    UNDER_REPLICATED = 8
    NEWS = 9
    POINTER = 10
    POSITION = 11
    SETTINGS = 12
    DELETIONS = 13
    DELETION_HEAD = 14
    DELETION_POSITION = 15
    EPOCH = 16
    OUTDATED = 17
    AUDITOR = 18
    AUDITOR_REPORT = 19
    SCRUB = 20
    ORPHANS = 21


def new_token() -> bytes:
    """Return a random token."""
    return secrets.token_bytes(TOKEN_BYTES)


def token_of(value: bytes) -> bytes:
    """Return the token of a value's writer."""
    end = (_HEADER_BASE if value[:1] == b"\x01" else _HEADER).size
    return value[end - TOKEN_BYTES : end]


def mac_of(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """Return the MAC of a label and parts, each prefixed with its size, so that no two lists have the same input."""
    mac = hmac.new(key, label, hashlib.sha256)
    for part in parts:
        mac.update(_SIZE.pack(len(part)) + part)
    return mac.digest()


def encode_authenticated(
    kind: ValueKind, key: str, token: bytes, payload: bytes, mac_key: bytes | None, level: FeatureLevel
) -> bytes:
    """Return the bytes of a value.

    Args:
        kind: Its kind.
        key: Its key in the store.
        token: The writer's token.
        payload: Its payload.
        mac_key: The cluster's metadata key, None for a cluster without a secret.
        level: The cluster's feature level, which decides the format.
    """
    mac_bytes = 0 if mac_key is None else MAC_BYTES
    if level < FeatureLevel.SEALS:
        header = _HEADER_BASE.pack(VALUE_FORMAT_BASE, kind, mac_bytes, token)
    else:
        header = _HEADER.pack(VALUE_FORMAT, kind, mac_bytes, 0, KEY_EPOCH, token)
    mac = b"" if mac_key is None else mac_of(mac_key, _LABELS[header[0]], header, key.encode(), payload)
    return header + mac + payload


def decode_authenticated(key: str, value: bytes, mac_key: bytes | None) -> tuple[ValueKind, bytes]:
    """Check a value, and return its kind and payload. MACs are compared in constant time.

    Raises:
        UnsupportedFormatError: The value has a newer format, or another key epoch.
        CorruptError: It is not a value of a cluster.
        MetadataForgedError: Its MAC was not made with the cluster's secret.
    """
    if not value or len(value) < (_HEADER_BASE if value[0] == VALUE_FORMAT_BASE else _HEADER).size:
        raise CorruptError(f"metadata key {key!r}: {len(value)} bytes are not a value of pybk; restore it or remove it")
    number, kind, mac_size = value[0], value[1], value[2]
    if number not in _LABELS:
        raise UnsupportedFormatError(
            f"metadata key {key!r}: format {number}; this pybk reads formats up to {VALUE_FORMAT}: install a newer pybk"
        )
    header = value[: (_HEADER_BASE if number == VALUE_FORMAT_BASE else _HEADER).size]
    if number != VALUE_FORMAT_BASE:
        _, _, _, reserved, key_epoch, _ = _HEADER.unpack(header)
        if reserved or key_epoch != KEY_EPOCH:
            raise UnsupportedFormatError(
                f"metadata key {key!r}: reserved byte {reserved}, key epoch {key_epoch}; this pybk knows 0 and "
                f"{KEY_EPOCH}: install a newer pybk"
            )
    at = len(header) + mac_size
    if mac_size not in (0, MAC_BYTES) or len(value) < at or kind not in ValueKind.__members__.values():
        raise CorruptError(
            f"metadata key {key!r}: kind {kind} with a MAC of {mac_size} bytes is not a value of pybk; restore it or "
            "remove it"
        )
    if (mac_key is None) != (mac_size == 0):
        raise MetadataForgedError(
            f"metadata key {key!r} was written without a cluster secret, but one is given here: give none, or remove it"
            if mac_size == 0
            else f"metadata key {key!r} was written with a cluster secret, but none is given here: give it"
        )
    payload = value[at:]
    if mac_key is not None:
        mac = mac_of(mac_key, _LABELS[number], header, key.encode(), payload)
        if not hmac.compare_digest(mac, value[len(header) : at]):
            raise MetadataForgedError(
                f"metadata key {key!r} was not written with the cluster secret that is given here; check the secret, "
                "and which users may write to the metadata store"
            )
    return ValueKind(kind), payload


class AuthenticatedValues:
    """Authenticated values in a metadata store; the base of the classes that ``ClusterMetadata`` consists of.

    Args:
        store: The store.
        mac_key: The cluster's metadata key, None without a cluster secret.

    Attributes:
        feature_level: The level whose formats are written; it follows the cluster's.
    """

    feature_level: FeatureLevel

    def __init__(self, store: MetadataStore, mac_key: bytes | None) -> None:
        if mac_key is not None and len(mac_key) < MAC_BYTES:
            raise UsageError(f"the metadata key has {len(mac_key)} bytes; it takes at least {MAC_BYTES}")
        self._store = store
        self._mac_key = mac_key

    def _payload_of(self, kind: ValueKind, key: str, value: bytes) -> bytes:
        """Return the payload of a value; raises CorruptError if it is of another kind."""
        found, payload = decode_authenticated(key, value, self._mac_key)
        if found is not kind:
            raise CorruptError(f"metadata key {key!r}: kind {found.name} where {kind.name} belongs; restore it")
        return payload

    def create_value(self, kind: ValueKind, key: str, payload: bytes, *, leased: bool = False) -> int:
        """Create a key, once even if answers are lost; returns its version."""
        token = new_token()
        value = encode_authenticated(kind, key, token, payload, self._mac_key, self.feature_level)
        return settle(self._store, key, lambda: self._store.create(key, value, leased=leased), _wrote(token))

    def _put(
        self,
        kind: ValueKind,
        key: str,
        payload: bytes,
        version: int,
        *,
        reused: bool = False,
        token: bytes | None = None,
    ) -> int:
        """Replace a key's value, once even if answers are lost; returns its version. None draws a token."""
        token = token or new_token()
        value = encode_authenticated(kind, key, token, payload, self._mac_key, self.feature_level)
        return settle(self._store, key, lambda: self._store.put(key, value, version, reused=reused), _wrote(token))

    def read_document(self, kind: ValueKind, key: str) -> dict[str, Any] | None:
        """Return a value that is a JSON object; None if there is none.

        Raises:
            CorruptError, MetadataForgedError, UnsupportedFormatError: It is something else.
        """
        node = self._store.get(key, latest=True)
        if node is None:
            return None
        return decode_json(self._payload_of(kind, key, node.value), dict, where=f"metadata key {key!r}")

    def write_document(self, kind: ValueKind, key: str, values: Mapping[str, Any], *, leased: bool) -> None:
        """Replace a value by a JSON object, durably, whatever it was. Of two processes at once, the later write counts.

        Args:
            kind: Its kind.
            key: Its key.
            values: The object.
            leased: It disappears with the session of this process.
        """
        payload = encode_json(dict(values))
        while True:
            node = self._store.get(key, latest=True)
            with suppress(MetadataExistsError, MetadataVersionError):  # another process wrote it at this moment
                if node is None:
                    self.create_value(kind, key, payload, leased=leased)
                else:
                    # What is written does not depend on what is replaced, so a key that was made again may be, too.
                    self._put(kind, key, payload, node.version)
                return

    def _rename(self, kind: ValueKind, key: str, target: str, payload: bytes, version: int) -> None:
        """Remove a key and create another one as one change, once even if answers are lost."""
        token = new_token()
        value = encode_authenticated(kind, target, token, payload, self._mac_key, self.feature_level)

        def change() -> int:
            self._store.rename(key, target, value, version)
            return 0

        settle(self._store, target, change, _wrote(token))

    def _delete(self, key: str, version: int, *, reused: bool = False) -> None:
        """Remove a key; if an answer was lost and the key is gone, it counts as removed."""

        def change() -> int:
            self._store.delete(key, version, reused=reused)
            return 0

        settle(self._store, key, change, lambda node: node is None)


def _wrote(token: bytes) -> Callable[[Node | None], bool]:
    return lambda node: node is not None and token_of(node.value) == token


_encode_json: Final = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


def encode_json(values: dict[str, Any]) -> bytes:
    """Return JSON in UTF-8 with sorted keys and no spaces."""
    return _encode_json(values).encode()


def decode_json(data: bytes, make: Callable[[dict[str, Any]], T], *, where: str) -> T:
    """Decode the output of ``encode_json``.

    Args:
        data: The bytes.
        make: Makes the result of the values. It may raise what Python raises for missing or wrong values, such as
            OverflowError for a number that JSON decodes to infinity.
        where: Names the value in errors.

    Raises:
        CorruptError: The bytes are not JSON, or ``make`` refused them.
    """
    try:
        values = json.loads(data.decode())
        if not isinstance(values, dict):
            raise ValueError("not an object")
        return make(values)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CorruptError(
            f"{where}: {len(data)} bytes do not decode to the expected values: {error!r}; restore it"
        ) from error


def to_base64(data: bytes) -> str:
    """Return bytes as base64."""
    return b2a_base64(data, newline=False).decode()


def from_base64(text: object) -> bytes:
    """Return the bytes of base64, or raise ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not base64")
    return a2b_base64(text, strict_mode=True)
