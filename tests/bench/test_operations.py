"""The figures of a cluster that is watched are measured, and printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.operations import watching
from bench.operations.__main__ import main


@pytest.mark.long
def test_a_watched_cluster_is_measured(tmp_path: Path) -> None:
    found = watching.measure(tmp_path, 1, 0.5)
    assert not found.failed
    assert set(found.answered) == {"probes", "scrapes", "page"}
    assert len(found.ratios) == len(found.p50_ratios) == len(found.alone_ms) == 1
    assert found.ratios[0] > 0
    assert found.bystander_ratios[0] > 0


@pytest.mark.long
def test_a_page_of_a_large_cluster_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["page", "--quick", "--directory", str(tmp_path)]) == 0
    assert "1000 of 2000 ledgers" in capsys.readouterr().out
