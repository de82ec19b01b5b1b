"""CURVE on both ends, and the proof at each start that a stranger is refused. See ``docs/wire.md``.

A CURVE server without a handler of its authentication protocol (ZAP) lets everybody in; so a server has its own, which
knows one key, is bound before the server's socket is, and is required by the socket.
"""

from __future__ import annotations

import ipaddress
import time
from hmac import compare_digest
from typing import Any, Final
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from pybk.errors import PybkError, UsageError
from pybk.transport.cluster_keys import CurvePair

LIBZMQ_MIN: Final = (4, 3, 3)
"""Older ones let a stranger write into the server's memory, or stop it."""

HANDSHAKE_MS: Final = 3_000
"""How long a peer may take to say who it is, milliseconds."""

HEARTBEAT_MS: Final = 300
SILENCE_MS: Final = 1_500
"""How long a process may be silent before it counts as gone, milliseconds."""

_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_DOMAIN: Final = b"pybk"
_TEST_MS: Final = 2_000
_REFUSED: Final = zmq.Event.HANDSHAKE_FAILED_AUTH
_ACCEPTED: Final = zmq.Event.HANDSHAKE_SUCCEEDED


class InsecureError(PybkError):
    """What should keep strangers out does not; nothing was served."""


Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def check_library() -> None:
    """Check that ZeroMQ has CURVE, and none of the holes that were found in it.

    Raises:
        InsecureError: It has not, or has.
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
    """Check that an address may be listened on.

    Args:
        address: ``tcp://host:port``, ``ipc://path`` or ``inproc://name``.
        secret: Whether there is a cluster secret.

    Raises:
        UsageError: It is none of these; or others than this host's processes reach it, and there is no secret.
    """
    parts = None
    try:
        parts = urlsplit(address)
        sound = parts.scheme in ("tcp", "ipc", "inproc") and address != f"{parts.scheme}://"
        if parts.scheme == "tcp":
            sound = bool(parts.hostname) and (parts.netloc.endswith(":*") or parts.port is not None)
    except ValueError:  # as of a port that is no number, or a bracket that is not closed
        sound = False
    if parts is None or not sound or not address.isprintable():
        raise UsageError(f"{address[:200]!r} is no address: use tcp://host:port, ipc://path or inproc://name")
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
    """Answers, for one context, ZeroMQ's question whether a client may come in: only who has the cluster's key.

    Args:
        context: The context of the sockets that ask.
        client_public: The cluster's client key, Z85.

    Attributes:
        socket: To be polled; ``serve`` when it is readable.
        refused: Clients turned away.

    Raises:
        UsageError: Somebody else answers for this context.

    Threads: one at a time.
    """

    __slots__ = ("_key", "refused", "socket")

    def __init__(self, context: Context, client_public: bytes) -> None:
        self._key = z85.decode(client_public)
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.maxmsgsize = 1 << 10
        try:
            self.socket.bind(_ZAP_ADDRESS)
        except zmq.ZMQError as error:
            self.socket.close()
            raise UsageError("another bookie keeps the door of this ZeroMQ context: give each its own") from error

    def serve(self) -> None:
        """Answer every question that waits."""
        while True:
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            known = self._knows(question)
            self.refused += not known
            number = question[1] if len(question) > 1 else b""
            verdict = [b"200", b"OK", b"client", b""] if known else [b"400", b"unknown key", b"", b""]
            self.socket.send_multipart([_ZAP_VERSION, number, *verdict])

    def _knows(self, question: list[bytes]) -> bool:
        """Tell whether a question is about the cluster's key; NULL and PLAIN have none and are refused."""
        if len(question) != 7:
            return False
        version, _, domain, _, _, mechanism, key = question
        return (
            version == _ZAP_VERSION and domain == _DOMAIN and mechanism == b"CURVE" and compare_digest(key, self._key)
        )

    def close(self) -> None:
        """Let nobody in any more."""
        self.socket.close()


def secure_server(socket: Socket, pair: CurvePair) -> None:
    """Have a socket that is not bound yet take CURVE clients only, and of those whom the door keeper knows."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.curve_secretkey = pair.secret
    socket.curve_publickey = pair.public
    socket.curve_server = True


def secure_client(socket: Socket, pair: CurvePair, server_public: bytes) -> None:
    """Have a socket that is not connected yet talk to the server of this public key only.

    Args:
        socket: The socket.
        pair: The cluster's client keys.
        server_public: The bookie's public key, Z85.
    """
    socket.curve_serverkey = server_public
    socket.curve_secretkey = pair.secret
    socket.curve_publickey = pair.public


def prove_closed(context: Context, socket: Socket, door: ZapAuthenticator, pair: CurvePair, client: CurvePair) -> None:
    """Prove on the very socket that will serve that it refuses a random key and takes the cluster's.

    Args:
        context: The socket's.
        socket: Set up and not bound; it is bound to a port of the loopback for a moment.
        door: Its door keeper.
        pair: The server's keys.
        client: The cluster's client keys.

    Raises:
        InsecureError: A stranger came in, or the cluster's key did not.

    Cost: Some 10 ms.
    """
    socket.bind("tcp://127.0.0.1:*")
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    try:
        for keys, expected in ((CurvePair.random(), _REFUSED), (client, _ACCEPTED)):
            event = _knock(context, address, door, keys, pair.public)
            if event != expected:
                who = "the cluster's own key" if keys is client else "a random key"
                raise InsecureError(
                    f"the start-up test of CURVE failed: {who} met {event!r} instead of {expected!r}; "
                    "nothing is served: check the installation of pyzmq"
                )
    finally:
        socket.unbind(address)
    door.refused = 0


def _knock(
    context: Context, address: str, door: ZapAuthenticator, keys: CurvePair, server_public: bytes
) -> zmq.Event | None:
    """Try to come in, and return how that went; None if nothing was heard in time."""
    knocker = context.socket(zmq.DEALER)
    knocker.linger = 0
    knocker.setsockopt(zmq.RECONNECT_IVL, -1)
    secure_client(knocker, keys, server_public)
    monitor: Any = knocker.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    try:
        knocker.connect(address)
        poller = zmq.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(door.socket, zmq.POLLIN)
        end = time.monotonic() + _TEST_MS / 1000
        while (left := end - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left * 1000) + 1))
            if door.socket in ready:
                door.serve()
            if monitor in ready:
                return zmq.Event(parse_monitor_message(monitor.recv_multipart())["event"])
        return None
    finally:
        knocker.disable_monitor()
        monitor.close()
        knocker.close()


def set_heartbeat(socket: Socket) -> None:
    """Have a socket's connections end when the other process says nothing for a while, stopped or cut off."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_MS)
