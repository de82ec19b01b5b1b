"""Threads for calls that take long: each call is made once, also where the system gives no more threads."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

import pytest

from pybk import threads as module
from pybk.errors import StorageRefusedError
from pybk.threads import Workers
from tests.waiting import WAIT_S


def no_more_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have the operating system refuse threads whose names begin so."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_calls_run_in_parallel_up_to_the_number_of_threads() -> None:
    workers = Workers(3, "pybk-test")
    barrier = threading.Barrier(3, timeout=WAIT_S)

    def meet() -> None:
        barrier.wait()

    futures = [workers.submit(meet) for _ in range(6)]
    for future in futures:
        assert future is not None
        future.result(WAIT_S)
    assert len(workers.threads) == 3
    workers.close(wait=True)


def test_without_more_threads_those_there_make_each_call_once(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(4, "pybk-test")
    no_more_threads(monkeypatch, "pybk-test")
    calls: list[int] = []
    futures = [workers.submit(lambda number=number: calls.append(number)) for number in range(100)]  # type: ignore[misc]
    for future in futures:
        assert future is not None
        future.result(WAIT_S)
    assert calls == list(range(100))
    workers.close(wait=True)


def test_without_any_thread_there_are_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    no_more_threads(monkeypatch, "pybk-test")
    with pytest.raises(StorageRefusedError, match="ulimit -u"):
        Workers(4, "pybk-test")


def test_closed_workers_take_no_call_and_drop_those_not_begun() -> None:
    workers = Workers(1, "pybk-test")
    begun, end = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        end.wait(WAIT_S)

    running, waiting = workers.submit(call), workers.submit(lambda: None)
    assert running is not None
    assert waiting is not None
    assert begun.wait(WAIT_S)
    workers.close()
    assert waiting.cancelled()
    assert wait([waiting], WAIT_S).done == {waiting}, "who waits for it would wait for ever"
    assert workers.submit(lambda: None) is None
    end.set()
    workers.close(wait=True)
    assert running.done()


def test_a_call_that_raises_ends_no_thread() -> None:
    workers = Workers(1, "pybk-test")

    def fail() -> None:
        raise ValueError("no")

    failed, after = workers.submit(fail), workers.submit(lambda: None)
    assert failed is not None
    assert after is not None
    assert isinstance(failed.exception(WAIT_S), ValueError)
    assert after.result(WAIT_S) is None
    workers.close(wait=True)


def test_calls_one_after_another_take_one_thread() -> None:
    workers = Workers(4, "pybk-test")
    for _ in range(100):
        future = workers.submit(lambda: None)
        assert future is not None
        future.result(WAIT_S)
    assert len(workers.threads) == 1
    workers.close(wait=True)


def test_a_call_whose_future_was_cancelled_is_not_made() -> None:
    workers = Workers(1, "pybk-test")
    begun, end, calls = threading.Event(), threading.Event(), []

    def call() -> None:
        begun.set()
        end.wait(WAIT_S)

    workers.submit(call)
    assert begun.wait(WAIT_S)
    cancelled, after = workers.submit(lambda: calls.append(1)), workers.submit(lambda: calls.append(2))
    assert cancelled is not None
    assert after is not None
    assert cancelled.cancel()
    end.set()
    after.result(WAIT_S)
    assert calls == [2]
    workers.close(wait=True)


@pytest.mark.parametrize("interrupted", ["new thread", "close"])
def test_an_interrupt_leaves_no_extra_thread(monkeypatch: pytest.MonkeyPatch, interrupted: str) -> None:
    workers, others = Workers(3, "pybk-test"), set(threading.enumerate())
    begun, end = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        end.wait(WAIT_S)

    workers.submit(call)
    assert begun.wait(WAIT_S)

    def start_and_interrupt(thread: threading.Thread) -> None:
        thread.start()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if interrupted == "close":
            patch.setattr(workers, "calls", Interrupting())
        patch.setattr(module, "start_thread", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            workers.close() if interrupted == "close" else workers.submit(lambda: None)
    threads = {*workers.threads, *set(threading.enumerate()) - others}
    workers.close()
    end.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


class Interrupting:
    """A queue that an interrupt comes in the middle of."""

    def get_nowait(self) -> None:
        """Raise as the main thread does at Ctrl-C."""
        raise KeyboardInterrupt


def test_a_finaliser_may_submit_a_call_where_its_thread_submits_one() -> None:
    """The collector may run it while the thread holds the lock."""
    workers = Workers(1, "pybk-test")
    submitted: list[Future[None] | None] = []

    def submit() -> None:
        with workers.lock:
            submitted.append(workers.submit(lambda: None))

    thread = threading.Thread(target=submit, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert submitted[0] is not None
    assert submitted[0].result(WAIT_S) is None
    workers.close(wait=True)
