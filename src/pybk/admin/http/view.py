"""The view of the routes: a manager, the administration of its cluster, and the last looks at both.

A page and probes ask often, which must not burden a bookie. So a thread looks once in ``VIEW_SECONDS``, and routes that
are asked often read the values that it has seen; none of them calls the manager. Without requests, the thread only adds
to the ``history``, for which it reads counters of this process, and nothing from the metadata store.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, Unpack

from pybk.admin.http.bookie_loads import BookieLoads
from pybk.admin.http.events import Events
from pybk.admin.http.history import FreeSpace, History, Sample
from pybk.admin.http.lags import LagHistory
from pybk.admin.http.problems import ProblemError
from pybk.admin.http.rates import LedgerCounts, Load, RateMeter, Rates, together
from pybk.admin.http.shown import Shown, opens_logs
from pybk.errors import ClosedError, PybkError
from pybk.health import Health
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.operations.cluster_admin import ClusterAdmin
from pybk.operations.cluster_checks import BookieStatus, ClusterStatus, ClusterVerdict, space_by_tiers
from pybk.threads import in_children, start_thread

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer

logger = logging.getLogger(__name__)

VIEW_SECONDS: Final = 1.0
SEEN_SECONDS: Final = 10.0
"""The time for which a request waits for the first look, or for the next one after a pause without requests."""

IDLE_SECONDS: Final = 30.0
"""The time without requests after which the thread stops looking, and only adds to the history."""


COUNT_SECONDS: Final = 10.0
"""The seconds between two counts of a store's ledgers."""

COUNTED_MAX: Final = 20_000
"""The most ledgers that are counted."""


class Seen(NamedTuple):
    """The values that were seen at one moment.

    Attributes:
        seen_ns: The time, nanoseconds since 1970.
        health: The health of the manager.
        load: The load of this process.
        loads: The loads of the bookies that are asked and answer, by name; empty for a store.
        total: The load of the bookies together, or of this process if none is asked.
        types: The same by ledger type.
        ledgers: The numbers of ledgers by type; empty if they are not counted.
        free: Free space by tier of the cluster, or by directory of the store.
        cluster: The state of the cluster; None for a store.
        bookies: The bookies of the cluster; empty for a store.
        trouble: The reason why ``cluster`` and ``bookies`` are older than the rest; empty if they are not.
        looked: The time on the monotonic clock, seconds.
    """

    seen_ns: int
    health: Health
    load: Load
    loads: Mapping[str, Load]
    total: Rates
    types: Mapping[str, Rates]
    ledgers: Mapping[str, LedgerCounts]
    free: Mapping[str, FreeSpace]
    cluster: ClusterStatus | None = None
    bookies: tuple[BookieStatus, ...] = ()
    trouble: str = ""
    looked: float = 0.0


class View:
    """The view of the routes; see the module.

    Args:
        manager: The manager; it is not closed.
        bookie: The bookie in this process, if only that is shown.
        **shown: Further things that are shown.

    Attributes:
        name: The name.
        command: The form of commands that reach it.
        manager: The manager.
        bookie: The bookie, if only that is shown; None for the whole cluster, or a store.
        opens_logs: The password or secret of logs whose records may be shown; empty for none.
        history: The values of the last quarter of an hour.
        lags: The lags of subscriptions.
        events: The last events.

    Threads: any; it has some of its own from the first look until ``close``.
    """

    def __init__(
        self,
        manager: LedgerManager,
        bookie: BookieServer | None = None,
        **shown: Unpack[Shown],
    ) -> None:
        self.command: Final = shown.get("command") or f"pybk COMMAND {shlex.quote(manager.location)}"
        self.name: Final = shown.get("name") or manager.store_id.hex()[:8]
        self.manager: Final = manager
        self.bookie: Final = bookie
        self.opens_logs: Final = opens_logs(shown)
        self.history: Final = History()
        self.lags: Final = LagHistory(manager)
        self.events: Final = Events()
        self._admin: Final = ClusterAdmin(manager) if manager.is_cluster and bookie is None else None
        self._meter: Final = RateMeter()
        self._counter: Final = None if manager.is_cluster else _LedgerCounter(manager)
        self._ports = shown.get("ports")
        self._loads: BookieLoads | None = None
        self._condition = threading.Condition()
        """Guards the attributes below."""
        self._seen: Seen | None = None
        self._asked = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None
        in_children(self, View.after_fork)

    def after_fork(self) -> None:
        """End it in a forked child."""
        self._closed, self._loads = True, None

    @property
    def admin(self) -> ClusterAdmin:
        """The administration of the cluster; raises ProblemError for a store, which has none."""
        if self._admin is None:
            raise ProblemError(
                HTTPStatus.NOT_FOUND, "no_cluster", f"{self.manager.location} is a store, and not a cluster of bookies"
            )
        return self._admin

    def seen(self) -> Seen:
        """Return the last values, at most ``VIEW_SECONDS`` old under frequent requests; ProblemError without any."""
        return self._seen_by(SEEN_SECONDS)

    def seen_now(self) -> Seen:
        """Return the same, without a wait for the first look, or for the next one after a pause without requests."""
        return self._seen_by(0.0)

    def _seen_by(self, seconds: float) -> Seen:
        seen = self.seen_within(seconds)
        if seen is None:
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "not_seen",
                f"nothing is known after {seconds:g} s; maybe the metadata store does not answer",
                retryable=True,
            )
        return seen

    def seen_within(self, seconds: float) -> Seen | None:
        """Return the last values; None if there are none within some seconds, as without the metadata store."""
        with self._condition:
            if self._closed:
                raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, "closed", "the manager is being closed")
            idle = time.monotonic() - self._asked > IDLE_SECONDS
            self._asked = time.monotonic()
            if self._thread is None:
                self._begin()
            elif idle:
                self._seen = None
                self._condition.notify_all()
            ended = self._condition.wait_for(lambda: self._seen is not None or self._closed, seconds)
            if ended and self._seen is None:
                raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, "closed", "the manager is being closed")
            return self._seen

    def _begin(self) -> None:
        self.events.begin()
        if self._ports is not None and self._admin is not None:
            self._loads = BookieLoads(self._ports, self.events)
        self._thread = threading.Thread(target=self._run, name="pybk-http-view", daemon=True)
        start_thread(self._thread)

    def _run(self) -> None:
        seen: Seen | None = None
        while not self._closed:
            try:
                if self._is_wanted():
                    before, seen = seen, self._look(seen)
                    self._note_changes(before, seen)
                else:
                    self._measure(None if seen is None else seen.bookies)
            except ClosedError:
                self.close()
                return
            except Exception:
                # What was seen last stays, and grows old, which the probes notice. This thread must not end: no other
                # one would begin, and requests would wait for it.
                logger.exception("what is shown over HTTP could not be looked at")
                time.sleep(VIEW_SECONDS)
                continue
            with self._condition:
                if self._is_wanted():
                    self._seen = seen
                    self._condition.notify_all()
                self._condition.wait_for(lambda: self._closed or self._seen is None, VIEW_SECONDS)

    def _is_wanted(self) -> bool:
        with self._condition:
            return self._seen is None or time.monotonic() - self._asked <= IDLE_SECONDS

    def _look(self, before: Seen | None) -> Seen:
        cluster, bookies, trouble = (
            None if before is None else before.cluster,
            () if before is None else before.bookies,
            "",
        )
        if self._admin is not None:
            try:
                cluster, bookies = self._admin.status(), self._admin.bookies()
            except ClosedError:
                raise
            except PybkError as error:
                logger.warning("the state of the cluster is not seen now: %s", error)
                trouble = str(error)
        self._note_lags()
        return self._measure(bookies)._replace(cluster=cluster, bookies=bookies, trouble=trouble)

    def _note_lags(self) -> None:
        if self.bookie is not None:
            return
        try:
            self.lags.note()
        except ClosedError:
            raise
        except PybkError as error:
            logger.warning("the lags of subscriptions are not seen now: %s", error)

    def _measure(self, bookies: tuple[BookieStatus, ...] | None) -> Seen:
        """Return what costs no request to the metadata store, and add it to the history."""
        health, metrics = self.manager.health(), self.manager.metrics()
        now_ns = time.time_ns()
        load = self._meter.measure(now_ns, metrics)
        loads = {} if self._loads is None else self._loads.fresh()
        total, types, ledgers = load.total, load.types, load.ledgers
        if loads:
            total = together(each.total for each in loads.values())
            types = _types_together(loads.values())
            ledgers = next((each.ledgers for each in loads.values() if each.ledgers), {})
        if self._counter is not None:
            ledgers = self._counter.count()
        free = _free_of(bookies or ()) if self._admin is not None else _free_of_store(health)
        rates = {name: each.total for name, each in loads.items()}
        self.history.add(Sample(now_ns, total, types, rates, free))
        return Seen(now_ns, health, load, loads, total, types, ledgers, free, looked=time.monotonic())

    def _note_changes(self, before: Seen | None, now: Seen) -> None:
        """Add to the events how the cluster has changed."""
        if before is None or before.cluster is None or now.cluster is None:
            return
        if before.cluster.verdict is not now.cluster.verdict:
            verdict = now.cluster.verdict
            texts = "; ".join(each.text for each in now.cluster.reasons[:3]) or "nothing needs attention"
            self.events.add("cluster.verdict", f"the cluster is {verdict}: {texts}", level=_LEVELS[verdict])
        known = {each.name: _standing(each) for each in before.bookies}
        for each in now.bookies:
            if known.get(each.name) != (standing := _standing(each)):
                level = logging.INFO if each.writable else logging.WARNING
                self.events.add("cluster.bookie", f"bookie {each.name}: {standing}", level=level)

    def close(self) -> None:
        """Stop looking. Idempotent; the manager stays open."""
        self.events.close()
        with self._condition:
            self._closed = True
            if self._loads is not None:
                self._loads.close()
            self._condition.notify_all()


class _LedgerCounter:
    """Counts the ledgers of a store by type, now and then; of a store with very many, it counts none.

    Threads: one at a time.
    """

    def __init__(self, manager: LedgerManager) -> None:
        self._manager = manager
        self._counted = float("-inf")
        self._found: dict[str, LedgerCounts] = {}

    def count(self) -> Mapping[str, LedgerCounts]:
        """Return the counts of now, or of ``COUNT_SECONDS`` ago; empty if there are too many ledgers."""
        if time.monotonic() - self._counted < COUNT_SECONDS:
            return self._found
        try:
            self._found = self._counts()
        except ClosedError:
            raise
        except PybkError as error:
            logger.warning("the ledgers cannot be counted now: %s", error)
            self._found = {}
        self._counted = time.monotonic()
        return self._found

    def _counts(self) -> dict[str, LedgerCounts]:
        counts: dict[str, list[int]] = {}
        total = 0
        for each in islice(self._manager.ledgers(), COUNTED_MAX + 1):
            of_type = counts.setdefault(str(each.metadata.ledger_type), [0, 0])
            of_type[each.metadata.state is LedgerState.CLOSED] += 1
            total += 1
        return {} if total > COUNTED_MAX else {name: LedgerCounts(*each) for name, each in counts.items()}


def _standing(bookie: BookieStatus) -> str:
    """Return in words how a bookie stands."""
    if not bookie.registered:
        return f"does not run, {bookie.state}"
    return f"runs, {bookie.state}{'' if bookie.writable else ', takes no entries'}"


def _types_together(loads: Iterable[Load]) -> dict[str, Rates]:
    """Return the rates by ledger type of several processes, the busiest type first."""
    found: dict[str, list[Rates]] = {}
    for load in loads:
        for name, rates in load.types.items():
            found.setdefault(name, []).append(rates)
    summed = {name: together(each) for name, each in found.items()}
    return dict(sorted(summed.items(), key=lambda each: -(each[1].append_entries + each[1].read_entries)))


def _free_of(bookies: Iterable[BookieStatus]) -> dict[str, FreeSpace]:
    """Return the free space of a cluster, by the tiers of its devices."""
    return {name: FreeSpace(each.free_bytes, each.bookies) for name, each in space_by_tiers(bookies).items()}


def _free_of_store(health: Health) -> dict[str, FreeSpace]:
    return {name: FreeSpace(free) for name, free in health.free_bytes.items()}


_LEVELS: Final = {
    ClusterVerdict.OK: logging.INFO,
    ClusterVerdict.WARN: logging.WARNING,
    ClusterVerdict.BAD: logging.ERROR,
}
