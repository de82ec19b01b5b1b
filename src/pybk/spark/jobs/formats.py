"""Data sources that serve a single job: Spark formats of random names, registered with a session.

Their settings are in the object that Spark pickles for its tasks, and not in options, because plans and event logs show
options and the settings hold secrets.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from pybk.spark.source.batch_reader import new_reader
from pybk.spark.source.columns import schema_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceReader, DataSourceWriter
    from pyspark.sql.types import StructType

    from pybk.spark.options import SourceOptions


def register_source(spark: SparkSession, options: SourceOptions) -> str:
    """Register a format that reads ledgers by the options, and return its name."""
    name, columns = _new_name(), schema_of(options)

    class LedgersSource(DataSource):
        """Reads the ledgers of one job."""

        @classmethod
        def name(cls) -> str:
            """Return the name of the format."""
            return name

        def schema(self) -> StructType:
            """Return the columns."""
            return columns

        def reader(self, schema: StructType) -> DataSourceReader:
            """Return the reader that Spark plans and runs."""
            return new_reader(options, schema)

    spark.dataSource.register(LedgersSource)
    return name


def register_sink(spark: SparkSession, writer: DataSourceWriter) -> str:
    """Register a format that writes with ``writer``, and return its name."""
    name = _new_name()

    class LedgersSink(DataSource):
        """Writes the ledgers of one job."""

        @classmethod
        def name(cls) -> str:
            """Return the name of the format."""
            return name

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
            """Return the writer that Spark runs."""
            return writer

    spark.dataSource.register(LedgersSink)
    return name


def _new_name() -> str:
    return f"pybk-job-{secrets.token_hex(8)}"
