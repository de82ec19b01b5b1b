"""Apache BookKeeper's ledgers as a library: durable, authenticated, append-only logs inside your process."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.public import *  # noqa: F403
    from pybk.version import __version__ as __version__
else:
    from pybk.deferral import deferred as _deferred
    from pybk.deferral import homes_of as _homes_of
    from pybk.deferral import module_of as _module_of

    _NAMES = {
        "manager.arguments": "ClusterOptions LedgerOptions Tiers",
        "manager.atomic_group": "AtomicGroup",
        "backend": "Replicated",
        "backup": (
            "back_up back_up_async list_backup_runs list_backup_runs_async prune_backup prune_backup_async "
            "restore_backup restore_backup_async verify_backup verify_backup_async"
        ),
        "backup.backing_up": "BackupReport",
        "backup.chain": "BackupRunInfo",
        "backup.pruning": "PruneReport",
        "backup.restoring": "RestoreReport",
        "backup.verifying": "BackupCheckReport",
        "operations.cluster_admin": "ClusterAdmin",
        "operations.cluster_checks": (
            "BookieStatus ClusterStatus ClusterVerdict DrainProgress OrphanReport RebalanceProgress "
            "RebalanceStart RemovalProof StopCheck"
        ),
        "config": "StoreConfig TierPolicy",
        "credentials": "ClusterSecret KeyKind Passwords Secret",
        "ledger.digest": "DigestType",
        "ledger.entry": "Entry EntryBatch",
        "errors": (
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
        "feature_level": "FeatureLevel",
        "flags": "LedgerType ReadFlag StorageHint WriteFlag",
        "manager.append_future": "AppendFuture",
        "healing.rebalance": "RebalanceMove RebalancePlan TierFullness",
        "healing.scrub": "ScrubProgress ScrubReport ScrubStatus",
        "healing.scrub_schedule": "ScrubKind",
        "health": "Health HealthReason HealthState",
        "ledger.ledger_metadata": "Bookie Fragment LedgerMetadata LedgerState LedgerSummary",
        "manager.ledger_manager": "LedgerManager",
        "metadata.orphan_records": "OrphanReplicas",
        "metadata.registration": "BookieRegistration BookieState",
        "metadata.reports": "MetadataCheckReport MetadataExportReport MetadataProblem MetadataRestoreReport",
        "metadata.resealing": "SecretStatus",
        "metadata.settings": "ClusterSettings PlacementSettings RepairSettings ScrubSettings",
        "metadata.store": "Watch",
        "metadata.underreplication": "RepairReason RepairState UnderReplicatedLedger",
        "operations.metadata_repair": (
            "check_metadata check_metadata_async destroy_metadata destroy_metadata_async export_metadata "
            "export_metadata_async rebuild_metadata rebuild_metadata_async restore_metadata "
            "restore_metadata_async"
        ),
        "metrics": "HistogramSnapshot MetricKey MetricsSnapshot",
        "manager.opening": "Opening",
        "manager.ledger_reader": "LedgerReader",
        "operations.store_repair": "rebuild_index rebuild_index_async verify verify_async",
        "replication.replica_check": "ReplicaProblem ReplicasCheck",
        "spans": "OnSpan Span SpanAttributes",
        "storage.repair.rebuild": "LostEntries RebuildReport",
        "storage.repair.record_check": "DamagedEntries",
        "storage.repair.verify": "VerifyProblem VerifyReport",
        "streams.blob_store": "BlobData BlobInfo BlobStore BlobUpload",
        "streams.wal_checkpoint": "CheckpointWriter WalCheckpoint",
        "streams.detached_writer": "Adoption DetachedSegment DetachedWriter",
        "streams.format": "Position Records",
        "streams.log": "Log LogSegment SubscriptionState",
        "streams.log_reader": "LogEnd LogReader Start TxId",
        "streams.log_record": "LogRecord WalRecord",
        "streams.log_settings": "LogSettings",
        "streams.log_writer": "LogWriter NewRecord",
        "streams.namespace": "Namespace",
        "streams.list_rebuild": "RebuiltList",
        "streams.appender": "RecordFuture",
        "streams.remote_consumer": "ConsumerServer RemoteConsumer",
        "streams.retention": "Retention",
        "streams.segment_merge": "SegmentMerge",
        "streams.snapshot_store": "SkippedSnapshot SnapshotContent SnapshotInfo SnapshotReport SnapshotStore",
        "streams.subscription": "Acked DeadLetters Subscription SubscriptionMode SubscriptionStats",
        "streams.wal": "RecoveryInfo Transaction WalStats WriteAheadLog",
        "streams.wal_follower": "WalFollower",
        "manager.ledger_writer": "LedgerWriter Payload",
    }
    """The names of each module, as ``public`` has them for type checkers."""

    __all__ = sorted(_homes_of(_NAMES))

    _first_use = _deferred(
        __name__,
        _NAMES,
        LogWriterOptions="give the options as keyword arguments, as Log.writer takes them",
        WalOptions="give the options as keyword arguments, as WriteAheadLog.open takes them",
    )

    def __getattr__(name: str) -> object:
        """Import the module of a public name at its first use, or a module of the package.

        All public names together take a second, which a program that uses a few does not have to wait for.
        """
        if name == "__version__":
            return _module_of(f"{__name__}.version").__version__
        if name in __all__ or name.startswith("__"):
            return _first_use(name)
        from importlib.util import find_spec

        if find_spec(f"{__name__}.{name}") is None:
            return _first_use(name)
        return _module_of(f"{__name__}.{name}")

    def __dir__() -> list[str]:
        """Return the public names."""
        return sorted((*__all__, "__all__", "__version__"))
