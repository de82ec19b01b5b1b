"""The recipe for several processes: workers that append outlive their only bookie, killed and started again."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pybk import LedgerManager, Log, Secret
from tests.cluster.processes import Child
from tests.cluster.worker_child import PASSWORD, THREADS
from tests.docs.walkthrough import blocks_of
from tests.private_files import write_private

WORKERS = {"a": "app", "b": "app", "c": "log"}


class Host:
    """A host of the recipe: a bookie, and workers that are its clients.

    Attributes:
        url: The metadata store's.
        secret: The file of the cluster's secret.
        workers: The processes, by name.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.url = f"lmdb://{directory}/metadata"
        self.secret = directory / "cluster-secret"
        self.workers: dict[str, Child] = {}
        write_private(self.secret, b"ab" * 32)
        program = next(each for each in blocks_of("howto/forking.md") if each.caption == "app.py")
        (directory / "app.py").write_text(program.text)
        self.bookie = self.begin_bookie()

    def begin_bookie(self) -> Child:
        """Start the bookie as the page does."""
        options = ["--listen", "tcp://127.0.0.1:*", "--metadata", self.url, "--cluster-secret-file", str(self.secret)]
        arguments = ["bookie", str(self._directory / "bookie"), "--id", "b1", *options]
        self.bookie = Child(arguments, None, self._directory / "bookie.log", module="pybk")
        return self.bookie

    def wait_until_served(self) -> None:
        """Wait until the bookie serves."""
        self.bookie.wait_for(lambda: self.bookie.said("bookie"))

    def begin_workers(self) -> None:
        """Start the workers."""
        for name, kind in WORKERS.items():
            log = self._directory / f"{name}.log"
            module = "tests.cluster.worker_child"
            self.workers[name] = Child([kind, name, str(self._directory)], None, log, module=module)

    def wait_for_appends(self) -> None:
        """Wait until each thread of each worker has had two further appends acknowledged, begun by now or later."""
        for worker in self.workers.values():
            had = _counted(worker.said("acked"))
            worker.wait_for(lambda: all(_counted(worker.said("acked"))[each] >= had[each] + 2 for each in had))  # noqa: B023

    def end_workers(self) -> None:
        """Have the workers end, which fails if one of them had an error."""
        for worker in self.workers.values():
            worker.finish()
        for worker in self.workers.values():
            assert worker.join() == 0, worker.complaint()
            assert worker.lines[-1] == "stopped"

    def end(self) -> None:
        """End every process."""
        for each in (*self.workers.values(), self.bookie):
            if each.alive:
                each.kill()


def _counted(acked: Iterable[str]) -> dict[int, int]:
    counts = dict.fromkeys(range(THREADS), 0)
    for line in acked:
        counts[int(line.split()[0])] += 1
    return counts


@contextmanager
def running(directory: Path) -> Iterator[Host]:
    host = Host(directory)
    try:
        yield host
    finally:
        host.end()


def read_all(host: Host) -> dict[tuple[str, int], list[int]]:
    """Return the numbers of the records of each thread of each worker, in the order in which they are read."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    with LedgerManager.connect(host.url, cluster_secret=Secret(file=str(host.secret))) as manager:
        payloads = []
        for ledger_id in manager.list_ledgers("requests"):
            with manager.open_ledger(ledger_id, password=PASSWORD, recover=False) as reader:
                payloads += [entry.payload for entry in reader]
        for name in [name for name, kind in WORKERS.items() if kind == "log"]:
            with (
                Log.open(manager, f"requests/{name}", password=PASSWORD, quorums=(1, 1, 1)) as log,
                log.reader() as reader,
            ):
                payloads += [each.data for each in reader]
    for payload in payloads:
        name, thread, number = payload.decode().split()
        found[name, int(thread)].append(int(number))
    return found


@pytest.mark.sampled(one_in=8, group="processes")
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_workers_outlive_their_bookie_which_is_killed_again_and_again(kills: int, tmp_path: Path) -> None:
    """Every record that was acknowledged is there once and in order, nothing else is, and no worker had an error."""
    draw = random.Random(kills)
    with running(tmp_path) as host:
        host.wait_until_served()
        host.begin_workers()
        for _ in range(kills):
            host.wait_for_appends()
            host.bookie.kill()
            host.begin_bookie()
            if draw.random() < 0.3:  # before it serves, too
                time.sleep(draw.random())
                host.bookie.kill()
                host.begin_bookie()
            host.wait_until_served()
        host.wait_for_appends()
        host.end_workers()
        acked = {name: _counted(worker.said("acked")) for name, worker in host.workers.items()}
        found = read_all(host)
    assert found == {
        (name, thread): list(range(count)) for name, counts in acked.items() for thread, count in counts.items()
    }
