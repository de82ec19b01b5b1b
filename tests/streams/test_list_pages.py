"""Logs whose segments are in pages, and bounds of subscriptions in records of their own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pybk import LedgerManager, Log, LogEnd, WriteAheadLog
from pybk.admin.cli import main
from pybk.errors import CorruptError, LogFencedError, TruncateGuardError
from pybk.feature_level import FeatureLevel
from pybk.manager.ledger_manager import backend_of
from pybk.operations.metadata_repair import export_metadata, restore_metadata
from pybk.storage import directories
from pybk.streams import ledger_list, ledger_steps
from pybk.streams.format import Highest
from pybk.streams.ledger_list import (
    UNKNOWN,
    CreateLedger,
    DeleteLedger,
    Found,
    ReadList,
    ReadPage,
    WriteList,
)
from pybk.streams.ledger_steps import LedgerSteps, ListParts
from pybk.streams.list_record import (
    LIST_FORMAT,
    PAGED_FORMAT,
    CursorBound,
    ListKind,
    ListRecord,
    Producer,
    Segment,
    SegmentEnd,
    claimed,
    decode_bounds,
    decode_page,
    encode_bounds,
    encode_page,
    needing,
    new_list,
    shard_of,
    unsubscribed,
)
from pybk.streams.log_settings import spec_of
from pybk.streams.retention import Retention
from tests.cluster.inside import SECRET, inside
from tests.paths import ROOT
from tests.waiting import wait_until

PASSWORD = b"pages"
PAGE = 3
SEGMENTS = 20


@pytest.fixture(autouse=True)
def _short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_steps, "PAGE_SEGMENTS", PAGE)


def opened(manager: LedgerManager) -> Log:
    return Log.open(manager, "log", password=PASSWORD)


def fill(log: Log, segments: int = SEGMENTS) -> None:
    """Append a record to each of some segments, numbered from 0 up."""
    with log.writer() as writer:
        for number in range(segments):
            writer.append(b"%d" % number, time_ns=number * 10)
            writer.roll()


@pytest.fixture
def log(manager: LedgerManager) -> Iterator[Log]:
    with opened(manager) as log:
        fill(log)
        yield log


def record_of(manager: LedgerManager, name: str = "logs/log") -> ListRecord:
    found = backend_of(manager).read_record(name)
    assert found is not None
    return ListRecord.decode(found.value, where="the record")


def parts_of(manager: LedgerManager, kind: str = "logs") -> list[str]:
    """Return the names of all pages and bounds of the lists of a kind."""
    backend = backend_of(manager)
    return [name for first in range(256) for name in backend.record_names(f"{kind}_{first:02x}/")]


def numbers_of(log: Log) -> list[int]:
    with log.reader() as reader:
        return [int(each.data) for each in iter(lambda: reader.read(timeout=0), None)]


def test_segments_leave_the_record_and_are_read_as_before(manager: LedgerManager, log: Log) -> None:
    record = record_of(manager)
    assert record.format == PAGED_FORMAT
    assert len(record.pages) == (SEGMENTS - 1) // PAGE
    assert len(record.segments) <= PAGE
    assert numbers_of(log) == list(range(SEGMENTS))
    assert [each.number for each in log.segments()] == list(range(1, SEGMENTS + 1))
    for number in range(SEGMENTS):
        found = log.position_for(number)
        assert found is not None
        read = log.read(number)
        assert read is not None
        assert read.data == b"%d" % number
    with opened(manager) as again:
        assert numbers_of(again) == list(range(SEGMENTS))


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("first", [1, PAGE, PAGE + 1, 2 * PAGE - 1, SEGMENTS - 1, SEGMENTS])
def test_truncation_deletes_the_ledgers_before_it_and_their_pages(manager: LedgerManager, log: Log, first: int) -> None:
    ledgers = [each.ledger_id for each in log.segments()]
    with log.writer():
        log.truncate(1)
        log.truncate(first)
    assert numbers_of(log) == list(range(first, SEGMENTS))
    record = record_of(manager)
    assert not record.gone_pages
    assert not record.pending_deletes
    assert len([name for name in parts_of(manager) if ".p." in name]) == len(record.pages)
    assert record.segment_count == len(log.segments()) == SEGMENTS - first
    assert record.nbytes == sum(each.nbytes for each in log.segments())
    left = set(manager.list_ledgers())
    assert not left & set(ledgers[:first])
    assert left >= set(ledgers[first:])


def test_a_deleted_log_leaves_nothing(manager: LedgerManager, log: Log) -> None:
    with log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
        record = subscription.read(0)
        assert record is not None
        subscription.ack(record)
    assert any(".b." in name for name in parts_of(manager))
    log.close()
    Log.delete(manager, "log", password=PASSWORD)
    assert not parts_of(manager)
    assert not parts_of(manager, "cursors")
    assert not list(manager.list_ledgers())


def test_a_log_is_cut_inside_a_page(manager: LedgerManager) -> None:
    with WriteAheadLog.open(manager, "wal", password=PASSWORD) as wal:
        for number in range(SEGMENTS):
            wal.append(b"%d" % number)
            wal.roll()
        ledgers = wal.ledgers()
        end = wal.first_lsn() + PAGE
        wal.truncate_after(end)
        assert wal.append(b"more") == end + 1
        assert wal.ledgers()[: PAGE + 1] == ledgers[: PAGE + 1]
        assert not set(manager.list_ledgers()) & set(ledgers[PAGE + 1 :])
        assert len(record_of(manager, "wals/wal").pages) == len(parts_of(manager, "wals"))
        assert [each.data for each in wal.read_many(range(wal.first_lsn(), wal.last_lsn() + 1))] == [
            *(b"%d" % number for number in range(PAGE + 1)),
            b"more",
        ]


def test_retention_reads_pages(manager: LedgerManager, log: Log) -> None:
    nbytes = log.segments()[-1].nbytes
    with log.writer() as writer:
        log.set_retention(Retention(max_bytes=5 * nbytes))
        wait_until(lambda: log.first_seq() >= SEGMENTS - 6)
        writer.append(b"%d" % SEGMENTS)
    assert numbers_of(log) == list(range(log.first_seq(), SEGMENTS + 1))


def test_a_raised_bound_lets_the_writer_drop_what_is_acknowledged(manager: LedgerManager, log: Log) -> None:
    with log.writer(), log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
        log.set_retention(Retention())
        subscription.ack_through(SEGMENTS - 1)
        subscription.close()  # raises the bound, and changes nothing of the log's record
        wait_until(lambda: log.first_seq() == SEGMENTS)


def test_a_search_by_time_finds_records_of_pages(log: Log) -> None:
    for number in (0, 1, PAGE, 7, SEGMENTS - 1):
        position = log.position_for(datetime.fromtimestamp(number * 10 / 1e9, UTC))
        assert position is not None


def test_a_subscription_changes_nothing_of_the_record_when_its_bound_rises(manager: LedgerManager, log: Log) -> None:
    with log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
        before = backend_of(manager).read_record("logs/log")
        subscription.ack_through(4)
        subscription.close()
        assert backend_of(manager).read_record("logs/log") == before
    assert not record_of(manager).cursors
    with log.writer(), pytest.raises(TruncateGuardError, match="'sub' may need those from 5 on"):
        log.truncate(6)
    assert log.subscriptions() == ["sub"]
    assert log.delete_subscription("sub")
    assert log.subscriptions() == []
    with log.writer():
        log.truncate(6)
    assert numbers_of(log) == list(range(6, SEGMENTS))


def test_what_a_process_that_died_had_written_is_swept(manager: LedgerManager, log: Log) -> None:
    record = record_of(manager)
    parts = ListParts(backend_of(manager), ListKind.LOG, record.uid)
    named = parts_of(manager)
    parts.write_page(record.next_segment - 1, record.segments[:1])
    parts.write_bounds(record.next_segment - 1, ())
    later = parts.write_page(record.next_segment, record.segments[:1])
    Log.sweep(manager, password=PASSWORD)
    (left,) = set(parts_of(manager)) - set(named)
    assert left.endswith(later)
    assert numbers_of(log) == list(range(SEGMENTS))


def lose_page(manager: LedgerManager) -> None:
    backend = backend_of(manager)
    name = next(name for name in parts_of(manager) if ".p." in name)
    found = backend.read_record(name)
    assert found is not None
    backend.write_record(name, None, found.version)


def test_a_page_that_is_missing_is_damage_and_made_again(manager: LedgerManager, log: Log) -> None:
    log.close()
    lose_page(manager)
    with opened(manager) as damaged, pytest.raises(CorruptError, match=r"page p\..* is missing; restore it, or make"):
        damaged.segments()
    found = Log.rebuild(manager, "log", password=PASSWORD)
    assert (found.first_seq, found.last_seq) == (0, SEGMENTS - 1)
    with opened(manager) as again:
        assert numbers_of(again) == list(range(SEGMENTS))
        fill(again, 1)
        assert numbers_of(again)[-1] == 0


def test_a_reader_does_not_notice_that_a_page_was_removed_meanwhile(
    manager: LedgerManager, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is looked for by a record that was read before it was truncated."""
    with opened(manager) as other, other.writer():
        real = ListParts.page

        def late(parts: ListParts, name: str) -> object:
            monkeypatch.setattr(ListParts, "page", real)
            thread = threading.Thread(target=other.truncate, args=(2 * PAGE,))
            thread.start()
            thread.join()
            return real(parts, name)

        monkeypatch.setattr(ListParts, "page", late)
        assert [each.first_seq for each in log.segments()] == list(range(2 * PAGE, SEGMENTS + 1))


def test_an_export_of_a_clusters_metadata_has_pages_and_bounds(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster:
        with cluster.connect() as manager, Log.open(manager, "log", password=PASSWORD, quorums=(1, 1, 1)) as log:
            fill(log)
            with log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
                subscription.ack_through(4)
            parts, record = parts_of(manager), record_of(manager)
        for bookie in cluster.bookies:
            bookie.close()
        export_metadata(cluster.url, tmp_path / "export", cluster_secret=SECRET)
        url = f"lmdb://{tmp_path}/other"
        restore_metadata(url, tmp_path / "export", cluster_secret=SECRET, new_epoch=False, write=True)
        with LedgerManager.connect(url, cluster_secret=SECRET) as manager, opened(manager) as log:
            assert parts_of(manager) == parts
            assert record_of(manager) == record
            assert [each.number for each in log.segments()] == list(range(1, SEGMENTS + 1))
            assert log.subscriptions() == ["sub"]


def test_names_of_pages_sort_after_the_lists_so_that_an_export_has_a_list_before_its_pages() -> None:
    for kind in ListKind:
        assert kind.group < f"{kind.group}_00"
        others = [each.group for each in ListKind if each > kind]
        assert all(f"{kind.group}_ff" < each for each in others)


GOLDEN = json.loads((ROOT / "tests" / "golden" / "ledger-lists.json").read_text())


def golden_record(number: int) -> ListRecord:
    rows = tuple(Segment(n, 100 + n, 1, 0, 10 * n, 10 * n + 9, 1000 + n, 10**18 + n, 2 * 10**18 + n) for n in (1, 2, 3))
    record = ListRecord(
        "log",
        ListKind.LOG,
        bytes(range(16)),
        10,
        12,
        40,
        epoch=2,
        generation=1,
        next_segment=5,
        cuts=((1, 9),),
        properties={"name": "value"},
        segments=(*rows, Segment(4, 104, 2, 1, 40, created_ns=3 * 10**18)),
        pending_deletes=(99,),
        cursors=(CursorBound("sub", 15, "ab" * 16, 3),),
    )
    return record if number == LIST_FORMAT else record.in_pages("b.4-0011223344556677").with_page("p.4-00aa", rows[:2])


@pytest.mark.parametrize("number", [LIST_FORMAT, PAGED_FORMAT])
def test_the_bytes_of_records_are_those_that_were_released(number: int) -> None:
    text = GOLDEN[f"record {number}"]
    assert golden_record(number).encode().decode() == text
    assert ListRecord.decode(text.encode(), where="the record") == golden_record(number)


def test_the_bytes_of_pages_and_bounds_are_those_that_were_released() -> None:
    record = golden_record(LIST_FORMAT)
    assert encode_page(record.segments[:2]).decode() == GOLDEN["page"]
    assert decode_page(GOLDEN["page"].encode(), where="the page") == record.segments[:2]
    assert encode_bounds(record.cursors).decode() == GOLDEN["bounds"]
    assert decode_bounds(GOLDEN["bounds"].encode(), where="the bounds") == record.cursors
    assert [shard_of(name) for name in ("sub", "reader 1", "")] == GOLDEN["shards"]


def at_level(path: Path, level: FeatureLevel, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(directories, "NEWEST_STORE_LEVEL", level)
        LedgerManager.open(path).close()


def test_below_the_level_a_record_has_all_and_at_the_level_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_level(tmp_path / "old", FeatureLevel.SEALS, monkeypatch)
    with LedgerManager.open(tmp_path / "old") as manager, opened(manager) as log:
        fill(log)
        with log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
            subscription.ack_through(4)
        record = record_of(manager)
        assert (record.format, len(record.segments), record.cursors[0].seq) == (LIST_FORMAT, SEGMENTS, 5)
        assert not parts_of(manager)
    assert main(["upgrade", str(tmp_path / "old"), "--finalize"]) == 0
    with LedgerManager.open(tmp_path / "old") as manager, opened(manager) as log:
        assert record_of(manager).format == LIST_FORMAT
        assert numbers_of(log) == list(range(SEGMENTS))
        with log.writer(), pytest.raises(TruncateGuardError, match="from 5 on"):
            log.truncate(6)
        record = record_of(manager)
        assert (record.format, len(record.pages), record.cursors) == (PAGED_FORMAT, (SEGMENTS - 1) // PAGE, ())
        assert numbers_of(log) == list(range(SEGMENTS))
        with log.subscribe("sub") as subscription:
            found = subscription.read(0)
            assert found is not None
            assert found.seq == 5


def test_a_converter_that_was_overtaken_leaves_its_bounds_unnamed(manager: LedgerManager) -> None:
    steps = LedgerSteps(manager, "log", spec_of(ListKind.LOG, None, None, insecure=True))
    parts = ListParts(backend_of(manager), ListKind.LOG, bytes(16))
    first, second = parts.write_bounds(1, ()), parts.write_bounds(1, ())
    assert first != second
    assert steps.read() is None


def test_a_ledger_that_a_page_lists_is_not_deleted_after_a_lost_answer() -> None:
    """Its listing takes effect, and others add so many segments that a page has it, before the outcome is read."""
    record = new_list("log", ListKind.LOG, bytes(16), 0).taken_over({}, 7, 0)
    steps = ledger_list.roll("log", 1, 1, lambda: 0)
    assert next(steps) == ReadList()
    assert isinstance(steps.send(Found(record, 1)), CreateLedger)
    write = steps.send(8)
    assert isinstance(write, WriteList)
    assert steps.send(UNKNOWN) == ReadList()
    rows = (Segment(1, 7, 1, 0, 0, 9), Segment(2, 8, 1, 0, 10, 19))
    later = write.record.closed({1: SegmentEnd(0, 9, 10), 2: SegmentEnd(10, 19, 10)}, 0)
    later = later.taken_over({}, 9, 0).closed({3: SegmentEnd(20, 29, 10)}, 0).in_pages("b.3-0").with_page("p.3-0", rows)
    assert steps.send(Found(later, 9)) == ReadPage("p.3-0")
    try:
        step: object = steps.send(rows)
    except Exception:  # noqa: BLE001  # it is fenced, which is right
        return
    assert not isinstance(step, DeleteLedger)


def test_an_owner_of_a_deleted_subscription_changes_nothing_of_one_that_was_made_again() -> None:
    again = (CursorBound("sub", 3, "bb" * 16, 2),)
    late = CursorBound("sub", 9, "aa" * 16, 2)
    with pytest.raises(LogFencedError, match="was deleted"):
        needing(again, "log", late)
    with pytest.raises(LogFencedError, match="was deleted"):
        claimed(again, "log", "sub", "aa" * 16, 3)
    assert unsubscribed(again, "sub", "aa" * 16) == again
    assert needing(again, "log", again[0]._replace(seq=9)) == (again[0]._replace(seq=9),)


def test_records_and_pages_with_adopted_ledgers_have_the_bytes_that_are_documented() -> None:
    adopted = Segment(3, 30, 1, 0, 5, 9, 100, 1, 2, before=Highest(7, 8))
    rows = (Segment(1, 10, 1, 0, 0, 4, 100, 1, 2), adopted)
    assert decode_page(encode_page(rows), where="a page") == rows
    segments = b'"segments":[[1,10,1,0,0,4,100,1,2],[3,30,1,0,5,9,100,1,2,[7,8]]]'
    assert segments in encode_page(rows)
    record = ListRecord(
        "log",
        ListKind.LOG,
        bytes(16),
        0,
        0,
        10,
        epoch=1,
        next_segment=4,
        segments=rows,
        format=PAGED_FORMAT,
        producers={"query": Producer(3, 4, 5)},
    )
    assert segments in record.encode()
    assert b'"producers":{"query":[3,4,5]}' in record.encode()
    assert ListRecord.decode(record.encode(), where="the record") == record
