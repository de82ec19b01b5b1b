"""The connections of the server, bounded where uvicorn does not bound them.

A probe must be answered although others keep all connections, or else they could have a process ended that is well. So
the connection that is one too many, or leaves too few descriptors to the rest of the process, takes the place of
another one, whose client still sends its request, or takes the response: the oldest of the peer that has most of them.
Only what is being answered keeps its place, and the application answers fewer requests at once than there are
connections.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import sys
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pybk.admin.http.application import THREADS
from pybk.admin.http.problems import ProblemError
from pybk.storage.io.spare_descriptors import descriptor_max

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = THREADS
REQUEST_SECONDS: Final = 5.0
"""The time that a request may take to arrive, and its response to leave; a resting connection is closed after it."""

HEADERS_BYTES_MAX: Final = 32 << 10
"""Limit on the headers of a request together."""

_ABSOLUTE: Final = re.compile(r"https?://([^/?]*)", re.IGNORECASE)
"""The beginning of a target that is sent to a proxy, which servers have to accept, too."""


class _Log(logging.Logger):
    """The log of uvicorn's connections: anybody may send what it warns of, so that is for debugging alone."""

    def handle(self, record: logging.LogRecord) -> None:
        """Log a record as one of this module."""
        if record.levelno < logging.ERROR:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


_LOG: Final = _Log(__name__)


class Connections:
    """The connections of a server, and the ASGI application that they ask: another one, within limits.

    Args:
        application: The other one.
        context: How TLS is spoken on new connections; None for none.

    Threads: that of the event loop; ``context`` may be set, and ``descriptors`` called, in any.
    """

    def __init__(self, application: ASGIApp, context: ssl.SSLContext | None) -> None:
        self.context = context
        self._application = application
        self._open: dict[Connection, None] = {}
        """Those that have a place, the oldest first."""

    def take_place(self, connection: Connection) -> bool:
        """Give a connection a place, maybe that of another one, which ends; return whether there is one."""
        if len(self._open) >= CONNECTIONS_MAX or connection.descriptor > descriptor_max():
            waiting = [each for each in self._open if each.waits]
            if not waiting:
                return False
            peers = Counter(each.peer for each in waiting)
            victim = max(waiting, key=lambda each: peers[each.peer])  # of equal ones the first, which is the oldest
            self.leave(victim)
            victim.end()
        self._open[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        """Take the place of a connection back, if it has one."""
        self._open.pop(connection, None)

    def end_waiting(self) -> None:
        """End the connections whose clients have nothing more to get."""
        for each in list(self._open):
            if each.waits and not each.sending:
                each.end()

    def descriptors(self) -> Iterator[int]:
        """Yield the descriptor of each connection; -1 for one that is closed."""
        for each in self._open:
            yield each.descriptor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and what the connection has to know of it."""
        connection: Connection = scope["state"].pop(_CONNECTION)
        if connection.is_whole:
            connection.has_request()

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                connection.has_request()
            return message

        async def sending(message: Message) -> None:
            if connection.refused:
                return
            if message["type"] == "http.response.start":
                connection.wait()
            await send(message)

        refusal = _refusal(scope)
        answering = self._application if refusal is None else refusal.response()
        await answering(_with_host(scope), receiving, sending)


def _refusal(scope: Scope) -> ProblemError | None:
    """Return why a request is refused that uvicorn takes; None if it is not."""
    if scope["http_version"] not in ("1.0", "1.1"):
        return ProblemError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "other_version", "HTTP/1.1 or HTTP/1.0 is needed")
    target = len(scope["raw_path"]) + len(scope["query_string"])
    if target + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > HEADERS_BYTES_MAX:
        return _too_large()
    return None


def _too_large() -> ProblemError:
    return ProblemError(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        "headers_too_long",
        f"the target and the headers have at most {HEADERS_BYTES_MAX} bytes together",
    )


def _with_host(scope: Scope) -> Scope:
    """Return a request whose target is a path: a host in the target counts, whatever Host says (RFC 9112, 3.2.2)."""
    target = scope["raw_path"].decode("latin-1")
    if not (found := _ABSOLUTE.match(target)):
        return scope
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {
        **scope,
        "raw_path": (target[found.end() :] or "/").encode("latin-1"),
        "headers": [*headers, (b"host", found[1].encode("latin-1"))],
    }


_CONNECTION: Final = "pybk.connection"


class Connection(H11Protocol):
    """A connection as uvicorn serves it, with a place and a time.

    Args:
        connections: The connections of the server.
        given: What uvicorn gives each.

    Attributes:
        waits: Whether its client has to act: its request has not arrived as a whole, or its response not left.
        refused: Whether what came was no request; the answer to that is the last one.
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.app_state = {**self.app_state, _CONNECTION: self}
        self.access_log = False
        self.logger = _LOG
        self.waits = True
        self.refused = False
        self._connections = connections
        self._raw: asyncio.Transport | None = None
        """The transport below TLS."""
        self._begun = False
        """True if uvicorn knows of the connection."""
        self._early = b""
        """The bytes that came with the end of the handshake."""
        self._securing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def descriptor(self) -> int:
        """The descriptor of its socket; -1 once that is closed."""
        return -1 if self._raw is None else int(self._raw.get_extra_info("socket").fileno())

    @property
    def peer(self) -> str:
        """The address at its other end."""
        return "" if self._raw is None else str(self._raw.get_extra_info("peername")[0])

    @property
    def sending(self) -> bool:
        """True if its client has not taken all of a response."""
        return self._raw is not None and self._raw.get_write_buffer_size() > 0

    @property
    def is_whole(self) -> bool:
        """True if the whole body of a request that has begun has arrived."""
        return self.conn.their_state is not h11.SEND_BODY

    def wait(self) -> None:
        """Give its client the time that it has, from now on."""
        self.has_request()
        self.waits = True
        self._timer = self.loop.call_later(REQUEST_SECONDS, self.end)

    def has_request(self) -> None:
        """Wait no longer: its request is here as a whole."""
        self.waits = False
        if self._timer is not None:
            self._timer.cancel()

    def end(self) -> None:
        """End it at once."""
        if self._raw is not None:
            self._raw.abort()

    # ---- as asyncio calls it -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Begin, if there is a place."""
        self._raw = transport
        if not self._connections.take_place(self):
            transport.abort()
            return
        self.wait()
        if self._connections.context is None:
            self._begin(transport)
        else:
            transport.pause_reading()
            self._securing = self.loop.create_task(self._secure(transport, self._connections.context))

    async def _secure(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        """Begin with TLS; the time of the connection bounds the handshake."""
        try:
            secured = await self.loop.start_tls(transport, self, context, server_side=True)
        except OSError as error:  # the client has gone, or speaks no TLS
            logger.debug("a connection from %s ended: %s", self.peer, error)
            secured = None
        if secured is None:
            self.connection_lost(None)
            transport.abort()
        else:
            self._begin(secured)

    def _begin(self, transport: asyncio.Transport) -> None:
        self._begun = True
        super().connection_made(transport)
        if self._early:
            super().data_received(self._early)

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        if self._begun:
            super().data_received(data)
        else:
            self._early += data

    def eof_received(self) -> bool | None:  # type: ignore[override]  # as asyncio's
        """Answer a client that sends nothing more, if its request is here."""
        if self.waits or not self._begun:
            return None  # which closes it
        self.shutdown()
        return self._connections.context is None  # a connection with TLS ends nevertheless

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        self.has_request()
        self._connections.leave(self)
        if self._begun:
            super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, as the application refuses; uvicorn calls it with the error under way."""
        self.refused = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = sys.exception()
            status = HTTPStatus(error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400)
            problem = ProblemError(status, status.name.lower(), str(error))
            if status is HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                problem = _too_large()
            response = problem.response()
            headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
            start = h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())
            for event in (start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
