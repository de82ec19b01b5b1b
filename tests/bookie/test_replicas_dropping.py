"""Dropping the entries of a ledger, over kills and crashes."""

from __future__ import annotations

from itertools import count

import pytest

from pybk.bookie.replicas import Replicas
from pybk.errors import PybkError, StorageFullError
from pybk.flags import WriteFlag
from pybk.replication.messages import Status
from tests.bookie.replica_harness import (
    LEDGER,
    add,
    after_crash,
    assert_reads,
    check_disk,
    content,
    describe,
    entry,
    make_run,
    no_space,
    open_replicas,
    state_of,
)
from tests.simdisk import SimCrash, SimFileSystem


def fill(replicas: Replicas, *, fenced: bool) -> None:
    """Store entries in three extents, one of which replaces nothing, and a fence."""
    add(replicas, make_run(0, 4))
    add(replicas, make_run(10, 4))
    add(replicas, make_run(21, 3, stride=3))
    if fenced:
        replicas.fence(LEDGER, describe())


@pytest.mark.parametrize("fenced", [False, True])
def test_entries_are_gone_and_a_fence_stays_after_a_crash_as_well(
    fs: SimFileSystem, replicas: Replicas, fenced: bool
) -> None:
    fill(replicas, fenced=fenced)
    assert replicas.count_entries(LEDGER) == 11
    replicas.drop_entries(LEDGER)
    for _ in range(2):
        assert replicas.count_entries(LEDGER) == 0
        assert replicas.ledgers() == ([LEDGER] if fenced else [])
        state = replicas.state(LEDGER)
        assert (state is not None and state.fenced) == fenced
        status = Status.NO_SUCH_ENTRY if fenced else Status.NO_SUCH_LEDGER
        assert replicas.read(LEDGER, 0, 3, 1, 100) == (status, None)
        fs, replicas = after_crash(fs, replicas)
    replicas.close()
    check_disk(fs, int(fenced))


@pytest.mark.parametrize("fenced", [False, True])
def test_entries_can_be_copied_here_again(fs: SimFileSystem, replicas: Replicas, fenced: bool) -> None:
    fill(replicas, fenced=fenced)
    replicas.drop_entries(LEDGER)
    for restarted in (False, True):
        if restarted:
            fs, replicas = after_crash(fs, replicas)
        replicas.create(LEDGER, describe())
        assert add(replicas, make_run(0, 12), recovery=True) is Status.OK
        assert_reads(replicas, 0, 11)
        fs, replicas = after_crash(fs, replicas)
        assert_reads(replicas, 0, 11)
        assert state_of(replicas).fenced == fenced
        assert state_of(replicas).header == describe()
        replicas.drop_entries(LEDGER)


@pytest.mark.parametrize("restarted", [False, True])
def test_the_last_add_confirmed_that_was_reported_does_not_go_down(
    fs: SimFileSystem, replicas: Replicas, restarted: bool
) -> None:
    """I13: every answer with a last add confirmed, and the announcement of a drop, come from ``state``."""
    fill(replicas, fenced=True)
    replicas.note_lac(LEDGER, 40, b"")
    if restarted:  # from then on, what the last entry says counts
        fs, replicas = after_crash(fs, replicas)
    reported = state_of(replicas).lac
    assert reported == (26 if restarted else 40)
    replicas.drop_entries(LEDGER)
    assert state_of(replicas).lac == reported


def test_an_unknown_ledger_and_one_with_a_fence_alone_are_left_as_they_are(replicas: Replicas) -> None:
    replicas.fence(8, None)
    for ledger_id in (8, 9):
        replicas.drop_entries(ledger_id)
    assert state_of(replicas, 8).fenced
    assert replicas.state(9) is None
    assert [replicas.count_entries(ledger_id) for ledger_id in (8, 9)] == [0, 0]


def test_entries_are_counted_without_loading_their_ledger(fs: SimFileSystem, replicas: Replicas) -> None:
    fill(replicas, fenced=True)
    fs, replicas = after_crash(fs, replicas)
    assert replicas.count_entries(LEDGER) == 11
    assert_reads(replicas, 0, 3)
    assert replicas.count_entries(LEDGER) == 11


@pytest.mark.parametrize("flags", [WriteFlag.NONE, WriteFlag.DEFERRED_FORCE], ids=str)
def test_a_stop_at_any_point_leaves_sound_entries_and_the_fence(flags: WriteFlag) -> None:
    """SD5: what is left can be dropped again, and copied here again."""
    for operation in count():
        fs = SimFileSystem(operation)
        replicas = open_replicas(fs)
        replicas.create(LEDGER, describe(flags=flags))
        fill(replicas, fenced=True)
        fs.crash_at(operation)
        ended = False
        try:
            replicas.drop_entries(LEDGER)
            ended = True
        except (SimCrash, PybkError):
            pass
        fs, replicas = after_crash(fs, replicas)
        assert state_of(replicas).fenced, f"operation {operation}"
        for entry_id in (*range(4), *range(10, 14), 21, 24, 27):
            status, run = replicas.read(LEDGER, entry_id, entry_id, 1, 1000)
            assert status is not Status.OK or content(run) == [entry(entry_id)]
            assert not ended or status is not Status.OK
        assert add(replicas, make_run(0, 28), recovery=True) is Status.OK
        fs, replicas = after_crash(fs, replicas)
        assert_reads(replicas, 0, 27)
        replicas.drop_entries(LEDGER)
        assert replicas.count_entries(LEDGER) == 0
        if ended:
            assert operation > 0, "the drop writes"
            return


def test_a_drop_that_failed_half_way_is_completed_by_the_next(fs: SimFileSystem, replicas: Replicas) -> None:
    fill(replicas, fenced=True)
    no_space(fs, replicas)
    with pytest.raises(StorageFullError):
        replicas.drop_entries(LEDGER)
    fs.heal()
    replicas.drop_entries(LEDGER)
    assert replicas.count_entries(LEDGER) == 0
    assert state_of(replicas).fenced


def test_the_lac_stays_while_the_bookie_runs_and_limbo_stays_until_it_ends(replicas: Replicas) -> None:
    """I13."""
    fill(replicas, fenced=True)
    before = state_of(replicas).lac
    replicas.put_in_limbo({LEDGER: None})
    replicas.drop_entries(LEDGER)
    assert state_of(replicas).lac == before
    assert (state_of(replicas).limbo, state_of(replicas).gap) == (True, True)
    assert replicas.read(LEDGER, 0, 0, 1, 100) == (Status.UNKNOWN, None)
