"""The sitting of the tutorial that is in Spark: its pieces run as they are printed, in one session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.walkthrough import paste
from tests.spark import clusters


@pytest.mark.long
def test_the_sitting_in_spark_runs_as_printed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    paste("tutorial/spark.md", work, ("tutorial/access.log",), **clusters.environment(tmp_path))
