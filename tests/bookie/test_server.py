"""What a running bookie does between requests: how long it waits, what it remembers, and when it drops a ledger."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pybk.bookie import server as service_module
from pybk.bookie.own_position import PositionRecorder
from pybk.bookie.server import BookieServer
from pybk.errors import StorageError, StorageFullError, UsageError
from pybk.flags import StorageHint
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.registration import RegisteredBookie
from pybk.replication.bookie import BookieEffect, Respond
from pybk.replication.messages import Add, EntryRun, Force, Move, Reply, Status
from pybk.transport.server import Caller
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of, service_of
from tests.waiting import WAIT_S, wait_until

PASSWORD = b"correct horse"
NO_PEER: Any = None


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path, count=1) as cluster:
        yield cluster


def closed_ledger(cluster: Inside) -> int:
    with cluster.connect().create_ledger(password=PASSWORD, ensemble_size=1, write_quorum=1, ack_quorum=1) as writer:
        writer.append(b"entry 0")
    return writer.ledger_id


def test_the_serving_thread_waits_until_it_is_due_but_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 10**12
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))

    def timeout_ms(wake_ns: int | None, *posted: object, due_ns: int | None = None) -> int:
        state: Any = SimpleNamespace(posted=posted, wake_ns=wake_ns, copy_reads=SimpleNamespace(due_ns=due_ns))
        return BookieServer.timeout_ms(state)

    assert timeout_ms(None) == 1000
    assert timeout_ms(None, "something to do") == 0
    assert timeout_ms(now_ns - 5_000_000) == 0
    assert timeout_ms(now_ns + 3_500_000) == 4, "rounded up: an earlier turn of the loop would find nothing due"
    assert timeout_ms(now_ns + 60 * 10**9) == 1000
    assert timeout_ms(None, due_ns=now_ns + 3_500_000) == 4
    assert timeout_ms(now_ns + 2_500_000, due_ns=now_ns + 3_500_000) == 3


def test_what_is_posted_at_any_moment_of_a_turn_is_committed(one: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(one.bookies[0])
    answered: list[int] = []
    caller = Caller(lambda request_id, _: answered.append(request_id), lambda: None)

    def force() -> list[BookieEffect]:
        return service.machine.receive((caller, 1), Force(7), None, time.monotonic_ns())

    class Late(deque[Callable[[], list[BookieEffect]]]):
        """Another thread posts right after the serving thread has looked."""

        looks_left = 0

        def __bool__(self) -> bool:
            found = len(self) > 0
            self.looks_left -= 1
            if self.looks_left == 0:
                service.post(force)
            elif self.looks_left > 0:
                service.wake()
            return found

    late = Late()
    monkeypatch.setattr(service, "posted", late)

    def begin(looks: int) -> list[BookieEffect]:
        late.looks_left = looks
        return []

    for looks in range(1, 7):
        service.post(partial(begin, looks))
        wait_until(lambda: len(answered) == looks)  # noqa: B023  # called in this turn of the loop


def test_a_ledger_is_dropped_when_its_tombstone_is_seen_for_the_second_time(
    one: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger_id = closed_ledger(one)
    one.connect().delete_ledger(ledger_id, password=PASSWORD)
    posted: list[Callable[[], object]] = []
    service = service_of(one.bookies[0])
    monkeypatch.setattr(service, "post", posted.append)
    service.keeper.collect()
    assert posted == []
    service.keeper.collect()
    remember, drop = posted
    remember()  # first: metadata that are made again from directories must not bring it back
    assert list(service.replicas.deleted) == service.replicas.ledgers() == [ledger_id]
    drop()
    assert service.replicas.ledgers() == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, Status.OK),
        (StorageFullError("no space"), Status.READ_ONLY),
        (UsageError("no such tier"), Status.UNKNOWN),
    ],
)
def test_a_move_request_is_answered_with_refused_or_failed(
    one: Inside, monkeypatch: pytest.MonkeyPatch, error: Exception | None, status: Status
) -> None:
    def move(ledger_id: int, tier: StorageHint) -> None:
        if error is not None:
            raise error

    posted: list[Callable[[], object]] = []
    service = service_of(one.bookies[0])
    monkeypatch.setattr(service.replicas, "move", move)
    monkeypatch.setattr(service, "post", posted.append)
    service.move(NO_PEER, 7, Move(1, StorageHint.HDD))
    assert [call() for call in posted] == [[Respond((NO_PEER, 7), Reply(status))]]


def test_the_end_of_a_ledger_is_looked_up_once_for_many_copies(one: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = [closed_ledger(one) for _ in range(3)]
    service = service_of(one.bookies[0])
    looks: list[int] = []
    answers: list[object] = []
    look_aside = service.look_aside

    def count(peer: Any, request_id: int, request: Any, look: Any) -> None:
        looks.append(request.ledger_id)
        look_aside(peer, request_id, request, look)

    monkeypatch.setattr(service_module, "DESCRIPTIONS", 2)  # so many are remembered
    monkeypatch.setattr(service, "look_aside", count)
    monkeypatch.setattr(service.server, "reply", lambda peer, request_id, reply: answers.append(reply))

    def bring(ledger_id: int) -> None:
        wait_until(lambda: service.replicas.read(ledger_id, 0, 0, 1, 1 << 20)[0] is Status.OK)
        _, run = service.replicas.read(ledger_id, 0, 0, 1, 1 << 20)
        assert run is not None
        copy = Add(ledger_id, (EntryRun(0, 1, array("q", run.sizes), (b"".join(run.body),)),), 0, recovery=True)
        before = len(answers)

        def take() -> list[Any]:
            service.without_right(NO_PEER, 1, copy, time.monotonic_ns())
            return []

        service.post(take)
        wait_until(lambda: len(answers) > before)
        assert answers[before:] == [Reply(Status.OK)]

    for ledger_id in (ledgers[0], ledgers[0], ledgers[1], ledgers[2]):
        bring(ledger_id)
    assert looks == ledgers
    assert set(service.final) == {ledgers[2]}, "what is remembered is bounded"


def bookie_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("pybk-bookie"))


def check_threads_ended() -> None:
    """Check that a bookie that was closed has no threads; that of moves, which close does not wait for, ends soon."""
    assert [name for name in bookie_threads() if not name.startswith("pybk-bookie-move")] == []
    wait_until(lambda: bookie_threads() == [], "the thread of moves to end")


@pytest.mark.parametrize("error", [StorageFullError("the metadata store has no space"), FileNotFoundError("gone")])
def test_a_bookie_ends_although_it_cannot_unregister(
    one: Inside, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    ledger_id = closed_ledger(one)

    def failing(_: RegisteredBookie) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(RegisteredBookie, "close", failing)
        one.bookies[0].close()
    check_threads_ended()
    one.open_bookie(0)
    assert one.connect().ledger_metadata(ledger_id).last_entry_id >= 0


def test_a_start_that_fails_once_it_is_registered_leaves_nothing(one: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    one.bookies[0].close()
    opened, close = list[ClusterMetadata](), ClusterMetadata.close

    def failing(_: PositionRecorder) -> None:
        raise StorageError("the position cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(PositionRecorder, "record", failing)
        patch.setattr(ClusterMetadata, "close", lambda self: opened.append(self))  # its session stays
        with pytest.raises(StorageError, match="position"):
            one.open_bookie(0)
    check_threads_ended()
    client = one.connect()
    assert cluster_backend_of(client).membership.metadata.list_bookies() == []
    for metadata in opened:
        close(metadata)
    one.open_bookie(0)
    wait_until(lambda: cluster_backend_of(client).membership.bookies)
    assert client.create_ledger(ensemble_size=1, insecure=True).append(b"x") == 0


def test_a_bookie_may_be_closed_by_two_threads_and_again(one: Inside) -> None:
    service = service_of(one.bookies[0])
    threads = [threading.Thread(target=service.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    service.close()
    check_threads_ended()


def test_a_bookie_that_does_not_close_keeps_nothing_else_open(one: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = ClusterMetadata.close

    def failing(_: object) -> None:
        raise StorageFullError("no space to close")

    def noted(self: ClusterMetadata) -> None:
        closed.append("metadata")
        close(self)

    service = service_of(one.bookies[0])
    with monkeypatch.context() as patch:
        patch.setattr(service, "close", failing.__get__(service))
        patch.setattr(ClusterMetadata, "close", noted)
        with pytest.raises(StorageFullError):
            one.bookies[0].close()
    assert closed == ["metadata"]
    service.close()
