"""Digests, which prove that an entry is the one that its writer made.

An encoded entry is ``header | digest | payload``. The header is BookKeeper's: ledger id, entry id, LAC and length, each
a big-endian i64. The writer computes the digest over header and payload once; the same bytes travel to every bookie and
every tier. The reader verifies the digest, so no component in between has to be trusted. The leading
``header | digest`` is called the entry's *prefix*: a writer makes the prefix and never copies the payload.

To add a digest, add a line to ``DigestType`` and a subclass of ``EntryDigest`` that names that line; the subclass
registers itself. Other modules use ``entry_digest``, ``digest_bytes`` and ``is_keyed`` only.

Digests are computed, and single entries opened, by the native core, if there is one and it has the digest
(``pybk.ledger.native``). It has HMAC-SHA256 of lone entries on processors with instructions for SHA-256 only, and of
batches also on those with AVX2 or AVX-512. Otherwise batches of 32 entries or more go through numpy, and others one by
one. All ways give the same bytes and the same errors.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import IntEnum
from hmac import compare_digest
from struct import Struct
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from pybk.deferral import LateModule, np
from pybk.errors import DigestMismatchError, UsageError
from pybk.ledger import CORE, CORE_ENCODES
from pybk.ledger.entry import ENTRY_HEADER_BYTES, Entry, EntryBatch, gather

if TYPE_CHECKING:
    import crc32c
    import numpy.typing as npt

    from pybk.ledger.native import NativeCore
else:
    crc32c = LateModule("crc32c")

KEY_BYTES: Final = 32
"""Size of every key of a ledger, and of a verifier."""

_HASH_BLOCK_BYTES: Final = 64
_INNER_PAD: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD: Final = bytes(byte ^ 0x5C for byte in range(256))
_VECTOR_MIN: Final = 32
"""The number of entries from which on numpy makes or verifies a batch's headers faster than a loop does."""

_LANES_MIN: Final = 3
"""The least number of entries that a processor's vectors compute in less time together, in lanes, than one by one.

Most lanes are empty then. A batch is not computed so if one entry is more than a third of it, because that one would
fill its lane alone most of the time.
"""

_COPIED_BYTES: Final = 16 << 10
"""The mean size of payloads below which it takes less time to copy a batch than to write it in so many pieces."""

_new_tuple = tuple.__new__
_pack_header = Struct(">qqqq").pack
_unpack_header = Struct(">qqqq").unpack_from
_unpack_ids = Struct(">qq").unpack_from
_pack_crc = Struct(">I").pack
_pack_xxh3 = Struct(">Q").pack


class DigestType(IntEnum):
    """The digest that each entry of a ledger carries; codes below 100 are BookKeeper's."""

    CRC32C = 3
    """Finds damage; 4 bytes."""

    NONE = 4
    """Finds nothing."""

    HMAC_SHA256 = 100
    """Finds damage, and changes made on purpose, with a key that is derived from the ledger's password; 32 bytes."""

    XXH3 = 101
    """Finds damage; 8 bytes."""


_KINDS: Final[dict[int, type[EntryDigest]]] = {}
"""The class of each digest type; filled by ``EntryDigest.__init_subclass__``."""


class EncodedEntries(NamedTuple):
    """Consecutive entries as they are written.

    Attributes:
        pieces: Their bytes after those of a head: one piece that has all, or the head, and then prefix and payload of
            each entry. So their number is odd.
        checksum: XXH3-64 of the pieces.
        last_prefix: The prefix of the last entry.
    """

    pieces: list[bytes]
    checksum: int
    last_prefix: bytes


class EntryDigest(ABC):
    """Makes the prefixes of one ledger's entries and verifies entries; made by ``entry_digest``.

    Attributes:
        digest_type: The digest that this class computes.
        size: Bytes of a digest.
        keyed: Whether the digest needs the ledger's entry key.
        ledger_id: The ledger whose id the entries carry.
        core: The native core, which computes digests and opens entries; None if Python does.
        core_alone: The core for a lone entry; None where Python is faster, as without instructions for SHA-256.
        prefers_batches: Whether the prefixes of several entries take much less time together than one by one.

    Threads: any; nothing changes after construction.
    """

    __slots__ = ("_key", "core", "core_alone", "ledger_id", "prefers_batches")

    digest_type: ClassVar[DigestType]
    size: ClassVar[int]
    keyed: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Register the digest under its type."""
        _KINDS[cls.digest_type] = cls

    def __init__(self, ledger_id: int, key: bytes) -> None:
        """Digests without a key ignore it."""
        self.ledger_id: Final = ledger_id
        self._key: Final = key if self.keyed else b""
        self.core = CORE if CORE is not None and self.digest_type in CORE.TYPES else None
        self.core_alone = CORE if CORE is not None and self.digest_type in CORE.ALONE else None
        self.prefers_batches = self.core is not self.core_alone

    def __repr__(self) -> str:
        """Name the digest and the ledger; never the key."""
        return f"<EntryDigest {self.digest_type.name}, ledger {self.ledger_id}>"

    def prefix(self, entry_id: int, lac: int, length: int, payload: bytes) -> bytes:
        """Return an entry's prefix, which stands before its payload.

        Args:
            entry_id: The entry's id.
            lac: The writer's last add confirmed, -1 for none.
            length: Payload bytes of the ledger up to and including this entry.
            payload: The payload.

        Returns:
            Header and digest, ``ENTRY_HEADER_BYTES + size`` bytes.
        """
        if self.core_alone is not None:
            return self.core_alone.prefix(self.digest_type, self._key, self.ledger_id, entry_id, lac, length, payload)
        header = _pack_header(self.ledger_id, entry_id, lac, length)
        return header + self._digest(header, payload)

    def prefixes(
        self,
        first_entry_id: int,
        lac: int,
        length_before: int,
        payloads: Sequence[bytes],
        lengths: npt.NDArray[np.int64] | None = None,
    ) -> list[bytes]:
        """Return the prefixes of consecutive entries.

        Args:
            first_entry_id: Id of the first entry.
            lac: The writer's last add confirmed, the same for all.
            length_before: Payload bytes of the ledger before the first of these entries.
            payloads: The payloads, ``(n,)``.
            lengths: The payloads' sizes in bytes, ``(n,)`` int64, if the caller has them.

        Returns:
            Header and digest of each, ``(n,)`` of ``ENTRY_HEADER_BYTES + size`` bytes.
        """
        count = len(payloads)
        if lengths is None and self.core is not self.core_alone:
            lengths = np.fromiter(map(len, payloads), np.int64, count)
        core = self.core if lengths is None else self._core_for(lengths)
        if core is not None:
            return core.prefixes(
                self.digest_type, self._key, self.ledger_id, first_entry_id, lac, length_before, payloads
            )
        if count < _VECTOR_MIN:
            prefixes = []
            length = length_before
            for entry_id, payload in enumerate(payloads, first_entry_id):
                length += len(payload)
                prefixes.append(self.prefix(entry_id, lac, length, payload))
            return prefixes
        headers = np.empty((count, 4), ">i8")
        headers[:, 0] = self.ledger_id
        headers[:, 1] = np.arange(first_entry_id, first_entry_id + count)
        headers[:, 2] = lac
        if lengths is None:
            lengths = np.fromiter(map(len, payloads), np.int64, count)
        headers[:, 3] = lengths.cumsum() + length_before
        return self._with_digests(headers.view(np.uint8).reshape(count, ENTRY_HEADER_BYTES), payloads)

    def encode(
        self,
        first_entry_id: int,
        lac: int,
        length_before: int,
        payloads: Sequence[bytes],
        lengths: npt.NDArray[np.int64],
        head: bytes,
    ) -> EncodedEntries:
        """Encode consecutive entries, as they stand in a record after its table.

        Args:
            first_entry_id: As for ``prefixes``.
            lac: As for ``prefixes``.
            length_before: As for ``prefixes``.
            payloads: The payloads, ``(n,)``, at least one.
            lengths: The payloads' sizes in bytes, ``(n,)`` int64.
            head: The bytes before the entries.

        Returns:
            Head and entries, with the checksum of both. Payloads of 16 KiB and more, in the mean, are not copied.

        Cost: One pass over the payloads with the core, which lets the interpreter lock go from 256 KiB of them on.
        """
        copies = int(lengths.sum()) < _COPIED_BYTES * len(payloads)
        core = self._core_for(lengths) if CORE_ENCODES else None
        if core is not None:
            pieces, checksum = core.encode(
                self.digest_type,
                self._key,
                self.ledger_id,
                first_entry_id,
                lac,
                length_before,
                payloads,
                head,
                copies,
            )
        else:
            pieces = [head, *([b""] * (2 * len(payloads)))]
            pieces[1::2] = self.prefixes(first_entry_id, lac, length_before, payloads, lengths)
            pieces[2::2] = payloads
            if copies:
                pieces = [b"".join(pieces)]
            hasher = xxh3_64()
            for piece in pieces:
                hasher.update(piece)
            checksum = hasher.intdigest()
        if not copies:
            return EncodedEntries(pieces, checksum, pieces[-2])
        end = len(pieces[0]) - int(lengths[-1])
        return EncodedEntries(pieces, checksum, pieces[0][end - ENTRY_HEADER_BYTES - self.size : end])

    def check(self, buffer: memoryview, start: int, end: int, entry_id: int) -> None:
        """Verify that ``buffer[start:end]`` is this ledger's entry of this id, as its writer made it.

        Args:
            buffer: Contiguous bytes.
            start: Offset of the encoded entry, bytes.
            end: Its end, bytes.
            entry_id: The id that it must have.

        Raises:
            DigestMismatchError: The ids or the digest are others, or the range is not inside the buffer.
        """
        middle = start + ENTRY_HEADER_BYTES
        body = middle + self.size
        if not 0 <= start < body <= end <= len(buffer):
            raise self._mismatch(entry_id, f"{end - start} bytes at {start} of {len(buffer)} are not an entry")
        ids = _unpack_ids(buffer, start)
        if ids != (self.ledger_id, entry_id):
            raise self._mismatch(entry_id, f"the bytes say ledger {ids[0]} entry {ids[1]}")
        if not compare_digest(self._digest(buffer[start:middle], buffer[body:end]), buffer[middle:body]):
            raise self._mismatch(entry_id, f"the {self.digest_type.name} digest is not that of the bytes")

    def open(self, buffer: memoryview, start: int, end: int, entry_id: int) -> Entry:
        """Verify an entry as ``check`` does, and return it, copied out of the buffer.

        Raises:
            DigestMismatchError: As ``check``.
        """
        core = self.core_alone
        if core is not None:
            entry = core.open(Entry, self._key, buffer, self.digest_type, self.ledger_id, entry_id, start, end)
            if entry is not None:
                return entry
        body = start + ENTRY_HEADER_BYTES + self.size
        if not 0 <= start < body <= end <= len(buffer):
            raise self._mismatch(entry_id, f"{end - start} bytes at {start} of {len(buffer)} are not an entry")
        data = buffer[start:end].tobytes()
        ledger_id, found_id, lac, length = _unpack_header(data)
        payload = data[body - start :]
        header, digest = data[:ENTRY_HEADER_BYTES], data[ENTRY_HEADER_BYTES : body - start]
        if (
            found_id != entry_id
            or ledger_id != self.ledger_id
            or not compare_digest(self._digest(header, payload), digest)
        ):
            self.check(memoryview(data), 0, len(data), entry_id)  # its error says what is wrong
        return _new_tuple(Entry, (ledger_id, entry_id, lac, length, payload))  # see ``decode_entry``

    def check_many(self, batch: EntryBatch) -> None:
        """Verify every entry of a batch as ``check`` does.

        Raises:
            DigestMismatchError: Names the first entry that fails.
        """
        core = self._core_for(batch.sizes)
        if core is None and len(batch) < _VECTOR_MIN:
            self._check_each(batch)
        elif not self._all_match(batch, core):
            self._check_each(batch)
            raise self._mismatch(int(batch.entry_ids[0]), "it or a later one of its batch changed while being checked")

    def _core_for(self, sizes: npt.NDArray[np.int64]) -> NativeCore | None:
        """Return the core for a batch of entries of these sizes; None if Python does not take longer."""
        if self.core is self.core_alone:
            return self.core
        fill = len(sizes) >= _LANES_MIN and int(sizes.max()) * _LANES_MIN <= int(sizes.sum())
        return self.core if fill else None

    def _all_match(self, batch: EntryBatch, core: NativeCore | None) -> bool:
        """Return whether all entries of a batch pass, without saying which entry fails."""
        if batch.ledger_id != self.ledger_id or batch.digest_bytes != self.size:
            return False
        if core is not None:
            # A caller's arrays may have other integers, or be slices: the core reads contiguous int64.
            places = (np.ascontiguousarray(each, np.int64) for each in (batch.offsets, batch.sizes, batch.entry_ids))
            return core.matches(self.digest_type, self._key, self.ledger_id, batch.buffer, *places)
        prefix_bytes = ENTRY_HEADER_BYTES + self.size
        starts = batch.offsets
        if (
            int(batch.sizes.min()) < prefix_bytes
            or int(starts.min()) < 0
            or bool((starts > len(batch.buffer) - batch.sizes).any())
        ):
            return False
        gathered = gather(batch.buffer, starts, prefix_bytes)
        prefixes = np.frombuffer(gathered, np.uint8).reshape(len(batch), prefix_bytes)
        headers = np.ascontiguousarray(prefixes[:, :ENTRY_HEADER_BYTES])
        ids = headers.view(">i8")
        if bool((ids[:, 0] != self.ledger_id).any()) or bool((ids[:, 1] != batch.entry_ids).any()):
            return False
        if not self.size:
            return True
        # An iterator, because the garbage collector would traverse a list of thousands of views.
        slices = map(slice, (starts + prefix_bytes).tolist(), (starts + batch.sizes).tolist())
        payloads = map(batch.buffer.__getitem__, slices)
        digests = self._digest_many(headers, payloads)
        return compare_digest(digests, prefixes[:, ENTRY_HEADER_BYTES:].tobytes())

    def _mismatch(self, entry_id: int, why: str) -> DigestMismatchError:
        return DigestMismatchError(
            f"ledger {self.ledger_id} entry {entry_id} is not what its writer made: {why}; when all entries fail, "
            "check the password and the digest type, otherwise restore the file that holds it"
        )

    def _check_each(self, batch: EntryBatch) -> None:
        """Verify the entries of a batch one by one, so that the error names the first that fails."""
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
        """Return the digests of some entries, concatenated; ``headers`` is ``(n, 32)``."""

    def _with_digests(self, headers: npt.NDArray[np.uint8], payloads: Sequence[bytes]) -> list[bytes]:
        """Return each header followed by the digest of its entry."""
        prefixes = np.empty((len(payloads), ENTRY_HEADER_BYTES + self.size), np.uint8)
        prefixes[:, :ENTRY_HEADER_BYTES] = headers
        digests = self._digest_many(headers, payloads)
        prefixes[:, ENTRY_HEADER_BYTES:] = np.frombuffer(digests, np.uint8).reshape(len(payloads), self.size)
        joined: list[bytes] = prefixes.view(f"V{prefixes.shape[1]}").ravel().tolist()
        return joined


def _as_bytes(headers: npt.NDArray[np.uint8]) -> list[bytes]:
    """Return the rows of ``headers``, ``(n, 32)``, as bytes objects."""
    one_by_one: list[bytes] = headers.view(f"V{ENTRY_HEADER_BYTES}").ravel().tolist()
    return one_by_one


class _NoneDigest(EntryDigest):
    """An empty digest: only the ids and the size of an entry are verified."""

    __slots__ = ()
    digest_type = DigestType.NONE
    size = 0

    def _digest(self, header: bytes | memoryview, payload: bytes | memoryview) -> bytes:
        return b""

    def _digest_many(self, headers: npt.NDArray[np.uint8], payloads: Iterable[bytes | memoryview]) -> bytes:
        return b""


def _crc_table() -> npt.NDArray[np.uint32]:
    """Return ``(32, 256)``: how a header's CRC changes when the byte at an offset changes from 0 to a value.

    CRC-32C is linear, so the CRCs of two headers differ by the XOR of the changes of the bytes in which they differ.
    The headers of a batch differ in a few bytes; each such byte costs one look-up for all headers at once.
    """
    zeros = bytes(ENTRY_HEADER_BYTES)
    base = crc32c.crc32c(zeros)
    table = np.empty((ENTRY_HEADER_BYTES, 256), np.uint32)
    for offset in range(ENTRY_HEADER_BYTES):
        for value in range(256):
            table[offset, value] = base ^ crc32c.crc32c(zeros[:offset] + bytes((value,)) + zeros[offset + 1 :])
    return table


class _Crc32cDigest(EntryDigest):
    """BookKeeper's CRC32C."""

    __slots__ = ()
    digest_type = DigestType.CRC32C
    size = 4

    _table: ClassVar[npt.NDArray[np.uint32] | None] = None
    """``_crc_table()``, made at the first use, because that takes milliseconds. Two threads may make the same twice."""

    def _digest(self, header: bytes | memoryview, payload: bytes | memoryview) -> bytes:
        return _pack_crc(crc32c.crc32c(payload, crc32c.crc32c(header)))

    def _digest_many(self, headers: npt.NDArray[np.uint8], payloads: Iterable[bytes | memoryview]) -> bytes:
        if _Crc32cDigest._table is None:
            _Crc32cDigest._table = _crc_table()
        first = headers[0]
        header_crcs = np.full(len(headers), crc32c.crc32c(first.tobytes()), np.uint32)
        for offset in np.flatnonzero((headers != first).any(axis=0)):
            changes = _Crc32cDigest._table[offset]
            header_crcs ^= (changes ^ changes[first[offset]])[headers[:, offset]]
        values = map(crc32c.crc32c, payloads, header_crcs.tolist())
        return np.fromiter(values, np.uint32, len(headers)).astype(">u4").tobytes()


class _Xxh3Digest(EntryDigest):
    """XXH3-64 of the payload, seeded with the XXH3-64 of the header."""

    __slots__ = ()
    digest_type = DigestType.XXH3
    size = 8

    def _digest(self, header: bytes | memoryview, payload: bytes | memoryview) -> bytes:
        return _pack_xxh3(xxh3_64_intdigest(payload, xxh3_64_intdigest(header)))

    def _digest_many(self, headers: npt.NDArray[np.uint8], payloads: Iterable[bytes | memoryview]) -> bytes:
        values = map(xxh3_64_intdigest, payloads, map(xxh3_64_intdigest, _as_bytes(headers)))
        return np.fromiter(values, np.uint64, len(headers)).astype(">u8").tobytes()


class _HmacDigest(EntryDigest):
    """HMAC-SHA256 (RFC 2104). The two hash states that depend on the key alone are computed once and copied."""

    __slots__ = ("_inner", "_outer")
    digest_type = DigestType.HMAC_SHA256
    size = 32
    keyed = True

    def __init__(self, ledger_id: int, key: bytes) -> None:
        super().__init__(ledger_id, key)
        block = key.ljust(_HASH_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(block.translate(_INNER_PAD))
        self._outer = hashlib.sha256(block.translate(_OUTER_PAD))

    def prefix(self, entry_id: int, lac: int, length: int, payload: bytes) -> bytes:
        """See ``EntryDigest.prefix``; written out, because every append waits for it."""
        if self.core_alone is not None:
            return self.core_alone.prefix(self.digest_type, self._key, self.ledger_id, entry_id, lac, length, payload)
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
    """Return the digest of a ledger's entries.

    Args:
        digest_type: The ledger's digest type.
        ledger_id: The id that the entries carry.
        key: For a keyed digest the ledger's entry key, ``KEY_BYTES`` bytes; the others ignore it.

    Raises:
        UsageError: The key has another size, or the digest type is unknown.
    """
    kind = _KINDS.get(digest_type)
    if kind is None:
        raise UsageError(f"digest type {digest_type!r} of ledger {ledger_id} is unknown; known are {list(DigestType)}")
    if kind.keyed and len(key) != KEY_BYTES:
        raise UsageError(
            f"the entry key of ledger {ledger_id} has {len(key)} bytes; {kind.digest_type.name} takes {KEY_BYTES}"
        )
    return kind(ledger_id, key)


def digest_bytes(digest_type: DigestType) -> int:
    """Return the size of a digest in bytes."""
    return _KINDS[digest_type].size


def is_keyed(digest_type: DigestType) -> bool:
    """Return whether verifying an entry needs a key that is derived from the ledger's password."""
    return _KINDS[digest_type].keyed
