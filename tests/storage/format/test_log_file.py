"""Log file and commit headers: sound ones come back, nothing else does."""

from __future__ import annotations

import runpy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.ledger import CORE
from pybk.storage.format import log_file
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    COMMIT_HEADER_BYTES,
    CommitHeader,
    check_body,
    decode_commit_header,
    decode_file_header,
    decode_header,
    encode_commit_header,
    encode_entry_commit,
    encode_file_header,
    file_header_is_whole,
    padding,
)
from tests.paths import GOLDEN

STORE = b"0123456789abcdef"
U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)


def newer(header: bytes) -> bytes:
    """Return the header with the next format version and a matching checksum."""
    start = 8 if header.startswith(b"PYBKLOG1") else 4
    head = bytearray(header[:56])
    head[start] += 1
    return bytes(head) + xxh3_64_intdigest(bytes(head)).to_bytes(8, "little") + header[64:]


@given(file_id=U64, first=U64, durable=U64)
def test_file_header_comes_back(file_id: int, first: int, durable: int) -> None:
    block = encode_file_header(STORE, file_id, first, durable)
    assert len(block) == BLOCK_BYTES
    found = decode_file_header(memoryview(block), store_id=STORE, file_id=file_id, where="here")
    assert found == (STORE, file_id, first, durable)


@given(lsn=U64, durable=U64, file_id=U64, count=U32, size=U32, shift=st.integers(0, 9))
def test_commit_header_comes_back(lsn: int, durable: int, file_id: int, count: int, size: int, shift: int) -> None:
    header = encode_commit_header(lsn, durable, file_id, count, size)
    assert len(header) == COMMIT_HEADER_BYTES
    found = decode_commit_header(memoryview(bytes(shift) + header), shift, file_id)
    assert found == CommitHeader(lsn, durable, file_id, count, size)


@pytest.mark.parametrize("core", [None, CORE])
@pytest.mark.parametrize("payload_bytes", [0, 1, 3936, 3937, 10_000])
def test_a_commit_of_one_entry_is_read_as_any_other(
    core: object, payload_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "CORE", core)
    prefix, payload = bytes(range(32)), bytes(payload_bytes)
    commit = memoryview(b"".join(encode_entry_commit(5, 9, 7, 3, prefix, payload)))
    assert len(commit) == BLOCK_BYTES * (1 + (payload_bytes > 3936) + (payload_bytes > 8032))
    body_bytes = 32 + payload_bytes
    assert decode_commit_header(commit, 0, 3) == CommitHeader(7, 6, 3, 1, 64 + body_bytes)
    header = decode_header(commit, 64, where="here")
    assert header[:9] == (1, 0, 5, 9, 7, 1, 1, body_bytes, body_bytes)
    check_body(header, commit[128 : 128 + body_bytes], where="here")
    assert commit[128:] == prefix + payload + bytes(len(commit) - 128 - body_bytes)


@given(garbage=st.binary(max_size=200), offset=st.integers(0, 300))
def test_garbage_is_not_read_as_a_commit(garbage: bytes, offset: int) -> None:
    assert decode_commit_header(memoryview(garbage), offset, 1) is None
    assert decode_commit_header(memoryview(b"PBKC\1\0\0\0" + garbage), 0, 1) is None


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    block = encode_file_header(STORE, 7, 5, 4)
    header = encode_commit_header(5, 4, 7, 1, 100)
    for bit in range(8 * 64):
        damaged = bytearray(block)
        damaged[bit // 8] ^= 1 << bit % 8
        assert not file_header_is_whole(memoryview(damaged))
        with pytest.raises(CorruptError, match="here"):
            decode_file_header(memoryview(damaged), store_id=STORE, file_id=7, where="here")
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode_commit_header(memoryview(damaged), 0, 7) is None


def test_shortened_headers_are_noticed() -> None:
    block = encode_file_header(STORE, 7, 5, 4)
    for size in (0, 1, 63, 64, BLOCK_BYTES - 1):
        with pytest.raises(CorruptError, match=f"after {size} bytes"):
            decode_file_header(memoryview(block)[:size], store_id=STORE, file_id=7, where="here")
    header = encode_commit_header(5, 4, 7, 1, 100)
    assert all(decode_commit_header(memoryview(header)[:size], 0, 7) is None for size in range(64))


def test_only_a_block_of_zeros_was_never_begun() -> None:
    block = bytearray(BLOCK_BYTES)
    assert decode_file_header(memoryview(block), store_id=STORE, file_id=7, where="here") is None
    block[-1] = 1
    with pytest.raises(CorruptError, match="no log file header"):
        decode_file_header(memoryview(block), store_id=STORE, file_id=7, where="here")


def test_headers_of_another_place_are_noticed() -> None:
    block = memoryview(encode_file_header(STORE, 7, 5, 4))
    for store_id, file_id in ((STORE, 8), (bytes(16), 7)):
        with pytest.raises(CorruptError, match="put the right file") as caught:
            decode_file_header(block, store_id=store_id, file_id=file_id, where="here")
        assert caught.value.path == "here"
    assert file_header_is_whole(block)
    assert decode_commit_header(memoryview(encode_commit_header(5, 4, 7, 1, 100)), 0, 8) is None


def test_a_feature_that_this_version_does_not_know_is_refused() -> None:
    head = bytearray(encode_file_header(STORE, 7, 5, 4))
    head[12] = 4
    head[56:64] = xxh3_64_intdigest(bytes(head[:56])).to_bytes(8, "little")
    with pytest.raises(UnsupportedFormatError, match="incompatible features 0x4"):
        decode_file_header(memoryview(head), store_id=STORE, file_id=7, where="x")


def test_newer_formats_are_not_corruption() -> None:
    with pytest.raises(UnsupportedFormatError, match="format 2; this pybk reads 1"):
        decode_file_header(memoryview(newer(encode_file_header(STORE, 7, 5, 4))), store_id=STORE, file_id=7, where="x")
    with pytest.raises(UnsupportedFormatError, match="format 2 at offset 0; this pybk reads 1"):
        decode_commit_header(memoryview(newer(encode_commit_header(5, 4, 7, 1, 9))), 0, 7)


@given(size=st.integers(0, 1 << 40))
def test_padding(size: int) -> None:
    assert 0 <= padding(size) < BLOCK_BYTES
    assert (size + padding(size)) % BLOCK_BYTES == 0


def test_golden_log_file() -> None:
    golden = (GOLDEN / "0000000000000007.log").read_bytes()
    made = runpy.run_path(str(GOLDEN / "make.py"))
    assert made["log_file"]() == golden
    view = memoryview(golden)
    store_id = bytes(range(16))
    assert decode_file_header(view, store_id=store_id, file_id=7, where="golden") == (store_id, 7, 41, 40)
    assert decode_commit_header(view, BLOCK_BYTES, 7) == (41, 40, 7, 7, 499)
    assert decode_commit_header(view, 2 * BLOCK_BYTES, 7) == (42, 41, 7, 1, 68)
    assert decode_commit_header(view, 3 * BLOCK_BYTES, 7) is None
