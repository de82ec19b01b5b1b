"""What a worker does for a ledger, row by row of the table in ``ledger_work``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pybk.flags import StorageHint
from pybk.healing.ledger_work import FragmentWork, LedgerWork, Presence, ledger_work, live_copies
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata, LedgerState
from pybk.metadata.underreplication import RepairReason, UnderReplicatedLedger

HERE, LEAVING, ABSENT = Presence
A, B, C, D, OWN = (Bookie(name, name.encode() * 16) for name in "abcdo")
LOST, DAMAGED, MISSING, MISSED, DRAINING, MISPLACED, REBALANCE = RepairReason


def ledger(*fragments: tuple[int, str], last: int | None = None, recovering: bool = False) -> LedgerMetadata:
    """Return a ledger; it is closed if it has a last entry."""
    names = {bookie.bookie_id: bookie for bookie in (A, B, C, D, OWN)}
    made = LedgerMetadata(
        ledger_id=7,
        digest_type=DigestType.CRC32C,
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        creation_time_ns=0,
        creation_sequence=0,
        tier=StorageHint.NVME,
        key_salt=b"",
        verifier=b"",
        fragments=tuple(Fragment(first, tuple(names[each] for each in ensemble)) for first, ensemble in fragments),
    )
    if last is not None:
        return made.closed_at(last, 100)
    return replace(made, state=LedgerState.IN_RECOVERY) if recovering else made


def mark(bookie: Bookie, **causes: int) -> UnderReplicatedLedger:
    """Return a mark with causes and the first entry of each."""
    made = UnderReplicatedLedger(7, bookie, 0)
    return made.with_causes({RepairReason(reason): first for reason, first in causes.items()})


def work(
    metadata: LedgerMetadata,
    *marks: UnderReplicatedLedger,
    presence: Mapping[Bookie, Presence] | None = None,
    fits: bool = True,
) -> LedgerWork:
    return ledger_work(metadata, marks, OWN, lambda bookie: (presence or {}).get(bookie, HERE), lambda *_: fits)


@pytest.mark.parametrize(
    ("presence", "cause"), [(ABSENT, "lost"), (ABSENT, "draining"), (LEAVING, "draining"), (LEAVING, "lost")]
)
def test_a_place_that_a_bookie_gives_up_is_taken(presence: Presence, cause: str) -> None:
    metadata = ledger((0, "abc"), (10, "adb"), (20, "bcd"), last=30)
    done = work(metadata, mark(A, **{cause: 0}), presence={A: presence})
    assert done == LedgerWork((FragmentWork(0, A), FragmentWork(10, A)), (), (), (), ())


def test_a_place_is_taken_only_where_the_bookie_fits_and_has_none() -> None:
    lost = mark(A, lost=0)
    assert work(ledger((0, "abc"), last=9), lost, presence={A: ABSENT}, fits=False).fragments == ()
    assert work(ledger((0, "abo"), (5, "abc"), last=9), lost, presence={A: ABSENT}).fragments == (FragmentWork(5, A),)


def test_of_two_lost_bookies_one_place_of_a_fragment_is_taken() -> None:
    done = work(ledger((0, "abc"), last=9), mark(A, lost=0), mark(B, lost=0), presence={A: ABSENT, B: ABSENT})
    assert done.fragments == (FragmentWork(0, A),)


def test_a_bookie_that_is_absent_and_not_lost_may_come_back() -> None:
    done = work(ledger((0, "abc"), last=9), mark(A, missing=3), presence={A: ABSENT})
    assert done == LedgerWork((), (), (), (), ())


def test_a_bookie_that_is_back_keeps_its_places() -> None:
    for cause in ("lost", "draining"):
        found = mark(A, **{cause: 0})
        assert work(ledger((0, "abc"), last=9), found) == LedgerWork((), (), (), (found,), ())


@pytest.mark.parametrize("cause", ["missing", "missed", "damaged"])
def test_the_own_bookie_is_filled_up_from_the_first_entry_that_it_misses(cause: str) -> None:
    found = mark(OWN, **{cause: 12})
    done = work(ledger((0, "abo"), (10, "aco"), (20, "abc"), last=30), found)
    assert done == LedgerWork((FragmentWork(10, None),), (found,), (), (), ())


def test_another_bookie_is_filled_up_by_its_own_worker() -> None:
    assert work(ledger((0, "abc"), last=9), mark(A, damaged=0)) == LedgerWork((), (), (), (), ())


def test_a_bookie_that_misses_entries_of_the_fragment_without_an_end_stays_marked() -> None:
    found, late = mark(OWN, missing=4), mark(OWN, missing=12)
    metadata = ledger((0, "abo"), (10, "abo"))
    assert work(metadata, found) == LedgerWork((FragmentWork(0, None),), (), (found,), (), (OWN,))
    assert work(metadata, late) == LedgerWork((), (), (late,), (), (OWN,))
    assert work(ledger((0, "abo"), (10, "abc")), found) == LedgerWork((FragmentWork(0, None),), (found,), (), (), ())


def test_a_mark_of_a_bookie_that_has_no_place_is_over() -> None:
    found = mark(D, lost=0, missing=3)
    assert work(ledger((0, "abc"), last=9), found, presence={D: ABSENT}).over == (found,)


@pytest.mark.parametrize("presence", list(Presence))
def test_a_mark_of_entries_whose_places_others_have_is_over(presence: Presence) -> None:
    late, due = mark(A, missing=10), mark(A, missing=9)
    replaced = ledger((0, "abc"), (10, "bcd"), last=20)
    assert work(replaced, late, presence={A: presence}) == LedgerWork((), (), (), (late,), ())
    assert work(replaced, due, presence={A: presence}).over == ()
    assert work(ledger((0, "abc"), (10, "acd"), last=20), late, presence={A: presence}).over == ()
    assert work(ledger((0, "bcd"), (10, "abc")), late, presence={A: presence}).over == ()


def test_in_recovery_no_mark_is_removed() -> None:
    unwritten, filled = mark(D, missing=3), mark(OWN, missing=3)
    done = work(ledger((0, "abo"), (10, "abc"), recovering=True), unwritten, filled)
    assert done == LedgerWork((FragmentWork(0, None),), (), (), (), ())
    assert work(ledger((0, "abo"), (10, "abo"), recovering=True), filled).partly == ()


@pytest.mark.parametrize("presence", [ABSENT, LEAVING])
def test_a_lost_bookie_of_the_fragment_without_an_end_is_reported(presence: Presence) -> None:
    done = work(ledger((0, "abc"), (5, "adb")), mark(A, lost=0), presence={A: presence})
    assert done == LedgerWork((FragmentWork(0, A),), (), (), (), (A,))


def test_a_misplaced_bookie_is_replaced_by_any_that_fits() -> None:
    found = mark(A, misplaced=0, rebalance=0)._replace(target="d")
    assert work(ledger((0, "abc"), last=9), found).fragments == (FragmentWork(0, A),)


def test_a_rebalance_moves_one_fragment_to_the_target_of_its_mark() -> None:
    metadata = ledger((0, "abc"), (10, "adb"), last=19)
    found = mark(A, rebalance=10)._replace(target="o")
    assert work(metadata, found) == LedgerWork((FragmentWork(10, A),), (), (), (), ())
    assert work(metadata, found, fits=False) == LedgerWork((), (), (), (), ())
    assert work(metadata, found._replace(target="e")) == LedgerWork((), (), (), (), ()), "another one takes it"
    assert work(metadata, found, presence={A: ABSENT}) == LedgerWork((), (), (), (), ()), "it may come back"
    own = mark(OWN, rebalance=0)._replace(target="d")
    assert work(ledger((0, "abo"), last=9), own) == LedgerWork((), (), (), (), ()), "the source waits"


@pytest.mark.parametrize(
    ("second", "first", "target"), [("obd", 10, "o"), ("abo", 10, "o"), ("adb", 5, "o"), ("adb", 10, "")]
)
def test_a_rebalance_is_over_once_there_is_nothing_to_move(second: str, first: int, target: str) -> None:
    found = mark(A, rebalance=first)._replace(target=target)
    assert work(ledger((0, "abc"), (10, second), last=19), found) == LedgerWork((), (), (), (found,), ())


def test_a_bookie_that_is_to_lose_a_copy_is_filled_up_meanwhile() -> None:
    found = mark(OWN, missing=4, rebalance=0)._replace(target="d")
    assert work(ledger((0, "abo"), last=9), found) == LedgerWork((FragmentWork(0, None),), (found,), (), (), ())


def test_live_copies_are_those_on_bookies_that_serve_and_miss_nothing() -> None:
    metadata = ledger((0, "abc"), (10, "bcd"), last=19)

    def copies(*marks: UnderReplicatedLedger, absent: str = "", leaving: str = "") -> int:
        states = dict.fromkeys(absent, ABSENT) | dict.fromkeys(leaving, LEAVING)
        return live_copies(metadata, marks, lambda bookie: states.get(bookie.bookie_id, HERE))

    assert copies() == copies(leaving="abc") == 3
    assert copies(absent="a") == copies(absent="ad") == 2
    assert copies(absent="ac") == copies(mark(A, missing=3), absent="c") == copies(mark(A, missed=3), absent="c") == 1
    assert copies(mark(A, missing=10)) == 3, "the bookie has no entry from there on"
    assert copies(absent="abc") == 0


def test_an_empty_fragment_needs_no_copies() -> None:
    metadata = ledger((0, "abc"), (10, "bcd"), last=9)
    assert live_copies(metadata, [], lambda bookie: ABSENT if bookie == D else HERE) == 3


def test_a_fragment_without_an_end_counts_only_if_it_is_wanted() -> None:
    metadata = ledger((0, "abc"), (10, "bcd"))
    marks = [mark(A, missing=0), mark(B, missing=10), mark(C, missing=10)]
    assert live_copies(metadata, marks, lambda _: HERE) == 1
    assert live_copies(metadata, marks, lambda _: HERE, ended=True) == 2
