"""The checks before bookies are drained or stopped, of clusters that are only described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pybk.admin.cli.check_verb import CHECKS
from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata
from pybk.metadata.registration import BookieState
from pybk.metadata.settings import ClusterSettings
from pybk.metadata.underreplication import RepairReason, UnderReplicatedLedger
from pybk.operations.cluster_checks import (
    SPACE_FACTOR,
    BookieStatus,
    ClusterVerdict,
    Copies,
    DeviceSpace,
    StopCheck,
    bytes_on,
    drain_failures,
    short_by_copies,
    space_by_tiers,
    status_with_report,
    stop_check,
)
from pybk.replication.locations import PlacementPolicy
from pybk.values import FrozenDict
from tests.healing.clusters import bookie, ledger, mapped


def running(zones: str) -> list[BookieStatus]:
    """Return bookies that run, one in each of some zones; "-" for one whose zone is not known."""
    return [
        BookieStatus(
            bookie=bookie(number),
            state=BookieState.ACTIVE,
            registered=True,
            location="" if zone == "-" else f"{zone}/rack/host{number}",
        )
        for number, zone in enumerate(zones)
    ]


@pytest.mark.parametrize(
    ("last", "running_ones", "reasons", "fewest"),
    [
        (None, (0, 1, 2), ("missed", "missed", "missed"), 2),
        (None, (0, 2), ("missed", "missed", "missed"), 1),
        (None, (0, 1, 2), ("missed", "missing", "missed"), 1),
        (None, (0, 1, 2), ("damaged", "missing", "missed"), 0),
        (None, (0, 1, 2), ("missing", "missing", "missing"), 0),
        (9, (0, 1, 2), ("missed", "missed", "missed"), 0),
    ],
)
def test_a_ledger_without_an_end_has_the_copies_of_what_was_acknowledged(
    last: int | None, running_ones: tuple[int, ...], reasons: tuple[str, ...], fewest: int
) -> None:
    marks = [UnderReplicatedLedger(7, bookie(number), 1, RepairReason(reason)) for number, reason in enumerate(reasons)]
    cluster = mapped(ledger(7, (0, (0, 1, 2)), quorum=(3, 2), last=last))
    copies = Copies(cluster, {bookie(number) for number in running_ones}, marks)
    assert copies.fewest(7) == fewest
    assert short_by_copies(copies, [7]) == {str(fewest): 1}


@pytest.mark.parametrize(
    ("ack_quorum", "numbers", "causes", "fewest"),
    [
        (2, (0, 1, 2), {"missing": 0}, 0),
        (2, (0, 1, 2), {"missing": 0, "missed": 1}, 0),
        (2, (0, 1, 2), {"damaged": 0, "missed": 1}, 0),
        (2, (0, 1, 2), {"lost": 0, "missed": 1}, 2),
        (3, (0,), {"missing": 0}, 2),
        (3, (0,), {"missing": 0, "missed": 1}, 2),
    ],
)
def test_what_a_bookie_may_have_acknowledged_and_lost_does_not_count(
    ack_quorum: int, numbers: tuple[int, ...], causes: dict[str, int], fewest: int
) -> None:
    """The bookies mark themselves when they are in limbo, and a rebuild of the metadata marks those that lack entries.

    A writer or a recovery may have reported the same bookies.
    """
    found = {RepairReason(reason): first for reason, first in causes.items()}
    marks = [UnderReplicatedLedger(7, bookie(number), 0).with_causes(found) for number in numbers]
    copies = Copies(
        mapped(ledger(7, (0, (0, 1, 2)), quorum=(3, ack_quorum), last=None)), set(map(bookie, range(3))), marks
    )
    assert copies.fewest(7) == fewest


@pytest.mark.parametrize(
    ("zones", "strict", "ok"),
    [
        ("ababb", False, True),
        ("ababb", True, False),
        ("ababa", True, True),
        ("aba-b", False, True),
        ("aba-b", True, False),
        ("abc-d", True, False),
    ],
)
def test_a_strict_policy_may_keep_a_writer_from_replacing_bookies(zones: str, *, strict: bool, ok: bool) -> None:
    """Bookies 0 and 2 are stopped. Those that are left are as many as an ensemble has."""
    cluster = mapped(ledger(7, (0, (0, 1, 2)), quorum=(3, 2), last=None))
    found = stop_check(
        cluster, running(zones), {bookie(0), bookie(2)}, (), lambda _: True, policy=PlacementPolicy(2, strict)
    )
    assert found.ok == ok


def test_with_a_strict_policy_and_several_write_sets_enough_zones_do_not_suffice() -> None:
    """Only one of the two places can be filled, as one bookie is in zone a, and both are between bookies of zone b."""
    cluster = mapped(ledger(7, (0, (0, 1, 2, 3)), quorum=(2, 2), last=None))
    bookies, stopped = running("ababbba"), {bookie(0), bookie(2)}
    assert not stop_check(cluster, bookies, stopped, (), lambda _: True, policy=PlacementPolicy(2, strict=True)).ok
    assert stop_check(cluster, bookies, stopped, (), lambda _: True, policy=PlacementPolicy(2, strict=False)).ok
    assert stop_check(cluster, bookies, stopped, (), lambda _: True, policy=PlacementPolicy(1, strict=True)).ok


@pytest.mark.parametrize(("used", "spare", "refused"), [(0.84, 0, False), (0.86, 0, True), (0.84, -1, True)])
def test_a_drain_counts_the_space_up_to_the_line_above_which_bookies_get_no_copies(
    used: float, spare: int, *, refused: bool
) -> None:
    cluster = mapped(ledger(7, (0, (0, 1, 2))))
    ((tier, size),) = bytes_on(cluster, bookie(0)).items()
    total = int(size * SPACE_FACTOR / 3) * 100 + 100  # three bookies take a hundredth of their bytes each
    bookies = [
        replace(
            each,
            free_bytes=FrozenDict({tier: int(total * (1 - used)) + spare * size}),
            capacity_bytes=FrozenDict({tier: total}),
        )
        for each in running("aaaa")
    ]
    failures = drain_failures(cluster, bookies, bookie(0), ClusterSettings())
    assert [each for each in failures if "before they are 85% full" in each] == list(failures)
    assert bool(failures) == refused


def test_the_bookies_of_a_ledger_are_asked_once_for_its_writer() -> None:
    cluster = mapped(ledger(7, (0, (0, 1, 2)), quorum=(2, 2), last=None))
    asked: list[int] = []

    def has_writer(ledger_id: int) -> bool:
        asked.append(ledger_id)
        return False

    assert stop_check(cluster, running("abc"), {bookie(0)}, (), has_writer).ok
    assert asked == [7]


def test_no_more_ledgers_are_asked_for_their_writers_than_are_listed() -> None:
    cluster = mapped(*(ledger(number, (0, (0, 1)), quorum=(2, 2), last=None) for number in range(50)))
    asked: list[int] = []

    def has_writer(ledger_id: int) -> bool:
        asked.append(ledger_id)
        return True

    found = stop_check(cluster, running("ab"), {bookie(0)}, (), has_writer)
    assert not found.ok
    assert (len(found.refusals), found.refusals[-1]) == (21, "30 more ledgers")
    assert asked == list(range(20))


def test_copies_of_a_bookie_that_has_yet_to_look_at_what_it_lost_do_not_count() -> None:
    """Bookie 1 has three ledgers in limbo, and has marked as many or fewer of them: those that are open."""
    cluster = mapped(ledger(7, (0, (0, 1))))
    marks = [UnderReplicatedLedger(each, bookie(1), 0, RepairReason.MISSING, token=b"1") for each in (1, 2, 3)]

    def check(number: int, count: int) -> StopCheck:
        return stop_check(
            cluster, running("abc"), {bookie(number)}, marks[:count], lambda _: True, in_limbo={bookie(1): 3}
        )

    found = check(0, 2)
    assert found.refusals == ("ledger 7, entries 0 to 99: no sound copy would be left",)
    assert "bookie b1@01000100 may have lost entries of 3 ledgers" in found.warnings[0]
    assert check(0, 3).ok
    assert check(1, 2).ok
    for reason in (RepairReason.DRAINING, RepairReason.MISSED):
        marks[2] = marks[2]._replace(reason=reason)
        assert not check(0, 3).ok, "one of the marks is not about what it lost"


def test_a_large_old_ledger_does_not_stand_for_those_to_come() -> None:
    large = ledger(1, (0, (0, 1, 2)))
    small = [ledger(number, (0, (0, 1))) for number in range(2, 22)]

    def check(*ledgers: LedgerMetadata) -> StopCheck:
        return stop_check(mapped(*ledgers), running("abc"), {bookie(0)}, (), lambda _: True)

    (warning,) = check(large, *small[1:]).warnings
    assert "2 writable bookies would be left, and ledgers have ensembles of 3" in warning
    assert check(large, *small).warnings == ()


@pytest.mark.parametrize(("age_s", "silent"), [(60, False), (61, True)])
def test_an_auditor_that_does_not_report_any_more_is_named(age_s: int, *, silent: bool) -> None:
    report = {"auditor": "bookie-1", "reported_ns": 10**9}
    status = status_with_report(report, running("abcd"), ClusterSettings(), (1 + age_s) * 10**9)
    found = [each.text for each in status.reasons if each.code == "auditor_silent"]
    assert found == (["the auditor, bookie-1, has not reported for 61 s: restart it"] if silent else [])
    assert status.verdict == (ClusterVerdict.WARN if silent else ClusterVerdict.OK)
    assert CHECKS["auditor"](status)[0] == (2 if silent else 0)


def on_devices(name: str, devices: Mapping[StorageHint, str]) -> BookieStatus:
    """Return a bookie with 3 of 10 bytes free on each device."""
    tiers = list(StorageHint)
    return BookieStatus(
        bookie=Bookie(name, bytes(8)),
        state=BookieState.ACTIVE,
        registered=True,
        free_bytes=dict.fromkeys(tiers, 3),
        capacity_bytes=dict.fromkeys(tiers, 10),
        devices=devices,
    )


def test_a_device_counts_once_whatever_has_it_in_common() -> None:
    one_disk = dict.fromkeys(StorageHint, "host:1")
    together = on_devices("a", one_disk), on_devices("b", one_disk)
    assert space_by_tiers(together) == {"hdd, nvme, ssd": DeviceSpace(3, 10, frozenset("ab"))}
    own = {tier: f"other:{number}" for number, tier in enumerate(StorageHint)}
    found = space_by_tiers([*together, on_devices("c", own)])
    assert found["nvme"] == DeviceSpace(3, 10, frozenset("c"))
    assert found.keys() == {"hdd, nvme, ssd", "hdd", "nvme", "ssd"}


def test_devices_of_several_tiers_count_once_if_one_tier_has_more_of_them() -> None:
    devices = {StorageHint.NVME: "host:1", StorageHint.SSD: "host:1+host:2", StorageHint.HDD: "host:3"}
    found = space_by_tiers([on_devices("a", devices), on_devices("b", {StorageHint.HDD: "host:2"})])
    own = DeviceSpace(3, 10, frozenset("b"))
    assert found == {
        "hdd, nvme, ssd": DeviceSpace(3, 10, frozenset("ab")),
        "hdd": DeviceSpace(3, 10, frozenset("a")),
        "nvme": own,
        "ssd": own,
    }


def test_bookies_that_register_no_devices_count_by_tier() -> None:
    found = space_by_tiers([on_devices("a", {}), on_devices("b", {})])
    assert found == {tier.value: DeviceSpace(6, 20, frozenset("ab")) for tier in StorageHint}
