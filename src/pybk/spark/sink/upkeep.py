"""What is deleted of the sinks of a cluster: orphans, the records of writes whose ledgers are gone, expired ledgers.

Retention deletes the committed ledgers of the sinks of which it is asked, by the rules of ``sink_retention``: a commit
of a stream, or of a batch write with an app id, applies that of its own sink now and then, and ``pybk spark retain``
that of a type of ledgers. Neither lists the ledgers of the cluster, because records and manifests name those of sinks.
First ledgers are deleted, then their names are dropped. So a retention that is stopped anywhere leaves names without
ledgers, which readers skip and the next retention drops.

A batch write without an app id gets no later commit, which would collect what it left. So writes of this kind look
after each other. One in eight looks at 64 records that it takes by chance, and removes those whose ledgers were all
deleted. So a write looks at eight records on average, and few of all records are left over. The
first such write of a day, by one compare-and-set of the whole cluster, collects the orphans of all of them.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from pybk import streams
from pybk.credentials import NO_CREDENTIALS, Credentials, CredentialSources, Secret
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    MetadataForgedError,
    MetadataVersionError,
    PybkError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.metadata.ledgers import LEDGERS_PAGE
from pybk.spark.connection import Connection, StoreOrCluster, connection
from pybk.spark.consumers import read_consumers
from pybk.spark.options import AGE_SECONDS_MAX
from pybk.spark.places import ITSELF
from pybk.spark.sink.manifest import (
    LOST_REMEDY,
    SINK_KEY,
    SINKS,
    Sink,
    is_deleted,
    is_lost,
    member_metadata,
    read_sinks,
    sink_ledgers,
)
from pybk.spark.sink.sink_record import ORPHAN_AGE_S, ManifestRow, ManifestRows, is_one_off
from pybk.spark.sink.sink_retention import (
    HeldLedger,
    Readership,
    SinkRetention,
    beyond_limits,
    by_ledger,
    may_be_deleted,
    with_ages,
)
from pybk.values import decode_json, encode_json, listed

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.metadata.cluster import ClusterMetadata

DAY_NS: Final = 86_400 * 10**9
"""A day; the first batch write without an app id on each collects orphans."""

DELETED_AT_ONCE: Final = 1000
"""The most ledgers that a commit deletes, unless it adds more than half as many."""

_UPKEEP: Final = "sinks-upkeep"
"""The group of the pointer that says on which day orphans of batch writes without an app id were collected last."""

_ONE_OFFS: Final = "one-offs"
"""Its name."""

_ONE_IN: Final = 8
"""Of this number of writes one looks at the records of others."""

_SAMPLE: Final = 64
"""The number of records that it looks at."""

_UNREADABLE: Final = (CorruptError, MetadataForgedError, UnsupportedFormatError)
"""The errors of a record, or of a manifest, that cannot be read."""

logger = logging.getLogger(__name__)


# ---- retention ---------------------------------------------------------------------------------------------------


def retain_sometimes(sink: Sink, retention: SinkRetention, *, added: int = 0) -> None:
    """Apply the retention of a sink unless that was done a moment ago; errors are logged.

    Args:
        sink: The sink.
        retention: What is kept.
        added: The number of ledgers that the commit has added.

    Cost: A read of the metadata store; now and then what ``retain_ledgers`` costs. It deletes at most
        ``DELETED_AT_ONCE`` ledgers, or twice as many as were added, so that every sink comes to its limits. If that was
        not enough, the next commit continues.
    """
    if not retention.deletes:
        return
    most = max(DELETED_AT_ONCE, 2 * added)
    try:
        if sink.claim_retention(retention.period_s):
            deleted = retain_ledgers(sink.metadata, [sink], retention, most=most)
            if sum(map(len, deleted.values())) >= most:  # of merged ledgers all members count
                sink.allow_retention()
    except PybkError as error:
        logger.warning("sink %r: what expired was not deleted: %s", sink.app_id, error)


def retain_ledgers(
    metadata: ClusterMetadata,
    sinks: Sequence[Sink],
    retention: SinkRetention,
    *,
    ledger_type: str | None = None,
    most: int | None = None,
    dry_run: bool = False,
) -> dict[str, list[int]]:
    """Delete the committed ledgers of sinks that retention does not keep, the oldest first.

    Those of a sink whose record or manifests cannot be read stay, with a warning in the log of ``logging``.

    Args:
        metadata: The cluster's metadata.
        sinks: The sinks; the limit of bytes is that of all of them together.
        retention: What is kept.
        ledger_type: Only ledgers of this type are looked at; None for all.
        most: The most ledgers that are deleted; None for all. One that cannot be deleted counts, and a merged one
            counts once.
        dry_run: Whether to delete nothing, and return what would be deleted.

    Returns:
        The deleted ledgers by app id, for sinks that had any.

    Raises:
        CorruptError, MetadataForgedError, UnsupportedFormatError: The record of a consumer cannot be read; nothing more
            was deleted.
        PybkError: As the metadata store and ledgers. Names of deleted ledgers that are left are dropped later.

    Cost: Reads the records of consumers, the records and manifests of the sinks, and the metadata of ledgers that may
        expire; with a limit of bytes, that of all their ledgers. The records of consumers are read again before each
        ``LEDGERS_PAGE`` ledgers that are deleted. Manifests of sinks that lose ledgers are written anew.
    """
    if not retention.deletes:
        return {}
    readership = Readership(read_consumers(metadata))  # before the ledgers (RT5)
    if not (retention.has_limits or readership.consumers):
        return {}
    now_ns = time.time_ns()
    held = _HeldLedgers(metadata, sinks, ledger_type)
    pages = held.pages(lambda row, since_ns: _may_expire(row, since_ns, retention, readership, now_ns), now_ns)
    expired: dict[str, list[int]] = {}
    left = math.inf if most is None else most
    for page, beyond in _judged(pages, retention, now_ns):
        going = _expired(page, beyond, retention, readership)
        if going and not dry_run:
            readership = Readership(read_consumers(metadata))  # again, as a query may have begun meanwhile (RT5)
            going = _expired(page, beyond, retention, readership)
        if left < len(going):
            going = going[: int(left)]
        left -= len(going)
        members = [each for one in going for each in one]
        if not (dry_run or retention.keep_unread):
            _log_unread(members, readership)
        for app_id, ids in (held.by_sink(members) if dry_run else held.delete(members)).items():
            expired.setdefault(app_id, []).extend(ids)
        if not left:
            break
    if not dry_run:
        held.drop_names()
    return expired


def _may_expire(row: ManifestRow, since_ns: int, retention: SinkRetention, readership: Readership, now_ns: int) -> bool:
    """Return whether to look at a ledger's metadata: not if its age alone shows that it is kept."""
    if retention.max_bytes is not None:
        return True
    # The time is 0 in old manifests, and counts as old.
    if retention.max_age_s is not None and since_ns < now_ns - int(retention.max_age_s * 1e9):
        return True
    return not retention.keep_read and readership.may_have_read(row.ledger_id, row.created_ns)


def _judged(
    pages: Iterable[list[HeldLedger]], retention: SinkRetention, now_ns: int
) -> Iterator[tuple[list[list[HeldLedger]], set[int]]]:
    """Yield ledgers in pages, the oldest first, each page with the ids of ledgers beyond the limits.

    A page has the members of a merged ledger together, and all of them.
    """
    if retention.max_bytes is None:
        for page in pages:
            yield by_ledger(page), beyond_limits(page, retention, now_ns)  # each by its age alone
        return
    held = [each for page in pages for each in page]
    beyond = beyond_limits(held, retention, now_ns)
    ledgers = by_ledger(held)
    for at in range(0, len(ledgers), LEDGERS_PAGE):
        yield ledgers[at : at + LEDGERS_PAGE], beyond


def _expired(
    page: Iterable[list[HeldLedger]], beyond: Collection[int], retention: SinkRetention, readership: Readership
) -> list[list[HeldLedger]]:
    """Return those whose members may all be deleted (RT6)."""
    return [
        members
        for members in page
        if all(may_be_deleted(each, retention, readership, is_beyond=each.ledger_id in beyond) for each in members)
    ]


def _log_damaged(ledger_id: int, error: PybkError) -> None:
    logger.warning("ledger %d is not looked at, and stays: %s", ledger_id, error)


def _log_unread(going: Sequence[HeldLedger], readership: Readership) -> None:
    """Log which ledgers are deleted although consumers have not read them."""
    unread = [each for each in going if readership.have_read(each) is False]
    for consumer in readership.consumers if unread else ():
        ids = [each.ledger_id for each in unread if consumer.needs(each)]
        if ids:
            logger.warning("%d ledgers expired unread by consumer %r: %s", len(ids), consumer.name, listed(ids))


class _HeldLedgers:
    """The committed ledgers of sinks that are looked at, those that exist and names that outlived their ledgers.

    Args:
        metadata: The cluster's metadata.
        sinks: The sinks.
        ledger_type: The type of the ledgers; None for all.
    """

    def __init__(self, metadata: ClusterMetadata, sinks: Sequence[Sink], ledger_type: str | None) -> None:
        self._metadata = metadata
        self._sinks = sinks
        self._type = ledger_type
        self._sink_of: dict[int, Sink] = {}
        self._rows: dict[int, list[tuple[ManifestRow, int]]] = {}
        """The members of each merged ledger, and each other ledger, with the time since which its age counts."""
        self._deleted: set[int] = set()
        """Ledgers that this retention has deleted."""
        self._gone: set[int] = set()
        """Ledgers that others have deleted: a retention that was interrupted, or the release of members of a merge."""
        self._missing: set[int] = set()
        """Ledgers without metadata that can be read, which does not prove a deletion."""

    def pages(self, may_expire: Callable[[ManifestRow, int], bool], now_ns: int) -> Iterator[list[HeldLedger]]:
        """Yield the ledgers that exist, the oldest first, in pages; those that may expire by their names."""
        ids = self._named(may_expire, now_ns)
        for at in range(0, len(ids), LEDGERS_PAGE):
            page = ids[at : at + LEDGERS_PAGE]
            found = self._metadata.read_ledgers(page, damaged=_log_damaged, deleted=self._gone.add)
            there = [each.metadata for each in found if each is not None]
            self._missing.update({*page}.difference(self._gone, (each.ledger_id for each in there)))
            yield [held for each in there if self._is_wanted(each) for held in self._members(each)]

    def _named(self, may_expire: Callable[[ManifestRow, int], bool], now_ns: int) -> list[int]:
        """Return the ids of ledgers all of whose members may expire, the oldest first."""
        found: list[tuple[int, int]] = []
        for sink, rows in self._committed():
            stored: dict[int, list[tuple[ManifestRow, int]]] = {}
            for row, since_ns in with_ages(rows, now_ns):
                stored.setdefault(row.stored_in, []).append((row, since_ns))
            for stored_in, members in stored.items():
                if all(may_expire(row, since_ns) for row, since_ns in members):
                    self._sink_of[stored_in] = sink
                    self._rows[stored_in] = members
                    found.append((max(since_ns for _, since_ns in members), stored_in))
        return [ledger_id for _, ledger_id in sorted(found)]

    def _committed(self) -> Iterator[tuple[Sink, ManifestRows]]:
        """Yield the sinks that can be read, each with its committed ledgers."""
        for at in range(0, len(self._sinks), LEDGERS_PAGE):
            page = self._sinks[at : at + LEDGERS_PAGE]
            try:
                records = read_sinks(self._metadata, [each.app_id for each in page])
            except _UNREADABLE:
                records = None  # it does not say which one; so they are read one by one
            for sink in page:
                try:
                    if records is None:
                        yield sink, sink.rows()
                    else:
                        yield sink, [*chain.from_iterable(sink.manifests(records[sink.app_id]).values())]
                except _UNREADABLE as error:
                    logger.warning("sink %r: its ledgers stay: %s", sink.app_id, error)

    def _members(self, metadata: LedgerMetadata) -> Iterator[HeldLedger]:
        """Yield the members of a merged ledger, or another ledger itself."""
        for row, since_ns in self._rows[metadata.ledger_id]:
            # Old manifests do not have the creation time.
            each = metadata if row.holder == ITSELF else member_metadata(metadata, row)
            since_ns = max(since_ns, each.creation_time_ns)
            yield HeldLedger(since_ns, each.ledger_id, each.length, each.ledger_type, each.creation_time_ns, row.holder)

    def _is_wanted(self, metadata: LedgerMetadata) -> bool:
        """Return whether a ledger is of the type, and of the sink that names it (RT1)."""
        app_id = self._sink_of[metadata.ledger_id].app_id
        is_own = metadata.custom_metadata.get(SINK_KEY) == app_id.encode()
        return is_own and self._type in (None, metadata.ledger_type)

    def by_sink(self, ledgers: Iterable[HeldLedger]) -> dict[str, list[int]]:
        """Return the ids of ledgers by the app id of their sink."""
        ids: dict[str, list[int]] = {}
        for each in ledgers:
            ids.setdefault(self._sink_of[each.stored_in].app_id, []).append(each.ledger_id)
        return ids

    def delete(self, ledgers: Sequence[HeldLedger]) -> dict[str, list[int]]:
        """Delete ledgers, all members of merged ones; return those deleted by app id, for sinks that had any."""
        stored: dict[str, list[int]] = {}
        for ledger_id in dict.fromkeys(each.stored_in for each in ledgers):
            stored.setdefault(self._sink_of[ledger_id].app_id, []).append(ledger_id)
        done: set[int] = set()
        for ids in stored.values():
            done.update(self._sink_of[ids[0]].delete_committed(ids))
        self._deleted.update(done)
        return self.by_sink(each for each in ledgers if each.stored_in in done)

    def drop_names(self) -> None:
        """Drop the names of the ledgers that were deleted, now or by a retention that was interrupted."""
        deleted: dict[str, set[int]] = {}
        gone: dict[str, set[int]] = {}
        for ledger_id in self._deleted | self._gone | self._missing:
            sink = self._sink_of[ledger_id]
            if ledger_id in self._deleted:
                deleted.setdefault(sink.app_id, set()).update(row.ledger_id for row, _ in self._rows[ledger_id])
            elif ledger_id in self._gone or is_deleted(self._metadata, ledger_id):
                gone.setdefault(sink.app_id, set()).add(ledger_id)
            elif is_lost(self._metadata, ledger_id):
                logger.warning(
                    "sink %r: ledger %d has neither metadata nor a tombstone, so its name stays; %s",
                    *(sink.app_id, ledger_id, LOST_REMEDY),
                )
        for sink in self._sinks:
            if sink.app_id in deleted or sink.app_id in gone:
                sink.drop_names(deleted.get(sink.app_id, ()), gone.get(sink.app_id, ()))


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
    Orphans of a sink whose record or manifests cannot be read stay, with a warning in the log of ``logging``.

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
    if not 0 <= older_than < AGE_SECONDS_MAX:
        raise UsageError(f"older_than is {older_than!r}; it takes 0 to {AGE_SECONDS_MAX} seconds")
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
        try:
            collected[app_id] = sink.collect(ledgers, before_ns) if ledgers else []
            collected[app_id] += sink.shrink(before_ns)
        except _UNREADABLE as error:
            logger.warning("orphans of sink %r stay: %s", app_id, error)
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
