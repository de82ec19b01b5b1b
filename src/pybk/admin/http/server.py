"""The interface on a port of its own, with the server of Python's standard library.

Its documents advise against it for production because it checks little. What it does not bound is bounded here: the
connections and threads, the size and the time of a request. Head and body of a response are sent as one piece, because
two small ones on a connection that stays open wait for each other (Nagle's algorithm, and delayed acknowledgements).
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from pybk.admin.http.application import AdminApplication
from pybk.admin.http.bookie_loads import BookiePorts
from pybk.admin.http.messages import BODY_BYTES_MAX, Request, Response
from pybk.admin.http.problems import ProblemError
from pybk.admin.http.tokens import Token
from pybk.errors import UsageError
from pybk.manager import LedgerManager
from pybk.storage.io.failures import start_thread

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 32
REQUEST_SECONDS: Final = 5.0
"""How long a request may take to arrive; a connection that rests is closed after it, too."""


DISCARDED_MAX: Final = 1 << 20
"""How many bytes of a body that is too long are read nevertheless."""


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
        store: The label ``store`` of the metrics; that of a bookie is its name.

    Attributes:
        url: Where it is.

    Raises:
        UsageError: Others than this host could reach it, and there are no tokens or no certificate; or the address,
            the tokens or the certificate cannot be used.

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
        store: str = "",
    ) -> None:
        tokens = tuple(tokens)
        local = _is_loopback(host)
        probes_alone = bookie is not None and not tokens
        if not local and not probes_alone and (not tokens or certificate is None):
            raise UsageError(
                f"others could reach {host!r}, so tokens and a certificate are needed: give them, or use 127.0.0.1"
            )
        self._certificate = certificate
        self._context = None if certificate is None else ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load_certificate()
        names = {host, *hosts} if local or hosts else {"*"}
        self.application: Final = AdminApplication(
            manager, tokens=tokens, hosts=names, open_reads=local, bookie=bookie, ports=ports, store=store
        )
        try:
            self._server = _Server((host, port), self.application, self._context)
        except OSError as error:
            self.application.close()
            raise UsageError(f"{host}:{port} cannot be listened on: {error}; choose another port") from error
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if certificate is None else "https"
        self.url: Final = f"{scheme}://{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="pybk-http", daemon=True)
        start_thread(self._thread)

    def _load_certificate(self) -> None:
        if self._certificate is None or self._context is None:
            return
        try:
            self._context.load_cert_chain(*self._certificate)
        except (OSError, ssl.SSLError) as error:
            named, key = self._certificate
            raise UsageError(f"the certificate {named!r} with key {key!r} cannot be used: {error}") from error

    def reload(self, tokens: Iterable[Token]) -> None:
        """Take other tokens, and read the files of the certificate again, from the next connection on.

        Raises:
            UsageError: The certificate cannot be used; the one before stays.
        """
        self._load_certificate()
        self.application.tokens = tuple(tokens)

    def close(self) -> None:
        """Stop; returns when no request is being answered any more. Idempotent."""
        self.application.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class _Server(HTTPServer):
    """Answers connections in a bounded number of threads; what is more waits in the backlog of the port."""

    request_queue_size = CONNECTIONS_MAX
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], application: AdminApplication, context: ssl.SSLContext | None) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.application = application
        self._context = context
        self._pool = ThreadPoolExecutor(CONNECTIONS_MAX, "pybk-http-answer")
        self._free = threading.Semaphore(CONNECTIONS_MAX)
        self._open: set[socket.socket] = set()
        super().__init__(address, _Answer)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hand a connection to a thread; one too many is closed at once, and its client may try again."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._open.add(request)
        self._pool.submit(self._serve, request, client_address)

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            request.settimeout(REQUEST_SECONDS)
            connection = request if self._context is None else self._context.wrap_socket(request, server_side=True)
            self.finish_request(connection, client_address)
            self.shutdown_request(connection)
        except OSError as error:  # the client has gone, or speaks no TLS
            logger.debug("a connection from %s ended: %s", client_address, error)
        finally:
            self._open.discard(request)
            request.close()
            self._free.release()

    def server_close(self) -> None:
        """Close the port and all connections, and wait for the threads."""
        super().server_close()
        for each in tuple(self._open):
            try:
                each.shutdown(socket.SHUT_RD)
            except OSError:  # it has ended meanwhile
                continue
        self._pool.shutdown()


class _Answer(BaseHTTPRequestHandler):
    """Reads the requests of one connection, and sends the responses of the application."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    @property
    def _application(self) -> AdminApplication:
        assert isinstance(self.server, _Server)
        return self.server.application

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self._body(headers)
        if body is None:
            return
        parsed = dict(parse_qsl(query, keep_blank_values=True))
        peer = str(self.client_address[0])
        self._send(self._application.handle(Request(self.command, path, parsed, headers, body, peer)))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _answer

    def _body(self, headers: dict[str, str]) -> bytes | None:
        """Read the body; None, after a refusal, if it is too long, or its length is not known."""
        text = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not text.isdecimal() or len(text) > 9 or int(text) > BODY_BYTES_MAX:
            self.close_connection = True
            self._discard(int(text) if text.isdecimal() and len(text) <= 9 else DISCARDED_MAX)
            problem = ProblemError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "too_long",
                f"a Content-Length of at most {BODY_BYTES_MAX} bytes is needed",
                headers=(("Connection", "close"),),
            )
            self._send(problem.response())
            return None
        return self.rfile.read(int(text))

    def _discard(self, size: int) -> None:
        """Read what a client sends in spite of a refusal, or else it might not see the refusal."""
        left = min(size, DISCARDED_MAX)
        while left > 0 and (found := self.rfile.read1(left)):
            left -= len(found)

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        for name, value in (
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            *response.headers,
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "pybk"

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request for debugging alone; the application logs changes."""
        logger.debug("%s: %s", self.address_string(), format % args)
