"""Entries of named logs: their bytes, what is read from them, and that damage of any kind is an error of its own."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.ledger.entry import ENTRY_HEADER_BYTES, EntryBatch
from pybk.streams.format import (
    NO_VALUE,
    NOTHING_YET,
    DetachedHeader,
    EntryFlag,
    EntryHeader,
    Highest,
    Item,
    Origin,
    Records,
    decode_batch,
    decode_entry_header,
    encode_attributes,
    encode_items,
    encode_record,
    highest_after,
    highest_before,
    item_bytes,
)
from pybk.streams.log_record import LogRecord, log_records

ITEM = Item(b"data", 5, 3, encode_attributes(b"k", [("h", b"v")]))

GOLDEN = {
    "one plain record": (
        encode_items(7, [Item(b"data", 5, NO_VALUE, b"")], NOTHING_YET),
        "0102050001000000" + "0700000000000000" + "ff" * 16 + "0500000000000000" + b"data".hex(),
    ),
    "one full record": (
        encode_items(7, [ITEM], Highest(9, 2)),
        "01021d0001000000"
        "0700000000000000"
        "0900000000000000"
        "0200000000000000"
        "0500000000000000"
        "0300000000000000"
        "01000100" + b"k".hex() + "010001000000" + b"hv".hex() + b"data".hex(),
    ),
    "two records, of which more follow": (
        encode_items(7, [ITEM, Item(b"", 6, NO_VALUE, b"")], Highest(9, 2), more=True),
        "01021f0002000000"
        "0700000000000000"
        "0900000000000000"
        "0200000000000000"
        "05000000000000000600000000000000"
        "0300000000000000ffffffffffffffff"
        "1100000015000000"
        "01000100" + b"k".hex() + "010001000000" + b"hv".hex() + b"data".hex() + "ffff0000",
    ),
    "one full record of a detached ledger": (
        encode_items(7, [ITEM], Highest(9, 2), relative=True),
        "01023d0001000000"
        "0700000000000000"
        "0900000000000000"
        "0200000000000000"
        "0500000000000000"
        "0300000000000000"
        "01000100" + b"k".hex() + "010001000000" + b"hv".hex() + b"data".hex(),
    ),
    "the first entry of a detached ledger": (
        DetachedHeader(bytes(range(16)), "log", "query", 3, 2, 1).encode(),
        "0103000000000000"
        "0000000000000000"
        + b'{"attempt":1,"epoch":3,"name":"log","partition":2,"query":"query",'.hex()
        + b'"uid":"000102030405060708090a0b0c0d0e0f"}'.hex(),
    ),
}
"""Entries, and their bytes as ``docs/design/ledger_lists.md`` lists them: a change of any is a change of the format."""


def batch_of(payloads: Sequence[bytes]) -> EntryBatch:
    encoded = [bytes(ENTRY_HEADER_BYTES) + payload for payload in payloads]
    sizes = np.array(list(map(len, encoded)), np.int64)
    ids = np.arange(1, len(payloads) + 1)
    return EntryBatch(0, ids, memoryview(b"".join(encoded)), sizes.cumsum() - sizes, sizes, 0)


def decoded(payloads: Sequence[bytes], seq: int) -> Records:
    return decode_batch(batch_of(payloads), seq, where="ledger 0", segment=1)


def read(payloads: Sequence[bytes], seq: int) -> list[LogRecord]:
    return list(log_records(decoded(payloads, seq), name="log"))


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_of_an_entry_are_those_that_are_documented(name: str) -> None:
    payload, expected = GOLDEN[name]
    assert payload.hex() == expected


def test_a_golden_entry_is_read() -> None:
    payload = bytes.fromhex(GOLDEN["one full record"][1])
    record = read([payload], 7)[0]
    assert (record.position, record.data, record.time_ns, record.txid) == ((1, 1, 0, 7), b"data", 5, 3)
    assert (record.key, record.headers) == (b"k", (("h", b"v"),))
    assert highest_before(payload, where="") == Highest(9, 2)
    assert highest_after(payload, where="") == Highest(9, 3)
    assert highest_after(encode_record(7, b"", 5), where="") == NOTHING_YET


DETACHED = bytes.fromhex(GOLDEN["one full record of a detached ledger"][1])


def test_an_entry_of_an_adopted_ledger_counts_from_where_the_log_has_it() -> None:
    origin = Origin(100, Highest(4, 50))
    header = decode_entry_header(DETACHED, where="", origin=origin)
    assert (header.seq, header.records) == (107, 1)
    assert highest_before(DETACHED, where="", origin=origin) == Highest(9, 50)
    assert highest_after(DETACHED, where="", origin=Origin(100, Highest(4, 1))) == Highest(9, 3)
    records = decode_batch(batch_of([DETACHED]), 107, where="ledger 0", segment=2, origin=origin)
    (record,) = log_records(records, name="log")
    assert (record.position, record.data, record.time_ns, record.txid) == ((2, 1, 0, 107), b"data", 5, 3)
    with pytest.raises(CorruptError, match="begins with record 107, but 108 comes next"):
        decode_batch(batch_of([DETACHED]), 108, where="ledger 0", origin=origin)


def test_an_entry_without_the_mark_is_none_of_an_adopted_ledger_and_the_other_way_round() -> None:
    own = bytes.fromhex(GOLDEN["one full record"][1])
    with pytest.raises(CorruptError, match=r"entry 1 is not marked relative.*that the log adopted"):
        decode_batch(batch_of([own]), 7, where="ledger 0", origin=Origin(0, NOTHING_YET))
    with pytest.raises(CorruptError, match=r"entry 1 is marked relative.*that the log's writer made"):
        decode_batch(batch_of([DETACHED]), 7, where="ledger 0")


def test_versions_that_do_not_know_the_mark_refuse_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of those versions: any flag but the first five is unknown."""
    monkeypatch.setattr("pybk.streams.format.UNKNOWN_FLAGS", 0xFFFF & ~0x1F)
    for read_it in (lambda: decode_entry_header(DETACHED, where="ledger 0 entry 1"), lambda: decoded([DETACHED], 7)):
        with pytest.raises(UnsupportedFormatError, match=r"ledger 0 entry 1 has flags 0x3d.*install a newer pybk"):
            read_it()


VALUES = st.integers(0, 2**63 - 1)
ITEMS = st.builds(
    Item,
    st.binary(max_size=30),
    VALUES,
    st.just(NO_VALUE) | VALUES,
    st.just(b"") | st.builds(encode_attributes, st.binary(max_size=9), st.just([("name", b"value")])),
)
ENTRIES = st.lists(st.lists(ITEMS, min_size=1, max_size=5), min_size=1, max_size=4)


def encoded(entries: list[list[Item]], seq: int) -> tuple[list[bytes], list[Highest]]:
    """Return entries, and the highest values after each."""
    highest, payloads, after = NOTHING_YET, [], []
    for items in entries:
        payloads.append(encode_items(seq, items, highest))
        highest = Highest(
            max(highest.time_ns, *(each.time_ns for each in items)), max(highest.txid, *(each.txid for each in items))
        )
        after.append(highest)
        seq += len(items)
    return payloads, after


@given(entries=ENTRIES, seq=st.integers(0, 2**40))
def test_what_was_encoded_is_decoded(entries: list[list[Item]], seq: int) -> None:
    payloads, after = encoded(entries, seq)
    found = read(payloads, seq)
    assert [each.seq for each in found] == list(range(seq, seq + len(found)))
    places = [(entry, slot) for entry, items in enumerate(entries, 1) for slot in range(len(items))]
    assert [(each.position.entry, each.position.slot) for each in found] == places
    items = [item for each in entries for item in each]
    assert [each.data for each in found] == [each.data for each in items]
    assert [each.time_ns for each in found] == [each.time_ns for each in items]
    assert [each.txid for each in found] == [None if each.txid == NO_VALUE else each.txid for each in items]
    for record, item in zip(found, items, strict=True):
        assert encode_attributes(record.key, record.headers) == item.attributes
    assert [highest_after(each, where="") for each in payloads] == after
    for payload, each in zip(payloads, entries, strict=True):
        assert len(payload) <= 32 + sum(map(item_bytes, each))


def use_all(payloads: Sequence[bytes], seq: int) -> None:
    """Read entries in every way that there is; each returns something or raises what damage raises."""
    with suppress(CorruptError, UnsupportedFormatError):
        found = read(payloads, seq)
        assert [each.seq for each in found] == list(range(seq, seq + len(found)))
        assert sum(len(each.data) for each in found) <= sum(map(len, payloads))
    for payload in payloads:
        for call in (decode_entry_header, highest_before, highest_after):
            with suppress(CorruptError, UnsupportedFormatError):
                call(payload, where="ledger 0 entry 1")


@given(
    entries=ENTRIES,
    damage=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_changed_bytes_are_an_error_or_other_values(
    entries: list[list[Item]], damage: list[tuple[int, int, int]]
) -> None:
    payloads = [bytearray(each) for each in encoded(entries, 7)[0]]
    for entry, at, value in damage:
        payload = payloads[entry % len(payloads)]
        payload[at % len(payload)] = value
    use_all(list(map(bytes, payloads)), 7)


@given(
    flags=st.integers(0, 40),
    count=st.sampled_from([0, 1, 2, 3, 1000, 2**31, 2**32 - 1]),
    body=st.binary(max_size=80),
    beside=st.booleans(),
)
def test_any_body_is_read_or_damaged(flags: int, count: int, body: bytes, beside: bool) -> None:
    """Before memory is taken for as many records as the header says."""
    payload = struct.pack("<BBHIq", 1, 2, flags, count, 7) + body
    before = [encode_items(6, [ITEM], NOTHING_YET)] if beside else []
    use_all([*before, payload], 7 - beside)


@given(entries=ENTRIES, cut=st.floats(0, 1, exclude_max=True))
def test_an_entry_that_was_cut_off_inside_its_tables_is_damaged(entries: list[list[Item]], cut: float) -> None:
    payloads = encoded(entries, 7)[0]
    last, items = payloads[-1], entries[-1]
    tables = 16 + 16 + 8 * len(items)
    payloads[-1] = last[: int(tables * cut)]
    with pytest.raises(CorruptError):
        read(payloads, 7)
    with pytest.raises(CorruptError):
        highest_after(payloads[-1], where="")


def test_headers_that_cannot_be_say_why() -> None:
    def header(format_: int = 1, kind: int = 2, flags: int = 0, count: int = 1, seq: int = 7) -> bytes:
        return struct.pack("<BBHIq", format_, kind, flags, count, seq)

    assert decode_entry_header(header(), where="") == EntryHeader(EntryFlag.NONE, 1, 7)
    wrong = [
        (header(format_=2), UnsupportedFormatError, "format 2"),
        (header(flags=64), UnsupportedFormatError, "flags 0x40.*0x20"),
        (header(flags=32), CorruptError, "is marked relative"),
        (header(kind=1), CorruptError, "kind 1"),
        (header(count=0), CorruptError, "no records"),
        (header()[:-1], CorruptError, "15 bytes"),
    ]
    for payload, error, text in wrong:
        with pytest.raises(error, match=text):
            decode_entry_header(payload, where="ledger 0 entry 1")
        with pytest.raises(error):
            decoded([payload], 7)
    with pytest.raises(CorruptError, match="begins with record 8, but 7 comes next"):
        decoded([header(seq=8)], 7)
    with pytest.raises(CorruptError, match="does not say what was highest"):
        highest_before(header(), where="ledger 0 entry 1")
