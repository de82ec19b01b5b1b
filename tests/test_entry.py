from __future__ import annotations

import copy
import random
import struct
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from struct import pack
from typing import Any

import numpy as np
import pytest

from pybk.errors import UsageError
from pybk.ledger import CORE
from pybk.ledger import entry as entries_of
from pybk.ledger.entry import ENTRY_HEADER_BYTES, Entry, EntryBatch, decode_entry, gather


def encoded(entry: Entry, digest: bytes) -> bytes:
    return pack(">qqqq", *entry[:4]) + digest + entry.payload


def made_batch(count: int, digest_bytes: int, *, seed: int = 1) -> tuple[EntryBatch, list[Entry]]:
    """Make a batch whose buffer has other bytes before, between and after the entries."""
    chance = random.Random(seed)
    entries, buffer, offsets, sizes = [], bytearray(), [], []
    for number in range(count):
        entry = Entry(9, 100 + 3 * number, 98 + number, 1000 + number, chance.randbytes(chance.choice((0, 1, 40))))
        buffer += chance.randbytes(chance.randrange(9))
        offsets.append(len(buffer))
        buffer += encoded(entry, chance.randbytes(digest_bytes))
        sizes.append(len(buffer) - offsets[-1])
        entries.append(entry)
    buffer += b"rest"
    ids = np.array([entry.entry_id for entry in entries], np.int64)
    view = memoryview(buffer)
    return EntryBatch(9, ids, view, np.array(offsets, np.int64), np.array(sizes, np.int64), digest_bytes), entries


@pytest.mark.parametrize("digest_bytes", [0, 4, 32])
@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256))])
def test_decode_entry(digest_bytes: int, payload: bytes) -> None:
    entry = Entry(2**63 - 1, 5, -1, 2**62, payload)
    data = b"before" + encoded(entry, b"d" * digest_bytes)
    decoded = decode_entry(memoryview(data + b"after"), 6, len(data), digest_bytes)
    assert type(decoded) is Entry
    assert decoded == entry
    assert type(decoded.payload) is bytes


@pytest.fixture(scope="module", params=["native", "pure"], autouse=True)
def core(request: pytest.FixtureRequest) -> Iterator[str]:
    """Decode batches by the native core, and without it."""
    if request.param == "native" and CORE is None:
        pytest.skip("the native core is not there: no compiler built it, or PYBK_PURE is set")
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "pure":
            patched.setattr(entries_of, "CORE", None)
        yield request.param


@pytest.mark.parametrize("digest_bytes", [0, 4, 32])
@pytest.mark.parametrize("count", [0, 1, 5, 31, 32, 100])
def test_batch_gives_its_entries(count: int, digest_bytes: int) -> None:
    batch, entries = made_batch(count, digest_bytes)
    assert len(batch) == count
    assert list(batch) == entries
    assert [batch[index] for index in range(count)] == entries
    assert all(type(entry) is Entry for entry in batch)
    assert batch.payload_bytes == sum(len(entry.payload) for entry in entries)
    assert batch.payload_sizes.tolist() == [len(entry.payload) for entry in entries]
    for offset, size, entry in zip(batch.payload_offsets.tolist(), batch.payload_sizes.tolist(), entries, strict=True):
        assert batch.buffer[offset : offset + size] == entry.payload


@pytest.mark.parametrize("count", [2, 100])
@pytest.mark.parametrize(
    ("offset", "size", "error"),
    [
        (0, 3, None),
        (10**6, 60, struct.error),
        (2**62, 2**62, struct.error),
        (2**63 - 1, 2**62, struct.error),
        (-(10**6), 60, struct.error),
    ],
)
def test_entries_before_one_that_lies_elsewhere_are_given(
    count: int, offset: int, size: int, error: type[Exception] | None
) -> None:
    batch, entries = made_batch(count, 4)
    offsets, sizes = batch.offsets.copy(), batch.sizes.copy()
    offsets[-1], sizes[-1] = offset, size
    wrong = iter(EntryBatch(9, batch.entry_ids, batch.buffer, offsets, sizes, 4))
    assert [next(wrong) for _ in range(count - 1)] == entries[:-1]
    if error is None:
        assert next(wrong).payload == b""
    else:
        with pytest.raises(error):
            next(wrong)


def test_batch_index() -> None:
    batch, entries = made_batch(4, 8)
    assert batch[-1] == entries[-1]
    assert batch.payload(-1) == entries[-1].payload
    for index in (4, -5):
        for get in (batch.__getitem__, batch.payload):
            with pytest.raises(IndexError):
                get(index)
    wrong: tuple[Any, ...] = (None, "a", [0], (0,), 1.0, True, np.bool_(True), np.array([0]))
    for index in wrong:
        for get in (batch.__getitem__, batch.payload):
            with pytest.raises(TypeError, match="whole number"):
                get(index)
    with pytest.raises(TypeError, match="whole number"):
        batch.payload(slice(0, 1))  # type: ignore[arg-type]


def test_a_payload_is_not_copied_and_its_buffer_is_read_only() -> None:
    batch, entries = made_batch(4, 8)
    payload = batch.payload(2)
    assert payload == entries[2].payload
    assert payload.obj is batch.buffer.obj
    assert batch.buffer.readonly
    assert payload.readonly


def test_batch_repr_names_the_entries() -> None:
    assert "ledger 9, entries 100 to 103" in repr(made_batch(2, 8)[0])
    assert "no entries" in repr(made_batch(0, 8)[0])


@pytest.mark.parametrize("size", [1, 32, 64])
def test_gather(size: int) -> None:
    buffer = random.Random(3).randbytes(500)
    offsets = np.array([0, 7, 7, 500 - size, 13], np.int64)
    pieces = gather(memoryview(buffer), offsets, size)
    assert pieces.shape == (5,)
    assert [piece.tobytes() for piece in pieces] == [buffer[at : at + size] for at in offsets.tolist()]


def test_gather_beyond_the_buffer() -> None:
    for length, offset in ((31, 0), (40, 9), (0, 0)):
        with pytest.raises(IndexError):
            gather(memoryview(bytes(length)), np.array([offset], np.int64), ENTRY_HEADER_BYTES)


def test_a_slice_is_a_batch_over_the_same_buffer() -> None:
    batch, entries = made_batch(6, 8)
    for part in (slice(2, 5), slice(-2, None), slice(None, None, -2), slice(4, 2)):
        piece = batch[part]
        assert type(piece) is EntryBatch
        assert list(piece) == entries[part]
        assert piece.buffer is batch.buffer
        assert piece.payload_bytes == sum(len(entry.payload) for entry in entries[part])


def test_numbers_of_numpy_are_indices() -> None:
    batch, entries = made_batch(4, 8)
    assert batch[np.int64(1)] == entries[1]
    assert batch.payload(np.uint8(3)) == entries[3].payload


@pytest.mark.parametrize("count", [0, 5])
def test_a_pickled_batch_has_its_entries_and_no_other_bytes(count: int) -> None:
    batch, entries = made_batch(count, 8)
    again: EntryBatch = ForkingPickler.loads(ForkingPickler.dumps(batch))
    assert list(again) == entries
    assert again.buffer.readonly
    assert len(again.buffer) == int(batch.sizes.sum())
    assert list(copy.deepcopy(batch)) == entries
    assert copy.copy(batch) is batch


@pytest.mark.parametrize("count", [0, 1, 6])
def test_a_batch_becomes_arrow_columns(count: int) -> None:
    pa = pytest.importorskip("pyarrow")
    batch, entries = made_batch(count, 8)
    rows = batch[::-1].to_arrow()
    assert rows.to_pylist() == [entry._asdict() for entry in reversed(entries)]
    assert [str(field.type) for field in rows.schema] == ["int64"] * 4 + ["binary"]
    assert pa.record_batch(batch).equals(batch.to_arrow())
    assert pa.RecordBatchReader.from_stream(batch).read_all().to_pylist() == [entry._asdict() for entry in entries]


def test_arrow_columns_need_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'pybk\[arrow\]'"):
        made_batch(1, 8)[0].to_arrow()
