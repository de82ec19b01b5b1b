"""The keys of ledgers, derived from their passwords or secrets.

A password becomes a ledger's keys in two steps:

    root  = scrypt(password, the store's salt, the store's cost)     some 400 ms and 128 MiB, cached by ``KeyRing``
    key   = HKDF-SHA256(root, the ledger's salt, purpose | scope)     some microseconds each

A secret is random, so it is the root itself, without scrypt; the root of a ledger that has neither is empty.

The scope is the ledger's id, its key epoch and the id of its store or cluster, so that one password means other keys
for each ledger. With key format 1 it also holds the digest type and the write flags (the *binding*): if somebody
changes those in the metadata, the keys differ and the password fails. See ``docs/reference/format.md``, "Ledger
metadata".

A ledger's metadata stores the verifier alone. The verifier and the other keys are derived side by side from the root,
so that none can be computed from another.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hmac import digest as hmac_digest
from typing import TYPE_CHECKING, Final

from pybk.credentials import KeyKind, checked_password
from pybk.deferral import LateModule
from pybk.errors import OutOfMemoryError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives import keywrap
    from cryptography.hazmat.primitives.kdf import scrypt
else:
    keywrap = LateModule("cryptography.hazmat.primitives.keywrap")
    scrypt = LateModule("cryptography.hazmat.primitives.kdf.scrypt")

KEY_BYTES: Final = 32
"""Size of every key and of a verifier."""

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
        store_id: Identity of the store or cluster, so that the same password means other keys in another one.
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
            Other threads wait meanwhile, so that many threads with one password run one scrypt.
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
        """Know what another key ring of the same store has derived, so that its passwords cost no scrypt here.

        Args:
            other: The key ring of the manager before; nothing is adopted if it belongs to another store.
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
            given: The ledger's password or secret, as its kind is; empty for a ledger that has neither.
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
        wrapping: The key that it takes to unwrap the result, ``KEY_BYTES`` bytes, used for nothing else.
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
