"""What is deleted of the sinks of a cluster: orphans, the records of writes whose ledgers are gone, expired ledgers.

Retention deletes the committed ledgers of the sinks of which it is asked, by the rules of ``sink_retention``: a commit
of a stream, or of a batch write with an app id, applies that of its own sink now and then, and ``pybk spark retain``
that of a type of ledgers. Neither lists the ledgers of the cluster, because records and manifests name those of sinks.

A batch write without an app id gets no later commit, which would collect what it left. So writes of this kind look
after each other. One in eight looks at 64 records that it takes by chance, and removes those whose ledgers were all
deleted. So a write looks at eight records on average, and few of all records are left over. The
first such write of a day, by one compare-and-set of the whole cluster, collects the orphans of all of them.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from pybk import streams
from pybk.credentials import NO_CREDENTIALS, Credentials, CredentialSources, Secret
from pybk.errors import IllegalOperationError, MetadataVersionError, PybkError, UsageError
from pybk.metadata.ledgers import LEDGERS_PAGE
from pybk.spark.connection import Connection, StoreOrCluster, connection
from pybk.spark.consumers import read_consumers
from pybk.spark.sink.manifest import SINK_KEY, SINKS, Sink, sink_ledgers
from pybk.spark.sink.sink_record import ORPHAN_AGE_S, ManifestRow, is_one_off
from pybk.spark.sink.sink_retention import HeldLedger, SinkRetention, beyond_limits, may_be_deleted
from pybk.values import decode_json, encode_json

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.spark.consumers import Consumer

DAY_NS: Final = 86_400 * 10**9
"""A day; the first batch write without an app id on each collects orphans."""

_AGE_S_MAX: Final = 1e9

_UPKEEP: Final = "sinks-upkeep"
"""The group of the pointer that says on which day orphans of batch writes without an app id were collected last."""

_ONE_OFFS: Final = "one-offs"
"""Its name."""

_ONE_IN: Final = 8
"""Of this number of writes one looks at the records of others."""

_SAMPLE: Final = 64
"""The number of records that it looks at."""

logger = logging.getLogger(__name__)


# ---- retention ---------------------------------------------------------------------------------------------------


def retain_sometimes(sink: Sink, retention: SinkRetention) -> None:
    """Apply the retention of a sink unless that was done a moment ago; errors are logged.

    Cost: A read of the metadata store; now and then what ``retain_ledgers`` costs.
    """
    if not retention.deletes:
        return
    try:
        if sink.claim_retention(retention.period_s):
            retain_ledgers(sink.metadata, [sink], retention)
    except PybkError as error:
        logger.warning("sink %r: what expired was not deleted: %s", sink.app_id, error)


def retain_ledgers(
    metadata: ClusterMetadata,
    sinks: Iterable[Sink],
    retention: SinkRetention,
    *,
    ledger_type: str | None = None,
    dry_run: bool = False,
) -> dict[str, list[int]]:
    """Delete the committed ledgers of sinks that retention does not keep.

    Args:
        metadata: The cluster's metadata.
        sinks: The sinks; the limit of bytes is that of all of them together.
        retention: What is kept.
        ledger_type: Only ledgers of this type are looked at; None for all.
        dry_run: Whether to delete nothing, and return what would be deleted.

    Returns:
        The deleted ledgers by app id, for sinks that had any.

    Raises:
        CorruptError, MetadataForgedError, UnsupportedFormatError: The record of a sink or a consumer cannot be read;
            nothing was deleted.
        PybkError: As the metadata store and ledgers.

    Cost: Reads the records and manifests of the sinks, and the metadata of ledgers that may expire; with a limit of
        bytes, that of all their ledgers. Manifests of sinks that lose ledgers are written anew.
    """
    consumers = read_consumers(metadata)  # before the ledgers (RT5)
    if not retention.deletes or not (retention.has_limits or consumers):
        return {}
    sink_of: dict[int, Sink] = {}
    now_ns = time.time_ns()
    held: list[HeldLedger] = []
    found: dict[int, LedgerMetadata] = {}
    for sink in sinks:
        ids = [row.ledger_id for row in sink.rows() if _may_expire(row, retention, consumers, now_ns)]
        existing = list(_existing(metadata, ids))
        if not dry_run:
            sink.drop_deleted({*ids}.difference(each.ledger_id for each in existing))
        for each in existing:
            if ledger_type is None or each.ledger_type == ledger_type:
                sink_of[each.ledger_id], found[each.ledger_id] = sink, each
                held.append(HeldLedger(each.creation_time_ns, each.ledger_id, each.length))
    beyond = beyond_limits(held, retention, now_ns)
    expired: dict[str, list[int]] = {}
    for ledger_id, each in found.items():
        if may_be_deleted(each, retention, consumers, is_beyond=ledger_id in beyond):
            expired.setdefault(sink_of[ledger_id].app_id, []).append(ledger_id)
    if dry_run:
        return expired
    for consumer in consumers:
        unread = [ledger_id for ids in expired.values() for ledger_id in ids if consumer.needs(found[ledger_id])]
        if unread:
            logger.warning("%d ledgers expired unread by consumer %r: %s", len(unread), consumer.name, unread)
    deleted = {app: sink_of[ids[0]].delete_committed(ids) for app, ids in expired.items()}
    return {app: ids for app, ids in deleted.items() if ids}


def _may_expire(row: ManifestRow, retention: SinkRetention, consumers: Sequence[Consumer], now_ns: int) -> bool:
    """Return whether to look at a ledger's metadata: not if its age alone shows that it is kept."""
    if retention.max_bytes is not None or not row.created_ns:
        return True
    if retention.max_age_s is not None and row.created_ns < now_ns - int(retention.max_age_s * 1e9):
        return True
    return not retention.keep_read and any(each.finished.has(row.ledger_id, row.created_ns) for each in consumers)


def _existing(metadata: ClusterMetadata, ledger_ids: Sequence[int]) -> Iterable[LedgerMetadata]:
    for at in range(0, len(ledger_ids), LEDGERS_PAGE):
        for each in metadata.read_sound_ledgers(ledger_ids[at : at + LEDGERS_PAGE]):
            yield each.metadata


# ---- batch writes without an app id --------------------------------------------------------------------------------


def look_after_one_offs(connection: Connection, given: Credentials, app_id: str) -> None:
    """Delete what other batch writes without an app id have left, now and then; errors are logged.

    Args:
        connection: The cluster.
        given: The password or secret of this write; orphans with another one stay.
        app_id: The app id that this write has got.

    Cost: A read of the metadata store. In one of eight writes, the names of all records, and the records of some; in
        the first write of a day, the keys of all ledgers.
    """
    metadata = connection.metadata
    if metadata is None:
        return
    try:
        if claims_day(metadata):
            collect_orphans(connection, given=given, of=is_one_off)
        elif int(app_id[-1], 16) % _ONE_IN == 0:
            _look_at_some(connection, metadata)
    except PybkError as error:
        logger.warning("what batch writes without txnAppId left was not deleted: %s", error)


def claims_day(metadata: ClusterMetadata) -> bool:
    """Return whether this process is the first one today (UTC), and note that it is."""
    found, today = metadata.read_pointer(_UPKEEP, _ONE_OFFS), time.time_ns() // DAY_NS

    def day_of(values: dict[str, Any]) -> int:
        return int(values["day"])

    if found is not None and decode_json(found.value, day_of, where="the day of the last collection") == today:
        return False
    try:
        value = encode_json({"day": today})
        metadata.write_pointer(_UPKEEP, _ONE_OFFS, value, None if found is None else found.version)
    except MetadataVersionError:
        return False
    return True


def _look_at_some(connection: Connection, metadata: ClusterMetadata) -> None:
    """Remove the records, among some, whose ledgers were all deleted."""
    names = [name for name in metadata.pointer_names(SINKS) if is_one_off(name)]
    before_ns = time.time_ns() - int(ORPHAN_AGE_S * 1e9)
    for app_id in random.sample(names, min(_SAMPLE, len(names))):
        Sink(connection.manager, metadata, app_id).shrink(before_ns)


# ---- orphans -------------------------------------------------------------------------------------------------------


def collect_orphans(
    connection: Connection,
    *,
    older_than: float = ORPHAN_AGE_S,
    given: Credentials = NO_CREDENTIALS,
    of: Callable[[str], bool] | None = None,
) -> dict[str, list[int]]:
    """Delete the orphans of all sinks of a cluster, and manifests that name only deleted ledgers.

    The sink of a batch write without ``txnAppId`` leaves nothing then. What writes to logs left is deleted, too.

    Args:
        connection: The cluster.
        older_than: Only orphans created longer ago than this, seconds. Writes that take longer than this from their
            first ledger to their commit are refused afterwards.
        given: The password or secret of the sinks' ledgers, and of logs; orphans with another one stay.
        of: Returns whether to collect those of a sink, by its app id; then what writes to logs left stays. None for
            all.

    Returns:
        The deleted ledgers by app id, for sinks that had any; those of writes to logs by query.

    Raises:
        UsageError: ``older_than`` is out of range.
        PybkError: As the metadata store.

    Cost: Reads the metadata of every ledger of the cluster twice.
    """
    if not 0 <= older_than < _AGE_S_MAX:
        raise UsageError(f"older_than is {older_than!r}; it takes 0 to {_AGE_S_MAX} seconds")
    if connection.metadata is None:
        raise IllegalOperationError(f"{connection.manager!r} is not a cluster, and sinks write to clusters")
    before_ns = time.time_ns() - int(older_than * 1e9)
    old: dict[str, list[LedgerMetadata]] = {}
    for each in sink_ledgers(connection.metadata):
        app_id = each.custom_metadata[SINK_KEY].decode(errors="replace")
        if each.creation_time_ns <= before_ns and (of is None or of(app_id)):
            old.setdefault(app_id, []).append(each)
    for app_id in filter(is_one_off, connection.metadata.pointer_names(SINKS)):
        old.setdefault(app_id, [])  # it may have committed no rows
    collected: dict[str, list[int]] = {}
    for app_id, ledgers in old.items():
        sink = Sink(connection.manager, connection.metadata, app_id, given=given)
        deleted = sink.collect(ledgers, before_ns) if ledgers else []
        collected[app_id] = deleted + sink.shrink(before_ns)
    if of is None:
        for query, given_up in streams.sweep.give_up_commits(connection.manager, given, before_ns).items():
            collected[query] = collected.get(query, []) + given_up
    return {app_id: deleted for app_id, deleted in collected.items() if deleted}


def collect(
    metadata: str,
    *,
    cluster_secret: bytes | Secret | None = None,
    password: bytes | Secret | None = None,
    secret: bytes | Secret | None = None,
    older_than: float = ORPHAN_AGE_S,
) -> dict[str, list[int]]:
    """Delete ledgers that writes from Spark, imports and copies left without a commit; this does not need Spark.

    It also deletes the manifests of sinks whose ledgers were all deleted. The sink of a batch write without
    ``txnAppId`` leaves nothing then.

    Args:
        metadata: The URL of the cluster's metadata.
        cluster_secret: The cluster's secret, or its source; None for none.
        password: The password of the ledgers and logs; orphans with another one stay, and the log of ``logging`` names
            them.
        secret: The secret of the ledgers that were created with one.
        older_than: As for ``collect_orphans``.

    Returns:
        The deleted ledgers by app id of their sink, or by the query that wrote them for a log.

    Raises:
        UsageError: The URL, the secret or the age is not valid.
        PybkError: As the metadata store.

    Cost: Reads the metadata of every ledger of the cluster twice.
    """
    key = cluster_secret if isinstance(cluster_secret, Secret) else Secret(cluster_secret)
    given = CredentialSources.of(password, secret).read()
    cluster = connection(StoreOrCluster(metadata_uri=metadata, secret=key))
    return collect_orphans(cluster, older_than=older_than, given=given)
