"""What the disk may forget is forgotten, at many points of recorded runs; nothing acknowledged is.

``python -m tests.loss`` cuts more, and leaves out the syncs of every call site.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

import pytest

from tests.loss.campaign import Run, room
from tests.loss.recording import why_not
from tests.loss.workloads.every import WORKLOADS

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"nothing can be recorded: {why_not()}")

_CUTS: Final = 25
_CUTS_WITHOUT: Final = 60


@pytest.fixture(scope="module")
def space() -> Iterator[Path]:
    with room() as path:
        yield path


@pytest.fixture(scope="module")
def creation(space: Path) -> Run:
    return Run.of("creation", 1, space)


def needed(run: Run, system_call: str, *lines: str) -> bool:
    """Return whether a cut shows that the one call site with these lines is needed."""
    [call] = [each for each in run.syncs if each.startswith(system_call) and all(line in each for line in lines)]
    return run.failure_without(call, Random(1), _CUTS_WITHOUT) is not None


@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_acknowledged_is_lost_when_the_power_is_cut(name: str) -> None:
    with room() as path:
        run = Run.of(name, 1, path)
        assert not list(run.failures(run.random_cuts(Random(1), _CUTS)))


def test_the_sync_of_an_append_is_needed(creation: Run) -> None:
    assert needed(creation, "write", "commit_writer.py")


def test_the_sync_of_a_new_lmdb_file_is_needed(creation: Run) -> None:
    assert needed(creation, "fdatasync", "lmdb_environment.py", " __init__", "open_environment")


def test_the_name_of_a_new_lmdb_file_is_needed(creation: Run) -> None:
    [call, _] = [each for each in creation.syncs if "sync_directory" in each and "open_environment" in each]
    assert creation.failure_without(call, Random(1), _CUTS_WITHOUT) is not None
