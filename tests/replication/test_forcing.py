"""Deferred entries, which are confirmed by force alone."""

from __future__ import annotations

from pybk.replication.messages import (
    Acknowledged,
    Add,
    BookiesChosen,
    ChooseBookies,
    Confirmed,
    Force,
    MetadataWritten,
    Reply,
    Status,
    UnderReplicated,
)
from tests.replication.driving import Writer, bookie, confirmed


def test_deferred_entries_are_acknowledged_and_confirmed_by_force() -> None:
    writer = Writer(deferred=True)
    writer.submit(0, 2)
    assert all(isinstance(send.request, Add) and send.request.deferred for send in writer.sends)
    writer.answer(0)
    writer.take(writer.writer.force(0))
    assert not any(isinstance(send.request, Force) for send in writer.sends), "it is not acknowledged yet"
    writer.answer(1)
    assert Acknowledged(2) in writer.effects
    assert confirmed(writer) == -1
    forced = [send for send in writer.sends if isinstance(send.request, Force)]
    assert [send.bookie for send in forced] == [bookie(0), bookie(1), bookie(2)]
    writer.sends = forced
    writer.answer(2)
    writer.answer(0)
    assert confirmed(writer) == -1, "bookie 2 had acknowledged nothing when it was asked"
    writer.answer(1)
    assert writer.effects == [Confirmed(2)]


def test_unforced_entries_are_resent_durably_to_a_new_bookie() -> None:
    writer = Writer(deferred=True)
    writer.submit(0, 0)
    writer.submit(1, 1)
    for number in (0, 1):
        writer.answer(number)
        writer.answer(number)
    writer.take(writer.writer.force(0))
    writer.sends = [send for send in writer.sends if isinstance(send.request, Force)]
    writer.answer(0)
    writer.replace(1, 3, place=1)
    writer.feed(MetadataWritten(8))
    resent = [send.request for send in writer.pending(3)]
    assert [isinstance(request, Add) and request.deferred for request in resent] == [False, False]
    writer.answer(3)
    assert writer.effects == [Confirmed(0)]
    writer.answer(3)
    assert writer.effects == [Confirmed(1)]


def test_a_bookie_that_cannot_force_is_replaced() -> None:
    writer = Writer(deferred=True)
    writer.submit(0, 0)
    for number in (0, 1, 2):
        writer.answer(number)
    writer.take(writer.writer.force(0))
    writer.answer(2, Reply(Status.LIMBO))
    assert writer.only(ChooseBookies).places == (2,)


def test_entries_that_a_failed_force_may_have_missed_are_recorded() -> None:
    """C13: the quorum has forced it, and the bookie that has not may have lost it."""
    writer = Writer(deferred=True)
    writer.submit(0, 1)
    for number in (0, 1, 2):
        writer.answer(number)
    writer.take(writer.writer.force(0))
    writer.answer(0)
    writer.answer(1)
    assert confirmed(writer) == 1
    writer.answer(2, Reply(Status.LIMBO))
    writer.feed(BookiesChosen({}))
    assert writer.only(UnderReplicated) == UnderReplicated(bookie(2), 0)


def test_entries_are_acknowledged_in_order() -> None:
    """I15: the application learns of none before those that come before it."""
    writer = Writer(deferred=True)
    writer.submit(0, 0)
    writer.submit(1, 1)
    first = [writer.sends.pop(0) for _ in range(3)]
    writer.answer(0)
    writer.answer(1)
    assert writer.effects == []
    writer.sends = first
    writer.answer(0)
    writer.answer(1)
    assert writer.effects == [Acknowledged(1)]
