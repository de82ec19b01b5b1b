"""A short run of what ``python -m tests.cluster.nemesis`` does for as long as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.nemesis import torment


@pytest.mark.long
def test_some_seconds_of_random_faults(tmp_path: Path) -> None:
    counts = torment(tmp_path, 4.0, seed=7, faults=5)
    assert counts["ledgers"] >= 2
    assert counts["acknowledged"] >= 100
    assert sum(count for what, count in counts.items() if what.startswith("bookies ")) >= 5
