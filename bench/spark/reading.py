"""Contests about reading ledgers in Spark; every entry that is read is verified."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from bench.cluster.appending import CURVES
from bench.contest import Contest, Contestant, Run, Scale, Target
from bench.payloads import ENTRY_BYTES, PASSWORD
from bench.spark.bookies import colocated, password_file
from bench.spark.session import read_all, rows, session, write_parquet
from pybk import DigestType, LedgerManager

PARQUET: Final = "parquet"
DIGESTS: Final = (("CRC32C", DigestType.CRC32C), ("HMAC", DigestType.HMAC_SHA256))
_OF_STORE: Final = 0.8
_OF_BOOKIE: Final = {DigestType.CRC32C: 0.8, DigestType.HMAC_SHA256: 0.5}
"""Targets, as shares of Parquet's speed."""


def turns(frame: DataFrame, scale: Scale) -> Run:
    """Read a frame once, so that what reads it is there; return what reads it again and says payload MB/s."""
    read_all(frame)

    def run(_: float) -> float:
        begin = time.perf_counter()
        read_all(frame)
        return scale.entries * ENTRY_BYTES / (time.perf_counter() - begin) / 1e6

    return run


def fill(manager: LedgerManager, digest: DigestType, entries: int, ensemble_size: int | None = None) -> int:
    """Write the rows to a new ledger; return its id."""
    with manager.create_ledger(password=PASSWORD, digest_type=digest, ensemble_size=ensemble_size) as writer:
        for pending in [writer.append_many_async(batch.column("payload").to_pylist()) for batch in rows(entries)]:
            pending.result()
    return writer.ledger_id


def frame_of(spark: SparkSession, ledger_id: int, **where: str) -> DataFrame:
    """Return a ledger as rows."""
    return spark.read.format("pybk").options(**where, ledger=str(ledger_id)).load()


@contextmanager
def parquet(directory: Path, scale: Scale) -> Iterator[Run]:
    """Parquet files, uncompressed."""
    write_parquet(directory / "rows", scale.entries)
    with session(directory) as spark:
        yield turns(spark.read.parquet(str(directory / "rows")), scale)


@contextmanager
def store(digest: DigestType, directory: Path, scale: Scale) -> Iterator[Run]:
    """The directory of an embedded store."""
    path = str(directory / "store")
    with LedgerManager.open(path) as manager:
        ledger_id = fill(manager, digest, scale.entries)
    with session(directory) as spark:
        yield turns(frame_of(spark, ledger_id, path=path, passwordFile=password_file(directory)), scale)


@contextmanager
def cluster(digest: DigestType, curve: bool, directory: Path, scale: Scale) -> Iterator[Run]:
    """A ledger of one replica, on the bookie on the executor's host."""
    with session(directory) as spark, colocated(spark, directory, curve=curve) as found:
        with found.connect() as client:
            ledger_id = fill(client, digest, scale.entries, ensemble_size=1)
        yield turns(frame_of(spark, ledger_id, **found.options), scale)


def beside_parquet(share: float) -> list[Target]:
    """Return the target for the speed relative to Parquet."""
    return [Target(f">= {share} x parquet", lambda rates: share * rates[PARQUET])]


CONTESTS: Final[Sequence[Contest]] = (
    Contest(
        "read",
        "spark.read, verified, nothing done with the rows",
        "MB/s",
        [
            Contestant(PARQUET, parquet),
            *(
                Contestant(f"pybk store, {name}", partial(store, digest), beside_parquet(_OF_STORE))
                for name, digest in DIGESTS
            ),
            *(
                Contestant(
                    f"pybk bookie, {name}{suffix}", partial(cluster, digest, curve), beside_parquet(_OF_BOOKIE[digest])
                )
                for name, digest in DIGESTS
                for suffix, curve in CURVES
            ),
        ],
    ),
)
