"""The figures of the benchmark are compared fairly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.contest import Contest, Contestant, Run, Scale, Target, at_least, at_most, hold, rate

SCALE = Scale(rounds=3, seconds=0.5, entries=1, ledgers=1, reopen_bytes=1, memory_bytes=1)


class Recorded:
    """Contestants that write down when they run, and reach figures given beforehand."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def contestant(self, name: str, figures: list[float], *targets: Target) -> Contestant:
        @contextmanager
        def enter(directory: Path, scale: Scale) -> Iterator[Run]:
            assert scale is SCALE
            assert list(directory.iterdir()) == []
            (directory / "file").touch()
            left = iter(figures)

            def run(seconds: float) -> float:
                assert seconds == SCALE.seconds
                self.log.append(name)
                return next(left)

            yield run
            self.log.append(f"{name} left")

        return Contestant(name, enter, targets)


def test_contestants_take_turns_and_leave_nothing(tmp_path: Path) -> None:
    recorded = Recorded()
    two = Target("2 x b", lambda rates: 2 * rates["b"])
    contest = Contest(
        "c",
        "title",
        "/s",
        [recorded.contestant("a", [10, 40, 30], two, at_least(20)), recorded.contestant("b", [10, 5, 30])],
    )
    a, b = hold(contest, SCALE, tmp_path, lambda _: None)
    assert recorded.log == ["a", "b", "a", "b", "a", "b", "b left", "a left"]
    assert list(tmp_path.iterdir()) == []
    assert (a.median, b.median) == (30, 10)
    assert (a.rounds, b.rounds) == ([10, 40, 30], [10, 5, 30])
    assert a.targets == [("2 x b", 0.5), (">= 20", 1.5)]  # ratios of the rounds: 0.5, 4, 0.5 and 0.5, 2, 1.5


def test_work_that_is_done_once_has_one_round(tmp_path: Path) -> None:
    contest = Contest("c", "title", "s", [Recorded().contestant("a", [4.0], at_most(2))], once=True)
    (figure,) = hold(contest, SCALE, tmp_path, lambda _: None)
    assert figure.rounds == [4.0]
    assert figure.targets == [("<= 2", 0.5)]


def test_the_rate_is_work_divided_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0

    def step() -> int:
        nonlocal now
        now += 0.04
        return 10

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert rate(step, 0.1) == pytest.approx(250)
    assert now == pytest.approx(1000.12), "it ends with the first step that is over in time"
