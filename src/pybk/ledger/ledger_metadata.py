"""The metadata of a ledger, and their encoding."""

from __future__ import annotations

import json
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, Self

from pybk.credentials import KeyKind
from pybk.errors import CorruptError, IllegalOperationError, UnsupportedFormatError, UsageError
from pybk.feature_level import FeatureLevel
from pybk.flags import LedgerType, StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.values import INT64_MAX, FrozenDict

METADATA_FORMAT: Final = 1
FRAGMENTS_FORMAT: Final = 2
"""Format of metadata with fragments, which is that of format 1 and the fragments."""

SEALS_FORMAT: Final = 3
"""Format of metadata with a key format or a seal: that of format 2, and the four fields from ``key_format`` on."""

DEFAULT_ENSEMBLE_SIZE: Final = 3
"""The number of bookies of a ledger unless its creator gives another one."""

DEFAULT_WRITE_QUORUM: Final = 3
"""The number of bookies that get each entry, unless its creator gives another one."""

DEFAULT_ACK_QUORUM: Final = 2
"""The number of bookies that have to acknowledge an entry, unless its creator gives another one."""

_KEY_KINDS: Final = (KeyKind.PASSWORD, KeyKind.PASSWORD, KeyKind.SECRET, KeyKind.NOTHING)
"""The kind of value from which keys are derived, by key format."""

KEY_FORMAT_MAX: Final = len(_KEY_KINDS) - 1
SEAL_BYTES: Final = 32
LAST_DIGEST_BYTES_MAX: Final = 64

INSTANCE_BYTES: Final = 16
CUSTOM_METADATA_BYTES_MAX: Final = 64 << 10
"""Bound on the keys, as UTF-8, and values of a ledger's custom metadata together."""

SYSTEM_METADATA_BYTES_MAX: Final = 256 << 10
"""The same bound on keys that begin with a full stop, which pybk itself uses in the ledgers of a bookie's store."""

DESCRIPTION_BYTES_MAX: Final = (4 << 10) + 2 * CUSTOM_METADATA_BYTES_MAX
"""Bound on the encoded description of a ledger, which bookies are shown and keep."""

DESCRIPTION_BYTES_MAX_BASE: Final = 4 << 10
"""The same for a ledger of key format 0, whose description has no custom metadata."""

_INTS: Final = (
    ("ledger_id", 0),
    ("ensemble_size", 1),
    ("write_quorum", 1),
    ("ack_quorum", 1),
    ("last_entry_id", -1),
    ("length", 0),
    ("creation_time_ns", 0),
    ("creation_sequence", 0),
    ("key_epoch", 0),
    ("version", 0),
    ("key_format", 0),
)
_SEAL_KEYS: Final = frozenset({"key_format", "seal", "last_digest", "extra"})
_END_INTS: Final = tuple(each for each in _INTS if each[0] in ("last_entry_id", "length", "version"))
_OLD_INTS: Final = tuple(name for name, _ in _INTS if name not in _SEAL_KEYS)
_KEYS: Final = frozenset(
    {
        *_OLD_INTS,
        *("advanced", "custom_metadata", "digest_type", "key_salt", "ledger_type", "state"),
        *("storage_hints", "tier", "verifier", "write_flags"),
    }
)
_KEYS_OF: Final = {
    METADATA_FORMAT: _KEYS,
    FRAGMENTS_FORMAT: _KEYS | {"fragments"},
    SEALS_FORMAT: _KEYS | {"fragments"} | _SEAL_KEYS,
}


class Bookie(NamedTuple):
    """A bookie as ensembles name it; its address is in its registration, so it may change.

    Attributes:
        bookie_id: The bookie's name, which another bookie can take over.
        instance: ``INSTANCE_BYTES`` random bytes, made with the bookie's directory: a bookie that lost its directory
            gets another instance.
    """

    bookie_id: str
    instance: bytes

    def __str__(self) -> str:
        """Return the bookie's name, with enough of the instance to distinguish it from others of that name."""
        return f"{self.bookie_id}@{self.instance[:4].hex()}"


class Fragment(NamedTuple):
    """A range of a ledger's entries that one ensemble holds; it ends before the first entry of the next fragment.

    Attributes:
        first_entry_id: The first entry.
        ensemble: The bookies; the index of a bookie is its place.
    """

    first_entry_id: int
    ensemble: tuple[Bookie, ...]


class LedgerState(StrEnum):
    """The state of a ledger in its life."""

    OPEN = "open"
    """It accepts entries."""

    IN_RECOVERY = "in_recovery"
    """A recovery looks for its end."""

    CLOSED = "closed"
    """Its end is final."""


_MEMBERS: Final = (
    ("state", LedgerState),
    ("tier", StorageHint),
    ("write_flags", WriteFlag),
    ("digest_type", DigestType),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMetadata:
    """The metadata of a ledger.

    Attributes:
        ledger_id: The ledger, from 0 up.
        state: Whether the ledger is open, in recovery or closed.
        ledger_type: The ledger type, by which metrics are split.
        storage_hints: The tiers that the application wants for the entries.
        write_flags: How the entries are written.
        digest_type: The digest that the entries carry.
        ensemble_size: Number of bookies in an ensemble.
        write_quorum: Number of bookies that an entry is written to.
        ack_quorum: Number of bookies that must acknowledge an entry.
        last_entry_id: The last entry, -1 for none; only valid if the state is CLOSED.
        length: The payload bytes of all entries; only valid if the state is CLOSED.
        creation_time_ns: The creation time, in nanoseconds since 1970.
        creation_sequence: The number of ledgers that the store had created before this one.
        custom_metadata: The application's metadata, at most ``CUSTOM_METADATA_BYTES_MAX`` bytes; immutable.
        tier: The tier of the entries.
        advanced: Whether the application assigns the entry ids.
        key_salt: The random salt from which the ledger's keys are derived.
        key_epoch: The generation of the ledger's keys.
        verifier: The value by which a password is checked.
        version: A number that grows by one with each change.
        fragments: The fragments with their bookies, ascending; empty for a ledger of an embedded store.
        key_format: What the keys depend on: 0 for a password, id, epoch and salt; 1 for digest type and write flags as
            well; 2 and 3 the same with a secret, or with nothing, instead of a password.
        seal: MAC of the closed ledger's kind and end under a key from its password; empty for an unsealed ledger.
        last_digest: Digest of a sealed ledger's last entry; empty if it has no entries, or entries without digests.
        extra: Reserved: fields that a later version has added, kept unchanged.

    Raises:
        UsageError: A value is of another type or out of its range.

    Threads: any.
    """

    ledger_id: int
    state: LedgerState = LedgerState.OPEN
    ledger_type: LedgerType = field(default_factory=LedgerType)
    storage_hints: frozenset[StorageHint] = frozenset()
    write_flags: WriteFlag = WriteFlag.NONE
    digest_type: DigestType
    ensemble_size: int = 1
    write_quorum: int = 1
    ack_quorum: int = 1
    last_entry_id: int = -1
    length: int = 0
    creation_time_ns: int
    creation_sequence: int
    custom_metadata: Mapping[str, bytes] = field(default_factory=dict, hash=False)
    tier: StorageHint
    advanced: bool = False
    key_salt: bytes = field(repr=False)
    key_epoch: int = 0
    verifier: bytes = field(repr=False)
    version: int = 0
    fragments: tuple[Fragment, ...] = ()
    key_format: int = 0
    seal: bytes = field(default=b"", repr=False)
    last_digest: bytes = field(default=b"", repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raise UsageError if a value is not valid."""
        _check_ints(self, _INTS)
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum:
            raise UsageError(
                f"ensemble {self.ensemble_size}, write quorum {self.write_quorum}, ack quorum {self.ack_quorum}: none "
                "may be larger than the one before it"
            )
        if type(self.advanced) is not bool:
            raise UsageError(f"advanced is {self.advanced!r}; it takes True or False")
        for name in ("key_salt", "verifier"):
            if type(getattr(self, name)) is not bytes:
                raise UsageError(f"{name} takes bytes, not {type(getattr(self, name)).__name__}")
        if self.key_format > KEY_FORMAT_MAX:
            raise UsageError(
                f"key_format is {self.key_format}; this pybk derives keys of formats 0 to {KEY_FORMAT_MAX}"
            )
        _check_seal(self.seal, self.last_digest)
        put = object.__setattr__
        # Metadata are mostly copies of other metadata, whose mappings and fragments were checked before.
        if type(self.extra) is not FrozenDict:
            if not isinstance(self.extra, Mapping):
                raise UsageError(f"extra takes a mapping, not {type(self.extra).__name__}")
            put(self, "extra", FrozenDict(self.extra))
        put(self, "ledger_type", LedgerType(self.ledger_type))
        put(self, "custom_metadata", _checked_custom(self.custom_metadata))
        put(self, "fragments", _checked_fragments(self.fragments, self.ensemble_size))
        try:
            for name, kind in _MEMBERS:
                value = getattr(self, name)
                if type(value) is not kind:
                    put(self, name, kind(value))
            put(self, "storage_hints", frozenset(map(StorageHint, self.storage_hints)))
        except ValueError as error:
            raise UsageError(f"ledger {self.ledger_id}: {error}") from error

    @property
    def sealed(self) -> bool:
        """True if the ledger's kind and end are sealed; opening the ledger with its password checks the seal."""
        return bool(self.seal)

    def closed_at(self, last_entry_id: int, length: int) -> Self:
        """Return the metadata of the ledger in state CLOSED, with the next version.

        Args:
            last_entry_id: The last entry, -1 for none.
            length: The payload bytes of all entries.

        Raises:
            UsageError: A value is of another type or out of its range.

        Cost: 5 microseconds, a third of ``dataclasses.replace``, which checks the other values again.
        """
        state, version = LedgerState.CLOSED, self.version + 1
        made = self._copy(state=state, last_entry_id=last_entry_id, length=length, version=version)
        _check_ints(made, _END_INTS)
        return made

    def with_seal(self, seal: bytes, last_digest: bytes) -> Self:
        """Return the same metadata with another seal, or without one if both values are empty.

        Raises:
            UsageError: A value is of another type or length.

        Cost: As ``closed_at``.
        """
        _check_seal(seal, last_digest)
        return self._copy(seal=seal, last_digest=last_digest)

    def _copy(self, **values: object) -> Self:
        """Return a copy with other values, which the caller has checked."""
        made = object.__new__(type(self))
        put = object.__setattr__
        for name, value in zip(_NAMES, _values(self), strict=True):
            put(made, name, value)
        for name, value in values.items():
            put(made, name, value)
        return made

    @property
    def key_kind(self) -> KeyKind:
        """The kind of value from which the keys are derived."""
        return key_kind(self.key_format)

    @property
    def key_binding(self) -> tuple[bytes, ...]:
        """The bytes on which the keys depend in addition to id, epoch and salt."""
        return key_binding(self.key_format, self.digest_type, self.write_flags)

    def encode(self) -> bytes:
        """Return the metadata as JSON in UTF-8 with sorted keys, bytes as base64.

        The format is the oldest that can represent them: 1 in a store, 2 with fragments, 3 with a key format or a seal.

        Cost: 15 microseconds, and what the custom metadata costs.
        """
        values: dict[str, Any] = {name: getattr(self, name) for name in _OLD_INTS}
        values["format"] = METADATA_FORMAT
        if self.key_format or self.seal or self.last_digest or self.extra:
            values["format"] = SEALS_FORMAT
            values["key_format"] = self.key_format
            values["seal"] = _to_base64(self.seal)
            values["last_digest"] = _to_base64(self.last_digest)
            values["extra"] = dict(self.extra)
            values["fragments"] = []
        if self.fragments:
            values["format"] = max(FRAGMENTS_FORMAT, values["format"])
            values["fragments"] = [
                [fragment.first_entry_id, [[name, _to_base64(instance)] for name, instance in fragment.ensemble]]
                for fragment in self.fragments
            ]
        values["state"] = self.state
        values["ledger_type"] = str(self.ledger_type)
        values["storage_hints"] = sorted(self.storage_hints)
        values["write_flags"] = self.write_flags
        values["digest_type"] = self.digest_type
        values["custom_metadata"] = {key: _to_base64(value) for key, value in self.custom_metadata.items()}
        values["tier"] = self.tier
        values["advanced"] = self.advanced
        values["key_salt"] = _to_base64(self.key_salt)
        values["verifier"] = _to_base64(self.verifier)
        return _encode_json(values).encode()

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Self:
        """Decode the result of ``encode``.

        Args:
            data: The bytes.
            where: The name of the source in errors.

        Raises:
            UnsupportedFormatError: The metadata have another format version.
            CorruptError: The bytes are not valid metadata.

        Cost: 20 microseconds, and what the custom metadata costs.
        """
        try:
            values = json.loads(data.decode(), object_pairs_hook=_unique)
            if not isinstance(values, dict) or type(values.get("format")) is not int:
                raise ValueError("no object with a format")
            if not METADATA_FORMAT <= values["format"] <= SEALS_FORMAT:
                raise UnsupportedFormatError(
                    f"{where}: ledger metadata of format {values['format']}; this pybk reads {METADATA_FORMAT} to "
                    f"{SEALS_FORMAT}: open it with the pybk that wrote it, or newer"
                )
            key_format = values.get("key_format", 0)
            if type(key_format) is int and KEY_FORMAT_MAX < key_format <= INT64_MAX:
                raise UnsupportedFormatError(
                    f"{where}: a ledger of key format {key_format}; this pybk derives keys of formats 0 to "
                    f"{KEY_FORMAT_MAX}: open it with the pybk that wrote it, or newer"
                )
            return cls._from_values(values)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CorruptError(
                f"{where}: {len(data)} bytes are not ledger metadata: {error}; restore the file or the "
                "index it came from"
            ) from error

    @classmethod
    def _from_values(cls, values: dict[str, Any]) -> Self:
        """Return metadata from decoded JSON; raises ValueError or TypeError if it is not valid."""
        keys = _KEYS_OF[values.pop("format")]
        if values.keys() != keys:
            raise ValueError(f"missing or unknown are {sorted(values.keys() ^ keys)}")
        values["fragments"] = [
            Fragment(first, tuple(Bookie(name, _from_base64(instance)) for name, instance in ensemble))
            for first, ensemble in values.get("fragments", ())
        ]
        for name in ("write_flags", "digest_type"):
            if type(values[name]) is not int:
                raise ValueError(f"{name} is not a whole number")
        if not isinstance(values["storage_hints"], list) or not isinstance(values["custom_metadata"], dict):
            raise ValueError("storage_hints is not a list, or custom_metadata is not an object")
        values["custom_metadata"] = {key: _from_base64(value) for key, value in values["custom_metadata"].items()}
        values["key_salt"] = _from_base64(values["key_salt"])
        values["verifier"] = _from_base64(values["verifier"])
        if "seal" in values:
            if not isinstance(values["extra"], dict):
                raise ValueError("extra is not an object")
            values["seal"] = _from_base64(values["seal"])
            values["last_digest"] = _from_base64(values["last_digest"])
        return cls(**values)


def key_kind(key_format: int) -> KeyKind:
    """Return what the keys of a ledger of a key format are derived from."""
    return _KEY_KINDS[key_format]


def key_binding(key_format: int, digest_type: DigestType, write_flags: WriteFlag) -> tuple[bytes, ...]:
    """Return the bytes on which a ledger's keys depend in addition to id, epoch and salt."""
    if not key_format:
        return ()
    return digest_type.to_bytes(4, "big"), write_flags.to_bytes(4, "big")


def new_key_format(kind: KeyKind, level: FeatureLevel, where: str) -> int:
    """Return the key format of a new ledger.

    Args:
        kind: What its keys are derived from.
        level: The feature level of its store or cluster.
        where: The name of the store or cluster, for errors.

    Raises:
        IllegalOperationError: The level has no ledgers with a secret.
    """
    if level >= FeatureLevel.SECRETS:
        return _KEY_KINDS.index(kind, 1)
    if kind is KeyKind.SECRET:
        raise IllegalOperationError(
            f"{where} is at feature level {level.name}, at which ledgers have a password, not a secret; pass "
            "password=..., or raise the level with --finalize of `pybk store upgrade` or `pybk cluster upgrade`, once "
            "no older pybk uses it"
        )
    return 1 if level >= FeatureLevel.SEALS else 0


class LedgerSummary(NamedTuple):
    """A ledger as ``LedgerManager.ledgers`` yields it.

    Attributes:
        metadata: The ledger's metadata.
        last_add_confirmed: The last entry that readers may read, -1 for none. None for a ledger of a cluster that is
            not closed, because only its bookies know the entry; open the ledger to find out.
        length: The payload bytes up to that entry. None if the entry would have to be read: for ledgers of a cluster
            that are not closed, and for ``DEFERRED_FORCE`` ledgers of a store with unconfirmed entries.
    """

    metadata: LedgerMetadata
    last_add_confirmed: int | None
    length: int | None

    @property
    def ledger_id(self) -> int:
        """The ledger."""
        return self.metadata.ledger_id


class PolicyMetadata(NamedTuple):
    """The part of a ledger's metadata that a tier policy needs; see ``LedgerMetadata`` for the values."""

    ledger_id: int
    state: LedgerState
    tier: StorageHint
    length: int
    creation_time_ns: int
    version: int

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Self:
        """Decode a part of the result of ``LedgerMetadata.encode``, in a fifth of the time of decoding it whole.

        Raises:
            CorruptError: The bytes are not metadata of a version that this pybk knows.
        """
        try:
            values = json.loads(data)
            if not METADATA_FORMAT <= values["format"] <= SEALS_FORMAT:
                raise ValueError(f"format {values['format']}")
            return cls(
                values["ledger_id"],
                LedgerState(values["state"]),
                StorageHint(values["tier"]),
                values["length"],
                values["creation_time_ns"],
                values["version"],
            )
        except (ValueError, TypeError, LookupError) as error:
            raise CorruptError(f"{where}: {len(data)} bytes are not ledger metadata: {error}") from error


@lru_cache(16)
def type_marked(ledger_type: str) -> bytes:
    """Return bytes that the result of ``LedgerMetadata.encode`` has for a ledger of a type, and seldom for others."""
    return b'"ledger_type":' + _encode_json(str(ledger_type)).encode()


def decode_type(data: bytes, *, where: str) -> tuple[int, LedgerType]:
    """Return the id and the type in the result of ``LedgerMetadata.encode``; a fifth of the cost of decoding all.

    Raises:
        CorruptError: The bytes are not metadata.
    """
    try:
        values = json.loads(data)
        return values["ledger_id"], LedgerType(values["ledger_type"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise CorruptError(f"{where}: {len(data)} bytes are not ledger metadata: {error}") from error


_NAMES: Final = LedgerMetadata.__slots__
_values = attrgetter(*_NAMES)
_encode_json = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


def _check_ints(metadata: LedgerMetadata, minima: Iterable[tuple[str, int]]) -> None:
    for name, minimum in minima:
        value = getattr(metadata, name)
        if type(value) is not int or not minimum <= value <= INT64_MAX:
            raise UsageError(f"{name} is {value!r}; it takes a whole number from {minimum} to {INT64_MAX}")


def _check_seal(seal: bytes, last_digest: bytes) -> None:
    if type(seal) is not bytes or type(last_digest) is not bytes:
        raise UsageError(f"seal and last_digest take bytes, not {type(seal).__name__} and {type(last_digest).__name__}")
    if len(seal) not in (0, SEAL_BYTES) or len(last_digest) > LAST_DIGEST_BYTES_MAX:
        raise UsageError(
            f"a seal of {len(seal)} bytes and a last digest of {len(last_digest)}; a seal has {SEAL_BYTES} bytes or "
            f"none, a digest at most {LAST_DIGEST_BYTES_MAX}"
        )


def _checked_custom(custom: object) -> Mapping[str, bytes]:
    """Return a copy of custom metadata that cannot be changed."""
    if not isinstance(custom, Mapping):
        raise UsageError(f"custom_metadata takes a mapping of strings to bytes, not {type(custom).__name__}")
    size = system = 0
    for key, value in custom.items():
        if not isinstance(key, str) or not isinstance(value, bytes):
            raise UsageError(f"custom metadata {key!r}: {type(value).__name__}; keys are strings and values bytes")
        try:
            nbytes = len(key.encode()) + len(value)
        except UnicodeEncodeError as error:
            raise UsageError(f"custom metadata key {key!r} cannot be encoded as UTF-8: {error.reason}") from error
        if key.startswith("."):
            system += nbytes
        else:
            size += nbytes
    if system > SYSTEM_METADATA_BYTES_MAX:
        raise UsageError(
            f"custom metadata whose keys begin with '.' has {system} bytes; the limit is {SYSTEM_METADATA_BYTES_MAX}"
        )
    if size > CUSTOM_METADATA_BYTES_MAX:
        raise UsageError(
            f"custom metadata has {size} bytes; the limit is {CUSTOM_METADATA_BYTES_MAX}: put the rest into entries"
        )
    return custom if type(custom) is FrozenDict else FrozenDict(custom)


def _checked_fragments(fragments: Sequence[Any], ensemble_size: int) -> tuple[Fragment, ...]:
    """Return fragments as a tuple; raise UsageError if they are not valid (I5: first entries strictly ascend)."""
    before = -1
    for first, ensemble in fragments:
        in_order = first == 0 if before < 0 else before < first <= INT64_MAX
        if type(first) is not int or not in_order:
            raise UsageError(f"a fragment begins with entry {first!r} after {before}; the first with 0, others ascend")
        before = first
        if len(ensemble) != ensemble_size or len(set(ensemble)) != ensemble_size:
            raise UsageError(f"the fragment from entry {first} needs {ensemble_size} bookies, each once: {ensemble}")
        for name, instance in ensemble:
            if not isinstance(name, str) or not name or len(instance) != INSTANCE_BYTES:
                raise UsageError(f"{name!r} with an instance of {len(instance)} bytes names no bookie")
    return tuple(Fragment(first, tuple(ensemble)) for first, ensemble in fragments)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of a JSON object's pairs; raise ValueError if a key is duplicated."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _to_base64(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode()


def _from_base64(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not base64")
    return a2b_base64(text, strict_mode=True)
