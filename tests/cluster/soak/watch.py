"""What is seen of a soak's cluster from outside, every second: whether it is whole, and for how long it is not."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from pybk.errors import PybkError
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.registration import BookieState
from pybk.operations.cluster_admin import ClusterAdmin
from pybk.operations.cluster_checks import ClusterVerdict
from tests.cluster.soak.members import SoakCluster
from tests.internals import cluster_backend_of

LOOK_S = 1.0
STEADY_S = 4.0
"""For how long a cluster must be whole, because the auditor looks every second only."""

PROGRESS_S = 10.0
PATIENCE = 4
"""How many times as long as without progress a cluster may take that makes progress."""


class Watch:
    """Looks at a cluster from its creation until ``end``.

    Attributes:
        short_s: The longest time during which a ledger was marked all the time.
        seen: How many looks saw what.
        holds: How many looks saw which hold.
        why: Why the cluster was not whole at the last look.
        limbo: How many ledgers all bookies had in limbo then.
    """

    def __init__(self, cluster: SoakCluster) -> None:
        self._cluster = cluster
        self._client = cluster.connect()
        self.admin = ClusterAdmin(self._client)
        self.began = time.monotonic()
        self.short_s = 0.0
        self.seen: Counter[str] = Counter()
        self.holds: Counter[str] = Counter()
        self._marked: dict[int, float] = {}
        self.why = ["nothing was seen yet"]
        self.limbo = 0
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._cluster.book.take(list(self._cluster.writers))
            try:
                why = self._look()
            except PybkError as error:
                why = [f"it could not be seen: {error}"]
                self.seen[f"looks ended by {type(error).__name__}"] += 1
            self.limbo = self._in_limbo()
            if why or self.why:
                self._since = time.monotonic()
            self.why = why
            self.seen["whole" if not why else "not whole"] += 1

    def _look(self) -> list[str]:
        """Return why the cluster is not whole, and note since when ledgers are marked."""
        now = time.monotonic()
        status = self.admin.status()
        marks = self.admin.repairs()
        marked = {mark.ledger_id for mark in marks}
        self._marked = {ledger_id: self._marked.get(ledger_id, now) for ledger_id in marked}
        self.short_s = max([self.short_s, *(now - since for since in self._marked.values())])
        self.holds.update(status.holds)
        why = [reason.text for reason in status.reasons] if status.verdict is not ClusterVerdict.OK else []
        if marks:
            example = marks[0]
            why.append(
                f"{len(marked)} ledgers are marked, such as {example.ledger_id}: {example.reason}, {example.state}, "
                f"{example.bookie}, {example.tries} tries, {example.error or 'no error'}"
            )
        why += self._unwell()
        return why or self._misnamed()

    def _unwell(self) -> list[str]:
        """Return which bookies do not run well."""
        why = []
        for name in list(self._cluster.bookies):
            bookie = self._cluster.soak_bookie(name)
            health = bookie.report().get("health", "starting") if bookie.alive else "ended"
            if health != "ok":
                why.append(f"{name} is {health}")
        return why

    def _misnamed(self) -> list[str]:
        """Return which ledgers name bookies that do not run, or leave: what no repair and no writer has replaced."""
        well: set[Bookie] = {
            each.bookie
            for each in self.admin.bookies()
            if each.registered and each.state in (BookieState.ACTIVE, BookieState.MAINTENANCE)
        }
        ledgers = cluster_backend_of(self._client).ledgers(-1)
        wrong = {
            metadata.ledger_id: bookie
            for metadata in ledgers
            for fragment in metadata.fragments
            for bookie in fragment.ensemble
            if bookie not in well
        }
        if not wrong:
            return []
        return [f"{len(wrong)} ledgers name bookies that are not well, such as {next(iter(wrong.items()))}"]

    def wait_whole(self, what: str, seconds: float) -> float:
        """Wait until the cluster has been whole for a moment; return for how long it was waited.

        Bookies fill up what they may have lost ledger by ledger, which is the progress that is counted.

        Args:
            what: What is said while it waits.
            seconds: How long it may take without progress.

        Raises:
            AssertionError: It was not in time.
        """
        self.why = ["it was not looked at since"]

        def left() -> int | None:
            steady = not self.why and time.monotonic() - self._since >= STEADY_S
            return None if steady else self.limbo

        return self.wait_while_less(what, left, seconds)

    def wait_while_less(self, what: str, left: Callable[[], int | None], seconds: float) -> float:
        """Wait until nothing is left, as long as there is progress; return for how long it was waited.

        Args:
            what: What is said while it waits.
            left: Returns how much is left, None at the end. It is progress when that is less than ever.
            seconds: How long it may take without progress; ``PATIENCE`` times as long at most.

        Raises:
            AssertionError: It was not in time.
        """
        began = moved = said = time.monotonic()
        fewest = sys.maxsize
        while (now_left := left()) is not None:
            now = time.monotonic()
            if now_left < fewest:
                fewest, moved = now_left, now
            late = now > moved + seconds or now > began + PATIENCE * seconds
            why = "; ".join(self.why)[:400] or "it is whole only since now"
            assert not late, f"{what}: {now_left} left after {now - began:.0f} s: {why}"
            if now > said + PROGRESS_S:
                said = now
                self.say(f"{what}: waiting, {now_left} left, because {why}")
            time.sleep(0.1)
        return time.monotonic() - began

    def _in_limbo(self) -> int:
        """Return how many ledgers all bookies have in limbo, as they say."""
        bookies = (self._cluster.soak_bookie(name) for name in list(self._cluster.bookies))
        return sum(each.report().get("limbo", 0) for each in bookies if each.alive)

    def say(self, text: str) -> None:
        """Print a line of progress."""
        sys.stderr.write(f"{time.monotonic() - self.began:7.1f} s  {text}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self._thread.join()
