"""Some of the scenarios that ``python -m tests.cluster.scenarios`` runs, with few ledgers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.scenarios import stage
from tests.cluster.scenarios.absence import scenario_04_three_of_five


@pytest.fixture(autouse=True)
def few_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "LEDGERS", 24)


def test_scenario_04_three_of_five_bookies_die(tmp_path: Path) -> None:
    assert scenario_04_three_of_five(tmp_path)["ledgers with one copy"]
