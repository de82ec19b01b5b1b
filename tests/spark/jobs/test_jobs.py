"""Jobs over ledgers, on two executor threads and real bookies: they find exactly what was written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.internals import backend_of, cluster_backend_of, service_of, store_of

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk import spark as pybk_spark
from pybk.client.backend import ClusterBackend
from pybk.credentials import Passwords
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import Bookie
from pybk.manager.ledger_manager import LedgerManager
from pybk.replication.replica_check import Span
from pybk.spark.connection import close_connections
from pybk.spark.jobs import verify as verifying
from pybk.spark.jobs.export import export
from pybk.spark.jobs.inventory import inventory
from pybk.spark.jobs.ledgers import selected_ledgers, where_of
from pybk.spark.jobs.spreading import grouped
from pybk.spark.jobs.tier import tier
from pybk.spark.jobs.verify import CheckedReplica, verify
from pybk.storage.store import Store
from tests.cluster.inside import SECRET, Inside, inside
from tests.cluster.test_seals import rewrite
from tests.sealing import tamper
from tests.storage.real_store import open_quick
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pybk.bookie.server import BookieServer

pytestmark = pytest.mark.sampled(one_in=6, using="spark")

PASSWORD = b"the password of most ledgers here"


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_connections()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster", count=4) as cluster:
        yield cluster
        close_connections()


def payload(number: int) -> bytes:
    return b"payload %d of a ledger; " % number * 4


def fill(manager: LedgerManager, count: int, **arguments: Any) -> int:
    """Write a ledger, one entry after the other to each of its bookies at once, and return its id."""
    if isinstance(backend_of(manager), ClusterBackend):
        arguments["ack_quorum"] = arguments.get("write_quorum", min(3, arguments.get("ensemble_size", 3)))
    with manager.create_ledger(**{"password": PASSWORD, **arguments}) as writer:
        for number in range(count):
            writer.append(payload(number))
    return writer.ledger_id


def until_confirmed(cluster: Inside, ledger_id: int, last: int, password: bytes = PASSWORD) -> None:
    """Wait until a reader of a ledger sees that an entry is confirmed, which is a moment after its writer."""
    other = cluster.connect()

    def told() -> bool:
        with other.open_ledger(ledger_id, password=password, recover=False) as reader:
            return reader.last_add_confirmed >= last

    wait_until(told)


def bookie_named(cluster: Inside, name: str) -> BookieServer:
    """Return a bookie of this process."""
    return service_of(cluster.bookies[int(name.rsplit("-", 1)[1])])


def damage(store: Store, found: bytes) -> None:
    """Flip a bit of some bytes in the one place where a store keeps them."""
    hits = 0
    for row in list(store.volumes.rows.values()):
        path = Path(store.volumes.path_of(row))
        data = b"" if path.is_dir() else path.read_bytes()
        at = data.find(found)
        if at >= 0:
            hits += 1
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([data[at] ^ 1]))
    assert hits == 1


def wrong(replicas: tuple[CheckedReplica, ...]) -> list[tuple[int, str, tuple[Span, ...], tuple[Span, ...]]]:
    """Return ledger, bookie, what is missing and what is damaged."""
    return [
        (each.ledger_id, "" if each.bookie is None else each.bookie.bookie_id, each.missing, each.damaged)
        for each in replicas
    ]


# ---- spreading ---------------------------------------------------------------------------------------------------


def test_units_are_shared_out_evenly_and_none_is_left_out() -> None:
    groups = grouped([5, 5, 5, 100, 1, 1, 1, 1], 1)
    assert [number for low, high in groups for number in range(low, high)] == list(range(8))
    assert (3, 4) in groups
    assert grouped([], 2) == []
    assert len(grouped([1] * 1000, 2)) <= 10
    assert len(grouped([1 << 40] * 8, 2)) == 8


def test_the_jobs_are_where_users_look() -> None:
    jobs = {"copy", "export", "import_", "inventory", "tier", "verify"}
    assert jobs <= set(pybk_spark.__all__)
    assert {getattr(pybk_spark, job).__module__ for job in jobs} == {f"pybk.spark.jobs.{job}" for job in jobs}
    assert pybk_spark.verify is verify


# ---- verify ------------------------------------------------------------------------------------------------------


def test_every_entry_of_every_replica_is_counted(spark: SparkSession, cluster: Inside) -> None:
    client = cluster.connect()
    fill(client, 20)
    fill(client, 30, ensemble_size=4, write_quorum=2, ack_quorum=2, digest_type=DigestType.CRC32C)
    fill(client, 0, password=b"another, but there is nothing to check")
    found = verify(spark, cluster.url, cluster_secret=SECRET, password=PASSWORD)
    assert (found.ledgers, found.entries, found.replicas) == (3, 20 * 3 + 30 * 2, 3 + 4)
    assert found.bytes > 0
    assert found.sound
    assert found.problems == ()


@pytest.mark.parametrize(
    ("digest_type", "password"),
    [(DigestType.HMAC_SHA256, PASSWORD), (DigestType.HMAC_SHA256, None), (DigestType.XXH3, None)],
    ids=["by the digest", "by the bookie's checksum", "by a digest without a key"],
)
def test_a_damaged_copy_is_found_exactly_and_repaired(
    spark: SparkSession, cluster: Inside, digest_type: DigestType, password: bytes | None
) -> None:
    client = cluster.connect()
    small = fill(client, 10, digest_type=digest_type)
    ledger_id = fill(client, 40, digest_type=digest_type)
    cluster.wait_for_copies(small, 10)
    cluster.wait_for_copies(ledger_id, 40)
    bad = client.ledger_metadata(ledger_id).fragments[0].ensemble[1].bookie_id
    damage(bookie_named(cluster, bad).replicas.store, payload(17))
    arguments: dict[str, Any] = {"cluster_secret": SECRET, "password": password}
    found = verify(spark, cluster.url, **arguments)
    assert wrong(found.problems) == [(ledger_id, bad, (), (Span(17, 17, 1),))]
    assert found.entries == 10 * 3 + 40 * 3 - 1
    assert not found.sound
    repaired = verify(spark, cluster.url, **arguments, repair=True)
    assert (repaired.repaired, repaired.problems, repaired.left, repaired.sound) == (1, (), (), True)
    assert repaired.entries == 10 * 3 + 40 * 3
    assert verify(spark, cluster.url, **arguments).entries == 10 * 3 + 40 * 3


def test_entries_that_a_bookie_lost_are_reported_and_restored(spark: SparkSession, cluster: Inside) -> None:
    client = cluster.connect()
    ledger_id = fill(client, 30, ensemble_size=3, write_quorum=2, ack_quorum=2)
    bad = client.ledger_metadata(ledger_id).fragments[0].ensemble[0].bookie_id
    bookie_named(cluster, bad).replicas.delete(ledger_id)
    found = verify(spark, cluster.url, cluster_secret=SECRET, password=PASSWORD)
    assert wrong(found.problems) == [(ledger_id, bad, (Span(0, 27, 3), Span(2, 29, 3)), ())]
    assert verify(spark, cluster.url, cluster_secret=SECRET, password=PASSWORD, repair=True).sound
    assert client.ledger_metadata(ledger_id).fragments[0].ensemble[0].bookie_id == bad
    metadata = cluster_backend_of(cluster.connect())
    assert isinstance(metadata, ClusterBackend)
    assert list(metadata.membership.metadata.marks()) == []


def test_a_missing_bookie_is_reported_and_replaced(spark: SparkSession, cluster: Inside) -> None:
    client = cluster.connect()
    ledger_id = fill(client, 30)
    before = client.ledger_metadata(ledger_id).fragments[0].ensemble
    gone = before[2]
    cluster.bookies[int(gone.bookie_id[-1])].close()
    found = verify(spark, cluster.url, cluster_secret=SECRET, password=PASSWORD)
    assert found.unreachable == (str(gone),)
    assert [(each.bookie, each.entries) for each in found.problems] == [(gone, 0)]
    repaired = verify(spark, cluster.url, cluster_secret=SECRET, password=PASSWORD, repair=True)
    assert (repaired.repaired, repaired.sound, repaired.entries) == (1, True, 90)
    assert gone not in client.ledger_metadata(ledger_id).fragments[0].ensemble


def test_confirmed_entries_of_an_open_ledger_are_checked(
    spark: SparkSession, cluster: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = cluster.connect()
    with client.create_ledger(password=PASSWORD) as writer:
        for number in range(20):
            writer.append(payload(number))
        writer.force()
        until_confirmed(cluster, writer.ledger_id, 19)
        found = verify(spark, cluster.url, cluster_secret=SECRET, password=PASSWORD)
        assert found.sound
        assert found.replicas == 3
        assert found.entries >= 20 * 2
        unknown = verify(spark, cluster.url, cluster_secret=SECRET, password=b"another")
        assert unknown.left == (f"ledger {writer.ledger_id} is open, and the password is wrong",)
        assert not unknown.sound
        blind = verify(spark, cluster.url, cluster_secret=SECRET)
        assert (blind.unread, blind.entries, blind.left) == ((writer.ledger_id,), 0, ())
        assert (found.unread, unknown.unread) == ((), ())
        writer.append(payload(20))  # nobody was fenced
        for bookie in cluster.connect().ledger_metadata(writer.ledger_id).fragments[-1].ensemble[:2]:
            bookie_named(cluster, bookie.bookie_id).replicas.delete(writer.ledger_id)
        monkeypatch.setattr(verifying, "end_of", lambda *_: (19, 0))  # these two bookies report less
        lost = verify(spark, cluster.url, cluster_secret=SECRET, password=PASSWORD)
        assert [each.missing for each in lost.problems] == [(Span(0, 19, 1),)] * 2
        assert lost.late == 0


def test_what_a_bookie_of_an_open_ledger_misses_is_late_only_if_it_can_be_confirmed() -> None:
    bookies = [Bookie(f"bookie-{number}", bytes(16)) for number in range(3)]

    def sound(*missing: tuple[Span, ...], **arguments: Any) -> list[bool]:
        found = [
            CheckedReplica(7, 0, 9, bookie, growing=True, missing=spans, **arguments)
            for bookie, spans in zip(bookies, missing, strict=True)
        ]
        return [each.sound for each in verifying.mark_short(found, {7: 1})]

    assert sound((Span(3, 9, 3),), (Span(4, 8, 4),), ()) == [True] * 3
    assert sound((Span(3, 9, 3),), (Span(4, 6, 2),), (Span(8, 8, 1),)) == [False, False, True]
    assert sound((), (Span(0, 9, 1),), (Span(9, 9, 1),)) == [True, False, False]
    assert sound((), (), (), unknown=(Span(9, 9, 1),)) == [False] * 3


def test_a_ledger_of_another_password_is_reported_and_its_checksums_are_checked(
    spark: SparkSession, cluster: Inside
) -> None:
    client = cluster.connect()
    fill(client, 5)
    other = fill(client, 7, password=b"another")
    found = verify(spark, cluster.url, cluster_secret=SECRET, password=PASSWORD)
    assert (found.not_opened, found.unauthenticated) == ((other,), ())
    assert (found.problems, found.entries, found.sound) == ((), 12 * 3, False)
    found = verify(spark, cluster.url, cluster_secret=SECRET, ledgers=[other])
    assert (found.not_opened, found.unauthenticated) == ((), (other,))
    assert (found.entries, found.sound) == (7 * 3, True)


def test_bookies_that_were_replaced_meanwhile_are_checked_too(spark: SparkSession, cluster: Inside) -> None:
    client = cluster.connect()
    moved, still, deleted = fill(client, 10), fill(client, 20, ensemble_size=4, write_quorum=4), fill(client, 30)
    where, passwords, left = where_of(cluster.url, SECRET), Passwords(PASSWORD), list[str]()
    units = verifying.planned(where, passwords, selected_ledgers(where), left)
    leaving = client.ledger_metadata(moved).fragments[0].ensemble[1]
    assert leaving in client.ledger_metadata(still).fragments[0].ensemble
    client.replicate(leaving.bookie_id)
    client.delete_ledger(deleted, password=PASSWORD)
    found = verifying.checked(spark, where, passwords, units, left, quiet=True)
    entries = dict.fromkeys((each.ledger_id for each in found), 0)
    for each in found:
        entries[each.ledger_id] += each.entries
    assert entries == {moved: 30, still: 80}
    assert {each.bookie for each in found if each.ledger_id == moved} == set(
        client.ledger_metadata(moved).fragments[0].ensemble
    )
    assert all(each.sound for each in found)
    assert left == []


def test_seals_kinds_and_lengths_of_replicated_ledgers_are_checked(spark: SparkSession, cluster: Inside) -> None:
    client = cluster.connect()
    striped: dict[str, Any] = {"ensemble_size": 4, "write_quorum": 2, "ack_quorum": 2}
    sound, cut = fill(client, 20, **striped), fill(client, 20)
    unsealed, emptied = fill(client, 20), fill(client, 20)
    renamed, longer = fill(client, 5, custom_metadata={"schema": b"1"}), fill(client, 9, digest_type=DigestType.XXH3)
    weaker, typed = fill(client, 5), fill(client, 5, password=b"of the orders", ledger_type="orders")
    swapped = fill(client, 3, digest_type=DigestType.CRC32C)
    rewrite(client, cut, last_entry_id=9, length=len(payload(0)) * 10)
    rewrite(client, unsealed, seal=b"", last_digest=b"")
    rewrite(client, emptied, last_entry_id=-1, length=0)
    rewrite(client, renamed, custom_metadata={"schema": b"2"})
    rewrite(client, longer, length=client.ledger_metadata(longer).length + 1)
    rewrite(client, weaker, digest_type=DigestType.NONE)
    rewrite(client, swapped, last_digest=bytes(4))
    every = verify(
        spark, cluster.url, cluster_secret=SECRET, passwords=Passwords(PASSWORD, {"orders": b"of the orders"})
    )
    assert {ledger_id for ledger_id, _ in every.ledger_problems} == {cut, emptied, renamed, longer, weaker, swapped}
    said = [text for ledger_id, text in every.ledger_problems if ledger_id == longer]
    assert any("length up to entry 8 is" in text for text in said)
    assert any("entry 2, its last" in text for ledger_id, text in every.ledger_problems if ledger_id == swapped)
    assert (every.unsealed, every.seals_unchecked, every.not_opened) == ((unsealed,), (), ())
    assert (every.sound, every.complete) == (False, False)
    good = verify(spark, cluster.url, cluster_secret=SECRET, password=PASSWORD, ledgers=[sound])
    assert (good.sound, good.complete, good.ledger_problems) == (True, True, ())
    some = verify(spark, cluster.url, cluster_secret=SECRET, ledgers=[sound, typed])
    assert (some.sound, some.complete, some.seals_unchecked) == (True, False, (sound, typed))
    named = verify(
        spark, cluster.url, cluster_secret=SECRET, passwords=Passwords(ledgers={sound: b"another"}), ledgers=[sound]
    )
    assert "the password that is given for it is another" in named.ledger_problems[0][1]


def test_seals_and_lengths_of_a_store_are_checked(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_quick(path) as manager:
        cut, sound, swapped = fill(manager, 20), fill(manager, 20), fill(manager, 20)
    tamper(path, cut, last_entry_id=9, length=len(payload(0)) * 10)
    tamper(path, swapped, last_digest=bytes(32))
    found = verify(spark, str(path), password=PASSWORD)
    assert {ledger_id for ledger_id, _ in found.ledger_problems} == {cut, swapped}
    assert verify(spark, str(path), password=PASSWORD, ledgers=[sound]).complete


def test_a_store_is_checked_while_its_writer_runs(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_quick(path) as manager:
        first = fill(manager, 40)
        with manager.create_ledger(password=PASSWORD, digest_type=DigestType.CRC32C, ledger_type="b") as writer:
            writer.append_many([payload(100 + number) for number in range(50)])
            found = verify(spark, str(path), password=PASSWORD)
            assert (found.sound, found.ledgers, found.entries) == (True, 2, 90)
            assert verify(spark, str(path), password=PASSWORD, ledger_type="b").entries == 50
            store = store_of(manager)
            damage(store, payload(17))
            damage(store, payload(130))
            found = verify(spark, str(path), password=PASSWORD)
            assert wrong(found.problems) == [
                (first, "", (), (Span(17, 17, 1),)),
                (writer.ledger_id, "", (), (Span(30, 30, 1),)),
            ]
            assert found.entries == 88
            with pytest.raises(UsageError, match="one copy"):
                verify(spark, str(path), repair=True)


def test_a_directory_of_a_bookie_is_no_store(spark: SparkSession, cluster: Inside) -> None:
    fill(cluster.connect(), 5, ensemble_size=4, write_quorum=4)
    with pytest.raises(UsageError, match="directory of a bookie"):
        verify(spark, str(cluster.directory / "bookie-0"))


# ---- tier --------------------------------------------------------------------------------------------------------


def test_closed_ledgers_are_moved_by_policy(spark: SparkSession, cluster: Inside) -> None:
    client = cluster.connect()
    small = fill(client, 2, ledger_type="logs")
    large = fill(client, 40, ledger_type="logs", storage_hints={StorageHint.SSD})
    other = fill(client, 40, ledger_type="metrics")
    closed = fill(client, 40, password=b"another", ledger_type="logs")
    with client.create_ledger(password=PASSWORD, ledger_type="logs") as writer:
        writer.append(payload(0))
        arguments: dict[str, Any] = {"cluster_secret": SECRET, "password": PASSWORD}
        found = tier(
            spark, cluster.url, StorageHint.HDD, **arguments, ledger_type="logs", larger_than=500, dry_run=True
        )
        assert (found.ledgers, found.not_opened, found.failed, found.dry_run) == ((large,), (closed,), (), True)
        assert found.bytes == client.ledger_metadata(large).length
        assert client.ledger_metadata(large).tier is StorageHint.SSD
        assert tier(spark, cluster.url, StorageHint.HDD, **arguments, older_than=3600).ledgers == ()
        found = tier(spark, cluster.url, StorageHint.HDD, **arguments, hint=StorageHint.SSD)
        assert (found.ledgers, found.not_opened) == ((large,), ())
        found = tier(spark, cluster.url, StorageHint.HDD, **arguments, older_than=0)
        assert (found.ledgers, found.not_opened) == ((small, other), (closed,))
    for ledger_id in (small, large, other):
        metadata = client.ledger_metadata(ledger_id)
        assert metadata.tier is StorageHint.HDD
        for bookie in metadata.fragments[0].ensemble:
            parts = bookie_named(cluster, bookie.bookie_id).replicas.replica(ledger_id)
            assert parts is not None
            assert {part.metadata.tier for part in parts.parts()} == {StorageHint.HDD}
    for ledger_id in (closed, writer.ledger_id):
        assert client.ledger_metadata(ledger_id).tier is not StorageHint.HDD
    assert verify(spark, cluster.url, **arguments, ledgers=[small, large, other]).sound


def test_ledgers_that_cannot_be_moved_are_reported_and_others_moved(spark: SparkSession, cluster: Inside) -> None:
    client = cluster.connect()
    first, second = fill(client, 5, ensemble_size=1), fill(client, 5, ensemble_size=1)
    while client.ledger_metadata(second).fragments == client.ledger_metadata(first).fragments:
        second = fill(client, 5, ensemble_size=1)
    gone = client.ledger_metadata(first).fragments[0].ensemble[0]
    cluster.bookies[int(gone.bookie_id[-1])].close()
    found = tier(spark, cluster.url, StorageHint.SSD, cluster_secret=SECRET, password=PASSWORD, ledgers=[first, second])
    assert found.ledgers == (second,)
    ((failed, reason),) = found.failed
    assert failed == first
    assert str(gone) in reason


def test_a_store_is_not_moved_from_outside(spark: SparkSession, tmp_path: Path) -> None:
    with open_quick(tmp_path / "store"), pytest.raises(UsageError, match="one process writes"):
        tier(spark, str(tmp_path / "store"), StorageHint.HDD)


# ---- inventory ---------------------------------------------------------------------------------------------------


def test_the_inventory_lists_ledgers_bookies_and_under_replicated_fragments(
    spark: SparkSession, cluster: Inside
) -> None:
    client = cluster.connect()
    whole = fill(client, 30, ledger_type="logs", ensemble_size=4, write_quorum=2, ack_quorum=2)
    hinted = fill(client, 10, storage_hints={StorageHint.SSD}, digest_type=DigestType.CRC32C)
    with client.create_ledger(password=PASSWORD) as writer:
        writer.append(payload(0))
        until_confirmed(cluster, writer.ledger_id, 0)
        backend = cluster_backend_of(client)
        assert isinstance(backend, ClusterBackend)
        noted = client.ledger_metadata(hinted).fragments[0].ensemble[1]
        backend.membership.metadata.mark_under_replicated(hinted, noted, 0)
        gone = client.ledger_metadata(whole).fragments[0].ensemble[3]
        cluster.bookies[int(gone.bookie_id[-1])].close()
        rewrite(client, hinted, seal=b"", last_digest=b"")
        found = inventory(spark, cluster.url, cluster_secret=SECRET, password=PASSWORD)
        blind = inventory(spark, cluster.url, cluster_secret=SECRET, password=b"another", ledgers=[writer.ledger_id])
    rows = {row.ledger_id: row for row in found.ledgers.collect()}
    length = client.ledger_metadata(whole).length
    assert (rows[whole].ledger_type, rows[whole].entries, rows[whole].bytes) == ("logs", 30, length)
    assert (rows[hinted].storage_hints, rows[hinted].tier, rows[hinted].digest_type) == (["ssd"], "ssd", "CRC32C")
    assert (rows[writer.ledger_id].state, rows[writer.ledger_id].entries) == ("open", 1)
    assert (rows[whole].sealed, rows[hinted].sealed, rows[writer.ledger_id].sealed) == (True, False, None)
    assert [(row.sealed, row.unsealed) for row in found.by_kind().filter("ledger_type = 'logs'").collect()] == [(1, 0)]
    assert all(0 <= row.age_seconds < 600 for row in rows.values())
    assert {ledger_id: row.created.timestamp() for ledger_id, row in rows.items()} == {
        ledger_id: pytest.approx(client.ledger_metadata(ledger_id).creation_time_ns / 1e9, abs=1e-3)
        for ledger_id in rows
    }
    replicas = [row for row in found.replicas.collect() if row.ledger_id == whole]
    assert sum(row.entries for row in replicas) == 60
    assert sum(row.bytes for row in replicas) == pytest.approx(2 * length, abs=8)
    short = {(row.ledger_id, row.bookie): row for row in found.replicas.filter("under_replicated").collect()}
    assert (short[whole, gone.bookie_id].registered, short[whole, gone.bookie_id].recorded) == (False, False)
    if noted != gone:
        assert (short[hinted, noted.bookie_id].registered, short[hinted, noted.bookie_id].recorded) == (True, True)
    assert {bookie for _, bookie in short} == {gone.bookie_id, noted.bookie_id}
    assert [(row.entries, row.bytes) for row in blind.ledgers.collect()] == [(None, None)]
    assert {row.entries for row in blind.replicas.collect()} == {None}


def test_inventory_of_a_store(spark: SparkSession, tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        fill(manager, 3)
        with manager.create_ledger(ledger_type="b", insecure=True) as writer:
            writer.append(b"12345")
            found = inventory(spark, str(tmp_path / "store"))
            assert sorted((row.ledger_type, row.entries, row.state) for row in found.ledgers.collect()) == [
                ("", 3, "closed"),
                ("b", 1, "open"),
            ]
            assert found.replicas.collect() == []
    empty = tmp_path / "empty"
    open_quick(empty).close()
    assert inventory(spark, str(empty)).ledgers.count() == 0


def test_a_flag_takes_true_or_false_alone(tmp_path: Path, spark: SparkSession) -> None:
    where: Any = str(tmp_path)
    with open_quick(tmp_path) as manager, manager.create_ledger(insecure=True) as writer:
        writer.append(b"entry")
    with inside(tmp_path / "cluster", count=1) as cluster:
        calls: list[Any] = [
            lambda: verify(spark, where, repair="no"),  # type: ignore[arg-type]
            lambda: verify(spark, where, quiet="no"),  # type: ignore[arg-type]
            lambda: tier(spark, cluster.url, StorageHint.HDD, cluster_secret=SECRET, dry_run="no"),  # type: ignore[arg-type]
            lambda: export(spark, where, str(tmp_path / "export"), open_too="no"),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(UsageError, match="is 'no'; it takes True or False"):
                call()
