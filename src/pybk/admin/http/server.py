"""The interface on a port of its own: uvicorn, in a thread with an event loop of its own.

``connections`` has the bounds that uvicorn lacks. The server takes over no signals, and the loggers of uvicorn stay as
they are.

A child of a fork has copies of all descriptors: a port would stay taken, and connections open, after the parent has
closed them. The child closes its copies, which the clients do not notice.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Final, Unpack
from weakref import WeakSet

import uvicorn

from pybk.admin.http.application import AdminApplication
from pybk.admin.http.certificates import checked_context, context_of, is_loopback
from pybk.admin.http.connections import CONNECTIONS_MAX, Listener, Protocol
from pybk.admin.http.shown import Shown
from pybk.admin.http.tokens import Token
from pybk.errors import UsageError
from pybk.manager.ledger_manager import LedgerManager
from pybk.threads import start_thread

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer

HEADERS_BYTES_MAX: Final = 32 << 10
"""Limit on the headers of a request together."""


class AdminServer:
    """Serves the administration interface of a manager on a port, from its creation until ``close``.

    Args:
        manager: The manager; it is not closed.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        tokens: The valid tokens; without one nothing can be changed.
        hosts: The names that requests may give in ``Host``, in addition to those of loopback and ``host``. If none are
            given, and other hosts could reach the port, all names are accepted, because there everything except the
            probes takes a token, which a page of another site does not have.
        certificate: Files of a certificate and its key, in PEM; None serves without TLS.
        bookie: The bookie in this process, to show it alone: probes, metrics and ``bookies/self``. Without tokens and
            certificate, other hosts may reach its port, which then answers probes only.
        store: The label ``store`` of the metrics; that of a bookie is its name.
        **shown: Further things that it shows; each may be left out. ``ports``: the HTTP ports of the cluster's bookies,
            whose load is then shown instead of this process's. ``name``: the name of the cluster or the store for
            people, instead of the beginning of its id. ``command``: the form of commands that reach it, ``pybk
            COMMAND`` with the options that they need, which the page offers for copying instead of its location only.
            ``password`` or ``secret``: what opens the logs whose records those may look at who have a token with the
            scope ``operate``; without them no record is shown.

    Attributes:
        url: Its URL.

    Raises:
        UsageError: Other hosts could reach it, and tokens or the certificate are missing; or the address, the tokens or
            the certificate cannot be used; or every user of this host may read or change its key.

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
        store: str = "",
        **shown: Unpack[Shown],
    ) -> None:
        tokens = tuple(tokens)
        local = is_loopback(host)
        self._context = context = checked_context(host, tokens, certificate, of_bookie=bookie is not None)
        self._certificate = certificate
        self._tokens_allowed = local or certificate is not None
        try:
            self._listener = Listener(host, port)
        except (OSError, ValueError) as error:
            raise UsageError(f"{host}:{port} cannot be listened on: {error}; choose another port") from error
        names = {host, *hosts} if local or hosts else {"*"}
        self.application: Final = AdminApplication(
            manager, tokens=tokens, hosts=names, open_reads=local, bookie=bookie, store=store, **shown
        )
        shown_host = f"[{host}]" if ":" in host else host
        scheme = "http" if certificate is None else "https"
        self.url: Final = f"{scheme}://{shown_host}:{self._listener.getsockname()[1]}"
        self._server = uvicorn.Server(self._configuration(context))
        _LISTENERS.add(self._listener)
        self._thread = threading.Thread(target=self._serve, name="pybk-http", daemon=True)
        start_thread(self._thread)

    def _configuration(self, context: ssl.SSLContext | None) -> uvicorn.Config:
        found = uvicorn.Config(
            self._listener.serving(self.application),
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            headers=[("Server", "pybk")],
            backlog=CONNECTIONS_MAX,
            h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
        )
        found.load()
        found.ssl = context
        if context is not None:
            context.sni_callback = self._present
        return found

    def _present(self, connection: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
        """Have a new connection see the certificate that was read last."""
        if self._context is not None:
            connection.context = self._context

    def _serve(self) -> None:
        """Serve in a thread, in which uvicorn takes no signals over."""
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def reload(self, tokens: Iterable[Token]) -> None:
        """Replace the tokens, and read the files of the certificate again; both count from the next connection on.

        Raises:
            UsageError: The certificate cannot be used, or other hosts would send tokens without TLS; certificate and
                tokens stay as they were.
        """
        tokens = tuple(tokens)
        if tokens and not self._tokens_allowed:
            raise UsageError(f"{self.url} has no certificate, so everybody on the way could read tokens: start anew")
        if self._certificate is not None:
            self._context = context_of(self._certificate)
        self.application.admission.tokens = tokens

    def close(self) -> None:
        """Stop; return when no request is being answered any more. Idempotent; in a forked child it does nothing."""
        if self._listener.fileno() < 0:
            return
        self.application.close()
        self._server.should_exit = True
        self._thread.join()
        self.application.threads.shutdown()


_LISTENERS: Final[WeakSet[Listener]] = WeakSet()


def _close_inherited() -> None:
    for each in _LISTENERS:
        each.close_inherited()


os.register_at_fork(after_in_child=_close_inherited)
