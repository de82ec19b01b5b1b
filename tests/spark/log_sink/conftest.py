"""A cluster with logs to write to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.cluster.inside import inside

if TYPE_CHECKING:
    from tests.spark.log_sink.writes import Place


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
    pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")
    from pybk.spark.connection import close_connections
    from tests.spark.log_sink.writes import Place

    directory = tmp_path_factory.mktemp("writes")
    with inside(directory / "cluster", count=1) as cluster:
        yield Place(cluster.url, directory)
        close_connections()


@pytest.fixture
def place(served: Place) -> Iterator[Place]:
    """A cluster with a log ``orders`` that is new, and no other."""
    from pyspark import TaskContext

    from pybk.streams.log import Log
    from tests.spark.log_source.logs import PASSWORD

    for name in Log.names(served.manager):
        Log.delete(served.manager, name, password=PASSWORD, steal=True)
    served.create("orders")
    yield served
    TaskContext._taskContext = None
