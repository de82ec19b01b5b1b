"""What is handed out, compared with a model that remembers every record by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.streams.cursor_state import CursorState
from pybk.streams.deliveries import Deliveries, Handed

END = 60
TIMEOUT_S = 5.0
MAX_UNACKED = 12

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("fresh"), st.integers(1, 9), st.just(0)),
        st.tuples(st.just("again"), st.integers(1, 9), st.just(0)),
        st.tuples(st.just("ack"), st.integers(0, END - 1), st.integers(1, 4)),
        st.tuples(st.just("nack"), st.integers(0, END - 1), st.integers(0, 9)),
        st.tuples(st.just("give back"), st.integers(0, 99), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("seek"), st.integers(0, END), st.just(0)),
    ),
    max_size=80,
)


class Model:
    """Each outstanding record, with when it was handed out, how often, and when it is due again."""

    def __init__(self) -> None:
        self.acked: set[int] = set()
        self.since: dict[int, float] = {}
        self.counts: dict[int, int] = {}
        self.due: dict[int, float] = {}
        self.read = 0
        self.numbers: dict[int, int] = {}
        """The delivery that each outstanding record is of."""
        self.past: list[tuple[int, int]] = []
        """All deliveries there have been."""

    @property
    def outstanding(self) -> set[int]:
        """The records that were handed out and are not acknowledged."""
        return set(range(self.read)) - self.acked

    def expire(self, now: float) -> None:
        """Have records wait that were not acknowledged in time."""
        for seq in self.outstanding:
            if seq in self.since and seq not in self.due and self.since[seq] + TIMEOUT_S <= now:
                self.due[seq] = self.since[seq] + TIMEOUT_S

    def take(self, handed: Handed, now: float) -> None:
        """Check that records may be handed out, and do it."""
        seqs = range(handed.first, handed.end)
        for seq in seqs:
            assert seq not in self.acked
            assert self.counts.get(seq, -1) + 1 == handed.redeliveries
            assert handed.number > self.numbers.get(seq, 0)
            self.numbers[seq] = handed.number
            self.past.append((seq, handed.number))
            self.counts[seq] = handed.redeliveries
            self.since[seq] = now
            self.due.pop(seq, None)
        self.read = max(self.read, seqs.stop)

    def is_held(self, seq: int, number: int) -> bool:
        """Return whether a record is with the consumer that got it by a delivery."""
        return seq in self.outstanding and seq not in self.due and self.numbers.get(seq) == number

    def seek(self, seq: int) -> None:
        """Begin anew."""
        self.acked = set(range(seq))
        self.since, self.counts, self.due, self.numbers, self.read = {}, {}, {}, {}, seq


def act(deliveries: Deliveries, state: CursorState, model: Model, action: tuple[str, int, int], now: float) -> None:
    """Do one thing with both, and compare."""
    what, number, extra = action
    if what == "fresh":
        room = max(0, MAX_UNACKED - len(model.outstanding))
        unread = sorted(set(range(model.read, END)) - model.acked)
        taken = deliveries.take_fresh(number, END, now)
        assert [seq for each in taken for seq in range(each.first, each.end)] == unread[: min(room, number)]
        for each in taken:
            model.take(each, now)
    elif what == "again":
        model.expire(now)
        ready = sorted((due, seq) for seq, due in model.due.items() if due <= now and seq not in model.acked)
        taken = deliveries.take_again(number, now)
        seqs = [seq for each in taken for seq in range(each.first, each.end)]
        assert seqs == [seq for _, seq in ready[:number]]
        for each in taken:
            model.take(each, now)
    elif what == "ack":
        state.ack(number, number + extra)
        model.acked |= set(range(number, number + extra))
    elif what == "nack":
        assert deliveries.nack(number, number + 1, now + extra) == (number in model.outstanding)
        if number in model.outstanding:
            model.due[number] = min(now + extra, model.due.get(number, now + extra))
    elif what == "give back" and model.past:
        seq, delivery = model.past[number % len(model.past)]
        held = model.is_held(seq, delivery)
        assert deliveries.give_back([(seq, delivery)], now + extra) == held
        if held:
            model.due[seq] = now + extra
    elif what == "seek":
        state.seek(number)
        deliveries.reset()
        model.seek(number)


@given(ACTIONS)
def test_it_hands_out_what_the_model_does(actions: list[tuple[str, int, int]]) -> None:
    state, model, now = CursorState(), Model(), 100.0
    deliveries = Deliveries(state, ack_timeout_s=TIMEOUT_S, max_unacked=MAX_UNACKED)
    for action in actions:
        if action[0] == "wait":
            now += action[1]
        act(deliveries, state, model, action, now)
        assert deliveries.outstanding == len(model.outstanding)
        assert deliveries.room == max(0, MAX_UNACKED - len(model.outstanding))
        for seq in model.outstanding:
            assert deliveries.is_outstanding(seq)
            if seq in model.since:
                assert deliveries.redeliveries(seq) == model.counts[seq]
        for seq, delivery in model.past:
            assert deliveries.is_held(seq, delivery) == model.is_held(seq, delivery)
        waiting = [min(due, now + TIMEOUT_S * 9) for seq, due in model.due.items() if seq not in model.acked]
        timed = [
            model.since[seq] + TIMEOUT_S for seq in model.outstanding if seq in model.since and seq not in model.due
        ]
        assert deliveries.next_due() == min([*waiting, *timed], default=None)


def plain(taken: list[Handed]) -> list[tuple[int, int, int]]:
    """Return what was handed out without the numbers of the deliveries."""
    return [(each.first, each.end, each.redeliveries) for each in taken]


def test_what_was_handed_out_before_comes_again_with_its_count() -> None:
    state = CursorState(2)
    state.ack(4, 6)
    state.handed_end = 9
    state.hand_again(3, 4, 2)
    deliveries = Deliveries(state, ack_timeout_s=None, max_unacked=3)
    deliveries.resume()
    assert deliveries.next_due() == 0
    assert deliveries.redeliveries(3) == 1
    assert deliveries.take_fresh(9, END, 1.0) == []
    assert plain(deliveries.take_again(4, 1.0)) == [(2, 3, 1), (3, 4, 2), (6, 8, 1)]
    assert deliveries.redeliveries(3) == 2
    assert plain(deliveries.take_again(4, 1.0)) == [(8, 9, 1)]
    assert deliveries.take_fresh(9, END, 1.0) == [], "too many are outstanding"
    state.ack(2, 9)
    assert plain(deliveries.take_fresh(9, 11, 1.0)) == [(9, 11, 0)]
    deliveries.rewind()
    assert plain(deliveries.take_again(4, 1.0)) == [(9, 11, 1)]


def test_a_record_is_handed_out_alone_by_its_last_delivery() -> None:
    state = CursorState()
    state.handed_end = 6
    state.hand_again(2, 4, 2)
    deliveries = Deliveries(state, ack_timeout_s=None, max_unacked=99)
    deliveries.resume()
    assert [plain(deliveries.take_again(9, 1.0, 2)) for _ in range(4)] == [
        [(0, 2, 1)],
        [(2, 3, 2)],
        [(3, 4, 2)],
        [(4, 6, 1)],
    ]


def test_memory_is_bounded_by_what_is_outstanding() -> None:
    state = CursorState()
    deliveries = Deliveries(state, ack_timeout_s=None, max_unacked=10)
    for seq in range(20_000):
        assert plain(deliveries.take_fresh(1, 1 << 40, 0.0)) == [(seq, seq + 1, 0)]
        if seq:
            state.ack(seq, seq + 1)
            assert deliveries.nack(seq - 1, seq, 0.0) == (seq == 1)
        deliveries.nack(0, 1, float(seq))
    deliveries.take_again(0, 0.0)
    kept = [len(each) for each in vars(deliveries).values() if hasattr(each, "__len__")]
    assert max(kept) < 4000


def test_counts_of_records_that_were_acknowledged_are_forgotten() -> None:
    state = CursorState()
    deliveries = Deliveries(state, ack_timeout_s=None, max_unacked=10)
    for seq in range(20_000):
        assert plain(deliveries.take_fresh(1, 1 << 40, 0.0)) == [(seq, seq + 1, 0)]
        assert deliveries.nack(seq, seq + 1, 0.0) == 1
        assert plain(deliveries.take_again(1, 0.0)) == [(seq, seq + 1, 1)]
        assert state.ack(seq, seq + 1) == 1
        assert deliveries.next_due() is None
    kept = [len(each) for each in vars(deliveries).values() if hasattr(each, "__len__")]
    assert max(kept) < 4000


def test_nothing_fresh_is_handed_out_beyond_the_limit() -> None:
    state = CursorState()
    deliveries = Deliveries(state, ack_timeout_s=None, max_unacked=3)
    assert plain(deliveries.take_fresh(10, 100, 0.0)) == [(0, 3, 0)]
    assert deliveries.take_fresh(10, 100, 0.0) == []
    state.ack(1, 2)
    assert plain(deliveries.take_fresh(10, 100, 0.0)) == [(3, 4, 0)]
    assert deliveries.room == 0


def lines_of(work: Callable[[], object]) -> int:
    """Return how many lines of Python some work runs."""
    count = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def with_holes(state: CursorState, count: int, most: int) -> Deliveries:
    """Return deliveries of records of which every second one is acknowledged, and the others are handed out."""
    for seq in range(1, 2 * count, 2):
        state.ack(seq, seq + 1)
    deliveries = Deliveries(state, ack_timeout_s=None, max_unacked=count)
    while deliveries.take_fresh(most, 2 * count, 0.0):
        deliveries.next_due()
    assert deliveries.outstanding == count
    return deliveries


@pytest.mark.parametrize("most", [1, 10, 10_000])
def test_holes_cost_as_many_steps_as_there_are(most: int) -> None:
    few, many = (lines_of(partial(with_holes, CursorState(), count, most)) for count in (100, 1600))
    assert many < 2 * 16 * few


def test_records_that_are_acknowledged_after_they_were_handed_out_are_passed_once() -> None:
    def acknowledged(count: int) -> None:
        state = CursorState()
        deliveries = with_holes(state, count, count)
        for seq in range(2 * count - 2, 0, -2):
            deliveries.nack(seq, seq + 1, 9.0)
        deliveries.take_again(count - 1, 9.0)
        for seq in range(0, 2 * count, 2):
            state.ack(seq, seq + 1)
            deliveries.next_due()

    assert lines_of(partial(acknowledged, 1600)) < 2 * 16 * lines_of(partial(acknowledged, 100))


def test_what_is_put_back_was_not_handed_out() -> None:
    state = CursorState()
    deliveries = Deliveries(state, ack_timeout_s=5.0, max_unacked=9)
    assert plain(deliveries.take_fresh(4, 100, 0.0)) == [(0, 4, 0)]
    assert deliveries.nack(0, 4, 0.0) == 4
    for now in (0.0, 1.0):
        assert plain(deliveries.take_again(9, now)) == [(0, 4, 1)]
        deliveries.put_back(Handed(0, 4, 1, 0), now + 1.0)
        assert deliveries.take_again(9, now) == []
        assert deliveries.next_due() == now + 1.0
    state.ack(1, 2)
    assert plain(deliveries.take_again(9, 2.0)) == [(0, 1, 1), (2, 4, 1)]
    assert plain(deliveries.take_again(9, 7.0)) == [(0, 1, 2), (2, 4, 2)]
