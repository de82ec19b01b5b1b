"""The recorders of the library ``eventsourcing`` on logs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    DataError,
    ListenNotifySubscription,
    Notification,
    OperationalError,
    ProcessRecorder,
    StoredEvent,
    Subscription,
    Tracking,
    TrackingRecorder,
)

from pybk.adapters.eventsourcing.event_log import EventLog
from pybk.adapters.eventsourcing.tracking_log import TrackingLog, check_moves
from pybk.errors import PybkError, UsageError
from pybk.threads import in_children


@contextmanager
def _translated() -> Iterator[None]:
    """Raise errors of pybk as the library's own, as its other recorders do."""
    try:
        yield
    except UsageError as error:
        raise DataError(str(error)) from error
    except PybkError as error:
        raise OperationalError(str(error)) from error


class PybkAggregateRecorder(AggregateRecorder):
    """Records events of aggregates, or snapshots.

    Args:
        events: Their log.

    Threads: any.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Insert events, all or nothing; return None.

        Raises:
            IntegrityError: The originator has an event with that version; nothing was inserted.
            DataError: An event cannot be encoded or is too long; nothing was inserted.
            OperationalError: The log failed; its ``__cause__`` is the error of pybk, whose ``outcome_unknown`` says
                whether the events may have been inserted nevertheless.

        Durability: On return they are on disk; in a cluster, on the disks of an ack quorum.
        """
        self._insert_events(stored_events, **kwargs)
        return None

    def _insert_events(self, stored_events: Sequence[StoredEvent], **_: Any) -> Sequence[int]:
        with _translated():
            return self._events.insert(stored_events) if stored_events else []

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Sequence[StoredEvent]:
        """Return events of an originator whose versions are after ``gt`` and up to ``lte``, in order of versions.

        Cost: A read of the log for each group of events that are near each other, some 0.5 ms.
        """
        with _translated():
            return self._events.of_originator(originator_id, gt, lte, desc=desc, limit=limit)


class PybkApplicationRecorder(PybkAggregateRecorder, ApplicationRecorder):
    """Records the events of an application; notification ids are log sequence numbers, without gaps.

    Threads: any.
    """

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Insert events as ``PybkAggregateRecorder`` does; return their notification ids, which are consecutive."""
        return self._insert_events(stored_events, **kwargs)

    def select_notifications(
        self,
        start: int | None,
        limit: int,
        stop: int | None = None,
        topics: Sequence[str] = (),
        *,
        inclusive_of_start: bool = True,
    ) -> Sequence[Notification]:
        """Return up to ``limit`` notifications from ``start`` to ``stop``, of some topics or all."""
        first = 1 if start is None else max(1, start if inclusive_of_start else start + 1)
        with _translated():
            return self._events.notifications(first, limit, stop, topics)

    def max_notification_id(self) -> int | None:
        """Return the last notification id; None without events."""
        return self._events.last()

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> Subscription[ApplicationRecorder]:
        """Return an iterator of the notifications after ``gt``, which waits for more."""
        return PybkSubscription(self, gt, topics)

    def listen(self, listener: threading.Event) -> None:
        """Set an event whenever new notifications may exist, until ``unlisten``."""
        self._events.listen(listener)

    def unlisten(self, listener: threading.Event) -> None:
        """Stop setting an event."""
        self._events.unlisten(listener)


class PybkSubscription(ListenNotifySubscription[PybkApplicationRecorder]):
    """Notifications of an application as they become durable; made by ``PybkApplicationRecorder.subscribe``."""

    def __init__(self, recorder: PybkApplicationRecorder, gt: int | None, topics: Sequence[str]) -> None:
        super().__init__(recorder, gt, topics)
        recorder.listen(self._has_been_notified)
        self._has_been_notified.set()  # for events that came before it listened

    def stop(self) -> None:
        """End the iteration, from any thread."""
        super().stop()
        self._recorder.unlisten(self._has_been_notified)


class PybkTrackingRecorder(TrackingRecorder):
    """Records positions in upstream applications.

    Args:
        tracking: Their log.

    Threads: any.
    """

    def __init__(self, tracking: TrackingLog) -> None:
        self._tracking = tracking

    def insert_tracking(self, tracking: Tracking) -> None:
        """Record a position, and return when it is durable.

        Raises:
            IntegrityError: It is not after the one before; nothing was recorded.
            OperationalError: The log failed.
        """
        with _translated():
            self._tracking.insert(tracking)

    def max_tracking_id(self, application_name: str) -> int | None:
        """Return the last position in an upstream application; None without one."""
        return self._tracking.position(application_name)


class PybkProcessRecorder(PybkTrackingRecorder, PybkApplicationRecorder, ProcessRecorder):
    """Records events with the position in the upstream application that they result from, in one transaction.

    A position without events goes to a log of its own. So notification ids have no gaps, and the position can be
    dropped when the next one is recorded. Positions in one upstream application are recorded one after the other, so
    none survives a crash that an earlier one does not survive.

    Args:
        events: The log of its events.
        tracking: The log of positions without events.

    Threads: any.
    """

    def __init__(self, events: EventLog, tracking: TrackingLog) -> None:
        PybkApplicationRecorder.__init__(self, events)
        PybkTrackingRecorder.__init__(self, tracking)
        self._turns: dict[str, threading.Lock] = {}
        """A lock for each upstream application, held until its position is durable."""
        in_children(self, PybkProcessRecorder._disable)

    def _disable(self) -> None:
        """Wait in a forked child for no thread of the parent."""
        self._turns = {}

    def _insert_events(
        self, stored_events: Sequence[StoredEvent], *, tracking: Tracking | None = None, **kwargs: Any
    ) -> Sequence[int]:
        if tracking is None:
            return super()._insert_events(stored_events, **kwargs)
        name = tracking.application_name
        with self._turns.setdefault(name, threading.Lock()), _translated():
            self._events.refresh()
            check_moves(tracking, self.max_tracking_id(name))
            if stored_events:
                return self._events.insert(stored_events, tracking)
            self._tracking.insert(tracking)
            return []

    def insert_tracking(self, tracking: Tracking) -> None:
        """Record a position without events, as ``PybkTrackingRecorder`` does."""
        self._insert_events([], tracking=tracking)

    def max_tracking_id(self, application_name: str) -> int | None:
        """Return the last position in an upstream application; None without one."""
        positions = self._events.position(application_name), self._tracking.position(application_name)
        return max((each for each in positions if each is not None), default=None)
