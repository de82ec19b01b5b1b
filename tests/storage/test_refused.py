"""A log that gets no file for want of space: what fails with it, and how its ledgers resume once there is space."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pybk.config import MIB
from pybk.errors import AppendTimeoutError, LedgerFencedError, NoSuchLedgerError, StorageFullError
from pybk.flags import WriteFlag
from pybk.ledger.digest import DigestType
from pybk.manager.append_future import AppendFuture
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.io.filesystem import File
from pybk.storage.log.log import Log
from pybk.storage.preallocation import ReserveUse
from pybk.storage.repair.verify import verify_store
from pybk.threads.group_commit import Completion
from tests.internals import descriptor_of, store_of
from tests.simdisk import SimEnvironment, SimFileSystem
from tests.storage.store_harness import CONFIG, RESERVE_BYTES
from tests.storage.test_space import check, new_ledger, open_small, payload_of, tick
from tests.waiting import WAIT_S, wait_until


def fill_the_log(manager: LedgerManager, writer: LedgerWriter) -> int:
    """Append until the log finds no space for another file; return how many entries there are."""
    with pytest.raises(StorageFullError, match="no space for a log file"):  # noqa: PT012  # it is not known which one
        for number in range(writer.last_add_confirmed + 1, 10_000):
            writer.append(payload_of(number))
    return writer.last_add_confirmed + 1


def test_a_refused_ledger_resumes_although_maintenance_ran_before_the_refusal() -> None:
    fs = SimFileSystem(7, capacity_bytes=6 * MIB + RESERVE_BYTES)
    manager = open_small(fs, CONFIG)
    writer = new_ledger(manager)
    ballast = fs.create("/ballast", 4 * MIB)
    store = store_of(manager)
    store.supply.on_use = store.space_checked
    count = fill_the_log(manager, writer)
    ballast.close()
    fs.unlink("/ballast")
    tick(manager)
    assert writer.append(payload_of(count)) == count
    check(manager, writer.ledger_id, count + 1)
    manager.close()


def test_the_commit_that_formed_during_a_refused_one_fails_with_it_and_no_later_one() -> None:
    fs = SimFileSystem(8, capacity_bytes=6 * MIB + RESERVE_BYTES)
    manager = open_small(fs, CONFIG)
    writer, other = new_ledger(manager), new_ledger(manager)
    ballast = fs.create("/ballast", 4 * MIB)
    supply = store_of(manager).supply
    take = supply.next_log_file
    behind: list[AppendFuture[int]] = []

    def refused(bytes_min: int, after: int, *, use: ReserveUse = ReserveUse.NONE) -> tuple[int, File]:
        try:
            return take(bytes_min, after, use=use)
        except StorageFullError:
            if not behind:
                behind.extend([other.append_async(payload_of(0)), writer.append_async(b"a gap, were it written")])
            raise

    supply.next_log_file = refused  # type: ignore[method-assign]  # it is looked up at each call
    count = fill_the_log(manager, writer)
    assert [future.done() for future in behind] == [True, True]
    assert all(isinstance(future.exception(), StorageFullError) for future in behind)
    ballast.close()
    fs.unlink("/ballast")
    with descriptor_of(writer).lock:  # its lock is held, so it is notified the next time
        tick(manager)
    assert other.append(payload_of(0)) == 0
    with pytest.raises(StorageFullError):
        writer.append(b"not yet")
    tick(manager)
    assert writer.append(payload_of(count)) == count
    assert other.append(payload_of(1)) == 1
    check(manager, writer.ledger_id, count + 1)
    check(manager, other.ledger_id, 2)
    manager.close()
    manager = open_small(fs.crash(), CONFIG)
    check(manager, writer.ledger_id, count + 1)
    check(manager, other.ledger_id, 2)
    manager.close()


def new_deferred(manager: LedgerManager) -> LedgerWriter:
    return manager.create_ledger(digest_type=DigestType.CRC32C, write_flags=WriteFlag.DEFERRED_FORCE)


def test_acknowledged_deferred_entries_outlive_commits_that_are_refused_again_and_again() -> None:
    fs = SimFileSystem(15, capacity_bytes=6 * MIB + RESERVE_BYTES)
    manager = open_small(fs, CONFIG)
    deferred, writer = new_deferred(manager), new_ledger(manager)
    ballast = fs.create("/ballast", 4 * MIB)
    fill_the_log(manager, writer)
    acknowledged = [deferred.append(payload_of(number)) for number in range(5)]
    for _ in range(3):
        with pytest.raises(StorageFullError):
            new_ledger(manager).append(bytes(MIB))
        with pytest.raises(StorageFullError):
            deferred.append(b"not taken while the others wait")
        with pytest.raises(StorageFullError):
            deferred.force()
    ballast.close()
    fs.unlink("/ballast")
    tick(manager)
    new_ledger(manager).append(payload_of(0))  # the next commit takes along what waits
    assert deferred.append(payload_of(5)) == 5
    assert deferred.force() == 5
    manager.close()
    manager = open_small(fs.crash(), CONFIG)
    check(manager, deferred.ledger_id, len(acknowledged) + 1)
    manager.close()


def test_deferred_entries_that_formed_after_a_refused_commit_follow_those_in_it() -> None:
    fs = SimFileSystem(16, capacity_bytes=6 * MIB + RESERVE_BYTES)
    manager = open_small(fs, CONFIG)
    deferred, writer = new_deferred(manager), new_ledger(manager)
    ballast = fs.create("/ballast", 4 * MIB)
    fill_the_log(manager, writer)
    supply = store_of(manager).supply
    take = supply.next_log_file
    behind: list[int] = []

    def refused(bytes_min: int, after: int, *, use: ReserveUse = ReserveUse.NONE) -> tuple[int, File]:
        try:
            return take(bytes_min, after, use=use)
        except StorageFullError:
            if not behind:
                behind.extend([deferred.append(payload_of(1)), deferred.append(payload_of(2))])
            raise

    supply.next_log_file = refused  # type: ignore[method-assign]  # it is looked up at each call
    assert deferred.append(payload_of(0)) == 0
    with pytest.raises(StorageFullError):
        deferred.force()
    assert behind == [1, 2]
    ballast.close()
    fs.unlink("/ballast")
    tick(manager)
    new_ledger(manager).append(payload_of(0))
    assert deferred.force() == 2
    check(manager, deferred.ledger_id, 3)
    deferred.close()
    manager.close()


def test_closing_a_store_without_space_for_acknowledged_deferred_entries_raises() -> None:
    fs = SimFileSystem(17, capacity_bytes=6 * MIB + RESERVE_BYTES)
    manager = open_small(fs, CONFIG)
    deferred, writer = new_deferred(manager), new_ledger(manager)
    fs.create("/ballast", 4 * MIB).close()
    fill_the_log(manager, writer)
    deferred.append(payload_of(0))
    with pytest.raises(StorageFullError):
        deferred.force()
    with pytest.raises(StorageFullError):
        manager.close()


def test_an_append_is_refused_if_kept_entries_take_all_the_space() -> None:
    fs = SimFileSystem(18, capacity_bytes=6 * MIB + RESERVE_BYTES)
    manager = open_small(fs, replace(CONFIG, max_outstanding_bytes=256 << 10))
    deferred, other, writer = new_deferred(manager), new_deferred(manager), new_ledger(manager)
    ballast = fs.create("/ballast", 4 * MIB)
    fill_the_log(manager, writer)
    deferred.append(bytes(200 << 10))
    with pytest.raises(StorageFullError):
        deferred.force()
    with pytest.raises(StorageFullError):
        other.append(bytes(200 << 10))
    health = manager.health()
    assert health.outstanding_bytes < 256 << 10
    assert health.state == "degraded"
    assert health.reason.startswith("appending: ")
    ballast.close()
    fs.unlink("/ballast")
    tick(manager)
    assert other.append(bytes(200 << 10)) == 0
    assert deferred.force() == 0
    assert manager.health().state == "ok"
    manager.close()


def kept_store(fs: SimFileSystem) -> tuple[LedgerManager, LedgerWriter, LedgerWriter]:
    """Return a store without space, a ledger with an acknowledged entry that it keeps, and another deferred ledger."""
    manager = open_small(fs, CONFIG)
    deferred, other, writer = new_deferred(manager), new_deferred(manager), new_ledger(manager)
    fs.create("/ballast", 4 * MIB).close()
    fill_the_log(manager, writer)
    deferred.append(bytes(200 << 10))
    with pytest.raises(StorageFullError):
        deferred.force()
    assert store_of(manager).log.kept is not None
    return manager, deferred, other


@pytest.mark.parametrize("waits", [Log.wait_for_space, Log.flush, partial(Log.flush, kept=True)])
def test_waiters_wait_no_longer_than_the_attempt_to_write_kept_entries(
    waits: Callable[[Log], None],
) -> None:
    manager, _, _ = kept_store(SimFileSystem(20, capacity_bytes=6 * MIB + RESERVE_BYTES))
    log, supply = store_of(manager).log, store_of(manager).supply
    take = supply.next_log_file
    raised: list[StorageFullError | None] = []

    def wait() -> None:
        try:
            waits(log)
            raised.append(None)
        except StorageFullError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)

    def refused(bytes_min: int, after: int, *, use: ReserveUse = ReserveUse.NONE) -> tuple[int, File]:
        if waiter.ident is None:
            assert log.inflight is log.kept is not None
            waiter.start()
            wait_until(lambda: log.forming.followers or (log.kept and log.kept.followers) or raised)
        return take(bytes_min, after, use=use)

    supply.next_log_file = refused  # type: ignore[method-assign]  # it is looked up at each call
    with pytest.raises(StorageFullError):
        log.flush(kept=True)
    waiter.join(WAIT_S)
    assert len(raised) == 1
    with pytest.raises(StorageFullError):
        manager.close()


def test_writing_kept_entries_also_writes_those_that_join_them_meanwhile() -> None:
    fs = SimFileSystem(21, capacity_bytes=6 * MIB + RESERVE_BYTES)
    manager, deferred, other = kept_store(fs)
    log, supply = store_of(manager).log, store_of(manager).supply
    take, before = supply.next_log_file, log.kept
    calls = 0

    def refused(bytes_min: int, after: int, *, use: ReserveUse = ReserveUse.NONE) -> tuple[int, File]:
        nonlocal calls
        calls += 1
        if calls == 1:
            assert other.append(bytes(100 << 10)) == 0  # acknowledged, and refused with the next commit
        elif log.kept is not before and fs.exists("/ballast"):
            fs.unlink("/ballast")
            fs.sync_directory("/")
        return take(bytes_min, after, use=use)

    supply.next_log_file = refused  # type: ignore[method-assign]  # it is looked up at each call
    log.flush(kept=True)
    assert log.kept is None
    tick(manager)
    manager = open_small(fs.crash(), CONFIG)
    for writer in (deferred, other):
        with manager.open_ledger(writer.ledger_id) as reader:
            assert len(list(reader)) == 1
    manager.close()


@pytest.mark.parametrize("own", [False, True], ids=["another-ledger", "their-ledger"])
def test_entries_that_were_kept_do_not_keep_a_ledger_from_being_deleted(own: bool) -> None:
    fs = SimFileSystem(19, capacity_bytes=6 * MIB + RESERVE_BYTES)
    manager = open_small(fs, CONFIG)
    deferred, writer = new_deferred(manager), new_ledger(manager)
    writer.append(payload_of(0))
    ballast = fs.create("/ballast", fs.free_bytes("/store") - (16 << 10))
    deferred.append(bytes(2 * MIB))
    with pytest.raises(StorageFullError):
        deferred.force()
    manager.delete_ledger(deferred.ledger_id if own else writer.ledger_id)
    ballast.close()
    fs.unlink("/ballast")
    tick(manager)
    another = new_ledger(manager)
    another.append(payload_of(0))
    if own:
        with pytest.raises(NoSuchLedgerError):
            deferred.append(b"more")
    else:
        assert deferred.force() == 0
    manager.close()
    fs = fs.crash()
    manager = open_small(fs, CONFIG)
    assert list(manager.list_ledgers()) == [(writer if own else deferred).ledger_id, another.ledger_id]
    manager.close()
    found = verify_store("/store", fs=fs, environment=lambda path: SimEnvironment(fs, path, read_only=True))
    assert found.problems == ()


def test_a_ledger_that_was_recovered_without_space_stays_fenced() -> None:
    fs = SimFileSystem(9, capacity_bytes=6 * MIB + RESERVE_BYTES)
    manager = open_small(fs, CONFIG)
    writer = new_ledger(manager)
    ballast = fs.create("/ballast", 4 * MIB)
    count = fill_the_log(manager, writer)
    ballast.close()
    fs.unlink("/ballast")
    reader = manager.open_ledger(writer.ledger_id)
    assert reader.is_closed
    tick(manager)
    with pytest.raises(LedgerFencedError):
        writer.append(b"beyond the end")
    check(manager, writer.ledger_id, count)
    manager.close()


def test_a_store_without_a_background_thread_resumes_after_a_checkpoint_that_found_space() -> None:
    fs = SimFileSystem(10, capacity_bytes=6 * MIB + RESERVE_BYTES)
    manager = open_small(fs, CONFIG)
    writer = new_ledger(manager)
    ballast = fs.create("/ballast", 4 * MIB)
    count = fill_the_log(manager, writer)
    ballast.close()
    fs.unlink("/ballast")
    with pytest.raises(StorageFullError):
        writer.append(b"nobody looked")
    manager.checkpoint()
    assert writer.append(payload_of(count)) == count
    manager.close()


def test_a_passing_lack_of_space_does_not_fail_waiting_advanced_entries() -> None:
    fs = SimFileSystem(11, capacity_bytes=6 * MIB + RESERVE_BYTES)
    manager = open_small(fs, CONFIG)
    writer = manager.create_ledger(ledger_id=5, digest_type=DigestType.CRC32C)
    writer.append(payload_of(0), entry_id=0)
    waits = writer.append_async(payload_of(3), entry_id=3)
    ballast = fs.create("/ballast", 4 * MIB)
    fill_the_log(manager, new_ledger(manager))
    with pytest.raises(StorageFullError):
        writer.append(bytes(MIB), entry_id=1)
    assert not waits.done()
    with pytest.raises(AppendTimeoutError):
        waits.result(0.01)
    ballast.close()
    fs.unlink("/ballast")
    tick(manager)
    for number in (1, 2):
        assert writer.append(payload_of(number), entry_id=number) == number
    assert waits.result(WAIT_S) == 3
    check(manager, 5, 4)
    manager.close()


def test_an_advanced_entry_that_waits_is_not_failed_by_a_delete_that_fails() -> None:
    fs = SimFileSystem(12, capacity_bytes=16 * MIB)
    manager = open_small(fs, CONFIG)
    writer = manager.create_ledger(ledger_id=5, digest_type=DigestType.CRC32C)
    waits = writer.append_async(payload_of(1), entry_id=1)
    manager.checkpoint()
    seen: list[bool] = []

    def refused(bytes_min: int, after: int, *, use: ReserveUse = ReserveUse.NONE) -> tuple[int, File]:
        seen.append(waits.done())
        raise StorageFullError("no space")

    supply = store_of(manager).supply
    take, supply.next_log_file = supply.next_log_file, refused  # type: ignore[method-assign]  # at each call anew
    with pytest.raises(StorageFullError):
        manager.delete_ledger(5)
    supply.next_log_file = take  # type: ignore[method-assign]  # as above
    assert seen
    assert not any(seen)
    assert writer.append(payload_of(0), entry_id=0) == 0
    assert waits.result(WAIT_S) == 1
    manager.delete_ledger(5)
    manager.close()


def test_an_advanced_entry_whose_turn_finds_no_space_raises_and_may_be_retried() -> None:
    manager = open_small(SimFileSystem(13), CONFIG)
    writer = manager.create_ledger(ledger_id=5, digest_type=DigestType.CRC32C)
    turn, behind = (writer.append_async(payload_of(number), entry_id=number) for number in (1, 2))
    log = store_of(manager).log
    stage = log.stage_entry

    def refuse_one(descriptor: LedgerDescriptor, entry_id: int, *rest: Any) -> Completion | None:
        if entry_id == 1:
            raise StorageFullError("no space")
        return stage(descriptor, entry_id, *rest)

    log.stage_entry = refuse_one  # type: ignore[method-assign, assignment]  # it is looked up at each call
    assert writer.append(payload_of(0), entry_id=0) == 0
    with pytest.raises(StorageFullError):
        turn.result(WAIT_S)
    with pytest.raises(StorageFullError):
        writer.append(payload_of(1), entry_id=1)
    assert not behind.done()
    log.stage_entry = stage  # type: ignore[method-assign]  # as above
    assert writer.append(payload_of(1), entry_id=1) == 1
    assert behind.result(WAIT_S) == 2
    check(manager, 5, 3)
    manager.close()


def test_an_append_that_passes_over_a_small_file_does_not_wait_for_one_that_is_being_made() -> None:
    fs = SimFileSystem(14, capacity_bytes=64 * MIB)
    manager = open_small(fs, CONFIG)
    writer = new_ledger(manager)
    supply = store_of(manager).supply
    with supply.making:
        for size in (64 << 10, 512 << 10, 64 << 10, 512 << 10):
            supply.make(size, 0.0)
    ahead = supply.queued()
    passed = [store_of(manager).volumes.path_of(made.row) for made in (ahead[0], ahead[2])]
    with supply.making:  # as maintenance holds it for as long as it takes to write the zeros of a large file
        for _ in range(4):
            appending = threading.Thread(target=writer.append, args=(bytes(200_000),), daemon=True)
            appending.start()
            appending.join(WAIT_S)
            assert not appending.is_alive(), "an append waits for maintenance"
    assert supply.current_id == ahead[3].row.file_id
    assert [fs.exists(path) for path in passed] == [True, True]
    assert supply.queued() == []
    before = fs.kill()
    manager = open_small(before, CONFIG)
    assert [before.exists(path) for path in passed] == [False, False], "the next open removes them"
    assert manager.open_ledger(writer.ledger_id).last_add_confirmed == 3
    manager.close()


def test_a_preallocated_file_that_cannot_be_removed_is_retried_and_blocks_nothing() -> None:
    fs = SimFileSystem(15, capacity_bytes=64 * MIB)
    manager = open_small(fs, CONFIG)
    writer = new_ledger(manager)
    supply = store_of(manager).supply
    with supply.making:
        for size in (64 << 10, 512 << 10):
            supply.make(size, 0.0)
    passed = store_of(manager).volumes.path_of(supply.queued()[0].row)
    fs.fail_at(0, "EIO", only="unlink", forever=True)
    assert writer.append(bytes(200_000)) == 0
    tick(manager)
    assert manager.health().state == "ok"
    assert fs.exists(passed)
    fs.heal()
    tick(manager)
    assert not fs.exists(passed)
    assert writer.append(b"last") == 1
    manager.close()
