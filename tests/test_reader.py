"""Reading: ranges, batches, tails that are followed, from every tier."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pybk.errors import ClosedError, CorruptError, DigestMismatchError, ReadRangeError, UsageError
from pybk.flags import ReadFlag, StorageHint
from pybk.ledger.digest import DigestType
from pybk.ledger.entry import ENTRY_HEADER_BYTES
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from pybk.metrics import READ_BYTES, READ_ENTRIES, READ_LATENCY, MetricKey
from tests.internals import descriptor_of, waiting_followers
from tests.storage.real_store import numbered, open_quick, payloads
from tests.waiting import WAIT_S, wait_until


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "data") as manager:
        yield manager


def filled(manager: LedgerManager, count: int = 10, **arguments: Any) -> LedgerReader:
    """Return a reader of a closed ledger whose payloads contain their entry ids."""
    with manager.create_ledger(**{"insecure": True, **arguments}) as writer:
        if count:
            writer.append_many(numbered(count))
    return manager.open_ledger(writer.ledger_id)


# ---- ranges ----------------------------------------------------------------------------------------------------------


def test_both_ends_are_inclusive(manager: LedgerManager) -> None:
    reader = filled(manager)
    assert reader.last_add_confirmed == 9
    for first in range(10):
        for last in range(first - 1, 10):
            assert [entry.payload for entry in reader.read(first, last)] == numbered(last + 1 - first, first)


def test_an_empty_ledger_reads_as_nothing(manager: LedgerManager) -> None:
    reader = filled(manager, 0)
    assert (reader.last_add_confirmed, reader.length, reader.is_closed) == (-1, 0, True)
    assert list(reader.read(0, -1)) == []
    assert list(reader.read_unconfirmed(0, -1)) == []
    assert list(reader.follow()) == []
    with pytest.raises(ReadRangeError):
        reader.read_batch(0)


@pytest.mark.parametrize("span", [(0, 10), (10, 10), (-1, 0), (-1, -1), (-2, -1), (5, 3), (11, 10), (0, 1 << 63)])
def test_outside_of_the_ledger_is_an_error_at_once(manager: LedgerManager, span: tuple[int, int]) -> None:
    reader = filled(manager)
    with pytest.raises(ReadRangeError, match="not within 0 to 9") as refused:
        reader.read(*span)
    assert refused.value.code == -1
    with pytest.raises(ReadRangeError):
        reader.read_unconfirmed(*span)


def test_a_reader_sees_what_was_confirmed_when_it_last_looked(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    writer.append(b"entry 0")
    reader = manager.open_ledger(writer.ledger_id, recover=False)
    writer.append(b"entry 1")
    assert reader.last_add_confirmed == 0
    with pytest.raises(ReadRangeError, match="read_last_add_confirmed"):
        reader.read(0, 1)
    assert not reader.is_closed
    assert reader.read_last_add_confirmed() == 1
    assert payloads(reader) == numbered(2)
    assert reader.length == 14
    writer.close()
    assert reader.is_closed


def test_entries_are_named_tuples_of_all_they_carry(manager: LedgerManager) -> None:
    entry = next(filled(manager).read(3, 3))
    assert (entry.ledger_id, entry.entry_id, entry.last_add_confirmed, entry.payload) == (0, 3, -1, b"entry 3")
    assert entry.length == 4 * len(b"entry 3")
    assert type(entry.payload) is bytes


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("tier", list(StorageHint))
@pytest.mark.parametrize("flags", list(ReadFlag) or [ReadFlag.NONE])
@pytest.mark.parametrize("digest_type", [DigestType.HMAC_SHA256, DigestType.CRC32C, DigestType.XXH3, DigestType.NONE])
def test_every_tier_reads_the_same_singly_and_in_batches(
    tmp_path: Path, tier: StorageHint, flags: ReadFlag, digest_type: DigestType
) -> None:
    given = [bytes([number % 251]) * (number % 700) for number in range(400)]
    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(storage_hints={tier}, digest_type=digest_type, insecure=True)
        writer.append_many(given[:200])
        for payload in given[200:250]:
            writer.append(payload)
        manager.checkpoint()
        writer.append_many(given[250:])
        for read_flags in (ReadFlag.NONE, flags):
            reader = manager.open_ledger(writer.ledger_id, read_flags=read_flags, recover=False)
            assert payloads(reader) == given
            assert [next(reader.read(n, n)).payload for n in range(0, 400, 7)] == given[::7]
            first = 0
            while first < 400:
                batch = reader.read_batch(first, max_bytes=20_000)
                assert batch.ledger_id == 0
                assert batch.entry_ids.tolist() == list(range(first, first + len(batch)))
                assert [bytes(batch.payload(n)) for n in range(len(batch))] == given[first : first + len(batch)]
                assert [entry.payload for entry in batch] == given[first : first + len(batch)]
                assert int(batch.sizes.sum()) <= 20_000
                assert batch.buffer.readonly
                assert batch.offsets.dtype == np.int64
                assert batch.payload_bytes == sum(map(len, given[first : first + len(batch)]))
                first += len(batch)


def test_batches_keep_to_their_bounds(manager: LedgerManager) -> None:
    with manager.create_ledger(digest_type=DigestType.CRC32C) as writer:
        writer.append_many([bytes(1000)] * 100)
    reader = manager.open_ledger(writer.ledger_id)
    size = 1000 + ENTRY_HEADER_BYTES + 4
    assert len(reader.read_batch(0)) == 100
    assert len(reader.read_batch(0, max_bytes=5 * size)) == 5
    assert len(reader.read_batch(0, max_bytes=5 * size - 1)) == 4
    assert len(reader.read_batch(0, max_bytes=1)) == 1, "an entry longer than the bound must come alone"
    assert reader.read_batch(90, last=93).entry_ids.tolist() == [90, 91, 92, 93]
    assert reader.read_batch(99).entry_ids.tolist() == [99]
    for first, last in ((100, None), (-1, None), (0, 100), (3, 2), (3, 1)):
        with pytest.raises(ReadRangeError):
            reader.read_batch(first, last=last)
    with pytest.raises(UsageError, match="max_bytes is 0"):
        reader.read_batch(0, max_bytes=0)


def test_a_batch_outlives_its_manager_and_its_file(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        reader = filled(manager, 100)
        manager.checkpoint()
        batch = reader.read_batch(0)
        manager.delete_ledger(0)
        manager.checkpoint()
    assert [entry.payload for entry in batch] == numbered(100)


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [StorageHint.NVME, StorageHint.HDD])
@pytest.mark.parametrize("digest_type", [DigestType.HMAC_SHA256, DigestType.CRC32C, DigestType.XXH3, DigestType.NONE])
def test_a_changed_byte_is_found_however_it_is_read(tmp_path: Path, tier: StorageHint, digest_type: DigestType) -> None:
    with open_quick(tmp_path) as manager:
        with manager.create_ledger(storage_hints={tier}, digest_type=digest_type, insecure=True) as writer:
            writer.append_many([b"before the one", b"the damaged one", b"after the one"])
        manager.checkpoint()
    (path,) = [path for path in tmp_path.rglob("*.*") if b"the damaged one" in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(b"the damaged one") + 4] ^= 1
    path.write_bytes(data)
    with open_quick(tmp_path) as manager:
        for read_flags in (ReadFlag.NONE, ReadFlag.DONT_CACHE):
            reader = manager.open_ledger(0, read_flags=read_flags)
            reads: list[Any] = [
                lambda reader=reader: list(reader.read(0, 2)),
                lambda reader=reader: list(reader.read(1, 1)),
                lambda reader=reader: reader.read_batch(0),
                lambda reader=reader: list(reader.follow()),
            ]
            for read in reads:
                with pytest.raises((DigestMismatchError, CorruptError)):
                    read()
            if digest_type is not DigestType.NONE:
                assert next(reader.read(2, 2)).payload == b"after the one"


# ---- following -------------------------------------------------------------------------------------------------------


def test_following_yields_everything_until_the_ledger_is_closed(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    writer.append_many(numbered(5))
    found: dict[int, list[bytes]] = {}

    def follow(first: int) -> None:
        reader = manager.open_ledger(writer.ledger_id, recover=False)
        found[first] = [entry.payload for entry in reader.follow(first)]

    threads = [threading.Thread(target=follow, args=(first,)) for first in (0, 3, 40)]
    for thread in threads:
        thread.start()
    for number in range(5, 60):
        writer.append(b"entry %d" % number)
        if number % 20 == 0:
            manager.checkpoint()
        if number == 30:
            manager.move_ledger(writer.ledger_id, StorageHint.HDD)
    writer.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == {first: numbered(60 - first, first) for first in (0, 3, 40)}


def test_a_follower_sees_an_entry_while_the_ledger_stays_open(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    followed = manager.open_ledger(writer.ledger_id, recover=False).follow()
    for number in range(5):
        writer.append(b"entry %d" % number)
        assert next(followed).payload == b"entry %d" % number


@pytest.mark.parametrize("closed", ["reader", "manager"])
def test_closing_ends_followers_that_wait(manager: LedgerManager, closed: str) -> None:
    writer = manager.create_ledger(insecure=True)
    reader = manager.open_ledger(writer.ledger_id, recover=False)
    ended: list[BaseException] = []

    def follow() -> None:
        try:
            list(reader.follow())
        except ClosedError as error:
            ended.append(error)

    async def follow_async() -> None:
        try:
            async for _ in reader.follow_async():
                pass
        except ClosedError as error:
            ended.append(error)

    followers = [threading.Thread(target=follow), threading.Thread(target=lambda: asyncio.run(follow_async()))]
    for follower in followers:
        follower.start()
    wait_until(lambda: waiting_followers(reader) == 2)
    (reader if closed == "reader" else manager).close()
    for follower in followers:
        follower.join(WAIT_S)
    assert len(ended) == 2, f"closing the {closed} did not end both followers"


def test_waiting_costs_nothing_but_a_place(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    reader = manager.open_ledger(writer.ledger_id, recover=False)
    follower = threading.Thread(target=lambda: list(reader.follow()))
    follower.start()
    time.sleep(0.05)
    for _ in range(50):
        writer.append(b"x")
    time.sleep(0.05)
    assert len(descriptor_of(writer).advanced_callbacks) <= 1
    writer.close()
    follower.join(WAIT_S)
    assert not follower.is_alive()


def test_following_from_before_the_first_entry_is_refused(manager: LedgerManager) -> None:
    with pytest.raises(ReadRangeError, match="count from 0"):
        next(filled(manager).follow(-1))


# ---- counting --------------------------------------------------------------------------------------------------------


def test_reads_are_counted_by_type_and_tier(manager: LedgerManager) -> None:
    orders = filled(manager, 10, ledger_type="orders", digest_type=DigestType.CRC32C)
    other = filled(manager, 5, ledger_type="other", storage_hints={StorageHint.SSD})
    size = ENTRY_HEADER_BYTES + 4 + len(b"entry 0")
    list(orders.read(0, 9))
    orders.read_batch(4)
    for number in range(200):
        next(orders.read(number % 10, number % 10))
    list(other.read(0, 4))
    snapshot = manager.metrics()
    assert snapshot.counters[MetricKey(READ_ENTRIES, "orders", "nvme")] == 10 + 6 + 200
    assert snapshot.counters[MetricKey(READ_BYTES, "orders", "nvme")] == (10 + 6 + 200) * size
    assert snapshot.counters[MetricKey(READ_ENTRIES, "other", "ssd")] == 5
    latency = snapshot.histograms[MetricKey(READ_LATENCY, "orders", "nvme")]
    assert 3 <= latency.count <= 10
    assert 0 < latency.quantile(0.5) < 10**9
    manager.move_ledger(orders.ledger_id, StorageHint.HDD)
    list(orders.read(0, 9))
    next(orders.read(5, 5))
    counters = manager.metrics().counters
    assert counters[MetricKey(READ_ENTRIES, "orders", "hdd")] == 11
    assert counters[MetricKey(READ_ENTRIES, "orders", "nvme")] == 216


def test_repr_names_the_ledger(manager: LedgerManager) -> None:
    reader = filled(manager)
    assert repr(reader) == "<LedgerReader ledger 0, last add confirmed 9>"
    reader.close()
    assert repr(reader) == "<LedgerReader ledger 0, last add confirmed 9, closed>"
