"""Audits of one replica, step by step."""

from __future__ import annotations

from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.replication.messages import EntriesRead, Read, ReadEnded, ReadReply, Status
from pybk.replication.replica_check import ReplicaCheckMachine, Span, joined, spans_of
from tests.replication.driving import Driven, bookie, metadata, run

NO = ReadReply(Status.NO_SUCH_ENTRY)
UNKNOWN = ReadReply(Status.UNKNOWN)


class Audit(Driven):
    def __init__(
        self,
        first: int,
        last: int,
        opened: LedgerMetadata | None = None,
        *,
        place: int = 1,
        window: int = 100,
        checked: bool = False,
    ) -> None:
        self.audit = ReplicaCheckMachine(
            opened or metadata(), place, first, last, bytes_max=1000, window=window, checked=checked
        )
        super().__init__(self.audit)
        self.take(self.audit.start(0))

    def asked(self) -> list[tuple[int, int, int]]:
        """Return first, last and stride of the reads that wait."""
        reads = [send.request for send in self.sends if isinstance(send.request, Read)]
        return [(read.first, read.last, read.stride) for read in reads]

    def ended(self) -> bool:
        return any(isinstance(effect, ReadEnded) for effect in self.effects)


def test_only_the_one_bookie_is_asked_for_all_that_it_should_have() -> None:
    audit = Audit(0, 9, window=4)
    assert audit.asked() == [(0, 3, 1), (4, 7, 1)]
    assert {send.bookie for send in audit.sends} == {bookie(1)}
    audit.answer(1, ReadReply(Status.OK, run(0, 3)))
    assert audit.only(EntriesRead).run == run(0, 3)
    assert audit.asked() == [(4, 7, 1), (8, 9, 1)]
    audit.answer(1, ReadReply(Status.OK, run(4, 5)))  # no more did fit
    assert audit.asked() == [(8, 9, 1), (6, 7, 1)]
    audit.answer(1, ReadReply(Status.OK, run(8, 9)))
    assert not audit.ended()
    audit.answer(1, ReadReply(Status.OK, run(6, 7)))
    assert audit.ended()
    assert (audit.audit.missing, audit.audit.damaged, audit.audit.unknown) == ((), (), ())


def test_entries_of_other_places_are_not_asked_for() -> None:
    wide = metadata((3, 2, 2))
    assert spans_of(wide, 1, 0, 9) == [Span(0, 9, 3), Span(1, 7, 3)]
    audit = Audit(0, 9, wide)
    assert audit.asked() == [(0, 9, 3), (1, 7, 3)]
    audit.answer(1, ReadReply(Status.OK, run(0, 9, 3)))
    audit.answer(1, ReadReply(Status.OK, run(1, 1, 3)))
    audit.answer(1, NO)
    audit.answer(1, ReadReply(Status.OK, run(7, 7, 3)))
    assert audit.ended()
    assert audit.audit.missing == (Span(4, 4, 3),)


def test_the_fragment_determines_the_bookie() -> None:
    moved = metadata((3, 3, 2), (0, (0, 1, 2)), (5, (0, 4, 2)))
    assert Audit(5, 9, moved).audit.bookie == bookie(4)
    assert Audit(0, 4, moved).audit.bookie == bookie(1)


def test_denied_entries_are_missing_and_the_others_are_still_read() -> None:
    audit = Audit(0, 5)
    audit.answer(1, ReadReply(Status.NO_SUCH_ENTRY, run(0, 1)))
    assert audit.only(EntriesRead).run == run(0, 1)
    assert audit.asked() == [(3, 5, 1)]
    audit.answer(1, NO)
    audit.answer(1, ReadReply(Status.OK, run(4, 5)))
    assert audit.ended()
    assert audit.audit.missing == (Span(2, 3, 1),)


def test_a_bookie_that_knows_nothing_of_the_ledger_misses_all_of_it() -> None:
    audit = Audit(0, 9, window=5)
    audit.answer(1, ReadReply(Status.NO_SUCH_LEDGER))
    audit.answer(1, ReadReply(Status.NO_SUCH_LEDGER))
    assert audit.ended()
    assert audit.audit.missing == (Span(0, 9, 1),)


def test_entries_that_fail_verification_are_damaged_and_unanswered_ones_unknown() -> None:
    audit = Audit(0, 3)
    audit.answer(1, ReadReply(Status.UNKNOWN, run(0, 0), damaged=True))
    audit.answer(1, UNKNOWN)
    audit.answer(1, ReadReply(Status.OK, run(3, 3)))
    assert audit.ended()
    assert audit.audit.damaged == (Span(1, 1, 1),)
    assert audit.audit.unknown == (Span(2, 2, 1),)


def test_entries_that_only_an_unchecked_read_returns_are_damaged() -> None:
    audit = Audit(0, 2, checked=True)
    audit.answer(1, ReadReply(Status.UNKNOWN, run(0, 0)))
    probe, rest = (send.request for send in audit.sends)
    assert probe == Read(5, 1, 1, 1, 1000, checked=False)
    assert rest == Read(5, 2, 2, 1, 1000, checked=True)
    audit.answer(1, ReadReply(Status.OK, run(1, 1)))
    audit.answer(1, UNKNOWN)
    audit.answer(1, UNKNOWN)
    assert audit.ended()
    assert audit.audit.damaged == (Span(1, 1, 1),)
    assert audit.audit.unknown == (Span(2, 2, 1),)


def test_a_bookie_that_answers_no_more_is_silent() -> None:
    audit = Audit(0, 9, window=5)
    audit.lose(1)
    assert audit.asked() == [(5, 9, 1), (0, 4, 1)]  # a link may break once
    audit.lose(1)
    audit.lose(1)
    assert audit.ended()
    assert audit.audit.silent
    assert audit.audit.missing == ()


def test_an_answer_in_between_shows_that_the_bookie_is_alive() -> None:
    audit = Audit(0, 9, window=5)
    audit.lose(1)
    audit.answer(1, ReadReply(Status.OK, run(5, 9)))
    audit.lose(1)
    audit.answer(1, ReadReply(Status.OK, run(0, 4)))
    assert audit.ended()
    assert not audit.audit.silent


def test_an_empty_answer_leaves_entries_unknown() -> None:
    audit = Audit(0, 0)
    audit.answer(1, ReadReply(Status.OK))
    assert audit.ended()
    assert audit.audit.unknown == (Span(0, 0, 1),)


def test_consecutive_spans_are_joined() -> None:
    assert joined([Span(6, 6, 3), Span(0, 3, 3), Span(4, 4, 3)]) == (Span(0, 6, 3), Span(4, 4, 3))
    assert str(Span(0, 6, 3)) == "0-6 by 3"
    assert str(Span(4, 4, 3)) == "4"
    assert Span(0, 6, 3).entries == 3


def test_spans_are_named_by_their_entries() -> None:
    assert [str(Span(3, 3, 1)), str(Span(3, 5, 1)), str(Span(0, 4, 2)), str(Span(1, 9, 4))] == [
        "3",
        "3-5",
        "0-4 by 2",
        "1-9 by 4",
    ]
