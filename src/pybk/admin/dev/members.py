"""The processes of a local cluster: started in sessions of their own, found again by pid and start time.

A pid alone may be another process's by now, so a member is the process that has its pid *and* began when it did.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pybk.errors import PybkError, UsageError

START_SECONDS: Final = 60.0
"""The time that a process may take to serve, on a busy host, before its start counts as failed."""

STOP_SECONDS: Final = 60.0
"""The time that a process may take to end by itself before it is killed."""

_POLL_SECONDS: Final = 0.01
_LOG_SHOWN: Final = 800

CONSOLE: Final = "console"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process of a local cluster.

    Attributes:
        name: The name of the bookie, or ``console``.
        zone: The zone of the bookie; empty for none.
        address: The address of the bookie; empty for the console, and until it has served.
        http: The URL of its HTTP port; empty until it has served.
        pid: The id of its process; 0 if it was not started.
        began: The start of that process, in clock ticks since the host's boot.
        lost: Whether it was started after its directory was lost, and has not served since.
    """

    name: str
    zone: str = ""
    address: str = ""
    http: str = ""
    pid: int = 0
    began: int = 0
    lost: bool = False

    def state(self) -> str:
        """Return ``running``, ``paused``, or ``stopped``."""
        found = _status(self.pid) if self.pid else None
        if found is None or found[1] != self.began or found[0] in "ZX":
            return "stopped"
        return "paused" if found[0] in "Tt" else "running"

    def is_alive(self) -> bool:
        """Return whether its process exists, paused or not."""
        return self.state() != "stopped"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process.

        Raises:
            UsageError: It does not run.
        """
        if not self.is_alive():
            raise UsageError(f"{self.name} does not run; `pybk dev start {self.name}` starts it")
        os.kill(self.pid, number)


def _status(pid: int) -> tuple[str, int] | None:
    """Return the state of a process and when it began; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            found = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return found[0], int(found[19])


class Started:
    """A process that was started and does not serve yet.

    Args:
        member: The member.
        arguments: The arguments of Python.
        directory: The directory of its log and of its messages.
        environment: Its environment.
    """

    def __init__(
        self, member: Member, arguments: Sequence[str], directory: str, environment: Mapping[str, str]
    ) -> None:
        self.log: Final = os.path.join(directory, f"{member.name}.log")
        self._said = os.path.join(directory, f"{member.name}.ready")
        with open(self.log, "ab") as log, open(self._said, "wb") as said:
            self._log_from = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-P", *arguments],  # the current directory may have modules of any name
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )
        status = _status(self._process.pid)
        assert status is not None, "a child stays until it was waited for"
        self.member: Final = replace(member, pid=self._process.pid, began=status[1])

    def wait(self, until: float) -> dict[str, Any]:
        """Return its message once it serves.

        Args:
            until: The end of the wait, on the monotonic clock.

        Raises:
            PybkError: It ended, or took too long; the text has the end of its log.
        """
        while True:
            with open(self._said, encoding="utf-8") as file:
                line = file.readline()
            if line.endswith("\n"):
                found: dict[str, Any] = json.loads(line)
                return found
            ended = self._process.poll()
            if ended is not None or time.monotonic() > until:
                how = f"ended with status {ended}" if ended is not None else "does not serve yet"
                raise PybkError(f"{self.member.name} {how}; its log, {self.log}, ends with: {self._complaint()}")
            time.sleep(_POLL_SECONDS)

    def _complaint(self) -> str:
        with open(self.log, "rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace").strip()[-_LOG_SHOWN:] or "nothing"


def environment_of_members() -> dict[str, str]:
    """Return the environment of members: without the options that the user's own environment may have."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("PYBK_")}
    # Each process that imports numpy would start threads of OpenBLAS, which nothing here uses.
    found.setdefault("OPENBLAS_NUM_THREADS", "1")
    return found


def stop_all(members: Sequence[Member], report: Callable[[str], None]) -> None:
    """Let members end by themselves; kill those that do not.

    Args:
        members: The members; those that do not run are left out.
        report: Called with a sentence for each one that had to be killed.
    """
    running = [each for each in members if each.is_alive()]
    for each in running:
        for number in (signal.SIGTERM, signal.SIGCONT):  # a paused one gets both once it continues
            each.signal(number)
    until = time.monotonic() + STOP_SECONDS
    while any(each.is_alive() for each in running) and time.monotonic() < until:
        _reap(running)
        time.sleep(_POLL_SECONDS)
    for each in running:
        if each.is_alive():
            report(f"{each.name} did not end within {STOP_SECONDS:g} s, and was killed")
            kill(each)


def kill(member: Member) -> None:
    """Kill a member; return once it has ended.

    Raises:
        UsageError: It does not run.
    """
    member.signal(signal.SIGKILL)
    while member.is_alive():
        _reap([member])
        time.sleep(_POLL_SECONDS)


def _reap(members: Sequence[Member]) -> None:
    """Collect members that are children of this process, because a child that ended exists until it is collected."""
    for each in members:
        try:
            os.waitpid(each.pid, os.WNOHANG)
        except ChildProcessError:
            continue  # it is the child of another process, which collects it
