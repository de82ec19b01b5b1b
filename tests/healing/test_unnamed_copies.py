"""Bookies that come back after they were replaced drop what they have, and take copies again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import MetadataError, StorageFullError
from pybk.healing import unnamed_copies
from pybk.healing.unnamed_copies import SurplusDrops
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of, service_of
from tests.waiting import wait_until

PASSWORD = b"correct horse"
COUNT = 50


@pytest.fixture(name="four")
def new_four(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path, count=4) as cluster:
        yield cluster


def payload(number: int) -> bytes:
    return b"entry %d " % number * 20


def fill(client: LedgerManager, **options: Any) -> int:
    with client.create_ledger(password=PASSWORD, **options) as writer:
        writer.append_many([payload(number) for number in range(COUNT)])
    return writer.ledger_id


def check(client: LedgerManager, ledger_id: int) -> None:
    with client.open_ledger(ledger_id, password=PASSWORD) as reader:
        entries = [entry.payload for entry in reader.read(0, COUNT - 1)]
    assert entries == [payload(number) for number in range(COUNT)]


class Replaced:
    """A ledger one of whose bookies was stopped, replaced, and started again.

    Attributes:
        client: Another client.
        ledger_id: The ledger.
        manager: The manager of the bookie that came back.
        service: The bookie.
        drops: What drops its surplus copies, without a delay.
    """

    def __init__(self, cluster: Inside, *, fenced: bool = False) -> None:
        self.client = cluster.connect()
        self.ledger_id = fill(self.client)
        self.name = self.client.ledger_metadata(self.ledger_id).fragments[0].ensemble[0].bookie_id
        self.place = int(self.name[-1])
        service = service_of(cluster.bookies[self.place])
        # The ledger is closed once two of three have its entries; the third may be late.
        wait_until(lambda: service.replicas.count_entries(self.ledger_id) == COUNT)
        if fenced:
            state = service.replicas.state(self.ledger_id)
            assert state is not None
            service.replicas.fence(self.ledger_id, state.header)
        cluster.bookies[self.place].close()
        wait_until(lambda: self.name not in cluster_backend_of(self.client).membership.bookies)
        self.client.replicate(self.ledger_id)
        self.start(cluster)

    def start(self, cluster: Inside) -> None:
        """Start the bookie."""
        self.manager = cluster.open_bookie(self.place)
        self.service = service_of(self.manager)
        self.drops = drops_of(self.manager)
        wait_until(lambda: self.name in cluster_backend_of(self.client).membership.bookies)

    def held(self) -> int:
        """Return how many entries the bookie has."""
        return self.service.replicas.count_entries(self.ledger_id)


def drops_of(manager: LedgerManager, delay_s: float = 0.0) -> SurplusDrops:
    backend = cluster_backend_of(manager)
    return SurplusDrops(backend.driver, backend.membership, service_of(manager), delay_s=delay_s)


@pytest.mark.parametrize("fenced", [False, True])
def test_a_bookie_that_was_replaced_drops_its_copy_and_takes_it_again(four: Inside, fenced: bool) -> None:
    replaced = Replaced(four, fenced=fenced)
    drops, service, ledger_id = replaced.drops, replaced.service, replaced.ledger_id
    drops.delay_s = 1e9
    assert drops.look() == 0
    metadata = replaced.client.ledger_metadata(ledger_id)
    assert list(drops.copies) == [ledger_id]
    assert drops.surplus_bytes == metadata.length
    assert replaced.held() == COUNT
    drops.delay_s = 0.0
    assert drops.look() == 1
    assert replaced.held() == 0
    assert (drops.copies, drops.surplus_bytes, drops.dropped) == ({}, 0, 1)
    state = service.replicas.state(ledger_id)
    assert (state is not None and state.fenced) == fenced, "SD5"
    assert drops.look() == 0
    check(replaced.client, ledger_id)
    after = replaced.client.ledger_metadata(ledger_id)
    assert after == replace(metadata, version=metadata.version + 1), "the barrier changes nothing"

    leaving = after.fragments[0].ensemble[0].bookie_id
    assert replaced.client.replicate(leaving).left == ()
    assert replaced.name in [
        each.bookie_id for each in replaced.client.ledger_metadata(ledger_id).fragments[0].ensemble
    ]
    assert replaced.held() == COUNT
    assert drops.look() == 0
    assert drops.copies == {}, "it is named again"
    check(replaced.client, ledger_id)


def test_the_first_look_drops_nothing_and_a_restart_begins_anew(four: Inside) -> None:
    replaced = Replaced(four)
    replaced.drops.delay_s = 0.5
    assert replaced.drops.look() == 0
    replaced.manager.close()
    replaced.start(four)
    replaced.drops.delay_s = 0.5
    assert replaced.drops.look() == 0
    assert replaced.held() == COUNT
    wait_until(lambda: replaced.drops.look() == 1)


def test_a_change_of_the_metadata_begins_the_delay_anew(four: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = Replaced(four)
    replaced.drops.delay_s = 1e9
    replaced.drops.look()
    noted = replaced.drops.copies[replaced.ledger_id]
    metadata = cluster_backend_of(replaced.client).membership.metadata
    found = metadata.read_ledger(replaced.ledger_id)
    metadata.write_ledger(replace(found.metadata, version=found.metadata.version + 1), found.version)
    replaced.drops.look()
    again = replaced.drops.copies[replaced.ledger_id]
    assert again.since > noted.since
    assert again.version > noted.version


def test_copies_of_marked_ledgers_stay(four: Inside) -> None:
    replaced = Replaced(four)
    metadata = cluster_backend_of(replaced.client).membership.metadata
    short = replaced.client.ledger_metadata(replaced.ledger_id).fragments[0].ensemble[1]
    metadata.mark_under_replicated(replaced.ledger_id, short, 0)
    assert [replaced.drops.look() for _ in range(2)] == [0, 0]
    assert replaced.held() == COUNT
    replaced.client.replicate(replaced.ledger_id)
    assert replaced.drops.look() == 1


def test_the_copy_stays_while_another_bookie_is_away(four: Inside, caplog: pytest.LogCaptureFixture) -> None:
    replaced = Replaced(four)
    other = replaced.client.ledger_metadata(replaced.ledger_id).fragments[0].ensemble[1].bookie_id
    four.bookies[int(other[-1])].close()
    wait_until(lambda: other not in cluster_backend_of(replaced.manager).membership.bookies)
    with caplog.at_level(logging.INFO):
        assert [replaced.drops.look() for _ in range(3)] == [0, 0, 0]
    assert f"the surplus copy at {replaced.service.bookie} stays" in caplog.text
    assert replaced.held() == COUNT
    assert list(replaced.drops.copies) == [replaced.ledger_id]


def test_a_storage_that_fails_keeps_the_copy_until_the_next_pass(four: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = Replaced(four)

    def fail(ledger_id: int) -> None:
        raise StorageFullError("no space")

    monkeypatch.setattr(replaced.service.replicas, "drop_entries", fail)
    assert [replaced.drops.look() for _ in range(2)] == [0, 0]
    monkeypatch.undo()
    wait_until(lambda: replaced.drops.look() == 1)
    assert replaced.held() == 0


def test_open_ledgers_named_ones_and_fences_alone_are_no_surplus(four: Inside) -> None:
    client = four.connect()
    named = fill(client, ensemble_size=4)
    service = service_of(four.bookies[0])
    service.replicas.fence(named + 1000, None)
    with client.create_ledger(password=PASSWORD, ensemble_size=4) as writer:
        writer.append(b"open")
        drops = drops_of(four.bookies[0])
        assert drops.look() == 0
        assert drops.copies == {}


def test_ledgers_without_a_key_are_orphans_and_stay(four: Inside) -> None:
    client = four.connect()
    ledger_id = fill(client, ensemble_size=4)
    deleted = fill(client, ensemble_size=4)
    store = cluster_backend_of(client).membership.metadata
    client.delete_ledger(deleted, password=PASSWORD)
    service = service_of(four.bookies[0])
    orphan = 999_999
    service.replicas.fence(orphan, None)
    drops = drops_of(four.bookies[0])
    for _ in range(2):
        assert drops.look() == 0
        assert drops.orphans == {orphan}, "a tombstone is a key"
    assert orphan in service.replicas.ledgers()
    assert store.read_ledger(ledger_id).metadata.state is LedgerState.CLOSED


def test_a_pass_reads_pages_and_takes_its_time(four: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unnamed_copies, "LEDGERS_PAGE", 2)
    client = four.connect()
    ledgers = [fill(client, ensemble_size=4) for _ in range(5)]
    # Ledgers are closed once two bookies have their entries; this one may be late.
    wait_until(lambda: service_of(four.bookies[0]).replicas.ledgers() == ledgers)
    drops = drops_of(four.bookies[0], delay_s=60.0)
    assert drops.pause_s == 20.0
    metadata = cluster_backend_of(four.bookies[0]).membership.metadata
    read = metadata.read_ledgers
    pages: list[list[int]] = []

    def note(page: list[int], **arguments: Any) -> Any:
        pages.append(list(page))
        return read(page, **arguments)

    monkeypatch.setattr(metadata, "read_ledgers", note)
    for _ in range(4):
        drops.look()
    assert pages == [ledgers[:2], ledgers[2:4], ledgers[4:], ledgers[:2]]


def test_a_page_that_could_not_be_read_is_read_again(four: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = Replaced(four)
    metadata = cluster_backend_of(replaced.manager).membership.metadata

    def fail(page: object, **arguments: object) -> None:
        raise MetadataError("away")

    monkeypatch.setattr(metadata, "read_ledgers", fail)
    with pytest.raises(MetadataError):
        replaced.drops.look()
    monkeypatch.undo()
    replaced.drops.look()
    assert list(replaced.drops.copies) == [replaced.ledger_id]
    replaced.drops.stopping.set()
    assert [replaced.drops.look() for _ in range(2)] == [0, 0]
