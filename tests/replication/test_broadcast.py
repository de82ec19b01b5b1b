"""Requests to several bookies at once, step by step."""

from __future__ import annotations

from pybk.replication.broadcast import BroadcastMachine
from pybk.replication.messages import BroadcastEnded, Reply, Send, Status, Woken, WriteLac
from tests.replication.driving import LEDGER, Driven, bookie

REQUEST = WriteLac(LEDGER, 3)


def asking(*numbers: int) -> Driven:
    driven = Driven(BroadcastMachine((bookie(number), REQUEST) for number in numbers))
    driven.take(driven.machine.start(0))
    return driven


def test_each_bookie_is_asked_once_and_the_end_comes_with_the_last_answer() -> None:
    driven = asking(0, 1)
    assert driven.sends == [Send(1, bookie(0), REQUEST), Send(2, bookie(1), REQUEST)]
    assert driven.answer(1) == []
    assert driven.answer(0) == [BroadcastEnded(())]


def test_refusing_and_silent_bookies_are_named() -> None:
    driven = asking(0, 1, 2)
    driven.answer(0, Reply(Status.UNAUTHORIZED))
    driven.lose(1)
    driven.answer(2)
    assert driven.effects == [BroadcastEnded(((bookie(0), Status.UNAUTHORIZED), (bookie(1), None)))]


def test_a_broadcast_to_no_bookies_ends_at_once() -> None:
    assert asking().effects == [BroadcastEnded(())]


def test_unexpected_events_are_ignored() -> None:
    driven = asking(0)
    assert driven.feed(Woken()) == []
    (send,) = driven.sends
    driven.answer(0)
    driven.sends = [send]
    assert driven.lose(0) == []
