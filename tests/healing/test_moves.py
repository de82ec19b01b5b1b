"""Real bookies whose copies move when a person asks for it: to emptier bookies, or to more zones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pybk import (
    ClusterAdmin,
    LedgerManager,
    OrphanReplicas,
    OrphanReport,
    PlacementSettings,
    RepairReason,
    RepairState,
    SafetyCheckError,
)
from pybk.admin.cli import main
from pybk.bookie.keeper import Keeper
from pybk.healing import chores, repair_worker
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.registration import BookieRegistration
from tests.cluster.inside import SECRET, Inside, inside
from tests.healing.quick import repair_quickly
from tests.internals import metadata_of, service_of
from tests.waiting import wait_until

CAPACITY = 100_000
ENTRIES = 10
LEDGERS = 60


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have repairs look often."""
    repair_quickly(monkeypatch)
    monkeypatch.setattr(chores, "LOOK_S", 0.2)


def make(client: LedgerManager) -> None:
    """Make a closed ledger on three bookies."""
    with client.create_ledger(password=b"p", ensemble_size=3, write_quorum=3, ack_quorum=2) as writer:
        writer.append_many([b"x" * 100] * ENTRIES)


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    """Three small bookies that repair themselves, and are 60 % full; a fourth one is empty."""
    look = Keeper.registration

    def small(keeper: Keeper) -> BookieRegistration:
        found = look(keeper)
        sizes = dict.fromkeys(found.tiers, CAPACITY)
        return replace(found, capacity=sizes, tiers={tier: size * 4 // 10 for tier, size in sizes.items()})

    monkeypatch.setattr(Keeper, "registration", small)
    quick(monkeypatch)
    with inside(tmp_path, count=3, autorecovery=True) as cluster:
        client = cluster.connect()
        for _ in range(LEDGERS):
            make(client)
        cluster.bookies.append(cluster.open_bookie(3))
        admin = ClusterAdmin(client)
        wait_until(lambda: admin.plan_rebalance().moves, "the auditor has looked at all bookies")
        yield cluster


def ensembles(client: LedgerManager) -> dict[int, tuple[Bookie, ...]]:
    return {each: client.ledger_metadata(each).fragments[0].ensemble for each in client.list_ledgers()}


def check_whole(cluster: Inside, client: LedgerManager) -> None:
    """Check that each bookie has all entries of each ledger that names it."""
    replicas = {service_of(manager).bookie: service_of(manager).replicas for manager in cluster.bookies}
    for ledger_id, ensemble in ensembles(client).items():
        assert [replicas[bookie].count_entries(ledger_id) for bookie in ensemble] == [ENTRIES] * 3


def held(cluster: Inside) -> list[int]:
    """Return how many ledgers each bookie has entries of."""
    found = [service_of(manager).replicas for manager in cluster.bookies]
    return [sum(replicas.count_entries(each) > 0 for each in range(LEDGERS)) for replicas in found]


def ended(cluster: Inside, admin: ClusterAdmin, client: LedgerManager) -> Callable[[], bool]:
    """Return whether a rebalance is over, and check that no ledger is short meanwhile."""

    def look() -> bool:
        check_whole(cluster, client)
        return not admin.rebalance_progress().moves_left

    return look


@pytest.mark.long
def test_an_empty_bookie_is_filled_by_small_plans(three: Inside) -> None:
    client = three.connect()
    admin = ClusterAdmin(client)
    admin.change_settings(lambda found: replace(found, repair=replace(found.repair, surplus_delay_s=1.0)))
    plans = 0
    while (plan := admin.plan_rebalance()).moves:
        assert not plan.refused
        assert plan.moved_bytes <= 0.05 * plan.all_bytes
        before = ensembles(client)
        assert admin.apply_rebalance(plan).moves == len(plan.moves)
        wait_until(ended(three, admin, client))
        changed = {each: ensemble for each, ensemble in ensembles(client).items() if ensemble != before[each]}
        assert changed.keys() == {move.ledger_id for move in plan.moves}, "nothing moves by itself"
        plans += 1
    assert plan.level, str(plan)
    assert plans >= 4
    assert all(abs(each.after - 45_000) <= 10_000 for each in plan.fullness if each.before)
    placed = [sum(service_of(each).bookie in them for them in ensembles(client).values()) for each in three.bookies]
    wait_until(lambda: held(three) == placed)
    check_whole(three, client)


def test_a_rebalance_is_aborted_at_any_moment(three: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_worker, "BATCH", 1)
    client = three.connect()
    admin = ClusterAdmin(client)
    plan = admin.plan_rebalance()
    metadata = metadata_of(client)
    stale = plan.moves[3].ledger_id
    stored = metadata.read_ledger(stale)
    metadata.write_ledger(replace(stored.metadata, version=stored.metadata.version + 1), stored.version)
    began = admin.apply_rebalance(plan)
    assert (began.moves, began.skipped) == (len(plan.moves) - 1, 1)
    wait_until(lambda: admin.rebalance_progress().moves_left < began.moves)
    left = admin.abort_rebalance()
    assert (admin.rebalance_progress().moves_left, admin.abort_rebalance()) == (0, 0)
    third = service_of(three.bookies[3]).bookie
    moved = sum(third in ensemble for ensemble in ensembles(client).values())
    assert 0 < moved <= began.moves
    assert moved + left >= began.moves
    check_whole(three, client)
    assert not admin.plan_rebalance().refused, "nothing is left of it"


def test_moves_wait_while_repairs_are_held_and_for_their_target(three: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    client = three.connect()
    admin = ClusterAdmin(client)
    plan = admin.plan_rebalance()
    quiet: list[bool] = []
    monkeypatch.setattr(ClusterMetadata, "is_quiet", lambda *_: bool(quiet))
    admin.apply_rebalance(plan)
    progress = admin.rebalance_progress()
    assert (progress.moves_left, progress.bytes_left) == (len(plan.moves), plan.moved_bytes)
    refused = admin.plan_rebalance().refused
    assert refused == (
        f"a rebalance is under way, of which {len(plan.moves)} moves are left: wait for them, or abort it",
    )
    with pytest.raises(SafetyCheckError, match="a rebalance is under way"):
        admin.apply_rebalance(plan)
    three.bookies[3].close()
    wait_until(lambda: admin.rebalance_progress().absent_targets == ("bookie-3",))
    leader = wait_until(lambda: admin.status().auditor)
    if leader != "bookie-3":
        place = int(leader[-1])
        three.bookies[place].close()
        three.bookies[place] = three.open_bookie(place)
    wait_until(lambda: admin.status().auditor not in ("", leader), "another auditor leads")
    marks = list(metadata_of(client).marks())
    assert [mark.target for mark in marks] == ["bookie-3"] * len(plan.moves), "the next auditor keeps them"
    wait_until(lambda: admin.status().auditor and not admin.status().short, "no ledger is short because of them")
    assert all(third.bookie_id != "bookie-3" for them in ensembles(client).values() for third in them)
    three.bookies[3] = three.open_bookie(3)
    quiet.append(True)
    wait_until(ended(three, admin, client))
    assert all(mark.reason is RepairReason.REBALANCE for mark in marks)


def test_misplaced_ledgers_are_counted_and_moved_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    with inside(tmp_path, count=0, autorecovery=True) as cluster:
        zones = ["a", "b", "a", "b"]
        cluster.bookies += [cluster.open_bookie(place, rack=zone) for place, zone in enumerate(zones)]
        client = cluster.connect()
        admin = ClusterAdmin(client)
        admin.change_settings(lambda found: replace(found, placement=PlacementSettings(min_zones=3)))
        wait_until(lambda: metadata_of(client).current_settings().placement.min_zones == 3)
        for _ in range(10):
            make(client)
        before = ensembles(client)
        wait_until(lambda: admin.status().misplaced == 10)
        assert any("placement.repair has them moved" in reason.text for reason in admin.status().reasons)

        admin.change_settings(lambda found: replace(found, placement=PlacementSettings(min_zones=3, repair=True)))
        metadata = metadata_of(client)
        wait_until(
            lambda: (
                len(found := list(metadata.marks())) == 10 and {each.state for each in found} == {RepairState.NO_TARGET}
            )
        )
        assert (ensembles(client), admin.status().misplaced) == (before, 10), "a move within two zones is of no use"

        cluster.bookies.append(cluster.open_bookie(4, rack="c"))
        wait_until(lambda: admin.status().misplaced == 0 and not list(metadata.marks()))
        there = {service_of(manager).bookie: zone for manager, zone in zip(cluster.bookies, [*zones, "c"], strict=True)}
        for ledger_id, ensemble in ensembles(client).items():
            assert {there[bookie] for bookie in ensemble} == {"a", "b", "c"}
            assert len(set(ensemble) - set(before[ledger_id])) == 1
        check_whole(cluster, client)


def test_orphans_are_found_and_not_deleted(
    three: Inside, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    client = three.connect()
    admin = ClusterAdmin(client)
    admin.change_settings(lambda found: replace(found, repair=replace(found.repair, surplus_delay_s=0.5)))
    metadata = metadata_of(client)
    assert admin.orphans() == OrphanReport()
    forgotten = client.create_ledger(insecure=True)
    stored = metadata.read_ledger(forgotten.ledger_id)
    metadata.write_ledger(replace(stored.metadata, creation_time_ns=1), stored.version)
    holder = service_of(three.bookies[0])
    holder.replicas.fence(10**6, None)
    found = wait_until(lambda: admin.orphans().replicas, "the bookie has looked at its ledgers")
    assert found == (OrphanReplicas(holder.bookie, 1, (10**6,)),)
    assert holder.replicas.state(10**6) is not None, "it stays"
    assert admin.orphans().long_open == (forgotten.ledger_id,)
    assert main(["cluster", "orphans", three.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replicas"] == [{"bookie": "bookie-0", "count": 1, "ledgers": [10**6]}]


def test_the_command_plans_and_applies(
    three: Inside, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())

    def run(*options: str) -> tuple[int, str]:
        return main(["cluster", "rebalance", three.url, *options]), capsys.readouterr().out

    status, out = run()
    assert (status, "9 copies move, 9000 of 180000 bytes (5.0%)" in out, "with both" in out) == (0, True, True)
    assert run("--status") == (0, "0 moves left, 0 B\n"), "a plan begins nothing"
    status, out = run("--apply", "--json")
    assert (status, json.loads(out)["began"], json.loads(out)["skipped"]) == (0, 9, 0)
    assert {each["to"] for each in json.loads(out)["moves"]} == {"bookie-3"}
    wait_until(lambda: json.loads(run("--status", "--json")[1])["moves_left"] == 0)
    assert run("--abort") == (0, "0 moves will not be made\n")
    ClusterAdmin(three.connect()).pause_repair(60, "ann")
    assert run("--apply")[0] == 3
