"""What the tests of backups share: sources and targets that stop where a test says."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pybk.backup import back_up, restore_backup
from pybk.backup.backing_up import BackupReport, BackupRun
from pybk.backup.source import Cut, Source, StoreSource
from pybk.backup.target import DirectoryTarget, Target
from pybk.credentials import Passwords
from pybk.manager.ledger_manager import LedgerManager
from tests.internals import store_view_of

PASSWORD = b"a password that no backup has"
KNOWN = Passwords(PASSWORD)


class StoppedError(Exception):
    """What a test stops a run with."""


class StoppingTarget(DirectoryTarget):
    """A directory whose put number ``stop_at`` is cut off, before or after the file is there."""

    def __init__(self, path: Path, stop_at: int, *, after: bool) -> None:
        super().__init__(str(path), writes=True)
        self.puts = 0
        self._stop_at = stop_at
        self._after = after

    def put(self, name: str, data: bytes) -> None:
        self.puts += 1
        if self.puts == self._stop_at and not self._after:
            raise StoppedError(name)
        super().put(name, data)
        if self.puts == self._stop_at:
            raise StoppedError(name)


class HookedSource(StoreSource):
    """A store, and what a test does right after each cut."""

    def __init__(self, manager: LedgerManager, after_cut: Callable[[int], None]) -> None:
        super().__init__(store_view_of(manager))
        self.cuts = 0
        self._after_cut = after_cut

    def cut(self) -> Cut:
        cut = super().cut()
        self.cuts += 1
        # In a thread of its own, as another user of the store.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._after_cut, self.cuts).result()
        return cut


def run_with(source: Source, target: Target, *, pack_bytes: int = 4096) -> BackupReport:
    """Make a run with small packs, and release the target whatever happens."""
    try:
        return BackupRun(source, target, KNOWN, lambda done, total: None, pack_bytes=pack_bytes).run()
    finally:
        target.close()


def backed_up(source: Any, target: Path | str, **options: Any) -> BackupReport:
    """Back up with the passwords that the tests' ledgers have."""
    return back_up(source, target, passwords=KNOWN, **options)


def restored(target: Path, path: Path, **options: Any) -> Path:
    """Restore with the passwords that the tests' ledgers have, and return the directory."""
    restore_backup(target, path, passwords=KNOWN, **options)
    return path


def files(path: Path) -> dict[str, bytes]:
    """Return the files of a backup, without its lock."""
    return {each.name: each.read_bytes() for each in path.iterdir() if each.name != "LOCK"}
