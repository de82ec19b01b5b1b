"""Contests about reading logs in Spark, next to a Python source that only hands constant batches over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from bench.contest import Contest, Contestant, Run, Scale, Target
from bench.payloads import ENTRY_BYTES, PASSWORD
from bench.spark.bookies import password_file
from bench.spark.reading import DIGESTS, PARQUET, parquet, turns
from bench.spark.session import BATCH, rows, session
from pybk import DigestType, LedgerManager
from pybk.streams.log import Log

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

CEILING: Final = "constant batches"
COLUMNS: Final = "value BINARY, topic STRING, offset BIGINT"
TASK_BYTES: Final = 128 << 20
"""The payload bytes that a task reads of a log, about. Constant batches have as many tasks, because each takes time."""
_OF_CEILING: Final = {DigestType.CRC32C: 0.9, DigestType.HMAC_SHA256: 0.8}
"""Targets, as shares of the speed of constant batches."""


class Constant(DataSource):
    """Batches of Python that are made once in each task."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "constant"

    def schema(self) -> str:
        """Return the columns."""
        return COLUMNS

    def reader(self, schema: StructType) -> ConstantReader:
        """Return the reader."""
        return ConstantReader(int(self.options["entries"]))


class ConstantReader(DataSourceReader):
    """Yields one batch again and again.

    Args:
        entries: The rows of all tasks.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries

    def partitions(self) -> list[InputPartition]:
        """Return the tasks."""
        tasks = self._entries * ENTRY_BYTES // TASK_BYTES + 1
        firsts = np.linspace(0, self._entries, tasks + 1).astype(int).tolist()
        return [InputPartition(end - first) for first, end in pairwise(firsts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        left: int = partition.value
        payload = next(rows(BATCH)).column("payload")
        topic, offsets = pa.repeat(pa.scalar("log"), BATCH), pa.array(np.arange(BATCH))
        batch = pa.RecordBatch.from_arrays([payload, topic, offsets], ["value", "topic", "offset"])
        while left > 0:
            yield batch.slice(0, min(BATCH, left))
            left -= BATCH


@contextmanager
def constant(directory: Path, scale: Scale) -> Iterator[Run]:
    """The most that a Python source of such columns can do."""
    with session(directory) as spark:
        spark.dataSource.register(Constant)
        yield turns(spark.read.format("constant").option("entries", scale.entries).load(), scale)


@contextmanager
def log(digest: DigestType, directory: Path, scale: Scale) -> Iterator[Run]:
    """A log in the directory of an embedded store, in segments of 64 MiB."""
    path = str(directory / "store")
    with (
        LedgerManager.open(path) as manager,
        Log.open(manager, "log", password=PASSWORD, digest_type=digest) as opened,
        opened.writer() as writer,
    ):
        for batch in rows(scale.entries):
            writer.append_many(batch.column("payload").to_pylist())
    options = {"path": path, "passwordFile": password_file(directory), "log": "log"}
    with session(directory) as spark:
        yield turns(spark.read.format("pybk").options(**options).schema(COLUMNS).load(), scale)


def beside_constant(digest: DigestType) -> list[Target]:
    """Return the target for the speed relative to constant batches."""
    share = _OF_CEILING[digest]
    return [Target(f">= {share} x {CEILING}", lambda rates: share * rates[CEILING])]


CONTESTS: Final[Sequence[Contest]] = (
    Contest(
        "read-log",
        f"spark.read of a log, {ENTRY_BYTES} bytes a record, verified, nothing done with the rows",
        "MB/s",
        [
            Contestant(CEILING, constant),
            Contestant(PARQUET, parquet),
            *(
                Contestant(f"pybk log, {name}", partial(log, digest), beside_constant(digest))
                for name, digest in DIGESTS
            ),
        ],
    ),
)
