"""Copies, exports and imports: what comes out is what went in, byte for byte, and once, whatever is interrupted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.internals import cluster_backend_of

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.credentials import CredentialSources, Secret
from pybk.errors import IllegalOperationError, UsageError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.spark.connection import StoreOrCluster, close_connections, connection
from pybk.spark.jobs import copy as copying
from pybk.spark.jobs import export as exporting
from pybk.spark.jobs.copy import copy
from pybk.spark.jobs.export import export
from pybk.spark.jobs.import_ import import_
from pybk.spark.jobs.ledgers import selected_ledgers, where_of
from pybk.spark.jobs.session import failure
from pybk.spark.jobs.transfer import (
    COPY_OF,
    IMPORT_OF,
    TransferHeader,
    TransferTarget,
    finish,
    rounds,
    safest_quorums,
    visible,
)
from pybk.spark.jobs.verify import verify
from pybk.spark.sink.manifest import SINK_KEY, Sink, WrittenLedger
from pybk.spark.sink.sink_record import SinkRecord
from tests.cluster.inside import SECRET, Inside, inside
from tests.spark.jobs.test_jobs import until_confirmed
from tests.storage.real_store import contents, open_quick

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.sampled(one_in=6, using="spark")

PASSWORD = b"the password of all ledgers here \xff"
OTHER_SECRET = b"the secret of the other cluster -"


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_connections()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "source", count=3) as cluster:
        yield cluster
        close_connections()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "target", count=3, secret=OTHER_SECRET) as cluster:
        yield cluster
        close_connections()


SOURCE: dict[str, Any] = {"cluster_secret": SECRET, "password": PASSWORD}
TARGET: dict[str, Any] = {"cluster_secret": OTHER_SECRET, "password": PASSWORD}
BOTH: dict[str, Any] = {**SOURCE, "target_secret": OTHER_SECRET}


def write(manager: LedgerManager, payloads: list[bytes], **arguments: Any) -> int:
    with manager.create_ledger(**{"password": PASSWORD, **arguments}) as writer:
        if payloads:
            writer.append_many(payloads)
    return writer.ledger_id


def various(manager: LedgerManager) -> dict[int, list[bytes]]:
    """Write ledgers of all kinds; return their payloads by id."""
    kinds: list[tuple[list[bytes], dict[str, Any]]] = [
        (
            [b"", b"\0", os.urandom(3000), b"text"],
            {"ledger_type": "logs", "custom_metadata": {"k": b"\xff\0", "": b""}},
        ),
        ([b"%d" % number for number in range(3000)], {"storage_hints": {StorageHint.SSD, StorageHint.HDD}}),
        ([], {"ledger_type": "empty"}),
        ([os.urandom(1 << 20) for _ in range(10)], {"digest_type": DigestType.CRC32C}),
        ([b"unguarded"], {"digest_type": DigestType.NONE, "insecure": True}),
    ]
    return {write(manager, payloads, **arguments): payloads for payloads, arguments in kinds}


def kind(metadata: LedgerMetadata) -> tuple[Any, ...]:
    """Return what is taken over."""
    own = (SINK_KEY, COPY_OF, IMPORT_OF)
    return (
        metadata.ledger_type,
        metadata.storage_hints,
        metadata.digest_type,
        metadata.state,
        metadata.last_entry_id,
        metadata.length,
        {key: value for key, value in metadata.custom_metadata.items() if key not in own},
    )


def check(
    ledgers: dict[int, int], payloads: dict[int, list[bytes]], before: LedgerManager, after: LedgerManager
) -> None:
    """Check that ledgers are what they were written after."""
    assert ledgers.keys() == payloads.keys()
    assert len(set(ledgers.values())) == len(ledgers)
    for old, new in ledgers.items():
        assert contents(after, new, PASSWORD) == payloads[old]
        assert kind(after.ledger_metadata(new)) == kind(before.ledger_metadata(old))


def shown(cluster: Inside) -> list[int]:
    """Return the ledgers of a cluster that count."""
    where = where_of(cluster.url, cluster.secret)
    return [each.ledger_id for each in visible(connection(where), partial(selected_ledgers, where))]


# ---- copy --------------------------------------------------------------------------------------------------------


def test_a_copy_is_the_same_and_is_made_once(spark: SparkSession, source: Inside, target: Inside) -> None:
    here, there = source.connect(), target.connect()
    payloads = various(here)
    other = write(here, [b"x"], password=b"another")
    with here.create_ledger(password=PASSWORD) as writer:
        writer.append(b"is not finished")
        found = copy(spark, source.url, target.url, **BOTH)
        check(found.ledgers, payloads, here, there)
        assert found.copied == tuple(payloads)
        assert found.bytes == sum(len(payload) for each in payloads.values() for payload in each)
        assert (found.not_opened, found.open, found.failed) == ((other,), (writer.ledger_id,), ())
        again = copy(spark, source.url, target.url, **BOTH)
        assert (again.ledgers, again.copied, again.bytes) == (found.ledgers, (), 0)
    assert sorted(found.ledgers.values()) == shown(target)
    assert verify(spark, target.url, **TARGET).sound  # the manifests' password is the empty one
    new = there.ledger_metadata(found.ledgers[next(iter(payloads))])
    identity = cluster_backend_of(here).identity.store_id.hex()
    assert new.custom_metadata[COPY_OF] == f"{identity}/{next(iter(payloads))}".encode()
    more = write(here, [b"later"])
    assert copy(spark, source.url, target.url, **BOTH).copied == (writer.ledger_id, more)


def test_an_open_ledger_is_copied_as_far_as_it_is_confirmed(
    spark: SparkSession, source: Inside, target: Inside
) -> None:
    here, there = source.connect(), target.connect()
    with here.create_ledger(password=PASSWORD) as writer:
        writer.append_many([b"first", b"second"])
        until_confirmed(source, writer.ledger_id, 1, PASSWORD)
        first = copy(spark, source.url, target.url, **BOTH, open_too=True)
        assert contents(there, first.ledgers[writer.ledger_id], PASSWORD) == [b"first", b"second"]
        writer.append(b"third")
    second = copy(spark, source.url, target.url, **BOTH, quorums=(1, 1, 1))
    assert second.copied == (writer.ledger_id,)
    assert contents(there, second.ledgers[writer.ledger_id], PASSWORD) == [b"first", b"second", b"third"]
    assert there.ledger_metadata(second.ledgers[writer.ledger_id]).ensemble_size == 1
    assert shown(target) == [second.ledgers[writer.ledger_id]]
    assert first.ledgers[writer.ledger_id] not in there.list_ledgers()


def test_a_copy_killed_before_it_deleted_the_shorter_one_is_mended_by_the_next(
    spark: SparkSession, source: Inside, target: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = source.connect(), target.connect()
    with here.create_ledger(password=PASSWORD) as writer:
        writer.append(b"first")
        until_confirmed(source, writer.ledger_id, 0, PASSWORD)
        copy(spark, source.url, target.url, **BOTH, open_too=True)
        writer.append(b"second")

    def stop(self: TransferTarget, ledger_id: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TransferTarget, "delete_ledger", stop)
        with pytest.raises(KeyboardInterrupt):
            copy(spark, source.url, target.url, **BOTH)
    assert len(shown(target)) == 2
    found = copy(spark, source.url, target.url, **BOTH)
    assert found.copied == ()
    assert shown(target) == [found.ledgers[writer.ledger_id]]
    assert contents(there, found.ledgers[writer.ledger_id], PASSWORD) == [b"first", b"second"]


@pytest.mark.long
@pytest.mark.parametrize("job", ["copy", "import"])
def test_a_commit_of_another_job_after_the_listing_is_not_duplicated(
    spark: SparkSession, source: Inside, target: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    write(source.connect(), [b"x"])
    directory = str(tmp_path / "lake")
    if job == "import":
        export(spark, source.url, directory, **SOURCE)
    there = TransferTarget.there

    def run() -> None:
        if job == "import":
            import_(spark, target.url, directory, **TARGET)
        else:
            copy(spark, source.url, target.url, **BOTH)

    def look(self: TransferTarget) -> dict[int, LedgerMetadata]:
        found = there(self)
        monkeypatch.setattr(TransferTarget, "there", there)
        run()
        return found

    monkeypatch.setattr(TransferTarget, "there", look)
    with pytest.raises(Exception, match="another job"):  # from the import's commit it comes as Spark's
        run()
    assert len(shown(target)) == 1


def test_an_interrupted_copy_resumes(
    spark: SparkSession, source: Inside, target: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = source.connect(), target.connect()
    payloads = {write(here, [b"%d" % number]): [b"%d" % number] for number in range(4)}
    monkeypatch.setattr(copying, "ROUND_LEDGERS", 1)
    commit, calls = TransferTarget.commit, []

    def stop(self: TransferTarget, number: int, written: Any) -> None:
        calls.append(written)
        if len(calls) == 3:
            raise KeyboardInterrupt
        commit(self, number, written)

    with monkeypatch.context() as patch:
        patch.setattr(TransferTarget, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            copy(spark, source.url, target.url, **BOTH)
    assert len(shown(target)) == 2  # what does not count is as if it were not there
    found = copy(spark, source.url, target.url, **BOTH)
    assert found.copied == tuple(payloads)[2:]
    check(found.ledgers, payloads, here, there)
    assert len(shown(target)) == 4


def test_of_two_copies_at_once_one_counts(
    spark: SparkSession, source: Inside, target: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source.connect(), [b"x"])
    commit = TransferTarget.commit

    def be_late(self: TransferTarget, number: int, written: Any) -> None:
        monkeypatch.setattr(TransferTarget, "commit", commit)
        copy(spark, source.url, target.url, **BOTH)
        commit(self, number, written)

    monkeypatch.setattr(TransferTarget, "commit", be_late)
    with pytest.raises(IllegalOperationError, match="another job"):
        copy(spark, source.url, target.url, **BOTH)
    (one,) = shown(target)
    assert [each for each in target.connect().list_ledgers() if not _is_manifest(target, each)] == [one]


def _is_manifest(cluster: Inside, ledger_id: int) -> bool:
    return cluster.connect().ledger_metadata(ledger_id).ledger_type.is_system


def test_a_ledger_that_cannot_be_copied_is_reported_and_the_others_are_copied(
    spark: SparkSession, source: Inside, target: Inside
) -> None:
    here = source.connect()
    full = write(here, [b"x"], custom_metadata={"k": bytes(65_500)})
    good = write(here, [b"y"])
    found = copy(spark, source.url, target.url, **BOTH)
    assert found.copied == (good,)
    ((failed, reason),) = found.failed
    assert failed == full
    assert "custom metadata" in reason
    assert shown(target) == [found.ledgers[good]]


def test_a_store_is_copied_to_a_cluster_and_what_a_sink_has_not_committed_is_not(
    spark: SparkSession, source: Inside, target: Inside, tmp_path: Path
) -> None:
    with open_quick(tmp_path / "store") as manager:
        payloads = various(manager)
        found = copy(spark, str(tmp_path / "store"), target.url, password=PASSWORD, target_secret=OTHER_SECRET)
        check(found.ledgers, payloads, manager, target.connect())
    hidden = write(source.connect(), [b"x"], custom_metadata={SINK_KEY: b"somebody"})
    found = copy(spark, source.url, target.url, **BOTH, ledgers=[hidden])
    assert (found.ledgers, found.copied) == ({}, ())


def test_a_copy_goes_to_another_cluster(spark: SparkSession, source: Inside, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is the source itself"):
        copy(spark, source.url, source.url, **SOURCE, target_secret=SECRET)
    with pytest.raises(UsageError, match="metadata URL"):
        copy(spark, source.url, str(tmp_path), **SOURCE)


def test_rounds_have_bytes_and_ledgers_to_their_limits() -> None:
    sizes = [5, 5, 20, 1, 1, 1]
    headers = [
        TransferHeader(number, "", (), "NONE", {}, 1, size, (None, None, None)) for number, size in enumerate(sizes)
    ]
    assert [[each.ledger_id for each in group] for group in rounds(headers, 10, 2)] == [[0, 1], [2], [3, 4], [5]]
    header = TransferHeader(7, "t", ("ssd",), "XXH3", {"k": b"\xff"}, 3, 9, (3, 2, None))
    assert TransferHeader.decode(header.encode()) == header


def test_a_manifest_is_as_safe_as_the_safest_of_its_ledgers() -> None:
    quorums = [(5, 2, 2), (3, 3, 2), (3, 3, 1)]
    assert safest_quorums(TransferHeader(1, "", (), "NONE", {}, 1, 1, each) for each in quorums) == (3, 3, 2)
    assert safest_quorums([]) == (None, None, None)


def test_a_cluster_of_one_bookie_takes_copies_and_imports(spark: SparkSession, tmp_path: Path) -> None:
    with inside(tmp_path / "a", count=1) as a, inside(tmp_path / "b", count=1, secret=OTHER_SECRET) as b:
        write(a.connect(), [b"x"], ensemble_size=1, write_quorum=1, ack_quorum=1)
        assert len(copy(spark, a.url, b.url, **BOTH).copied) == 1
        export(spark, a.url, str(tmp_path / "lake"), **SOURCE)
        assert len(import_(spark, b.url, str(tmp_path / "lake"), **TARGET).imported) == 1
        close_connections()


# ---- without Spark -----------------------------------------------------------------------------------------------


def made(to: TransferTarget, name: int) -> WrittenLedger:
    """Write a ledger anew that does not count yet."""
    header = TransferHeader(name, "logs", (), "CRC32C", {}, 1, 1, (None, None, None))
    writer = to.create(header)
    return finish(writer, header, writer.append_many_async([b"x"]))


def test_a_commit_whose_answer_was_lost_is_one(target: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    to = TransferTarget(where_of(target.url, OTHER_SECRET), CredentialSources(Secret(PASSWORD)), COPY_OF, "a")
    swap = Sink.swap

    def lose(self: Sink, record: SinkRecord, version: int | None) -> bool:
        monkeypatch.setattr(Sink, "swap", swap)
        assert swap(self, record, version)
        return False

    first, second = made(to, 1), made(to, 2)
    monkeypatch.setattr(Sink, "swap", lose)
    to.commit(0, [first])
    assert shown(target) == [first.ledger_id]
    with pytest.raises(IllegalOperationError, match="another job"):
        to.commit(0, [second])
    assert shown(target) == [first.ledger_id]


def test_a_commit_after_the_listing_is_seen_whole_or_not_at_all(target: Inside) -> None:
    where = where_of(target.url, OTHER_SECRET)
    to = TransferTarget(where, CredentialSources(Secret(PASSWORD)), COPY_OF, "a")
    ledgers = [made(to, 1)]

    def listing() -> list[LedgerMetadata]:
        found = selected_ledgers(where)
        if len(ledgers) == 1:
            ledgers.append(made(to, 2))
            to.commit(0, ledgers)
        return found

    found = visible(connection(where), listing)
    assert [each.ledger_id for each in found] == [each.ledger_id for each in ledgers]


# ---- export and import -------------------------------------------------------------------------------------------


def test_an_imported_export_equals_the_original(
    spark: SparkSession, source: Inside, target: Inside, tmp_path: Path
) -> None:
    here, there = source.connect(), target.connect()
    payloads = various(here)
    other = write(here, [b"x"], password=b"another")
    directory = str(tmp_path / "lake")
    with here.create_ledger(password=PASSWORD) as writer:
        writer.append(b"is not finished")
        exported = export(spark, source.url, directory, **SOURCE)
    assert exported.ledgers == tuple(payloads)
    assert exported.entries == sum(map(len, payloads.values()))
    assert (exported.not_opened, exported.open, exported.failed) == ((other,), (writer.ledger_id,), ())
    rows = spark.read.parquet(f"{directory}/entries")
    assert set(rows.columns) == {"ledger_id", "entry_id", "payload", "length"}
    assert rows.filter("length != octet_length(payload)").count() == 0
    found = import_(spark, target.url, directory, **TARGET)
    check(found.ledgers, payloads, here, there)
    assert found.imported == tuple(payloads)
    assert (found.entries, found.bytes) == (exported.entries, exported.bytes)
    new = there.ledger_metadata(found.ledgers[exported.ledgers[0]])
    assert new.custom_metadata[IMPORT_OF] == f"{exported.export_id}/{exported.ledgers[0]}".encode()
    again = import_(spark, target.url, directory, **TARGET)
    assert (again.ledgers, again.imported) == (found.ledgers, ())
    assert sorted(found.ledgers.values()) == shown(target)


@pytest.mark.sampled(one_in=8, group="processes")
def test_no_secret_is_in_what_spark_shows(spark: SparkSession, source: Inside, target: Inside, tmp_path: Path) -> None:
    write(source.connect(), [b"x"])
    verify(spark, source.url, **SOURCE)
    export(spark, source.url, str(tmp_path / "lake"), **SOURCE)
    import_(spark, target.url, str(tmp_path / "lake"), **TARGET)
    copy(spark, source.url, target.url, **BOTH)
    context = spark.sparkContext
    jobs = context._jsc.sc().statusStore().jobsList(None)
    told = [str(jobs.apply(at).description()) + jobs.apply(at).name() for at in range(jobs.size())]
    plans = spark._jsparkSession.sharedState().statusStore().executionsList()
    told += [str(plans.apply(at).physicalPlanDescription()) for at in range(plans.size())]
    told += [f"{plans.apply(at).description()} {plans.apply(at).details()}" for at in range(plans.size())]
    shown = "\n".join(told)
    assert f"pybk: copy {source.url} to {target.url}" in shown
    assert "pybk-job-" in shown
    for secret in (SECRET, OTHER_SECRET, PASSWORD[:-1]):
        assert secret.decode() not in shown
    assert context.getLocalProperty("spark.job.description") is None
    assert context.getLocalProperty("spark.jobGroup.id") is None


@pytest.mark.long
def test_an_incomplete_export_is_refused_and_makes_no_ledgers(
    spark: SparkSession, source: Inside, target: Inside, tmp_path: Path
) -> None:
    here = source.connect()
    ledger_id = write(here, [b"%d" % number for number in range(100)])
    write(here, [b"whole"])
    directory = str(tmp_path / "lake")
    export(spark, source.url, directory, **SOURCE)
    broken = str(tmp_path / "broken")
    rows = spark.read.parquet(f"{directory}/entries").filter(f"ledger_id != {ledger_id} OR entry_id != 50")
    rows.write.parquet(f"{broken}/entries")
    spark.read.parquet(f"{directory}/ledgers").write.parquet(f"{broken}/ledgers")
    with pytest.raises(Exception, match="the export is damaged") as raised:
        import_(spark, target.url, broken, **TARGET)
    assert str(failure(raised.value)).startswith(f"CorruptError: entry 50 of ledger {ledger_id} is missing")
    assert failure(ValueError("none of Spark's")) is None
    assert shown(target) == []
    assert len(import_(spark, target.url, directory, **TARGET).imported) == 2
    spark.read.parquet(f"{directory}/entries").filter("entry_id < 99").write.parquet(f"{broken}/short")
    os.rename(f"{broken}/entries", f"{broken}/gap")
    os.rename(f"{broken}/short", f"{broken}/entries")
    with pytest.raises(Exception, match="are incomplete"):
        import_(spark, source.url, broken, **SOURCE)


def test_a_store_is_exported_up_to_its_lac_while_its_writer_runs(
    spark: SparkSession, target: Inside, tmp_path: Path
) -> None:
    directory = str(tmp_path / "lake")
    with open_quick(tmp_path / "store") as manager, manager.create_ledger(password=PASSWORD) as writer:
        writer.append_many([b"a", b"b"])
        exported = export(spark, str(tmp_path / "store"), directory, password=PASSWORD, open_too=True)
        assert (exported.ledgers, exported.entries) == ((writer.ledger_id,), 2)
        with pytest.raises(UsageError, match="metadata URL"):
            import_(spark, str(tmp_path / "store"), directory)
    found = import_(spark, target.url, directory, **TARGET, quorums=(2, 2, 1))
    new = target.connect().ledger_metadata(found.ledgers[writer.ledger_id])
    assert (new.state, new.ensemble_size, new.last_entry_id) == (LedgerState.CLOSED, 2, 1)


def test_an_export_that_was_interrupted_overwriting_is_none(
    spark: SparkSession, source: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = tmp_path / "lake"
    write(source.connect(), [b"x"])
    export(spark, source.url, str(lake), **SOURCE)
    with pytest.raises(UsageError, match="already exists"):
        export(spark, source.url, str(lake), **SOURCE)
    with pytest.raises(UsageError, match="'append'"):
        export(spark, source.url, str(lake), **SOURCE, mode="append")
    assert (lake / "ledgers").exists()
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "row_of", lambda *_: 1 // 0)  # the entries are written by then
        with pytest.raises(ZeroDivisionError):
            export(spark, source.url, str(lake), **SOURCE, mode="overwrite")
    assert (lake / "entries").exists()
    assert not (lake / "ledgers").exists()
    (lake / "entries").rename(lake / "ledgers")
    with pytest.raises(UsageError, match="other columns"):
        import_(spark, source.url, str(lake), **SOURCE)


def test_an_export_of_nothing(spark: SparkSession, source: Inside, target: Inside, tmp_path: Path) -> None:
    exported = export(spark, source.url, str(tmp_path / "lake"), **SOURCE)
    assert (exported.ledgers, exported.entries) == ((), 0)
    assert import_(spark, target.url, str(tmp_path / "lake"), **TARGET).ledgers == {}


def test_where_is_a_url_or_a_directory() -> None:
    cluster = where_of("zk://a:1/b", b"my own")
    assert (cluster.metadata_uri, cluster.path, cluster.secret.read()) == ("zk://a:1/b", None, b"my own")
    assert "my own" not in repr(cluster)
    assert where_of("/a/b") == StoreOrCluster(path="/a/b")
