"""Retention of a type of ledgers, and its consumers; this needs neither Spark nor executors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pybk.credentials import CredentialSources, Secret
from pybk.errors import UsageError
from pybk.manager.arguments import user_type
from pybk.spark.connection import Connection, StoreOrCluster, connection
from pybk.spark.consumers import read_consumers, remove_consumer
from pybk.spark.jobs.transfer import COPY_OF, IMPORT_OF
from pybk.spark.sink.manifest import SINKS, Sink
from pybk.spark.sink.sink_retention import SinkRetention
from pybk.spark.sink.upkeep import retain_ledgers
from pybk.values import flag_of

if TYPE_CHECKING:
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.spark.consumers import Consumer


def retain(
    metadata: str,
    ledger_type: str,
    *,
    max_age_s: float | None = None,
    max_bytes: int | None = None,
    keep_read: bool = True,
    keep_unread: bool = True,
    dry_run: bool = False,
    cluster_secret: bytes | Secret | None = None,
    password: bytes | Secret | None = None,
    secret: bytes | Secret | None = None,
) -> dict[str, list[int]]:
    """Delete ledgers of a type that Spark has written, by age, by size, and by what consumers have read.

    Ledgers that no sink wrote, that are not committed, or that ``copy`` and ``import_`` made, stay. Consumers are the
    streaming queries with the option ``consumer``. Ledgers of a sink whose record or manifests cannot be read stay,
    with a warning in the log of ``logging``.

    Args:
        metadata: The URL of the cluster's metadata.
        ledger_type: The type of the ledgers.
        max_age_s: Seconds since the creation of a ledger, after which it is deleted; None for no limit.
        max_bytes: The payload bytes of the newest ledgers, beyond which the others are deleted; None for no limit.
        keep_read: Whether ledgers within these limits are kept even if all consumers of the type have read them. If
            False, and there is a consumer, they are deleted.
        keep_unread: Whether ledgers beyond these limits are kept until all consumers of the type have read them.
        dry_run: Whether to delete nothing, and return what would be deleted.
        cluster_secret: The cluster's secret, or its source; None for none.
        password: The password of the ledgers; those with another one stay, and the log names them.
        secret: The secret of the ledgers that were created with one.

    Returns:
        The deleted ledgers by app id of their sink, for sinks that had any.

    Raises:
        UsageError: The URL, the type, the secret, a limit or a flag is not valid; or nothing says what to delete.
        CorruptError: The record of a consumer is damaged; nothing more was deleted.
        PybkError: As the metadata store and ledgers.

    Durability: Ledgers are deleted for good on return; a call that was interrupted is made again.

    Cost: Reads the records and manifests of all sinks, and the metadata of their ledgers that may expire; with
        ``max_bytes``, of all.
    """
    retention = SinkRetention(max_age_s=max_age_s, max_bytes=max_bytes, keep_read=keep_read, keep_unread=keep_unread)
    if not retention.deletes:
        raise UsageError("nothing says what to delete: give an age, a size, or say that what was read need not be kept")
    kind, dry_run = user_type(ledger_type), flag_of(dry_run, "dry_run")
    given = CredentialSources.of(password, secret).read()
    found, stored = _cluster(metadata, cluster_secret)
    names = sorted(name for name in stored.pointer_names(SINKS) if not name.startswith((COPY_OF, IMPORT_OF)))
    sinks = [Sink(found.manager, stored, name, given=given) for name in names]
    return retain_ledgers(stored, sinks, retention, ledger_type=kind, dry_run=dry_run)


def list_consumers(metadata: str, *, cluster_secret: bytes | Secret | None = None) -> list[Consumer]:
    """Return what the consumers of ledgers have recorded, by name.

    Args:
        metadata: The URL of the cluster's metadata.
        cluster_secret: The cluster's secret, or its source; None for none.

    Raises:
        UsageError: The URL or the secret is not valid.
        CorruptError: A record is damaged.
        PybkError: As the metadata store.
    """
    return read_consumers(_cluster(metadata, cluster_secret)[1])


def forget_consumer(metadata: str, name: str, *, cluster_secret: bytes | Secret | None = None) -> None:
    """Remove a consumer, whose query has ended for good, so that retention keeps nothing for it.

    Args:
        metadata: The URL of the cluster's metadata.
        name: The consumer.
        cluster_secret: The cluster's secret, or its source; None for none.

    Raises:
        UsageError: The URL or the secret is not valid.
        IllegalOperationError: There is no such consumer.
        PybkError: As the metadata store.

    Durability: The record is removed when this returns. A query that still runs records itself again.
    """
    remove_consumer(_cluster(metadata, cluster_secret)[1], name)


def _cluster(metadata: str, cluster_secret: bytes | Secret | None) -> tuple[Connection, ClusterMetadata]:
    key = cluster_secret if isinstance(cluster_secret, Secret) else Secret(cluster_secret)
    found = connection(StoreOrCluster(metadata_uri=metadata, secret=key))
    assert found.metadata is not None, "it is named by a URL"
    return found, found.metadata
