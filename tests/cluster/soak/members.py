"""The processes of a soak, and what its writers said about each ledger."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.processes import BookieProcess, Child, Cluster
from tests.waiting import wait_until


class SoakBookie(BookieProcess):
    """A bookie with tiers on directories of their own."""

    def __init__(self, cluster: SoakCluster, name: str) -> None:
        super().__init__(cluster, name)
        self._members = cluster
        self.replacing = False

    def begin(self, listen: str = "tcp://127.0.0.1:*") -> Child:
        """Start its process."""
        members = self._members
        self.directory.mkdir(parents=True, exist_ok=True)
        arguments = [str(self.directory), "--listen", listen, "--metadata", members.url, "--id", self.name]
        arguments += ["--replace"] if self.replacing else []
        self.replacing = False
        log = members.directory / f"{self.name}.log"
        self.process = Child(arguments, members.secret, log, module="tests.cluster.soak.bookie")
        members.processes.append((self.name, self.process))
        return self.process

    def report(self) -> dict[str, Any]:
        """Return its last report, empty if it has made none."""
        said = self.process.said("report") if self.process is not None else []
        found: dict[str, Any] = json.loads(said[-1]) if said else {}
        return found

    def look(self) -> dict[str, Any]:
        """Return what it holds now."""
        child = self.child
        before = len(child.said("look"))
        child.order("look")
        found: dict[str, Any] = json.loads(child.wait_for(lambda: child.said("look")[before:])[0])
        return found


class SoakCluster(Cluster):
    """Bookies that repair the cluster, and writers.

    Attributes:
        processes: All processes of bookies that there ever were, by name.
        book: What writers said about ledgers.
    """

    def __init__(self, directory: Path, **arguments: Any) -> None:
        super().__init__(directory, **arguments)
        self.processes: list[tuple[str, Child]] = []
        self.book = Book()
        self._removed: list[BookieProcess] = []

    def make(self, name: str) -> SoakBookie:
        """Make a bookie that is not started yet."""
        return SoakBookie(self, name)

    def add_one(self) -> SoakBookie:
        """Start one more bookie, under a name that none ever had."""
        number = 1 + max(int(name.partition("-")[2]) for name, _ in self.processes)
        bookie = self.make(f"bookie-{number}")
        bookie.start()
        self.bookies[bookie.name] = bookie
        return bookie

    def forget(self, name: str) -> None:
        """Leave out a bookie that was removed; it is killed with the others."""
        self._removed.append(self.bookies.pop(name))

    def close(self) -> None:
        """Close the clients and kill all processes."""
        self.bookies.update({bookie.name: bookie for bookie in self._removed})
        super().close()

    def soak_bookie(self, name: str) -> SoakBookie:
        """Return a bookie by its name."""
        found = self.bookies[name]
        assert isinstance(found, SoakBookie)
        return found

    def begin_soak_writer(self, seed: str, threads: int) -> Child:
        """Start a process that writes ledgers."""
        arguments = ["--metadata", self.url, "--seed", seed, "--threads", str(threads)]
        log = self.directory / f"writer-{len(self.writers)}.log"
        child = Child(arguments, self.secret, log, module="tests.cluster.soak.writer")
        self.writers.append(child)
        return child

    def totals(self) -> Counter[str]:
        """Return what all processes of bookies did, as far as they reported it before they were killed."""
        found: Counter[str] = Counter()
        for _, child in self.processes:
            said = child.said("report")
            if said:
                last = json.loads(said[-1])
                found.update({name: last[name] for name in ("copied_bytes", "repaired", "dropped", "damaged")})
        return found

    def footprints(self) -> dict[str, dict[str, list[int]]]:
        """Return memory, descriptors and threads of each bookie that runs: at its start, and now."""
        found = {}
        for name, child in self.processes:
            said = child.said("report")
            if child.alive and said:
                # The first reports are of a process that is still loading modules.
                first, last = json.loads(said[min(4, len(said) - 1)]), json.loads(said[-1])
                kinds = ("rss_bytes", "own_bytes", "descriptors", "threads")
                found[name] = {each: [first[each], last[each]] for each in kinds}
                found[name]["reports"] = [len(said)]
        return found


@dataclass
class Written:
    """What a writer said of one ledger.

    Attributes:
        ledger_id: The ledger.
        kind: What it is like.
        writer: The process of its writer.
        acked: The last entry that was acknowledged as durable.
        pushed: The last entry that may have been appended.
        closed: Its last entry once its writer has closed it.
        deleting: Whether its deletion was begun.
        deleted: Whether it was deleted.
        error: Why its writer gave it up; empty if it did not.
        at: When something was last said of it, by the monotonic clock.
    """

    ledger_id: int
    kind: str
    writer: Child
    acked: int = -1
    pushed: int = -1
    closed: int | None = None
    deleting: bool = False
    deleted: bool = False
    error: str = ""
    at: float = 0.0

    @property
    def entries(self) -> int:
        """How many entries it has, once its writer has closed it."""
        assert self.closed is not None, self
        return self.closed + 1

    @property
    def left(self) -> bool:
        """Whether it was neither closed nor is written any more."""
        return self.closed is None and (bool(self.error) or not self.writer.alive)


class Book:
    """What all writers said so far; ``take`` reads what is new.

    Attributes:
        ledgers: By id.
        errors: Errors of writers, by class.
        texts: An example of each.
        took: Microseconds that each append took.
        wrong: What writers saw and must not see.
    """

    def __init__(self) -> None:
        self.ledgers: dict[int, Written] = {}
        self.errors: Counter[str] = Counter()
        self.texts: dict[str, str] = {}
        self.took: list[int] = []
        self.wrong: list[str] = []
        self._at: dict[Child, int] = {}

    def take(self, writers: list[Child]) -> None:
        """Read what writers said since the last time; one thread at a time."""
        for writer in writers:
            start, end = self._at.get(writer, 0), len(writer.lines)
            for line in writer.lines[start:end]:
                self._hear(writer, line)
            self._at[writer] = end

    def _hear(self, writer: Child, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "took":
            self.took += map(int, rest.split())
            return
        number, _, text = rest.partition(" ")
        ledger_id = int(number)
        if word == "ledger":
            self.ledgers[ledger_id] = Written(ledger_id, text, writer)
        if word == "error":
            name, _, why = text.partition(" ")
            self.errors[name] += 1
            self.texts.setdefault(name, f"ledger {ledger_id}: {why}")
        if word == "wrong":
            self.wrong.append(f"ledger {ledger_id}: {text}")
        found = self.ledgers.get(ledger_id)
        if found is not None:
            _note(found, word, text)
            found.at = time.monotonic()

    def open_ledgers(self) -> list[int]:
        """Return the ledgers that are written now."""
        return [
            each.ledger_id
            for each in list(self.ledgers.values())
            if each.closed is None and not each.left and not each.deleting
        ]


def _note(found: Written, word: str, text: str) -> None:
    if word == "acked":
        found.acked = int(text)
    elif word == "pushed":
        found.pushed = int(text)
    elif word == "closed":
        found.closed = int(text)
    elif word == "deleting":
        found.deleting = True
    elif word == "deleted":
        found.deleted = True
    elif word == "error":
        found.error = text


def wait_for_members(cluster: SoakCluster, count: int) -> None:
    """Wait until so many bookies reported that they work."""
    names = list(cluster.bookies)
    wait_until(lambda: sum(bool(cluster.soak_bookie(name).report()) for name in names) >= count)
