"""Two of the scenarios that ``python -m tests.cluster.scenarios`` runs, with few ledgers.

What they take is the start of their processes, so there are few: the others have tests in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.scenarios import stage
from tests.cluster.scenarios.absence import scenario_04_three_of_five
from tests.cluster.scenarios.draining import scenario_18_stale


@pytest.fixture(autouse=True)
def few_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "LEDGERS", 24)


@pytest.mark.long
def test_scenario_04_three_of_five_bookies_die(tmp_path: Path) -> None:
    assert scenario_04_three_of_five(tmp_path)["ledgers with one copy"]


@pytest.mark.sampled(one_in=8, group="processes")
def test_scenario_18_a_writer_leaves_a_bookie_that_is_drained(tmp_path: Path) -> None:
    assert scenario_18_stale(tmp_path)["ensemble changes of each"] == 1
