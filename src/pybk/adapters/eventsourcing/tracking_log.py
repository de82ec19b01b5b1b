"""A log of positions in upstream applications that were tracked without events."""

from __future__ import annotations

import json
import logging
import threading
from typing import Final

from eventsourcing.persistence import IntegrityError, Tracking

from pybk.errors import PybkError
from pybk.streams.wal import WriteAheadLog
from pybk.threads import in_children

logger = logging.getLogger(__name__)

CHECKPOINT_RECORDS: Final = 10_000
"""The records after which the positions are written as a checkpoint, which drops the earlier records."""


class TrackingLog:
    """Positions in upstream applications.

    Args:
        wal: The log, open for writing; nothing else writes to it. Each record is a pair in JSON, of an application's
            name and a notification id.
        owner: The object that closes the log; it is kept alive until then.

    Threads: any, one append at a time.
    """

    def __init__(self, wal: WriteAheadLog, owner: object) -> None:
        self._wal = wal
        self._owner = owner
        self._lock = threading.Lock()
        self._positions: dict[str, int] = {}
        in_children(self)
        checkpoint = wal.latest_checkpoint()
        if checkpoint is not None:
            with checkpoint.open() as file:
                self._positions = json.load(file)
        for record in wal.replay(None if checkpoint is None else checkpoint.lsn + 1):
            self._move(*json.loads(record.data))

    def close(self) -> None:
        """Close the log."""
        self._wal.close()

    def _move(self, application_name: str, notification_id: int) -> None:
        if notification_id > self._positions.get(application_name, notification_id - 1):
            self._positions[application_name] = notification_id

    def position(self, application_name: str) -> int | None:
        """Return the last notification of an upstream application that was tracked in this log; None without one."""
        return self._positions.get(application_name)

    def insert(self, tracking: Tracking) -> None:
        """Track a position, and return when it is durable.

        Raises:
            IntegrityError: The position is not after the one before; nothing was inserted.
            PybkError: As ``WriteAheadLog.append``.
        """
        with self._lock:
            check_moves(tracking, self._positions.get(tracking.application_name))
            lsn = self._wal.append(json.dumps([tracking.application_name, tracking.notification_id]).encode())
            self._move(tracking.application_name, tracking.notification_id)
            if lsn % CHECKPOINT_RECORDS == 0:
                self._checkpoint()

    def _checkpoint(self) -> None:
        try:
            with self._wal.checkpoint() as file:
                file.write(json.dumps(self._positions).encode())
        except PybkError as error:
            logger.warning("the positions of %r were not written; its records stay: %s", self._wal, error)


def check_moves(tracking: Tracking, position: int | None) -> None:
    """Raise IntegrityError unless a position is after the one before."""
    if position is not None and tracking.notification_id <= position:
        raise IntegrityError(
            f"notification {tracking.notification_id} of {tracking.application_name!r:.100} was processed already, "
            f"because {position} was"
        )
