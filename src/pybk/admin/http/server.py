"""The interface on a port of its own, with the server of Python's standard library.

Its documents advise against it for production because it checks little. What it does not bound is bounded here: the
connections and threads, the size and the time of a request. Head and body of a response are sent as one piece, because
two small ones on a connection that stays open wait for each other (Nagle's algorithm, and delayed acknowledgements).

A probe must be answered although others keep all connections, or else they could have a process ended that is well. So
the connection that is one too many, or leaves too few descriptors to the rest of the process, takes the place of
another one, whose client still sends its request, or takes the response: the oldest of the peer that has most of them.
Only what is being answered keeps its place, and the application answers fewer requests at once than there are
connections.

A child of a fork has copies of all descriptors, so that a port would stay taken, and connections open, after the parent
has closed them. The child closes its copies, without a word to the clients.
"""

from __future__ import annotations

import io
import logging
import os
import re
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl
from weakref import WeakSet

from pybk.admin.http.application import THREADS, AdminApplication
from pybk.admin.http.bookie_loads import BookiePorts
from pybk.admin.http.messages import BODY_BYTES_MAX, Request, Response, by_name
from pybk.admin.http.problems import ProblemError
from pybk.admin.http.timed_connection import TimedConnection
from pybk.admin.http.tokens import Token
from pybk.credentials import read_secret_file
from pybk.errors import UsageError
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.io.spare_descriptors import descriptor_max
from pybk.threads.thread_start import start_thread

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = THREADS
REQUEST_SECONDS: Final = 5.0
"""How long a request may take to arrive, and its response to leave; a connection that rests is closed after it, too."""

HEADERS_BYTES_MAX: Final = 32 << 10
"""Limit on the headers of a request together."""

_FIELD: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*\r?\n")
"""A line of a header. What another server would take for two lines, or for none, is refused."""

_ABSOLUTE: Final = re.compile(r"https?://([^/?]*)", re.IGNORECASE)
"""How a target begins that is sent to a proxy; servers have to take it, too."""

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
        local = _is_loopback(host)
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
            self._server = _Server((host, port), self.application, context)
        except (OSError, ValueError) as error:  # ValueError: no name of a host has such parts
            self.application.close()
            raise UsageError(f"{host}:{port} cannot be listened on: {error}; choose another port") from error
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if certificate is None else "https"
        self.url: Final = f"{scheme}://{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="pybk-http", daemon=True)
        start_thread(self._thread)

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
            self._server.context = _context_of(self._certificate)
        self.application.tokens = tokens

    def close(self) -> None:
        """Stop; returns when no request is being answered any more. Idempotent; a forked child has nothing to stop."""
        if self._server.inherited:
            return
        self.application.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def checked_context(
    host: str, tokens: Collection[Token], certificate: tuple[str, str] | None, *, of_bookie: bool
) -> ssl.SSLContext | None:
    """Return how TLS is spoken at an address, None for without; raises UsageError as ``AdminServer``."""
    probes_alone = of_bookie and not tokens
    if not _is_loopback(host) and not probes_alone and (not tokens or certificate is None):
        raise UsageError(
            f"others could reach {host!r}, so tokens and a certificate are needed: give them, or use 127.0.0.1"
        )
    return None if certificate is None else _context_of(certificate)


def _context_of(certificate: tuple[str, str]) -> ssl.SSLContext:
    """Return a new context for a certificate; one that is in use would have lost its key if the new one is wrong."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    read_secret_file(certificate[1], private=True)
    try:
        context.load_cert_chain(*certificate, password="")  # a service cannot be asked for one
    except (OSError, ValueError) as error:
        named, key = certificate
        raise UsageError(f"the certificate {named!r} with key {key!r} cannot be used: {error}") from error
    return context


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection.

    Attributes:
        socket: Its socket, with TLS around it if there is some.
        peer: The address at its other end.
        waits: Whether its client has to act: its request has not arrived as a whole, or its response not left.
    """

    socket: socket.socket
    peer: str
    waits: bool = True

    def end(self, how: int) -> None:
        """Shut it down, while a thread uses it."""
        try:
            # That of SSLSocket takes TLS away, and the thread would send its answer without it.
            socket.socket.shutdown(self.socket, how)
        except OSError:  # it has ended meanwhile
            return


class _Server(HTTPServer):
    """Answers connections in a bounded number of threads.

    Attributes:
        context: How TLS is spoken on new connections; None for none.
        closing: Whether connections end after the answer that is under way.
        inherited: Whether this process was forked from the one that serves.
    """

    request_queue_size = CONNECTIONS_MAX
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], application: AdminApplication, context: ssl.SSLContext | None) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.application = application
        self.context = context
        self.closing = False
        self.inherited = False
        self._pool = ThreadPoolExecutor(CONNECTIONS_MAX, "pybk-http-answer")
        self._lock = threading.Lock()
        """Guards the attributes below, and ``waits`` of connections."""
        self._open: dict[_Connection, None] = {}
        """Those that have a place, the oldest first."""
        self._unfinished = 0
        """How many have a thread, or wait for one; some of them have lost their place."""
        super().__init__(address, _Answer)
        _SERVERS.add(self)

    def server_bind(self) -> None:
        """Listen; the name of the host is not asked for, as HTTPServer does, because that takes long without DNS."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hand a connection to a thread; without a place for it, it is closed, and its client may try again."""
        connection = _Connection(request, str(client_address[0]))
        if not self._take_place(connection):
            self.shutdown_request(request)
            return
        self._pool.submit(self._serve, connection, client_address)

    def _take_place(self, connection: _Connection) -> bool:
        with self._lock:
            if self._unfinished >= 2 * CONNECTIONS_MAX:
                return False
            if len(self._open) >= CONNECTIONS_MAX or connection.socket.fileno() > descriptor_max():
                waiting = [each for each in self._open if each.waits]
                if not waiting:
                    return False
                peers = Counter(each.peer for each in waiting)
                victim = max(waiting, key=lambda each: peers[each.peer])  # of equal ones the first, which is the oldest
                del self._open[victim]
                victim.end(socket.SHUT_RDWR)
            self._open[connection] = None
            self._unfinished += 1
            return True

    def arrives(self, connection: _Connection, waits: bool) -> None:
        """Note that a connection begins to wait for its client, or for an answer."""
        with self._lock:
            connection.waits = waits

    def _serve(self, connection: _Connection, client_address: Any) -> None:
        try:
            self._secure(connection)
            _Answer(connection, client_address, self)
        except OSError as error:  # the client has gone, or speaks no TLS
            logger.debug("a connection from %s ended: %s", client_address, error)
        except Exception:  # a server must survive its handlers
            logger.exception("a connection from %s failed", client_address)
        finally:
            with self._lock:
                self._open.pop(connection, None)
                self._unfinished -= 1
            self.shutdown_request(connection.socket)

    def _secure(self, connection: _Connection) -> None:
        """Begin TLS, if there is some."""
        if self.context is None:
            return
        connection.socket.settimeout(REQUEST_SECONDS)  # for the handshake as a whole
        with self._lock:  # another thread that ends the connection needs its present socket
            connection.socket = self.context.wrap_socket(
                connection.socket, server_side=True, do_handshake_on_connect=False
            )
        assert isinstance(connection.socket, ssl.SSLSocket)
        connection.socket.do_handshake()

    def server_close(self) -> None:
        """Close the port and all connections, and wait for the threads."""
        super().server_close()
        self.closing = True
        with self._lock:
            for each in self._open:
                each.end(socket.SHUT_RD)
        self._pool.shutdown()

    def close_inherited(self) -> None:
        """Close the descriptors of a forked child; the parent's connections continue."""
        self.inherited = True
        for each in (self.socket, *(connection.socket for connection in self._open)):
            if (descriptor := each.detach()) >= 0:  # closing would wait for the files around it, whose thread is gone
                os.close(descriptor)


_SERVERS: Final[WeakSet[_Server]] = WeakSet()


def _close_inherited() -> None:
    for each in _SERVERS:
        each.close_inherited()


os.register_at_fork(after_in_child=_close_inherited)


class _Reader(io.BufferedReader):
    """Reads a request, and checks the lines of its headers, which the parser takes as they come."""

    left: int | None = None
    """Bytes that the headers may still have; None if what is read is none."""
    wrong = False
    """Whether a line was no header."""

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line."""
        line = super().readline(size)
        if self.left is not None:
            self.left -= len(line)
            if self.left < 0:
                raise LineTooLong("header")
            self.wrong |= line not in (b"\r\n", b"\n") and not _FIELD.fullmatch(line)
        return line


class _Answer(BaseHTTPRequestHandler):
    """Reads the requests of one connection, and sends the responses of the application."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # with headers in the refusal of a line that names no version
    disable_nagle_algorithm = True

    def __init__(self, connection: _Connection, client_address: Any, server: _Server) -> None:
        self._connection = connection
        self._server = server
        super().__init__(connection.socket, client_address, server)

    def setup(self) -> None:
        """Read through what bounds requests."""
        super().setup()
        self.rfile.close()
        self.wfile.close()
        self._timed = TimedConnection(self.connection)
        self.rfile = self._reader = _Reader(self._timed)
        self.wfile = io.BufferedWriter(self._timed)

    def handle_one_request(self) -> None:
        """Wait for a request, and answer it."""
        if self._server.closing:
            self.close_connection = True
            return
        self._server.arrives(self._connection, waits=True)
        self._timed.begin(REQUEST_SECONDS)
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Read the headers; False after a refusal."""
        self._reader.left, self._reader.wrong = HEADERS_BYTES_MAX, False
        try:
            if not super().parse_request():
                return False
        finally:
            self._reader.left = None
        if self._reader.wrong:
            self.send_error(HTTPStatus.BAD_REQUEST, "A line of the headers is not NAME: VALUE")
            return False
        return True

    def handle_expect_100(self) -> bool:
        """Have the client send the body; one that waits for this would wait until it loses patience."""
        going_on = super().handle_expect_100()
        self.wfile.flush()
        return going_on

    def _answer(self) -> None:
        headers = by_name(self.headers.items())
        target = self.path
        if found := _ABSOLUTE.match(target):
            headers["host"] = found[1]  # whatever Host says (RFC 9112, 3.2.2)
            target = target[found.end() :]
        path, _, query = target.partition("?")
        body = self._body(headers)
        if body is None:
            return
        self._server.arrives(self._connection, waits=False)
        parsed = dict(parse_qsl(query, keep_blank_values=True))
        peer = str(self.client_address[0])
        request = Request(self.command, path or "/", parsed, headers, body, peer)
        response = self._server.application.handle(request)
        self._server.arrives(self._connection, waits=True)
        self._timed.begin(REQUEST_SECONDS)
        self._send(response)

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Have the application answer all methods, as it knows which a path takes: the base class calls ``do_NAME``."""
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _body(self, headers: dict[str, str]) -> bytes | None:
        """Read the body; None, after a refusal, if it is too long, or its length is not known."""
        text = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not text.isdecimal() or len(text) > 9 or int(text) > BODY_BYTES_MAX:
            self.close_connection = True
            problem = ProblemError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "too_long",
                f"a Content-Length of at most {BODY_BYTES_MAX} bytes is needed",
                headers=(("Connection", "close"),),
            )
            self._send(problem.response())
            self.wfile.flush()  # before the wait for a body that may never come
            self._discard(int(text) if text.isdecimal() and len(text) <= 9 else DISCARDED_MAX)
            return None
        body = self.rfile.read(int(text))
        if len(body) < int(text):  # the client has gone, and maybe did not mean what it has sent so far
            self.close_connection = True
            return None
        return body

    def _discard(self, size: int) -> None:
        """Read what a client sends in spite of a refusal, or else the close could take the refusal from it."""
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

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request, such as a line without a version, as the application refuses."""
        status = HTTPStatus(code)
        self.close_connection = True
        problem = ProblemError(
            status, status.name.lower(), message or status.phrase, headers=(("Connection", "close"),)
        )
        self._send(problem.response())

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "pybk"

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request for debugging alone; the application logs changes."""
        logger.debug("%s: %r", self.client_address[0], format % args)
