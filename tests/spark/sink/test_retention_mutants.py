"""Each rule of the retention of ledgers, and of the records of consumers, is broken on purpose; a test must notice."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.spark.connection import close_connections
from pybk.spark.jobs import retain as job
from pybk.spark.sink import manifest as sink_manifest
from pybk.spark.sink import upkeep as sink_upkeep
from tests.cluster.inside import Inside, inside
from tests.mutation.patterns import changed
from tests.spark import test_consumers as consumers
from tests.spark.sink import merging
from tests.spark.sink import test_ledger_merge as merges
from tests.spark.sink import test_sink_retention as rules
from tests.spark.sink import test_upkeep as upkeep
from tests.spark.sink.test_manifest import place as place  # a fixture
from tests.spark.sink.test_upkeep import no_consumers as no_consumers  # a fixture
from tests.spark.test_consumers import at_once as at_once  # a fixture
from tests.spark.test_consumers import metadata as metadata  # a fixture


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    """Yield a cluster of one test alone, because a check may run in several, and names its sinks always alike."""
    with inside(tmp_path / "cluster", count=1) as cluster:
        yield cluster
        close_connections()


def limits_are_kept() -> None:
    """Check which ledgers are beyond limits, with all cases of the test of that."""
    for retention, expected in arguments_of(rules.test_the_oldest_are_beyond_the_limits):
        rules.test_the_oldest_are_beyond_the_limits(retention, expected)


def what_is_needed_is_kept() -> None:
    """Check what is deleted, with all cases of the test of that."""
    for case in arguments_of(rules.test_what_a_consumer_needs_is_kept):
        rules.test_what_a_consumer_needs_is_kept(*case)


def consumers_are_asked() -> None:
    """Check what many consumers have read, with all seeds of the test of that."""
    for seed in range(20):
        rules.test_consumers_are_asked_all_at_once_as_one_by_one(seed)


def arguments_of(test: Any) -> list[Any]:
    """Return the cases of a test with parameters."""
    return list(test.pytestmark[0].args[1])


CHECKS: Final[dict[str, Callable[..., None]]] = {
    "limits": limits_are_kept,
    "needs": what_is_needed_is_kept,
    "asked": consumers_are_asked,
    "clocks": rules.test_a_ledger_is_not_older_than_one_that_was_committed_before,
    "slow clock": upkeep.test_a_slow_clock_does_not_end_a_ledger_early,
    "values": rules.test_limits_that_make_no_sense_are_refused,
    "by age": upkeep.test_ledgers_go_by_age_and_their_names_with_them,
    "by size": upkeep.test_ledgers_go_by_size_the_oldest_first,
    "read": upkeep.test_what_a_consumer_has_not_read_is_kept,
    "nobody": upkeep.test_without_a_consumer_what_was_read_is_kept,
    "type": upkeep.test_the_type_in_the_metadata_says_who_reads_a_ledger,
    "damaged": upkeep.test_a_consumer_that_cannot_be_read_keeps_everything,
    "orphan": upkeep.test_what_is_not_committed_is_kept,
    "old manifests": upkeep.test_manifests_without_creation_times_are_taken_by_metadata,
    "stopped": upkeep.test_a_retention_that_is_stopped_anywhere_is_made_up_for,
    "raced": upkeep.test_a_commit_meanwhile_is_not_lost,
    "refused": upkeep.test_names_that_changed_although_that_was_refused_are_not_damaged,
    "sometimes": upkeep.test_a_sink_applies_its_retention_now_and_then,
    "in parts": upkeep.test_a_commit_deletes_some_and_the_next_one_continues,
    "unreached": upkeep.test_a_metadata_store_that_is_gone_is_waited_for_once,
    "of another": upkeep.test_a_ledger_of_another_sink_is_kept_although_it_is_named,
    "begun": upkeep.test_a_query_that_begins_meanwhile_keeps_what_was_not_deleted_yet,
    "missing": upkeep.test_a_ledger_that_is_only_missing_keeps_its_name,
    "merged": merges.test_a_merged_ledger_expires_as_a_whole,
    "released": merges.test_names_stay_if_members_were_released_during_a_retention,
    "of a type": upkeep.test_a_type_of_all_sinks_is_retained,
    "record": consumers.test_a_query_records_where_it_begins_and_what_is_complete,
    "two": consumers.test_of_two_queries_with_one_name_the_older_ends,
    "taken": consumers.test_a_query_takes_no_consumer_that_reads_other_ledgers,
    "lost": consumers.test_what_the_store_does_not_take_is_recorded_later,
    "unreadable": consumers.test_a_record_that_cannot_be_read_is_an_error,
}


class Mutant(NamedTuple):
    """A rule, the function that is broken, how, and the check that has to notice."""

    rule: str
    function: str
    old: str
    new: str
    check: str


RULES: Final = "pybk.spark.sink.sink_retention:"
UPKEEP: Final = "pybk.spark.sink.upkeep:"
SINK: Final = "pybk.spark.sink.manifest:Sink."
CONSUMERS: Final = "pybk.spark.consumers:"
FINISHED: Final = "pybk.spark.finished_ledgers:"

MUTANTS: Final = [
    Mutant(
        "RT1: a ledger that another sink owns is kept",
        UPKEEP + "_HeldLedgers._is_wanted",
        "is_own and self._type in (None, metadata.ledger_type)",
        "self._type in (None, metadata.ledger_type)",
        "of another",
    ),
    Mutant(
        "RT1: a ledger of another type is kept",
        UPKEEP + "_HeldLedgers._is_wanted",
        "is_own and self._type in (None, metadata.ledger_type)",
        "is_own",
        "of a type",
    ),
    Mutant(
        "RT1: what was copied or imported is kept",
        "pybk.spark.jobs.retain:retain",
        "not name.startswith((COPY_OF, IMPORT_OF))",
        "True",
        "of a type",
    ),
    Mutant(
        "RT2: the age is that since the creation",
        RULES + "beyond_limits",
        "each.since_ns < before_ns",
        "each.since_ns <= before_ns",
        "limits",
    ),
    Mutant(
        "RT2: a ledger is not older than one that was committed before",
        RULES + "with_ages",
        "yield row, max(newest_ns, row.created_ns)",
        "yield row, row.created_ns",
        "clocks",
    ),
    Mutant(
        "RT2: a time in the future counts for its own ledger alone",
        RULES + "with_ages",
        "row.created_ns <= now_ns",
        "True",
        "clocks",
    ),
    Mutant(
        "RT2: the age of a ledger counts since that of its sink's",
        UPKEEP + "_HeldLedgers._members",
        "max(since_ns, each.creation_time_ns)",
        "each.creation_time_ns",
        "slow clock",
    ),
    Mutant(
        "RT2: a ledger with which the size is just reached is kept",
        RULES + "beyond_limits",
        "newer > retention.max_bytes",
        "newer >= retention.max_bytes",
        "limits",
    ),
    Mutant(
        "RT2: the size is counted from the newest on",
        RULES + "beyond_limits",
        "sorted(held, reverse=True)",
        "sorted(held)",
        "limits",
    ),
    Mutant(
        "RT2: one of the two limits is enough",
        RULES + "beyond_limits",
        "is_old or (retention.max_bytes is not None and newer > retention.max_bytes)",
        "is_old and (retention.max_bytes is None or newer > retention.max_bytes)",
        "limits",
    ),
    Mutant(
        "RT2: the size is that of the payloads",
        UPKEEP + "_HeldLedgers._members",
        "each.length",
        "1",
        "by size",
    ),
    Mutant(
        "RT2: with a size, all ledgers are counted before one is judged",
        UPKEEP + "_judged",
        "retention.max_bytes is None",
        "True",
        "by size",
    ),
    Mutant(
        "RT3: what is unread beyond the limits is kept",
        RULES + "may_be_deleted",
        "is_read is not False or not retention.keep_unread",
        "True",
        "needs",
    ),
    Mutant(
        "RT3: what is unread goes if that is asked for",
        RULES + "may_be_deleted",
        "is_read is not False or not retention.keep_unread",
        "is_read is not False",
        "needs",
    ),
    Mutant(
        "RT3: without a consumer the limits are enough",
        RULES + "may_be_deleted",
        "is_read is not False or not retention.keep_unread",
        "is_read is True or not retention.keep_unread",
        "needs",
    ),
    Mutant(
        "RT3: all consumers count, not one",
        RULES + "Readership.have_read",
        "all(each.has(ledger.ledger_id, ledger.creation_time_ns) for each in mine)",
        "any(each.has(ledger.ledger_id, ledger.creation_time_ns) for each in mine)",
        "asked",
    ),
    Mutant(
        "RT3: a consumer of ranges of ids counts, too",
        RULES + "Readership._finished",
        "(str(ledger.ledger_type), None)",
        "(str(ledger.ledger_type),)",
        "asked",
    ),
    Mutant(
        "RT3: a consumer of other ids does not count",
        RULES + "Readership._finished",
        "is_selected(ledger, *selection)",
        "True",
        "asked",
    ),
    Mutant(
        "RT3: what one of many has yet to read is unread",
        FINISHED + "FinishedByAll.has",
        "within(ledger_id, self._left)",
        "False",
        "asked",
    ),
    Mutant(
        "RT3: the consumer that is the furthest back counts",
        FINISHED + "FinishedByAll.__init__",
        "min(each.upto for each in every)",
        "max(each.upto for each in every)",
        "asked",
    ),
    Mutant(
        "RT3: the consumer with the earliest time counts",
        FINISHED + "FinishedByAll.__init__",
        "self._every[0].before_ns",
        "self._every[-1].before_ns",
        "asked",
    ),
    Mutant(
        "RT4: what was read within the limits is kept unless that is asked for",
        RULES + "may_be_deleted",
        "is_read is True and not retention.keep_read",
        "is_read is True",
        "needs",
    ),
    Mutant(
        "RT4: what nobody selects was not read",
        RULES + "may_be_deleted",
        "is_read is True and not retention.keep_read",
        "is_read is not False and not retention.keep_read",
        "needs",
    ),
    Mutant(
        "RT4: what was read is looked at before it is old",
        UPKEEP + "_may_expire",
        "not retention.keep_read and readership.may_have_read(row.ledger_id, row.created_ns)",
        "False",
        "read",
    ),
    Mutant(
        "RT5: a query that begins meanwhile keeps the rest",
        UPKEEP + "retain_ledgers",
        "going and not dry_run",
        "False",
        "begun",
    ),
    Mutant(
        "RT6: a merged ledger is kept as long as one of its members",
        UPKEEP + "_expired",
        "all((_1 for each in members))",
        "any((_1 for each in members))",
        "merged",
    ),
    Mutant(
        "RT6: what is kept for readers of a merged ledger goes with it",
        SINK + "drop_names",
        "self._delete(self._left_over(record, dropped, holders), self._given)",
        "pass",
        "merged",
    ),
    Mutant(
        "a commit deletes some ledgers at a time",
        UPKEEP + "retain_ledgers",
        "going[: int(left)]",
        "going",
        "in parts",
    ),
    Mutant(
        "a commit that adds many deletes more",
        UPKEEP + "retain_sometimes",
        "max(DELETED_AT_ONCE, 2 * added)",
        "DELETED_AT_ONCE",
        "in parts",
    ),
    Mutant(
        "the next commit continues what a commit has left",
        UPKEEP + "retain_sometimes",
        "sum(map(len, deleted.values())) >= most",
        "False",
        "in parts",
    ),
    Mutant(
        "retention is applied now and then",
        SINK + "claim_retention",
        "record.retained_ns <= now_ns < record.retained_ns + int(period_s * 1e9)",
        "False",
        "sometimes",
    ),
    Mutant(
        "retention is applied again after a time",
        SINK + "claim_retention",
        "record.retained_ns <= now_ns < record.retained_ns + int(period_s * 1e9)",
        "record.retained_ns",
        "sometimes",
    ),
    Mutant(
        "a metadata store that is gone ends the retention",
        SINK + "delete_committed",
        "raises=True",
        "raises=False",
        "unreached",
    ),
    Mutant(
        "names go with their ledgers",
        UPKEEP + "_HeldLedgers.delete",
        "self._deleted.update(done)",
        "pass",
        "by age",
    ),
    Mutant(
        "RT5: a record that cannot be read keeps everything",
        CONSUMERS + "read_consumers",
        "[_1 for name, pointer in sorted(_2)]",
        "[_1 for name, pointer in sorted(_2) if len(pointer.value) > 2]",
        "damaged",
    ),
    Mutant(
        "names that a stopped retention left are dropped",
        UPKEEP + "retain_ledgers",
        "if not dry_run: ...",
        "if expired:\n    held.drop_names()",
        "stopped",
    ),
    Mutant(
        "the name of a ledger that is only missing stays",
        UPKEEP + "_HeldLedgers.drop_names",
        "ledger_id in self._gone or is_deleted(self._metadata, ledger_id)",
        "True",
        "missing",
    ),
    Mutant(
        "the name of a ledger that a merge has moved stays",
        SINK + "drop_names",
        "row.stored_in in gone",
        "row.ledger_id in gone",
        "released",
    ),
    Mutant(
        "a commit meanwhile is not lost",
        SINK + "drop_names",
        "if now is not None: ...",
        "record = replace(record, chain=())\nbreak",
        "raced",
    ),
    Mutant(
        "a name goes after its ledger, and not before",
        UPKEEP + "_HeldLedgers.delete",
        "for ids in stored.values(): ...",
        "for ids in stored.values():\n"
        "    self._sink_of[ids[0]].drop_names(ids)\n"
        "    done.update(self._sink_of[ids[0]].delete_committed(ids))",
        "stopped",
    ),
    Mutant(
        "names of ledgers that are left stay",
        SINK + "drop_names",
        "row.ledger_id in deleted or row.stored_in in gone",
        "True",
        "by age",
    ),
    Mutant(
        "a manifest that is named is not deleted",
        SINK + "drop_names",
        "change.unnamed(record.chain)",
        "change.unnamed(())",
        "refused",
    ),
    Mutant(
        "manifests that are not named any more are deleted",
        SINK + "drop_names",
        "self._delete(change.unnamed(record.chain), NO_CREDENTIALS)",
        "pass",
        "by age",
    ),
    Mutant(
        "CO1: a run records where it begins, whatever an earlier one has recorded",
        CONSUMERS + "QueryConsumer.begin",
        "self._write(finished, None if found is None else found.version)",
        "self._write(finished if found is None else Consumer.decode(self._name, found.value).finished,"
        " None if found is None else found.version)",
        "record",
    ),
    Mutant(
        "CO2: what was recorded is replaced by what is complete",
        CONSUMERS + "QueryConsumer.record",
        "self._record_latest()",
        "pass",
        "record",
    ),
    Mutant(
        "CO3: a run that finds another one ends",
        CONSUMERS + "QueryConsumer._write_own",
        "run != self._run",
        "False",
        "two",
    ),
    Mutant(
        "CO3: a record whose answer was lost is the run's own",
        CONSUMERS + "QueryConsumer._write_own",
        "run != self._run",
        "True",
        "lost",
    ),
    Mutant(
        "CO4: a run does not take the place of one that reads other ledgers",
        CONSUMERS + "QueryConsumer.begin",
        "self._check_selection(found)",
        "pass",
        "taken",
    ),
    Mutant(
        "unread ledgers do not expire without a limit",
        RULES + "SinkRetention.__post_init__",
        "not self.keep_unread and not self.has_limits",
        "False",
        "values",
    ),
]

PLACES: Final = (sink_manifest, sink_upkeep, job, rules, upkeep, merges, merging, consumers)
"""The modules, besides their own, into which functions are imported."""


def mutate(patch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Put a changed copy of a function in the place of the real one, wherever it was imported."""
    module_name, path = mutant.function.split(":")
    owner: Any = importlib.import_module(module_name)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    real = getattr(owner, name)
    broken = changed(real, mutant.old, mutant.new)
    for where in [owner, *(each for each in PLACES if not classes and getattr(each, name, None) is real)]:
        patch.setattr(where, name, broken)


def run(check: Callable[..., None], request: pytest.FixtureRequest) -> None:
    """Run a check with the fixtures that it takes."""
    check(**{name: request.getfixturevalue(name) for name in inspect.signature(check).parameters})


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
