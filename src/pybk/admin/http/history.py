"""The last quarter of an hour, second by second: rates by ledger type and by bookie, and the free space.

A sample is added by the thread that looks (``View``), and never by a request. There are few lines: one for the total,
and one for each of the first ``LINES_MAX`` active ledger types and bookies, which keeps its line until its samples are
dropped; all others share a line. So a history has at most ``SAMPLES_MAX`` times 35 small tuples, some megabytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from pybk.admin.http.rates import Rates, together
from pybk.metrics import OTHER_TYPES

SAMPLES_MAX: Final = 900
"""Samples that are kept, one a second."""

LINES_MAX: Final = 16
"""The most ledger types, and the most bookies, that have a line of their own."""

TREND_SECONDS: Final = 60.0
"""The least time between two samples from which a trend is concluded."""

_DIGITS: Final = 4

ALL: Final = "all"
BY_TYPE: Final = "type"
BY_BOOKIE: Final = "bookie"

_Line = tuple[str, str]
"""A line: ``ALL``, ``BY_TYPE`` or ``BY_BOOKIE``, and the name of the type or the bookie."""


class FreeSpace(NamedTuple):
    """The free space of a tier, or of a directory.

    Attributes:
        free_bytes: The free bytes.
        members: The bookies that have the tier; only sums over the same bookies can be compared.
    """

    free_bytes: int
    members: frozenset[str] = frozenset()


class Sample(NamedTuple):
    """The values that were seen at one moment.

    Attributes:
        at_ns: The time, nanoseconds since 1970.
        total: The total rates.
        types: Rates by ledger type.
        bookies: Rates by bookie; empty for a store.
        free: Free space by tier, or by directory.
    """

    at_ns: int
    total: Rates
    types: Mapping[str, Rates]
    bookies: Mapping[str, Rates]
    free: Mapping[str, FreeSpace]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesLine:
    """A line of each chart; its values belong to the times in ``Series.at_ms``, null where they are unknown.

    Attributes:
        by: ``all``, ``type`` or ``bookie``.
        name: The ledger type or the bookie; ``.other`` for all others.
        append_entries: Entries appended a second.
        append_p50_s: Seconds.
        append_p99_s: Seconds.
        read_entries: Entries read a second.
        read_p99_s: Seconds.
    """

    by: str
    name: str
    append_entries: tuple[float | None, ...]
    append_p50_s: tuple[float | None, ...]
    append_p99_s: tuple[float | None, ...]
    read_entries: tuple[float | None, ...]
    read_p99_s: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Rates and latencies of the last quarter of an hour, or since a moment in it.

    Attributes:
        at_ms: The times, milliseconds since 1970, ascending, about one a second.
        lines: The lines.
    """

    at_ms: tuple[int, ...]
    lines: tuple[SeriesLine, ...]


class History:
    """Keeps samples; see the module.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._samples: deque[tuple[int, dict[_Line, Rates], Mapping[str, FreeSpace]]] = deque(maxlen=SAMPLES_MAX)
        self._used: dict[_Line, int] = {}
        """The lines, each with the number of samples that have it."""

    def add(self, sample: Sample) -> None:
        """Add a sample, and drop the oldest."""
        with self._lock:
            lines: dict[_Line, Rates] = {(ALL, ""): sample.total}
            for by, found in ((BY_TYPE, sample.types), (BY_BOOKIE, sample.bookies)):
                lines |= self._lines(by, found)
            if len(self._samples) == SAMPLES_MAX:
                for line in self._samples[0][1]:
                    self._used[line] -= 1
                    if not self._used[line]:
                        del self._used[line]
            self._samples.append((sample.at_ns, lines, sample.free))
            for line in lines:
                self._used[line] = self._used.get(line, 0) + 1

    def _lines(self, by: str, found: Mapping[str, Rates]) -> dict[_Line, Rates]:
        names = {name for kind, name in self._used if kind == by and name != OTHER_TYPES}
        lines: dict[_Line, Rates] = {}
        others: list[Rates] = []
        for name, rates in found.items():
            if name not in names and (name == OTHER_TYPES or len(names) >= LINES_MAX):
                others += [rates] if rates else []
            elif name in names or rates:
                names.add(name)
                lines[by, name] = rates
        if others:
            lines[by, OTHER_TYPES] = together(others)
        return lines

    def since(self, at_ms: int = 0) -> Series:
        """Return the samples after a moment, in milliseconds since 1970."""
        with self._lock:
            samples = [each for each in self._samples if each[0] // 1_000_000 > at_ms]
            lines = sorted(self._used)
        return Series(
            at_ms=tuple(each[0] // 1_000_000 for each in samples),
            lines=tuple(_series_line(line, [each[1].get(line) for each in samples]) for line in lines),
        )

    def days_left(self, name: str) -> float | None:
        """Return the days until a tier or directory is full at the present rate; None if it does not fill."""
        with self._lock:
            found = [(at_ns, free[name]) for at_ns, _, free in self._samples if name in free]
        if not found:
            return None
        last_ns, last = found[-1]
        first_ns, first = next(each for each in found if each[1].members == last.members)
        seconds, used = (last_ns - first_ns) / 1e9, first.free_bytes - last.free_bytes
        if seconds < TREND_SECONDS or used <= 0:
            return None
        return last.free_bytes / used * seconds / 86_400


def _series_line(line: _Line, rates: list[Rates | None]) -> SeriesLine:
    def values(name: str) -> tuple[float | None, ...]:
        return tuple(_rounded(None if each is None else getattr(each, name)) for each in rates)

    return SeriesLine(
        by=line[0],
        name=line[1],
        append_entries=values("append_entries"),
        append_p50_s=values("append_p50_s"),
        append_p99_s=values("append_p99_s"),
        read_entries=values("read_entries"),
        read_p99_s=values("read_p99_s"),
    )


def _rounded(value: float | None) -> float | None:
    """Return a value with as many digits as a chart can show."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")
