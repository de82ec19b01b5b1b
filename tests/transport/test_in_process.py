"""The client of a bookie's own process passes its requests by call, with the outcomes that a socket would have."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from pybk.errors import UsageError
from pybk.replication.messages import Add, Force, Read, Reply, Status
from pybk.transport.client_links import Links
from pybk.transport.cluster_keys import MemberKey, RightsKey, held_keys, proves_right
from pybk.transport.codec import Answer, Authorize, AuthorizeMember, LacPacket
from pybk.transport.in_process import Called, InProcessLink
from pybk.transport.lanes import SHARE_BYTES, SHARE_MESSAGES, TURN_MESSAGES, Waiting
from pybk.transport.server import Caller, Server
from tests.transport.wire_harness import BOOKIE, INSTANCE, KEYS, OK, TCP, RawClient, World, add, entries
from tests.waiting import WAIT_S, wait_until

RIGHT = RightsKey(bytes(32))
NO_RIGHTS: Mapping[int, tuple[bytes, RightsKey | MemberKey]] = MappingProxyType({})


def anyone(_session_id: bytes, _proof: Authorize | AuthorizeMember) -> bool:
    return True


@contextmanager
def own_world(
    authorize: Callable[[bytes, Authorize | AuthorizeMember], bool] = anyone, **settings: Any
) -> Iterator[tuple[World, InProcessLink]]:
    with (
        Server([TCP], INSTANCE, KEYS, authorize=authorize) as server,
        Links(KEYS, own=(BOOKIE, server), **settings) as links,
    ):
        link = links.own_link(BOOKIE)
        assert link is not None
        yield World(server, links), link


class Stuck:
    """A server that takes requests and answers none."""

    instance = INSTANCE
    closed = False

    def __init__(self) -> None:
        self.called: list[int] = []
        self.woken = 0

    def call(self, _caller: Caller, request_id: int, _message: Any, _nbytes: int) -> bool:
        self.called.append(request_id)
        return True

    def wake_called(self) -> None:
        self.woken += 1


def alone(
    server: Called,
    on_outcome: Callable[[int, Any], None],
    wake: Callable[[], None],
    look_at: Callable[[int], None] = lambda _: None,
    *,
    rights: Mapping[int, tuple[bytes, RightsKey | MemberKey]] = NO_RIGHTS,
    bytes_max: int = 1000,
) -> InProcessLink:
    """Return a link that belongs to no links."""
    return InProcessLink(
        BOOKIE,
        server,
        grants=rights,
        on_outcome=on_outcome,
        look_at=look_at,
        wake=wake,
        outstanding_bytes_max=bytes_max,
        message_bytes_max=bytes_max,
    )


def ask(here: World, link: InProcessLink, message: Any, number: int = 1) -> Any:
    here.outcomes.clear()
    assert link.send(number, message, 60 * 10**9)
    here.until(lambda: here.outcomes)
    ((found, request_id, reply),) = here.outcomes
    assert (found, request_id) == (link, number)
    return reply


def test_a_request_arrives_as_it_is_and_its_reply_comes_back() -> None:
    with own_world() as (here, link):
        message = add()
        assert ask(here, link, message) is OK
        ((peer, number, request),) = here.arrived
        assert (number, request) == (1, message)
        assert isinstance(request, Add)
        assert request.runs[0].body[0] is message.runs[0].body[0], "no copy was made"
        answer = Answer(Status.OK, entries())
        here.answer = lambda *_: answer
        assert ask(here, link, Read(7, 0, 0, 1, 1 << 20), 2) is answer
        assert isinstance(peer, Caller)
        assert link.outstanding_bytes == 0
        assert here.links.own_link(BOOKIE) is link
        assert here.server.peers == {}


def test_another_bookie_is_not_of_this_process() -> None:
    with own_world() as (here, _):
        assert here.links.own_link(BOOKIE._replace(instance=b"another-16-bytes")) is None
    with Links(KEYS) as links:
        assert links.own_link(BOOKIE) is None


def test_requests_are_taken_in_order_and_the_bookie_is_woken_once_for_all() -> None:
    with own_world() as (here, link):
        for number in range(5):
            assert link.send(number, add(number), 60 * 10**9)
        assert here.server.receive(0) != [], "what was handed over is taken whether or not there was a wake-up"
        here.turn()
        for number in range(5, 10):
            assert link.send(number, add(number), 60 * 10**9)
        here.links.poll(0)  # flushes
        taken = [request for _, _, request in here.server.receive(60_000)]
        assert taken == [add(number) for number in range(5, 10)]


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "begins to wait"])
def test_a_bookie_that_waits_takes_what_is_handed_over_at_once(waits: bool) -> None:
    def sleeps(native_id: int) -> bool:
        stat = Path(f"/proc/self/task/{native_id}/stat").read_text(encoding="ascii")
        return stat.rsplit(") ", 1)[1].startswith("S")

    def take() -> list[int]:
        while not (taken := here.server.receive(2 * int(WAIT_S) * 1000)):
            pass
        return [number for _, number, _ in taken]

    with own_world() as (here, link), ThreadPoolExecutor(1) as pool:
        native_id = pool.submit(threading.get_native_id).result(WAIT_S)
        here.server.receive(0)
        if not waits:
            assert link.send(1, add(), 60 * 10**9)
        taken = pool.submit(take)
        if waits:
            wait_until(lambda: sleeps(native_id) and not taken.done())
            assert link.send(1, add(), 60 * 10**9)
            here.links.poll(0)
        try:
            assert taken.result(WAIT_S) == [1]
        finally:
            here.server.wake()


def test_a_client_of_the_process_gets_its_share_of_a_turn_as_any_other() -> None:
    with own_world() as (here, link):
        lanes, counters = here.server.lanes, here.server.counters

        def turn() -> tuple[int, int]:
            """Return how many messages a turn served of the process, and of the socket."""
            before = counters.garbage
            return len(here.server.receive(0)), counters.garbage - before

        for number in range(2000):
            assert link.send(number, Force(7), 60 * 10**9)
        assert turn() == (TURN_MESSAGES, 0), "it is alone"
        for _ in range(2000):
            assert lanes.put(b"other", Waiting(b"garbage", (), 100))
        assert turn() == (SHARE_MESSAGES, SHARE_MESSAGES)
        while turn()[0]:
            pass
        sizes = SHARE_BYTES // 2, SHARE_BYTES // 2 - 1000, 2 * SHARE_BYTES, 100
        for number, size in enumerate(sizes, 2000):
            assert link.send(number, add(7, entries(0, (size,))), 60 * 10**9)
        assert [turn()[0] for _ in range(4)] == [2, 1, 1, 0]


def test_a_message_of_the_socket_that_arrived_alone_is_of_another_client() -> None:
    with own_world() as (here, link), RawClient(here.server) as other:
        other.greet()
        for number in range(2000):
            assert link.send(number, Force(7), 60 * 10**9)
        other.socket.send_multipart(other.request(Force(7)))
        assert here.server.socket.poll(int(WAIT_S) * 1000)
        assert len(here.server.receive(0)) == SHARE_MESSAGES + 1


def test_a_right_is_proved_once_and_again_when_the_bookie_denies_it() -> None:
    proofs: list[tuple[bytes, Any]] = []

    def note(session_id: bytes, proof: Authorize | AuthorizeMember) -> bool:
        proofs.append((session_id, proof))
        return True

    with own_world(note) as (here, link):
        here.links.grant(7, b"described", RIGHT)
        assert [ask(here, link, add(), number) for number in range(3)] == [OK] * 3
        ((session_id, proof),) = proofs
        assert proof.description == b"described"
        assert proves_right(RIGHT.public, proof.signature, session_id, INSTANCE, 7)
        (peer,) = {each[0] for each in here.arrived}
        assert peer.may_write(7)
        here.answer = lambda *_: Reply(Status.UNAUTHORIZED)
        assert ask(here, link, Force(7), 4).status is Status.UNAUTHORIZED
        peer.revoke(7)
        here.answer = lambda *_: OK
        assert ask(here, link, Force(7), 5) is OK
        assert len(proofs) == 2
        here.links.grant(7, b"described anew", RIGHT)
        assert ask(here, link, Force(7), 6) is OK
        assert proofs[-1][1].description == b"described anew"


def test_a_proof_that_is_refused_gives_no_right_and_a_member_gets_less_than_all() -> None:
    with own_world(lambda *_: False) as (here, link):
        here.links.grant(7, b"described", RIGHT)
        assert ask(here, link, add()) is OK
        assert here.arrived[0][0].rights == {}
    held = held_keys(KEYS)
    assert held is not None
    with own_world() as (here, link):
        here.links.grant(7, b"described", MemberKey(held))
        assert ask(here, link, add()) is OK
        assert not here.arrived[0][0].may_write(7)
        assert list(here.arrived[0][0].rights) == [7]


def test_a_proof_at_which_the_check_fails_is_refused_and_counted() -> None:
    def broken(_session_id: bytes, _proof: Authorize | AuthorizeMember) -> bool:
        raise RuntimeError("broken")

    with own_world(broken) as (here, link):
        here.links.grant(7, b"described", RIGHT)
        assert ask(here, link, add()) is OK
        assert here.server.counters.faults == 1


def test_too_much_outstanding_is_refused_until_replies_come() -> None:
    with own_world(outstanding_bytes_max=1000) as (here, link):
        big = add(7, entries(0, (700,)))
        assert link.send(1, big, 60 * 10**9)
        assert not link.send(2, big, 60 * 10**9)
        here.until(lambda: here.outcomes)
        assert link.send(2, big, 60 * 10**9)


def test_what_is_too_large_or_sent_twice_is_an_error() -> None:
    with own_world(message_bytes_max=1000) as (_, link):
        with pytest.raises(UsageError, match="the limit is 1000"):
            link.send(1, add(7, entries(0, (800,))), 60 * 10**9)
        assert link.send(1, add(), 60 * 10**9)
        with pytest.raises(UsageError, match="each id is sent once"):
            link.send(1, add(), 60 * 10**9)


def test_a_request_that_is_not_answered_ends_at_its_time_and_a_late_reply_is_ignored() -> None:
    with own_world() as (here, link):
        here.answer = lambda *_: None
        assert link.send(1, add(), 10**6)
        here.until(lambda: here.outcomes)
        assert here.outcomes == [(link, 1, None)]
        here.server.reply(here.arrived[0][0], 1, OK)
        here.turn()
        assert len(here.outcomes) == 1
        here.answer = lambda *_: OK
        assert ask(here, link, add(), 2) is OK


def test_a_reply_that_arrived_in_time_counts_however_late_it_is_taken() -> None:
    with own_world() as (here, link):
        assert link.send(1, add(), 10**6)
        ((peer, number, _),) = here.server.receive(0)
        here.server.reply(peer, number, OK)
        time.sleep(0.002)  # the deadline passes
        assert here.links.poll(0) == [(link, 1, OK)]
        assert here.links.poll(0) == []


def test_a_reply_wakes_a_client_that_takes_the_one_before_it_at_that_moment() -> None:
    class Taken(deque[Any]):
        """The client takes all that is there right before something is appended."""

        def append(self, item: Any) -> None:
            link.take()
            super().append(item)

    server, wakes = Stuck(), list[int]()
    link = alone(server, lambda *_: None, lambda: wakes.append(len(link.arrived)))
    link.arrived = Taken()
    for number in range(3):
        assert link.send(number, add(), 60 * 10**9)
        link.deliver(number, OK)
    assert wakes == [1, 1, 1]


def test_the_bookie_is_woken_when_something_was_handed_over_and_the_client_until_it_closes() -> None:
    server, wakes = Stuck(), list[int]()
    link = alone(server, lambda *_: None, lambda: wakes.append(1))
    for number in range(2):
        assert link.send(number, Force(7), 60 * 10**9)
    for _ in range(2):
        link.flush()
    assert server.woken == 1
    link.deliver(0, OK)
    link.take()
    assert wakes == [1]
    link.close()
    assert server.woken == 2, "the session ends now, not with the next request of another client"
    link.deliver(1, OK)
    assert wakes == [1], "the descriptor may be another file by now"


def test_a_right_is_proved_before_the_request_that_takes_it() -> None:
    server = Stuck()
    link = alone(server, lambda *_: None, lambda: None, rights={7: (b"described", RIGHT)})
    assert link.send(1, Force(7), 60 * 10**9)
    assert server.called == [1 << 63, 1]


def test_deadlines_are_looked_at_and_reads_count_what_they_ask_for() -> None:
    looks: list[int] = []
    link = alone(Stuck(), lambda *_: None, lambda: None, looks.append)
    assert link.send(1, Read(7, 0, 0, 1, 700), 60 * 10**9)
    assert not link.send(2, Force(7), 60 * 10**9)
    (deadline_ns,) = looks
    link.look_after(deadline_ns - 1)
    assert looks == [deadline_ns, deadline_ns], "the time of the next look was forgotten"


def test_after_the_end_nothing_is_handed_over() -> None:
    server, outcomes = Stuck(), list[tuple[int, Any]]()
    link = alone(server, lambda *outcome: outcomes.append(outcome), lambda: None)
    assert link.send(1, Force(7), 60 * 10**9)
    link.end()
    link.take()
    assert link.send(2, Force(7), 60 * 10**9)
    assert outcomes == [(1, None), (2, None)]
    assert server.called == [1]


def test_what_waits_at_a_bookie_that_makes_no_progress_is_bounded() -> None:
    server, outcomes = Stuck(), list[tuple[int, Any]]()
    link = alone(server, lambda *outcome: outcomes.append(outcome), lambda: None)
    big = add(7, entries(0, (200,)))
    for number in range(4):
        assert link.send(number, big, 1)
        link.look_after(time.monotonic_ns() + 1)
        assert outcomes.pop() == (number, None)
    assert server.called == [0, 1], "the others would have to wait behind what is late"
    assert link.outstanding_bytes == 0
    link.deliver(0, OK)
    link.take()
    for number in range(4, 6):
        assert link.send(number, big, 60 * 10**9)
    assert server.called == [0, 1, 4, 5]
    assert outcomes == []


def test_a_server_that_is_closed_is_nobodys_own() -> None:
    with Links(KEYS, own=(BOOKIE, server := Server([TCP], INSTANCE, KEYS))) as links:
        link = links.own_link(BOOKIE)
        assert link is not None
        server.close()
        assert links.own_link(BOOKIE) is None, "another process may be this bookie by now"
        assert link.send(1, add(), 60 * 10**9)
        assert links.poll(0) == [(link, 1, None)]


@pytest.mark.parametrize("taken", [True, False])
def test_a_request_ends_with_the_server_whether_it_was_taken_or_not(*, taken: bool) -> None:
    with Links(KEYS, own=(BOOKIE, server := Server([TCP], INSTANCE, KEYS))) as links:
        link = links.own_link(BOOKIE)
        assert link is not None
        assert link.send(1, add(), 60 * 10**9)
        assert not taken or len(server.receive(0)) == 1
        server.close()
        assert links.poll(60_000) == [(link, 1, None)]


def test_a_closed_server_leaves_no_request_without_an_outcome() -> None:
    with Links(KEYS, own=(BOOKIE, server := Server([TCP], INSTANCE, KEYS, authorize=anyone))) as links:
        link = links.own_link(BOOKIE)
        assert link is not None
        for number in range(2):
            assert link.send(number, add(), 60 * 10**9)
        assert len(server.receive(0)) == 2
        assert link.send(2, add(), 60 * 10**9)
        server.close()
        found: list[Any] = []

        def all_ended() -> bool:
            found.extend(links.poll(100))
            return len(found) == 3

        wait_until(all_ended, "three outcomes")
        assert found == [(link, number, None) for number in range(3)]
        for number in (3, 4):
            assert link.send(number, add(), 60 * 10**9)
            assert links.poll(0) == [(link, number, None)]
        assert link.outstanding_bytes == 0


def test_a_session_ends_with_its_links_and_the_bookie_drops_what_it_wrote() -> None:
    with Server([TCP], INSTANCE, KEYS, authorize=anyone) as server:
        links = Links(KEYS, own=(BOOKIE, server))
        link = links.own_link(BOOKIE)
        assert link is not None
        assert link.send(1, add(), 60 * 10**9)
        ((peer, number, _),) = server.receive(0)
        peer.writes.add(7)
        assert server.has_writer(7)
        links.close()
        assert server.receive(60_000) == []
        assert server.take_ended() == [peer]
        assert not server.has_writer(7)
        server.reply(peer, number, OK)  # wakes nothing: the descriptor may be another file by now


def test_a_link_that_was_closed_is_made_again() -> None:
    with own_world() as (here, link):
        assert link.send(1, add(), 60 * 10**9)
        link.close()
        assert here.links.poll(0) == [(link, 1, None)]
        again = here.links.own_link(BOOKIE)
        assert again is not None
        assert again is not link
        assert ask(here, again, LacPacket(7, b"x"), 2) is OK
        assert len(here.server.take_ended()) == 1


def test_its_name_has_no_secret() -> None:
    with own_world() as (here, link):
        here.links.grant(7, b"described", RIGHT)
        assert ask(here, link, add()) is OK
        assert repr(link) == f"<InProcessLink to {BOOKIE}>"
