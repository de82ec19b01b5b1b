from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from pybk.errors import UsageError
from pybk.replication.messages import EntryRun
from pybk.transport import curve
from pybk.transport.client_links import Links
from pybk.transport.cluster_keys import ClusterKeys, CurvePair
from pybk.transport.codec import Ping
from pybk.transport.curve import InsecureError, ZapAuthenticator
from pybk.transport.server import Server
from tests.transport.wire_harness import BOOKIE, CLUSTER, INSTANCE, KEYS, OK, TCP, RawClient, Tap, World, add, world

STRANGER = ClusterKeys.derive(b"another secret, but a long one", CLUSTER)


@pytest.fixture
def context() -> Iterator[Any]:
    context: Any = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:1", "tcp://[::]:1", "tcp://host:1"]
)
def test_listening_beyond_this_host_needs_a_secret(address: str) -> None:
    with pytest.raises(UsageError, match="give a cluster_secret, or listen on 127"):
        Server([address], INSTANCE)
    curve.check_address(address, secret=True)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///x", "inproc://x"]
)
def test_listening_on_this_host_needs_none(address: str) -> None:
    curve.check_address(address, secret=False)


@pytest.mark.parametrize("address", ["", "tcp://", "udp://127.0.0.1:1", "127.0.0.1:1", "pgm://x"])
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        Server([address], INSTANCE, KEYS)


@pytest.mark.parametrize("port", ["0", "65536", "99999", "-1", "x"])
def test_the_error_of_a_wrong_port_says_which_ports_there_are(port: str) -> None:
    with pytest.raises(UsageError, match=r"with a port from 1 to 65535, or \* for any that is free"):
        curve.check_address(f"tcp://127.0.0.1:{port}", secret=False)


def test_a_port_that_is_taken_is_named() -> None:
    with Server([TCP], INSTANCE) as server, pytest.raises(UsageError, match=f"cannot listen on {server.addresses[0]}"):
        Server([server.addresses[0]], INSTANCE)


@pytest.mark.parametrize(("version", "has_curve"), [((4, 3, 2), True), ((4, 3, 5), False)])
def test_a_library_without_curve_or_with_known_holes_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], has_curve: bool
) -> None:
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: version)
    monkeypatch.setattr(zmq, "has", lambda _name: has_curve)
    with pytest.raises(InsecureError, match=r"needs 4\.3\.3 or newer"):
        Server([TCP], INSTANCE, KEYS)
    with pytest.raises(InsecureError):
        Links(KEYS)


def test_the_start_up_test_waits_for_nothing_that_does_not_come() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        Server([TCP], INSTANCE, KEYS).close()
        times.append(time.perf_counter() - start)
    assert min(times) < curve.TEST_MS / 1000, "it waits for what nobody says"


def test_a_handler_that_admits_everybody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ZapAuthenticator, "knows", lambda _self, _question: True)
    with pytest.raises(InsecureError, match=r"a random key met .*SUCCEEDED"):
        Server([TCP], INSTANCE, KEYS)


def test_a_socket_that_asks_no_handler_is_found(monkeypatch: pytest.MonkeyPatch, context: Any) -> None:
    """Z1: a CURVE server without a handler takes any key."""

    def secure_server(socket: Any, pair: CurvePair) -> None:
        socket.curve_secretkey, socket.curve_publickey, socket.curve_server = pair.secret, pair.public, True

    monkeypatch.setattr(curve, "secure_server", secure_server)
    monkeypatch.setattr(curve, "ZAP_ADDRESS", "inproc://somewhere-else")
    with pytest.raises(InsecureError, match=r"a random key met .*SUCCEEDED"):
        Server([TCP], INSTANCE, KEYS, context=context)


def test_without_a_handler_no_client_is_admitted(context: Any) -> None:
    """Z1: the socket requires a handler, so that clients are refused when it is gone."""
    pair = CurvePair.random()
    with context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as client:
        curve.secure_server(server, pair)
        server.bind(TCP)
        curve.secure_client(client, CurvePair.random(), pair.public)
        client.linger = 0
        client.connect(server.last_endpoint.decode())
        client.send(b"knock")
        assert not server.poll(200)


def test_a_handler_that_admits_no_client_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ZapAuthenticator, "knows", lambda _self, _question: False)
    with pytest.raises(InsecureError, match="the cluster's own key met"):
        Server([TCP], INSTANCE, KEYS)


def test_a_context_has_one_handler(context: Any) -> None:
    with Server([TCP], INSTANCE, KEYS, context=context), pytest.raises(UsageError, match="give each bookie its own"):
        Server([TCP], INSTANCE, KEYS, context=context)


@pytest.mark.parametrize(
    "question",
    [
        [],
        [b"1.0", b"1", b"pybk", b"127.0.0.1", b"", b"NULL"],
        [b"1.0", b"1", b"pybk", b"127.0.0.1", b"", b"PLAIN", b"user", b"password"],
        [b"1.0", b"1", b"pybk", b"127.0.0.1", b"", b"PLAIN", zmq.utils.z85.decode(KEYS.client.public)],
        [b"1.0", b"1", b"other", b"127.0.0.1", b"", b"CURVE", zmq.utils.z85.decode(KEYS.client.public)],
        [b"2.0", b"1", b"pybk", b"127.0.0.1", b"", b"CURVE", zmq.utils.z85.decode(KEYS.client.public)],
        [b"1.0", b"1", b"pybk", b"127.0.0.1", b"", b"CURVE", b"k" * 32],
        [b"1.0", b"1", b"pybk", b"127.0.0.1", b"", b"CURVE", b""],
    ],
)
def test_the_handler_admits_one_key_only(context: Any, question: list[bytes]) -> None:
    authenticator = ZapAuthenticator(context, lambda: [KEYS.client.public])
    asker = context.socket(zmq.REQ)
    asker.connect(curve.ZAP_ADDRESS)
    for frames, verdict in (
        (question, b"400"),
        ([b"1.0", b"1", b"pybk", b"", b"", b"CURVE", zmq.utils.z85.decode(KEYS.client.public)], b"200"),
    ):
        asker.send_multipart(frames or [b""])
        assert authenticator.socket.poll(60_000)
        authenticator.serve()
        assert asker.recv_multipart()[2] == verdict
    assert authenticator.refused == 1
    asker.close()
    authenticator.close()


def refused(server: Server, links: Links, public_key: bytes | None) -> str:
    """Return why a link that must not come up did not."""
    world = World(server, links)
    link = links.connect(BOOKIE, server.addresses[0], public_key)
    assert link.send(1, Ping(), 60 * 10**9)
    world.until(lambda: world.outcomes)
    assert world.outcomes == [(link, 1, None)]
    assert not world.arrived
    assert not link.is_up
    return link.why_down


def test_another_secret_does_not_come_in() -> None:
    with Server([TCP], INSTANCE, KEYS) as server, Links(STRANGER) as links:
        assert "is it the same cluster secret" in refused(server, links, server.public_key)


def test_no_secret_does_not_come_in() -> None:
    with Server([TCP], INSTANCE, KEYS) as server, Links() as links:
        assert "do both have" in refused(server, links, None)


def test_a_secret_does_not_talk_to_a_bookie_without_one() -> None:
    with Server([TCP], INSTANCE) as server, Links(KEYS) as links:
        assert "do both have" in refused(server, links, CurvePair.random().public)
        with pytest.raises(UsageError, match="give cluster_secret to all of a cluster, or to none"):
            links.connect(BOOKIE, server.addresses[0], None)


def test_another_bookie_key_than_the_registered_one_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pybk.transport.client_links.HANDSHAKE_NS", 300_000_000)
    with Server([TCP], INSTANCE, KEYS) as server, Links(KEYS) as links:
        assert refused(server, links, CurvePair.random().public)


def test_a_plain_password_does_not_come_in(context: Any) -> None:
    with Server([TCP], INSTANCE, KEYS) as server, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.plain_username, socket.plain_password = b"user", b"password"
        socket.connect(server.addresses[0])
        socket.send(b"x")
        for _ in range(20):
            assert server.receive(5) == []
        assert server.counters.garbage == 0


def test_bytes_on_the_wire_are_not_readable() -> None:
    """A proxy between client and bookie sees no byte of an entry."""
    payload = b"a payload that nobody else may read"
    for keys in (KEYS, None):
        with Server([TCP], INSTANCE, keys) as server, Tap(server.addresses[0]) as tap, Links(keys) as links:
            served = World(server, links)
            link = links.connect(BOOKIE, tap.address, server.public_key)
            request = add(7, EntryRun(0, 1, array("q", [len(payload)]), (payload,)))
            assert served.ask(link, request) == OK
            assert served.arrived[0][2] == request
            assert (payload in tap.seen) is (keys is None)


def test_an_accepted_client_is_served() -> None:
    with world(KEYS) as served:
        assert served.ask(served.link(), add()) == OK
        with RawClient(served.server) as client:
            assert client.greet()
