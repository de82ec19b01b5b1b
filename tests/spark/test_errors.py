"""Errors as Spark shows them: one line for an error of pybk, and the traceback of a defect."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.errors import UsageError
from pybk.spark import worker_errors
from pybk.spark.worker_errors import one_line_errors, with_one_line_errors
from tests.storage.real_store import open_quick

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HIDDEN = "SPARK_HIDE_TRACEBACK"


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIDDEN, "")


@pytest.mark.usefixtures("hidden")
def test_the_traceback_of_a_defect_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError), one_line_errors():
        raise UsageError("in a process of the user")
    assert not os.environ[HIDDEN]
    monkeypatch.setattr(worker_errors, "is_worker", lambda: True)
    with pytest.raises(ZeroDivisionError):
        list(with_one_line_errors(1 // number for number in (1, 0)))
    assert not os.environ[HIDDEN]
    with pytest.raises(UsageError), one_line_errors():
        raise UsageError("in a worker")
    assert os.environ[HIDDEN]


def lines_of(error: pytest.ExceptionInfo[BaseException]) -> list[str]:
    return [line for line in str(error.value).splitlines() if line.strip()]


def test_an_error_of_analysis_is_its_first_line(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="/nowhere") as error:
        spark.read.format("pybk").options(path="/nowhere", ledger="0").load()
    first, *others = lines_of(error)
    assert first.endswith(
        "pybk.errors.UsageError: there is no directory /nowhere here; each machine that reads a store needs it"
    )
    assert len(others) <= 1, others


def test_an_error_of_a_task_has_no_traceback(spark: SparkSession, tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager, manager.create_ledger(insecure=True) as writer:
        writer.append(b"x")
    planned = spark.read.format("pybk").options(path=str(tmp_path / "store"), ledger="0").load().rdd
    assert planned.getNumPartitions() == 1
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(Exception, match="there is no directory") as error:
        planned.count()
    assert "Traceback" not in str(error.value)
