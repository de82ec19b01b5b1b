from __future__ import annotations

import os
import random
import resource
import socket
import struct
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import zmq

from pybk.ledger.ledger_metadata import Bookie
from pybk.replication.messages import Add, EntryRun, Force, Read, ReadLac, Reply, Status
from pybk.transport import connection_limit, lanes
from pybk.transport import server as server_module
from pybk.transport.cluster_keys import ClusterKeys, RightsKey, keyed_mac, proves_right
from pybk.transport.codec import (
    NONCE_BYTES,
    Answer,
    Authorize,
    AuthorizeMember,
    LacPacket,
    MessageKind,
    Ping,
    WireReply,
    WireRequest,
    encode,
)
from pybk.transport.frames import MESSAGE_BYTES_MAX, Outgoing
from pybk.transport.server import Peer, Right, Server
from tests.transport.wire_harness import (
    BOOKIE,
    INSTANCE,
    KEYS,
    OK,
    TCP,
    RawClient,
    add,
    entries,
    flat,
    world,
)
from tests.waiting import WAIT_S, wait_until

LARGE = 100_000
NO = Reply(Status.UNAUTHORIZED)


@pytest.fixture(params=["curve", "no secret"])
def keys(request: pytest.FixtureRequest) -> ClusterKeys | None:
    return KEYS if request.param == "curve" else None


@pytest.fixture
def raw(keys: ClusterKeys | None) -> Iterator[RawClient]:
    with Server([TCP], INSTANCE, keys) as server, RawClient(server, keys) as client:
        client.greet()
        yield client


REQUESTS: list[WireRequest] = [
    add(7, entries(0, (100, 200))),
    Add(7, (entries(0, (LARGE, LARGE), 5), entries(1, (50,), 5)), 3, True, True),
    ReadLac(7, True, 4, 10**9),
    Read(7, 1, 9, 2, 1000, True),
    Force(7),
    LacPacket(7, b"p" * 32),
]
REPLIES: list[WireReply] = [
    OK,
    Reply(Status.LIMBO, True),
    Answer(Status.OK, entries(0, (LARGE, LARGE)), b"p" * 32),
    Answer(Status.NO_SUCH_LEDGER),
]


@pytest.mark.parametrize("address", [TCP, "ipc://{path}/socket", "inproc://here"])
def test_requests_and_replies_travel(keys: ClusterKeys | None, address: str, tmp_path: Any) -> None:
    context: Any = zmq.Context() if address.startswith("inproc") else None
    with world(keys, address.format(path=tmp_path), context=context) as here:
        link = here.link()
        for number, message in enumerate(REQUESTS):
            assert here.ask(link, message, number) == OK
            assert flat(here.arrived[-1][2]) == flat(message)
        for number, reply in enumerate(REPLIES):
            here.answer = lambda _peer, _number, _request, reply=reply: reply  # type: ignore[misc]
            assert flat(here.ask(link, Force(1), number)) == flat(reply)
        assert here.ask(link, Ping()) == OK
        assert link.outstanding == link.outstanding_bytes == 0
    if context is not None:
        context.term()


def test_a_request_that_was_sent_before_is_refused(raw: RawClient) -> None:
    frames = raw.request(add())
    assert len(raw.exchange(*frames)[0]) == 1
    assert raw.exchange(*frames) == ([], [])
    earlier, later = raw.request(Force(1), 2), raw.request(Force(1), 3)
    assert [number for _, number, _ in raw.exchange(*later)[0]] == [3]
    assert raw.exchange(*earlier) == ([], [])
    assert raw.server.counters.replayed == 2


def test_a_request_of_one_session_is_worth_nothing_in_another() -> None:
    """With a secret, that is: without one, nothing tells sessions apart but their counters."""
    with Server([TCP], INSTANCE, KEYS) as server, RawClient(server) as client:
        client.greet()
        frames = client.request(add())
        client.greet()
        assert client.exchange(*frames) == ([], [])
        assert server.counters.forged == 1


def test_a_request_without_a_session_is_answered_so(raw: RawClient) -> None:
    with RawClient(raw.server, raw.keys) as other:
        arrived, (header,) = other.exchange(*other.request(add()), wait_ms=60_000)
    assert not arrived
    assert header.kind == MessageKind.NO_SESSION
    assert raw.server.counters.strangers == 1


def test_a_forged_greeting_begins_no_session(raw: RawClient) -> None:
    before = dict(raw.server.peers)
    raw.mac = keyed_mac(bytes(32))
    nonce = b"n" * NONCE_BYTES
    for size, numbers in ((16, (1, 0, 0, 0)), (15, (1, 0, 0, 0)), (16, (0, 0, 0, 0))):
        assert raw.exchange(raw.head(Outgoing(MessageKind.HELLO, numbers=numbers, blob=nonce[:size]))) == ([], [])
    assert raw.server.peers == before
    assert (raw.server.counters.forged, raw.server.counters.garbage) == (1, 2)


def test_garbage_delays_no_request(raw: RawClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "RECEIVED_MAX", 8)
    for _ in range(100):
        raw.socket.send(b"garbage")
    raw.socket.send_multipart(raw.request(add()))
    time.sleep(0.3)  # so that all of it waits, and no more signals come
    arrived: list[Any] = []
    begin = time.monotonic()
    while not arrived:
        arrived += raw.server.receive(60_000)
    assert time.monotonic() - begin < WAIT_S
    assert raw.server.counters.garbage == 100


def test_a_changed_head_is_dropped(raw: RawClient) -> None:
    draw = random.Random(3)
    for _ in range(50):
        head = bytearray(raw.request(Force(7))[0])
        place = draw.randrange(len(head))
        head[place] ^= 1 << draw.randrange(8)
        if place == 3:
            continue  # another kind that is a greeting would end the session
        assert raw.exchange(bytes(head), wait_ms=2) == ([], [])
    counters = raw.server.counters
    assert counters.forged > 20
    assert counters.received == 0


@pytest.mark.parametrize("size", [100, LARGE])
def test_changed_entries_are_refused_so_that_they_are_sent_again(raw: RawClient, size: int) -> None:
    frames = raw.request(add(7, entries(0, (size,))))
    frames[-1] = frames[-1][:-1] + bytes([frames[-1][-1] ^ 1])
    arrived, (header,) = raw.exchange(*frames, wait_ms=60_000)
    assert not arrived
    assert (header.kind, header.flags & 0xFF) == (MessageKind.REPLY, Status.REFUSED)
    assert raw.server.counters.damaged == 1
    assert len(raw.exchange(*raw.request(add(7, entries(0, (size,)))), wait_ms=60_000)[0]) == 1


def test_authentic_nonsense_is_refused(raw: RawClient) -> None:
    nonsense = [
        Outgoing(99),
        Outgoing(MessageKind.ADD, ledger_id=7),
        Outgoing(MessageKind.READ, ledger_id=7, numbers=(9, 3, 1, 1)),
        Outgoing(MessageKind.FORCE, ledger_id=-1),
        Outgoing(MessageKind.REPLY),
        Outgoing(MessageKind.AUTHORIZE, blob=b"short"),
    ]
    for outgoing in nonsense:
        arrived, (header,) = raw.exchange(raw.head(outgoing), wait_ms=60_000)
        assert not arrived
        assert (header.kind, header.flags) == (MessageKind.REPLY, Status.REFUSED)
    assert raw.server.counters.refused == len(nonsense)


def test_a_request_for_another_instance_is_answered_so(raw: RawClient) -> None:
    arrived, (header,) = raw.exchange(*raw.request(add(), instance=b"i" * 16), wait_ms=60_000)
    assert not arrived
    assert (header.flags, header.instance) == (Status.WRONG_INSTANCE, INSTANCE)


def test_a_link_to_a_replaced_bookie_is_answered_so() -> None:
    with world() as here:
        assert here.ask(here.link(Bookie("a", b"i" * 16)), add()) == Reply(Status.WRONG_INSTANCE)
        assert here.arrived == []


def test_garbage_is_harmless(keys: ClusterKeys | None) -> None:
    draw = random.Random(5)
    with world(keys) as here, RawClient(here.server, keys) as garbage:
        link = here.link()
        garbage.socket.send(b"x")
        here.until(lambda: here.server.counters.garbage == 1)  # so much before the first message would end it
        for number in range(300):
            frames = [draw.randbytes(draw.randrange(300)) for _ in range(draw.randrange(1, 5))]
            if number % 3 == 0:
                frames[0] = garbage.head(encode(add())) + frames[0]
            garbage.socket.send_multipart(frames)
        garbage.socket.send_multipart([b"x"] * 5000)
        for number in range(5):
            assert here.ask(link, add(), number) == OK
        here.until(lambda: here.server.counters.garbage == 302)
        assert here.server.counters.received == 5


def test_bytes_that_are_not_zmtp_are_harmless() -> None:
    with world() as here:
        host, port = here.server.addresses[0].removeprefix("tcp://").split(":")
        for data in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 100_000, bytes(64)):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(data)
                assert here.ask(here.link(), add()) == OK


def test_a_frame_beyond_the_bound_ends_the_connection_unread(keys: ClusterKeys | None) -> None:
    with Server([TCP], INSTANCE, keys, message_bytes_max=1 << 20) as server, RawClient(server, keys) as client:
        client.greet()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        client.socket.send(bytes(2 << 20))
        assert client.exchange() == ([], [])
        assert server.counters.garbage == 0
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10
        with RawClient(server, keys) as other:
            other.greet()
            assert len(other.exchange(*other.request(add(7, entries(0, (LARGE,)))), wait_ms=60_000)[0]) == 1


# ---- rights ----------------------------------------------------------------------------------------------------------

RIGHT = RightsKey(b"\x07" * 32)


def knows(session_id: bytes, proof: Authorize | AuthorizeMember) -> bool:
    """Check a proof as a bookie does, but for the description's MAC."""
    assert isinstance(proof, Authorize)
    return proof.description == RIGHT.public and proves_right(
        proof.description, proof.signature, session_id, INSTANCE, proof.ledger_id
    )


def test_a_right_is_proved_before_the_first_request_of_each_session() -> None:
    with world(authorize=knows) as here:
        link = here.link()
        here.links.grant(7, RIGHT.public, RIGHT)
        for number in range(2):
            assert here.ask(link, add(7), number) == OK
        peer = here.arrived[-1][0]
        assert peer.rights == {7: Right(RIGHT.public)}
        assert here.ask(link, add(8)) == OK
        assert 8 not in here.arrived[-1][0].rights
        link.lose("for the test")
        time.sleep(0.03)
        assert here.ask(link, add(7)) == OK
        assert here.arrived[-1][0] is not peer
        assert here.arrived[-1][0].rights == {7: Right(RIGHT.public)}


def test_a_wrong_proof_gives_no_right(raw: RawClient) -> None:
    raw.server.authorize = knows
    session_id = raw.greet()
    wrong = [
        Authorize(7, RIGHT.public, RIGHT.sign(session_id[::-1], INSTANCE, 7)),
        Authorize(7, RIGHT.public, RIGHT.sign(session_id, INSTANCE[::-1], 7)),
        Authorize(7, RIGHT.public, RIGHT.sign(session_id, INSTANCE, 8)),
        Authorize(7, RightsKey(b"\x08" * 32).public, RIGHT.sign(session_id, INSTANCE, 7)),
        Authorize(7, b"", b"s" * 64),
    ]
    for proof in wrong:
        _, (header,) = raw.exchange(*raw.request(proof), wait_ms=60_000)
        assert header.flags == Status.UNAUTHORIZED
    right = Authorize(7, RIGHT.public, RIGHT.sign(session_id, INSTANCE, 7))
    _, (header,) = raw.exchange(*raw.request(right), wait_ms=60_000)
    assert header.flags == Status.OK
    ((peer, _, _),), _ = raw.exchange(*raw.request(Force(7)), wait_ms=60_000)
    assert peer.rights == {7: Right(RIGHT.public)}


def test_without_a_callback_no_client_has_rights() -> None:
    with world() as here:
        proof = Authorize(7, RIGHT.public, b"s" * 64)
        assert here.ask(here.link(), proof) == Reply(Status.UNAUTHORIZED)


def test_rights_are_bounded_and_proved_again_when_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "RIGHTS_MAX", 2)
    with world(authorize=knows) as here:
        here.answer = lambda peer, _, request: (
            OK if isinstance(request, Add) and request.ledger_id in peer.rights else NO
        )
        link = here.link()
        for ledger_id in (1, 2, 3):
            here.links.grant(ledger_id, RIGHT.public, RIGHT)
            assert here.ask(link, add(ledger_id)) == OK
        assert list(here.arrived[-1][0].rights) == [2, 3]
        assert here.ask(link, add(1)) == NO
        assert here.ask(link, add(1)) == OK
        here.links.revoke(2)
        assert here.ask(link, add(2)) == NO


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SESSIONS_MAX", 2)
    monkeypatch.setattr(server_module, "IDLE_NS", 0)
    with world() as here:
        first = here.link()
        assert here.ask(first, add()) == OK
        for _ in range(2):
            assert here.ask(here.link(), add()) == OK
        assert len(here.server.peers) == 2
        # A client whose session was forgotten learns it with its next request, which is sent again in a new session.
        assert here.ask(first, add()) == OK
        assert here.links.counters.forgotten == 1
        assert here.links.counters.lost == 0


def test_a_session_of_a_writer_does_not_displace_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SESSIONS_MAX", 2)
    monkeypatch.setattr(server_module, "IDLE_NS", 0)
    monkeypatch.setattr(server_module, "SILENCE_NS", 0)
    monkeypatch.setattr(server_module, "PROBE_NS", 0)
    with world(authorize=knows) as here:
        writers = [here.link(), here.link()]
        here.links.grant(7, RIGHT.public, RIGHT)
        assert [here.ask(link, add()) for link in writers] == [OK, OK]
        peers = list(here.server.peers.values())
        third = here.link()
        assert here.ask(third, add()) is None
        assert "as many sessions as it keeps" in third.why_down
        assert list(here.server.peers.values()) == peers
        assert [here.ask(link, add()) for link in writers] == [OK, OK]
        # A session whose client has gone is displaced at once.
        writers[0].close()
        here.until(lambda: here.ask(here.link(), add()) == OK)
        assert here.ask(writers[1], add()) == OK
        assert here.links.counters.forgotten == 0


def test_sessions_of_which_nothing_is_heard_end_if_their_clients_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SILENCE_NS", 1)
    monkeypatch.setattr(server_module, "PROBE_NS", 1)
    with world() as here:
        first, second = here.link(), here.link()
        here.until(lambda: first.is_up and second.is_up)
        assert len(here.server.peers) == 2
        first.close()

        def only_two() -> bool:
            other = here.link()
            here.until(lambda: other.is_up)
            found = len(here.server.peers) == 2
            other.close()
            return found

        here.until(only_two)
        assert here.ask(second, add()) == OK


def test_everything_outstanding_is_sent_again_when_a_session_was_forgotten(keys: ClusterKeys | None) -> None:
    with world(keys, authorize=knows) as here:
        link = here.link()
        here.links.grant(7, RIGHT.public, RIGHT)
        assert here.ask(link, add()) == OK
        here.server.peers.clear()
        here.arrived.clear()
        here.outcomes.clear()
        for number in range(10, 20):
            assert link.send(number, add())
        here.until(lambda: len(here.outcomes) == 10)
        assert [outcome[1:] for outcome in here.outcomes] == [(number, OK) for number in range(10, 20)]
        assert [number for _, number, _ in here.arrived] == list(range(10, 20))
        assert all(7 in peer.rights for peer, _, _ in here.arrived)
        assert (here.links.counters.forgotten, here.links.counters.lost) == (1, 0)


def test_a_bookie_that_forgets_every_session_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with world() as here:
        link = here.link()
        assert here.ask(link, add()) == OK
        monkeypatch.setattr(here.server, "peers", Forgetful())
        assert here.ask(link, add()) is None
        assert "forgot the session" in link.why_down


class Forgetful(dict[bytes, Peer]):
    """Sessions that are forgotten as soon as they begin."""

    def __setitem__(self, key: bytes, value: Peer) -> None:
        """Keep nothing."""


def test_a_client_that_does_not_read_costs_a_bounded_amount_and_no_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "UNREAD_BYTES_MAX", 4 << 20)
    large = Answer(Status.OK, entries(0, (1 << 20,)))
    with world(None) as here, RawClient(here.server, None) as slow:
        link = here.link()
        slow.greet()
        ((peer, _, _),), _ = slow.exchange(*slow.request(Read(7, 0, 9, 1, 1 << 20)), wait_ms=60_000)
        assert all(here.server.reply(peer, number, large) for number in range(100))
        assert here.server.counters.unread == 97
        assert here.ask(link, add()) == OK
        # A client that reports what it has read is served again.
        slow.mac, mac = peer.mac, slow.mac
        assert mac is peer.mac
        slow.counter += 1
        head = encode(Read(7, 0, 9, 1, 1)).head(9, slow.counter, 4 << 20, INSTANCE, slow.mac, 1)
        slow.socket.send(head)
        here.until(lambda: len(here.arrived) == 2)
        assert here.server.reply(peer, 9, large)
        assert here.server.counters.unread == 97


def test_a_client_that_reads_may_ask_for_any_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "UNREAD_BYTES_MAX", 1 << 20)
    large = Answer(Status.OK, entries(0, (300_000,)))
    with world() as here:
        here.answer = lambda _peer, _number, _request: large
        link = here.link()
        for number in range(10):
            assert flat(here.ask(link, Read(7, 0, 9, 1, 300_000), number)) == flat(large)


def test_a_client_that_never_reads_loses_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "QUEUE_MESSAGES", 100)
    with world(None) as here, RawClient(here.server, None) as slow:
        slow.socket.rcvhwm = 100
        link = here.link()
        slow.greet()
        ((peer, _, _),), _ = slow.exchange(*slow.request(Force(7)), wait_ms=60_000)
        answer = Answer(Status.OK, entries(0, (8000,)))
        taken = 0
        while here.server.reply(peer, taken, answer):
            taken += 1
            assert taken < 20_000
        assert here.server.counters.dropped == 1
        assert not here.server.reply(peer, 1, OK)
        assert here.ask(link, add()) == OK


def test_replies_to_a_client_that_is_gone_are_dropped() -> None:
    with world(None) as here:
        with RawClient(here.server, None) as gone:
            gone.greet()
            ((peer, _, _),), _ = gone.exchange(*gone.request(Force(7)), wait_ms=60_000)
        here.until(lambda: not here.server.reply(peer, 1, OK))
        assert here.server.counters.dropped == 1


def test_waiting_messages_are_taken_in_bounded_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "RECEIVED_MAX", 10)
    with world(None) as here:
        link = here.link()
        here.until(lambda: link.is_up)
        for number in range(25):
            assert link.send(number, add())
        portions: list[int] = []
        while sum(portions) < 25:
            portions.append(len(here.server.receive(1000)))
        assert max(portions) <= 10


def test_receive_is_woken_from_another_thread() -> None:
    with Server([TCP], INSTANCE) as server:
        timer = threading.Timer(0.02, server.wake)
        timer.start()
        start = time.perf_counter()
        assert server.receive(2 * 60_000) == []
        assert time.perf_counter() - start < WAIT_S
        timer.join()
        server.wake()
        server.wake()
        assert server.receive(5000) == []
        assert server.receive(0) == []


def test_messages_that_arrive_during_a_send_are_received_at_once() -> None:
    """Sending takes ZeroMQ's signal that something came, so the signal cannot be relied on afterwards."""
    with world() as here:
        here.answer = lambda _peer, _number, _request: None
        link = here.link()
        assert link.send(1, add())
        here.until(lambda: here.arrived)
        assert link.send(2, add())
        time.sleep(0.05)
        here.server.reply(here.arrived[0][0], 1, OK)
        start = time.perf_counter()
        assert [number for _, number, _ in here.server.receive(2 * 60_000)] == [2]
        time.sleep(0.05)
        assert link.send(3, add())
        assert [reply for _, _, reply in here.links.poll(2 * 60_000)] == [OK]
        assert time.perf_counter() - start < WAIT_S


def test_a_hostile_client_cannot_take_another_ones_place(keys: ClusterKeys | None) -> None:
    """Z3: a routing id belongs to the connection that used it first."""
    with Server([TCP], INSTANCE, keys) as server, RawClient(server, keys) as first:
        first.socket.disconnect(server.addresses[0])
        first.socket.setsockopt(zmq.ROUTING_ID, b"chosen")
        first.socket.connect(server.addresses[0])
        first.greet()
        with RawClient(server, keys) as thief:
            thief.socket.disconnect(server.addresses[0])
            thief.socket.setsockopt(zmq.ROUTING_ID, b"chosen")
            thief.socket.connect(server.addresses[0])
            for _ in range(20):
                assert server.receive(5) == []
            assert len(first.exchange(*first.request(add()), wait_ms=60_000)[0]) == 1


def test_no_secret_is_shown(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with world() as here:
        link = here.link()
        assert here.ask(link, add()) == OK
        peer = here.arrived[0][0]
        shown = "".join(map(repr, (link, peer, here.server, here.links, here.server.counters, BOOKIE)))
    out = capfd.readouterr()
    shown += out.out + out.err + caplog.text
    for secret in (KEYS.session_key, KEYS.metadata_key, KEYS.client.secret, peer.session_id):
        assert secret.hex() not in shown
        assert repr(secret)[2:-1] not in shown


def test_runs_of_an_array_are_not_changed_by_sending() -> None:
    sizes = array("q", [100])
    with world(None) as here:
        assert here.ask(here.link(), add(7, EntryRun(0, 1, sizes, (bytes(100),)))) == OK
    assert sizes == array("q", [100])


def test_a_client_that_lies_about_what_it_has_read_costs_a_bounded_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "UNWRITTEN_BYTES_MAX", 8 << 20)
    large = Answer(Status.OK, entries(0, (1 << 20,)))
    with world(None) as here, RawClient(here.server, None) as liar:
        link = here.link()
        liar.socket.rcvhwm = 1
        liar.greet()
        for number in range(100):
            liar.counter += 1
            head = encode(Read(7, 0, 9, 1, 1)).head(number, liar.counter, number << 20, INSTANCE, liar.mac, 1)
            liar.socket.send(head)
            here.until(lambda number=number: len(here.arrived) == number + 1)  # type: ignore[misc]
            peer = here.arrived[-1][0]
            assert here.server.reply(peer, number, large)
        lane = here.server.lanes.of(here.arrived[-1][0].routing_id)
        assert lane.unwritten <= 8 << 20
        assert here.server.counters.unread > 0
        assert here.ask(link, add()) == OK


def test_a_message_larger_than_a_message_may_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(None, message_bytes_max=1 << 24) as here:
        monkeypatch.setattr(here.server, "message_bytes_max", 1 << 20)
        with RawClient(here.server, None) as client:
            client.greet()
            runs = tuple(entries(first, (300_000,)) for first in range(8))
            arrived, (header,) = client.exchange(*client.request(Add(7, runs, -1)), wait_ms=60_000)
            assert not arrived
            assert header.flags & 0xFF == Status.REFUSED


def test_a_connection_that_floods_loses_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LANE_BYTES_MAX", 1 << 20)
    with world(None) as here, RawClient(here.server, None) as flood:
        link = here.link()
        flood.greet()
        for number in range(100):
            flood.socket.send_multipart(flood.request(add(7, entries(0, (40_000,))), number))
        here.until(lambda: here.server.counters.flooded)
        assert here.ask(link, add()) == OK
        ended = here.server.take_ended()
        assert len(ended) == 1
        assert ended[0] not in here.server.peers.values()


def test_silent_unauthenticated_connections_are_bounded(
    monkeypatch: pytest.MonkeyPatch, keys: ClusterKeys | None
) -> None:
    monkeypatch.setattr(connection_limit, "connections_max", lambda: 12)
    with world(keys) as here, ExitStack() as stack:
        link = here.link()
        assert here.ask(link, add()) == OK
        host, port = here.server.addresses[0].removeprefix("tcp://").split(":")
        strangers = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(40)]
        watched = here.server.connections
        assert watched is not None
        here.until(lambda: watched.ended >= 40 + 1 - 12)
        assert here.ask(link, add()) == OK
        for stranger in strangers:
            stranger.close()
        here.until(lambda: here.ask(here.link(), add()) == OK)
        assert len(watched.open) <= 40


def test_strangers_before_the_end_of_their_handshake_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "GREETING_MAX", 4)
    with world() as here, ExitStack() as stack:
        links = [here.link() for _ in range(3)]
        for number, link in enumerate(links):
            assert here.ask(link, add(), number) == OK
        host, port = here.server.addresses[0].removeprefix("tcp://").split(":")
        for _ in range(20):
            stack.enter_context(socket.create_connection((host, int(port))))
        watched = here.server.connections
        assert watched is not None
        here.until(lambda: watched.ended >= 16)
        for number, link in enumerate(links):
            assert here.ask(link, add(), number) == OK
        stack.close()
        here.until(lambda: here.ask(here.link(), add()) == OK)


def test_bytes_that_strangers_may_send_before_their_handshake_ends_are_bounded(keys: ClusterKeys | None) -> None:
    """ZeroMQ keeps what comes of a frame, up to its full size, until the handshake fails."""
    frame = struct.pack(">BQ", 0x06, MESSAGE_BYTES_MAX - 1)  # of a handshake, and long
    mechanism = b"NULL" if keys is None else b"CURVE"
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    with world(keys) as here, ExitStack() as stack:
        link = here.link()
        assert here.ask(link, add()) == OK
        watched = here.server.connections
        assert watched is not None
        host, port = here.server.addresses[0].removeprefix("tcp://").split(":")
        for number in range(1, 4):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(greeting + frame + bytes(2 * connection_limit.GREETING_BYTES_MAX))
            here.until(lambda number=number: watched.ended == number)  # type: ignore[misc]
            stranger.settimeout(WAIT_S)
            with suppress(ConnectionResetError):
                while stranger.recv(1 << 16):
                    pass
        assert here.ask(link, add()) == OK
        assert here.ask(here.link(), add()) == OK


def test_members_whose_greeting_is_read_before_their_connection_is_known_may_send_much_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with world() as here:
        watched = here.server.connections
        assert watched is not None
        look = watched.look
        monkeypatch.setattr(here.server, "watched", {watched.monitor.fileno(): lambda: None})
        here.server.watched[here.server.authenticator.socket.fileno()] = here.server.authenticator.serve  # type: ignore[union-attr]
        link = here.link()
        assert here.ask(link, add()) == OK
        look(here.server.addresses)
        assert not watched.greeting
        assert here.ask(link, add(7, entries(0, (1 << 20,) * 4)), 2) == OK
        assert watched.ended == 0


def test_a_message_read_after_its_connection_ended_exempts_no_later_connection(keys: ClusterKeys | None) -> None:
    """A descriptor is used again: what is known of a member's connection must not count for a stranger's."""
    with Server([TCP], INSTANCE, keys) as server, ExitStack() as stack:
        watched = server.connections
        assert watched is not None
        strangers = [stack.enter_context(socket.socket()) for _ in range(64)]
        with RawClient(server, keys) as member:
            member.socket.send_multipart(member.request(add()))
            wait_until(lambda: _has_message(server), "the message has come")
            watched.look(server.addresses)
            (descriptor,) = watched.open
        wait_until(lambda: not _known(server), "the connection has ended")
        server.receive(0)
        _connect(server, strangers, descriptor)
        watched.look(server.addresses)
        assert descriptor in watched.open
        assert watched.greeting.keys() == watched.open


def test_a_message_exempts_its_connection_before_the_end_of_an_earlier_one_is_known() -> None:
    """Else a member that connects again, by the same descriptor, would be ended if it sends much at once."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    with Server([TCP], INSTANCE, None) as server, ExitStack() as stack:
        watched = server.connections
        assert watched is not None
        members = [stack.enter_context(socket.socket()) for _ in range(64)]
        with socket.socket() as first:
            _connect(server, [first])
            wait_until(lambda: _known(server), "the first is accepted")
        (descriptor,) = watched.open
        wait_until(lambda: not _is_open(server, descriptor), "the first is closed")
        for member in _connect(server, members, descriptor):
            member.sendall(greeting + bytes((4, len(ready))) + ready)
            member.settimeout(WAIT_S)
            received = b""
            while b"READY" not in received:  # a message before that would end the handshake
                part = member.recv(1 << 10)
                assert part, "the server ended the connection"
                received += part
            member.sendall(b"\x00\x05hello")
            wait_until(lambda: _has_message(server), "its message has come")
            server.drain()
        watched.look(server.addresses)
        assert descriptor in watched.open
        assert not watched.greeting


def _has_message(server: Server) -> bool:
    """Let strangers and members in, and return whether a message can be received."""
    if server.authenticator is not None:
        server.authenticator.serve()
    events: Any = server.socket.get(zmq.EVENTS)
    return bool(events & zmq.POLLIN)


def _known(server: Server) -> set[int]:
    """Read the monitor, and return the descriptors of the connections that are known to be open."""
    watched = server.connections
    assert watched is not None
    watched.look(server.addresses)
    return watched.open


def _is_open(server: Server, descriptor: int) -> bool:
    watched = server.connections
    assert watched is not None
    return watched.is_connection(descriptor, server.addresses)


def _open_files() -> set[str]:
    """Return this process's open files, by inode; looking takes no descriptor, which the next connection would have."""
    found = set[str]()
    for number in range(1024):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def _connect(server: Server, sockets: list[socket.socket], descriptor: int | None = None) -> list[socket.socket]:
    """Connect sockets until the server has accepted all, or one of them by a descriptor; return those."""
    host, port = server.addresses[0].removeprefix("tcp://").split(":")
    for number, each in enumerate(sockets, 1):
        before = _open_files()
        each.connect((host, int(port)))
        wait_until(lambda: _open_files() - before, "it is accepted")  # noqa: B023
        if descriptor is not None and _is_open(server, descriptor):
            return sockets[:number]
    return sockets


def test_members_may_send_much_at_once_and_be_silent_for_long() -> None:
    with world() as here:
        links = [here.link() for _ in range(4)]
        for number, link in enumerate(links):
            assert here.ask(link, add(7, entries(0, (1 << 20,) * 4)), number) == OK
        watched = here.server.connections
        assert watched is not None
        here.until(lambda: not watched.greeting)
        assert watched.ended == 0


def test_connections_stay_below_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert connection_limit.connections_max() == 1024 - connection_limit.DESCRIPTORS_RESERVED
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert connection_limit.connections_max() == connection_limit.CONNECTIONS_MAX
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connection_limit.connections_max() == connection_limit.CONNECTIONS_MAX
