"""The short form of ``python -m tests.transport.fuzz``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sampling import all_are_tried
from tests.transport.fuzz import run


@pytest.mark.sampled
def test_bookies_survive_a_member_that_says_anything(tmp_path: Path) -> None:
    steps = 300 if all_are_tried() else 120
    assert run(tmp_path, seed=1, seconds=30.0, steps=steps)["acknowledged to the writer"] > 0
