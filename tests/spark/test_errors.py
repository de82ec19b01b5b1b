"""Errors as Spark shows them: one line for an error of pybk, and the traceback of a defect."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.errors import UsageError
from pybk.spark import worker_errors
from pybk.spark.executors.executor import Process
from pybk.spark.worker_errors import one_line_errors, with_one_line_errors
from tests.storage.real_store import open_quick
from tests.waiting import WAIT_S, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HIDDEN = "SPARK_HIDE_TRACEBACK"


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIDDEN, "")


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What this process prints, as a worker with its own standard error."""
    found = io.StringIO()
    monkeypatch.setattr(worker_errors, "is_worker", lambda: True)
    monkeypatch.setattr(sys, "__stderr__", found)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: found.write("ignored\n"))
    return found


@pytest.mark.usefixtures("hidden")
def test_processes_of_users_keep_their_tracebacks() -> None:
    with pytest.raises(UsageError), one_line_errors():
        raise UsageError("in a process of the user")
    assert not os.environ[HIDDEN]


@pytest.mark.usefixtures("hidden", "printed")
def test_the_traceback_of_a_defect_stays() -> None:
    with pytest.raises(ZeroDivisionError):
        list(with_one_line_errors(1 // number for number in (1, 0)))
    assert not os.environ[HIDDEN]
    with pytest.raises(UsageError), one_line_errors():
        raise UsageError("in a worker")
    assert os.environ[HIDDEN]


def test_what_a_worker_prints_of_a_connection_of_its_own_stays(printed: io.StringIO) -> None:
    """Spark's daemon alone prints the error of the connection to Spark."""
    for _ in range(2):
        assert list(with_one_line_errors(iter([1]))) == [1]
    try:
        raise BrokenPipeError("of a service")
    except BrokenPipeError:
        traceback.print_exc(file=printed)
    assert printed.getvalue().endswith("BrokenPipeError: of a service\n")
    assert printed.getvalue().count("Traceback") == 1


def test_the_file_of_a_closed_connection_ends_in_silence(printed: io.StringIO) -> None:
    """Python 3.13 reports it when it drops such a file, and each version what else cannot be raised."""
    list(with_one_line_errors(iter([1])))
    ours, theirs = socket.socketpair()
    file = ours.makefile("wb")
    file.write(b"the end")
    theirs.close()
    ours.close()
    del file
    assert not printed.getvalue()
    sys.unraisablehook(SimpleNamespace(exc_value=ZeroDivisionError(), object=None))
    assert printed.getvalue() == "ignored\n"


WORKER = """
from pybk.spark.worker_errors import with_one_line_errors

def main(infile, outfile):
    assert list(with_one_line_errors(iter([1]))) == [1]
    assert not infile.read()  # Spark has closed the connection
    outfile.write(b"report")
    {end}
"""


def read_int(file: IO[bytes]) -> int:
    return int.from_bytes(file.read(4), "big")


@pytest.mark.parametrize(
    ("end", "lines"),
    [
        ("pass", 0),  # Spark's daemon writes the rest
        ("outfile.flush()", 0),
        ("1 // 0", 1),
    ],
)
def test_a_worker_that_has_made_its_last_row_ends_in_silence(tmp_path: Path, end: str, lines: int) -> None:
    """In Spark's daemon of workers, with a function of its own in place of that of tasks."""
    (tmp_path / "pyspark_worker_here.py").write_text(WORKER.format(end=end))
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PYTHON_UNIX_DOMAIN_ENABLED": "true"}
    with (
        tempfile.TemporaryDirectory(prefix="pybk-") as short,  # as the path of a socket is
        subprocess.Popen(
            [sys.executable, "-m", "pyspark.daemon", "pyspark_worker_here"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables, "PYTHON_WORKER_FACTORY_SOCK_DIR": short},
        ) as daemon,
    ):
        assert daemon.stdout is not None
        path = daemon.stdout.read(read_int(daemon.stdout)).decode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            with connection.makefile("rb") as answers:
                worker = Process.of(read_int(answers))
        wait_until(lambda: not worker.is_alive())
        _, said = daemon.communicate(timeout=WAIT_S)
    assert said.count(b"Traceback") == lines, said.decode()
    assert said.count(b"ZeroDivisionError") == lines


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
