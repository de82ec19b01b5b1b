"""A cluster of bookies, one on the host of each of a session's executors."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from bench.payloads import PASSWORD
from pybk import LedgerManager
from pybk.spark import ExecutorBookie, start_bookies

END_SECONDS: Final = 10.0
STEP_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Colocated:
    """Bookies on the hosts of executors.

    Attributes:
        url: Where the cluster's metadata is.
        secret: The cluster's secret, or None.
        directory: Of files of secrets.
        bookies: They.
        start_seconds: What starting them took.
    """

    url: str
    secret: bytes | None
    directory: Path
    bookies: Sequence[ExecutorBookie]
    start_seconds: float

    @property
    def options(self) -> dict[str, str]:
        """Options of reads and writes, of ledgers that have the password of the payloads."""
        found = {"metadataUri": self.url, "passwordFile": password_file(self.directory)}
        return found if self.secret is None else {**found, "clusterSecretFile": str(self.directory / "secret")}

    def connect(self) -> LedgerManager:
        """Return a client."""
        return LedgerManager.connect(self.url, cluster_secret=self.secret)


@contextmanager
def colocated(spark: SparkSession, directory: Path, *, curve: bool) -> Iterator[Colocated]:
    """Have one bookie of a new cluster on each executor's host.

    Args:
        spark: The session; it has run a Python task before, so that what is measured are the bookies.
        directory: For their directories, the metadata and the secret.
        curve: With a cluster secret: CURVE, and MACs.
    """
    secret = secrets.token_hex(32).encode() if curve else None
    file = directory / "secret"
    if secret is not None:
        file.touch(0o600)
        file.write_bytes(secret)
    url = f"lmdb://{directory.resolve()}/metadata"
    begin = time.perf_counter()
    bookies = start_bookies(
        spark,
        metadata=url,
        directory=str(directory.resolve() / "bookies"),
        cluster_secret_file=None if secret is None else str(file.resolve()),
    )
    took = time.perf_counter() - begin
    try:
        yield Colocated(url, secret, directory.resolve(), bookies, took)
    finally:
        for bookie in bookies:
            end(bookie.pid)


def password_file(directory: Path) -> str:
    """Make a file that has the password of the payloads, and return its path."""
    file = directory.resolve() / "password"
    file.write_bytes(PASSWORD)
    return str(file)


def end(pid: int) -> None:
    """End a process that is not a child of this one, and wait until it has."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + END_SECONDS
        while time.monotonic() < until:
            os.kill(pid, 0)
            time.sleep(STEP_SECONDS)
        os.kill(pid, signal.SIGKILL)
