"""Which executor a Python process of Spark belongs to, and which bookie runs on that executor's behalf.

Theory of operation: a bookie and the tasks of its executor find each other by two small files in a directory of this
user's, named after the executor's JVM and the cluster: a lock, which the bookie's process holds for as long as it
lives, and a state file (``ExecutorBookie`` as JSON), which it writes once it serves. A state file counts only while
the lock is held, so when the process ends, in whatever way, its executor has no bookie any more. Executors are named
by pid and start time, because pids are reused.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Self
from urllib.parse import unquote

from pybk.errors import IllegalOperationError, UsageError
from pybk.ledger import Bookie

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.005
_STATE_BYTES_MAX: Final = 1 << 16
DRIVER: Final = "driver"
"""Name of the executor in the driver's own JVM, with ``local[N]``."""


class Process(NamedTuple):
    """A process on this host.

    Attributes:
        pid: Its number.
        started: When it began, in ticks since the host did, so that a later process of the same number is another.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the process that has a number now.

        Raises:
            IllegalOperationError: None has.
        """
        status = _status(pid)
        if status is None:
            raise IllegalOperationError(f"there is no process {pid}")
        return cls(pid, int(status[19]))

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        status = _status(self.pid)
        return status is not None and int(status[19]) == self.started and status[0] not in (b"Z", b"X")


class Executor(Process):
    """An executor's JVM on this host."""

    __slots__ = ()

    @classmethod
    def of_task(cls) -> Self:
        """Return the executor that this Python process works for.

        Raises:
            IllegalOperationError: This is no Python worker or daemon of Spark.
        """
        return cls.of_daemon() if _is_jvm(os.getppid()) else cls._over(os.getppid())

    @classmethod
    def of_daemon(cls) -> Self:
        """Return the executor that started this very process; raises as ``of_task``."""
        return cls._jvm(os.getppid())

    @classmethod
    def _over(cls, parent: int) -> Self:
        """Return the executor that runs a worker's parent, the daemon that forked the worker."""
        if not any(part.endswith(b"daemon") for part in _command(parent)):
            raise IllegalOperationError(f"process {os.getpid()} is no Python worker of Spark: call this in a task")
        status = _status(parent)
        return cls._jvm(0 if status is None else int(status[1]))

    @classmethod
    def _jvm(cls, pid: int) -> Self:
        if not _is_jvm(pid):
            raise IllegalOperationError(f"process {os.getpid()} has no executor over it: call this in a task of Spark")
        return cls.of(pid)

    @property
    def name(self) -> str:
        """Spark's id of the executor; ``driver`` with ``local[N]``."""
        return self._option("--executor-id") or os.environ.get("SPARK_EXECUTOR_ID", DRIVER)

    @property
    def location(self) -> str | None:
        """Where Spark places tasks that prefer this executor; None if that is not known."""
        host = self._option("--hostname")
        return f"executor_{host}_{self.name}" if host else None

    @property
    def host(self) -> str:
        """What Spark calls this host."""
        return self._option("--hostname") or socket.gethostname()

    def _option(self, option: str) -> str:
        """Return an option of the executor's command line, empty for none."""
        parts = _command(self.pid)
        place = parts.index(option.encode()) + 1 if option.encode() in parts else len(parts)
        return os.fsdecode(parts[place]) if place < len(parts) else ""

    def file(self, metadata: str, kind: str) -> str:
        """Return the path of a file that the executor's bookie and tasks find each other by.

        Args:
            metadata: The URL of the cluster's metadata, in any spelling.
            kind: ``lock`` or ``json``.
        """
        cluster = blake2b(_canonical(metadata).encode(), digest_size=8).hexdigest()
        return os.path.join(_state_directory(), f"executor-{self.pid}-{self.started}-{cluster}.{kind}")


@dataclass(frozen=True, slots=True)
class ExecutorBookie:
    """The bookie of an executor, a process on the same host.

    Attributes:
        executor: Spark's id of the executor; ``driver`` with ``local[N]``.
        location: Where Spark places tasks that prefer the executor; None if that is not known.
        bookie_id: The bookie's name in the cluster.
        instance: Its instance, in hex.
        address: Where it listens.
        directory: What it keeps its entries in.
        pid: Its process.
    """

    executor: str
    location: str | None
    bookie_id: str
    instance: str
    address: str
    directory: str
    pid: int

    @property
    def bookie(self) -> Bookie:
        """The bookie as ledgers' metadata name it."""
        return Bookie(self.bookie_id, bytes.fromhex(self.instance))

    def write(self, path: str) -> None:
        """Say so in a file, for tasks to find."""
        write_state(path, asdict(self))


def executor_bookie(executor: Executor, metadata: str, wait_s: float = _WAIT_SECONDS) -> ExecutorBookie | None:
    """Return an executor's bookie in a cluster.

    Args:
        executor: The executor, on this host.
        metadata: The URL of the cluster's metadata, in any spelling.
        wait_s: How long to wait for one that is starting, seconds.

    Returns:
        The bookie; None if there is none.

    Cost: 0.1 ms.
    """
    lock, state = executor.file(metadata, "lock"), executor.file(metadata, "json")
    until = time.monotonic() + wait_s
    while is_locked(lock):
        found = read_state(state)
        if found is not None:
            return ExecutorBookie(**found)
        if time.monotonic() > until:
            return None
        time.sleep(_LOOK_SECONDS)
    return None


def local_bookie(metadata: str) -> ExecutorBookie | None:
    """Return the bookie, in a cluster, of the executor that this task runs on.

    None also outside of a task, or if its files cannot be read, which is logged: the task continues without one.
    """
    try:
        return executor_bookie(Executor.of_task(), metadata)
    except IllegalOperationError:
        return None
    except (UsageError, OSError) as error:
        logger.warning("whether this executor has a bookie is not known, so none is used: %s", error)
        return None


def _canonical(metadata: str) -> str:
    """Return a metadata URL in the one spelling that stands for all that name the same place."""
    scheme, _, rest = metadata.partition("?")[0].partition("://")
    hosts, _, path = rest.partition("/")
    if scheme.lower() == "lmdb":
        path = os.path.normpath(unquote(path).lstrip("/"))
    return f"{scheme.lower()}://{','.join(sorted(hosts.lower().split(',')))}/{path.strip('/')}"


# ---- files ---------------------------------------------------------------------------------------------------------


def _state_directory() -> str:
    """Return the directory of this user's for files that do not outlive the host's uptime, made if it is missing.

    Raises:
        UsageError: Another user owns it, or other users may open it.
    """
    path = os.path.join(tempfile.gettempdir(), f"pybk-{os.getuid()}")
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(
                f"{path} is no directory of this user's alone: remove it, or set TMPDIR to another place"
            ) from None
    return path


def take_lock(path: str) -> int | None:
    """Take the lock of a file, made if it is missing; processes that inherit the descriptor share the lock.

    Returns:
        The descriptor to close; None if another process has it.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                return fd
        os.close(fd)  # it was removed meanwhile, so the next process locks another file


def is_locked(path: str) -> bool:
    """Return whether a process holds the lock of a file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def write_state(path: str, state: dict[str, Any]) -> None:
    """Replace a file's contents."""
    new = f"{path}.{os.getpid()}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(state, file)
    os.replace(new, path)


def read_state(path: str) -> dict[str, Any] | None:
    """Return a file's contents; None if there is no such file."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(_STATE_BYTES_MAX) or b"null")
    except FileNotFoundError:
        return None
    return found if isinstance(found, dict) else None


# ---- processes -------------------------------------------------------------------------------------------------------


def _status(pid: int) -> list[bytes] | None:
    """Return the fields of ``/proc/<pid>/stat`` after the command's name; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def _command(pid: int) -> list[bytes]:
    """Return the command line of a process; empty if there is none."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _is_jvm(pid: int) -> bool:
    return any(os.path.basename(part) == b"java" for part in _command(pid)[:1])
