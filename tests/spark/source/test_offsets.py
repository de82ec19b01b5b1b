"""Offsets of streams: every entry once whatever ledgers do, and small however many there were."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from dataclasses import dataclass, replace

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.errors import UnsupportedFormatError
from pybk.spark.finished_ledgers import FinishedLedgers
from pybk.spark.options import Positions
from pybk.spark.packed_ids import pack_numbers
from pybk.spark.source.offsets import LATE_NS, PART_NS, Offset, advance, between, first_offset
from pybk.spark.source.planning import EntryRange, ReadableLedger, numbers_of, ranges_of

NOW = 10 * LATE_NS


def ledger(ledger_id: int, end: int, *, closed: bool = False, created_ns: int = NOW) -> ReadableLedger:
    return ReadableLedger(ledger_id, created_ns, end, 10 * end, closed)


def view(*ledgers: ReadableLedger) -> dict[int, ReadableLedger]:
    return {each.ledger_id: each for each in ledgers}


def everything(start: Offset, ledgers: dict[int, ReadableLedger]) -> dict[int, int]:
    left = start.unfinished(ledgers.values())
    return {each.ledger_id: max(0, each.end - start.next_entry(each.ledger_id)) for each in left}


def step(
    start: Offset,
    *ledgers: ReadableLedger,
    now_ns: int = NOW,
    deleted: Collection[int] = (),
    others: Collection[int] = (),
) -> Offset:
    """Read all there is."""
    there = view(*ledgers)
    return advance(start, there, {}, everything(start, there), now_ns, deleted, others)


def finished_of(offset: Offset) -> set[int]:
    """Return the ledgers that an offset names as finished."""
    return {ledger_id for _, ranges in offset.done for ledger_id in numbers_of(ranges)}


def test_two_offsets_determine_the_entries_between_them() -> None:
    first = step(Offset(), ledger(3, 5), ledger(4, 7, closed=True), ledger(9, 0))
    assert between(Offset(), first) == [EntryRange(3, 0, 4), EntryRange(4, 0, 6)]
    second = step(first, ledger(3, 6, closed=True), ledger(4, 7, closed=True), ledger(9, 1), ledger(10, 2))
    assert between(first, second) == [EntryRange(3, 5, 5), EntryRange(9, 0, 0), EntryRange(10, 0, 1)]


def test_an_offset_changes_when_there_is_something_to_read_or_a_ledger_ends() -> None:
    first = step(Offset(), ledger(1, 5), ledger(2, 0))
    assert step(first, ledger(1, 5), ledger(2, 0), ledger(3, 0), now_ns=2 * NOW) is first
    second = step(first, ledger(1, 5, closed=True), ledger(2, 0))
    assert (second.ended, between(first, second)) == ({1: 5}, [])
    assert step(second, ledger(1, 5, closed=True), ledger(2, 0), now_ns=2 * NOW) is second
    assert step(second, ledger(2, 0), now_ns=2 * NOW) is second  # deleted once it was read


def test_finished_ledgers_leave_the_offset() -> None:
    first = step(Offset(), *(ledger(number, 3, closed=True, created_ns=NOW + number) for number in range(100)))
    assert first.ended == dict.fromkeys(range(100), 3)
    again = (ledger(number, 3, closed=True, created_ns=NOW + number) for number in range(100))
    second = step(first, *again, ledger(100, 1))
    assert (second.done, second.at, second.ended) == (((NOW + PART_NS, ((0, 99),)),), {100: 1}, {})
    again = (ledger(number, 3, closed=True, created_ns=NOW + number) for number in range(100))
    much_later = NOW + PART_NS + LATE_NS
    third = step(second, *again, ledger(100, 2), ledger(101, 1, created_ns=much_later), now_ns=much_later)
    assert (third.done, third.at) == ((), {100: 2, 101: 1})
    again = (ledger(number, 3, closed=True, created_ns=NOW + number) for number in range(100))
    assert third.unfinished([*again]) == []


def test_old_ledgers_that_are_not_finished_are_named() -> None:
    """One that is empty, one that a sink has not committed, and one that is a backlog."""
    there = view(ledger(1, 0, created_ns=5), ledger(2, 4, closed=True, created_ns=6), ledger(5, 9))
    first = advance(Offset(), there, {3: 7}, {2: 4, 5: 2}, NOW)
    assert first.before_ns == NOW - LATE_NS
    assert (first.at, first.due, first.ended) == ({3: 0, 5: 2}, ((1, 1),), {2: 4})
    backlog = advance(Offset(), there, {3: 7}, {5: 2}, NOW)
    assert (backlog.before_ns, backlog.at, backlog.due) == (NOW - LATE_NS, {3: 0, 5: 2}, ((1, 2),))
    assert [each.ledger_id for each in backlog.unfinished(there.values())] == [1, 2, 5]
    there |= view(ledger(3, 4, closed=True, created_ns=7))
    assert [each.ledger_id for each in backlog.unfinished(there.values())] == [1, 2, 3, 5]
    assert advance(backlog, there, {}, {5: 1}, NOW).due == ((1, 3),)


def test_a_clock_that_is_ahead_finishes_nothing() -> None:
    """The floor stays an hour older than the newest ledger, too."""
    first = step(Offset(), ledger(5, 1, closed=True, created_ns=NOW), now_ns=100 * NOW)
    assert first.before_ns == NOW - LATE_NS
    late = ledger(3, 2, created_ns=NOW - LATE_NS // 2)
    assert [each.ledger_id for each in first.unfinished([late])] == [3]


@pytest.mark.parametrize("ended", [False, True])
def test_deleted_ledgers_are_dropped(ended: bool) -> None:
    first = step(Offset(), ledger(1, 5, closed=ended), ledger(2, 1))
    assert (1 in first.ended, 1 in first.at) == (ended, not ended)
    second = step(first, ledger(2, 2), deleted={1})
    assert (second.at, second.ended, second.due) == ({2: 2}, {}, ())
    assert finished_of(second) == ({1} if ended else set())


@pytest.mark.parametrize(("end", "closed"), [(5, False), (5, True), (0, False)])
def test_a_ledger_that_a_listing_misses_is_not_forgotten(end: int, closed: bool) -> None:
    """Listings may be late, and a ledger that is not deleted comes back: its read resumes where it was."""
    offset = step(Offset(), ledger(1, end, closed=closed), ledger(2, 1))
    for count in (2, 3):
        offset = step(offset, ledger(2, count))
    more = 0 if closed else 2
    again = step(offset, ledger(1, end + more, closed=closed), ledger(2, 4))
    assert between(offset, again) == [*([EntryRange(1, end, end + 1)] if more else []), EntryRange(2, 3, 3)]


def test_an_offset_names_what_is_not_read_yet() -> None:
    there = view(ledger(1, 5), ledger(2, 4, closed=True), ledger(3, 3, closed=True), ledger(4, 0))
    first = first_offset(Positions(), there, {}, NOW)
    assert (first.unread(), first.unfinished_ids()) == ({1, 2, 3, 4}, {1, 2, 3, 4})
    second = advance(first, there, {9: NOW - 2 * LATE_NS}, {1: 1, 2: 4}, NOW)
    assert (second.unread(), second.unfinished_ids()) == ({1, 3, 4}, {1, 3, 4, 9})
    latest = first_offset(Positions(latest=True), there, {}, NOW)
    assert (latest.unread(), latest.unfinished_ids()) == ({1, 4}, {1, 4})


def test_where_streams_begin() -> None:
    there = view(ledger(1, 5, closed=True), ledger(2, 4), ledger(3, 0), ledger(4, 9, closed=True))
    assert first_offset(Positions(), there, {}, NOW, of="here") == Offset(due=((1, 4),), of="here")
    named = first_offset(Positions(entries={2: 3}), there, {}, NOW)
    assert [*map(tuple, [(p.ledger_id, p.first) for p in between(named, step(named, *there.values()))])] == [
        (1, 0),
        (2, 3),
        (4, 0),
    ]
    latest = first_offset(Positions(latest=True), there, {8: 5}, NOW)
    done = ((NOW + PART_NS, ((1, 1), (4, 4))),)
    assert latest == Offset({2: 4, 8: 0}, done=done, due=((3, 3),), upto=8, before_ns=NOW - LATE_NS)
    there |= view(ledger(2, 6), ledger(5, 2), ledger(8, 1, closed=True, created_ns=5))
    ranges = [EntryRange(2, 4, 5), EntryRange(5, 0, 1), EntryRange(8, 0, 0)]
    assert between(latest, step(latest, *there.values())) == ranges
    assert first_offset(Positions(latest=True), view(ledger(3, 0)), {}, NOW) == Offset(due=((3, 3),))


def test_ledgers_of_others_lie_in_between() -> None:
    """Ledgers of two types have come in turns."""
    there = [ledger(number, 1 + number % 7, closed=True) for number in range(0, 10_000, 2)]
    begin = first_offset(Positions(), view(*there), {}, NOW)
    first = step(begin, *there, others=range(1, 10_000, 2))
    second = step(first, ledger(10_000, 1), others=range(1, 10_000, 2))
    assert all(len(json.dumps(each.to_json())) < 2000 for each in (begin, first, second))
    assert finished_of(first) == set(range(9_999)), "the others are in between"
    assert second.unfinished(there) == []
    unknown = step(begin, *there, others=[*range(1, 5000, 2), *range(5003, 10_000, 2)])
    assert unknown.done == ((NOW + PART_NS, ((0, 5000), (5002, 9_998))),)
    assert unknown.unfinished([ledger(5001, 3)]) == [ledger(5001, 3)]


def test_offsets_of_ids_in_no_order_are_packed() -> None:
    chance = random.Random(7)
    ids = chance.sample(range(100_000), 2000)
    offset = Offset(
        {each: chance.randrange(1000) for each in ids[:500]},
        {each: chance.randrange(1000) for each in ids[500:1000]},
        ((NOW, ranges_of(ids[500:1000])),),
        due=ranges_of(ids[1000:]),
    )
    text = json.dumps(offset.to_json())
    written_out = sum(len(f'"{each}": 500, ') for each in ids[:1000]) + sum(len(f"[{each}, {each}], ") for each in ids)
    assert len(text) < written_out // 4
    assert Offset.from_json(json.loads(text)) == offset


def test_an_offset_of_the_version_before_is_continued() -> None:
    before = {
        "version": 2,
        "of": "here",
        "at": {"9": 2},
        "ended": {"7": 4},
        "due": [[8, 8]],
        "done": [[1, 3]],
        "upto": 9,
        "before": NOW - LATE_NS,
    }
    offset = Offset.from_json(before)
    there = [ledger(each, 4, closed=True) for each in (1, 2, 3, 7)]
    assert offset.unfinished(there) == []
    following = step(offset, *there, ledger(8, 1, closed=True), ledger(9, 3), now_ns=NOW)
    assert between(offset, following) == [EntryRange(8, 0, 0), EntryRange(9, 2, 2)]
    later = step(following, ledger(9, 4, created_ns=NOW + 3 * LATE_NS), now_ns=NOW + 3 * LATE_NS)
    assert (later.done, later.unfinished(there)) == ((), [])


def test_an_offset_is_the_same_text_each_time() -> None:
    offset = Offset({10: 1, 9: 2}, {8: 3, 7: 4}, ((99, ((1, 2), (4, 4))),), 12, 13, ((5, 6),), "here")
    other = Offset({9: 2, 10: 1}, {7: 4, 8: 3}, ((99, ((1, 2), (4, 4))),), 12, 13, ((5, 6),), "here")
    text = json.dumps(offset.to_json())
    assert text == json.dumps(other.to_json())
    assert text == (
        '{"version": 3, "of": "here", "at": {"9": 2, "10": 1}, "ended": {"7": 4, "8": 3}, "due": [[5, 6]], '
        '"done": [[99, [[1, 2], [4, 4]]]], "upto": 12, "before": 13}'
    )
    assert Offset.from_json(json.loads(text)) == offset


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"version": 4},
        {**Offset().to_json(), "at": []},
        {**Offset().to_json(), "version": 2, "at": {"x": 1}},
        {**Offset().to_json(), "due": "not packed"},
        {**Offset().to_json(), "at": str(pack_numbers(dict.fromkeys(range(100), 300)))[:-5]},
    ],
)
def test_offsets_of_another_kind_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(UnsupportedFormatError, match="checkpoint"):
        Offset.from_json(values)


@dataclass
class World:
    """Ledgers of several creators, whose ids come in no order and whose clocks differ."""

    chance: random.Random
    now_ns: int = NOW

    def __post_init__(self) -> None:
        self.ledgers: dict[int, ReadableLedger] = {}
        self.hidden: dict[int, ReadableLedger] = {}
        self.blocks = [list(range(8 * n, 8 * n + 8)) for n in range(40)]
        self.others: set[int] = set()
        self.written: dict[int, int] = {}
        self.deleted: set[int] = set()

    def happen(self) -> None:
        """Have one thing happen."""
        self.now_ns += self.chance.randrange(LATE_NS // 4)
        what = self.chance.random()
        open_ids = [each for each, found in self.ledgers.items() if not found.closed]
        if what < 0.3:
            block = self.chance.choice([block for block in self.blocks[:5] if block] or [[]])
            if not block:
                self.blocks = self.blocks[5:]
                return
            if self.chance.random() < 0.3:
                self.others.add(block.pop(0))
                return
            created_ns = self.now_ns - self.chance.randrange(LATE_NS // 2)
            found = ReadableLedger(block.pop(0), created_ns, 0, 0, False)
            (self.hidden if self.chance.random() < 0.3 else self.ledgers)[found.ledger_id] = found
        elif what < 0.4 and self.hidden:
            ledger_id = self.chance.choice(sorted(self.hidden))
            self.ledgers[ledger_id] = replace(self.hidden.pop(ledger_id), end=3, closed=True)
        elif open_ids:
            found = self.ledgers[self.chance.choice(open_ids)]
            more = self.chance.randrange(4)
            self.ledgers[found.ledger_id] = replace(found, end=found.end + more, closed=self.chance.random() < 0.4)
        self.written |= {each: found.end for each, found in self.ledgers.items()}


@pytest.mark.parametrize("seed", range(60))
def test_every_entry_is_read_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    world = World(chance)
    offset, read = Offset(), dict[int, int]()

    def read_some(limited: bool) -> None:
        nonlocal offset
        listed = world.ledgers
        if limited:
            known = offset.unfinished_ids() | finished_of(offset)  # others are seen within an hour of their creation
            listed = {each: found for each, found in listed.items() if each not in known or chance.random() < 0.9}
        taken = everything(offset, listed)
        if limited:
            taken = {each: chance.randrange(count + 1) for each, count in taken.items()}
        hidden = {each: found.created_ns for each, found in world.hidden.items()}
        following = advance(offset, listed, hidden, taken, world.now_ns, world.deleted, world.others)
        for entry_range in between(offset, following):
            assert entry_range.first == read.get(entry_range.ledger_id, 0)
            read[entry_range.ledger_id] = entry_range.last + 1
        offset = Offset.from_json(json.loads(json.dumps(following.to_json())))
        for each in [each for each in offset.ended if chance.random() < 0.2]:
            if world.ledgers.pop(each, None):  # deleted once it was read
                world.deleted.add(each)

    for _ in range(200):
        world.happen()
        if chance.random() < 0.6:
            read_some(limited=chance.random() < 0.5)
    read_some(limited=False)
    assert read == {each: end for each, end in world.written.items() if end}
    world.now_ns += 2 * LATE_NS
    for _ in range(2):  # nothing happens but one ledger, each time
        world.ledgers[1000] = ReadableLedger(
            1000, world.now_ns, world.ledgers.get(1000, ledger(1000, 0)).end + 1, 0, False
        )
        read_some(limited=False)
    unfinished = [*world.hidden, *(each for each, found in world.ledgers.items() if not found.closed)]
    assert sorted({*offset.at, *numbers_of(offset.due)}) == sorted(unfinished)
    assert (offset.done, offset.ended) == ((), {})


def test_a_finished_ledger_need_not_be_seen_again() -> None:
    """Catalogs forget what an offset has finished."""
    chance = random.Random(3)
    there = {number: ledger(number, 3, closed=number % 3 > 0) for number in range(60)}
    forgetful = plain = Offset()
    for turn in range(20):
        there[100 + turn] = ledger(100 + turn, 2, closed=chance.random() < 0.5, created_ns=NOW + turn * LATE_NS // 9)
        now_ns = there[100 + turn].created_ns
        left = {each: found for each, found in there.items() if not forgetful.finished(each, found.created_ns)}
        assert len(left) < len(there) or not turn
        taken = everything(plain, there)
        assert everything(forgetful, left) == taken
        plain, forgetful = advance(plain, there, {}, taken, now_ns), advance(forgetful, left, {}, taken, now_ns)
        assert forgetful == plain


def test_ranges_of_numbers() -> None:
    assert ranges_of([]) == ()
    assert ranges_of([5, 1, 2, 3, 9, 8, 5]) == ((1, 3), (5, 5), (8, 9))


@pytest.mark.parametrize("seed", range(20))
def test_what_a_consumer_records_says_the_same_as_the_offset(seed: int) -> None:
    chance = random.Random(seed)
    ledgers = [
        ledger(
            number, chance.randrange(4), closed=chance.random() < 0.7, created_ns=NOW + chance.randrange(3 * LATE_NS)
        )
        for number in chance.sample(range(200), 60)
    ]
    found = Offset()
    for count in (20, 40, 60):
        found = step(found, *ledgers[:count], now_ns=NOW + 3 * LATE_NS, others={7, 8, 9})
    recorded = FinishedLedgers.from_json(json.loads(json.dumps(found.finished_ledgers().to_json())))
    assert recorded == found.finished_ledgers()
    for ledger_id in range(-1, 210):
        for created_ns in (0, found.before_ns - 1, found.before_ns, NOW + 3 * LATE_NS):
            assert recorded.has(ledger_id, created_ns) == found.finished(ledger_id, created_ns)
    assert any(recorded.has(each.ledger_id, each.created_ns) for each in ledgers)
