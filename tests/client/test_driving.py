"""The client's driver sends what formed at the right moment, and does not pause when it need not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pybk.client import driver as driver_module
from pybk.client.driver import Conversation, Driver
from pybk.client.remote_ledger import RemoteLedger
from pybk.manager.ledger_writer import LedgerWriter
from pybk.replication import writer as machine
from pybk.replication.messages import Effect, Event, Failed, Reason, Status, WakeAt
from pybk.threads.group_commit import Completion, GroupCommit
from tests.client.test_limbo_repair import PASSWORD
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of, metadata_of, service_of
from tests.waiting import WAIT_S, wait_until


def test_a_wait_for_finished_work_does_not_wait_for_bookies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "WAIT_MS", int(1000 * WAIT_S))
    with inside(tmp_path) as cluster, cluster.connect() as client:
        driver = cluster_backend_of(client).driver
        begin = time.perf_counter()
        for _ in range(5):
            driver.call_as_leader(lambda: None)
        assert time.perf_counter() - begin < WAIT_S


def test_a_formed_batch_waits_only_for_the_woken_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, submit = GroupCommit.finish, Driver.submit
    woke: list[bool] = []

    def finish_as_if_somebody_woke(group: GroupCommit, completion: Completion) -> None:
        finish(group, completion)
        group.woke = True

    def note(driver: Driver, now_ns: int) -> None:
        woke.append(driver.group.woke)
        submit(driver, now_ns)

    with inside(tmp_path) as cluster, cluster.connect() as client, client.create_ledger(password=b"p") as writer:
        monkeypatch.setattr(GroupCommit, "finish", finish_as_if_somebody_woke)
        monkeypatch.setattr(Driver, "submit", note)
        futures = [writer.append_async(b"x") for _ in range(200)]
        assert [future.result(WAIT_S) for future in futures] == list(range(200))
        done: list[int] = []
        for _ in range(200):
            writer.append_async(b"x").add_done_callback(lambda future: done.append(future.result()))
        wait_until(lambda: len(done) == 200, "what formed to be sent, although nobody waits for it")
        assert woke
        assert not any(woke)
        monkeypatch.undo()


class Sleeper:
    """A machine that ends when it is woken."""

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """End."""
        return [Failed(Reason.UNDECIDED, "it was woken")]


class Sleep(Conversation[Sleeper]):
    """The conversation with it."""

    def take(self, effect: Effect) -> None:
        """End."""
        self.end()


def test_conversations_are_woken_that_asked_for_the_same_moment(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as client, client.create_ledger(password=b"p") as writer:
        backend = cluster_backend_of(client)
        ledger = RemoteLedger(writer.metadata, 0, b"")
        wake = WakeAt(time.monotonic_ns() + 10**6)
        sleeps = [Sleep(backend.driver, ledger, Sleeper()) for _ in range(3)]
        for each in sleeps:
            backend.driver.start(each, lambda _: [wake])
        for each in sleeps:
            backend.driver.group.wait(each.completion)
            assert each.completion.error is None


def give_up(cluster: Inside, writer: LedgerWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a writer give up the place of a bookie that stays registered, and takes entries again afterwards."""

    def refuse(*_: Any, **__: Any) -> Status:
        return Status.REFUSED

    with monkeypatch.context() as patch:
        patch.setattr(service_of(cluster.bookies[1]).replicas, "stage", refuse)
        writer.append(b"first")
        wait_until(lambda: metadata_of(cluster.bookies[0]).marks_of(writer.ledger_id), "the place is given up")


def test_an_idle_writer_fills_a_place_again_although_no_bookie_comes_or_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "REVIVE_NS", 500_000_000)
    with inside(tmp_path) as cluster:
        metadata = metadata_of(cluster.bookies[0])
        writer = cluster.connect().create_ledger(password=PASSWORD)
        give_up(cluster, writer, monkeypatch)
        wait_until(lambda: len(metadata.read_ledger(writer.ledger_id).metadata.fragments) == 2)


def test_idle_work_does_not_wait_for_a_late_wake_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "REVIVE_NS", machine.REVIVE_NS_MAX)
    with inside(tmp_path) as cluster:
        client = cluster.connect()
        driver = cluster_backend_of(client).driver
        writer = client.create_ledger(password=PASSWORD)
        give_up(cluster, writer, monkeypatch)
        wait_until(lambda: driver.sleep_seconds() > 1.0)
        wait_until(lambda: driver.group.rests)
        writer.append(b"second")
        replicas = service_of(cluster.bookies[0]).replicas

        def lac() -> int:
            state = replicas.state(writer.ledger_id)
            return -1 if state is None else state.lac

        wait_until(lambda: lac() == 1, "no entry has carried it")
