"""Apache BookKeeper's ledgers as a library: durable, authenticated, append-only logs inside your process."""

from pybk.arguments import ClusterOptions, LedgerOptions, Tiers
from pybk.atomic_group import AtomicGroup
from pybk.backend import Replicated
from pybk.cluster_admin import ClusterAdmin
from pybk.cluster_checks import (
    BookieStatus,
    ClusterStatus,
    ClusterVerdict,
    DrainProgress,
    OrphanReport,
    RebalanceProgress,
    RebalanceStart,
    RemovalProof,
    StopCheck,
)
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
    MetadataOutdatedError,
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
    SafetyCheckError,
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
from pybk.healing.rebalance import RebalanceMove, RebalancePlan, TierFullness
from pybk.healing.scrub import ScrubKind
from pybk.healing.scrub_status import ScrubProgress, ScrubStatus
from pybk.healing.scrubbing import ScrubReport
from pybk.health import Health, HealthReason, HealthState
from pybk.ledger import Bookie, Fragment, LedgerMetadata, LedgerState, LedgerSummary
from pybk.manager import LedgerManager
from pybk.metadata.orphan_records import OrphanReplicas
from pybk.metadata.registration import BookieRegistration, BookieState
from pybk.metadata.reports import MetadataCheckReport, MetadataExportReport, MetadataProblem, MetadataRestoreReport
from pybk.metadata.resealing import SecretStatus
from pybk.metadata.settings import ClusterSettings, PlacementSettings, RepairSettings, ScrubSettings
from pybk.metadata.store import Watch
from pybk.metadata.underreplication import RepairReason, RepairState, UnderReplicatedLedger
from pybk.metadata_repair import (
    check_metadata,
    check_metadata_async,
    export_metadata,
    export_metadata_async,
    rebuild_metadata,
    rebuild_metadata_async,
    restore_metadata,
    restore_metadata_async,
)
from pybk.metrics import HistogramSnapshot, MetricKey, MetricsSnapshot
from pybk.opening import Opening
from pybk.reader import LedgerReader
from pybk.repair import rebuild_index, rebuild_index_async, verify, verify_async
from pybk.replication.replica_check import ReplicaProblem, ReplicasCheck
from pybk.storage.repair.rebuild import LostEntries, RebuildReport
from pybk.storage.repair.record_check import DamagedEntries
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
    "BookieState",
    "BookieStatus",
    "CheckpointWriter",
    "ClosedError",
    "ClusterAdmin",
    "ClusterOptions",
    "ClusterSettings",
    "ClusterStatus",
    "ClusterVerdict",
    "ConsumerServer",
    "CookieError",
    "CorruptError",
    "DamagedEntries",
    "DeadLetters",
    "DigestMismatchError",
    "DigestType",
    "DrainProgress",
    "DuplicateEntryError",
    "Entry",
    "EntryBatch",
    "EntryError",
    "EntryUnknownError",
    "FeatureLevel",
    "ForkedProcessError",
    "Fragment",
    "Health",
    "HealthReason",
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
    "MetadataCheckReport",
    "MetadataError",
    "MetadataExistsError",
    "MetadataExportReport",
    "MetadataForgedError",
    "MetadataOutdatedError",
    "MetadataProblem",
    "MetadataRestoreReport",
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
    "OrphanReplicas",
    "OrphanReport",
    "OutOfMemoryError",
    "OutOfOrderError",
    "OwnerNeededError",
    "Passwords",
    "Payload",
    "PlacementSettings",
    "Position",
    "PybkError",
    "ReadFlag",
    "ReadRangeError",
    "RebalanceMove",
    "RebalancePlan",
    "RebalanceProgress",
    "RebalanceStart",
    "RebuildReport",
    "RebuiltList",
    "RecordFuture",
    "Records",
    "RecoveryInfo",
    "RemoteConsumer",
    "RemovalProof",
    "RepairReason",
    "RepairSettings",
    "RepairState",
    "ReplicaProblem",
    "ReplicasCheck",
    "Replicated",
    "Retention",
    "RewoundError",
    "SafetyCheckError",
    "ScrubKind",
    "ScrubProgress",
    "ScrubReport",
    "ScrubSettings",
    "ScrubStatus",
    "SealMismatchError",
    "Secret",
    "SecretStatus",
    "SkippedSnapshot",
    "SnapshotContent",
    "SnapshotInfo",
    "SnapshotReport",
    "SnapshotStore",
    "Start",
    "StopCheck",
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
    "TierFullness",
    "TierPolicy",
    "Tiers",
    "TooManyRequestsError",
    "Transaction",
    "TruncateGuardError",
    "TruncatedError",
    "TxId",
    "UnauthorizedError",
    "UnderReplicatedLedger",
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
    "check_metadata",
    "check_metadata_async",
    "export_metadata",
    "export_metadata_async",
    "rebuild_index",
    "rebuild_index_async",
    "rebuild_metadata",
    "rebuild_metadata_async",
    "restore_metadata",
    "restore_metadata_async",
    "verify",
    "verify_async",
]
