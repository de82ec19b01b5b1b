"""What a situation is in which an error is raised, and the table of all situations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from pybk.errors import PybkError
from pybk.manager.ledger_manager import LedgerManager
from tests.cluster.inside import Inside, inside
from tests.storage.real_store import open_quick

PASSWORD: Final = b"the password"


def nothing() -> int:
    """Count the effects of a call that has none, as a read."""
    return 0


@dataclass
class Situation:
    """A call that fails, and what becomes of it.

    Attributes:
        call: What raises.
        remedy: What the class advises. A call that is retryable succeeds afterwards.
        effects: Returns how often the effect of the call is there.
        again: What a repeated call raises, if that is another class.
    """

    call: Callable[[], object]
    remedy: Callable[[], object]
    effects: Callable[[], int] = nothing
    again: type[PybkError] | None = None


class Scene:
    """Where a situation is made.

    Attributes:
        path: A directory.
        stack: Ends with the test.
        monkeypatch: That of the test.
    """

    def __init__(self, path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.stack = stack
        self.monkeypatch = monkeypatch

    def store(self, **settings: Any) -> LedgerManager:
        """Open a store until the test ends."""
        return self.stack.enter_context(open_quick(self.path / "store", **settings))

    def cluster(self, bookies: int = 1) -> Inside:
        """Run a cluster until the test ends."""
        return self.stack.enter_context(inside(self.path, count=bookies))


class Case(NamedTuple):
    """An entry of the table: what is raised, and how ``outcome_unknown`` and ``retryable`` are set there."""

    kind: type[PybkError]
    unknown: bool
    retryable: bool
    make: Callable[[Scene], Situation]


CASES: Final[list[Case]] = []


def raises(
    kind: type[PybkError], *, unknown: bool = False, retryable: bool = False
) -> Callable[[Callable[[Scene], Situation]], Callable[[Scene], Situation]]:
    """Enter a situation in the table."""

    def enter(make: Callable[[Scene], Situation]) -> Callable[[Scene], Situation]:
        CASES.append(Case(kind, unknown, retryable, make))
        return make

    return enter


def entries_of(manager: LedgerManager, ledger_id: int, payload: bytes, password: bytes = b"") -> int:
    """Return how many confirmed entries of a ledger have a payload."""
    with manager.open_ledger(ledger_id, password=password, recover=False) as reader:
        reader.read_last_add_confirmed()
        return [entry.payload for entry in reader].count(payload)
