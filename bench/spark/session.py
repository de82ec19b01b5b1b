"""The Spark that is measured, and rows of 1 KiB for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from bench.payloads import ENTRY_BYTES

MASTER: Final = "local[2]"
BATCH: Final = 8 << 10
FILES: Final = 8
ROOT: Final = Path(__file__).resolve().parents[2]


@contextmanager
def session(directory: Path, master: str = MASTER) -> Iterator[SparkSession]:
    """Have a Spark run.

    Args:
        directory: Where it keeps its files.
        master: Spark's name of the cluster.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_HOSTNAME"] = "localhost"
    spark = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "2g")
        .config("spark.log.level", "ERROR")
        .config("spark.python.unix.domain.socket.enabled", "true")  # as pybk.spark.configure sets it
        .config("spark.local.dir", str(directory / "spark"))
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .getOrCreate()
    )
    try:
        yield spark
    finally:
        spark.stop()


def rows(entries: int) -> Iterator[pa.RecordBatch]:
    """Yield rows of 1 KiB each that no compression helps with, as they are the columns of a ledger."""
    source = np.random.default_rng(20)
    offsets = pa.array(np.arange(BATCH + 1, dtype=np.int32) * ENTRY_BYTES).buffers()[1]
    for first in range(0, entries, BATCH):
        data = pa.py_buffer(source.bytes(BATCH * ENTRY_BYTES))
        payload = pa.Array.from_buffers(pa.binary(), BATCH, [None, offsets, data])
        ids = pa.array(np.arange(first, first + BATCH))
        length = pa.array(np.full(BATCH, ENTRY_BYTES))
        ledger = pa.array(np.zeros(BATCH, np.int64))
        batch = pa.RecordBatch.from_arrays(
            [ledger, ids, payload, length], ["ledger_id", "entry_id", "payload", "length"]
        )
        yield batch.slice(0, min(BATCH, entries - first))


def write_parquet(directory: Path, entries: int) -> None:
    """Write the rows as Parquet files, uncompressed and without dictionaries."""
    directory.mkdir()
    batches = rows(entries)
    per_file = -(-entries // (BATCH * FILES))
    for number in range(FILES):
        found = [batch for _, batch in zip(range(per_file), batches, strict=False)]
        if found:
            table = pa.Table.from_batches(found)
            pq.write_table(table, directory / f"{number}.parquet", compression="none", use_dictionary=False)


def read_all(frame: DataFrame) -> None:
    """Have all rows made, and nothing done with them."""
    frame.write.format("noop").mode("overwrite").save()
