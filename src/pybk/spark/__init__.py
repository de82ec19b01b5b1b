"""Ledgers in Apache Spark: needs ``pip install "pybk[spark]"`` and Java 17 or newer. See ``docs/spark.md``."""

from pybk.spark.bookies import configure, start_bookies
from pybk.spark.executor import ExecutorBookie, local_bookie

__all__ = ["ExecutorBookie", "configure", "local_bookie", "start_bookies"]
