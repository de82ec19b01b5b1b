"""A contest about starting bookies: how long until each executor has one, once it has run a task."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from bench.contest import Contest, Contestant, Run, Scale, at_most
from bench.spark.bookies import colocated
from bench.spark.session import session


def started(spark: SparkSession, directory: Path, _: float) -> float:
    """Start the bookies of a new cluster; return the seconds until all serve."""
    with colocated(spark, Path(tempfile.mkdtemp(dir=directory)), curve=True) as cluster:
        return cluster.start_seconds


@contextmanager
def local_reader(directory: Path, _: Scale) -> Iterator[Run]:
    """An executor that has run a Python task."""
    with session(directory) as spark:
        spark.sparkContext.parallelize([0]).map(str).collect()
        yield partial(started, spark, directory)


CONTESTS: Final[Sequence[Contest]] = (
    Contest(
        "start",
        "start_bookies after the first task, one executor, CURVE",
        "s",
        [Contestant("one bookie", local_reader, [at_most(1)])],
    ),
)
