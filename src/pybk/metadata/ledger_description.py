"""The immutable part of a ledger's metadata, with a MAC.

Clients send it to bookies, which store it with their replicas. Format 1, of ledgers of key format 0, has only the
digest of the custom metadata. Format 2, of all other ledgers, has the custom metadata itself, from which a ledger's
metadata can be reconstructed. The format of a ledger never changes, because bookies compare the bytes after the MAC.
The MAC is made once, with the secret that the cluster has when the description is made.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Self

from pybk.errors import CorruptError, MetadataForgedError, UnsupportedFormatError, UsageError
from pybk.flags import LedgerType, StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import DESCRIPTION_BYTES_MAX, DESCRIPTION_BYTES_MAX_BASE, LedgerMetadata
from pybk.metadata.authenticated_values import MAC_BYTES, mac_of
from pybk.values import decode_json, encode_json, from_base64, to_base64

DESCRIPTION_FORMAT_BASE: Final = 1
DESCRIPTION_FORMAT: Final = 2

_LABELS: Final = {
    DESCRIPTION_FORMAT_BASE: b"pybk ledger description 1\0",
    DESCRIPTION_FORMAT: b"pybk ledger description 2\0",
}
_HEADER_BYTES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerDescription:
    """The immutable part of a ledger's metadata; ``LedgerMetadata`` explains the fields in full.

    Attributes:
        ledger_id: The ledger.
        ledger_type: The application's name for its purpose.
        storage_hints: The tiers that the application wants its entries on.
        write_flags: The write flags of its entries.
        digest_type: The digest of its entries.
        ensemble_size: Bookies of an ensemble.
        write_quorum: Bookies that an entry is written to.
        ack_quorum: Bookies that acknowledge an entry.
        creation_time_ns: The time when it was created.
        creation_sequence: The number of ledgers that were created before it.
        custom_digest: SHA-256 of its custom metadata.
        advanced: Whether the application chooses the entry ids.
        key_salt: The salt that its keys are derived with.
        key_epoch: The generation of its keys.
        verifier: A public key against which a password, and signatures made with it, are verified.
        key_format: The number of the key format, which determines the properties of the ledger on which its keys
            depend.
        custom_metadata: Its custom metadata; None for a ledger of key format 0, whose description has the digest alone.
    """

    ledger_id: int
    ledger_type: LedgerType
    storage_hints: frozenset[StorageHint]
    write_flags: WriteFlag
    digest_type: DigestType
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    creation_time_ns: int
    creation_sequence: int
    custom_digest: bytes = field(repr=False)
    advanced: bool
    key_salt: bytes = field(repr=False)
    key_epoch: int
    verifier: bytes = field(repr=False)
    key_format: int = 0
    custom_metadata: Mapping[str, bytes] | None = field(default=None, hash=False)

    @classmethod
    def of(cls, metadata: LedgerMetadata) -> Self:
        """Return the description of a ledger."""
        values = {name: getattr(metadata, name) for name in _NAMES if name != "custom_digest"}
        custom = metadata.custom_metadata
        if metadata.key_format:
            values |= {"key_format": metadata.key_format, "custom_metadata": custom}
        return cls(custom_digest=_digest(custom), **values)

    def encode(self, mac_key: bytes | None) -> bytes:
        """Encode as ``format u8 | MAC size u8 | MAC | JSON``: always the same bytes for the same ledger and key.

        Args:
            mac_key: The cluster's metadata key, None without a cluster secret.

        Raises:
            UsageError: The result has more than ``DESCRIPTION_BYTES_MAX`` bytes (format 1:
                ``DESCRIPTION_BYTES_MAX_BASE``).
        """
        values = {name: getattr(self, name) for name in _NAMES}
        values["ledger_type"] = str(self.ledger_type)
        values["storage_hints"] = sorted(hint.value for hint in self.storage_hints)
        for name in _ENUMS:
            values[name] = values[name].value
        for name in _BYTES:
            values[name] = to_base64(values[name])
        number = DESCRIPTION_FORMAT_BASE
        if self.custom_metadata is not None:
            number = DESCRIPTION_FORMAT
            del values["custom_digest"]
            values["key_format"] = self.key_format
            values["custom_metadata"] = {key: to_base64(value) for key, value in self.custom_metadata.items()}
        body = encode_json(values)
        mac = b"" if mac_key is None else mac_of(mac_key, _LABELS[number], body)
        data = bytes((number, len(mac))) + mac + body
        limit = DESCRIPTION_BYTES_MAX_BASE if number == DESCRIPTION_FORMAT_BASE else DESCRIPTION_BYTES_MAX
        if len(data) > limit:
            raise UsageError(
                f"ledger {self.ledger_id}: its description has {len(data)} bytes; the limit is {limit}: use a shorter "
                "ledger type or less custom metadata"
            )
        return data

    @classmethod
    def decode(cls, data: bytes, mac_keys: Sequence[bytes] | None, *, where: str) -> Self:
        """Decode a result of ``encode``, and verify its MAC.

        Args:
            data: The bytes.
            mac_keys: The metadata keys of all secrets that the cluster ever had, because a description never changes;
                None without a cluster secret.
            where: The source of the bytes, for error messages.

        Raises:
            UnsupportedFormatError: The bytes have a format of a newer pybk.
            MetadataForgedError: They were made with none of the cluster's secrets.
            CorruptError: They are not a description.
        """
        if not _HEADER_BYTES < len(data) <= DESCRIPTION_BYTES_MAX:
            raise CorruptError(f"{where}: {len(data)} bytes; a ledger's description has 3 to {DESCRIPTION_BYTES_MAX}")
        if data[0] not in _LABELS:
            raise UnsupportedFormatError(
                f"{where}: ledger description of format {data[0]}; this pybk reads formats up to {DESCRIPTION_FORMAT}: "
                "install a newer pybk"
            )
        body = description_body(data)
        mac = data[_HEADER_BYTES : len(data) - len(body)]
        expected = [b""] if mac_keys is None else (mac_of(key, _LABELS[data[0]], body) for key in mac_keys)
        if data[1] not in (0, MAC_BYTES) or not any(hmac.compare_digest(each, mac) for each in expected):
            raise MetadataForgedError(
                f"{where}: the ledger's description was not made with the cluster secret that is given here; check the "
                "secret here and at the sender"
            )
        make = cls._from_values_base if data[0] == DESCRIPTION_FORMAT_BASE else cls._from_values
        return decode_json(body, make, where=where)

    @classmethod
    def _from_values(cls, values: dict[str, Any]) -> Self:
        """Decode the values of format 2."""
        key_format, custom = values.pop("key_format"), values.pop("custom_metadata")
        if type(key_format) is not int or key_format < 1 or not isinstance(custom, dict):
            raise ValueError("key_format is not a whole number from 1 up, or custom_metadata not an object")
        decoded = {key: from_base64(value) for key, value in custom.items()}
        values["custom_digest"] = to_base64(_digest(decoded))
        return replace(cls._from_values_base(values), key_format=key_format, custom_metadata=decoded)

    @classmethod
    def _from_values_base(cls, values: dict[str, Any]) -> Self:
        if values.keys() != frozenset(_NAMES):
            raise ValueError(f"missing or unknown names: {sorted(values.keys() ^ frozenset(_NAMES))}")
        for name in _INTS:
            if type(values[name]) is not int:
                raise ValueError(f"{name} is not a whole number")
        if type(values["advanced"]) is not bool or not isinstance(values["storage_hints"], list):
            raise ValueError("advanced is not a boolean, or storage_hints not a list")
        for name in _BYTES:
            values[name] = from_base64(values[name])
        values["ledger_type"] = LedgerType(values["ledger_type"])
        values["storage_hints"] = frozenset(map(StorageHint, values["storage_hints"]))
        values["write_flags"] = WriteFlag(values["write_flags"])
        values["digest_type"] = DigestType(values["digest_type"])
        return cls(**values)


def description_body(encoded: bytes) -> bytes:
    """Return the content of an encoded description without the MAC, which depends on the secret of its time."""
    return encoded[_HEADER_BYTES + encoded[1] :]


_NAMES: Final = tuple(
    field.name for field in fields(LedgerDescription) if field.name not in ("key_format", "custom_metadata")
)
_BYTES: Final = ("custom_digest", "key_salt", "verifier")
_ENUMS: Final = ("digest_type", "write_flags")
_INTS: Final = (
    *("ledger_id", "ensemble_size", "write_quorum", "ack_quorum", "creation_time_ns", "creation_sequence"),
    *("key_epoch", *_ENUMS),
)


def _digest(custom: Mapping[str, bytes]) -> bytes:
    return hashlib.sha256(encode_json({key: to_base64(value) for key, value in custom.items()})).digest()
