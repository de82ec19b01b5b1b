"""The one thread of a bookie's self-healing: it asks each chore for due work, which a few workers do.

Theory of operation
-------------------

A *chore* is one kind of work that comes again and again, such as an audit or a repair. The thread asks each chore that
has no work under way what is ``due``. The answer is a call, which a worker makes, or the time at which to ask again.
The thread rests until the earliest of these times; the end of any work, and ``wake``, end the rest.

So a chore decides by its memory and the time that it is given, and neither waits nor reads for a decision: reading and
waiting is work. Each chore has at most one work under way, and the thread asks again after it has ended. So data that
only the work and ``due`` of a chore use need no lock.

Works are short pieces, a page or a ledger, except for the repair of a batch, so ``AT_ONCE`` of them suffice. At rest
one at a time suffices: another one is admitted once due work has waited for ``PATIENCE_S``. A work may give the workers
further calls, such as copies, which are not counted.

A work that raises is logged, and its chore is asked again ``FAILED_S`` later at the earliest. Nothing ends the thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from pybk.errors import PybkError
from pybk.threads import Workers, start_thread

logger = logging.getLogger(__name__)

AT_ONCE: Final = 4
"""The most works under way: a repair, a check of a disk that may hang, and two others."""

WORKERS: Final = AT_ONCE + 2
"""Threads that do the works and their further calls; each is started when it is needed."""

PATIENCE_S: Final = 0.5
"""Seconds for which due work waits for other work before one more is admitted."""

LOOK_S: Final = 10.0
"""Seconds between two looks of a chore whether something is due."""

LEDGER_PAUSE_S: Final = 0.02
"""Seconds between two ledgers of a chore that looks at all, so that it reads at most fifty metadata per second."""

FAILED_S: Final = 0.1
"""The least seconds between a work that raised and the next one of its chore; most chores rest for longer."""

_REST_MAX_S: Final = 60.0

T = TypeVar("T")

Work = Callable[[], object]


class Chore(Protocol):
    """A kind of work that comes again and again."""

    @property
    def trouble(self) -> str:
        """The name, for the log, of the work that is not done while this chore fails."""

    def due(self, now: float) -> Work | float:
        """Return the due work, or the time to ask again, by the monotonic clock; neither reads nor waits.

        Args:
            now: The time, by the monotonic clock.
        """


class Rounds:
    """A chore that makes rounds, which are generators: each yields the seconds after which it is continued.

    A round that raised or ended is followed by a new one at once. So a round begins with a rest, before any work.

    Args:
        make_round: Begins a round.
        trouble: See ``Chore``.
    """

    def __init__(self, make_round: Callable[[], Iterator[float]], trouble: str) -> None:
        self.trouble: Final = trouble
        self._make_round = make_round
        self._round: Iterator[float] | None = None
        self._at = -math.inf

    def due(self, now: float) -> Work | float:
        """Return the next step of the round, or the time when it is due."""
        if self._round is None:
            self._round = self._make_round()
            self._at = now + next(self._round)
        return self._step if now >= self._at else self._at

    def _step(self) -> None:
        """Continue the round until its next rest."""
        found, self._round = self._round, None
        assert found is not None
        for rest_s in found:
            self._round, self._at = found, time.monotonic() + rest_s
            return


class ChoreThread:
    """The thread that asks chores for due work, and its workers; from ``start`` until ``stop``.

    Attributes:
        workers: The workers; a work may give them further calls.

    Raises:
        StorageRefusedError: The operating system gives no thread.

    Threads: its own; all methods any.
    """

    def __init__(self) -> None:
        self.workers: Final = Workers(WORKERS, "pybk-healing-work")
        self._chores: list[Chore] = []
        """The chores, asked in this order; one whose work begins moves to the end, so none waits for ever."""
        self._under_way: set[Chore] = set()
        """Chores whose work is under way; each change is a single operation."""
        self._failed: dict[Chore, float] = {}
        """The chores whose last work failed, each with the time when it is asked again."""
        self._admitted = 1
        """The number of works that may be under way."""
        self._waits_since = math.inf
        """The time since which due work has waited for admission; infinite if none waits."""
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pybk-healing", daemon=True)

    def start(self, chores: Sequence[Chore]) -> None:
        """Start the thread.

        Args:
            chores: The chores that it asks.

        Raises:
            StorageRefusedError: The operating system gives no thread.
        """
        self._chores = list(chores)
        start_thread(self._thread)

    def wake(self) -> None:
        """Ask all chores again at once, because the facts by which they decide have changed."""
        self._news.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._news.clear()  # what changes from here on is seen by this look, or ends the rest after it
            self._news.wait(self._begin_due(time.monotonic()))

    def _begin_due(self, now: float) -> float:
        """Have the workers do the work that is due; return the seconds until the next look."""
        again = now + _REST_MAX_S
        waits = False
        for chore in list(self._chores):
            if chore in self._under_way:
                continue
            failed = self._failed.get(chore, now)
            found = failed if failed > now else self._attempt(chore, partial(chore.due, now))
            if not callable(found):
                again = min(again, found)
            elif len(self._under_way) >= self._admitted:
                waits = True
            else:
                self._under_way.add(chore)
                self._chores.remove(chore)
                self._chores.append(chore)
                self.workers.submit(partial(self._do, chore, found))
        self._waits_since = min(self._waits_since, now) if waits else math.inf
        if now >= self._waits_since + PATIENCE_S:
            self._admitted, self._waits_since = min(self._admitted + 1, AT_ONCE), now
        return max(0.0, min(again, self._waits_since + PATIENCE_S) - now)

    def _do(self, chore: Chore, work: Work) -> None:
        """Do a work; runs in a worker."""
        self._attempt(chore, work)
        self._under_way.discard(chore)
        self._news.set()

    def _attempt(self, chore: Chore, call: Callable[[], T]) -> T | float:
        """Make a call for a chore; return its result, or after a failure the time to ask the chore again."""
        try:
            return call()
        except Exception as error:  # whatever failed, the other chores have to be done
            self._failed[chore] = again = time.monotonic() + FAILED_S
            if not self._stopping.is_set():  # else the close of the client has cut it off
                logger.warning("%s: %s", chore.trouble, error, exc_info=not isinstance(error, PybkError))
            return again

    def begin_stop(self) -> None:
        """Begin no further work; returns at once."""
        self._stopping.set()
        self._news.set()

    def stop(self) -> None:
        """Stop; returns when the work that is under way has ended."""
        self.begin_stop()
        if self._thread.is_alive():
            self._thread.join()
        self.workers.close(wait=True)
