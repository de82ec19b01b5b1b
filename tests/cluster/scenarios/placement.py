"""Scenarios 25 and 27: a zone is down while ledgers are made, and members of two versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pybk import NotEnoughBookiesError
from tests.cluster.child import PASSWORD
from tests.cluster.scenarios.catalog import scenario
from tests.cluster.scenarios.stage import SHAPE, Figures, Stage, stage
from tests.internals import cluster_backend_of
from tests.paths import ROOT
from tests.storage.real_store import python_path


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


@scenario(27, "members of two versions")
def scenario_27_levels(directory: Path) -> Figures:
    command = [sys.executable, "-m", "pytest", "-q", "tests/cluster/test_levels.py", f"--basetemp={directory}/pytest"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path()}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return {"tests/cluster/test_levels.py": done.stdout.strip().splitlines()[-1]}
