"""Marks of under-replicated ledgers: their causes, what a repair records, and what must not be removed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.errors import UsageError
from pybk.metadata.authenticated_values import ValueKind, decode_authenticated
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.store import MetadataStore
from pybk.metadata.underreplication import (
    MARK_ERROR_CHARS_MAX,
    RepairReason,
    RepairState,
    UnderReplicatedLedger,
    decode_record,
    missing_key,
    record_json,
)
from pybk.values import encode_json
from tests.metadata.harness import SimWorld, World
from tests.metadata.records import KEYS, bookie, cluster_on


def only(cluster: ClusterMetadata) -> UnderReplicatedLedger:
    """Return the only mark."""
    (record,) = cluster.marks()
    return record


def payload(store: MetadataStore) -> dict[str, object]:
    """Return what the mark of ledger 7 says in the store."""
    key = missing_key(7, bookie(1))
    node = store.get(key, latest=True)
    assert node is not None
    found: dict[str, object] = json.loads(decode_authenticated(key, node.value, KEYS)[1])
    return found


def test_a_second_mark_adds_its_cause_and_keeps_what_repairs_recorded(world: World) -> None:
    cluster = cluster_on(world.open())
    cluster.mark_under_replicated(7, bookie(1), 5, since_ns=200, size_bytes=10, target="bookie-9")
    made = only(cluster)
    assert (made.reason, made.since_ns, made.size_bytes, made.state) == ("missing", 200, 10, RepairState.QUEUED)
    tried = cluster.update_mark(made, state=RepairState.STUCK, tries=3, error="no answer")
    assert tried is not None
    cluster.mark_under_replicated(7, bookie(1), 3, reason=RepairReason.LOST, since_ns=100, size_bytes=30)
    cluster.mark_under_replicated(7, bookie(1), 9, reason=RepairReason.DRAINING, since_ns=300, size_bytes=20)
    found = only(cluster)
    assert (found.first_entry_id, found.reason, found.since_ns, found.size_bytes) == (3, RepairReason.LOST, 100, 30)
    assert found.causes == ((RepairReason.LOST, 3), (RepairReason.MISSING, 5), (RepairReason.DRAINING, 9))
    assert (found.state, found.tries, found.error, found.target) == (RepairState.STUCK, 3, "no answer", "bookie-9")


def test_reasons_are_ordered_by_urgency() -> None:
    assert sorted(RepairReason, key=lambda reason: reason.rank) == [
        *("lost", "damaged", "missing", "missed", "draining", "misplaced", "rebalance"),
    ]


def test_only_derived_causes_are_withdrawn(world: World) -> None:
    cluster = cluster_on(world.open())
    cluster.mark_under_replicated(7, bookie(1), 5)
    cluster.mark_under_replicated(7, bookie(1), 0, reason=RepairReason.LOST)
    cluster.mark_under_replicated(8, bookie(1), 0, reason=RepairReason.LOST)
    (lost, _) = cluster.marks()
    cluster.update_mark(lost, state=RepairState.NO_TARGET, tries=2)
    assert not cluster.withdraw_mark(7, bookie(1), {RepairReason.LOST, RepairReason.DRAINING})
    assert cluster.withdraw_mark(8, bookie(1), {RepairReason.LOST})
    assert cluster.withdraw_mark(8, bookie(1), {RepairReason.LOST}), "it is gone"
    found = only(cluster)
    assert (found.ledger_id, found.reason, found.first_entry_id) == (7, RepairReason.MISSING, 5)
    assert (found.state, found.tries) == (RepairState.QUEUED, 0), "the lost cause needed a target"
    before = payload(world.open())
    assert not cluster.withdraw_mark(7, bookie(1), {RepairReason.LOST})
    assert payload(world.open()) == before
    for reason in (RepairReason.MISSING, RepairReason.MISSED, RepairReason.DAMAGED):
        with pytest.raises(UsageError, match="observed"):
            cluster.withdraw_mark(7, bookie(1), {reason})


def test_what_is_observed_again_while_a_repair_runs_stays_marked(world: World) -> None:
    cluster, scrub = cluster_on(world.open()), cluster_on(world.open())
    cluster.mark_under_replicated(7, bookie(1), 5)
    taken = only(cluster)
    scrub.mark_under_replicated(7, bookie(1), 5)
    assert not cluster.unmark_under_replicated(taken), "the copy may have been made before the entry was lost again"
    assert cluster.update_mark(taken, tries=1) is None
    taken = only(cluster)
    assert scrub.unmark_under_replicated(only(scrub))
    assert cluster.update_mark(taken, tries=1) is None
    scrub.mark_under_replicated(7, bookie(1), 5)
    assert not cluster.unmark_under_replicated(taken), "it is another mark"
    assert cluster.unmark_under_replicated(only(cluster))


def test_a_cause_that_is_derived_again_writes_nothing() -> None:
    world = SimWorld()
    cluster = cluster_on(world.open())
    cluster.mark_under_replicated(7, bookie(1), 5, reason=RepairReason.LOST)
    before = world.server.changes
    cluster.mark_under_replicated(7, bookie(1), 5, reason=RepairReason.LOST)
    made = only(cluster)
    assert cluster.update_mark(made, tries=0, error="") == made
    assert world.server.changes == before


def test_the_marks_of_one_ledger_are_read_alone(world: World) -> None:
    cluster = cluster_on(world.open())
    for ledger_id, number in ((7, 1), (7, 2), (8, 1), (10_007, 1)):
        cluster.mark_under_replicated(ledger_id, bookie(number), 0)
    assert [mark.bookie for mark in cluster.marks_of(7)] == [bookie(1), bookie(2)]
    assert [mark.ledger_id for mark in cluster.marks_of(10_007)] == [10_007]
    assert cluster.marks_of(6) == []


def test_a_damaged_mark_is_a_mark(world: World) -> None:
    """A copy that is surplus but for it might be the last one."""
    store = world.open()
    cluster = cluster_on(store)
    cluster.mark_under_replicated(7, bookie(1), 0)
    key = missing_key(7, bookie(1))
    found = store.get(key)
    assert found is not None
    store.put(key, b"no mark", found.version)
    assert cluster.marks_of(7) == []
    assert [cluster.is_marked(each) for each in (6, 7, 8, 10_007)] == [False, True, False, False]


def test_marks_are_read_by_their_keys(world: World) -> None:
    cluster = cluster_on(world.open())
    for number in (1, 2):
        cluster.mark_under_replicated(7, bookie(number), 0)
    keys = [missing_key(7, bookie(2)), missing_key(8, bookie(1))]
    assert cluster.marks_at(keys) == [mark for mark in cluster.marks_of(7) if mark.bookie == bookie(2)]


def test_what_a_mark_says_is_bounded() -> None:
    cluster = cluster_on(SimWorld().open())
    for values in ({"size_bytes": -1}, {"since_ns": 1 << 63}, {"size_bytes": True}):
        with pytest.raises(UsageError, match="whole number from 0"):
            cluster.mark_under_replicated(7, bookie(1), 0, **values)
    with pytest.raises(UsageError, match="first_entry_id"):
        cluster.mark_under_replicated(7, bookie(1), -1)
    cluster.mark_under_replicated(7, bookie(1), 0)
    with pytest.raises(UsageError, match="tries"):
        cluster.update_mark(only(cluster), tries=-1)
    changed = cluster.update_mark(only(cluster), error="\udce9" * 10_000)
    assert changed is not None
    assert only(cluster) == changed
    assert changed.error == "?" * MARK_ERROR_CHARS_MAX


def test_a_member_that_knows_no_reasons_records_what_it_observes() -> None:
    """It compares ``first_entry_id`` only, and replaces a mark whose first entry is above what it observed."""
    world = SimWorld()
    cluster = cluster_on(world.open())
    cluster.mark_under_replicated(7, bookie(1), 0, reason=RepairReason.LOST)
    theirs = payload(world.open())["first_entry_id"]
    assert isinstance(theirs, int)
    assert theirs > 1 << 60, "a mark that the auditor may withdraw must not hide what such a member saw"
    cluster.mark_under_replicated(7, bookie(1), 9)
    assert payload(world.open())["first_entry_id"] == 9


def test_a_mark_without_reason_is_read_as_missing_entries() -> None:
    values = {"ledger_id": 7, "bookie_id": "a", "instance": "AAAAAAAAAAAAAAAAAAAAAA==", "first_entry_id": 5}
    found = decode_record(values)
    assert (found.first_entry_id, found.reason, found.since_ns) == (5, RepairReason.MISSING, 0)
    assert record_json(found) == encode_json(values), "nothing more is written than there was"
    newer = decode_record({**values, "causes": {"haunted": 4, "lost": 6}, "state": "exorcised", "more": 1})
    assert newer.causes == ((RepairReason.LOST, 6), (RepairReason.MISSING, 4))
    assert newer.state is RepairState.QUEUED
    for name in ("bookie_id", "error", "target"):
        with pytest.raises(ValueError, match="surrogates"):
            decode_record({**values, name: "\ud800"})
    with pytest.raises(ValueError, match="causes"):
        decode_record({**values, "causes": {}})


def test_a_report_of_a_writer_is_distinguished_and_one_of_missing_entries_to_older_members() -> None:
    """They do not know the reason, and write another one: the bookie then counts as one that may have lost entries."""
    world = SimWorld()
    cluster = cluster_on(world.open())
    cluster.mark_under_replicated(7, bookie(1), 5, reason=RepairReason.MISSED)
    assert only(cluster).causes == ((RepairReason.MISSED, 5),)
    found = payload(world.open())
    assert (found["first_entry_id"], found["causes"]) == (5, {"missed": 5})
    theirs = decode_record({**found, "causes": {"a name that they do not know": 5}})
    assert theirs.causes == ((RepairReason.MISSING, 5),)
    assert decode_record(json.loads(record_json(theirs))).causes == theirs.causes
    cluster.mark_under_replicated(7, bookie(1), 3)
    cluster.mark_under_replicated(7, bookie(1), 8, reason=RepairReason.MISSED)
    assert only(cluster).causes == ((RepairReason.MISSING, 3), (RepairReason.MISSED, 5))
    assert cluster.update_mark(only(cluster), missing_from=6) is not None
    assert only(cluster).causes == ((RepairReason.MISSING, 6), (RepairReason.MISSED, 6))


def test_a_damaged_mark_is_replaced_by_one_of_entries_that_may_be_lost(world: World) -> None:
    store = world.open()
    cluster = cluster_on(store)
    cluster.mark_under_replicated(7, bookie(1), 5, reason=RepairReason.MISSED)
    found = store.get(missing_key(7, bookie(1)))
    assert found is not None
    store.put(missing_key(7, bookie(1)), b"no mark", found.version)
    cluster.mark_under_replicated(7, bookie(1), 5, reason=RepairReason.MISSED)
    assert only(cluster).causes == ((RepairReason.MISSING, 0), (RepairReason.MISSED, 0))


@given(
    st.dictionaries(st.sampled_from(RepairReason), st.integers(0, (1 << 63) - 1), min_size=1),
    st.integers(0, (1 << 63) - 1),
    st.sampled_from(RepairState),
    st.integers(0, 1 << 31),
    st.text(st.characters(codec="utf-8"), max_size=40),
)
def test_a_mark_is_read_as_it_was_written(
    causes: dict[RepairReason, int], number: int, state: RepairState, tries: int, text: str
) -> None:
    record = UnderReplicatedLedger(
        7, bookie(1), 0, since_ns=number, size_bytes=number, state=state, tries=tries, error=text, target=text
    ).with_causes(causes)
    assert decode_record(json.loads(record_json(record))) == record


def test_a_value_at_the_key_of_another_mark_is_left_out() -> None:
    world = SimWorld()
    cluster = cluster_on(world.open())
    cluster.create_value(
        ValueKind.UNDER_REPLICATED, missing_key(8, bookie(1)), record_json(UnderReplicatedLedger(7, bookie(1), 0))
    )
    assert list(cluster.marks()) == []
