"""A bookie by itself: it serves until it is told to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Final

from pybk.bookie.server import BookieServer
from pybk.config import StoreConfig
from pybk.connect import open_cluster
from pybk.errors import PybkError

_LOOK_SECONDS: Final = 1.0


def serve(
    root: str,
    listen: Sequence[str],
    url: str,
    secret: bytes | None,
    *,
    bookie_id: str | None,
    advertise: Sequence[str],
    rack: str,
    moved: bool,
    replace: bool,
    ready: Callable[[BookieServer], None],
) -> None:
    """Serve as a bookie until SIGTERM or SIGINT, then close; call it in the main thread.

    A signal that comes while the directory is opened ends it as soon as it is open.

    Args:
        root: The bookie's directory.
        listen: Addresses; the first is the one that others are told.
        url: Where the cluster's metadata is.
        secret: The cluster's, None for none.
        bookie_id: The bookie's name; None keeps that of the directory, or makes one.
        advertise: Addresses that others are told instead of those listened on, none for the same.
        rack: Where it stands.
        replace: It takes the name of a bookie whose directory is lost for good.
        moved: Its directory was moved since its last start, not copied.
        ready: Called once it serves.

    Raises:
        PybkError: It cannot begin, or ended by itself, which is logged.
    """
    # Not an Event: its own lock may be held by what the handler interrupts.
    told = threading.Lock()
    told.acquire()

    def end(*_: object) -> None:
        if told.locked():
            told.release()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with ExitStack() as stack:
        metadata, keys = open_cluster(url, secret, create=True)
        stack.callback(metadata.close)
        bookie = BookieServer.open(
            root,
            listen,
            metadata=metadata,
            keys=keys,
            config=StoreConfig(),
            bookie_id=bookie_id,
            rack=rack,
            advertise=advertise,
            moved=moved,
            replace_lost=replace,
        )
        stack.enter_context(closing(bookie))
        ready(bookie)
        while not told.acquire(timeout=_LOOK_SECONDS):
            if not bookie.serving:
                raise PybkError(f"bookie {bookie.bookie} serves no more; the error is logged above")
