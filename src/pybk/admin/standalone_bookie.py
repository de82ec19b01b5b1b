"""A process that is a bookie, and repairs its cluster, until it is stopped.

| signal | what happens |
|---|---|
| SIGTERM, SIGINT | the bookie drains and closes; the second one ends the drain |
| SIGHUP | secrets, tokens, certificates, options and the log level are read again |
| SIGUSR1 | the stacks of all threads are written to the standard error |

While it drains, the bookie is registered as read-only and refuses the entries of writers, which then replace it by
another bookie; it still serves reads. The drain ends once no add has come for ``drain_idle_s``, or after ``drain_s``.
Then the bookie makes a checkpoint, with which the next start reads little, removes its registration and closes.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.admin import service_log
from pybk.admin.bookie_options import BookieSettings
from pybk.admin.http.extra import missing
from pybk.admin.http_options import HttpSettings
from pybk.admin.sd_notify import notify, reloading
from pybk.admin.signals import STOPS, Signals
from pybk.bookie.server import SWITCH_SECONDS, BookieServer
from pybk.client.backend import ClusterBackend
from pybk.errors import CookieError, MetadataUnreachableError, PybkError
from pybk.log_events import log_event
from pybk.manager.connect import join
from pybk.manager.ledger_manager import LedgerManager
from pybk.metrics import code_of
from pybk.version import __version__

if TYPE_CHECKING:  # a bookie without an HTTP port starts without the modules of one
    from pybk.admin.http.server import AdminServer

logger = logging.getLogger(__name__)

_CHECK_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 2.0
"""The pause of the start after a try in which the metadata store could not be reached."""


class _Watchdog:
    """Reports to systemd that a bookie works, as long as its serving thread turns."""

    def __init__(self, bookie: BookieServer) -> None:
        self._bookie = bookie
        self._turned_ns = 0

    def look(self) -> None:
        """Report a turn since the last look."""
        if self._bookie.turned_ns != self._turned_ns:
            self._turned_ns = self._bookie.turned_ns
            notify("WATCHDOG=1")


class _Served(NamedTuple):
    """The servers of this process.

    Attributes:
        backend: The client, which the bookie uses for repairs.
        bookie: The bookie.
        http: Its HTTP port, if it has one.
    """

    backend: ClusterBackend
    bookie: BookieServer
    http: AdminServer | None


def serve(
    settings: BookieSettings,
    *,
    ready: Callable[[BookieServer, str], None],
    reload: Callable[[], BookieSettings] | None = None,
) -> bool:
    """Serve as a bookie until SIGTERM or SIGINT, then close it. Takes over these signals, SIGHUP and SIGUSR1.

    A signal that comes while the bookie is starting takes effect as soon as it has started.

    Args:
        settings: The settings of the bookie.
        ready: Called once it serves, with the URL of its HTTP port; an empty one if it has none.
        reload: Returns the new settings, at SIGHUP; None if they never change.

    Returns:
        True if a signal ended it, False if an error did, which is logged.

    Raises:
        PybkError: It cannot start, another process has its name by now, or it was removed from the cluster.

    Threads: the main thread, because signal handlers are set.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    began = time.monotonic()
    signals = Signals()
    logger.info(
        "a bookie starts in %s, with pybk %s",
        settings.directory,
        __version__,
        extra=log_event("bookie.starting", directory=settings.directory, version=__version__),
    )
    settings = replace(settings, http=_checked_http(settings))
    backend = _joined(settings, signals)
    if backend is None:
        return True
    with ExitStack() as stack:
        stack.enter_context(closing(backend))
        bookie = backend.bookie
        assert isinstance(bookie, BookieServer), "joining opens one"
        http = None if settings.http is None else settings.http.serve(LedgerManager(backend), bookie)
        if http is not None:
            stack.callback(http.close)
        fields = {"bookie": str(bookie.bookie), "addresses": list(bookie.addresses), "took_ms": _since(began)}
        logger.info(
            "bookie %s serves at %s",
            bookie.bookie,
            ", ".join(bookie.addresses),
            extra=log_event("bookie.started", **fields),
        )
        ready(bookie, "" if http is None else http.url)
        notify("READY=1", f"STATUS=bookie {bookie.bookie.bookie_id} serves at {', '.join(bookie.addresses)}")
        _run(settings, reload, signals, _Served(backend, bookie, http))
        error, stopping = bookie.error, time.monotonic()
        notify("STOPPING=1")
        logger.info("bookie %s closes", bookie.bookie, extra=log_event("bookie.stopping", bookie=str(bookie.bookie)))
    fields = {"bookie": str(bookie.bookie), "took_ms": _since(stopping)}
    logger.info("bookie %s has stopped", bookie.bookie, extra=log_event("bookie.stopped", **fields))
    if isinstance(error, CookieError):
        raise error
    return error is None


def _checked_http(settings: BookieSettings) -> HttpSettings | None:
    """Return where it serves HTTP; None, with a warning, if the packages for that are not installed."""
    if settings.http is None:
        return None
    settings.http.check_for_bookie()
    if said := missing():
        logger.warning("the bookie serves clients, but its HTTP port does not serve: %s", said)
        return None
    return settings.http


def _since(began: float) -> int:
    return round((time.monotonic() - began) * 1000)


def _joined(settings: BookieSettings, signals: Signals) -> ClusterBackend | None:
    """Start the bookie; None if a signal ended the wait for a metadata store that cannot be reached."""
    until = time.monotonic() + settings.start_wait_s
    while True:
        try:
            return join(
                settings.directory,
                settings.listen,
                settings.metadata,
                settings.secret,
                settings.config,
                tiers=settings.tiers,
                bookie_id=settings.bookie_id,
                rack=settings.rack,
                advertise=settings.advertise,
                advertise_check=settings.advertise_check,
                moved=settings.moved,
                replace_lost=settings.replace,
            )
        except MetadataUnreachableError as error:
            if time.monotonic() + RETRY_SECONDS >= until:
                raise
            fields = {"directory": settings.directory, "code": code_of(error)}
            logger.warning("the start is tried again: %s", error, extra=log_event("bookie.waiting", **fields))
            if signals.wait(RETRY_SECONDS) in STOPS:
                return None


def _run(
    settings: BookieSettings,
    reload: Callable[[], BookieSettings] | None,
    signals: Signals,
    served: _Served,
) -> None:
    """Obey signals until one of them, or an error of the bookie, ends it."""
    bookie = served.bookie
    watchdog = _Watchdog(bookie)
    while bookie.serving:
        number = signals.wait(_CHECK_SECONDS)
        if number in STOPS:
            _drain(settings, signals, watchdog, bookie)
            return
        if number == signal.SIGHUP:
            reloading()
            _reload(settings, reload, served)
            notify("READY=1")
        watchdog.look()


# ---- the reload ----------------------------------------------------------------------------------------------------


def _reload(began_with: BookieSettings, reload: Callable[[], BookieSettings] | None, served: _Served) -> None:
    """Read secrets, tokens, certificates and options again; what cannot be read stays as it was.

    Of tokens and certificates the files are read that were named at the start. Other names take effect at the next
    start, as most options do: half of them now would mix a new key with an old certificate.
    """
    bookie = served.bookie
    try:
        service_log.set_level((began_with if reload is None else reload()).log_level)
        served.backend.membership.metadata.refresh_keys()
        if served.http is not None and began_with.http is not None:
            served.http.reload(began_with.http.read_tokens())
    except PybkError as error:
        fields = {"bookie": str(bookie.bookie), "code": code_of(error)}
        logger.error("not everything could be reloaded: %s", error, extra=log_event("bookie.reload_failed", **fields))
        return
    logger.info("bookie %s was reloaded", bookie.bookie, extra=log_event("bookie.reloaded", bookie=str(bookie.bookie)))


# ---- the drain -----------------------------------------------------------------------------------------------------


def _drain(settings: BookieSettings, signals: Signals, watchdog: _Watchdog, bookie: BookieServer) -> None:
    """Let writers leave, and make a checkpoint; a second signal ends this."""
    if not settings.drain_s:
        return
    began = time.monotonic()
    named = {"bookie": str(bookie.bookie)}
    notify("STOPPING=1", f"STATUS=bookie {bookie.bookie.bookie_id} drains")
    logger.info(
        "bookie %s lets writers leave, for %g s at most; another signal closes it at once",
        bookie.bookie,
        settings.drain_s,
        extra=log_event("bookie.draining", **named),
    )
    try:
        bookie.keeper.retire()
    except (PybkError, OSError) as error:
        logger.warning("bookie %s cannot be registered as read-only: %s", bookie.bookie, error)
    while bookie.serving:
        now = time.monotonic()
        idle_since = max(began, bookie.last_add_ns / 1e9)
        left = min(began + settings.drain_s, idle_since + settings.drain_idle_s) - now
        if left <= 0:
            break
        if signals.wait(min(left, _CHECK_SECONDS)) in STOPS:
            return
        watchdog.look()
    _checkpoint(bookie)
    fields = {**named, "took_ms": _since(began)}
    logger.info("bookie %s is drained", bookie.bookie, extra=log_event("bookie.drained", **fields))


def _checkpoint(bookie: BookieServer) -> None:
    """Make the next start quick; without a checkpoint it reads more, and nothing is lost."""
    try:
        bookie.replicas.store.scheduler.checkpoint()
    except (PybkError, OSError) as error:
        logger.warning("bookie %s ends without a checkpoint: %s", bookie.bookie, error)
