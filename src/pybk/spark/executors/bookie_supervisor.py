"""The supervisor of an executor's bookie: starts the bookie's process, and starts it again if it ends too early.

``python -m pybk.spark.executors.bookie_supervisor SETTINGS PID STARTED`` inherits the locked descriptor of the
executor's lock file from the task that starts it. If the bookie cannot start, it writes the reason to its standard
error; once the bookie serves, it closes standard error without output.

Theory of operation: the supervisor holds the lock of the executor and that of a slot, a directory for a bookie on this
host, until it ends. So a bookie that was killed comes back in the same directory, with its name, its instance and its
entries, and nothing has to be copied. The bookie inherits both locks: if the supervisor is killed, the bookie serves
until the executor ends, and once that bookie has ended, the next task that asks for one starts both anew. A bookie that
ends with status 0 was asked to end, by SIGTERM or by the end of the executor, and is not started again. While the
bookie does not serve, the state file has the reason, and tasks continue without it.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import Final

from pybk.errors import PybkError
from pybk.spark.executors.bookie_settings import BookieSettings
from pybk.spark.executors.detached_process import Shutdown, detach, log_to
from pybk.spark.executors.executor import (
    DOWN,
    Executor,
    Process,
    executor_bookie,
    forget,
    read_state,
    take_lock,
    write_state,
)

logger = logging.getLogger(__name__)

PAUSES_MS: Final = (0, 1_000, 5_000, 30_000)
"""The pauses before the starts of a bookie that ended; the last one counts for all further starts, too."""

_STEADY_SECONDS: Final = 60.0
"""The time of serving after which the pauses begin anew."""

_LOOK_MS: Final = 60_000
_FREED_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 0.02


def supervise(settings: BookieSettings, executor: Executor) -> str | None:
    """Run the bookie of an executor until the executor ends or SIGTERM arrives; the process must end afterwards.

    Args:
        settings: The settings of the bookie.
        executor: The executor.

    Returns:
        The reason why the bookie did not start for the first time; None if it served.

    Raises:
        OSError: The directory of the settings cannot be used.
    """
    lock, state = (executor.file(settings.metadata, kind) for kind in ("lock", "json"))
    with ExitStack() as stack:
        stack.callback(forget, lock)
        shutdown = Shutdown(executor)
        slot = _take_slot(settings.directory, executor)
        stack.callback(forget, state)
        bookie = _Bookie(settings, executor, slot)
        if not bookie.served:
            return bookie.reason
        log_to(f"{slot}.log")
        detach(f"{slot}.log")
        failures = 0
        while not bookie.wait(shutdown) and not shutdown.executor_ended:
            failures = 0 if bookie.is_steady else failures
            pause_ms = PAUSES_MS[min(failures, len(PAUSES_MS) - 1)]
            failures += 1
            write_state(state, {DOWN: bookie.reason})
            logger.warning("the bookie in %s ended, and starts again in %d ms: %s", slot, pause_ms, bookie.reason)
            if shutdown.requested(pause_ms) or shutdown.executor_ended:
                break
            bookie = _Bookie(settings, executor, slot)
    return None


class _Bookie:
    """One process of the bookie, which serves, or has ended, once this returns.

    Attributes:
        served: Whether it began to serve.
    """

    def __init__(self, settings: BookieSettings, executor: Executor, slot: str) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "pybk.spark.executors.bookie_process"),
                *(str(settings), slot, *map(str, executor)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            close_fds=False,  # it inherits the locks
        )
        write_state(f"{slot}.json", {"executor": executor, "bookie": Process.of(self._process.pid)})
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            self._said = errors.read().decode(errors="replace").strip()
        self.served = executor_bookie(executor, settings.metadata, wait_s=0.0) is not None
        self._began = time.monotonic()

    def wait(self, shutdown: Shutdown) -> bool:
        """Wait until it ends, and pass SIGTERM on to it; return whether it ended because it was asked to."""
        with shutdown.watched(self._process.pid):
            while self._process.poll() is None:
                if shutdown.requested(_LOOK_MS):
                    self._process.terminate()
                    self._process.wait()
        return self._process.returncode == 0

    @property
    def is_steady(self) -> bool:
        """True if it has served for long."""
        return self.served and time.monotonic() - self._began >= _STEADY_SECONDS

    @property
    def reason(self) -> str:
        """The reason why it ended."""
        status = self._process.wait()
        if status < 0:
            return f"{signal.Signals(-status).name} killed its process"
        return self._said[-2000:] or f"its process ended with status {status}"


# ---- slots -----------------------------------------------------------------------------------------------------------


def _take_slot(directory: str, executor: Executor) -> str:
    """Lock and return the first free directory on this host for the bookie; the lock is held until both processes end.

    A directory whose executor has ended is claimed: its bookie is asked to end, and waited for.
    """
    os.makedirs(directory, 0o700, exist_ok=True)
    for number in itertools.count():
        slot = os.path.join(directory, f"slot-{number}")
        deadline = time.monotonic() + _FREED_SECONDS
        while (taken := take_lock(f"{slot}.lock")) is None and time.monotonic() < deadline and _is_leaving(slot):
            time.sleep(_RETRY_SECONDS)
        if taken is not None:
            os.set_inheritable(taken, True)
            return slot
    raise AssertionError("there is always another number")


def _is_leaving(slot: str) -> bool:
    """Return whether the executor of a slot has ended; if so, ask its bookie to end."""
    found = read_state(f"{slot}.json")
    if found is None or Process(*found["executor"]).is_alive():
        return False
    bookie = Process(*found["bookie"])
    if bookie.is_alive():
        with suppress(ProcessLookupError):
            os.kill(bookie.pid, signal.SIGTERM)
    return True


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # no thread waits for the supervisor to end
    try:
        sys.exit(supervise(BookieSettings.of(sys.argv[1]), Executor(int(sys.argv[2]), int(sys.argv[3]))))
    except (PybkError, OSError) as error:
        logger.exception("the supervisor of a bookie ends")
        sys.exit(f"{type(error).__name__}: {error}")
