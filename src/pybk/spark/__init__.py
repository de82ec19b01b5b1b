"""Ledgers in Apache Spark: needs ``pip install "pybk[spark]"`` and Java 17 or newer. See ``docs/spark.md``."""
