"""Scenarios 25 to 27: a zone is down while ledgers are made, an empty bookie is added, and members of two versions."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from pybk import NotEnoughBookiesError, RepairSettings
from tests.cluster.child import PASSWORD
from tests.cluster.scenarios.catalog import scenario
from tests.cluster.scenarios.draining import check_copies
from tests.cluster.scenarios.stage import SHAPE, Figures, Stage, stage
from tests.internals import cluster_backend_of
from tests.paths import ROOT
from tests.storage.real_store import python_path

CAPACITY: Final = 4_800_000
"""Bytes of each bookie's disk in scenario 26, which the copies fill by half or so."""


@scenario(25, "ledgers are made while a zone is down")
def scenario_25_zone_down(directory: Path) -> Figures:
    with stage(directory, ledgers=5, load=False, repair={"grace_s": 60.0}) as it:
        alone = "bookie-2"  # the only one of its zone
        assert [it.bookie(name).location.partition("/")[0] for name in it.cluster.bookies].count("zone2") == 1
        it.bookie(alone).kill()
        membership = cluster_backend_of(it.client).membership
        it.until(lambda: alone not in membership.bookies, "the client to notice")
        it.change_placement(min_zones=3, strict=True)
        with pytest.raises(NotEnoughBookiesError) as refused:
            it.client.create_ledger(password=PASSWORD, **SHAPE)
        text = str(refused.value)
        assert all(name in text for name in it.cluster.bookies if name != alone), text
        assert "zone0" in text, text
        assert "zone1" in text, text
        it.change_placement(strict=False)
        made = it.fill(10)
        assert _zones(it, made) == {2}
        it.change_placement(repair=True)
        it.bookie(alone).start()
        counted = it.until(
            lambda: _zones(it, made) == {3} or it.report()["reasons"].get("misplaced"), "misplaced ledgers"
        )
        moved = it.until(lambda: _zones(it, made) == {3}, "copies in all zones")
        it.until_whole()
        it.check()
        return {"refused": text, "counted after s": counted, "repaired after s": moved}


def _zones(it: Stage, ledgers: list[int]) -> set[int]:
    """Return in how many zones ledgers are."""
    zones = {each.name: each.location.partition("/")[0] for each in it.admin.bookies()}
    return {len({zones[name] for name in it.ensemble(ledger_id)}) for ledger_id in ledgers}


@scenario(26, "an empty bookie is filled by a rebalance")
def scenario_26_rebalance(directory: Path) -> Figures:
    options = ("--capacity", str(CAPACITY))
    with stage(directory, bookies=3, zones=0, ledgers=60, largest=4000, load=False, options=options) as it:
        it.cluster.add(1)
        it.until(lambda: it.admin.plan_rebalance().moves, "a plan for the empty bookie")
        it.reports()
        assert not it.copied(), "copies move by themselves"
        aborted = _abort(it)
        plans, moves, moved = 0, 0, []
        while (plan := it.admin.plan_rebalance()).moves:
            assert not plan.refused, plan.refused
            moved.append(plan.moved_bytes / plan.all_bytes)
            before = _ensembles(it)
            assert it.admin.apply_rebalance(plan).moves == len(plan.moves)
            it.until(partial(_is_over, it), "the end of the moves")
            changed = {ledger_id for ledger_id, ensemble in _ensembles(it).items() if ensemble != before[ledger_id]}
            assert changed == {move.ledger_id for move in plan.moves}
            plans, moves = plans + 1, moves + len(plan.moves)
        assert not plan.refused, plan.refused
        assert plan.level, str(plan)
        assert plans > 1
        assert max(moved) <= 0.05, moved
        tiers = [each for each in plan.fullness if each.before]
        level = sum(each.before for each in tiers) / sum(each.capacity for each in tiers)
        off = {each.bookie.bookie_id: round(each.parts[1] - level, 3) for each in tiers}
        assert off.keys() == it.cluster.bookies.keys()
        assert max(map(abs, off.values())) <= 0.1, off
        it.until_whole()
        it.check()
        return {"plans": plans, "moves": moves, "largest share moved": round(max(moved), 3), "off": off, **aborted}


def _abort(it: Stage) -> Figures:
    """Begin moves, abort them after the first, and check that nothing is short or moves on."""
    plan = it.admin.plan_rebalance()
    it.change(background_bytes_per_second=1 << 16)  # the moves of a plan take seconds
    it.admin.apply_rebalance(plan)
    it.until(it.copied, "the first move")
    left = it.admin.abort_rebalance()
    assert left > 0, "all moves were over before they were aborted"
    it.until(lambda: len(it.said("copied")) == len(it.said("copy")), "the end of the copies that were under way")
    before = _ensembles(it)
    it.reports()
    assert not it.admin.rebalance_progress().moves_left
    assert before == _ensembles(it), "copies move after the rebalance was aborted"
    check_copies(it)
    it.change(background_bytes_per_second=RepairSettings().background_bytes_per_second)
    return {"moves that were aborted": left, "of": len(plan.moves)}


def _is_over(it: Stage) -> bool:
    check_copies(it)
    return not it.admin.rebalance_progress().moves_left


def _ensembles(it: Stage) -> dict[int, list[str]]:
    return {ledger_id: it.ensemble(ledger_id) for ledger_id in it.closed}


@scenario(27, "members of two versions")
def scenario_27_levels(directory: Path) -> Figures:
    command = [sys.executable, "-m", "pytest", "-q", "tests/cluster/test_levels.py", f"--basetemp={directory}/pytest"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path()}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return {"tests/cluster/test_levels.py": done.stdout.strip().splitlines()[-1]}
