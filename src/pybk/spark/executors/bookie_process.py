"""The process of an executor's bookie: serves until the executor ends or SIGTERM arrives.

``python -m pybk.spark.executors.bookie_process SETTINGS SLOT PID STARTED`` is started by the supervisor, whose locks it
inherits. If the bookie cannot start, it writes the reason to its standard error; once it serves, it closes standard
error without output. It also repairs its cluster in the background, as every bookie does, so the entries of an executor
that was lost are copied from their other bookies.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import sys
import time
from contextlib import ExitStack
from typing import Final
from urllib.parse import urlsplit

from pybk.bookie.server import SWITCH_SECONDS, BookieServer
from pybk.errors import PybkError, UsageError
from pybk.manager.connect import join
from pybk.manager.ledger_manager import LedgerManager
from pybk.options.bookie import config_of, rack_of
from pybk.spark.executors.bookie_settings import BookieSettings
from pybk.spark.executors.configuration import resolve_for, tiers_in
from pybk.spark.executors.departure import Departure
from pybk.spark.executors.detached_process import Shutdown, detach, log_to
from pybk.spark.executors.executor import Executor, ExecutorBookie, forget

logger = logging.getLogger(__name__)

_LOOK_MS: Final = 1_000
_NAME_BYTES: Final = 2


def main(settings: BookieSettings, slot: str, executor: Executor) -> None:
    """Serve as the bookie of an executor until the executor ends or SIGTERM arrives; the process must end afterwards.

    Args:
        settings: The settings of the bookie.
        slot: The directory of the bookie.
        executor: The executor.

    Raises:
        PybkError, OSError: The bookie cannot start, or has stopped serving.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    state = executor.file(settings.metadata, "json")
    with ExitStack() as stack:
        shutdown = Shutdown(executor)
        log_to(f"{slot}.log")
        options = resolve_for(settings, os.environ)
        backend = join(
            slot,
            [f"tcp://{own_host(settings.metadata)}:*"],
            settings.metadata,
            settings.secret,
            config_of(options),
            tiers=tiers_in(options, slot),
            bookie_id=None if os.path.exists(slot) else _name(executor, slot),
            rack=rack_of({name: each.value for name, each in options.items()}),
        )
        manager = stack.enter_context(LedgerManager(backend))
        bookie = backend.bookie
        assert isinstance(bookie, BookieServer), "joining opens one"
        departure = Departure(manager, bookie, backend.membership.metadata, slot)
        departure.cancel()
        stack.callback(forget, state)
        ExecutorBookie(
            executor=executor.name(),
            location=executor.location(),
            bookie_id=bookie.bookie.bookie_id,
            instance=bookie.bookie.instance.hex(),
            address=bookie.addresses[0],
            directory=slot,
            pid=os.getpid(),
        ).write(state)
        detach(f"{slot}.log")
        _serve(bookie, shutdown, departure, settings.linger_s)


def _serve(bookie: BookieServer, shutdown: Shutdown, departure: Departure, linger_s: float) -> None:
    """Serve until SIGTERM, or after the executor's end until the bookie is drained, for ``linger_s`` at most."""
    until: float | None = None
    while not shutdown.requested(_LOOK_MS):
        if not bookie.serving:
            raise PybkError(f"{bookie.bookie} serves no more; the error is logged above")
        if until is None and shutdown.executor_ended:
            until = time.monotonic() + linger_s
            if linger_s:
                departure.begin(linger_s)
        if until is not None and (time.monotonic() >= until or departure.is_complete):
            return


def _name(executor: Executor, slot: str) -> str:
    """Return an unused name for a new bookie, because the name of a lost directory would promise its lost entries."""
    return f"{executor.host()}-{os.path.basename(slot)}-{secrets.token_hex(_NAME_BYTES)}"


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


if __name__ == "__main__":
    try:
        main(BookieSettings.of(sys.argv[1]), sys.argv[2], Executor(int(sys.argv[3]), int(sys.argv[4])))
    except (PybkError, OSError) as error:
        logger.exception("the bookie ends")
        sys.exit(f"{type(error).__name__}: {error}")
