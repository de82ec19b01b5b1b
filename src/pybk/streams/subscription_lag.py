"""Gauges of a manager: the lag of durable subscriptions whose logs have their writers in this process.

A writer knows the end of its log, and the log has the bound of each subscription, even while no process consumes it. So
the writer's process reads the bounds of subscriptions every ``NOTE_SECONDS``, and notes the end of the log at that
time. From these notes it knows since when a record has existed; for records that are older than the writer it takes the
time when their ledger was closed. Neither time is ever too early, so the age of a record is never shown as too high.

A bound is the first record that was not acknowledged some seconds ago. Records that are acknowledged after it count as
lag.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from typing import Final, NamedTuple

from pybk.errors import ClosedError, LogFencedError, NoSuchLogError, PybkError
from pybk.manager.ledger_manager import backend_of
from pybk.metrics import Gauge, MetricKey, Metrics
from pybk.streams.list_record import Segment
from pybk.streams.list_writer import ListWriter
from pybk.threads import background, hold_over_forks, in_children, weakly

logger = logging.getLogger(__name__)

NOTE_SECONDS: Final = 15.0
NOTES_MAX: Final = 1000
"""The most notes of a log; beyond it every second one is dropped."""

_END: Final = itemgetter(1)


class Note(NamedTuple):
    """The end of a log at a time.

    Attributes:
        time_ns: The time, nanoseconds since 1970.
        end: The next record at that time.
    """

    time_ns: int
    end: int


def noted(notes: list[Note], note: Note, lowest: int | None) -> list[Note]:
    """Return notes with a later one, without those that no record from ``lowest`` on needs; for None, only that one."""
    needed = [] if lowest is None else [each for each in notes if each.end > lowest]
    found = [*needed, note]
    return found if len(found) <= NOTES_MAX else found[::2]


class SubscriptionLag:
    """The lag of a log's subscriptions, as long as its writer in this process is open.

    Threads: any.
    """

    def __init__(self, writer: ListWriter) -> None:
        self._writer = writer
        self._notes = [Note(time.time_ns(), writer.appender.next_seq)]
        self._seen: tuple[int, Segment | None] | None = None
        """The lowest bound as of the last look, and the segment that has it; None if there are no subscriptions."""
        _lags_of(backend_of(writer.steps.manager).metrics).add(self)
        self._set_timer()

    def _set_timer(self) -> None:
        background().call_later(NOTE_SECONDS, weakly(SubscriptionLag.on_timer, self))

    def on_timer(self) -> None:
        """Look at the bounds, and again some time later."""
        if self._writer.closed:
            return
        try:
            self._look()
        except (LogFencedError, NoSuchLogError, ClosedError):
            self._seen = None
            return
        except (PybkError, OSError) as error:
            logger.warning("log %r: the lag of its subscriptions is as of before: %s", self._writer.steps.name, error)
        self._set_timer()

    def _look(self) -> None:
        end = self._writer.appender.next_seq
        steps = self._writer.steps
        record = steps.existing().record
        lowest = min((each.seq for each in steps.bounds_of(record)), default=None)
        self._notes = noted(self._notes, Note(time.time_ns(), end), lowest)
        self._seen = None if lowest is None else (lowest, steps.segment_of(record, lowest))

    def shown(self) -> tuple[int, int | None] | None:
        """Return the number of records that the slowest subscription has not acknowledged, and the time of the oldest.

        None if the log has no known subscriptions, or its writer was closed. The time is None if no record lags.
        """
        seen, notes = self._seen, self._notes
        if seen is None or self._writer.closed:
            return None
        seq, segment = seen
        lag = max(0, self._writer.appender.next_seq - seq)
        known = [each.time_ns for each in notes[bisect_right(notes, seq, key=_END) :][:1]]
        if segment is not None and not segment.is_open:
            known.append(segment.closed_ns)
        return lag, min(known, default=None) if lag else None


class _Lags:
    """The logs of a manager whose writers this process has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lags: weakref.WeakSet[SubscriptionLag] = weakref.WeakSet()
        in_children(self)

    def add(self, lag: SubscriptionLag) -> None:
        """Add one."""
        with self._lock:
            self._lags.add(lag)

    def gauges(self) -> Iterable[Gauge]:
        """Return those of the subscriptions that lag most; none if no log has subscriptions."""
        with self._lock:
            lags = list(self._lags)
        shown = [found for each in lags if (found := each.shown()) is not None]
        if not shown:
            return []
        gauges: list[Gauge] = [(MetricKey("subscription_lag_records"), max(lag for lag, _ in shown))]
        times = [since for _, since in shown if since is not None]
        if times:
            gauges.append((MetricKey("subscription_oldest_timestamp_ns"), min(times)))
        return gauges


_all: Final[weakref.WeakKeyDictionary[Metrics, _Lags]] = weakref.WeakKeyDictionary()
_all_lock: Final = threading.RLock()
hold_over_forks(_all_lock)


def _lags_of(metrics: Metrics) -> _Lags:
    """Return the logs of a manager, which are part of its metrics from the first one on."""
    with _all_lock:
        found = _all.get(metrics)
        if found is None:
            found = _all[metrics] = _Lags()
            metrics.add_gauges(found.gauges)
        return found
