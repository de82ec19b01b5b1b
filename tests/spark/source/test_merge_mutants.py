"""Each rule of merges of ledgers is broken on purpose, in sinks and in their readers; a test must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.spark.connection import close_connections
from tests.cluster.inside import Inside, inside
from tests.spark.sink import test_ledger_merge as sinks
from tests.spark.sink import test_row_change as changes
from tests.spark.sink.test_manifest import place as place  # a fixture
from tests.spark.sink.test_retention_mutants import Mutant, mutate, run
from tests.spark.source import test_merged_ledgers as reads
from tests.spark.source.test_merged_ledgers import pipeline as pipeline  # a fixture

pytestmark = pytest.mark.usefixtures("process_of_a_driver")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    """Yield a cluster of one test alone, because all tests name their sinks alike."""
    with inside(tmp_path / "cluster", count=1) as cluster:
        yield cluster
        close_connections()


CHECKS: Final[dict[str, Callable[..., None]]] = {
    "plain": sinks.test_small_ledgers_become_one_and_keep_their_numbers,
    "again": sinks.test_merged_ledgers_are_merged_again,
    "kinds": sinks.test_only_ledgers_of_one_kind_are_merged,
    "limits": sinks.test_limits_of_a_merged_ledger,
    "retention": sinks.test_a_retention_during_a_merge,
    "dropped": sinks.test_names_of_deleted_members_are_dropped,
    "two": sinks.test_two_merges_at_once,
    "answer": sinks.test_an_answer_that_is_lost,
    "lost": sinks.test_names_that_are_dropped_while_an_answer_is_lost,
    "many": sinks.test_only_so_many_merges_are_kept_for_readers,
    "incomplete": sinks.test_a_copy_that_is_incomplete_is_not_named,
    "orphan": sinks.test_an_orphan_is_collected_and_never_named,
    "missing": sinks.test_old_ledgers_stay_while_the_merged_one_is_missing,
    "tried": sinks.test_old_ledgers_that_cannot_be_deleted_are_tried_again,
    "folds": sinks.test_folds_keep_members_of_merged_ledgers,
    "busy": sinks.test_a_merge_ends_although_a_commit_comes_whenever_it_writes,
    "folded": sinks.test_after_a_fold_its_names_alone_are_written_again,
    "large": sinks.test_a_large_manifest_is_not_written_again_after_a_fold,
    "pieces": sinks.test_manifests_that_a_merge_writes_have_so_many_rows_at_most,
    "collected": sinks.test_what_a_collection_may_have_deleted_is_written_again,
    "values": changes.test_rows_that_a_record_names_itself_are_looked_at_each_time,
    "too old": sinks.test_what_was_written_does_not_name_a_merge_that_became_too_old,
    "rounds": sinks.test_rounds_are_of_so_many_members_at_most,
    "unreadable": sinks.test_old_ledgers_whose_metadata_cannot_be_read_are_kept_and_tried_again,
    "batch": reads.test_a_batch_reads_the_same_before_and_after,
    "columns": reads.test_columns_of_members,
    "numbers": reads.test_ledgers_by_their_numbers,
    "listing": reads.test_a_merge_during_a_listing,
    "planned": reads.test_a_merge_between_plan_and_read,
    "checkpoint": reads.test_a_checkpoint_from_before_a_merge,
    "over": reads.test_a_query_over_merges,
    "follows": reads.test_a_catalog_that_follows,
    "named": reads.test_a_query_of_ledgers_that_are_named,
    "opened": reads.test_a_new_read_opens_merged_ledgers_alone,
    "missed": reads.test_a_ledger_is_not_deleted_because_a_listing_misses_the_merged_one,
    "merged again": reads.test_a_ledger_is_not_deleted_because_it_is_merged_again,
    "lagging": reads.test_a_look_sees_what_a_server_has_not_heard_of_yet,
}

SINK: Final = "pybk.spark.sink.manifest:Sink."
RECORD: Final = "pybk.spark.sink.sink_record:"
MERGE: Final = "pybk.spark.sink.ledger_merge:"
CHANGE: Final = "pybk.spark.sink.row_change:RowChange."
CATALOG: Final = "pybk.spark.source.ledger_catalog:LedgerCatalog."
READING: Final = "pybk.spark.source.reading:"

MUTANTS: Final = [
    Mutant(
        "SK13: a member keeps the place of its entries",
        RECORD + "LedgerMerge.rows",
        "first += row.entries",
        "pass",
        "plain",
    ),
    Mutant("SK13: ledgers of one kind alone are merged", MERGE + "_reach", "part.kind == first.kind", "True", "kinds"),
    Mutant(
        "SK13: a member has a creation time",
        MERGE + "plans_of",
        "all((row.created_ns for row in found))",
        "True",
        "limits",
    ),
    Mutant("SK13: a copy is complete", MERGE + "copied", "_check_complete(plan, writer)", "pass", "incomplete"),
    Mutant("SK13: readers show no merged ledger", CATALOG + "_selected", "is_merged(metadata)", "False", "over"),
    Mutant("SK14: members are as they were copied", SINK + "merge", "_are_as_copied(each, named)", "True", "retention"),
    Mutant("SK14: no orphan is named", SINK + "merge", "each.created_ns > record.floor_ns", "True", "orphan"),
    Mutant("SK14: a merge that took effect is not undone", SINK + "merge", "[*done, *new]", "new", "answer"),
    Mutant(
        "SK14: a ledger that the record names is not deleted",
        SINK + "merge",
        "each.holder in holders",
        "all((named.get(row.ledger_id) == row for row in each.rows()))",
        "lost",
    ),
    Mutant(
        "SK14: the record names so many merges only",
        MERGE + "merge_ledgers",
        "max(0, KEPT_MERGES_MAX - len(sink.record().replaced))",
        "None",
        "many",
    ),
    Mutant(
        "SK17: what was written serves after a commit",
        SINK + "_rewritten",
        "part not in change.written",
        "True",
        "busy",
    ),
    Mutant(
        "SK17: what was found in a manifest serves after a commit",
        CHANGE + "look",
        "each in seen and each in fixed",
        "each in seen",
        "values",
    ),
    Mutant(
        "SK17: a fold has its rows alone written again",
        CHANGE + "parts",
        "size + rows <= sink_record.MANIFEST_ROWS",
        "True",
        "folded",
    ),
    Mutant(
        "SK17: a fold has no larger manifest written again",
        CHANGE + "parts",
        "part[-1][1] == each[1]",
        "True",
        "large",
    ),
    Mutant("SK17: what commits do not fold is not folded", CHANGE + "note", "len(written) > 1", "False", "pieces"),
    Mutant(
        "SK17: what may have been deleted is written again",
        CHANGE + "look",
        "self._created_ns[each] > record.floor_ns",
        "True",
        "collected",
    ),
    Mutant(
        "SK17: what other merges have written is not used", SINK + "merge", "change.written.clear()", "pass", "too old"
    ),
    Mutant("SK17: manifests that are not named go", CHANGE + "unnamed", "sorted(_1)", "[]", "busy"),
    Mutant(
        "SK17: a round has so many members",
        MERGE + "_rounds",
        "members + len(plan.members) > ROUND_MEMBERS",
        "False",
        "rounds",
    ),
    Mutant("SK14: one process merges a sink", MERGE + "_locked", "lock is None", "False", "two"),
    Mutant(
        "SK15: old ledgers are kept for a time", SINK + "release_replaced", "each.until_ns <= now_ns", "True", "again"
    ),
    Mutant(
        "SK15: old ledgers that stay are named",
        SINK + "release_replaced",
        "not failed",
        "True",
        "tried",
    ),
    Mutant(
        "a metadata store that is gone ends the deletion of old ledgers",
        SINK + "release_replaced",
        "raises=True",
        "raises=False",
        "tried",
    ),
    Mutant(
        "SK15: old ledgers that cannot be deleted are reported",
        SINK + "release_replaced",
        "stay |= failed",
        "pass",
        "tried",
    ),
    Mutant(
        "SK15: an old ledger that cannot be read is not gone",
        SINK + "_deleted_of",
        "is_deleted(self.metadata, each)",
        "True",
        "unreadable",
    ),
    Mutant(
        "SK15: a merged ledger that cannot be read is not gone",
        SINK + "release_replaced",
        "for holder in sorted(there): ...",
        "for holder in due:\n    released.append(holder)",
        "unreadable",
    ),
    Mutant(
        "SK15: a ledger that a listing misses is not gone",
        CATALOG + "deleted",
        "gone - self._sought_in_merged(connected, gone)",
        "gone",
        "missed",
    ),
    Mutant(
        "SK15: a merged ledger that is gone may have been merged again",
        "pybk.spark.sink.manifest:places_in_merged",
        "lost <= tried",
        "True",
        "merged again",
    ),
    Mutant(
        "SK15: a ledger is in no merged ledger that is gone",
        "pybk.spark.sink.manifest:places_in_merged",
        "place.holder not in lost",
        "True",
        "merged again",
    ),
    Mutant("a batch sees every ledger that exists", CATALOG + "there", "found.metadata.catch_up()", "pass", "lagging"),
    Mutant(
        "a first look sees every ledger that exists",
        CATALOG + "_update",
        "changes.metadata.catch_up()",
        "pass",
        "lagging",
    ),
    Mutant(
        "SK15: a ledger that is gone is looked up",
        CATALOG + "_leave_out",
        "ledger_id in there",
        "False",
        "follows",
    ),
    Mutant(
        "SK15: a ledger that a listing misses is looked up",
        CATALOG + "_newly_committed",
        "self._members_of_now(found, {each: unseen[each] for each in gone}).values()",
        "()",
        "batch",
    ),
    Mutant("SK15: a task follows a merge", READING + "OpenLedgers.moved", "place == planned", "True", "planned"),
    Mutant(
        "SK15: a repeated micro-batch knows the places",
        CATALOG + "placed",
        "not self._has_looked",
        "False",
        "checkpoint",
    ),
    Mutant(
        "SK15: a merged ledger leads to its sink", CATALOG + "_note_merged", "self._merging.add(_1)", "pass", "batch"
    ),
    Mutant(
        "SK15: members that are named are sought",
        CATALOG + "_list",
        "self._sought_in_merged(_1, _2)",
        "pass",
        "numbers",
    ),
    Mutant(
        "SK15: a new read takes the merged ledger",
        CATALOG + "_place",
        "place.holder == ITSELF or _1",
        "False",
        "opened",
    ),
    Mutant(
        "SK16: merged ledgers are no orphans",
        SINK + "collect",
        "all_named.update((row.stored_in for row in named))",
        "pass",
        "orphan",
    ),
    Mutant(
        "SK16: folds keep members",
        SINK + "_not_deleted",
        "deleted = _1\nreturn _2",
        "deleted = self._deleted_of(row.ledger_id for row in rows)\n"
        "return [row for row in rows if row.ledger_id not in deleted]",
        "folds",
    ),
    Mutant(
        "a row has the number of the member's entry",
        READING + "_read_range",
        "entries.entry_ids - shift",
        "entries.entry_ids",
        "columns",
    ),
    Mutant(
        "a row has the metadata of the member",
        READING + "_read_range",
        "left.stored_in != left.ledger_id",
        "False",
        "columns",
    ),
    Mutant(
        "names that were dropped leave gaps",
        RECORD + "_merged_runs",
        "(rows[high].holder, rows[high].first)",
        "(rows[high].holder, last.first + last.entries)",
        "dropped",
    ),
]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_a_broken_rule_is_noticed(
    mutant: Mutant, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, mutant)
    with pytest.raises((Exception, pytest.fail.Exception)):  # whatever the test says
        run(CHECKS[mutant.check], request)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", sorted({mutant.check for mutant in MUTANTS}))
def test_the_checks_pass_where_no_rule_is_broken(name: str, request: pytest.FixtureRequest) -> None:
    run(CHECKS[name], request)
