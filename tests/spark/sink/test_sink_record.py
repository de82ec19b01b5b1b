"""What is decided on a commit, for every record and attempt; how manifests are kept few."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.errors import CorruptError
from pybk.spark.places import ITSELF
from pybk.spark.sink import sink_record
from pybk.spark.sink.sink_record import (
    FOLD,
    ORPHAN_AGE_S,
    RUNS_KEPT,
    Attempt,
    Chain,
    LedgerMerge,
    ManifestRow,
    ManifestRows,
    Publish,
    Refuse,
    Replaced,
    SinkRecord,
    Skip,
    decide,
    decode_rows,
    encode_rows,
    fold,
    with_merges,
    without_names,
)

RUNS = ("a", "b", "c", "d")

records = st.builds(
    SinkRecord,
    chain=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3))).map(tuple),
    epoch=st.integers(0, 9),
    runs=st.lists(st.sampled_from(RUNS[:3]), unique=True).map(tuple),
    last=st.integers(-1, 4),
    query=st.sampled_from(["", "q", "r"]),
    floor_ns=st.integers(0, 4),
    given_up=st.lists(st.integers(0, 99), unique=True).map(tuple),
    has_merged=st.booleans(),
    replaced=st.lists(st.builds(Replaced, st.integers(0, 99), st.integers(1, 9), st.just((4, 5)))).map(tuple),
)
attempts = st.builds(
    Attempt,
    number=st.integers(0, 6),
    oldest_ns=st.integers(1, 6),
    query=st.sampled_from(["q", "r"]),
    run=st.sampled_from(RUNS),
) | st.builds(Attempt, number=st.integers(0, 6), oldest_ns=st.integers(1, 6))


@given(records, attempts)
def test_published_attempts_are_new_and_none_is_left_out(record: SinkRecord, attempt: Attempt) -> None:
    action = decide(record, attempt)
    if not isinstance(action, Publish):
        return
    assert attempt.number > record.last
    assert attempt.oldest_ns > record.floor_ns
    assert attempt.run not in record.runs[:-1]
    if record.last >= 0:
        assert record.query == attempt.query
        assert not attempt.query or attempt.number == record.last + 1
        assert action.record.floor_ns == record.floor_ns
    assert (action.record.last, action.record.query, action.record.chain) == (
        attempt.number,
        attempt.query,
        record.chain,
    )


@given(records, attempts)
def test_old_attempts_are_skipped_or_refused(record: SinkRecord, attempt: Attempt) -> None:
    action = decide(record, attempt)
    old = attempt.number <= record.last
    mine = record.query == attempt.query and attempt.run not in record.runs[:-1]
    if record.last >= 0 and not mine:
        assert isinstance(action, Refuse)
    else:
        assert isinstance(action, Skip) == old
    if isinstance(action, Skip):
        assert (action.record.last, action.record.chain) == (record.last, record.chain)


@given(records, attempts)
def test_a_run_that_was_not_seen_takes_a_new_epoch(record: SinkRecord, attempt: Attempt) -> None:
    action = decide(record, attempt)
    if isinstance(action, Refuse):
        return
    if attempt.run and attempt.run not in record.runs:
        assert action.record.epoch == record.epoch + 1
        assert action.record.runs == (*record.runs, attempt.run)
    else:
        assert (action.record.epoch, action.record.runs) == (record.epoch, record.runs)


@pytest.mark.parametrize(
    ("record", "attempt", "expected"),
    [
        (SinkRecord(), Attempt(0, 1, "q", "a"), Publish),
        (SinkRecord(), Attempt(7, 1, "q", "a"), Publish),  # a sink that begins with an old checkpoint
        (SinkRecord(last=3, query="q", runs=("a",)), Attempt(4, 1, "q", "a"), Publish),
        (SinkRecord(last=3, query="q", runs=("a",)), Attempt(3, 1, "q", "b"), Skip),
        (SinkRecord(last=3, query="q", runs=("a",)), Attempt(1, 1, "q", "b"), Skip),
        (SinkRecord(last=3, query="q", runs=("a",)), Attempt(5, 1, "q", "a"), "between are missing"),
        (SinkRecord(last=3, query="q", runs=("a", "b")), Attempt(4, 1, "q", "a"), "stop this one"),
        (SinkRecord(last=3, query="q", runs=("a", "b")), Attempt(3, 1, "q", "a"), "stop this one"),
        (SinkRecord(last=3, query="q", runs=("a",)), Attempt(4, 1, "r", "z"), "streaming query q, and .* query r"),
        (SinkRecord(last=3, query="q", runs=("a",)), Attempt(4, 1), "streaming query q, and .* batch writes"),
        (SinkRecord(last=3), Attempt(9, 1), Publish),
        (SinkRecord(last=3), Attempt(3, 1), Skip),
        (SinkRecord(last=3), Attempt(4, 1, "q", "a"), "batch writes, and .* query q"),
        (SinkRecord(last=3, floor_ns=5), Attempt(4, 5), "counted as orphans"),
        (SinkRecord(floor_ns=5), Attempt(0, 5, "q", "a"), "counted as orphans"),
        (SinkRecord(last=3, floor_ns=5), Attempt(3, 5), Skip),
        (SinkRecord(last=3, floor_ns=5), Attempt(4, 6), Publish),
    ],
)
def test_decisions(record: SinkRecord, attempt: Attempt, expected: type | str) -> None:
    action = decide(record, attempt)
    if isinstance(expected, type):
        assert type(action) is expected
    else:
        assert isinstance(action, Refuse)
        with pytest.raises(AssertionError, match=expected):
            raise AssertionError(action.reason)


def test_runs_are_forgotten_after_many() -> None:
    record = SinkRecord()
    for number in range(2 * RUNS_KEPT):
        action = decide(record, Attempt(number, 1, "q", f"run {number}"))
        assert isinstance(action, Publish)
        record = action.record
    assert (record.epoch, len(record.runs), record.runs[-1]) == (2 * RUNS_KEPT, RUNS_KEPT, f"run {2 * RUNS_KEPT - 1}")


def test_a_new_sink_looks_for_orphans_only_once_there_may_be_some() -> None:
    age_ns = int(ORPHAN_AGE_S * 1e9)
    action = decide(SinkRecord(), Attempt(0, 5 * age_ns))
    assert isinstance(action, Publish)
    assert action.record.floor_ns == 4 * age_ns


@given(records)
def test_a_record_is_what_was_encoded(record: SinkRecord) -> None:
    assert SinkRecord.decode(record.encode(), where="here") == record


@pytest.mark.parametrize(
    "change",
    [
        *({"format": 4}, {"last": None}, {"chain": [[1]]}, {"chain": 7}, {"runs": None}, {"floor_ns": "x"}),
        *({"epoch": "x"}, {"named": [[1]]}, {"retained_ns": None}, {"replaced": [[1, 2]]}),
    ],
)
def test_a_damaged_record_says_where(change: dict[str, object]) -> None:
    values = json.loads(SinkRecord(last=3, query="q").encode())
    with pytest.raises(CorruptError, match=r"the record of x.*restore"):
        SinkRecord.decode(json.dumps({**values, **change}).encode(), where="the record of x")


@given(st.integers(1, 5 * FOLD * FOLD))
def test_many_commits_make_few_manifests_that_name_all_in_order(commits: int) -> None:
    chain: Chain = ()
    manifests: dict[int, list[int]] = {}
    written = 0
    for number in range(commits):
        kept, folded, tier = fold(chain)
        rows = [row for ledger_id in folded for row in manifests.pop(ledger_id)] + [number]
        written += len(rows)
        manifests[number] = rows
        chain = (*kept, (number, tier))
    assert list(manifests) == [ledger_id for ledger_id, _ in chain]
    assert [row for rows in manifests.values() for row in rows] == list(range(commits))
    tiers = chain[0][1] + 1
    assert len(chain) <= (FOLD - 1) * tiers
    assert FOLD ** (tiers - 1) <= commits
    assert written <= commits * tiers


@pytest.mark.parametrize("count", [0, 1, 20_000, 50_001])
def test_manifests_decode_to_the_rows_that_were_encoded(count: int) -> None:
    rows: ManifestRows = [ManifestRow(number, number + 1, 2 * number, 10**18 + number) for number in range(count)]
    entries = encode_rows(7, rows)
    assert decode_rows(entries, where="here") == rows
    assert max(map(len, entries)) < 1 << 20
    with pytest.raises(CorruptError, match="manifest 7"):
        decode_rows([entries[0][:-1]], where="manifest 7")
    with pytest.raises(CorruptError, match="newer pybk"):
        decode_rows([entries[0].replace(b'"format":1', b'"format":2')], where="manifest 7")


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([ITSELF, ITSELF, 500, 501, 502]), st.integers(0, 2))),
    st.integers(1, 9),
)
def test_members_of_merged_ledgers_are_what_was_encoded(drawn: list[tuple[int, int, int]], part: int) -> None:
    """In parts of any size, and also where the names of some members were dropped."""
    ends: dict[int, int] = {}
    rows: ManifestRows = []
    for number, (entries, holder, left_out) in enumerate(drawn):
        first = 0 if holder == ITSELF else ends.get(holder, 0) + left_out
        ends[holder] = first + entries
        rows.append(ManifestRow(number, entries, 10 * entries, number + 1, holder, first))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_record, "ROWS_PER_ENTRY", part)
        encoded = encode_rows(7, rows)
    assert decode_rows(encoded, where="here") == rows
    assert [b'"format":3' in each for each in encoded] == [b'"merged"' in each for each in encoded]


def test_merges_as_values() -> None:
    rows = [ManifestRow(number, 2, 20, number + 1) for number in range(6)]
    record = SinkRecord(chain=((70, 2), (71, 1), (72, 1), (73, 0)), last=5)
    one, other = LedgerMerge(100, 9, tuple(rows[2:4])), LedgerMerge(101, 9, (rows[4],))
    new = [*one.rows(), *other.rows()]
    assert [row[4:] for row in new] == [(100, 0), (100, 2), (101, 0)]
    merged = with_merges(record, [one, other], 1000)
    assert (merged.has_merged, merged.replaced) == (True, (Replaced(100, 1000), Replaced(101, 1000)))
    again = with_merges(merged, [LedgerMerge(102, 9, tuple(new))], 2000)
    assert again.replaced == (Replaced(102, 2000, (100, 101)),)
    rows_of_third = [row._replace(holder=102, first=2 * at) for at, row in enumerate(new)]
    last = with_merges(again, [LedgerMerge(103, 9, tuple(rows_of_third))], 3000)
    assert last.replaced == (Replaced(103, 3000, (100, 101, 102)),)
    assert without_names(again, {ITSELF}).replaced == ()


def test_the_format_is_as_documented() -> None:
    record = SinkRecord(chain=((7, 1), (9, 0)), epoch=2, runs=("a", "b"), last=3, query="q", floor_ns=5)
    assert record.encode() == (
        b'{"chain":[[7,1],[9,0]],"epoch":2,"floor_ns":5,"format":1,"last":3,"query":"q","runs":["a","b"]}'
    )
    assert SinkRecord.decode(record.encode(), where="here") == record
    named = SinkRecord(last=0, named=(ManifestRow(1, 2, 3, 4),), retained_ns=6)
    assert named.encode() == (
        b'{"chain":[],"epoch":0,"floor_ns":0,"format":2,"last":0,"named":[[1,2,3,4]],"query":"","retained_ns":6,"runs":[]}'
    )
    assert SinkRecord.decode(named.encode(), where="here") == named
    rows = [ManifestRow(1, 2, 3, 4), ManifestRow(5, 6, 7, 8)]
    [written] = encode_rows(3, rows)
    assert written == b'{"created":[4,8],"format":1,"last":3,"ledgers":[[1,2,3],[5,6,7]]}'
    assert decode_rows([written], where="here") == rows


def test_manifests_of_versions_without_creation_times_are_read() -> None:
    old = b'{"format":1,"last":3,"ledgers":[[1,2,3]]}'
    assert decode_rows([old], where="here") == [ManifestRow(1, 2, 3, 0)]
    assert encode_rows(3, [ManifestRow(1, 2, 3, 0)]) == [old]
    with pytest.raises(CorruptError, match="here"):
        decode_rows([b'{"created":[1,2],"format":1,"last":3,"ledgers":[[1,2,3]]}'], where="here")
