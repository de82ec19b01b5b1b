"""The writer's machine, step by step."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import cast

import pytest

from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerState
from pybk.replication.messages import (
    Acknowledged,
    Add,
    Answered,
    BookiesChosen,
    ChangeReason,
    ChooseBookies,
    Confirmed,
    Done,
    EnsembleChanged,
    Failed,
    MetadataRead,
    MetadataRefused,
    MetadataUnreachable,
    MetadataWritten,
    ReadMetadata,
    Reason,
    Reply,
    Send,
    Status,
    UnderReplicated,
    WakeAt,
    Woken,
    WriteLac,
    WriteMetadata,
)
from pybk.replication.writer import LOOK_NS, METADATA_RETRY_NS, METADATA_TRIES, REVIVE_NS, REVIVE_NS_MAX
from tests.internals import inflight_of
from tests.replication.driving import Writer, batch, bookie, confirmed, metadata

SECOND = 10**9


def test_a_batch_is_one_message_per_bookie_and_is_confirmed_by_the_ack_quorum() -> None:
    writer = Writer()
    writer.submit(0, 9)
    assert [send.bookie for send in writer.sends] == [bookie(0), bookie(1), bookie(2)]
    assert len({id(send.request) for send in writer.sends}) == 1, "what all take is one message"
    writer.answer(0)
    assert writer.effects == []
    assert (writer.writer.last_submitted, writer.writer.last_add_confirmed) == (9, -1)
    writer.answer(2)
    assert writer.effects == [Confirmed(9)]
    writer.answer(1)
    assert writer.effects == []
    assert writer.writer.last_add_confirmed == 9


def test_batches_are_confirmed_in_order() -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.submit(1, 1)
    for number in (0, 1):
        send = writer.pending(number)[1]
        writer.sends.remove(send)
        writer.sends.insert(0, send)
        writer.answer(number)
        assert writer.effects == []
    writer.answer(0)
    writer.answer(1)
    assert writer.effects == [Confirmed(1)]


def test_striped_batches_need_a_quorum_for_every_residue() -> None:
    writer = Writer(metadata((5, 3, 2)))
    writer.submit(0, 9)
    for send in writer.sends:
        place = int(send.bookie.bookie_id[1:])
        assert isinstance(send.request, Add)
        residues = {run.first % 5 for run in send.request.runs}
        assert residues == {place, (place - 1) % 5, (place - 2) % 5}
    for number in (0, 1, 2):
        writer.answer(number)
        assert writer.effects == [], "the entries of residue 3 are on one bookie at most"
    writer.answer(4)
    assert writer.effects == [Confirmed(9)]


def test_the_lac_is_piggybacked_and_sent_when_nothing_is_outstanding() -> None:
    writer = Writer()
    writer.submit(0, 3)
    assert writer.writer.send_lac() == []
    writer.answer(0)
    writer.answer(1)
    writer.answer(2)
    writer.submit(4, 4)
    assert [send.request.lac for send in writer.sends if isinstance(send.request, Add)] == [3, 3, 3]
    for number in range(3):
        writer.answer(number)
    writer.take(writer.writer.send_lac())
    assert [send.request for send in writer.sends] == [WriteLac(5, 4)] * 3
    assert writer.writer.send_lac() == []


def test_an_idle_writer_shows_that_it_lives_also_before_its_first_entry() -> None:
    writer = Writer()
    for _ in range(2):
        writer.sends.clear()
        writer.take(writer.writer.announce())
        assert [(send.bookie, send.request) for send in writer.sends] == [
            (bookie(number), WriteLac(5, -1)) for number in range(3)
        ]


def leaves(*numbers: int) -> frozenset[Bookie]:
    return frozenset(map(bookie, numbers))


def asked_places(writer: Writer) -> list[tuple[int, ...]]:
    return [effect.places for effect in writer.effects if isinstance(effect, ChooseBookies)]


@pytest.mark.parametrize("entries", [0, 5])
def test_an_idle_writer_replaces_a_bookie_that_leaves(entries: int) -> None:
    writer = Writer()
    if entries:
        writer.submit(0, entries - 1)
        for number in range(3):
            writer.answer(number)
    writer.take(writer.writer.bookies_changed(0, leaves(1)))
    assert asked_places(writer) == [(1,)]
    writer.feed(BookiesChosen({1: bookie(7)}))
    ensemble = (bookie(0), bookie(7), bookie(2))
    fragments = writer.only(WriteMetadata).metadata.fragments
    assert fragments[-1] == Fragment(entries, ensemble)
    assert len(fragments) == (2 if entries else 1)
    writer.feed(MetadataWritten(8))
    assert EnsembleChanged((ChangeReason.READ_ONLY,)) in writer.effects
    assert writer.recorded == [], "it has every entry"
    writer.submit(entries, entries)
    assert {send.bookie for send in writer.sends} == set(ensemble)


def test_a_bookie_that_leaves_keeps_its_place_while_there_is_no_other_one() -> None:
    writer = Writer()
    writer.take(writer.writer.bookies_changed(0, leaves(0, 1, 2)))
    writer.feed(BookiesChosen({}))
    assert writer.recorded == []
    writer.submit(0, 0)
    for number in range(3):
        writer.answer(number)
    assert writer.writer.last_add_confirmed == 0
    writer.take(writer.writer.bookies_changed(0, leaves(0, 1, 2)))
    assert asked_places(writer) == [(0, 1, 2)], "it is asked again when a bookie comes"
    writer.feed(BookiesChosen({}))
    writer.now = REVIVE_NS
    writer.feed(Woken())
    assert asked_places(writer) == [(0, 1, 2)], "and after a pause, as one may have freed space"


def test_a_bookie_that_comes_in_while_it_leaves_is_replaced_after_the_change() -> None:
    writer = Writer()
    writer.submit(0, 0)
    for number in (0, 2):
        writer.answer(number)
    writer.lose(1)
    writer.feed(BookiesChosen({1: bookie(7)}))
    writer.take(writer.writer.bookies_changed(0, leaves(7)))
    assert asked_places(writer) == [], "an ensemble is being written"
    writer.feed(MetadataWritten(8))
    writer.wake_up()
    assert asked_places(writer) == [(1,)]


def test_a_writer_shows_that_it_lives_also_while_it_fills_a_place_that_was_given_up() -> None:
    """The same change of bookies asks for both, and its ledger has a place short."""
    writer = Writer()
    writer.submit(0, 0)
    for number in (0, 2):
        writer.answer(number)
    writer.lose(1)
    writer.feed(BookiesChosen({}))
    writer.take(writer.writer.bookies_changed(0))

    def shown_to() -> list[Bookie]:
        return [effect.bookie for effect in writer.writer.announce() if isinstance(effect, Send)]

    assert shown_to() == [bookie(0), bookie(2)]
    writer.feed(BookiesChosen({1: bookie(7)}))
    assert shown_to() == [bookie(0), bookie(2)], "no other one is named yet"
    writer.feed(MetadataWritten(8))
    assert shown_to() == [bookie(0), bookie(7), bookie(2)]
    writer.take(writer.writer.close(0))
    assert shown_to() == []


@pytest.mark.parametrize("found", [{1: bookie(7)}, {}], ids=["replaced", "given up"])
def test_a_lac_that_was_to_be_sent_during_a_change_is_sent_after_it(found: dict[int, Bookie]) -> None:
    """The driver asks once; readers would see the last entry no earlier than the next append otherwise."""
    writer = Writer()
    writer.submit(0, 0)
    writer.lose(1)
    writer.answer(0)
    writer.answer(2)
    assert writer.writer.last_add_confirmed == 0
    assert writer.writer.send_lac() == []
    writer.feed(BookiesChosen(found))
    assert writer.writer.send_lac() == []
    if found:
        assert writer.sends == [], "it is not known yet whether the metadata name the new bookie"
        writer.feed(MetadataWritten(8))
    assert {(send.bookie, send.request) for send in writer.sends} == {
        (each, WriteLac(5, 0)) for each in (bookie(0), bookie(2), *found.values())
    }


@pytest.mark.parametrize("entries", [0, 5])
def test_a_bookie_that_comes_in_hears_of_a_writer_that_appends_nothing(entries: int) -> None:
    writer = Writer()
    if entries:
        writer.submit(0, entries - 1)
        for number in range(3):
            writer.answer(number)
        writer.take(writer.writer.send_lac())
    writer.take(writer.writer.bookies_changed(0, leaves(1)))
    writer.feed(BookiesChosen({1: bookie(7)}))
    writer.sends.clear()
    writer.feed(MetadataWritten(8))
    assert [send.request for send in writer.pending(7)] == [WriteLac(5, entries - 1)]


def test_a_watched_lac_is_sent_at_once() -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.answer(0, Reply(Status.OK, watched=True))
    writer.answer(1)
    assert [send.request for send in writer.pending(0)] == [WriteLac(5, 0)]


def test_a_failed_bookie_is_replaced_from_the_first_entry_that_is_not_confirmed() -> None:
    writer = Writer()
    writer.submit(0, 4)
    writer.answer(0)
    writer.answer(1)
    writer.answer(2)
    writer.submit(5, 6)
    writer.submit(7, 7)
    written = writer.replace(1, 3, place=1)
    assert written.version == 7
    assert written.metadata.fragments == (
        metadata().fragments[0],
        Fragment(5, (bookie(0), bookie(3), bookie(2))),
    )
    assert writer.pending(3) == [], "nothing is sent before the metadata name the bookie (AW5)"
    writer.answer(0)
    writer.answer(2)
    assert writer.effects == [], "nothing is confirmed while the change is being written (C3)"
    others = [writer.pending(number) for number in (0, 1, 2)]
    writer.feed(MetadataWritten(8))
    assert writer.effects == [EnsembleChanged((ChangeReason.NO_ANSWER,)), Confirmed(6)]
    assert [writer.pending(number) for number in (0, 1, 2)] == others, "to the new bookie alone (AW6)"
    firsts = [send.request.runs[0].first for send in writer.pending(3) if isinstance(send.request, Add)]
    assert firsts == [5, 7], "what is pending is resent, lowest first (AW6)"
    assert {send.bookie for send in writer.sends if send.bookie != bookie(3)} == {bookie(0), bookie(1), bookie(2)}


def test_a_fragment_without_entries_is_replaced() -> None:
    writer = Writer()
    writer.submit(0, 0)
    assert writer.replace(1, 3, place=1).metadata.fragments == (Fragment(0, (bookie(0), bookie(3), bookie(2))),)


def test_acknowledgements_of_replaced_bookies_are_undone_all_together() -> None:
    """C2: undoing one batch must not let the next be confirmed by what was not undone yet."""
    writer = Writer()
    for entry_id in range(3):
        writer.submit(entry_id, entry_id)
    for _ in range(2):
        writer.answer(1)
    writer.answer(0)
    assert writer.effects == [Confirmed(0)]
    writer.answer(0)
    assert writer.effects == [Confirmed(1)]
    writer.submit(3, 3)
    writer.replace(1, 3, place=1)
    writer.answer(0)
    writer.answer(0)
    writer.feed(MetadataWritten(8))
    assert confirmed(writer) == 1
    writer.answer(3)
    assert writer.effects == [Confirmed(2)]


def test_late_acknowledgements_of_replaced_bookies_do_not_count() -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.submit(1, 1)
    writer.replace(1, 3, place=1)
    writer.feed(MetadataWritten(8))
    writer.answer(1)
    writer.answer(0)
    assert confirmed(writer) == -1


def test_a_failure_during_a_change_begins_the_next() -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.replace(1, 3, place=1)
    writer.lose(2)
    assert writer.effects == []
    writer.feed(MetadataWritten(8))
    choose = writer.only(ChooseBookies)
    assert choose.places == (2,)
    assert choose.excluded == {bookie(1), bookie(2)}


def test_a_failure_after_the_quorum_changes_the_ensemble_and_is_recorded() -> None:
    """C13."""
    writer = Writer()
    writer.submit(0, 3)
    writer.answer(0)
    writer.answer(1)
    writer.replace(2, 3, place=2)
    recorded, written = writer.effects
    assert recorded == UnderReplicated(bookie(2), 0), "before the change: the writer may end before it is told of it"
    assert isinstance(written, WriteMetadata)
    writer.feed(MetadataWritten(8))
    assert not any(isinstance(effect, UnderReplicated) for effect in writer.effects)


def test_without_a_spare_writing_continues_with_the_quorum() -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.answer(0)
    writer.lose(1)
    writer.feed(BookiesChosen({}))
    assert writer.only(UnderReplicated) == UnderReplicated(bookie(1), 0)
    writer.answer(2)
    assert writer.effects == [Confirmed(0)]
    writer.submit(1, 1)
    assert [send.bookie for send in writer.sends] == [bookie(0), bookie(2)]
    writer.lose(2)
    writer.feed(BookiesChosen({}))
    assert writer.only(ChooseBookies).excluded == frozenset(), "those that failed may be back"
    writer.feed(BookiesChosen({}, "b7 has no label"))
    failed = writer.only(Failed)
    assert failed.reason is Reason.NOT_ENOUGH_BOOKIES
    assert failed.detail.endswith("b7 has no label")
    assert "2 bookies of every 3" in failed.detail
    assert "b0@00000000" in failed.detail
    assert writer.writer.ended
    assert writer.writer.submit(batch(2, 2), 0) == []


def test_below_the_quorum_those_that_failed_are_tried_once_more() -> None:
    writer = Writer()
    writer.submit(0, 0)
    for number in (0, 1, 2):
        writer.lose(number)
    writer.feed(BookiesChosen({}))
    writer.feed(BookiesChosen({}))
    assert writer.only(ChooseBookies).places == (0, 1, 2)
    writer.feed(BookiesChosen({place: bookie(place) for place in range(3)}))
    writer.feed(MetadataWritten(8))
    assert len(writer.sends) == 3
    for number in (0, 1):
        writer.lose(number)
    writer.feed(BookiesChosen({}))
    writer.feed(BookiesChosen({}))
    assert writer.only(Failed).reason is Reason.NOT_ENOUGH_BOOKIES, "it has not helped"


def without_bookies(patience_ns: int) -> Writer:
    """Return a writer with a pending entry, for which no bookie was found, neither now nor at the second look."""
    writer = Writer(patience_ns=patience_ns)
    writer.submit(0, 0)
    lose_all(writer)
    return writer


def lose_all(writer: Writer) -> None:
    """Let no bookie answer, and none be found."""
    for number in (0, 1, 2):
        writer.lose(number)
    for _ in range(3):  # for the first that failed, for the others, and for all of them once more
        writer.feed(BookiesChosen({}))


def test_a_writer_keeps_its_entries_and_waits_for_bookies_to_return() -> None:
    """AW10: those that registered meanwhile are asked for at once, and they get what is pending."""
    writer = without_bookies(30 * SECOND)
    assert not [effect for effect in writer.effects if isinstance(effect, Failed)]
    writer.now += 5 * SECOND
    writer.take(writer.writer.bookies_changed(writer.now))
    assert writer.only(ChooseBookies) == ChooseBookies((0, 1, 2), tuple(map(bookie, range(3))), frozenset())
    writer.feed(BookiesChosen({0: bookie(0)}))
    assert not writer.sends, "one is too few"
    writer.take(writer.writer.bookies_changed(writer.now))
    writer.feed(BookiesChosen({0: bookie(0), 1: bookie(1)}))
    writer.feed(MetadataWritten(8))
    writer.answer(0)
    writer.answer(1)
    assert Confirmed(0) in writer.effects


def test_a_writer_looks_for_bookies_until_its_patience_has_passed() -> None:
    """AW10: none of those that were there all the time reports that it answers again."""
    writer = without_bookies(5 * SECOND // 2)
    begun = writer.now
    for after in (LOOK_NS, 2 * LOOK_NS, 5 * SECOND // 2):
        writer.wake_up()
        assert writer.now - begun == after
        assert writer.only(ChooseBookies).excluded == frozenset()
        writer.feed(BookiesChosen({}))
    assert writer.only(Failed).reason is Reason.NOT_ENOUGH_BOOKIES
    assert writer.now - begun == 5 * SECOND // 2


def test_a_writer_that_is_tried_by_a_bookie_in_vain_does_not_wait_longer() -> None:
    """AW10: a bookie that registers and does not answer begins no new patience, and is not asked without a pause."""
    writer = without_bookies(3 * SECOND)
    for tries in range(1, 4):
        writer.wake_up()
        assert writer.now == tries * SECOND
        writer.feed(BookiesChosen({0: bookie(0), 1: bookie(1)}))
        writer.feed(MetadataWritten(7 + tries))
        writer.lose(0)
        writer.lose(1)
        writer.feed(BookiesChosen({}))
        if not writer.writer.ended and not [each for each in writer.effects if isinstance(each, WakeAt)]:
            writer.feed(BookiesChosen({}))
    assert writer.only(Failed).reason is Reason.NOT_ENOUGH_BOOKIES


def test_the_patience_begins_anew_once_an_entry_is_confirmed() -> None:
    writer = without_bookies(3 * SECOND)
    writer.now += 2 * SECOND
    writer.take(writer.writer.bookies_changed(writer.now))
    writer.feed(BookiesChosen({place: bookie(place) for place in range(3)}))
    writer.feed(MetadataWritten(8))
    for number in (*range(3), *range(3)):  # the entry, and the LAC after it
        writer.answer(number)
    writer.submit(1, 1)
    lost = writer.now
    lose_all(writer)
    while not writer.writer.ended:
        writer.wake_up()
        writer.feed(BookiesChosen({}))
    assert writer.now - lost == 3 * SECOND


def test_the_patience_of_a_deferred_ledger_begins_anew_once_an_entry_is_acknowledged() -> None:
    """Its LAC moves with forces alone, which nobody may ask for."""

    def lose_two() -> None:
        writer.lose(1)
        writer.lose(2)
        for _ in range(3):
            writer.feed(BookiesChosen({}))

    writer = Writer(patience_ns=3 * SECOND, deferred=True)
    writer.submit(0, 0)
    writer.answer(0)
    lose_two()
    writer.now += 2 * SECOND
    writer.take(writer.writer.bookies_changed(writer.now))
    writer.feed(BookiesChosen({place: bookie(place) for place in (1, 2)}))
    writer.feed(MetadataWritten(8))
    writer.answer(1)
    assert (writer.effects, confirmed(writer)) == ([Acknowledged(0)], -1)
    writer.submit(1, 1)
    writer.answer(0)
    lost = writer.now
    lose_two()
    while not writer.writer.ended:
        writer.wake_up()
        writer.feed(BookiesChosen({}))
    assert writer.now - lost == 3 * SECOND


def test_a_bookie_that_was_given_up_may_take_its_place_again() -> None:
    """C4: what is pending is sent, also if the ensemble is the same as before."""
    writer = Writer()
    writer.submit(0, 0)
    writer.lose(1)
    writer.feed(BookiesChosen({}))
    writer.take(writer.writer.bookies_changed(0))
    assert writer.only(ChooseBookies).excluded == frozenset()
    writer.feed(BookiesChosen({1: bookie(1)}))
    writer.feed(MetadataWritten(8))
    assert [send.request.runs[0].first for send in writer.pending(1) if isinstance(send.request, Add)] == [0]
    writer.answer(1)
    writer.answer(0)
    assert writer.effects == [Confirmed(0)]


def test_a_bookie_that_only_did_not_answer_for_a_while_takes_its_place_again() -> None:
    """Nobody reports that it is back, because it was registered all the time."""
    writer = Writer()
    writer.submit(0, 0)
    writer.lose(1)
    for wait_ns in (REVIVE_NS, 2 * REVIVE_NS, 4 * REVIVE_NS):
        before = writer.now
        writer.feed(BookiesChosen({}))
        asked = writer.only(WakeAt)
        writer.feed(Woken())
        assert writer.effects == [asked], "it is too early"
        writer.sends.clear()
        writer.wake_up()
        assert writer.now == before + wait_ns
        assert [send.bookie for send in writer.sends] == [bookie(0), bookie(2)], "they may have lost its sessions"
        assert writer.only(ChooseBookies) == ChooseBookies((1,), tuple(map(bookie, range(3))), frozenset())
    writer.feed(BookiesChosen({1: bookie(1)}))
    writer.feed(MetadataWritten(8))
    assert [send.request.runs[0].first for send in writer.pending(1) if isinstance(send.request, Add)] == [0]
    writer.now += 2 * REVIVE_NS_MAX
    writer.lose(1)
    writer.feed(BookiesChosen({}))
    assert writer.only(WakeAt).time_ns == writer.now + REVIVE_NS, "that was long ago"


def given_up_for_long() -> Writer:
    """Return a writer that has tried so often to fill a place that it waits for minutes until the next try."""
    writer = Writer()
    writer.submit(0, 0)
    writer.lose(1)
    for _ in range(6):
        writer.feed(BookiesChosen({}))
        writer.wake_up()
    return writer


def test_a_bookie_that_registers_while_others_are_chosen_takes_its_place_soon() -> None:
    """Its registration came too late for that choice, and nobody reports it again."""
    writer = given_up_for_long()
    writer.take(writer.writer.bookies_changed(writer.now))
    assert not writer.effects, "a choice is under way"
    before = writer.now
    writer.feed(BookiesChosen({}))
    writer.wake_up()
    assert writer.now - before == REVIVE_NS
    assert writer.only(ChooseBookies) == ChooseBookies((1,), tuple(map(bookie, range(3))), frozenset())


def test_a_bookie_that_registers_and_does_not_answer_at_once_takes_its_place_soon() -> None:
    """The pauses of the time before it registered say nothing about it."""
    writer = given_up_for_long()
    writer.feed(BookiesChosen({}))
    assert writer.only(WakeAt).time_ns > writer.now + 30 * REVIVE_NS
    writer.now += SECOND
    registered = writer.now
    writer.take(writer.writer.bookies_changed(writer.now))
    writer.feed(BookiesChosen({1: bookie(1)}))
    writer.feed(MetadataWritten(8))
    writer.now += 5 * SECOND
    writer.lose(1)
    assert writer.only(ChooseBookies).excluded == {bookie(1)}
    for wait_ns in (REVIVE_NS, REVIVE_NS, 2 * REVIVE_NS):
        writer.feed(BookiesChosen({}))
        writer.wake_up()
        assert writer.only(ChooseBookies).excluded == frozenset()
        assert writer.now - registered == wait_ns
        registered = writer.now


def test_a_place_that_was_given_up_is_filled_although_another_wake_up_came_first() -> None:
    """A machine has one wake-up at a time; that for the metadata store replaces the one for the place."""
    writer = Writer(metadata((5, 3, 2)))
    writer.submit(0, 9)
    writer.lose(1)
    writer.feed(BookiesChosen({}))
    revival = writer.only(WakeAt)
    writer.lose(3)
    writer.feed(BookiesChosen({3: bookie(7)}))
    writer.feed(MetadataUnreachable())
    writer.wake_up()
    assert writer.now < revival.time_ns
    writer.only(ReadMetadata)
    writer.feed(MetadataRead(metadata((5, 3, 2)), 7))
    writer.feed(MetadataWritten(8))
    assert writer.only(WakeAt) == revival
    writer.wake_up()
    assert writer.only(ChooseBookies).places == (1,)


def test_what_a_bookie_that_was_given_up_misses_is_reported_before_its_fragment_ends() -> None:
    """Its mark may be gone: it had all entries at that time (H13). C13 holds for what it does not get from then on."""
    for ends in ("change", "close", "pause"):
        writer = Writer(metadata((5, 3, 2)))
        writer.submit(0, 9)
        for place in (0, 2, 3, 4):
            writer.answer(place)
        writer.lose(1)
        writer.feed(BookiesChosen({}))
        assert writer.recorded == [UnderReplicated(bookie(1), 0)]
        revival = writer.only(WakeAt)
        writer.submit(10, 19)
        for place in (0, 2, 3, 4):
            writer.answer(place)
        assert confirmed(writer) == 19
        if ends == "change":
            writer.submit(20, 29)
            writer.lose(3)
            writer.feed(BookiesChosen({3: bookie(7)}))
        elif ends == "close":
            writer.take(writer.writer.close(0))
        else:
            writer.now = revival.time_ns
            writer.feed(Woken())
            writer.feed(BookiesChosen({}))
        assert writer.recorded[-1] == UnderReplicated(bookie(1), 0)
        assert len(writer.recorded) > 1
        if ends != "pause":
            assert isinstance(writer.effects[-1], WriteMetadata), "the report comes first"


def test_what_a_bookie_that_was_given_up_misses_of_an_ended_fragment_is_not_reported_again() -> None:
    """That fragment is filled up once; its mark was recorded before the metadata said where it ends."""
    writer = Writer(metadata((5, 3, 2)))
    writer.submit(0, 9)
    writer.submit(10, 19)
    for _ in range(2):
        for place in (0, 2, 3, 4):
            writer.answer(place)
    writer.lose(1)
    writer.feed(BookiesChosen({}))
    revival = writer.only(WakeAt)
    writer.submit(20, 29)
    writer.lose(3)
    writer.feed(BookiesChosen({3: bookie(7)}))
    assert writer.recorded[-1] == UnderReplicated(bookie(1), 0)
    writer.feed(MetadataWritten(8))
    writer.lose(1)  # an answer that was waited for until now
    for place in (0, 2, 7, 4):
        writer.answer(place)
    assert confirmed(writer) == 29
    writer.now = revival.time_ns
    writer.feed(Woken())
    writer.feed(BookiesChosen({}))
    assert writer.recorded[-1] == UnderReplicated(bookie(1), 20)


def test_a_bookie_that_falls_behind_is_replaced_and_holds_no_bytes() -> None:
    writer = Writer(straggler_bytes=200)
    for entry_id in range(4):
        writer.submit(entry_id, entry_id)
        writer.answer(0)
        writer.answer(1)
        assert not any(isinstance(effect, ChooseBookies) for effect in writer.effects)
    writer.submit(4, 4)
    writer.answer(0)
    writer.answer(1)
    assert writer.only(ChooseBookies).places == (2,), "it owes 5 entries of 42 bytes"
    assert writer.writer.lag_bytes == 210
    writer.feed(BookiesChosen({}))
    assert writer.only(UnderReplicated) == UnderReplicated(bookie(2), 0)
    assert writer.writer.lag_bytes == 0, "it was given up, and is waited for no more"
    assert not inflight_of(writer.writer).pending
    assert all(sent.pending.runs == () for sent in inflight_of(writer.writer).sent.values())


def test_a_slow_bookie_is_replaced_for_that() -> None:
    writer = Writer(straggler_bytes=20)
    writer.submit(0, 0)
    writer.answer(0)
    writer.answer(1)
    writer.feed(BookiesChosen({2: bookie(3)}))
    writer.feed(MetadataWritten(8))
    assert writer.only(EnsembleChanged).reasons == (ChangeReason.SLOW,)
    assert writer.writer.lag_bytes == 0


def test_a_slow_bookie_that_keeps_up_stays() -> None:
    writer = Writer(straggler_bytes=200)
    for entry_id in range(50):
        writer.submit(entry_id, entry_id)
        writer.answer(0)
        writer.answer(1)
        if entry_id >= 3:
            writer.answer(2)
        assert not any(isinstance(effect, ChooseBookies) for effect in writer.effects)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status.FENCED, Reason.FENCED),
        (Status.UNAUTHORIZED, Reason.UNAUTHORIZED),
        (Status.CONFLICT, Reason.CONFLICT),
        (Status.DELETED, Reason.DELETED),
    ],
)
def test_some_answers_end_the_writer(status: Status, reason: Reason) -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.answer(0, Reply(status))
    assert writer.only(Failed).reason is reason
    assert writer.answer(1) == []
    assert writer.answer(2) == []


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status.UNKNOWN, ChangeReason.REFUSED),
        (Status.LIMBO, ChangeReason.LIMBO),
        (Status.WRONG_INSTANCE, ChangeReason.REFUSED),
        (Status.READ_ONLY, ChangeReason.READ_ONLY),
        (Status.NO_SUCH_LEDGER, ChangeReason.REFUSED),
    ],
)
def test_other_answers_are_failures_of_the_bookie(status: Status, reason: ChangeReason) -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.answer(1, Reply(status))
    assert writer.only(ChooseBookies).places == (1,)
    writer.feed(BookiesChosen({1: bookie(3)}))
    writer.feed(MetadataWritten(8))
    assert writer.only(EnsembleChanged).reasons == (reason,)


def test_a_corrupted_message_is_sent_once_more() -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.answer(1, Reply(Status.REFUSED))
    assert len(writer.pending(1)) == 1
    assert writer.effects == []
    writer.answer(1, Reply(Status.REFUSED))
    assert writer.only(ChooseBookies).places == (1,)


def test_a_refused_change_is_merged_with_what_a_replication_wrote() -> None:
    writer = Writer(metadata((3, 3, 2), (0, (4, 5, 6)), (3, (0, 1, 2))))
    writer.submit(0, 0)
    inflight_of(writer.writer).lac = 2
    written = writer.replace(1, 3, place=1)
    swapped = replace(
        written.metadata,
        fragments=(Fragment(0, (bookie(4), bookie(9), bookie(6))), Fragment(3, (bookie(0), bookie(1), bookie(2)))),
    )
    writer.feed(MetadataRefused(swapped, 8))
    again = writer.only(WriteMetadata)
    assert again.version == 8
    assert again.metadata.fragments == (swapped.fragments[0], written.metadata.fragments[1])


@pytest.mark.parametrize("state", [LedgerState.IN_RECOVERY, LedgerState.CLOSED])
def test_a_refused_change_ends_a_writer_whose_ledger_was_taken(state: LedgerState) -> None:
    writer = Writer()
    writer.submit(0, 0)
    written = writer.replace(1, 3, place=1)
    writer.feed(MetadataRefused(replace(metadata(), state=state), 8))
    assert writer.only(Failed).reason is Reason.FENCED
    assert written.metadata.state is LedgerState.OPEN


def test_a_deleted_ledger_ends_its_writer() -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.replace(1, 3, place=1)
    writer.feed(MetadataRefused(None, -1))
    assert writer.only(Failed).reason is Reason.DELETED


def test_an_ambiguous_change_is_settled_by_reading() -> None:
    """C9: whether it took effect is seen from the metadata."""
    for applied in (True, False):
        writer = Writer()
        writer.submit(0, 0)
        writer.answer(0)
        written = writer.replace(1, 3, place=1)
        writer.answer(2)
        writer.feed(MetadataUnreachable())
        writer.wake_up()
        writer.only(ReadMetadata)
        writer.feed(MetadataRead(written.metadata, 8) if applied else MetadataRead(metadata(), 7))
        if not applied:
            assert writer.only(WriteMetadata) == written
            writer.feed(MetadataWritten(8))
        assert Confirmed(0) in writer.effects
        assert [type(send.request) for send in writer.pending(3)] == [Add, WriteLac]


def test_a_metadata_store_that_stays_away_ends_the_writer() -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.replace(1, 3, place=1)
    for _ in range(METADATA_TRIES):
        writer.feed(MetadataUnreachable())
        writer.wake_up()
    writer.feed(MetadataUnreachable())
    assert writer.only(Failed).reason is Reason.METADATA_UNREACHABLE


def test_a_writer_waits_for_the_metadata_store_until_its_patience_has_passed() -> None:
    """AW10: it asks each second at least, and continues once the store answers."""
    for patience in (0, 20, 60):
        writer = Writer(patience_ns=patience * SECOND)
        writer.submit(0, 0)
        writer.answer(0)
        written = writer.replace(1, 3, place=1)
        writer.answer(2)
        while not writer.writer.ended and writer.now < 30 * SECOND:
            asked = writer.now
            writer.feed(MetadataUnreachable())
            if not writer.writer.ended:
                writer.wake_up()
                assert asked < writer.now <= asked + LOOK_NS
        if patience == 60:
            writer.feed(MetadataRead(written.metadata, 8))
            assert Confirmed(0) in writer.effects
        else:
            assert writer.only(Failed).reason is Reason.METADATA_UNREACHABLE
            assert patience * SECOND <= writer.now < (patience + 10) * SECOND


def test_a_registered_bookie_is_asked_again_and_then_given_up() -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.lose(1)
    for _ in range(METADATA_TRIES):
        writer.only(ChooseBookies)
        writer.feed(MetadataUnreachable())
        writer.wake_up()
    writer.feed(MetadataUnreachable())
    assert writer.only(UnderReplicated).bookie == bookie(1)
    writer.answer(0)
    writer.answer(2)
    assert writer.effects == [Confirmed(0)]


def test_close_writes_the_last_confirmed_entry_and_its_length_once() -> None:
    writer = Writer()
    writer.submit(0, 4)
    writer.answer(0)
    writer.answer(1)
    writer.submit(5, 5)
    writer.take(writer.writer.close(0))
    written = writer.only(WriteMetadata)
    assert (written.metadata.state, written.metadata.last_entry_id, written.metadata.length) == (
        LedgerState.CLOSED,
        4,
        50,
    )
    for number in (0, 1):
        writer.sends = [send for send in writer.sends if send.bookie != bookie(number) or len(writer.sends) < 3]
    writer.feed(MetadataWritten(8))
    assert writer.only(Done).metadata == written.metadata
    assert writer.writer.ended


def test_close_waits_for_a_change_under_way() -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.replace(1, 3, place=1)
    assert writer.take(writer.writer.close(0)) == []
    writer.feed(MetadataWritten(8))
    assert writer.only(WriteMetadata).version == 8


def test_a_refused_close_succeeds_if_the_ledger_is_closed_at_the_same_entry() -> None:
    for length, outcome in ((10, Done), (11, Failed)):
        writer = Writer()
        writer.submit(0, 0)
        writer.answer(0)
        writer.answer(1)
        writer.take(writer.writer.close(0))
        found = replace(metadata(), state=LedgerState.CLOSED, last_entry_id=0, length=length, version=5)
        writer.feed(MetadataRefused(found, 9))
        assert writer.only(outcome)


@pytest.mark.parametrize("when", ["before", "while it is written"])
def test_a_failure_is_recorded_before_the_end_is_written_or_at_once(when: str) -> None:
    """C13: a writer that is killed as soon as the end is written has recorded what it knew."""
    writer = Writer()
    writer.submit(0, 0)
    writer.answer(0)
    writer.answer(1)
    if when == "before":
        writer.lose(2)
        writer.take(writer.writer.close(0))
        writer.feed(BookiesChosen({}))
        recorded, written = writer.effects
        assert isinstance(written, WriteMetadata)
    else:
        writer.take(writer.writer.close(0))
        writer.lose(2)
        (recorded,) = writer.effects
    assert recorded == UnderReplicated(bookie(2), 0)
    writer.feed(MetadataWritten(8))
    assert [type(effect) for effect in writer.effects] == [Done]


def test_answers_after_close_still_show_missing_entries() -> None:
    """C13."""
    writer = Writer()
    writer.submit(0, 0)
    writer.answer(0)
    writer.answer(1)
    writer.take(writer.writer.close(0))
    writer.feed(MetadataWritten(8))
    writer.lose(2)
    assert writer.effects == [UnderReplicated(bookie(2), 0)]


def test_a_bookie_that_knows_the_end_before_the_writer_does_does_not_end_it() -> None:
    for outcome in (Done, Failed):
        writer = Writer()
        writer.submit(0, 0)
        writer.answer(0)
        writer.answer(1)
        writer.take(writer.writer.close(0))
        writer.answer(2, Reply(Status.FENCED))
        assert writer.effects == [UnderReplicated(bookie(2), 0)]
        if outcome is Done:
            writer.feed(MetadataWritten(8))
        else:
            writer.feed(MetadataRefused(replace(metadata(), state=LedgerState.IN_RECOVERY), 9))
        assert writer.only(outcome)


def test_an_unexpected_refusal_changes_nothing() -> None:
    writer = Writer()
    assert writer.feed(MetadataRefused(None, -1)) == []
    writer.submit(0, 0)
    assert len(writer.sends) == 3


def test_the_metadata_store_is_asked_again_after_pauses_that_double() -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.replace(0, 3, place=0)
    for tries in range(3):
        writer.feed(MetadataUnreachable())
        assert writer.only(WakeAt).time_ns == METADATA_RETRY_NS << tries
        writer.feed(Woken())


def test_a_writer_that_failed_holds_no_entries_that_were_answered() -> None:
    writer = Writer()
    writer.submit(0, 0)
    writer.submit(1, 1)
    entry = cast("Add", writer.pending(0)[1].request).runs[0].body[0]
    for number in range(3):
        send = writer.pending(number)[1]
        writer.sends.remove(send)
        writer.feed(Answered(send.token, Reply(Status.OK)))
        del send
    before = sys.getrefcount(entry)
    writer.answer(0, Reply(Status.FENCED))
    assert writer.only(Failed).reason is Reason.FENCED
    assert sys.getrefcount(entry) < before


# ---- members that were away from the start ---------------------------------------------------------------------------


def test_nothing_waits_for_a_bookie_that_was_away_when_the_ledger_was_created() -> None:
    writer = Writer(away=frozenset({bookie(2)}))
    writer.submit(0, 4)
    assert [send.bookie for send in writer.sends] == [bookie(0), bookie(1)]
    writer.answer(0)
    assert writer.effects == [WakeAt(REVIVE_NS)], "the place is filled later (AW9), and no bookie is asked for now"
    writer.answer(1)
    assert writer.effects == [Confirmed(4)]


def test_a_bookie_that_was_away_and_registers_gets_a_fragment_of_its_own() -> None:
    writer = Writer(away=frozenset({bookie(2)}))
    writer.submit(0, 4)
    writer.answer(0)
    writer.answer(1)
    writer.take(writer.writer.bookies_changed(1))
    assert writer.only(ChooseBookies) == ChooseBookies((2,), (bookie(0), bookie(1), bookie(2)), frozenset())
    writer.feed(BookiesChosen({2: bookie(2)}))
    assert writer.recorded == [UnderReplicated(bookie(2), 0)], "again, as the mark may have been removed (H13)"
    changed = writer.only(WriteMetadata).metadata
    assert [fragment.first_entry_id for fragment in changed.fragments] == [0, 5]
    writer.feed(MetadataWritten(8))
    assert writer.effects[0] == EnsembleChanged((ChangeReason.AWAY,))
    writer.sends.clear()
    writer.submit(5, 5)
    assert [send.bookie for send in writer.sends] == [bookie(0), bookie(1), bookie(2)]


def test_a_bookie_that_registers_before_the_first_entry_needs_no_second_fragment() -> None:
    writer = Writer(away=frozenset({bookie(2)}))
    writer.take(writer.writer.bookies_changed(1))
    writer.feed(BookiesChosen({2: bookie(3)}))
    (fragment,) = writer.only(WriteMetadata).metadata.fragments
    assert fragment == Fragment(0, (bookie(0), bookie(1), bookie(3)))
    assert writer.recorded == []


def test_a_ledger_that_is_closed_without_its_third_bookie_has_that_recorded() -> None:
    writer = Writer(away=frozenset({bookie(2)}))
    writer.submit(0, 4)
    writer.answer(0)
    writer.answer(1)
    writer.take(writer.writer.close(1))
    assert writer.recorded == [UnderReplicated(bookie(2), 0)]


def test_a_second_bookie_that_fails_beside_one_that_was_away_ends_the_writer() -> None:
    writer = Writer(away=frozenset({bookie(2)}))
    writer.submit(0, 4)
    writer.lose(1)
    for _ in range(2):
        writer.feed(BookiesChosen({}))
    assert writer.only(Failed).reason is Reason.NOT_ENOUGH_BOOKIES
