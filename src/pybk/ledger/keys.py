"""The keys of ledgers, derived from their passwords or secrets, and the seals that are made with them.

A password becomes a ledger's keys in two steps:

    root  = scrypt(password, the store's salt, the store's cost)     some 400 ms and 128 MiB, cached by ``KeyRing``
    key   = HKDF-SHA256(root, the ledger's salt, purpose | scope)     some microseconds each

A secret is random, so it is the root itself, without scrypt; the root of a ledger that has neither is empty.

The scope is the ledger's id, its key epoch and the id of its store or cluster, so one password gives each ledger other
keys. With key format 1 it also holds the digest type and the write flags (the *binding*): if somebody changes those in
the metadata, the keys differ and the password fails. See ``docs/reference/format.md``, "Ledger metadata".

A ledger's metadata stores the verifier alone. The verifier and the other keys are derived separately from the root, so
none can be computed from another.

A seal proves to holders of a ledger's password that its kind and end were not changed. It is a MAC over the ledger's
immutable metadata, last entry id, length and last digest, under a key that is derived from the password. The writer
makes it when it closes the ledger, or recovery does. It is deterministic: two recoveries that find the same end make
the same seal. See ``docs/concepts/seals.md`` and ``docs/reference/format.md``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import threading
from binascii import b2a_base64
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hmac import digest as hmac_digest
from struct import Struct
from typing import TYPE_CHECKING, Final

from pybk.credentials import PASSWORD, SECRET, Credentials, KeyKind, checked_password
from pybk.deferral import LateModule
from pybk.errors import LedgerUnsealedError, OutOfMemoryError, SealMismatchError, UsageError
from pybk.flags import WriteFlag
from pybk.ledger.digest import KEY_BYTES, DigestType, EntryDigest, entry_digest
from pybk.ledger.entry import ENTRY_HEADER_BYTES, EntryBatch
from pybk.ledger.ledger_metadata import KEY_FORMAT_MAX, LedgerMetadata, LedgerState, key_kind

if TYPE_CHECKING:
    from cryptography.hazmat.primitives import keywrap
    from cryptography.hazmat.primitives.kdf import scrypt
else:
    keywrap = LateModule("cryptography.hazmat.primitives.keywrap")
    scrypt = LateModule("cryptography.hazmat.primitives.kdf.scrypt")

logger = logging.getLogger(__name__)

SALT_BYTES_MIN: Final = 16

SCRYPT_COST: Final = 1 << 17
"""scrypt's N of new stores and clusters. With r = 8, one derivation takes 128 MiB. Existing ones keep theirs."""

SCRYPT_COST_MAX: Final = 1 << 20
"""The highest cost that is accepted. The cost comes from a file, and each unit takes 1 KiB of memory."""

_CACHED_ROOTS_MAX: Final = 64

_LABELS: Final = {KeyKind.PASSWORD: b"pybk/2", KeyKind.SECRET: b"pybk/3", KeyKind.NOTHING: b"pybk/4"}
_LABEL_UNBOUND: Final = b"pybk/1"


@dataclass(frozen=True, slots=True, eq=False)
class LedgerKeys:
    """The keys of one ledger in one key epoch.

    Attributes:
        entry_key: Key of the entries' HMAC, ``KEY_BYTES`` bytes; never stored.
        verifier: Shows whether a password is the ledger's, ``KEY_BYTES`` bytes; stored in the ledger's metadata.
        lac_key: Key that authenticates a last add confirmed that no entry carries; never stored.
        right_key: Seed of the key pair that proves the right to write to bookies; never stored.
    """

    entry_key: bytes = field(repr=False)
    verifier: bytes = field(repr=False)
    lac_key: bytes = field(repr=False)
    right_key: bytes = field(repr=False)
    _derive: Callable[[bytes], bytes] = field(repr=False)

    def seal_key(self) -> bytes:
        """Derive the key of the ledger's seal; never stored.

        Cost: 5 microseconds. Most handles never make or check a seal, so the key is not derived with the others.
        """
        return self._derive(b"seal")


class KeyRing:
    """Derives the keys of the ledgers of one store or cluster from passwords and secrets.

    Caches scrypt's result for each password, never the password itself, nor a secret.

    Args:
        store_id: Identity of the store or cluster; the same password gives other keys in another one.
        salt: The store's scrypt salt, at least ``SALT_BYTES_MIN`` bytes.
        cost: scrypt's N, a power of two up to ``SCRYPT_COST_MAX``; a derivation takes this many KiB of memory.

    Raises:
        UsageError: The salt is too short, or the cost is not such a number.

    Threads: any.
    """

    __slots__ = ("_cache_key", "_cost", "_lock", "_roots", "_salt", "_store_id")

    def __init__(self, store_id: bytes, salt: bytes, *, cost: int = SCRYPT_COST) -> None:
        if len(salt) < SALT_BYTES_MIN:
            raise UsageError(f"the store's salt has {len(salt)} bytes; it takes at least {SALT_BYTES_MIN} random ones")
        if not 2 <= cost <= SCRYPT_COST_MAX or cost & (cost - 1):
            raise UsageError(f"scrypt cost {cost} is not a power of two from 2 to {SCRYPT_COST_MAX}; use {SCRYPT_COST}")
        self._store_id = store_id
        self._salt = salt
        self._cost = cost
        # Held during scrypt, too, so that many threads with one password run one scrypt.
        self._lock = threading.Lock()
        self._cache_key = secrets.token_bytes(KEY_BYTES)
        # Guarded by _lock. Keyed by a MAC of the password, least recently used first, at most _CACHED_ROOTS_MAX.
        self._roots: OrderedDict[bytes, bytes] = OrderedDict()

    def __repr__(self) -> str:
        """Name the store; never a key."""
        return f"<KeyRing of store {self._store_id.hex()}>"

    def root(self, password: bytes) -> bytes:
        """Return the key that all keys of this password are derived from; keep it in memory only.

        Args:
            password: Any bytes; may be empty.

        Returns:
            ``KEY_BYTES`` bytes.

        Raises:
            UsageError: The password is not bytes.
            OutOfMemoryError: There is no memory for scrypt.

        Cost: The first time for a password, with the cost of new stores, some 400 ms and 128 MiB (1 KiB for each unit
            of the cost), which are free again afterwards; then a microsecond. The last 64 passwords are cached.
            Other threads wait meanwhile, so many threads with one password run one scrypt.
        """
        checked_password(password)
        # The cache key is random and in memory only, so the cache's keys do not help to guess a password.
        name = hashlib.blake2b(password, key=self._cache_key, digest_size=32).digest()
        with self._lock:
            root = self._roots.get(name)
            if root is None:
                root = self._derive_root(password)
                self._roots[name] = root
                if len(self._roots) > _CACHED_ROOTS_MAX:
                    self._roots.popitem(last=False)
            else:
                self._roots.move_to_end(name)
        return root

    def adopt(self, other: KeyRing) -> None:
        """Adopt the roots that another key ring of the same store has derived; its passwords then cost no scrypt here.

        Args:
            other: The key ring of the previous manager; nothing is adopted if it belongs to another store.
        """
        if (other._store_id, other._salt, other._cost) != (self._store_id, self._salt, self._cost):
            return
        with other._lock:
            cache_key, roots = other._cache_key, other._roots.copy()
        with self._lock:
            self._cache_key, self._roots = cache_key, roots

    def _derive_root(self, password: bytes) -> bytes:
        try:
            return scrypt.Scrypt(salt=self._salt, length=KEY_BYTES, n=self._cost, r=8, p=1).derive(password)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"deriving keys from a password takes {self._cost >> 10} MiB (scrypt with N = {self._cost}), which "
                "this process cannot get; free memory, or raise its limit, and try again"
            ) from error

    def ledger_keys(
        self,
        given: bytes,
        ledger_id: int,
        ledger_salt: bytes,
        key_epoch: int,
        *,
        kind: KeyKind = KeyKind.PASSWORD,
        binding: tuple[bytes, ...] = (),
    ) -> LedgerKeys:
        """Derive the keys of a ledger.

        Args:
            given: The ledger's password or secret, according to its kind; empty for a ledger that has neither.
            ledger_id: The ledger.
            ledger_salt: The random salt in its metadata.
            key_epoch: The key epoch in its metadata, at least 0.
            kind: What its keys are derived from.
            binding: Immutable metadata that the keys depend on; empty for ledgers of key format 0.

        Raises:
            UsageError: The password is not bytes.
            OutOfMemoryError: As ``root``.

        Cost: 20 microseconds; for a password that of ``root``, too.
        """
        root = self.root(given) if kind is KeyKind.PASSWORD else given
        scope = (ledger_id.to_bytes(8, "big", signed=True), key_epoch.to_bytes(8, "big"), self._store_id, *binding)
        label = _sized((_LABELS[kind] if binding else _LABEL_UNBOUND,))
        derive = partial(_expand, hmac_digest(ledger_salt, root, "sha256"), label, _sized(scope))
        return LedgerKeys(derive(b"entry-mac"), derive(b"verifier"), derive(b"lac-mac"), derive(b"write-auth"), derive)


def _sized(parts: tuple[bytes, ...]) -> bytes:
    """Join parts, each after its size, so that two different lists of parts never give the same bytes."""
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])


def _expand(extracted: bytes, label: bytes, scope: bytes, purpose: bytes) -> bytes:
    """Derive the key of a purpose: HKDF's step Expand (RFC 5869), whose first block is the whole key.

    The step Extract is the same for all keys of a ledger, so the caller makes it once. It is most of the cost of a
    key in a library's HKDF.
    """
    return hmac_digest(extracted, label + _sized((purpose,)) + scope + b"\x01", "sha256")


def wrap_key(wrapping: bytes, key: bytes) -> bytes:
    """Return a key that is encrypted and authenticated under another one (AES key wrap, RFC 3394).

    Args:
        wrapping: The key that unwraps the result, ``KEY_BYTES`` bytes, used for nothing else.
        key: The key, ``KEY_BYTES`` bytes.
    """
    return keywrap.aes_key_wrap(wrapping, key)


def unwrap_key(wrapping: bytes, wrapped: bytes) -> bytes | None:
    """Return the key in the result of ``wrap_key``; None if it was not wrapped under this key."""
    try:
        key = keywrap.aes_key_unwrap(wrapping, wrapped)
    except keywrap.InvalidUnwrap:
        return None
    return key if len(key) == KEY_BYTES else None


_LABEL: Final = b"pybk ledger seal 1\0"
_unpack_header = Struct(">qqqq").unpack_from
_pack_id = Struct(">IQI").pack
_pack_kind = Struct(">II II I? IQ IQ I32s I").pack
_pack_end = Struct(">IQ II Iq IQ I").pack
_NO_CUSTOM_HASH: Final = hashlib.sha256(b"{}").digest()
_encode_json = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode

Verifier = Callable[[LedgerKeys], bytes]
"""Returns the verifier of a ledger's keys that metadata stores; ``LedgerBackend.verifier``."""


def keys_of(ring: KeyRing, given: Credentials, metadata: LedgerMetadata) -> LedgerKeys | None:
    """Derive the keys of a ledger as its metadata describes it; None if nothing of its kind is given."""
    value = given.of(metadata.key_kind)
    if value is None:
        return None
    return ring.ledger_keys(
        value,
        metadata.ledger_id,
        metadata.key_salt,
        metadata.key_epoch,
        kind=metadata.key_kind,
        binding=metadata.key_binding,
    )


def unlocked(ring: KeyRing, verifier: Verifier, given: Credentials, metadata: LedgerMetadata) -> LedgerKeys | None:
    """Derive the keys of a ledger, and check that the password or secret is the ledger's.

    Args:
        ring: Derives keys.
        verifier: Returns the verifier of keys that metadata stores.
        given: The password, the secret, or both.
        metadata: The ledger's metadata.

    Returns:
        The keys; None if what is given is wrong, or nothing of the ledger's kind.

    Raises:
        SealMismatchError: The password or secret is right, but the ledger was created with another digest type, other
            write flags or another key format.

    Cost: As ``KeyRing.ledger_keys``; ten times that for a wrong password.
    """

    def opens(described: LedgerMetadata) -> LedgerKeys | None:
        keys = keys_of(ring, given, described)
        return keys if keys is not None and hmac.compare_digest(verifier(keys), metadata.verifier) else None

    keys = opens(metadata)
    if keys is not None:
        return keys
    for kind in _other_kinds(metadata, given):
        if opens(kind) is not None:
            raise SealMismatchError(
                f"ledger {metadata.ledger_id} was created with digest {kind.digest_type.name}, write flags "
                f"{kind.write_flags!r} and key format {kind.key_format}, but its metadata say "
                f"{metadata.digest_type.name}, {metadata.write_flags!r} and {metadata.key_format}: they were changed; "
                "restore them"
            )
    return None


def _other_kinds(metadata: LedgerMetadata, given: Credentials) -> list[LedgerMetadata]:
    """Return the ledger as it would be with other immutable metadata that its keys may be bound to.

    A password stands for those of key format 0 and 1, the others for one each. The empty password is stretched for a
    ledger alone whose metadata say that it has a password.
    """
    formats = {metadata.key_format, *(each for each in range(KEY_FORMAT_MAX + 1) if given.of(key_kind(each)))}
    if key_kind(metadata.key_format) is KeyKind.PASSWORD:
        formats |= {0, 1}
    kinds = [
        replace(metadata, digest_type=digest_type, write_flags=flags, key_format=key_format)
        for key_format in sorted(formats - {0})
        for digest_type in DigestType
        for flags in {WriteFlag.NONE, *WriteFlag}
    ]
    if 0 in formats:
        kinds.append(replace(metadata, key_format=0))
    return [kind for kind in kinds if kind != metadata]


def wrong_credentials(kind: KeyKind, given: Credentials, what: str) -> str:
    """Return a sentence with the reason why credentials do not open a ledger.

    Args:
        kind: The kind of the ledger.
        given: The credentials that were given.
        what: The name of the ledger or log, such as "ledger 5" or "log 'orders'".
    """
    in_a_shell = f"in a shell: --{kind.value}-file FILE"
    if kind is KeyKind.NOTHING:
        word = KeyKind.SECRET.value if given.secret is not None else KeyKind.PASSWORD.value
        variable = PASSWORD if given.secret is None else SECRET
        return (
            f"{what} has no {word}, and one was given: unset {variable} and {variable}_FILE, or leave {word}=... out "
            f"(in a shell: --{word}-file), and pass insecure=True"
        )
    if kind is KeyKind.PASSWORD and given.secret is not None and not given.password:
        return (
            f"{what} has a password, not a secret: pass password=... ({in_a_shell}), with the secret if new ledgers "
            "are to have that"
        )
    if kind is KeyKind.SECRET and given.secret is None and given.password:
        return f"{what} has a secret, not a password: pass secret=... ({in_a_shell}) or set {SECRET}_FILE"
    if not given:
        variable = SECRET if kind is KeyKind.SECRET else PASSWORD
        return f"{what} has a {kind.value}, and none was given: pass {kind.value}=... ({in_a_shell}) or set {variable}"
    return f"the {kind.value} is not that of {what}: give the right one ({in_a_shell})"


class LedgerSeal:
    """Makes and checks the seal of one ledger.

    Args:
        keys: The ledger's keys.
        digest: Checks the ledger's entries.

    Threads: any.
    """

    def __init__(self, keys: LedgerKeys, digest: EntryDigest) -> None:
        self._keys = keys
        self.digest: Final = digest

    def sealed(self, closed: LedgerMetadata, last_entry: bytes | memoryview) -> LedgerMetadata:
        """Return the metadata of a closed ledger with its seal.

        Args:
            closed: The metadata to be written; state, last entry id and length are final.
            last_entry: The encoded last entry, or its header and digest; nothing for an empty ledger. The caller has
                checked its digest.

        Returns:
            The metadata; without a seal, and a warning in the log, if ``last_entry`` is another entry than the last.

        Cost: Two HMACs.
        """
        if not names(last_entry, closed):
            logger.warning(
                "ledger %d is closed without a seal: its last entry is not entry %d with %d bytes in all; check the "
                "ledger with verify",
                closed.ledger_id,
                closed.last_entry_id,
                closed.length,
            )
            return closed.with_seal(b"", b"")
        last_digest = b""
        if closed.last_entry_id >= 0:
            last_digest = bytes(last_entry[ENTRY_HEADER_BYTES : ENTRY_HEADER_BYTES + self.digest.size])
        return closed.with_seal(self._seal_of(closed, last_digest), last_digest)

    def check(self, metadata: LedgerMetadata) -> None:
        """Check the seal of a sealed ledger.

        Raises:
            SealMismatchError: The seal does not match the ledger's kind or end.
        """
        right = metadata.state is LedgerState.CLOSED and hmac.compare_digest(
            self._seal_of(metadata, metadata.last_digest), metadata.seal
        )
        if not right:
            raise SealMismatchError(
                f"ledger {metadata.ledger_id}: the seal is not that of a {metadata.digest_type.name} ledger that ends "
                f"with entry {metadata.last_entry_id} and {metadata.length} bytes: its metadata were changed after it "
                "was sealed; restore them"
            )

    def require(self, metadata: LedgerMetadata, remedy: str) -> None:
        """Check that a ledger is closed and sealed.

        Args:
            metadata: The metadata of the ledger.
            remedy: The remedy in the error for a ledger without a seal.

        Raises:
            LedgerUnsealedError: The ledger has no seal.
            SealMismatchError: As ``check``.
        """
        if not metadata.sealed:
            raise LedgerUnsealedError(
                f"ledger {metadata.ledger_id} is {metadata.state.value} and not sealed, and require_seal is given; "
                f"{remedy}"
            )
        self.check(metadata)

    @staticmethod
    def check_end(metadata: LedgerMetadata, proven: int) -> None:
        """Check that a ledger without a seal was not closed short of an entry that was confirmed.

        Args:
            metadata: The metadata of the closed ledger.
            proven: The highest last add confirmed that authentic entries prove.

        Raises:
            SealMismatchError: It is beyond the end.
        """
        if proven > metadata.last_entry_id:
            raise SealMismatchError(
                f"ledger {metadata.ledger_id} is closed at entry {metadata.last_entry_id}, but an authentic entry of "
                f"its bookies proves that entry {proven} was confirmed: somebody without its password closed it short; "
                "restore its metadata while the bookies have the entries"
            )

    def check_last(self, metadata: LedgerMetadata, batch: EntryBatch) -> None:
        """Check that a batch that holds a sealed ledger's last entry holds the one that was sealed.

        Raises:
            SealMismatchError: It is a different entry.
        """
        if int(batch.entry_ids[-1]) == metadata.last_entry_id:
            self.check_digest(metadata, batch.buffer, int(batch.offsets[-1]))

    @staticmethod
    def check_digest(metadata: LedgerMetadata, buffer: memoryview, start: int) -> None:
        """Check that the encoded entry at ``buffer[start:]`` carries the digest of a sealed ledger's last entry.

        Raises:
            SealMismatchError: It carries another.
        """
        at = start + ENTRY_HEADER_BYTES
        if bytes(buffer[at : at + len(metadata.last_digest)]) != metadata.last_digest:
            raise SealMismatchError(
                f"ledger {metadata.ledger_id}: entry {metadata.last_entry_id}, its last, is not the one that was "
                "sealed; restore the file it lies in"
            )

    def _seal_of(self, metadata: LedgerMetadata, last_digest: bytes) -> bytes:
        # Each part follows its length. Parts of fixed length are packed together with the length of the next part.
        ledger_type, salt = str(metadata.ledger_type).encode(), metadata.key_salt
        content = b"".join(
            (
                _LABEL,
                _pack_id(8, metadata.ledger_id, len(ledger_type)),
                ledger_type,
                _pack_kind(
                    *(4, metadata.write_flags, 4, metadata.digest_type, 1, metadata.advanced),
                    *(8, metadata.creation_time_ns, 8, metadata.creation_sequence),
                    *(32, _custom_hash(metadata.custom_metadata), len(salt)),
                ),
                salt,
                _pack_end(
                    *(8, metadata.key_epoch, 4, metadata.key_format),
                    *(8, metadata.last_entry_id, 8, metadata.length, len(last_digest)),
                ),
            )
        )
        return hmac.digest(self._keys.seal_key(), content + last_digest, "sha256")


def _custom_hash(custom_metadata: Mapping[str, bytes]) -> bytes:
    if not custom_metadata:
        return _NO_CUSTOM_HASH
    custom = {key: b2a_base64(value, newline=False).decode() for key, value in custom_metadata.items()}
    return hashlib.sha256(_encode_json(custom).encode()).digest()


def end_is_sealed(metadata: LedgerMetadata) -> bool | None:
    """Return whether a closed ledger has a seal; None if the ledger is not closed, or has no password.

    A ledger without a verifier has no password: the ledger is a store's own, or a bookie's part of one. This does not
    check the seal, which needs the password.
    """
    if metadata.state is not LedgerState.CLOSED or not metadata.verifier:
        return None
    return metadata.sealed


def names(entry: bytes | memoryview, closed: LedgerMetadata) -> bool:
    """Return whether an encoded entry, or its header, is the last one of a closed ledger by id and length."""
    if closed.last_entry_id < 0:
        return not closed.length
    if len(entry) < ENTRY_HEADER_BYTES:
        return False
    ledger_id, entry_id, _, length = _unpack_header(entry)
    return (ledger_id, entry_id, length) == (closed.ledger_id, closed.last_entry_id, closed.length)


def seal_of(ring: KeyRing, verifier: Verifier, given: Credentials, metadata: LedgerMetadata) -> LedgerSeal | None:
    """Return the checker of a ledger's seal and entries, None if what is given is wrong; raises as ``unlocked``."""
    keys = unlocked(ring, verifier, given, metadata)
    if keys is None:
        return None
    return LedgerSeal(keys, entry_digest(metadata.digest_type, metadata.ledger_id, keys.entry_key))
