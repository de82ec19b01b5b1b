"""A cluster of real processes under random faults: ``python -m tests.cluster.nemesis --seconds 600 --seed 1``.

Five bookies, two writers at a time, one tailing reader. Bookies and writers are killed, stopped and cut off, ledgers
are recovered by up to three clients at once while they are written. At the end everything is healed, and each ledger
must hold what ``tests.cluster.checker`` asks for. The seed decides which faults come when; what they meet is chance.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path

from pybk.errors import PybkError
from pybk.manager.ledger_manager import LedgerManager
from tests.cluster.checker import check_writer
from tests.cluster.child import PASSWORD, payload
from tests.cluster.inside import SECRET
from tests.cluster.processes import BookieProcess, Child, Cluster, running
from tests.internals import cluster_backend_of
from tests.waiting import wait_until

BOOKIES = 5
WRITERS = 2
LARGEST = 2000
SHAPES = [(3, 3, 2), (3, 3, 2), (4, 3, 2), (5, 3, 2), (4, 2, 2), (2, 2, 1), (3, 3, 3), (5, 5, 3)]
FOLLOWED_S = 5.0
HURT_MAX = 2
"""Bookies that are not well at the same time."""


class TailingReader:
    """Follows ledgers while they are written, and remembers how far it saw each.

    Attributes:
        seen: Entries seen, by ledger.
        wrong: What it saw and should not have.
        errors: Errors of following, by class.
    """

    def __init__(self, cluster: Cluster, ledgers: Callable[[], list[int]], source: random.Random) -> None:
        self.seen: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.errors: Counter[str] = Counter()
        self._client = cluster.connect(routed=True)
        self._ledgers = ledgers
        self._source = source
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.05):
            ledgers = self._ledgers()
            if ledgers:
                try:
                    self._follow(self._source.choice(ledgers))
                except PybkError as error:
                    self.errors[type(error).__name__] += 1

    def _follow(self, ledger_id: int) -> None:
        with self._client.open_ledger(ledger_id, password=PASSWORD, recover=False) as reader:
            first = self.seen[ledger_id]
            # One whose writer was killed may stay open for ever.
            leaving = threading.Timer(FOLLOWED_S, reader.close)
            leaving.daemon = True
            leaving.start()
            for entry_id, entry in enumerate(reader.follow(first), first):
                if (entry.entry_id, entry.payload) != (entry_id, payload(ledger_id, entry_id, LARGEST)):
                    self.wrong.append(f"ledger {ledger_id}: entry {entry_id} was read as {entry!r:.200}")
                self.seen[ledger_id] = entry_id + 1
                if self._ended.is_set():
                    return

    def end(self) -> None:
        """Stop following."""
        self._ended.set()
        self._client.close()
        self._thread.join()


class Nemesis:
    """Breaks things, and mends them later.

    Attributes:
        counts: How often what was done.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster = cluster
        self._source = random.Random(f"faults {seed}")
        self._workload = random.Random(f"workload {seed}")
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._hurt: set[str] = set()
        self._live: list[Child] = []
        self._stopped: set[Child] = set()
        self._recoveries: list[threading.Thread] = []
        self._reader = TailingReader(cluster, self._open_ledgers, random.Random(f"reader {seed}"))
        self._actions: list[tuple[int, Callable[[], None]]] = [
            (4, self._kill_bookie),
            (4, self._stop_bookie),
            (4, self._cut_off_bookie),
            (2, self._slow_bookie),
            (3, self._break_connections),
            (2, self._kill_writer),
            (2, self._stop_writer),
            (2, self._recover),
        ]

    def _open_ledgers(self) -> list[int]:
        return [ledger_id for writer in list(self._live) for ledger_id in map(int, writer.said("ledger"))]

    # ---- the run -------------------------------------------------------------------------------------------------

    def run(self, seconds: float, faults: int = 0) -> None:
        """Break and mend for so long, and until bookies met so many faults under load, then mend everything."""
        end = time.monotonic() + seconds
        at = 0.0
        try:
            while time.monotonic() < end or not self._enough(faults):
                self._keep_writing()
                self._mend(time.monotonic())
                if time.monotonic() >= at:
                    weights, actions = zip(*self._actions, strict=True)
                    self._source.choices(actions, weights)[0]()
                    at = time.monotonic() + self._source.expovariate(3.0)
                time.sleep(0.02)
            self._mend(float("inf"))
        finally:
            self._reader.end()
            for thread in self._recoveries:
                thread.join()

    def _enough(self, faults: int) -> bool:
        """Return whether bookies met so many faults, and writers had 20 entries acknowledged for each."""
        met = sum(count for what, count in self.counts.items() if what.startswith("bookies "))
        writers = self._cluster.writers
        acknowledged = sum(len(writer.said("acked")) for writer in writers)
        ledgers = sum(bool(writer.said("ledger")) for writer in writers)
        return met >= faults and (not faults or (acknowledged >= 20 * faults and ledgers >= 2))

    def _in(self, seconds: float, call: Callable[[], None]) -> None:
        heappush(self._later, (time.monotonic() + seconds, len(self._later) + self.counts.total(), call))

    def _mend(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            heappop(self._later)[2]()

    def _keep_writing(self) -> None:
        """Replace writers that ended."""
        self._live = [writer for writer in self._live if writer.alive]
        while len(self._live) < WRITERS:
            source = self._workload
            self._live.append(
                self._cluster.begin_writer(
                    routed=True,
                    shape=source.choice(SHAPES),
                    window=source.choice((1, 10, 100)),
                    entries=source.choice((None, 200, 2000)),
                    pause_s=source.choice((0.0, 0.001, 0.01)),
                    largest=LARGEST,
                )
            )
            self.counts["writers"] += 1

    # ---- faults of bookies ---------------------------------------------------------------------------------------

    def _victim(self) -> BookieProcess | None:
        """Return a bookie that is well, unless enough are not."""
        well = [bookie for name, bookie in self._cluster.bookies.items() if name not in self._hurt]
        if len(self._hurt) >= HURT_MAX:
            return None
        bookie = self._source.choice(well)
        self._hurt.add(bookie.name)
        return bookie

    def _hurt_for(self, seconds: float, bookie: BookieProcess, heal: Callable[[], object], what: str) -> None:
        self.counts[what] += 1

        def mend() -> None:
            heal()
            self._hurt.discard(bookie.name)

        self._in(seconds, mend)

    def _kill_bookie(self) -> None:
        if bookie := self._victim():
            bookie.kill()
            self._hurt_for(self._source.uniform(0.0, 3.0), bookie, bookie.start, "bookies killed")

    def _stop_bookie(self) -> None:
        if bookie := self._victim():
            bookie.stop()
            self._hurt_for(self._source.expovariate(0.5), bookie, bookie.resume, "bookies stopped")

    def _cut_off_bookie(self) -> None:
        if bookie := self._victim():
            requests, replies = self._source.choice(((True, True), (True, False), (False, True)))
            bookie.proxy.hold(requests=requests, replies=replies)
            which = "both ways" if requests and replies else "one way"
            self._hurt_for(self._source.expovariate(0.3), bookie, bookie.proxy.heal, f"bookies cut off {which}")

    def _slow_bookie(self) -> None:
        if bookie := self._victim():
            bookie.proxy.replies.delay_s = self._source.uniform(0.0, 0.1)
            self._hurt_for(self._source.uniform(0.0, 2.0), bookie, bookie.proxy.heal, "bookies slowed")

    def _break_connections(self) -> None:
        self._source.choice(list(self._cluster.bookies.values())).proxy.cut()
        self.counts["connections broken"] += 1

    # ---- faults of writers ---------------------------------------------------------------------------------------

    def _kill_writer(self) -> None:
        if running_now := [writer for writer in self._live if writer.alive and writer not in self._stopped]:
            self._source.choice(running_now).kill()
            self.counts["writers killed"] += 1

    def _stop_writer(self) -> None:
        """Stop a writer; mostly somebody recovers its ledger meanwhile."""
        ready = [writer for writer in self._live if writer not in self._stopped and writer.said("ledger")]
        if not ready:
            return
        writer = self._source.choice(ready)
        writer.stop()
        self._stopped.add(writer)
        self.counts["writers stopped"] += 1
        if self._source.random() < 0.7:
            self._recover_ledger(int(writer.said("ledger")[0]))

        def resume() -> None:
            writer.signal(signal.SIGCONT)
            self._stopped.discard(writer)

        self._in(self._source.expovariate(0.5), resume)

    def _recover(self) -> None:
        if ledgers := self._open_ledgers():
            self._recover_ledger(self._source.choice(ledgers))

    def _recover_ledger(self, ledger_id: int) -> None:
        for _ in range(self._source.choice((1, 1, 2, 3))):
            client = self._cluster.connect(routed=self._source.random() < 0.7)
            thread = threading.Thread(target=self._recover_with, args=(client, ledger_id))
            self._recoveries.append(thread)
            thread.start()

    def _recover_with(self, client: LedgerManager, ledger_id: int) -> None:
        try:
            with client:
                client.open_ledger(ledger_id, password=PASSWORD)
            self.counts["recoveries"] += 1
        except PybkError as error:
            self.counts[f"recoveries ended by {type(error).__name__}"] += 1

    # ---- the end -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check every ledger that a writer named, once all is well again (I10: it must come to a close)."""
        for writer in self._cluster.writers:
            writer.kill()
        membership = cluster_backend_of(self._cluster.connect()).membership
        wait_until(lambda: len(membership.bookies) == BOOKIES, "all bookies to come back")
        assert not self._reader.wrong, self._reader.wrong[:10]
        self.counts.update({f"following ended by {name}": count for name, count in self._reader.errors.items()})
        for writer in self._cluster.writers:
            if not writer.said("ledger"):
                self.counts["writers without a ledger"] += 1
                continue
            metadata = check_writer(self._cluster, writer, largest=LARGEST, complete=False)
            seen = self._reader.seen[metadata.ledger_id]
            assert seen <= metadata.last_entry_id + 1, f"ledger {metadata.ledger_id}: {seen} entries were read (I16)"
            self.counts["ledgers"] += 1
            self.counts["entries"] += metadata.last_entry_id + 1
            self.counts["acknowledged"] += len(writer.said("acked"))
            self.counts["followed"] += seen
            self.counts["fragments"] += len(metadata.fragments)
            for error in writer.said("error")[:1]:
                self.counts[f"writers ended by {error.split()[0]}"] += 1


def torment(
    directory: Path, seconds: float, seed: int, *, secret: bytes | None = SECRET, faults: int = 0
) -> Counter[str]:
    """Run a cluster under faults for some seconds, check it, and return what was done and found; see ``run``."""
    with running(directory, BOOKIES, secret=secret) as cluster:
        nemesis = Nemesis(cluster, seed)
        nemesis.run(seconds, faults)
        nemesis.check()
        return nemesis.counts


def main() -> int:
    """Run as the command line says; a failure says where its logs are and which seed it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults go on; default: 60")
    parser.add_argument("--seed", type=int, default=None, help="default: one by chance")
    parser.add_argument("--no-secret", action="store_true", help="a cluster without a secret")
    parsed = parser.parse_args()
    seed = random.randrange(1 << 32) if parsed.seed is None else parsed.seed
    directory = Path(tempfile.mkdtemp(prefix="pybk-nemesis-"))
    sys.stderr.write(f"seed {seed}, in {directory}\n")
    began = time.monotonic()
    counts = torment(directory, parsed.seconds, seed, secret=None if parsed.no_secret else SECRET)
    counts["seconds"] = int(time.monotonic() - began)
    for name, count in sorted(counts.items()):
        sys.stdout.write(f"{count:>10,} {name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
