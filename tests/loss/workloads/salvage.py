"""A bookie that loses something durable again and again, and starts with what is left; its two peers have the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Final

from pybk.bookie.replicas import Replicas
from pybk.flags import StorageHint
from pybk.storage.compaction.mover import UnmovedError
from pybk.storage.io.filesystem import OsFileSystem
from pybk.testing import TestCluster, small_config
from tests.loss.workloads.clusters import Bookies
from tests.loss.workloads.ledgers import append
from tests.loss.workloads.workload import Report


@contextmanager
def _offline(root: Path) -> Iterator[Replicas]:
    replicas = Replicas.open(str(root), config=small_config())
    try:
        yield replicas
    finally:
        replicas.close()


def _lose_watermark(root: Path) -> None:
    (root / "watermark").unlink()


def _destroy_log(root: Path) -> None:
    """Overwrite the log, durably."""
    for path in (root / "nvme").glob("*.log"):
        with closing(OsFileSystem().open(str(path), writable=True)) as file:
            file.write([b"?" * path.stat().st_size], 0)
            file.sync()


def _move(replicas: Replicas, tier: StorageHint) -> None:
    for ledger_id in replicas.ledgers():
        with suppress(UnmovedError):  # what an earlier harm took is damaged
            replicas.move(ledger_id, tier)


def _lose_cold_segments(root: Path) -> None:
    with _offline(root) as replicas:
        _move(replicas, StorageHint.HDD)
    for path in root.rglob("*.cold"):
        path.unlink()


def _lose_entries(root: Path) -> None:
    with _offline(root) as replicas:
        _move(replicas, StorageHint.SSD)
        replicas.store.scheduler.checkpoint()
    (root / "ssd" / "entries" / "data.mdb").unlink()


_HARMS: Final[tuple[Callable[[Path], None], ...]] = (
    _lose_watermark,
    _destroy_log,
    _lose_cold_segments,
    _lose_entries,
)


class Salvaged(Bookies):
    """Three bookies, one of which is harmed between its starts."""

    def __init__(self) -> None:
        super().__init__(3)

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        path = directory / "of" / "cluster"
        OsFileSystem().make_directory(str(path))
        for harm in (*choice.sample(_HARMS, len(_HARMS)), None):
            with TestCluster(path, 3) as cluster:
                report("began")
                for count in (3, 20):
                    with cluster.connect().create_ledger(ensemble_size=3, insecure=True) as writer:
                        report(f"made {writer.ledger_id}")
                        append(writer, count, report)
                    report(f"closed {writer.ledger_id}")
            if harm is not None:
                harm(path / "b1")
