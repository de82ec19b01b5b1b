"""The auditor of a process against a real metadata store: in which order it reads, and how long it writes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk.bookie import keeper
from pybk.errors import MetadataForgedError
from pybk.healing import auditor_driver, situation
from pybk.healing.auditor_driver import AuditorDriver
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.ledgers import LEDGERS_KEY
from pybk.metadata.registration import BookieCookie, BookieState
from pybk.metrics import Metrics
from pybk.operations import cluster_admin
from pybk.operations.cluster_admin import ClusterAdmin
from pybk.replication.bookie import BookieEffect
from tests.client.test_limbo_repair import fill
from tests.cluster.inside import Inside, inside
from tests.healing.alone import auditor_of
from tests.internals import metadata_of, service_of
from tests.metadata.records import cluster_on, ledger
from tests.metadata.simulated_store import SimServer
from tests.waiting import WAIT_S, wait_until

LEDGERS = 12


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    """Four bookies that repair nothing by themselves, and whose auditor looks often."""
    monkeypatch.setattr(auditor_driver, "TICK_S", 0.1)
    monkeypatch.setattr(auditor_driver, "REQUESTS_SECONDS", 0.0)
    monkeypatch.setattr(situation, "SESSION_NS_MIN", 0)
    with inside(tmp_path, count=4) as cluster:
        yield cluster


def drain(metadata: ClusterMetadata, name: str) -> Bookie:
    return metadata.change_cookie(name, lambda cookie: replace(cookie, state=BookieState.DRAINING)).bookie


def move(metadata: ClusterMetadata, ledger_id: int, bookie: Bookie) -> None:
    """Do what a worker does after its copies: give the place of a bookie to another one, and then remove the mark."""
    marks = [mark for mark in metadata.marks_of(ledger_id) if mark.bookie == bookie]
    found = metadata.read_ledger(ledger_id)
    (spare,) = {each.bookie for each in metadata.list_bookies()} - set(found.metadata.fragments[0].ensemble)
    fragments = tuple(
        each._replace(ensemble=tuple(spare if place == bookie else place for place in each.ensemble))
        for each in found.metadata.fragments
    )
    new = replace(found.metadata, fragments=fragments, version=found.metadata.version + 1)
    metadata.write_ledger(new, found.version)
    assert all(metadata.unmark_under_replicated(mark) for mark in marks)


def test_a_bookie_with_ledgers_in_limbo_is_known_as_such(four: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "POSITION_SECONDS", 0.01)
    monkeypatch.setattr(keeper, "STATE_SECONDS", 0.05)
    four.bookies[0].close()
    four.bookies[0] = four.open_bookie(0)
    service = service_of(four.bookies[0])

    def put() -> list[BookieEffect]:
        service.replicas.put_in_limbo({ledger_id: None})
        return []

    with four.connect() as client, client.create_ledger(password=b"correct horse", ensemble_size=4) as writer:
        writer.append(b"entry")
        ledger_id = writer.ledger_id
        with auditor_of(metadata_of(four.connect())) as auditor:

            def status() -> list[tuple[str, str]]:
                report = auditor.report
                return [] if report is None else [(each.bookie.bookie_id, each.status) for each in report.bookies]

            service.post(put)
            wait_until(lambda: status() == [("bookie-0", "in_limbo")])
            service.end_limbo(ledger_id, closed=False)
            wait_until(lambda: auditor.report is not None and not status())


def test_a_mark_is_not_published_again_after_its_repair(four: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    client = four.connect()
    metadata = metadata_of(client)
    ledgers = [fill(client, 20) for _ in range(LEDGERS)]
    named = [each for each in ledgers if _names(metadata, each, "bookie-0")]
    published: Counter[int] = Counter()
    own = metadata_of(four.connect())
    publish, watch_below = own.mark_under_replicated, own.watch_below

    def publish_and_repair(ledger_id: int, bookie: Bookie, *arguments: Any, **options: Any) -> None:
        publish(ledger_id, bookie, *arguments, **options)
        published[ledger_id] += 1
        if published[ledger_id] == 1:
            move(metadata, ledger_id, bookie)

    def report_late(key: str, callback: Callable[[Any], None]) -> Any:
        """Report changes of ledgers half a second later than those of marks, as a feed may."""

        def late(keys: Any) -> None:
            threading.Timer(0.5, callback, (keys,)).start()

        return watch_below(key, late if key == LEDGERS_KEY else callback)

    monkeypatch.setattr(own, "mark_under_replicated", publish_and_repair)
    monkeypatch.setattr(own, "watch_below", report_late)
    with auditor_of(own) as auditor:
        wait_until(lambda: auditor.report is not None)
        drain(metadata, "bookie-0")
        wait_until(lambda: _state(metadata, "bookie-0") is BookieState.DRAINED)
    assert published == dict.fromkeys(named, 1)


def test_a_mark_that_is_refused_keeps_no_other_ledger_from_its_repair(
    four: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = four.connect()
    metadata = metadata_of(client)
    refused, *others = sorted(
        each for each in [fill(client, 20) for _ in range(LEDGERS)] if _names(metadata, each, "bookie-0")
    )
    own = metadata_of(four.connect())
    publish = own.mark_under_replicated
    tries: Counter[int] = Counter()

    def publish_others(ledger_id: int, bookie: Bookie, *arguments: Any, **options: Any) -> None:
        tries[ledger_id] += 1
        if ledger_id == refused:
            raise MetadataForgedError("refused")
        publish(ledger_id, bookie, *arguments, **options)

    monkeypatch.setattr(own, "mark_under_replicated", publish_others)
    with auditor_of(own) as auditor:
        wait_until(lambda: auditor.report is not None)
        drain(metadata, "bookie-0")
        wait_until(lambda: {mark.ledger_id for mark in metadata.marks()} == set(others))
        assert tries[refused]


def test_changes_wake_the_auditor_and_no_other_candidate() -> None:
    server = SimServer()
    client, own = cluster_on(server.store()), cluster_on(server.store())
    woken: list[str] = []
    leader = AuditorDriver(cluster_on(server.store()), "leader", Metrics(), lambda: woken.append("leader"))
    candidate = AuditorDriver(own, "candidate", Metrics(), lambda: woken.append("candidate"))
    do_all(server, leader, candidate)
    woken.clear()
    client.create_ledger(ledger(1))
    server.deliver()
    assert woken == ["leader"]
    do_all(server, leader, candidate)
    leader.close()
    do_all(server, candidate)
    assert candidate.leads
    assert candidate.ledger_ids() == [1]
    woken.clear()
    client.create_ledger(ledger(2))
    do_all(server, candidate)
    assert woken == ["candidate"]
    assert candidate.ledger_ids() == [1, 2]
    candidate.close()


def test_changes_that_come_while_a_heartbeat_is_late_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session lives on, so nobody is elected anew, which would read everything."""
    server = SimServer()
    store, client = server.store(), cluster_on(server.store())
    alive, lateness = store.alive, [False]
    monkeypatch.setattr(store, "alive", lambda session: alive(session) and not lateness[-1])
    auditor = AuditorDriver(cluster_on(store), "auditor", Metrics(), lambda: None)
    do_all(server, auditor)
    lateness.append(True)
    client.create_ledger(ledger(1))
    do_all(server, auditor)
    led = [auditor.leads]
    lateness.append(False)
    do_all(server, auditor)
    assert [*led, auditor.leads] == [False, True]
    assert auditor.ledger_ids() == [1]
    auditor.close()


def do_all(server: SimServer, *auditors: AuditorDriver) -> None:
    """Do what is due until nothing is, as the thread of the chores does."""
    while server.deliver() or any(map(has_done, auditors)):
        continue


def has_done(auditor: AuditorDriver) -> bool:
    """Do one work of an auditor; return whether one was due."""
    work = auditor.due(time.monotonic() + 1)  # no rest between two changes
    if not callable(work):
        return False
    work()
    return True


def test_the_auditor_reads_what_has_changed_before_it_writes_all_marks(
    four: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditor_driver, "TRUST_NS", 10**7)
    client = four.connect()
    metadata = metadata_of(client)
    ledgers = [fill(client, 20) for _ in range(LEDGERS)]
    named = [each for each in ledgers if _names(metadata, each, "bookie-0")]
    published: Counter[int] = Counter()
    own = metadata_of(four.connect())
    publish = own.mark_under_replicated

    def publish_and_move_the_others(ledger_id: int, bookie: Bookie, *arguments: Any, **options: Any) -> None:
        publish(ledger_id, bookie, *arguments, **options)
        published[ledger_id] += 1
        for each in named:
            if not published[each] and _names(metadata, each, "bookie-0"):
                move(metadata, each, bookie)
        time.sleep(0.02)  # longer than its trust

    monkeypatch.setattr(own, "mark_under_replicated", publish_and_move_the_others)
    with auditor_of(own) as auditor:
        wait_until(lambda: auditor.report is not None)
        bookie = drain(metadata, "bookie-0")
        wait_until(lambda: published.total())
        (first,) = metadata.marks()
        move(metadata, first.ledger_id, bookie)
        wait_until(lambda: _state(metadata, "bookie-0") is BookieState.DRAINED)
    assert published.total() < len(named)


def test_others_look_into_the_machine_while_the_metadata_store_is_slow(
    four: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = four.connect()
    ledger_id = fill(client, 20)
    own = metadata_of(four.connect())
    began, looked, ends = threading.Event(), threading.Event(), list[bool]()
    list_cookies = own.list_cookies

    def slow(**options: Any) -> list[BookieCookie]:
        began.set()
        ends.append(looked.wait(WAIT_S))
        looked.set()
        return list_cookies(**options)

    with auditor_of(own) as auditor:
        wait_until(lambda: auditor.ledger_ids() == [ledger_id])
        monkeypatch.setattr(own, "list_cookies", slow)
        assert began.wait(WAIT_S)
        assert (auditor.ledger_ids(), auditor.short_ledgers()) == ([ledger_id], [])
        looked.set()
    assert all(ends)


def test_a_drain_ends_when_no_request_from_before_it_may_name_the_bookie(
    four: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it can be removed at once: ``drained`` does not have people wait for the same a second time."""
    for module in (auditor_driver, cluster_admin):
        monkeypatch.setattr(module, "REQUESTS_SECONDS", 1.0)
    client = four.connect()
    admin = ClusterAdmin(client)
    with auditor_of(metadata_of(four.connect())) as auditor:
        wait_until(lambda: auditor.report is not None)
        drain(metadata_of(client), "bookie-0")
        began = metadata_of(client).read_cookie("bookie-0")
        assert began is not None
        wait_until(lambda: _state(metadata_of(client), "bookie-0") is BookieState.DRAINED)
        assert time.time_ns() - began.state_since_ns >= 10**9
    wait_until(lambda: admin.bookies()[0].read_only, "the bookie is read-only")
    admin.remove("bookie-0", admin.ok_to_remove("bookie-0"))


def _names(metadata: ClusterMetadata, ledger_id: int, name: str) -> bool:
    fragments = metadata.read_ledger(ledger_id).metadata.fragments
    return any(bookie.bookie_id == name for fragment in fragments for bookie in fragment.ensemble)


def _state(metadata: ClusterMetadata, name: str) -> BookieState:
    cookie = metadata.read_cookie(name)
    assert cookie is not None
    return cookie.state
