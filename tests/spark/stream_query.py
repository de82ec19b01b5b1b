"""A streaming query without Spark: the calls that Spark makes of a source."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from pyspark.sql.streaming.datasource import ReadLimit

O = TypeVar("O")  # noqa: E741  # the options of a source
K = TypeVar("K", bound=Hashable)


class StreamQuery(ABC, Generic[O, K]):
    """A streaming query.

    Attributes:
        options: The options of the source.
        reader: The source in the process of the driver.
        offset: The offset after the last micro-batch.
        rows: The numbers of the rows that were read, by ledger or log.
    """

    def __init__(self, options: O) -> None:
        self.options = options
        self.start()
        self.offset: dict[str, Any] = self.reader.initialOffset()
        self.rows: dict[K, list[int]] = {}

    @abstractmethod
    def new_reader(self) -> Any:
        """Return a source with the options."""

    @abstractmethod
    def place(self, row: dict[str, Any]) -> tuple[K, int]:
        """Return the ledger or log of a row, and its number in it."""

    def start(self, **changed: Any) -> None:
        """Begin with a new process of the driver, and perhaps with other options."""
        self.options = replace(self.options, **changed)  # type: ignore[type-var]
        self.reader = self.new_reader()

    def latest(self, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Return how far there is to read; listings are not put off."""
        if self.reader.catalog is not None:
            self.reader.catalog.list_at = 0.0
        found: dict[str, Any] = self.reader.latestOffset(self.offset, limit or self.reader.getDefaultReadLimit())
        return found

    def batch(self, limit: ReadLimit | None = None) -> int:
        """Run a micro-batch; return how many rows it had."""
        return self.read(json.loads(json.dumps(self.latest(limit))))

    def read(self, end: dict[str, Any]) -> int:
        """Read up to an offset; return how many rows there were."""
        before = sum(map(len, self.rows.values()))
        task = self.new_reader()
        for partition in self.reader.partitions(self.offset, end):
            for batch in task.read(partition):
                for row in batch.to_pylist():
                    where, number = self.place(row)
                    self.rows.setdefault(where, []).append(number)
        self.reader.commit(end)
        self.offset = end
        return sum(map(len, self.rows.values())) - before
