"""Futures of records: the future of an entry, whose result is a position in a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from pybk.backend import AppendLog
from pybk.errors import (
    LedgerFencedError,
    LedgerRecoveryError,
    LogFencedError,
    MetadataUnreachableError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
    PybkError,
)
from pybk.manager.append_future import ACKNOWLEDGED, AppendFuture, T, origin_of
from pybk.streams.format import Move, Position, moved
from pybk.threads.group_commit import Completion


class Fate:
    """The fate of the records of a log's writer, which its futures share.

    Attributes:
        moves: The entries that were appended again.
        is_fence_reported: Whether a call or a future has raised LogFencedError.
    """

    __slots__ = ("is_fence_reported", "moves")

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.is_fence_reported = False


class RecordFuture(AppendFuture[T]):
    """The outcome of an append to a log: an ``AppendFuture`` that raises the errors of logs.

    Threads: any.
    """

    __slots__ = ("_fate", "_title")

    def __init__(
        self, log: AppendLog, commit: Completion, value: T, title: str = "the log", fate: Fate | None = None
    ) -> None:
        self._log = log
        self._commit = commit
        self._value = value
        self._title = title
        self._fate = fate

    def result(self, timeout: float | None = None) -> T:
        """Wait for the append, and return its result; arguments and errors as for ``AppendFuture.result``."""
        value = super().result(timeout)
        fate = self._fate
        return _moved(value, fate.moves) if fate is not None and fate.moves else value

    def _error(self, error: PybkError) -> PybkError:
        error = log_error(error, self._title)
        if self._fate is not None and isinstance(error, LogFencedError):
            self._fate.is_fence_reported = True
        return super()._error(error)


def with_value(future: RecordFuture[Any], value: T) -> RecordFuture[T]:
    """Return a future of the same append that has another result."""
    return RecordFuture(*origin_of(future), value, future._title, future._fate)


def _moved(value: T, moves: Sequence[Move]) -> T:
    """Return the result of an append with the positions that its records have now."""
    found: Any = value
    if isinstance(found, Position):
        found = moved(found, moves)
    elif isinstance(found, list):
        found = [moved(each, moves) if isinstance(each, Position) else each for each in found]
    return cast(T, found)


LOSSES: Final = (NotEnoughBookiesError, MetadataUnreachableError, LedgerRecoveryError)
"""The errors of a ledger that is lost: its writer has ended because bookies or the metadata store did not answer, or
because the client was interrupted."""


def bookies_error(title: str, cause: Exception, seconds: float, *, outcome_unknown: bool) -> PybkError:
    """Return the error of a log's writer that has waited for bookies without result; the next append tries again.

    It is an error of the metadata store if that did not answer the last attempt.

    Args:
        title: The name of the log in errors; see ``names.title_of``.
        cause: The last error.
        seconds: Seconds for which it has waited.
        outcome_unknown: Whether records may have been appended nevertheless.
    """
    kind: type[PybkError] = NotEnoughBookiesError
    what = "too few bookies answered"
    if isinstance(cause, MetadataUnreachableError):
        kind, what = MetadataUnreachableError, "the metadata store did not answer"
    return kind(
        f"{title}: {what} for {seconds:g} s (bookie_patience_seconds), at last: {cause}; the writer continues with the "
        "next append, once that is mended",
        outcome_unknown=outcome_unknown,
    )


class _NoLog:
    """Stands for the log of appends that are done when they are made."""

    def when_done(self, commit: Completion, callback: Callable[[], None]) -> None:
        """Call a callback, because the append is done."""
        callback()


_NO_LOG: Final = cast(AppendLog, _NoLog())


def done_future(value: T) -> RecordFuture[T]:
    """Return the future of an append that is durable already."""
    return RecordFuture(_NO_LOG, ACKNOWLEDGED, value)


def log_error(error: PybkError, title: str, *, refused: bool = False) -> PybkError:
    """Return the error of a log that corresponds to an error of one of its ledgers.

    Args:
        error: The error of the ledger.
        title: The name of the log in errors; see ``names.title_of``.
        refused: Whether the append was refused, unless ``error`` says that a part of it may be in the ledger.
    """
    if not isinstance(error, LedgerFencedError | NoSuchLedgerError):
        return error
    # A take-over also deletes ledgers without records, and a truncation after it those with records.
    unknown = error.outcome_unknown or not (refused or isinstance(error, LedgerFencedError))
    translated = fenced_error(title, f" ({error})", outcome_unknown=unknown)
    translated.__cause__ = error
    return translated


def fenced_error(title: str, why: str = "", *, outcome_unknown: bool | None = None) -> LogFencedError:
    """Return the error of a writer that may no longer append.

    Args:
        title: The name of the log in errors; see ``names.title_of``.
        why: The error of its ledger, in parentheses.
        outcome_unknown: As for ``PybkError``.
    """
    return LogFencedError(
        f"{title} was taken over by another owner, or deleted{why}; open it again, if this process should have it",
        outcome_unknown=outcome_unknown,
    )
