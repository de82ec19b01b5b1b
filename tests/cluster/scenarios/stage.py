"""The cluster of a scenario: bookies in processes, closed ledgers, writers at work, and what can be seen of repairs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from pybk import AppendFuture, BookieStatus, ClusterAdmin, ClusterStatus, LedgerManager, LedgerMetadata, PybkError
from pybk.client.remote_ledger import RemoteLedger
from pybk.credentials import ClusterSecret
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.underreplication import RepairReason, UnderReplicatedLedger
from tests.cluster.checker import check_ledger, check_replicas, copies
from tests.cluster.child import PASSWORD, payload
from tests.cluster.inside import SECRET, make_cluster
from tests.cluster.processes import BookieProcess, Child, Cluster
from tests.cluster.scenarios.scaled import LEASE_S
from tests.internals import cluster_backend_of, descriptor_of
from tests.storage.real_store import contents
from tests.waiting import PROCESS_S, wait_until

LOOK_S: Final = 0.05
"""Seconds between two looks at the metadata."""

SCALED_PYBK: Final = "tests.cluster.scenarios.scaled"

LEDGERS = 100
"""How many closed ledgers a scenario has that does not choose."""

SHAPE: Final[dict[str, Any]] = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2}

Figures = dict[str, object]
"""What a scenario has measured, by name."""


class Load:
    """Appends to open ledgers in turn, from one thread, until ``stop``.

    Args:
        client: The client.
        ledgers: How many ledgers.
        pause_s: Seconds between two appends.

    Attributes:
        errors: What was refused, a text each.
        seconds: How long each append took, in order.
    """

    def __init__(self, client: LedgerManager, ledgers: int, pause_s: float) -> None:
        self.writers = [client.create_ledger(password=PASSWORD, **SHAPE) for _ in range(ledgers)]
        self.errors: list[str] = []
        self.seconds: list[float] = []
        self._pause_s = pause_s
        self._pushed = [0] * ledgers
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        turn = 0
        pending: list[AppendFuture[int]] = []
        while self.writers and not self._stopping.wait(self._pause_s):
            number = turn % len(self.writers)
            turn += 1
            writer = self.writers[number]
            began = time.monotonic()
            try:
                future = writer.append_async(payload(writer.ledger_id, self._pushed[number]))
            except PybkError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                continue
            self._pushed[number] += 1
            future.add_done_callback(partial(self._done, began))
            pending = [*(each for each in pending if not each.done()), future]
        for future in pending:
            future.exception(PROCESS_S)

    def _done(self, began: float, future: AppendFuture[int]) -> None:
        self.seconds.append(time.monotonic() - began)
        error = future.exception()
        if error is not None:
            self.errors.append(f"{type(error).__name__}: {error}")

    def more(self, count: int = 100) -> None:
        """Wait until so many more appends have ended."""
        wanted = len(self.seconds) + count
        wait_until(lambda: len(self.seconds) >= wanted, "appends to go on", pause_s=LOOK_S)

    def slowest_ms(self, since: int = 0) -> float:
        """Return how long the slowest append took, of those from one on."""
        return round(max(self.seconds[since:], default=0.0) * 1e3, 1)

    def p99_ms(self, since: int, until: int | None = None) -> float:
        """Return the 99th percentile of the appends from one on."""
        found = sorted(self.seconds[since:until])
        return round(found[len(found) * 99 // 100] * 1e3, 1) if found else 0.0

    def end(self) -> None:
        """Append no more; returns at once."""
        self._stopping.set()

    def stop(self) -> dict[int, int]:
        """Stop, close the ledgers, and return how many entries each has."""
        self.end()
        self._thread.join()
        for writer in self.writers:
            writer.close()
        return {writer.ledger_id: count for writer, count in zip(self.writers, self._pushed, strict=True)}


class StageBookie(BookieProcess):
    """A bookie whose repairs are scaled down, and that stands somewhere.

    Attributes:
        location: Where it stands, ``zone/rack``; empty for nowhere.
        variables: Variables of the environment of its processes from now on.
        children: All its processes; the last one is the present one.
    """

    def __init__(self, cluster: Members, name: str, location: str) -> None:
        super().__init__(cluster, name)
        self.location = location
        self.variables: dict[str, str] = {}
        self.children: list[Child] = []
        self._members = cluster

    def begin(self, listen: str = "tcp://127.0.0.1:*", *options: str) -> Child:
        """Start its process; options as of ``pybk bookie``."""
        arguments = ["bookie", str(self.directory), "--listen", listen, "--metadata", self._members.url]
        arguments += ["--id", self.name, "--json", *self._members.options, *options]
        arguments += ["--rack", self.location] if self.location else []
        log = self._members.directory / f"{self.name}.log"
        self.process = Child(arguments, self._members.secret, log, module=SCALED_PYBK, variables=self.variables)
        self.children.append(self.process)
        return self.process


class Members(Cluster):
    """Such bookies, which stand in zones in turn.

    Attributes:
        zones: In how many zones; 0 for nowhere.
        options: What each bookie is started with, as of ``pybk bookie`` or of ``tests.cluster.scenarios.scaled``.
    """

    zones = 0
    options: tuple[str, ...] = ()

    def make(self, name: str) -> StageBookie:
        """Make a bookie that is not started yet."""
        number = int(name.rpartition("-")[2])
        return StageBookie(self, name, f"zone{number % self.zones}/rack{number}" if self.zones else "")


class Stage:
    """A cluster with ledgers; made by ``stage``.

    Attributes:
        cluster: The processes.
        client: A client.
        admin: The administration.
        metadata: The metadata.
        closed: The closed ledgers, and how many entries each has.
        load: The writers at work.
    """

    def __init__(self, cluster: Members, entries: int, largest: int) -> None:
        self.cluster = cluster
        self.client = cluster.connect()
        self.admin = ClusterAdmin(self.client)
        self.closed: dict[int, int] = {}
        self._entries, self._largest = entries, largest
        self.load = Load(self.client, 0, 0.0)

    @property
    def metadata(self) -> ClusterMetadata:
        """The metadata, as a client has them."""
        return cluster_backend_of(self.client).membership.metadata

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def fill(self, count: int, **shape: Any) -> list[int]:
        """Write closed ledgers; the shape is 3/3/2 by default."""
        made = []
        for _ in range(count):
            with self.client.create_ledger(password=PASSWORD, **{**SHAPE, **shape}) as writer:
                data = [payload(writer.ledger_id, number, self._largest) for number in range(self._entries)]
                writer.append_many(data)
            self.closed[writer.ledger_id] = self._entries
            made.append(writer.ledger_id)
        return made

    def begin_load(self, ledgers: int = 4, pause_s: float = 0.002) -> None:
        """Have writers append to open ledgers."""
        self.load = Load(self.client, ledgers, pause_s)
        self.load.more(20)

    def ledgers(self) -> list[LedgerMetadata]:
        """Return the metadata of all ledgers."""
        ids = self.metadata.list_ledgers(count=10_000)
        return [each.metadata for each in self.metadata.read_ledgers(ids) if each is not None]

    def named(self, name: str) -> set[int]:
        """Return the closed ledgers of ``fill`` that name a bookie."""
        return {each.ledger_id for each in self.ledgers() if each.ledger_id in self.closed and name in names_of(each)}

    def ensemble(self, ledger_id: int) -> list[str]:
        """Return the bookies of the last fragment of a ledger."""
        return [each.bookie_id for each in self.client.ledger_metadata(ledger_id).fragments[-1].ensemble]

    # ---- bookies -------------------------------------------------------------------------------------------------

    def bookie(self, name: str) -> StageBookie:
        """Return the process of a bookie."""
        found = self.cluster.bookies[name]
        assert isinstance(found, StageBookie)
        return found

    def zones(self, count: int) -> None:
        """Have the bookies that are made from now on stand in so many zones in turn."""
        self.cluster.zones = count

    def seen(self, name: str) -> BookieStatus:
        """Return what is known of a bookie."""
        return next(each for each in self.admin.bookies(removed=True) if each.name == name)

    def rates(self) -> dict[str, float]:
        """Return how many bytes per second each bookie may copy."""
        return {name: self.figures(name)["rate"] for name, each in self.cluster.bookies.items() if each.alive}

    def leader(self) -> str:
        """Wait for the auditor's report, and return its bookie."""
        return wait_until(lambda: self.status().auditor, "an auditor", pause_s=LOOK_S)

    def followers(self) -> list[str]:
        """Return the bookies that run and are not the auditor, by name."""
        leader = self.leader()
        return [name for name, each in sorted(self.cluster.bookies.items()) if each.alive and name != leader]

    def figures(self, name: str) -> dict[str, Any]:
        """Return what a bookie says of itself."""
        child = self.bookie(name).child
        before = len(child.said("figures"))
        child.order("figures")
        found: str = child.wait_for(lambda: child.said("figures")[before:])[0]
        return dict(json.loads(found))

    def said(self, word: str) -> list[tuple[str, str]]:
        """Return what all processes of bookies said after a word, and which bookie."""
        return [
            (name, line)
            for name in self.cluster.bookies
            for child in self.bookie(name).children
            for line in child.said(word)
        ]

    def copied(self) -> list[tuple[str, int]]:
        """Return the copies that were begun: the bookie that copied to itself, and the ledger."""
        return [(name, int(line)) for name, line in self.said("copy")]

    def copied_bytes(self, ledgers: set[int] | None = None, by: str = "") -> int:
        """Return how many bytes were copied, of all ledgers or of some, by all bookies or by one."""
        pairs = [line.split() for name, line in self.said("copied") if by in ("", name)]
        return sum(int(size) for ledger_id, size in pairs if ledgers is None or int(ledger_id) in ledgers)

    def held_bytes(self, name: str) -> int:
        """Return how many bytes a bookie has of the closed ledgers that name it."""
        return sum(self.copy_bytes(name, ledger_id) for ledger_id in self.named(name))

    def copy_bytes(self, name: str, ledger_id: int) -> int:
        """Return how many bytes a bookie gives of a closed ledger."""
        bookie = self.seen(name).bookie
        ledger = descriptor_of(self.client.open_ledger(ledger_id, password=PASSWORD))
        assert isinstance(ledger, RemoteLedger)
        return sum(map(len, copies(self.cluster, self.client, bookie, ledger).values()))

    # ---- repairs -------------------------------------------------------------------------------------------------

    def change(self, **repair: Any) -> None:
        """Change how the cluster repairs itself."""
        self.admin.change_settings(lambda found: replace(found, repair=replace(found.repair, **repair)))

    def change_placement(self, **placement: Any) -> None:
        """Change where copies may lie."""
        self.admin.change_settings(lambda found: replace(found, placement=replace(found.placement, **placement)))

    def status(self) -> ClusterStatus:
        """Return how the cluster is."""
        return self.admin.status()

    def report(self) -> dict[str, Any]:
        """Return the auditor's report; nothing without an auditor."""
        return self.metadata.read_auditor_report() or {}

    def standing(self, name: str) -> str:
        """Return the status of a bookie in the auditor's report, which names those alone that are not live."""
        found = (each["status"] for each in self.report().get("bookies", ()) if each["bookie_id"] == name)
        return str(next(found, "live"))

    def reports(self, count: int = 5) -> None:
        """Wait for so many more reports of an auditor, between which it has looked at everything."""
        for _ in range(count):
            before = self.report().get("reported_ns", 0)
            wait_until(partial(self._reported, before), "a report of the auditor", pause_s=LOOK_S)

    def _reported(self, before: int) -> bool:
        return bool(self.report().get("reported_ns", 0) > before)

    def marks(self) -> list[UnderReplicatedLedger]:
        """Return all marks."""
        return list(self.metadata.marks())

    def lost(self) -> list[UnderReplicatedLedger]:
        """Return the marks because of a lost bookie."""
        return [mark for mark in self.marks() if RepairReason.LOST in mark.causes_by_reason()]

    def until(self, condition: Callable[[], Any], what: str, seconds: float = PROCESS_S) -> float:
        """Wait for something, and return how many seconds that took."""
        began = time.monotonic()
        wait_until(condition, what, seconds, LOOK_S)
        return round(time.monotonic() - began, 2)

    def whole(self) -> bool:
        """Return whether all ledgers have all their places on bookies that are registered, and no marks."""
        if self.marks():
            return False
        there = {each.bookie for each in self.metadata.list_bookies()}
        return all(there.issuperset(bookies_of(each)) for each in self.ledgers())

    def until_whole(self) -> float:
        """Wait until the cluster is whole, and return how many seconds that took."""
        try:
            return self.until(self.whole, "the cluster to be whole")
        except AssertionError as error:
            marks = [f"{mark.ledger_id} {mark.bookie} {mark.causes} {mark.state} {mark.error}" for mark in self.marks()]
            raise AssertionError(f"{error}; status {self.status()}; marks {marks[:5]}") from error

    # ---- the end -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Stop the writers, and check that nothing is lost, and that each place of each ledger has its entries."""
        written = self.load.stop()
        assert not self.load.errors, self.load.errors[:3]
        with self.cluster.connect() as client:
            for ledger_id, entries in self.closed.items():
                wanted = [payload(ledger_id, number, self._largest) for number in range(entries)]
                assert contents(client, ledger_id, PASSWORD) == wanted, f"ledger {ledger_id}"
                check_replicas(self.cluster, client, ledger_id, complete=True)
        for ledger_id, entries in written.items():
            check_ledger(self.cluster, ledger_id, entries - 1, entries - 1)

    def run(self, *arguments: str) -> Child:
        """Run ``pybk ARGUMENTS`` in a process, which says lines and has an exit status."""
        log = self.cluster.directory / f"command-{len(self.cluster.writers)}.log"
        child = Child(list(arguments), self.cluster.secret, log, module=SCALED_PYBK)
        self.cluster.writers.append(child)
        return child


def names_of(metadata: LedgerMetadata) -> set[str]:
    """Return the names of all bookies of a ledger."""
    return {bookie.bookie_id for bookie in bookies_of(metadata)}


def bookies_of(metadata: LedgerMetadata) -> set[Bookie]:
    """Return all bookies of a ledger."""
    return {bookie for fragment in metadata.fragments for bookie in fragment.ensemble}


@contextmanager
def stage(
    directory: Path,
    *,
    bookies: int = 5,
    zones: int = 3,
    ledgers: int | None = None,
    entries: int = 20,
    largest: int = 400,
    load: bool = True,
    url: str = "",
    repair: Mapping[str, Any] | None = None,
    options: tuple[str, ...] = (),
    given: ClusterSecret = SECRET,
) -> Iterator[Stage]:
    """Run a cluster with closed ledgers and writers at work.

    Args:
        directory: Where everything lies.
        bookies: How many bookies.
        zones: In how many zones they stand in turn; 0 for nowhere.
        ledgers: How many closed ledgers; ``LEDGERS`` by default.
        entries: How many entries each of them has.
        largest: Bytes of the longest payload.
        load: Whether writers append to four open ledgers.
        url: The metadata store's; by default one in the directory.
        repair: Settings of repairs.
        options: What each bookie is started with, too.
        given: What clients of this process are given as the cluster's secret.
    """
    url = make_cluster(directory, SECRET, url=url)
    with ExitStack() as ending:
        cluster = Members(directory, url=url)
        cluster.zones, cluster.options, cluster.given = zones, options, given
        ending.callback(cluster.close)
        made = Stage(cluster, entries, largest)
        made.change(**{"grace_s": 2 * LEASE_S, **(repair or {})})
        cluster.add(bookies)
        wait_until(lambda: len(cluster_backend_of(made.client).membership.bookies) == bookies)
        made.fill(LEDGERS if ledgers is None else ledgers)
        if load:
            made.begin_load()
            ending.callback(made.load.end)
        # A young session is a reason to hold repairs, which is over then.
        made.until(lambda: made.report().get("phase") == "leading" and not made.report()["holds"], "an auditor")
        yield made
