"""What a run of the tests tries of what could be tried: a sample that the commit draws, or more of it.

Tests that repeat one rule over many seeds, places, kinds or mutants are marked ``sampled``. A run tries some of their
cases, which ``SEED`` draws: the same ones in each process and each time for one commit, others for the next commit, so
that all of them are tried in time. So are tests of a file that use a fixture that takes long, such as a cluster of
processes, and tests of several files that each take long. ``make test-long`` tries all of them, and
``PYBK_ALL_FAULTS=1`` many more, which takes hours.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

import pytest

from tests.paths import ROOT

ALL: Final = bool(os.environ.get("PYBK_ALL_FAULTS"))

VARIABLE: Final = "PYBK_TEST_SEED"
"""The environment's variable that draws a sample instead of the commit; ``EVERYTHING`` is the sample of all cases."""
EVERYTHING: Final = "all"
NO_COMMIT: Final = "0"
"""The seed where the tests are no commit of Git, as in a source distribution."""

Place = TypeVar("Place")


def _of_commit() -> str:
    """Return the first digits of the hash of the commit that is checked out, with changes or without."""
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return NO_COMMIT
    return found.stdout[:12]


SEED: Final = os.environ.get(VARIABLE) or _of_commit()
os.environ[VARIABLE] = SEED  # for pytest's workers, whatever is committed meanwhile


def all_are_tried() -> bool:
    """Return whether this run tries all cases, so that what they come to together can be judged."""
    return ALL or SEED == EVERYTHING


def chosen(seed: str, group: str, places: Sequence[Place], one_in: int) -> list[Place]:
    """Return one in so many of a group's places, but at least one, in their order."""
    if ALL or seed == EVERYTHING:
        return list(places)

    def rank(number: int) -> bytes:
        return hashlib.sha256(f"{seed} {group} {places[number]}".encode()).digest()

    numbers = sorted(range(len(places)), key=rank)[: -(-len(places) // one_in)]
    return [places[number] for number in sorted(numbers)]


def sample(group: str, places: Sequence[Place], one_in: int) -> list[Place]:
    """Return the places of a group that this run tries."""
    return chosen(SEED, group, places, one_in)


def places(group: str, step: int, one_in: int) -> Iterator[int]:
    """Yield places without an end: the first one, and one in so many of those that ``every(step)`` reaches."""
    yield 0
    for block in count():
        numbers = range(block * one_in + 1, block * one_in + one_in + 1)
        for number in numbers if all_are_tried() else sample(group, numbers, one_in):
            yield number * every(step)


def every(step: int) -> int:
    """Return the distance from one place that is tried to the next: ``step``, or 1 for all of them."""
    return 1 if ALL else step


def some(few: int, many: int) -> int:
    """Return how many are tried: ``few``, or ``many``."""
    return many if ALL else few


def bits_of(offset: int) -> Iterable[int]:
    """Return which bits of the byte at an offset are flipped: two, others in the next byte, or all."""
    return range(8) if ALL else (offset % 8, (offset + 3) % 8)


def _names(argument: str, item: pytest.Item) -> bool:
    """Return whether an argument of the command line names a test, or one of its cases."""
    path, _, name = argument.partition("::")
    own = item.nodeid.partition("::")[2]
    if not name or not (own == name or own.startswith((f"{name}[", f"{name}::"))):
        return False
    return (item.config.invocation_params.dir / path).resolve() == Path(item.path)


def _group(item: pytest.Item, marker: pytest.Mark) -> str:
    """Return what a case is drawn from.

    That are the cases of its test; or, if the marker names a parameter, those that differ in this one alone; or, if it
    names a fixture, the tests of its file that use it; or, if it names a group, the tests of all files that name it.
    """
    if "group" in marker.kwargs:
        return str(marker.kwargs["group"])
    test, _, case = item.nodeid.partition("[")
    among = marker.kwargs.get("among")
    if "using" in marker.kwargs:
        return test.partition("::")[0]
    if not among:
        return test
    parts = case.removesuffix("]").split("-")
    parts.remove(str(getattr(item, "callspec").params[among]))  # noqa: B009  # only functions have one
    return f"{test}[{'-'.join(parts)}]"


def drawn(items: Sequence[pytest.Item], seed: str, arguments: Sequence[str]) -> list[pytest.Item]:
    """Return the tests without the cases that a seed leaves out; none is left out that an argument names."""
    groups: dict[tuple[str, int], list[str]] = {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker and marker.kwargs.get("using") in (None, *getattr(item, "fixturenames", ())):
            one_in = marker.kwargs.get("one_in", 1)
            groups.setdefault((_group(item, marker), one_in), []).append(item.nodeid)
    left_out: set[str] = set()
    for (group, one_in), names in groups.items():
        left_out.update(set(names) - set(chosen(seed, group, names, one_in)))
    named = [argument for argument in arguments if "::" in argument]
    return [item for item in items if item.nodeid not in left_out or any(_names(each, item) for each in named)]
