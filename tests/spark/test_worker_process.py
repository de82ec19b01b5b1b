"""What a process of Spark's workers is known by: the module that Spark has it run."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

from pybk.spark.log_sink import log_writers
from pybk.spark.source import batch_reader
from pybk.spark.worker_process import TASKS, is_worker, worker_module


@pytest.mark.parametrize(
    ("main", "arguments", "module"),
    [
        ("pyspark.daemon", ["pyspark.worker"], "pyspark.worker"),
        ("pybk.spark.executors.daemon", ["pyspark.sql.worker.plan_data_source_read"], "*.plan_data_source_read"),
        ("the.daemon.of.a.user", ["pyspark.sql.worker.plan_data_source_read"], "*.plan_data_source_read"),
        ("pyspark.daemon", [], "pyspark.worker"),
        ("pyspark.sql.worker.plan_data_source_read", [], "*.plan_data_source_read"),  # without a daemon
        ("a_program", ["of", "its", "own"], ""),
        (None, [], ""),
    ],
)
def test_the_module_is_known_with_each_daemon_and_without(
    monkeypatch: pytest.MonkeyPatch, main: str | None, arguments: list[str], module: str
) -> None:
    spec = None if main is None else SimpleNamespace(name=main)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr(sys, "argv", ["/path/of/it.py", *arguments])
    assert worker_module() == module.replace("*", "pyspark.sql.worker")
    assert is_worker() == bool(module)


def test_spark_has_the_modules_of_these_names() -> None:
    """A version of Spark that renames one of them is noticed here."""
    for name in (TASKS, log_writers.COMMITTING, batch_reader.PUSHING):
        assert find_spec(name) is not None, name
