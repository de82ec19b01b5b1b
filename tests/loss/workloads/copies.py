"""A bookie whose entries are damaged again and again, and replaced by copies, as a repair does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Final

from pybk.bookie.replicas import Replicas
from pybk.flags import StorageHint
from pybk.replication.messages import Status
from pybk.storage.compaction.mover import UnmovedError
from pybk.storage.io.filesystem import OsFileSystem
from pybk.testing import cheap_keys, small_config
from tests.bookie.replica_harness import LEDGER, add, content, describe, entry, make_run
from tests.loss.workloads.workload import RECOVERED, Report, ignore

_COUNT: Final = 40
_TOGETHER: Final = 8


@contextmanager
def _opened(directory: Path) -> Iterator[Replicas]:
    with cheap_keys():
        replicas = Replicas.open(str(directory / "bookie"), config=small_config())
    try:
        yield replicas
    finally:
        replicas.close()


class Copied:
    """Entries of one ledger in the log, and in the tier that it is moved to."""

    rounds = 5

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        with _opened(directory) as replicas:
            replicas.create(LEDGER, describe())
            for first in range(0, _COUNT, _TOGETHER):
                assert add(replicas, make_run(first, _TOGETHER)) is Status.OK
                report(f"added {first + _TOGETHER}")
        for _ in range(self.rounds):
            report("damaging")
            self._damage(directory, choice)
            with _opened(directory) as replicas:
                self._replace(replicas, _COUNT, report)
                if choice.random() < 0.5:
                    with suppress(UnmovedError):  # what was damaged stays where it is
                        replicas.move(LEDGER, choice.choice([StorageHint.NVME, StorageHint.HDD]))
                replicas.store.scheduler.checkpoint()

    def _damage(self, directory: Path, choice: Random) -> None:
        """Flip a bit of an entry where it lies in a log file or cold segment, durably."""
        found = entry(choice.randrange(_COUNT))
        for path in sorted((*directory.rglob("*.log"), *directory.rglob("*.cold"))):
            place = path.read_bytes().rfind(found)
            if place >= 0:
                file = OsFileSystem().open(str(path), writable=True)
                file.write([bytes([found[100] ^ 1])], place + 100)
                file.sync()
                file.close()

    def _replace(self, replicas: Replicas, count: int, report: Report) -> None:
        for first in range(0, count, _TOGETHER):
            assert add(replicas, make_run(first, _TOGETHER), recovery=True) is Status.OK
        report("replaced")

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        counts = [int(each.split()[1]) for each in reports if each.startswith("added")]
        if not counts:
            return
        with _opened(directory) as replicas:
            if reports.count("damaging") > reports.count("replaced"):
                self._replace(replicas, counts[-1], report)
            for number in range(counts[-1]):
                status, run = replicas.read(LEDGER, number, number, 1, 1 << 20, checked=True)
                assert status is Status.OK, f"entry {number} is {status.name}"
                assert content(run) == [entry(number)]
            report(RECOVERED)
