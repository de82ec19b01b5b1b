"""The core of group commit: leader, followers, hand-over, callbacks and the background thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pybk.threads.group_commit import Completion, GroupCommit
from tests.waiting import WAIT_S, wait_until


class Quiet:
    """Work that is never pending."""

    idles = False

    def __init__(self) -> None:
        self.looked = 0
        self.interrupts = 0
        self.ended = False

    def step(self) -> None:
        raise AssertionError("nothing is pending")

    def is_pending(self) -> bool:
        return False

    def sleep_seconds(self) -> float:
        return -1.0

    def idle(self) -> None:
        self.looked += 1

    def interrupt(self) -> None:
        self.interrupts += 1

    def background_ended(self) -> None:
        self.ended = True


class InSteps(Quiet):
    """Work each of whose steps is one of these calls."""

    def __init__(self, *steps: Callable[[], None]) -> None:
        super().__init__()
        self.steps = list(steps)

    def step(self) -> None:
        self.steps.pop(0)()


def started(work: Quiet) -> GroupCommit:
    """Return a group commit whose background thread runs."""
    group = GroupCommit(work, "test-group")
    group.background.start()
    return group


def follow(group: GroupCommit, completion: Completion) -> threading.Thread:
    """Have another thread wait; return once it follows."""
    followers = len(completion.followers)
    thread = threading.Thread(target=group.wait, args=(completion,), daemon=True)
    thread.start()
    wait_until(lambda: len(completion.followers) > followers)
    return thread


def test_a_lone_thread_leads_until_its_completion_is_done() -> None:
    completion = Completion()
    work = InSteps(lambda: None, lambda: None)
    group = started(work)
    work.steps.append(lambda: group.finish(completion))
    group.wait(completion)
    assert completion.done
    assert completion.followers == []
    group.stop()


def test_the_leadership_is_handed_to_the_first_follower_of_what_is_not_done() -> None:
    own, done_too, others = Completion(), Completion(), Completion()
    threads: list[threading.Thread] = []
    leaders: list[str] = []

    def first() -> None:
        leaders.append(threading.current_thread().name)
        threads.extend((follow(group, done_too), follow(group, others), follow(group, others)))
        group.finish(done_too)
        group.finish(own)

    def second() -> None:
        leaders.append(threading.current_thread().name)
        group.finish(others)

    group = started(InSteps(first, second))
    group.wait(own)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert leaders == [threading.current_thread().name, threads[1].name]
    assert not group.followed
    group.stop()


def test_a_step_knows_whether_it_woke_followers() -> None:
    own, others = Completion(), Completion()
    seen: list[bool] = []

    def wake() -> None:
        group.woke = False
        follow(group, others)
        group.finish(others)
        seen.append(group.woke)
        group.woke = False
        group.finish(own)
        seen.append(group.woke)

    group = started(InSteps(wake))
    group.wait(own)
    assert seen == [True, False]
    group.stop()


def test_a_follower_interrupts_a_leader_that_may_not_know_of_it_once() -> None:
    own, seen, unseen = Completion(), Completion(), Completion()
    unseen.unseen = True

    def meet() -> None:
        follow(group, seen)
        assert work.interrupts == 0
        follow(group, unseen)
        wait_until(lambda: work.interrupts == 1 and not unseen.unseen)
        follow(group, unseen)
        for completion in (seen, unseen, own):
            group.finish(completion)

    work = InSteps(meet)
    group = started(work)
    group.wait(own)
    assert work.interrupts == 1
    group.stop()


def test_leading_waits_for_its_turn_and_never_overlaps() -> None:
    own = Completion()
    led: list[str] = []

    def queue() -> None:
        thread = threading.Thread(target=group.lead, args=(lambda: led.append("led"),))
        thread.start()
        wait_until(lambda: bool(group.followed))
        led.append("step")
        group.finish(own)

    group = started(InSteps(queue))
    group.wait(own)
    wait_until(lambda: len(led) == 2)
    assert led == ["step", "led"]
    assert group.lead(lambda: 5) == 5
    group.stop()


class Idling(Quiet):
    """Work that idles for a while after each step."""

    idles = True

    def __init__(self) -> None:
        super().__init__()
        self.completion = Completion()
        self.group: GroupCommit | None = None
        self.left = 0

    def step(self) -> None:
        assert self.group is not None
        self.left = 5
        self.group.finish(self.completion)

    def sleep_seconds(self) -> float:
        return 0.001 if self.left > 0 else -1.0

    def idle(self) -> None:
        super().idle()
        self.left -= 1


def test_idle_work_follows_the_last_leader_and_then_the_background_rests() -> None:
    work = Idling()
    group = work.group = started(work)
    wait_until(lambda: group.rests)
    group.wait(work.completion)
    wait_until(lambda: work.looked == 5)
    wait_until(lambda: group.rests)
    assert group.kick_lock.locked()
    assert work.looked == 5
    group.stop()


def test_no_exception_of_a_callback_ends_the_background_thread(caplog: pytest.LogCaptureFixture) -> None:
    group, completion, called = started(Quiet()), Completion.finished(None), threading.Event()

    def leave() -> None:
        raise SystemExit(3)

    with caplog.at_level(logging.ERROR):
        group.when_done(completion, leave)
        group.when_done(completion, called.set)
        assert called.wait(WAIT_S)
    wait_until(lambda: "continues after an exception" in caplog.text)
    group.stop()
    assert not group.work.ended  # type: ignore[attr-defined]  # Quiet's


def test_callbacks_of_what_is_completed_after_the_end_are_called() -> None:
    """By ``finish``, and by a leader that completes with the mutex held, as the log does."""
    called = [threading.Event(), threading.Event()]
    first, second = Completion(), Completion()

    def complete() -> None:
        with group.mutex:
            group.complete(second)

    group = started(InSteps(complete))
    group.stop()
    group.when_done(first, called[0].set)
    group.finish(first)
    assert called[0].is_set()
    group.when_done(second, called[1].set)
    group.wait(second)
    assert called[1].is_set()


def test_a_kick_takes_no_lock_if_a_thread_leads_or_was_kicked_already() -> None:
    """Each append kicks that nobody waits for."""
    group: Any = GroupCommit(Quiet(), "test-group")
    mutex, group.mutex = group.mutex, None
    group.leader = threading.Lock()
    group.kick()
    assert group.kick_lock.locked(), "the leader sees what was staged when it leaves"
    group.leader, group.mutex = None, mutex
    group.kick()
    assert not group.kick_lock.locked()
    group.mutex = None
    group.kick()


def test_a_child_of_a_fork_has_no_lock_to_wait_for() -> None:
    group = started(Quiet())
    group.stop()
    with group.mutex:
        group.after_fork()
    called: list[Any] = []
    group.when_done(Completion.finished(None), lambda: called.append(1))
    assert called == [1]


def test_a_forked_child_calls_no_callback_of_its_parent() -> None:
    group, completion, called = GroupCommit(Quiet(), "test-group"), Completion(), list[str]()
    completion.done = True
    group.when_done(completion, partial(called.append, "parent"))  # its background thread has not run yet
    group.after_fork()
    group.when_done(completion, partial(called.append, "child"))
    assert called == ["child"]
