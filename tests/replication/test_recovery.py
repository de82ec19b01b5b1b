"""The recovery's machine, step by step."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from pybk.ledger.ledger_metadata import Fragment, LedgerMetadata, LedgerState
from pybk.replication.entry_runs import entries_of
from pybk.replication.messages import (
    Add,
    BookiesChosen,
    BookiesLeave,
    ChooseBookies,
    Done,
    EntryRun,
    Failed,
    LacReply,
    MetadataRead,
    MetadataRefused,
    MetadataUnreachable,
    MetadataWritten,
    Read,
    ReadLac,
    ReadMetadata,
    ReadReply,
    Reason,
    Reply,
    Send,
    Status,
    UnderReplicated,
    WakeAt,
    Woken,
    WriteMetadata,
)
from pybk.replication.recovery import RETRY_FOR_NS, RETRY_NS, RecoveryMachine
from tests.replication.driving import Driven, bookie, entry, metadata, run

NO = ReadReply(Status.NO_SUCH_ENTRY)
UNKNOWN = ReadReply(Status.UNKNOWN)


class Recovery(Driven):
    def __init__(self, opened: LedgerMetadata | None = None, *, member: bool = False) -> None:
        self.opened = opened or metadata()
        super().__init__(RecoveryMachine(self.opened, 3, member=member))
        self.take(self.machine.start(0))

    def mark(self) -> None:
        """Let the ledger be marked as in recovery, which is followed by the fencing."""
        written = self.only(WriteMetadata)
        assert written.metadata.state is LedgerState.IN_RECOVERY
        self.marked = written.metadata
        self.feed(MetadataWritten(4))

    def fence(self, *numbers: int, lac: int = -1) -> None:
        for number in numbers:
            self.answer(number, LacReply(Status.OK, lac))

    def reads(self) -> list[Send]:
        return [send for send in self.sends if isinstance(send.request, Read)]

    def adds(self) -> list[Send]:
        return [send for send in self.sends if isinstance(send.request, Add)]

    def told(self, number: int, reply: ReadReply, first: int | None = None) -> None:
        """Answer the oldest read of a bookie, or the one that begins with an entry."""
        send = next(
            send
            for send in self.reads()
            if send.bookie == bookie(number)
            and isinstance(send.request, Read)
            and (first is None or send.request.first == first)
        )
        self.sends.remove(send)
        self.sends.insert(0, send)
        self.answer(number, reply)

    def added(self, number: int) -> None:
        """Acknowledge the oldest add to a bookie."""
        send = next(send for send in self.adds() if send.bookie == bookie(number))
        self.sends.remove(send)
        self.sends.insert(0, send)
        self.answer(number)

    def wake(self) -> None:
        """Let the time come that the machine asked to be woken at."""
        self.now = self.only(WakeAt).time_ns
        self.feed(Woken())

    def drop_fences(self) -> None:
        self.sends = [send for send in self.sends if not isinstance(send.request, ReadLac)]

    def reading(self, lac: int = -1) -> None:
        """Fence two of three, and leave the third out."""
        self.mark()
        self.fence(0, 1, lac=lac)
        self.drop_fences()

    def closes(self) -> LedgerMetadata:
        return self.only(WriteMetadata).metadata


def test_a_closed_ledger_is_adopted() -> None:
    recovery = Recovery(replace(metadata(), state=LedgerState.CLOSED, last_entry_id=4))
    assert recovery.only(Done).metadata.last_entry_id == 4


def test_all_of_the_last_ensemble_are_fenced_after_the_ledger_is_marked() -> None:
    recovery = Recovery(metadata((3, 3, 2), (0, (0, 1, 2)), (5, (3, 1, 4))))
    assert recovery.sends == []
    recovery.mark()
    assert [send.request for send in recovery.sends] == [ReadLac(5, fence=True)] * 3
    assert [send.bookie for send in recovery.sends] == [bookie(3), bookie(1), bookie(4)]


def test_an_empty_ledger_is_closed_empty() -> None:
    recovery = Recovery()
    recovery.reading()
    recovery.answer(0, NO)
    assert recovery.effects == []
    recovery.answer(1, ReadReply(Status.NO_SUCH_LEDGER))
    closed = recovery.closes()
    assert (closed.state, closed.last_entry_id, closed.length) == (LedgerState.CLOSED, -1, 0)
    recovery.feed(MetadataWritten(5))
    assert recovery.only(Done).version == 5


def test_reads_fence_and_begin_after_the_lac() -> None:
    recovery = Recovery()
    recovery.reading(lac=6)
    ahead = [send.request for send in recovery.reads() if isinstance(send.request, Read) and send.request.first == 7]
    assert len(ahead) == 3
    assert all(request.fence for request in ahead)


def test_one_hung_bookie_holds_nothing_up() -> None:
    """C5: two of three are enough to fence, to deny and to acknowledge."""
    recovery = Recovery()
    recovery.reading()
    recovery.told(0, ReadReply(Status.NO_SUCH_ENTRY, run(0, 2)))
    recovery.told(1, ReadReply(Status.NO_SUCH_ENTRY, run(0, 1)))
    recovery.added(0)
    recovery.added(1)
    recovery.told(1, NO)
    closed = recovery.closes()
    assert (closed.last_entry_id, closed.length) == (2, 30)


def test_found_entries_are_written_back_unchanged_with_a_frozen_lac() -> None:
    recovery = Recovery()
    recovery.reading(lac=-1)
    recovery.answer(0, ReadReply(Status.NO_SUCH_ENTRY, run(0, 2)))
    for send in recovery.adds():
        add = send.request
        assert isinstance(add, Add)
        assert add.recovery
        assert add.lac == -1
        assert [bytes(each) for each in entries_of(add.runs[0])] == [entry(0), entry(1), entry(2)]
    assert {send.bookie for send in recovery.adds()} == {bookie(0), bookie(1), bookie(2)}
    recovery.answer(1, ReadReply(Status.OK, run(0, 2)))
    reads = recovery.pending(1)
    assert [send.request.first for send in reads if isinstance(send.request, Read)] == [3], "reading continues"


def test_later_adds_carry_the_same_lac() -> None:
    recovery = Recovery()
    recovery.reading(lac=-1)
    recovery.answer(0, ReadReply(Status.OK, run(0, 0)))
    recovery.added(0)
    recovery.added(1)
    recovery.sends = recovery.reads()
    recovery.told(0, ReadReply(Status.OK, run(1, 1)))
    assert [send.request.lac for send in recovery.adds() if isinstance(send.request, Add)] == [-1] * 3


def test_a_recovery_never_guesses_an_unknown_entry() -> None:
    recovery = Recovery()
    recovery.reading()
    recovery.answer(0, NO)
    recovery.answer(1, UNKNOWN)
    recovery.lose(2)
    while recovery.now < RETRY_FOR_NS:
        recovery.wake()
        assert {send.bookie for send in recovery.reads()} == {bookie(1), bookie(2)}, "who denied need not be asked"
        recovery.answer(1, UNKNOWN)
        recovery.lose(2)
    failed = recovery.only(Failed)
    assert failed.reason is Reason.UNDECIDED
    assert "UNKNOWN" in failed.detail
    assert "no answer" in failed.detail


def test_silent_bookies_are_asked_again() -> None:
    recovery = Recovery()
    recovery.reading()
    recovery.answer(0, NO)
    recovery.answer(1, UNKNOWN)
    recovery.lose(2)
    recovery.feed(Woken())
    recovery.answer(2, NO)
    assert recovery.closes().last_entry_id == -1


def test_fencing_needs_coverage_and_is_tried_again() -> None:
    recovery = Recovery()
    recovery.mark()
    recovery.answer(0, LacReply(Status.OK, 3))
    recovery.answer(1, Reply(Status.WRONG_INSTANCE))
    recovery.lose(2)
    assert recovery.only(WakeAt).time_ns > 0
    assert recovery.sends == []
    recovery.feed(Woken())
    assert [send.bookie for send in recovery.sends] == [bookie(1), bookie(2)]
    recovery.answer(2, LacReply(Status.NO_SUCH_LEDGER))
    assert recovery.reads() != []


def test_without_the_right_recovery_is_refused() -> None:
    recovery = Recovery()
    recovery.mark()
    for number in range(3):
        recovery.answer(number, Reply(Status.UNAUTHORIZED))
    recovery.now = RETRY_FOR_NS
    recovery.feed(Woken())
    for number in range(3):
        recovery.answer(number, Reply(Status.UNAUTHORIZED))
    assert recovery.only(Failed).reason is Reason.UNAUTHORIZED


def test_slow_failures_end_a_recovery_as_soon_as_fast_ones() -> None:
    """A stopped bookie is found out by the timeout of a request, so rounds may be much longer than the pause."""
    for timeout_ns in (0, RETRY_NS, RETRY_FOR_NS // 2, RETRY_FOR_NS):
        recovery = Recovery()
        recovery.mark()
        recovery.fence(0)
        asked_ns = rounds = 0
        while not any(isinstance(effect, Failed) for effect in recovery.effects):
            rounds += 1
            asked_ns = recovery.now
            recovery.now += timeout_ns
            recovery.lose(1)
            recovery.lose(2)
            if recovery.effects and isinstance(recovery.effects[0], WakeAt):
                recovery.wake()
        assert rounds > 1, "each is asked again at least once"
        assert asked_ns <= timeout_ns + RETRY_FOR_NS + RETRY_NS
        assert recovery.now >= RETRY_FOR_NS


def test_progress_gives_a_recovery_new_time() -> None:
    recovery = Recovery()
    recovery.mark()
    for number in range(3):
        recovery.lose(number)
    recovery.now = RETRY_FOR_NS - 1
    recovery.feed(Woken())
    recovery.fence(0, 1)
    recovery.drop_fences()
    recovery.now += RETRY_FOR_NS
    recovery.answer(0, NO)
    recovery.answer(1, UNKNOWN)
    recovery.lose(2)
    recovery.now += RETRY_FOR_NS - 1
    recovery.feed(Woken())
    recovery.told(1, ReadReply(Status.NO_SUCH_ENTRY, run(0, 0)))
    recovery.lose(2)
    recovery.added(0)
    recovery.added(1)
    recovery.sends = recovery.reads()
    recovery.told(0, UNKNOWN)
    recovery.lose(2)
    recovery.now += RETRY_FOR_NS - 1
    recovery.wake()
    recovery.told(0, UNKNOWN)
    recovery.lose(2)
    recovery.only(WakeAt)


def test_the_floor_is_the_last_fragment() -> None:
    """D2: an empty last ensemble says -1, and entries before it are in another one."""
    recovery = Recovery(metadata((3, 3, 2), (0, (0, 1, 2)), (5, (3, 4, 6))))
    recovery.mark()
    recovery.fence(3, 4)
    recovery.drop_fences()
    firsts = {(send.bookie, send.request.first) for send in recovery.reads() if isinstance(send.request, Read)}
    assert firsts == {(bookie(n), 5) for n in (3, 4, 6)} | {(bookie(n), 4) for n in (0, 1, 2)}
    recovery.answer(1, ReadReply(Status.OK, run(4, 4)))
    recovery.answer(3, NO)
    recovery.answer(4, NO)
    closed = recovery.closes()
    assert (closed.last_entry_id, closed.length) == (4, 50)
    assert closed.fragments == recovery.opened.fragments


def test_the_length_comes_from_the_last_confirmed_entry_if_none_follows() -> None:
    recovery = Recovery()
    recovery.reading(lac=3)
    recovery.told(0, NO, first=4)
    recovery.told(1, NO, first=4)
    assert recovery.effects == [], "the length is not known yet"
    recovery.told(0, UNKNOWN)
    recovery.told(1, ReadReply(Status.OK, run(3, 3)))
    assert recovery.closes().length == 40


@pytest.mark.parametrize("leaves", [False, True])
def test_a_changed_ensemble_is_written_by_the_close_alone(*, leaves: bool) -> None:
    """AR7, D3: reads stay with the ensemble that was fenced. H14: a new bookie that leaves by then is not written."""
    recovery = Recovery()
    recovery.reading()
    recovery.answer(0, ReadReply(Status.OK, run(0, 1)))
    recovery.sends = [send for send in recovery.sends if send.bookie != bookie(2) or send in recovery.adds()]
    recovery.lose(2)
    assert recovery.only(ChooseBookies).places == (2,)
    recovery.feed(BookiesChosen({2: bookie(7)}))
    assert not any(isinstance(effect, WriteMetadata) for effect in recovery.effects)
    recovery.answer(7)
    assert bookie(7) not in {send.bookie for send in recovery.reads()}
    recovery.told(1, ReadReply(Status.NO_SUCH_ENTRY, run(0, 1)))
    recovery.told(0, NO)
    assert bookie(7) not in {send.bookie for send in recovery.reads()}
    recovery.added(0)
    written = recovery.only(WriteMetadata)
    assert written.metadata.fragments == (Fragment(0, (bookie(0), bookie(1), bookie(7))),)
    assert written.metadata.last_entry_id == 1
    assert written.joining == {bookie(7)}
    if leaves:
        recovery.feed(BookiesLeave((bookie(7),)))
        failed = recovery.only(Failed)
        assert failed.reason is Reason.UNDECIDED
        assert f"{bookie(7)} took entries, and leaves the cluster by now" in failed.detail


def test_too_few_bookies_fail_the_recovery_and_close_nothing() -> None:
    """C16."""
    recovery = Recovery()
    recovery.reading()
    recovery.answer(0, ReadReply(Status.NO_SUCH_ENTRY, run(0, 1)))
    recovery.sends = recovery.adds()
    recovery.lose(1)
    recovery.feed(BookiesChosen({}))
    recovery.lose(2)
    recovery.feed(BookiesChosen({}, "b7 has no label"))
    failed = recovery.only(Failed)
    assert failed.reason is Reason.NOT_ENOUGH_BOOKIES
    assert failed.detail.endswith("b7 has no label")


def test_a_refused_mark_is_repeated_on_the_stored_metadata() -> None:
    recovery = Recovery()
    newer = metadata((3, 3, 2), (0, (0, 1, 2)), (2, (0, 1, 4)))
    recovery.feed(MetadataRefused(newer, 9))
    written = recovery.only(WriteMetadata)
    assert (written.version, written.metadata.fragments) == (9, newer.fragments)


@pytest.mark.parametrize("last", [-1, 4])
def test_a_refused_close_adopts_the_winner(last: int) -> None:
    recovery = Recovery()
    recovery.reading()
    recovery.answer(0, NO)
    recovery.answer(1, NO)
    won = replace(metadata(), state=LedgerState.CLOSED, last_entry_id=last)
    recovery.feed(MetadataRefused(won, 9))
    assert recovery.only(Done).metadata == won


def test_a_close_refused_because_of_an_ensemble_change_keeps_the_change() -> None:
    recovery = Recovery(metadata((3, 3, 2), (0, (0, 1, 2)), (5, (0, 1, 2))))
    recovery.reading(lac=4)
    recovery.told(0, NO, first=5)
    recovery.told(1, NO, first=5)
    recovery.told(0, ReadReply(Status.OK, run(4, 4)))
    swapped = metadata((3, 3, 2), (0, (9, 1, 2)), (5, (0, 1, 2)))
    recovery.feed(MetadataRefused(replace(swapped, state=LedgerState.IN_RECOVERY), 9))
    written = recovery.only(WriteMetadata)
    assert (written.version, written.metadata.fragments) == (9, swapped.fragments)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param((*((0, (0, 1, 2)), (5, (0, 9, 2))), LedgerState.IN_RECOVERY), id="a bookie of the last fragment"),
        pytest.param((*((0, (0, 1, 2)), (7, (0, 1, 2))), LedgerState.IN_RECOVERY), id="its first entry"),
        pytest.param(((0, (0, 1, 2)), LedgerState.IN_RECOVERY), id="the last fragment is gone"),
        pytest.param((*((0, (0, 1, 2)), (5, (0, 1, 2)), (6, (0, 1, 9))), LedgerState.IN_RECOVERY), id="one more"),
        pytest.param((*((0, (0, 1, 2)), (5, (0, 1, 2))), LedgerState.OPEN), id="the ledger is open again"),
    ],
)
def test_a_close_is_not_repeated_on_a_last_fragment_that_was_changed(changed: tuple[Any, ...]) -> None:
    """AR3: other bookies may have entries of it, and were not fenced; metadata that were mended may say so."""
    recovery = Recovery(metadata((3, 3, 2), (0, (0, 1, 2)), (5, (0, 1, 2))))
    recovery.reading(lac=4)
    recovery.told(0, NO, first=5)
    recovery.told(1, NO, first=5)
    recovery.told(0, ReadReply(Status.OK, run(4, 4)))
    assert recovery.only(WriteMetadata).metadata.state is LedgerState.CLOSED
    *fragments, state = changed
    recovery.feed(MetadataRefused(replace(metadata((3, 3, 2), *fragments), state=state), 9))
    assert recovery.only(Failed).reason is Reason.UNDECIDED


def test_metadata_that_cannot_be_reached_end_the_recovery() -> None:
    recovery = Recovery()
    recovery.feed(MetadataUnreachable())
    assert recovery.only(Failed).reason is Reason.METADATA_UNREACHABLE


def test_a_deleted_ledger_ends_the_recovery() -> None:
    recovery = Recovery()
    recovery.feed(MetadataRefused(None, -1))
    assert recovery.only(Failed).reason is Reason.DELETED


def test_a_thousand_entries_take_few_round_trips() -> None:
    recovery = Recovery()
    recovery.mark()
    closed: LedgerMetadata | None = None
    for _ in ("fence", "read", "write back"):
        assert closed is None
        waiting, recovery.sends = recovery.sends, []
        for send in waiting:
            recovery.sends.insert(0, send)
            number = int(send.bookie.bookie_id[1:])
            if isinstance(send.request, ReadLac):
                recovery.answer(number, LacReply(Status.OK, -1))
            elif isinstance(send.request, Read):
                recovery.answer(number, ReadReply(Status.NO_SUCH_ENTRY, run(0, 999)))
            else:
                recovery.answer(number)
            if any(isinstance(effect, WriteMetadata) for effect in recovery.effects):
                closed = recovery.closes()
    assert closed is not None
    assert closed.last_entry_id == 999


# ---- a member's recovery, which has no password ----------------------------------------------------------------------


class MemberRecovery(Recovery):
    def __init__(self, opened: LedgerMetadata | None = None) -> None:
        super().__init__(opened, member=True)

    def reading(self, lac: int = -1) -> None:
        """Fence all three, as a member waits for all."""
        self.mark()
        self.fence(0, 1, lac=lac)
        assert self.reads() == []
        self.fence(2)

    def needs_owner(self, what: str) -> None:
        """Check that it ends, because only the password can decide."""
        self.only(ReadMetadata)
        self.feed(MetadataRead(self.marked, 5))
        failed = self.only(Failed)
        assert failed.reason is Reason.OWNER_NEEDED
        assert what in failed.detail
        assert "open it with its password" in failed.detail
        self.feed(MetadataWritten(9))
        assert self.effects == []


def other(first: int, last: int) -> ReadReply:
    """Return entries whose last byte is another than their writer gave them."""
    entries = [entry(entry_id)[:-1] + b"!" for entry_id in range(first, last + 1)]
    return ReadReply(Status.NO_SUCH_ENTRY, EntryRun(first, 1, array("q", map(len, entries)), (b"".join(entries),)))


def ends(first: int, last: int) -> ReadReply:
    return ReadReply(Status.NO_SUCH_ENTRY, run(first, last))


def test_a_member_takes_no_lac_and_has_records_checked() -> None:
    recovery = MemberRecovery(metadata((3, 3, 2), (0, (3, 4, 5)), (4, (0, 1, 2))))
    recovery.reading(lac=6)
    requests = [send.request for send in recovery.reads() if isinstance(send.request, Read)]
    assert {request.first for request in requests} == {4, 3}, "the last fragment, and the entry with the length"
    assert all(request.checked for request in requests)
    recovery.told(0, ends(4, 7), first=4)
    recovery.told(1, ends(4, 7), first=4)
    assert {send.request.lac for send in recovery.adds() if isinstance(send.request, Add)} == {3}


def test_a_member_closes_without_a_seal_once_all_adds_are_answered() -> None:
    recovery = MemberRecovery()
    recovery.reading()
    for number in range(3):
        recovery.told(number, ends(0, 1))
    for number in range(3):
        assert recovery.effects == []
        recovery.added(number)
    closed = recovery.closes()
    assert (closed.last_entry_id, closed.length, closed.seal) == (1, 20, b"")


def test_a_bookie_that_fails_at_the_end_is_recorded_and_not_replaced() -> None:
    recovery = MemberRecovery()
    recovery.reading()
    for number in range(3):
        recovery.told(number, ends(0, 1))
    recovery.added(0)
    recovery.added(1)
    recovery.lose(2)
    assert recovery.closes().fragments == recovery.opened.fragments
    assert recovery.recorded == [UnderReplicated(bookie(2), 0)]


def test_a_member_takes_an_entry_that_one_has_if_the_others_cannot_deny_it() -> None:
    """One may be dead and one may lack it: it was confirmed by the first and the dead one, maybe."""
    recovery = MemberRecovery()
    recovery.reading()
    recovery.told(0, ends(0, 0))
    recovery.told(1, NO)
    assert recovery.adds() == [], "the third is not heard yet"
    recovery.lose(2)
    assert len(recovery.adds()) == 3


def test_a_member_does_not_take_what_enough_bookies_deny() -> None:
    """One that lies could otherwise have all store what it makes, for ever."""
    recovery = MemberRecovery()
    recovery.reading()
    recovery.told(0, ends(0, 5))
    recovery.told(1, NO)
    recovery.told(2, NO)
    assert recovery.closes().last_entry_id == -1


def test_a_member_hears_all_before_it_ends_the_ledger() -> None:
    recovery = MemberRecovery(metadata((3, 3, 3)))
    recovery.reading()
    recovery.told(0, NO)
    assert recovery.effects == []
    recovery.told(1, NO)
    recovery.told(2, NO)
    assert recovery.closes().last_entry_id == -1


def test_a_member_asks_each_bookie_for_all_that_it_has() -> None:
    recovery = MemberRecovery()
    recovery.reading()
    recovery.told(0, ends(0, 3))
    recovery.told(1, ReadReply(Status.OK, run(0, 1)))
    firsts = [send.request.first for send in recovery.pending(1) if isinstance(send.request, Read)]
    assert firsts == [2]
    recovery.told(2, NO)
    assert [send.request.first for send in recovery.reads() if isinstance(send.request, Read)] == [2, 2]


def test_a_member_does_not_read_far_ahead_of_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pybk.replication.recovery.MEMBER_BYTES_MAX", 5 * len(entry(0)))
    recovery = MemberRecovery()
    recovery.reading()
    for first in range(5):
        recovery.told(0, ReadReply(Status.OK, run(first, first)), first=first)
        assert len(recovery.pending(0)) == 1
    recovery.told(0, ReadReply(Status.OK, run(5, 5)), first=5)
    assert recovery.pending(0) == []
    recovery.told(1, ReadReply(Status.OK, run(0, 4)))
    assert recovery.adds() != []
    assert [send.request.first for send in recovery.pending(0) if isinstance(send.request, Read)] == [6]
    assert [send.request.first for send in recovery.pending(1) if isinstance(send.request, Read)] == [5]


def test_a_silent_bookie_is_waited_for_once() -> None:
    recovery = MemberRecovery()
    recovery.reading()
    recovery.told(0, ends(0, 1))
    recovery.told(1, ends(0, 0))
    assert len(recovery.adds()) == 3, "two have entry 0"
    recovery.lose(2)
    assert len(recovery.adds()) == 6, "entry 1 follows: one has it, one denies it, and one is silent"


def test_copies_that_differ_need_the_owner() -> None:
    recovery = MemberRecovery()
    recovery.reading()
    recovery.told(0, ends(0, 1))
    recovery.told(1, other(0, 1))
    recovery.needs_owner("different copies of entry")
    assert recovery.adds() == []


def test_a_bookie_that_holds_other_bytes_needs_the_owner_and_is_not_replaced() -> None:
    recovery = MemberRecovery()
    recovery.reading()
    recovery.told(0, ends(0, 0))
    recovery.told(1, NO)
    recovery.lose(2)
    recovery.added(0)
    recovery.added(1)
    assert recovery.effects == [], "the third may hold another entry"
    recovery.sends = recovery.adds()
    recovery.answer(2, Reply(Status.CONFLICT))
    recovery.needs_owner("holds other bytes")


def test_a_lac_beyond_what_was_found_needs_the_owner() -> None:
    recovery = MemberRecovery()
    recovery.reading(lac=3)
    for number in range(3):
        recovery.told(number, NO)
    recovery.needs_owner("a bookie says that 3 was confirmed")


def test_a_lac_in_an_entry_beyond_the_end_needs_the_owner() -> None:
    recovery = MemberRecovery()
    recovery.reading()
    recovery.told(0, NO)
    recovery.told(1, NO)
    sound = entry(0), entry(1, lac=0)
    recovery.told(2, ReadReply(Status.NO_SUCH_ENTRY, EntryRun(0, 1, array("q", map(len, sound)), (b"".join(sound),))))
    recovery.needs_owner("a bookie says that 0 was confirmed")


def test_a_doubt_ends_with_what_others_did_meanwhile() -> None:
    """AM7: the ledger was closed or deleted meanwhile."""
    closed = replace(metadata(), state=LedgerState.CLOSED, last_entry_id=3)
    for found, kind in ((closed, Done), (None, Failed)):
        recovery = MemberRecovery()
        recovery.reading(lac=3)
        for number in range(3):
            recovery.told(number, NO)
        recovery.feed(MetadataRead(found, 7))
        ended = recovery.only(kind)
        assert not isinstance(ended, Failed) or ended.reason is Reason.DELETED


def test_lengths_that_differ_need_the_owner() -> None:
    recovery = MemberRecovery(metadata((3, 3, 2), (0, (3, 4, 5)), (2, (0, 1, 2))))
    recovery.reading()
    recovery.told(3, ReadReply(Status.OK, run(1, 1)))
    recovery.told(4, other(1, 1))
    recovery.needs_owner("different copies of entry 1")


def test_a_member_that_bookies_refuse_says_why() -> None:
    recovery = MemberRecovery()
    recovery.mark()
    for number in range(3):
        recovery.answer(number, Reply(Status.UNAUTHORIZED))
    recovery.now = RETRY_FOR_NS
    recovery.feed(Woken())
    for number in range(3):
        recovery.answer(number, Reply(Status.UNAUTHORIZED))
    failed = recovery.only(Failed)
    assert failed.reason is Reason.UNAUTHORIZED
    assert "members" in failed.detail
