"""Reading a bookie's entries from its directory, while its process runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pybk.bookie.local_reader import LocalReader
from pybk.client.backend import ClusterBackend
from pybk.config import StoreConfig
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.ledger.entry import EntryBatch
from pybk.manager.connect import connect
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from tests.cluster.inside import SECRET, Inside, inside
from tests.internals import service_of
from tests.storage.real_store import QUICK

PASSWORD = b"correct horse"
COUNT = 300


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path) as cluster:
        yield cluster


class Nearby:
    """A client on the host of bookie 0, and what it found there."""

    def __init__(self, cluster: Inside, directory: Path | None = None, near: str = "bookie-0") -> None:
        path = cluster.directory / "bookie-0" if directory is None else directory
        backend = connect(cluster.url, SECRET, StoreConfig(**QUICK), near=near, directory=str(path))
        self.found: list[int | None] = []
        self.local_reader = backend.local_reader
        if self.local_reader is not None:
            self._watch(backend)
        self.manager = LedgerManager(backend)

    def _watch(self, backend: ClusterBackend) -> None:
        assert isinstance(self.local_reader, LocalReader)
        read = self.local_reader.read_verified

        def watched(*arguments: Any, **named: Any) -> EntryBatch | None:
            batch = read(*arguments, **named)
            self.found.append(None if batch is None else len(batch))
            return batch

        self.local_reader.read_verified = watched  # type: ignore[method-assign]

    def close(self) -> None:
        self.manager.close()


def payload(number: int) -> bytes:
    return b"entry %d " % number * (number % 40)


def fill(manager: LedgerManager, ack_quorum: int = 3, **options: Any) -> int:
    """Write a ledger; by default bookie 0 has all of it on return, as all three have."""
    with manager.create_ledger(password=PASSWORD, ack_quorum=ack_quorum, **options) as writer:
        for first in range(0, COUNT, 50):
            writer.append_many([payload(number) for number in range(first, first + 50)])
    return writer.ledger_id


def read(reader: LedgerReader, upto: int, max_bytes: int = 10_000) -> list[bytes]:
    found: list[bytes] = []
    while len(found) <= upto:
        batch = reader.read_batch(len(found), max_bytes=max_bytes, last=upto)
        assert batch.entry_ids.tolist() == list(range(len(found), len(found) + len(batch)))
        assert batch.ledger_id == reader.ledger_id
        found += [bytes(batch.payload(place)) for place in range(len(batch))]
    return found


@pytest.mark.parametrize("digest", [DigestType.HMAC_SHA256, DigestType.CRC32C, DigestType.NONE])
def test_a_ledger_is_read_without_its_bookies(cluster: Inside, digest: DigestType) -> None:
    with closing(Nearby(cluster)) as nearby:
        ledger_id = fill(cluster.bookies[1], digest_type=digest, insecure=digest is DigestType.NONE)
        for bookie in cluster.bookies:
            bookie.close()
        with nearby.manager.open_ledger(ledger_id, password=PASSWORD) as reader:
            assert read(reader, COUNT - 1) == [payload(number) for number in range(COUNT)]
            assert [entry.payload for entry in reader.read(7, 9)] == [payload(number) for number in (7, 8, 9)]
        assert len(nearby.found) > 3
        assert None not in nearby.found


def test_the_files_of_the_bookie_are_closed_with_the_client(cluster: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    nearby = Nearby(cluster)
    assert isinstance(nearby.local_reader, LocalReader)
    closed: list[bool] = []
    close = nearby.local_reader.close

    def noted() -> None:
        closed.append(True)
        close()

    monkeypatch.setattr(nearby.local_reader, "close", noted)
    nearby.close()
    assert closed == [True]


def test_an_open_ledger_is_read_up_to_what_is_confirmed(cluster: Inside) -> None:
    with closing(Nearby(cluster)) as nearby, cluster.bookies[1].create_ledger(password=PASSWORD) as writer:
        with nearby.manager.open_ledger(writer.ledger_id, password=PASSWORD, recover=False) as reader:
            for number in range(60):
                writer.append(payload(number))
                if number % 20 == 19:
                    confirmed = reader.read_last_add_confirmed()
                    assert confirmed >= number - 1  # the last entry carries the LAC of those before it
                    assert read(reader, confirmed) == [payload(each) for each in range(confirmed + 1)]
        assert any(nearby.found)


def test_a_striped_ledger_is_read_from_the_bookies(cluster: Inside) -> None:
    ledger_id = fill(cluster.bookies[1], ensemble_size=3, write_quorum=2, ack_quorum=2)
    with closing(Nearby(cluster)) as nearby:
        with nearby.manager.open_ledger(ledger_id, password=PASSWORD) as reader:
            assert read(reader, COUNT - 1) == [payload(number) for number in range(COUNT)]
        assert set(nearby.found) == {None}


def test_damaged_local_entries_are_requested_from_other_bookies(
    cluster: Inside, caplog: pytest.LogCaptureFixture
) -> None:
    ledger_id = fill(cluster.bookies[1])
    [log] = [path for path in (cluster.directory / "bookie-0").rglob("*") if path.is_file() and damage(path)]
    assert log.is_file()
    with closing(Nearby(cluster)) as nearby, caplog.at_level(logging.WARNING, "pybk"):
        with nearby.manager.open_ledger(ledger_id, password=PASSWORD) as reader:
            assert read(reader, COUNT - 1) == [payload(number) for number in range(COUNT)]
        assert None in nearby.found
        assert any(nearby.found)
    assert "the bookie is asked" in caplog.text


def damage(path: Path) -> bool:
    """Change a byte of an entry's payload, if it lies in a file."""
    data = path.read_bytes()
    place = data.find(payload(139))
    if place < 0:
        return False
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([data[place] ^ 1]))
    return True


def test_ledgers_that_move_and_come_are_found(cluster: Inside) -> None:
    with closing(Nearby(cluster)) as nearby:
        for tier in (StorageHint.HDD, StorageHint.SSD, StorageHint.NVME):
            ledger_id = fill(cluster.bookies[1])
            with nearby.manager.open_ledger(ledger_id, password=PASSWORD) as reader:
                for _ in range(2):
                    assert read(reader, COUNT - 1) == [payload(number) for number in range(COUNT)]
                    cluster.bookies[1].move_ledger(ledger_id, tier, password=PASSWORD)
                    service_of(cluster.bookies[0]).replicas.store.scheduler.checkpoint()
        assert None not in nearby.found


@pytest.mark.parametrize(("directory", "near"), [("bookie-1", "bookie-0"), ("nothing", "bookie-0")])
def test_a_directory_that_is_not_the_bookies_is_left_alone(
    cluster: Inside, directory: str, near: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger_id = fill(cluster.bookies[1])
    with closing(Nearby(cluster, cluster.directory / directory, near)) as nearby:
        assert nearby.local_reader is None
        with nearby.manager.open_ledger(ledger_id, password=PASSWORD) as reader:
            assert read(reader, COUNT - 1) == [payload(number) for number in range(COUNT)]
    assert "bookie-0 is asked for its entries" in caplog.text


def test_a_bookie_of_the_same_name_in_another_cluster_is_left_alone(cluster: Inside, tmp_path: Path) -> None:
    with inside(tmp_path / "other") as other, closing(Nearby(cluster, other.directory / "bookie-0")) as nearby:
        assert nearby.local_reader is None
