"""No connection takes the bookie's time or memory from the others."""

from __future__ import annotations

from typing import Any

import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pybk.transport import lanes as lanes_module
from pybk.transport.lanes import (
    LANE_BYTES_MAX,
    MARK_BYTES,
    SHARE_BYTES,
    SHARE_MESSAGES,
    TURN_BYTES,
    TURN_MESSAGES,
    Lanes,
    Waiting,
)
from pybk.transport.server import Server
from tests.transport.wire_harness import INSTANCE, RawClient, add, entries

LATER = 10**9


def message(size: int = 100) -> Waiting:
    return Waiting(b"", (), size)


def served(lanes: Lanes, now_ns: int = 0) -> dict[bytes, list[int]]:
    """Return the sizes of what a turn serves, by connection."""
    found: dict[bytes, list[int]] = {}
    for routing_id, waiting in lanes.turn(now_ns):
        found.setdefault(routing_id, []).append(waiting.size)
    return found


def test_a_connection_that_is_alone_gets_the_whole_turn() -> None:
    lanes = Lanes()
    for _ in range(3000):
        assert lanes.put(b"a", message())
    assert served(lanes) == {b"a": [100] * TURN_MESSAGES}
    lanes = Lanes()
    for _ in range(80):
        assert lanes.put(b"a", message(1 << 20))
    assert served(lanes) == {b"a": [1 << 20] * (TURN_BYTES >> 20)}


def test_a_connection_that_was_not_alone_just_now_gets_its_share() -> None:
    lanes = Lanes()
    assert lanes.put(b"b", message())
    for _ in range(3000):
        assert lanes.put(b"a", message())
    assert served(lanes) == {b"a": [100] * SHARE_MESSAGES, b"b": [100]}
    assert served(lanes, 1000) == {b"a": [100] * SHARE_MESSAGES}
    assert served(lanes, LATER) == {b"a": [100] * TURN_MESSAGES}


@settings(suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 3 << 20)), min_size=1, max_size=40),
    st.integers(1, 1 << 20),
)
def test_waiting_messages_are_served_in_the_next_turn_despite_a_flood(floods: list[tuple[int, int]], size: int) -> None:
    lanes = Lanes()
    for number, (count, flood_bytes) in enumerate(floods):
        for _ in range(count):
            lanes.put(b"flood %d" % number, message(flood_bytes))
    lanes.put(b"other", message(size))
    waiting = sum(len(lane.waiting) for lane in lanes.busy_lanes.values())
    turns = 1 + sum(min(flood_bytes, 3 << 20) for _, flood_bytes in floods) // TURN_BYTES
    seen = 0
    for turn in range(turns):
        found = served(lanes)
        seen += b"other" in found
        assert sum(map(sum, found.values())) <= TURN_BYTES + (3 << 20)
        for sizes in found.values():
            assert len(sizes) <= SHARE_MESSAGES
            assert len(sizes) == 1 or sum(sizes) <= SHARE_BYTES
        waiting -= sum(map(len, found.values()))
        if turns == 1:
            assert turn == 0
    assert seen == 1
    while lanes.busy_lanes:
        waiting -= sum(map(len, served(lanes).values()))
    assert (waiting, lanes.waiting_bytes) == (0, 0)


def test_a_connection_with_more_on_the_way_than_it_may_loses_it() -> None:
    lanes = Lanes()
    assert lanes.put(b"other", message())
    for _ in range(LANE_BYTES_MAX >> 20):
        if not lanes.put(b"a", message(1 << 20)):
            break
    else:
        raise AssertionError("nothing bounds what waits")
    assert served(lanes) == {b"other": [100]}
    assert lanes.waiting_bytes == 0
    assert lanes.put(b"a", message())


class WriteTracker:
    done = False


def test_sent_bytes_count_until_written_whatever_the_client_reports() -> None:
    lanes = Lanes()
    lane = lanes.of(b"a")
    marks = []
    for _ in range(10):
        lane.unmarked += MARK_BYTES // 2
        if lane.unmarked >= MARK_BYTES:
            marks.append(WriteTracker())
            lanes.marked(lane, marks[-1])
    assert len(marks) == 5
    assert lane.unwritten == lanes.unwritten == 5 * MARK_BYTES
    marks[1].done = True  # those before it are written, too, but it says so only in order
    lanes.check_written(lane)
    assert lane.unwritten == 5 * MARK_BYTES
    marks[0].done = True
    lanes.check_all_written()
    assert lane.unwritten == lanes.unwritten == 3 * MARK_BYTES
    for mark in marks:
        mark.done = True
    lanes.check_all_written()
    assert lanes.unwritten == 0
    assert lanes.lanes == {}


def test_a_turn_of_the_bookie_serves_another_session_though_many_flood() -> None:
    """Over inproc what was sent is there, so that each turn can be looked at."""
    context = zmq.Context()
    with Server(["inproc://bookie"], INSTANCE, context=context) as server:
        floods = [RawClient(server, None, context) for _ in range(5)]
        with RawClient(server, None, context) as other:
            for client in (*floods, other):
                client.greet()
            for client in floods:
                for number in range(150):
                    client.socket.send_multipart(client.request(add(7, entries(0, (20_000,))), number))
            other.socket.send_multipart(other.request(add(8), 1))
            turns: list[list[Any]] = []
            while len(turns) < 4:
                turns.append(server.receive(0))
            for turn in turns[:2]:
                by_peer: dict[object, int] = {}
                for peer, _, request in turn:
                    by_peer[peer] = by_peer.get(peer, 0) + request.runs[0].sizes[0]
                    assert by_peer[peer] <= SHARE_BYTES
                assert len(by_peer) >= 5
            assert [request.ledger_id for _, _, request in turns[0] if request.ledger_id == 8] == [8]
        for client in floods:
            client.socket.close(linger=0)
    context.term()
    assert lanes_module.SHARE_MESSAGES == 64
