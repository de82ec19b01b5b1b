"""The module for ``spark.python.daemon.module``: Spark's daemon of Python workers, which also starts a bookie.

Spark starts the daemon at an executor's first Python task. The daemon forks the workers, so they all inherit its
imported modules, and it must not run threads.
"""

from __future__ import annotations

import logging
import os

from pyspark.daemon import manager

from pybk.errors import PybkError
from pybk.spark.executors.bookie_settings import BookieSettings
from pybk.spark.executors.bookie_start import SETTINGS, ensure_bookie
from pybk.spark.executors.executor import Executor
from pybk.spark.worker_process import TASKS, worker_module

logger = logging.getLogger(__name__)


def start_bookie() -> None:
    """Start the bookie of this daemon's executor if the settings demand one; errors are written to the executor's log.

    A daemon that the driver runs for planning does not start a bookie.
    """
    settings = os.environ.get(SETTINGS)
    if settings is None or worker_module() != TASKS:
        return
    try:
        ensure_bookie(BookieSettings.of(settings), Executor.of_daemon())
    except (PybkError, OSError) as error:
        # An exception would end the daemon, and the executor could not run Python tasks.
        logger.warning("pybk: this executor has no bookie: %s: %s", type(error).__name__, error)


if __name__ == "__main__":
    start_bookie()
    manager()
