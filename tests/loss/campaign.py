"""Cuts a recorded run at many points, and leaves out its syncs, one call site after the other."""

from __future__ import annotations

import json
import shutil
import tempfile
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from pybk.errors import PybkError
from tests.loss.disk import Disk, Loss
from tests.loss.recording import Kind, Record, inodes_kept, record, records, written
from tests.loss.workloads.every import WORKLOADS
from tests.loss.workloads.workload import RECOVERED

_MEMORY: Final = Path("/dev/shm")
_LOSSES: Final = tuple(Loss)


@contextmanager
def room() -> Iterator[Path]:
    """Make a directory, in memory where that is possible, and remove it in the end."""
    with tempfile.TemporaryDirectory(prefix="loss-", dir=_MEMORY if _MEMORY.is_dir() else None) as path:
        yield Path(path)


@dataclass(frozen=True, slots=True)
class Cut:
    """A loss of power after the first ``position`` records."""

    position: int
    loss: Loss
    seed: int


@dataclass(frozen=True, slots=True)
class Failure:
    """What was wrong after a cut."""

    workload: str
    seed: int
    cut: Cut
    problem: str

    def __str__(self) -> str:
        """Return it with what repeats it."""
        cut = self.cut
        place = f"{self.workload} {self.seed}, cut after record {cut.position}, {cut.loss.name} {cut.seed}"
        return f"{place} (kept: {cut.loss.value}): {self.problem}"


class Run:
    """A program that was run and recorded once: a workload, or the recovery of what a loss left of one.

    Args:
        name: The name of the workload.
        seed: What it does.
        path: An existing directory, for all files of the run.
    """

    def __init__(self, name: str, seed: int, path: Path) -> None:
        self.name = name
        self.seed = seed
        self.path = path
        self.log = path / "log"
        # Cuts are written to the same path, because stores and clusters keep some of their paths.
        self.root = path / "root"
        self.image: list[Record] = []
        self.before: list[str] = []
        self.first = 0
        """The position of the first cut."""

    @classmethod
    def of(cls, name: str, seed: int, path: Path) -> Run:
        """Run a workload."""
        run = cls(name, seed, path)
        run.root.mkdir()
        record(["-m", "tests.loss.child", "run", name, str(seed), str(run.root)], run.root, run.log)
        run.read()
        return run

    @classmethod
    def of_killed(cls, name: str, seed: int, path: Path, after: int) -> Run:
        """Run a workload that is killed after some records, and recover what it left; the recovery is cut."""
        run = cls(name, seed, path)
        run.root.mkdir()
        record(["-m", "tests.loss.child", "run", name, str(seed), str(run.root)], run.root, run.log, after)
        done = records(run.log)
        run.log = path / "log of recovery"
        run.image = [*done, *run.locks_of_others(done)]
        run.first = len(run.image)
        run.recover(_reports(done))
        return run

    def locks_of_others(self, done: Sequence[Record]) -> list[Record]:
        """Return what threads stored to lock files of LMDB after the kill was sent, and before they were dead."""
        disk = Disk(self.root.stat().st_ino)
        for each in done:
            disk.apply(each)
        image = self.path / "image"
        disk.write_cut(image, Loss.NOTHING, Random(0))
        stored = [
            Record(Kind.STORED, 0, path.stat().st_ino, 0, 0, 0, 0, "", "", path.read_bytes())
            for path in self.root.rglob("lock.mdb")
            if path.read_bytes() != (image / path.relative_to(self.root)).read_bytes()
        ]
        shutil.rmtree(image)
        return stored

    def cut_run(self, cut: Cut, path: Path) -> Run:
        """Recover what a cut leaves; the recovery is cut.

        Raises:
            AssertionError: It cannot be recovered.
        """
        run = Run(self.name, self.seed, path)
        run.root = self.root
        disk = Disk(self._inode)
        for each in self.records[: cut.position]:
            disk.apply(each)
        disk.write_cut(run.root, cut.loss, Random(cut.seed))
        run.image = written(run.root)
        run.before = [*self.before, *_reports(self.records[: cut.position])]
        run.first = len(run.image)
        run.recover(run.before)
        return run

    def recover(self, reports: list[str]) -> None:
        """Recover what is below the root, and read what was recorded."""
        said = self.path / "reports"
        said.write_text(json.dumps(reports))
        record(["-m", "tests.loss.child", "recover", self.name, str(said), str(self.root)], self.root, self.log)
        self.read()

    def read(self) -> None:
        """Read what was recorded. A recovery is cut until it adds what a second check would not know."""
        self._inode = self.root.stat().st_ino
        self.records = [*self.image, *records(self.log)]
        self._check_record()
        done = [
            number
            for number, each in enumerate(self.records)
            if each.kind is Kind.MARK and each.data == RECOVERED.encode()
        ]
        del self.records[done[0] if done else len(self.records) :]
        self.syncs: dict[str, list[int]] = {}
        """The positions of the records that sync, by system call and the lines that lead to it."""
        for position, each in enumerate(self.records):
            if each.syncs and position >= self.first:
                self.syncs.setdefault(each.call, []).append(position)

    def _check_record(self) -> None:
        """Raise AssertionError unless the record leads to the files that the run left: a call was not seen."""
        disk = Disk(self._inode)
        for each in self.records:
            disk.apply(each)
        expected = files(self.root)
        shutil.rmtree(self.root)
        disk.write_cut(self.root, Loss.NOTHING, Random(0))
        found = files(self.root)
        shutil.rmtree(self.root)
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        assert found.keys() == expected.keys(), f"{self.name} {self.seed}: the record has other files: {wrong}"
        assert not wrong, f"{self.name} {self.seed}: the record has other bytes in {wrong}"

    def random_cuts(self, choice: Random, count: int) -> Iterator[Cut]:
        """Yield cuts anywhere."""
        for _ in range(count):
            yield Cut(choice.randint(self.first, len(self.records)), choice.choice(_LOSSES), choice.getrandbits(32))

    def cuts_at(self, call: str, choice: Random, count: int) -> Iterator[Cut]:
        """Yield a cut just before, and one just after, some syncs of a call site."""
        for position in choice.sample(self.syncs[call], min(count, len(self.syncs[call]))):
            yield Cut(position, choice.choice(_LOSSES), choice.getrandbits(32))
            yield Cut(position + 1, choice.choice(_LOSSES), choice.getrandbits(32))

    def cuts_without(self, call: str, choice: Random, count: int) -> Iterator[Cut]:
        """Yield cuts that may show that the syncs of a call site are left out: soon after these."""
        marks = [position for position, each in enumerate(self.records) if each.kind is Kind.MARK]
        syncs = self.syncs[call]
        yield Cut(len(self.records), Loss.ALL, 0)
        for number in range(count):
            after = syncs[number % len(syncs)] if number < len(syncs) else choice.choice(syncs)
            acknowledged = marks[bisect(marks, after) :][:3]
            later = choice.randrange(after, self._synced_again(after))
            at = choice.choice([after, after + choice.randrange(12), later, later, *acknowledged, *acknowledged])
            loss = choice.choice(_LOSSES) if number % 2 else Loss.NODE
            yield Cut(min(at + 1, len(self.records)), loss, choice.getrandbits(32))

    def _synced_again(self, position: int) -> int:
        """Return where what a record syncs is synced by another call site, or the end."""
        synced = self.records[position]
        for later in range(position + 1, len(self.records)):
            each = self.records[later]
            if each.inode == synced.inode and each.syncs and each.call != synced.call:
                return later
        return len(self.records)

    def failures(self, cuts: Iterable[Cut], without: str | None = None) -> Iterator[Failure]:
        """Yield what is wrong after each cut that shows anything wrong, in the order of their positions.

        Args:
            cuts: Where to cut.
            without: The call site whose syncs are left out, if any.
        """

        disk, reports, position = Disk(self._inode, lambda each: each.call == without), list(self.before), 0
        for cut in sorted(cuts, key=lambda cut: cut.position):
            for each in self.records[position : cut.position]:
                disk.apply(each)
            reports += _reports(self.records[position : cut.position])
            position = cut.position
            disk.write_cut(self.root, cut.loss, Random(cut.seed))
            try:
                with inodes_kept():
                    WORKLOADS[self.name].check(self.root, reports)
            except (AssertionError, PybkError, OSError) as error:
                yield Failure(self.name, self.seed, cut, f"{type(error).__name__}: {error}")
            finally:
                shutil.rmtree(self.root)

    def failure_without(self, call: str, choice: Random, count: int) -> Failure | None:
        """Return what the syncs of a call site are for: what is wrong after a cut without them, or None."""
        return next(self.failures(self.cuts_without(call, choice, count), call), None)


def _reports(done: Iterable[Record]) -> list[str]:
    return [each.data.decode() for each in done if each.kind is Kind.MARK and each.data]


def files(root: Path) -> dict[str, bytes | None]:
    """Return all files below a directory with their bytes, and all directories."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))
    }
