"""A contest about verifying every replica of a ledger on executors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from bench.cluster.appending import CURVES
from bench.contest import Contest, Contestant, Run, Scale, at_least
from bench.payloads import ENTRY_BYTES, PASSWORD
from bench.spark.bookies import colocated
from bench.spark.reading import DIGESTS, fill
from bench.spark.session import session
from pybk import DigestType, LedgerManager
from pybk.spark import verify

ENOUGH: Final = at_least(300)


def audited(spark: SparkSession, where: str, secret: bytes | None, entries: int, _: float) -> float:
    """Verify all ledgers once; return payload megabytes per second."""
    begin = time.perf_counter()
    found = verify(spark, where, cluster_secret=secret, password=PASSWORD, quiet=True)
    took = time.perf_counter() - begin
    if not found.sound or found.entries != entries:
        raise RuntimeError(f"{found.entries} of {entries} entries were found sound: {found}")
    return entries * ENTRY_BYTES / took / 1e6


@contextmanager
def store(digest: DigestType, directory: Path, scale: Scale) -> Iterator[Run]:
    """The directory of an embedded store."""
    path = str(directory / "store")
    with LedgerManager.open(path) as manager:
        fill(manager, digest, scale.entries)
    with session(directory) as spark:
        yield partial(audited, spark, path, None, scale.entries)


@contextmanager
def cluster(digest: DigestType, curve: bool, directory: Path, scale: Scale) -> Iterator[Run]:
    """A ledger of one replica, on the bookie on the executor's host."""
    with session(directory) as spark, colocated(spark, directory, curve=curve) as found:
        with found.connect() as client:
            fill(client, digest, scale.entries, ensemble_size=1)
        yield partial(audited, spark, found.url, found.secret, scale.entries)


CONTESTS: Final[Sequence[Contest]] = (
    Contest(
        "verify",
        "verify, every replica",
        "MB/s",
        [
            *(Contestant(f"store, {name}", partial(store, digest), [ENOUGH]) for name, digest in DIGESTS),
            *(
                Contestant(f"bookie, {name}{suffix}", partial(cluster, digest, curve), [ENOUGH])
                for name, digest in DIGESTS
                for suffix, curve in CURVES
            ),
        ],
    ),
)
