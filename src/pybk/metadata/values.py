"""The bytes of a cluster's values in the metadata store: who wrote them, of what kind they are, and the proof of it.

A value is ``format u8 | kind u8 | MAC size u8 | token (16) | MAC | payload``. The token is its writer's, new for each
change. The MAC is HMAC-SHA256 with the cluster's metadata key over the header, the key in the tree and the payload; a
cluster without a secret has none.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import Any, Final, TypeVar

from pybk.errors import CorruptError, MetadataForgedError, UnsupportedFormatError, UsageError
from pybk.metadata.settle import settle
from pybk.metadata.tree import MetadataTree, Node

VALUE_FORMAT: Final = 1
TOKEN_BYTES: Final = 16
MAC_BYTES: Final = 32

_HEADER: Final = Struct(f">BBB{TOKEN_BYTES}s")
_SIZE: Final = Struct(">I")
_LABEL: Final = b"pybk metadata value 1\0"

T = TypeVar("T")


class Kind(IntEnum):
    """What a value is about."""

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


def new_token() -> bytes:
    """Return a token that nobody else has."""
    return secrets.token_bytes(TOKEN_BYTES)


def token_of(value: bytes) -> bytes:
    """Return the token of a value's writer."""
    return value[3 : 3 + TOKEN_BYTES]


def mac_of(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """Return the MAC of a label and parts, each written with its size, so that no two lists read the same."""
    mac = hmac.new(key, label, hashlib.sha256)
    for part in parts:
        mac.update(_SIZE.pack(len(part)) + part)
    return mac.digest()


def seal(kind: Kind, key: str, token: bytes, payload: bytes, mac_key: bytes | None) -> bytes:
    """Make a value.

    Args:
        kind: What it is about.
        key: Where in the tree it stands.
        token: Its writer's.
        payload: What it says.
        mac_key: The cluster's metadata key, None for a cluster without a secret.
    """
    header = _HEADER.pack(VALUE_FORMAT, kind, 0 if mac_key is None else MAC_BYTES, token)
    mac = b"" if mac_key is None else mac_of(mac_key, _LABEL, header, key.encode(), payload)
    return header + mac + payload


def unseal(key: str, value: bytes, mac_key: bytes | None) -> tuple[Kind, bytes]:
    """Check a value, in constant time where it matters, and return its kind and payload.

    Raises:
        UnsupportedFormatError: It is of another format.
        CorruptError: It is no value of a cluster.
        MetadataForgedError: Its MAC is not the one that the cluster's secret makes.
    """
    if len(value) < _HEADER.size:
        raise CorruptError(f"metadata key {key!r}: {len(value)} bytes are no value of pybk; restore it or remove it")
    number, kind, mac_size, _ = _HEADER.unpack_from(value)
    if number != VALUE_FORMAT:
        raise UnsupportedFormatError(
            f"metadata key {key!r}: format {number}; this pybk reads {VALUE_FORMAT}: use a newer one"
        )
    at = _HEADER.size + mac_size
    if mac_size not in (0, MAC_BYTES) or len(value) < at or kind not in Kind.__members__.values():
        raise CorruptError(f"metadata key {key!r}: kind {kind} with a MAC of {mac_size} bytes is no value of pybk")
    if (mac_key is None) != (mac_size == 0):
        raise MetadataForgedError(
            f"metadata key {key!r} was written without a cluster secret, but one is given here: give none, or remove it"
            if mac_size == 0
            else f"metadata key {key!r} was written with a cluster secret, but none is given here: give it"
        )
    payload = value[at:]
    if mac_key is not None:
        mac = mac_of(mac_key, _LABEL, value[: _HEADER.size], key.encode(), payload)
        if not hmac.compare_digest(mac, value[_HEADER.size : at]):
            raise MetadataForgedError(
                f"metadata key {key!r} was not written with the cluster secret that is given here; check the secret, "
                "and who may write to the metadata store"
            )
    return Kind(kind), payload


class Records:
    """The parts of a cluster's metadata build on this: sealed values in a tree.

    Args:
        tree: The store.
        mac_key: The cluster's metadata key, None without a cluster secret.
    """

    def __init__(self, tree: MetadataTree, mac_key: bytes | None) -> None:
        if mac_key is not None and len(mac_key) < MAC_BYTES:
            raise UsageError(f"the metadata key has {len(mac_key)} bytes; it takes at least {MAC_BYTES}")
        self._tree = tree
        self._mac_key = mac_key

    def _unseal(self, kind: Kind, key: str, value: bytes) -> bytes:
        """Return the payload of a value, which must be of this kind."""
        found, payload = unseal(key, value, self._mac_key)
        if found is not kind:
            raise CorruptError(f"metadata key {key!r}: kind {found.name} where {kind.name} belongs; restore it")
        return payload

    def _create(self, kind: Kind, key: str, payload: bytes, *, leased: bool = False) -> int:
        """Make a key, once, whatever becomes of the answers; returns its version."""
        token = new_token()
        value = seal(kind, key, token, payload, self._mac_key)
        return settle(self._tree, key, lambda: self._tree.create(key, value, leased=leased), _wrote(token))

    def _put(self, kind: Kind, key: str, payload: bytes, version: int) -> int:
        """Replace a key's value, once, whatever becomes of the answers; returns its version."""
        token = new_token()
        value = seal(kind, key, token, payload, self._mac_key)
        return settle(self._tree, key, lambda: self._tree.put(key, value, version), _wrote(token))

    def _delete(self, key: str, version: int) -> None:
        """Remove a key; that it is gone when an answer was lost counts as removed."""

        def change() -> int:
            self._tree.delete(key, version)
            return 0

        settle(self._tree, key, change, lambda node: node is None)


def _wrote(token: bytes) -> Callable[[Node | None], bool]:
    return lambda node: node is not None and token_of(node.value) == token


_encode_json: Final = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


def encode_json(values: dict[str, Any]) -> bytes:
    """Return JSON in UTF-8 with sorted keys and no spaces."""
    return _encode_json(values).encode()


def decode_json(data: bytes, make: Callable[[dict[str, Any]], T], *, where: str) -> T:
    """Decode what ``encode_json`` made.

    Args:
        data: The bytes.
        make: Makes the result of the values; a missing or wrong one raises KeyError, ValueError or TypeError.
        where: Names the place in errors.

    Raises:
        CorruptError: The bytes say something else.
    """
    try:
        values = json.loads(data.decode())
        if not isinstance(values, dict):
            raise ValueError("no object")
        return make(values)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptError(
            f"{where}: {len(data)} bytes do not say what belongs there: {error!r}; restore it"
        ) from error


def to_base64(data: bytes) -> str:
    """Return bytes as base64."""
    return b2a_base64(data, newline=False).decode()


def from_base64(text: object) -> bytes:
    """Return the bytes of base64, or raise ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is no base64")
    return a2b_base64(text, strict_mode=True)
