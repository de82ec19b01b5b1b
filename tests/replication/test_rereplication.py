"""Copying a fragment, step by step."""

from __future__ import annotations

from dataclasses import replace

from pybk.ledger.ledger_metadata import Fragment, LedgerMetadata, LedgerState
from pybk.replication import rereplication
from pybk.replication.entry_runs import entries_of
from pybk.replication.messages import (
    Add,
    Answered,
    BookiesChosen,
    BookiesLeave,
    ChooseBookies,
    Done,
    Failed,
    MetadataRead,
    MetadataRefused,
    MetadataUnreachable,
    MetadataWritten,
    Read,
    ReadMetadata,
    ReadReply,
    Reason,
    Reply,
    Send,
    Status,
    WakeAt,
    Woken,
    WriteMetadata,
)
from pybk.replication.rereplication import RereplicationMachine
from tests.replication.driving import LEDGER, Driven, bookie, entry, metadata, run


def closed(last: int = 4, shape: tuple[int, int, int] = (3, 3, 2)) -> LedgerMetadata:
    return replace(metadata(shape), state=LedgerState.CLOSED, last_entry_id=last, length=10 * (last + 1))


class Copying(Driven):
    def __init__(
        self, found: LedgerMetadata, *lost: int, first: int = 0, stay: tuple[int, ...] = (), to: tuple[int, ...] = (7,)
    ) -> None:
        super().__init__(
            RereplicationMachine(LEDGER, first, frozenset(map(bookie, lost)), stay=frozenset(map(bookie, stay)))
        )
        self.take(self.machine.start(0))
        self.only(ReadMetadata)
        self.feed(MetadataRead(found, 3))
        if any(isinstance(effect, ChooseBookies) for effect in self.effects):
            wanted = self.only(ChooseBookies).places
            self.feed(BookiesChosen({place: bookie(number) for place, number in zip(wanted, to, strict=False)}))


def test_entries_are_copied_unchanged_and_then_the_bookies_replaced() -> None:
    copy = Copying(closed(), 1)
    (read,) = copy.sends
    assert isinstance(read.request, Read)
    assert (read.bookie, read.request.first, read.request.last) == (bookie(0), 0, 4)
    copy.answer(0, ReadReply(Status.OK, run(0, 4)))
    (add,) = copy.sends
    assert isinstance(add.request, Add)
    assert add.bookie == bookie(7)
    assert add.request.recovery, "the ledger may be fenced there (C7)"
    assert [bytes(each) for each in entries_of(add.request.runs[0])] == [entry(number) for number in range(5)]
    assert copy.effects == [], "the ensemble stays until the copies are durable"
    copy.answer(7)
    written = copy.only(WriteMetadata)
    assert written.version == 3
    assert written.metadata == replace(closed(), fragments=(Fragment(0, (bookie(0), bookie(7), bookie(2))),), version=1)
    copy.feed(MetadataWritten(4))
    assert copy.only(Done).metadata == written.metadata


def test_only_residues_of_the_lost_places_are_copied() -> None:
    copy = Copying(closed(9, (5, 2, 2)), 1)
    firsts = {send.request.first for send in copy.sends if isinstance(send.request, Read)}
    assert firsts == {0, 1}, "place 1 of five takes residues 1 and 0"


def test_the_copy_goes_to_the_end_of_the_fragment() -> None:
    """C15: entries after the last confirmed one that is known are part of the fragment, too."""
    copy = Copying(metadata((3, 3, 2), (0, (0, 1, 2)), (15, (3, 4, 6))), 1)
    (read,) = copy.sends
    assert isinstance(read.request, Read)
    assert (read.request.first, read.request.last) == (0, 14)


def test_an_open_last_fragment_is_not_copied() -> None:
    for state in (LedgerState.OPEN, LedgerState.IN_RECOVERY):
        copy = Copying(replace(metadata(), state=state), 1)
        assert copy.only(Failed).reason is Reason.UNDECIDED
        assert copy.sends == []


def test_a_fragment_without_lost_bookies_is_not_copied() -> None:
    copy = Copying(closed(), 5)
    assert copy.only(Done).metadata == closed()


def test_a_fragment_without_entries_only_gets_the_new_ensemble() -> None:
    copy = Copying(closed(-1), 1)
    assert copy.only(WriteMetadata).metadata.fragments[0].ensemble[1] == bookie(7)


def test_without_another_bookie_it_fails() -> None:
    copy = Copying(closed(), 1, to=())
    failed = copy.only(Failed)
    assert failed.reason is Reason.NOT_ENOUGH_BOOKIES
    assert str(bookie(1)) in failed.detail


def test_a_bookie_that_is_alive_is_filled_up_in_its_place() -> None:
    copy = Copying(closed(), 1, stay=(1,))
    copy.answer(0, ReadReply(Status.OK, run(0, 4)))
    copy.answer(1)
    assert copy.only(Done).metadata == closed()


def test_entries_that_no_bookie_has_end_the_copy() -> None:
    copy = Copying(closed(0), 1)
    for number in (0, 2, 1):
        copy.answer(number, ReadReply(Status.UNKNOWN))
    copy.feed(MetadataRead(closed(0), 3))
    failed = copy.only(Failed)
    assert failed.reason is Reason.UNDECIDED
    assert "entry 0" in failed.detail


def test_a_copy_that_is_not_taken_ends_it() -> None:
    copy = Copying(closed(), 1)
    copy.answer(0, ReadReply(Status.OK, run(0, 4)))
    copy.answer(7, Reply(Status.READ_ONLY))
    assert "READ_ONLY" in copy.only(Failed).detail


def swapping() -> Copying:
    copy = Copying(closed(), 1)
    copy.answer(0, ReadReply(Status.OK, run(0, 4)))
    copy.answer(7)
    copy.only(WriteMetadata)
    return copy


def test_a_target_that_leaves_by_now_takes_no_place() -> None:
    """H14: it may have been removed meanwhile, with a proof that no ledger names it."""
    copy = Copying(closed(), 1)
    copy.answer(0, ReadReply(Status.OK, run(0, 4)))
    copy.answer(7)
    assert copy.only(WriteMetadata).joining == {bookie(7)}
    copy.feed(BookiesLeave((bookie(7),)))
    failed = copy.only(Failed)
    assert failed.reason is Reason.UNDECIDED
    assert f"{bookie(7)} took copies, and leaves the cluster by now" in failed.detail


def test_a_refused_compare_and_set_is_repeated_on_the_stored_metadata() -> None:
    first, second = metadata((3, 3, 2), (0, (0, 1, 2)), (5, (3, 4, 6))), (5, (3, 4, 5))
    copy = Copying(first, 1)
    copy.answer(0, ReadReply(Status.OK, run(0, 4)))
    copy.answer(7)
    copy.only(WriteMetadata)
    other = replace(metadata((3, 3, 2), (0, (0, 1, 2)), second), version=5)
    copy.feed(MetadataRefused(other, 9))
    written = copy.only(WriteMetadata)
    assert written.version == 9
    assert written.metadata == replace(metadata((3, 3, 2), (0, (0, 7, 2)), second), version=6), (
        "the ledger is open, so its bookies drop nothing"
    )


def test_after_a_refused_compare_and_set_a_closed_ledger_is_copied_again() -> None:
    """SD4: the change may have been the barrier of the target, which dropped what it had."""
    copy = swapping()
    copy.feed(MetadataRefused(replace(closed(), version=5), 9))
    assert copy.effects[1:] == [], "nothing is written"
    (read,) = copy.sends
    assert isinstance(read.request, Read)
    assert (read.request.first, read.request.last) == (0, 4)
    copy.answer(0, ReadReply(Status.OK, run(0, 4)))
    (add,) = copy.sends
    assert (add.bookie, type(add.request)) == (bookie(7), Add)
    assert copy.effects == []
    copy.answer(7)
    written = copy.only(WriteMetadata)
    assert (written.version, written.metadata.version) == (9, 6)
    assert written.metadata.fragments[0].ensemble == (bookie(0), bookie(7), bookie(2))


def test_a_ledger_that_was_closed_meanwhile_is_copied_again() -> None:
    opened = metadata((3, 3, 2), (0, (0, 1, 2)), (5, (3, 4, 6)))
    copy = Copying(opened, 1)
    copy.answer(0, ReadReply(Status.OK, run(0, 4)))
    copy.answer(7)
    copy.feed(MetadataRefused(replace(opened, state=LedgerState.CLOSED, last_entry_id=8, length=90, version=1), 4))
    (read,) = copy.sends
    assert isinstance(read.request, Read)


def test_the_compare_and_set_names_the_version_from_before_the_copies() -> None:
    """SD4: what the reader reads again meanwhile may be newer than the barrier of a target that dropped its copies."""
    copy = Copying(closed(1), 1)
    for number in (0, 2, 1):
        copy.answer(number, ReadReply(Status.UNKNOWN))
    copy.only(ReadMetadata)
    renewed = replace(closed(1), fragments=(Fragment(0, (bookie(8), bookie(1), bookie(2))),), version=6)
    copy.feed(MetadataRead(renewed, 9))
    copy.answer(8, ReadReply(Status.OK, run(0, 1)))
    copy.answer(7)
    written = copy.only(WriteMetadata)
    assert written.version == 3
    assert written.metadata.fragments[0].ensemble == (bookie(0), bookie(7), bookie(2))


def test_late_answers_to_the_reads_of_a_window_are_none_to_those_of_the_next() -> None:
    last = rereplication.WINDOW_ENTRIES
    copy = Copying(closed(last), 1)
    copy.now = 2_000_000_000
    copy.feed(Woken())
    late = copy.pending(0)[0]
    copy.answer(2, ReadReply(Status.OK, run(0, last - 1)))
    copy.answer(7)
    copy.sends.remove(late)
    assert copy.feed(Answered(late.token, ReadReply(Status.NO_SUCH_ENTRY))) == []
    copy.answer(2, ReadReply(Status.OK, run(last, last)))
    copy.answer(7)
    assert copy.only(WriteMetadata).version == 3


def test_a_replacement_that_another_client_made_is_kept() -> None:
    for ensemble in ((0, 9, 2), (7, 1, 2)):
        copy = swapping()
        copy.feed(MetadataRefused(replace(closed(), fragments=(Fragment(0, tuple(map(bookie, ensemble))),)), 9))
        assert copy.only(Failed).reason is Reason.UNDECIDED


def test_a_compare_and_set_whose_reply_was_lost_counts() -> None:
    copy = swapping()
    written = replace(closed(), fragments=(Fragment(0, (bookie(0), bookie(7), bookie(2))),), version=1)
    copy.feed(MetadataRefused(written, 4))
    assert copy.only(Done).version == 4


def test_long_fragments_go_window_by_window() -> None:
    last = rereplication.WINDOW_ENTRIES + 5
    copy = Copying(closed(last), 1)
    copy.answer(0, ReadReply(Status.OK, run(0, rereplication.WINDOW_ENTRIES - 1)))
    assert [type(send.request) for send in copy.sends] == [Add]
    copy.answer(7)
    (read,) = copy.sends
    assert isinstance(read.request, Read)
    assert (read.request.first, read.request.last) == (rereplication.WINDOW_ENTRIES, last)


def test_a_deleted_ledger_is_not_copied() -> None:
    copy = Driven(RereplicationMachine(LEDGER, 0, frozenset({bookie(1)})))
    copy.take(copy.machine.start(0))
    copy.feed(MetadataRead(None, -1))
    assert copy.only(Failed).reason is Reason.DELETED


def test_after_the_end_nothing_is_done() -> None:
    """A failed copy asks and writes nothing, whatever is answered then."""
    copy = Copying(closed(), 1)
    copy.answer(0, ReadReply(Status.OK, run(0, 4)))
    copy.answer(7, Reply(Status.READ_ONLY))
    assert copy.only(Failed).reason is Reason.UNDECIDED
    assert copy.feed(MetadataRead(closed(), 3)) == []
    assert copy.feed(MetadataUnreachable()) == []


def test_bookies_are_chosen_once() -> None:
    copy = Copying(closed(), 1)
    assert copy.feed(BookiesChosen({1: bookie(8)})) == []


class Slow:
    """A pace that wants a pause before each copy but the first."""

    def __init__(self) -> None:
        self.charged: list[int] = []
        self.until_ns = 0
        self.pause_ns = 1000
        self.piece_bytes = rereplication.READ_BYTES_MAX

    def wait_ns(self, now_ns: int) -> int:
        return max(0, self.until_ns - now_ns)

    def charge(self, size_bytes: int, now_ns: int) -> None:
        self.charged.append(size_bytes)
        self.until_ns = now_ns + self.pause_ns


def test_a_given_target_takes_the_place() -> None:
    machine = RereplicationMachine(LEDGER, 0, frozenset((bookie(1),)), target=bookie(9))
    copy = Driven(machine)
    copy.take(machine.start(0))
    copy.feed(MetadataRead(closed(), 3))
    copy.answer(0, ReadReply(Status.OK, run(0, 4)))
    copy.answer(9)
    assert copy.only(WriteMetadata).metadata.fragments[0].ensemble == (bookie(0), bookie(9), bookie(2))
    assert machine.copied_bytes == sum(run(0, 4).sizes)


def test_targets_are_asked_for_copies_and_the_error_says_why_there_is_none() -> None:
    copy = Driven(RereplicationMachine(LEDGER, 0, frozenset((bookie(1),))))
    copy.take(copy.machine.start(0))
    copy.feed(MetadataRead(closed(), 3))
    assert copy.only(ChooseBookies).copies
    copy.feed(BookiesChosen({}, "b7 would be too full"))
    assert copy.only(Failed).detail.endswith("no bookie can take the places of b1@01010101: b7 would be too full")


def test_a_given_target_that_has_a_place_already_takes_no_other() -> None:
    machine = RereplicationMachine(LEDGER, 0, frozenset((bookie(1),)), target=bookie(2))
    copy = Driven(machine)
    copy.take(machine.start(0))
    copy.feed(MetadataRead(closed(), 3))
    assert copy.only(Failed).reason is Reason.NOT_ENOUGH_BOOKIES


def test_a_copy_pauses_between_windows_as_its_pace_says() -> None:
    pace = Slow()
    last = 2 * rereplication.WINDOW_ENTRIES - 1
    machine = RereplicationMachine(LEDGER, 0, frozenset((bookie(1),)), target=bookie(9), pace=pace)
    copy = Driven(machine)
    copy.take(machine.start(0))
    copy.feed(MetadataRead(closed(last), 3))
    half = run(0, rereplication.WINDOW_ENTRIES - 1)
    copy.answer(0, ReadReply(Status.OK, half))
    copy.answer(9)
    assert copy.only(WakeAt).time_ns == 1000
    assert copy.sends == []
    assert machine.step(Woken(), 500) == [WakeAt(1000)], "too early"
    (read,) = (effect.request for effect in machine.step(Woken(), 1000) if isinstance(effect, Send))
    assert isinstance(read, Read)
    assert (read.first, read.last) == (rereplication.WINDOW_ENTRIES, last)
    assert pace.charged == [sum(half.sizes)]


def test_a_long_pause_ends_soon_after_the_rate_has_grown() -> None:
    pace = Slow()
    pace.pause_ns = 40 * rereplication.PAUSE_NS_MAX  # an entry of 5 MiB at 128 KiB/s
    last = 2 * rereplication.WINDOW_ENTRIES - 1
    machine = RereplicationMachine(LEDGER, 0, frozenset((bookie(1),)), target=bookie(9), pace=pace)
    copy = Driven(machine)
    copy.take(machine.start(0))
    copy.feed(MetadataRead(closed(last), 3))
    copy.answer(0, ReadReply(Status.OK, run(0, rereplication.WINDOW_ENTRIES - 1)))
    copy.answer(9)
    assert copy.only(WakeAt).time_ns == rereplication.PAUSE_NS_MAX
    copy.wake_up()
    assert copy.sends == []
    pace.until_ns = copy.now
    copy.wake_up()
    assert copy.now == 2 * rereplication.PAUSE_NS_MAX
    (read,) = (send.request for send in copy.sends)
    assert isinstance(read, Read)
    assert read.first == rereplication.WINDOW_ENTRIES


def test_a_window_is_one_piece_if_the_pace_wants_small_ones() -> None:
    pace = Slow()
    pace.piece_bytes = rereplication.READ_BYTES_MAX // 4
    machine = RereplicationMachine(LEDGER, 0, frozenset((bookie(1),)), target=bookie(9), pace=pace)
    copy = Driven(machine)
    copy.take(machine.start(0))
    copy.feed(MetadataRead(replace(closed(999), length=1000 * (pace.piece_bytes // 20)), 3))
    (read,) = copy.sends
    assert isinstance(read.request, Read)
    assert read.request.last == 19
    assert read.request.bytes_max == pace.piece_bytes


def test_a_window_of_large_entries_has_few() -> None:
    size = rereplication.WINDOW_BYTES // 20
    machine = RereplicationMachine(LEDGER, 0, frozenset((bookie(1),)), target=bookie(9))
    copy = Driven(machine)
    copy.take(machine.start(0))
    copy.feed(MetadataRead(replace(closed(999), length=1000 * size), 3))
    (read,) = copy.sends
    assert isinstance(read.request, Read)
    assert read.request.last == 19


def test_the_first_window_is_small_where_the_size_of_entries_is_not_known() -> None:
    machine = RereplicationMachine(LEDGER, 0, frozenset((bookie(1),)), target=bookie(9))
    copy = Driven(machine)
    copy.take(machine.start(0))
    copy.feed(MetadataRead(metadata((3, 3, 2), (0, (0, 1, 2)), (5000, (3, 4, 6))), 3))
    first = rereplication.WINDOW_ENTRIES_MIN
    copy.answer(0, ReadReply(Status.OK, run(0, first - 1)))
    copy.answer(9)
    (read,) = copy.sends
    assert isinstance(read.request, Read)
    assert (read.request.first, read.request.last) == (first, first + rereplication.WINDOW_ENTRIES - 1)
