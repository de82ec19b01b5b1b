"""Backups of a store: made, pruned and restored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from pybk.backup import back_up, prune_backup, restore_backup, verify_backup
from tests.loss.workloads.ledgers import append, check_ledgers
from tests.loss.workloads.workload import RECOVERED, Report, ignore, unused
from tests.storage.real_store import open_quick


class Backups:
    """Runs of a backup to a new directory, the older ones pruned, and restores of the newest."""

    runs = 4

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        target = directory / "backups" / "of" / "store"
        with open_quick(directory / "store") as manager:
            for number in range(1, self.runs + 1):
                with manager.create_ledger(insecure=True) as writer:
                    report(f"made {writer.ledger_id}")
                    append(writer, choice.choice((3, 40)), report)
                report(f"closed {writer.ledger_id}")
                if choice.random() < 0.5:
                    manager.checkpoint()
                back_up(manager, target)
                report(f"backed up {number}")
                restore_backup(target, directory / "restored" / "stores" / f"{number}")
                report(f"restored {number}")
                if number > 1:
                    prune_backup(target, keep=1, keep_seconds=0)
                    report(f"pruned {number}")

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        target = directory / "backups" / "of" / "store"
        own = [report for report in reports if report.split()[0] in ("made", "appended", "closed")]
        if any(report.startswith("backed") for report in reports):
            last = max(number for number, report in enumerate(reports) if report.startswith("backed"))
            now = unused(directory)
            restore_backup(target, now)
            with open_quick(now) as manager:
                check_ledgers(manager, [report for report in reports[:last] if report in own])
            verify_backup(target)
        if any(report.startswith("restored") for report in reports):
            last = max(number for number, report in enumerate(reports) if report.startswith("restored"))
            number = reports[last].split()[1]
            with open_quick(directory / "restored" / "stores" / number) as manager:
                check_ledgers(manager, [report for report in reports[:last] if report in own])
        with open_quick(directory / "store") as manager:
            check_ledgers(manager, own)
            back_up(manager, target)
        report(RECOVERED)
