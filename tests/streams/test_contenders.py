"""Two processes that compete for one log of a cluster, and are killed at random: one owner an epoch, nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from pybk import LedgerManager, Log, WriteAheadLog
from tests.cluster.inside import inside
from tests.paths import ROOT
from tests.sampling import some
from tests.streams.contender_child import NAME
from tests.waiting import WAIT_S, wait_until
from tests.zookeeper_server import ZooKeeperServer, missing, zookeeper_server

__all__ = ["zookeeper_server"]

KILLS = some(3, 6)
ACKED_BETWEEN = 40
"""Records of both that are acknowledged between two kills."""


class Contender:
    """A process that competes for the log, and what it printed."""

    def __init__(self, url: str, kind: str, seed: int) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.streams.contender_child", url, kind, str(seed)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.endswith("\n"):  # the last one may be cut off
                self.lines.append(line.rstrip("\n"))

    def said(self, word: str) -> list[list[str]]:
        """Return what followed a word at the beginning of lines."""
        return [line.split()[1:] for line in list(self.lines) if line.startswith(word + " ")]

    def kill(self) -> None:
        """Kill it, and read what it printed last."""
        self._child.kill()
        self._child.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert self._child.stdout is not None
        self._child.stdout.close()

    @property
    def alive(self) -> bool:
        """Whether it runs; it never ends by itself."""
        return self._child.poll() is None


@pytest.fixture(params=["lmdb", pytest.param("zookeeper", marks=pytest.mark.long)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "lmdb":
        yield ""
    elif missing() is not None:
        pytest.skip(str(missing()))
    else:
        server: ZooKeeperServer = request.getfixturevalue("zookeeper_server")
        yield server.url()


def read(manager: LedgerManager, kind: str) -> list[tuple[int, bytes]]:
    """Take the log over once more, and return its records with their sequence numbers."""
    if kind == "log":
        with Log.open(manager, NAME, insecure=True) as log:
            log.writer(steal=True).close()
            return [(record.seq, record.data) for record in log.reader()]
    with WriteAheadLog.open(manager, NAME, insecure=True, steal=True) as wal:
        return [(record.lsn, record.data) for record in wal.replay()]


@pytest.mark.sampled(one_in=8, group="processes")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["log", pytest.param("wal", marks=pytest.mark.long)])
def test_processes_compete_for_a_log(tmp_path: Path, url: str, kind: str) -> None:
    source = Random(7)
    everyone: list[Contender] = []
    with inside(tmp_path / "cluster", url=url) as cluster:

        def start() -> Contender:
            everyone.append(Contender(cluster.url, kind, len(everyone)))
            return everyone[-1]

        def acked() -> int:
            return sum(len(each.said("acked")) for each in everyone)

        def contest(rivals: list[Contender], enough: int) -> Callable[[], bool]:
            """Return what says that both owned the log, and enough was acknowledged; or that one ended by itself."""

            def is_over() -> bool:
                owned = all(each.said("epoch") for each in rivals)
                return (owned and acked() >= enough) or not all(each.alive for each in rivals)

            return is_over

        rivals = [start(), start()]
        try:
            for _ in range(KILLS):
                enough = acked() + ACKED_BETWEEN + source.randrange(ACKED_BETWEEN)
                wait_until(contest(list(rivals), enough), seconds=4 * WAIT_S)
                assert all(each.alive for each in rivals), [each.lines[-5:] for each in rivals]
                place = source.randrange(2)
                rivals[place].kill()
                rivals[place] = start()
            wait_until(lambda: any(each.said("refused") for each in everyone), seconds=4 * WAIT_S)
        finally:
            for each in everyone:
                with suppress(ValueError):
                    each.kill()
        with cluster.connect() as manager:
            records = read(manager, kind)
    check(everyone, records)


def check(everyone: list[Contender], records: list[tuple[int, bytes]]) -> None:
    """Check what became of all that was acknowledged."""
    first = 0 if not records else records[0][0]
    assert [seq for seq, _ in records] == list(range(first, first + len(records))), "each position once, without gaps"
    found = {str(seq): data.decode().split() for seq, data in records}
    for contender in everyone:
        for seq, *data in contender.said("acked"):
            assert found.get(seq) == data, f"record {seq} was acknowledged as {data}, and is {found.get(seq)}"
    order = [tuple(map(int, data.split())) for _, data in records]
    assert order == sorted(order), "records of an epoch lie together, in the order of their appends"
    assert len(set(order)) == len(order), "a record is there twice"
    epochs = [epoch for contender in everyone for (epoch,) in contender.said("epoch")]
    assert len(set(epochs)) == len(epochs), "an epoch had two owners"
    owners = sum(bool(contender.said("epoch")) for contender in everyone)
    assert owners >= KILLS, "hardly anybody owned the log"
