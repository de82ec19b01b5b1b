from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from pybk.errors import UsageError
from pybk.replication.messages import EntryRun, Force, Read, ReadLac, Reply, Status
from pybk.transport import client_links, codec, frames, heartbeat
from pybk.transport.client_links import Link, LinkCounters, Links
from pybk.transport.cluster_keys import ClusterKeys, greeting_mac
from pybk.transport.codec import Answer, EntryRead, MessageKind, OneEntry
from pybk.transport.frames import Outgoing
from pybk.transport.in_process import NEVER_NS
from pybk.transport.server import Server, ServerCounters
from tests.paths import ROOT
from tests.ports import free_port
from tests.transport.wire_harness import BOOKIE, INSTANCE, KEYS, OK, TCP, Tap, World, add, entries, flat, world
from tests.waiting import WAIT_S, stop, wait_until

MS = 1_000_000


@pytest.fixture(params=["curve", "no secret"])
def keys(request: pytest.FixtureRequest) -> ClusterKeys | None:
    return KEYS if request.param == "curve" else None


@contextmanager
def child(keys: ClusterKeys | None, version: int = 1) -> Iterator[tuple[subprocess.Popen[str], str, bytes | None]]:
    """Run a bookie's server in another process; yield it, its address and its key."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.transport.child", "secret" if keys else "none", str(version)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        address, public = process.stdout.readline().split()
        yield process, address, public.encode() if keys else None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def outcomes(links: Links, count: int = 1) -> list[Any]:
    """Poll until there are so many outcomes, and return them."""
    found: list[Any] = []

    def enough() -> bool:
        found.extend(links.poll(100))
        return len(found) >= count

    wait_until(enough, f"{count} outcomes")
    return found


def ask(links: Links, link: Link, number: int) -> Any:
    assert link.send(number, add())
    ((_, found, reply),) = outcomes(links)
    assert found == number
    return reply


def silent(here: World) -> None:
    """Have the bookie answer nothing."""
    here.answer = lambda _peer, _number, _request: None


# ---- bookies that die, stop, or are cut off --------------------------------------------------------------------------


def test_a_killed_bookie_is_noticed_at_once(keys: ClusterKeys | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SILENCE_MS", 3600 * 1000)
    with child(keys) as (process, address, public), Links(keys) as links:
        link = links.connect(BOOKIE, address, public)
        assert ask(links, link, 1) == OK
        stop(process.pid)  # so that the requests are outstanding for certain
        for number in (2, 3):
            assert link.send(number, add(), 3600 * 10**9)
        assert links.poll(20) == []
        process.kill()
        found = outcomes(links, count=2)  # long before the deadline, and before silence would be noticed
        assert sorted(found) == sorted([(link, 2, None), (link, 3, None)], key=lambda row: row[1])
        assert not link.is_up
        assert "connection broke" in link.why_down
        process.wait()
        time.sleep(0.03)
        assert ask(links, link, 4) is None  # no process listens there: as quick
        assert links.counters.lost == 2


def test_a_reply_that_came_before_the_end_counts(keys: ClusterKeys | None) -> None:
    with child(keys) as (process, address, public), Links(keys) as links:
        link = links.connect(BOOKIE, address, public)
        assert ask(links, link, 1) == OK
        assert link.send(2, add())
        assert link.socket is not None
        assert link.socket.poll(60_000)
        process.kill()
        process.wait()
        assert link.monitor is not None
        assert link.monitor.poll(60_000)
        link.hear()
        assert not link.is_up
        assert links.poll(0) == [(link, 2, OK)]


def test_a_stopped_bookie_is_noticed_by_its_silence(keys: ClusterKeys | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_MS", 250)
    monkeypatch.setattr(heartbeat, "SILENCE_MS", 1500)
    with child(keys) as (process, address, public), Links(keys) as links:
        link = links.connect(BOOKIE, address, public)
        wait_until(lambda: ask(links, link, 1) == OK)  # a busy machine may be silent for as long, too
        stop(process.pid)
        assert link.send(2, add(), 3600 * 10**9)
        assert outcomes(links) == [(link, 2, None)]


def test_a_cut_connection_is_noticed_by_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_MS", 250)
    monkeypatch.setattr(heartbeat, "SILENCE_MS", 1500)
    with world() as here, Tap(here.server.addresses[0]) as tap:
        link = here.links.connect(BOOKIE, tap.address, here.server.public_key)
        here.until(lambda: here.ask(link, add()) == OK)  # a busy machine may be silent for as long, too
        tap.is_open.clear()
        assert here.ask(link, add(), 2) is None
        tap.is_open.set()
        here.until(lambda: here.ask(link, add(), 3) == OK)


def test_a_bookie_that_comes_again_is_a_new_session(keys: ClusterKeys | None) -> None:
    with Links(keys) as links:
        with Server([f"tcp://127.0.0.1:{free_port()}"], INSTANCE, keys) as server:
            here = World(server, links)
            link = here.link()
            silent(here)
            assert link.send(1, add())
            here.until(lambda: here.arrived)
            address = server.addresses[0]
        assert outcomes(links) == [(link, 1, None)]
        if keys is not None:
            return  # its registration has another key then, so it is another link
        with Server([address], INSTANCE) as server:
            here = World(server, links)
            time.sleep(0.03)
            assert here.ask(link, add(), 1) == OK
            assert [number for _, number, _ in here.arrived] == [1]


def test_nothing_of_a_session_reaches_the_next_bookie_there() -> None:
    """Z5: a socket that connects again by itself would resend and lose as it likes."""
    with Links() as links:
        with Server([f"tcp://127.0.0.1:{free_port()}"], INSTANCE) as server:
            here = World(server, links)
            link = here.link()
            here.until(lambda: link.is_up)
        with Server([server.addresses[0]], INSTANCE) as other:
            time.sleep(0.3)
            assert link.send(1, add())
            for _ in range(5):
                assert other.receive(10) == []
            assert other.counters.strangers == 0
            assert outcomes(links) == [(link, 1, None)]


def test_requests_to_a_bookie_that_is_down_end_unanswered_and_are_not_lost() -> None:
    with Links() as links:
        link = links.connect(BOOKIE, "tcp://127.0.0.1:1")
        for number in range(20):
            assert link.send(number, add())
        assert sorted(number for _, number, reply in outcomes(links, count=20) if reply is None) == list(range(20))
        assert "no process listens" in link.why_down
        assert link.outstanding == link.outstanding_bytes == 0


def test_a_bookie_that_never_greets_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_links, "HANDSHAKE_NS", 100 * MS)
    context: Any = zmq.Context()
    with context.socket(zmq.ROUTER) as mute, Links() as links:
        mute.linger = 0
        mute.bind(TCP)
        link = links.connect(BOOKIE, mute.last_endpoint.decode())
        assert link.send(1, add())
        assert outcomes(links) == [(link, 1, None)]
        assert "not answered in time" in link.why_down
    context.term()


def test_a_bookie_that_does_not_know_the_secret_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CURVE key alone does not make a bookie: it must prove the cluster's secret in its greeting."""
    other = ClusterKeys(KEYS.client, KEYS.metadata_key, bytes(32), KEYS.recovery_key)
    with Server([TCP], INSTANCE, other) as server, Links(KEYS) as links:
        monkeypatch.setattr("pybk.transport.server.greeting_mac", lambda keys: greeting_mac(KEYS))
        here = World(server, links)
        link = here.link()
        assert here.ask(link, add()) is None
        assert "does not know the cluster's secret" in link.why_down
        assert links.counters.forged == 1


# ---- time ------------------------------------------------------------------------------------------------------------


def test_each_request_has_its_own_deadline() -> None:
    with world() as here:
        silent(here)
        link = here.link()
        here.until(lambda: link.is_up)
        start = time.monotonic()
        assert link.send(1, add(), 3000 * MS)
        assert link.send(2, add(), 50 * MS)
        assert link.send(3, ReadLac(7, False, 5, int(WAIT_S * 10**9)))
        here.until(lambda: here.outcomes)
        assert here.outcomes[0] == (link, 2, None)
        assert time.monotonic() - start >= 0.05
        here.until(lambda: len(here.outcomes) == 2)
        assert here.outcomes[1] == (link, 1, None)
        assert time.monotonic() - start >= 3
        assert link.is_up
        assert link.outstanding == 1


def test_a_reply_after_the_deadline_is_not_an_outcome() -> None:
    with world() as here:
        silent(here)
        link = here.link()
        here.until(lambda: link.is_up)  # else the request may never be sent
        assert link.send(1, add(), 50 * MS)
        here.until(lambda: here.outcomes and here.arrived)
        here.server.reply(here.arrived[0][0], 1, OK)
        here.until(lambda: here.links.counters.late)
        assert here.outcomes == [(link, 1, None)]


def test_an_arrived_reply_counts_although_it_was_polled_late() -> None:
    with world() as here:
        link = here.link()
        here.until(lambda: link.is_up)
        assert link.send(1, add(), timeout_ns=0)
        while not here.arrived:
            here.arrived += here.server.receive(10)
        here.server.reply(here.arrived[0][0], 1, OK)
        assert link.socket is not None
        assert link.socket.poll(60_000)
        assert here.links.poll(0) == [(link, 1, OK)]


def test_a_quiet_bookie_is_pinged_and_stays() -> None:
    with world() as here:
        link = here.link()
        here.until(lambda: link.is_up)
        link.heard_ns -= 3600 * 10**9
        here.links.due_ns = 0
        here.turn()
        assert link.pinged_ns < NEVER_NS
        here.until(lambda: link.pinged_ns == NEVER_NS)
        assert link.is_up
        assert not here.arrived
        assert not here.outcomes


def test_a_bookie_that_does_not_answer_a_ping_is_given_up() -> None:
    with world() as here:
        link = here.link()
        here.until(lambda: link.is_up)
        assert link.send(1, add())
        link.heard_ns -= 3600 * 10**9
        here.links.due_ns = 0
        assert here.links.poll(0) == []
        link.pinged_ns -= 3600 * 10**9
        here.links.due_ns = 0
        assert here.links.poll(0) == [(link, 1, None)]
        assert "silent" in link.why_down


def test_poll_is_woken_from_another_thread() -> None:
    with Links() as links:
        timer = threading.Timer(0.02, links.wake)
        timer.start()
        start = time.perf_counter()
        assert links.poll(2 * 60_000) == []
        assert time.perf_counter() - start < WAIT_S
        timer.join()


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_bytes_under_way_are_bounded() -> None:
    with world(outstanding_bytes_max=10_000) as here:
        silent(here)
        link = here.link()
        numbers = iter(range(1000))
        sent = 0
        while link.send(next(numbers), add(7, entries(0, (1000,)))):
            sent += 1
        assert 7 <= sent <= 9
        assert link.outstanding == sent
        here.until(lambda: len(here.arrived) == sent)
        here.server.reply(here.arrived[0][0], 0, OK)
        here.until(lambda: here.outcomes)
        assert link.send(1000, add(7, entries(0, (1000,))))
        assert not link.send(1001, add(7, entries(0, (1000,))))


def test_bytes_requested_by_reads_count() -> None:
    with world(outstanding_bytes_max=10_000) as here:
        link = here.link()
        assert link.send(1, Read(7, 0, 9, 1, 50_000))  # alone it may be larger
        assert not link.send(2, Read(7, 0, 9, 1, 1))
        here.until(lambda: here.outcomes)
        assert link.send(2, Read(7, 0, 9, 1, 5_000))
        assert not link.send(3, Read(7, 0, 9, 1, 5_000))


def test_a_full_queue_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_links, "QUEUE_MESSAGES", 10)
    with world(None) as here:
        link = here.link()
        here.until(lambda: link.is_up)
        sent = 0
        while link.send(sent, add(7, entries(0, (7000,)))):
            sent += 1
            assert sent < 20_000
        assert link.outstanding == sent
        here.until(lambda: len(here.outcomes) == sent)
        assert {reply for _, _, reply in here.outcomes} == {OK}
        assert link.send(0, add())


def test_messages_that_can_never_be_sent_are_refused() -> None:
    with world(message_bytes_max=1000) as here:
        link = here.link()
        with pytest.raises(UsageError, match=r"the limit is 1000.*send smaller batches"):
            link.send(1, add(7, entries(0, (1000,))))
        assert link.send(1, add())
        with pytest.raises(UsageError, match="each id is sent once"):
            link.send(1, add())


def test_a_message_is_encoded_once_for_all_bookies(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    encode = codec.encode

    def counted(message: Any) -> Outgoing:
        nonlocal count
        count += 1
        return encode(message)

    with world() as here:
        links = [here.link() for _ in range(3)]
        here.until(lambda: all(link.is_up for link in links))
        monkeypatch.setattr("pybk.transport.client_links.encode", counted)
        message = add(7, entries(0, (100_000,)))
        for link in links:
            assert link.send(1, message)
        assert count == 1
        here.until(lambda: len(here.outcomes) == 3)
        assert [flat(request) for _, _, request in here.arrived] == [flat(message)] * 3


# ---- damage ----------------------------------------------------------------------------------------------------------


def damage(payload: bytes, times: int) -> Any:
    """Return a ``Frame`` whose bytes are wrong the first times that it is sent."""

    class Damaged(Outgoing):
        __slots__ = ("left",)

        def head(self, *arguments: Any) -> bytes:
            head = super().head(*arguments)
            self.left = getattr(self, "left", times) - 1
            return head if self.left < 0 else head.replace(payload, payload[::-1])

    return Damaged


@pytest.mark.parametrize(("times", "expected"), [(1, OK), (3, OK), (4, Reply(Status.REFUSED))])
def test_a_damaged_request_is_sent_again(monkeypatch: pytest.MonkeyPatch, times: int, expected: Reply) -> None:
    payload = bytes(range(100))
    monkeypatch.setattr(codec, "Outgoing", damage(payload, times))
    with world() as here:
        assert here.ask(here.link(), add(7, EntryRun(0, 1, array("q", [100]), (payload,)))) == expected
        assert here.server.counters.damaged == here.links.counters.damaged == times
        assert len(here.arrived) == (expected == OK)


def test_a_damaged_reply_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = bytes(range(100))
    answer = Answer(Status.OK, EntryRun(0, 1, array("q", [100]), (payload,)))
    broken = damage(payload, 1)(MessageKind.ANSWER, runs=(answer.run,))
    with world() as here:
        monkeypatch.setitem(codec.ENCODERS, Answer, lambda _answer: broken)
        here.answer = lambda _peer, _number, _request: answer
        assert flat(here.ask(here.link(), Read(7, 0, 0, 1, 1000))) == flat(answer)
        assert len(here.arrived) == 2
        assert here.links.counters.damaged == 1


def read_entry(here: World, link: Link, run: EntryRun) -> Any:
    """Return the outcome of a read of one entry."""
    here.answer = lambda _peer, _number, _request: Answer(Status.OK, run)
    here.outcomes.clear()
    assert link.read(2, EntryRead(7, run.first, run.stride), int(WAIT_S * 10**9))
    here.until(lambda: here.outcomes)
    ((_, number, outcome),) = here.outcomes
    assert number == 2
    assert here.arrived[-1][2] == Read(7, run.first, run.first, run.stride, 1)
    return outcome


@pytest.mark.parametrize("size", [32, 1000, frames.INLINE_BYTES_MAX, frames.INLINE_BYTES_MAX + 1])
@pytest.mark.parametrize("pure", [False, True], ids=["core", "pure"])
def test_an_entry_that_is_read_alone_comes_as_it_was_sent(
    keys: ClusterKeys | None, monkeypatch: pytest.MonkeyPatch, size: int, *, pure: bool
) -> None:
    if pure:
        monkeypatch.setattr(client_links, "WIRE_CORE", None)
    run = entries(5, (size,), 3)
    with world(keys) as here:
        link = here.link()
        assert not link.read(2, EntryRead(7, 5, 3), 1), "there is no session yet"
        assert here.ask(link, Force(7)) == OK
        outcome = read_entry(here, link, run)
        if isinstance(outcome, OneEntry):
            assert bytes(outcome.buffer[outcome.start : outcome.end]) == run.body[0]
        else:
            assert flat(outcome) == Answer(Status.OK, run)
        assert isinstance(outcome, OneEntry) == (
            not (pure or frames.WIRE_CORE is None) and size <= frames.INLINE_BYTES_MAX
        )
        assert link.outstanding == link.outstanding_bytes == 0
        assert here.server.counters == ServerCounters(received=2)
        assert here.links.counters == LinkCounters()


def test_a_read_of_one_entry_is_sent_again_in_a_new_session_and_if_it_came_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = EntryRun(5, 1, array("q", [100]), (bytes(range(100)),))
    with world() as here:
        link = here.link()
        assert here.ask(link, Force(7)) == OK
        here.server.peers.clear()
        assert read_entry(here, link, run) is not None
        assert here.links.counters.forgotten == 1
        broken = damage(b"".join(run.body), 1)(MessageKind.ANSWER, runs=(run,))
        with monkeypatch.context() as patch:
            patch.setitem(codec.ENCODERS, Answer, lambda _answer: broken)
            assert read_entry(here, link, run) is not None
        assert here.links.counters.damaged == 1
        assert here.server.counters.damaged == 0


def test_a_late_entry_is_counted_and_dropped() -> None:
    with world() as here:
        link = here.link()
        assert here.ask(link, Force(7)) == OK
        silent(here)
        assert link.read(2, EntryRead(7, 5, 1), 1)
        here.until(lambda: (link, 2, None) in here.outcomes)
        peer, number, _ = here.arrived[-1]
        here.server.reply_entry(peer, number, entries(5))
        here.until(lambda: here.links.counters.late)
        assert here.links.counters == LinkCounters(late=1)


def test_no_more_reads_are_sent_than_may_be_outstanding() -> None:
    with world(outstanding_bytes_max=1000) as here:
        link = here.link()
        assert here.ask(link, Force(7)) == OK
        silent(here)
        assert [link.read(number, EntryRead(7, number, 1), int(WAIT_S * 10**9)) for number in range(2, 7)] == (
            [True] * 3 + [False] * 2
        )


def test_forged_replies_are_dropped() -> None:
    with world() as here:
        silent(here)
        link = here.link()
        assert link.send(1, Force(7))
        here.until(lambda: here.arrived)
        peer = here.arrived[0][0]
        mac = peer.mac
        forged = codec.encode(Reply(Status.NO_SUCH_LEDGER))
        routing_id = peer.routing_id
        here.server.send(routing_id, forged, 1, greeting_mac(KEYS), 1)
        here.server.send(routing_id, codec.NO_SESSION, 1, lambda data: bytes(16), 1)
        here.server.instance = b"j" * 16
        here.server.send(routing_id, forged, 1, mac, 1)
        here.server.instance = INSTANCE
        here.server.socket.send_multipart([routing_id, b"garbage"])
        here.server.send(routing_id, Outgoing(99), 1, mac, 1)
        here.until(lambda: here.outcomes)
        assert here.links.counters.forged == 3
        assert here.links.counters.garbage == 2
        assert here.outcomes == [(link, 1, None)]
        assert link.is_up


def test_a_bookie_that_does_not_stop_sending_does_not_hold_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_links, "READ_ROUNDS", 8)
    with world() as here:
        silent(here)
        assert here.link().send(1, Force(7))
        here.until(lambda: here.arrived)
        peer = here.arrived[0][0]
        for _ in range(50):
            here.server.socket.send_multipart([peer.routing_id, b"garbage"])
        here.server.send(peer.routing_id, codec.encode(Reply(Status.OK)), 1, peer.mac, 1)
        taken = [0]
        while not here.outcomes:
            here.outcomes += here.links.poll(1000)
            taken.append(here.links.counters.garbage)
        assert max(now - before for before, now in itertools.pairwise(taken)) <= 2 * 8  # the touched and the signalled
        assert taken[-1] == 50
        assert here.outcomes[0][2] == Reply(Status.OK)


# ---- versions --------------------------------------------------------------------------------------------------------


def test_a_bookie_one_version_ahead_talks(keys: ClusterKeys | None) -> None:
    with child(keys, version=2) as (_, address, public), Links(keys) as links:
        link = links.connect(BOOKIE, address, public)
        assert ask(links, link, 1) == OK
        assert link.version == 1


def test_a_bookie_one_version_older_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with child(KEYS) as (_, address, public), Links(KEYS) as links:
        monkeypatch.setattr(frames, "VERSION", 2)
        link = links.connect(BOOKIE, address, public)
        assert ask(links, link, 1) == OK
        assert link.version == 1


def test_two_of_a_newer_version_speak_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "VERSION", 2)
    with world() as here:
        link = here.link()
        assert here.ask(link, add()) == OK
        assert (link.version, here.arrived[0][0].version) == (2, 2)


# ---- links -----------------------------------------------------------------------------------------------------------


def test_a_closed_link_reports_what_was_outstanding() -> None:
    with world() as here:
        silent(here)
        first, second = here.link(), here.link()
        assert first.send(1, add())
        assert second.send(2, add())
        here.until(lambda: len(here.arrived) == 2)
        first.close()
        assert here.links.poll(0) == [(first, 1, None)]
        here.answer = lambda _peer, _number, _request: OK
        assert here.ask(second, add(), 3) == OK


def test_inproc_needs_no_monitor() -> None:
    context: Any = zmq.Context()
    with world(KEYS, "inproc://bookie", context=context) as here:
        link = here.link()
        assert here.ask(link, add()) == OK
        assert link.monitor is None
    context.term()
