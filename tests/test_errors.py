from __future__ import annotations

import errno
import inspect
from typing import Any

import pytest

from pybk import errors
from pybk.errors import (
    AppendTimeoutError,
    BlobLockedError,
    CorruptError,
    DigestMismatchError,
    DuplicateEntryError,
    EntryUnknownError,
    IllegalOperationError,
    LedgerClosedError,
    LedgerExistsError,
    LedgerFencedError,
    LedgerRecoveryError,
    LogFencedError,
    LogLockedError,
    MetadataError,
    MetadataUnreachableError,
    MetadataVersionError,
    NoSuchEntryError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
    OutOfMemoryError,
    PybkError,
    ReadRangeError,
    StorageFailedError,
    StorageFullError,
    StorageRefusedError,
    StoreLockedError,
    TooManyRequestsError,
    UnauthorizedError,
    UsageError,
)
from pybk.metadata.authenticated_values import UnknownEpochError

ERRORS: list[Any] = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]

BOOKKEEPER_CODES = {
    ReadRangeError: -1,
    DigestMismatchError: -5,
    NotEnoughBookiesError: -6,
    NoSuchLedgerError: -7,
    LedgerRecoveryError: -10,
    LedgerClosedError: -11,
    NoSuchEntryError: -13,
    UsageError: -14,
    MetadataVersionError: -17,
    MetadataError: -18,
    LedgerExistsError: -20,
    DuplicateEntryError: -22,
    AppendTimeoutError: -23,
    IllegalOperationError: -100,
    LedgerFencedError: -101,
    UnauthorizedError: -102,
    StorageFullError: -104,
    TooManyRequestsError: -105,
    EntryUnknownError: -108,
}


def test_codes_are_bookkeepers() -> None:
    assert {kind: kind.code for kind in BOOKKEEPER_CODES} == BOOKKEEPER_CODES
    assert PybkError.code == -999


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_is_in_the_tree_and_keeps_its_message(kind: type[PybkError]) -> None:
    assert issubclass(kind, PybkError)
    assert str(kind("what, limit, remedy")) == "what, limit, remedy"


def test_outcome_is_unknown_only_where_the_entry_may_be_there() -> None:
    unknown = {kind for kind in ERRORS if kind.outcome_unknown}
    assert unknown == {LedgerFencedError, LogFencedError, AppendTimeoutError, StorageFailedError}


def test_errors_whose_cause_may_end_without_the_caller_are_retryable() -> None:
    assert {kind for kind in ERRORS if kind.retryable} == {
        BlobLockedError,
        EntryUnknownError,
        LedgerRecoveryError,
        LogLockedError,
        OutOfMemoryError,
        StoreLockedError,
        TooManyRequestsError,
        StorageFullError,
        StorageRefusedError,
        MetadataUnreachableError,
        NotEnoughBookiesError,
    }


@pytest.mark.parametrize("kind", ERRORS)
def test_one_error_may_say_otherwise(kind: type[PybkError]) -> None:
    usual = kind.outcome_unknown
    assert kind("x", outcome_unknown=not usual).outcome_unknown is not usual
    assert kind("x").outcome_unknown is usual
    assert kind.outcome_unknown is usual


def test_errors_are_subclasses_of_the_matching_errors_of_python() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(AppendTimeoutError, TimeoutError)


def test_errors_name_the_corrupt_place_and_the_holder_of_the_lock() -> None:
    error = CorruptError("x", path="a.log", offset=4096)
    assert (error.path, error.offset) == ("a.log", 4096)
    assert (CorruptError("x").path, CorruptError("x").offset) == (None, None)
    assert StoreLockedError("x", pid=7).pid == 7
    assert StoreLockedError("x").pid is None


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_without_frames_says_the_same_and_refers_to_none(kind: Any) -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "no space")
        except OSError as cause:
            raise kind("what, limit, remedy", outcome_unknown=True) from cause
    except kind as caught:
        error = caught
    error.extra = 7
    free = errors.without_frames(error)
    assert (type(free), str(free), vars(free)) == (kind, "what, limit, remedy", vars(error))
    assert (free.__traceback__, free.__context__) == (None, None)
    assert isinstance(free.__cause__, OSError)
    assert (free.__cause__.__traceback__, free.__cause__.__context__) == (None, None)
    assert error.__traceback__ is not None, "it is raised still"


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = UsageError("x")
    error.__cause__ = error
    assert str(errors.without_frames(error)) == "x"


def test_an_error_that_is_made_of_more_than_its_text_is_copied_whole() -> None:
    error = UnknownEpochError("what, limit, remedy", 7)
    error.add_note("where")
    free = errors.without_frames(error)
    assert isinstance(free, UnknownEpochError)
    assert (str(free), free.epoch) == (str(error), 7)
    free.add_note("when")
    assert error.__notes__ == ["where"]
