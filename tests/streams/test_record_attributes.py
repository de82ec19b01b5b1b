"""Keys and headers of many records at once: as those of each record alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.errors import CorruptError
from pybk.ledger.entry import ENTRY_HEADER_BYTES, EntryBatch
from pybk.streams.format import Highest, Item, Records, decode_attributes, decode_batch, encode_attributes, encode_items
from pybk.streams.record_attributes import Pieces, record_parts

HEADERS = st.lists(st.tuples(st.text(min_size=1, max_size=5), st.binary(max_size=9)), max_size=4).map(tuple)
ATTRIBUTES = st.tuples(st.one_of(st.none(), st.binary(max_size=6)), HEADERS)
RECORDS = st.lists(st.tuples(ATTRIBUTES, st.binary(max_size=9)), min_size=1, max_size=12)


def pieces_of(records: Records, pieces: Pieces) -> list[bytes]:
    return [
        bytes(records.buffer[start : start + size])
        for start, size in zip(pieces.starts.tolist(), pieces.sizes.tolist(), strict=True)
    ]


def decoded(payloads: list[bytes]) -> Records:
    """Return the records of entries with these payloads."""
    encoded = [bytes(ENTRY_HEADER_BYTES) + payload for payload in payloads]
    sizes = np.array(list(map(len, encoded)), np.int64)
    ids = np.arange(1, len(payloads) + 1)
    batch = EntryBatch(0, ids, memoryview(b"".join(encoded)), sizes.cumsum() - sizes, sizes, 0)
    return decode_batch(batch, 0, where="here")


def entries_of(records: list[tuple[tuple[bytes | None, tuple[tuple[str, bytes], ...]], bytes]]) -> list[bytes]:
    """Return the payloads of entries: one with all of the records, and then one with each."""
    items = [Item(data, 5, -1, encode_attributes(*attributes)) for attributes, data in records]
    alone = [encode_items(len(items) + at, [item], Highest()) for at, item in enumerate(items)]
    return [encode_items(0, items, Highest()), *alone]


@given(RECORDS)
def test_the_parts_are_those_of_each_record(records: list[Any]) -> None:
    found = decoded(entries_of(records))
    parts = record_parts(found, where="log 'x'")
    wanted = records + records
    keys, data = pieces_of(found, parts.keys), pieces_of(found, parts.data)
    names, values = (pieces_of(found, each) for each in (parts.header_names, parts.header_values))
    pairs = iter(zip(names, values, strict=True))
    for at, each in enumerate(wanted):
        (key, headers), payload = each
        assert (keys[at] if parts.has_key[at] else None, data[at]) == (key, payload)
        own = tuple(next(pairs) for _ in range(int(parts.header_counts[at])))
        assert tuple((name.decode(), value) for name, value in own) == headers
    assert next(pairs, None) is None


@pytest.mark.parametrize("cut", [0, 3, 4, 6, 8, 13, 15])
def test_damage_is_found(cut: int) -> None:
    """Wherever the bytes end, as decoding of the record alone finds it."""
    attributes = encode_attributes(b"key", (("name", b"va"),))
    item = Item(b"", 5, -1, attributes[:cut] or b"\x01")
    found = decoded([encode_items(0, [Item(b"x", 5, -1, attributes)], Highest()), encode_items(1, [item], Highest())])
    with pytest.raises(CorruptError):
        decode_attributes(item.attributes, where="x")
    with pytest.raises(CorruptError, match="log 'x': the key and headers of record 1 are damaged"):
        record_parts(found, where="log 'x'")


def test_records_without_attributes_are_their_data() -> None:
    found = decoded([encode_items(0, [Item(b"a", 5, -1, b""), Item(b"", 5, -1, b"")], Highest())])
    parts = record_parts(found, where="x")
    assert pieces_of(found, parts.data) == [b"a", b""]
    assert not parts.has_key.any()
    assert parts.header_counts.tolist() == [0, 0]
