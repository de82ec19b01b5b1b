"""What a run of the tests tries of what could be tried: a sample that the commit draws, or more of it.

Tests that repeat one rule over many seeds, places, kinds or mutants are marked ``sampled``. A run tries some of their
cases, which ``SEED`` draws: the same ones in each process and each time for one commit, others for the next commit, so
that all of them are tried in time. So are tests of a file that use a fixture that takes long, such as a cluster of
processes, and tests of several files that each take long. A test of a store and of a cluster is tried with one of them,
most times with the store, which takes a tenth of the time (``mostly``). ``make test-long`` tries all of them, and
``PYBK_ALL_FAULTS=1`` many more, which takes hours.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from tests.paths import ROOT

if TYPE_CHECKING:
    import pytest
    from _pytest.mark import ParameterSet

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


def chosen(seed: str, group: str, places: Sequence[Place], one_in: int, lots: Sequence[int] = ()) -> list[Place]:
    """Return one in so many of a group's places, but at least one, in their order.

    A place with several lots is drawn that many times as often as one that has a single lot, as each has without them.
    """
    if ALL or seed == EVERYTHING:
        return list(places)

    def rank(number: int) -> bytes:
        drawn = (f"{seed} {group} {places[number]}" + " " * lot for lot in range(lots[number] if lots else 1))
        return min(hashlib.sha256(each.encode()).digest() for each in drawn)

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


def mostly(first: str, *others: str, among: str) -> list[ParameterSet]:
    """Return the parameters of a fixture, of which a run tries one for each test: four in five times the first."""
    import pytest  # which programs that draw places, too, do without

    drawn = partial(pytest.mark.sampled, one_in=len(others) + 1, among=among)
    return [pytest.param(first, marks=drawn(lots=4)), *(pytest.param(each, marks=drawn()) for each in others)]


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
    value = getattr(item, "callspec").params[among]  # noqa: B009  # only functions have one
    parts.remove(getattr(value, "__name__", str(value)))  # as pytest names a case by a function
    return f"{test}[{'-'.join(parts)}]"


def _lots(item: pytest.Item) -> int:
    """Return how many times as often a case is drawn as others, if its parameter says so."""
    return max(int(marker.kwargs.get("lots", 1)) for marker in item.iter_markers("sampled"))


def _marker(item: pytest.Item, *, of_parameters: bool) -> pytest.Mark | None:
    """Return what draws a case: among those that differ in a parameter, or among tests, if it says that of itself."""
    closest = item.get_closest_marker("sampled")
    if closest is None or of_parameters:
        return closest if closest and "among" in closest.kwargs else None
    found = next((each for each in item.iter_markers("sampled") if "among" not in each.kwargs), None)
    return found if found and found.kwargs.get("using") in (None, *getattr(item, "fixturenames", ())) else None


def drawn(items: Sequence[pytest.Item], seed: str, arguments: Sequence[str]) -> list[pytest.Item]:
    """Return the tests without the cases that a seed leaves out; none is left out that an argument names.

    Cases that differ in a parameter are drawn first; the marker of their file draws from those that are left.
    """
    left_out: set[str] = set()
    for of_parameters in (True, False):
        groups: dict[tuple[str, int], dict[str, int]] = {}
        for item in items:
            marker = None if item.nodeid in left_out else _marker(item, of_parameters=of_parameters)
            if marker:
                one_in = marker.kwargs.get("one_in", 1)
                groups.setdefault((_group(item, marker), one_in), {})[item.nodeid] = _lots(item)
        for (group, one_in), lots in groups.items():
            left_out.update(set(lots) - set(chosen(seed, group, list(lots), one_in, list(lots.values()))))
    named = [argument for argument in arguments if "::" in argument]
    return [item for item in items if item.nodeid not in left_out or any(_names(each, item) for each in named)]
