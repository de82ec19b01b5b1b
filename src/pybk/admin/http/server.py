"""The interface on a port of its own: uvicorn, in a thread with an event loop of its own.

What uvicorn does not bound is bounded by ``connections``. It takes no signals over, and its loggers stay as they are.

A child of a fork has copies of all descriptors, so that a port would stay taken, and connections open, after the parent
has closed them. The child closes its copies, without a word to the clients.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import uvicorn

from pybk.admin.http.application import AdminApplication
from pybk.admin.http.bookie_loads import BookiePorts
from pybk.admin.http.certificates import checked_context, context_of, is_loopback
from pybk.admin.http.connections import CONNECTIONS_MAX, HEADERS_BYTES_MAX, REQUEST_SECONDS, Connection, Connections
from pybk.admin.http.tokens import Token
from pybk.errors import UsageError
from pybk.manager.ledger_manager import LedgerManager
from pybk.threads.workers import start_thread

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer


class AdminServer:
    """Serves the administration interface of a manager on a port, from its creation until ``close``.

    Args:
        manager: The manager; it is not closed.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        tokens: The valid tokens; without one nothing can be changed.
        hosts: The names that requests may give in ``Host``, besides those of loopback and ``host``. If none are given,
            and others than this host could reach the port, all names are accepted: everything but the probes takes a
            token there, which no page of another site has.
        certificate: Files of a certificate and its key, in PEM; None serves without TLS.
        bookie: The bookie in this process, to show it alone: probes, metrics and ``bookies/self``. Its port may be one
            that others can reach, without tokens and certificate: it answers nothing but probes then.
        ports: Where the HTTP ports of the cluster's bookies are, to show what they do; None shows what this process
            does alone.
        name: What people call the cluster or the store, which the page shows; empty for the beginning of its id.
        command: How commands reach it, which the page shows to be copied: ``pybk COMMAND`` with what they need besides;
            empty for its location alone.
        store: The label ``store`` of the metrics; that of a bookie is its name.

    Attributes:
        url: Where it is.

    Raises:
        UsageError: Others than this host could reach it, and there are no tokens or no certificate; or the address,
            the tokens or the certificate cannot be used, or every user of this host may read or change its key.

    Threads: any; its own accept and answer.
    """

    def __init__(
        self,
        manager: LedgerManager,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tokens: Iterable[Token] = (),
        hosts: Collection[str] = (),
        certificate: tuple[str, str] | None = None,
        bookie: BookieServer | None = None,
        ports: BookiePorts | None = None,
        name: str = "",
        store: str = "",
        command: str = "",
    ) -> None:
        tokens = tuple(tokens)
        local = is_loopback(host)
        context = checked_context(host, tokens, certificate, of_bookie=bookie is not None)
        self._certificate = certificate
        self._tokens_allowed = local or certificate is not None
        names = {host, *hosts} if local or hosts else {"*"}
        self.application: Final = AdminApplication(
            manager,
            tokens=tokens,
            hosts=names,
            open_reads=local,
            bookie=bookie,
            ports=ports,
            name=name,
            store=store,
            command=command,
        )
        try:
            self._listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=CONNECTIONS_MAX
            )
            # Connections inherit it: head and body of a response are two small pieces, which would wait for each other.
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError) as error:  # ValueError: no name of a host has such parts
            self.application.close()
            raise UsageError(f"{host}:{port} cannot be listened on: {error}; choose another port") from error
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if certificate is None else "https"
        self.url: Final = f"{scheme}://{shown}:{self._listener.getsockname()[1]}"
        self._connections = Connections(self.application, context)
        self._server = _Server(self._connections)
        self._inherited = False
        _SERVERS.add(self)
        self._thread = threading.Thread(target=self._serve, name="pybk-http", daemon=True)
        start_thread(self._thread)

    def _serve(self) -> None:
        """Serve in a thread, in which uvicorn takes no signals over."""
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def reload(self, tokens: Iterable[Token]) -> None:
        """Take other tokens, and read the files of the certificate again, from the next connection on.

        Raises:
            UsageError: The certificate cannot be used, or tokens would be sent without one by others than this host;
                certificate and tokens stay as they were.
        """
        tokens = tuple(tokens)
        if tokens and not self._tokens_allowed:
            raise UsageError(f"{self.url} has no certificate, so everybody on the way could read tokens: start anew")
        if self._certificate is not None:
            self._connections.context = context_of(self._certificate)
        self.application.tokens = tokens

    def close(self) -> None:
        """Stop; returns when no request is being answered any more. Idempotent; a forked child has nothing to stop."""
        if self._inherited:
            return
        self.application.close()
        self._server.end()
        self._thread.join()
        self.application.threads.shutdown()

    def close_inherited(self) -> None:
        """Close the descriptors of a forked child; the parent's connections continue.

        Python's sockets keep their numbers, which stand for nothing that matters from now on.
        """
        self._inherited = True
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for each in (self._listener.fileno(), *self._connections.descriptors()):
            if each >= 0:
                os.dup2(nothing, each, inheritable=False)
        os.close(nothing)


_SERVERS: Final[WeakSet[AdminServer]] = WeakSet()


def _close_inherited() -> None:
    for each in _SERVERS:
        each.close_inherited()


os.register_at_fork(after_in_child=_close_inherited)


class _Server(uvicorn.Server):
    """uvicorn, with bounded connections; it rests while nobody asks, and waits for no idle client at its end."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        made: Any = partial(Connection, connections)
        super().__init__(
            uvicorn.Config(
                connections,
                http=made,
                ws="none",
                lifespan="off",
                loop="asyncio",
                interface="asgi3",
                log_config=None,
                proxy_headers=False,
                server_header=False,
                headers=[("Server", "pybk")],
                backlog=CONNECTIONS_MAX,
                timeout_keep_alive=math.ceil(REQUEST_SECONDS),
                h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
            )
        )

    def end(self) -> None:
        """Have it end. Threads: any."""
        self.should_exit = True  # which it looks at before it waits
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ending.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        """Wait for the end, and set the date of responses once a second; uvicorn would look ten times."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), 1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End: at once what waits for its client, and the others with their responses."""
        self._connections.end_waiting()
        await super().shutdown(sockets)
