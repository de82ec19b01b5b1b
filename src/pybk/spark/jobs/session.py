"""The session that a job on a command line runs in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from pybk.errors import UsageError

_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""Set in a driver that ``spark-submit`` has started, whose settings say which master."""


@contextmanager
def session(name: str, master: str | None = None) -> Iterator[SparkSession]:
    """Give the session that runs; or one of its own, which is stopped at the end.

    Args:
        name: Of the application.
        master: Spark's master URL; None for what ``spark-submit`` says, or else all cores of this machine.

    Raises:
        UsageError: Spark cannot be started.
    """
    running = SparkSession.getActiveSession()
    if running is not None:
        yield running
        return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR")
    if master is not None or _SUBMITTED not in os.environ:
        master = master or "local[*]"
        builder = builder.master(master)
    if master is not None and master.startswith("local["):
        builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
        builder = builder.config("spark.ui.enabled", "false")
    try:
        spark = builder.getOrCreate()
    except Exception as error:
        raise UsageError(
            f"Spark cannot be started: {' '.join(str(error).split()):.300}; it needs Java 17 or newer, on the path or "
            "in JAVA_HOME, and a master that is there"
        ) from error
    try:
        yield spark
    finally:
        spark.stop()


def failure(error: Exception) -> str | None:
    """Return in one line what went wrong in Spark; None for an error that is none of Spark's.

    Raises:
        UsageError: Spark refused the request, such as a write to a path that exists.
    """
    if not isinstance(error, PySparkException) and not type(error).__module__.startswith("py4j"):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, AnalysisException):
        raise UsageError(lines[0]) from error
    # What a task raised stands at the end of its traceback.
    reported = [line for line in lines if line.startswith("pybk.errors.")]
    return reported[0].removeprefix("pybk.errors.") if reported else f"a Spark job failed: {' '.join(lines)[:300]}"
