"""The connections of the server, bounded where uvicorn does not bound them.

A probe must be answered even if other clients keep all connections; otherwise they could cause the end of a healthy
process. So a connection that is one too many, or leaves too few descriptors to the rest of the process, takes the place
of another one whose client is still sending its request or receiving the response: the oldest of the peer that has most
of these. A connection whose request is being answered keeps its place, and the application answers fewer requests at
once than there are connections.

uvicorn knows a connection only after its handshake, but the event loop asks the listening socket for it earlier. So the
listening socket gives the places. A connection is ended by a shutdown of its socket, as if its client had left.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress
from typing import Any, Final

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from pybk.admin.http.admission import THREADS
from pybk.storage.io.failures import descriptor_max

CONNECTIONS_MAX: Final = THREADS
REQUEST_SECONDS: Final = 5.0
"""The time that a request may take to arrive, and its response to leave."""


class Place:
    """The place of a connection.

    Args:
        connection: Its socket.

    Attributes:
        waits: Whether its client has to act: its request has not arrived as a whole, or its response not left.

    Threads: that of the event loop.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection: Final = connection
        self.waits = True
        self._timer = self._begin()

    def _begin(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(REQUEST_SECONDS, self.end)

    def wait(self) -> None:
        """Give its client the allowed time, from now on."""
        self.answer()
        self.waits = True
        self._timer = self._begin()

    def answer(self) -> None:
        """Stop waiting: its request has arrived as a whole."""
        self.waits = False
        self._timer.cancel()

    def end(self) -> None:
        """End its connection."""
        with suppress(OSError):  # which has ended
            self.connection.shutdown(socket.SHUT_RDWR)


class Listener(socket.socket):
    """A socket that listens, and gives places to the connections that it accepts.

    Args:
        host: The address.
        port: The port; 0 for any that is free.

    Raises:
        OSError: It cannot listen there.
        ValueError: The address cannot be a host name.

    Threads: that of the event loop.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, port), family=family, backlog=CONNECTIONS_MAX)
        # Connections inherit it: head and body of a response are two small pieces, which would wait for each other.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(fileno=made.detach())
        self._places: dict[tuple[str, int], Place] = {}
        """The places by the address at the other end, the oldest first."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a connection that has a place; raises ConnectionAbortedError without one."""
        connection, peer = super().accept()
        if not self._has_place(connection.fileno()):
            connection.close()
            raise ConnectionAbortedError("each connection is being answered")
        self._places[peer[:2]] = Place(connection)
        return connection, peer

    def _has_place(self, descriptor: int) -> bool:
        """Return whether there is a place for one more connection, maybe that of another one, which ends."""
        self._places = {peer: each for peer, each in self._places.items() if each.connection.fileno() >= 0}
        if len(self._places) < CONNECTIONS_MAX and descriptor <= descriptor_max():
            return True
        waiting = [peer for peer, each in self._places.items() if each.waits]
        if not waiting:
            return False
        counts = Counter(host for host, _ in waiting)
        victim = max(waiting, key=lambda peer: counts[peer[0]])  # of equal ones the first, which is the oldest
        self._places.pop(victim).end()
        return True

    def serving(self, application: ASGIApp) -> ASGIApp:
        """Return an application that passes requests to another, and notes whether each connection waits."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            place = self._places.get(scope["client"])
            if place is None:  # it has ended
                await application(scope, receive, send)
                return

            async def receiving() -> Message:
                message = await receive()
                if not message.get("more_body", False):
                    place.answer()
                return message

            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    place.wait()
                await send(message)

            await application(scope, receiving, sending)

        return answer

    def close_inherited(self) -> None:
        """Close the descriptors of a forked child; the parent's connections continue."""
        for each in self._places.values():
            each.connection.close()
        self.close()


class Protocol(H11Protocol):
    """A connection as uvicorn serves it; its requests are not logged."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.access_log = False  # uvicorn's own setting would change the logger of all servers of the process

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio's
        """Answer a client that sends no more, if its request has arrived; with TLS its connection ends."""
        self.shutdown()
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request, whatever uvicorn declares
        return self.scheme == "http" and cycle is not None and not cycle.more_body

    def shutdown(self) -> None:
        """End after the response that is under way; with TLS, without waiting for the client to agree."""
        super().shutdown()
        if self.scheme == "https" and self.transport.is_closing():
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not a request, unless a response was sent, after which no other may follow."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()
