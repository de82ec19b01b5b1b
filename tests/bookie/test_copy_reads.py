"""Reads for copies are held back, and writers' adds are timed."""

from __future__ import annotations

from array import array
from typing import Any

from pybk.bookie.append_latency import AppendLatency
from pybk.bookie.copy_reads import DELAY_NS_MAX, CopyReads
from pybk.healing.throttle import TokenBucket
from pybk.replication.bookie import BookieEffect, Respond
from pybk.replication.messages import EntryRun, Read, ReadReply, Status

SECOND = 10**9
MIB = 1 << 20


def answer(sender: Any, request: Read, now_ns: int) -> list[BookieEffect]:
    """Answer with one entry of a MiB."""
    return [Respond(sender, ReadReply(Status.OK, EntryRun(request.first, 1, array("q", (MIB,)), (bytes(MIB),))))]


def reads(sent: CopyReads, until_ns: int) -> list[tuple[int, int]]:
    """Answer what is due; return when each was answered, and to whom."""
    answered = []
    while (due_ns := sent.due_ns) is not None and due_ns <= until_ns:
        answered += [(due_ns, effect.sender) for effect in sent.due(due_ns) if isinstance(effect, Respond)]
    return answered


def test_without_a_pace_each_read_is_answered_at_once() -> None:
    sent = CopyReads(answer)
    for number in range(100):
        assert len(sent.read(number, Read(1, 0, 0, 1, MIB, checked=True), 0)) == 1
    assert sent.due_ns is None


def test_reads_are_answered_at_the_rate_and_in_order() -> None:
    sent = CopyReads(answer)
    sent.pace = TokenBucket(8 * MIB, 0)
    now, answered = 0, []
    for number in range(40):  # one after the other, as a copy asks
        effects = sent.read(number, Read(1, 0, 0, 1, MIB, checked=True), now)
        done = [(now, number)] if effects else reads(sent, now + DELAY_NS_MAX)
        assert [who for _, who in done] == [number]
        answered += done
        now = done[0][0]
    assert 36 <= 8 * now / SECOND <= 40


def test_a_read_gets_no_more_at_once_than_the_bookies_own_rate_says() -> None:
    """Else readers whose own bookies have no appends would take a MiB each, and adds would wait for that."""
    asked: list[int] = []

    def noted(sender: Any, request: Read, now_ns: int) -> list[BookieEffect]:
        asked.append(request.bytes_max)
        return answer(sender, request, now_ns)

    sent = CopyReads(noted)
    pace = sent.pace = TokenBucket(32 * MIB, 0)
    sent.read(1, Read(1, 0, 0, 1, MIB, checked=True), 0)
    pace.cap = 2 * MIB
    sent.read(2, Read(1, 0, 0, 1, MIB, checked=True), SECOND)
    sent.read(3, Read(1, 0, 0, 1, 1000, checked=True), 2 * SECOND)
    assert asked == [MIB, pace.piece_bytes, 1000]
    assert pace.piece_bytes < MIB // 8


def test_a_read_is_not_held_back_until_its_client_gives_up() -> None:
    sent = CopyReads(answer)
    sent.pace = TokenBucket(1024, 0)
    sent.pace.charge(MIB, 0)
    assert sent.read(7, Read(1, 0, 0, 1, MIB, checked=True), 0) == []
    assert reads(sent, DELAY_NS_MAX) == [(DELAY_NS_MAX, 7)]


def test_an_add_waits_for_the_turn_before_only_if_it_came_during_it() -> None:
    latency = AppendLatency()
    assert not latency.take().count
    latency.before_ns = 40_000_000  # of copies
    latency.note_adds(3, 0, 2_000_000)
    found = latency.take()
    assert found.count == 3
    assert 42_000_000 <= found.quantile(0.99) <= 42_000_000 * 1.13
    latency.note_adds(3, 5_000_000, 2_000_000)
    assert 2_000_000 <= latency.take().quantile(0.99) <= 2_000_000 * 1.13
    assert not latency.take().count
