"""Ledgers of a store: made, written, forced, closed, moved between tiers and deleted, with checkpoints in between."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from pybk import DigestType, LedgerManager, LedgerWriter, StorageHint, WriteFlag
from pybk.operations.store_repair import rebuild_index
from tests.loss.workloads.workload import Report, ignore
from tests.storage.real_store import open_quick, payloads
from tests.storage.test_kill import payload_of


@dataclass(slots=True)
class _Known:
    acknowledged: int = -1
    closed: bool = False
    deleting: bool = False
    deleted: bool = False


def check_ledgers(manager: LedgerManager, reports: Sequence[str], report: Report = ignore) -> None:
    """Compare ledgers with what was reported: ``made``, ``appended``, ``closed``, ``deleting`` and ``deleted``.

    Entries that were found are reported as appended, because what was read is there ever after.
    """
    known: dict[int, _Known] = {}
    for said in reports:
        word, *numbers = said.split()
        if word == "made":
            known[int(numbers[0])] = _Known()
        elif word == "appended":
            known[int(numbers[0])].acknowledged = int(numbers[1])
        elif word in ("closed", "deleting", "deleted"):
            setattr(known[int(numbers[0])], word, True)
    listed = set(manager.list_ledgers())
    for ledger_id, each in known.items():
        if each.deleted:
            assert ledger_id not in listed, f"ledger {ledger_id} was deleted, and is back"
        elif not each.deleting:
            assert ledger_id in listed, f"ledger {ledger_id} is gone"
    for ledger_id in sorted(listed):
        found = _check_ledger(manager, ledger_id, known.get(ledger_id, _Known()))
        if ledger_id not in known:
            report(f"made {ledger_id}")
        report(f"appended {ledger_id} {found - 1}")


def _check_ledger(manager: LedgerManager, ledger_id: int, known: _Known) -> int:
    with manager.open_ledger(ledger_id) as reader:
        found = payloads(reader)
    assert len(found) > known.acknowledged, (
        f"ledger {ledger_id} has {len(found)} entries, and {known.acknowledged} was acknowledged"
    )
    if known.closed:
        assert len(found) == known.acknowledged + 1, f"ledger {ledger_id} was closed, and has more entries"
    for number, payload in enumerate(found):
        assert payload == payload_of(ledger_id, number), f"entry {number} of ledger {ledger_id} is another one"
    return len(found)


def append(writer: LedgerWriter, count: int, report: Report) -> None:
    """Append entries one by one or together."""
    first = writer.last_add_pushed + 1
    if count > 3:
        writer.append_many([payload_of(writer.ledger_id, first + number) for number in range(count)])
        report(f"appended {writer.ledger_id} {first + count - 1}")
        return
    for number in range(first, first + count):
        writer.append(payload_of(writer.ledger_id, number))
        report(f"appended {writer.ledger_id} {number}")


class Creation:
    """A store is made, and entries are appended to its first ledger. May be killed and run again."""

    entries = 300

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        with open_quick(directory / "store") as manager, manager.create_ledger(insecure=True) as writer:
            report(f"made {writer.ledger_id}")
            append(writer, 3, report)
            append(writer, 50, report)
            while writer.last_add_pushed < self.entries:
                append(writer, 3, report)

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        with open_quick(directory / "store") as manager:
            check_ledgers(manager, reports, report)


class Ledgers:
    """What a store does with ledgers, in tiers of their own directories; it is closed and opened in between."""

    steps = 50

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        for number in range(3):
            with self._opened(directory, first=number == 0) as manager:
                Working(manager, choice, report).work(self.steps)

    def _opened(self, directory: Path, *, first: bool = False) -> LedgerManager:
        disks = directory / "disks"
        tiers = {
            StorageHint.NVME: [str(disks / "nvme" / "a"), str(disks / "nvme" / "b")],
            StorageHint.SSD: [str(disks / "ssd" / "pybk")],
            StorageHint.HDD: [str(disks / "hdd" / "a"), str(disks / "hdd" / "b")],
        }
        return open_quick(directory / "var" / "lib" / "store", tiers=tiers if first else None)

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        with self._opened(directory, first=not reports) as manager:
            check_ledgers(manager, reports, report)
            with manager.create_ledger(insecure=True) as writer:
                report(f"made {writer.ledger_id}")
                append(writer, 3, report)
            manager.checkpoint()


class Rebuilt(Ledgers):
    """The same, and after a cut the index is lost, too: it is made again from the catalog and the files."""

    steps = 30

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        if reports:
            shutil.rmtree(directory / "disks" / "ssd" / "pybk" / "index", ignore_errors=True)
            assert rebuild_index(directory / "var" / "lib" / "store").made
        super().check(directory, reports, report)


class Working:
    """Works on the ledgers of a store."""

    def __init__(self, manager: LedgerManager, choice: Random, report: Report) -> None:
        self._manager = manager
        self._choice = choice
        self._report = report
        self._writers: list[LedgerWriter] = []

    def work(self, steps: int) -> None:
        """Make steps at random."""
        actions = [
            self._make,
            *[self._append] * 6,
            self._append_deferred,
            self._close,
            self._move,
            self._move,
            self._delete,
            self._checkpoint,
        ]
        for _ in range(steps):
            self._choice.choice(actions)()

    def _make(self) -> LedgerWriter:
        writer = self._manager.create_ledger(
            storage_hints={self._choice.choice(list(StorageHint))},
            digest_type=self._choice.choice([DigestType.CRC32C, DigestType.XXH3, DigestType.HMAC_SHA256]),
            insecure=True,
        )
        self._report(f"made {writer.ledger_id}")
        self._writers.append(writer)
        return writer

    def _append(self) -> None:
        writer = self._choice.choice(self._writers) if self._writers else self._make()
        append(writer, self._choice.choice((1, 3, 20, 200)), self._report)

    def _append_deferred(self) -> None:
        with self._manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True) as writer:
            self._report(f"made {writer.ledger_id}")
            for number in range(self._choice.randrange(1, 9)):
                writer.append(payload_of(writer.ledger_id, number))
            self._report(f"appended {writer.ledger_id} {writer.force()}")

    def _close(self) -> None:
        if self._writers:
            writer = self._writers.pop(self._choice.randrange(len(self._writers)))
            writer.close()
            self._report(f"closed {writer.ledger_id}")

    def _move(self) -> None:
        ledgers = list(self._manager.list_ledgers())
        if ledgers:
            self._manager.move_ledger(self._choice.choice(ledgers), self._choice.choice(list(StorageHint)))

    def _delete(self) -> None:
        open_ones = {writer.ledger_id for writer in self._writers}
        ledgers = [each for each in self._manager.list_ledgers() if each not in open_ones]
        if len(ledgers) > 3:
            ledger_id = self._choice.choice(ledgers)
            self._report(f"deleting {ledger_id}")
            self._manager.delete_ledger(ledger_id)
            self._report(f"deleted {ledger_id}")

    def _checkpoint(self) -> None:
        self._manager.checkpoint()
