"""Forks: calls in a child, and threads of its parent that hold all locks of pybk at the moment of the fork."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pybk.errors import ForkedProcessError
from tests.waiting import WAIT_S

_LOCK = type(threading.Lock())
_LOCKS = (_LOCK, type(threading.RLock()), threading.Condition)


_FORKS_MAX = 20
_LMDB_IN_USE = 3


def in_child(work: Callable[[], object]) -> None:
    """Call in a forked child; fail if it raises, or takes longer than ``WAIT_S``.

    A child cannot open an LMDB environment that another thread of its parent was reading at the fork: then fork again.
    """
    statuses = (_status_of_child(work) for _ in range(_FORKS_MAX))
    status = next((each for each in statuses if os.waitstatus_to_exitcode(each) != _LMDB_IN_USE), _LMDB_IN_USE)
    assert status == 0, "the forked child failed, or waited for somebody who is not there"


def _status_of_child(work: Callable[[], object]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a finaliser would ignore the error of a handler
            signal.alarm(int(WAIT_S))
            work()
            status = 0
        except ForkedProcessError as error:
            status = _LMDB_IN_USE if "in use by the process that this one was forked from" in str(error) else 1
            traceback.print_exc()
        except BaseException:  # noqa: BLE001  # nothing may get out of a child into the test run of its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitpid(pid, 0)[1]


@contextmanager
def all_locks_held() -> Iterator[None]:
    """Have a thread hold the locks of all objects of pybk, except those that others hold at the moment."""
    taken, done = threading.Event(), threading.Event()
    held: list[Any] = []

    def hold() -> None:
        found = {id(lock): lock for lock in locks_of_pybk()}
        held.extend(lock for lock in found.values() if lock.acquire(blocking=False))
        taken.set()
        done.wait(WAIT_S)
        for lock in held:
            with suppress(RuntimeError):  # one that serves as a signal, which was given meanwhile
                lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(WAIT_S)
    assert held, "objects of pybk have locks"
    try:
        yield
    finally:
        done.set()
        thread.join(WAIT_S)


def locks_of_pybk() -> Iterator[Any]:
    """Yield the locks that are attributes of modules and objects of pybk; one may come several times.

    The reentrant locks of modules are left out, because a fork takes them.
    """
    for name, module in tuple(sys.modules.items()):
        if name.startswith("pybk."):
            yield from (found for found in tuple(vars(module).values()) if isinstance(found, _LOCK))
    for each in gc.get_objects():
        home = str(type(each).__module__)
        if home.startswith("pybk.") and home != "pybk.deferral":
            for found in attributes_of(each):
                if isinstance(found, _LOCKS):
                    yield found


def attributes_of(each: object) -> Iterator[object]:
    """Yield the values of the attributes of an object."""
    yield from tuple(getattr(each, "__dict__", {}).values())
    for kind in type(each).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            with suppress(AttributeError):
                yield object.__getattribute__(each, name)
