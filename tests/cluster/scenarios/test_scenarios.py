"""Some of the scenarios that ``python -m tests.cluster.scenarios`` runs, with few ledgers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.scenarios import stage
from tests.cluster.scenarios.absence import scenario_04_three_of_five
from tests.cluster.scenarios.draining import REFUSED, scenario_16_refused, scenario_18_stale


@pytest.fixture(autouse=True)
def few_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "LEDGERS", 24)


def test_scenario_04_three_of_five_bookies_die(tmp_path: Path) -> None:
    assert scenario_04_three_of_five(tmp_path)["ledgers with one copy"]


def test_scenario_16_a_drain_that_the_others_cannot_take_is_refused(tmp_path: Path) -> None:
    assert scenario_16_refused(tmp_path)["exit status"] == REFUSED


def test_scenario_18_a_writer_leaves_a_bookie_that_is_drained(tmp_path: Path) -> None:
    assert scenario_18_stale(tmp_path)["ensemble changes of each"] == 1
