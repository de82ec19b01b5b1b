"""Prefixes that are made for all entries of a commit together, where that is quicker than one by one."""

from __future__ import annotations

import os
import threading
from array import array
from pathlib import Path

import numpy as np
import pytest

from pybk.errors import StorageFullError
from pybk.ledger.digest import KEY_BYTES, DigestType, EntryDigest, entry_digest
from pybk.ledger.entry import ENTRY_HEADER_BYTES
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.descriptor import LedgerDescriptor, StagedEntries
from pybk.storage.log.commit import Commit
from pybk.threads.group_commit import Completion
from tests.cluster.inside import inside
from tests.internals import store_of
from tests.metadata.records import ledger
from tests.sealing import open_sealing
from tests.storage.real_store import payloads

PASSWORD = b"correct horse"


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have writers stage entries without prefixes on every processor; return how many get one, by batch."""
    begin, add = EntryDigest.__init__, StagedEntries.add_prefixes
    batches: list[int] = []

    def begun(digest: EntryDigest, ledger_id: int, key: bytes) -> None:
        begin(digest, ledger_id, key)
        digest.prefers_batches = True

    def counted(entries: StagedEntries, digest: EntryDigest) -> None:
        empty = entries.parts[::2].count(b"")
        add(entries, digest)
        if empty:
            batches.append(empty)

    monkeypatch.setattr(EntryDigest, "__init__", begun)
    monkeypatch.setattr(StagedEntries, "add_prefixes", counted)
    return batches


def staged(digest: EntryDigest, given: list[tuple[bytes, bytes]], first: int = 7, before: int = 100) -> StagedEntries:
    """Return entries that were staged, each as prefix and payload."""
    descriptor = LedgerDescriptor(ledger(digest.ledger_id), last_add_confirmed=5)
    descriptor.late_digest = digest
    entries = StagedEntries(Completion(), descriptor, first, before, ENTRY_HEADER_BYTES + digest.size, 0)
    for prefix, payload in given:
        entries.parts += (prefix, payload)
        entries.sizes.append(entries.overhead + len(payload))
    return entries


@pytest.mark.parametrize("kind", list(DigestType))
def test_entries_get_the_prefixes_that_they_would_have_got_one_by_one(kind: DigestType) -> None:
    digest = entry_digest(kind, 3, bytes(range(KEY_BYTES)))
    source = np.random.default_rng(5)
    for count in (1, 2, 3, 16, 40):
        for share in (0.0, 0.3, 1.0):
            bodies = [os.urandom(int(size)) for size in source.integers(0, 90, count)]
            lengths = (np.cumsum([len(body) for body in bodies]) + 100).tolist()
            expected = [
                digest.prefix(7 + n, 5, length, body)
                for n, (length, body) in enumerate(zip(lengths, bodies, strict=True))
            ]
            early = source.random(count) < share
            given = [(expected[n] if early[n] else b"", body) for n, body in enumerate(bodies)]
            entries = staged(digest, given)
            entries.freeze()
            assert entries.parts[::2] == expected
            assert entries.parts[1::2] == bodies
            assert entries.encoded_bytes == sum(map(len, (*expected, *bodies)))
            assert entries.descriptor.last_prefix == expected[-1]


def test_what_an_error_left_gets_no_prefix() -> None:
    digest = entry_digest(DigestType.CRC32C, 3)
    entries = staged(digest, [(b"", b"one"), (b"", b"two")])
    entries.parts += (b"", b"never counted")
    entries.freeze()
    assert entries.parts[1::2] == [b"one", b"two"]
    assert entries.descriptor.last_prefix == digest.prefix(8, 5, 106, b"two")
    nothing = staged(digest, [])
    nothing.parts.append(b"")
    nothing.freeze()
    assert (nothing.parts, nothing.sizes, nothing.descriptor.last_prefix) == ([], array("q"), b"")


@pytest.mark.parametrize("kind", [DigestType.HMAC_SHA256, DigestType.XXH3])
def test_every_way_to_append_gives_entries_that_are_verified(tmp_path: Path, late: list[int], kind: DigestType) -> None:
    with open_sealing(tmp_path) as manager:
        writer = manager.create_ledger(password=PASSWORD, digest_type=kind)
        expected = [b"alone", b""]
        assert [writer.append(payload) for payload in expected] == [0, 1]
        futures = [writer.append_async(b"%d" % number) for number in range(20)]
        many = writer.append_many_async([b"in", b"", b"a batch"])
        futures += [writer.append_async(b"") for _ in range(3)]
        expected += [*(b"%d" % number for number in range(20)), b"in", b"", b"a batch", *[b""] * 3]
        assert [future.result() for future in futures] == [*range(2, 22), *range(25, 28)]
        assert many.result() == range(22, 25)
        assert sum(late) == 2 + 20 + 3, "those of a batch are made by its caller"
        writer.close()
        assert writer.metadata.seal
        assert manager.check_seal(writer.ledger_id, password=PASSWORD, require=True)
        with manager.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            entries = list(reader)
            assert [entry.payload for entry in entries] == expected
            assert all(-1 <= entry.last_add_confirmed < entry.entry_id for entry in entries)
            assert [entry.length for entry in entries] == np.cumsum([len(body) for body in expected]).tolist()


def test_a_ledger_that_is_closed_while_appends_are_under_way_is_sealed(tmp_path: Path, late: list[int]) -> None:
    with open_sealing(tmp_path) as manager:
        for count in (1, 2, 30):
            writer = manager.create_ledger(password=PASSWORD)
            futures = [writer.append_async(b"%d" % number) for number in range(count)]
            writer.close()
            assert [future.result() for future in futures] == list(range(count))
            assert manager.check_seal(writer.ledger_id, password=PASSWORD, require=True)
        assert sum(late) == 1 + 2 + 30


def test_a_close_shares_the_sync_of_the_entries_before_it(
    tmp_path: Path, late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_sealing(tmp_path) as manager:
        log = store_of(manager).log
        monkeypatch.setattr(log, "kick", lambda: None)  # the committer sleeps
        for count in (1, 2, 30):
            writer = manager.create_ledger(password=PASSWORD)
            before = log.durable_lsn
            futures = [writer.append_async(b"%d" % number) for number in range(count)]
            writer.close()
            assert log.durable_lsn == before + 1
            assert [future.result() for future in futures] == list(range(count))
            assert manager.check_seal(writer.ledger_id, password=PASSWORD, require=True)
            assert payloads(manager.open_ledger(writer.ledger_id, password=PASSWORD)) == [
                b"%d" % number for number in range(count)
            ]
    assert late == [1, 2, 30], "each time together"


def test_a_close_ends_before_entries_whose_commit_is_refused_meanwhile(
    tmp_path: Path, late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_sealing(tmp_path) as manager:
        log = store_of(manager).log
        writer = manager.create_ledger(password=PASSWORD)
        writer.append(b"kept")
        monkeypatch.setattr(log, "kick", lambda: None)  # the committer sleeps
        lost = writer.append_async(b"lost")

        def refuse(_: Commit) -> None:
            raise StorageFullError("no space")

        def prefix_staged(_: LedgerDescriptor) -> None:
            with monkeypatch.context() as full:
                full.setattr(log.writer, "write", refuse)
                log.wait(log.forming)  # as the committer may at this moment

        monkeypatch.setattr(log, "prefix_staged", prefix_staged)
        writer.close()
        with pytest.raises(StorageFullError):
            lost.result()
        assert (writer.metadata.last_entry_id, writer.metadata.length) == (0, 4)
        assert manager.check_seal(writer.ledger_id, password=PASSWORD, require=True)


def test_threads_append_entries_that_are_verified(tmp_path: Path, late: list[int]) -> None:
    with open_sealing(tmp_path) as manager:
        writer = manager.create_ledger(password=PASSWORD)

        def append(name: int) -> None:
            for number in range(40):
                if number % 7:
                    writer.append(b"%d %d" % (name, number))
                else:
                    writer.append_many([b"%d %d" % (name, number)] * 2)

        threads = [threading.Thread(target=append, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.close()
        assert manager.check_seal(writer.ledger_id, password=PASSWORD, require=True)
        found = payloads(manager.open_ledger(writer.ledger_id, password=PASSWORD))
        expected = [
            b"%d %d" % (name, number) for name in range(8) for number in range(40) for _ in range(1 + (number % 7 == 0))
        ]
        assert sorted(found) == sorted(expected)
        assert sum(late) == 8 * sum(number % 7 > 0 for number in range(40))


def test_bookies_get_entries_that_are_verified(tmp_path: Path, late: list[int]) -> None:
    with inside(tmp_path) as cluster:
        client: LedgerManager = cluster.connect()
        with client.create_ledger(password=PASSWORD, ensemble_size=3, write_quorum=2, ack_quorum=2) as writer:
            futures = [writer.append_async(b"%d" % number) for number in range(50)]
            writer.append_many([b"many", b""])
            writer.append(b"")
        assert [future.result() for future in futures] == list(range(50))
        assert sum(late) == 50 + 1
        with client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            assert payloads(reader) == [*(b"%d" % number for number in range(50)), b"many", b"", b""]
        assert client.check_seal(writer.ledger_id, password=PASSWORD, require=True)
