"""Merged segments: few ledgers in place of many, and no reader reads a record twice or misses one meanwhile."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest

from pybk import (
    CorruptError,
    FeatureLevel,
    IllegalOperationError,
    LedgerManager,
    Log,
    LogEnd,
    LogFencedError,
    LogLockedError,
    LogReader,
    LogRecord,
    LogSealedError,
    Namespace,
    NewRecord,
    NoSuchLedgerError,
    NoSuchLogError,
    Passwords,
    Retention,
    TxId,
    UnsupportedFormatError,
    UsageError,
    back_up,
    restore_backup,
)
from pybk.admin.cli import main
from pybk.manager.ledger_manager import backend_of
from pybk.streams import detached_writer, ledger_list, ledger_steps, segment_merge
from pybk.streams.ledger_list import Merge
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import (
    LIST_FORMAT,
    MERGES,
    PAGED_FORMAT,
    ListKind,
    ListRecord,
    Producer,
    Replaced,
    Segment,
    new_list,
)
from pybk.streams.log_settings import RollPolicy, spec_of
from pybk.streams.segment_merge import MEMBERS_MAX, MergePlan, groups_to_merge
from tests.cluster.inside import inside
from tests.internals import cut_log
from tests.sampling import all_are_tried
from tests.streams.test_detached import DAY, commit, numbered
from tests.streams.test_list_pages import at_level, parts_of, record_of
from tests.streams.test_log import PASSWORD, data_of, opened
from tests.streams.test_log_rebuild import lose_record
from tests.waiting import PROCESS_S, WAIT_S, wait_until

COMMITS, EACH = 11, 3
RECORDS = COMMITS * EACH


@pytest.fixture(autouse=True)
def _short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_steps, "PAGE_SEGMENTS", 4)


def fill(log: Log, commits: int = COMMITS, first: int = 0) -> None:
    """Write segments of ``EACH`` records, by commits and by a writer in turns."""
    for number in range(first, first + commits):
        if number % 4 == 3:
            with log.writer() as writer:
                writer.append_many(numbered(number * EACH, EACH))
        else:
            commit(log, number, numbered(number * EACH, EACH))


@pytest.fixture
def log(manager: LedgerManager) -> Iterator[Log]:
    with opened(manager) as log:
        fill(log)
        yield log


def taken(read: Callable[..., LogRecord | None]) -> list[LogRecord]:
    """Return all records that a reader or a subscription returns without waiting."""
    return list(iter(lambda: read(timeout=0), None))


def exists(manager: LedgerManager, ledger_id: int) -> bool:
    try:
        manager.open_ledger(ledger_id, password=PASSWORD).close()
    except NoSuchLedgerError:
        return False
    return True


def contents(records: list[LogRecord]) -> list[tuple[object, ...]]:
    """Return records without the parts of their positions that a merge changes."""
    return [(each.seq, *each[1:]) for each in records]


# ---- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("keep_s", [0, 3600])
def test_a_position_that_names_a_merged_segment_is_still_that_of_its_record(log: Log, keep_s: float) -> None:
    before = list(log.reader())
    assert log.merge_segments(segment_records=4 * EACH, keep_s=keep_s).ledgers == 3
    log.merge_segments(keep_s=keep_s, segment_records=1)
    after = list(log.reader())
    assert contents(after) == contents(before)
    assert [each.number for each in log.segments()] == [4, 8, 11]
    assert [(each.first_seq, each.last_seq) for each in log.segments()] == [(0, 11), (12, 23), (24, 32)]
    for old, new in zip(before, after, strict=True):
        assert log.read(old.position) == log.read(new.position) == log.read(old.seq) == new
        assert log.position_for(old.position) == new.position
        assert log.position_for(TxId(old.seq * 10)) == log.position_for(TxId(old.seq * 10 - 9)) == new.position
        assert log.position_for(DAY + timedelta(hours=old.seq)) == new.position
        with log.reader(old.position) as reader:
            assert taken(reader.read) == after[old.seq :]


def test_a_subscription_continues_at_the_positions_that_it_handed_out(manager: LedgerManager, log: Log) -> None:
    with log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
        handed = [subscription.read(0) for _ in range(20)]
        subscription.ack([each.position for each in handed[:7] if each is not None])
        log.merge_segments(keep_s=0)
        log.merge_segments(keep_s=0)
        subscription.ack([each.position for each in handed[8:19] if each is not None])
    with opened(manager) as again, again.subscribe("sub") as subscription:
        assert [each.seq for each in taken(subscription.read)] == [7, *range(19, RECORDS)]
        subscription.ack_through(RECORDS - 1)
        assert again.subscription_states()[0].backlog == 0
    with opened(manager) as again:
        again.truncate(RECORDS - 1)
        assert data_of(again) == [b"%d" % (RECORDS - 1)]


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("keep_s", [0, 3600])
@pytest.mark.parametrize("most", [1, 2, 100])
def test_readers_at_every_place_continue_in_the_merged_segments(log: Log, keep_s: float, most: int) -> None:
    expected = data_of(log)
    readers: list[tuple[LogReader, list[LogRecord]]] = []
    for count in range(RECORDS + 1):
        reader = log.reader()
        readers.append((reader, [record for _ in range(count) for record in reader.read_many(1, 0)]))
    for limit in (2 * EACH, 100):
        log.merge_segments(segment_records=limit, keep_s=keep_s)
    log.merge_segments(keep_s=keep_s)
    assert len(log.segments()) == 1
    commit(log, 100, [NewRecord(b"more", txid=10**6)])
    for reader, read in readers:
        while more := reader.read_many(most, 0):
            read += more
        assert [each.data for each in read] == [*expected, b"more"]
        reader.close()


def test_a_reader_at_the_end_of_an_open_segment_continues_after_it_was_merged(log: Log) -> None:
    for epoch, closes_first in enumerate((True, False), 100):
        with log.reader(LogEnd.LATEST) as reader:
            writer = log.writer()
            first = writer.append(b"first", txid=10**6).seq
            record = reader.read(0)
            assert record is not None
            assert record.seq == first, "it has the open segment"
            if closes_first:
                writer.roll()
                writer.append(b"second", txid=10**6)
            writer.close()
            log.merge_segments(keep_s=0)
            log.merge_segments(keep_s=0)
            commit(log, epoch, [NewRecord(b"third", txid=10**6)])
            assert [each.seq for each in taken(reader.read)] == list(range(first + 1, log.last_seq() + 1))


def test_readers_of_another_client_continue_in_the_merged_segments(tmp_path: Path) -> None:
    with (
        inside(tmp_path) as cluster,
        cluster.connect() as merging,
        cluster.connect() as reading,
        opened(merging) as log,
        opened(reading) as other,
    ):
        fill(log)
        readers = [other.reader(follow=True) for _ in range(RECORDS)]
        for count, reader in enumerate(readers):
            assert [each.seq for _ in range(count) for each in reader.read_many(1, 0)] == list(range(count))
        for limit in (2 * EACH, 100, 100):
            log.merge_segments(segment_records=limit, keep_s=0)
        for count, reader in enumerate(readers):
            assert [each.seq for each in taken(reader.read)] == list(range(count, RECORDS))
            reader.close()
        assert data_of(other) == data_of(log)
        wait_until(lambda: len(other.segments()) == 1)


@pytest.mark.sampled(one_in=2)
def test_nothing_is_missed_or_read_twice_while_a_writer_rolls_and_segments_are_merged(manager: LedgerManager) -> None:
    total = 300 if all_are_tried() else 90
    with opened(manager) as log, ThreadPoolExecutor() as pool, log.writer() as writer:
        reader, subscription = log.reader(follow=True), log.subscribe("sub", start=LogEnd.EARLIEST)

        def consumes(read: Callable[..., list[LogRecord]]) -> list[int]:
            found: list[int] = []
            while len(found) < total and (records := read(5, WAIT_S)):
                found += [each.seq for each in records]
            return found

        def merges() -> int:
            replaced, is_last = 0, False
            while not is_last:
                is_last = log.last_seq() >= total - 1
                replaced += log.merge_segments(keep_s=0).replaced
            return replaced

        read, consumed, merged = (
            pool.submit(consumes, reader.read_many),
            pool.submit(consumes, subscription.read_many),
            pool.submit(merges),
        )
        for number in range(total):
            writer.append(b"%d" % number)
            if number % 3 == 2:
                writer.roll()
        assert read.result(PROCESS_S) == list(range(total))
        assert consumed.result(PROCESS_S) == list(range(total))
        assert merged.result(PROCESS_S) > 0
        assert data_of(log) == [b"%d" % number for number in range(total)]
        subscription.close()
        reader.close()


# ---- what is merged --------------------------------------------------------------------------------------------------


def rows(*sizes: int, generation: int = 0) -> list[Segment]:
    return [
        Segment(at + 1, at + 1, 1, generation, at, at, nbytes, at * 10**9, (at + 1) * 10**9)
        for at, nbytes in enumerate(sizes)
    ]


def grouped(segments: list[Segment], **limits: float) -> list[list[int]]:
    record = new_list("log", ListKind.LOG, bytes(16), 0)
    found = groups_to_merge(record, segments, RollPolicy(**{"nbytes": 100, **limits}))  # type: ignore[arg-type]
    return [[each.nbytes for each in group] for group in found]


def test_groups_keep_to_the_limits_and_to_one_generation() -> None:
    assert grouped(rows(*[30] * 7)) == [[30, 30, 30], [30, 30, 30]]
    assert grouped(rows(*[1] * 7), records=3) == [[1, 1, 1], [1, 1, 1]]
    assert grouped(rows(*[1] * 7), age_s=2.5) == [[1, 1], [1, 1], [1, 1]]
    assert grouped([*rows(1, 2, 3, 6)[:2], *rows(1, 2, 3, 6, generation=1)[2:]]) == []
    assert grouped([*rows(2, 2, 3, 3)[:2], *rows(2, 2, 3, 3, generation=1)[2:]]) == [[2, 2], [3, 3]]
    assert grouped(rows(1)) == grouped([]) == []
    many = grouped(rows(*[1] * (2 * MEMBERS_MAX + 3)), nbytes=10**9)
    assert [len(each) for each in many] == [MEMBERS_MAX, MEMBERS_MAX, 3], "their rows fit into one page"


def test_a_large_segment_is_merged_only_with_two_thirds_as_much() -> None:
    assert grouped(rows(90, 1, 1)) == [[1, 1]]
    assert grouped(rows(1, 1, 90, 5, 5)) == [[1, 1], [5, 5]]
    assert grouped(rows(8, 4, 2, 2)) == [[8, 4, 2, 2]]
    assert grouped(rows(12, 4, 2, 2)) == [[12, 4, 2, 2]]
    assert grouped(rows(13, 4, 2, 2)) == [[4, 2, 2]]
    assert grouped(rows(81, 27, 9, 3, 1)) == []
    assert grouped(rows(2, 3)) == [[2, 3]]
    assert grouped(rows(150, 60, 60)) == []


def merged_often(commits: int, nbytes: int, every: int, policy: RollPolicy) -> tuple[int, float]:
    """Merge after so many commits, a second each; return the segments that are left, and how often a byte is copied."""
    record, segments, copied = new_list("log", ListKind.LOG, bytes(16), 0), list[Segment](), 0
    for number in range(commits):
        times = number * 10**9, (number + 1) * 10**9
        segments.append(Segment(number + 1, number + 1, 1, 0, number, number, nbytes, *times))
        if number % every == every - 1:
            groups = {group[0].number: group for group in groups_to_merge(record, segments, policy)}
            left, rest = list[Segment](), iter(segments)
            for each in rest:
                group = groups.get(each.number, (each,))
                for _ in group[1:]:
                    next(rest)
                size = sum(member.nbytes for member in group)
                copied += size if len(group) > 1 else 0
                first = group[0]
                left.append(replace(group[-1], first_seq=first.first_seq, nbytes=size, created_ns=first.created_ns))
            segments = left
    assert sum(each.nbytes for each in segments) == commits * nbytes
    return len(segments), copied / (commits * nbytes)


def test_records_are_copied_a_few_times_only_however_often_segments_are_merged() -> None:
    left, copies = merged_often(4000, 10, 10, RollPolicy(nbytes=5_000, age_s=10**9))
    assert left < 30
    assert copies < 8, "as 5000 is 10 times 1.67**12, in the worst case 12"


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("nbytes", [1_000, 10_000, 100_000])
def test_a_day_of_commits_each_second_leaves_few_ledgers(nbytes: int) -> None:
    left, copies = merged_often(86_400, nbytes, 600, RollPolicy())
    assert left <= 200
    assert copies < 5


def test_keys_headers_times_and_ids_of_different_entries_are_kept(manager: LedgerManager) -> None:
    random = Random(7)
    with opened(manager) as log:
        for epoch in range(60):
            records = [
                NewRecord(
                    random.randbytes(random.choice((0, 1, 100, 70_000))),
                    key=random.choice((None, b"", b"key")),
                    headers=random.choice(((), (("name", b"value"),))),
                    txid=epoch if epoch % 3 else None,
                    time_ns=random.randrange(10**9),
                )
                for _ in range(random.randrange(1, 5))
            ]
            if epoch % 2:
                commit(log, epoch, records)
            else:
                with log.writer(ordered_txids=False) as writer:
                    writer.append_many(records)
        before = list(log.reader())
        assert log.merge_segments().ledgers == 1
        assert contents(list(log.reader())) == contents(before)
        for each in range(60):
            found = log.position_for(TxId(each))
            assert (
                None
                if found is None
                else found.seq
                == next((record.seq for record in before if record.txid is not None and record.txid >= each), None)
            )


def test_what_was_truncated_or_cut_is_not_merged(manager: LedgerManager, log: Log) -> None:
    log.truncate(EACH + 1)
    cut_log(log, RECORDS - 2).close()
    commit(log, 100, numbered(200, 2))
    data = data_of(log)
    result = log.merge_segments()
    assert result == (1, COMMITS - 2, RECORDS - 2 * EACH - 1, result.nbytes, 3), (
        "one generation each, and what is whole"
    )
    assert data_of(log) == data
    log.truncate(2 * EACH + 1)
    assert data_of(log) == data[EACH:]
    assert len(log.segments()) == 2, "a merged segment is deleted once all of it was truncated"
    cut_log(log, 3 * EACH).close()
    assert data_of(log) == data[EACH : 2 * EACH]
    with log.writer() as writer:
        writer.append(b"last", txid=10**6)
    assert data_of(log) == [*data[EACH : 2 * EACH], b"last"]


def test_pages_stay_short_where_each_boundary_is_between_members(manager: LedgerManager) -> None:
    small, large = [NewRecord(b"s" * 10)], [NewRecord(b"l" * 5_000)]
    with opened(manager) as log:
        for number in range(32):
            commit(log, number, large if number % 4 in (1, 2) else small)
        assert [each.segments for each in record_of(manager).pages] == [4] * 7
        data = data_of(log)
        assert log.merge_segments(segment_bytes=2_000).ledgers == 7
        pages = [each.segments for each in record_of(manager).pages]
        assert max(pages) <= 4, "a metadata store takes no value of any length"
        assert sum(pages) + len(record_of(manager).segments) == 25
        assert data_of(log) == data


def test_retention_drops_a_merged_segment_as_a_whole(log: Log) -> None:
    log.merge_segments(segment_records=4 * EACH)
    commit(log, 100, [NewRecord(b"last")])
    log.set_retention(Retention(max_bytes=log.segments()[-1].nbytes + log.segments()[-2].nbytes))
    commit(log, 101, [])
    assert log.first_seq() == 8 * EACH
    assert len(log.segments()) == 2


# ---- ledgers that are replaced ---------------------------------------------------------------------------------------


def test_replaced_ledgers_are_kept_for_their_time_and_deleted_then(manager: LedgerManager, log: Log) -> None:
    old = [each.ledger_id for each in log.segments()]
    log.merge_segments(segment_records=4 * EACH, keep_s=100)
    assert Log.sweep(manager, password=PASSWORD) == []
    assert all(exists(manager, each) for each in old)
    assert len(record_of(manager).replaced) == 3
    steps = LedgerSteps(manager, "log", spec_of(ListKind.LOG, PASSWORD, None, insecure=False))
    steps.perform(ledger_list.release("log", time.time_ns() + 101 * 10**9))
    assert not any(exists(manager, each) for each in old)
    record = record_of(manager)
    assert (record.replaced, record.gone_pages, record.pending_deletes) == ((), (), ())
    assert len(data_of(log)) == RECORDS
    fill(log, 2, first=COMMITS)  # so that pages which nothing names have lower numbers
    Log.sweep(manager, password=PASSWORD)
    assert {each.rpartition(".")[2] for each in parts_of(manager) if ".p." in each} == {
        each.name[2:] for each in record_of(manager).pages
    }


@pytest.mark.parametrize("by", ["writer", "merge"])
def test_replaced_ledgers_are_deleted_without_a_sweep(manager: LedgerManager, log: Log, by: str) -> None:
    old = [each.ledger_id for each in log.segments()]
    log.merge_segments(keep_s=0)
    commit(log, 100, numbered(100, 1))
    assert all(exists(manager, each) for each in old), "a commit does not wait for deletions"
    if by == "merge":
        log.merge_segments()
    else:
        with log.writer():
            wait_until(lambda: not record_of(manager).replaced and not record_of(manager).gone_pages)
    assert not any(exists(manager, each) for each in old)


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_deleted_log_leaves_nothing(manager: LedgerManager, log: Log, is_empty: bool) -> None:
    log.merge_segments(segment_records=4 * EACH)
    if is_empty:
        log.seal()
        log.truncate(RECORDS)
        assert log.segments() == []
    log.close()
    Log.delete(manager, "log", password=PASSWORD)
    assert list(manager.ledgers()) == []
    assert parts_of(manager) == []


def test_a_log_has_room_for_segments_however_many_merges_are_kept(
    manager: LedgerManager, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_merge, "KEPT_MERGES_MAX", 2)
    assert log.merge_segments(segment_records=2 * EACH).ledgers == 2
    assert log.merge_segments(segment_records=2 * EACH).ledgers == 0
    steps = LedgerSteps(manager, "log", spec_of(ListKind.LOG, PASSWORD, None, insecure=False))
    steps.perform(ledger_list.release("log", time.time_ns() + 4000 * 10**9))
    assert log.merge_segments(segment_records=2 * EACH).ledgers == 2
    assert data_of(log) == [b"%d" % number for number in range(RECORDS)]


def test_the_time_for_which_ledgers_are_kept_has_an_end(log: Log) -> None:
    for keep_s in (None, -1, "1h", float("inf"), float("nan"), 1e12):
        with pytest.raises(UsageError, match=r"keep_s is .*; it takes seconds, from 0 to 1000000000"):
            log.merge_segments(keep_s=keep_s)  # type: ignore[arg-type]


# ---- others that change the log meanwhile ----------------------------------------------------------------------------


def after_copies(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Have something done after the first merge has copied its records, and before it is listed."""
    real, done = ledger_list.merge, list[bool]()

    def merge(*arguments: object) -> object:
        if not done:
            done.append(True)
            with ThreadPoolExecutor() as pool:  # in a thread of its own, because a merge is no place to close a writer
                pool.submit(do).result(WAIT_S)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ledger_list, "merge", merge)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kept", [EACH, EACH + 1, 4 * EACH, RECORDS])
def test_a_merge_of_what_was_truncated_meanwhile_changes_nothing(
    manager: LedgerManager, log: Log, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    data = data_of(log)
    after_copies(monkeypatch, lambda: log.truncate(kept))
    result = log.merge_segments(segment_records=4 * EACH)
    assert data_of(log) == data[kept:]
    assert result.ledgers == (0 if kept == RECORDS else 2)
    again = log.merge_segments(segment_records=4 * EACH, keep_s=0)
    log.merge_segments(keep_s=0)
    assert data_of(log) == data[kept:]
    assert again.ledgers == (0 if kept in (4 * EACH, RECORDS) else 1)
    if kept != RECORDS:
        assert not Log.sweep(manager, password=PASSWORD)


@pytest.mark.parametrize("kept", [4 * EACH, 5 * EACH + 1, RECORDS])
def test_what_was_truncated_before_it_is_copied_is_left_out(
    log: Log, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    log.truncate(3 * EACH)  # so that the first segment is one of a writer
    real = segment_merge.copied

    def copied(steps: LedgerSteps, plan: MergePlan) -> Merge | None:
        if log.first_seq() < kept:
            with ThreadPoolExecutor() as pool:
                pool.submit(log.truncate, kept).result(WAIT_S)
        return real(steps, plan)

    monkeypatch.setattr(segment_merge, "copied", copied)
    assert log.merge_segments(segment_records=4 * EACH).ledgers == (0 if kept == RECORDS else 1)
    assert data_of(log) == [b"%d" % number for number in range(kept, RECORDS)]


def test_a_member_that_is_missing_is_damage(manager: LedgerManager, log: Log) -> None:
    log.truncate(3 * EACH)
    gone = log.segments()[0]
    manager.delete_ledger(gone.ledger_id, password=PASSWORD)
    with pytest.raises(CorruptError, match=f"record {gone.first_seq} cannot be read, because ledger {gone.ledger_id}"):
        log.merge_segments()


def test_a_log_that_was_deleted_meanwhile_leaves_nothing_of_a_merge(
    manager: LedgerManager, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_copies(monkeypatch, lambda: Log.delete(manager, "log", password=PASSWORD))
    with pytest.raises(NoSuchLogError):
        log.merge_segments()
    assert list(manager.ledgers()) == []
    with opened(manager) as again:
        assert data_of(again) == []


def test_a_log_that_was_made_again_meanwhile_gets_nothing_of_a_merge(
    manager: LedgerManager, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_again() -> None:
        Log.delete(manager, "log", password=PASSWORD)
        with opened(manager) as again:
            fill(again, 2)

    after_copies(monkeypatch, made_again)
    with pytest.raises(NoSuchLogError):
        log.merge_segments()
    with opened(manager) as again:
        assert data_of(again) == [b"%d" % number for number in range(2 * EACH)]
        assert {each.ledger_id for each in manager.ledgers()} == {each.ledger_id for each in again.segments()}


def test_a_log_that_was_cut_meanwhile_has_no_void_records(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_of(log)
    after_copies(monkeypatch, lambda: cut_log(log, EACH + 1).close())
    assert log.merge_segments().ledgers == 0
    assert data_of(log) == data[: EACH + 2]


def test_a_log_that_was_sealed_meanwhile_keeps_its_segments(
    manager: LedgerManager, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_of(log)
    after_copies(monkeypatch, log.seal)
    with pytest.raises(LogSealedError, match="its segments are not merged"):
        log.merge_segments()
    (left,) = Log.sweep(manager, password=PASSWORD)
    assert not exists(manager, left)
    assert data_of(log) == data
    assert len(log.segments()) == COMMITS


def test_what_is_appended_and_adopted_meanwhile_is_there(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    after_copies(monkeypatch, lambda: fill(log, 6, first=COMMITS))
    assert log.merge_segments().ledgers == 1
    assert data_of(log) == [b"%d" % number for number in range(RECORDS + 6 * EACH)]
    assert len(log.segments()) == 7


def test_two_merges_of_a_log_exclude_each_other(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        with pytest.raises(LogLockedError, match="segments of log 'log' are being merged"):
            log.merge_segments()

    after_copies(monkeypatch, refused)
    assert log.merge_segments().ledgers == 1


def test_a_merge_that_lost_its_lock_changes_nothing_after_another(
    manager: LedgerManager, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_of(log)

    def other() -> None:
        backend_of(manager).break_lock("merge.log")
        assert log.merge_segments(segment_records=4 * EACH).ledgers == 3

    after_copies(monkeypatch, other)
    with pytest.raises(LogFencedError, match="another run of merges of log 'log' has begun"):
        log.merge_segments()
    assert data_of(log) == data
    assert len(log.segments()) == 3
    (left,) = Log.sweep(manager, password=PASSWORD)
    assert not exists(manager, left)
    assert data_of(log) == data


def test_what_a_merge_that_died_has_written_is_swept_after_a_later_one(
    manager: LedgerManager, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_of(log)
    with monkeypatch.context() as patch:
        patch.setattr(ledger_list, "merge", None)
        with pytest.raises(TypeError):
            log.merge_segments()
    left = max(each.ledger_id for each in manager.ledgers())
    assert Log.sweep(manager, password=PASSWORD) == [], "that merge may be listed yet"
    log.merge_segments(segment_records=4 * EACH)
    assert Log.sweep(manager, password=PASSWORD) == [left]
    assert data_of(log) == data


def test_a_copy_that_fails_leaves_nothing(manager: LedgerManager, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [each.ledger_id for each in manager.ledgers()]
    monkeypatch.setattr(detached_writer, "encode_parts", None)
    with pytest.raises(TypeError):
        log.merge_segments()
    assert [each.ledger_id for each in manager.ledgers()] == before
    assert len(data_of(log)) == RECORDS


# ---- refusals, bytes, and other uses of the list ---------------------------------------------------------------------


def test_a_sealed_log_is_not_merged(log: Log) -> None:
    log.seal()
    with pytest.raises(LogSealedError, match="its segments are not merged"):
        log.merge_segments()


def test_below_the_level_of_pages_nothing_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_level(tmp_path / "old", FeatureLevel.SEALS, monkeypatch)
    with LedgerManager.open(tmp_path / "old") as manager, opened(manager) as log:
        with log.writer() as writer:
            for number in range(5):
                writer.append(b"%d" % number)
                writer.roll()
        with log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
            subscription.ack_through(1)
        with pytest.raises(IllegalOperationError, match="pybk store upgrade DIRECTORY --finalize"):
            log.merge_segments()
        assert len(data_of(log)) == 5
    assert main(["store", "upgrade", str(tmp_path / "old"), "--finalize"]) == 0
    with LedgerManager.open(tmp_path / "old") as manager, opened(manager) as log:
        assert record_of(manager).format == LIST_FORMAT
        assert log.merge_segments().replaced == 5
        assert record_of(manager).format == PAGED_FORMAT
        assert len(data_of(log)) == 5
        with log.subscribe("sub") as subscription:
            assert [each.seq for each in taken(subscription.read)] == [2, 3, 4]


def test_a_record_with_replaced_segments_has_the_bytes_that_are_documented() -> None:
    row = Segment(3, 30, 1, 0, 0, 9, 100, 1, 2)
    record = ListRecord(
        "log",
        ListKind.LOG,
        bytes(16),
        0,
        0,
        10,
        epoch=1,
        next_segment=4,
        segments=(row,),
        format=PAGED_FORMAT,
        producers={MERGES: Producer(3, 9, 5)},
        replaced=(Replaced("p.4-00aa", 77),),
    )
    assert b'"format":3' in record.encode()
    assert b'"replaced":[["p.4-00aa",77]]' in record.encode()
    assert b'"producers":{".merges":[3,9,5]}' in record.encode()
    assert ListRecord.decode(record.encode(), where="the record") == record
    assert (record.pages_over(76), record.pages_over(77)) == ((), ("p.4-00aa",))
    released = record.without_page("p.4-00aa", [])
    assert b'"format":2' in released.encode(), "which versions without merges read"
    assert b"replaced" not in released.encode()
    assert released.without_page("p.4-00aa", []) is released
    newer = record.encode().replace(b'"format":3', b'"format":4')
    with pytest.raises(UnsupportedFormatError, match="format 4; this pybk reads formats 1 to 3"):
        ListRecord.decode(newer, where="the record")


def test_a_query_that_commits_does_not_make_the_log_forget_its_merges() -> None:
    record, day = new_list("log", ListKind.LOG, bytes(16), 0).in_pages(""), 86_400 * 10**9
    record = record.merging(day).merging(day)
    assert record.adopted({}, [], "query", 1, 100 * day).last_epoch(MERGES) == 2


def test_a_log_with_merged_segments_is_not_made_again(manager: LedgerManager, log: Log) -> None:
    log.merge_segments()
    (merged,) = [each.ledger_id for each in log.segments()]
    log.close()
    lose_record(manager)
    with pytest.raises(CorruptError, match=re.escape(f"{merged} (merged segments)")):
        Log.rebuild(manager, "log", password=PASSWORD)


def test_a_renamed_log_has_its_merged_segments(manager: LedgerManager, log: Log) -> None:
    log.merge_segments(segment_records=4 * EACH)
    log.close()
    with Namespace.open(manager, password=PASSWORD) as logs:
        logs.rename("log", "other")
    with opened(manager, "other") as other:
        assert len(data_of(other)) == RECORDS
        assert other.merge_segments(keep_s=0).ledgers == 1
        other.merge_segments()
        assert len(data_of(other)) == RECORDS


def test_a_backup_of_a_store_has_merged_and_replaced_segments(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "store") as manager, opened(manager) as log:
        fill(log)
        log.merge_segments()
        back_up(manager, tmp_path / "backup", passwords=Passwords(PASSWORD))
    restore_backup(tmp_path / "backup", tmp_path / "restored", passwords=Passwords(PASSWORD))
    with LedgerManager.open(tmp_path / "restored") as manager, opened(manager) as log:
        assert len(data_of(log)) == RECORDS
        fill(log, 3, first=COMMITS)
        log.merge_segments(keep_s=0)
        log.merge_segments(keep_s=0)
        assert data_of(log) == [b"%d" % number for number in range(RECORDS + 3 * EACH)]
