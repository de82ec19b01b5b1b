"""Apache BookKeeper's ledgers as a library: durable, authenticated, append-only logs inside your process."""

from pybk.arguments import ClusterOptions, LedgerOptions, Tiers
from pybk.backend import Replicated
from pybk.config import StoreConfig, TierPolicy
from pybk.credentials import Passwords
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
    LedgerDeletedError,
    LedgerError,
    LedgerExistsError,
    LedgerFencedError,
    LedgerRecoveryError,
    LedgerUnsealedError,
    MetadataError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataUnreachableError,
    MetadataVersionError,
    NoSuchEntryError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
    OutOfMemoryError,
    PybkError,
    ReadRangeError,
    SealMismatchError,
    StorageError,
    StorageFailedError,
    StorageFullError,
    StorageRefusedError,
    StoreLockedError,
    TooManyRequestsError,
    UnauthorizedError,
    UnsupportedFormatError,
    UsageError,
    VersionConflictError,
)
from pybk.feature_level import FeatureLevel
from pybk.flags import LedgerType, ReadFlag, StorageHint, WriteFlag
from pybk.futures import AppendFuture
from pybk.health import Health
from pybk.ledger import Bookie, Fragment, LedgerMetadata, LedgerState, LedgerSummary
from pybk.manager import LedgerManager
from pybk.metadata.registration import BookieRegistration
from pybk.metrics import HistogramSnapshot, MetricKey, MetricsSnapshot
from pybk.opening import Opening
from pybk.reader import LedgerReader
from pybk.repair import rebuild_index, rebuild_index_async, verify, verify_async
from pybk.storage.repair.rebuild import LostEntries, RebuildReport
from pybk.storage.repair.verify import VerifyProblem, VerifyReport
from pybk.version import __version__ as __version__
from pybk.writer import LedgerWriter

__all__ = [
    "AppendFuture",
    "AppendTimeoutError",
    "Bookie",
    "BookieRegistration",
    "ClosedError",
    "ClusterOptions",
    "CookieError",
    "CorruptError",
    "DigestMismatchError",
    "DigestType",
    "DuplicateEntryError",
    "Entry",
    "EntryBatch",
    "EntryError",
    "EntryUnknownError",
    "FeatureLevel",
    "ForkedProcessError",
    "Fragment",
    "Health",
    "HistogramSnapshot",
    "IllegalOperationError",
    "LedgerClosedError",
    "LedgerDeletedError",
    "LedgerError",
    "LedgerExistsError",
    "LedgerFencedError",
    "LedgerManager",
    "LedgerMetadata",
    "LedgerOptions",
    "LedgerReader",
    "LedgerRecoveryError",
    "LedgerState",
    "LedgerSummary",
    "LedgerType",
    "LedgerUnsealedError",
    "LedgerWriter",
    "LostEntries",
    "MetadataError",
    "MetadataExistsError",
    "MetadataForgedError",
    "MetadataUnreachableError",
    "MetadataVersionError",
    "MetricKey",
    "MetricsSnapshot",
    "NoSuchEntryError",
    "NoSuchLedgerError",
    "NotEnoughBookiesError",
    "Opening",
    "OutOfMemoryError",
    "Passwords",
    "VerifyProblem",
    "PybkError",
    "ReadFlag",
    "ReadRangeError",
    "RebuildReport",
    "Replicated",
    "SealMismatchError",
    "StorageError",
    "StorageFailedError",
    "StorageFullError",
    "StorageHint",
    "StorageRefusedError",
    "StoreConfig",
    "StoreLockedError",
    "TierPolicy",
    "Tiers",
    "TooManyRequestsError",
    "UnauthorizedError",
    "UnsupportedFormatError",
    "UsageError",
    "VerifyReport",
    "VersionConflictError",
    "WriteFlag",
    "rebuild_index",
    "rebuild_index_async",
    "verify",
    "verify_async",
]
