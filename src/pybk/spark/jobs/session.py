"""The Spark session of a job that was started on the command line."""

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
"""The environment variable that ``spark-submit`` sets in a driver; its settings then name the master."""


@contextmanager
def session(name: str, master: str | None = None) -> Iterator[SparkSession]:
    """Yield the active session; if there is none, start one, and stop it at the end.

    Args:
        name: The name of the application.
        master: Spark's master URL; None for the master of ``spark-submit``, or else all cores of this machine.

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
            "in JAVA_HOME, and a master that exists"
        ) from error
    try:
        yield spark
    finally:
        spark.stop()


def failure(error: Exception) -> str | None:
    """Return an error of Spark as one line; None if the error is not Spark's.

    Raises:
        UsageError: Spark refused the request, such as a write to a path that exists.
    """
    if not isinstance(error, PySparkException) and not type(error).__module__.startswith("py4j"):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, AnalysisException):
        raise UsageError(lines[0]) from error
    # The error that a task raised is at the end of the traceback.
    reported = [line for line in lines if line.startswith("pybk.errors.")]
    return reported[0].removeprefix("pybk.errors.") if reported else f"a Spark job failed: {' '.join(lines)[:300]}"
