"""What a recovery records of bookies that miss entries, also by answers that come after the ledger was closed (C13)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pybk.ledger.ledger_metadata import LedgerState
from pybk.replication.messages import (
    ChooseBookies,
    EntryRun,
    Failed,
    Force,
    LacReply,
    MetadataRefused,
    MetadataUnreachable,
    MetadataWritten,
    Read,
    ReadReply,
    Reason,
    Reply,
    Status,
    UnderReplicated,
    WakeAt,
    Woken,
    WriteMetadata,
)
from tests.replication.driving import Writer, bookie, metadata, run
from tests.replication.test_recovery import NO, Recovery


def fenced(recovery: Recovery, number: int, *, lac: int, held: int) -> None:
    """Fence a bookie that has the entries up to one."""
    recovery.answer(number, LacReply(Status.OK, lac, entry_id=held))


def find_the_end(recovery: Recovery, lac: int, last: EntryRun | None = None) -> list[UnderReplicated]:
    """Let nothing be found after the last add confirmed; return what was recorded before anything is written."""
    recorded = list(recovery.recorded)
    for number in (0, 1) if last is None else (1, 2):
        recovery.told(number, NO, first=lac + 1)
    recovery.told(0, ReadReply(Status.OK, last or run(lac, lac)), first=lac)
    assert [type(effect) for effect in recovery.effects] == [WriteMetadata]
    assert recovery.recorded == recorded
    return recorded


def close_at_the_lac(recovery: Recovery, lac: int) -> list[UnderReplicated]:
    """Let nothing be found after the last add confirmed, and the end be written; return what was recorded before."""
    recorded = find_the_end(recovery, lac)
    recovery.feed(MetadataWritten(5))
    assert recovery.recorded == recorded
    return recorded


def test_confirmed_entries_that_a_fenced_bookie_lacks_are_recorded_before_anything_is_written() -> None:
    recovery = Recovery()
    recovery.mark()
    fenced(recovery, 0, lac=4, held=4)
    fenced(recovery, 1, lac=4, held=2)
    assert close_at_the_lac(recovery, 4) == [UnderReplicated(bookie(1), 3)]


def test_a_fence_answered_after_the_coverage_and_before_the_close_counts() -> None:
    recovery = Recovery()
    recovery.mark()
    fenced(recovery, 0, lac=4, held=4)
    fenced(recovery, 1, lac=4, held=4)
    fenced(recovery, 2, lac=0, held=0)
    assert close_at_the_lac(recovery, 4) == [UnderReplicated(bookie(2), 1)]


@pytest.mark.parametrize("written", [False, True])
def test_a_fence_answered_while_the_end_is_written_or_later_counts(written: bool) -> None:
    recovery = Recovery()
    recovery.mark()
    fenced(recovery, 0, lac=4, held=4)
    fenced(recovery, 1, lac=4, held=4)
    assert (close_at_the_lac if written else find_the_end)(recovery, 4) == []
    fenced(recovery, 2, lac=-1, held=-1)
    assert recovery.recorded == [UnderReplicated(bookie(2), 0)]


@pytest.mark.parametrize(("before", "first"), [((0, 1, 4), 3), ((0, 4, 2), 0)])
def test_a_bookie_that_never_answers_the_fence_may_lack_the_last_fragments_that_it_is_in(
    before: tuple[int, ...], first: int
) -> None:
    recovery = Recovery(metadata((3, 3, 2), (0, before), (3, (0, 1, 2))))
    recovery.mark()
    fenced(recovery, 0, lac=4, held=4)
    fenced(recovery, 1, lac=4, held=4)
    assert close_at_the_lac(recovery, 4) == []
    recovery.lose(2)
    assert recovery.recorded == [UnderReplicated(bookie(2), first)]


@pytest.mark.parametrize("silent", [True, False])
def test_a_bookie_that_gave_no_answer_that_counts_is_recorded_before_the_close(silent: bool) -> None:
    recovery = Recovery()
    recovery.mark()
    if silent:
        recovery.lose(2)
    else:
        recovery.answer(2, LacReply(Status.UNKNOWN))
    fenced(recovery, 0, lac=4, held=4)
    fenced(recovery, 1, lac=4, held=4)
    assert close_at_the_lac(recovery, 4) == [UnderReplicated(bookie(2), 0)]


def test_a_bookie_that_has_all_that_it_takes_lacks_nothing() -> None:
    """Of five entries, place 1 of four takes 0, 1 and 4; place 3 takes 2 and 3."""
    recovery = Recovery(metadata((4, 2, 2)))
    recovery.mark()
    for number, held in enumerate((4, 4, 2, 3)):
        fenced(recovery, number, lac=4, held=held)
    assert find_the_end(recovery, 4, run(4, 4, 4)) == []


def test_missing_entries_are_counted_by_the_residues_of_the_bookie() -> None:
    recovery = Recovery(metadata((4, 2, 2)))
    recovery.mark()
    for number, held in enumerate((4, 1, 2, 2)):
        fenced(recovery, number, lac=4, held=held)
    assert find_the_end(recovery, 4, run(4, 4, 4)) == [UnderReplicated(bookie(1), 2), UnderReplicated(bookie(3), 3)]


@pytest.mark.parametrize(("before", "held", "first"), [((0, 1, 4), 1, 2), ((0, 1, 4), -1, 0), ((0, 4, 2), -1, 3)])
@pytest.mark.parametrize("lac", [2, 4])
def test_fragments_before_the_last_one_are_looked_at_as_far_as_the_bookie_is_in_them(
    before: tuple[int, ...], held: int, first: int, lac: int
) -> None:
    """The writer may have been killed when it had just replaced another bookie, and this one was slow."""
    recovery = Recovery(metadata((3, 3, 2), (0, before), (3, (0, 1, 2))))
    recovery.mark()
    fenced(recovery, 0, lac=lac, held=lac)
    fenced(recovery, 1, lac=lac, held=held)
    assert close_at_the_lac(recovery, lac) == ([UnderReplicated(bookie(1), first)] if first <= lac else [])


def closing(*, answered: int = 2) -> Recovery:
    """Return a recovery that wrote entries 0 to 2 back to so many bookies, and is writing the end."""
    recovery = Recovery()
    recovery.reading()
    recovery.told(0, ReadReply(Status.NO_SUCH_ENTRY, run(0, 2)))
    recovery.told(1, ReadReply(Status.NO_SUCH_ENTRY, run(0, 2)))
    for number in range(answered):
        recovery.added(number)
    assert recovery.closes().last_entry_id == 2
    recovery.sends = recovery.adds()
    return recovery


def test_a_failed_bookie_is_recorded_before_the_end_is_written() -> None:
    recovery = Recovery()
    recovery.reading()
    recovery.told(0, ReadReply(Status.NO_SUCH_ENTRY, run(0, 2)))
    recovery.told(1, ReadReply(Status.NO_SUCH_ENTRY, run(0, 2)))
    recovery.sends = recovery.adds()
    recovery.lose(2)
    assert isinstance(recovery.only(ChooseBookies), ChooseBookies)
    recovery.answer(0)
    recovery.answer(1)
    assert [type(effect) for effect in recovery.effects] == [UnderReplicated, WriteMetadata]
    assert recovery.recorded == [UnderReplicated(bookie(2), 0)]


def test_missing_entries_of_a_deleted_ledger_are_not_recorded() -> None:
    recovery = Recovery()
    recovery.mark()
    fenced(recovery, 0, lac=4, held=4)
    fenced(recovery, 1, lac=4, held=4)
    assert find_the_end(recovery, 4) == []
    recovery.feed(MetadataRefused(None, -1))
    assert recovery.only(Failed).reason is Reason.DELETED
    recovery.lose(2)
    assert recovery.recorded == []


def test_a_bookie_that_refuses_a_write_back_is_recorded_after_the_close() -> None:
    recovery = closing()
    recovery.feed(MetadataWritten(5))
    assert recovery.recorded == []
    recovery.answer(2, Reply(Status.READ_ONLY))
    assert recovery.recorded == [UnderReplicated(bookie(2), 0)]


def test_after_the_close_silent_bookies_are_recorded_and_answering_ones_are_not() -> None:
    recovery = closing()
    recovery.feed(MetadataWritten(5))
    recovery.lose(2)
    assert recovery.recorded == [UnderReplicated(bookie(2), 0)]
    recovery = closing()
    recovery.feed(MetadataWritten(5))
    recovery.answer(2)
    assert recovery.recorded == []


def test_a_bookie_that_fails_while_the_end_is_written_is_recorded_at_once() -> None:
    recovery = closing()
    recovery.lose(2)
    assert recovery.recorded == [UnderReplicated(bookie(2), 0)]
    recovery.feed(MetadataWritten(5))
    assert len(recovery.recorded) == 1


def test_a_fence_answered_after_a_recovery_without_success_counts() -> None:
    """What it wrote back hides the gap from the recovery that closes the ledger."""
    recovery = Recovery()
    recovery.mark()
    fenced(recovery, 0, lac=4, held=4)
    fenced(recovery, 1, lac=4, held=4)
    for number in (0, 1):
        recovery.told(number, NO, first=5)
    recovery.told(0, ReadReply(Status.OK, run(4, 4)), first=4)
    recovery.feed(MetadataUnreachable())
    assert recovery.only(Failed).reason is Reason.METADATA_UNREACHABLE
    fenced(recovery, 2, lac=1, held=1)
    assert recovery.recorded == [UnderReplicated(bookie(2), 2)]


def test_a_bookie_that_fails_after_a_close_of_unknown_outcome_is_recorded() -> None:
    recovery = closing()
    recovery.feed(MetadataUnreachable())
    recovery.lose(2)
    assert recovery.recorded == [UnderReplicated(bookie(2), 0)]


def test_a_recovery_that_did_not_close_the_ledger_says_nothing_of_what_it_wrote_back() -> None:
    recovery = closing()
    recovery.feed(MetadataRefused(replace(metadata(), state=LedgerState.CLOSED, last_entry_id=0), 9))
    recovery.lose(2)
    assert recovery.recorded == []


def test_a_failed_force_of_a_replaced_bookie_does_not_fail_the_new_one() -> None:
    writer = Writer(deferred=True)
    writer.submit(0, 0)
    writer.answer(0)
    writer.answer(1)
    writer.take(writer.writer.force(0))
    late = next(send for send in writer.pending(2) if isinstance(send.request, Force))
    writer.sends.remove(late)
    writer.replace(2, 3, place=2)
    writer.feed(MetadataWritten(8))
    writer.sends.insert(0, late)
    writer.lose(2)
    assert not any(isinstance(effect, ChooseBookies) for effect in writer.effects)


def test_a_late_force_of_a_replaced_bookie_confirms_nothing() -> None:
    """The new bookie has the entry only when it says so."""
    writer = Writer(deferred=True)
    writer.submit(0, 0)
    for number in (0, 1, 2):
        writer.answer(number)
    writer.submit(1, 1)
    for number in (0, 1):
        writer.answer(number)
    writer.take(writer.writer.force(0))
    late = next(send for send in writer.pending(2) if isinstance(send.request, Force))
    writer.sends.remove(late)
    writer.answer(0)
    writer.replace(2, 3, place=2)
    writer.feed(MetadataWritten(8))
    writer.sends.insert(0, late)
    writer.answer(2)
    assert writer.writer.last_add_confirmed == -1
    writer.answer(3)
    assert writer.writer.last_add_confirmed == 0


def test_nothing_is_read_after_the_end_that_was_decided() -> None:
    """When only the length is not known, the last confirmed entry is asked for again, and what follows it is not."""
    recovery = Recovery()
    recovery.reading(lac=3)
    for number in (0, 1):
        recovery.told(number, NO, first=4)
    recovery.told(2, ReadReply(Status.UNKNOWN), first=4)
    for number in (0, 1, 2):
        recovery.told(number, ReadReply(Status.UNKNOWN), first=3)
    assert recovery.reads() == []
    recovery.only(WakeAt)
    recovery.feed(Woken())
    assert [send.request.first for send in recovery.reads() if isinstance(send.request, Read)] == [3, 3, 3]


def test_each_residue_is_read_on_though_others_wait() -> None:
    recovery = Recovery(metadata((4, 2, 2)))
    recovery.mark()
    for number in range(4):
        recovery.answer(number, LacReply(Status.OK, -1))
    recovery.told(2, ReadReply(Status.OK, run(1, 1, 4)), first=1)
    assert [send.request.first for send in recovery.pending(2) if isinstance(send.request, Read)] == [2, 5]


def test_a_close_refused_for_another_last_fragment_is_undecided() -> None:
    """The writer changed it before the mark was seen: what was read may not be all."""
    for state, fragments in (
        (LedgerState.OPEN, (0, (0, 1, 2))),
        (LedgerState.IN_RECOVERY, (0, (0, 1, 7))),
    ):
        recovery = Recovery()
        recovery.reading()
        recovery.answer(0, NO)
        recovery.answer(1, NO)
        recovery.feed(MetadataRefused(replace(metadata((3, 3, 2), fragments), state=state), 9))
        assert recovery.only(Failed).reason is Reason.UNDECIDED
