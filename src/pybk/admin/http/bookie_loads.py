"""The loads and events of a cluster's bookies, from their HTTP ports.

Only a bookie's own process knows its rates. So a process that shows the whole cluster asks each of them, once in
``LOADS_SECONDS``, in threads of its own: so a bookie that does not answer, or sends a byte now and then, does not delay
the verdict, and delays other bookies by at most ``ANSWER_SECONDS``.
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from pybk.admin.http.events import Events
from pybk.admin.http.rates import Load, decode_load
from pybk.admin.http.timed_connection import TimedConnection
from pybk.errors import PybkError
from pybk.threads import start_thread

logger = logging.getLogger(__name__)

LOADS_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 2.0
"""The time that a bookie may take to connect, and then to send its answer."""

FRESH_SECONDS: Final = 8.0
"""The time for which a load is valid; afterwards the bookie's rates are unknown."""

_AT_ONCE: Final = 8
_ANSWER_BYTES_MAX: Final = 1 << 20

_NO_LOAD: Final = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
"""The error for an answer that is not a load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookiePorts:
    """The HTTP ports of the bookies, and the requests to them.

    Attributes:
        urls: Returns their URLs by the names of the bookies; called every other second, in a thread.
        token: A token with the scope ``read``; empty if none is needed, as on loopback.
        context: The context that checks the certificates of ``https`` URLs; None for the authorities of the system.
    """

    urls: Callable[[], Mapping[str, str]]
    token: str = field(default="", repr=False)
    context: ssl.SSLContext | None = None


class _Known(NamedTuple):
    """The last load of a bookie with its time, and the bookie's last event."""

    load: Load | None = None
    came: float = float("-inf")
    last_event: int = 0


class BookieLoads:
    """Asks the bookies until ``close``.

    Args:
        ports: Their HTTP ports.
        events: Gets their events.

    Threads: any; it has some of its own.
    """

    def __init__(self, ports: BookiePorts, events: Events) -> None:
        self._ports = ports
        self._events = events
        self._known: dict[str, _Known] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pybk-http-loads", daemon=True)
        start_thread(self._thread)

    def fresh(self) -> dict[str, Load]:
        """Return the loads, by bookie, of the bookies that answered recently."""
        oldest = time.monotonic() - FRESH_SECONDS
        return {
            name: known.load
            for name, known in tuple(self._known.items())
            if known.load is not None and known.came >= oldest
        }

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        with ThreadPoolExecutor(_AT_ONCE, "pybk-http-load") as pool:
            while not self._closed.is_set():
                urls = self._urls()
                for name in self._known.keys() - urls.keys():
                    del self._known[name]
                for name, known in zip(urls, pool.map(self._ask, urls, urls.values()), strict=True):
                    self._known[name] = known
                # Many bookies are asked less often, so that this costs a bounded share of a core.
                self._closed.wait(max(LOADS_SECONDS, len(urls) / 100))

    def _urls(self) -> Mapping[str, str]:
        try:
            return dict(self._ports.urls())
        except (PybkError, OSError) as error:
            logger.warning("the HTTP ports of the bookies are not known now: %s", error)
            return {}

    def _ask(self, name: str, url: str) -> _Known:
        known = self._known.get(name, _Known())
        if self._closed.is_set():
            return known
        try:
            return self._answered(name, url, known)
        except (OSError, http.client.HTTPException, *_NO_LOAD) as error:
            logger.debug("bookie %s did not answer at %s: %s", name, url, error)
            return known

    def _answered(self, name: str, url: str, known: _Known) -> _Known:
        parts = urlsplit(url)
        connection: http.client.HTTPConnection = (
            http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=ANSWER_SECONDS, context=self._ports.context
            )
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_SECONDS)
        )
        connection.response_class = partial(_Response, until=time.monotonic() + ANSWER_SECONDS)  # type: ignore[assignment]
        root = parts.path.rstrip("/")
        try:
            load = decode_load(self._get(connection, f"{root}/api/v1/load"))
            page = self._get(connection, f"{root}/api/v1/events?after={known.last_event}")
        finally:
            connection.close()
        last = self._events.take_in(page["events"], name)
        return _Known(load, time.monotonic(), last or known.last_event)

    def _get(self, connection: http.client.HTTPConnection, path: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._ports.token}"} if self._ports.token else {}
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read(_ANSWER_BYTES_MAX)
        if response.status != 200:
            raise ValueError(f"{path} has status {response.status}")
        found: dict[str, Any] = json.loads(body)
        return found


class _Response(http.client.HTTPResponse):
    """A response that has to arrive as a whole until a moment, on the monotonic clock."""

    def __init__(self, sock: socket.socket, *, method: str, until: float) -> None:
        super().__init__(sock, method=method)
        self.fp.close()
        timed = TimedConnection(sock)
        timed.begin(until - time.monotonic())
        self.fp = io.BufferedReader(timed)
