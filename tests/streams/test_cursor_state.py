"""The state of a cursor, compared with a set of numbers; ranges are never dropped, whatever their number."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.errors import CorruptError, UnsupportedFormatError, UsageError
from pybk.streams.cursor_state import (
    PART_RANGES,
    PROPERTIES_BYTES_MAX,
    CursorState,
    StatePart,
    checked_properties,
    encode_acks,
    encode_again,
    encode_handed,
    encode_lease,
    encode_seek,
    is_state,
    merged,
    ranges_of,
)

LIMIT = 60
SEQS = st.integers(0, LIMIT - 1)
RANGES = st.tuples(SEQS, st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))
CHANGES = st.lists(st.one_of(RANGES, SEQS), max_size=60)


def reloaded(state: CursorState) -> CursorState:
    """Return the state that comes back from bytes."""
    found = CursorState()
    for number, part in enumerate(state.encode()):
        found.apply(part, where=f"part {number}")
    assert found.is_whole
    return found


def shown(state: CursorState) -> tuple[int, list[tuple[int, int]], dict[str, int | str]]:
    """Return everything that a state says."""
    return state.first_unacked, state.acked_ranges, state.properties


@given(SEQS, CHANGES)
def test_it_says_what_a_set_of_acknowledged_records_says(start: int, changes: list[tuple[int, int] | int]) -> None:
    state, replayed = CursorState(start), CursorState(start)
    acked = set(range(start))
    for change in changes:
        if isinstance(change, int):
            acked = set(range(change))
            state.seek(change)
            replayed.apply(encode_seek(change), where="seek")
        else:
            assert state.ack(*change) == len(set(range(*change)) - acked)
            acked |= set(range(*change))
            replayed.apply(encode_acks([change]), where="ack")
        whole = set(range(2 * LIMIT))
        assert state.first_unacked == min(whole - acked)
        assert state.last_acked == max(acked, default=-1)
        for end in (0, state.first_unacked, LIMIT // 2, LIMIT, 2 * LIMIT):
            unacked = sorted(set(range(end)) - acked)
            assert state.unacked_count(end) == len(unacked)
            assert state.unacked_ranges(0, end) == ranges_of(unacked)
        for seq in range(LIMIT + 12):
            assert state.is_acked(seq) == (seq in acked)
            assert state.next_unacked(seq) == min(each for each in whole - acked if each >= seq)
        assert shown(state) == shown(replayed) == shown(reloaded(state))


@given(st.sets(st.integers(0, 1 << 62), max_size=50))
def test_numbers_and_ranges_are_the_same(numbers: set[int]) -> None:
    ranges = ranges_of(numbers)
    assert sum(end - first for first, end in ranges) == len(numbers)
    assert all(first in numbers and end - 1 in numbers and end not in numbers for first, end in ranges)


@given(st.lists(RANGES))
def test_ranges_that_touch_are_merged(ranges: list[tuple[int, int]]) -> None:
    assert merged(ranges) == ranges_of({seq for each in ranges for seq in range(*each)})


@given(st.lists(RANGES, min_size=1, max_size=5), st.dictionaries(st.text(max_size=3), st.integers() | st.text()))
def test_properties_are_set_by_the_record_that_acknowledges(
    ranges: list[tuple[int, int]], properties: dict[str, int | str]
) -> None:
    apart = ranges_of({seq for each in ranges for seq in range(*each)})
    state = CursorState()
    state.properties = {"before": 1}
    state.apply(encode_acks(apart, properties), where="ack")
    assert state.properties == {"before": 1} | properties
    assert shown(reloaded(state)) == shown(state)


def test_pulsar_25540_ack_ranges_are_never_dropped() -> None:
    state = CursorState()
    count = 5 * PART_RANGES + 3
    for seq in range(1, 2 * count, 2):
        state.ack(seq, seq + 1)
    assert state.range_count == count
    parts = state.encode()
    assert len(parts) == 6
    assert max(map(len, parts)) < 256 << 10
    again = reloaded(state)
    assert shown(again) == shown(state)
    random = Random(1)
    holes = list(range(0, 2 * count, 2))
    random.shuffle(holes)
    for seq in holes:
        again.ack(seq, seq + 1)
    assert again.acked_ranges == []
    assert again.first_unacked == 2 * count


def test_pulsar_25985_state_depends_on_holes_and_not_on_the_backlog() -> None:
    state = CursorState()
    state.ack(1, 30_000_000_000)
    assert len(b"".join(state.encode())) < 100
    assert state.unacked_count(30_000_000_001) == 2
    assert state.unacked_ranges(0, 30_000_000_001) == [(0, 1), (30_000_000_000, 30_000_000_001)]


def test_parts_that_are_missing_or_out_of_order_are_noticed() -> None:
    state = CursorState()
    for seq in range(1, 4 * PART_RANGES, 2):
        state.ack(seq, seq + 1)
    first, second = state.encode()
    with pytest.raises(CorruptError):
        CursorState().apply(second, where="here")
    for wrong in (first, encode_acks([(0, 1)]), encode_seek(1)):
        found = CursorState()
        found.apply(first, where="here")
        assert not found.is_whole
        with pytest.raises(CorruptError):
            found.apply(wrong, where="here")
    assert is_state(first, where="here")
    assert not is_state(second, where="here")
    assert not is_state(encode_seek(1), where="here")


DELIVERIES = st.one_of(
    RANGES.map(lambda each: ("ack", *each)),
    RANGES.map(lambda each: ("again", *each)),
    st.tuples(st.sampled_from(["handed", "lease", "seek"]), SEQS, st.just(0)),
    st.just(("part", 0, 0)),
)


def changed(state: CursorState, what: str, first: int, end: int) -> bytes:
    """Change a state, and return the record that says it."""
    if what == "ack":
        record = encode_acks([(first, end)], {"last": first})
    elif what == "again":
        record = encode_again([(first, end)], max(state.deliveries(seq) for seq in range(first, end)) + 1)
    else:
        encode: dict[str, Callable[[int], bytes]] = {
            "handed": encode_handed,
            "lease": encode_lease,
            "seek": encode_seek,
        }
        record = encode[what](first)
    state.apply(record, where=what)
    return record


def replayed(records: list[bytes]) -> CursorState:
    """Return what records come to, of which the first begins a state."""
    assert is_state(records[0], where="the first")
    found = CursorState()
    for number, record in enumerate(records):
        found.apply(record, where=f"record {number}")
    return found


def delivered(state: CursorState) -> object:
    """Return what a state says of deliveries."""
    unacked = [seq for each in state.unacked_ranges(0, 2 * LIMIT) for seq in range(*each)]
    return state.handed_end, state.lease_end, [(seq, state.deliveries(seq)) for seq in unacked]


@given(SEQS, st.lists(DELIVERIES, max_size=60))
def test_parts_of_a_state_between_changes_come_to_the_state(start: int, changes: list[tuple[str, int, int]]) -> None:
    state, records, last, since = CursorState(start), list[bytes](), StatePart([], None), 0
    for change in [("part", 0, 0), *changes, *[("part", 0, 0)] * 2 * LIMIT]:
        if change[0] == "part":
            begins = last.after is None
            last = state.part(last.after, 1 + start % 3)
            records += last.records
            if begins:
                since = len(records) - len(last.records)
            if last.after is None:  # what is before it is not needed any more
                records = records[since:]
                assert shown(replayed(records)) == shown(state)
                assert delivered(replayed(records)) == delivered(state)
            continue
        records.append(changed(state, *change))
        if change[0] == "seek":
            last = StatePart([], None)
        if replayed(records).is_whole:
            assert shown(replayed(records)) == shown(state)
            assert delivered(replayed(records)) == delivered(state)
    assert replayed(records).is_whole


def test_parts_have_every_range() -> None:
    state, records, at = CursorState(), list[bytes](), None
    for seq in range(1, 40, 2):
        state.ack(seq, seq + 1)
    for _ in range(5):
        part = state.part(at, 5)
        records += part.records
        at = part.after
    assert at is None
    assert shown(replayed(records)) == shown(state)


def test_a_state_that_lacks_parts_is_noticed() -> None:
    state = CursorState()
    for seq in range(1, 40, 2):
        state.ack(seq, seq + 1)
    first = state.part(None, 5)
    assert not replayed([*first.records, encode_acks([(50, 51)])]).is_whole
    with pytest.raises(CorruptError, match="has no end"):
        replayed([*first.records, *first.records])
    assert not is_state(state.part(first.after, 5).records[0], where="the second")


def test_the_bytes_of_records_of_deliveries_are_as_they_ever_were() -> None:
    state = CursorState(5)
    state.properties = {"offset": 7}
    state.ack(8, 10)
    state.hand_again(6, 8, 3)
    state.handed_end, state.lease_end = 20, 30
    zeros, one = bytes(4), bytes(4) + b"\1" + bytes(3)
    assert state.part(None, 9).records == [
        b"\2\4\0\0" + zeros + b"\5" + bytes(7) + one + b'{"offset":7}',
        b"\2\7\0\0" + zeros + b"\x14" + bytes(7) + one,
        b"\2\6\0\0" + zeros + b"\x1e" + bytes(7) + one,
        b"\1\2\0\0\1\0\0\0\10" + bytes(7) + one + bytes(8) + b"\2" + bytes(7),
        b"\2\10\0\0\1\0\0\0\6" + bytes(7) + zeros + b"\3\0\0\0" + bytes(8) + b"\2" + bytes(7),
        b"\2\5\0\0" + zeros + bytes(8) + one,
    ]


@given(st.binary(max_size=80))
def test_other_bytes_are_refused(data: bytes) -> None:
    state = CursorState()
    try:
        state.apply(data, where="here")
    except (CorruptError, UnsupportedFormatError):
        pass
    else:
        assert len(data) >= 24


@given(st.integers(0, 150), st.binary(min_size=1, max_size=1))
def test_a_changed_byte_is_refused_or_says_something_else(at: int, byte: bytes) -> None:
    encoded = bytearray(encode_acks([(5, 9), (20, 21), (40, 45)], {"offset": 7}))
    encoded[at % len(encoded)] = byte[0]
    state = CursorState()
    try:
        state.apply(bytes(encoded), where="here")
    except (CorruptError, UnsupportedFormatError):
        return
    assert shown(reloaded(state)) == shown(state)


@pytest.mark.parametrize(
    "properties",
    [[], {1: 1}, {"a": True}, {"a": 1.5}, {"a": None}, {"a": "\ud800"}, {"a": "x" * PROPERTIES_BYTES_MAX}],
)
def test_properties_that_cannot_be_stored_are_refused(properties: object) -> None:
    with pytest.raises(UsageError):
        checked_properties(properties)
