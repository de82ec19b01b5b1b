"""Contests: contestants that do the same work take turns, and their figures are compared."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SETTLE_SECONDS: Final = 1.0
SETTLE_STEP: Final = 0.02
THREADS: Final = 16

Rates = Mapping[str, float]
"""What the contestants of one round reached, by name."""

Run = Callable[[float], float]
"""Works for about that many seconds; returns the figure reached, most often a rate per second."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of work.

    Attributes:
        rounds: How often the contestants take turns.
        seconds: How long each works per round.
        entries: Entries in what is read.
        ledgers: Ledgers created, one after the other.
        reopen_bytes: Payload in the store that is killed and opened again.
        memory_bytes: Payload written while memory is watched.
        moved_ledgers: Ledgers moved to another tier.
        idle_ledgers: Ledgers in the store that is watched at rest.
        idle_seconds: How long it is watched.
        blob_bytes: Bytes of a blob.
    """

    rounds: int
    seconds: float
    entries: int
    ledgers: int
    reopen_bytes: int
    memory_bytes: int
    moved_ledgers: int = 10_000
    idle_ledgers: int = 100_000
    idle_seconds: float = 60.0
    blob_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that a contestant should reach.

    Attributes:
        text: The target in words.
        value: The figure to reach, from what all reached in the same round.
        at_most: Less is better.
    """

    text: str
    value: Callable[[Rates], float]
    at_most: bool = False

    def ratio(self, name: str, rates: Rates) -> float:
        """Return the ratio of the figure to the target; 1 or more means that it was reached."""
        value = self.value(rates)
        return value / rates[name] if self.at_most else rates[name] / value


def at_least(value: float) -> Target:
    """Return a target that no other contestant has a say in."""
    return Target(f">= {_text(value)}", lambda _: value)


def at_most(value: float) -> Target:
    """Return a target that should not be exceeded."""
    return Target(f"<= {_text(value)}", lambda _: value, at_most=True)


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way of doing the work.

    Attributes:
        name: What it is; unique in its contest.
        enter: Makes it ready in an empty directory, and gives its run.
        targets: What it should reach.
    """

    name: str
    enter: Callable[[Path, Scale], AbstractContextManager[Run]]
    targets: Sequence[Target] = ()


@dataclass(frozen=True, slots=True)
class Contest:
    """Contestants and their common work.

    Attributes:
        name: Its name on the command line.
        title: What is done.
        unit: Of the figures.
        contestants: The programs that are compared.
        once: The work has its own size and is done once, whatever the scale says about rounds.
    """

    name: str
    title: str
    unit: str
    contestants: Sequence[Contestant]
    once: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """The result of a contestant.

    Attributes:
        contest: The contest's name.
        contestant: The contestant's name.
        unit: Of ``rounds`` and ``median``.
        rounds: The figure of each round.
        median: Their median.
        targets: Each target in words, and the median of the ratios that were reached in the rounds; 1 is reached.
    """

    contest: str
    contestant: str
    unit: str
    rounds: list[float]
    median: float
    targets: list[tuple[str, float]]


def hold(contest: Contest, scale: Scale, directory: Path, report: Callable[[str], None]) -> list[Figure]:
    """Let all contestants take turns, round by round, so that a machine that drifts drifts for all of them.

    Args:
        contest: The contest.
        scale: How much is done.
        directory: An existing directory on the disk in question; what is made in it is deleted again.
        report: Called with a line of progress now and then.
    """
    rounds: list[dict[str, float]] = []
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for contestant in contest.contestants:
            report(f"{contest.name}: {contestant.name} gets ready")
            place = tempfile.mkdtemp(prefix="contest-", dir=directory)
            stack.callback(shutil.rmtree, place)
            runs[contestant.name] = stack.enter_context(contestant.enter(Path(place), scale))
        for number in range(1 if contest.once else scale.rounds):
            rates = {}
            for name, run in runs.items():
                report(f"{contest.name}: round {number + 1}, {name}")
                rates[name] = run(scale.seconds)
                settle()
            rounds.append(rates)
    return [_figure(contest, contestant, rounds) for contestant in contest.contestants]


def settle() -> None:
    """Wait until background threads rest, a second at most, so that none works in another contestant's turn."""
    end = time.perf_counter() + SETTLE_SECONDS
    busy = SETTLE_STEP
    while busy > SETTLE_STEP / 20 and time.perf_counter() < end:
        before = time.process_time()
        time.sleep(SETTLE_STEP)
        busy = time.process_time() - before


def _figure(contest: Contest, contestant: Contestant, rounds: Sequence[Rates]) -> Figure:
    values = [rates[contestant.name] for rates in rounds]
    targets = [
        (target.text, statistics.median(target.ratio(contestant.name, rates) for rates in rounds))
        for target in contestant.targets
    ]
    return Figure(contest.name, contestant.name, contest.unit, values, statistics.median(values), targets)


def rate(step: Callable[[], int], seconds: float) -> float:
    """Repeat ``step``, which returns how much it did, for about ``seconds``; return how much was done per second."""
    done = 0
    begin = now = time.perf_counter()
    end = begin + seconds
    while now < end:
        done += step()
        now = time.perf_counter()
    return done / (now - begin)


def latencies_of(call: Callable[[], object], seconds: float) -> list[float]:
    """Repeat a call; return the seconds of each repetition."""
    latencies = []
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        begin = now
        call()
        now = time.perf_counter()
        latencies.append(now - begin)
    return latencies


def tail_of(latencies: list[float], part: int) -> float:
    """Return the time that one of ``part`` latencies exceeds, divided by the median."""
    return statistics.quantiles(latencies, n=part)[-1] / statistics.median(latencies)


def in_threads(append: Callable[[], object], threads: int, seconds: float) -> float:
    """Append from several threads at once; return the rate of all together."""
    counts = [0] * threads
    ready = threading.Barrier(threads + 1)
    end = 0.0

    def work(index: int) -> None:
        append()  # makes what a thread needs of its own
        ready.wait()
        ready.wait()
        count = 0
        while time.perf_counter() < end:
            append()
            count += 1
        counts[index] = count

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    begin = time.perf_counter()
    end = begin + seconds
    ready.wait()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - begin)
