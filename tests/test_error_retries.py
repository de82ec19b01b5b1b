"""What each error says about a retry is what a retry does: in a real situation for each class, the call is repeated."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from pybk import errors
from pybk.errors import BlobError, EntryError, LedgerError, LogError, PybkError, StorageError
from tests.error_situations import clusters, logs, stores
from tests.error_situations.situation import CASES, Case, Scene, nothing
from tests.waiting import wait_until

NEVER_RAISED: Final = {
    PybkError: "the base of all",
    LedgerError: "the base of those of ledgers",
    EntryError: "the base of those of entries",
    StorageError: "the base of those of disks",
    LogError: "the base of those of logs",
    BlobError: "the base of those of blobs",
}
"""Classes without a situation, and why."""

TABLES: Final = (clusters, logs, stores)


def test_each_class_has_a_situation() -> None:
    """A class that is added needs one, in a module of ``tests/error_situations``."""
    assert {case.make.__module__ for case in CASES} == {table.__name__ for table in TABLES}
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PybkError)}
    assert {case.kind for case in CASES} == kinds - NEVER_RAISED.keys()


def caught(kind: type[PybkError], call: Callable[[], object]) -> PybkError:
    with pytest.raises(PybkError) as found:
        call()
    assert type(found.value) is kind, f"{found.value!r}"
    return found.value


def succeeds(kind: type[PybkError], call: Callable[[], object]) -> bool:
    """Repeat a call: a client may learn only from further ones that a bookie has come back."""
    failed: PybkError | None = None
    try:
        call()
    except PybkError as error:
        failed = error
    assert failed is None or (type(failed), failed.outcome_unknown, failed.retryable) == (kind, False, True)
    return failed is None


@pytest.mark.timeout(0)
@pytest.mark.parametrize("case", CASES, ids=[f"{case.kind.__name__}-{case.make.__name__}" for case in CASES])
def test_a_retry_does_what_the_error_says(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has happened unless it says so; the retry succeeds once the cause is over, or fails again as before."""
    with ExitStack() as stack:
        situation = case.make(Scene(tmp_path, stack, monkeypatch))
        error = caught(case.kind, situation.call)
        assert (error.outcome_unknown, error.retryable) == (case.unknown, case.retryable)
        assert situation.effects() == 0 or error.outcome_unknown
        if not error.retryable:
            again = caught(situation.again or case.kind, situation.call)
            assert not again.retryable
            assert situation.effects() == 0 or again.outcome_unknown
        situation.remedy()
        if error.retryable:
            wait_until(lambda: succeeds(case.kind, situation.call), "a retry succeeds")
            assert situation.effects() == 1 or error.outcome_unknown or situation.effects is nothing
