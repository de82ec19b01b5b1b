"""A store that is changed as a whole: its level, its directories, its catalog, its notes; one whose disk is full."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from pybk.errors import StorageFullError
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.healing.scrub import EmbeddedScrub
from pybk.ledger import keys
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage import preallocation
from pybk.storage.format import catalog
from pybk.storage.format.cookie import COOKIE_FORMATS, COOKIE_NAME
from pybk.storage.index import catalog_and_index
from pybk.storage.io.filesystem import OsFile, OsFileSystem
from pybk.storage.store import Store
from tests.internals import store_of
from tests.loss.workloads.ledgers import Ledgers, Rebuilt, Working, append, check_ledgers
from tests.loss.workloads.workload import RECOVERED, Report, ignore
from tests.storage.real_store import open_quick
from tests.storage.store_harness import CONFIG
from tests.storage.test_full_disk import made_when_full


class Raised:
    """A store of the first level that is raised from level to level; its ledgers are sealed, and its checks noted."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        keys.SCRYPT_COST = 2  # type: ignore[misc]  # final for everybody but tests
        Store.open(str(directory / "store"), config=CONFIG, level=FeatureLevel.BASE).close()
        report(f"level {FeatureLevel.BASE:d}")
        for number, level in enumerate(sorted(COOKIE_FORMATS)):
            with open_quick(directory / "store") as manager:
                self._work(manager, level, number, choice, report)

    def _work(self, manager: LedgerManager, level: FeatureLevel, number: int, choice: Random, report: Report) -> None:
        newest = _closed_ledger(manager, choice.choice((3, 40)), report)
        store_of(manager).raise_level(level)
        report(f"level {level:d}")
        if level > FeatureLevel.BASE:
            for ledger_id in range(newest + 1):
                manager.reseal(ledger_id)
                report(f"sealed {ledger_id}")
        scrub = EmbeddedScrub(store_of(manager))
        for noted in range(3 * number, 3 * number + 3):
            scrub.save({"noted": noted})
            report(f"noted {noted}")
        _closed_ledger(manager, 3, report)

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        said: dict[str, list[int]] = {"level": [], "sealed": [], "noted": []}
        for word, *numbers in map(str.split, reports):
            if word in said:
                said[word].append(int(numbers[0]))
        with open_quick(directory / "store") as manager:
            check_ledgers(manager, [each for each in reports if each.split()[0] not in said], report)
            assert manager.feature_level >= max(said["level"], default=0)
            report(f"level {manager.feature_level:d}")
            for ledger_id in said["sealed"]:
                assert manager.open_ledger(ledger_id).metadata.seal, f"ledger {ledger_id} has no seal"
            noted = (EmbeddedScrub(store_of(manager)).load() or {"noted": -1})["noted"]
            assert noted >= max(said["noted"], default=-1)


class Moved(Ledgers):
    """A store whose directories are renamed, and named at the next open alone."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        super().run(directory, choice, report)
        disks = directory / "disks"
        for number in range(2):
            report("moving")
            for disk in ("nvme", "ssd", "hdd"):
                os.rename(disks / f"{disk}{number or ''}", disks / f"{disk}{number + 1}")
            OsFileSystem().sync_directory(str(disks))
            with self._named(directory, number + 1) as manager:
                report("moved")
                _closed_ledger(manager, 3, report)

    def _named(self, directory: Path, number: int) -> LedgerManager:
        disks = directory / "disks"
        tiers = {
            StorageHint.NVME: [str(disks / f"nvme{number}" / "a"), str(disks / f"nvme{number}" / "b")],
            StorageHint.SSD: [str(disks / f"ssd{number}" / "pybk")],
            StorageHint.HDD: [str(disks / f"hdd{number}" / "a"), str(disks / f"hdd{number}" / "b")],
        }
        return open_quick(directory / "var" / "lib" / "store", tiers=tiers)

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        own = [each for each in reports if each not in ("moving", "moved")]
        moves = reports.count("moving")
        if moves == reports.count("moved"):
            super().check(directory, own, report)
            return
        for disk in ("nvme", "ssd", "hdd"):
            before = directory / "disks" / f"{disk}{moves - 1 or ''}"
            if before.exists():
                os.rename(before, directory / "disks" / f"{disk}{moves}")
        OsFileSystem().sync_directory(str(directory / "disks"))
        with self._named(directory, moves) as manager:
            report("moved")
            check_ledgers(manager, own, report)


class Renewed(Rebuilt):
    """A store whose catalog is written anew often, and which loses its index at the cut."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        with mock.patch.object(catalog, "REWRITE_BYTES_MIN", 0):
            super().run(directory, choice, report)

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        with mock.patch.object(catalog, "REWRITE_BYTES_MIN", 0):
            super().check(directory, reports, report)


class Uncookied:
    """A store that loses its cookie at the cut, once it has a ledger; it is made again from what repeats it."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        with open_quick(directory / "store") as manager, manager.create_ledger(insecure=True) as writer:
            report(f"made {writer.ledger_id}")
            for _ in range(4):
                append(writer, choice.choice((1, 3, 40)), report)
                manager.checkpoint()

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        if reports:
            (directory / "store" / COOKIE_NAME).unlink(missing_ok=True)
        with open_quick(directory / "store") as manager:
            check_ledgers(manager, reports, report)
            report(RECOVERED)


class Full(Ledgers):
    """A store whose disk is full again and again.

    What frees space, and the first entries of logs that are taken over, are written to log files of the reserve, out of
    which checkpoints move these entries to the SSD tier.

    One of two ledgers whose entries lie in the same files is deleted, too, so that these are packed in the reserve.
    """

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        for number in range(3):
            with _reserves_for_packing(), self._opened(directory, first=number == 0) as manager:
                work = Working(manager, choice, report)
                work.work(10)
                made = [_closed_ledger(manager, choice.choice((3, 40)), report) for _ in range(7)]
                made.append(_interleaved(manager, report))
                manager.checkpoint()
                with _no_space():
                    self._free(manager, made, report)
                    with suppress(StorageFullError):
                        store_of(manager).scheduler.collect()

    def _free(self, manager: LedgerManager, ledgers: Sequence[int], report: Report) -> None:
        store_of(manager).supply.give_back()
        for ledger_id in ledgers:
            report(f"deleting {ledger_id}")
            manager.delete_ledger(ledger_id)
            report(f"deleted {ledger_id}")
            with made_when_full(manager, 1) as writer:
                report(f"made {writer.ledger_id}")
                append(writer, 1, report)
            report(f"closed {writer.ledger_id}")
            with suppress(StorageFullError):
                manager.checkpoint()

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        if len(reports) % 2:
            with _no_space(), self._opened(directory) as manager:
                check_ledgers(manager, reports, report)
                report(RECOVERED)
                self._free(manager, list(manager.list_ledgers())[:2], ignore)
        else:
            super().check(directory, reports, report)


@contextmanager
def _no_space() -> Iterator[None]:
    """Have all file systems be full, for those who look before they write, and for files that are allocated.

    A catalog is written anew in the spare file each time that the reserve is looked after.
    """
    create = OsFileSystem.create

    def create_empty(fs: OsFileSystem, path: str, size: int) -> OsFile:
        if size:
            raise OSError(errno.ENOSPC, "no space, says the test", path)
        return create(fs, path, size)

    full = mock.patch.object(OsFileSystem, "free_bytes", return_value=0)
    renewed = mock.patch.object(catalog_and_index, "RENEWED_BELOW_BYTES", 1 << 40)
    with full, renewed, mock.patch.object(OsFileSystem, "create", create_empty):
        yield


@contextmanager
def _reserves_for_packing() -> Iterator[None]:
    """Let a store have a reserve for packing that is as large as its files, because it is small."""
    with mock.patch.multiple(preallocation, _PACK_BYTES_MIN=4096, _PACK_SHARE=1, _PACK_SHARE_KEPT=0):
        yield


def _interleaved(manager: LedgerManager, report: Report) -> int:
    """Append to two ledgers in turns, and close them; return the id of one."""
    writers = [manager.create_ledger(insecure=True) for _ in range(2)]
    for writer in writers:
        report(f"made {writer.ledger_id}")
    for _ in range(8):
        for writer in writers:
            append(writer, 4, report)
    for writer in writers:
        writer.close()
        report(f"closed {writer.ledger_id}")
    return writers[0].ledger_id


def _closed_ledger(manager: LedgerManager, count: int, report: Report, **options: Any) -> int:
    """Make a ledger, append entries to it, and close it; return its id."""
    with manager.create_ledger(insecure=True, **options) as writer:
        report(f"made {writer.ledger_id}")
        append(writer, count, report)
    report(f"closed {writer.ledger_id}")
    return writer.ledger_id
