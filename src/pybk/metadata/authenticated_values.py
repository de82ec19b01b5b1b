"""The bytes of a cluster's values in the metadata store: a header, a MAC and a payload.

A value of format 1 is ``format u8 | kind u8 | MAC size u8 | token (16) | MAC | payload``; it is written below feature
level SEALS. A value of format 2 is ``format u8 | kind u8 | MAC size u8 | reserved u8 | key epoch u32 | token (16) | MAC
| payload``. The token is random and new for each change, so a writer recognises its own value. The MAC is HMAC-SHA256
with the cluster's metadata key over the header, the key of the value in the store and the payload; a cluster without a
secret has no MACs. The key epoch names the secret.

A value of format 3 was *resealed*: another MAC was made for a value that did not change, by the key of a later epoch.
Its header has ``since (16)`` after the token: the version that the key had when it got this payload. All versions from
there on have the same payload and token. A writer that expects one of them in a compare-and-set has read the present
payload, and continues from the present version (``AuthenticatedValues.change``).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from functools import partial
from struct import Struct
from typing import Any, Final

from pybk.errors import (
    CorruptError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataVersionError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.feature_level import FeatureLevel
from pybk.metadata.lost_answers import settle
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.store import MetadataStore, Node
from pybk.values import decode_json, encode_json

VALUE_FORMAT_BASE: Final = 1
VALUE_FORMAT: Final = 2
VALUE_FORMAT_RESEALED: Final = 3
SECRETS_AGE_SECONDS: Final = 10.0
"""The greatest age, in seconds, that a process's knowledge of the cluster's secrets may have when it writes."""

TOKEN_BYTES: Final = 16
MAC_BYTES: Final = 32

_HEADER_BASE: Final = Struct(f">BBB{TOKEN_BYTES}s")
_HEADER: Final = Struct(f">BBBBI{TOKEN_BYTES}s")
_HEADER_RESEALED: Final = Struct(f">BBBBI{TOKEN_BYTES}s16s")
_HEADERS: Final = {VALUE_FORMAT_BASE: _HEADER_BASE, VALUE_FORMAT: _HEADER, VALUE_FORMAT_RESEALED: _HEADER_RESEALED}
_SIZE: Final = Struct(">I")
_LABELS: Final = {
    VALUE_FORMAT_BASE: b"pybk metadata value 1\0",
    VALUE_FORMAT: b"pybk metadata value 2\0",
    VALUE_FORMAT_RESEALED: b"pybk metadata value 3\0",
}


class ValueKind(IntEnum):
    """The kind of a value, as written; ``docs/reference/metadata.md`` lists the payloads."""

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
    DELETED_IDS = 22


def new_token() -> bytes:
    """Return a random token."""
    return secrets.token_bytes(TOKEN_BYTES)


def token_of(value: bytes) -> bytes:
    """Return the token of a value's writer."""
    end = (_HEADER_BASE if value[:1] == b"\x01" else _HEADER).size
    return value[end - TOKEN_BYTES : end]


def epoch_of(value: bytes) -> int:
    """Return the key epoch that a value names, unverified; 0 for one that names none."""
    return 0 if value[0] == VALUE_FORMAT_BASE else int.from_bytes(value[4:8], "big")


def unchanged_since(value: bytes, version: int) -> int:
    """Return the first version of a key with the payload and the token that it has at ``version``."""
    if value[0] != VALUE_FORMAT_RESEALED:
        return version
    return int.from_bytes(value[_HEADER.size : _HEADER_RESEALED.size], "big")


def mac_of(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """Return the MAC of a label and parts, each prefixed with its size, so no two lists have the same input."""
    mac = hmac.new(key, label, hashlib.sha256)
    for part in parts:
        mac.update(_SIZE.pack(len(part)) + part)
    return mac.digest()


def encode_authenticated(
    kind: ValueKind,
    key: str,
    token: bytes,
    payload: bytes,
    keys: MetadataKeys | None,
    level: FeatureLevel,
    since: int | None = None,
) -> bytes:
    """Return the bytes of a value.

    Args:
        kind: Its kind.
        key: Its key in the store.
        token: The writer's token.
        payload: Its payload.
        keys: The cluster's metadata keys; None for a cluster without a secret.
        level: The cluster's feature level, which decides the format.
        since: For a value that is resealed: the version of the key that had this payload first.
    """
    mac_bytes = 0 if keys is None else MAC_BYTES
    epoch = 0 if keys is None else keys.current
    if since is not None:
        header = _HEADER_RESEALED.pack(
            VALUE_FORMAT_RESEALED, kind, mac_bytes, 0, epoch, token, since.to_bytes(16, "big")
        )
    elif level < FeatureLevel.SEALS:
        header = _HEADER_BASE.pack(VALUE_FORMAT_BASE, kind, mac_bytes, token)
    else:
        header = _HEADER.pack(VALUE_FORMAT, kind, mac_bytes, 0, epoch, token)
    mac = b"" if keys is None else mac_of(keys.key, _LABELS[header[0]], header, key.encode(), payload)
    return header + mac + payload


def decode_authenticated(key: str, value: bytes, keys: MetadataKeys | None) -> tuple[ValueKind, bytes]:
    """Check a value, and return its kind and payload; MACs are compared in constant time.

    Raises:
        UnsupportedFormatError: The value has a newer format.
        CorruptError: It is not a value of a cluster.
        MetadataForgedError: Its MAC was not made with a valid secret of the cluster.
    """
    if not value or len(value) < _HEADERS.get(value[0], _HEADER).size:
        raise CorruptError(f"metadata key {key!r}: {len(value)} bytes are not a value of pybk; restore it or remove it")
    number, kind, mac_size = value[0], value[1], value[2]
    if number not in _LABELS:
        raise UnsupportedFormatError(
            f"metadata key {key!r}: format {number}; this pybk reads formats up to {VALUE_FORMAT_RESEALED}: install a "
            "newer pybk"
        )
    header = value[: _HEADERS[number].size]
    if number != VALUE_FORMAT_BASE and value[3]:
        raise UnsupportedFormatError(
            f"metadata key {key!r}: reserved byte {value[3]}; this pybk knows 0: install a newer pybk"
        )
    at = len(header) + mac_size
    if mac_size not in (0, MAC_BYTES) or len(value) < at or kind not in ValueKind.__members__.values():
        raise CorruptError(
            f"metadata key {key!r}: kind {kind} with a MAC of {mac_size} bytes is not a value of pybk; restore it or "
            "remove it"
        )
    if (keys is None) != (mac_size == 0):
        raise MetadataForgedError(
            f"metadata key {key!r} was written without a cluster secret, but one is given here: give none, or remove it"
            if mac_size == 0
            else f"metadata key {key!r} was written with a cluster secret, but none is given here: give it"
        )
    payload = value[at:]
    if keys is not None:
        mac_key = _accepted_key(key, epoch_of(value), keys)
        mac = mac_of(mac_key, _LABELS[number], header, key.encode(), payload)
        if not hmac.compare_digest(mac, value[len(header) : at]):
            raise MetadataForgedError(
                f"metadata key {key!r} was not written with the cluster secret that is given here; check the secret, "
                "and which users may write to the metadata store"
            )
    return ValueKind(kind), payload


class UnknownEpochError(MetadataForgedError):
    """A value names a key epoch that this process does not know; it may know it once it has read the secrets again.

    Attributes:
        epoch: The epoch.
    """

    def __init__(self, message: str, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch


def _accepted_key(key: str, epoch: int, keys: MetadataKeys) -> bytes:
    """Return the metadata key of an epoch, if values of that epoch are accepted."""
    mac_key = keys.by_epoch.get(epoch)
    if mac_key is not None:
        return mac_key
    if epoch in keys.earlier:
        raise MetadataForgedError(
            f"metadata key {key!r} was written with secret {epoch} of the cluster, which was retired, so no member "
            "writes with it: check who still has it, and which users may write to the metadata store"
        )
    raise UnknownEpochError(
        f"metadata key {key!r} was written with secret {epoch} of the cluster, which is not given here: give it, too; "
        "if the cluster has no such secret, restore the key",
        epoch,
    )


class AuthenticatedValues:
    """Authenticated values in a metadata store; the base of the classes that ``ClusterMetadata`` consists of.

    Args:
        store: The store.
        keys: The cluster's metadata keys, None without a cluster secret.

    Attributes:
        feature_level: The level whose formats are written; it follows the cluster's.
        keys: The metadata keys, which follow the cluster's; None without a secret.
    """

    feature_level: FeatureLevel

    def __init__(self, store: MetadataStore, keys: MetadataKeys | None) -> None:
        if keys is not None and len(keys.key) < MAC_BYTES:
            raise UsageError(f"the metadata key has {len(keys.key)} bytes; it takes at least {MAC_BYTES}")
        self._store = store
        self.keys = keys
        self._looked = time.monotonic()

    def refresh_keys(self) -> None:
        """Read the cluster's secrets again, and adopt changes; ``ClusterMetadata`` overrides this."""
        self._looked = time.monotonic()

    def encoded(self, kind: ValueKind, key: str, token: bytes, payload: bytes) -> bytes:
        """Return the bytes of a value that is about to be written.

        Raises:
            MetadataForgedError: The cluster uses a secret that was not given to this process.
            MetadataUnreachableError: The secret in use is not known, and cannot be read; nothing is written.
        """
        # A process that was suspended must not write with a secret that was retired since: no reader would take it.
        if self.keys is not None and time.monotonic() - self._looked > SECRETS_AGE_SECONDS:
            self.refresh_keys()
        return encode_authenticated(kind, key, token, payload, self.keys, self.feature_level)

    def decoded(self, key: str, value: bytes) -> tuple[ValueKind, bytes]:
        """Check a value as ``decode_authenticated`` does; on a new epoch, read the cluster's secrets again."""
        try:
            return decode_authenticated(key, value, self.keys)
        except UnknownEpochError:
            self.refresh_keys()
            return decode_authenticated(key, value, self.keys)

    def _payload_of(self, kind: ValueKind, key: str, value: bytes) -> bytes:
        """Return the payload of a value; raises CorruptError if it is of another kind."""
        found, payload = self.decoded(key, value)
        if found is not kind:
            raise CorruptError(f"metadata key {key!r}: kind {found.name} where {kind.name} belongs; restore it")
        return payload

    def create_value(self, kind: ValueKind, key: str, payload: bytes, *, leased: bool = False) -> int:
        """Create a key, once even if answers are lost; return its version."""
        token = new_token()
        value = self.encoded(kind, key, token, payload)
        return settle(self._store, key, lambda: self._store.create(key, value, leased=leased), _wrote(token))

    def change(
        self, key: str, version: int, change: Callable[[int], int], mine: Callable[[Node | None], bool], *, at: str = ""
    ) -> int:
        """Make a change of a key that has ``version``, once even if answers are lost.

        If the key was only resealed since, and so has the same payload, the change is made at its present version.

        Args:
            key: The key.
            version: The version that the caller has read.
            change: Makes the change at a version; returns the new version.
            mine: Returns whether a value shows that the change took effect.
            at: The key that ``mine`` judges; ``key`` by default.

        Raises:
            MetadataVersionError: The key has another value, or none.
        """
        while True:
            try:
                return settle(self._store, at or key, partial(change, version), mine)
            except MetadataVersionError:
                node = self._store.get(key, latest=True) if self._resealed else None
                if node is None or not self.is_unchanged(key, node, version) or node.version == version:
                    raise
                version = node.version

    @property
    def _resealed(self) -> bool:
        """True if values of the cluster may have been resealed, because it had several secrets."""
        return self.keys is not None and (self.keys.current > 0 or len(self.keys.by_epoch) > 1)

    def is_unchanged(self, key: str, node: Node, version: int) -> bool:
        """Return whether a key still has the payload of a version; it may have been resealed since."""
        if node.version == version:
            return True
        self.decoded(key, node.value)  # otherwise any client could forge this
        return unchanged_since(node.value, node.version) <= version < node.version

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
        """Replace a key's value, once even if answers are lost; return its version. ``token`` None draws one."""
        token = token or new_token()
        value = self.encoded(kind, key, token, payload)
        return self.change(
            key, version, lambda current: self._store.put(key, value, current, reused=reused), _wrote(token)
        )

    def read_document(self, kind: ValueKind, key: str) -> dict[str, Any] | None:
        """Return a value that is a JSON object; None if there is none.

        Raises:
            CorruptError, MetadataForgedError, UnsupportedFormatError: It is not a JSON object of this kind.
        """
        node = self._store.get(key, latest=True)
        if node is None:
            return None
        return decode_json(self._payload_of(kind, key, node.value), dict, where=f"metadata key {key!r}")

    def write_document(self, kind: ValueKind, key: str, values: Mapping[str, Any], *, leased: bool) -> None:
        """Replace a value by a JSON object, durably and unconditionally; of concurrent writes, the later one counts.

        Args:
            kind: Its kind.
            key: Its key.
            values: The object.
            leased: Whether the value disappears with the session of this process.
        """
        payload = encode_json(dict(values))
        while True:
            node = self._store.get(key, latest=True)
            with suppress(MetadataExistsError, MetadataVersionError):  # another process wrote it at this moment
                if node is None:
                    self.create_value(kind, key, payload, leased=leased)
                else:
                    # The new value does not depend on the old one, so a key that was removed and created again may be
                    # replaced, too.
                    self._put(kind, key, payload, node.version)
                return

    def _rename(self, kind: ValueKind, key: str, target: str, payload: bytes, version: int) -> None:
        """Remove a key and create another one as one change, once even if answers are lost."""
        token = new_token()
        value = self.encoded(kind, target, token, payload)

        def change(current: int) -> int:
            self._store.rename(key, target, value, current)
            return 0

        self.change(key, version, change, _wrote(token), at=target)

    def _delete(self, key: str, version: int, *, reused: bool = False) -> None:
        """Remove a key; if an answer was lost and the key is gone, it counts as removed."""

        def change(current: int) -> int:
            self._store.delete(key, current, reused=reused)
            return 0

        self.change(key, version, change, lambda node: node is None)


def _wrote(token: bytes) -> Callable[[Node | None], bool]:
    return lambda node: node is not None and token_of(node.value) == token
