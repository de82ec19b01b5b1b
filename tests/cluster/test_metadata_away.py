"""Writers outlive a metadata store that does not answer while they need it, as they outlive bookies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import MetadataUnreachableError
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.replication.writer import METADATA_TRIES
from pybk.streams.log import Log
from tests.cluster.inside import inside
from tests.internals import changes_of, cluster_backend_of, metadata_store_of, open_ledger_of, wait_for_loss
from tests.waiting import WAIT_S, wait_until

PASSWORD = b"p"
CHANGES = ("create", "put", "delete", "rename")
READS = ("get", "get_many", "children")


class Away:
    """Lets the metadata store of a client not answer.

    Args:
        client: The client.
        monkeypatch: That of the test.
        lost: Whether changes are made all the same, and only the answers are lost.

    Attributes:
        now: Whether it does not answer.
        asked: How often it was asked meanwhile.
    """

    def __init__(self, client: LedgerManager, monkeypatch: pytest.MonkeyPatch, *, lost: bool = False) -> None:
        self.now = False
        self.asked = 0
        store = metadata_store_of(client)
        for name in (*CHANGES, *READS):
            monkeypatch.setattr(store, name, self._or_away(getattr(store, name), lost=lost and name in CHANGES))

    def _or_away(self, method: Callable[..., Any], *, lost: bool) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            if not self.now:
                return method(*arguments, **options)
            if lost:
                method(*arguments, **options)
            self.asked += 1
            raise MetadataUnreachableError("no answer", outcome_unknown=lost)

        return called


def place_of(client: LedgerManager, ledger_id: int) -> int:
    """Return the place of the only bookie of a ledger."""
    return int(client.ledger_metadata(ledger_id).fragments[-1].ensemble[0].bookie_id[-1])


def go_away_once_bookies_are_chosen(client: LedgerManager, monkeypatch: pytest.MonkeyPatch, away: Away) -> None:
    """Let the metadata store go away when the new ensemble is about to be written."""
    membership = cluster_backend_of(client).membership
    choose = membership.choose

    def choose_last(*arguments: Any) -> Any:
        found = choose(*arguments)
        away.now = True
        return found

    monkeypatch.setattr(membership, "choose", choose_last)


def test_a_writer_waits_for_the_metadata_store_while_a_bookie_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(tmp_path, count=2) as cluster, cluster.connect() as client:
        away = Away(client, monkeypatch)
        writer = client.create_ledger(password=PASSWORD, ensemble_size=1)
        writer.append(b"before")
        place = place_of(client, writer.ledger_id)
        go_away_once_bookies_are_chosen(client, monkeypatch, away)
        cluster.bookies[place].close()
        future = writer.append_async(b"while both are away")
        wait_until(lambda: away.asked > METADATA_TRIES + 2)
        assert not future.done()
        away.now = False
        assert future.result(WAIT_S) == 1
        writer.close()
        assert place_of(client, writer.ledger_id) != place


def test_a_writer_whose_patience_has_passed_says_what_a_retry_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(tmp_path, count=2) as cluster, cluster.connect(bookie_patience_seconds=0.1) as client:
        away = Away(client, monkeypatch)
        writer = client.create_ledger(password=PASSWORD, ensemble_size=1)
        writer.append(b"before")
        go_away_once_bookies_are_chosen(client, monkeypatch, away)
        place = place_of(client, writer.ledger_id)
        cluster.bookies[place].close()
        for unknown in (True, False):
            with pytest.raises(MetadataUnreachableError, match=r"recover=True .*another ledger") as failed:
                writer.append(b"while it is away")
            assert (failed.value.outcome_unknown, failed.value.retryable) == (unknown, False)
        monkeypatch.undo()
        cluster.open_bookie(place)
        wait_until(lambda: len(client.bookies()) == 2)
        with client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            assert reader.last_add_confirmed == 0


def test_a_log_continues_in_another_segment_when_the_metadata_store_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(tmp_path, count=2) as cluster, cluster.connect(bookie_patience_seconds=20) as client:
        away = Away(client, monkeypatch)
        log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        writer = log.writer()
        given = [(writer.append(b"before"), b"before")]
        go_away_once_bookies_are_chosen(client, monkeypatch, away)
        place = place_of(client, open_ledger_of(log))
        cluster.bookies[place].close()
        futures = [writer.append_async(b"%d" % number) for number in range(20)]
        wait_for_loss(writer)
        assert not any(future.done() for future in futures)
        monkeypatch.undo()
        cluster.open_bookie(place)
        given += [(future.result(WAIT_S), b"%d" % at) for at, future in enumerate(futures)]
        given.append((writer.append(b"after"), b"after"))
        assert [position.seq for position, _ in given] == list(range(22))
        writer.close()
        with log.reader() as reader:
            assert [(record.position, record.data) for record in reader] == given


def test_a_roll_continues_although_it_did_not_hear_that_it_had_closed_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger is closed where this writer was about to close it, which is no foreign fence."""
    with inside(tmp_path, count=1) as cluster, cluster.connect(bookie_patience_seconds=0.1) as client:
        away = Away(client, monkeypatch, lost=True)
        log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        writer = log.writer()
        given = [(writer.append(b"before"), b"before")]
        first = open_ledger_of(log)
        write = ClusterMetadata.write_ledger

        def write_last(metadata: ClusterMetadata, changed: LedgerMetadata, version: int) -> int:
            away.now = changed.ledger_id == first
            return write(metadata, changed, version)

        monkeypatch.setattr(ClusterMetadata, "write_ledger", write_last)
        with pytest.raises(MetadataUnreachableError):
            writer.roll()
        away.now = False
        monkeypatch.setattr(ClusterMetadata, "write_ledger", write)
        assert client.ledger_metadata(first).state is LedgerState.CLOSED
        writer.roll()
        given.append((writer.append(b"after"), b"after"))
        writer.close()
        with log.reader() as reader:
            assert [(record.position, record.data) for record in reader] == given


def test_a_reader_goes_on_while_the_metadata_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was truncated meanwhile by another is seen once the store answers."""
    with inside(tmp_path, count=1) as cluster, cluster.connect() as client, cluster.connect() as other:
        away = Away(client, monkeypatch)
        log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        there = Log.open(other, "log", password=PASSWORD, quorums=(1, 1, 1))
        with there.writer() as writer:
            writer.append_many([b"%d" % number for number in range(10)])
        with log.reader() as reader:
            records = iter(reader)
            assert next(records).data == b"0"
            away.now, before = True, changes_of(log)
            there.truncate(5)
            wait_until(lambda: changes_of(log) > before)
            assert next(records).data == b"1"
            away.now, before = False, changes_of(log)
            wait_until(lambda: changes_of(log) > before)
            assert (next(records).data, reader.skipped) == (b"5", 3)
