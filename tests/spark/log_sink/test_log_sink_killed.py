"""Writes to two logs stopped by SIGKILL at every step, and started again as Spark does; here without Spark."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.spark.connection import close_connections
from pybk.streams.detached_writer import DetachedLedger
from tests.cluster.processes import running
from tests.sampling import places
from tests.spark.killing import in_child
from tests.spark.log_sink.writes import LARGE, TO_LOGS, Place, Stream

BATCHES = 2
ACTIONS = (
    (DetachedLedger, "append"),
    (DetachedLedger, "seal"),
    (DetachedLedger, "close"),
    (LedgerManager, "delete_ledger"),
    (ClusterMetadata, "read_pointer"),
    (ClusterMetadata, "write_pointer"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("killed")
    with running(directory, 1) as cluster:
        yield Place(cluster.url, directory)
        close_connections()


def tasks_of(number: int) -> tuple[list[bytes], list[bytes]]:
    """Return the rows of the two tasks of a micro-batch for each log: those of a ledger, and few."""
    return [b"%d/%d " % (number, row) + bytes(LARGE) for row in range(3)], [b"%d/3" % number]


EXPECTED = [row for number in range(BATCHES) for row in chain(*tasks_of(number))]
WHOLE = range(0, len(EXPECTED) + 1, len(EXPECTED) // BATCHES)
"""The numbers of records of a log that has whole micro-batches."""


class Query:
    """A streaming query that writes each row to two logs."""

    def __init__(self, place: Place, logs: tuple[str, str], checkpoint: Path) -> None:
        self._place = place
        self._logs = logs
        self._checkpoint = checkpoint

    def finish(self) -> None:
        """Do all micro-batches that are left."""
        done = int(self._checkpoint.read_text()) if self._checkpoint.exists() else 0
        for number in range(done, BATCHES):
            self.batch(number, *tasks_of(number))
            self._checkpoint.write_text(str(number + 1))

    def batch(self, number: int, *tasks: list[bytes]) -> None:
        """Do a micro-batch."""
        rows = [[(log, row) for row in task for log in self._logs] for task in tasks]
        Stream(self._place, TO_LOGS).batch(number, *rows)


@pytest.mark.sampled(one_in=2, group="killed at any step")
def test_a_stream_killed_at_any_step_is_written_once(place: Place, tmp_path: Path) -> None:
    ends: list[int] = []
    made: list[str] = []
    for step in places("a stream of logs is killed", 1, 10):
        logs = f"orders-{step}", f"clicks-{step}"
        made += logs
        place.create(*logs)
        query = Query(place, logs, tmp_path / f"checkpoint-{step}")
        ends.append(in_child(query.finish, step, ACTIONS))
        assert all(len(place.data(log)) in WHOLE for log in logs), "a batch is there or not"
        assert in_child(query.finish) == 0
        assert all(place.data(log) == EXPECTED for log in logs)
        query.batch(BATCHES, [b"the last one"])
        for log in logs:
            with place.open(log) as opened:
                opened.sweep_detached("query")
            assert place.data(log) == [*EXPECTED, b"the last one"]
        assert place.ledgers() == place.listed(*made)
        if ends[-1] == 0:
            break
    assert ends == [-signal.SIGKILL] * (len(ends) - 1) + [0]
    assert step > 20
