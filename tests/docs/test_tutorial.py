"""The sittings of the tutorial but that of Spark: each step runs as it is printed, and prints what the page shows."""

from __future__ import annotations

import codeop
from pathlib import Path

import pytest

from tests.docs.walkthrough import blocks_of, walk


@pytest.mark.sampled(one_in=6, group="documents")
@pytest.mark.parametrize("page", ["event_log.md", "database.md"])
def test_each_step_of_a_sitting_runs_as_printed(page: str, tmp_path: Path) -> None:
    walk(f"tutorial/{page}", tmp_path, files=("tutorial/access.log",))


def test_the_pieces_of_the_sitting_in_spark_can_be_pasted_into_python() -> None:
    """Up to Python 3.12 a compound statement ends with an empty line there, whatever follows."""
    for block in blocks_of("tutorial/spark.md"):
        pending: list[str] = []
        for line in [*block.text.splitlines(), ""] if block.kind == "python" else ():
            pending.append(line)
            if not any(pending) or codeop.compile_command("\n".join(pending), symbol="single"):
                pending.clear()
        assert not pending, "\n".join(pending)
