"""The module that Spark has this process run, which shows the work that the process was started for.

Spark passes a Python source neither the settings of the session nor the purpose of a call. It starts a worker as
``python -m MODULE``, or, as it does by default, forks it from a daemon that was started as ``python -m DAEMON MODULE``,
and the daemon chooses by this argument what its workers run.
"""

from __future__ import annotations

import sys
from typing import Final

TASKS: Final = "pyspark.worker"
"""The module that runs tasks."""

_DAEMONS: Final = ("pyspark.daemon", "pybk.spark.executors.daemon")


def worker_module() -> str:
    """Return the module that Spark has this process run, such as ``pyspark.worker``; empty if it is no worker."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    main = "" if spec is None else spec.name
    if main.startswith("pyspark.") and main not in _DAEMONS:
        return str(main)
    if len(sys.argv) > 1 and sys.argv[1].startswith("pyspark."):  # whichever module the daemon is
        return sys.argv[1]
    return TASKS if main in _DAEMONS else ""


def is_worker() -> bool:
    """Return whether this process is a Python worker of Spark, or was forked by Spark's daemon of workers."""
    return bool(worker_module())
