"""Data sources of one job, made of values that were checked: so no secret is an option, which plans may show."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceReader, DataSourceWriter

    from pybk.spark.jobs.transfer import Target
    from pybk.spark.options import SourceOptions

ENTRIES = StructType(
    [
        StructField("ledger_id", LongType()),
        StructField("entry_id", LongType()),
        StructField("payload", BinaryType()),
    ]
)
"""What a ledger is written of: entries, and before them a header (``transfer.Header``) as entry -1."""


def reading(spark: SparkSession, options: SourceOptions) -> str:
    """Return the name of a format that reads ledgers as options say."""
    from pybk.spark.source.columns import schema_of

    name, columns = _new_name(), schema_of(options)

    class Reading(DataSource):
        """Reads some ledgers."""

        @classmethod
        def name(cls) -> str:
            """Return the name of the format."""
            return name

        def schema(self) -> StructType:
            """Return the columns."""
            return columns

        def reader(self, schema: StructType) -> DataSourceReader:
            """Return what reads."""
            from pybk.spark.source.batch_reader import new_reader

            return new_reader(options, schema)

    spark.dataSource.register(Reading)
    return name


def writing(spark: SparkSession, target: Target, number: int) -> str:
    """Return the name of a format that writes whole ledgers, in commit ``number`` of their sink."""
    name = _new_name()

    class Writing(DataSource):
        """Writes ledgers anew."""

        @classmethod
        def name(cls) -> str:
            """Return the name of the format."""
            return name

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
            """Return what writes."""
            from pybk.spark.jobs.import_ import LedgersWriter

            return LedgersWriter(target, number)

    spark.dataSource.register(Writing)
    return name


def _new_name() -> str:
    return f"pybk-job-{secrets.token_hex(8)}"
