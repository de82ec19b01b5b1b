"""A store is made, and entries are appended to its ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.loss.workloads.workload import Report
from tests.storage.real_store import contents, open_quick


class Creation:
    """A store, a ledger, and entries in it."""

    entries = 300

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        with open_quick(directory / "store") as manager, manager.create_ledger(insecure=True) as writer:
            report(f"made {writer.ledger_id}")
            for number in range(self.entries):
                writer.append(b"entry %d" % number)
                report(f"appended {number}")

    def check(self, directory: Path, reports: Sequence[str]) -> None:
        """See :class:`Workload`."""
        acknowledged = sum(report.startswith("appended") for report in reports)
        with open_quick(directory / "store") as manager:
            if reports:
                found = contents(manager, 0, recover=True)
                assert found[:acknowledged] == [b"entry %d" % number for number in range(acknowledged)]
                assert len(found) <= acknowledged + 1
