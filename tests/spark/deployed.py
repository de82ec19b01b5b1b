"""The program that tests of deployment submit: bookies on all executors, a write, a read, and where modules lie.

``deployed.py METADATA DIRECTORY SECRET_FILE EXECUTORS [register]``; it prints what it found as JSON. It finds pybk as
the tests deploy it, and nothing of the tests.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession


def places(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Say where the executor of a task has its directory, and where the task found the source."""
    import pyspark_pybk

    for _ in batches:
        yield pa.RecordBatch.from_pydict({"directory": [os.getcwd()], "file": [os.path.abspath(pyspark_pybk.__file__)]})


def main(metadata: str, directory: str, secret_file: str, executors: int, register: bool) -> None:
    """Start bookies, write and read."""
    from pybk.spark import start_bookies

    spark = SparkSession.builder.getOrCreate()
    if register:
        from pyspark_pybk import DefaultSource

        spark.dataSource.register(DefaultSource)
    bookies = start_bookies(
        spark, metadata=metadata, directory=directory, cluster_secret_file=secret_file, executors=executors
    )
    cluster = {"metadataUri": metadata, "clusterSecretFile": secret_file, "ledgerType": "deployed"}
    quorums = dict.fromkeys(("ensembleSize", "writeQuorum", "ackQuorum"), str(executors))
    rows = spark.range(0, 1000, 1, 4).selectExpr("CAST(id AS STRING) AS payload")
    rows.write.format("pybk").mode("append").options(**cluster, **quorums, digestType="CRC32C").save()
    read = spark.read.format("pybk").options(**cluster).load()
    found = spark.range(0, 16, 1, 16).mapInArrow(places, "directory string, file string")
    answer = {
        "bookies": sorted(bookie.executor for bookie in bookies),
        "rows": read.selectExpr("sum(CAST(CAST(payload AS STRING) AS INT)) AS sum").collect()[0].sum,
        "places": [tuple(row) for row in found.distinct().collect()],
    }
    spark.stop()
    print(json.dumps(answer))  # noqa: T201  # the answer


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:] == ["register"])
