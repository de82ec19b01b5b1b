"""The status of bookies, and reasons to hold repairs."""

from __future__ import annotations

import pytest

from pybk.flags import StorageHint
from pybk.healing.situation import (
    HOLD_TEXTS,
    SECOND_NS,
    HoldReason,
    Space,
    Standing,
    Status,
    holds_of,
    standing_of,
    targets_of,
)
from pybk.metadata.registration import BookieState
from pybk.metadata.settings import RepairSettings
from pybk.metadata.underreplication import RepairReason
from tests.healing.clusters import GIB, GRACE_NS, NOW, bookie, facts, ledger, mapped, situation

CLUSTER = mapped(*(ledger(each, (0, (each % 6, (each + 1) % 6, (each + 2) % 6))) for each in range(6)))


def standing(number: int = 0, instance: int = 0, **values: object) -> Standing:
    found = situation(6, changed=[facts(number, **values)])
    return standing_of(found, bookie(number, instance), NOW)


def holds(*arguments: object, needed: int = 0, **values: object) -> list[HoldReason]:
    found = situation(6, **values)  # type: ignore[arg-type]
    return [each.reason for each in holds_of(CLUSTER, found, NOW, {StorageHint.SSD: needed})]


def test_a_registered_bookie_is_what_its_state_says() -> None:
    assert standing() == (Status.LIVE, True, None, 0, False)
    assert standing(read_only=True).status is Status.READ_ONLY
    assert standing(in_limbo=3).status is Status.IN_LIMBO
    assert standing(state=BookieState.MAINTENANCE, until_ns=NOW + 1).status is Status.MAINTENANCE
    assert standing(state=BookieState.MAINTENANCE, until_ns=NOW).status is Status.LIVE
    draining = standing(state=BookieState.DRAINING, state_since_ns=7)
    assert draining == (Status.DRAINING, True, RepairReason.DRAINING, 7, False)


def test_an_absent_bookie_is_lost_after_the_grace() -> None:
    found = situation(6, absent={0: GRACE_NS - 1, 1: GRACE_NS, 2: 29 * SECOND_NS, 3: 30 * SECOND_NS})
    assert [standing_of(found, bookie(each), NOW).status.value for each in range(4)] == [
        "absent",
        "lost",
        "absent",
        "absent",
    ]
    assert [standing_of(found, bookie(each), NOW).urgent for each in range(4)] == [True, True, False, True]
    assert [standing_of(found, bookie(each), NOW).gone for each in range(2)] == [False, True]


def test_maintenance_lengthens_the_grace() -> None:
    changed = [facts(0, state=BookieState.MAINTENANCE, until_ns=NOW + 1)]
    found = standing_of(situation(6, absent={0: GRACE_NS}, changed=changed), bookie(0), NOW)
    assert (found.status, found.sound, found.gone) == (Status.MAINTENANCE, False, False)
    assert standing_of(situation(6, absent={0: GRACE_NS}, changed=changed), bookie(0), NOW + 1).status is Status.LOST


def test_an_instance_that_was_replaced_never_comes_back() -> None:
    assert standing(0, instance=1).status is Status.REMOVED
    assert standing(0, instance=1).gone
    removed = situation(6, absent={0: 1}, changed=[facts(0, state=BookieState.REMOVED)])
    assert standing_of(removed, bookie(0), NOW).gone


def test_a_bookie_that_was_never_heard_of_has_a_grace() -> None:
    assert standing_of(situation(2), bookie(7), NOW).status is Status.ABSENT


def test_a_flapping_bookie_is_no_steady_target_for_half_an_hour() -> None:
    found = situation(6)
    found.absences[bookie(0)] = (NOW - 3599 * SECOND_NS, NOW - 3000 * SECOND_NS, NOW - 1799 * SECOND_NS)
    assert standing_of(found, bookie(0), NOW).status is Status.FLAPPING
    assert [each.bookie for each in targets_of(found, NOW) if not each.steady] == [bookie(0)]
    assert standing_of(found, bookie(0), NOW + SECOND_NS).status is Status.LIVE
    assert all(each.steady for each in targets_of(found, NOW + SECOND_NS))


def test_space_of_flapping_bookies_does_not_end_a_hold() -> None:
    found = situation(6)
    found.absences = {bookie(each): (NOW - 3, NOW - 2, NOW - 1) for each in range(3)}
    assert [each.reason for each in holds_of(CLUSTER, found, NOW, {StorageHint.SSD: 4 * GIB})] == [
        HoldReason.LITTLE_SPACE
    ]


def test_targets_have_space_below_the_line() -> None:
    full = {StorageHint.SSD: Space(14, 100)}
    found = situation(3, changed=[facts(0, tiers=full), facts(1, tiers={StorageHint.SSD: Space(50)})])
    targets = {each.bookie.bookie_id: each for each in targets_of(found, NOW)}
    assert sorted(targets) == ["b1", "b2"]
    assert targets["b1"].takes(StorageHint.SSD, 50)
    assert not targets["b1"].takes(StorageHint.SSD, 51)
    assert targets["b2"].bytes_for(StorageHint.HDD) == int(2 * GIB * 0.85) - GIB


def test_one_absent_bookie_holds_nothing() -> None:
    assert holds(absent={0: 1}) == []
    assert holds(absent={0: 2 * GRACE_NS}) == []


def test_few_registered_members_hold_repairs() -> None:
    assert HoldReason.FEW_REGISTERED in holds(absent={0: 1, 1: 1})
    assert HoldReason.FEW_REGISTERED not in holds(absent={0: 1, 1: 1}, repair=RepairSettings(hold_below=0.6))
    assert holds(absent={0: 1, 1: 1}, repair=RepairSettings(accepted_losses=("b0", "b1"))) == []


def test_an_absent_zone_holds_repairs_and_a_zone_of_one_does_not() -> None:
    loose = RepairSettings(hold_below=0.0)
    assert holds(absent={0: 1, 3: 1}, repair=loose) == [HoldReason.ZONE_ABSENT]
    alone = [facts(3, location="zone1/rack")]
    assert holds(absent={0: 1}, repair=loose, changed=alone) == []
    racks = [facts(each, location=f"zone0/rack{each // 2}") for each in range(6)]
    assert holds(absent={0: 1, 1: 1}, repair=loose, changed=racks) == [HoldReason.RACK_ABSENT]
    same = [facts(each, location="zone0/rack") for each in range(6)]
    assert holds(absent=dict.fromkeys(range(6), 1), repair=loose, changed=same) == []


def test_losses_within_one_grace_hold_repairs() -> None:
    loose = RepairSettings(hold_below=0.0)
    assert holds(absent={0: 3 * GRACE_NS, 1: 2 * GRACE_NS}, repair=loose) == [HoldReason.MANY_LOST]
    assert holds(absent={0: 3 * GRACE_NS + 1, 1: 2 * GRACE_NS}, repair=loose) == []


def test_a_lost_bookie_without_ledgers_counts_no_more() -> None:
    found = situation(8, absent={6: 3 * GRACE_NS, 7: 3 * GRACE_NS, 0: GRACE_NS})
    assert holds_of(CLUSTER, found, NOW, {}) == ()


def test_an_unknown_state_holds_even_urgent_repairs() -> None:
    found = situation(6, absent={0: 1})
    found.store_since_ns = NOW - 29 * SECOND_NS
    assert [each.reason for each in holds_of(CLUSTER, found, NOW, {})] == [HoldReason.SESSION_YOUNG]
    found.store_since_ns = None
    (hold,) = holds_of(CLUSTER, found, NOW, {})
    assert (hold.reason, hold.reason.blind) == (HoldReason.STORE_UNREACHABLE, True)


def test_a_young_session_holds_nothing_once_all_bookies_are_registered() -> None:
    found = situation(6)
    found.store_since_ns = NOW
    assert holds_of(CLUSTER, found, NOW, {}) == ()
    gone = situation(6, absent={5: 1}, changed=[facts(5, state=BookieState.DRAINED)])
    gone.store_since_ns = NOW
    assert holds_of(CLUSTER, gone, NOW, {}) == (), "a bookie that was drained need not run"


def test_open_ledgers_need_bookies() -> None:
    cluster = mapped(ledger(1, (0, range(6)), last=None))
    found = situation(6, absent={0: GRACE_NS})
    assert [each.reason for each in holds_of(cluster, found, NOW, {})] == [HoldReason.FEW_WRITABLE]


def test_copies_must_fit() -> None:
    assert holds(needed=6 * GIB) == [HoldReason.LITTLE_SPACE]
    assert holds(needed=4 * GIB) == []


@pytest.mark.parametrize("reason", HoldReason)
def test_each_hold_has_a_text(reason: HoldReason) -> None:
    assert HOLD_TEXTS[reason]
