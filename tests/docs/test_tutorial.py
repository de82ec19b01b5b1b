"""The sittings of the tutorial but that of Spark: each step runs as it is printed, and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.walkthrough import walk


@pytest.mark.parametrize("page", ["event_log.md", "database.md"])
def test_each_step_of_a_sitting_runs_as_printed(page: str, tmp_path: Path) -> None:
    walk(f"tutorial/{page}", tmp_path, files=("tutorial/access.log",))
