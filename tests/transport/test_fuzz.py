"""The short form of ``python -m tests.transport.fuzz``."""

from __future__ import annotations

from pathlib import Path

from tests.transport.fuzz import run


def test_bookies_survive_a_member_that_says_anything(tmp_path: Path) -> None:
    assert run(tmp_path, seed=1, seconds=30.0, steps=300)["acknowledged to the writer"] > 0
