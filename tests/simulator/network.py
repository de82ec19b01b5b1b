"""Virtual time, and a network that loses, doubles, delays, reorders and holds back messages."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from pybk.replication.messages import ChooseBookies
from tests.simulator.plan import MS, Plan


class Clock:
    """What happens when; ties are broken by the order of scheduling."""

    def __init__(self, *, traced: bool = False) -> None:
        self.now = 0
        self.events = 0
        self.trace: list[str] = []
        self.trace_sum = 0
        self._traced = traced
        self._scheduled = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Do something later."""
        self._scheduled += 1
        heappush(self._heap, (self.now + delay_ns, self._scheduled, action, arguments))

    def run(self, until_ns: int, done: Callable[[], bool] | None = None) -> bool:
        """Let time pass until something is done; return whether it was, or False when the time is up."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns:
            self.now, _, action, arguments = heappop(heap)
            self.events += 1
            if self._traced:
                self._note(action, arguments)
            action(*arguments)
            if done is not None and done():
                return True
        self.now = max(self.now, until_ns)
        return False

    def _note(self, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        who = getattr(getattr(action, "__self__", None), "name", "")
        what = ", ".join(_describe(argument) for argument in arguments)
        line = f"{self.now / MS:10.3f} ms  {who}.{action.__name__}({what})"
        self.trace.append(line)
        self.trace_sum = zlib.crc32(line.encode(), self.trace_sum)


def _describe(argument: Any) -> str:
    if isinstance(argument, ChooseBookies):  # which has a set, whose order is another in each process
        return f"places {argument.places}, not {sorted(argument.excluded)}"
    name = getattr(argument, "name", None)
    return str(name) if isinstance(name, str) else repr(argument)


class Network:
    """Which members reach which others, and when."""

    def __init__(self, seed: int, plan: Plan, clock: Clock) -> None:
        self.clock = clock
        self.random = Random(f"{seed}/network")
        self.loss = plan.loss
        self.duplication = plan.duplication
        self.slow = plan.slow
        self._slow_ns = plan.slow_ns
        self._held: dict[tuple[str, str], int] = {}
        self._cut: dict[tuple[str, str], int] = {}

    def clog(self, source: str, target: str, until_ns: int) -> None:
        """Hold back what is sent from one to another until then."""
        self._held[source, target] = until_ns

    def cut(self, source: str, target: str, until_ns: int) -> None:
        """Lose what is sent from one to another until then."""
        self._cut[source, target] = until_ns

    def heal(self) -> None:
        """Lose, double and hold back nothing any more."""
        self.loss = self.duplication = self.slow = 0.0
        self._held.clear()
        self._cut.clear()

    def send(self, source: str, target: str, action: Callable[..., None], *arguments: Any) -> None:
        """Have something done at the other end, possibly."""
        random = self.random.random
        now = self.clock.now
        link = (source, target)
        copies = 2 if self.duplication and random() < self.duplication else 1
        for _ in range(copies):
            if (self.loss and random() < self.loss) or self._cut.get(link, 0) > now:
                continue
            delay = int(random() * MS)
            if self.slow and random() < self.slow:
                delay += int(random() * self._slow_ns)
            held = self._held.get(link, 0)
            if held > now:
                delay += held - now
            self.clock.after(delay, action, *arguments)
