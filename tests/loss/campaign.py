"""Cuts a recorded run at many points, and leaves out its syncs, one call site after the other."""

from __future__ import annotations

import json
import shutil
import tempfile
import traceback
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from tests.loss.disk import Disk, Loss
from tests.loss.recording import Kind, Record, inodes_kept, record, records, written
from tests.loss.workloads.every import WORKLOADS
from tests.loss.workloads.workload import RECOVERED
from tests.paths import ROOT

_MEMORY: Final = Path("/dev/shm")
_LOSSES: Final = tuple(Loss)
KEPT: Final = ROOT / "build" / "loss" / "failures"
"""Where each failure has a directory."""


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
    node: int | None = None
    """The file or directory that ``Loss.NODE`` takes; None for any."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What was wrong after a cut."""

    workload: str
    seed: int
    cut: Cut
    problem: str
    trace: str = ""
    kept: Path | None = None
    """Where what repeats it is kept, if it is."""

    def __str__(self) -> str:
        """Return it with what repeats it."""
        cut = self.cut
        place = f"{self.workload} {self.seed}, cut after record {cut.position}, {cut.loss.name} {cut.seed}"
        repeat = f"\n  repeat: python -m tests.loss --repeat {self.kept}" if self.kept else ""
        return f"{place} (kept: {cut.loss.value}): {self.problem}{repeat}"


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
        self.records: list[Record] = []
        self.inode = 0
        """The number of the root."""
        self.syncs: dict[str, list[int]] = {}
        """The positions of the records that sync, by system call and the lines that lead to it."""

    @classmethod
    def of(cls, name: str, seed: int, path: Path) -> Run:
        """Run a workload."""
        run = cls(name, seed, path)
        run.work()
        return run

    def work(self) -> None:
        """Run the workload.

        Raises:
            AssertionError: It failed.
        """
        self.make_root()
        try:
            record(["-m", "tests.loss.child", "run", self.name, str(self.seed), str(self.root)], self.root, self.log)
            self.read()
        except AssertionError:
            self.records = records(self.log)
            raise
        finally:
            shutil.rmtree(self.root, ignore_errors=True)

    @classmethod
    def of_killed(cls, name: str, seed: int, path: Path, after: int) -> Run:
        """Run a workload that is killed after some records; ``recover`` recovers what it left, and that is cut."""
        run = cls(name, seed, path)
        run.make_root()
        record(["-m", "tests.loss.child", "run", name, str(seed), str(run.root)], run.root, run.log, after)
        done = records(run.log)
        run.log = path / "log of recovery"
        run.image = [*done, *run.locks_of_others(done)]
        return run

    def make_root(self) -> None:
        """Make the directory that is recorded."""
        self.root.mkdir()
        self.inode = self.root.stat().st_ino

    def locks_of_others(self, done: Sequence[Record]) -> list[Record]:
        """Return what threads stored to lock files of LMDB after the kill was sent, and before they were dead."""
        disk = Disk(self.inode)
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
        """Return the run that recovers what a cut leaves, before it is recovered."""
        run = Run(self.name, self.seed, path)
        run.root = self.root
        self.write_left(cut, run.root)
        run.inode = run.root.stat().st_ino
        run.image = written(run.root)
        run.before = [*self.before, *_reports(self.records[: cut.position])]
        return run

    def recover(self) -> None:
        """Recover what is below the root, and read what was recorded.

        Raises:
            AssertionError: It cannot be recovered.
        """
        self.records, self.first = self.image, len(self.image)
        said = self.path / "reports"
        said.write_text(json.dumps([*self.before, *_reports(self.image)]))
        try:
            record(["-m", "tests.loss.child", "recover", self.name, str(said), str(self.root)], self.root, self.log)
            self.read()
        except AssertionError:
            self.records = self.image
            raise
        finally:
            shutil.rmtree(self.root, ignore_errors=True)

    def read(self) -> None:
        """Read what was recorded. A recovery is cut until it adds what a second check would not know."""
        self.records = [*self.image, *records(self.log)]
        self._check_record()
        done = [
            number
            for number, each in enumerate(self.records)
            if each.kind is Kind.MARK and each.data == RECOVERED.encode()
        ]
        del self.records[done[0] if done else len(self.records) :]
        for position, each in enumerate(self.records):
            if each.syncs and position >= self.first:
                self.syncs.setdefault(each.call, []).append(position)

    def _check_record(self) -> None:
        """Raise AssertionError unless the record leads to the files that the run left: a call was not seen."""
        disk = Disk(self.inode)
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
            at = min(at + 1, len(self.records))
            if number % 2:
                yield Cut(at, choice.choice(_LOSSES), choice.getrandbits(32))
            else:
                yield Cut(at, Loss.NODE, 0, self.records[after].inode)

    def cuts_between(self, call: str) -> Iterator[Cut]:
        """Yield cuts from each sync of a call site to the next one of the same file, which has lost its changes."""
        for sync in self.syncs[call]:
            for position in range(sync + 1, self._synced_again(sync) + 1):
                yield Cut(position, Loss.NODE, 0, self.records[sync].inode)

    def _synced_again(self, position: int) -> int:
        """Return where what a record syncs is synced by another call site, or the end."""
        synced = self.records[position]
        for later in range(position + 1, len(self.records)):
            each = self.records[later]
            if each.inode == synced.inode and each.syncs and each.call != synced.call:
                return later
        return len(self.records)

    def failures(self, cuts: Iterable[Cut]) -> Iterator[Failure]:
        """Yield what is wrong, as ``wrong_after`` does, and keep what repeats it."""
        return map(self.keep, self.wrong_after(cuts))

    def wrong_after(self, cuts: Iterable[Cut], without: str | None = None) -> Iterator[Failure]:
        """Yield what is wrong after each cut that shows anything wrong, in the order of their positions.

        Args:
            cuts: Where to cut.
            without: The call site whose syncs are left out, if any.
        """

        disk, reports, position = Disk(self.inode, lambda each: each.call == without), list(self.before), 0
        for cut in sorted(cuts, key=lambda cut: cut.position):
            for each in self.records[position : cut.position]:
                disk.apply(each)
            reports += _reports(self.records[position : cut.position])
            position = cut.position
            disk.write_cut(self.root, cut.loss, Random(cut.seed), cut.node)
            try:
                with inodes_kept():
                    WORKLOADS[self.name].check(self.root, reports)
            except Exception as error:  # noqa: BLE001 # whatever a check raises is a failure
                yield Failure(self.name, self.seed, cut, f"{type(error).__name__}: {error}", traceback.format_exc())
            finally:
                shutil.rmtree(self.root)

    def keep(self, failure: Failure) -> Failure:
        """Keep what repeats a failure: the record so far, because no second run has the same one."""
        KEPT.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-{self.seed}-", dir=KEPT))
        cut = failure.cut
        described = {
            "workload": self.name,
            "seed": self.seed,
            "position": cut.position,
            "loss": cut.loss.name,
            "cut_seed": cut.seed,
            "node": cut.node,
            "problem": failure.problem,
            "root": str(self.root),
            "inode": self.inode,
            "before": self.before,
        }
        (folder / "failure.json").write_text(json.dumps(described, indent=1))
        (folder / "trace").write_text(failure.trace)
        with (folder / "records").open("wb") as file:
            file.writelines(each.encode() for each in self.records[: cut.position])
        self.write_left(cut, folder / "left")
        return replace(failure, kept=folder)

    def write_left(self, cut: Cut, path: Path) -> None:
        """Write what a cut leaves to a new directory."""
        disk = Disk(self.inode)
        for each in self.records[: cut.position]:
            disk.apply(each)
        disk.write_cut(path, cut.loss, Random(cut.seed), cut.node)

    @classmethod
    def kept(cls, folder: Path) -> tuple[Run, Cut]:
        """Return the run and the cut of a failure that was kept."""
        described = json.loads((folder / "failure.json").read_text())
        run = cls(described["workload"], described["seed"], Path(described["root"]).parent)
        run.root, run.inode, run.before = Path(described["root"]), described["inode"], described["before"]
        run.records = records(folder / "records")
        cut = Cut(described["position"], Loss[described["loss"]], described["cut_seed"], described["node"])
        return run, cut

    def failure_without(self, call: str, choice: Random, count: int) -> Failure | None:
        """Return what the syncs of a call site are for: what is wrong after a cut without them, or None."""
        return next(self.wrong_after(self.cuts_without(call, choice, count), call), None)


def _reports(done: Iterable[Record]) -> list[str]:
    return [each.data.decode() for each in done if each.kind is Kind.MARK and each.data]


def files(root: Path) -> dict[str, bytes | None]:
    """Return all files below a directory with their bytes, and all directories."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))
    }
