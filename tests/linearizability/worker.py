"""What the processes do whose histories are checked; each function runs in a process that may be killed."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from pybk import LedgerManager, LogLockedError, StoreLockedError, WalRecord, WriteAheadLog
from pybk.config import StoreConfig
from pybk.errors import MetadataExistsError, MetadataUnreachableError, MetadataVersionError, PybkError
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.append_future import AppendFuture
from pybk.metadata.store import MetadataStore
from pybk.metadata.url import open_metadata
from tests.cluster.inside import SECRET
from tests.linearizability.history import Recorder
from tests.linearizability.models import with_record
from tests.linearizability.mutants import MUTANTS
from tests.simulator.mutating import mutated
from tests.storage.real_store import QUICK
from tests.waiting import WAIT_S

PASSWORD = b"the password of the ledgers"
WINDOW = 4
"""Entries that a writer appends before the first of them was acknowledged."""


@contextmanager
def broken(mutant: str) -> Iterator[None]:
    """Run with a mutant; with none if it has no name."""
    logging.disable()
    if not mutant:
        yield
        return
    with mutated(MUTANTS[mutant]):
        yield


# ---- compare-and-set -----------------------------------------------------------------------------------------------


def change_keys(url: str, path: Path, seed: str, mutant: str, count: int) -> None:
    """Read and change a few keys of a metadata store with two threads that share it."""
    recorder = Recorder(path)
    with broken(mutant):
        store = open_metadata(url, timeout_s=WAIT_S)
        threads = [
            threading.Thread(target=_change_keys, args=(store, recorder, Random(name), name, count))
            for name in (f"{seed}/0", f"{seed}/1")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.close()


def _change_keys(store: MetadataStore, recorder: Recorder, source: Random, name: str, count: int) -> None:
    seen: dict[str, int] = {}
    for number in range(count):
        reused = source.random() < 0.5
        key = "keys/reused" if reused else "keys/once"
        value = f"{name}.{number}"
        chance = source.random()
        version = seen.get(key)
        if version is None or chance < 0.4:
            _read(store, recorder, key, seen)
        elif chance < 0.85 or not reused:  # a key that comes back takes another round trip
            _attempt(
                recorder, key, "put", [value, version], partial(store.put, key, value.encode(), version, reused=reused)
            )
        else:
            _attempt(recorder, key, "delete", ["", version], partial(store.delete, key, version, reused=True))
        if key not in seen:
            _attempt(recorder, key, "create", value, partial(store.create, key, value.encode()))


def _read(store: MetadataStore, recorder: Recorder, key: str, seen: dict[str, int]) -> None:
    call = recorder.call(key, "get")
    try:
        node = store.get(key, latest=True)
    except MetadataUnreachableError:
        recorder.refused(call)
        return
    seen.pop(key, None)
    if node is not None:
        seen[key] = node.version
    recorder.returned(call, None if node is None else [node.value.decode(), node.version])


def _attempt(recorder: Recorder, key: str, kind: str, argument: Any, change: Callable[[], int | None]) -> None:
    call = recorder.call(key, kind, argument)
    try:
        recorder.returned(call, [change()])
    except (MetadataVersionError, MetadataExistsError, MetadataUnreachableError) as error:
        if not error.outcome_unknown and isinstance(error, MetadataUnreachableError):
            recorder.refused(call)
        elif not error.outcome_unknown:
            recorder.returned(call, ())


# ---- recovery ------------------------------------------------------------------------------------------------------


def payload(ledger_id: int, entry_id: int) -> bytes:
    """Return what a writer appends as an entry."""
    return b"%d/%d" % (ledger_id, entry_id)


def write(url: str, path: Path, announced: Path, count: int) -> None:
    """Make a ledger, write its id to a file, and append until the ledger is fenced, or some entries were appended."""
    recorder = Recorder(path)
    with _connected(url) as manager:
        writer = manager.create_ledger(password=PASSWORD)
        ledger_id = writer.ledger_id
        announced.with_suffix(".new").write_text(str(ledger_id))
        announced.with_suffix(".new").rename(announced)
        pending: deque[tuple[int, AppendFuture[int]]] = deque()
        with suppress(PybkError):  # whatever had no answer by then has an unknown outcome
            for entry_id in range(count):
                call = recorder.call(str(ledger_id), "append", entry_id)
                pending.append((call, writer.append_async(payload(ledger_id, entry_id))))
                while len(pending) >= WINDOW or (pending and entry_id == count - 1):
                    call, future = pending.popleft()
                    future.result()
                    recorder.returned(call)


def recover(url: str, path: Path, ledger_id: int, mutant: str) -> None:
    """Recover a ledger until it is closed, read all its entries, and note where the metadata say that it ends."""
    recorder = Recorder(path)
    key = str(ledger_id)
    with broken(mutant), _connected(url) as manager:
        while True:
            call = recorder.call(key, "recover")
            try:
                reader = manager.open_ledger(ledger_id, password=PASSWORD)
            except PybkError:  # it may be closed nevertheless
                continue
            last = reader.last_add_confirmed
            recorder.returned(call, last)
            break
        for entry in reader.read(0, last) if last >= 0 else ():
            assert entry.payload == payload(ledger_id, entry.entry_id), f"entry {entry.entry_id} of ledger {ledger_id}"
        call = recorder.call(key, "closed")
        metadata = manager.ledger_metadata(ledger_id)
        assert metadata.state is LedgerState.CLOSED
        recorder.returned(call, metadata.last_entry_id)


@contextmanager
def _connected(url: str) -> Iterator[LedgerManager]:
    with LedgerManager.connect(url, cluster_secret=SECRET) as manager:
        yield manager


# ---- standbys ------------------------------------------------------------------------------------------------------


def stand_by(where: str, path: Path, name: str, seed: str, mutant: str, count: int) -> None:
    """Be promoted again and again, and append some records each time, until others take the log.

    Args:
        where: The directory of a store, or the metadata URL of a cluster.
        path: The history.
        name: The log.
        seed: Decides how many records.
        mutant: How the code is broken.
        count: How often; 0 makes the log.
    """
    with broken(mutant), _opened(where) as place:
        config = StoreConfig(**QUICK) if isinstance(place, str) else None
        opened = partial(WriteAheadLog.open, place, name, insecure=True, config=config)
        if not count:
            opened().close()
            return
        _stand_by(opened, Recorder(path), name, Random(seed), seed, count, steal=config is None)


@contextmanager
def _opened(where: str) -> Iterator[str | LedgerManager]:
    if "://" not in where:
        yield where
        return
    with _connected(where) as manager:
        yield manager


def _stand_by(
    opened: Callable[..., WriteAheadLog],
    recorder: Recorder,
    name: str,
    source: Random,
    seed: str,
    count: int,
    *,
    steal: bool,
) -> None:
    promotions = 0
    while promotions < count:
        owner = f"{seed}.{promotions}"
        with suppress(PybkError), opened(mode="r") as log:
            _promote(log, recorder, name, owner, steal=steal)
            promotions += 1
            for number in range(source.randrange(1, 8)):
                data = f"{owner}.{number}"
                call = recorder.call(name, "append", [owner, data])
                recorder.returned(call, log.append(data.encode()) - 1)


def _promote(log: WriteAheadLog, recorder: Recorder, name: str, owner: str, *, steal: bool) -> None:
    """Promote a log, and note which records it applied."""
    records = 0
    content = ""

    def apply(record: WalRecord) -> None:
        nonlocal records, content
        assert record.lsn == records + 1, f"record {record.lsn} after {records}"
        records += 1
        content = with_record(content, record.data.decode())

    call = recorder.call(name, "promote", owner)
    try:
        log.promote(apply, steal=steal, wait=0.0 if steal else 1.0)
    except (LogLockedError, StoreLockedError):
        recorder.refused(call)
        raise
    recorder.returned(call, [records, content])
