from __future__ import annotations

import copy
import errno
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

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
from pybk.flags import StorageHint
from pybk.metadata.authenticated_values import UnknownEpochError
from pybk.storage.compaction.mover import Unmoved
from pybk.storage.format.catalog import CatalogState
from pybk.storage.format.index_rows import CheckpointMark
from tests.test_everyday import pickled

SOURCE = Path(errors.__file__).parent

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


class TwoPartsError(Exception):
    """An error of a user, whose class takes other arguments than it passes on."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")
        self.one = one


@pytest.mark.parametrize("made", [OSError(errno.ENOSPC, "no space", "a.log"), TwoPartsError(1, 2), KeyError("x")])
def test_causes_that_others_have_keep_their_frames(made: Exception) -> None:
    try:
        try:
            try:
                raise ZeroDivisionError("first")
            except ZeroDivisionError as first:
                raise made from first
        except type(made) as cause:
            raise UsageError("x") from cause
    except UsageError as caught:
        error = caught
    free = errors.without_frames(error)
    assert made.__traceback__ is not None
    assert made.__context__ is made.__cause__ is not None
    assert made.__cause__.__traceback__ is not None
    found = free.__cause__
    assert found is not None
    assert found is not made
    assert (type(found), str(found), vars(found)) == (type(made), str(made), vars(made))
    assert (found.__traceback__, found.__context__) == (None, None)
    root = found.__cause__
    assert isinstance(root, ZeroDivisionError)
    assert (root.args, root.__traceback__, root.__context__) == (("first",), None, None)


# ---- copies ----------------------------------------------------------------------------------------------------------

_DEFINES = re.compile(r"^class \w+Error\(", re.MULTILINE)
_MADE: dict[str, Callable[[Any], object]] = {
    "OlderIndexError": lambda kind: kind(
        "what, limit, remedy",
        CatalogState({}, {}, {}, CheckpointMark("00" * 16, *range(1, len(CheckpointMark._fields)))),
    ),
    "ProblemError": lambda kind: kind(HTTPStatus.CONFLICT, "code", "detail", {"a": "b"}, retryable=True, passing=True),
    "UnknownEpochError": lambda kind: kind("what, limit, remedy", 7),
    "UnmovedError": lambda kind: kind([Unmoved(3, "a.cold", 2, "damaged")], StorageHint.HDD),
    "_LeftOutError": lambda kind: kind("what, limit, remedy", None),
}
"""How errors are made that take more than a text and options."""


def error_classes() -> Iterator[type[BaseException]]:
    """Yield the classes of errors that modules of pybk define, private ones included."""
    for path in sorted(SOURCE.rglob("*.py")):
        if _DEFINES.search(path.read_text(encoding="utf-8")):
            name = ".".join(("pybk", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
            for found in vars(importlib.import_module(name)).values():
                if isinstance(found, type) and issubclass(found, BaseException) and found.__module__ == name:
                    yield found


def made_of(kind: type[BaseException]) -> BaseException:
    """Return an error with a value for each option of its class."""
    if kind.__name__ in _MADE:
        found = _MADE[kind.__name__](kind)
        assert isinstance(found, kind)
        return found
    if not issubclass(kind, PybkError):
        return kind("what, limit, remedy")
    options = [each for each in inspect.signature(kind).parameters.values() if each.kind is each.KEYWORD_ONLY]
    values: dict[str, Any] = {each.name: number for number, each in enumerate(options, start=5)}
    return kind("what, limit, remedy", **values)


COPIES: Final[tuple[Callable[[Any], Any], ...]] = (copy.copy, copy.deepcopy, pickled)


def test_every_error_is_copied_and_pickled_whole() -> None:
    kinds = list(error_classes())
    assert {kind.__name__ for kind in kinds} >= {*_MADE, "PybkError", "IrregularFileError", "FrameError"}
    for kind in kinds:
        error = made_of(kind)
        error.add_note("where")
        for copied in COPIES:
            found = copied(error)
            assert type(found) is kind
            assert (found.args, str(found), vars(found)) == (error.args, str(error), vars(error)), kind
            if issubclass(kind, PybkError):
                found.args = ("another text",)
                assert copied(found).args == ("another text",), kind
