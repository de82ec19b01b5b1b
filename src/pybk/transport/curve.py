"""CURVE, ZeroMQ's encryption and authentication, for bookies and clients, with a test at each start that it works.

Theory of operation
-------------------

All clients of a cluster have one CURVE key pair, derived from the cluster secret; each bookie makes a pair of its own
when it starts, and publishes the public key in its registration. While the secret is replaced, there are two secrets,
and clients with the pair of either are admitted. A client accepts only a bookie with the registered public key
(``secure_client``). A bookie must accept only clients with the cluster's key (``secure_server``), but CURVE by itself
does not check that: a ZeroMQ server asks an authentication handler (ZAP, a REP socket at a fixed ``inproc`` address of
the context) at each handshake, and admits *every* client without a handler. So

1. ``ZapAuthenticator`` is bound before the server's socket is, and answers 200 for the cluster's key and 400 otherwise;
2. the server's socket sets ``ZAP_ENFORCE_DOMAIN``, which makes it refuse all clients if the handler is missing;
3. ``prove_closed`` connects to the very socket that will serve, over loopback, before it listens anywhere else. A
   random key must be refused, and the cluster's key accepted. If either fails, the server does not start.

libzmq asks the handler from its I/O thread and waits for the answer without blocking others; the server's thread
answers in its loop (``ZapAuthenticator.serve``). So a handshake takes effect only while that loop runs. See
``docs/reference/wire.md``.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterable
from hmac import compare_digest
from typing import Any, Final
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from pybk.errors import PybkError, UsageError
from pybk.transport.cluster_keys import CurvePair

LIBZMQ_MIN: Final = (4, 3, 3)
"""The oldest version in which an unauthenticated peer cannot write to the server's memory or crash it."""

HANDSHAKE_MS: Final = 3_000
"""The time that a handshake may take, milliseconds."""

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
"""The address at which ZeroMQ asks whether a client is admitted (ZAP)."""

_ZAP_VERSION: Final = b"1.0"
_DOMAIN: Final = b"pybk"
TEST_MS: Final = 2_000
"""The time that a handshake of the start-up test may take."""

_REFUSED: Final = zmq.Event.HANDSHAKE_FAILED_AUTH
_ACCEPTED: Final = zmq.Event.HANDSHAKE_SUCCEEDED


class InsecureError(PybkError):
    """CURVE is missing, outdated, or failed its test at the start; the bookie did not serve."""


Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def check_library() -> None:
    """Check that libzmq has CURVE, and is at least ``LIBZMQ_MIN``.

    Raises:
        InsecureError: It has no CURVE, or is older.
    """
    version = zmq.zmq_version_info()
    if version < LIBZMQ_MIN or not zmq.has("curve"):
        found = ".".join(map(str, version))
        wanted = ".".join(map(str, LIBZMQ_MIN))
        raise InsecureError(
            f"libzmq {found}{'' if zmq.has('curve') else ' without CURVE'}: a cluster secret needs {wanted} or newer, "
            "with CURVE; install pyzmq from its wheels"
        )


def check_address(address: str, *, secret: bool) -> None:
    """Check that a server may listen on an address.

    Args:
        address: ``tcp://host:port``, ``ipc://path`` or ``inproc://name``.
        secret: Whether the cluster has a secret.

    Raises:
        UsageError: It is none of these, or it is reachable from other hosts and the cluster has no secret.
    """
    parts = None
    try:
        parts = urlsplit(address)
        sound = parts.scheme in ("tcp", "ipc", "inproc") and address != f"{parts.scheme}://"
        if parts.scheme == "tcp":
            sound = bool(parts.hostname) and (parts.netloc.endswith(":*") or bool(parts.port))
    except ValueError:  # for example the port is not a number, or a bracket is not closed
        sound = False
    if parts is None or not sound or not address.isprintable():
        raise UsageError(
            f"{address[:200]!r} is not an address: use tcp://host:port with a port from 1 to 65535, or * for any that "
            "is free; or ipc://path or inproc://name"
        )
    if parts.scheme == "tcp" and not secret and not _is_loopback(parts.hostname or ""):
        raise UsageError(
            f"listening on {address} without a cluster secret lets everybody read and write: "
            "give a cluster_secret, or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ZapAuthenticator:
    """The authentication handler of one ZeroMQ context: admits clients that have a key of the cluster.

    Args:
        context: The context of the server's socket.
        admitted: Returns the public halves of the clients' keys that are admitted now, Z85.

    Attributes:
        socket: The handler's socket; the owner polls it and calls ``serve`` when it is readable.
        refused: Clients that were refused.

    Raises:
        UsageError: The context has a handler already.

    Threads: one at a time.
    """

    __slots__ = ("_admitted", "refused", "socket")

    def __init__(self, context: Context, admitted: Callable[[], Iterable[bytes]]) -> None:
        self._admitted = admitted
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.maxmsgsize = 1 << 10
        try:
            self.socket.bind(ZAP_ADDRESS)
        except zmq.ZMQError as error:
            self.socket.close()
            raise UsageError(
                "another bookie authenticates the clients of this ZeroMQ context: give each bookie its own context"
            ) from error

    def serve(self) -> None:
        """Answer all waiting requests."""
        while True:
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            known = self.knows(question)
            self.refused += not known
            number = question[1] if len(question) > 1 else b""
            verdict = [b"200", b"OK", b"client", b""] if known else [b"400", b"unknown key", b"", b""]
            self.socket.send_multipart([_ZAP_VERSION, number, *verdict])

    def knows(self, question: list[bytes]) -> bool:
        """Return whether a request has a key of the cluster; requests by the mechanisms NULL and PLAIN have no key."""
        if len(question) != 7:
            return False
        version, _, domain, _, _, mechanism, key = question
        if version != _ZAP_VERSION or domain != _DOMAIN or mechanism != b"CURVE":
            return False
        return any(compare_digest(key, z85.decode(each)) for each in self._admitted())

    def close(self) -> None:
        """Stop answering; the server's socket then refuses all clients."""
        self.socket.close()


def secure_server(socket: Socket, pair: CurvePair) -> None:
    """Make a socket, before it is bound, admit only CURVE clients that the authentication handler accepts."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.curve_secretkey = pair.secret
    socket.curve_publickey = pair.public
    socket.curve_server = True


def secure_client(socket: Socket, pair: CurvePair, server_public: bytes) -> None:
    """Make a socket, before it is connected, accept only the server with this public key.

    Args:
        socket: The socket.
        pair: The key pair of the cluster's clients.
        server_public: The bookie's public key, Z85.
    """
    socket.curve_serverkey = server_public
    socket.curve_secretkey = pair.secret
    socket.curve_publickey = pair.public


def prove_closed(
    context: Context, socket: Socket, authenticator: ZapAuthenticator, pair: CurvePair, client: CurvePair
) -> None:
    """Verify, on the very socket that will serve, that it refuses a random key and accepts the cluster's.

    Args:
        context: The socket's context.
        socket: The server's socket, with all options set and not bound; it is bound to a loopback port meanwhile.
        authenticator: The context's authentication handler.
        pair: The server's key pair.
        client: The key pair of the cluster's clients.

    Raises:
        InsecureError: The random key was accepted, or the cluster's key refused.

    Cost: Some 10 ms.
    """
    socket.bind("tcp://127.0.0.1:*")
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    try:
        for keys, expected in ((CurvePair.random(), _REFUSED), (client, _ACCEPTED)):
            event = _try_handshake(context, address, authenticator, keys, pair.public)
            if event != expected:
                who = "the cluster's own key" if keys is client else "a random key"
                raise InsecureError(
                    f"the start-up test of CURVE failed: {who} met {event!r} instead of {expected!r}; "
                    "nothing is served: check the installation of pyzmq"
                )
    finally:
        socket.unbind(address)
    authenticator.refused = 0


def _try_handshake(
    context: Context, address: str, authenticator: ZapAuthenticator, keys: CurvePair, server_public: bytes
) -> zmq.Event | None:
    """Attempt a handshake, and return the monitor's event that ended it; None if none came in ``TEST_MS``."""
    probe = context.socket(zmq.DEALER)
    probe.linger = 0
    probe.setsockopt(zmq.RECONNECT_IVL, -1)
    secure_client(probe, keys, server_public)
    monitor: Any = probe.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    try:
        probe.connect(address)
        poller = zmq.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(authenticator.socket, zmq.POLLIN)
        end = time.monotonic() + TEST_MS / 1000
        while (left := end - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left * 1000) + 1))
            if authenticator.socket in ready:
                authenticator.serve()
            if monitor in ready:
                return zmq.Event(parse_monitor_message(monitor.recv_multipart())["event"])
        return None
    finally:
        probe.disable_monitor()
        monitor.close()
        probe.close()
