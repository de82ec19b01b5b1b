"""The background thread of a client's baton survives whatever comes at the same moment."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pybk.client import baton as baton_module
from pybk.client import driver as driver_module
from pybk.client.baton import Baton
from pybk.client.driver import Driver
from pybk.storage.log.commit import Commit
from tests.cluster.inside import inside
from tests.waiting import WAIT_S, wait_until


class Quiet:
    """Work of which there is none, but for what is idle."""

    def __init__(self) -> None:
        self.looked = 0

    def turn(self) -> None:
        raise AssertionError("nobody waits for anything")

    def busy(self) -> bool:
        return False

    def idle(self) -> bool:
        self.looked += 1
        return self.looked % 50 != 0

    def interrupt(self) -> None:
        return


class KickedMeanwhile:
    """A lock on which somebody else comes in just after it was taken in time."""

    def __init__(self, lock: Any, baton: Baton) -> None:
        self._lock = lock
        self._baton = baton
        self.met = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = bool(self._lock.acquire(blocking, timeout))
        if taken and timeout >= 0:
            self.met += 1
            self._baton.kick()
        return taken

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return bool(self._lock.locked())


def test_a_kick_in_the_moment_of_another_does_not_end_the_background_thread() -> None:
    work = Quiet()
    baton = Baton(work, "test-baton")
    kick = baton._kick = KickedMeanwhile(baton._kick, baton)  # type: ignore[assignment]  # stands in for a lock
    baton.kick()

    def met() -> bool:
        baton.kick()
        return kick.met > 3

    wait_until(met)
    looked = work.looked

    def looks_again() -> bool:
        baton.kick()
        return work.looked > looked

    wait_until(looks_again)
    assert "test-baton" in {thread.name for thread in threading.enumerate()}
    baton.stop()


class Untold(Quiet):
    """Work whose turn leaves something to do when nothing else is."""

    def __init__(self) -> None:
        super().__init__()
        self.commit = Commit()
        self.untold = False
        self.baton: Baton | None = None

    def turn(self) -> None:
        assert self.baton is not None
        self.untold = True
        self.baton.finish(self.commit)

    def idle(self) -> bool:
        told, self.untold = self.untold, False
        return told


class LookedAt(int):
    """A number that calls something the first time it is found to be reached."""

    reached: Callable[[], None] | None = None

    def __gt__(self, other: int) -> bool:
        if int(self) > other:
            return True
        reached, self.reached = self.reached, None
        if reached is not None:
            reached()
        return False


def test_who_leaves_in_the_moment_in_which_the_ticks_end_is_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Untold()
    baton = work.baton = Baton(work, "test-baton")
    ticks = LookedAt(5)
    ticks.reached = lambda: baton.wait(work.commit)
    monkeypatch.setattr(baton_module, "_TICKS_UNTIL_REST", ticks)
    baton.kick()
    wait_until(lambda: work.commit.done)
    wait_until(lambda: not work.untold, "somebody to look what the last one left")
    baton.stop()


def test_the_background_rests_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Untold()
    baton = work.baton = Baton(work, "test-baton")
    monkeypatch.setattr(baton_module, "_TICKS_UNTIL_REST", 5)
    baton.wait(work.commit)
    wait_until(lambda: not work.untold)
    wait_until(lambda: not baton._ticking and not baton._unseen)
    assert baton._kick.locked()
    baton.stop()


class InTurn(Quiet):
    """Work each of whose turns is one of these calls."""

    def __init__(self, *turns: Callable[[], None]) -> None:
        super().__init__()
        self.turns = list(turns)

    def turn(self) -> None:
        self.turns.pop(0)()


def test_a_turn_knows_whether_it_woke_somebody() -> None:
    own, others = Commit(), Commit()
    seen: list[bool] = []

    def finish(commit: Commit) -> None:
        before = baton.woke
        baton.finish(commit)
        seen.extend((before, baton.woke))

    def wake() -> None:
        threading.Thread(target=baton.wait, args=(others,)).start()
        wait_until(lambda: bool(others.waiters))
        finish(others)

    baton = Baton(InTurn(wake, lambda: finish(own)), "test-baton")
    baton.wait(own)
    assert seen == [False, True, False, False]
    baton.stop()


def test_who_waits_for_what_is_done_at_once_does_not_wait_for_bookies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "_WAIT_SECONDS", WAIT_S)
    with inside(tmp_path) as cluster, cluster.connect() as client:
        driver = client._backend.driver  # type: ignore[attr-defined]  # a cluster's
        begin = time.perf_counter()
        for _ in range(5):
            driver.have_done(lambda: None)
        assert time.perf_counter() - begin < WAIT_S


def test_what_formed_waits_for_those_woken_and_for_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, submit = Baton.finish, Driver._submit
    woke: list[bool] = []

    def finish_as_if_somebody_woke(baton: Baton, commit: Commit) -> None:
        finish(baton, commit)
        baton.woke = True

    def note(driver: Driver, now_ns: int) -> None:
        woke.append(driver.baton.woke)
        submit(driver, now_ns)

    with inside(tmp_path) as cluster, cluster.connect() as client, client.create_ledger(password=b"p") as writer:
        monkeypatch.setattr(Baton, "finish", finish_as_if_somebody_woke)
        monkeypatch.setattr(Driver, "_submit", note)
        futures = [writer.append_async(b"x") for _ in range(200)]
        assert [future.result(WAIT_S) for future in futures] == list(range(200))
        done: list[int] = []
        for _ in range(200):
            writer.append_async(b"x").add_done_callback(lambda future: done.append(future.result()))
        wait_until(lambda: len(done) == 200, "what formed to be sent, although nobody waits for it")
        assert woke
        assert not any(woke)
        monkeypatch.undo()


def test_no_exception_of_a_callback_ends_the_background_thread(caplog: pytest.LogCaptureFixture) -> None:
    work = Untold()
    baton = work.baton = Baton(work, "test-baton")
    called = threading.Event()

    def leave() -> None:
        raise SystemExit(3)

    baton.wait(work.commit)
    with caplog.at_level(logging.ERROR):
        baton.when_done(work.commit, leave)
        baton.when_done(work.commit, called.set)
        assert called.wait(WAIT_S)
    assert "goes on after an exception" in caplog.text
    baton.stop()


def test_callbacks_of_what_is_finished_after_the_end_are_called() -> None:
    baton = Baton(Quiet(), "pybk-test")
    baton.stop()
    commit, called = Commit(), threading.Event()
    baton.when_done(commit, called.set)
    assert not called.is_set()
    baton.finish(commit)
    assert called.is_set()
