"""Child processes that are here to be killed: tasks, orders and reports are lines of JSON on their pipes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

from pybk.errors import PybkError

SECONDS_MAX: Final = 300.0
"""After which a child is taken to hang and is killed."""


class Child:
    """A module of the demonstration in a process of its own; killed when the context is left.

    Args:
        module: The module's name; it has a ``main``.
        task: What it is to do, as JSON has it; goes through its standard input, so that no secret stands in a process
            list.
    """

    def __init__(self, module: str, task: object) -> None:
        # A session of its own: Ctrl-C is for the parent, which then ends the child.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._watchdog = threading.Timer(SECONDS_MAX, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()
        self.send(task)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, order: object) -> None:
        """Send an order to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def reports(self) -> Iterator[Any]:
        """Yield what it reports until it has nothing more to report, or is dead."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # A kill may have cut off the last line; an incomplete report counts as not sent.
            if line.endswith(b"\n"):
                yield json.loads(line)

    def answer(self) -> Any:
        """Return its next report.

        Raises:
            PybkError: There is none.
        """
        for report in self.reports():
            return report
        raise PybkError(f"process {self.pid} ended with exit code {self._process.wait()}; its error is above")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def end(self) -> int:
        """Let it end by itself, as nothing more is ordered; returns its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()

    def __enter__(self) -> Self:
        """Return the child."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill it, if it still runs."""
        self._watchdog.cancel()
        self._process.kill()
        self._process.__exit__(kind, error, traceback)


def task() -> Any:
    """Return this process's task: its first order."""
    return json.loads(sys.stdin.buffer.readline())


def orders() -> Iterator[Any]:
    """Yield this process's orders until there are no more."""
    for line in sys.stdin.buffer:
        yield json.loads(line)


def report(content: object) -> None:
    """Report to the parent."""
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()
