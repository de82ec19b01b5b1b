"""Contests about writing rows to ledgers and logs in Spark; Spark reads the rows from Parquet meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame

from bench.cluster.appending import CURVES
from bench.contest import Contest, Contestant, Run, Scale, Target
from bench.payloads import ENTRY_BYTES, PASSWORD
from bench.spark.bookies import Colocated, colocated
from bench.spark.reading import DIGESTS, PARQUET
from bench.spark.session import read_all, session, write_parquet
from pybk import DigestType, Log

SHARE: Final = 0.5
LEDGER_TYPE: Final = "rows"
LOG: Final = "rows"


@contextmanager
def payloads(directory: Path, scale: Scale) -> Iterator[DataFrame]:
    """What is written, read once before."""
    write_parquet(directory / "rows", scale.entries)
    with session(directory) as spark:
        frame = spark.read.parquet(str(directory / "rows")).select("payload")
        read_all(frame)
        yield frame


@contextmanager
def parquet(directory: Path, scale: Scale) -> Iterator[Run]:
    """Parquet files, uncompressed and without dictionaries."""
    with payloads(directory, scale) as frame:
        written = (
            frame.write.mode("overwrite").option("compression", "none").option("parquet.enable.dictionary", "false")
        )

        def run(_: float) -> float:
            begin = time.perf_counter()
            written.parquet(str(directory / "copy"))
            return scale.entries * ENTRY_BYTES / (time.perf_counter() - begin) / 1e6

        run(0)  # so that what writes is there
        yield run


@contextmanager
def ledgers(digest: DigestType, curve: bool, directory: Path, scale: Scale) -> Iterator[Run]:
    """Ledgers of one replica each, on the bookie on the executor's host."""
    with payloads(directory, scale) as frame, colocated(frame.sparkSession, directory, curve=curve) as cluster:
        run = partial(written_to, cluster, frame, digest, scale.entries)
        run(0)  # so that what writes is there
        yield run


def written_to(cluster: Colocated, frame: DataFrame, digest: DigestType, entries: int, _: float) -> float:
    """Write a frame to ledgers once and delete them; return payload megabytes per second, the deleting left out."""
    options = {**cluster.options, "ledgerType": LEDGER_TYPE, "digestType": digest.name}
    begin = time.perf_counter()
    frame.write.format("pybk").mode("append").options(**options, ensembleSize="1").save()
    took = time.perf_counter() - begin
    with cluster.connect() as client:
        found = list(client.list_ledgers(LEDGER_TYPE))
        written = sum(client.ledger_metadata(ledger_id).length for ledger_id in found)
        if written != entries * ENTRY_BYTES:
            raise RuntimeError(f"{written} payload bytes in ledgers, not {entries * ENTRY_BYTES}")
        for ledger_id in found:
            client.delete_ledger(ledger_id, password=PASSWORD)
    return entries * ENTRY_BYTES / took / 1e6


@contextmanager
def log(digest: DigestType, curve: bool, directory: Path, scale: Scale) -> Iterator[Run]:
    """A log whose segments have one replica each, on the bookie on the executor's host."""
    with payloads(directory, scale) as frame, colocated(frame.sparkSession, directory, curve=curve) as cluster:
        values = frame.withColumnRenamed("payload", "value")
        run = partial(written_to_log, cluster, values, digest, scale.entries)
        run(0)  # so that what writes is there
        yield run


def written_to_log(cluster: Colocated, frame: DataFrame, digest: DigestType, records: int, _: float) -> float:
    """Write a frame to a log once and delete it; return megabytes per second, making and deleting it left out."""
    with cluster.connect() as client:
        opened = Log.open(client, LOG, password=PASSWORD, digest_type=digest, quorums=(1, 1, 1))
        begin = time.perf_counter()
        frame.write.format("pybk").mode("append").options(**cluster.options, topic=LOG).save()
        took = time.perf_counter() - begin
        written = opened.last_seq() + 1
        opened.close()
        if written != records:
            raise RuntimeError(f"{written} records in the log, not {records}")
        Log.delete(client, LOG, password=PASSWORD)
    return records * ENTRY_BYTES / took / 1e6


def at_least(share: float) -> list[Target]:
    """Return the target for the speed relative to Parquet."""
    return [Target(f">= {share} x parquet", lambda rates: share * rates[PARQUET])]


CONTESTS: Final[Sequence[Contest]] = (
    Contest(
        "write",
        "df.write of rows read from Parquet",
        "MB/s",
        [
            Contestant(PARQUET, parquet),
            *(
                Contestant(
                    f"pybk, {name}{suffix}",
                    partial(ledgers, digest, curve),
                    at_least(SHARE),
                )
                for name, digest in DIGESTS
                for suffix, curve in CURVES
            ),
        ],
    ),
    Contest(
        "write-log",
        "df.write of rows read from Parquet to a log",
        "MB/s",
        [
            Contestant(PARQUET, parquet),
            *(
                Contestant(f"pybk log, {name}{suffix}", partial(log, digest, curve), at_least(SHARE))
                for name, digest in DIGESTS
                for suffix, curve in CURVES
            ),
        ],
    ),
)
