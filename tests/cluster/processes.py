"""Clusters of real processes: bookies and writers that can be killed, stopped, cut off and started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from pybk.credentials import ClusterSecret
from pybk.ledger.ledger_metadata import Bookie
from pybk.manager.ledger_manager import LedgerManager
from tests.cluster.child import Orders, route
from tests.cluster.inside import SECRET, make_cluster
from tests.cluster.proxy import Proxy
from tests.paths import ROOT
from tests.storage.real_store import python_path
from tests.waiting import WAIT_S, stop, wait_until

QUICK_DRAIN = {"PYBK_BOOKIE_DRAIN_S": "2", "PYBK_BOOKIE_DRAIN_IDLE_S": "0.1"}
"""Options of bookies that are to end soon once they are asked to."""


class Child:
    """A process that says things line by line; killed when the context is left.

    Args:
        arguments: Its arguments.
        secret: The cluster's secret; None for none.
        log: Where its standard error goes.
        module: What it runs.
        variables: More variables of its environment.

    Attributes:
        lines: What it said.
    """

    def __init__(
        self,
        arguments: list[str],
        secret: bytes | None,
        log: Path,
        *,
        module: str = "tests.cluster.child",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": python_path()}
        environment.pop("PYBK_CLUSTER_SECRET", None)
        if secret is not None:
            environment["PYBK_CLUSTER_SECRET"] = secret.decode()
        environment |= QUICK_DRAIN
        environment.update(variables)
        self._log = log
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=environment,
            )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        """Return the process."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it if it still runs, and close its pipes; a test that failed leaves nothing to the next ones."""
        self.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.decode().rstrip("\n"))

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, stopped or not."""
        return self._process.poll() is None

    def said(self, word: str) -> list[str]:
        """Return the rest of all lines that began with a word."""
        return [line[len(word) + 1 :] for line in list(self.lines) if line.startswith(word + " ")]

    def wait_for(self, what: Callable[[], Any], seconds: float = WAIT_S) -> Any:
        """Wait until something is true, as long as the process runs or has just ended."""

        def happened() -> Any:
            found = what()
            if not found and not self.alive:
                self._reader.join(WAIT_S)
                found = what() or True
            return found

        try:
            wait_until(happened, seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; it said {self.lines[-5:]}, {self.complaint()}") from error
        found = what()
        assert found, f"it ended before; it said {self.lines[-5:]}, {self.complaint()}"
        return found

    def complaint(self) -> str:
        """Return the end of its standard error."""
        return self._log.read_text(errors="replace")[-1500:]

    def order(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def finish(self) -> None:
        """Close its standard input, at which it ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stop it with SIGSTOP, unless it has ended."""
        if self.alive:
            stop(self._process.pid)

    def kill(self) -> None:
        """Kill it; what it said up to then is known afterwards."""
        self._process.kill()
        self.join()

    def join(self, seconds: float = WAIT_S) -> int:
        """Wait for its end and return its exit status."""
        status = self._process.wait(seconds)
        self._reader.join(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return status


class BookieProcess:
    """One bookie, in a process of its own whenever it runs.

    Attributes:
        name: Its bookie id.
        directory: Its directory.
        proxy: What clients with ``routes`` reach it through.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.directory = cluster.directory / name
        self._cluster = cluster
        self.process: Child | None = None
        self.proxy = Proxy("tcp://127.0.0.1:9")

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.alive

    @property
    def child(self) -> Child:
        """Its process."""
        assert self.process is not None
        return self.process

    def begin(self, listen: str = "tcp://127.0.0.1:*") -> Child:
        """Start its process."""
        cluster = self._cluster
        arguments = ["bookie", str(self.directory), "--listen", listen, "--metadata", cluster.url, "--id", self.name]
        self.process = Child([*arguments, "--json"], cluster.secret, cluster.directory / f"{self.name}.log")
        return self.process

    def serving(self) -> str:
        """Wait until it serves, and return its address."""
        child = self.child
        line = child.wait_for(lambda: next((line for line in list(child.lines) if line.startswith("{")), None))
        address: str = json.loads(line)["addresses"][0]
        self.proxy.target = address
        return address

    def start(self, listen: str = "tcp://127.0.0.1:*") -> str:
        """Start it, and return its address once it serves."""
        self.begin(listen)
        return self.serving()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.child.kill()

    def stop(self) -> None:
        """Stop it with SIGSTOP."""
        self.child.stop()

    def resume(self) -> None:
        """Let it continue with SIGCONT."""
        self.child.signal(signal.SIGCONT)

    def terminate(self) -> int:
        """Have it close, and return its exit status."""
        self.child.signal(signal.SIGTERM)
        return self.child.join()

    def wipe(self) -> None:
        """Forget everything that it kept."""
        shutil.rmtree(self.directory)


class Cluster:
    """Bookies in processes, and clients of this process and of others.

    Attributes:
        directory: Where everything lies.
        url: The metadata store's.
        secret: The cluster's; None for none.
        given: What clients of this process are given from now on, at first the secret.
        bookies: By name.
    """

    def __init__(self, directory: Path, *, url: str | None = None, secret: bytes | None = SECRET) -> None:
        self.directory = directory
        self.secret = secret
        self.given: ClusterSecret | None = secret
        self.url = url or make_cluster(directory, secret)
        self.bookies: dict[str, BookieProcess] = {}
        self.writers: list[Child] = []
        self._clients: list[LedgerManager] = []

    def add(self, count: int) -> None:
        """Start more bookies."""
        new = [self.make(f"bookie-{len(self.bookies) + number}") for number in range(count)]
        for bookie in new:
            self.bookies[bookie.name] = bookie
            bookie.begin()
        for bookie in new:
            bookie.serving()

    def make(self, name: str) -> BookieProcess:
        """Make a bookie that is not started yet."""
        return BookieProcess(self, name)

    def bookie(self, which: Bookie) -> BookieProcess:
        """Return the bookie that metadata names."""
        return self.bookies[which.bookie_id]

    @property
    def routes(self) -> dict[str, str]:
        """The proxies' addresses by bookie."""
        return {name: bookie.proxy.address for name, bookie in self.bookies.items()}

    def connect(self, *, routed: bool = False) -> LedgerManager:
        """Return a client; it is closed with the cluster."""
        client = LedgerManager.connect(self.url, cluster_secret=self.given)
        self._clients.append(client)
        if routed:
            route(client, self.routes)
        return client

    def begin_writer(self, *, routed: bool = False, **orders: Any) -> Child:
        """Start a writer in a process of its own; keyword arguments as ``Orders`` has them."""
        ordered = Orders(self.url, self.routes if routed else {}, **orders)
        child = Child(["writer", ordered.text()], self.secret, self.directory / f"writer-{len(self.writers)}.log")
        self.writers.append(child)
        return child

    def writer(self, **orders: Any) -> Child:
        """Start a writer as ``begin_writer`` does, and return it once its ledger exists."""
        child = self.begin_writer(**orders)
        child.wait_for(lambda: child.said("ledger"))
        return child

    def close(self) -> None:
        """Close the clients and kill all processes."""
        for child in [*self.writers, *(bookie.child for bookie in self.bookies.values() if bookie.process is not None)]:
            child.kill()
        for client in self._clients:
            client.close()
        for bookie in self.bookies.values():
            bookie.proxy.close()


@contextmanager
def running(directory: Path, count: int, **arguments: Any) -> Iterator[Cluster]:
    """Run a cluster of so many bookies; other arguments as for ``Cluster``."""
    cluster = Cluster(directory, **arguments)
    try:
        cluster.add(count)
        yield cluster
    finally:
        cluster.close()
