"""Merges of ledgers of sinks in a real cluster, without Spark: what is merged, named and deleted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk.admin.cli import main
from pybk.credentials import Credentials, Secret
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    MetadataUnreachableError,
    PybkError,
    UnauthorizedError,
)
from pybk.feature_level import FeatureLevel
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.metadata.ledgers import LEDGERS_KEY, StoredLedger, ledger_path
from pybk.spark.connection import Connection, StoreOrCluster, close_connections, connection
from pybk.spark.consumers import QueryConsumer, Selection
from pybk.spark.finished_ledgers import FinishedLedgers
from pybk.spark.places import ITSELF, MERGED_KEY, Place
from pybk.spark.sink import ledger_merge, manifest, sink_record, upkeep
from pybk.spark.sink.ledger_merge import MergePlan, copied
from pybk.spark.sink.manifest import SINK_KEY, SINKS, FollowedSink, Sink, WrittenLedger, is_merged
from pybk.spark.sink.sink_record import LedgerMerge, ManifestRow, Replaced, one_off_app_id
from pybk.spark.sink.sink_retention import SinkRetention, with_ages
from pybk.spark.sink.upkeep import retain_ledgers
from pybk.streams.log_settings import RollPolicy
from tests.cluster.inside import SECRET, Inside, inside
from tests.internals import metadata_store_of
from tests.private_files import write_private
from tests.spark.sink.merging import merge
from tests.spark.sink.test_manifest import commit, left, look, metadata_of, sink_of, write
from tests.spark.sink.test_manifest import place as place  # a fixture
from tests.storage.real_store import contents

pytestmark = pytest.mark.sampled(one_in=2, using="place")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("merges"), count=1) as cluster:
        yield cluster
        close_connections()


def entry_of(app: str, number: int) -> bytes:
    return b"%s %d" % (app.encode(), number)


def filled(place: Connection, app: str, count: int, *, at: int = 0, size: int = 3, **more: Any) -> Sink:
    """Commit ledgers one by one, each of some entries that follow each other."""
    sink = sink_of(place, app)
    for number in range(at, at + count):
        commit(sink, number, one(place, app, number, size=size, **more), query="", run="")
    return sink


def one(place: Connection, app: str, number: int, *, size: int = 3, kind: str = "t") -> WrittenLedger:
    with place.manager.create_ledger(
        ledger_type=kind, custom_metadata={SINK_KEY: app.encode()}, ensemble_size=1, insecure=True
    ) as writer:
        writer.append_many([entry_of(app, number * size + each) for each in range(size)])
    return WrittenLedger(writer.ledger_id, size, writer.length, writer.metadata.creation_time_ns)


def entries(place: Connection, sink: Sink) -> list[bytes]:
    """Return the entries of a sink by its rows, in order."""
    found: list[bytes] = []
    for row in sink.rows():
        first = row.first
        found += contents(place.manager, row.stored_in)[first : first + row.entries]
    return found


def expected(app: str, count: int, size: int = 3) -> list[bytes]:
    return [entry_of(app, number) for number in range(count * size)]


def holders(sink: Sink) -> set[int]:
    return {row.holder for row in sink.rows()} - {ITSELF}


def check(place: Connection, sink: Sink, count: int, size: int = 3) -> None:
    """Check the entries of a sink, also as one reads them that has read none of its manifests."""
    assert entries(place, sink) == expected(sink.app_id, count, size)
    manifest.MANIFESTS_READ.clear()
    assert entries(place, sink) == expected(sink.app_id, count, size)
    assert left(place, sink.app_id, manifests=True) == {ledger_id for ledger_id, _ in sink.record().chain}


# ---- what a merge does -----------------------------------------------------------------------------------------------


def test_small_ledgers_become_one_and_keep_their_numbers(place: Connection) -> None:
    sink = filled(place, "plain", 20)
    before = sink.rows()
    made = merge(place, sink)
    assert made == (1, 20, 60, sum(row.payload_bytes for row in before), 1, (), "")
    assert [row[:4] for row in sink.rows()] == [row[:4] for row in before]
    [holder] = holders(sink)
    assert [row.first for row in sink.rows()] == [3 * number for number in range(20)]
    check(place, sink, 20)
    metadata = place.manager.ledger_metadata(holder)
    assert (metadata.custom_metadata[MERGED_KEY], str(metadata.ledger_type), is_merged(metadata)) == (b"20", "t", True)
    assert left(place, "plain") == {holder, *(row.ledger_id for row in before)}, "the old ledgers are kept for a time"
    filled(place, "plain", 3, at=20)
    check(place, sink, 23)
    assert merge(place, sink).ledgers == 1, "the three alone; the large one has more than two thirds"
    assert len({row.stored_in for row in sink.rows()}) == 2
    check(place, sink, 23)
    followed = FollowedSink(place, "plain")
    look(place, followed)
    assert followed.place(before[4].ledger_id) == Place("plain", holder, 12)
    assert followed.place(holder) == Place("plain")


class OneKind:
    """Metadata of ledgers that differ in their numbers alone."""

    def __init__(self, like: LedgerMetadata) -> None:
        self._like = like

    def read_sound_ledgers(self, ledger_ids: Sequence[int]) -> list[StoredLedger]:
        """Return the metadata of ledgers."""
        return [StoredLedger(replace(self._like, ledger_id=each), 0) for each in ledger_ids]


def test_a_day_of_micro_batches_leaves_few_ledgers(place: Connection) -> None:
    """One a second of 1 KiB, of which each hour is merged: what plans make of it, without the copies."""
    metadata: Any = OneKind(place.manager.ledger_metadata(one(place, "day", 0).ledger_id))
    rows: list[ManifestRow] = []
    copied_entries, hour = 0, 3600
    for run in range(86_400 // hour):
        rows += [ManifestRow(number, 1, 1024, number * 10**9 + 1) for number in range(run * hour, (run + 1) * hour)]
        for number, plan in enumerate(ledger_merge.plans_of(metadata, rows, RollPolicy())):
            moved = {row.ledger_id: row for row in LedgerMerge(10**6 + run * 100 + number, 0, plan.members).rows()}
            rows = [moved.get(row.ledger_id, row) for row in rows]
            copied_entries += len(moved)
    left = {row.stored_in for row in rows}
    assert len(left) <= 20
    assert len(rows) == 86_400
    assert copied_entries <= 4 * len(rows), "each entry is copied a few times"


def test_merged_ledgers_are_merged_again(place: Connection) -> None:
    sink = filled(place, "again", 6)
    merge(place, sink, policy=RollPolicy(records=6))
    firsts = holders(sink)
    assert len(firsts) == 3
    merge(place, sink)
    [holder] = holders(sink)
    assert sink.record().replaced == (Replaced(holder, sink.record().replaced[0].until_ns, tuple(sorted(firsts))),)
    check(place, sink, 6)
    assert sink.release_replaced(time.time_ns()) == ([], {}), "their time is not over"
    own = {row.ledger_id for row in sink.rows()}
    assert {*sink.release_replaced(time.time_ns() + 3601 * 10**9).deleted} == own | firsts
    assert (left(place, "again"), sink.record().replaced) == ({holder}, ())
    check(place, sink, 6)


def test_only_ledgers_of_one_kind_are_merged(place: Connection) -> None:
    sink = filled(place, "kinds", 4)
    filled(place, "kinds", 2, at=4, kind="other")
    filled(place, "kinds", 3, at=6)
    made = merge(place, sink, kind="t")
    assert (made.ledgers, made.replaced, made.left) == (2, 7, 4)
    assert [row.holder == ITSELF for row in sink.rows()] == [False] * 4 + [True] * 2 + [False] * 3
    check(place, sink, 9)
    assert merge(place, sink).ledgers == 1
    check(place, sink, 9)


def test_limits_of_a_merged_ledger(place: Connection) -> None:
    sink = filled(place, "limits", 9)
    made = merge(place, sink, policy=RollPolicy(records=12))
    assert (made.ledgers, made.replaced) == (2, 8)
    assert merge(place, sink, policy=RollPolicy(nbytes=1)).ledgers == 0
    rows = sink.rows()
    spans = [ManifestRow(row.ledger_id, 3, 30, number * 10**9) for number, row in enumerate(rows, 1)]
    plans = ledger_merge.plans_of(metadata_of(place), spans, RollPolicy(age_s=2.5))
    assert [len(plan.members) for plan in plans] == [3, 3, 3]
    unknown = [row._replace(created_ns=0) for row in spans]
    assert ledger_merge.plans_of(metadata_of(place), unknown, RollPolicy()) == []
    oldest_unknown = [unknown[0], *spans[1:]]
    (plan,) = ledger_merge.plans_of(metadata_of(place), oldest_unknown, RollPolicy(age_s=1e11))
    assert plan.members == tuple(spans[1:])


def test_a_merge_keeps_quorums_and_password(place: Connection) -> None:
    given = Credentials(b"word")
    sink = sink_of(place, "password", b"word")
    for number in range(3):
        commit(sink, number, write(place, "password", password=b"word"), query="", run="")
    with pytest.raises(Exception, match="has another password"):
        merge(place, sink)
    merge(place, sink, given=Credentials(b"word", b"a secret that has thirty-two byt"))
    [holder] = holders(sink)
    assert contents(place.manager, holder, b"word") == [b"a", b"b"] * 3
    assert not place.manager.check_password(holder, b"another")
    assert place.manager.ledger_metadata(holder).ensemble_size == 1
    assert {*sink.release_replaced(time.time_ns() + 3601 * 10**9).deleted} == {row.ledger_id for row in sink.rows()}
    assert given.password == b"word"


def test_sinks_that_are_not_merged(place: Connection, cluster: Inside) -> None:
    app = one_off_app_id()
    written = [one(place, app, number) for number in range(3)]
    sink = sink_of(place, app)
    assert commit(sink, 0, *written, query="", run="")
    assert merge(place, sink).ledgers == 0
    assert merge(place, sink_of(place, "nothing was committed")) == (0, 0, 0, 0, 0, (), "")


def test_a_lower_feature_level_merges_nothing(tmp_path: Path) -> None:
    with inside(tmp_path / "old", count=1, level=FeatureLevel.HEALING) as cluster:
        where = StoreOrCluster(metadata_uri=cluster.url, secret=Secret(SECRET))
        place = connection(where)
        sink = filled(place, "old", 2)
        with pytest.raises(IllegalOperationError, match=r"STREAMS.*`pybk cluster upgrade URL --finalize`"):
            merge(place, sink)
        close_connections()
        write_private(tmp_path / "secret", SECRET)
        secret = ["--cluster-secret-file", str(tmp_path / "secret")]
        assert main(["cluster", "upgrade", cluster.url, "--finalize", *secret]) == 0
        place = connection(where)
        assert merge(place, sink_of(place, "old")).ledgers == 1
        close_connections()


# ---- others meanwhile ------------------------------------------------------------------------------------------------


def meanwhile(monkeypatch: pytest.MonkeyPatch, what: Callable[[], object]) -> None:
    """Do something just before the next compare-and-set."""
    swap = Sink.swap

    def late(self: Sink, *arguments: Any) -> bool:
        monkeypatch.setattr(Sink, "swap", swap)
        what()
        return swap(self, *arguments)

    monkeypatch.setattr(Sink, "swap", late)


def test_a_commit_during_a_merge(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = filled(place, "commit", 5)
    other = one(place, "commit", 5)
    meanwhile(monkeypatch, lambda: commit(sink_of(place, "commit"), 5, other, query="", run=""))
    assert merge(place, sink).replaced == 5
    check(place, sink, 6)


def test_a_merge_during_a_commit(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_record, "FOLD", 4)
    sink = filled(place, "merge", 7)
    other = one(place, "merge", 7)
    meanwhile(monkeypatch, lambda: merge(place, sink_of(place, "merge")))
    assert commit(sink, 7, other, query="", run="")
    assert len(holders(sink)) == 1
    check(place, sink, 8)
    for number in range(8, 24):
        commit(sink, number, one(place, "merge", number), query="", run="")
        if number % 5 == 0:
            merge(place, sink)
        check(place, sink, number + 1)
    assert len(sink.record().chain) < 12


def deleted(sink: Sink, *ledger_ids: int) -> None:
    """Delete ledgers as a retention does."""
    assert sink.delete_committed(ledger_ids) == [*ledger_ids]
    sink.drop_names(ledger_ids)


def test_a_retention_during_a_merge(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = filled(place, "expired", 4)
    first = sink.committed()[0]
    meanwhile(monkeypatch, lambda: deleted(sink_of(place, "expired"), first))
    assert merge(place, sink).ledgers == 0, "its members are others now"
    assert len(left(place, "expired")) == 3, "the copy is deleted"
    assert entries(place, sink) == expected("expired", 4)[3:]
    assert merge(place, sink).replaced == 3
    assert entries(place, sink) == expected("expired", 4)[3:]


def test_names_stay_if_members_were_released_during_a_retention(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retention has read the names before the merge, and finds the members' own ledgers deleted."""
    sink, ages = filled(place, "released", 4), with_ages

    def merge_then(*arguments: Any) -> Any:
        found = list(ages(*arguments))
        merge(place, sink_of(place, "released"), keep_s=0.0)
        sink_of(place, "released").release_replaced(time.time_ns())
        return found

    monkeypatch.setattr(upkeep, "with_ages", merge_then)
    assert retain_ledgers(metadata_of(place), [sink], SinkRetention(max_bytes=10**9)) == {}
    assert len(holders(sink)) == 1
    assert len(left(place, "released")) == 1
    assert entries(place, sink) == expected("released", 4)


def test_a_ledger_that_is_gone_is_not_merged(place: Connection) -> None:
    sink = filled(place, "gone", 4)
    rows = sink.rows()
    place.manager.delete_ledger(rows[1].ledger_id)
    assert copied(place.manager, Credentials(), MergePlan(tuple(rows))) is None
    assert len(left(place, "gone")) == 3, "what was copied is deleted"
    # The names of what was deleted separate the others.
    assert merge(place, sink).replaced == 2


def test_names_of_deleted_members_are_dropped(place: Connection) -> None:
    """A retention has deleted a ledger, and the merge that copied it before comes first with its names."""
    sink = filled(place, "dropped", 5)
    second = sink.committed()[1]
    merge(place, sink)
    sink.drop_names({second})
    kept = expected("dropped", 5)
    assert entries(place, sink) == kept[:3] + kept[6:]
    manifest.MANIFESTS_READ.clear()
    assert entries(place, sink) == kept[:3] + kept[6:]
    filled(place, "dropped", 4, at=5)
    merge(place, sink)
    assert len(holders(sink)) == 1
    assert entries(place, sink) == kept[:3] + kept[6:] + expected("dropped", 9)[15:]


def test_two_merges_at_once(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = filled(place, "two", 4)

    def other() -> None:
        with pytest.raises(IllegalOperationError, match=r"are being merged \(.*process"):
            merge(place, sink_of(place, "two"))
        rows = tuple(sink.rows())
        made = copied(place.manager, Credentials(), MergePlan(rows))
        assert made is not None
        assert sink_of(place, "two").merge([made], 0.0) == [made]

    meanwhile(monkeypatch, other)
    assert merge(place, sink).ledgers == 0
    assert len(left(place, "two")) == 5, "the copy that came second is deleted"
    check(place, sink, 4)


def test_an_answer_that_is_lost(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compare-and-set took effect, and says that it was refused."""
    sink = filled(place, "answer", 4)
    swap = Sink.swap

    def lost(self: Sink, *arguments: Any) -> bool:
        monkeypatch.setattr(Sink, "swap", swap)
        assert swap(self, *arguments)
        return False

    monkeypatch.setattr(Sink, "swap", lost)
    assert merge(place, sink).replaced == 4
    check(place, sink, 4)


def test_names_that_are_dropped_while_an_answer_is_lost(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retention has deleted a member before the merge, and drops its name after it."""
    sink = filled(place, "unanswered", 4)
    first = sink.committed()[0]
    swap = Sink.swap

    def lost(self: Sink, *arguments: Any) -> bool:
        monkeypatch.setattr(Sink, "swap", swap)
        assert swap(self, *arguments)
        sink_of(place, "unanswered").drop_names({first})
        return False

    monkeypatch.setattr(Sink, "swap", lost)
    assert merge(place, sink).ledgers == 1
    assert entries(place, sink) == expected("unanswered", 4)[3:]


def test_only_so_many_merges_are_kept_for_readers(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = filled(place, "many", 8)
    monkeypatch.setattr(ledger_merge, "KEPT_MERGES_MAX", 3)
    policy = RollPolicy(records=6)
    assert [merge(place, sink, policy=policy).ledgers for _ in range(2)] == [3, 0]
    assert len(sink.record().replaced) == 3
    sink.release_replaced(time.time_ns() + 3601 * 10**9)
    assert merge(place, sink, policy=policy).ledgers == 1
    check(place, sink, 8)


def test_what_was_kept_for_readers_goes_with_a_merged_ledger_that_a_commit_forgot(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_record, "FOLD", 2)
    sink = filled(place, "forgot", 2)
    merge(place, sink)
    place.manager.delete_ledger(holders(sink).pop())
    filled(place, "forgot", 4, at=2)
    assert not holders(sink), "a commit has folded the manifest"
    assert len(sink.record().replaced) == 1
    sink.drop_names(())
    assert sink.record().replaced == ()


def test_a_merged_ledger_that_has_entries_of_others_stays_when_names_are_dropped(place: Connection) -> None:
    """Merges take all members of a merged ledger; one that took some would be no reason to lose the others."""
    sink = filled(place, "some", 4)
    merge(place, sink)
    first, *others = sink.rows()
    made = copied(place.manager, Credentials(), MergePlan(tuple(others)))
    assert made is not None
    assert sink.merge([made], 3600.0) == [made]
    assert sink.delete_committed([made.holder]) == [made.holder]
    sink.drop_names({row.ledger_id for row in others})
    assert sink.rows() == [first]
    assert entries(place, sink) == expected("some", 1)


def test_a_copy_that_is_incomplete_is_not_named(place: Connection) -> None:
    sink = filled(place, "short", 3)
    rows = [row._replace(payload_bytes=row.payload_bytes + 1) for row in sink.rows()]
    with pytest.raises(Exception, match="has 9 entries of"):
        copied(place.manager, Credentials(), MergePlan(tuple(rows)))
    assert len(left(place, "short")) == 3


# ---- many names, and commits all the time ----------------------------------------------------------------------------


class Busy:
    """Makes a commit each time a merge or a retention of a sink writes a manifest.

    Args:
        monkeypatch: The patches of a test.
        sink: The sink.
        next_commit: Commits something more.

    Attributes:
        written: The number of manifests that were written by others than commits.
        made: Their writers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, next_commit: Callable[[], object]) -> None:
        self.written = 0
        self.made: list[LedgerWriter] = []
        self._commits = next_commit
        self._is_committing = False
        self._create = LedgerManager.create_system_ledger
        monkeypatch.setattr(LedgerManager, "create_system_ledger", lambda *given, **more: self._created(*given, **more))

    def _created(self, *given: Any, **more: Any) -> Any:
        if not self._is_committing and self.written < 30:  # that would never end
            self.written += 1
            self._is_committing = True
            self._commits()
            self._is_committing = False
            self.made.append(self._create(*given, **more))
            return self.made[-1]
        return self._create(*given, **more)


def test_a_merge_ends_although_a_commit_comes_whenever_it_writes(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = filled(place, "busy", 20)
    busy = Busy(monkeypatch, lambda: filled(place, "busy", 1, at=len(sink.rows())))
    assert merge(place, sink).replaced == 20
    assert busy.written == 2, "one for each of the two tiers, which serve after the commits"
    check(place, sink, 22)


def test_a_retention_ends_although_a_commit_comes_whenever_it_writes(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = filled(place, "busy names", 20)
    first, *_ = sink.committed()
    busy = Busy(monkeypatch, lambda: filled(place, "busy names", 1, at=len(sink.rows())))
    deleted(sink, first)
    assert busy.written == 1
    monkeypatch.undo()
    assert entries(place, sink) == expected("busy names", 21)[3:]
    assert left(place, "busy names", manifests=True) == {each for each, _ in sink.record().chain}


def test_after_a_fold_its_names_alone_are_written_again(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_record, "MANIFEST_ROWS", 8)
    sink = filled(place, "folded", 23)
    assert [tier for _, tier in sink.record().chain] == [1, 1, *[0] * 7]
    busy = Busy(monkeypatch, lambda: filled(place, "folded", 1, at=len(sink.rows())))
    assert merge(place, sink).replaced == 23
    assert busy.written == 4, "one for each of the first two, which serve, and one for the others before and after"
    check(place, sink, 27)


def test_a_large_manifest_is_not_written_again_after_a_fold(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_record, "FOLD", 4)
    sink = filled(place, "large", 19)
    assert [tier for _, tier in sink.record().chain] == [2, 0, 0, 0]
    busy = Busy(monkeypatch, lambda: filled(place, "large", 1, at=len(sink.rows())))
    assert merge(place, sink).replaced == 19
    check(place, sink, 19 + busy.written)
    sizes = sorted(each.length for each in busy.made)
    assert sizes[-1] > 2 * sizes[-2], "that of sixteen ledgers was written once"


def test_manifests_that_a_merge_writes_have_so_many_rows_at_most(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_record, "MANIFEST_ROWS", 3)
    sink = filled(place, "pieces", 10)
    assert [tier for _, tier in sink.record().chain] == [1, 0, 0]
    merge(place, sink)
    assert [tier for _, tier in sink.record().chain] == [sink_record.WHOLE] * 3 + [0], (
        "commits do not fold the large one"
    )
    check(place, sink, 10)
    for number in range(10, 20):
        commit(sink, number, one(place, "pieces", number), query="", run="")
    assert [tier for _, tier in sink.record().chain] == [sink_record.WHOLE] * 3 + [1, 0, 0, 0]
    merge(place, sink)
    check(place, sink, 20)
    rows = sink.rows()
    deleted(sink, rows[0].stored_in)
    sink.drop_names({row.ledger_id for row in rows if row.stored_in == rows[0].stored_in})
    assert entries(place, sink) == expected("pieces", 20)[sum(row.entries for row in rows if row not in sink.rows()) :]


def test_what_a_collection_may_have_deleted_is_written_again(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between a manifest of a retention and the compare-and-set that would name it."""
    monkeypatch.setattr(sink_record, "FOLD", 2)
    sink = filled(place, "collected", 4)
    first = sink.committed()[0]
    meanwhile(monkeypatch, lambda: sink_of(place, "collected").collect(ledgers_of(place, "collected"), time.time_ns()))
    deleted(sink, first)
    manifest.MANIFESTS_READ.clear()
    assert entries(place, sink) == expected("collected", 4)[3:]
    assert left(place, "collected", manifests=True) == {each for each, _ in sink.record().chain}


def test_what_was_written_does_not_name_a_merge_that_became_too_old(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_record, "FOLD", 2)
    sink = filled(place, "too old", 4)
    rows = sink.rows()
    old, young = (copied(place.manager, Credentials(), MergePlan(tuple(part))) for part in (rows[:2], rows[2:]))
    assert old is not None
    assert young is not None
    meanwhile(monkeypatch, lambda: sink_of(place, "too old").collect([], old.created_ns))
    assert sink.merge([old, young], 0.0) == [young]
    assert holders(sink) == {young.holder}
    check(place, sink, 4)


def test_rounds_are_of_so_many_members_at_most(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_merge, "ROUND_MEMBERS", 5)
    sink, rounds = filled(place, "rounds", 12), list[int]()
    named = Sink.merge

    def noted(self: Sink, merges: Sequence[LedgerMerge], keep_s: float) -> list[LedgerMerge]:
        rounds.append(sum(len(each.members) for each in merges))
        return named(self, merges, keep_s)

    monkeypatch.setattr(Sink, "merge", noted)
    assert merge(place, sink, policy=RollPolicy(records=6)).ledgers == 6
    assert rounds == [4, 4, 4]
    check(place, sink, 12)


def test_an_error_of_a_later_round_keeps_the_report_of_those_before(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_merge, "ROUND_MEMBERS", 5)
    sink = filled(place, "broken", 12)
    named, rounds = Sink.merge, list[int]()

    def breaking(self: Sink, merges: Sequence[LedgerMerge], keep_s: float) -> list[LedgerMerge]:
        rounds.append(len(merges))
        if len(rounds) > 1:
            raise MetadataUnreachableError("the store is away")
        return named(self, merges, keep_s)

    monkeypatch.setattr(Sink, "merge", breaking)
    made = merge(place, sink, policy=RollPolicy(records=6))
    assert (made.ledgers, made.replaced, made.entries, made.failed) == (2, 4, 12, "the store is away")
    assert made.left == len({row.stored_in for row in sink.rows()}) == 10
    with pytest.raises(MetadataUnreachableError):
        merge(place, sink, policy=RollPolicy(records=6))


def test_any_other_error_of_a_round_leaves_merges_that_count_and_orphans(
    place: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_merge, "ROUND_MEMBERS", 5)
    sink = filled(place, "ended", 12)
    named, rounds = Sink.merge, list[int]()

    def breaking(self: Sink, merges: Sequence[LedgerMerge], keep_s: float) -> list[LedgerMerge]:
        rounds.append(len(merges))
        if len(rounds) == 2:
            raise OSError("the executors are gone")
        return named(self, merges, keep_s)

    with monkeypatch.context() as patch:
        patch.setattr(Sink, "merge", breaking)
        with pytest.raises(OSError, match="the executors are gone"):
            merge(place, sink, policy=RollPolicy(records=6))
    assert len(holders(sink)) == 2
    check(place, sink, 12)
    assert merge(place, sink, policy=RollPolicy(records=6)).ledgers == 4, "no lock is left"
    check(place, sink, 12)
    orphans = sink.collect(list(ledgers_of(place, "ended")), time.time_ns())
    assert len(orphans) == 2
    check(place, sink, 12)


# ---- deletions -------------------------------------------------------------------------------------------------------


def test_an_orphan_is_collected_and_never_named(place: Connection) -> None:
    sink = filled(place, "orphan", 3)
    made = copied(place.manager, Credentials(), MergePlan(tuple(sink.rows())))
    assert made is not None
    assert sink.collect(list(ledgers_of(place, "orphan")), time.time_ns()) == [made.holder]
    assert sink.merge([made], 0.0) == []
    check(place, sink, 3)
    merge(place, sink)
    [holder] = holders(sink)
    everything = time.time_ns()
    assert sink.collect(list(ledgers_of(place, "orphan")), everything) == []
    assert len(left(place, "orphan")) == 4
    check(place, sink, 3)
    assert sink.release_replaced(everything).deleted == []
    assert holder in left(place, "orphan")


def ledgers_of(place: Connection, app: str) -> list[Any]:
    return list(manifest.sink_ledgers(metadata_of(place), app))


def test_old_ledgers_stay_while_the_merged_one_is_missing(place: Connection) -> None:
    sink = filled(place, "lost", 3)
    merge(place, sink, keep_s=0.0)
    [holder] = holders(sink)
    place.manager.delete_ledger(holder)
    assert sink.release_replaced(time.time_ns()) == ([], {})
    assert left(place, "lost") == {row.ledger_id for row in sink.rows()}


def test_old_ledgers_that_cannot_be_deleted_are_tried_again(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = filled(place, "tried", 3)
    merge(place, sink, keep_s=0.0)
    delete = LedgerManager.delete_ledger
    stuck = sink.committed()[1]

    def refused(self: LedgerManager, ledger_id: int, **more: Any) -> None:
        if ledger_id == stuck:
            raise why
        delete(self, ledger_id, **more)

    with monkeypatch.context() as patch:
        patch.setattr(LedgerManager, "delete_ledger", refused)
        why: PybkError = MetadataUnreachableError("for a moment")
        with pytest.raises(MetadataUnreachableError):
            sink.release_replaced(time.time_ns())
        assert left(place, "tried") == {*sink.committed()[1:], *holders(sink)}, "the others are not waited for"
        why = UnauthorizedError("another password")
        released = sink.release_replaced(time.time_ns())
        assert (len(released.deleted), released.stay) == (1, {stuck: "another password"})
        assert merge(place, sink).stay == ((stuck, "another password"),), "the caller sees it"
    assert len(sink.record().replaced) == 1
    assert sink.release_replaced(time.time_ns()) == ([stuck], {})
    assert sink.record().replaced == ()


def test_old_ledgers_whose_metadata_cannot_be_read_are_kept_and_tried_again(place: Connection) -> None:
    sink = filled(place, "unreadable", 3)
    merge(place, sink, keep_s=0.0)
    [holder] = holders(sink)
    ids = sink.committed()
    for damaged in (ids[1], holder):
        key = f"{LEDGERS_KEY}/{ledger_path(damaged)}"
        store = metadata_store_of(place.manager)
        found = store.get(key)
        version = store.put(key, b"damage", found.version)
        assert [*sink.release_replaced(time.time_ns()).stay] == [damaged]
        assert len(sink.record().replaced) == 1, "not forgotten"
        store.put(key, found.value, version)
    assert left(place, "unreadable") == {ids[1], holder}
    assert sink.release_replaced(time.time_ns()) == ([ids[1]], {})
    assert sink.record().replaced == ()
    check(place, sink, 3)


def test_an_old_ledger_whose_metadata_are_lost_is_reported_with_a_remedy(place: Connection) -> None:
    sink = filled(place, "lost key", 3)
    merge(place, sink, keep_s=0.0)
    lost = sorted(sink.committed())[1]
    key, store = f"{LEDGERS_KEY}/{ledger_path(lost)}", metadata_store_of(place.manager)
    found = store.get(key)
    assert found is not None
    store.delete(key, found.version)
    stay = sink.release_replaced(time.time_ns()).stay
    assert [*stay] == [lost]
    assert "does not prove that it was deleted" in stay[lost]
    assert "`pybk metadata rebuild`" in stay[lost]
    store.create(key, found.value)
    assert sink.release_replaced(time.time_ns()) == ([lost], {})
    assert sink.record().replaced == ()


def expire(place: Connection, sink: Sink, **limits: Any) -> list[int]:
    dry = retain_ledgers(metadata_of(place), [sink], SinkRetention(**limits), dry_run=True).get(sink.app_id, [])
    found = retain_ledgers(metadata_of(place), [sink], SinkRetention(**limits)).get(sink.app_id, [])
    assert found == dry
    return found


def test_a_merged_ledger_expires_as_a_whole(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = filled(place, "age", 6)
    rows = sink.rows()
    merge(place, sink, policy=RollPolicy(records=9))
    assert len(holders(sink)) == 2
    old_enough = (rows[3].created_ns + rows[4].created_ns) // 2

    def now() -> int:
        return old_enough + 10 * 10**9

    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", now)
        assert expire(place, sink, max_age_s=10.0) == [row.ledger_id for row in rows[:3]]
    assert left(place, "age") == {row.ledger_id for row in rows[3:]} | holders(sink), "with what it had replaced"
    assert entries(place, sink) == expected("age", 6)[9:]
    assert len(sink.record().replaced) == 1
    assert expire(place, sink, max_bytes=sum(row.payload_bytes for row in rows[4:])) == []
    assert expire(place, sink, max_bytes=0) == [row.ledger_id for row in rows[3:]]
    assert (left(place, "age"), sink.rows()) == (set(), [])
    assert (sink.record().replaced, sink.record().has_merged) == ((), False)


def test_a_member_that_is_unread_keeps_the_merged_ledger(place: Connection) -> None:
    sink = filled(place, "unread", 4, kind="unread")
    rows = sink.rows()
    merge(place, sink)
    done = tuple((row.ledger_id, row.ledger_id) for row in rows)
    name = "consumer of merged ledgers"
    consumer = QueryConsumer(metadata_of(place), name, Selection("unread", None))
    consumer.begin(FinishedLedgers(done=done[:3]))
    assert expire(place, sink, max_bytes=0) == []
    QueryConsumer(metadata_of(place), name, Selection("unread", None)).begin(FinishedLedgers(done=done))
    assert expire(place, sink, max_bytes=0) == [row.ledger_id for row in rows]
    metadata_of(place).delete_pointer("sink-consumers", name, found_version(place, name))


def found_version(place: Connection, name: str) -> int:
    found = metadata_of(place).read_pointer("sink-consumers", name)
    assert found is not None
    return found.version


def test_names_of_a_merged_ledger_that_was_deleted_are_dropped(place: Connection) -> None:
    sink = filled(place, "names", 4)
    merge(place, sink, keep_s=0.0)
    sink.release_replaced(time.time_ns())
    [holder] = holders(sink)
    place.manager.delete_ledger(holder)
    filled(place, "names", 1, at=4)
    assert expire(place, sink, max_bytes=10**9) == []
    assert entries(place, sink) == expected("names", 5)[12:]
    assert sink.record().has_merged is False


def test_folds_keep_members_of_merged_ledgers(place: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_record, "FOLD", 2)
    sink = filled(place, "folds", 4)
    merge(place, sink, keep_s=0.0)
    sink.release_replaced(time.time_ns())
    for number in range(4, 9):
        commit(sink, number, one(place, "folds", number), query="", run="")
        check(place, sink, number + 1)


# ---- the bytes -------------------------------------------------------------------------------------------------------


def test_older_versions_refuse_records_with_merged_ledgers(place: Connection) -> None:
    sink = filled(place, "bytes", 3)

    def number() -> Any:
        found = metadata_of(place).read_pointer(SINKS, "bytes")
        assert found is not None
        return json.loads(found.value)["format"]

    assert number() == 1
    merge(place, sink)
    assert number() == 3, "they read 1 and 2"
    [manifest_id] = [ledger_id for ledger_id, _ in sink.record().chain]
    [data] = contents(place.manager, manifest_id)
    values = json.loads(data)
    [holder] = holders(sink)
    assert (values["format"], values["merged"]) == (3, [[0, 3, holder, 0]])
    values["merged"] = [[0, 4, holder, 0]]
    with pytest.raises(CorruptError):
        sink_record.decode_rows([json.dumps(values).encode()], where="a manifest")
