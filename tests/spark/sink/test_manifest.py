"""Sinks in a real cluster, without Spark: what counts, what is deleted, and what becomes of answers that are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk.credentials import Credentials, Secret
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    MetadataUnreachableError,
    MetadataVersionError,
    PybkError,
    UsageError,
)
from pybk.flags import LedgerType
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.spark.connection import Connection, StoreOrCluster, close_connections, connection
from pybk.spark.sink import manifest, sink_record
from pybk.spark.sink.manifest import (
    SINK_KEY,
    SINKS,
    FollowedSink,
    Sink,
    WrittenLedger,
    committed,
    read_sinks,
    sink_ledgers,
)
from pybk.spark.sink.sink_record import Attempt, SinkRecord, one_off_app_id
from pybk.spark.sink.upkeep import collect, collect_orphans
from tests.cluster.inside import SECRET, Inside, inside
from tests.internals import backend_of
from tests.storage.real_store import open_quick
from tests.waiting import wait_until

QUORUMS = (1, 1, 1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("sinks"), count=1) as cluster:
        yield cluster
        close_connections()


@pytest.fixture
def place(cluster: Inside) -> Connection:
    return connection(StoreOrCluster(metadata_uri=cluster.url, secret=Secret(SECRET)))


def metadata_of(place: Connection) -> ClusterMetadata:
    assert place.metadata is not None
    return place.metadata


def sink_of(place: Connection, app: str, password: bytes = b"") -> Sink:
    return Sink(place.manager, metadata_of(place), app, given=Credentials(password), quorums=QUORUMS)


def write(place: Connection, app: str, *, password: bytes = b"", kind: str = "") -> WrittenLedger:
    """Write a ledger as a task does."""
    with place.manager.create_ledger(
        ledger_type=kind,
        custom_metadata={SINK_KEY: app.encode()},
        ensemble_size=1,
        password=password,
        insecure=not password,
    ) as writer:
        writer.append_many([b"a", b"b"])
    return WrittenLedger(writer.ledger_id, 2, writer.length, writer.metadata.creation_time_ns)


def commit(sink: Sink, number: int, *written: WrittenLedger, run: str = "run", query: str = "query") -> bool:
    """Commit ledgers."""
    oldest_ns = min((each.created_ns for each in written), default=time.time_ns())
    return sink.commit(Attempt(number, oldest_ns, query, run), written)


def left(place: Connection, app: str, *, manifests: bool = False) -> set[int]:
    """Return the ledgers of a sink that are there."""
    found = sink_ledgers(metadata_of(place), app)
    return {each.ledger_id for each in found if (each.ledger_type == LedgerType.METADATA) == manifests}


def look(place: Connection, followed: FollowedSink) -> list[int]:
    """Return what a sink has committed since the last look."""
    return followed.look(read_sinks(metadata_of(place), [followed.app_id])[followed.app_id])


def test_ledgers_count_once_they_are_committed(place: Connection) -> None:
    sink = sink_of(place, "one")
    written = [write(place, "one") for _ in range(3)]
    assert committed(place, "one") == set()
    assert commit(sink, 0, *written)
    assert committed(place, "one") == {each.ledger_id for each in written}
    more = write(place, "one")
    assert commit(sink, 1, more)
    assert sink.committed() == [each.ledger_id for each in (*written, more)]
    assert committed(place, "other") == set()
    [data, manifest_id] = [left(place, "one"), left(place, "one", manifests=True)]
    assert data == committed(place, "one")
    assert [place.manager.ledger_metadata(each).ledger_type for each in manifest_id] == [LedgerType.METADATA] * 2


def test_an_empty_batch_is_recorded_without_a_manifest(place: Connection) -> None:
    sink = sink_of(place, "empty")
    assert commit(sink, 0)
    assert not commit(sink, 0)
    assert commit(sink, 1)
    assert (sink.record().last, sink.record().chain) == (1, ())


def test_a_repeated_batch_is_deleted_and_a_repeated_commit_is_not(place: Connection) -> None:
    sink = sink_of(place, "replay")
    first, again = write(place, "replay"), write(place, "replay")
    assert commit(sink, 0, first)
    assert not commit(sink, 0, again, run="later")
    assert not commit(sink, 0, first, run="later")
    assert left(place, "replay") == {first.ledger_id}
    assert sink.record().runs == ("run", "later")


def test_a_skipped_batch_write_is_logged(
    cluster: Inside, place: Connection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
    from pyspark.sql.types import StructType

    from pybk.spark.options import sink_options
    from pybk.spark.sink.writer import BatchWriter, LedgerCommitMessage

    schema = StructType().add("payload", "binary")
    secret = tmp_path / "cluster-secret"
    secret.write_bytes(SECRET)
    written = []
    for version in (3, 0):  # the second is that of a stream that has a new checkpoint
        given = {"metadatauri": cluster.url, "clustersecretfile": str(secret), "ensemblesize": "1", "writequorum": "1"}
        given |= {"ackquorum": "1", "txnappid": "each", "txnversion": str(version), "insecure": "true"}
        written.append(write(place, "each"))
        BatchWriter(sink_options(given, streaming=False), schema, False).commit([LedgerCommitMessage(written[-1])])
        assert ("is skipped" in caplog.text) is (version == 0)
    assert "write 0 of 'each' is skipped" in caplog.text
    assert committed(place, "each") == left(place, "each") == {written[0].ledger_id}


def test_a_refused_commit_publishes_nothing(place: Connection) -> None:
    sink = sink_of(place, "refused")
    assert commit(sink, 0, write(place, "refused"), run="old")
    assert commit(sink, 1, write(place, "refused"), run="new")
    before = sink.record()
    late = write(place, "refused")
    for number, run, query in ((2, "old", "query"), (3, "new", "query"), (2, "new", "another"), (2, "", "")):
        with pytest.raises(IllegalOperationError, match="sink 'refused' refuses the commit"):
            commit(sink, number, late, run=run, query=query)
    assert sink.record() == before
    sink.abort([late.ledger_id])
    assert late.ledger_id not in left(place, "refused")
    assert len(left(place, "refused", manifests=True)) == 2


def test_an_abort_spares_committed_ledgers(place: Connection) -> None:
    sink = sink_of(place, "abort")
    good, bad = write(place, "abort"), write(place, "abort")
    assert commit(sink, 0, good)
    sink.abort([good.ledger_id, bad.ledger_id])
    sink.abort([good.ledger_id])
    sink.abort([])
    assert left(place, "abort") == {good.ledger_id}


@pytest.mark.parametrize("meanwhile", [True, False])
def test_what_an_abort_gives_up_is_not_committed(
    place: Connection, monkeypatch: pytest.MonkeyPatch, meanwhile: bool
) -> None:
    """Another process commits it, while it is being deleted or afterwards."""
    app = f"given up {meanwhile}"
    sink, written = sink_of(place, app), write(place, app)
    delete = LedgerManager.delete_ledger

    def commit_it() -> None:
        with pytest.raises(IllegalOperationError, match=f"ledger {written.ledger_id} was given up; write the rows"):
            commit(sink, 0, written)

    def delete_ledger(*arguments: Any, **more: Any) -> None:
        if meanwhile:
            commit_it()
        delete(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(LedgerManager, "delete_ledger", delete_ledger)
        sink.abort([written.ledger_id])
    commit_it()
    assert (sink.committed(), sink.record().given_up) == ([], ())
    assert left(place, app) == left(place, app, manifests=True) == set()
    assert commit(sink, 0, write(place, app))


def test_what_cannot_be_deleted_stays_given_up_until_it_is_collected(place: Connection) -> None:
    sink, locked = sink_of(place, "kept"), write(place, "kept", password=b"another")
    sink.abort([locked.ledger_id])
    assert sink.record().given_up == (locked.ledger_id,)
    with pytest.raises(IllegalOperationError, match="was given up"):
        commit(sink, 0, locked)
    assert sink.collect(sink_ledgers(metadata_of(place), "kept"), time.time_ns()) == []
    assert sink.record().given_up == ()
    with pytest.raises(IllegalOperationError, match="counted as orphans"):
        commit(sink, 0, locked)
    place.manager.delete_ledger(locked.ledger_id, password=b"another")


@pytest.mark.parametrize("before", [True, False])
def test_a_commit_whose_answer_was_lost_is_settled_by_the_next(
    place: Connection, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    app = f"lost-{before}"
    sink, written = sink_of(place, app), write(place, app)
    change = ClusterMetadata.write_pointer

    def lose(self: ClusterMetadata, *arguments: Any) -> int:
        if not before:
            change(self, *arguments)
        raise MetadataUnreachableError("gone", outcome_unknown=True)

    with monkeypatch.context() as patched:
        patched.setattr(ClusterMetadata, "write_pointer", lose)
        with pytest.raises(MetadataUnreachableError):
            commit(sink, 0, written)
    sink.abort([written.ledger_id])  # as Spark does
    assert sink.committed() == [written.ledger_id] * (not before)
    again = write(place, app)
    assert commit(sink, 0, again) == before
    assert left(place, app) == set(sink.committed()) == {(again if before else written).ledger_id}


def test_a_compare_and_set_that_comes_late_does_not_bring_back_what_was_deleted(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, written = sink_of(place, "late"), write(place, "late")
    change = ClusterMetadata.write_pointer
    held: list[tuple[Any, ...]] = []

    def hold(self: ClusterMetadata, *arguments: Any) -> int:
        held.append((self, *arguments))
        raise MetadataUnreachableError("no answer yet", outcome_unknown=True)

    assert commit(sink, 0)
    with monkeypatch.context() as patched:
        patched.setattr(ClusterMetadata, "write_pointer", hold)
        with pytest.raises(MetadataUnreachableError):
            commit(sink, 1, written)
    sink.abort([written.ledger_id])
    with pytest.raises(MetadataVersionError):
        change(*held[0])
    assert sink.committed() == []


def test_a_compare_and_set_that_took_effect_though_it_was_refused_is_no_second_commit(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, written = sink_of(place, "both"), write(place, "both")
    change = ClusterMetadata.write_pointer

    def lose(self: ClusterMetadata, *arguments: Any) -> int:
        change(self, *arguments)
        raise MetadataVersionError("another version", outcome_unknown=True)

    monkeypatch.setattr(ClusterMetadata, "write_pointer", lose)
    commit(sink, 0, written)
    assert left(place, "both") == set(sink.committed()) == {written.ledger_id}
    assert left(place, "both", manifests=True) == {ledger_id for ledger_id, _ in sink.record().chain}


def test_of_writers_of_one_version_at_once_one_counts(place: Connection) -> None:
    counted = []

    def work(version: int) -> None:
        written = write(place, "crowd")
        if commit(sink_of(place, "crowd"), version, written, run="", query=""):
            counted.append(written.ledger_id)

    for version in range(3):
        threads = [threading.Thread(target=work, args=(version,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(counted) == version + 1
    assert sink_of(place, "crowd").committed() == counted
    assert left(place, "crowd") == set(counted)
    assert len(left(place, "crowd", manifests=True)) == 3


def test_readers_see_all_commits_while_manifests_are_folded(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_record, "FOLD", 2)
    sink, written = sink_of(place, "fold"), [write(place, "fold") for _ in range(16)]
    expected = [each.ledger_id for each in written]
    seen: list[list[int]] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            manifest.MANIFESTS_READ.clear()
            seen.append(sink_of(place, "fold").committed())

    reader = threading.Thread(target=look)
    reader.start()
    for number, each in enumerate(written):
        assert commit(sink, number, each)
        if number % 4 == 3:  # the reader sees some of the states between
            looks = len(seen)
            wait_until(lambda: len(seen) > looks + 1)  # noqa: B023
    done.set()
    reader.join()
    assert sink.committed() == expected
    assert len(left(place, "fold", manifests=True)) == len(sink.record().chain) == 1
    assert [found == expected[: len(found)] for found in seen] == [True] * len(seen)
    assert len({len(found) for found in seen}) > 2


def test_a_fold_leaves_out_what_was_deleted(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing that is merely not seen: a missing key does not prove a deletion."""
    monkeypatch.setattr(sink_record, "FOLD", 4)
    sink, written = sink_of(place, "shrink"), [write(place, "shrink") for _ in range(4)]
    for number, each in enumerate(written[:3]):
        assert commit(sink, number, each)
    place.manager.delete_ledger(written[1].ledger_id)
    read = ClusterMetadata.read_ledgers

    def late(self: ClusterMetadata, ledger_ids: Any, **more: Any) -> Any:
        found = read(self, ledger_ids, **more)
        pairs = zip(ledger_ids, found, strict=True)
        return [None if ledger_id == written[0].ledger_id else each for ledger_id, each in pairs]

    monkeypatch.setattr(ClusterMetadata, "read_ledgers", late)
    assert commit(sink, 3, written[3])
    assert len(sink.record().chain) == 1
    assert sink.committed() == [written[at].ledger_id for at in (0, 2, 3)]


def test_a_followed_sink_names_each_ledger_once(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_record, "FOLD", 3)
    sink, followed, seen = sink_of(place, "followed"), FollowedSink(place, "followed"), list[int]()
    assert look(place, followed) == []
    for number in range(10):
        written = write(place, "followed")
        assert commit(sink, number, written)
        new = look(place, followed)
        assert new == [written.ledger_id]
        seen += new
    assert (seen, followed.committed) == (sink.committed(), {*seen})
    assert look(place, followed) == []


def test_nothing_stays_of_a_write_whose_ledgers_are_gone(place: Connection) -> None:
    """Of a sink that has a name, the number of its last commit stays; of one that never committed, its floor."""
    gone, there, empty, died = (one_off_app_id() for _ in range(4))
    written = {app: write(place, app) for app in (gone, there, "shrunk", died)}
    for app in (gone, there, "shrunk"):
        assert commit(sink_of(place, app), 0, written[app], run="", query="")
    assert commit(sink_of(place, empty), 0, run="", query="")
    [(manifest_id, _)] = sink_of(place, "shrunk").record().chain
    assert sink_of(place, gone).record().chain == ()
    for app in (gone, "shrunk"):
        place.manager.delete_ledger(written[app].ledger_id)

    def names() -> set[str]:
        return {*metadata_of(place).pointer_names(SINKS)}.intersection((gone, there, empty, "shrunk", died))

    assert collect_orphans(place, older_than=3600.0) == {}, "what was committed is new"
    assert names() == {gone, there, "shrunk"}
    found = collect_orphans(place, older_than=0.0)
    assert (found["shrunk"], found[died]) == ([manifest_id], [written[died].ledger_id])
    assert names() == {there, "shrunk", died}
    assert left(place, gone, manifests=True) == left(place, "shrunk", manifests=True) == set()
    assert sink_of(place, there).committed() == [written[there].ledger_id]
    assert (sink_of(place, "shrunk").record().last, sink_of(place, "shrunk").committed()) == (0, [])
    assert not {gone, "shrunk", there, empty}.intersection(collect_orphans(place, older_than=0.0))


def test_many_records_are_read_at_once(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "LEDGERS_PAGE", 2)
    apps = [f"many-{number}" for number in range(6)]
    for app in apps[:5]:
        assert commit(sink_of(place, app), 0, write(place, app))
    found = read_sinks(metadata_of(place), apps)
    assert [*found] == apps
    assert [found[app] for app in apps] == [metadata_of(place).read_pointer(SINKS, app) for app in apps]
    assert read_sinks(metadata_of(place), []) == {}


def test_a_manifest_that_is_gone_or_open_is_damage(place: Connection) -> None:
    sink = sink_of(place, "damage")
    assert commit(sink, 0, write(place, "damage"))
    [(named, _)] = sink.record().chain
    manifest.MANIFESTS_READ.clear()
    place.manager.delete_ledger(named)
    with pytest.raises(CorruptError, match=r"sink 'damage' names a manifest ledger that does not exist.*restore"):
        sink.committed()
    writer = place.manager.create_ledger(ensemble_size=1, insecure=True)
    found = metadata_of(place).read_pointer(SINKS, "damage")
    assert found is not None
    metadata_of(place).write_pointer(
        SINKS, "damage", SinkRecord(chain=((writer.ledger_id, 0),), last=0).encode(), found.version
    )
    with pytest.raises(CorruptError, match="not closed"):
        committed(place, "damage")
    writer.close()


# ---- orphans -------------------------------------------------------------------------------------------------------


def test_orphans_go_and_nothing_else_does(place: Connection) -> None:
    sink = sink_of(place, "orphans")
    good, bad = write(place, "orphans"), write(place, "orphans")
    never = write(place, "never")
    locked = write(place, "orphans", password=b"another")
    with place.manager.create_ledger(ensemble_size=1, insecure=True) as other:
        pass
    assert commit(sink, 0, good)
    ensemble_size, write_quorum, ack_quorum = QUORUMS
    with place.manager.create_system_ledger(
        LedgerType.METADATA,
        custom_metadata={SINK_KEY: b"orphans"},
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        insecure=True,
    ) as spare:
        pass
    assert collect_orphans(place, older_than=3600.0) == {}
    found = collect_orphans(place, older_than=0.0)
    assert found["orphans"] == [spare.ledger_id, bad.ledger_id]
    assert found["never"] == [never.ledger_id]
    assert left(place, "orphans") == {good.ledger_id, locked.ledger_id}
    assert sink.committed() == [good.ledger_id]
    assert other.ledger_id in set(place.manager.list_ledgers())
    assert collect_orphans(place, older_than=0.0, given=Credentials(b"another")) == {"orphans": [locked.ledger_id]}


def test_a_damaged_record_keeps_no_other_orphans(place: Connection) -> None:
    broken, orphan = write(place, "a broken one"), write(place, "another")
    version = metadata_of(place).write_pointer(SINKS, "a broken one", b"{}", None)
    assert collect_orphans(place, older_than=0.0) == {"another": [orphan.ledger_id]}
    assert left(place, "a broken one") == {broken.ledger_id}
    metadata_of(place).delete_pointer(SINKS, "a broken one", version)
    assert collect_orphans(place, older_than=0.0) == {"a broken one": [broken.ledger_id]}


def test_an_invalid_age_collects_nothing(place: Connection) -> None:
    orphan = write(place, "ages")
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="older_than"):
            collect_orphans(place, older_than=wrong)
    assert left(place, "ages") == {orphan.ledger_id}
    assert sink_of(place, "ages").record() == SinkRecord()


def test_orphans_are_collected_by_the_url_of_a_cluster(cluster: Inside, place: Connection) -> None:
    sink, good, bad = sink_of(place, "url", b"hush"), write(place, "url", password=b"hush"), write(place, "url")
    assert commit(sink, 0, good)
    assert "url" not in collect(cluster.url, cluster_secret=SECRET)
    another = collect(cluster.url, cluster_secret=Secret(SECRET), password=Secret(b"hush"), older_than=0.0)
    assert "url" not in another
    assert collect(cluster.url, cluster_secret=SECRET, older_than=0.0)["url"] == [bad.ledger_id]
    assert left(place, "url") == {good.ledger_id}
    with pytest.raises(UsageError, match="unknown scheme"):
        collect("/srv/data")


def test_collected_ledgers_cannot_be_committed(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, slow = sink_of(place, "slow"), write(place, "slow")
    change = ClusterMetadata.write_pointer
    collected: list[list[int]] = []

    def collect_first(self: ClusterMetadata, *arguments: Any) -> int:
        if not collected:
            collected.append([])
            collected.append(sink.collect(sink_ledgers(metadata_of(place), "slow"), time.time_ns()))
        return change(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(ClusterMetadata, "write_pointer", collect_first)
        with pytest.raises(IllegalOperationError, match="counted as orphans"):
            commit(sink, 0, slow)
    assert slow.ledger_id in collected[1]
    assert sink.committed() == []
    assert left(place, "slow", manifests=True) == set()
    assert commit(sink, 0, write(place, "slow"))


def test_commits_collect_orphans_now_and_then(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, orphan = sink_of(place, "now"), write(place, "now")
    assert commit(sink, 0, write(place, "now"))
    assert orphan.ledger_id in left(place, "now")
    monkeypatch.setattr(manifest, "ORPHAN_AGE_S", 0.0)
    assert commit(sink, 1, write(place, "now"))
    assert left(place, "now") == set(sink.committed())
    assert sink.record().floor_ns > orphan.created_ns


def test_a_collection_that_fails_does_not_fail_the_commit(
    place: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise PybkError("no list")

    monkeypatch.setattr(sink_record, "ORPHAN_AGE_S", 0.0)
    monkeypatch.setattr(manifest, "ORPHAN_AGE_S", -1.0)
    monkeypatch.setattr(manifest, "sink_ledgers", fail)
    sink = sink_of(place, "failing")
    assert commit(sink, 0, write(place, "failing"))
    assert "orphans were not collected: no list" in caplog.text
    assert len(sink.committed()) == 1


def test_an_embedded_store_has_no_sinks(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        place = Connection(manager, None, backend_of(manager))
        with pytest.raises(IllegalOperationError, match="is not a cluster"):
            committed(place, "app")
        with pytest.raises(IllegalOperationError, match="is not a cluster"):
            collect_orphans(place)
