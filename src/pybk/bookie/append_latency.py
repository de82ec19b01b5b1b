"""The latencies of writers' adds at a bookie, for the throttle of copies."""

from __future__ import annotations

from typing import Final

from pybk.metrics import Histogram, HistogramSnapshot

_QUEUED_NS: Final = 1_000_000
"""A receive that returned sooner found messages that had arrived while the turn before was under way."""


class AppendLatency:
    """The time from the arrival of a writer's add to its reply, including its wait for the previous turn.

    Adds of recoveries and re-replications do not count, because they are the ones that may be slowed down.

    Attributes:
        before_ns: The time for which the serving thread worked in the turn before.

    Threads: the serving thread notes, and sets ``before_ns``; any one other thread takes.
    """

    def __init__(self) -> None:
        self._histogram = Histogram()
        self.before_ns = 0

    def note_adds(self, adds: int, waited_ns: int, took_ns: int) -> None:
        """Note a turn of the serving thread in which adds arrived.

        Args:
            adds: The number of adds of writers that it received.
            waited_ns: The time for which it waited for messages.
            took_ns: The time for which it worked on them, until the replies were sent.
        """
        self._histogram.record(took_ns + (self.before_ns if waited_ns < _QUEUED_NS else 0), adds)

    def take(self) -> HistogramSnapshot:
        """Return the latencies of the adds since the last call, and begin again."""
        found, self._histogram = self._histogram, Histogram()
        return found.snapshot()
