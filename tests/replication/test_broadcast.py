"""Requests to several bookies at once, step by step."""

from __future__ import annotations

import pytest

from pybk.replication.broadcast import BroadcastMachine, LacBroadcastMachine, WriterSearchMachine
from pybk.replication.messages import BroadcastEnded, LacReply, ReadLac, Reply, Send, Status, Woken, WriteLac
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


def test_the_highest_lac_of_all_bookies_is_kept() -> None:
    """One bookie may be the only one that proves it, so that nobody's answer is left out."""
    machine = LacBroadcastMachine(LEDGER, map(bookie, range(4)))
    driven = Driven(machine)
    driven.take(machine.start(0))
    assert {send.request for send in driven.sends} == {ReadLac(LEDGER)}
    driven.answer(0, LacReply(Status.OK, 3))
    driven.answer(1, LacReply(Status.OK, 8))
    driven.answer(2, LacReply(Status.UNKNOWN))
    assert driven.effects == []
    driven.lose(3)
    assert driven.effects == [BroadcastEnded(((bookie(2), Status.UNKNOWN), (bookie(3), None)))]
    assert machine.last_add_confirmed == 8


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ((Status.NO_WRITER, Status.NO_WRITER), False),
        ((Status.NO_WRITER, Status.OK), True),
        ((None, Status.OK), True),
        ((None, Status.NO_WRITER), None),
        ((Status.REFUSED, Status.NO_WRITER), None),
        ((), None),
    ],
    ids=str,
)
def test_a_writer_is_gone_only_if_all_bookies_say_so(answers: tuple[Status | None, ...], found: bool | None) -> None:
    """A bookie of an older version does not know the question, and refuses it."""
    machine = WriterSearchMachine(LEDGER, map(bookie, range(len(answers))))
    driven = Driven(machine)
    driven.take(machine.start(0))
    for place, status in enumerate(answers):
        if status is None:
            driven.lose(place)
        else:
            driven.answer(place, Reply(status))
    assert isinstance(driven.effects[-1], BroadcastEnded)
    assert machine.found is found
