"""What is deleted of sinks in a real cluster: expired ledgers with their names, and what batch writes have left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from pybk.credentials import NO_CREDENTIALS
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    MetadataForgedError,
    MetadataUnreachableError,
    MetadataVersionError,
    PybkError,
    UsageError,
)
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.ledgers import LEDGERS_KEY, ledger_path
from pybk.spark.connection import Connection, close_connections
from pybk.spark.consumers import CONSUMERS, QueryConsumer, Selection, remove_consumer
from pybk.spark.finished_ledgers import FinishedLedgers
from pybk.spark.jobs.retain import retain
from pybk.spark.sink import manifest, sink_record, upkeep
from pybk.spark.sink.manifest import SINKS, FollowedSink, Sink, WrittenLedger, sink_ledgers
from pybk.spark.sink.sink_record import NAMED_MAX, ManifestRow, SinkRecord, is_one_off, one_off_app_id
from pybk.spark.sink.sink_retention import SinkRetention
from pybk.spark.sink.upkeep import collect_orphans, look_after_one_offs, retain_ledgers, retain_sometimes
from tests.cluster.inside import SECRET, Inside, inside
from tests.cluster.test_seals import rewrite
from tests.internals import metadata_store_of
from tests.spark.sink.test_manifest import commit, left, look, metadata_of, sink_of, write
from tests.spark.sink.test_manifest import place as place  # a fixture
from tests.waiting import wait_until

DAY_NS = 86_400 * 10**9


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("upkeep"), count=1) as cluster:
        yield cluster
        close_connections()


@pytest.fixture(autouse=True)
def no_consumers(place: Connection) -> Iterator[None]:
    yield
    metadata = metadata_of(place)
    for name, pointer in metadata.list_pointers(CONSUMERS):
        metadata.delete_pointer(CONSUMERS, name, pointer.version)


def filled(place: Connection, app: str, count: int, kind: str = "") -> tuple[Sink, list[WrittenLedger]]:
    """Commit ledgers one by one."""
    sink, written = sink_of(place, app), []
    for number in range(count):
        written.append(write(place, app, kind=kind))
        assert commit(sink, number, written[-1], query="", run="")
    return sink, written


def consume(place: Connection, name: str, *written: WrittenLedger, kind: str = "") -> None:
    """Record that a consumer of a type has finished ledgers."""
    done = tuple(sorted((each.ledger_id, each.ledger_id) for each in written))
    QueryConsumer(metadata_of(place), name, Selection(kind, None)).begin(FinishedLedgers(done=done))


def expire(place: Connection, *sinks: Sink, kind: str | None = None, **limits: Any) -> dict[str, list[int]]:
    return retain_ledgers(metadata_of(place), sinks, SinkRetention(**limits), ledger_type=kind)


def check_names(place: Connection, sink: Sink, *written: WrittenLedger) -> None:
    """Check that a sink has some ledgers and names these alone, by the manifests that are there."""
    ids = [each.ledger_id for each in written]
    assert sink.committed() == ids
    assert left(place, sink.app_id) == {*ids}
    assert left(place, sink.app_id, manifests=True) == {ledger_id for ledger_id, _ in sink.record().chain}
    manifest.MANIFESTS_READ.clear()
    assert sink.committed() == ids


def stored(place: Connection, app: str) -> tuple[SinkRecord, int]:
    """Return the record of a sink, and its version."""
    found = metadata_of(place).read_pointer(SINKS, app)
    assert found is not None
    return SinkRecord.decode(found.value, where=app), found.version


# ---- retention -----------------------------------------------------------------------------------------------------


def test_nothing_is_deleted_unless_that_is_asked_for(place: Connection) -> None:
    sink, written = filled(place, "kept", 3)
    consume(place, "all", *written)
    retain_sometimes(sink, SinkRetention())
    assert expire(place, sink) == expire(place, sink, max_age_s=3600.0) == {}
    assert sink.record().retained_ns == 0
    check_names(place, sink, *written)


def test_ledgers_go_by_age_and_their_names_with_them(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_record, "FOLD", 3)
    sink, written = filled(place, "aged", 7)
    followed = FollowedSink(place, "aged")
    assert len(look(place, followed)) == 7
    now_ns = (written[3].created_ns + written[4].created_ns) // 2 + 10 * 10**9
    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "time", SimpleNamespace(time_ns=lambda: now_ns))
        assert expire(place, sink, max_age_s=10.0) == {"aged": [each.ledger_id for each in written[:4]]}
    check_names(place, sink, *written[4:])
    assert len(sink.record().chain) == 2, "the newest manifest named none of them"
    assert look(place, followed) == []
    written.append(write(place, "aged"))
    assert commit(sink, 7, written[-1], query="", run="")
    assert look(place, followed) == [written[-1].ledger_id]
    assert expire(place, sink, max_age_s=0) == {"aged": [each.ledger_id for each in written[4:]]}
    check_names(place, sink)
    assert (sink.record().last, sink.record().chain) == (7, ())
    assert expire(place, sink, max_age_s=0) == {}


def test_ledgers_go_by_size_the_oldest_first(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LEDGERS_PAGE", 2)
    sink, written = filled(place, "sized", 5)
    size = written[0].payload_bytes
    place.manager.delete_ledger(written[3].ledger_id)  # which does not count any more
    assert expire(place, sink, max_age_s=3600.0, max_bytes=3 * size) == {"sized": [written[0].ledger_id]}
    check_names(place, sink, written[1], written[2], written[4])
    assert expire(place, sink, max_bytes=2 * size) == {"sized": [written[1].ledger_id]}
    check_names(place, sink, written[2], written[4])


def test_a_slow_clock_does_not_end_a_ledger_early(place: Connection) -> None:
    sink, [first] = filled(place, "slow", 1)
    slow, last = write(place, "slow"), write(place, "slow")
    slow = slow._replace(created_ns=slow.created_ns - DAY_NS // 2)  # one that is slower is refused
    rewrite(place.manager, slow.ledger_id, creation_time_ns=slow.created_ns)
    assert commit(sink, 1, slow, last, query="", run="")
    assert expire(place, sink, max_age_s=3600.0) == {}
    assert expire(place, sink, max_bytes=2 * first.payload_bytes) == {"slow": [first.ledger_id]}
    check_names(place, sink, slow, last)


def test_what_a_consumer_has_not_read_is_kept(place: Connection, caplog: pytest.LogCaptureFixture) -> None:
    sink, written = filled(place, "read", 4, kind="r")
    consume(place, "slow", written[0], written[2], kind="r")
    consume(place, "fast", *written, kind="r")
    consume(place, "of-another-type", kind="another")
    assert expire(place, sink, keep_read=False) == {"read": [written[0].ledger_id, written[2].ledger_id]}
    check_names(place, sink, written[1], written[3])
    assert expire(place, sink, max_age_s=0, max_bytes=0, keep_read=False) == {}
    check_names(place, sink, written[1], written[3])
    consume(place, "slow", *written[:3], kind="r")
    assert expire(place, sink, max_age_s=0) == {"read": [written[1].ledger_id]}
    assert "slow" not in caplog.text
    assert expire(place, sink, max_age_s=0, keep_unread=False) == {"read": [written[3].ledger_id]}
    assert f"1 ledgers expired unread by consumer 'slow': {written[3].ledger_id}" in caplog.text
    check_names(place, sink)


def test_without_a_consumer_what_was_read_is_kept(place: Connection) -> None:
    sink, written = filled(place, "nobody", 2, kind="n")
    assert expire(place, sink, keep_read=False) == {}
    consume(place, "of-another-type", kind="another")
    assert expire(place, sink, keep_read=False) == {}
    check_names(place, sink, *written)


def test_the_type_in_the_metadata_says_who_reads_a_ledger(place: Connection) -> None:
    """And not the one that the sink writes now."""
    sink, [before] = filled(place, "retyped", 1, kind="before")
    after = write(place, "retyped", kind="after")
    assert commit(sink, 1, after, query="", run="")
    consume(place, "reader", kind="before")
    assert expire(place, sink, max_age_s=0) == {"retyped": [after.ledger_id]}
    check_names(place, sink, before)


def test_a_consumer_that_cannot_be_read_keeps_everything(place: Connection) -> None:
    sink, written = filled(place, "damaged", 2)
    metadata_of(place).write_pointer(CONSUMERS, "damaged", b"{}", None)
    with pytest.raises(CorruptError, match="consumer 'damaged'"):
        expire(place, sink, max_age_s=0, keep_unread=False)
    check_names(place, sink, *written)


def test_a_sink_that_cannot_be_read_keeps_no_other(
    place: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, unread = filled(place, "broken", 1)
    record, version = stored(place, "broken")
    version = metadata_of(place).write_pointer(SINKS, "broken", b"{}", version)

    def forged(*_: Any) -> Any:
        raise MetadataForgedError("one of them was forged")

    for app in ("sound", "sound, after a forged one"):
        sink, [written] = filled(place, app, 1)
        assert expire(place, broken, sink, max_age_s=0) == {app: [written.ledger_id]}
        assert "sink 'broken': its ledgers stay: the record of sink 'broken'" in caplog.text
        caplog.clear()
        monkeypatch.setattr(upkeep, "read_sinks", forged)
    assert broken.swap(record, version)
    check_names(place, broken, *unread)


def test_what_is_not_committed_is_kept(place: Connection) -> None:
    sink, [good] = filled(place, "uncommitted", 1)
    orphan = write(place, "uncommitted")
    assert expire(place, sink, max_age_s=0) == {"uncommitted": [good.ledger_id]}
    assert left(place, "uncommitted") == {orphan.ledger_id}
    assert commit(sink, 1, orphan, query="", run="")
    check_names(place, sink, orphan)


def test_manifests_without_creation_times_are_taken_by_metadata(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of = sink_record.encode_rows

    def old(number: int, rows: list[ManifestRow]) -> list[bytes]:
        return rows_of(number, [row._replace(created_ns=0) for row in rows])

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "encode_rows", old)
        sink, written = filled(place, "older", 2)
    assert {row.created_ns for row in sink.rows()} == {0}
    assert expire(place, sink, max_age_s=3600.0) == {}
    assert expire(place, sink, max_age_s=0) == {"older": [each.ledger_id for each in written]}


def test_a_look_at_ages_reads_the_metadata_of_old_ledgers_alone(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, written = filled(place, "looked", 6)
    consume(place, "one", written[2])
    read, asked = ClusterMetadata.read_ledgers, list[int]()

    def noted(metadata: ClusterMetadata, ledger_ids: Any, **more: Any) -> Any:
        asked.extend(ledger_ids)
        return read(metadata, ledger_ids, **more)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the ledgers of the cluster are listed")

    monkeypatch.setattr(ClusterMetadata, "read_ledgers", noted)
    for name in ("list_ledgers", "ledger_pages"):
        monkeypatch.setattr(ClusterMetadata, name, never)
    assert expire(place, sink, max_age_s=3600.0) == {}
    assert asked == []
    assert expire(place, sink, max_age_s=3600.0, keep_read=False) == {"looked": [written[2].ledger_id]}
    assert {*asked}.intersection(each.ledger_id for each in written) == {written[2].ledger_id}


class Stop:
    """Fails all changes of the metadata store from the one with a number on, as for a process that loses it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self._left = number
        for owner, name in ((LedgerManager, "delete_ledger"), (LedgerManager, "create_system_ledger")):
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name)))
        monkeypatch.setattr(ClusterMetadata, "write_pointer", self._failing(ClusterMetadata.write_pointer))

    @property
    def has_failed(self) -> bool:
        """Whether a change was asked for and not made."""
        return self._left < 0

    def _failing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self.has_failed:
                raise MetadataUnreachableError("stopped")
            return original(*arguments, **options)

        return act


def test_a_retention_that_is_stopped_anywhere_is_made_up_for(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next one; meanwhile no ledger that exists lacks its name."""
    monkeypatch.setattr(sink_record, "FOLD", 3)
    for number in count():
        app = f"stopped-{number}"
        sink, written = filled(place, app, 5)
        kept, size = {each.ledger_id for each in written[3:]}, written[0].payload_bytes
        with monkeypatch.context() as patch:
            stop = Stop(patch, number)
            with suppress(PybkError):
                expire(place, sink, max_bytes=2 * size)
        manifest.MANIFESTS_READ.clear()
        assert kept <= left(place, app) <= {*sink.committed()}
        expire(place, sink, max_bytes=2 * size)
        sink.collect(sink_ledgers(metadata_of(place), app), time.time_ns())
        assert left(place, app) == kept == {*sink.committed()}
        assert left(place, app, manifests=True) == {ledger_id for ledger_id, _ in sink.record().chain}
        if not stop.has_failed:
            break
    assert number > 4


def test_a_commit_meanwhile_is_not_lost(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, written = filled(place, "raced", 3)
    late, change = write(place, "raced"), ClusterMetadata.write_pointer
    committed: list[bool] = []

    def commit_first(self: ClusterMetadata, *arguments: Any) -> int:
        if not committed:
            committed.append(True)
            assert commit(sink_of(place, "raced"), 3, late, query="", run="")
        return change(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ClusterMetadata, "write_pointer", commit_first)
        assert expire(place, sink, max_bytes=written[0].payload_bytes) == {
            "raced": [each.ledger_id for each in written[:2]]
        }
    check_names(place, sink, written[2], late)


def test_commits_and_retentions_at_once_keep_the_newest(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_record, "FOLD", 3)
    sink, written = filled(place, "busy", 4)
    size = written[0].payload_bytes

    def commit_more() -> None:
        for number in range(4, 12):
            written.append(write(place, "busy"))
            assert commit(sink_of(place, "busy"), number, written[-1], query="", run="")

    def retain_often() -> None:
        for _ in range(5):
            expire(place, sink_of(place, "busy"), max_bytes=3 * size)
            known = {each.ledger_id for each in written[:-1]}
            # The other one may have dropped the name of a ledger, and not deleted the ledger yet.
            wait_until(lambda: known & left(place, "busy") <= {*sink_of(place, "busy").committed()})  # noqa: B023

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(commit_more), pool.submit(retain_often), pool.submit(retain_often)]:
            done.result()
    expire(place, sink, max_bytes=3 * size)
    check_names(place, sink, *written[-3:])


def test_names_that_changed_although_that_was_refused_are_not_damaged(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_record, "FOLD", 3)
    sink, written = filled(place, "refused names", 4)
    change = ClusterMetadata.write_pointer

    def lose(self: ClusterMetadata, *arguments: Any) -> int:
        change(self, *arguments)
        raise MetadataVersionError("another version", outcome_unknown=True)

    with monkeypatch.context() as patch:
        patch.setattr(ClusterMetadata, "write_pointer", lose)
        expire(place, sink, max_bytes=2 * written[0].payload_bytes)
    check_names(place, sink, *written[2:])


def test_a_sink_applies_its_retention_now_and_then(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, written = filled(place, "sometimes", 3)
    retention = SinkRetention(max_bytes=written[0].payload_bytes)
    retain_sometimes(sink, retention)
    check_names(place, sink, written[2])
    written.append(write(place, "sometimes"))
    assert commit(sink, 3, written[3], query="", run="")
    retain_sometimes(sink, retention)
    assert len(sink.committed()) == 2, "it was applied a moment ago"
    record, version = stored(place, sink.app_id)
    assert sink.swap(SinkRecord(record.chain, last=record.last, retained_ns=record.retained_ns - 301 * 10**9), version)
    retain_sometimes(sink, retention)
    check_names(place, sink, written[3])


def test_a_retention_that_fails_does_not_fail_the_commit(
    place: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PybkError("no consumers")

    monkeypatch.setattr(upkeep, "read_consumers", fail)
    sink, written = filled(place, "unretained", 1)
    retain_sometimes(sink, SinkRetention(max_age_s=0))
    assert "what expired was not deleted: no consumers" in caplog.text
    check_names(place, sink, *written)


def test_a_commit_deletes_some_and_the_next_one_continues(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "DELETED_AT_ONCE", 2)
    sink, written = filled(place, "much", 12)
    retention = SinkRetention(max_age_s=0)
    retain_sometimes(sink, retention)
    check_names(place, sink, *written[2:])
    retain_sometimes(sink, retention, added=1)
    check_names(place, sink, *written[4:])
    retain_sometimes(sink, retention, added=3)
    check_names(place, sink, *written[10:])
    retain_sometimes(sink, SinkRetention(max_bytes=written[0].payload_bytes))
    check_names(place, sink, written[11])
    retain_sometimes(sink, SinkRetention(max_bytes=0))
    check_names(place, sink, written[11])
    assert expire(place, sink, max_age_s=0) == {"much": [written[11].ledger_id]}


def test_what_cannot_be_deleted_does_not_keep_others(place: Connection, caplog: pytest.LogCaptureFixture) -> None:
    sink, [first] = filled(place, "mixed", 1)
    locked, last = write(place, "mixed", password=b"another"), write(place, "mixed")
    assert commit(sink, 1, locked, last, query="", run="")
    assert expire(place, sink, max_age_s=0) == {"mixed": [first.ledger_id, last.ledger_id]}
    assert f"ledger {locked.ledger_id} stays" in caplog.text
    check_names(place, sink, locked)


def test_a_metadata_store_that_is_gone_is_waited_for_once(
    place: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink, written = filled(place, "unreached", 4)
    tried = list[int]()

    def unreachable(_: LedgerManager, ledger_id: int, **__: Any) -> None:
        tried.append(ledger_id)
        raise MetadataUnreachableError("gone for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(LedgerManager, "delete_ledger", unreachable)
        retain_sometimes(sink, SinkRetention(max_age_s=0))
    assert tried == [written[0].ledger_id]
    assert "what expired was not deleted: gone for a moment" in caplog.text
    check_names(place, sink, *written)


def test_a_ledger_that_is_only_missing_keeps_its_name(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of many ledgers may be late."""
    sink, written = filled(place, "missing", 3)
    read = ClusterMetadata.read_ledgers

    def late(metadata: ClusterMetadata, ledger_ids: Any, **more: Any) -> Any:
        found = read(metadata, ledger_ids, **more)
        return [None if each == written[1].ledger_id else one for each, one in zip(ledger_ids, found, strict=True)]

    with monkeypatch.context() as patch:
        patch.setattr(ClusterMetadata, "read_ledgers", late)
        assert expire(place, sink, max_bytes=written[2].payload_bytes) == {"missing": [written[0].ledger_id]}
        assert sink.committed() == [each.ledger_id for each in written[1:]]
    check_names(place, sink, *written[1:])


def test_a_ledger_whose_metadata_are_lost_keeps_its_name_and_is_reported_with_a_remedy(
    place: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    sink, written = filled(place, "lost", 3)
    lost = written[1].ledger_id
    key, store = f"{LEDGERS_KEY}/{ledger_path(lost)}", metadata_store_of(place.manager)
    found = store.get(key)
    assert found is not None
    store.delete(key, found.version)
    assert expire(place, sink, max_age_s=0) == {"lost": [written[0].ledger_id, written[2].ledger_id]}
    assert sink.committed() == [lost]
    assert f"ledger {lost} has neither metadata nor a tombstone" in caplog.text
    assert "`pybk metadata rebuild`" in caplog.text


def test_a_ledger_of_another_sink_is_kept_although_it_is_named(place: Connection) -> None:
    owner, [owned] = filled(place, "owner", 1)
    thief, [own] = filled(place, "thief", 1)
    assert commit(thief, 1, owned, query="", run="")
    assert expire(place, thief, max_age_s=0) == {"thief": [own.ledger_id]}
    check_names(place, owner, owned)


def test_a_query_that_begins_meanwhile_keeps_what_was_not_deleted_yet(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "LEDGERS_PAGE", 2)
    delete = Sink.delete_committed

    def begin_first(sink: Sink, ledger_ids: Any) -> list[int]:
        consume(place, "late", kind=kind)
        return delete(sink, ledger_ids)

    monkeypatch.setattr(Sink, "delete_committed", begin_first)
    cases: dict[str, dict[str, Any]] = {"aged": {"max_age_s": 0.0}, "sized": {"max_bytes": 0}}
    for kind, limits in cases.items():
        sink, written = filled(place, f"begun {kind}", 5, kind=kind)
        assert expire(place, sink, **limits) == {sink.app_id: [each.ledger_id for each in written[:2]]}
        check_names(place, sink, *written[2:])
        remove_consumer(metadata_of(place), "late")


def test_the_records_of_many_sinks_are_read_in_few_requests(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = []
    for _ in range(12):
        sinks.append(sink_of(place, one_off_app_id()))
        assert commit(sinks[-1], 0, write(place, sinks[-1].app_id), query="", run="")
    read, many, asked, pages = ClusterMetadata.read_pointer, ClusterMetadata.read_ledgers, list[str](), list[int]()

    def read_pointer(metadata: ClusterMetadata, group: str, name: str) -> Any:
        asked.append(name)
        return read(metadata, group, name)

    def read_ledgers(metadata: ClusterMetadata, ledger_ids: Any, **more: Any) -> Any:
        pages.append(len(ledger_ids))
        return many(metadata, ledger_ids, **more)

    monkeypatch.setattr(ClusterMetadata, "read_pointer", read_pointer)
    monkeypatch.setattr(ClusterMetadata, "read_ledgers", read_ledgers)
    size = len(b"ab")
    assert expire(place, *sinks, max_bytes=12 * size) == {}
    assert len(asked) == 1, "consumers are listed"
    assert pages == [12]


# ---- of a type -----------------------------------------------------------------------------------------------------


def test_a_type_of_all_sinks_is_retained(cluster: Inside, place: Connection) -> None:
    """Those of batch writes without an app id included, whose records go as well once they are old."""
    one_off, young = one_off_app_id(), one_off_app_id()
    written = [write(place, one_off, kind="all"), write(place, "named", kind="all"), write(place, young, kind="all")]
    other = write(place, "named", kind="other")
    assert commit(sink_of(place, one_off), 0, written[0], query="", run="")
    assert commit(sink_of(place, "named"), 0, written[1], other, query="", run="")
    assert commit(sink_of(place, young), 0, written[2], query="", run="")
    copied = write(place, "pybk.copy-of/here", kind="all")
    assert commit(sink_of(place, "pybk.copy-of/here"), 0, copied, query="", run="")
    [plain] = [place.manager.create_ledger(ensemble_size=1, insecure=True, ledger_type="all")]
    plain.close()
    record, version = stored(place, one_off)
    old = SinkRecord(last=0, named=(record.named[0]._replace(created_ns=record.named[0].created_ns - 2 * DAY_NS),))
    assert sink_of(place, one_off).swap(old, version)

    expected = {one_off: [written[0].ledger_id], "named": [written[1].ledger_id]}
    limit = written[0].payload_bytes
    assert retain(cluster.url, "all", cluster_secret=SECRET, max_bytes=limit, dry_run=True) == expected
    assert left(place, one_off) == {written[0].ledger_id}
    assert retain(cluster.url, "all", cluster_secret=SECRET, max_bytes=limit) == expected
    check_names(place, sink_of(place, "named"), other)
    check_names(place, sink_of(place, young), written[2])
    assert one_off not in metadata_of(place).pointer_names(SINKS)
    assert retain(cluster.url, "all", cluster_secret=SECRET, max_age_s=0) == {young: [written[2].ledger_id]}
    assert young in metadata_of(place).pointer_names(SINKS), "its record is new"
    assert {copied.ledger_id, plain.ledger_id} <= {*place.manager.list_ledgers("all")}
    with pytest.raises(UsageError, match="nothing says what to delete"):
        retain(cluster.url, "all", cluster_secret=SECRET)
    unsure: Any = None
    with pytest.raises(UsageError, match="dry_run is None; it takes True or False"):
        retain(cluster.url, "all", cluster_secret=SECRET, max_age_s=0, dry_run=unsure)


# ---- batch writes without an app id --------------------------------------------------------------------------------


def test_a_batch_write_without_a_name_has_no_manifest(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    app = one_off_app_id()
    written = [write(place, app) for _ in range(3)]
    followed = FollowedSink(place, app)
    assert look(place, followed) == []
    assert commit(sink_of(place, app), 0, *written, query="", run="")
    assert look(place, followed) == [each.ledger_id for each in written]
    assert look(place, followed) == []
    assert not commit(sink_of(place, app), 0, *written, query="", run="")
    check_names(place, sink_of(place, app), *written)
    assert left(place, app, manifests=True) == set()
    assert expire(place, sink_of(place, app), max_bytes=written[0].payload_bytes) == {
        app: [each.ledger_id for each in written[:2]]
    }
    check_names(place, sink_of(place, app), written[2])

    many = one_off_app_id()
    monkeypatch.setattr(manifest, "NAMED_MAX", 2)
    written = [write(place, many) for _ in range(3)]
    assert commit(sink_of(place, many), 0, *written, query="", run="")
    assert len(left(place, many, manifests=True)) == 1
    expire(place, sink_of(place, many), max_bytes=written[0].payload_bytes)
    check_names(place, sink_of(place, many), written[2])
    assert NAMED_MAX == 500


def test_a_batch_write_that_took_a_day_is_refused_without_a_record_too(place: Connection) -> None:
    """So the record of one that died need not stay for ever."""
    app = one_off_app_id()
    written = write(place, app)
    with pytest.raises(IllegalOperationError, match="counted as orphans"):
        commit(sink_of(place, app), 0, written._replace(created_ns=written.created_ns - DAY_NS), query="", run="")
    assert sink_of(place, app).committed() == []


def test_the_record_of_a_write_that_died_goes_after_two_days(place: Connection) -> None:
    app = one_off_app_id()
    died = write(place, app)
    assert collect_orphans(place, older_than=0.0)[app] == [died.ledger_id]
    assert sink_of(place, app).record().floor_ns > died.created_ns
    assert app not in collect_orphans(place, older_than=0.0)
    assert app in metadata_of(place).pointer_names(SINKS), "a commit may come late"
    record, version = stored(place, app)
    assert sink_of(place, app).swap(SinkRecord(floor_ns=record.floor_ns - 2 * DAY_NS), version)
    collect_orphans(place, older_than=0.0)
    assert app not in metadata_of(place).pointer_names(SINKS)


def test_the_first_write_of_a_day_collects_what_others_left(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    collect, odd = collect_orphans, "write-" + 31 * "0" + "1"
    monkeypatch.setattr(upkeep, "collect_orphans", lambda place, **more: collect(place, older_than=0.0, **more))
    named = write(place, "a name")

    def is_kept(day: int) -> bool:
        """Return whether an orphan outlives a write on a day."""
        orphan = write(place, one_off_app_id())
        with monkeypatch.context() as patch:
            patch.setattr(upkeep, "DAY_NS", time.time_ns() // day)
            look_after_one_offs(place, NO_CREDENTIALS, odd)
        return orphan.ledger_id in {*place.manager.list_ledgers()}

    assert [is_kept(day) for day in (3, 3, 4, 4)] == [False, True, False, True]
    assert named.ledger_id in {*place.manager.list_ledgers()}


def test_one_of_eight_writes_removes_records_of_others(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "claims_day", lambda metadata: False)
    gone, there = one_off_app_id(), one_off_app_id()
    for app in (gone, there):
        written = write(place, app)
        assert commit(sink_of(place, app), 0, written, query="", run="")
        record, version = stored(place, app)
        old = record.named[0]._replace(created_ns=written.created_ns - 2 * DAY_NS)
        assert sink_of(place, app).swap(SinkRecord(last=0, named=(old,)), version)
        if app == gone:
            place.manager.delete_ledger(written.ledger_id)

    def names() -> set[str]:
        return {*filter(is_one_off, metadata_of(place).pointer_names(SINKS))}

    look_after_one_offs(place, NO_CREDENTIALS, "write-" + 31 * "0" + "1")
    assert {gone, there} <= names()
    look_after_one_offs(place, NO_CREDENTIALS, "write-" + 32 * "0")
    assert (gone in names(), there in names()) == (False, True)


def test_what_others_left_does_not_fail_a_write(
    place: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: ClusterMetadata) -> bool:
        raise PybkError("no day")

    monkeypatch.setattr(upkeep, "claims_day", fail)
    look_after_one_offs(place, NO_CREDENTIALS, one_off_app_id())
    assert "was not deleted: no day" in caplog.text
