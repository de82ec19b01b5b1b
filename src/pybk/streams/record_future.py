"""Futures of records: the future of an entry, whose result is a position in a log."""

from __future__ import annotations

from pybk.errors import LedgerFencedError, LogFencedError, NoSuchLedgerError, PybkError
from pybk.futures import AppendFuture, T


class RecordFuture(AppendFuture[T]):
    """The outcome of an append to a log; as ``AppendFuture``, but it fails as a log does.

    Threads: any.
    """

    __slots__ = ()

    def _error(self, error: PybkError) -> PybkError:
        return super()._error(log_error(error))


def log_error(error: PybkError) -> PybkError:
    """Return the error of a log that stands for an error of one of its ledgers."""
    if isinstance(error, LedgerFencedError | NoSuchLedgerError):  # a take-over also deletes ledgers without records
        translated = LogFencedError(f"another writer took the log over: {error}")
        translated.__cause__ = error
        return translated
    return error
