"""A log of events with an index in memory: optimistic concurrency, atomic inserts, notifications in order.

Theory of operation
===================

**The log is the notification log.** Each record is an event, and its log sequence number is its notification id.
Notification ids begin with 1 and have no gaps, and a lower one never becomes visible after a higher one. An insert is
one transaction of the log.

**Conflicts** are found in the index, under the lock under which the insert is staged. Threads wait for durability
without the lock, so they share commits. A staged event conflicts with others at once, but can be read only when it is
durable: ``_durable`` moves from the end of one transaction to the end of another.

**Errors.** If an insert fails, its events may be in the log or not. They leave the index, and before the next insert
``_refresh`` brings the index up to date with the log. If the log itself has failed, ``_refresh`` fails as well.

**Restart.** The index is read from a checkpoint of the log, which drops no records, and brought up to date by a replay
of the later records. It is derived from the log: without a readable checkpoint, all records are replayed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from uuid import UUID

from eventsourcing.persistence import IntegrityError, Notification, StoredEvent, Tracking

from pybk.adapters.eventsourcing.event_index import EventIndex
from pybk.adapters.eventsourcing.event_record import Originator, decode_event, encode_event, originator_of
from pybk.errors import CorruptError, PybkError
from pybk.streams.wal import WriteAheadLog
from pybk.threads import in_children

logger = logging.getLogger(__name__)

CHECKPOINT_EVENTS: Final = 50_000
"""The least events after which the index is written; a restart replays them in some 0.2 seconds."""

_CHECKPOINT_PART: Final = 4
"""The inverse of the growth of the log after which the index is written, so that the writing stays in proportion."""


class EventLog:
    """The events of an application, or its snapshots.

    Args:
        wal: The log, open for writing; nothing else writes to it.
        owner: The object that closes the log; it is kept alive until then.

    Threads: any. Inserts of all threads share syncs.
    """

    def __init__(self, wal: WriteAheadLog, owner: object) -> None:
        self._wal = wal
        self._owner = owner
        self._changed = threading.Condition()
        """The lock of all attributes below; notified when ``_in_flight`` or ``_paused`` changes."""
        self._index, self._covered = self._loaded()
        self._durable = self._covered
        """The last event that can be read, which is the end of a transaction."""
        self._in_flight = 0
        """Inserts that are staged and not durable yet."""
        self._paused = False
        """True if inserts have to wait, because a thread waits for those in flight."""
        self._stale_from: int | None = self._durable + 1
        """The first event of the log that the index may lack; None if it lacks none."""
        self._listeners: set[threading.Event] = set()
        self._forked = False
        in_children(self, EventLog._disable)
        self.refresh()

    def _disable(self) -> None:
        """Wait in a forked child for no thread of the parent."""
        self._forked = True
        self._in_flight, self._paused = 0, False

    def close(self) -> None:
        """Write the index if it has grown enough, and close the log; in a forked child, do nothing."""
        if not self._forked:
            self._checkpoint_if_due()
        self._wal.close()

    # ---- the index -----------------------------------------------------------------------------------------------

    def _loaded(self) -> tuple[EventIndex, int]:
        """Return the index of the newest checkpoint and the last event that it covers; an empty index without one."""
        try:
            checkpoint = self._wal.latest_checkpoint()
        except CorruptError as error:
            logger.warning("%s; all events are replayed instead", error)
            checkpoint = None
        if checkpoint is not None:
            with checkpoint.open() as file:
                index = EventIndex.of(file.read())
            if index is not None:
                return index, checkpoint.lsn
        return EventIndex(), 0

    def refresh(self) -> None:
        """Bring the index up to date with the log, after an insert of unknown outcome."""
        with self._changed:
            self._await_turn()

    def _await_turn(self) -> None:
        """Wait until inserts are allowed and the index is up to date; the caller holds the lock."""
        while self._paused:
            self._changed.wait()
        if self._stale_from is not None:
            with self._at_rest():
                self._refresh(self._stale_from)

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Run the block while no insert is under way; the caller holds the lock."""
        self._paused = True
        try:
            while self._in_flight:
                self._changed.wait()
            yield
        finally:
            self._paused = False
            self._changed.notify_all()

    def _refresh(self, first: int) -> None:
        self._wal.sync()  # because an interrupted insert may be under way
        last = self._wal.durable_lsn()
        for record in self._wal.replay(first, last):
            event = decode_event(record.data)
            self._index.add(event.originator, event.version, record.lsn)
            if event.tracking is not None:
                self._index.track(event.tracking.application_name, event.tracking.notification_id)
        self._durable = last
        self._stale_from = None

    def _checkpoint_if_due(self) -> None:
        """Write the index if the log has grown enough; a failure does no harm, because the index is derived."""
        with self._changed:
            while self._paused:
                self._changed.wait()
            if self._durable - self._covered < max(CHECKPOINT_EVENTS, self._covered // _CHECKPOINT_PART):
                return
            with self._at_rest():
                if self._stale_from is not None:
                    return
                covered = self._covered = self._durable
                data = b"".join(self._index.pieces())
        try:
            with self._wal.checkpoint(covered, truncate=False) as file:
                file.write(data)
        except PybkError as error:
            logger.warning("the index of %r was not written; a restart replays more events: %s", self._wal, error)

    # ---- inserting -----------------------------------------------------------------------------------------------

    def insert(self, events: Sequence[StoredEvent], tracking: Tracking | None = None) -> list[int]:
        """Insert events and a tracked position, all or nothing; return the notification ids once they are durable.

        Args:
            events: The events, at least one.
            tracking: The position that is tracked with them.

        Raises:
            IntegrityError: An originator has one of the versions; nothing was inserted.
            DataError: An event cannot be encoded; nothing was inserted.
            PybkError: As ``WriteAheadLog.append_many``.
        """
        payloads = [encode_event(event, None if number else tracking) for number, event in enumerate(events)]
        with self._changed:
            self._await_turn()
            self._check_new(events)
            before = self._durable
            self._stale_from = before + 1  # until all events are in the index, because an interrupt may come in between
            future = self._wal.append_many_async(payloads)
            first = self._wal.last_lsn() - len(events) + 1
            for lsn, event in enumerate(events, first):
                self._index.add(originator_of(event.originator_id), event.originator_version, lsn)
            self._in_flight += 1
            self._stale_from = None
        lsns = range(0)
        try:
            lsns = future.result()
        finally:
            with self._changed:
                self._in_flight -= 1
                if lsns:
                    self._take_durable(lsns[-1], tracking)
                else:
                    self._withdraw(events, before)
                self._changed.notify_all()
        self._checkpoint_if_due()
        return list(lsns)

    def _check_new(self, events: Sequence[StoredEvent]) -> None:
        """Raise IntegrityError if the log has one of some events, or if two of them are the same version."""
        new = set[tuple[Originator, int]]()
        for stored in events:
            event = originator_of(stored.originator_id), stored.originator_version
            if event in new or event in self._index:
                raise IntegrityError(
                    f"originator {stored.originator_id!s:.100} has version {stored.originator_version} already; "
                    "nothing was inserted"
                )
            new.add(event)

    def _withdraw(self, events: Sequence[StoredEvent], before: int) -> None:
        """Remove the events of a failed insert from the index; ``_refresh`` finds out whether the log has them.

        Args:
            events: The events.
            before: An event before them; other events that follow it may have become durable since.
        """
        for event in events:
            self._index.remove(originator_of(event.originator_id), event.originator_version)
        self._stale_from = before + 1 if self._stale_from is None else min(self._stale_from, before + 1)

    def _take_durable(self, lsn: int, tracking: Tracking | None) -> None:
        """Make the events up to one readable."""
        self._durable = max(self._durable, lsn)
        if tracking is not None:
            self._index.track(tracking.application_name, tracking.notification_id)
        for listener in self._listeners:
            listener.set()

    # ---- reading -------------------------------------------------------------------------------------------------

    def position(self, application_name: str) -> int | None:
        """Return the last notification of an upstream application that was tracked with events; None without one."""
        with self._changed:
            return self._index.positions.get(application_name)

    def last(self) -> int | None:
        """Return the last notification id; None without events."""
        with self._changed:
            return self._durable or None

    def of_originator(
        self, originator_id: UUID | str, gt: int | None, lte: int | None, *, desc: bool, limit: int | None
    ) -> list[StoredEvent]:
        """Return events of an originator, as ``AggregateRecorder.select_events``."""
        with self._changed:
            lsns = self._index.lsns(originator_of(originator_id), gt, lte)
            durable = self._durable
        lsns = [lsn for lsn in lsns if lsn <= durable]
        if desc:
            lsns.reverse()
        lsns = lsns[:limit]
        records = self._wal.read_many(sorted(lsns))
        events = {record.lsn: decode_event(record.data).stored_event() for record in records}
        return [events[lsn] for lsn in lsns]

    def notifications(self, first: int, limit: int, stop: int | None, topics: Sequence[str]) -> list[Notification]:
        """Return up to ``limit`` notifications from ``first`` to ``stop``, of some topics or all."""
        with self._changed:
            end = self._durable
        if stop is not None:
            end = min(end, stop)
        if not topics:
            end = min(end, first + limit - 1)
        found = list[Notification]()
        if first > end or limit < 1:
            return found
        for record in self._wal.replay(first, end):
            event = decode_event(record.data)
            if not topics or event.topic in topics:
                found.append(event.notification(record.lsn))
                if len(found) == limit:
                    break
        return found

    def listen(self, listener: threading.Event) -> None:
        """Set an event whenever new notifications may exist, until ``unlisten``."""
        with self._changed:
            self._listeners.add(listener)

    def unlisten(self, listener: threading.Event) -> None:
        """Stop setting an event."""
        with self._changed:
            self._listeners.discard(listener)
