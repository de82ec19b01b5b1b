"""Records: what is written is what is read, and nothing else is."""

from __future__ import annotations

import runpy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.storage.format.log_file import (
    LOCATION_BYTES,
    RECORD_HEADER_BYTES,
    RecordHeader,
    RecordKind,
    check_body,
    decode_header,
    encode_control,
    encode_entries,
    encode_header,
    entry_ends,
)
from tests.paths import GOLDEN

IDS = st.integers(-(1 << 63), (1 << 63) - 1)


def read(buffer: bytes, offset: int = 0) -> tuple[RecordHeader, list[bytes]]:
    """Return header and entries of a record, checked in full."""
    view = memoryview(buffer)
    header = decode_header(view, offset, where="here")
    start = offset + RECORD_HEADER_BYTES
    body = view[start : start + header.body_bytes]
    check_body(header, body, where="here")
    first, ends = entry_ends(body, header.entry_count, where="here")
    starts = [first, *ends[:-1].tolist()]
    return header, [bytes(body[a:b]) for a, b in zip(starts, ends.tolist(), strict=True)]


@given(
    ledger=IDS,
    first=IDS,
    entries=st.lists(st.binary(max_size=40), min_size=1, max_size=9),
    lsn=st.integers(0, (1 << 64) - 1),
    stride=st.integers(1, (1 << 32) - 1),
    shift=st.integers(0, 9),
)
def test_entries_come_back(ledger: int, first: int, entries: list[bytes], lsn: int, stride: int, shift: int) -> None:
    joined = b"".join(entries)
    pieces: list[bytes | memoryview] = [joined[:7], memoryview(joined)[7:]]
    header, body = encode_entries(ledger, first, [len(e) for e in entries], pieces, lsn=lsn, stride=stride)
    assert len(header) == RECORD_HEADER_BYTES
    found, back = read(bytes(shift) + header + body + b"behind", shift)
    assert back == entries
    checksum = xxh3_64_intdigest(body)
    n = len(body)
    assert found == (RecordKind.ENTRIES, 0, ledger, first, lsn, len(entries), stride, n, n, checksum)


@given(kind=st.sampled_from(list(RecordKind)), ledger=IDS, number=IDS, body=st.binary(max_size=50))
def test_controls_come_back(kind: RecordKind, ledger: int, number: int, body: bytes) -> None:
    record = encode_control(kind, ledger, number, body, lsn=3)
    found = decode_header(memoryview(record), 0, where="here")
    assert found[:7] == (kind, 0, ledger, number, 3, 0, 1)
    assert record[RECORD_HEADER_BYTES:] == body
    check_body(found, memoryview(body), where="here")


@pytest.mark.parametrize("entries", [[b"only one"], [b"one", b"", b"three"]])
def test_every_flipped_bit_is_noticed(entries: list[bytes]) -> None:
    record = b"".join(encode_entries(5, 9, [len(e) for e in entries], entries, lsn=2))
    assert read(record)[1] == entries
    for bit in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError, match="here"):
            read(bytes(damaged))


def test_every_shortened_record_is_noticed() -> None:
    record = b"".join(encode_entries(5, 9, [3, 4], [b"abcdefg"]))
    for size in range(len(record)):
        with pytest.raises(CorruptError, match=f"beyond the {size} bytes"):
            read(record[:size])


def test_newer_format_is_not_corruption() -> None:
    head = bytearray(encode_entries(5, 9, [3], [b"abc"])[0][:56])
    head[2] += 1
    newer = bytes(head) + xxh3_64_intdigest(bytes(head)).to_bytes(8, "little") + b"abc"
    with pytest.raises(UnsupportedFormatError, match=r"format 2 .* reads 1"):
        read(newer)


@pytest.mark.parametrize(
    ("count", "table"),
    [(2, [2, 5]), (2, [2, 3]), (2, [5, 4]), (2, [0xFFFFFFFF, 4]), (3, [3, 2, 4]), (2000, []), (0xFFFFFFFF, [])],
    ids=["end beyond", "end before", "falls to the end", "falls far", "falls", "too long", "huge"],
)
def test_wrong_tables_are_noticed(count: int, table: list[int]) -> None:
    body = b"".join(end.to_bytes(4, "little") for end in table) + b"abcd"
    with pytest.raises(CorruptError, match=f"table of {count}"):
        entry_ends(memoryview(body), count, where="here")


def test_huge_body_is_refused_before_anything_is_read() -> None:
    header = encode_header(RecordKind.ENTRIES, 1, 0, (1 << 32) - 1, 0, entry_count=1)
    with pytest.raises(CorruptError, match="4294967295 bytes"):
        decode_header(memoryview(header + b"abc"), 0, where="here")


def test_golden_records() -> None:
    golden = (GOLDEN / "records").read_bytes()
    assert runpy.run_path(str(GOLDEN / "make.py"))["records"]() == golden
    facts = []
    offset = 0
    while offset < len(golden):
        header, entries = (
            read(golden, offset)
            if golden[offset + 3] == 1
            else (decode_header(memoryview(golden), offset, where="golden"), [])
        )
        facts.append((header.kind, header.ledger_id, header.first_entry_id, header.stride, entries))
        offset += RECORD_HEADER_BYTES + header.body_bytes
    assert facts == [
        (1, 5, 0, 1, [b"first"]),
        (1, 5, 1, 1, [b"abc", b"", b"defg"]),
        (1, 6, 10, 7, [b"x", b"y"]),
        (2, 5, 3, 1, []),
        (3, 6, 0, 1, []),
        (4, 5, 2, 1, []),
        (5, -1, 0, 1, []),
    ]


def test_run_is_32_bytes() -> None:
    assert LOCATION_BYTES == 32
