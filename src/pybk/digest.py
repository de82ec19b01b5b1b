"""Digests that entries carry, and the keys they are made with. See ``docs/format.md``."""

from __future__ import annotations

import hashlib
import secrets
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from hmac import compare_digest
from hmac import digest as hmac_digest
from struct import Struct
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from xxhash import xxh3_64_intdigest

from pybk.entry import ENTRY_HEADER_BYTES, Entry, EntryBatch, gather
from pybk.errors import DigestMismatchError, OutOfMemoryError, UsageError

KEY_BYTES: Final = 32
"""Size of an entry key and of a verifier."""

SALT_BYTES_MIN: Final = 16
SCRYPT_COST: Final = 1 << 17
"""scrypt's N of new stores and clusters; with r = 8, one derivation takes 128 MiB. Existing ones keep theirs."""

SCRYPT_COST_MAX: Final = 1 << 20
"""The highest cost that is taken, as it comes from a file and means 1 KiB of memory each."""

_CACHED_ROOTS_MAX: Final = 64
_HASH_BLOCK_BYTES: Final = 64
_INNER_PAD: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD: Final = bytes(byte ^ 0x5C for byte in range(256))
_VECTOR_MIN: Final = 32
"""From this many entries on, numpy makes or checks the headers of a batch quicker than they are one by one."""

_new_tuple = tuple.__new__
_pack_header = Struct(">qqqq").pack
_unpack_header = Struct(">qqqq").unpack_from
_unpack_ids = Struct(">qq").unpack_from
_pack_crc = Struct(">I").pack
_pack_xxh3 = Struct(">Q").pack


class DigestType(IntEnum):
    """What proves that an entry is what its writer made; codes below 100 are BookKeeper's.

    ``CRC32C`` and ``XXH3`` find damage, ``HMAC_SHA256`` also what somebody changed on purpose, ``NONE`` nothing.
    """

    CRC32C = 3
    NONE = 4
    HMAC_SHA256 = 100
    XXH3 = 101


class EntryDigest(ABC):
    """Makes and checks the bytes that stand before the payloads of one ledger's entries; made by ``entry_digest``.

    Attributes:
        digest_type: Which digest.
        size: Bytes of a digest.
        ledger_id: Whose entries.

    Threads: any; nothing changes after construction.
    """

    __slots__ = ("ledger_id",)

    digest_type: ClassVar[DigestType]
    size: ClassVar[int]

    def __init__(self, ledger_id: int) -> None:
        self.ledger_id: Final = ledger_id

    def __repr__(self) -> str:
        """Name the digest and the ledger; never the key."""
        return f"<EntryDigest {self.digest_type.name}, ledger {self.ledger_id}>"

    def seal(self, entry_id: int, lac: int, length: int, payload: bytes) -> bytes:
        """Make what stands before the payload of an entry.

        Args:
            entry_id: The entry's id.
            lac: The writer's last add confirmed, -1 for none.
            length: Payload bytes of the ledger including this entry.
            payload: The payload.

        Returns:
            Header and digest, ``ENTRY_HEADER_BYTES + size`` bytes.
        """
        header = _pack_header(self.ledger_id, entry_id, lac, length)
        return header + self._digest(header, payload)

    def seal_many(
        self,
        first_entry_id: int,
        lac: int,
        length_before: int,
        payloads: Sequence[bytes],
        lengths: npt.NDArray[np.int64] | None = None,
    ) -> list[bytes]:
        """Make what stands before the payloads of consecutive entries.

        Args:
            first_entry_id: Id of the first.
            lac: The writer's last add confirmed, the same for all.
            length_before: Payload bytes of the ledger before the first of these.
            payloads: The payloads, ``(n,)``.
            lengths: Their sizes in bytes, ``(n,)`` int64, if the caller has them.

        Returns:
            Header and digest of each, ``(n,)`` of ``ENTRY_HEADER_BYTES + size`` bytes.
        """
        count = len(payloads)
        if count < _VECTOR_MIN:
            sealed = []
            length = length_before
            for entry_id, payload in enumerate(payloads, first_entry_id):
                length += len(payload)
                sealed.append(self.seal(entry_id, lac, length, payload))
            return sealed
        headers = np.empty((count, 4), ">i8")
        headers[:, 0] = self.ledger_id
        headers[:, 1] = np.arange(first_entry_id, first_entry_id + count)
        headers[:, 2] = lac
        if lengths is None:
            lengths = np.fromiter(map(len, payloads), np.int64, count)
        headers[:, 3] = lengths.cumsum() + length_before
        return self._seal_headers(headers.view(np.uint8).reshape(count, ENTRY_HEADER_BYTES), payloads)

    def check(self, buffer: memoryview, start: int, end: int, entry_id: int) -> None:
        """Check that ``buffer[start:end]`` is this ledger's entry of this id, as its writer made it.

        Args:
            buffer: Bytes, contiguous.
            start: Where the encoded entry starts, bytes.
            end: Where it ends, bytes.
            entry_id: The id it should have.

        Raises:
            DigestMismatchError: It is not.
        """
        middle = start + ENTRY_HEADER_BYTES
        body = middle + self.size
        if not 0 <= start < body <= end <= len(buffer):
            raise self._mismatch(entry_id, f"{end - start} bytes at {start} of {len(buffer)} are no entry")
        ids = _unpack_ids(buffer, start)
        if ids != (self.ledger_id, entry_id):
            raise self._mismatch(entry_id, f"the bytes say ledger {ids[0]} entry {ids[1]}")
        if not compare_digest(self._digest(buffer[start:middle], buffer[body:end]), buffer[middle:body]):
            raise self._mismatch(entry_id, f"the {self.digest_type.name} digest is not that of the bytes")

    def open(self, buffer: memoryview, start: int, end: int, entry_id: int) -> Entry:
        """Check as ``check`` does, and return the entry, copied out of the buffer.

        Raises:
            DigestMismatchError: It is not the entry that its writer made.
        """
        body = start + ENTRY_HEADER_BYTES + self.size
        if not 0 <= start < body <= end <= len(buffer):
            raise self._mismatch(entry_id, f"{end - start} bytes at {start} of {len(buffer)} are no entry")
        data = buffer[start:end].tobytes()
        ledger_id, found_id, lac, length = _unpack_header(data)
        payload = data[body - start :]
        header, digest = data[:ENTRY_HEADER_BYTES], data[ENTRY_HEADER_BYTES : body - start]
        if (
            found_id != entry_id
            or ledger_id != self.ledger_id
            or not compare_digest(self._digest(header, payload), digest)
        ):
            self.check(memoryview(data), 0, len(data), entry_id)  # says what is wrong
        return _new_tuple(Entry, (ledger_id, entry_id, lac, length, payload))  # see ``decode_entry``

    def check_many(self, batch: EntryBatch) -> None:
        """Check every entry of a batch as ``check`` does.

        Raises:
            DigestMismatchError: Names the first entry that is wrong.
        """
        if len(batch) < _VECTOR_MIN:
            self._check_each(batch)
        elif not self._are_right(batch):
            self._check_each(batch)
            raise self._mismatch(int(batch.entry_ids[0]), "it or a later one of its batch changed while being checked")

    def _are_right(self, batch: EntryBatch) -> bool:
        """Tell whether all entries of a batch are right."""
        sealed_bytes = ENTRY_HEADER_BYTES + self.size
        starts = batch.offsets
        if (
            batch.ledger_id != self.ledger_id
            or batch.digest_bytes != self.size
            or int(batch.sizes.min()) < sealed_bytes
            or int(starts.min()) < 0
            or bool((starts > len(batch.buffer) - batch.sizes).any())
        ):
            return False
        sealed = gather(batch.buffer, starts, sealed_bytes)
        parts = np.frombuffer(sealed, np.uint8).reshape(len(batch), sealed_bytes)
        headers = np.ascontiguousarray(parts[:, :ENTRY_HEADER_BYTES])
        ids = headers.view(">i8")
        if bool((ids[:, 0] != self.ledger_id).any()) or bool((ids[:, 1] != batch.entry_ids).any()):
            return False
        if not self.size:
            return True
        # Slices one at a time: a list of thousands of views would have the garbage collector look at all of them.
        slices = map(slice, (starts + sealed_bytes).tolist(), (starts + batch.sizes).tolist())
        payloads = map(batch.buffer.__getitem__, slices)
        digests = self._digest_many(headers, payloads)
        return compare_digest(digests, parts[:, ENTRY_HEADER_BYTES:].tobytes())

    def _mismatch(self, entry_id: int, why: str) -> DigestMismatchError:
        return DigestMismatchError(
            f"ledger {self.ledger_id} entry {entry_id} is not what its writer made: {why}; when all entries fail, look "
            "at the password and the digest type, otherwise restore the file it lies in"
        )

    def _check_each(self, batch: EntryBatch) -> None:
        """Check the entries of a batch one by one, which finds out the first that is wrong."""
        if batch.digest_bytes != self.size or batch.ledger_id != self.ledger_id:
            raise self._mismatch(
                int(batch.entry_ids[0]) if len(batch) else 0,
                f"the batch is of ledger {batch.ledger_id} with digests of {batch.digest_bytes} bytes",
            )
        ends = batch.offsets + batch.sizes
        for entry_id, start, end in zip(batch.entry_ids.tolist(), batch.offsets.tolist(), ends.tolist(), strict=True):
            self.check(batch.buffer, start, end, entry_id)

    @abstractmethod
    def _digest(self, header: bytes | memoryview, payload: bytes | memoryview) -> bytes:
        """Return the digest of one entry."""

    @abstractmethod
    def _digest_many(self, headers: npt.NDArray[np.uint8], payloads: Iterable[bytes | memoryview]) -> bytes:
        """Return the digests of some entries, one after the other."""

    def _seal_headers(self, headers: npt.NDArray[np.uint8], payloads: Sequence[bytes]) -> list[bytes]:
        """Return each header with the digest of its entry."""
        sealed = np.empty((len(payloads), ENTRY_HEADER_BYTES + self.size), np.uint8)
        sealed[:, :ENTRY_HEADER_BYTES] = headers
        digests = self._digest_many(headers, payloads)
        sealed[:, ENTRY_HEADER_BYTES:] = np.frombuffer(digests, np.uint8).reshape(len(payloads), self.size)
        joined: list[bytes] = sealed.view(f"V{sealed.shape[1]}").ravel().tolist()
        return joined


def _as_bytes(headers: npt.NDArray[np.uint8]) -> list[bytes]:
    """Return the headers of some entries, ``(n, 32)``, one by one."""
    one_by_one: list[bytes] = headers.view(f"V{ENTRY_HEADER_BYTES}").ravel().tolist()
    return one_by_one


class _NoneDigest(EntryDigest):
    """No digest: only the ids and the size of an entry are checked."""

    __slots__ = ()
    digest_type = DigestType.NONE
    size = 0

    def _digest(self, header: bytes | memoryview, payload: bytes | memoryview) -> bytes:
        return b""

    def _digest_many(self, headers: npt.NDArray[np.uint8], payloads: Iterable[bytes | memoryview]) -> bytes:
        return b""


def _crc_table() -> npt.NDArray[np.uint32]:
    """Return what each byte value at each place of a header changes in the header's CRC.

    CRC-32C is linear, so two headers' CRCs differ by the XOR of what the bytes change in which they differ: look-ups,
    for all headers at once, of the few bytes in which those of a batch differ.
    """
    zeros = bytes(ENTRY_HEADER_BYTES)
    base = crc32c(zeros)
    table = np.empty((ENTRY_HEADER_BYTES, 256), np.uint32)
    for place in range(ENTRY_HEADER_BYTES):
        for value in range(256):
            table[place, value] = base ^ crc32c(zeros[:place] + bytes((value,)) + zeros[place + 1 :])
    return table


class _Crc32cDigest(EntryDigest):
    """BookKeeper's CRC32C."""

    __slots__ = ()
    digest_type = DigestType.CRC32C
    size = 4

    _table: ClassVar[npt.NDArray[np.uint32] | None] = None

    def _digest(self, header: bytes | memoryview, payload: bytes | memoryview) -> bytes:
        return _pack_crc(crc32c(payload, crc32c(header)))

    def _digest_many(self, headers: npt.NDArray[np.uint8], payloads: Iterable[bytes | memoryview]) -> bytes:
        if _Crc32cDigest._table is None:
            _Crc32cDigest._table = _crc_table()
        first = headers[0]
        header_crcs = np.full(len(headers), crc32c(first.tobytes()), np.uint32)
        for place in np.flatnonzero((headers != first).any(axis=0)):
            changes = _Crc32cDigest._table[place]
            header_crcs ^= (changes ^ changes[first[place]])[headers[:, place]]
        values = map(crc32c, payloads, header_crcs.tolist())
        return np.fromiter(values, np.uint32, len(headers)).astype(">u4").tobytes()


class _Xxh3Digest(EntryDigest):
    """XXH3-64 of the payload, seeded with that of the header."""

    __slots__ = ()
    digest_type = DigestType.XXH3
    size = 8

    def _digest(self, header: bytes | memoryview, payload: bytes | memoryview) -> bytes:
        return _pack_xxh3(xxh3_64_intdigest(payload, xxh3_64_intdigest(header)))

    def _digest_many(self, headers: npt.NDArray[np.uint8], payloads: Iterable[bytes | memoryview]) -> bytes:
        values = map(xxh3_64_intdigest, payloads, map(xxh3_64_intdigest, _as_bytes(headers)))
        return np.fromiter(values, np.uint64, len(headers)).astype(">u8").tobytes()


class _HmacDigest(EntryDigest):
    """HMAC-SHA256 with the two states that depend on nothing but the key made once."""

    __slots__ = ("_inner", "_outer")
    digest_type = DigestType.HMAC_SHA256
    size = 32

    def __init__(self, ledger_id: int, key: bytes) -> None:
        super().__init__(ledger_id)
        block = key.ljust(_HASH_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(block.translate(_INNER_PAD))
        self._outer = hashlib.sha256(block.translate(_OUTER_PAD))

    def seal(self, entry_id: int, lac: int, length: int, payload: bytes) -> bytes:
        """See ``EntryDigest.seal``; written out, because every append waits for it."""
        header = _pack_header(self.ledger_id, entry_id, lac, length)
        inner = self._inner.copy()
        inner.update(header)
        inner.update(payload)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return header + outer.digest()

    def _digest(self, header: bytes | memoryview, payload: bytes | memoryview) -> bytes:
        inner = self._inner.copy()
        inner.update(header)
        inner.update(payload)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()

    def _digest_many(self, headers: npt.NDArray[np.uint8], payloads: Iterable[bytes | memoryview]) -> bytes:
        copy_inner, copy_outer = self._inner.copy, self._outer.copy
        digests = []
        for header, payload in zip(_as_bytes(headers), payloads, strict=True):
            inner = copy_inner()
            inner.update(header)
            inner.update(payload)
            outer = copy_outer()
            outer.update(inner.digest())
            digests.append(outer.digest())
        return b"".join(digests)


def entry_digest(digest_type: DigestType, ledger_id: int, key: bytes = b"") -> EntryDigest:
    """Make the digest of a ledger's entries.

    Args:
        digest_type: Which one.
        ledger_id: Whose entries.
        key: For HMAC_SHA256 the ledger's entry key, ``KEY_BYTES`` bytes; the others have no use for it.

    Raises:
        UsageError: The key has another size, or the digest type is unknown.
    """
    if digest_type == DigestType.HMAC_SHA256:
        if len(key) != KEY_BYTES:
            raise UsageError(f"the entry key of ledger {ledger_id} has {len(key)} bytes; HMAC_SHA256 takes {KEY_BYTES}")
        return _HmacDigest(ledger_id, key)
    for kind in (_Crc32cDigest, _Xxh3Digest, _NoneDigest):
        if digest_type == kind.digest_type:
            return kind(ledger_id)
    raise UsageError(f"digest type {digest_type!r} of ledger {ledger_id} is unknown; known are {list(DigestType)}")


@dataclass(frozen=True, slots=True, eq=False)
class LedgerKeys:
    """The keys of one ledger in one key epoch.

    Attributes:
        entry_key: Key of the entries' HMAC, ``KEY_BYTES`` bytes; never stored.
        verifier: Shows that a password is the right one, ``KEY_BYTES`` bytes; stored in the ledger's metadata.
        lac_key: Key that a last add confirmed is authenticated with when no entry carries it; never stored.
        right_key: Seed of the key pair that shows bookies the right to write; never stored.
    """

    entry_key: bytes = field(repr=False)
    verifier: bytes = field(repr=False)
    lac_key: bytes = field(repr=False)
    right_key: bytes = field(repr=False)
    _derive: Callable[[bytes], bytes] = field(repr=False)

    def seal_key(self) -> bytes:
        """Derive the key that seals the ledger's end; never stored.

        Cost: 5 microseconds. Most handles never seal or check an end, so the key is not derived with the others.
        """
        return self._derive(b"seal")


class KeyRing:
    """Derives the keys of a store's ledgers from passwords.

    Keeps what scrypt made of a password, never the password itself.

    Args:
        store_id: Identity of the store, so that the same password means other keys in another store.
        salt: The store's scrypt salt, at least ``SALT_BYTES_MIN`` bytes.
        cost: scrypt's n, a power of two up to ``SCRYPT_COST_MAX``; KiB of memory.

    Raises:
        UsageError: The salt is too short or the cost is not such a number.

    Threads: any.
    """

    __slots__ = ("_cache_key", "_cost", "_lock", "_roots", "_salt", "_store_id")

    def __init__(self, store_id: bytes, salt: bytes, *, cost: int = SCRYPT_COST) -> None:
        if len(salt) < SALT_BYTES_MIN:
            raise UsageError(f"the store's salt has {len(salt)} bytes; it takes at least {SALT_BYTES_MIN} random ones")
        if not 2 <= cost <= SCRYPT_COST_MAX or cost & (cost - 1):
            raise UsageError(f"scrypt cost {cost} is no power of two from 2 to {SCRYPT_COST_MAX}; use {SCRYPT_COST}")
        self._store_id = store_id
        self._salt = salt
        self._cost = cost
        self._lock = threading.Lock()
        self._cache_key = secrets.token_bytes(KEY_BYTES)
        self._roots: OrderedDict[bytes, bytes] = OrderedDict()

    def __repr__(self) -> str:
        """Name the store; never a key."""
        return f"<KeyRing of store {self._store_id.hex()}>"

    def root(self, password: bytes) -> bytes:
        """Return the key that all keys of this password are derived from; keep it in memory only.

        Args:
            password: Any bytes, also none.

        Returns:
            ``KEY_BYTES`` bytes.

        Raises:
            UsageError: The password is no bytes.
            OutOfMemoryError: There is no memory for scrypt.

        Cost: For a password seen first, with the cost of new stores, some 400 ms and 128 MiB, which are free again
            afterwards (1 KiB of memory for each unit of the cost); then a microsecond. The last 64 passwords are
            known. A thread that asks meanwhile waits, so that many threads with one password cost one scrypt.
        """
        if not isinstance(password, bytes):
            raise UsageError(f"a password is bytes, not {type(password).__name__}; encode text first: text.encode()")
        # The key is random and in memory only, so what the cache is searched by helps nobody to guess a password.
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

    def _derive_root(self, password: bytes) -> bytes:
        try:
            return Scrypt(salt=self._salt, length=KEY_BYTES, n=self._cost, r=8, p=1).derive(password)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"deriving keys from a password takes {self._cost >> 10} MiB (scrypt with N = {self._cost}), which "
                "this process cannot get; free memory, or raise its limit, and try again"
            ) from error

    def ledger_keys(
        self,
        password: bytes,
        ledger_id: int,
        ledger_salt: bytes,
        key_epoch: int,
        *,
        binding: tuple[bytes, ...] = (),
    ) -> LedgerKeys:
        """Derive the keys of a ledger.

        Args:
            password: The ledger's password.
            ledger_id: The ledger.
            ledger_salt: The random salt in its metadata.
            key_epoch: The key epoch in its metadata, from 0 up.
            binding: Immutable metadata that the keys depend on; empty for ledgers of key format 0.

        Raises:
            UsageError: The password is no bytes.

        Cost: That of ``root``, and 20 microseconds.
        """
        root = self.root(password)
        scope = (ledger_id.to_bytes(8, "big", signed=True), key_epoch.to_bytes(8, "big"), self._store_id, *binding)
        label = _sized((b"pybk/2" if binding else b"pybk/1",))
        derive = partial(_expand, hmac_digest(ledger_salt, root, "sha256"), label, _sized(scope))
        return LedgerKeys(derive(b"entry-mac"), derive(b"verifier"), derive(b"lac-mac"), derive(b"write-auth"), derive)


def _sized(parts: tuple[bytes, ...]) -> bytes:
    """Join parts, each behind its size, so that no two lists of parts read the same."""
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])


def _expand(extracted: bytes, label: bytes, scope: bytes, purpose: bytes) -> bytes:
    """Derive the key of a purpose: the step Expand of HKDF (RFC 5869), whose first block is the whole key.

    The step Extract is the same for all keys of a ledger, and made once: most of what a library's HKDF costs each time.
    """
    return hmac_digest(extracted, label + _sized((purpose,)) + scope + b"\x01", "sha256")
