"""Cuts a recorded run at many points, and leaves out its syncs, one call site after the other."""

from __future__ import annotations

import shutil
import tempfile
from bisect import bisect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from pybk.errors import PybkError
from tests.loss.disk import Disk, Loss
from tests.loss.recording import Kind, Record, inodes_kept, record, records
from tests.loss.workloads.every import WORKLOADS

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
    """A workload that was run and recorded once.

    Args:
        name: That of the workload.
        seed: What it does.
        path: An existing directory, for all files of the run.
    """

    def __init__(self, name: str, seed: int, path: Path) -> None:
        self.name = name
        self.seed = seed
        self._path = path
        # Cuts are written to the same path, because stores and clusters keep some of their paths.
        root = path / "root"
        root.mkdir()
        self._root = root
        self._inode = root.stat().st_ino
        record(["-m", "tests.loss.child", name, str(seed), str(root)], root, path / "log")
        self.records = records(path / "log")
        self.syncs: dict[str, list[int]] = {}
        """The positions of the records that sync, by system call and the lines that lead to it."""
        for position, each in enumerate(self.records):
            if each.syncs:
                self.syncs.setdefault(each.call, []).append(position)
        self._check_record()

    def _check_record(self) -> None:
        """Raise AssertionError unless the record leads to the files that the run left: a call was not seen."""
        disk = Disk(self._inode)
        for each in self.records:
            disk.apply(each)
        expected = files(self._root)
        shutil.rmtree(self._root)
        disk.write_cut(self._root, Loss.NOTHING, Random(0))
        found = files(self._root)
        shutil.rmtree(self._root)
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        assert found.keys() == expected.keys(), f"{self.name} {self.seed}: the record has other files: {wrong}"
        assert not wrong, f"{self.name} {self.seed}: the record has other bytes in {wrong}"

    def random_cuts(self, choice: Random, count: int) -> Iterator[Cut]:
        """Yield cuts anywhere."""
        for _ in range(count):
            yield Cut(choice.randint(0, len(self.records)), choice.choice(_LOSSES), choice.getrandbits(32))

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

        def skipped(each: Record) -> bool:
            return each.call == without

        disk, reports, position = Disk(self._inode, skipped), list[str](), 0
        for cut in sorted(cuts, key=lambda cut: cut.position):
            for each in self.records[position : cut.position]:
                disk.apply(each)
                if each.kind is Kind.MARK and each.data:
                    reports.append(each.data.decode())
            position = cut.position
            disk.write_cut(self._root, cut.loss, Random(cut.seed))
            try:
                with inodes_kept():
                    WORKLOADS[self.name].check(self._root, reports)
            except (AssertionError, PybkError, OSError) as error:
                yield Failure(self.name, self.seed, cut, f"{type(error).__name__}: {error}")
            finally:
                shutil.rmtree(self._root)

    def failure_without(self, call: str, choice: Random, count: int) -> Failure | None:
        """Return what the syncs of a call site are for: what is wrong after a cut without them, or None."""
        return next(self.failures(self.cuts_without(call, choice, count), call), None)


def files(root: Path) -> dict[str, bytes | None]:
    """Return all files below a directory with their bytes, and all directories."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))
    }
