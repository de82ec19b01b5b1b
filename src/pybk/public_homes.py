"""The module of each public name, so that the first use of a name imports that module, and not those of all names.

``public`` has the same for type checkers; a test compares both.
"""

from __future__ import annotations

from typing import Final

_NAMES: Final = {
    "pybk.manager.arguments": "ClusterOptions LedgerOptions Tiers",
    "pybk.manager.atomic_group": "AtomicGroup",
    "pybk.backend.ledger_backend": "Replicated",
    "pybk.backup": (
        "back_up back_up_async list_backup_runs list_backup_runs_async prune_backup prune_backup_async "
        "restore_backup restore_backup_async verify_backup verify_backup_async"
    ),
    "pybk.backup.backing_up": "BackupReport",
    "pybk.backup.chain": "BackupRunInfo",
    "pybk.backup.pruning": "PruneReport",
    "pybk.backup.restoring": "RestoreReport",
    "pybk.backup.verifying": "BackupCheckReport",
    "pybk.operations.cluster_admin": "ClusterAdmin",
    "pybk.operations.cluster_checks": (
        "BookieStatus ClusterStatus ClusterVerdict DrainProgress OrphanReport RebalanceProgress "
        "RebalanceStart RemovalProof StopCheck"
    ),
    "pybk.config": "StoreConfig TierPolicy",
    "pybk.credentials": "ClusterSecret Passwords Secret",
    "pybk.ledger.digest": "DigestType",
    "pybk.ledger.entry": "Entry EntryBatch",
    "pybk.errors": (
        "AppendTimeoutError BlobError BlobExistsError BlobGivenUpError BlobLockedError ClosedError "
        "CookieError CorruptError DigestMismatchError DuplicateEntryError EntryError EntryUnknownError "
        "ForkedProcessError IllegalOperationError LedgerClosedError LedgerDeletedError LedgerError "
        "LedgerExistsError LedgerFencedError LedgerRecoveryError LedgerUnsealedError LogError LogExistsError "
        "LogFencedError LogLockedError LogSealedError MetadataError MetadataExistsError MetadataForgedError "
        "MetadataOutdatedError MetadataUnreachableError MetadataVersionError NoSuchBlobError "
        "NoSuchBookieError NoSuchEntryError NoSuchLedgerError NoSuchLogError NotEnoughBookiesError "
        "OutOfMemoryError OutOfOrderError OwnerNeededError PybkError ReadRangeError RewoundError "
        "SafetyCheckError SealMismatchError StorageError StorageFailedError StorageFullError "
        "StorageRefusedError StoreLockedError TooManyRequestsError TruncatedError TruncateGuardError "
        "UnauthorizedError UnsupportedFormatError UsageError VersionConflictError"
    ),
    "pybk.feature_level": "FeatureLevel",
    "pybk.flags": "LedgerType ReadFlag StorageHint WriteFlag",
    "pybk.manager.append_future": "AppendFuture",
    "pybk.healing.rebalance": "RebalanceMove RebalancePlan TierFullness",
    "pybk.healing.scrub": "ScrubKind",
    "pybk.healing.scrub_status": "ScrubProgress ScrubStatus",
    "pybk.healing.scrubbing": "ScrubReport",
    "pybk.health": "Health HealthReason HealthState",
    "pybk.ledger.ledger_metadata": "Bookie Fragment LedgerMetadata LedgerState LedgerSummary",
    "pybk.manager.ledger_manager": "LedgerManager",
    "pybk.metadata.orphan_records": "OrphanReplicas",
    "pybk.metadata.registration": "BookieRegistration BookieState",
    "pybk.metadata.reports": "MetadataCheckReport MetadataExportReport MetadataProblem MetadataRestoreReport",
    "pybk.metadata.resealing": "SecretStatus",
    "pybk.metadata.settings": "ClusterSettings PlacementSettings RepairSettings ScrubSettings",
    "pybk.metadata.store": "Watch",
    "pybk.metadata.underreplication": "RepairReason RepairState UnderReplicatedLedger",
    "pybk.operations.metadata_repair": (
        "check_metadata check_metadata_async destroy_metadata destroy_metadata_async export_metadata "
        "export_metadata_async rebuild_metadata rebuild_metadata_async restore_metadata "
        "restore_metadata_async"
    ),
    "pybk.metrics": "HistogramSnapshot MetricKey MetricsSnapshot",
    "pybk.manager.opening": "Opening",
    "pybk.manager.ledger_reader": "LedgerReader",
    "pybk.operations.store_repair": "rebuild_index rebuild_index_async verify verify_async",
    "pybk.replication.replica_check": "ReplicaProblem ReplicasCheck",
    "pybk.spans": "OnSpan Span SpanAttributes",
    "pybk.storage.repair.rebuild": "LostEntries RebuildReport",
    "pybk.storage.repair.record_check": "DamagedEntries",
    "pybk.storage.repair.verify": "VerifyProblem VerifyReport",
    "pybk.streams.blob_store": "BlobData BlobInfo BlobStore BlobUpload",
    "pybk.streams.checkpoint": "CheckpointWriter WalCheckpoint",
    "pybk.streams.format": "Records",
    "pybk.streams.log": "Log LogSegment LogWriterOptions SubscriptionState",
    "pybk.streams.log_reader": "LogEnd LogReader Start TxId",
    "pybk.streams.log_record": "LogRecord",
    "pybk.streams.log_settings": "LogSettings",
    "pybk.streams.log_writer": "LogWriter NewRecord",
    "pybk.streams.namespace": "Namespace",
    "pybk.streams.position": "Position",
    "pybk.streams.rebuild": "RebuiltList",
    "pybk.streams.record_future": "RecordFuture",
    "pybk.streams.remote_consumer": "ConsumerServer RemoteConsumer",
    "pybk.streams.retention": "Retention",
    "pybk.streams.snapshot_store": "SkippedSnapshot SnapshotContent SnapshotInfo SnapshotReport SnapshotStore",
    "pybk.streams.subscription": "Acked DeadLetters Subscription SubscriptionMode SubscriptionStats",
    "pybk.streams.wal": "RecoveryInfo Transaction WalOptions WalStats WriteAheadLog",
    "pybk.streams.wal_follower": "WalFollower",
    "pybk.streams.wal_record": "WalRecord",
    "pybk.manager.ledger_writer": "LedgerWriter Payload",
}

HOMES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}
