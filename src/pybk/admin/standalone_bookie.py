"""A process that is a bookie, and repairs its cluster, until SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final

from pybk.bookie.server import BookieServer
from pybk.config import StoreConfig
from pybk.connect import join
from pybk.credentials import ClusterSecret
from pybk.errors import PybkError

_CHECK_SECONDS: Final = 1.0

_SWITCH_SECONDS: Final = 0.0005
"""How long a thread may keep the interpreter while another one wants it.

Python's default, 5 ms, is several times what an append takes, and the serving thread waits for threads that repair.
"""


def serve(
    root: str,
    listen: Sequence[str],
    url: str,
    secret: ClusterSecret | None,
    *,
    bookie_id: str | None,
    advertise: Sequence[str],
    rack: str,
    moved: bool,
    replace: bool,
    ready: Callable[[BookieServer], None],
) -> None:
    """Serve as a bookie until SIGTERM or SIGINT, then close it. Takes over both signals of the process.

    A signal that comes while the bookie is starting takes effect as soon as it has started.

    Args:
        root: The bookie's directory.
        listen: Addresses to listen on; the first is registered for clients unless ``advertise`` is given.
        url: Where the cluster's metadata is.
        secret: The cluster's, None for none.
        bookie_id: The bookie's name; None for that of the directory, or a new one if the directory is new.
        advertise: Addresses to register for clients instead of ``listen``; empty for the same.
        rack: Where it stands.
        replace: Whether it takes the name of a bookie whose directory is lost for good.
        moved: Whether its directory was moved since its last start, not copied.
        ready: Called once it serves.

    Raises:
        PybkError: It cannot start, or stopped serving because of an error, which is logged.

    Threads: the main thread, because signal handlers are set.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    # A lock and not an Event: an Event's set() takes a lock that the interrupted wait() may hold.
    stop = threading.Lock()
    stop.acquire()

    def end(*_: object) -> None:
        if stop.locked():
            stop.release()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    backend = join(
        root,
        listen,
        url,
        secret,
        StoreConfig(),
        bookie_id=bookie_id,
        rack=rack,
        advertise=advertise,
        moved=moved,
        replace_lost=replace,
    )
    with closing(backend):
        bookie = backend.bookie
        assert isinstance(bookie, BookieServer), "joining opens one"
        ready(bookie)
        while not stop.acquire(timeout=_CHECK_SECONDS):
            if not bookie.serving:
                raise PybkError(f"bookie {bookie.bookie} serves no more; the error is logged above")
