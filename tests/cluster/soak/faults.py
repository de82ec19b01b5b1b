"""The faults of a soak, in an order that its seed draws: never more at once than the quorums tolerate.

There are two classes. What *passes* takes a bookie away for some seconds, and its disk stays: killed, stopped, or all
of them cut off from the metadata store. At most ``HURT_MAX`` bookies are away at the same time. What *loses* takes
copies away for good: a bookie wiped, a device lost, a bit flipped. Each acknowledged entry has two copies at least, so
a loss is only begun when the cluster has been whole since the last one; then it may lose nothing. Drains, removals and
maintenance are begun at such times, too. While the cluster recovers, more faults pass.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pybk.errors import NoSuchLedgerError, PybkError, SafetyCheckError
from pybk.metadata.registration import BookieState
from tests.cluster.child import PASSWORD, payload
from tests.cluster.nemesis import LARGEST
from tests.cluster.processes import Child
from tests.cluster.soak.members import SoakBookie, SoakCluster
from tests.cluster.soak.watch import PROGRESS_S, Watch
from tests.waiting import wait_until
from tests.zookeeper_server import ZooKeeperServer

HURT_MAX = 2
WHOLE_S = 420.0
"""How long the cluster may take to become whole again, faults of the other class included."""

LEFT_S = 15.0
"""After how long somebody recovers a ledger that its writer has left."""

DRAIN_S = 420.0
"""How long a drain may take without progress, and for how long safety checks may refuse a step of it."""

FLIPPED = 20
"""In how many ledgers a bit is flipped at a time, as far as they have a copy on the bookie."""

UNIQUE_BYTES = 100
"""A payload that is shorter may be found in other bytes."""

SCRUBBED_S = 240.0
"""How long it may take until all entries of a bookie were checked, other faults included."""


class Faults:
    """Breaks things and mends them later, until ``end``.

    Attributes:
        counts: How often what was done.
        failures: What went wrong and must not.
        longest_s: The longest time from a loss until the cluster was whole again.
    """

    def __init__(
        self, cluster: SoakCluster, watch: Watch, seed: int, *, writers: int, zookeeper: ZooKeeperServer | None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.longest_s = 0.0
        self._cluster = cluster
        self._watch = watch
        self._seed = seed
        self._source = random.Random(f"faults {seed}")
        self._zookeeper = zookeeper
        self._hurt: set[str] = set()
        self._busy: set[str] = set()
        """Bookies that a person works on; no other fault meets them."""
        self._working: list[threading.Thread] = []
        self._stopped: set[Child] = set()
        self._writer_count = writers
        self._client = cluster.connect()
        self._passing: list[tuple[int, Callable[[], None]]] = [
            (4, self._kill_bookie),
            (4, self._stop_bookie),
            (2, self._kill_writer),
            (1, self._stop_writer),
            (1, self._interrupt_metadata),
            (2, self._recover_left),
        ]
        self._losing: list[tuple[int, Callable[[], None]]] = [
            (3, self._wipe),
            (3, self._lose_device),
            (3, self._flip_bits),
            (2, self._drain_and_remove),
            (1, self._drain_and_cancel),
            (1, self._maintenance),
            (1, self._pause),
        ]

    # ---- the run -------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Break and mend for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            self._act(self._losing)
            for _ in range(self._source.randint(2, 6)):
                self._keep_writing()
                self._act(self._passing)
                time.sleep(self._source.expovariate(0.5))
            self.wait_until_mended()
            self._recover_left(all_deferred=True)
            self._watch.wait_whole("between two losses", WHOLE_S)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self._keep_writing()

    def _act(self, actions: list[tuple[int, Callable[[], None]]]) -> None:
        weights, calls = zip(*actions, strict=True)
        self._source.choices(calls, weights)[0]()

    def wait_until_mended(self) -> None:
        """Wait until all that was broken is mended, and all work of people is done."""
        for thread in self._working:
            while thread.is_alive():
                thread.join(PROGRESS_S)
                if thread.is_alive():
                    self._watch.say(f"waiting for {thread.name}; {'; '.join(self._watch.why)[:400]}")
        self._working.clear()
        assert not self.failures, self.failures
        assert not self._hurt, self._hurt

    def _do(self, what: str, call: Callable[[], object]) -> None:
        """Do something in a thread of its own; its failure is one of the soak."""

        def run() -> None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 # whatever it is, the soak has failed
                self.failures.append(f"{what}: {type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name=what, daemon=True)
        self._working.append(thread)
        thread.start()

    def _keep_writing(self) -> None:
        """Replace writers that ended."""
        alive = [writer for writer in self._cluster.writers if writer.alive]
        for _ in range(self._writer_count - len(alive)):
            number = len(self._cluster.writers)
            self._cluster.begin_soak_writer(f"{self._seed}/{number}", threads=3)
            self.counts["writers started"] += 1

    # ---- what passes ---------------------------------------------------------------------------------------------

    def _victim(self) -> SoakBookie | None:
        """Return a bookie that is well, unless enough are not."""
        well = [
            name
            for name, bookie in sorted(self._cluster.bookies.items())
            if name not in self._hurt | self._busy and bookie.alive
        ]
        if len(self._hurt) >= HURT_MAX or not well:
            return None
        return self._cluster.soak_bookie(self._source.choice(well))

    def _hurt_for(self, seconds: float, bookie: SoakBookie, what: str, heal: Callable[[], object]) -> None:
        self._hurt.add(bookie.name)
        self.counts[what] += 1
        self._watch.say(f"{what}: {bookie.name} for {seconds:.1f} s")

        def mend() -> None:
            time.sleep(seconds)
            heal()
            self._hurt.discard(bookie.name)

        self._do(f"{what}: {bookie.name}", mend)

    def _kill_bookie(self) -> None:
        if bookie := self._victim():
            bookie.kill()
            self._hurt_for(self._source.uniform(0.0, 12.0), bookie, "bookies killed", bookie.start)

    def _stop_bookie(self) -> None:
        if bookie := self._victim():
            bookie.stop()
            self._hurt_for(self._source.uniform(0.5, 10.0), bookie, "bookies stopped", bookie.resume)

    def _interrupt_metadata(self) -> None:
        """Have no bookie and no writer reach the metadata store for some seconds."""
        if self._hurt:
            return
        seconds = self._source.uniform(1.0, 8.0)
        self.counts["metadata store interrupted"] += 1
        self._watch.say(f"the metadata store is interrupted for {seconds:.1f} s")
        if self._zookeeper is not None:
            if self._source.random() < 0.5:
                self._zookeeper.kill()
                time.sleep(seconds)
                self._zookeeper.start()
            else:
                self._zookeeper.pause()
                time.sleep(seconds)
                self._zookeeper.resume()
            return
        bookies = [each for name, each in self._cluster.bookies.items() if name not in self._busy and each.alive]
        for bookie in bookies:
            bookie.stop()
        time.sleep(seconds)
        for bookie in bookies:
            bookie.resume()

    # ---- writers -------------------------------------------------------------------------------------------------

    def _some_writer(self) -> Child | None:
        running = [each for each in self._cluster.writers if each.alive and each not in self._stopped]
        return self._source.choice(running) if running else None

    def _kill_writer(self) -> None:
        if writer := self._some_writer():
            writer.kill()
            self.counts["writers killed"] += 1

    def _stop_writer(self) -> None:
        if writer := self._some_writer():
            writer.stop()
            self._stopped.add(writer)
            self.counts["writers stopped"] += 1
            seconds = self._source.uniform(1.0, 20.0)

            def resume() -> None:
                time.sleep(seconds)
                writer.signal(signal.SIGCONT)
                self._stopped.discard(writer)

            self._do("a writer is resumed", resume)

    def _recover_left(self, *, all_deferred: bool = False) -> None:
        """Have the owner recover ledgers that were left: one, or all whose bookies may be in limbo until their end."""
        now = time.monotonic()
        left = [each for each in list(self._cluster.book.ledgers.values()) if each.left and not each.deleting]
        if all_deferred:
            left = [each for each in left if "DEFERRED" in each.kind]
        else:
            left = [each for each in left if now > each.at + LEFT_S]
            left = [self._source.choice(left)] if left else []
        for each in left:
            try:
                self._client.open_ledger(each.ledger_id, password=PASSWORD).close()
                self.counts["recoveries by owners"] += 1
            except PybkError as error:
                self.counts[f"recoveries by owners ended by {type(error).__name__}"] += 1

    # ---- what loses ----------------------------------------------------------------------------------------------

    def _wipe(self) -> None:
        """Replace a bookie by an empty one of its name, soon or after it was found lost."""
        if bookie := self._victim():
            bookie.kill()
            bookie.wipe()
            bookie.replacing = True
            seconds = self._source.choice((0.0, 3.0, 20.0))
            self._hurt_for(seconds, bookie, "bookies wiped and replaced", bookie.start)

    def _lose_device(self) -> None:
        """Lose the files of a tier.

        The index, which a bookie needs, stays, and so does the cookie of the tier: without it the bookie refuses to
        start, because the device may not be mounted.
        """
        if bookie := self._victim():
            name = self._source.choice(("hdd", "ssd/entries"))
            bookie.kill()
            for path in (bookie.directory / name).iterdir():
                if path.name != "cookie":
                    path.unlink()
            self._hurt_for(0.0, bookie, f"devices lost ({name})", bookie.start)

    def _flip_bits(self) -> None:
        """Flip a bit of an entry of each of some closed ledgers in the files of one bookie, and wait for the scrub."""
        bookie = self._victim()
        if bookie is None:
            return
        ledgers = list(self._cluster.book.ledgers.values())
        lasts = {each.ledger_id: each.closed for each in ledgers if each.closed is not None and not each.deleting}
        full = [(ledger_id, last) for ledger_id, last in lasts.items() if last >= 0]
        chosen = self._source.sample(full, min(len(full), FLIPPED))
        wanted = [payload(ledger_id, self._source.randint(0, last), LARGEST) for ledger_id, last in chosen]
        flipped = flip_bits(bookie.directory, [each for each in wanted if len(each) >= UNIQUE_BYTES])
        self.counts["bits flipped"] += flipped
        self._watch.say(f"bits flipped: {flipped} of {bookie.name}")
        at_ns = time.time_ns()

        def is_mended() -> bool:
            """Return whether the bookie has checked all of its entries since, and none waits for a copy."""
            time.sleep(0.5)
            report = bookie.report()
            return bool(report) and int(report["checked_ns"]) > at_ns and report["health"] == "ok"

        self._do(
            f"bits flipped: {bookie.name}", lambda: wait_until(is_mended, f"{bookie.name} to be checked", SCRUBBED_S)
        )

    def _work_on(self, bookie: SoakBookie, what: str, call: Callable[[SoakBookie], None]) -> None:
        self.counts[what] += 1
        self._watch.say(f"{what}: {bookie.name}")
        self._busy.add(bookie.name)

        def work() -> None:
            call(bookie)
            self._busy.discard(bookie.name)

        self._do(f"{what}: {bookie.name}", work)

    def _patiently(self, what: str, call: Callable[[], Any]) -> Any:
        """Make a call until no safety check refuses it, because of faults that pass."""
        end = time.monotonic() + DRAIN_S
        while True:
            try:
                return call()
            except PybkError as error:
                self.counts[f"{what} refused by {type(error).__name__}"] += 1
                if time.monotonic() > end:
                    raise
                time.sleep(1.0)

    def _drain_and_remove(self) -> None:
        """Start a new bookie, empty another one, and remove it for good."""
        bookie = self._victim()
        if bookie is None:
            return
        new = self._cluster.add_one()
        self._watch.say(f"{new.name} is new")
        self._work_on(bookie, "bookies drained and removed", self._remove)

    def _remove(self, bookie: SoakBookie) -> None:
        admin = self._watch.admin
        self._patiently("drains", lambda: admin.drain(bookie.name))

        def left() -> int | None:
            with suppress(PybkError):
                progress = admin.drain_progress(bookie.name)
                return None if progress.state is BookieState.DRAINED else progress.ledgers_left
            return sys.maxsize

        self._watch.wait_while_less(f"drain of {bookie.name}", left, DRAIN_S)
        proof = self._patiently("proofs", lambda: admin.ok_to_remove(bookie.name))
        self._patiently("removals", lambda: admin.remove(bookie.name, proof))
        self._cluster.forget(bookie.name)
        status = bookie.terminate()
        assert status == 0, f"{bookie.name} ended with {status}: {bookie.child.complaint()}"

    def _drain_and_cancel(self) -> None:
        """Begin to drain a bookie, and cancel that."""
        if bookie := self._victim():
            seconds = self._source.uniform(0.0, 4.0)
            self._work_on(bookie, "drains cancelled", lambda bookie: self._cancel(bookie, seconds))

    def _cancel(self, bookie: SoakBookie, seconds: float) -> None:
        admin = self._watch.admin
        try:
            admin.drain(bookie.name)
        except SafetyCheckError:  # with five bookies, and a ledger on all of them
            self.counts["drains refused for good"] += 1
        time.sleep(seconds)
        self._patiently("cancels", lambda: admin.cancel_drain(bookie.name))

    def _maintenance(self) -> None:
        """Stop a bookie for longer than its grace, after that was announced."""
        if bookie := self._victim():
            self._work_on(bookie, "maintenances", self._maintain)

    def _maintain(self, bookie: SoakBookie) -> None:
        admin = self._watch.admin
        self._patiently("maintenances", lambda: admin.maintenance(bookie.name, 60.0))
        self._patiently("stops", lambda: self._check_stop(bookie.name))
        status = bookie.terminate()
        assert status == 0, f"{bookie.name} ended with {status}: {bookie.child.complaint()}"
        time.sleep(10.0)
        bookie.start()
        self._patiently("maintenances", lambda: admin.end_maintenance(bookie.name))

    def _check_stop(self, name: str) -> None:
        check = self._watch.admin.ok_to_stop(name)
        if not check.ok:
            raise SafetyCheckError("; ".join(check.refusals), failures=check.refusals)

    def _pause(self) -> None:
        """Pause repairs, which resume by themselves."""
        self.counts["pauses"] += 1
        seconds = self._source.uniform(2.0, 10.0)
        self._patiently("pauses", lambda: self._watch.admin.pause_repair(seconds, "the soak"))


def flip_bits(directory: Path, wanted: list[bytes]) -> int:
    """Flip the lowest bit of the first byte of some payloads wherever a closed file or the SSD tier has them.

    Log files are left out: those since the last checkpoint are the only ones that a bookie must be able to read when it
    starts.

    Args:
        directory: Of a bookie, which may run. A payload is compared once more just before its bit is flipped, because
            LMDB may use its page anew.
        wanted: The payloads.

    Returns:
        How many bits were flipped. Copies that the store does not need any more are among them.
    """
    flipped = 0
    for path in [*directory.rglob("*.cold"), directory / "ssd" / "entries" / "data.mdb"]:
        with suppress(FileNotFoundError), path.open("r+b") as file:
            data = file.read()
            for each in wanted:
                at = data.find(each)
                if at >= 0 and os.pread(file.fileno(), len(each), at) == each:
                    os.pwrite(file.fileno(), bytes([each[0] ^ 1]), at)
                    flipped += 1
    return flipped


def recover_all(cluster: SoakCluster, watch: Watch) -> int:
    """Recover all ledgers that their writers have left, as their owner does; return how many."""
    with cluster.connect() as client:
        ledgers = cluster.book.ledgers.values()
        left = [each for each in ledgers if (each.closed is None or each.deleting) and not each.deleted]
        for each in left:
            try:
                client.open_ledger(each.ledger_id, password=PASSWORD).close()
            except NoSuchLedgerError:
                assert each.deleting, f"ledger {each.ledger_id} is gone"
                each.deleted = True
        watch.say(f"{len(left)} ledgers that were left are recovered")
        return len(left)
