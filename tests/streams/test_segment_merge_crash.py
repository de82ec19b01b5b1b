"""Merges whose process dies at any step, or whose answer is lost: the log has all records, once, and nothing leaks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pybk import LedgerManager, Log, LogEnd, LogReader, NoSuchLogError
from pybk.streams import ledger_steps
from pybk.streams.ledger_list import UNKNOWN, Step, WriteList
from pybk.streams.list_record import MERGES
from tests.internals import performed
from tests.sampling import sample
from tests.streams.test_detached import commit, numbered
from tests.streams.test_detached_crash import dying
from tests.streams.test_list_pages import parts_of
from tests.streams.test_log import PASSWORD, data_of, opened
from tests.waiting import WAIT_S

COMMITS = 9
EXPECTED = [b"%d" % number for number in range(2 * COMMITS)]


@pytest.fixture(autouse=True)
def _short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_steps, "PAGE_SEGMENTS", 4)


def fill(log: Log) -> None:
    for number in range(COMMITS):
        commit(log, number, numbered(2 * number, 2))


def merge(log: Log) -> int:
    """Merge segments into two ledgers, of which the first has a page's and the second those of page and record."""
    return log.merge_segments(segment_records=10, keep_s=0).ledgers


def steps_of(what: Callable[[], object]) -> int:
    taken: list[Step] = []

    def perform(real: Callable[[Step], Any], step: Step) -> Any:
        taken.append(step)
        return real(step)

    with performed(perform):
        what()
    return len(taken)


def check(manager: LedgerManager, log: Log, readers: list[LogReader]) -> None:
    """Check that the log has its records, that readers continue, and that nothing is left once merges are done."""
    assert data_of(log) == EXPECTED
    merge(log)
    merge(log)
    assert len(log.segments()) == 2
    assert data_of(log) == EXPECTED
    for count, reader in enumerate(readers):
        assert [each.seq for each in reader] == list(range(count, len(EXPECTED)))
    with log.subscribe("sub") as subscription:
        read = [record.data for _ in EXPECTED if (record := subscription.read(0)) is not None]
    assert read == EXPECTED
    commit(log, COMMITS, numbered(len(EXPECTED), 2))
    assert log.merge_segments(keep_s=0).ledgers == 1, "so a run that died is not the last one"
    log.merge_segments()
    Log.sweep(manager, password=PASSWORD)
    listed = {each.ledger_id for each in log.segments()}
    assert {each.ledger_id for each in manager.ledgers(ledger_type="log")} == listed


@pytest.mark.sampled(one_in=6, group="steps")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_merge_that_dies_at_any_step_changes_no_record(manager: LedgerManager, after: bool) -> None:
    with opened(manager) as log:
        fill(log)
        steps = steps_of(lambda: merge(log))
    assert steps > 15
    Log.delete(manager, "log", password=PASSWORD)
    for at in sample(f"deaths of a merge, {after}", range(steps), 6):
        with opened(manager) as log:
            fill(log)
            log.subscribe("sub", start=LogEnd.EARLIEST).close()
            readers = [log.reader() for _ in EXPECTED]
            for count, reader in enumerate(readers):
                assert sum(len(reader.read_many(1, 0)) for _ in range(count)) == count
            with dying(at, after=after):
                merge(log)
            check(manager, log, readers)
        Log.delete(manager, "log", password=PASSWORD)
        assert list(manager.ledgers()) == []


@pytest.mark.parametrize("done", [False, True])
def test_a_merge_whose_answer_is_lost_is_read_from_the_record(manager: LedgerManager, done: bool) -> None:
    with opened(manager) as log:
        fill(log)
        log.subscribe("sub", start=LogEnd.EARLIEST).close()
        lost = 3

        def perform(real: Callable[[Step], Any], step: Step) -> Any:
            nonlocal lost
            if isinstance(step, WriteList) and step.record.replaced and lost:
                lost -= 1
                if done:
                    real(step)
                return UNKNOWN
            return real(step)

        with performed(perform):
            assert merge(log) == 2
        assert lost < 3
        assert data_of(log) == EXPECTED
        assert len(log.segments()) == 2
        check(manager, log, [])


def test_a_log_that_is_deleted_before_a_merge_is_listed_leaves_nothing(manager: LedgerManager) -> None:
    with opened(manager) as log:
        fill(log)

        def perform(real: Callable[[Step], Any], step: Step) -> Any:
            if isinstance(step, WriteList) and step.record.replaced:
                with ThreadPoolExecutor() as pool:
                    pool.submit(Log.delete, manager, "log", password=PASSWORD).result(WAIT_S)
            return real(step)

        with performed(perform), pytest.raises(NoSuchLogError):
            merge(log)
    assert list(manager.ledgers()) == []
    assert parts_of(manager) == []


def test_the_beginning_of_a_run_whose_answer_is_lost_is_made_again(manager: LedgerManager) -> None:
    with opened(manager) as log:
        fill(log)
        lost = 2

        def perform(real: Callable[[Step], Any], step: Step) -> Any:
            nonlocal lost
            if isinstance(step, WriteList) and step.record.last_epoch(MERGES) is not None and lost:
                lost -= 1
                if lost:
                    real(step)
                return UNKNOWN
            return real(step)

        with performed(perform):
            assert merge(log) == 2
        assert lost == 0
        assert data_of(log) == EXPECTED
