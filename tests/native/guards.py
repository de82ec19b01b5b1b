"""Signals in guards of random depth, with checkpoints, for the fuzzer: none interrupts a call, and none is lost."""

from __future__ import annotations

import random
import signal
from contextlib import suppress
from functools import partial
from typing import Final

from pybk.threads.interrupts import checkpoint, guarded

NUMBERS: Final = (signal.SIGUSR1, signal.SIGALRM, signal.SIGTERM)


class Struck(BaseException):
    """What the handlers raise."""


class Signals:
    """Handlers that count, and raise now and then."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self.sent = self.handled = 0
        self.is_inside = False

    def handle(self, *_: object) -> None:
        assert not self.is_inside, "a handler interrupted a guarded call"
        self.handled += 1
        if self._source.random() < 0.5:
            raise Struck

    def send(self) -> None:
        self.sent += 1
        signal.raise_signal(self._source.choice(NUMBERS))

    def step(self, depth: int) -> int:
        """Get a signal at most; in a guard."""
        self.is_inside = True
        if depth:
            return guarded(self.step, depth - 1)
        if self._source.random() < 0.7:
            self.send()
        self.is_inside = False
        if self._source.random() < 0.3:
            checkpoint()
        return depth


def check(source: random.Random) -> int:
    """Make some guarded calls; return their number."""
    signals = Signals(source)
    before = [signal.signal(number, signals.handle) for number in NUMBERS]
    calls = 50
    try:
        for _ in range(calls):
            if source.random() < 0.1:
                signal.signal(source.choice(NUMBERS), signals.handle)
            with suppress(Struck):
                assert guarded(partial(signals.step, source.randrange(4))) == 0
            assert signals.sent == signals.handled
    finally:
        for number, handler in zip(NUMBERS, before, strict=True):
            signal.signal(number, handler)
    return calls
