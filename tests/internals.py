"""What lies under the public handles, for tests that look beneath the API; only this file knows their private names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from pybk.backend import LedgerBackend
from pybk.bookie.server import BookieServer
from pybk.client.backend import ClusterBackend
from pybk.credentials import Credentials
from pybk.flags import LedgerType
from pybk.healing.chores import Chore, ChoreThread, Work
from pybk.healing.repair_worker import Candidate, RepairWorker
from pybk.healing.throttle import TokenBucket
from pybk.ledger.digest import EntryDigest
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from pybk.manager.ledger_writer import LedgerWriter, keeping_log
from pybk.manager.local_backend import StoreBackend
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.lmdb_store import LmdbMetadataStore
from pybk.replication.inflight import Inflight
from pybk.replication.writer import WriterMachine
from pybk.storage.readonly import ReadOnlyStore
from pybk.storage.store import Store
from pybk.streams.ledger_list import Step
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_writer import ListWriter
from pybk.streams.log import Log
from pybk.streams.log_writer import LogWriter
from pybk.streams.subscription import Subscription
from tests.waiting import WAIT_S, wait_until

if TYPE_CHECKING:
    import pytest

    from pybk.adapters.eventsourcing.event_log import EventLog


def backend_of(manager: LedgerManager) -> LedgerBackend:
    """Return where a manager's ledgers live."""
    return manager._backend


def cluster_backend_of(manager: LedgerManager) -> ClusterBackend:
    """Return the client of a cluster under a manager."""
    backend = manager._backend
    assert isinstance(backend, ClusterBackend)
    return backend


def service_of(manager: LedgerManager) -> BookieServer:
    """Return the bookie that serves in the process of a manager."""
    service = cluster_backend_of(manager).bookie
    assert isinstance(service, BookieServer)
    return service


def metadata_of(manager: LedgerManager) -> ClusterMetadata:
    """Return the metadata of the cluster of a manager."""
    return cluster_backend_of(manager).membership.metadata


def store_view_of(handle: LedgerManager | LedgerReader) -> Store | ReadOnlyStore:
    """Return the store under a manager or a reader, live or read-only."""
    backend = handle._backend
    assert isinstance(backend, StoreBackend)
    return backend.store


def store_of(manager: LedgerManager) -> Store:
    """Return the live store under a manager."""
    store = store_view_of(manager)
    assert isinstance(store, Store)
    return store


def descriptor_of(handle: LedgerReader | LedgerWriter) -> Any:
    """Return the state of the ledger that a handle shares with all others of its manager."""
    return handle._descriptor


def digest_of(handle: LedgerReader | LedgerWriter) -> EntryDigest:
    """Return what signs and verifies the entries of a handle's ledger."""
    return handle._digest


def manager_of(writer: LedgerWriter) -> LedgerManager:
    """Return the manager that a writer keeps open."""
    manager = writer._manager
    assert isinstance(manager, LedgerManager)
    return manager


def create_of_type(manager: LedgerManager, ledger_type: LedgerType, password: bytes) -> LedgerWriter:
    """Create a ledger of a type that may be the system's own, which no public call does."""
    return manager._create_ledger(ledger_type, Credentials(password))


def stage(writer: LedgerWriter, payload: bytes) -> None:
    """Stage an entry that no thread waits for; the caller holds the ledger's lock."""
    writer._stage(payload)


def take_no_more(writer: LedgerWriter) -> None:
    """Have a writer take no more entries, as the first step of its close does."""
    writer._closed = True


def waiting_followers(reader: LedgerReader) -> int:
    """Return how many followers of a reader wait for entries."""
    return len(reader._waiting)


def inflight_of(machine: WriterMachine) -> Inflight:
    """Return the batches of a writer that are not confirmed at all places."""
    return machine._inflight


def has_waited_for_bookies(machine: WriterMachine) -> bool:
    """Return whether too few bookies answered a writer at some time."""
    return machine._stuck_at != -2


def wait_for_loss(writer: LogWriter | Subscription) -> None:
    """Wait until the ledger of the open segment of a log, or of a subscription's list, is lost."""
    found: Any = writer._cursor if isinstance(writer, Subscription) else writer
    appender = found._writer.appender
    log = keeping_log(appender._writers[max(appender._writers)])
    assert log is not None
    wait_until(lambda: log.is_lost)


@contextmanager
def patient_logs() -> Iterator[None]:
    """Have the writers of logs wait for bookies as long as a test waits, however soon a ledger of theirs is lost."""
    patience = property(lambda _: WAIT_S, lambda *_: None)
    with patch.object(ListWriter, "patience_s", patience, create=True):
        yield


@contextmanager
def locked_elsewhere(subscription: Subscription) -> Iterator[None]:
    """Have a thread hold the lock of a subscription; fails if the ``with`` block does not end meanwhile."""
    held, over, ended = threading.Event(), threading.Event(), list[bool]()

    def hold() -> None:
        with subscription._lock:
            held.set()
            ended.append(over.wait(WAIT_S / 6))

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert ended == [True], "what is done meanwhile waits for the lock"


@contextmanager
def looked_by(look: Callable[[Callable[[], bool]], bool]) -> Iterator[None]:
    """Have subscriptions look for fresh records by a function, which gets what looks for them otherwise."""
    real = Subscription._fetch
    with patch.object(Subscription, "_fetch", lambda self: look(partial(real, self))):
        yield


async def wait_for_lock_wait(subscription: Subscription) -> asyncio.Future[None]:
    """Return what the tasks of the running loop wait for that wait for the lock of a subscription, once one does."""
    waits, loop = subscription._lock_waits, asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_S):
        while loop not in waits:
            await asyncio.sleep(0)
    return waits[loop]


@contextmanager
def lock_never_free(subscription: Subscription) -> Iterator[None]:
    """Have another thread take the lock of a subscription again before those that waited for it have seen it free."""
    with patch.object(subscription, "_wait_for_lock", lambda: None), locked_elsewhere(subscription):
        yield


@contextmanager
def note_repairs(subscription: Subscription) -> Iterator[list[bool]]:
    """Note, for each repair by this thread of the list of a subscription, whether this thread had the lock."""
    cursor: Any = subscription._cursor
    lock: Any = subscription._lock
    repair, me, noted = cursor._writer.repair, threading.current_thread(), list[bool]()

    def note_and_repair() -> None:
        if threading.current_thread() is me:
            noted.append(lock._is_owned())
        repair()

    with patch.object(cursor._writer, "repair", note_and_repair):
        yield noted


def changes_of(log: Log) -> int:
    """Return how often a log that has readers was reported to have changed."""
    return log._steps.changes


def open_ledger_of(log: Log) -> int:
    """Return the ledger of the segment that a log's writer appends to."""
    return log._steps.existing().record.segments[-1].ledger_id


def leave(writer: LogWriter) -> None:
    """Let go of a log without closing it, as the end of the writer's process does."""
    writer._writer.let_go()


def cut_log(log: Log, seq: int) -> LogWriter:
    """Drop the records of a log after one, which only a write-ahead log offers; returns the writer."""
    writer = log.writer()
    writer._writer.cut(seq)
    return writer


@contextmanager
def performed(perform: Callable[[Callable[[Step], Any], Step], Any]) -> Iterator[None]:
    """Have steps of lists performed by a function, which gets what performs them otherwise, and the step."""
    real = LedgerSteps._step

    def step(self: LedgerSteps, step: Step) -> Any:
        return perform(partial(real, self), step)

    with patch.object(LedgerSteps, "_step", step):
        yield


@contextmanager
def hold_resumption(writer: LogWriter) -> Iterator[None]:
    """Keep a log's writer from replacing a lost ledger until the ``with`` block ends."""
    with writer._writer._operation:
        yield


def note_chores(monkeypatch: pytest.MonkeyPatch) -> set[Chore]:
    """Return a set that gets the chores of bookies which have worked once."""
    worked: set[Chore] = set()
    do = ChoreThread._do

    def do_and_note(self: ChoreThread, chore: Chore, work: Work) -> None:
        do(self, chore, work)
        worked.add(chore)

    monkeypatch.setattr(ChoreThread, "_do", do_and_note)
    return worked


def receive_event(client: Any, data: bytes) -> None:
    """Have a client of kazoo receive the event of a watch, as its own thread does."""
    client._connection._read_watch_event(data, 0)


def repairer_of(
    list_marks: Callable[[], dict[int, list[Any]]],
    candidates: Callable[[Any], list[Candidate]],
    repair: Callable[[list[Candidate], Any], bool],
    *,
    news: bool,
) -> Any:
    """Return what ``RepairWorker.look`` uses of its object: marks, ledgers, and how a batch is repaired."""
    worker = SimpleNamespace(
        **dict.fromkeys(("_sample", "_is_paused"), lambda: None),
        _ready=lambda found, _now: list(found),
        _stopping=SimpleNamespace(is_set=lambda: False),
        _news=SimpleNamespace(is_set=lambda: news, clear=lambda: None),
        failures={},
        _membership=SimpleNamespace(refresh=lambda: None),
        _queued_marks=list_marks,
        _candidates=lambda ready, marks: candidates(ready),
        _repair_batch=repair,
    )
    worker._listing_share = property.__get__(vars(RepairWorker)["_listing_share"], worker)
    return worker


def resting(
    look: Callable[[], bool], sample: Callable[[], None], look_s: Callable[[], float], read: TokenBucket
) -> Any:
    """Return what ``RepairWorker`` uses of its object to rest between two passes.

    Args:
        look: Makes a pass.
        sample: Looks at the appends.
        look_s: Returns in how many seconds they are looked at next.
        read: Counts what others read for copies.
    """
    worker = SimpleNamespace(
        **dict.fromkeys(("_stopping", "_news"), SimpleNamespace(is_set=lambda: False, clear=lambda: None)),
        **dict.fromkeys(("_pass_at", "_watch_at"), float("-inf")),
        _busy=False,
        look=look,
        _sample=sample,
        _look_s=look_s,
        _outbound=read,
        _read_bytes=0,
        _unread_looks=1000,
    )
    for name in ("_make_pass", "_watch_appends", "_next_watch"):
        setattr(worker, name, partial(getattr(RepairWorker, name), worker))
    return worker


def metadata_store_of(manager: LedgerManager) -> Any:
    """Return the metadata store of a client."""
    return cluster_backend_of(manager).membership.metadata._store


def lock_of(store: LmdbMetadataStore) -> threading.Lock:
    """Return the lock that the threads of a process take for a moment to use a metadata store."""
    return store._lock


def inserts_in_flight(events: EventLog) -> int:
    """Return the number of inserts that are staged and not durable yet."""
    return events._in_flight


def has_inserts_wait(events: EventLog) -> bool:
    """Return whether inserts have to wait, because a thread waits for those in flight."""
    return events._paused


def set_call_time(store: Any, seconds: float) -> None:
    """Change the deadline of the calls of a metadata store that is open."""
    store._timeout_s = seconds
