"""Requests to several bookies at once, step by step."""

from __future__ import annotations

from pybk.replication.broadcast import BroadcastMachine
from pybk.replication.messages import BroadcastEnded, Reply, Send, Status, Woken, WriteLac
from tests.replication.driving import LEDGER, Driven, bookie

REQUEST = WriteLac(LEDGER, 3)


def telling(*numbers: int) -> Driven:
    driven = Driven(BroadcastMachine((bookie(number), REQUEST) for number in numbers))
    driven.take(driven.machine.start(0))
    return driven


def test_each_bookie_is_asked_once_and_the_end_comes_with_the_last_answer() -> None:
    told = telling(0, 1)
    assert told.sends == [Send(1, bookie(0), REQUEST), Send(2, bookie(1), REQUEST)]
    assert told.answer(1) == []
    assert told.answer(0) == [BroadcastEnded(())]


def test_refusing_and_silent_bookies_are_named() -> None:
    told = telling(0, 1, 2)
    told.answer(0, Reply(Status.UNAUTHORIZED))
    told.lose(1)
    told.answer(2)
    assert told.effects == [BroadcastEnded(((bookie(0), Status.UNAUTHORIZED), (bookie(1), None)))]


def test_a_broadcast_to_no_bookies_ends_at_once() -> None:
    assert telling().effects == [BroadcastEnded(())]


def test_what_was_not_asked_is_no_answer() -> None:
    told = telling(0)
    assert told.tell(Woken()) == []
    (send,) = told.sends
    told.answer(0)
    told.sends = [send]
    assert told.lose(0) == []
