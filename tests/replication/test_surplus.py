"""Dropping a surplus copy, step by step."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata, LedgerState
from pybk.replication.messages import (
    AnnounceDrop,
    Answered,
    Done,
    DropAnnounced,
    DropEnded,
    DropEntries,
    Failed,
    MetadataRefused,
    MetadataUnreachable,
    MetadataWritten,
    Read,
    ReadReply,
    Reason,
    Reply,
    Send,
    Status,
    WakeAt,
    Woken,
    WriteMetadata,
)
from pybk.replication.surplus import ABSENT_ENTRY, BOOKIE_NS, SurplusDropMachine, is_surplus
from tests.replication.driving import Driven, bookie, metadata, run

OWN = 9


def closed(
    last: int = 9, shape: tuple[int, int, int] = (3, 3, 2), *fragments: tuple[int, tuple[int, ...]]
) -> LedgerMetadata:
    return replace(metadata(shape, *fragments), state=LedgerState.CLOSED, last_entry_id=last, length=10 * (last + 1))


class Dropping(Driven):
    def __init__(self, found: LedgerMetadata) -> None:
        self.found = found
        super().__init__(SurplusDropMachine(found, 3, bookie(OWN), Random(1)))
        self.take(self.machine.start(0))

    def audit(self) -> Dropping:
        """Answer all reads of the audit soundly."""
        while self.sends:
            self.answer_soundly()
        return self

    def answer_soundly(self) -> Send:
        """Answer the oldest read soundly, and return it."""
        send = self.sends.pop(0)
        self.feed(Answered(send.token, sound(send.request)))
        return send


def sound(read: object) -> ReadReply:
    assert isinstance(read, Read)
    if read.first == ABSENT_ENTRY:
        return ReadReply(Status.NO_SUCH_ENTRY)
    return ReadReply(Status.OK, run(read.first, read.first))


def announced(found: LedgerMetadata | None = None) -> Dropping:
    drop = Dropping(found or closed()).audit()
    drop.only(AnnounceDrop)
    drop.feed(DropAnnounced(ready=True))
    return drop


def test_a_copy_is_dropped_after_audit_announcement_and_barrier() -> None:
    drop = Dropping(closed())
    assert drop.effects == [], "nothing before the audit"
    drop.audit()
    drop.only(AnnounceDrop)
    drop.feed(DropAnnounced(ready=True))
    barrier = drop.only(WriteMetadata)
    assert barrier == WriteMetadata(replace(closed(), version=1), 3), "unchanged but for its version"
    drop.feed(MetadataWritten(4))
    drop.only(DropEntries)
    drop.feed(DropEnded(dropped=True))
    assert drop.only(Done).version == 4


def test_a_copy_is_surplus_if_the_ledger_is_closed_and_does_not_name_the_bookie() -> None:
    assert is_surplus(closed(), bookie(OWN))
    assert is_surplus(closed(), Bookie("b0", b"x" * 16)), "another instance of a bookie that it names"
    assert not is_surplus(closed(9, (3, 3, 2), (0, (0, 1, OWN)), (5, (0, 1, 2))), bookie(OWN)), "one fragment names it"
    for state in (LedgerState.OPEN, LedgerState.IN_RECOVERY):
        assert not is_surplus(replace(metadata(), state=state), bookie(OWN))


def test_first_last_and_some_entries_of_each_place_are_read_checked() -> None:
    drop = Dropping(closed(99, (4, 2, 2), (0, (0, 1, 2, 3)), (50, (4, 1, 2, 3))))
    reads: dict[Bookie, list[Read]] = {}
    while drop.sends:
        send = drop.answer_soundly()
        assert isinstance(send.request, Read)
        reads.setdefault(send.bookie, []).append(send.request)
        assert send.request.bytes_max == 1
        assert send.request.checked or send.request.first == ABSENT_ENTRY
    asked = {each: sorted(read.first for read in of) for each, of in reads.items()}
    assert set(asked) == {bookie(number) for number in range(5)}
    assert [number for number in (0, 47, 48) if number in asked[bookie(0)]] == [0, 48], "place 0 takes residues 0 and 3"
    assert asked[bookie(4)][0] in (51, 52)
    assert 98 < asked[bookie(4)][-2] <= 99
    assert all(ids.count(ABSENT_ENTRY) == 1 for ids in asked.values()), "each bookie once, in however many fragments"
    assert all(len(ids) <= 4 + 4 + 1 for ids in asked.values())


def test_a_ledger_without_entries_needs_no_copies() -> None:
    drop = Dropping(closed(-1))
    assert [send.request.first for send in drop.sends if isinstance(send.request, Read)] == [ABSENT_ENTRY] * 3
    drop.audit().only(AnnounceDrop)


@pytest.mark.parametrize(
    "reply",
    [
        ReadReply(Status.NO_SUCH_ENTRY),
        ReadReply(Status.NO_SUCH_LEDGER),
        ReadReply(Status.UNKNOWN),
        ReadReply(Status.OK),
        ReadReply(Status.OK, run(7, 7)),
        Reply(Status.WRONG_INSTANCE),
        None,
    ],
    ids=str,
)
def test_the_copy_stays_if_another_one_is_not_sound(reply: Any) -> None:
    drop = Dropping(closed())
    if reply is None:
        drop.lose(1)
    else:
        drop.answer(1, reply)
    failed = drop.only(Failed)
    assert failed.reason is Reason.UNDECIDED
    assert str(bookie(1)) in failed.detail
    assert "entry 0" in failed.detail
    assert drop.machine.step(DropAnnounced(ready=True), 0) == [], "it has ended"


def test_the_copy_stays_while_another_bookie_is_in_limbo() -> None:
    drop = Dropping(closed(-1))
    drop.answer(0, ReadReply(Status.NO_SUCH_LEDGER))
    drop.answer(1, ReadReply(Status.UNKNOWN))
    assert "instead of denying it" in drop.only(Failed).detail


def test_the_copy_stays_while_it_is_in_limbo() -> None:
    drop = Dropping(closed()).audit()
    drop.feed(DropAnnounced(ready=False))
    assert "limbo" in drop.only(Failed).detail


def test_a_barrier_that_was_refused_is_none_even_if_the_metadata_look_as_it_wrote_them() -> None:
    """Another bookie's barrier looks the same, and a copy may have come here between it and the announcement."""
    drop = announced()
    drop.feed(MetadataRefused(drop.only(WriteMetadata).metadata, 4))
    assert drop.only(Failed).reason is Reason.UNDECIDED


def test_a_barrier_whose_outcome_is_unknown_is_none() -> None:
    drop = announced()
    drop.feed(MetadataUnreachable())
    assert drop.only(Failed).reason is Reason.METADATA_UNREACHABLE


def test_entries_that_were_added_meanwhile_end_it() -> None:
    drop = announced()
    drop.feed(MetadataWritten(4))
    drop.feed(DropEnded(dropped=False))
    assert "added" in drop.only(Failed).detail


def test_a_bookie_that_serves_no_more_is_not_waited_for() -> None:
    drop = Dropping(closed()).audit()
    assert drop.only(WakeAt).time_ns == BOOKIE_NS
    drop.feed(Woken())
    assert drop.only(Failed).reason is Reason.UNDECIDED


def test_few_reads_are_under_way_at_a_time() -> None:
    drop = Dropping(closed(10_000, (7, 3, 2)))
    assert len(drop.sends) == 8
    drop.answer(0, sound(drop.pending(0)[0].request))
    assert len(drop.sends) == 8
    assert drop.machine.step(Woken(), 0)
    assert drop.machine.step(Woken(), 0) == []
