"""Apache BookKeeper's ledgers as a library: durable, authenticated, append-only logs inside your process."""

from pybk.config import StoreConfig, TierPolicy
from pybk.digest import DigestType
from pybk.entry import Entry, EntryBatch
from pybk.errors import (
    AppendTimeoutError,
    ClosedError,
    CookieError,
    CorruptError,
    DigestMismatchError,
    DuplicateEntryError,
    EntryError,
    EntryUnknownError,
    ForkedProcessError,
    IllegalOperationError,
    LedgerClosedError,
    LedgerError,
    LedgerExistsError,
    LedgerFencedError,
    LedgerRecoveryError,
    NoSuchEntryError,
    NoSuchLedgerError,
    PybkError,
    ReadRangeError,
    StorageError,
    StorageFailedError,
    StorageFullError,
    StoreLockedError,
    TooManyRequestsError,
    UnauthorizedError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.flags import LedgerType, ReadFlag, StorageHint, WriteFlag
from pybk.futures import AppendFuture
from pybk.ledger import LedgerMetadata, LedgerState
from pybk.manager import Health, LedgerManager
from pybk.reader import LedgerReader
from pybk.writer import LedgerWriter

__version__ = "0.1.0"

__all__ = [
    "AppendFuture",
    "AppendTimeoutError",
    "ClosedError",
    "CookieError",
    "CorruptError",
    "DigestMismatchError",
    "DigestType",
    "DuplicateEntryError",
    "Entry",
    "EntryBatch",
    "EntryError",
    "EntryUnknownError",
    "ForkedProcessError",
    "Health",
    "IllegalOperationError",
    "LedgerClosedError",
    "LedgerError",
    "LedgerExistsError",
    "LedgerFencedError",
    "LedgerManager",
    "LedgerMetadata",
    "LedgerReader",
    "LedgerRecoveryError",
    "LedgerState",
    "LedgerType",
    "LedgerWriter",
    "NoSuchEntryError",
    "NoSuchLedgerError",
    "PybkError",
    "ReadFlag",
    "ReadRangeError",
    "StorageError",
    "StorageFailedError",
    "StorageFullError",
    "StorageHint",
    "StoreConfig",
    "StoreLockedError",
    "TierPolicy",
    "TooManyRequestsError",
    "UnauthorizedError",
    "UnsupportedFormatError",
    "UsageError",
    "WriteFlag",
]
