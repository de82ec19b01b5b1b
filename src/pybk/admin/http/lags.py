"""The lags of durable subscriptions in the last quarter of an hour.

While there are requests, the thread that looks (``View``) notes the backlog of each subscription once in
``LAG_SECONDS``, for the first ``LOGS_MAX`` logs, whose records it reads from the metadata store.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

from pybk.admin.http.log_list import SubscriptionInfo, log_infos, log_names
from pybk.manager.ledger_manager import LedgerManager

LAG_SECONDS: Final = 10.0
LOGS_MAX: Final = 100
LINES_MAX: Final = 8
"""The most subscriptions of a log whose lag is kept; the slowest ones are taken."""

_SAMPLES_MAX: Final = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class LagLine:
    """The lag of a subscription; its values belong to the times in ``LagSeries.at_ms``, null where they are unknown.

    Attributes:
        name: The subscription.
        backlog_max: The most records of the log's closed ledgers that it had not acknowledged.
    """

    name: str
    backlog_max: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LagSeries:
    """The lag of a log's subscriptions in the last quarter of an hour.

    Attributes:
        at_ms: The times, milliseconds since 1970, ascending, about one in ten seconds while there are requests.
        lines: The subscriptions; if there are many, the slowest ones.
    """

    at_ms: tuple[int, ...]
    lines: tuple[LagLine, ...]


class LagHistory:
    """Keeps lags; see the module.

    Args:
        manager: The manager of the logs.

    Threads: any; ``note`` by one at a time.
    """

    def __init__(self, manager: LedgerManager) -> None:
        self._manager = manager
        self._noted = float("-inf")
        self._lock = threading.Lock()
        """Guards ``_samples``."""
        self._samples: deque[tuple[int, dict[str, dict[str, int]]]] = deque(maxlen=_SAMPLES_MAX)
        """The times of the samples, each with the backlogs of subscriptions by log."""

    def note(self) -> None:
        """Note the present lags, unless noted just before; raises PybkError without the metadata store."""
        if time.monotonic() - self._noted < LAG_SECONDS:
            return
        self._noted = time.monotonic()
        names = islice(log_names(self._manager), LOGS_MAX)
        found = {each.name: _slowest(each.subscriptions) for each in log_infos(self._manager, names)}
        with self._lock:
            self._samples.append((time.time_ns() // 1_000_000, found))

    def of(self, log: str) -> LagSeries:
        """Return the lags of a log."""
        with self._lock:
            samples = [(at_ms, lags.get(log, {})) for at_ms, lags in self._samples]
        names = dict.fromkeys(name for _, lags in samples for name in lags)
        return LagSeries(
            at_ms=tuple(at_ms for at_ms, _ in samples),
            lines=tuple(LagLine(name=name, backlog_max=tuple(lags.get(name) for _, lags in samples)) for name in names),
        )


def _slowest(subscriptions: tuple[SubscriptionInfo, ...]) -> dict[str, int]:
    ordered = sorted(subscriptions, key=lambda each: (-each.backlog_max, each.name))
    return {each.name: each.backlog_max for each in ordered[:LINES_MAX]}
