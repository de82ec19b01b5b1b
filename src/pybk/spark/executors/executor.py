"""The executor of a Python process of Spark, and the bookie of that executor.

Theory of operation: a bookie and the tasks of its executor find each other by two small files in a directory of the
user, named after the executor's JVM and the cluster: a lock file, which the bookie's supervisor and process keep locked
as long as they live, and a state file (``ExecutorBookie`` as JSON), written once the bookie serves. It is valid while
the lock is held, so an executor has no bookie from the moment when the processes of the bookie have ended, for whatever
reason. A supervisor that starts a bookie again writes the reason (``DOWN``) instead. Executors are named by pid and
start time, because pids are reused.
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
from pybk.ledger.ledger_metadata import Bookie

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.1
"""Seconds between two looks for what a call waits for."""

_WAIT_SECONDS: Final = 5.0
_STATE_LOOK_SECONDS: Final = 0.005
_STATE_BYTES_MAX: Final = 1 << 16
DOWN: Final = "down"
"""The key in a state file that has the reason why the bookie does not serve now, and is started again."""

DRIVER: Final = "driver"
"""The name of the executor in the driver's own JVM, with ``local[N]``."""


class Process(NamedTuple):
    """A process on this host.

    Attributes:
        pid: The process id.
        started: The start time, in clock ticks since the host's boot; it distinguishes processes that reuse a pid.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the process that has this pid now.

        Raises:
            IllegalOperationError: The process does not exist.
        """
        status = _status(pid)
        if status is None:
            raise IllegalOperationError(f"there is no process {pid}")
        return cls(pid, int(status[19]))

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        status = _status(self.pid)
        return status is not None and int(status[19]) == self.started and status[0] not in (b"Z", b"X")


class Executor(Process):
    """An executor's JVM on this host."""

    __slots__ = ()

    @classmethod
    def of_task(cls) -> Self:
        """Return the executor of this Python worker.

        Raises:
            IllegalOperationError: This process is not a Python worker of Spark.
        """
        return cls.of_daemon() if _is_jvm(os.getppid()) else cls._over(os.getppid())

    @classmethod
    def of_daemon(cls) -> Self:
        """Return the executor that started this daemon; raises as ``of_task``."""
        return cls._jvm(os.getppid())

    @classmethod
    def _over(cls, parent: int) -> Self:
        """Return the executor that runs a worker's parent, the daemon that forked the worker."""
        if not any(part.endswith(b"daemon") for part in _command(parent)):
            raise IllegalOperationError(f"process {os.getpid()} is not a Python worker of Spark: call this in a task")
        status = _status(parent)
        return cls._jvm(0 if status is None else int(status[1]))

    @classmethod
    def _jvm(cls, pid: int) -> Self:
        if not _is_jvm(pid):
            raise IllegalOperationError(f"process {os.getpid()} has no executor over it: call this in a task of Spark")
        return cls.of(pid)

    def name(self) -> str:
        """Return the executor's id in Spark; ``driver`` with ``local[N]``."""
        return self._option("--executor-id") or os.environ.get("SPARK_EXECUTOR_ID", DRIVER)

    def location(self) -> str | None:
        """Return the location by which Spark places tasks on this executor; None if it is not known."""
        host = self._option("--hostname")
        return f"executor_{host}_{self.name()}" if host else None

    def host(self) -> str:
        """Return the name of this host in Spark."""
        return self._option("--hostname") or socket.gethostname()

    def _option(self, option: str) -> str:
        """Return the value of an option in the executor's command line; empty if it is missing."""
        parts = _command(self.pid)
        place = parts.index(option.encode()) + 1 if option.encode() in parts else len(parts)
        return os.fsdecode(parts[place]) if place < len(parts) else ""

    def file(self, metadata: str, kind: str) -> str:
        """Return the path of the lock file or state file of the executor's bookie.

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
        executor: The executor's id in Spark; ``driver`` with ``local[N]``.
        location: The location by which Spark places tasks on the executor; None if it is not known.
        bookie_id: The bookie's name in the cluster.
        instance: The bookie's instance, in hex.
        address: The address at which the bookie listens.
        directory: The directory of the bookie.
        pid: The id of the bookie's process.
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
        """The bookie as in the metadata of ledgers."""
        return Bookie(self.bookie_id, bytes.fromhex(self.instance))

    def write(self, path: str) -> None:
        """Write the state file, which tasks read."""
        write_state(path, asdict(self))


def executor_bookie(executor: Executor, metadata: str, wait_s: float = _WAIT_SECONDS) -> ExecutorBookie | None:
    """Return an executor's bookie in a cluster.

    Args:
        executor: The executor, on this host.
        metadata: The URL of the cluster's metadata, in any spelling.
        wait_s: Seconds to wait for a bookie that is starting for the first time.

    Returns:
        The bookie; None if the executor has none, or it is started again after it ended.

    Cost: 0.1 ms.
    """
    lock, state = executor.file(metadata, "lock"), executor.file(metadata, "json")
    until = time.monotonic() + wait_s
    while is_locked(lock):
        found = read_state(state)
        if found is not None:
            return None if DOWN in found else ExecutorBookie(**found)
        if time.monotonic() > until:
            return None
        time.sleep(_STATE_LOOK_SECONDS)
    return None


def local_bookie(metadata: str) -> ExecutorBookie | None:
    """Return the bookie, in a cluster, of the executor that this task runs on.

    The result is also None outside of a task, or if its files cannot be read, which is logged: the task continues
    without a bookie.
    """
    try:
        return executor_bookie(Executor.of_task(), metadata)
    except IllegalOperationError:
        return None
    except (UsageError, OSError) as error:
        logger.warning("whether this executor has a bookie is not known, so none is used: %s", error)
        return None


def _canonical(metadata: str) -> str:
    """Return a metadata URL in one spelling, which is equal for all URLs of the same place."""
    scheme, _, rest = metadata.partition("?")[0].partition("://")
    hosts, _, path = rest.partition("/")
    if scheme.lower() == "lmdb":
        path = os.path.normpath(unquote(path).lstrip("/"))
    return f"{scheme.lower()}://{','.join(sorted(hosts.lower().split(',')))}/{path.strip('/')}"


# ---- files ---------------------------------------------------------------------------------------------------------


def _state_directory() -> str:
    """Return this user's directory for lock and state files, which are not needed after a reboot; make it if missing.

    Raises:
        UsageError: Another user owns the directory, or other users have access to it.
    """
    path = os.path.join(tempfile.gettempdir(), f"pybk-{os.getuid()}")
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(
                f"{path} is not a directory that only this user can access: remove it, or set TMPDIR to another place"
            ) from None
    return path


def take_lock(path: str) -> int | None:
    """Lock a file, and create it if it is missing; processes that inherit the descriptor share the lock.

    Returns:
        The descriptor, to be closed by the caller; None if another process holds the lock.
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
        os.close(fd)  # the file was removed meanwhile, so another process would lock another file of this name


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
    """Replace the contents of a file in one step."""
    new = f"{path}.{os.getpid()}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(state, file)
    os.replace(new, path)


def forget(path: str) -> None:
    """Remove a lock file or state file, if it exists."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def read_state(path: str) -> dict[str, Any] | None:
    """Return the contents of a file; None if it does not exist."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(_STATE_BYTES_MAX) or b"null")
    except FileNotFoundError:
        return None
    return found if isinstance(found, dict) else None


# ---- processes -------------------------------------------------------------------------------------------------------


def _status(pid: int) -> list[bytes] | None:
    """Return the fields of ``/proc/<pid>/stat`` after the command's name; None if the process does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def _command(pid: int) -> list[bytes]:
    """Return the command line of a process; empty if the process does not exist."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _is_jvm(pid: int) -> bool:
    return any(os.path.basename(part) == b"java" for part in _command(pid)[:1])
