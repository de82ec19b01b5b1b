"""Reads with fallback, and reads of the last add confirmed, step by step."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata, LedgerState
from pybk.replication.fragments import fragment_ranges
from pybk.replication.messages import (
    COMPARED_MAX,
    CompareLacs,
    EntriesRead,
    Failed,
    LacRead,
    LacReply,
    LacsAbove,
    LacsCompared,
    MetadataRead,
    MetadataUnreachable,
    Read,
    ReadEnded,
    ReadLac,
    ReadMetadata,
    ReadReply,
    Reason,
    Reply,
    Status,
    WakeAt,
    Woken,
)
from pybk.replication.reader import NO_LIMIT, LacComparisonMachine, LacMachine, ReadMachine
from tests.replication.driving import LEDGER, Driven, bookie, metadata, run

NO = ReadReply(Status.NO_SUCH_ENTRY)
UNKNOWN = ReadReply(Status.UNKNOWN)


class Reading(Driven):
    def __init__(
        self,
        first: int,
        last: int,
        opened: LedgerMetadata | None = None,
        rank: dict[Bookie, int] | None = None,
        residues: frozenset[int] | None = None,
        parts: int = 1,
        total_bytes: int = NO_LIMIT,
    ) -> None:
        super().__init__(
            ReadMachine(
                opened or metadata(),
                first,
                last,
                bytes_max=1000,
                speculative_ns=100,
                rank=rank or {},
                residues=residues,
                parts=parts,
                total_bytes=total_bytes,
            )
        )
        self.take(self.machine.start(0))

    def asked(self) -> list[tuple[int, int, int]]:
        """Return bookie, first and last of the reads that wait."""
        return [
            (int(send.bookie.bookie_id[1:]), send.request.first, send.request.last)
            for send in self.sends
            if isinstance(send.request, Read)
        ]

    def hurry(self, first: int) -> None:
        """Put the reads that begin with an entry to the front."""
        self.sends.sort(key=lambda send: not isinstance(send.request, Read) or send.request.first != first)


def ids(reading: Reading) -> list[int]:
    return [
        entry_id
        for effect in reading.effects
        if isinstance(effect, EntriesRead)
        for entry_id in range(effect.run.first, effect.run.last + 1, effect.run.stride)
    ]


def test_one_replica_is_asked_until_all_entries_have_arrived() -> None:
    reading = Reading(3, 9)
    assert reading.asked() == [(0, 3, 9)]
    reading.answer(0, ReadReply(Status.OK, run(3, 6)))
    assert ids(reading) == [3, 4, 5, 6]
    assert reading.asked() == [(0, 7, 9)]
    reading.answer(0, ReadReply(Status.OK, run(7, 9)))
    assert reading.only(ReadEnded) == ReadEnded(None, Status.OK, ())


def test_the_bookie_of_the_lowest_rank_is_asked_first() -> None:
    reading = Reading(0, 0, rank={bookie(0): 2, bookie(1): 1})
    assert reading.asked() == [(2, 0, 0)]


def test_parts_are_read_from_different_replicas_at_a_time() -> None:
    reading = Reading(2, 11, parts=4, rank={bookie(0): 1, bookie(1): 2, bookie(2): 3})
    assert reading.asked() == [(0, 2, 4), (1, 5, 7), (2, 8, 10), (0, 11, 11)]
    reading.answer(2, ReadReply(Status.OK, run(8, 10)))
    assert ids(reading) == [8, 9, 10]
    reading.answer(0, ReadReply(Status.OK, run(2, 3)))
    assert reading.asked() == [(1, 5, 7), (0, 11, 11), (0, 4, 4)]
    reading.lose(1)
    assert reading.asked() == [(0, 11, 11), (0, 4, 4), (2, 5, 7)]
    reading.answer(2, ReadReply(Status.OK, run(5, 7)))
    reading.answer(0, ReadReply(Status.OK, run(11, 11)))
    assert [type(effect) for effect in reading.effects] == [EntriesRead]
    reading.answer(0, ReadReply(Status.OK, run(4, 4)))
    assert reading.only(ReadEnded) == ReadEnded(None, Status.OK, ())


def test_a_read_ends_at_a_part_that_no_bookie_has() -> None:
    reading = Reading(0, 3, parts=2, rank={bookie(0): 1, bookie(1): 2, bookie(2): 3})
    reading.answer(0, ReadReply(Status.OK, run(0, 1)))
    for number in (1, 2, 0):
        reading.answer(number, NO)
    assert reading.only(ReadMetadata) == ReadMetadata()
    reading.feed(MetadataRead(metadata(), 1))
    assert reading.only(ReadEnded) == ReadEnded(2, Status.NO_SUCH_ENTRY, ())


def test_there_are_no_more_parts_than_entries_and_none_where_write_sets_differ() -> None:
    assert [first for _, first, _ in Reading(5, 6, parts=4).asked()] == [5, 6]
    wide = metadata((3, 2, 2))
    assert Reading(0, 8, wide, parts=4).asked() == Reading(0, 8, wide).asked()


def size(first: int, last: int, stride: int = 1) -> int:
    return sum(run(first, last, stride).sizes)


def test_a_read_ends_when_it_has_its_bytes() -> None:
    reading = Reading(0, 99, total_bytes=1000 + size(0, 9))
    reading.answer(0, ReadReply(Status.OK, run(0, 9)))
    assert ids(reading) == list(range(10))
    [request] = [send.request for send in reading.sends if isinstance(send.request, Read)]
    assert (request.first, request.bytes_max) == (10, 1000)
    reading.answer(0, ReadReply(Status.OK, run(10, 19)))
    assert reading.only(ReadEnded) == ReadEnded(20, Status.OK, ())


def test_an_answer_without_space_for_the_next_entry_is_the_last() -> None:
    reading = Reading(0, 99, total_bytes=1000)
    reading.answer(0, ReadReply(Status.OK, run(0, 3)))
    assert reading.only(ReadEnded) == ReadEnded(4, Status.OK, ())


def test_where_a_copy_is_damaged_another_one_is_asked_for_the_bytes_left() -> None:
    reading = Reading(0, 99, total_bytes=1000)
    reading.answer(0, ReadReply(Status.UNKNOWN, run(0, 3)))
    [request] = [send.request for send in reading.sends if isinstance(send.request, Read)]
    assert (request.first, request.bytes_max) == (4, 1000 - size(0, 3))


def test_one_entry_is_read_whatever_its_bytes_are() -> None:
    reading = Reading(0, 9, total_bytes=1)
    reading.lose(0)
    reading.answer(1, ReadReply(Status.OK, run(0, 0)))
    assert ids(reading) == [0]
    assert reading.only(ReadEnded) == ReadEnded(1, Status.OK, ())


def test_a_part_continues_until_it_and_those_before_it_have_the_bytes() -> None:
    reading = Reading(0, 99, parts=2, rank={bookie(0): 1, bookie(1): 2, bookie(2): 3}, total_bytes=1000 + size(0, 9))
    assert reading.asked() == [(0, 0, 49), (1, 50, 99)]
    reading.answer(1, ReadReply(Status.OK, run(50, 69)))
    assert reading.asked() == [(0, 0, 49), (1, 70, 99)]
    reading.answer(0, ReadReply(Status.OK, run(0, 9)))
    assert reading.asked() == [(1, 70, 99), (0, 10, 49)], "what was read behind a gap does not count"
    reading.answer(0, ReadReply(Status.OK, run(10, 29)))
    assert reading.only(ReadEnded) == ReadEnded(30, Status.OK, ()), "nobody waits for what comes behind the end"


def test_striped_entries_end_before_the_first_that_was_not_read() -> None:
    reading = Reading(0, 99, metadata((4, 2, 2)), total_bytes=4 * size(0, 8, 4))
    reading.answer(0, ReadReply(Status.OK, run(0, 12, 4)))
    reading.answer(1, ReadReply(Status.OK, run(1, 9, 4)))
    reading.answer(2, ReadReply(Status.OK, run(2, 6, 4)))
    assert not any(isinstance(effect, ReadEnded) for effect in reading.effects)
    reading.answer(3, ReadReply(Status.OK, run(3, 7, 4)))
    assert reading.only(ReadEnded) == ReadEnded(10, Status.OK, ())


def test_replicas_share_the_load_by_entry() -> None:
    assert [Reading(first, first).asked()[0][0] for first in range(4)] == [0, 1, 2, 0]


def test_a_bad_copy_is_read_elsewhere_and_named() -> None:
    reading = Reading(0, 4)
    reading.answer(0, ReadReply(Status.UNKNOWN, run(0, 1)))
    assert ids(reading) == [0, 1]
    assert reading.asked() == [(1, 2, 4)]
    reading.answer(1, ReadReply(Status.OK, run(2, 4)))
    assert reading.only(ReadEnded) == ReadEnded(None, Status.OK, ((bookie(0), 2),))


def test_a_silent_bookie_is_not_counted_as_a_bad_copy() -> None:
    reading = Reading(0, 0)
    reading.lose(0)
    reading.answer(1, Reply(Status.WRONG_INSTANCE))
    reading.answer(2, ReadReply(Status.OK, run(0, 0)))
    assert reading.only(ReadEnded).bad == ()


def test_an_answer_with_another_entry_is_not_accepted() -> None:
    reading = Reading(0, 0)
    reading.answer(0, ReadReply(Status.OK, run(1, 1)))
    assert ids(reading) == []
    assert reading.asked() == [(1, 0, 0)]


def test_a_slow_replica_gets_company_and_entries_come_once() -> None:
    reading = Reading(0, 4)
    assert reading.only(WakeAt).time_ns == 100
    reading.now = 100
    reading.feed(Woken())
    assert reading.asked() == [(0, 0, 4), (1, 0, 4)]
    reading.answer(1, ReadReply(Status.OK, run(0, 2)))
    assert ids(reading) == [0, 1, 2]
    reading.answer(0, ReadReply(Status.OK, run(0, 4)))
    assert ids(reading) == [3, 4]
    reading.only(ReadEnded)


def test_striped_entries_are_read_by_residue() -> None:
    reading = Reading(1, 9, metadata((4, 2, 2)))
    assert reading.asked() == [(1, 1, 9), (2, 2, 9), (3, 3, 9), (0, 4, 9)]
    assert {send.request.stride for send in reading.sends if isinstance(send.request, Read)} == {4}
    reading.answer(2, NO)
    assert reading.asked()[-1] == (3, 2, 9)


def test_only_the_residues_wanted_are_read() -> None:
    reading = Reading(0, 9, metadata((4, 2, 2)), residues=frozenset({1, 2}))
    assert [first for _, first, _ in reading.asked()] == [1, 2]


def test_fragments_are_read_from_their_ensembles() -> None:
    opened = metadata((3, 3, 2), (0, (0, 1, 2)), (5, (3, 4, 6)), (7, (0, 1, 2)))
    assert [(first, last) for _, first, last in Reading(3, 8, opened).asked()] == [(3, 4), (5, 6), (7, 8)]
    assert [(low, high) for _, low, high in fragment_ranges(opened.fragments, 5, 6)] == [(5, 6)]


def exhaust(reading: Reading, *replies: ReadReply) -> None:
    for number, reply in enumerate(replies):
        reading.answer(number, reply)


def test_metadata_are_read_again_before_a_read_fails() -> None:
    """C17: a replication may have moved the entries."""
    reading = Reading(0, 0)
    exhaust(reading, NO, UNKNOWN, UNKNOWN)
    reading.only(ReadMetadata)
    reading.feed(MetadataRead(metadata((3, 3, 2), (0, (0, 7, 2))), 9))
    assert reading.asked() == [(7, 0, 0)]
    reading.answer(7, ReadReply(Status.OK, run(0, 0)))
    assert reading.only(ReadEnded).missing is None


def test_only_a_denial_by_all_is_a_denial() -> None:
    for replies, status in (((NO, NO, NO), Status.NO_SUCH_ENTRY), ((NO, UNKNOWN, NO), Status.UNKNOWN)):
        reading = Reading(0, 0)
        exhaust(reading, *replies)
        reading.feed(MetadataRead(metadata(), 8))
        ended = reading.only(ReadEnded)
        assert (ended.missing, ended.status) == (0, status)


def test_entries_that_all_bookies_deny_are_unknown_if_the_metadata_cannot_be_read() -> None:
    """C17: another bookie may have taken the place of one that denies the entry, and have it."""
    reading = Reading(0, 0)
    exhaust(reading, NO, NO, NO)
    reading.feed(MetadataUnreachable())
    ended = reading.only(ReadEnded)
    assert (ended.missing, ended.status) == (0, Status.UNKNOWN)


def test_entries_that_new_metadata_put_into_a_later_fragment_are_requested_from_its_bookies() -> None:
    """C17: bookies of the fragment before it deny what they never had."""
    reading = Reading(0, 9)
    exhaust(reading, UNKNOWN, UNKNOWN, UNKNOWN)
    reading.feed(MetadataRead(metadata((3, 3, 2), (0, (0, 1, 6)), (5, (3, 4, 7)), (8, (0, 1, 2))), 8))
    assert reading.asked() == [(6, 0, 4), (7, 5, 7), (2, 8, 9)]
    for number, first, last in reading.asked():
        reading.answer(number, ReadReply(Status.OK, run(first, last)))
    assert reading.only(ReadEnded).missing is None


def test_residues_of_striped_entries_are_cut_at_fragments() -> None:
    reading = Reading(0, 9, metadata((4, 2, 2)), residues=frozenset({1}))
    for number in (1, 2):
        reading.answer(number, UNKNOWN)
    reading.feed(MetadataRead(metadata((4, 2, 2), (0, (0, 6, 2, 3)), (6, (0, 7, 2, 3))), 8))
    assert reading.asked() == [(6, 1, 5), (7, 9, 9)]


def test_a_residue_of_which_a_fragment_has_no_entry_is_asked_of_the_next_one() -> None:
    """C17: the fragment from 6 on has entry 6 alone, so entry 9 is at the bookies of the fragment from 7 on."""
    reading = Reading(0, 9, metadata((4, 2, 2)), residues=frozenset({1}))
    for number in (1, 2):
        reading.answer(number, UNKNOWN)
    reading.feed(MetadataRead(metadata((4, 2, 2), (0, (0, 6, 2, 3)), (6, (0, 7, 2, 3)), (7, (0, 8, 2, 3))), 8))
    assert reading.asked() == [(6, 1, 5), (8, 9, 9)]


def test_a_deleted_ledger_ends_the_read() -> None:
    reading = Reading(0, 0)
    exhaust(reading, NO, NO, NO)
    reading.feed(MetadataRead(None, -1))
    assert reading.only(Failed).reason is Reason.DELETED


# ---- last add confirmed --------------------------------------------------------------------------------------------


class Lac(Driven):
    def __init__(self, opened: LedgerMetadata | None = None, beyond: int | None = None, **pauses: Any) -> None:
        super().__init__(LacMachine(opened or metadata(), beyond=beyond, wait_ns=50, **pauses))
        self.take(self.machine.start(0))

    def wake(self, now: int) -> None:
        self.now = now
        self.feed(Woken())


def test_the_lac_is_the_highest_of_a_covering_set() -> None:
    lac = Lac()
    assert [send.request for send in lac.sends] == [ReadLac(LEDGER, False, None, 50)] * 3
    lac.answer(0, LacReply(Status.OK, 7))
    assert lac.effects == []
    lac.answer(2, LacReply(Status.OK, 5))
    assert lac.effects == [LacRead(7)]


def test_without_coverage_the_lac_is_not_known() -> None:
    lac = Lac()
    lac.answer(0, LacReply(Status.OK, 7))
    lac.lose(1)
    lac.answer(2, Reply(Status.WRONG_INSTANCE))
    failed = lac.only(Failed)
    assert failed.reason is Reason.UNDECIDED
    assert "only b0@00000000" in failed.detail


def test_a_ledger_that_begins_later_is_confirmed_before() -> None:
    lac = Lac(metadata((3, 3, 2), (0, (0, 1, 2)), (5, (3, 4, 6))))
    lac.answer(3, LacReply(Status.NO_SUCH_LEDGER))
    lac.answer(4, LacReply(Status.OK, -1))
    assert lac.effects == [LacRead(4)]


def test_the_lac_of_a_closed_ledger_is_its_end() -> None:
    lac = Lac(replace(metadata(), state=LedgerState.CLOSED, last_entry_id=3))
    assert (lac.effects, lac.sends) == ([LacRead(3)], [])


def test_waiting_ends_with_the_first_that_moved() -> None:
    lac = Lac(beyond=4)
    assert len(lac.sends) == 2, "one of these takes part in every acknowledgement"
    lac.answer(1, LacReply(Status.OK, 6))
    assert lac.effects == [LacRead(6)]


def test_waiting_ends_with_the_time() -> None:
    lac = Lac(beyond=4)
    lac.answer(0, LacReply(Status.OK, 4))
    assert lac.effects == []
    lac.answer(1, LacReply(Status.OK, 3))
    assert lac.effects == [LacRead(4)]


def test_waiting_continues_at_another_bookie() -> None:
    lac = Lac(beyond=4)
    lac.lose(0)
    assert [send.bookie for send in lac.sends] == [bookie(1), bookie(2)]
    lac.lose(1)
    lac.lose(2)
    failed = lac.only(Failed)
    assert failed.reason is Reason.UNDECIDED
    assert "none of its last 3 bookies returned the last add confirmed" in failed.detail


def test_waiting_begins_after_its_pause() -> None:
    lac = Lac(beyond=4, pause_ns=7)
    assert (lac.sends, lac.effects) == ([], [WakeAt(7)])
    lac.wake(7)
    assert len(lac.sends) == 2
    lac.answer(1, LacReply(Status.OK, 6))
    assert lac.effects == [LacRead(6)]


def test_while_too_few_bookies_wait_those_that_did_not_answer_are_asked_again() -> None:
    lac = Lac(beyond=4, retry_ns=10)
    lac.lose(0)
    assert lac.effects == [], "another one waits in its place"
    lac.lose(2)
    assert lac.only(WakeAt) == WakeAt(10)
    lac.wake(10)
    assert [send.bookie for send in lac.sends] == [bookie(1), bookie(0)], "two are enough"
    lac.lose(0)
    assert [send.bookie for send in lac.sends] == [bookie(1), bookie(2)]
    lac.answer(2, LacReply(Status.OK, 5))
    assert lac.effects == [LacRead(5)]


def test_waiting_fails_only_if_no_bookie_answers_any_more() -> None:
    lac = Lac(beyond=4, retry_ns=10)
    for place in (0, 1, 2):
        lac.lose(place)
    assert lac.only(Failed).reason is Reason.UNDECIDED
    lac.wake(10)
    assert (lac.sends, lac.effects) == ([], [])


# ---- comparisons of many last adds confirmed -----------------------------------------------------------------------


class Comparison(Driven):
    """Compares the LACs of ledgers, each given by its metadata, with those that the client knows."""

    def __init__(self, *known: tuple[LedgerMetadata, int]) -> None:
        super().__init__(LacComparisonMachine(known))
        self.take(self.machine.start(0))

    def name(self, number: int, *ledger_ids: int) -> None:
        """Answer the oldest request to a bookie with ledgers whose LAC has moved."""
        self.answer(number, LacsAbove(array("q", ledger_ids)))


def ledger(ledger_id: int, *fragments: tuple[int, tuple[int, ...]]) -> LedgerMetadata:
    return replace(metadata((3, 3, 2), *fragments), ledger_id=ledger_id)


def test_each_bookie_is_asked_once_for_all_ledgers() -> None:
    comparing = Comparison((ledger(1), 7), (ledger(2), -1), (ledger(3, (0, (0, 1, 3))), 5))
    asked = {send.bookie: send.request for send in comparing.sends}
    assert len(comparing.sends) == 4
    assert asked[bookie(0)] == CompareLacs(array("q", (1, 2, 3)), array("q", (7, -1, 5)))
    assert asked[bookie(2)] == CompareLacs(array("q", (1, 2)), array("q", (7, -1)))
    assert asked[bookie(3)] == CompareLacs(array("q", (3,)), array("q", (5,)))


def test_what_no_bookie_of_a_covering_set_names_has_not_moved() -> None:
    comparing = Comparison((ledger(1), 7), (ledger(2), -1))
    comparing.name(0)
    assert comparing.effects == [], "two others may have acknowledged an entry"
    comparing.name(2, 2)
    assert comparing.effects == [LacsCompared(frozenset({1}))]
    comparing.name(1, 1)
    assert comparing.effects == [], "it has ended"


def test_what_the_answers_do_not_cover_may_have_moved() -> None:
    comparing = Comparison((ledger(1), 7), (ledger(2, (0, (0, 1, 3))), 7), (ledger(3, (0, (2, 3, 4))), 7))
    comparing.lose(1)
    comparing.answer(3, Reply(Status.REFUSED))
    comparing.name(0)
    comparing.name(4)
    assert comparing.effects == []
    comparing.name(2)
    assert comparing.effects == [LacsCompared(frozenset({1, 3}))]


def test_entries_before_a_fragment_that_the_client_does_not_know_are_confirmed() -> None:
    comparing = Comparison(
        (ledger(1, (0, (0, 1, 2)), (5, (0, 1, 3))), 3), (ledger(2, (0, (0, 1, 2)), (5, (0, 1, 3))), 4)
    )
    comparing.name(0)
    comparing.name(3)
    assert comparing.effects == [LacsCompared(frozenset({2}))]


def test_more_ledgers_than_a_request_may_have_are_compared_by_several() -> None:
    comparing = Comparison(*((ledger(each), each) for each in range(COMPARED_MAX + 1)))
    assert len(comparing.sends) == 6
    comparing.name(0)
    comparing.name(1)
    comparing.name(0)
    assert comparing.effects == [], "another answer of bookie 1 is missing"
    comparing.name(1, 0)
    assert comparing.effects == [LacsCompared(frozenset(range(1, COMPARED_MAX + 1)))]


def test_each_ensemble_of_a_ledger_that_is_given_twice_is_to_be_covered() -> None:
    old, new = ledger(1, (0, (0, 1, 2))), ledger(1, (0, (0, 1, 3)))
    comparing = Comparison((old, 7), (new, 7))
    comparing.name(0)
    comparing.name(2)
    comparing.lose(1)
    comparing.lose(3)
    assert comparing.effects == [LacsCompared(frozenset())]


def test_what_covers_one_quorum_need_not_cover_another() -> None:
    all_four = (0, (0, 1, 2, 3))
    first, second = (
        replace(metadata(sizes, all_four), ledger_id=number) for number, sizes in ((1, (4, 2, 2)), (2, (4, 4, 2)))
    )
    comparing = Comparison((first, 7), (second, 7))
    for number in range(3):
        comparing.name(number)
    assert comparing.effects == [LacsCompared(frozenset({1, 2}))]
    comparing = Comparison((first, 7), (second, 7))
    comparing.name(0)
    comparing.name(2)
    comparing.lose(1)
    comparing.lose(3)
    assert comparing.effects == [LacsCompared(frozenset({1}))]


def test_nothing_is_compared_without_ledgers() -> None:
    assert Comparison().effects == [LacsCompared(frozenset())]


def test_two_slow_replicas_with_a_part_each_are_both_asked_on() -> None:
    """The bookie that answered first is asked for the rest, though the other one still owes an answer."""
    reading = Reading(0, 9)
    reading.now = 100
    reading.feed(Woken())
    assert reading.asked() == [(0, 0, 9), (1, 0, 9)]
    reading.answer(0, ReadReply(Status.OK, run(0, 3)))
    assert reading.asked() == [(1, 0, 9), (0, 4, 9)]
    reading.answer(1, ReadReply(Status.OK, run(0, 3)))
    assert reading.asked() == [(0, 4, 9)]


def striped() -> Reading:
    """Return a read of entries 0 to 3, one for each of four write sets, whose second entry nobody has."""
    reading = Reading(0, 3, metadata((4, 2, 2)))
    for number in (1, 2):
        reading.hurry(1)
        reading.answer(number, NO)
    reading.only(ReadMetadata)
    return reading


def test_only_exhausted_entries_are_requested_from_new_bookies() -> None:
    reading = striped()
    before = sorted(reading.asked())
    reading.feed(MetadataRead(metadata((4, 2, 2), (0, (0, 7, 2, 3))), 8))
    assert sorted(reading.asked()) == sorted([*before, (7, 1, 3)])


def test_entries_exhausted_later_are_tried_with_the_latest_metadata() -> None:
    reading = striped()
    reading.feed(MetadataRead(metadata((4, 2, 2), (0, (0, 7, 2, 8))), 8))
    for number in (2, 3):
        reading.hurry(2)
        reading.answer(number, NO)
    reading.only(ReadMetadata)
    reading.feed(MetadataUnreachable())
    assert (8, 2, 3) in reading.asked()
    assert reading.machine.metadata.fragments[0].ensemble[3] == bookie(8)
