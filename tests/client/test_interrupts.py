"""KeyboardInterrupt at any line of the client: no thread is stranded, and nothing acknowledged lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pybk import Entry, LedgerReader
from pybk.client.append_queue import AppendBatch, AppendQueue
from pybk.client.wire import BookieWire
from pybk.errors import LedgerRecoveryError, NotEnoughBookiesError, PybkError
from pybk.ledger.ledger_metadata import Bookie
from pybk.manager.ledger_manager import LedgerManager
from pybk.streams import appender
from pybk.threads.group_commit import Completion
from pybk.transport.client_links import Links
from pybk.transport.server import Server
from tests.cluster.inside import inside
from tests.internals import cluster_backend_of, service_of
from tests.interrupting import interrupted_at
from tests.sampling import every, places
from tests.transport.wire_harness import BOOKIE, INSTANCE, KEYS, TCP, add
from tests.waiting import WAIT_S

_TRANSPORT = ("pybk/transport/client_links", "pybk/transport/in_process", "pybk/transport/server")
_FILES = (
    "pybk/client/",
    "pybk/threads/group_commit.py",
    "pybk/replication/",
    "pybk/manager/ledger_writer.py",
    *_TRANSPORT,
)


def one_round(client: LedgerManager, line: int, others: int) -> bool:
    """Interrupt appends while other threads append to another ledger; return whether the line was reached."""
    writer, other = client.create_ledger(insecure=True), client.create_ledger(insecure=True)
    done: dict[bytes, int] = {}

    def append_there() -> None:
        try:
            for number in range(3):
                other.append(b"other %d" % number)
        except PybkError:
            pass  # given up with all else, and told so

    def append_here() -> None:
        for number in range(2):
            payload = b"here %d" % number
            done[payload] = writer.append(payload)

    threads = [threading.Thread(target=append_there, daemon=True) for _ in range(others)]
    for thread in threads:
        thread.start()
    fired = interrupted_at(line, _FILES, append_here, ignored=(PybkError,))
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"a waiter is stranded after an interrupt at line event {line}"
    with client.open_ledger(writer.ledger_id) as reader:
        found = [entry.payload for entry in reader.read(0, reader.last_add_confirmed)]
    for payload, entry_id in done.items():
        assert found[entry_id] == payload
    assert len(set(found)) == len(found), "an entry was written twice"
    with client.create_ledger(insecure=True) as after:
        assert after.append(b"after") == 0
    return fired


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("others", "step", "lines", "with_bookie"), [(0, 113, 900, True), (2, 17, 60, False)])
def test_an_interrupt_at_any_line_of_the_client_strands_no_waiter(
    tmp_path: Path, others: int, step: int, lines: int, with_bookie: bool
) -> None:
    with inside(tmp_path) as cluster:
        client = cluster.open_bookie(3) if with_bookie else cluster.connect()
        following = places(f"client {others}", step, 2)
        while one_round(client, line := next(following), others):
            pass
        assert line > lines, "the client was not traced"


def one_read(reader: LedgerReader, line: int, others: int) -> bool:
    """Interrupt the read of one entry while other threads read others; return whether the line was reached."""
    wrong: list[Entry] = []

    def read_there() -> None:
        for number in (0, 1, 2, 3):
            with suppress(PybkError):  # given up with all else, and told so
                wrong.extend(entry for entry in reader.read(number, number) if entry.payload != b"entry %d" % number)

    threads = [threading.Thread(target=read_there, daemon=True) for _ in range(others)]
    for thread in threads:
        thread.start()
    fired = interrupted_at(
        line, (*_FILES, "pybk/manager/ledger_reader.py"), partial(reader.read, 1, 1), ignored=(PybkError,)
    )
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"a reader is stranded after an interrupt at line event {line}"
    assert wrong == []
    assert [entry.payload for entry in reader.read(2, 2)] == [b"entry 2"]
    return fired


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("others", [0, 2])
def test_an_interrupt_at_any_line_of_a_read_of_one_entry_strands_no_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as client:
        near = service_of(cluster.bookies[1]).bookie.bookie_id
        monkeypatch.setattr(cluster_backend_of(client).membership, "near", near)  # else half of the links are down
        with client.create_ledger(insecure=True) as writer:
            writer.append_many([b"entry %d" % number for number in range(6)])
        with client.open_ledger(writer.ledger_id) as reader:
            following = places(f"read {others}", 5, 2)
            while one_read(reader, line := next(following), others):
                pass
            assert line > 40, "the client was not traced"


@pytest.mark.parametrize("then", [BookieWire.begin_again, BookieWire.close])
def test_an_interrupt_while_links_are_replaced_leaves_no_session_of_a_writer_open(
    then: Callable[[BookieWire], None],
) -> None:
    class Registered:
        def find(self, bookie: Bookie) -> tuple[str, bytes | None]:
            return server.addresses[0], server.public_key

    ledger: Any = SimpleNamespace(ledger_id=7, unlocked=False, as_member=False)
    with Server([TCP], INSTANCE, KEYS) as server:
        line, fired = 0, True
        while fired:
            made = [Links(KEYS, own=(BOOKIE, server)) for _ in range(3)]
            wire = BookieWire(iter(made).__next__, Registered())
            assert wire.send(1, BOOKIE, ledger, add())
            ((peer, _, _),) = server.receive(0)
            peer.writes.add(7)
            assert server.has_writer(7)
            fired = interrupted_at(line, _FILES, wire.begin_again)
            then(wire)
            assert server.receive(0) == []
            assert not server.has_writer(7), f"line event {line}"
            wire.close()
            for links in made:  # an interrupt may have lost some as they were made
                links.close()
            line += 1
        assert line > 20, "it was not traced"


def queue_of_no_ledger(waited: list[Completion]) -> AppendQueue:
    """Return an append queue whose caller is the leader, and which notes what is waited for."""

    def finish(completion: Completion) -> None:
        completion.done = True

    group: Any = SimpleNamespace(finish=finish, wait=waited.append, when_done=None)
    ledger: Any = SimpleNamespace(confirm=lambda _: None, error=None, deferred=False)
    return AppendQueue(ledger, group, lambda: None, lambda call: call(), 1 << 20)


def batch_of(entries: int) -> AppendBatch:
    """Return a batch of so many entries, the last of which is entry 0."""
    batch = AppendBatch()
    staged: Any = SimpleNamespace(sizes=[1] * entries, length_at_end=0, freeze=lambda: None)
    batch.entries, batch.last = staged, 0
    return batch


def test_a_flush_waits_for_what_is_sent_although_an_interrupted_append_left_an_empty_batch() -> None:
    """Else a ledger would be closed before entries that are under way, which its log could not append again."""
    waited: list[Completion] = []
    queue = queue_of_no_ledger(waited)
    queue.sent.append(batch_of(1))
    queue.formed.append(batch_of(0))
    queue.flush()
    assert queue.take() == []
    assert [mark.done for mark in waited] == [False]
    queue.acknowledged(0)
    assert [mark.done for mark in waited] == [True]
    queue.formed.append(batch_of(0))
    queue.flush()
    assert queue.take() == []
    assert [mark.done for mark in waited] == [True, True], "nothing else is under way"


def test_an_interrupt_of_an_acknowledgement_strands_no_future_of_a_lost_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is done is not appended again, and what waits for it in an earlier ledger is done, too."""
    writer: Any = SimpleNamespace(ledger_id=0)
    line, fired = 0, True
    while fired:
        queue = queue_of_no_ledger([])
        queue.on_lost = lambda: None
        origin, batch = Completion(), batch_of(1)
        batch.kept = [appender.Kept(0, 1, [b"entry"], 1, 1, origins=(origin,))]
        queue.sent.append(batch)
        fired = interrupted_at(line, ("pybk/client/append_queue.py",), partial(queue.acknowledged, 0))
        queue.lose(NotEnoughBookiesError("the leader was interrupted"))
        monkeypatch.setattr(appender, "keeping_log", lambda _, queue=queue: queue)
        log = appender.Appender("log 'log'")
        log.created(writer)
        acknowledged = batch.done
        log.give_up(NotEnoughBookiesError("too few bookies all the time"))
        assert (origin.done, origin.error is None) == (True, acknowledged), f"line event {line}"
        line += 1
    assert line > 10, "it was not traced"


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.timeout(0)
def test_an_interrupt_at_any_line_of_staging_leaves_a_writer_that_appends_and_closes(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster:
        line, fired, given_up, step = 0, True, list[int](), every(3)
        while fired:
            with cluster.connect() as client:
                writer = client.create_ledger(insecure=True)
                done = {writer.append(b"before"): b"before"}
                fired = interrupted_at(line, ("pybk/client/append_queue.py",), partial(writer.append, b"interrupted"))
                try:
                    done[writer.append(b"after")] = b"after"
                except LedgerRecoveryError:
                    given_up.append(line)
            with cluster.connect() as client, client.open_ledger(writer.ledger_id) as reader:
                found = [entry.payload for entry in reader]
            assert {entry_id: found[entry_id] for entry_id in done} == done, f"line event {line}"
            line += step
        # Staging comes first, and an interrupt there harms nothing; an interrupted leader gives up what is under way.
        assert given_up == list(range(given_up[0], given_up[-1] + 1, step))
        assert given_up[0] > 25, "an interrupt while staging failed a later append"
