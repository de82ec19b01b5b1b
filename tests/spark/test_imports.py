"""What a Python worker of Spark imports to read: nothing that writes, serves or repairs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

from pybk.ledger.digest import DigestType
from pybk.testing import open_store
from tests.waiting import PROCESS_S

MODULES_MAX = 82
"""The most modules of pybk that a read of a store in a directory may import."""

UNUSED = {"asyncio", "kazoo", "pandas", "ssl", "zmq"}
UNUSED |= {
    f"pybk.{name}"
    for name in ("bookie", "client", "healing", "options", "replication", "streams", "transport", "metadata.lmdb_store")
}
UNUSED |= {f"pybk.spark.{name}" for name in ("executors.bookie_start", "executors.task_placement", "jobs", "sink")}
UNUSED |= {f"pybk.spark.source.{name}" for name in ("ledger_catalog", "ledger_changes", "stream")}

READ = """
import pickle, sys
import pyarrow, pyspark.sql.datasource, pyspark.sql.streaming.datasource, pyspark.sql.pandas.types
before = set(sys.modules)
task = pickle.loads(bytes.fromhex(sys.argv[1]))
assert sum(batch.num_rows for batch in task[0].read(task[1])) == 1
print(*sorted(set(sys.modules) - before))
"""

PLAN = """
import pickle, sys
from pybk.spark.options import source_options
from pybk.spark.source.batch_reader import new_reader
from pybk.spark.source.columns import schema_of
options = source_options({"path": sys.argv[1], "ledger": sys.argv[2]}, streaming=False)
reader = new_reader(options, schema_of(options))
[partition] = reader.partitions()
print(pickle.dumps((reader, partition)).hex())
"""


def run(program: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_task_imports_what_it_reads_with(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as manager, manager.create_ledger(digest_type=DigestType.CRC32C) as writer:
        writer.append(b"entry")
    found = set(run(READ, run(PLAN, tmp_path / "store", writer.ledger_id)).split())
    assert sorted(UNUSED & found) == []
    own = {name for name in found if name.split(".")[0] == "pybk"}
    assert len(own) <= MODULES_MAX, sorted(own)
