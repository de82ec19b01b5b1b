"""Large batches: each is a record of its own, whose body the thread that appends makes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import StorageFullError, TooManyRequestsError
from pybk.flags import WriteFlag
from pybk.ledger.digest import DigestType, EntryDigest
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import RECORD_BYTES_MIN, LedgerWriter
from pybk.storage.io.filesystem import PIECES_MAX, OsFile
from pybk.storage.log.commit import BatchEntries, Commit
from pybk.storage.transaction_group import LedgerEntries
from tests.internals import descriptor_of, digest_of, store_of
from tests.sealing import open_sealing
from tests.storage.real_store import contents, open_quick

PASSWORD = b"correct horse"
COUNT = 100
ENTRY_BYTES = RECORD_BYTES_MIN // COUNT


def batch(name: int, count: int = COUNT, entry_bytes: int = ENTRY_BYTES) -> list[bytes]:
    """Return payloads of different sizes, which are different in each batch."""
    source = random.Random(name)
    return [source.randbytes(entry_bytes + number % 7) for number in range(count)]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "data", background=False) as opened:
        yield opened


def asleep(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the log of a store, whose committer sleeps from now on."""
    log = store_of(manager).log
    monkeypatch.setattr(log, "kick", lambda: None)
    return log


def records(writer: LedgerWriter) -> list[tuple[int, int]]:
    """Return first entry and number of entries of each record of a ledger that the index does not have yet."""
    tail = descriptor_of(writer).tail_snapshot()
    return list(zip(tail["first"].tolist(), tail["count"].tolist(), strict=True))


@pytest.mark.parametrize("kind", list(DigestType))
def test_batches_and_entries_of_one_commit_are_records_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: DigestType
) -> None:
    small = [b"%d" % number for number in range(3)]
    with open_quick(tmp_path / "data", background=False) as manager:
        log = asleep(manager, monkeypatch)
        insecure = kind is DigestType.NONE
        writer = manager.create_ledger(password=PASSWORD, digest_type=kind, insecure=insecure)
        before = log.durable_lsn
        futures: list[Any] = [writer.append_async(b"first")]
        futures += [writer.append_many_async(batch(name)) for name in range(2)]
        futures += [writer.append_many_async(small), writer.append_async(b""), writer.append_many_async(batch(2))]
        given = [b"first", *batch(0), *batch(1), *small, b"", *batch(2)]
        assert [future.result() for future in futures] == [
            0,
            range(1, 101),
            range(101, 201),
            range(201, 204),
            204,
            range(205, 305),
        ]
        assert log.durable_lsn == before + 1, "one sync for all"
        assert records(writer) == [(0, 1), (1, 100), (101, 100), (201, 4), (205, 100)]
        assert writer.length == descriptor_of(writer).length_durable == sum(map(len, given))
        staging = descriptor_of(writer).staging
        assert staging.encoded_bytes == sum(staging.sizes) > RECORD_BYTES_MIN, "what the metrics count"
        assert contents(manager, writer.ledger_id, PASSWORD) == given
    with open_quick(tmp_path / "data") as manager:
        assert contents(manager, writer.ledger_id, PASSWORD, recover=True) == given


@pytest.mark.parametrize("count", [1, 2])
def test_only_batches_of_some_entries_and_bytes_are_records_of_their_own(manager: LedgerManager, count: int) -> None:
    writer = manager.create_ledger(insecure=True)
    overhead = 32 + digest_of(writer).size
    for entry_bytes in (RECORD_BYTES_MIN // count - overhead, RECORD_BYTES_MIN // count - overhead - 1):
        writer.append_many([bytes(entry_bytes)] * count)
        is_batch = isinstance(descriptor_of(writer).staging, BatchEntries)
        assert is_batch is (count > 1 and count * (entry_bytes + overhead) >= RECORD_BYTES_MIN)


def test_batches_have_the_same_pieces_without_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path / "data", background=False) as manager:
        bodies = []
        for core in (True, False):
            for entry_bytes in (ENTRY_BYTES, 20_000):
                log = store_of(manager).log
                writer = manager.create_ledger(insecure=True)
                if not core:
                    digest_of(writer).core = digest_of(writer).core_alone = None
                with monkeypatch.context() as patched:
                    patched.setattr(log, "kick", lambda: None)
                    future = writer.append_many_async(batch(3, 20, 7 * entry_bytes))
                    (entries,) = log.forming.staged
                    assert isinstance(entries, BatchEntries)
                    bodies.append(list(map(len, entries.parts)))
                    future.result()
                assert contents(manager, writer.ledger_id) == batch(3, 20, 7 * entry_bytes)
    assert [len(sizes) for sizes in bodies] == [1, 41] * 2
    assert bodies[:2] == bodies[2:]


def test_large_payloads_are_written_from_where_the_caller_has_them(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    write = OsFile.write_durable

    def noted(file: OsFile, buffers: Any, offset: int) -> None:
        written.extend(buffers)
        write(file, buffers, offset)

    monkeypatch.setattr(OsFile, "write_durable", noted)
    writer = manager.create_ledger(insecure=True)
    given = batch(4, 10, 16 << 10)
    writer.append_many(given)
    where = {id(piece) for piece in written}
    assert all(id(payload) in where for payload in given)
    assert contents(manager, writer.ledger_id) == given


def test_a_commit_of_many_pieces_is_joined_where_lack_of_memory_refuses_it(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the write of the file it would be a failure of the device, which ends the store."""
    written: list[int] = []
    write = OsFile.write_durable

    def noted(file: OsFile, buffers: Any, offset: int) -> None:
        written.append(len(buffers))
        write(file, buffers, offset)

    monkeypatch.setattr(OsFile, "write_durable", noted)
    asleep(manager, monkeypatch)
    writer = manager.create_ledger(insecure=True)
    batches = [batch(20 + number, 200, 16 << 10) for number in range(3)]
    del written[:]
    futures = [writer.append_many_async(each) for each in batches]
    assert [future.result() for future in futures] == [range(200), range(200, 400), range(400, 600)]
    assert max(written) <= PIECES_MAX, "each batch has 401 pieces"
    assert records(writer) == [(0, 200), (200, 200), (400, 200)]
    assert contents(manager, writer.ledger_id) == [payload for each in batches for payload in each]


def test_a_commit_that_forms_and_is_in_flight_counts_once(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader makes it both for a moment; a batch that looks then must not be refused for lack of space."""
    log = asleep(manager, monkeypatch)
    writer = manager.create_ledger(insecure=True)
    future = writer.append_many_async(batch(15))
    staged = log.outstanding_bytes
    assert staged == sum(descriptor_of(writer).staging.sizes)
    with monkeypatch.context() as moment:
        moment.setattr(log, "inflight", log.forming)
        assert log.outstanding_bytes == staged
    assert future.result() == range(100)
    assert log.outstanding_bytes == 0


def test_a_batch_that_must_wait_is_not_hashed_before_there_is_space(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep(manager, monkeypatch)
    writer = manager.create_ledger(insecure=True)
    hashed: list[int] = []
    encode = EntryDigest.encode

    def noted(digest: EntryDigest, first: int, *rest: Any, **head: Any) -> Any:
        hashed.append(first)
        return encode(digest, first, *rest, **head)

    monkeypatch.setattr(EntryDigest, "encode", noted)
    large = batch(5, 400, 10_000)
    futures = [writer.append_many_async(large, wait=False) for _ in range(8)]
    with pytest.raises(TooManyRequestsError):
        _ = writer.append_many_async(large, wait=False)  # with these, 36 MB would be outstanding
    assert hashed == [400 * number for number in range(8)]
    assert [future.result() for future in futures][-1] == range(2800, 3200)
    assert writer.append_many(large) == range(3200, 3600)


def test_batches_of_a_deferred_ledger_that_were_refused_are_written_later(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = asleep(manager, monkeypatch)
    writer = manager.create_ledger(insecure=True, write_flags=WriteFlag.DEFERRED_FORCE)
    writer.append_many(batch(6))
    writer.append(b"between")
    writer.append_many(batch(7))

    def refuse(_: Commit) -> None:
        raise StorageFullError("no space")

    with monkeypatch.context() as full:
        full.setattr(log.writer, "write", refuse)
        with pytest.raises(StorageFullError):
            writer.force()
    log.flush(kept=True)
    log.readmit()
    assert records(writer) == [(0, 100), (100, 1), (101, 100)]
    writer.append(b"after")
    assert writer.force() == 201
    assert contents(manager, writer.ledger_id) == [*batch(6), b"between", *batch(7), b"after"]


def test_batches_stand_before_and_after_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path / "data", background=False) as manager:
        log = asleep(manager, monkeypatch)
        writer, other = (manager.create_ledger(insecure=True) for _ in range(2))
        before = log.durable_lsn
        futures = [writer.append_many_async(batch(8)), other.append_many_async(batch(9))]
        members = (writer, b"in a group"), (other, b"of two")
        group = store_of(manager).stage_group(
            [LedgerEntries(descriptor_of(each), digest_of(each), [payload]) for each, payload in members]
        )
        futures.append(writer.append_many_async(batch(10)))
        assert [future.result() for future in futures] == [range(100), range(100), range(101, 201)]
        assert log.durable_lsn == before + 1, "one commit has all"
        assert group.finish() is not None
        ledgers = [writer.ledger_id, other.ledger_id]
    wanted = [[*batch(8), b"in a group", *batch(10)], [*batch(9), b"of two"]]
    with open_quick(tmp_path / "data") as manager:
        assert [contents(manager, ledger_id, recover=True) for ledger_id in ledgers] == wanted


@pytest.mark.parametrize("last", ["batch", "entry"])
def test_a_ledger_is_sealed_by_its_last_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Also if prefixes of entries before it are made after it was staged."""
    begin = EntryDigest.__init__

    def begun(digest: EntryDigest, ledger_id: int, key: bytes) -> None:
        begin(digest, ledger_id, key)
        digest.prefers_batches = True

    monkeypatch.setattr(EntryDigest, "__init__", begun)
    with open_sealing(tmp_path) as manager:
        log = asleep(manager, monkeypatch)
        writer = manager.create_ledger(password=PASSWORD)
        before = log.durable_lsn
        futures: list[Any] = [writer.append_async(b"alone"), writer.append_many_async(batch(11))]
        if last == "entry":
            futures.append(writer.append_async(b"last"))
        writer.close()
        assert log.durable_lsn == before + 1, "the close shares the sync of the entries"
        assert [future.result() for future in futures][:2] == [0, range(1, 101)]
        assert manager.check_seal(writer.ledger_id, password=PASSWORD, require=True)
        assert contents(manager, writer.ledger_id, PASSWORD)[1:101] == batch(11)


def test_the_last_prefix_stays_when_those_of_entries_before_it_are_made(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep(manager, monkeypatch)
    writer = manager.create_ledger(password=PASSWORD)
    descriptor = descriptor_of(writer)
    descriptor.late_digest = digest_of(writer)
    _ = writer.append_async(b"alone")
    writer.append_many_async(batch(12)).result()
    assert int.from_bytes(descriptor.last_prefix[8:16], "big") == 100
