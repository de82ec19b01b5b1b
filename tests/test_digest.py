from __future__ import annotations

import hashlib
import hmac
import json
import random
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from pybk.errors import DigestMismatchError, UsageError
from pybk.ledger import CORE
from pybk.ledger import digest as digests
from pybk.ledger.digest import KEY_BYTES, DigestType, EntryDigest, entry_digest
from pybk.ledger.entry import ENTRY_HEADER_BYTES, Entry, EntryBatch, decode_entry
from tests.paths import GOLDEN

GOLDEN_ENTRIES = json.loads((GOLDEN / "entries.json").read_text(encoding="utf-8"))["entries"]
KEY = bytes(range(KEY_BYTES))
LEDGER = 7
MANY = 100
TYPES = list(DigestType)


@pytest.fixture(scope="module", params=["native", "pure"], autouse=True)
def core(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute the digests of batches by the native core, and without it."""
    if request.param == "native" and CORE is None:
        pytest.skip("the native core is not there: no compiler built it, or PYBK_PURE is set")
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "pure":
            patched.setattr(digests, "CORE", None)
        yield request.param


def made(kind: DigestType, *, ledger_id: int = LEDGER, key: bytes = KEY) -> EntryDigest:
    return entry_digest(kind, ledger_id, key)


def some_payloads(count: int) -> list[bytes]:
    chance = random.Random(count)
    return [chance.randbytes(chance.choice((0, 1, 31, 200))) for _ in range(count)]


def batch_of(digest: EntryDigest, payloads: list[bytes], *, first: int = 50) -> tuple[EntryBatch, bytearray]:
    """Encode entries and lay them out with other bytes between them; the bytearray is the batch's buffer."""
    buffer = bytearray(b"xyz")
    offsets, sizes = [], []
    for prefix, payload in zip(digest.prefixes(first, first - 1, 0, payloads), payloads, strict=True):
        offsets.append(len(buffer))
        sizes.append(len(prefix) + len(payload))
        buffer += prefix + payload + b"between"
    ids = np.arange(first, first + len(payloads))
    offset_array, size_array = np.array(offsets, np.int64), np.array(sizes, np.int64)
    return EntryBatch(digest.ledger_id, ids, memoryview(buffer), offset_array, size_array, digest.size), buffer


# ---- what the bytes are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDEN_ENTRIES, ids=lambda golden: golden["name"])
def test_crc32c_is_bookkeepers(golden: dict[str, Any]) -> None:
    payload = bytes.fromhex(golden["piece"]) * golden["times"]
    digest = made(DigestType.CRC32C, ledger_id=golden["ledger_id"])
    prefix = digest.prefix(golden["entry_id"], golden["last_add_confirmed"], golden["length"], payload)
    assert prefix[ENTRY_HEADER_BYTES:].hex() == golden["digest"]
    entry = prefix + payload
    assert (len(entry), hashlib.sha256(entry).hexdigest()) == (golden["size"], golden["sha256"])
    digest.check(memoryview(entry), 0, len(entry), golden["entry_id"])
    decoded = decode_entry(memoryview(entry), 0, len(entry), digest.size)
    fields = (golden[key] for key in ("ledger_id", "entry_id", "last_add_confirmed", "length"))
    assert decoded == (*fields, payload)


@pytest.mark.parametrize("payload", [b"", b"hello bookkeeper", bytes(5000)])
def test_hmac_is_rfc_2104_over_header_and_payload(payload: bytes) -> None:
    prefix = made(DigestType.HMAC_SHA256).prefix(3, 2, 9, payload)
    header = b"".join(n.to_bytes(8, "big") for n in (LEDGER, 3, 2, 9))
    assert prefix == header + hmac.digest(KEY, header + payload, "sha256")


@pytest.mark.parametrize("payload", [b"", b"hello bookkeeper", bytes(5000)])
def test_xxh3_is_seeded_with_that_of_the_header(payload: bytes) -> None:
    prefix = made(DigestType.XXH3).prefix(3, 2, 9, payload)
    header = prefix[:ENTRY_HEADER_BYTES]
    assert prefix[ENTRY_HEADER_BYTES:] == xxh3_64_digest(payload, seed=xxh3_64_intdigest(header))


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        (DigestType.CRC32C, "f7285967"),
        (DigestType.NONE, ""),
        (DigestType.HMAC_SHA256, "7bca60f866d4f033cf1afd9e91ccb24b59f7ceabbde03c537b2b65011419051c"),
        (DigestType.XXH3, "703c37129f6f5f4c"),
    ],
)
def test_digests_never_change(kind: DigestType, digest: str) -> None:
    assert made(kind, ledger_id=1).prefix(0, -1, 16, b"hello bookkeeper")[ENTRY_HEADER_BYTES:].hex() == digest


def test_types() -> None:
    assert {kind.name: int(kind) for kind in DigestType} == {"CRC32C": 3, "NONE": 4, "HMAC_SHA256": 100, "XXH3": 101}
    for kind in DigestType:
        assert made(kind).digest_type is kind
        assert made(kind).size == len(made(kind).prefix(0, -1, 0, b"")) - ENTRY_HEADER_BYTES
        assert made(kind).ledger_id == LEDGER


# ---- many at once is the same as one by one --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("count", [0, 1, 31, 32, MANY])
def test_prefixes_are_each_prefix(kind: DigestType, count: int) -> None:
    digest = made(kind)
    payloads = some_payloads(count)
    length, expected = 2**40, []
    for number, payload in enumerate(payloads):
        length += len(payload)
        expected.append(digest.prefix(10**12 + number, 10**12 - 1, length, payload))
    prefixes = digest.prefixes(10**12, 10**12 - 1, 2**40, payloads)
    assert prefixes == expected
    assert all(type(one) is bytes for one in prefixes)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("count", "more"), [(1, 0), (31, 0), (MANY, 0), (1, 16 << 10), (4, 16 << 10)])
def test_encoded_entries_are_prefixes_and_payloads_after_the_head(kind: DigestType, count: int, more: int) -> None:
    digest, head = made(kind), b"any bytes"
    payloads = [payload + bytes(more) for payload in some_payloads(count)]
    lengths = np.array([len(payload) for payload in payloads])
    prefixes = digest.prefixes(10**12, 10**12 - 1, 2**40, payloads)
    whole = head + b"".join(part for both in zip(prefixes, payloads, strict=True) for part in both)
    encoded = digest.encode(10**12, 10**12 - 1, 2**40, payloads, lengths, head)
    assert b"".join(encoded.pieces) == whole
    assert encoded.checksum == xxh3_64_intdigest(whole)
    assert encoded.last_prefix == prefixes[-1]
    assert len(encoded.pieces) == (1 + 2 * count if more else 1)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("count", [0, 1, 31, 32, MANY])
def test_check_many_accepts_right_digests(kind: DigestType, count: int) -> None:
    digest = made(kind)
    batch, _ = batch_of(digest, some_payloads(count))
    digest.check_many(batch)
    for number in range(count):
        start = int(batch.offsets[number])
        digest.check(batch.buffer, start, start + int(batch.sizes[number]), int(batch.entry_ids[number]))


@pytest.mark.parametrize("kind", TYPES)
def test_arrays_of_other_integers_and_slices_are_taken(kind: DigestType) -> None:
    digest = made(kind)
    batch, _ = batch_of(digest, some_payloads(MANY))
    ids, offsets = batch.entry_ids.astype(">i8"), np.repeat(batch.offsets, 2)[::2]
    sizes: Any = batch.sizes.astype(np.int32)
    digest.check_many(EntryBatch(LEDGER, ids, batch.buffer, offsets, sizes, digest.size))


@given(
    kind=st.sampled_from(TYPES),
    payloads=st.lists(st.binary(max_size=80), min_size=1, max_size=70),
    first=st.integers(0, 2**62),
)
def test_prefixed_entries_are_read_back(kind: DigestType, payloads: list[bytes], first: int) -> None:
    digest = made(kind)
    batch, _ = batch_of(digest, payloads, first=first)
    digest.check_many(batch)
    entries = list(batch)
    assert [entry.payload for entry in entries] == payloads
    assert [entry.entry_id for entry in entries] == list(range(first, first + len(payloads)))
    assert entries[-1].length == sum(map(len, payloads))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("payload", [b"", b"payload", bytes(300_000)])
def test_an_opened_entry_is_a_copy_of_what_was_written(kind: DigestType, payload: bytes) -> None:
    digest = made(kind)
    encoded = digest.prefix(3, -1, 2**62, payload) + payload
    buffer = bytearray(b"before" + encoded + b"after")
    entry = digest.open(memoryview(buffer), 6, 6 + len(encoded), 3)
    buffer[:] = bytes(len(buffer))
    assert type(entry) is Entry
    assert type(entry.payload) is bytes
    assert entry == Entry(LEDGER, 3, -1, 2**62, payload)


# ---- what is wrong is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind is not DigestType.NONE])
def test_every_flipped_bit_is_found(kind: DigestType) -> None:
    digest = made(kind)
    entry = bytearray(digest.prefix(3, 2, 20, b"payload!") + b"payload!")
    for bit in range(8 * len(entry)):
        entry[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DigestMismatchError, match="ledger 7 entry 3 "):
            digest.check(memoryview(entry), 0, len(entry), 3)
        entry[bit // 8] ^= 1 << bit % 8
    digest.check(memoryview(entry), 0, len(entry), 3)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind is not DigestType.NONE])
@pytest.mark.parametrize("count", [5, MANY])
def test_every_flipped_byte_of_a_batch_is_found_and_the_first_wrong_entry_named(kind: DigestType, count: int) -> None:
    digest = made(kind)
    batch, buffer = batch_of(digest, [b"0123456789"] * count)
    last = count - 1
    size = int(batch.sizes[0])
    for number in (0, count // 2, last):
        for at in range(size):
            flipped = {int(batch.offsets[number]) + at, int(batch.offsets[last]) + at}
            for offset in flipped:
                buffer[offset] ^= 0x10
            with pytest.raises(DigestMismatchError, match=f"ledger 7 entry {50 + number} "):
                digest.check_many(batch)
            for offset in flipped:
                buffer[offset] ^= 0x10
    digest.check_many(batch)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("count", [5, MANY])
def test_foreign_and_exchanged_entries_are_refused(kind: DigestType, count: int) -> None:
    digest = made(kind)
    batch, _ = batch_of(digest, [b"0123456789"] * count)
    ids = batch.entry_ids.copy()
    ids[3] += 1
    wrong = EntryBatch(LEDGER, ids, batch.buffer, batch.offsets, batch.sizes, digest.size)
    with pytest.raises(DigestMismatchError, match=r"ledger 7 entry 54 .* say ledger 7 entry 53"):
        digest.check_many(wrong)
    foreign, _ = batch_of(made(kind, ledger_id=8), [b"0123456789"] * count)
    relabelled = EntryBatch(LEDGER, foreign.entry_ids, foreign.buffer, foreign.offsets, foreign.sizes, digest.size)
    for one in (foreign, relabelled):
        with pytest.raises(DigestMismatchError, match=r"ledger 7 entry 50 .*ledger 8"):
            digest.check_many(one)
    start, size = int(batch.offsets[1]), int(batch.sizes[1])
    for checker, entry_id in ((digest, 50), (digest, 52), (made(kind, ledger_id=8), 51)):
        with pytest.raises(DigestMismatchError):
            checker.check(batch.buffer, start, start + size, entry_id)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("count", [5, MANY])
@pytest.mark.parametrize(
    ("offset", "size"),
    [(-1, 60), (0, 31), (0, 0), (0, -1), (10**6, 60), (2**62, 2**62), (3, 10**6), (-(2**62), 60), (0, 2**62)],
)
def test_ranges_outside_the_buffer_are_refused(kind: DigestType, count: int, offset: int, size: int) -> None:
    digest = made(kind)
    batch, _ = batch_of(digest, [b"0123456789"] * count)
    offsets, sizes = batch.offsets.copy(), batch.sizes.copy()
    offsets[2], sizes[2] = offset, size
    wrong = EntryBatch(LEDGER, batch.entry_ids, batch.buffer, offsets, sizes, digest.size)
    with pytest.raises(DigestMismatchError, match="ledger 7 entry 52 "):
        digest.check_many(wrong)


@pytest.mark.parametrize("kind", TYPES)
def test_what_is_not_opened_is_refused_with_the_error_of_a_check(kind: DigestType) -> None:
    digest = made(kind)
    entry = bytearray(digest.prefix(3, 2, 20, b"payload!") + b"payload!")
    size = len(entry)

    def refused(start: int, end: int, entry_id: int = 3, checker: EntryDigest = digest) -> None:
        errors = []
        for verify in (checker.check, checker.open):
            with pytest.raises(DigestMismatchError) as raised:
                verify(memoryview(entry), start, end, entry_id)
            errors.append(str(raised.value))
        assert errors[0] == errors[1]

    for bit in range(8 * size) if kind is not DigestType.NONE else range(8 * 16):
        entry[bit // 8] ^= 1 << bit % 8
        refused(0, size)
        entry[bit // 8] ^= 1 << bit % 8
    for start, end in [(-1, size), (-size, 0), (0, size + 1), (5, 4), (2**62, 2**62), (-(2**62), 2**62), (1, size)]:
        refused(start, end)
    for end in range(size - len(b"payload!")):
        refused(0, end)
    refused(0, size, 4)
    refused(0, size, checker=made(kind, ledger_id=8))
    if digest.keyed:
        refused(0, size, checker=made(kind, key=bytes(KEY_BYTES)))
    assert digest.open(memoryview(entry), 0, size, 3).payload == b"payload!"


@pytest.mark.parametrize("kind", TYPES)
def test_an_entry_shorter_than_header_and_digest_is_refused(kind: DigestType) -> None:
    digest = made(kind)
    entry = memoryview(digest.prefix(3, 2, 0, b""))
    digest.check(entry, 0, len(entry), 3)
    for end in range(len(entry)):
        with pytest.raises(DigestMismatchError, match="are not an entry"):
            digest.check(entry, 0, end, 3)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("count", [5, MANY])
def test_a_size_that_cuts_the_digest_is_refused(kind: DigestType, count: int) -> None:
    digest = made(kind)
    batch, _ = batch_of(digest, [b""] * count)
    digest.check_many(batch)
    sizes = batch.sizes.copy()
    sizes[2] -= 1
    with pytest.raises(DigestMismatchError, match="ledger 7 entry 52 "):
        digest.check_many(EntryBatch(LEDGER, batch.entry_ids, batch.buffer, batch.offsets, sizes, digest.size))


@pytest.mark.parametrize("kind", [DigestType.CRC32C, DigestType.NONE])
@pytest.mark.parametrize("count", [5, MANY])
def test_a_batch_of_another_digest_size_is_refused(kind: DigestType, count: int) -> None:
    batch, _ = batch_of(made(DigestType.XXH3), [b"0123456789"] * count)
    with pytest.raises(DigestMismatchError, match="digests of 8 bytes"):
        made(kind).check_many(batch)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("count", [5, MANY])
def test_a_batch_under_another_ledgers_name_is_refused(kind: DigestType, count: int) -> None:
    digest = made(kind)
    batch, _ = batch_of(digest, [b"0123456789"] * count)
    with pytest.raises(DigestMismatchError, match="the batch is of ledger 8"):
        digest.check_many(EntryBatch(8, batch.entry_ids, batch.buffer, batch.offsets, batch.sizes, digest.size))


def test_another_key_is_refused() -> None:
    batch, _ = batch_of(made(DigestType.HMAC_SHA256), some_payloads(MANY))
    with pytest.raises(DigestMismatchError, match="ledger 7 entry 50 "):
        made(DigestType.HMAC_SHA256, key=bytes(KEY_BYTES)).check_many(batch)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_keys_of_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"{size} bytes"):
        entry_digest(DigestType.HMAC_SHA256, 1, bytes(size))


def test_unknown_types_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown"):
        entry_digest(77, 1)  # type: ignore[arg-type]  # what a careless caller may do


def test_one_digest_serves_many_threads() -> None:
    digest = made(DigestType.HMAC_SHA256)
    payloads = some_payloads(200)
    expected = digest.prefixes(0, -1, 0, payloads)
    results: list[bool] = []

    def work() -> None:
        results.append(all(digest.prefixes(0, -1, 0, payloads) == expected for _ in range(20)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


@pytest.mark.parametrize(("sizes", "lanes"), [([10, 10], False), ([10, 10, 10], True), ([100, 10, 10], False)])
def test_only_batches_that_fill_some_lanes_are_computed_in_lanes(sizes: list[int], *, lanes: bool) -> None:
    taken: list[int] = []

    class Lanes:
        def prefixes(self, *given: Any) -> list[bytes]:
            taken.append(len(given[-1]))
            return []

        def matches(self, *given: Any) -> bool:
            taken.append(len(given[-1]))
            return True

    digest = entry_digest(DigestType.HMAC_SHA256, 7, bytes(KEY_BYTES))
    digest.core = digest.core_alone = None
    payloads = [bytes(size) for size in sizes]
    prefixes = digest.prefixes(0, -1, 0, payloads)
    entries = [prefix + payload for prefix, payload in zip(prefixes, payloads, strict=True)]
    whole = np.array([len(entry) for entry in entries], np.int64)
    batch = EntryBatch(
        7, np.arange(len(sizes)), memoryview(b"".join(entries)), np.cumsum(whole) - whole, whole, digest.size
    )
    digest.core = cast("Any", Lanes())
    digest.prefixes(0, -1, 0, payloads)
    digest.prefixes(0, -1, 0, payloads, np.array(sizes))
    digest.check_many(batch)
    assert taken == [len(sizes)] * (3 if lanes else 0)
