"""The process of an executor's bookie: serves until the executor ends or SIGTERM arrives.

``python -m pybk.spark.executors.bookie_process SETTINGS PID STARTED`` inherits the locked descriptor of the executor's
lock file from the task that starts it. If the bookie cannot start, it writes the reason to its standard error; once it
serves, it closes standard error without output.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import os
import secrets
import select
import signal
import socket
import sys
import time
from contextlib import ExitStack, closing, suppress
from typing import Final
from urllib.parse import urlsplit

from pybk.bookie.server import BookieServer
from pybk.config import StoreConfig
from pybk.errors import PybkError, UsageError
from pybk.manager.connect import open_cluster_for
from pybk.spark.executors.bookies import BookieSettings
from pybk.spark.executors.executor import Executor, ExecutorBookie, Process, read_state, take_lock, write_state

logger = logging.getLogger(__name__)

_LOOK_MS: Final = 1_000
_FREED_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 0.02
_NAME_BYTES: Final = 2


def main(settings: BookieSettings, executor: Executor) -> None:
    """Serve as the bookie of an executor until the executor ends or SIGTERM arrives; the process must end afterwards.

    Args:
        settings: The settings of the bookie.
        executor: The executor.

    Raises:
        PybkError, OSError: The bookie cannot start, or has stopped serving.
    """
    with ExitStack() as stack:
        stack.callback(_forget, executor, settings.metadata, "lock")
        end = _Shutdown(executor)
        place = _take_slot(settings.directory, executor)
        _log_to(f"{place}.log")
        metadata, keys = open_cluster_for(place, settings.metadata, settings.secret)
        stack.callback(metadata.close)
        bookie = BookieServer.open(
            place,
            [f"tcp://{own_host(settings.metadata)}:*"],
            metadata=metadata,
            keys=keys,
            config=StoreConfig(),
            bookie_id=None if os.path.exists(place) else _name(executor, place),
            rack=settings.rack,
        )
        stack.enter_context(closing(bookie))
        stack.callback(_forget, executor, settings.metadata, "json")
        ExecutorBookie(
            executor=executor.name(),
            location=executor.location(),
            bookie_id=bookie.bookie.bookie_id,
            instance=bookie.bookie.instance.hex(),
            address=bookie.addresses[0],
            directory=place,
            pid=os.getpid(),
        ).write(executor.file(settings.metadata, "json"))
        _detach(f"{place}.log")
        _serve(bookie, end, settings.linger_s)


def _serve(bookie: BookieServer, end: _Shutdown, linger_s: float) -> None:
    """Serve until SIGTERM or the executor's end; after the latter, serve reads for ``linger_s``, for re-replication."""
    retired_until: float | None = None
    while not end.requested(_LOOK_MS):
        if not bookie.serving:
            raise PybkError(f"{bookie.bookie} serves no more; the error is logged above")
        if retired_until is None and end.executor_ended:
            retired_until = time.monotonic() + linger_s
            if linger_s:
                _retire(bookie)
        if retired_until is not None and time.monotonic() >= retired_until:
            return


def _retire(bookie: BookieServer) -> None:
    try:
        bookie.retire()
    except PybkError as error:
        logger.warning("%s is not registered as read-only yet: %s", bookie.bookie, error)


class _Shutdown:
    """Waits for the two events that end the process: SIGTERM, and the end of the executor."""

    def __init__(self, executor: Executor) -> None:
        self._requested = os.eventfd(0, os.EFD_CLOEXEC)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os.eventfd_write(self._requested, 1))
        self._poll = select.poll()
        self._poll.register(self._requested, select.POLLIN)
        self._executor: int | None = None
        with suppress(ProcessLookupError):
            self._executor = os.pidfd_open(executor.pid)
        self.executor_ended = self._executor is None or not executor.is_alive()
        if self._executor is not None:
            self._poll.register(self._executor, select.POLLIN)

    def requested(self, wait_ms: int) -> bool:
        """Wait for either event; return whether SIGTERM arrived."""
        found = [fd for fd, _ in self._poll.poll(wait_ms)]
        if self._executor in found:
            self.executor_ended = True
            self._poll.unregister(self._executor)
        return self._requested in found


# ---- slots -----------------------------------------------------------------------------------------------------------


def _take_slot(directory: str, executor: Executor) -> str:
    """Lock and return the first free directory on this host for the bookie; the lock is held until the process ends.

    A directory whose executor has ended is claimed: its bookie is asked to end, and waited for.
    """
    os.makedirs(directory, 0o700, exist_ok=True)
    for number in itertools.count():
        place = os.path.join(directory, f"slot-{number}")
        deadline = time.monotonic() + _FREED_SECONDS
        while (taken := take_lock(f"{place}.lock")) is None and time.monotonic() < deadline and _is_leaving(place):
            time.sleep(_RETRY_SECONDS)
        if taken is not None:
            write_state(f"{place}.json", {"executor": executor, "bookie": Process.of(os.getpid())})
            return place
    raise AssertionError("there is always another number")


def _is_leaving(place: str) -> bool:
    """Return whether the executor of a slot has ended; if so, ask its bookie to end."""
    found = read_state(f"{place}.json")
    if found is None or Process(*found["executor"]).is_alive():
        return False
    bookie = Process(*found["bookie"])
    if bookie.is_alive():
        with suppress(ProcessLookupError):
            os.kill(bookie.pid, signal.SIGTERM)
    return True


def _name(executor: Executor, place: str) -> str:
    """Return an unused name for a new bookie, because the name of a lost directory would promise its lost entries."""
    return f"{executor.host()}-{os.path.basename(place)}-{secrets.token_hex(_NAME_BYTES)}"


def own_host(metadata: str) -> str:
    """Return the address of this host at which other hosts can reach it.

    Raises:
        UsageError: ZooKeeper can be reached by IPv6 only, but bookies listen on IPv4.
        OSError: The address of ZooKeeper cannot be resolved, or no route leads to it.
    """
    parts = urlsplit(metadata)
    if parts.scheme == "lmdb":
        return "127.0.0.1"
    host, _, port = parts.netloc.partition(",")[0].rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    there = {family: address for family, _, _, _, address in reversed(found)}
    if socket.AF_INET not in there:
        if ipaddress.ip_address(there[socket.AF_INET6][0]).is_loopback:
            return "127.0.0.1"
        raise UsageError(f"{host} has an IPv6 address only, and bookies listen on IPv4: name ZooKeeper by an IPv4 one")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(there[socket.AF_INET])  # sends nothing, but selects the local address of the route
        return str(probe.getsockname()[0])


# ---- the process -----------------------------------------------------------------------------------------------------


def _forget(executor: Executor, metadata: str, kind: str) -> None:
    """Remove the state file, by which tasks find the bookie."""
    with suppress(FileNotFoundError):
        os.unlink(executor.file(metadata, kind))


def _log_to(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    logging.basicConfig(filename=path, format="%(asctime)s %(levelname)s %(message)s")


def _detach(log: str) -> None:
    """Close the pipes to the starting process, which then returns, and send later output to the log."""
    for fd, path, flags in ((1, os.devnull, os.O_WRONLY), (2, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, fd)
        os.close(opened)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # no thread waits for the bookie to end
    try:
        main(BookieSettings.of(sys.argv[1]), Executor(int(sys.argv[2]), int(sys.argv[3])))
    except (PybkError, OSError) as error:
        logger.exception("the bookie ends")
        sys.exit(f"{type(error).__name__}: {error}")
