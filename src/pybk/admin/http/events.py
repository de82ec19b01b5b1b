"""The last events: what was logged under a name of ``pybk.log_events``, and changes of the cluster that were seen.

Logging calls ``Events`` in the thread that logs; it adds to a short list and never waits. Events below the level of the
logger ``pybk`` are missing here, too.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

EVENTS_MAX: Final = 200
"""Events that are kept."""

MESSAGE_MAX: Final = 500
"""Characters of a message that are kept."""

SEEN: Final[Mapping[str, str]] = {
    "cluster.verdict": "The verdict of the cluster changed.",
    "cluster.bookie": "A bookie began or ceased to run, or to take entries, or its state changed.",
}
"""Events that this process observes and does not log, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event.

    Attributes:
        number: Its number, which grows in the order in which this process learned of events; below 2**53, the limit of
            JavaScript's numbers.
        time_ns: The time of the event, nanoseconds since 1970.
        level: ``info``, ``warning`` or ``error``.
        event: Its name.
        message: The event in a sentence.
        bookie: The bookie whose process logged it; empty for the process that answers.
    """

    number: int
    time_ns: int
    level: str
    event: str
    message: str
    bookie: str = ""


_LOGGER: Final = logging.getLogger("pybk")


class Events(logging.Handler):
    """Keeps events; between ``begin`` and ``close`` also those that are logged.

    Threads: any.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: deque[Event] = deque(maxlen=EVENTS_MAX)
        """The kept events. Guarded by the lock of the handler, which logging renews in a forked child."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record of an event; others are not kept."""
        name = getattr(record, "event", "")
        if name:
            self.add(name, record.getMessage(), level=record.levelno, time_ns=int(record.created * 1e9))

    def begin(self) -> None:
        """Keep events that are logged from now on."""
        _LOGGER.addHandler(self)

    def close(self) -> None:
        """Stop keeping logged events. Idempotent."""
        _LOGGER.removeHandler(self)
        super().close()

    def add(
        self, event: str, message: str, *, level: int = logging.INFO, time_ns: int | None = None, bookie: str = ""
    ) -> None:
        """Keep an event; arguments as the attributes of ``Event``, and ``level`` as logging has it."""
        self.acquire()
        try:
            now_ns = time.time_ns()
            # Numbers grow from one process to the next, so that one that asks by number notices no restart.
            number = max(now_ns // 1000, self._kept[-1].number + 1 if self._kept else 0)
            self._kept.append(
                Event(
                    number=number,
                    time_ns=now_ns if time_ns is None else time_ns,
                    level=logging.getLevelName(level).lower(),
                    event=event[:100],
                    message=message[:MESSAGE_MAX],
                    bookie=bookie,
                )
            )
        finally:
            self.release()

    def take_in(self, events: Iterable[Mapping[str, Any]], bookie: str) -> int:
        """Keep events of a bookie, as its interface sent them; return the number of the last, or 0.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: A value is not an event.
        """
        last = 0
        for each in events:
            level = logging.getLevelNamesMapping().get(str(each["level"]).upper(), logging.INFO)
            self.add(str(each["event"]), str(each["message"]), level=level, time_ns=int(each["time_ns"]), bookie=bookie)
            last = int(each["number"])
        return last

    def after(self, number: int = 0) -> tuple[Event, ...]:
        """Return the events after one, by number."""
        self.acquire()
        try:
            return tuple(each for each in self._kept if each.number > number)
        finally:
            self.release()
