"""Appending: what is taken, what is refused before any effect, and when an entry is acknowledged."""

from __future__ import annotations

import array
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pybk.errors import (
    AppendTimeoutError,
    CorruptError,
    LedgerClosedError,
    LedgerFencedError,
    NoSuchLedgerError,
    PybkError,
    ReadRangeError,
    StorageFailedError,
    StorageFullError,
    TooManyRequestsError,
    UsageError,
)
from pybk.flags import WriteFlag
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.append_future import AppendFuture, PiecesFuture
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.descriptor import StagedEntries
from pybk.storage.log.commit import Commit
from tests.internals import store_of
from tests.storage.real_store import contents, numbered, open_quick, payloads, stop_syncing
from tests.waiting import WAIT_S, wait_until


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "data", max_entry_bytes=5000, max_outstanding_bytes=64 << 10) as manager:
        yield manager


# ---- payloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest_type", [DigestType.HMAC_SHA256, DigestType.CRC32C, DigestType.XXH3, DigestType.NONE])
def test_any_bytes_like_object_is_a_payload(manager: LedgerManager, digest_type: DigestType) -> None:
    numbers = np.arange(6, dtype=np.uint16)
    given: list[tuple[Any, bytes]] = [
        (b"bytes", b"bytes"),
        (bytearray(b"bytearray"), b"bytearray"),
        (memoryview(b"memoryview"), b"memoryview"),
        (memoryview(b"0123456789")[::3], b"0369"),
        (numbers, numbers.tobytes()),
        (numbers[::-2], numbers[::-2].tobytes()),
        (numbers.reshape(2, 3).T, numbers.reshape(2, 3).T.tobytes()),
        (array.array("i", [1, 2]), array.array("i", [1, 2]).tobytes()),
        (b"", b""),
        (bytearray(), b""),
        (np.empty(0), b""),
    ]
    writer = manager.create_ledger(digest_type=digest_type, insecure=True)
    for number, (payload, _) in enumerate(given):
        assert writer.append(payload) == number
    assert [writer.append_async(payload).result() for payload, _ in given] == list(range(11, 22))
    assert writer.append_many(payload for payload, _ in given) == range(22, 33)
    assert contents(manager, writer.ledger_id) == [wanted for _, wanted in given] * 3
    assert writer.length == 3 * sum(len(wanted) for _, wanted in given)


def test_a_payload_may_be_changed_once_the_call_has_returned(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    mutable = bytearray(b"before")
    futures: list[Any] = [writer.append_async(mutable), writer.append_many_async([mutable, memoryview(mutable)])]
    mutable[:] = b"after!"
    for future in futures:
        future.result()
    assert contents(manager, writer.ledger_id) == [b"before"] * 3


@pytest.mark.parametrize(
    "payload", ["text", None, 7, [b"list"], object(), b"x" * 5001, bytearray(5001), np.zeros(5001, np.uint8)]
)
def test_anything_else_is_refused_before_any_effect(manager: LedgerManager, payload: Any) -> None:
    writer = manager.create_ledger(insecure=True)
    writer.append(b"first")
    for refused in (
        lambda: writer.append(payload),
        lambda: writer.append_async(payload),
        lambda: writer.append_many([b"good", payload, b"good"]),
        lambda: writer.append_many_async([b"good", b"good", payload]),
    ):
        with pytest.raises(UsageError):
            refused()
    assert (writer.last_add_pushed, writer.last_add_confirmed, writer.length) == (0, 0, 5)
    assert writer.append(b"second") == 1
    assert contents(manager, writer.ledger_id) == [b"first", b"second"]


def test_a_released_buffer_and_one_without_bytes_are_refused(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    released = memoryview(b"gone")
    released.release()
    for payload in (released, np.array(["2020-01-01"], "datetime64[D]")):
        with pytest.raises(UsageError):
            writer.append(payload)  # type: ignore[arg-type]  # that is the point
    assert writer.last_add_pushed == -1


def test_the_longest_payload_is_taken_and_one_byte_more_is_not(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    longest = bytes(range(250)) * 20
    assert writer.append(longest) == 0
    assert writer.append_many([longest, longest]) == range(1, 3)
    with pytest.raises(UsageError, match=r"5001 bytes.*max_entry_bytes is 5000.*split"):
        writer.append(longest + b"x")
    assert contents(manager, writer.ledger_id) == [longest] * 3


def test_by_default_five_mebibytes_are_taken(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(digest_type=DigestType.XXH3)
        longest = bytes(5 << 20)
        writer.append(longest)
        with pytest.raises(UsageError):
            writer.append(longest + b"x")
        assert contents(manager, writer.ledger_id) == [longest]


# ---- ids -------------------------------------------------------------------------------------------------------------


def test_ids_count_from_zero_whatever_appends(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    assert (writer.last_add_pushed, writer.last_add_confirmed, writer.length) == (-1, -1, 0)
    assert writer.append(b"a") == 0
    assert writer.append_many([]) == range(1, 1)
    assert writer.append_many_async([]).result() == range(1, 1)
    assert writer.append_many([b"b", b"c"]) == range(1, 3)
    future = writer.append_async(b"d")
    assert writer.last_add_pushed == 3
    assert future.result() == 3
    assert (writer.last_add_pushed, writer.last_add_confirmed, writer.length) == (3, 3, 4)


def test_pushed_runs_ahead_of_confirmed_until_the_sync(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = manager.create_ledger(insecure=True)
    go = stop_syncing(monkeypatch)
    future = writer.append_async(b"abc")
    many = writer.append_many_async([b"d", b"e"])
    assert not future.done()
    assert (writer.last_add_pushed, writer.last_add_confirmed, writer.length) == (2, -1, 5)
    with pytest.raises(AppendTimeoutError):
        many.result(timeout=0.01)
    with manager.open_ledger(writer.ledger_id, recover=False) as reader:
        assert reader.last_add_confirmed == -1
        with pytest.raises(ReadRangeError):
            reader.read(0, 0)
    go.set()
    assert (future.result(), many.result()) == (0, range(1, 3))
    assert writer.last_add_confirmed == 2


def test_threads_append_to_one_ledger_and_nothing_is_lost_or_doubled(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    given: dict[int, bytes] = {}

    def work(name: int) -> None:
        for number in range(30):
            payload = b"%d-%d" % (name, number)
            if number % 3 == 0:
                given[writer.append(payload)] = payload
            elif number % 3 == 1:
                given[writer.append_async(payload).result()] = payload
            else:
                ids = writer.append_many([payload + b"a", payload + b"b"])
                assert len(ids) == 2
                given.update(zip(ids, (payload + b"a", payload + b"b"), strict=True))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given) == list(range(320))
    assert contents(manager, writer.ledger_id) == [given[entry_id] for entry_id in range(320)]


def test_entries_carry_the_last_add_confirmed_and_the_length_of_their_moment(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    writer.append(b"12345")
    writer.append_many([b"678", b"9"])
    writer.append(b"0")
    with manager.open_ledger(writer.ledger_id, recover=False) as reader:
        found = [(e.ledger_id, e.entry_id, e.last_add_confirmed, e.length) for e in reader.read(0, 3)]
    ledger_id = writer.ledger_id
    assert found == [(ledger_id, 0, -1, 5), (ledger_id, 1, 0, 8), (ledger_id, 2, 0, 9), (ledger_id, 3, 2, 10)]


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_too_much_outstanding_waits_or_fails_at_once(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = manager.create_ledger(insecure=True)
    other = manager.create_ledger(insecure=True)
    go = stop_syncing(monkeypatch)
    block = bytes(4000)
    many = writer.append_many_async([block] * 16)
    while store_of(manager).log.inflight is None:
        time.sleep(0.001)  # so that what is being written has to count, and not only what is forming
    with pytest.raises(TooManyRequestsError, match="max_outstanding_bytes 65536") as refused:
        _ = writer.append_async(block, wait=False)
    with pytest.raises(TooManyRequestsError):
        _ = writer.append_many_async([b"small", block], wait=False)
    assert refused.value.retryable
    assert not refused.value.outcome_unknown
    with pytest.raises(TooManyRequestsError):
        _ = other.append_async(block, wait=False)
    assert 60_000 <= manager.health().outstanding_bytes <= 65536
    futures = []
    waited = threading.Thread(target=lambda: futures.append(writer.append_async(block)))
    waited.start()
    waited.join(0.1)
    assert waited.is_alive(), "an append beyond the bound did not wait"
    go.set()
    waited.join(WAIT_S)
    assert (many.result(), futures[0].result()) == (range(16), 16)
    wait_until(lambda: manager.health().outstanding_bytes == 0)
    assert writer.append_async(block, wait=False).result() == 17
    assert writer.append_many_async([b"small", block], wait=False).result() == range(18, 20)


def test_an_entry_and_a_batch_longer_than_the_bound_pass(tmp_path: Path) -> None:
    with open_quick(tmp_path, max_outstanding_bytes=64 << 10) as manager:
        writer = manager.create_ledger(insecure=True)
        assert writer.append(bytes(200_000)) == 0
        assert writer.append_many([bytes(3000)] * 3000) == range(1, 3001)
        assert len(contents(manager, writer.ledger_id)) == 3001


def test_a_batch_of_which_a_later_part_is_refused_is_said_to_be_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(insecure=True)
        log = store_of(manager).log
        stage, refusal = log.stage_batch, CorruptError("bad map", path="/tier")

        def stage_one(*args: Any, **settings: Any) -> Any:
            if writer.last_add_pushed >= 0:
                raise refusal
            return stage(*args, **settings)

        monkeypatch.setattr(log, "stage_batch", stage_one)
        with pytest.raises(CorruptError, match="bad map; entries 0 to 2 of the batch may be there") as raised:
            writer.append_many([bytes(1 << 20)] * 10)
        assert (raised.value.outcome_unknown, raised.value.path, refusal.outcome_unknown) == (True, "/tier", False)
        with pytest.raises(CorruptError, match=r"^bad map$") as raised:
            writer.append_many([bytes(1 << 20)] * 10)
        assert not raised.value.outcome_unknown  # nothing of this one is there
        monkeypatch.undo()
        writer.append(b"after")
        assert len(contents(manager, writer.ledger_id, recover=True)) == 4


@pytest.mark.parametrize("call", ["append_many", "append_many_async"])
def test_a_batch_of_which_a_later_commit_is_refused_is_said_to_be_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The batch is longer than the bound: its earlier pieces are on disk when its last one is staged."""
    with open_quick(tmp_path, max_outstanding_bytes=8 << 20) as manager:
        writer = manager.create_ledger(insecure=True)
        log = store_of(manager).log.writer
        write, refusal = log.write, StorageFullError("no space")

        def refuse_last(commit: Commit) -> None:
            if any(run.last() == 23 for run in commit.staged):
                raise refusal
            write(commit)

        monkeypatch.setattr(log, "write", refuse_last)
        with pytest.raises(StorageFullError, match="no space; entries 0 to 23 of the batch may be there") as raised:
            finished(getattr(writer, call)([bytes(1 << 20)] * 24))
        assert (raised.value.outcome_unknown, refusal.outcome_unknown) == (True, False)
        monkeypatch.undo()
        assert 0 < len(contents(manager, writer.ledger_id, recover=True)) < 24


def finished(appended: range | AppendFuture[range]) -> range:
    """Return the ids of a batch once it is durable."""
    return appended.result() if isinstance(appended, AppendFuture) else appended


def test_a_batch_that_was_refused_from_its_first_piece_on_is_not_said_to_be_unknown(manager: LedgerManager) -> None:
    """What is forming fails with the commit that is refused, so nothing of the batch is there."""
    first, last, log = Commit(), Commit(), store_of(manager).log
    first.error = last.error = StorageFullError("no space")
    first.done = last.done = True
    error = PiecesFuture(log, first, last, range(8)).exception()
    assert isinstance(error, StorageFullError)
    assert (str(error), error.outcome_unknown) == ("no space", False)
    first.error = StorageFailedError("a write failed")
    error = PiecesFuture(log, first, last, range(8)).exception()
    assert error is not None
    assert error.outcome_unknown


# ---- deferred force --------------------------------------------------------------------------------------------------


def deferred(manager: LedgerManager) -> Any:
    return manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)


def test_deferred_appends_are_acknowledged_before_the_sync(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = deferred(manager)
    go = stop_syncing(monkeypatch)
    assert writer.append(b"a") == 0
    assert writer.append_many([b"b", b"c"]) == range(1, 3)
    future = writer.append_async(b"d")
    assert future.done()
    assert future.result() == 3
    assert writer.append_many_async([b"e"]).done()
    assert (writer.last_add_pushed, writer.last_add_confirmed) == (4, -1)
    go.set()
    assert writer.force() == 4
    assert writer.last_add_confirmed == 4


def test_only_force_confirms_deferred_entries(manager: LedgerManager) -> None:
    writer = deferred(manager)
    writer.append_many(numbered(3))
    with manager.open_ledger(writer.ledger_id, recover=False) as reader:
        assert reader.read_last_add_confirmed() == -1
        with pytest.raises(ReadRangeError):
            reader.read(0, 0)
        assert [e.payload for e in reader.read_unconfirmed(0, 2)] == numbered(3)
        assert reader.read_last_add_confirmed() == -1, "looking at unconfirmed entries confirmed them"
        assert writer.force() == 2
        assert writer.force() == 2
        assert reader.last_add_confirmed == -1, "the reader moved by itself"
        assert reader.read_last_add_confirmed() == 2
        assert payloads(reader) == numbered(3)
        writer.append(b"entry 3")
        manager.checkpoint()
        assert reader.read_last_add_confirmed() == 2, "a checkpoint confirmed what was not forced"
        assert [e.payload for e in reader.read_unconfirmed(0, 3)] == numbered(4)


def test_a_sync_by_another_ledger_confirms_no_deferred_entry(manager: LedgerManager) -> None:
    writer = deferred(manager)
    writer.append(b"deferred")
    manager.create_ledger(insecure=True).append(b"synced")
    assert writer.last_add_confirmed == -1


def test_close_forces_deferred_entries(manager: LedgerManager) -> None:
    writer = deferred(manager)
    writer.append_many(numbered(3))
    writer.close()
    assert writer.last_add_confirmed == 2
    assert contents(manager, writer.ledger_id) == numbered(3)


def test_the_bound_on_outstanding_bytes_makes_deferred_entries_durable(manager: LedgerManager) -> None:
    writer = deferred(manager)
    for _ in range(200):
        writer.append(bytes(4000))
        assert manager.health().outstanding_bytes <= 64 << 10
    assert writer.last_add_confirmed == -1
    assert writer.force() == 199


def test_deferred_entries_survive_a_close_of_the_manager_and_recovery_confirms_them(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        writer = deferred(manager)
        writer.append_many(numbered(2))
        writer.force()
        writer.append(b"entry 2")
    with open_quick(tmp_path) as manager:
        with manager.open_ledger(writer.ledger_id, recover=False) as reader:
            assert reader.last_add_confirmed == 1
        assert contents(manager, writer.ledger_id, recover=True) == numbered(3)


# ---- closing and fencing ---------------------------------------------------------------------------------------------


def test_appends_after_close_are_refused(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    writer.append(b"entry 0")
    future = writer.append_async(b"entry 1")
    writer.close()
    assert future.done()
    writer.close()
    for refused in (lambda: writer.append(b"x"), lambda: writer.append_many([b"x"]), lambda: writer.append_async(b"x")):
        with pytest.raises(LedgerClosedError) as raised:
            refused()
        assert raised.value.code == -11
    metadata = manager.ledger_metadata(writer.ledger_id)
    assert (metadata.state, metadata.last_entry_id, metadata.length) == (LedgerState.CLOSED, 1, 14)
    assert writer.force() == 1


def test_recovery_fences_a_live_writer_and_has_all_it_was_acknowledged(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    acknowledged: list[int] = []
    errors: list[PybkError] = []

    def write() -> None:
        try:
            while True:
                acknowledged.append(writer.append(b"entry %d" % len(acknowledged)))
        except PybkError as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    while len(acknowledged) < 20:
        pass
    with manager.open_ledger(writer.ledger_id) as reader:
        found = payloads(reader)
        assert reader.is_closed
    thread.join(WAIT_S)
    assert isinstance(errors[0], LedgerFencedError)
    assert errors[0].code == -101
    assert found == numbered(len(found))
    assert len(found) >= len(acknowledged)
    for refused in (lambda: writer.append(b"x"), lambda: writer.append_many([b"x"]), writer.close):
        with pytest.raises(LedgerFencedError):
            refused()
    assert contents(manager, writer.ledger_id) == found


def test_a_fence_leaves_pipelined_appends_in_or_out_but_never_acknowledged_and_out(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    futures = [writer.append_async(payload) for payload in numbered(50)]
    found = contents(manager, writer.ledger_id, recover=True)
    for entry_id, future in enumerate(futures):
        if future.exception() is None:
            assert found[entry_id] == b"entry %d" % entry_id


def test_deleting_ends_a_writer(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    writer.append(b"x")
    manager.delete_ledger(writer.ledger_id)
    with pytest.raises(NoSuchLedgerError):
        writer.append(b"y")
    writer.close()


def test_leaving_a_with_by_an_error_keeps_the_error(manager: LedgerManager) -> None:
    with pytest.raises(ZeroDivisionError), manager.create_ledger(insecure=True) as writer:
        assert manager.open_ledger(writer.ledger_id).last_add_confirmed / 0
    with pytest.raises(LedgerFencedError), manager.create_ledger(insecure=True) as writer:
        manager.open_ledger(writer.ledger_id)


def test_errors_of_a_refused_writer_do_not_pile_up_tracebacks(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    manager.open_ledger(writer.ledger_id)
    depths = []
    for _ in range(5):
        with pytest.raises(LedgerFencedError) as raised:
            writer.append(b"x")
        depths.append(len(raised.traceback))
    assert depths[-1] == depths[0]


def test_finished_appends_leave_nothing_to_the_collector_of_cycles(manager: LedgerManager) -> None:
    """It would run after every sixty appends, and delay one of them."""

    def staged() -> int:
        return sum(isinstance(each, StagedEntries) for each in gc.get_objects())

    def append() -> None:
        for _ in range(10):
            writer.append(b"x")
            writer.append_async(b"y").result()
        writer.append_many([b"z"] * 3)

    with manager.create_ledger(insecure=True) as writer:
        append()
        gc.collect()
        gc.disable()
        try:
            before = staged()
            append()
            assert staged() - before < 10  # of 21 and more
        finally:
            gc.enable()


def test_repr_names_the_ledger(manager: LedgerManager) -> None:
    writer = manager.create_ledger(password=b"s3cret")
    writer.append(b"x")
    assert repr(writer) == f"<LedgerWriter ledger {writer.ledger_id}, last add confirmed 0>"
    writer.close()
    assert repr(writer) == f"<LedgerWriter ledger {writer.ledger_id}, last add confirmed 0, closed>"
