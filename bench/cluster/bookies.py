"""A cluster to measure: ``pybk bookie`` processes, and a client in this one."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pybk import LedgerManager

BOOKIES: Final = 3
SECRET_VARIABLE: Final = "PYBK_CLUSTER_SECRET"
PROCESS_CLOCK: Final = 2  # of Linux's clock ids: CPU time as the scheduler counts it


def process_cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, all threads together, from ``clock_getcpuclockid``."""
    return time.clock_gettime(~pid << 3 | PROCESS_CLOCK)


class Cluster:
    """Bookies in processes of their own, and a client in this one.

    Args:
        directory: Where the bookies' directories and, unless ``url`` says else, the metadata lie.
        curve: With a cluster secret: CURVE, and MACs.
        bookies: How many to start.
        url: Where the metadata is; None for LMDB next to the bookies.
        http: Whether each has an HTTP port.
        node: Whether the client is one of the bookies.

    Attributes:
        client: The client.
        http: The URLs of the HTTP ports, by bookie.
        url: Where the metadata is.
        secret: The cluster's secret, or None.
    """

    client: LedgerManager

    def __init__(
        self,
        directory: Path,
        *,
        curve: bool,
        bookies: int = BOOKIES,
        url: str | None = None,
        http: bool = False,
        node: bool = False,
    ) -> None:
        self._directory = directory
        self.url = url or f"lmdb://{directory.resolve()}/metadata"
        self.secret = secrets.token_hex(32).encode() if curve else None
        self.environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        if self.secret is not None:
            self.environment[SECRET_VARIABLE] = self.secret.decode()
        self._processes: list[subprocess.Popen[str]] = []
        self._bookies: dict[str, subprocess.Popen[str]] = {}
        self._wanted = bookies - node
        self._node = node
        self._options = ["--http", "127.0.0.1:0"] if http else []
        self.http: dict[str, str] = {}

    def start(self, count: int = 1) -> None:
        """Start more bookies; they serve on return."""
        begun = [self._begin() for _ in range(count)]
        for process in begun:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a bookie ended with exit code {process.wait()}; its error is above")
            said = json.loads(line)
            self._bookies[said["bookie"]] = process
            if said["http"]:
                self.http[said["bookie"]] = said["http"]

    def _begin(self) -> subprocess.Popen[str]:
        path = self._directory / f"bookie-{secrets.token_hex(4)}"
        command = [sys.executable, "-m", "pybk.admin", "bookie", str(path), "--json", *self._options]
        process = subprocess.Popen(
            [*command, "--listen", "tcp://127.0.0.1:*", "--metadata", self.url],
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        self._processes.append(process)
        return process

    def kill(self, bookie_id: str) -> None:
        """Kill a bookie with SIGKILL."""
        process = self._bookies.pop(bookie_id)
        self._processes.remove(process)
        process.kill()
        process.communicate()

    def pid(self, bookie_id: str) -> int:
        """Return the id of a bookie's process."""
        return self._bookies[bookie_id].pid

    @property
    def pids(self) -> list[int]:
        """The ids of the bookies' processes."""
        return [process.pid for process in self._processes]

    def cpu_seconds(self) -> float:
        """Return the CPU time that the bookies and this process have used so far."""
        return sum(map(process_cpu_seconds, (os.getpid(), *self.pids)))

    def __enter__(self) -> Cluster:
        """Start it."""
        try:
            self.start(self._wanted)
            if self._node:
                path = self._directory / "node"
                self.client = LedgerManager.open(
                    path, listen="tcp://127.0.0.1:*", metadata=self.url, cluster_secret=self.secret
                )
            else:
                self.client = LedgerManager.connect(self.url, cluster_secret=self.secret)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        try:
            self.client.close()
        finally:
            self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@contextmanager
def child(cluster: Cluster, what: str, *operands: object) -> Iterator[subprocess.Popen[str]]:
    """Run a client in a process of its own (see ``bench.cluster.child``); killed when the context is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.cluster.child", what, cluster.url, *map(str, operands)],
        stdout=subprocess.PIPE,
        text=True,
        env=cluster.environment,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> str:
    """Return the next line that a child prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the client process ended with exit code {process.wait()}; its error is above")
    return line
