"""What becomes of a thread that cannot be started."""

from __future__ import annotations

import threading

import pytest

from pybk.errors import StorageRefusedError
from pybk.threads import start_thread


class _Refused(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


class _Interrupted(threading.Thread):
    def start(self) -> None:
        """Do what the standard library's does: its wait for the thread gives a lock away that ``with`` releases."""
        lock = threading.Lock()
        with lock:
            lock.release()
            raise KeyboardInterrupt


def test_a_thread_that_is_refused_says_what_to_do() -> None:
    with pytest.raises(StorageRefusedError, match=r"starting the thread job was refused: .*ulimit -u"):
        start_thread(_Refused(name="job"))


def test_an_interrupt_during_the_start_of_a_thread_is_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        start_thread(_Interrupted(name="job"))


class _LeaveError(Exception):
    """What a signal handler raises."""


class _LeftEarly(threading.Thread):
    def start(self) -> None:
        """Do what the standard library's does when a handler raises in it while the thread begins."""
        not_begun: dict[threading.Thread, threading.Thread] = {}
        try:
            raise _LeaveError
        except _LeaveError:
            del not_begun[self]
            raise


def test_what_a_handler_raises_during_the_start_of_a_thread_is_raised() -> None:
    with pytest.raises(_LeaveError):
        start_thread(_LeftEarly(name="job"))
