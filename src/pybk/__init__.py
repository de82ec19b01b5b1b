"""Apache BookKeeper's ledgers as a library: durable, authenticated, append-only logs inside your process."""

from pybk.arguments import ClusterOptions, LedgerOptions, Tiers
from pybk.atomic_group import AtomicGroup
from pybk.backend import Replicated
from pybk.config import StoreConfig, TierPolicy
from pybk.credentials import Passwords, Secret
from pybk.digest import DigestType
from pybk.entry import Entry, EntryBatch
from pybk.errors import (
    AppendTimeoutError,
    BlobError,
    BlobExistsError,
    BlobGivenUpError,
    BlobLockedError,
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
    LogError,
    LogExistsError,
    LogFencedError,
    LogLockedError,
    LogSealedError,
    MetadataError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataUnreachableError,
    MetadataVersionError,
    NoSuchBlobError,
    NoSuchEntryError,
    NoSuchLedgerError,
    NoSuchLogError,
    NotEnoughBookiesError,
    OutOfMemoryError,
    OutOfOrderError,
    OwnerNeededError,
    PybkError,
    ReadRangeError,
    RewoundError,
    SealMismatchError,
    StorageError,
    StorageFailedError,
    StorageFullError,
    StorageRefusedError,
    StoreLockedError,
    TooManyRequestsError,
    TruncatedError,
    TruncateGuardError,
    UnauthorizedError,
    UnsupportedFormatError,
    UsageError,
    VersionConflictError,
)
from pybk.feature_level import FeatureLevel
from pybk.flags import LedgerType, ReadFlag, StorageHint, WriteFlag
from pybk.futures import AppendFuture
from pybk.health import Health, HealthState
from pybk.ledger import Bookie, Fragment, LedgerMetadata, LedgerState, LedgerSummary
from pybk.manager import LedgerManager
from pybk.metadata.registration import BookieRegistration
from pybk.metadata.store import Watch
from pybk.metrics import HistogramSnapshot, MetricKey, MetricsSnapshot
from pybk.opening import Opening
from pybk.reader import LedgerReader
from pybk.repair import rebuild_index, rebuild_index_async, verify, verify_async
from pybk.storage.repair.rebuild import LostEntries, RebuildReport
from pybk.storage.repair.verify import VerifyProblem, VerifyReport
from pybk.streams.blob_store import BlobData, BlobInfo, BlobStore, BlobUpload
from pybk.streams.checkpoint import CheckpointWriter, WalCheckpoint
from pybk.streams.format import Records
from pybk.streams.log import Log, LogSegment, LogWriterOptions, SubscriptionState
from pybk.streams.log_reader import LogEnd, LogReader, Start, TxId
from pybk.streams.log_record import LogRecord
from pybk.streams.log_writer import LogWriter, NewRecord
from pybk.streams.namespace import Namespace
from pybk.streams.position import Position
from pybk.streams.rebuild import RebuiltList
from pybk.streams.record_future import RecordFuture
from pybk.streams.remote_consumer import ConsumerServer, RemoteConsumer
from pybk.streams.retention import Retention
from pybk.streams.snapshot_store import (
    SkippedSnapshot,
    SnapshotContent,
    SnapshotInfo,
    SnapshotReport,
    SnapshotStore,
)
from pybk.streams.subscription import Acked, DeadLetters, Subscription, SubscriptionMode, SubscriptionStats
from pybk.streams.wal import RecoveryInfo, Transaction, WalOptions, WalStats, WriteAheadLog
from pybk.streams.wal_follower import WalFollower
from pybk.streams.wal_record import WalRecord
from pybk.version import __version__ as __version__
from pybk.writer import LedgerWriter, Payload

__all__ = [
    "Acked",
    "AppendFuture",
    "AppendTimeoutError",
    "AtomicGroup",
    "BlobData",
    "BlobError",
    "BlobExistsError",
    "BlobGivenUpError",
    "BlobInfo",
    "BlobLockedError",
    "BlobStore",
    "BlobUpload",
    "Bookie",
    "BookieRegistration",
    "CheckpointWriter",
    "ClosedError",
    "ClusterOptions",
    "ConsumerServer",
    "CookieError",
    "CorruptError",
    "DeadLetters",
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
    "HealthState",
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
    "Log",
    "LogEnd",
    "LogError",
    "LogExistsError",
    "LogFencedError",
    "LogLockedError",
    "LogReader",
    "LogRecord",
    "LogSealedError",
    "LogSegment",
    "LogWriter",
    "LogWriterOptions",
    "LostEntries",
    "MetadataError",
    "MetadataExistsError",
    "MetadataForgedError",
    "MetadataUnreachableError",
    "MetadataVersionError",
    "MetricKey",
    "MetricsSnapshot",
    "Namespace",
    "NewRecord",
    "NoSuchBlobError",
    "NoSuchEntryError",
    "NoSuchLedgerError",
    "NoSuchLogError",
    "NotEnoughBookiesError",
    "Opening",
    "OutOfMemoryError",
    "OutOfOrderError",
    "OwnerNeededError",
    "Passwords",
    "Payload",
    "Position",
    "PybkError",
    "ReadFlag",
    "ReadRangeError",
    "RebuildReport",
    "RebuiltList",
    "RecordFuture",
    "Records",
    "RecoveryInfo",
    "RemoteConsumer",
    "Replicated",
    "Retention",
    "RewoundError",
    "SealMismatchError",
    "Secret",
    "SkippedSnapshot",
    "SnapshotContent",
    "SnapshotInfo",
    "SnapshotReport",
    "SnapshotStore",
    "Start",
    "StorageError",
    "StorageFailedError",
    "StorageFullError",
    "StorageHint",
    "StorageRefusedError",
    "StoreConfig",
    "StoreLockedError",
    "Subscription",
    "SubscriptionMode",
    "SubscriptionState",
    "SubscriptionStats",
    "TierPolicy",
    "Tiers",
    "TooManyRequestsError",
    "Transaction",
    "TruncateGuardError",
    "TruncatedError",
    "TxId",
    "UnauthorizedError",
    "UnsupportedFormatError",
    "UsageError",
    "VerifyProblem",
    "VerifyReport",
    "VersionConflictError",
    "WalCheckpoint",
    "WalFollower",
    "WalOptions",
    "WalRecord",
    "WalStats",
    "Watch",
    "WriteAheadLog",
    "WriteFlag",
    "rebuild_index",
    "rebuild_index_async",
    "verify",
    "verify_async",
]
