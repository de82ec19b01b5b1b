"""Logs, write-ahead logs, subscriptions, blobs and snapshots in a store, each as its crash tests work with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from random import Random
from unittest import mock

from pybk import BlobStore, LedgerManager, SnapshotStore, WriteAheadLog
from pybk.streams import cursor
from tests.loss.workloads.workload import RECOVERED, Report, ignore, unused
from tests.storage.real_store import open_quick
from tests.streams import blob_workload, log_workload, subscription_workload, workload

_STEPS = 60


class NamedLog:
    """A log."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        with open_quick(directory / "store") as manager, log_workload.opened(manager) as log:
            writer = log.writer(ordered_txids=False)
            for number, _ in enumerate(islice(log_workload.work(log, writer, choice, report), _STEPS)):
                if number % 20 == 19:
                    manager.checkpoint()

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        model = log_workload.Model()
        for each in reports:
            model.take(each)
        with open_quick(directory / "store") as manager, log_workload.opened(manager) as log:
            model.check(log)
            report(RECOVERED)
            log.writer(ordered_txids=False, steal=True).append(b"more")


class Wal:
    """A write-ahead log."""

    def _opened(self, manager: LedgerManager) -> WriteAheadLog:
        return WriteAheadLog.open(manager, insecure=True, segment_bytes=3000)

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        with open_quick(directory / "store") as manager, self._opened(manager) as wal:
            for number, _ in enumerate(islice(workload.work(wal, choice, report), _STEPS)):
                if number % 20 == 19:
                    manager.checkpoint()

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        model = workload.Model()
        for each in reports:
            model.take(each)
        with open_quick(directory / "store") as manager, self._opened(manager) as wal:
            model.check(wal)
            report(RECOVERED)
            wal.append(b"more")


class Subscribed:
    """A subscription to a log."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        with (
            mock.patch.multiple(cursor, CHANGES_BYTES=300, CURSOR_SEGMENT_BYTES=1500, BOUND_SECONDS=0.01),
            open_quick(directory / "store") as manager,
            subscription_workload.opened(manager) as log,
        ):
            writer = log.writer()
            for number, _ in enumerate(islice(subscription_workload.work(log, writer, choice, report), _STEPS)):
                if number % 20 == 19:
                    manager.checkpoint()

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        model = subscription_workload.Model()
        for each in reports:
            model.take(each)
        with open_quick(directory / "store") as manager, subscription_workload.opened(manager) as log:
            model.check(manager, log)
            report(RECOVERED)
            log.writer(steal=True).append(b"more")


class _BlobModel(blob_workload.Model):
    """A model that is reported whenever it changes."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def _say(self) -> None:
        states = [
            {name: [version.hex() for version in versions] for name, versions in state.items()}
            for state in self.allowed
        ]
        self._report(json.dumps(states))

    def begin(self, *later: blob_workload.State) -> None:
        super().begin(*later)
        self._say()

    def end(self) -> None:
        super().end()
        self._say()


class Blobs:
    """Blobs."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        with open_quick(directory / "store") as manager, blob_workload.opened(manager) as blobs:
            for number, _ in enumerate(islice(blob_workload.work(blobs, choice, _BlobModel(report)), _STEPS)):
                if number % 20 == 19:
                    manager.checkpoint()

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        model = blob_workload.Model()
        if reports:
            model.allowed = [
                {name: tuple(map(bytes.fromhex, versions)) for name, versions in state.items()}
                for state in json.loads(reports[-1])
            ]
        with open_quick(directory / "store") as manager, blob_workload.opened(manager) as blobs:
            model.check(blobs, manager)
            report(RECOVERED)
            blobs.put("more", b"more")


class Snapshots:
    """Snapshots of a directory, restored to new directories."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        state = directory / "state"
        (state / "sub").mkdir(parents=True)
        with open_quick(directory / "store") as manager, BlobStore.open(manager, insecure=True) as blobs:
            snapshots = SnapshotStore(blobs, "state", keep=2, part_bytes=1000)
            for number in range(1, 6):
                (state / "sub" / "number").write_bytes(b"%d" % number * 999)
                (state / "other").write_bytes(choice.randbytes(1500))
                snapshots.save(state, lsn=number)
                report(f"saved {number}")
                snapshots.restore(directory / "restored" / f"{number}" / "state")
                report(f"restored {number}")

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        numbers = {word: int(number) for word, number in map(str.split, reports)}
        restored = directory / "restored" / f"{numbers.get('restored')}" / "state"
        if "restored" in numbers:
            self._check_state(restored, numbers["restored"])
        with open_quick(directory / "store") as manager, BlobStore.open(manager, insecure=True) as blobs:
            snapshots = SnapshotStore(blobs, "state", keep=2, part_bytes=1000)
            now = unused(directory)
            found = snapshots.restore(now) if numbers else None
            assert found is None or found.info.lsn in (numbers["saved"], numbers["saved"] + 1)
            if found is not None:
                self._check_state(now, found.info.lsn)
        report(RECOVERED)

    @staticmethod
    def _check_state(path: Path, number: int) -> None:
        assert (path / "sub" / "number").read_bytes() == b"%d" % number * 999
        assert len((path / "other").read_bytes()) == 1500
