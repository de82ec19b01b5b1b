"""KeyboardInterrupt at a place of its own choosing, by a signal that comes there."""

from __future__ import annotations

import linecache
import signal
import sys
import threading
from collections.abc import Callable
from dis import opmap
from functools import cache
from inspect import isbuiltin
from types import FrameType
from typing import Any, Final

import pytest

from pybk.threads.interrupts import guarded
from tests.paths import ROOT

APPEND_PATH: Final = (
    "pybk/manager/ledger_writer.py",
    "pybk/threads/group_commit.py",
    "pybk/storage/log/log.py",
    "pybk/storage/log/commit.py",
    "pybk/storage/descriptor.py",
    "pybk/storage/store.py",
    "pybk/storage/preallocation.py",
)
"""The files whose lines an append of a store runs."""


def _found(files: tuple[str, ...]) -> tuple[str, ...]:
    """Return parts of the names of files; one that is part of none would interrupt nothing."""
    unknown = [part for part in files if not any(part in name for name in _sources())]
    assert not unknown, f"no file is called {unknown}"
    return files


@cache
def _sources() -> tuple[str, ...]:
    return threading.__file__, *map(str, (ROOT / "src" / "pybk").rglob("*.py"))


def interrupts() -> None:
    """Have ``strike`` raise KeyboardInterrupt. Called before the code that is struck: in a guard it would undo that."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR2, interrupt)


def traced_guards() -> None:
    """Skip the test where lines of a guarded call run in another thread, which is not traced."""
    if not isbuiltin(guarded):
        pytest.skip("without the native core another thread runs what is guarded, which is not traced")


def strike() -> None:
    """Get a signal whose handler raises KeyboardInterrupt: now, or where the guard of this thread ends or waits."""
    signal.raise_signal(signal.SIGUSR2)


class LineInterrupter:
    """Raises KeyboardInterrupt once, by a signal that comes at the n-th traced line; for ``sys.settrace``.

    Args:
        line: Which line.
        files: Parts of the names of the files whose lines count.

    Attributes:
        fired: Whether the signal came.
    """

    def __init__(self, line: int, files: tuple[str, ...]) -> None:
        interrupts()
        self._left = line
        self._files = _found(files)
        self.fired = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in self._files):
            return None
        if event == "line" and not self.fired and not takes_no_interrupt(frame):
            self._left -= 1
            if self._left < 0:
                self.fired = True
                strike()
        return self


def takes_no_interrupt(frame: FrameType) -> bool:
    """Return whether the line event is at a place where the interpreter itself takes no interrupts.

    Those are a ``with`` that is being left, between the last call of the body and ``__exit__``, and an instruction that
    does nothing, as at a ``try``, which the block around it need not guard. Raised by a trace function there, an
    exception would leave any lock of Python locked.
    """
    if frame.f_code.co_code[frame.f_lasti] == opmap["NOP"]:
        return True
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    if not line.startswith("with "):
        return False
    first = min(start for start, _, number in frame.f_code.co_lines() if number == frame.f_lineno)
    return frame.f_lasti > first


def interrupted_at(
    line: int, files: tuple[str, ...], call: Callable[[], object], *, ignored: tuple[type[Exception], ...] = ()
) -> bool:
    """Call with an interrupt at the n-th line of some files; return whether it came to that.

    Args:
        line: Which line.
        files: As for ``LineInterrupter``.
        call: What is interrupted.
        ignored: Errors that the call may raise, because what was interrupted is given up.
    """
    traced_guards()
    interrupter = LineInterrupter(line, files)
    sys.settrace(interrupter)
    try:
        call()
    except KeyboardInterrupt:
        assert interrupter.fired
    except ignored:
        pass
    finally:
        sys.settrace(None)
    return interrupter.fired
