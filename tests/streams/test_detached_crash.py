"""Commits of detached segments whose process dies at any step, or whose answer is lost: each is made exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pybk import LedgerManager, Log, LogEnd, MetadataUnreachableError, NewRecord, NoSuchLedgerError
from pybk.streams import ledger_list
from pybk.streams.detached_writer import row_of
from pybk.streams.ledger_list import CONFLICT, UNKNOWN, DeleteLedger, Step, WriteList
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import ListKind
from pybk.streams.log_settings import spec_of
from tests.internals import leave, performed
from tests.paths import ROOT
from tests.sampling import sample
from tests.streams.test_detached import commit, numbered, written
from tests.streams.test_log import PASSWORD, data_of, opened
from tests.waiting import PROCESS_S

EXPECTED = [b"%d" % number for number in range(12)]


class DeathError(BaseException):
    """The end of a process."""


@contextmanager
def dying(at: int, *, after: bool) -> Iterator[None]:
    """Have the process die at one of the steps of a commit, before that was done or after.

    A thread that closes a writer which was dropped takes its steps undisturbed.
    """
    steps, committing = count(), threading.get_ident()

    def perform(real: Callable[[Step], Any], step: Step) -> Any:
        number = next(steps) if threading.get_ident() == committing else -1
        if number == at and not after:
            raise DeathError
        result = real(step)
        if number == at:
            raise DeathError
        return result

    with performed(perform), suppress(DeathError):
        yield


def steps_of_a_commit(log: Log, epoch: int) -> int:
    """Make a commit, and return how many steps it took."""
    taken: list[Step] = []

    def perform(real: Callable[[Step], Any], step: Step) -> Any:
        taken.append(step)
        return real(step)

    with performed(perform):
        commit(log, epoch, numbered(0, 2), numbered(2, 3))
    return len(taken)


def prepared(log: Log) -> None:
    """Have a commit before, and an open segment whose writer died."""
    commit(log, 0, numbered(0, 2), numbered(2, 3))
    writer = log.writer()
    writer.append_many(numbered(5, 2))
    leave(writer)


@pytest.mark.sampled(one_in=6, group="steps")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_commit_that_dies_at_any_step_is_made_once(manager: LedgerManager, after: bool) -> None:
    with opened(manager, "first") as log:
        log.adopt([], query="query", epoch=0)
        steps = 3 + steps_of_a_commit(log, 1)  # there is an open segment, and one that is deleted
    for at in range(steps):
        name = f"log {at}"
        with opened(manager, name) as log, log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
            prepared(log)
            segments = written(log, 1, numbered(7, 2), numbered(9, 3))
            with dying(at, after=after):
                log.adopt(segments, query="query", epoch=1)
            assert data_of(log) in (EXPECTED[:7], EXPECTED), "all or nothing"
            done = log.last_epoch("query") == 1
            assert done == (data_of(log) == EXPECTED)
            again = written(log, 1, numbered(7, 2), numbered(9, 3))  # a new attempt of each task
            assert log.adopt(again, query="query", epoch=1).is_new == (not done)
            assert data_of(log) == EXPECTED
            with log.writer() as writer:
                writer.append(b"12")
            commit(log, 2, numbered(13, 1))
            read = [record.data for _ in range(14) if (record := subscription.read(0)) is not None]
            assert read == [*EXPECTED, b"12", b"13"]
            log.sweep_detached("query")
            unlisted = {each.ledger_id for each in (*segments, *again)} - {each.ledger_id for each in log.segments()}
            assert unlisted.isdisjoint(manager.list_ledgers())


@pytest.mark.parametrize("when", ["done", "late", "never"])
def test_what_a_commit_of_unknown_outcome_wrote_is_kept_if_it_takes_effect(manager: LedgerManager, when: str) -> None:
    """A commit that is given up either has taken effect, or its change, which may arrive late, is refused."""
    with opened(manager) as log:
        prepared(log)
        segments = written(log, 1, numbered(7, 2), numbered(9, 3))
        late: list[Callable[[], Any]] = []

        def perform(real: Callable[[Step], Any], step: Step) -> Any:
            if isinstance(step, WriteList) and step.record.last_epoch("query") == 1:
                if when == "done" and real(step) == CONFLICT:
                    return CONFLICT  # the thread that closes the writer that was left has changed the list
                late.append(lambda: real(step))
                raise MetadataUnreachableError("gone", outcome_unknown=True)
            return real(step)

        with performed(perform), pytest.raises(MetadataUnreachableError):
            log.adopt(segments, query="query", epoch=1)
        deleted = log.discard_detached(segments, query="query", epoch=1)
        if when == "late":
            [change] = late
            assert change() == CONFLICT
        assert data_of(log) == (EXPECTED if when == "done" else EXPECTED[:7])
        assert deleted == ([] if when == "done" else [each.ledger_id for each in segments])
        again = written(log, 1, numbered(7, 2), numbered(9, 3))
        assert log.adopt(again, query="query", epoch=1).is_new == (when != "done")
        assert data_of(log) == EXPECTED


@pytest.mark.parametrize("is_first", [False, True])
def test_a_commit_beside_which_it_is_given_up_does_nothing(manager: LedgerManager, is_first: bool) -> None:
    """Another process commits the segments, before they are given up or between that and their deletion."""
    with opened(manager) as log:
        prepared(log)
        segments = written(log, 1, numbered(7, 2), numbered(9, 3))
        rows = [row_of(each) for each in segments]
        driver = LedgerSteps(manager, "log", spec_of(ListKind.LOG, PASSWORD, None, insecure=False))
        deleted: list[int] = []
        met, acting = False, threading.get_ident()

        def commit_them() -> None:
            with pytest.raises(NoSuchLedgerError, match="commit 1 of 'query' was deleted; write it again"):
                driver.perform(ledger_list.adopt("log", rows, "query", 1, lambda: 1))

        def give_up() -> None:
            deleted.extend(log.discard_detached(segments, query="query", epoch=1))

        def perform(real: Callable[[Step], Any], step: Step) -> Any:
            nonlocal met
            commits = isinstance(step, WriteList) and step.record.last_epoch("query") == 1
            meets = commits if is_first else isinstance(step, DeleteLedger)
            if meets and not met and threading.get_ident() == acting:
                met = True
                (give_up if is_first else commit_them)()
            return real(step)

        with performed(perform):
            (commit_them if is_first else give_up)()
        assert met
        assert deleted == [each.ledger_id for each in segments]
        assert data_of(log) == EXPECTED[:7]
        commit(log, 1, numbered(7, 2), numbered(9, 3))
        assert data_of(log) == EXPECTED


@pytest.mark.parametrize("done", [False, True])
def test_a_commit_whose_answer_is_lost_is_read_from_the_record(manager: LedgerManager, done: bool) -> None:
    with opened(manager) as log:
        prepared(log)
        segments = written(log, 1, numbered(7, 2), numbered(9, 3))
        lost, acting = 3, threading.get_ident()

        def perform(real: Callable[[Step], Any], step: Step) -> Any:
            nonlocal lost
            commits = isinstance(step, WriteList) and step.record.last_epoch("query") == 1
            if commits and lost and threading.get_ident() == acting:  # the log's upkeep writes the list, too
                lost -= 1
                if done and lost == 2:
                    real(step)
                return UNKNOWN
            return real(step)

        with performed(perform):
            assert log.adopt(segments, query="query", epoch=1).is_new
        if done and manager.is_cluster:
            assert lost < 3  # a cluster reports a change some time later, so the commit may be tried again
        else:
            assert lost == (2 if done else 0)
        assert data_of(log) == EXPECTED


def test_another_driver_of_the_query_makes_the_commit_first(manager: LedgerManager) -> None:
    """It does so between the read and the compare-and-set of this one, after the lock was lost."""
    with opened(manager) as log:
        prepared(log)
        mine = written(log, 1, numbered(7, 2), numbered(9, 3))
        others = written(log, 1, numbered(7, 2), numbered(9, 3))
        rows = [row_of(each) for each in others]
        driver = LedgerSteps(manager, "log", spec_of(ListKind.LOG, PASSWORD, None, insecure=False))
        overtaken = False

        def perform(real: Callable[[Step], Any], step: Step) -> Any:
            nonlocal overtaken
            if isinstance(step, WriteList) and not overtaken:
                overtaken = True
                assert driver.perform(ledger_list.adopt("log", rows, "query", 1, lambda: 1)).is_new
            return real(step)

        with performed(perform):
            found = log.adopt(mine, query="query", epoch=1)
        assert (found.is_new, found.last_epoch, found.last_seq) == (False, 1, 11)
        assert data_of(log) == EXPECTED
        listed = {each.ledger_id for each in log.segments()}
        assert listed >= {each.ledger_id for each in others}
        assert listed.isdisjoint(each.ledger_id for each in mine)


CHILD = """
import os, signal, sys
from itertools import count
from pybk import LedgerManager
from pybk.streams.ledger_steps import LedgerSteps
from tests.streams.test_detached import numbered, written
from tests.streams.test_log import opened

path, at = sys.argv[1], int(sys.argv[2])
real, steps = LedgerSteps._step, count()

def step(self, step):
    if next(steps) == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, step)

with LedgerManager.open(path) as manager, opened(manager) as log:
    segments = written(log, 1, numbered(7, 2), numbered(9, 3))
    LedgerSteps._step = step
    log.adopt(segments, query="query", epoch=1)
"""


@pytest.mark.long
def test_a_process_that_is_killed_at_any_step_of_a_commit_has_made_all_of_it_or_nothing(tmp_path: Path) -> None:
    states = set()
    before, after = sample("kills before a commit", range(4), 4), sample("kills after a commit", range(6, 10), 4)
    for at in (*before, *after):  # its fifth step is the compare-and-set, or its sixth if a segment is open
        path = tmp_path / f"store {at}"
        with LedgerManager.open(path) as manager, opened(manager) as log:
            prepared(log)
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(path), str(at)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            timeout=PROCESS_S,
            check=False,
        )
        with LedgerManager.open(path) as manager, opened(manager) as log:
            done = log.last_epoch("query") == 1
            states.add(done)
            assert child.returncode == -signal.SIGKILL or done
            assert data_of(log) == (EXPECTED if done else EXPECTED[:7])
            again = written(log, 1, numbered(7, 2), [NewRecord(each) for each in EXPECTED[9:]])
            assert log.adopt(again, query="query", epoch=1).is_new == (not done)
            assert data_of(log) == EXPECTED
    assert states == {False, True}
