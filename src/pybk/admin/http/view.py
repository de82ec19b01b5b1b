"""What the routes look at: a manager, the administration of its cluster, and what was seen of both a moment ago.

A page and its probes ask often, and a bookie must not notice. So a thread looks once in ``LOOK_SECONDS``, and routes
that are asked often read what it has seen; none of them calls the manager. The thread rests while nobody asks.
"""

from __future__ import annotations

import logging
import threading
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.admin.http.problems import ProblemError
from pybk.cluster_admin import ClusterAdmin
from pybk.cluster_checks import BookieStatus, ClusterStatus
from pybk.errors import ClosedError, PybkError
from pybk.health import Health
from pybk.manager import LedgerManager
from pybk.metrics import MetricsSnapshot
from pybk.storage.io.failures import start_thread

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
IDLE_SECONDS: Final = 30.0
"""The thread rests once nobody has asked for so long."""


class Seen(NamedTuple):
    """What was seen at one moment.

    Attributes:
        seen_ns: When, nanoseconds since 1970.
        health: The health of the manager.
        metrics: Its counters.
        cluster: How the cluster is; None for a store.
        bookies: The bookies of the cluster; empty for a store.
        trouble: Why ``cluster`` and ``bookies`` are older than the rest; empty if they are not.
    """

    seen_ns: int
    health: Health
    metrics: MetricsSnapshot
    cluster: ClusterStatus | None = None
    bookies: tuple[BookieStatus, ...] = ()
    trouble: str = ""


class View:
    """What the routes look at; see the module.

    Args:
        manager: The manager; it is not closed.
        bookie: The bookie in this process, if it is looked at alone.

    Attributes:
        manager: The manager.
        bookie: The bookie that is looked at alone; None for the whole cluster, or a store.

    Threads: any; it has one of its own until ``close``.
    """

    def __init__(self, manager: LedgerManager, bookie: BookieServer | None = None) -> None:
        self.manager: Final = manager
        self.bookie: Final = bookie
        self._admin: Final = ClusterAdmin(manager) if manager.is_cluster and bookie is None else None
        self._condition = threading.Condition()
        """Guards the attributes below."""
        self._seen: Seen | None = None
        self._asked = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def admin(self) -> ClusterAdmin:
        """The administration of the cluster; raises ProblemError for a store, which has none."""
        if self._admin is None:
            raise ProblemError(
                HTTPStatus.NOT_FOUND, "no_cluster", f"{self.manager.location} is a store, and not a cluster of bookies"
            )
        return self._admin

    @property
    def seen(self) -> Seen:
        """What was seen last, ``LOOK_SECONDS`` ago at most while others ask, too."""
        with self._condition:
            if self._closed:
                raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, "closed", "the manager is being closed")
            idle = time.monotonic() - self._asked > IDLE_SECONDS
            self._asked = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pybk-http-view", daemon=True)
                start_thread(self._thread)
            elif idle:
                self._seen = None
                self._condition.notify_all()
            while self._seen is None and not self._closed:
                self._condition.wait()
            if self._seen is None:
                raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, "closed", "the manager is being closed")
            return self._seen

    def _run(self) -> None:
        seen: Seen | None = None
        while True:
            try:
                seen = self._look(seen)
            except ClosedError:
                self.close()
            with self._condition:
                self._seen = seen
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._closed, LOOK_SECONDS)
                while not self._closed and self._seen is not None and time.monotonic() - self._asked > IDLE_SECONDS:
                    self._condition.wait()
                if self._closed:
                    return

    def _look(self, before: Seen | None) -> Seen:
        health, metrics = self.manager.health(), self.manager.metrics()
        now_ns = time.time_ns()
        if self._admin is None:
            return Seen(now_ns, health, metrics)
        try:
            return Seen(now_ns, health, metrics, self._admin.status(), self._admin.bookies())
        except ClosedError:
            raise
        except PybkError as error:
            logger.warning("the state of the cluster is not seen now: %s", error)
            cluster, bookies = (None, ()) if before is None else (before.cluster, before.bookies)
            return Seen(now_ns, health, metrics, cluster, bookies, str(error))

    def close(self) -> None:
        """Look no more. Idempotent; the manager stays open."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
