"""The thread of a bookie's self-healing: one work of a chore at a time, and none that ends the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk.errors import PybkError
from pybk.healing import chores
from pybk.healing.chores import AT_ONCE, ChoreThread, Rounds, Work
from tests.cluster.inside import inside
from tests.healing.quick import repair_quickly, scrub_quickly
from tests.healing.test_autorecovery import autorecovery_of
from tests.internals import note_chores
from tests.waiting import wait_until


@pytest.fixture
def thread() -> Iterator[ChoreThread]:
    made = ChoreThread()
    yield made
    made.stop()


class Always:
    """A chore that always has something to do, which takes as long as a test wants."""

    trouble = "nothing is done"

    def __init__(self) -> None:
        self.done = self.under_way = self.most = 0
        self.held = threading.Event()
        self.held.set()

    def due(self, now: float) -> Work:
        return self.work

    def work(self) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.held.wait()
        self.done += 1
        self.under_way -= 1


class Asleep:
    """A chore that has nothing to do until a test says so, and says that it need not be asked again."""

    trouble = "nothing is done"

    def __init__(self) -> None:
        self.wanted = self.done = self.asked = False

    def due(self, now: float) -> Work | float:
        self.asked = True
        return self.work if self.wanted and not self.done else float("inf")

    def work(self) -> None:
        self.done = True


def test_one_work_of_a_chore_is_under_way_and_holds_up_no_other(thread: ChoreThread) -> None:
    slow, quick = Always(), Always()
    slow.held.clear()
    thread.start((slow, quick))
    wait_until(lambda: quick.done > 20)
    assert (slow.done, slow.most, quick.most) == (0, 1, 1)
    slow.held.set()
    wait_until(lambda: slow.done > 20)
    assert slow.most == 1


def test_what_changes_is_looked_at_at_once(thread: ChoreThread) -> None:
    chore = Asleep()
    thread.start((chore,))
    wait_until(lambda: chore.asked)
    chore.wanted = True
    thread.wake()
    wait_until(lambda: chore.done)


@pytest.mark.parametrize("error", [PybkError("the store is away"), ZeroDivisionError("a bug")])
def test_a_failure_is_logged_and_ends_neither_its_chore_nor_another(
    thread: ChoreThread, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(chores, "FAILED_S", 0.01)
    rounds = 0

    def fails_every_other() -> Iterator[float]:
        nonlocal rounds
        yield 0.0
        rounds += 1
        if rounds % 2:
            raise error

    other = Always()
    thread.start((Rounds(fails_every_other, "nobody looks"), other))
    wait_until(lambda: rounds > 4)
    assert f"nobody looks: {error}" in caplog.text
    assert ("Traceback" in caplog.text) is not isinstance(error, PybkError)
    assert other.done


def test_a_chore_whose_judgement_fails_is_asked_again(thread: ChoreThread, caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Always):
        """A chore that cannot say at first what is due."""

        asked = 0

        def due(self, now: float) -> Work:
            self.asked += 1
            return [self.work][0 if self.asked > 1 else 1]

    chore = Wrong()
    thread.start((chore,))
    wait_until(lambda: chore.done)
    assert "nothing is done: list index out of range" in caplog.text


def test_a_round_rests_as_long_as_it_says_and_is_followed_by_another() -> None:
    done: list[str] = []

    def steps() -> Iterator[float]:
        yield -1.0
        done.append("look")
        yield 1000.0
        done.append("never")

    chore = Rounds(steps, "nobody looks")
    work = chore.due(now := time.monotonic())
    assert callable(work)
    work()
    rest = chore.due(now)
    assert not callable(rest)
    assert rest > now + 900
    assert callable(chore.due(rest))
    assert done == ["look"]


def test_stop_waits_for_the_work_under_way_and_begins_no_other(thread: ChoreThread) -> None:
    chore = Always()
    chore.held.clear()
    thread.start((chore,))
    wait_until(lambda: chore.under_way)
    ended = threading.Thread(target=thread.stop)
    ended.start()
    ended.join(0.1)
    assert ended.is_alive()
    chore.held.set()
    ended.join()
    assert chore.done == 1


def test_healing_has_few_threads_at_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One asks, and one or two work, or some more where the machine is busy; each of seven loops had its own once."""
    repair_quickly(monkeypatch)
    scrub_quickly(monkeypatch)
    monkeypatch.setattr(chores, "LOOK_S", 0.2)
    worked = note_chores(monkeypatch)
    with inside(tmp_path, count=1, autorecovery=True) as cluster:
        healing = autorecovery_of(cluster.bookies[0])
        asked = {healing.auditor, healing.worker, healing.scrub, healing.quick_audits, healing.surplus}
        wait_until(lambda: worked >= asked)
        threads = set(threading.enumerate())
        healing.stop()
        ended = [each.name for each in threads - set(threading.enumerate())]
    assert 2 <= len(ended) <= 1 + AT_ONCE, ended


def test_more_work_is_admitted_when_something_waits(thread: ChoreThread) -> None:
    slow = [Always() for _ in range(AT_ONCE + 1)]
    for each in slow:
        each.held.clear()
    thread.start(slow)
    wait_until(lambda: sum(each.under_way for each in slow) == AT_ONCE)
    for each in slow:
        each.held.set()
    wait_until(lambda: all(each.done for each in slow))
