"""The figures of repairs are measured, and printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.healing import planning
from bench.healing.__main__ import main


@pytest.mark.long
def test_a_fresh_process_plans_for_the_loss_of_a_bookie() -> None:
    found = planning.measured(200, 0.1)
    assert found["ledgers"] == 200
    assert 0 < found["tasks"] < 60, "one bookie of fifty has three of fifty copies"
    assert found["plan_s"] > 0
    assert found["reading_s"] > 0
    assert found["growth_mib"] >= found["own_mib"] > 0
    assert 0 <= found["rest_percent"] < 100


def test_unknown_figures_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["speed", "--directory", str(tmp_path)])
    assert "there is no speed; there are loss, plan, audit, idle" in capsys.readouterr().err
