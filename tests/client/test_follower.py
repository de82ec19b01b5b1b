"""Followers over a cluster: what they learn at once, and what they ask for while nothing happens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk.client import follower as follower_module
from pybk.client.backend import ClusterBackend
from pybk.client.reader import LacReading
from pybk.client.wire import BookieWire
from pybk.errors import ClosedError, MetadataUnreachableError, NoSuchLedgerError, PybkError
from pybk.ledger.ledger_metadata import Bookie, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from pybk.manager.ledger_writer import LedgerWriter
from pybk.metadata.cluster import ClusterMetadata
from pybk.replication.bookie import POLL_NS_MAX
from pybk.replication.messages import ReadLac, Request
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of, descriptor_of
from tests.storage.real_store import numbered
from tests.waiting import WAIT_S, wait_until

_LONG_NS = 3600 * 10**9
_SOON_NS = 1_000_000


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path) as cluster:
        yield cluster


class Polls:
    """The long polls that clients send.

    Attributes:
        sent: The bookie and the ledger of each.
        wires: The wires that sent them.
        lost: Bookies to which none can be sent.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[Bookie, int]] = []
        self.wires: set[BookieWire] = set()
        self.lost: Callable[[Bookie], bool] = lambda bookie: False
        send = BookieWire.send

        def count(wire: BookieWire, request_id: int, bookie: Bookie, ledger: Any, request: Request) -> bool:
            if type(request) is not ReadLac or request.beyond is None:
                return send(wire, request_id, bookie, ledger, request)
            self.sent.append((bookie, ledger.ledger_id))
            self.wires.add(wire)
            return not self.lost(bookie) and send(wire, request_id, bookie, ledger, request)

        monkeypatch.setattr(BookieWire, "send", count)

    def wait(self, count: int = 2) -> None:
        """Wait until so many long polls are sent: the driver sends them after their followers have begun to wait."""
        wait_until(lambda: len(self.sent) >= count)

    @property
    def bookies(self) -> list[Bookie]:
        return [bookie for bookie, _ in self.sent]


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Polls:
    return Polls(monkeypatch)


def _only_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no long poll end, and none be repeated, by time: what a follower learns is sent to it."""
    monkeypatch.setattr(follower_module, "FOLLOW_NS", _LONG_NS)
    monkeypatch.setattr(follower_module, "RETRY_NS", _LONG_NS)


class Follower:
    """A thread that follows.

    Attributes:
        got: The payloads so far.
        error: What it ended with.
    """

    def __init__(self, reader: LedgerReader, first: int = 0, *, pace: Callable[[], object] = lambda: None) -> None:
        self.got: list[bytes] = []
        self.error: PybkError | None = None
        self._pace = pace  # called after each entry
        self._reader = reader
        self._thread = threading.Thread(target=self._follow, args=(first,))
        self._thread.start()

    def _follow(self, first: int) -> None:
        try:
            for entry in self._reader.follow(first):
                self.got.append(entry.payload)
                self._pace()
        except PybkError as error:
            self.error = error

    @property
    def waits(self) -> bool:
        """Whether it has looked, and sleeps until it is notified."""
        ledger: Any = descriptor_of(self._reader)
        return ledger.looked and bool(ledger.advanced_callbacks)

    def ends(self) -> bool:
        """Wait for the thread's end; return whether it came."""
        self._thread.join(WAIT_S)
        return not self._thread.is_alive()


def _opened(client: LedgerManager, writer: LedgerWriter, count: int = 1) -> list[LedgerReader]:
    return [client.open_ledger(writer.ledger_id, recover=False) for _ in range(count)]


def _follow(readers: list[LedgerReader]) -> list[Follower]:
    followers = [Follower(reader) for reader in readers]
    wait_until(lambda: all(follower.waits for follower in followers))
    return followers


def test_all_followers_of_a_ledger_in_one_client_share_one_long_poll_and_one_watch(
    three: Inside, polls: Polls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_notified(monkeypatch)
    watched: list[int] = []
    watch = ClusterMetadata.watch_ledger

    def count(metadata: ClusterMetadata, ledger_id: int, callback: Callable[[], None]) -> Any:
        watched.append(ledger_id)
        return watch(metadata, ledger_id, callback)

    monkeypatch.setattr(ClusterMetadata, "watch_ledger", count)
    writer = three.connect().create_ledger(insecure=True)
    followers = _follow(_opened(three.connect(), writer, 20))
    polls.wait()
    assert len(polls.sent) == 2, "with an ack quorum of 2, two of three bookies see every acknowledgement"
    assert watched == [writer.ledger_id]
    for number, payload in enumerate(numbered(3), 1):
        writer.append(payload)
        wait_until(lambda number=number: {len(follower.got) for follower in followers} == {number})  # type: ignore[misc]
    assert watched == [writer.ledger_id]
    writer.close()
    assert all(follower.ends() for follower in followers)
    assert {tuple(follower.got) for follower in followers} == {tuple(numbered(3))}


def test_tasks_that_follow_share_the_long_poll_too(
    three: Inside, polls: Polls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_notified(monkeypatch)
    writer = three.connect().create_ledger(insecure=True)
    readers = _opened(three.connect(), writer, 20)

    async def follow(reader: LedgerReader) -> list[bytes]:
        return [entry.payload async for entry in reader.follow_async()]

    async def follow_all() -> list[list[bytes]]:
        tasks = [asyncio.create_task(follow(reader)) for reader in readers]
        ledgers: list[Any] = [descriptor_of(reader) for reader in readers]
        while not all(ledger.looked and ledger.advanced_callbacks for ledger in ledgers):
            await asyncio.sleep(0.005)
        await asyncio.to_thread(polls.wait)
        assert len(polls.sent) == 2
        await writer.append_async(b"x")
        await writer.close_async()
        return await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)

    assert asyncio.run(follow_all()) == [[b"x"]] * 20


def test_long_polls_without_a_new_entry_do_not_wake_followers(
    three: Inside, polls: Polls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "FOLLOW_NS", 20 * _SOON_NS)
    monkeypatch.setattr(follower_module, "RETRY_NS", _SOON_NS)
    writer = three.connect().create_ledger(insecure=True)
    (follower,) = _follow(_opened(three.connect(), writer))
    looks: list[object] = []
    look = ClusterBackend.look

    def count(*arguments: Any, **named: Any) -> None:
        looks.append(arguments)
        look(*arguments, **named)

    monkeypatch.setattr(ClusterBackend, "look", count)
    wait_until(lambda: len(polls.sent) >= 20)
    assert looks == [], "the follower looked when it began, and sleeps"
    writer.append(b"x")
    wait_until(lambda: follower.got == [b"x"])
    writer.close()
    assert follower.ends()


def test_long_polls_of_all_ledgers_end_together_and_by_their_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Any = None
    monkeypatch.setattr(time, "monotonic_ns", lambda: 5)
    polling = follower_module.Followers(nothing, nothing)
    step = follower_module.FOLLOW_NS // 2
    for was_empty, most in ((False, 2 * step), (True, 8 * step)):
        for now in (5, 6, step + 4, step + 5, 17 * step + 99):
            wait = polling.wait_ns(now, was_empty=was_empty)
            assert most - step < wait <= most < POLL_NS_MAX
            assert (now + wait - 5) % step == 0


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("how", ["closed by its writer", "recovered by another client", "deleted"])
def test_followers_learn_at_once_that_their_ledger_has_ended(
    three: Inside, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    _only_notified(monkeypatch)
    writer = three.connect().create_ledger(insecure=True)
    writer.append(b"x")
    followers = _follow(_opened(three.connect(), writer, 3))
    if how == "deleted":
        three.connect().delete_ledger(writer.ledger_id)
    elif how == "closed by its writer":
        writer.close()
    else:
        reader = three.connect().open_ledger(writer.ledger_id)
        assert reader.metadata.state is LedgerState.CLOSED
    assert all(follower.ends() for follower in followers)
    assert [follower.got for follower in followers] == [[b"x"]] * 3
    assert {type(follower.error) for follower in followers} == {NoSuchLedgerError if how == "deleted" else type(None)}


def test_a_follower_ends_with_its_reader_and_the_others_stay(three: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    _only_notified(monkeypatch)
    writer = three.connect().create_ledger(insecure=True)
    readers = _opened(three.connect(), writer, 2)
    first, second = _follow(readers)
    readers[0].close()  # the long poll was asked for it
    assert first.ends()
    assert type(first.error) is ClosedError
    writer.append(b"x")
    wait_until(lambda: second.got == [b"x"])
    writer.close()
    assert second.ends()


def test_when_a_bookie_is_lost_another_one_is_asked_in_its_place(
    three: Inside, polls: Polls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_notified(monkeypatch)
    writer = three.connect().create_ledger(insecure=True)
    (follower,) = _follow(_opened(three.connect(), writer))
    polls.wait()
    asked = polls.bookies
    assert len(asked) == 2
    three.bookies[int(asked[0].bookie_id.rpartition("-")[2])].close()
    wait_until(lambda: set(polls.bookies) == set(writer.metadata.fragments[0].ensemble))
    writer.append(b"x")
    wait_until(lambda: follower.got == [b"x"])
    writer.close()
    assert follower.ends()


def test_a_new_ensemble_is_asked_at_once(three: Inside, polls: Polls, monkeypatch: pytest.MonkeyPatch) -> None:
    _only_notified(monkeypatch)
    writer = three.connect().create_ledger(ensemble_size=1, insecure=True)
    (follower,) = _follow(_opened(three.connect(), writer))
    polls.wait(1)
    (old,) = polls.bookies
    three.bookies[int(old.bookie_id.rpartition("-")[2])].close()
    writer.append(b"x")  # another bookie takes the place
    wait_until(lambda: follower.got == [b"x"])
    (new,) = three.connect().ledger_metadata(writer.ledger_id).fragments[-1].ensemble
    wait_until(lambda: set(polls.bookies) == {old, new})
    writer.close()
    assert follower.ends()


def test_bookies_that_do_not_answer_are_asked_again(
    three: Inside, polls: Polls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(follower_module, "FOLLOW_NS", _LONG_NS)
    monkeypatch.setattr(follower_module, "RETRY_NS", 5 * _SOON_NS)
    polls.lost = lambda bookie: True
    writer = three.connect().create_ledger(insecure=True)
    (follower,) = _follow(_opened(three.connect(), writer))
    writer.append(b"x")
    wait_until(lambda: len(polls.sent) >= 30)
    assert follower.got == []
    polls.lost = lambda bookie: False
    wait_until(lambda: follower.got == [b"x"])
    writer.close()
    assert follower.ends()
    assert caplog.text.count("bookies do not report its next entry") == 1


def test_bookies_that_answer_at_once_are_not_asked_in_a_loop(three: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    _only_notified(monkeypatch)
    pauses: list[int] = []

    def ask(*arguments: Any, **named: Any) -> LacReading:
        pauses.append(named["pause_ns"])
        return LacReading(*arguments, **named)

    monkeypatch.setattr(follower_module, "LacReading", ask)
    writer = three.connect().create_ledger(insecure=True)
    for manager in three.bookies:
        service: Any = cluster_backend_of(manager).bookie
        service.machine.polls_max = 0
    (follower,) = _follow(_opened(three.connect(), writer))
    wait_until(lambda: len(pauses) >= 8)
    assert pauses[:8] == [0, 0, *(1_000_000 << number for number in range(6))]
    writer.close()
    assert follower.ends()


def test_a_lac_that_a_bookie_cannot_prove_yet_delays_no_entry(three: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    _only_notified(monkeypatch)
    writer = three.connect().create_ledger(insecure=True)
    (follower,) = _follow(_opened(three.connect(), writer))
    for number in range(0, 300, 3):  # an add under way may carry a LAC that its entries, made before, do not
        futures = [writer.append_async(payload) for payload in numbered(3, number)]
        assert futures[-1].result(WAIT_S) == number + 2
    wait_until(lambda: follower.got == numbered(300))
    writer.close()
    assert follower.ends()


def test_metadata_that_changed_without_a_callback_are_found_when_long_polls_end(
    three: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Watch:
        def cancel(self) -> None:
            pass

    monkeypatch.setattr(ClusterMetadata, "watch_ledger", lambda *_: Watch())
    monkeypatch.setattr(follower_module, "FOLLOW_NS", 20 * _SOON_NS)
    monkeypatch.setattr(follower_module, "RETRY_NS", _SOON_NS)
    failures = iter([MetadataUnreachableError("it is away")])
    versions = ClusterMetadata.ledger_versions

    def failing(metadata: ClusterMetadata, ledger_ids: list[int]) -> list[int | None]:
        for error in failures:
            raise error
        return versions(metadata, ledger_ids)

    monkeypatch.setattr(ClusterMetadata, "ledger_versions", failing)
    writer = three.connect().create_ledger(insecure=True)
    (follower,) = _follow(_opened(three.connect(), writer))
    writer.close()
    assert follower.ends()
    assert "it is away" in caplog.text


def test_no_long_poll_waits_for_a_leader_that_pauses(
    three: Inside, polls: Polls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_notified(monkeypatch)
    poll, interrupt = BookieWire.poll, BookieWire.interrupt
    pausing: set[BookieWire] = set()
    interrupted: set[BookieWire] = set()
    long = threading.Event()

    def pause(wire: BookieWire, timeout_ms: int) -> Any:
        """Pause until something comes, while ``long`` is set."""
        (pausing.add if timeout_ms else pausing.discard)(wire)
        while not (replies := poll(wire, timeout_ms)) and timeout_ms and long.is_set() and wire not in interrupted:
            pass
        interrupted.discard(wire)
        return replies

    def end_pause(wire: BookieWire) -> None:
        interrupted.add(wire)
        interrupt(wire)

    writers = [three.connect().create_ledger(insecure=True) for _ in range(2)]
    client = three.connect()
    monkeypatch.setattr(BookieWire, "poll", pause)
    monkeypatch.setattr(BookieWire, "interrupt", end_pause)
    (quiet,) = _follow(_opened(client, writers[0]))  # the leader waits for the reply to its long poll
    (reader,) = _opened(client, writers[1])
    ledger: Any = descriptor_of(reader)
    gate = threading.Semaphore(0)
    follower = Follower(reader, pace=gate.acquire)
    wait_until(lambda: follower.waits)
    writers[1].append(b"0")
    wait_until(lambda: follower.got == [b"0"])
    writers[1].append(b"1")
    wait_until(lambda: ledger.followed.reading is None)  # as no follower waits
    for number, payload in ((2, b"2"), (3, b"3")):
        long.set()
        wait_until(lambda: polls.wires <= pausing)
        try:
            gate.release()
            wait_until(lambda number=number: len(follower.got) == number)  # type: ignore[misc]
        finally:
            long.clear()
        writers[1].append(payload)
    gate.release(2)
    for writer in writers:
        writer.close()
    assert quiet.ends()
    assert follower.ends()
    assert follower.got == [b"0", b"1", b"2", b"3"]


def test_a_follower_that_starts_later_gets_what_others_of_its_client_know(
    three: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_notified(monkeypatch)
    writer = three.connect().create_ledger(insecure=True)
    readers = _opened(three.connect(), writer, 2)
    (early,) = _follow(readers[:1])
    writer.append(b"x")
    wait_until(lambda: early.got == [b"x"])
    monkeypatch.setattr(ClusterBackend, "look_at_bookies", lambda backend, ledger: None)
    late = Follower(readers[1])
    wait_until(lambda: late.got == [b"x"])
    writer.close()
    assert early.ends()
    assert late.ends()
