"""Which ledgers of a sink count: its record in the metadata store, and the manifest ledgers that the record names.

A sink is known by its *app id*: that of a streaming query, or the ``txnAppId`` of batch writes. Each ledger that it
writes carries the app id in its custom metadata, and counts from the moment a manifest names it that the sink's record
names. So one compare-and-set of the record is the whole commit. What no manifest names is an orphan.

Two things make deleting orphans exact, whatever clocks say and however late a compare-and-set takes effect. Who deletes
moves the record first, so that a compare-and-set under way is refused. And the record has a *floor*: ledgers that say
they were created before it are published no more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.credentials import Secret
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    MetadataVersionError,
    NoSuchLedgerError,
    PybkError,
    UsageError,
)
from pybk.flags import LedgerType
from pybk.spark.connection import Connection, StoreOrCluster, connection
from pybk.spark.sink.sink_record import (
    ORPHAN_AGE_S,
    Attempt,
    Chain,
    Refuse,
    Rows,
    SinkRecord,
    Skip,
    decide,
    decode_rows,
    encode_rows,
    fold,
)

if TYPE_CHECKING:
    from pybk.ledger import LedgerMetadata
    from pybk.manager import LedgerManager
    from pybk.metadata.cluster import ClusterMetadata

SINK_KEY: Final = "pybk.sink"
"""Custom metadata of a sink's ledgers: its app id."""

SINKS: Final = "sinks"
"""The group of the records among the cluster's pointers."""

_PAGE: Final = 500
_AGE_S_MAX: Final = 1e9

logger = logging.getLogger(__name__)


class WrittenLedger(NamedTuple):
    """A closed ledger of one task attempt.

    Attributes:
        ledger_id: The ledger.
        entries: How many it has, at least 1.
        payload_bytes: Bytes of their payloads.
        created_ns: When it was created, as its metadata says.
    """

    ledger_id: int
    entries: int
    payload_bytes: int
    created_ns: int


_MANIFESTS_READ: dict[tuple[bytes, str], dict[int, Rows]] = {}
"""Manifests read before, by cluster and app id: they never change, and their ids are not given again."""


class Sink:
    """The record of one sink, and the ledgers that it wrote.

    Args:
        manager: The cluster's ledgers.
        metadata: The cluster's metadata.
        app_id: The sink's app id.
        password: That of its data ledgers; manifests, which name ledgers and nothing else, have an empty one.
        quorums: Ensemble size, write quorum, ack quorum of its manifests; None for the manager's own.

    Threads: any.
    """

    def __init__(
        self,
        manager: LedgerManager,
        metadata: ClusterMetadata,
        app_id: str,
        *,
        password: bytes = b"",
        quorums: tuple[int | None, int | None, int | None] = (None, None, None),
    ) -> None:
        self._manager = manager
        self._metadata = metadata
        self._app_id = app_id
        self._password = password
        self._quorums = quorums

    # ---- the record ----------------------------------------------------------------------------------------------

    def record(self) -> SinkRecord:
        """Return the record as it is now; a new one if there is none."""
        return self._read()[0]

    def _read(self) -> tuple[SinkRecord, int | None]:
        found = self._metadata.read_pointer(SINKS, self._app_id)
        if found is None:
            return SinkRecord(), None
        return SinkRecord.decode(found.value, where=f"the record of sink {self._app_id!r}"), found.version

    def _swap(self, record: SinkRecord, version: int | None) -> bool:
        """Put a record in place of the one read before; False if there is another by now."""
        try:
            self._metadata.write_pointer(SINKS, self._app_id, record.encode(), version)
        except MetadataVersionError:
            return False
        return True

    # ---- committing ----------------------------------------------------------------------------------------------

    def commit(self, attempt: Attempt, written: Sequence[WrittenLedger]) -> bool:
        """Make ledgers count, all of them at once.

        Args:
            attempt: Whose they are.
            written: The ledgers, in their order.

        Returns:
            Whether they count; False if the attempt's number was published before, and these were deleted.

        Raises:
            IllegalOperationError: Refused; ``decide`` knows the reasons.
            PybkError: As the metadata store and ledgers; with ``outcome_unknown`` they may count. Ask again.

        Durability: What counts does so for good. Cost: A small ledger and a compare-and-set.
        """
        manifest = None
        while True:
            record, version = self._read()
            if manifest is not None and all(manifest != ledger_id for ledger_id, _ in record.chain):
                self._delete((manifest,), b"")  # the record moved, so it will not be named any more
            action = decide(record, attempt)
            if isinstance(action, Refuse):
                raise IllegalOperationError(f"sink {self._app_id!r} refuses the commit: {action.reason}")
            if isinstance(action, Skip):
                if action.record == record or self._swap(action.record, version):
                    unnamed = {each.ledger_id for each in written}.difference(self.committed())
                    self._delete(sorted(unnamed), self._password)
                    return False
                continue
            try:
                manifest, chain, folded = self._extended(record.chain, attempt.number, written)
            except NoSuchLedgerError as error:
                self._check_moved(version, error)
                continue
            if self._swap(replace(action.record, chain=chain), version):
                self._delete(folded, b"")
                self._collect_sometimes(action.record)
                return True

    def _extended(
        self, chain: Chain, number: int, written: Sequence[WrittenLedger]
    ) -> tuple[int | None, Chain, tuple[int, ...]]:
        """Write a manifest of more ledgers; it is durable and closed on return.

        Returns:
            The manifest, None if there is nothing to name; the chain with it; the manifests that it replaces.
        """
        if not written:
            return None, chain, ()
        kept, folded, tier = fold(chain)
        rows = [row for ledger_id in folded for row in self._rows(ledger_id)]
        rows += [(each.ledger_id, each.entries, each.payload_bytes) for each in written]
        manifest = self._write_manifest(encode_rows(number, rows))
        return manifest, (*kept, (manifest, tier)), folded

    def _write_manifest(self, entries: list[bytes]) -> int:
        with self._manager._create_ledger(
            LedgerType.METADATA,
            custom_metadata={SINK_KEY: self._app_id.encode()},
            quorums=self._quorums,
            insecure=True,  # manifests are as open to members of the cluster as its metadata
        ) as writer:
            writer.append_many(entries)
        return writer.ledger_id

    def _rows(self, manifest: int) -> Rows:
        """Read a manifest."""
        where = f"manifest ledger {manifest} of sink {self._app_id!r}"
        with self._manager.open_ledger(manifest, recover=False) as reader:
            if not reader.is_closed:
                raise CorruptError(f"{where} is not closed, which no manifest that is named is; restore it")
            return decode_rows((entry.payload for entry in reader.read(0, reader.last_add_confirmed)), where=where)

    def abort(self, ledger_ids: Sequence[int]) -> None:
        """Delete ledgers of an attempt that failed, except those that count all the same.

        Raises:
            PybkError: As the metadata store; what was not deleted is an orphan.
        """
        while ledger_ids:
            record, version, named = self._read_committed()
            unnamed = set(ledger_ids).difference(named)
            # A compare-and-set whose answer was lost may be under way still: moved, the record refuses it.
            if not unnamed or self._swap(record, version):
                self._delete(sorted(unnamed), self._password)
                return

    # ---- what counts ---------------------------------------------------------------------------------------------

    def committed(self) -> list[int]:
        """Return the ledgers that count, in the order of commits, and of partitions in each.

        Cost: Manifests are read once in a process.
        """
        return self._read_committed()[2]

    def _read_committed(self) -> tuple[SinkRecord, int | None, list[int]]:
        """Return the record, its version, and the ledgers that count."""
        while True:
            record, version = self._read()
            try:
                return record, version, self._committed(record)
            except NoSuchLedgerError as error:
                self._check_moved(version, error)

    def _check_moved(self, version: int | None, error: NoSuchLedgerError) -> None:
        """Raise unless the record has moved, so that its manifests may have been folded into another."""
        if self._read()[1] == version:
            raise CorruptError(
                f"the record of sink {self._app_id!r} names a manifest ledger that is gone: {error}; restore it"
            ) from error

    def _committed(self, record: SinkRecord) -> list[int]:
        place = (self._metadata.cluster_id, self._app_id)
        seen = _MANIFESTS_READ.get(place, {})
        manifests = {
            ledger_id: seen[ledger_id] if ledger_id in seen else self._rows(ledger_id) for ledger_id, _ in record.chain
        }
        _MANIFESTS_READ[place] = manifests
        return [ledger_id for rows in manifests.values() for ledger_id, _, _ in rows]

    # ---- deleting ------------------------------------------------------------------------------------------------

    def _delete(self, ledger_ids: Iterable[int], password: bytes) -> list[int]:
        """Delete orphans; what cannot be deleted now stays one, and is told in the log."""
        deleted = []
        for ledger_id in ledger_ids:
            try:
                self._manager.delete_ledger(ledger_id, password=password)
                deleted.append(ledger_id)
            except NoSuchLedgerError:
                continue
            except PybkError as error:
                logger.warning("sink %r: orphan ledger %d stays: %s", self._app_id, ledger_id, error)
        return deleted

    def _collect_sometimes(self, record: SinkRecord) -> None:
        """Collect orphans if that was not done for long; what goes wrong is no matter of the commit before it."""
        age_ns = int(ORPHAN_AGE_S * 1e9)
        before_ns = time.time_ns() - age_ns
        if before_ns - record.floor_ns > age_ns:
            try:
                self.collect(sink_ledgers(self._metadata, self._app_id), before_ns)
            except PybkError as error:
                logger.warning("sink %r: orphans were not collected: %s", self._app_id, error)

    def collect(self, ledgers: Iterable[LedgerMetadata], before_ns: int) -> list[int]:
        """Delete orphans.

        Args:
            ledgers: Ledgers of this sink.
            before_ns: Only those created then or before.

        Returns:
            Those that were deleted.

        Raises:
            PybkError: As the metadata store, before anything is deleted.
        """
        old = {each.ledger_id: each.ledger_type for each in ledgers if each.creation_time_ns <= before_ns}
        while True:
            record, version, named = self._read_committed()
            # From here on none of the old ones is published, and no manifest that was seen among them is named.
            if self._swap(replace(record, floor_ns=max(record.floor_ns, before_ns)), version):
                unnamed = sorted(old.keys() - {*named, *(ledger_id for ledger_id, _ in record.chain)})
                manifests = [each for each in unnamed if old[each] == LedgerType.METADATA]
                data = [each for each in unnamed if old[each] != LedgerType.METADATA]
                return self._delete(manifests, b"") + self._delete(data, self._password)


def sink_ledgers(metadata: ClusterMetadata, app_id: str | None = None) -> Iterator[LedgerMetadata]:
    """Yield the ledgers that sinks wrote, manifests included, of one sink or of all."""
    after = -1
    while ids := metadata.list_ledgers(after=after, count=_PAGE):
        for found in metadata.read_sound_ledgers(ids):
            app = found.metadata.custom_metadata.get(SINK_KEY)
            if app is not None and (app_id is None or app == app_id.encode()):
                yield found.metadata
        after = ids[-1]


def committed(connection: Connection, app_id: str) -> set[int]:
    """Return the ledgers of a sink that count.

    Args:
        connection: Where they are.
        app_id: What their custom metadata says under ``SINK_KEY``.

    Raises:
        IllegalOperationError: The connection is to an embedded store, to which no sink writes: all its ledgers count.
        CorruptError: The record or a manifest is damaged or missing.
        PybkError: As the metadata store and ledgers.

    Cost: One look into the metadata store; manifests are read once in a process.
    """
    if connection.metadata is None:
        raise IllegalOperationError(
            f"sink {app_id!r}: {connection.manager!r} is no cluster, and sinks write to clusters"
        )
    return set(Sink(connection.manager, connection.metadata, app_id).committed())


def collect_orphans(
    connection: Connection, *, older_than: float = ORPHAN_AGE_S, password: bytes = b""
) -> dict[str, list[int]]:
    """Delete what sinks wrote and never committed, of all sinks of a cluster.

    Args:
        connection: The cluster.
        older_than: Seconds since they were created. A write that takes longer than this from its first ledger to its
            commit is refused then.
        password: That of the sinks' ledgers; orphans that have another stay.

    Returns:
        What was deleted, by app id of those that had orphans.

    Raises:
        UsageError: ``older_than`` is no age.
        PybkError: As the metadata store.

    Cost: Looks at every ledger of the cluster.
    """
    if not 0 <= older_than < _AGE_S_MAX:
        raise UsageError(f"older_than is {older_than!r}; it takes 0 to {_AGE_S_MAX} seconds")
    if connection.metadata is None:
        raise IllegalOperationError(f"{connection.manager!r} is no cluster, and sinks write to clusters")
    before_ns = time.time_ns() - int(older_than * 1e9)
    old: dict[str, list[LedgerMetadata]] = {}
    for each in sink_ledgers(connection.metadata):
        if each.creation_time_ns <= before_ns:
            old.setdefault(each.custom_metadata[SINK_KEY].decode(errors="replace"), []).append(each)
    collected = {
        app_id: Sink(connection.manager, connection.metadata, app_id, password=password).collect(ledgers, before_ns)
        for app_id, ledgers in old.items()
    }
    return {app_id: deleted for app_id, deleted in collected.items() if deleted}


def collect(
    metadata: str,
    *,
    cluster_secret: bytes | Secret | None = None,
    password: bytes | Secret | None = None,
    older_than: float = ORPHAN_AGE_S,
) -> dict[str, list[int]]:
    """Delete what writes from Spark, imports and copies left and never committed; this needs no Spark.

    Args:
        metadata: The URL of the cluster's metadata.
        cluster_secret: The cluster's, as such, or where it is found; None for none.
        password: That of the ledgers; what has another stays, and is told in the log.
        older_than: As for ``collect_orphans``.

    Returns:
        The ledgers that were deleted, by app id of the sink.

    Raises:
        UsageError: The URL, the secret or the age cannot be.
        PybkError: As the metadata store.

    Cost: Looks at every ledger of the cluster.
    """
    secret = cluster_secret if isinstance(cluster_secret, Secret) else Secret(cluster_secret)
    known = password.read() if isinstance(password, Secret) else password
    place = connection(StoreOrCluster(metadata_uri=metadata, secret=secret))
    return collect_orphans(place, older_than=older_than, password=known or b"")
