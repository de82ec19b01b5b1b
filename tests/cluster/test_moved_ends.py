"""Ledgers whose ends have moved, of many that one client reads: found with one request to each bookie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader, moved
from pybk.manager.ledger_writer import LedgerWriter
from pybk.transport import codec
from tests.cluster.inside import Inside, inside
from tests.waiting import wait_until

COUNT = 6


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster") as cluster:
        yield cluster


class Ledgers:
    """Open ledgers with an entry each, and readers of another client, which have seen it."""

    def __init__(self, cluster: Inside, opened: ExitStack, ensemble_size: int) -> None:
        self.manager = cluster.connect()
        self.third = cluster.connect()
        reading = cluster.connect()
        self.writers: list[LedgerWriter] = []
        self.readers: list[LedgerReader] = []
        for _ in range(COUNT):
            writer = opened.enter_context(self.manager.create_ledger(ensemble_size=ensemble_size, insecure=True))
            writer.append(b"entry")
            self.writers.append(writer)
            self.readers.append(reading.open_ledger(writer.ledger_id, recover=False))
        for reader in self.readers:
            wait_until(lambda reader=reader: reader.read_last_add_confirmed() == 0)  # type: ignore[misc]

    def append(self, number: int) -> None:
        """Append an entry, and wait until a third client sees it."""
        last = self.writers[number].append(b"entry")
        seen = self.third.open_ledger(self.writers[number].ledger_id, recover=False)
        wait_until(lambda: seen.read_last_add_confirmed() == last)

    def moved(self) -> list[int]:
        return [self.readers.index(reader) for reader in moved(self.readers)]


@pytest.fixture
def ledgers(request: pytest.FixtureRequest, cluster: Inside) -> Iterator[Ledgers]:
    with ExitStack() as opened:
        yield Ledgers(cluster, opened, getattr(request, "param", 3))


def test_ledgers_without_news_have_not_moved(ledgers: Ledgers) -> None:
    wait_until(lambda: not ledgers.moved())
    assert not moved([])


@pytest.mark.parametrize("ledgers", [1], indirect=True)
def test_an_entry_that_all_bookies_know_as_confirmed_is_seen(ledgers: Ledgers) -> None:
    for number in (4, 1):
        ledgers.append(number)
        wait_until(lambda: ledgers.moved() == [number])  # noqa: B023  # a ledger whose bookie answers late counts, too
        assert ledgers.readers[number].read_last_add_confirmed() == 1
        wait_until(lambda: not ledgers.moved())


def test_an_end_in_the_metadata_is_seen(ledgers: Ledgers) -> None:
    ledgers.writers[2].append(b"entry")
    ledgers.writers[2].close()
    assert 2 in ledgers.moved()
    assert ledgers.readers[2].read_last_add_confirmed() == 1
    assert ledgers.readers[2].is_closed
    ledgers.manager.delete_ledger(ledgers.writers[3].ledger_id)
    assert 2 not in ledgers.moved(), "a closed ledger does not move"
    assert 3 in ledgers.moved()
    ledgers.readers[5].close()
    assert 5 in ledgers.moved(), "reading it raises ClosedError"


def test_one_bookie_of_three_may_be_away(cluster: Inside, ledgers: Ledgers) -> None:
    cluster.bookies[1].close()
    wait_until(lambda: not ledgers.moved())
    ledgers.append(0)
    wait_until(lambda: ledgers.moved() == [0])


def test_bookies_that_do_not_know_the_request_are_asked_for_each_ledger(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: not ledgers.moved())
    monkeypatch.delitem(codec.DECODERS, codec.MessageKind.COMPARE_LACS)
    assert ledgers.moved() == [*range(COUNT)]
    assert [reader.read_last_add_confirmed() for reader in ledgers.readers] == [0] * COUNT


def test_ledgers_that_this_client_writes_count_as_moved(cluster: Inside) -> None:
    manager = cluster.connect()
    with ExitStack() as opened:
        writers = [opened.enter_context(manager.create_ledger(insecure=True)) for _ in range(COUNT)]
        for writer in writers:
            writer.append(b"entry")
        readers = [manager.open_ledger(each.ledger_id, recover=False) for each in writers]
        assert moved(readers) == readers


def test_every_ledger_of_a_store_may_have_moved(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "store") as manager, manager.create_ledger(insecure=True) as writer:
        reader = manager.open_ledger(writer.ledger_id, recover=False)
        assert moved([reader]) == [reader]
