"""Drivers of queries in the world of ledger lists: their tasks write detached ledgers, and they commit, die and retry.

A commit of a query has the same records whenever it is made, as in Spark, where the plan of a batch is durable before
its tasks run. Two drivers of one query may live at the same time, and a task may leave a ledger of a failed attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from pybk.streams.format import NOTHING_YET
from pybk.streams.list_record import Detached

QUERIES: Final = ("query", "query", "another")
"""The query of each driver."""


class Written(NamedTuple):
    """A detached ledger, as its first entry describes it.

    Attributes:
        query: The query that wrote it.
        epoch: The number of the commit.
    """

    query: str
    epoch: int


class Driver:
    """What a driver's process knows of the commit that it makes."""

    def __init__(self, query: str) -> None:
        self.query = query
        self.epoch: int | None = None
        """The number of the commit; None before it has looked which one is due."""
        self.ledgers: list[Detached] = []
        """Those that its tasks have written."""


class Committers:
    """The queries that commit to the log, and what they know durably.

    Args:
        random: Decides what happens.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self.due = dict.fromkeys(QUERIES, 0)
        """The commit of each query that comes next, as its drivers have it on disk."""
        self.committed: set[tuple[str, int]] = set()
        """The commits that took effect."""
        self.highest: dict[str, int] = {}
        """The highest commit of each query that took effect."""

    def tasks_of(self, query: str, epoch: int) -> list[list[object]]:
        """Return the records of each task of a commit; there may be none at all."""
        return [
            [(query, epoch, task, number) for number in range(1 + (epoch + task) % 2)]
            for task in range((epoch + len(query)) % 4)
        ]

    def forgets(self, driver: Driver) -> None:
        """End a driver, or only what it is doing: then it commits the same ledgers again."""
        if self._random.random() < 0.5:
            driver.epoch, driver.ledgers = None, []

    def described(self, ledger_id: int, values: Sequence[object]) -> Detached:
        """Return what the task of a ledger reports to its driver."""
        return Detached(ledger_id, len(values), len(values), NOTHING_YET)

    def took_effect(self, query: str, epoch: int, values: Sequence[object]) -> None:
        """Check that a commit is made once, after those before it, and with all its records in their order."""
        assert (query, epoch) not in self.committed, f"commit {epoch} of {query} is done twice"
        assert epoch > self.highest.get(query, -1), f"commit {epoch} of {query} is done after a later one"
        expected = [value for task in self.tasks_of(query, epoch) for value in task]
        assert list(values) == expected, f"commit {epoch} of {query} has {values}, not {expected}"
        self.committed.add((query, epoch))
        self.highest[query] = epoch

    def check(self) -> None:
        """Check that what drivers take for done is done."""
        for query, due in self.due.items():
            assert all((query, epoch) in self.committed for epoch in range(due)), "a commit is missing"
