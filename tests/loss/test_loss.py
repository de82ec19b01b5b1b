"""What the disk may forget is forgotten, at many points of recorded runs; nothing acknowledged is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

import pytest

from tests.loss.campaign import Run, room
from tests.loss.recording import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"nothing can be recorded: {why_not()}")

_CUTS: Final = 60


@pytest.fixture(scope="module")
def space() -> Iterator[Path]:
    with room() as path:
        yield path


@pytest.fixture(scope="module")
def creation(space: Path) -> Run:
    return Run("creation", 1, space)


def test_a_new_store_survives_a_loss_of_power_at_any_point(creation: Run) -> None:
    assert not list(creation.failures(creation.random_cuts(Random(1), _CUTS)))


def test_each_sync_of_an_append_is_needed(creation: Run) -> None:
    [call] = [call for call in creation.syncs if "commit_writer.py" in call]
    assert creation.failure_without(call, Random(1), _CUTS) is not None


def test_the_sync_of_a_new_lmdb_file_is_needed(creation: Run) -> None:
    [call] = [
        call
        for call in creation.syncs
        if call.startswith("fdatasync") and "open_environment" in call and "commit" not in call
    ]
    assert creation.failure_without(call, Random(1), _CUTS) is not None
