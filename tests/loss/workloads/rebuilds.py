"""A store that loses a part again and again, and whose index is made again without what is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final

from pybk.errors import CorruptError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.operations.store_repair import rebuild_index
from pybk.storage.directories import ACCEPTED_LOSS
from pybk.storage.format.catalog import CATALOG_PREFIX
from pybk.storage.format.cookie import COOKIE_NAME
from pybk.storage.io.filesystem import OsFileSystem
from tests.loss.workloads.ledgers import append
from tests.loss.workloads.workload import RECOVERED, Report, ignore
from tests.storage.real_store import open_quick
from tests.storage.test_kill import payload_of


def _garble_entries(root: Path) -> None:
    path = root / "ssd" / "entries" / "data.mdb"
    path.write_bytes(b"?" * path.stat().st_size)


def _lose_entries(root: Path) -> None:
    (root / "ssd" / "entries" / "data.mdb").unlink()


def _lose_watermark(root: Path) -> None:
    (root / "watermark").unlink()


def _lose_catalogs(root: Path) -> None:
    for path in root.glob(f"{CATALOG_PREFIX}*"):
        path.unlink()


def _lose_cookies(root: Path) -> None:
    for path in (root, root / "nvme"):
        (path / COOKIE_NAME).unlink()


def _lose_index(root: Path) -> None:
    shutil.rmtree(root / "ssd" / "index")


_HARMS: Final[tuple[Callable[[Path], None], ...]] = (
    _garble_entries,
    _lose_entries,
    _lose_watermark,
    _lose_catalogs,
    _lose_cookies,
    _lose_index,
)


class Harmed:
    """Entries are read as they were, or are known to be lost, and the store says for good that some may be."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        root = directory / "store"
        for harm in (*choice.sample(_HARMS, len(_HARMS)), None):
            with open_quick(root) as manager:
                for hint in (StorageHint.NVME, StorageHint.SSD):
                    with manager.create_ledger(storage_hints={hint}, insecure=True) as writer:
                        report(f"made {writer.ledger_id} {hint}")
                        append(writer, choice.choice((3, 40)), report)
                manager.checkpoint()
            if harm is not None:
                report("harming")
                harm(root)
                self._sync(root)
                self._rebuild(root, report)

    def _sync(self, root: Path) -> None:
        """Make a harm durable, as far as names go: a harm that a cut takes back is none."""
        for path in (root, *(each for each in root.rglob("*") if each.is_dir())):
            OsFileSystem().sync_directory(str(path))

    def _rebuild(self, root: Path, report: Report) -> None:
        assert rebuild_index(root, accept_loss=True).made
        report("rebuilt")

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        root = directory / "store"
        if reports.count("harming") > reports.count("rebuilt"):
            self._rebuild(root, report)
        acknowledged: dict[int, int] = {}
        on_ssd = set()
        for word, *said in map(str.split, reports):
            if word == "made" and said[1] == StorageHint.SSD:
                on_ssd.add(int(said[0]))
            elif word == "appended":
                acknowledged[int(said[0])] = int(said[1])
        with open_quick(root) as manager:
            lost = [each for each, last in acknowledged.items() if not self._is_there(manager, each, last)]
            report(RECOVERED)
        assert set(lost) <= on_ssd, f"ledgers {lost} have lost entries"
        assert not lost or (root / ACCEPTED_LOSS).exists(), f"nothing says that ledgers {lost} have lost entries"

    def _is_there(self, manager: LedgerManager, ledger_id: int, last: int) -> bool:
        """Return whether all acknowledged entries of a ledger can be read."""
        reader = manager.open_ledger(ledger_id)
        assert reader.last_add_confirmed >= last, f"ledger {ledger_id} ends before entry {last}"
        for number in range(last + 1):
            try:
                (entry,) = reader.read(number, number)
            except CorruptError:
                return False
            assert entry.payload == payload_of(ledger_id, number)
        return True
