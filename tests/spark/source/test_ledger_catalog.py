"""Which ledgers a read is about: what a sink wrote counts once it is committed, and the system's never do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

from pybk.errors import LedgerUnsealedError, NoSuchLedgerError, SealMismatchError, UnauthorizedError, UsageError
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.spark.connection import Connection, close_connections, connection
from pybk.spark.options import Positions, SourceOptions, source_options
from pybk.spark.sink.manifest import SINK_KEY, Sink, WrittenLedger
from pybk.spark.sink.sink_record import Attempt
from pybk.spark.source.batch_reader import BatchReader
from pybk.spark.source.columns import schema_of
from pybk.spark.source.ledger_catalog import LedgerCatalog
from pybk.spark.source.planning import EntryRange
from pybk.spark.source.reading import read_ranges
from pybk.spark.source.stream import StreamReader
from pybk.streams.log import Log
from pybk.streams.log_reader import LogEnd
from pybk.streams.wal import WriteAheadLog
from tests.cluster.inside import Inside, inside
from tests.cluster.test_seals import rewrite
from tests.spark.secret_files import cluster_options, secret_file
from tests.waiting import PROCESS_S


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("catalog") / "cluster") as cluster:
        yield cluster
        close_connections()


def options(cluster: Inside, **which: str) -> SourceOptions:
    return source_options({**cluster_options(cluster.url), **which}, streaming=False)


def fill(manager: LedgerManager, kind: str, app: str | None = None, *, close: bool = True) -> int:
    custom = {} if app is None else {SINK_KEY: app.encode()}
    writer = manager.create_ledger(ledger_type=kind, custom_metadata=custom, ensemble_size=1, insecure=True)
    writer.append_many([b"four"] * 3)
    if close:
        writer.close()
    return writer.ledger_id


def commit(found: Connection, app: str, number: int, *ledger_ids: int) -> None:
    assert found.metadata is not None
    created = [found.manager.ledger_metadata(each).creation_time_ns for each in ledger_ids]
    written = [WrittenLedger(each, 3, 12, at) for each, at in zip(ledger_ids, created, strict=True)]
    assert Sink(found.manager, found.metadata, app).commit(Attempt(number, min(created)), written)


def test_what_a_sink_wrote_counts_from_its_commit_on(cluster: Inside) -> None:
    manager = cluster.connect()
    found = connection(options(cluster, ledger="0").where)
    plain = fill(manager, "sunk")
    ids = [fill(manager, "sunk", app) for app in ("app", "app", "other")]
    by_type, by_id = (
        LedgerCatalog(options(cluster, ledgerType="sunk")),
        LedgerCatalog(options(cluster, ledgers=f"{plain},{ids[1]}")),
    )
    assert [*by_type.look()] == [plain]
    assert by_type.hidden == {each: manager.ledger_metadata(each).creation_time_ns for each in ids}
    assert [*by_id.look()] == [plain]
    assert by_id.missing == []
    commit(found, "app", 0, ids[1])
    assert [*by_type.look()] == [plain, ids[1]]
    assert [*by_id.look()] == [plain, ids[1]]
    commit(found, "other", 0, ids[2])
    assert [*by_type.look()] == [plain, ids[1], ids[2]]
    assert [*by_type.hidden] == [ids[0]]


def test_a_type_that_no_ledger_has_is_refused_with_the_nearest(cluster: Inside) -> None:
    fill(cluster.connect(), "known")
    for name in ("knowns", "known,other", "known*"):
        catalog = LedgerCatalog(options(cluster, ledgerType=name))
        catalog.look()
        with pytest.raises(NoSuchLedgerError, match=r"; there are known.*; option allowMissing=true waits"):
            catalog.check_type()
    missing = LedgerCatalog(options(cluster, ledgerType="knowns", allowMissing="true"))
    assert missing.look() == {}
    missing.check_type()
    fill(cluster.connect(), "hidden only", "an app that never commits")
    hidden = LedgerCatalog(options(cluster, ledgerType="hidden only"))
    assert hidden.look() == {}
    hidden.check_type()


def test_segments_of_logs_are_not_read_as_ledgers(cluster: Inside) -> None:
    """Neither by their number nor by their type, unless that is asked for."""
    manager = cluster.connect()
    with (
        Log.open(manager, "orders", insecure=True) as log,
        WriteAheadLog.open(manager, "app", insecure=True) as wal,
        log.subscribe("audit", start=LogEnd.EARLIEST) as subscription,
    ):
        with log.writer() as writer:
            writer.append(b"x")
        wal.append(b"y")
        record = subscription.read(timeout=PROCESS_S)
        assert record is not None
        subscription.ack(record)
        [segment] = [each.ledger_id for each in log.segments()]
        for which in ({"ledger": str(segment)}, {"ledgers": f"{segment}-{segment + 1}"}, {"ledgerType": "log"}):
            with pytest.raises(UsageError, match=f"ledger {segment} is a segment of log 'orders'.*option log='orders'"):
                LedgerCatalog(options(cluster, **which)).look()
        with pytest.raises(UsageError, match=r"is a segment of wal 'app'.*option wal='app', or .* raw=true"):
            LedgerCatalog(options(cluster, ledgerType="wal")).look()
        with pytest.raises(UsageError, match=r"a segment of cursor 'orders@audit'.*: to read .* raw=true"):
            LedgerCatalog(options(cluster, ledgerType="cursor")).look()
        assert [*LedgerCatalog(options(cluster, ledgerType="log", raw="true")).look()] == [segment]
        with log.detached_segment(query="query", epoch=0) as writing:
            writing.append_many([b"z"])
            detached = writing.seal().ledger_id
        with pytest.raises(UsageError, match=f"ledger {detached} is a segment of log 'orders'"):
            LedgerCatalog(options(cluster, ledger=str(detached))).look()


def test_a_commit_during_a_listing_counts_as_a_whole_or_not_at_all(
    cluster: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids come in no order, so one ledger of a commit may come after the position of the listing, and one before it."""
    other, found = cluster.connect(), connection(options(cluster, ledger="0").where)
    first, second = fill(found.manager, "halves"), fill(other, "halves")
    assert first < second
    catalog = LedgerCatalog(options(cluster, ledgerType="halves"))
    there, both = catalog.there, list[int]()

    def late(found: Connection) -> Iterator[LedgerMetadata]:
        for metadata in there(found):
            if metadata.ledger_id == second and not both:
                both.extend(fill(manager, "halves", "halves") for manager in (found.manager, other))
                commit(found, "halves", 0, *both)
            yield metadata

    monkeypatch.setattr(catalog, "there", late)
    seen = set(catalog.look())
    assert len(both) == 2
    assert first < both[0] < second < both[1]
    assert seen & {*both} in (set(), {*both})
    assert catalog.look().keys() == {first, second, *both}
    for each in both:
        other.delete_ledger(each)
    lists = 0

    def counted(found: Connection) -> Iterator[LedgerMetadata]:
        nonlocal lists
        lists += 1
        return there(found)

    monkeypatch.setattr(catalog, "there", counted)
    fill(other, "halves", "halves")
    for _ in range(3):
        assert [*catalog.look()] == [first, second]
    assert lists == 3, "what a sink names and a listing misses is read by itself"


def test_manifests_are_no_data(cluster: Inside) -> None:
    found = connection(options(cluster, ledger="0").where)
    data = fill(cluster.connect(), "manifested", "third")
    commit(found, "third", 0, data)
    manifest = max(found.manager.list_ledgers(".metadata"))
    assert [*LedgerCatalog(options(cluster, ledgers=f"{data},{manifest}-{manifest}")).look()] == [data]


def test_how_far_ledgers_can_be_read(cluster: Inside) -> None:
    manager = cluster.connect()
    closed, open_id = fill(manager, "far"), fill(manager, "far", close=False)
    catalog = LedgerCatalog(options(cluster, ledgerType="far"))
    found = catalog.look()
    assert [(each.ledger_id, each.closed) for each in found.values()] == [(closed, True), (open_id, False)]
    assert (found[closed].end, found[closed].length, found[closed].entry_bytes) == (3, 12, 4)
    assert found[open_id].end <= 3
    manager.open_ledger(open_id, recover=True).close()
    assert [each.end for each in catalog.look(now=False).values()] == [3, 3]
    assert all(each.closed for each in catalog.look().values())
    manager.delete_ledger(closed)
    assert [*catalog.look()] == [open_id]


def test_ledgers_that_are_missing(cluster: Inside) -> None:
    there = fill(cluster.connect(), "there")
    missing = there + 10_000  # ids are given in blocks, and other tests take some
    catalog = LedgerCatalog(options(cluster, ledgers=f"{there},{missing},{missing + 1000}-{missing + 2000}"))
    assert [*catalog.look()] == [there]
    assert catalog.missing == [missing]
    asked = LedgerCatalog(options(cluster, ledgers=f"{there},{missing}"), ids=((0, there),))
    assert [*asked.look()] == [there]
    assert asked.missing == []


def test_positions_name_ledgers_that_are_read(cluster: Inside) -> None:
    manager = cluster.connect()
    ours, other, hidden = fill(manager, "ours"), fill(manager, "other"), fill(manager, "ours", "uncommitted")
    missing = ours + 10_000
    catalog = LedgerCatalog(options(cluster, ledgerType="ours"))
    catalog.look()
    assert catalog.absent(Positions(entries={ours: 1, hidden: 2}), Positions(entries={missing: 1})) == [missing]
    with pytest.raises(UsageError, match=f"endingOffsets names ledger {other} of type 'other', which is not among"):
        catalog.absent(Positions(), Positions(entries={other: 1}))
    pushed = LedgerCatalog(options(cluster, ledgerType="ours"), ids=((0, ours),))
    pushed.look()
    assert pushed.absent(Positions(entries={ours + 100_000: 1})) == []


@pytest.mark.parametrize(("streaming", "option"), [(False, "startingOffsets"), (False, "endingOffsets"), (True, "")])
def test_reads_refuse_positions_that_fit_nothing(cluster: Inside, streaming: bool, option: str) -> None:
    manager = cluster.connect()
    fill(manager, "fit")
    other = fill(manager, "unfit")

    def plan(ledger_id: int, **more: str) -> object:
        which = {"ledgerType": "fit", option or "startingOffsets": f'{{"{ledger_id}": 1}}', **more}
        found = options(cluster, **which)
        schema = schema_of(found)
        return StreamReader(found, schema).initialOffset() if streaming else BatchReader(found, schema).ranges()

    with pytest.raises(UsageError, match=f"names ledger {other} of type 'unfit'"):
        plan(other)
    with pytest.raises(NoSuchLedgerError, match="ledger 7777 was deleted or never existed"):
        plan(7777)
    assert plan(7777, failOnDataLoss="false")


def test_listings_that_cost_are_put_off(cluster: Inside) -> None:
    manager = cluster.connect()
    fill(manager, "put off")
    catalog = LedgerCatalog(options(cluster, ledgerType="put off"))
    assert len(catalog.look()) == 1
    catalog.list_at += 1000
    fill(manager, "put off")
    assert len(catalog.look(now=False)) == 1
    assert len(catalog.look()) == 2


def test_what_does_not_exist_is_refused_before_ledgers_are_opened(cluster: Inside) -> None:
    there = fill(cluster.connect(), "picked", close=False)
    another = secret_file(cluster.directory, b"another")

    def check(**which: str) -> None:
        LedgerCatalog(options(cluster, passwordFile=another, **which)).check_selection()

    check(ledgerType="picked")
    check(ledgerType="picke", allowMissing="true")
    check(ledgers=f"{there},70000-70001")
    check(ledgers=f"{there},70000", failOnDataLoss="false")
    with pytest.raises(NoSuchLedgerError, match=r"no ledger of .* has type 'picke'; there are .*picked.*allowMissing"):
        check(ledgerType="picke")
    with pytest.raises(NoSuchLedgerError, match="ledger 70000 was deleted or never existed"):
        check(ledgers=f"{there},70000")


def test_a_wrong_password_raises_for_a_closed_ledger_too(cluster: Inside) -> None:
    fill(cluster.connect(), "guarded")
    another = secret_file(cluster.directory, b"another")
    with pytest.raises(UnauthorizedError):
        LedgerCatalog(options(cluster, ledgerType="guarded", passwordFile=another)).look()


def test_the_directory_of_a_bookie_is_refused(tmp_path: Path) -> None:
    """Its ledgers are parts of others, with passwords of their own."""
    with inside(tmp_path / "cluster") as cluster:
        ledger_id = fill(cluster.connect(), "parts")
        root = next(path.parent for path in sorted((tmp_path / "cluster").glob("*/cookie")))
    for which in ({"ledgerType": "parts"}, {"ledgers": "0-9"}, {"ledger": str(ledger_id)}):
        with pytest.raises(UsageError, match="is the directory of a bookie"):
            LedgerCatalog(source_options({"path": str(root), **which})).look()
    close_connections()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, None),
        ({"state": LedgerState.OPEN, "last_entry_id": -1, "length": 0}, LedgerUnsealedError),
        ({"seal": b"", "last_digest": b""}, LedgerUnsealedError),
        ({"seal": b"", "last_digest": b"", "last_entry_id": -1, "length": 0}, LedgerUnsealedError),
        ({"last_entry_id": -1, "length": 0}, SealMismatchError),
    ],
    ids=["sealed", "open", "seal-taken-away", "emptied", "emptied-under-its-seal"],
)
def test_a_required_seal_is_checked_when_the_ledgers_are_listed(
    cluster: Inside, changes: dict[str, Any], error: type[Exception] | None
) -> None:
    manager = cluster.connect()
    ledger_id = fill(manager, "guarded")
    rewrite(manager, ledger_id, **{"seal": b"", "last_digest": b"", **changes} if "state" in changes else changes)
    plain = LedgerCatalog(options(cluster, ledger=str(ledger_id)))
    required = LedgerCatalog(options(cluster, ledger=str(ledger_id), requireSeal="true"))
    if error is None:
        assert required.look() == plain.look()
        assert required.look() == plain.look()
        return
    with pytest.raises(error, match=f"ledger {ledger_id}"):
        required.look()


def test_a_task_refuses_a_ledger_whose_required_seal_was_taken_away_after_the_planning(cluster: Inside) -> None:
    manager = cluster.connect()
    ledger_id = fill(manager, "guarded-later")
    asked = options(cluster, ledger=str(ledger_id), requireSeal="true")
    end = LedgerCatalog(asked).look()[ledger_id].end
    assert sum(map(len, read_ranges(asked, schema_of(asked), [EntryRange(ledger_id, 0, end - 1)]))) == 3
    rewrite(manager, ledger_id, seal=b"", last_digest=b"")
    with pytest.raises(LedgerUnsealedError):
        list(read_ranges(asked, schema_of(asked), [EntryRange(ledger_id, 0, end - 1)]))
    unasked = options(cluster, ledger=str(ledger_id))
    assert sum(map(len, read_ranges(unasked, schema_of(unasked), [EntryRange(ledger_id, 0, end - 1)]))) == 3
