"""Child processes of the demonstration; tasks, orders and reports are lines of JSON on their pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pybk.errors import PybkError

_TOOLS: Final = str(Path(__file__).resolve().parents[1])
"""The directory of this package, which no installation has."""

SECONDS_MAX: Final = 300.0
"""The lifetime of a child; after it, the child is assumed to hang and is killed."""


class Child:
    """A module of the demonstration that runs in its own process; killed when the context is left.

    Args:
        module: The name of the module, which has a function ``main``.
        task: The first order, a JSON value; it is sent through standard input, because process lists would show its
            secrets.
    """

    def __init__(self, module: str, task: object) -> None:
        others = os.environ.get("PYTHONPATH", "")
        # In its own session, the child does not receive Ctrl-C; the parent receives it and ends the child.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],  # the current directory may have modules of any name
            env={**os.environ, "PYTHONPATH": f"{_TOOLS}{os.pathsep}{others}" if others else _TOOLS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._watchdog = threading.Timer(SECONDS_MAX, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()
        self.send(task)

    @property
    def pid(self) -> int:
        """The id of the child process."""
        return self._process.pid

    def send(self, order: object) -> None:
        """Send an order to the child's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def reports(self) -> Iterator[Any]:
        """Yield the child's reports until it ends or closes its output."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # A kill may have cut off the last line; an incomplete report is ignored.
            if line.endswith(b"\n"):
                yield json.loads(line)

    def answer(self) -> Any:
        """Return the child's next report.

        Raises:
            PybkError: The child ended before its next report.
        """
        for report in self.reports():
            return report
        raise PybkError(f"process {self.pid} ended with exit code {self._process.wait()}; its error is above")

    def signal(self, number: int) -> None:
        """Send a signal to the child."""
        self._process.send_signal(number)

    def end(self) -> int:
        """Close the child's standard input, so that it ends by itself, and return its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()

    def __enter__(self) -> Self:
        """Return the child."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill the child if it still runs."""
        self._watchdog.cancel()
        self._process.kill()
        self._process.__exit__(kind, error, traceback)


def task() -> Any:
    """Return the task of this process, its first order."""
    return json.loads(sys.stdin.buffer.readline())


def orders() -> Iterator[Any]:
    """Yield the orders to this process until the parent closes the pipe."""
    for line in sys.stdin.buffer:
        yield json.loads(line)


def report(content: object) -> None:
    """Send a report to the parent."""
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()
