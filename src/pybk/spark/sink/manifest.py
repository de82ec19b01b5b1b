"""The commit of a sink: its record in the metadata store, and the manifest ledgers that the record names.

Theory of operation
-------------------

A sink is identified by its *app id*: the id of a streaming query, ``appId``, or the ``txnAppId`` of batch writes. It
consists of

- *data ledgers*, one for each task attempt with rows. Each has the app id in its custom metadata under ``SINK_KEY``;
- *manifest ledgers* of type ``.metadata``, whose entries list data ledgers (``sink_record.encode_rows``);
- *the record* (``SinkRecord``), one value in the metadata store that is changed by compare-and-set alone. It names the
  manifests, and the last batch id or version that was committed.

A data ledger is *committed* if the record names a manifest that names the ledger. Every other ledger with the app id is
an *orphan*, which no reader shows.

Exactly one commit takes effect, by these steps:

1. Each task attempt writes its own ledger and closes it. Spark passes one attempt per partition to the driver.
2. ``Sink.commit`` reads the record, and ``sink_record.decide`` compares the attempt's number with the last one
   committed: publish, skip (the number was committed before), or refuse.
3. To publish, it writes a manifest of the attempt's ledgers and closes it. Nothing is committed yet: the manifest is an
   orphan, too.
4. One compare-and-set of the record names the manifest and the number. This compare-and-set is the whole commit. It
   succeeds at most once per number, because the version that was read in step 2 must still be the record's.
5. If the compare-and-set was refused, another driver has changed the record. Nothing else is known, so the commit
   starts over with step 2. It deletes its manifest unless the new record names it.

If the answer of the compare-and-set was lost, ``commit`` raises an error with ``outcome_unknown``, or finds its own
commit in step 2 and skips it. A skipped attempt's ledgers are deleted unless a manifest names them, so a driver that
finds its own commit deletes nothing.

Chains of manifests stay short: seven manifests of a tier and the new one are written as one of the next tier, whose
compare-and-set also drops the seven from the record; then they are deleted (``sink_record.fold``). A reader that finds
a named manifest deleted reads the record again. If the record has changed, the manifest was folded; if not, the sink is
damaged.

The deletion of orphans must not race with a commit whose compare-and-set is still under way, however late that takes
effect. Two rules ensure this without synchronised clocks:

- Before it deletes, the collector changes the record. Every compare-and-set under way is then refused, and its commit
  starts over with the new record.
- That change raises the record's *floor*. ``decide`` refuses attempts with ledgers created at the floor or before, so
  a ledger that was old enough to be deleted is never committed afterwards. Deletion and refusal compare the same
  creation time, from the ledger's metadata, with the same floor, so wrong clocks do no harm.

Threads: threads share only ``MANIFESTS_READ``, whose values are replaced as a whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.credentials import NO_CREDENTIALS, Credentials, CredentialSources, Secret
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
    ManifestRows,
    Refuse,
    SinkRecord,
    Skip,
    decide,
    decode_rows,
    encode_rows,
    fold,
)

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.metadata.cluster import ClusterMetadata

SINK_KEY: Final = "pybk.sink"
"""The custom metadata of a sink's ledgers: its app id."""

SINKS: Final = "sinks"
"""The group of the records among the cluster's pointers."""

_PAGE: Final = 500
"""The number of ledgers whose metadata is read at a time."""

_AGE_S_MAX: Final = 1e9

logger = logging.getLogger(__name__)


class WrittenLedger(NamedTuple):
    """A closed ledger of one task attempt.

    Attributes:
        ledger_id: The ledger.
        entries: The number of its entries, at least 1.
        payload_bytes: Bytes of their payloads.
        created_ns: The creation time in its metadata.
    """

    ledger_id: int
    entries: int
    payload_bytes: int
    created_ns: int


MANIFESTS_READ: dict[tuple[bytes, str], dict[int, ManifestRows]] = {}
"""Manifests that this process has read, by cluster and app id.

They are never read again, because manifests never change and ledger ids are not reused.
"""


class Sink:
    """The record of one sink, and the ledgers that the sink wrote.

    Args:
        manager: The cluster's ledgers.
        metadata: The cluster's metadata.
        app_id: The sink's app id.
        given: The password or secret of its data ledgers. Manifests have neither, because they only name ledgers.
        quorums: Ensemble size, write quorum and ack quorum of its manifests; None for the manager's defaults.

    Threads: any.
    """

    def __init__(
        self,
        manager: LedgerManager,
        metadata: ClusterMetadata,
        app_id: str,
        *,
        given: Credentials = NO_CREDENTIALS,
        quorums: tuple[int | None, int | None, int | None] = (None, None, None),
    ) -> None:
        self._manager = manager
        self.metadata = metadata
        """The metadata of the cluster."""
        self._app_id = app_id
        self._given = given
        self._quorums = quorums

    # ---- the record ----------------------------------------------------------------------------------------------

    def record(self) -> SinkRecord:
        """Return the record as the metadata store has it now; an empty one if the store has none."""
        return self._read()[0]

    def _read(self) -> tuple[SinkRecord, int | None]:
        """Return the record and its version; None for a record that was never written."""
        found = self.metadata.read_pointer(SINKS, self._app_id)
        if found is None:
            return SinkRecord(), None
        return SinkRecord.decode(found.value, where=f"the record of sink {self._app_id!r}"), found.version

    def swap(self, record: SinkRecord, version: int | None) -> bool:
        """Write a record if its version is still ``version``; return False if it was changed meanwhile."""
        try:
            self.metadata.write_pointer(SINKS, self._app_id, record.encode(), version)
        except MetadataVersionError:
            return False
        return True

    # ---- committing ----------------------------------------------------------------------------------------------

    def commit(self, attempt: Attempt, written: Sequence[WrittenLedger]) -> bool:
        """Commit ledgers, all of them at once.

        Args:
            attempt: The attempt that wrote them.
            written: The ledgers, in their order.

        Returns:
            True if they are committed; False if the attempt's number was committed before, and these ledgers were
            deleted.

        Raises:
            IllegalOperationError: The commit is refused; ``decide`` has the reasons.
            PybkError: As the metadata store and ledgers. With ``outcome_unknown`` the ledgers may be committed: call
                this again, which completes or skips the commit.

        Durability: A commit is durable on return. Cost: A small ledger and a compare-and-set.
        """
        manifest = None
        while True:
            record, version = self._read()
            if manifest is not None and all(manifest != ledger_id for ledger_id, _ in record.chain):
                self._delete(
                    (manifest,), NO_CREDENTIALS
                )  # the compare-and-set was refused, so no record will ever name it
            action = decide(record, attempt)
            if isinstance(action, Refuse):
                raise IllegalOperationError(f"sink {self._app_id!r} refuses the commit: {action.reason}")
            if isinstance(action, Skip):
                if action.record == record or self.swap(action.record, version):
                    unnamed = {each.ledger_id for each in written}.difference(self.committed())
                    self._delete(sorted(unnamed), self._given)
                    return False
                continue
            try:
                manifest, chain, folded = self._extend(record.chain, attempt.number, written)
            except NoSuchLedgerError as error:
                self._check_changed(version, error)
                continue
            if self.swap(replace(action.record, chain=chain), version):
                self._delete(folded, NO_CREDENTIALS)
                self._collect_sometimes(action.record)
                return True

    def _extend(
        self, chain: Chain, number: int, written: Sequence[WrittenLedger]
    ) -> tuple[int | None, Chain, tuple[int, ...]]:
        """Write a manifest that names more ledgers; it is durable and closed on return.

        Returns:
            The manifest, None without ledgers to name; the chain with it; the manifests that it replaces.
        """
        if not written:
            return None, chain, ()
        kept, folded, tier = fold(chain)
        rows = [row for ledger_id in folded for row in self._rows(ledger_id)]
        rows += [(each.ledger_id, each.entries, each.payload_bytes) for each in written]
        manifest = self._write_manifest(encode_rows(number, rows))
        return manifest, (*kept, (manifest, tier)), folded

    def _write_manifest(self, entries: list[bytes]) -> int:
        ensemble_size, write_quorum, ack_quorum = self._quorums
        with self._manager.create_system_ledger(
            LedgerType.METADATA,
            custom_metadata={SINK_KEY: self._app_id.encode()},
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            insecure=True,  # members of the cluster may read manifests, as they may read its metadata
        ) as writer:
            writer.append_many(entries)
        return writer.ledger_id

    def _rows(self, manifest: int) -> ManifestRows:
        """Read a manifest."""
        where = f"manifest ledger {manifest} of sink {self._app_id!r}"
        with self._manager.open_ledger(manifest, recover=False) as reader:
            if not reader.is_closed:
                raise CorruptError(f"{where} is not closed, although the record names closed ones only; restore it")
            return decode_rows((entry.payload for entry in reader.read(0, reader.last_add_confirmed)), where=where)

    def abort(self, ledger_ids: Sequence[int]) -> None:
        """Delete the ledgers of a failed attempt, except those that are committed nevertheless.

        Raises:
            PybkError: As the metadata store; ledgers that were not deleted are orphans.
        """
        while ledger_ids:
            record, version, named = self._read_committed()
            unnamed = set(ledger_ids).difference(named)
            # A compare-and-set whose answer was lost may still be under way. Writing the record makes it fail.
            if not unnamed or self.swap(record, version):
                self._delete(sorted(unnamed), self._given)
                return

    # ---- committed ledgers ---------------------------------------------------------------------------------------

    def committed(self) -> list[int]:
        """Return the committed ledgers, in the order of commits, and of partitions within each.

        Cost: A read of the metadata store; each manifest is read once in a process.
        """
        return self._read_committed()[2]

    def _read_committed(self) -> tuple[SinkRecord, int | None, list[int]]:
        """Return the record, its version, and the committed ledgers."""
        while True:
            record, version = self._read()
            try:
                return record, version, self._named_by(record)
            except NoSuchLedgerError as error:
                self._check_changed(version, error)

    def _check_changed(self, version: int | None, error: NoSuchLedgerError) -> None:
        """Check that the record has changed, so that a fold may have deleted a manifest that it named before.

        Raises:
            CorruptError: It has not changed, so a manifest that it names is missing.
        """
        if self._read()[1] == version:
            raise CorruptError(
                f"the record of sink {self._app_id!r} names a manifest ledger that does not exist: {error}; restore it"
            ) from error

    def _named_by(self, record: SinkRecord) -> list[int]:
        sink = (self.metadata.cluster_id, self._app_id)
        read = MANIFESTS_READ.get(sink, {})
        manifests = {
            ledger_id: read[ledger_id] if ledger_id in read else self._rows(ledger_id) for ledger_id, _ in record.chain
        }
        MANIFESTS_READ[sink] = manifests
        return [ledger_id for rows in manifests.values() for ledger_id, _, _ in rows]

    # ---- deleting ------------------------------------------------------------------------------------------------

    def _delete(self, ledger_ids: Iterable[int], given: Credentials) -> list[int]:
        """Delete orphans, and return those deleted; an orphan that cannot be deleted stays, with a warning."""
        deleted = []
        for ledger_id in ledger_ids:
            try:
                self._manager.delete_ledger(ledger_id, password=given.password, secret=given.secret)
                deleted.append(ledger_id)
            except NoSuchLedgerError:
                continue
            except PybkError as error:
                logger.warning("sink %r: orphan ledger %d stays: %s", self._app_id, ledger_id, error)
        return deleted

    def _collect_sometimes(self, record: SinkRecord) -> None:
        """Collect orphans if none were collected for a day; errors are logged, because the commit has succeeded."""
        age_ns = int(ORPHAN_AGE_S * 1e9)
        before_ns = time.time_ns() - age_ns
        if before_ns - record.floor_ns > age_ns:
            try:
                self.collect(sink_ledgers(self.metadata, self._app_id), before_ns)
            except PybkError as error:
                logger.warning("sink %r: orphans were not collected: %s", self._app_id, error)

    def collect(self, ledgers: Iterable[LedgerMetadata], before_ns: int) -> list[int]:
        """Delete orphans, and return those deleted.

        Args:
            ledgers: Ledgers of this sink, orphans and others.
            before_ns: Only orphans created at this time or before are deleted, nanoseconds since 1970.

        Raises:
            PybkError: As the metadata store, before anything is deleted.
        """
        old = {each.ledger_id: each.ledger_type for each in ledgers if each.creation_time_ns <= before_ns}
        while True:
            record, version, named = self._read_committed()
            # Once this compare-and-set has succeeded, no commit publishes a data ledger of ``old``, because of the
            # floor, and no commit under way publishes a manifest of ``old``, because its compare-and-set fails.
            if self.swap(replace(record, floor_ns=max(record.floor_ns, before_ns)), version):
                unnamed = sorted(old.keys() - {*named, *(ledger_id for ledger_id, _ in record.chain)})
                manifests = [each for each in unnamed if old[each] == LedgerType.METADATA]
                data = [each for each in unnamed if old[each] != LedgerType.METADATA]
                return self._delete(manifests, NO_CREDENTIALS) + self._delete(data, self._given)


def sink_ledgers(metadata: ClusterMetadata, app_id: str | None = None) -> Iterator[LedgerMetadata]:
    """Yield the ledgers, manifests included, of one sink, or of all sinks if ``app_id`` is None."""
    after = -1
    while ids := metadata.list_ledgers(after=after, count=_PAGE):
        for found in metadata.read_sound_ledgers(ids):
            app = found.metadata.custom_metadata.get(SINK_KEY)
            if app is not None and (app_id is None or app == app_id.encode()):
                yield found.metadata
        after = ids[-1]


def committed(connection: Connection, app_id: str) -> set[int]:
    """Return the committed ledgers of a sink.

    Args:
        connection: The cluster.
        app_id: The sink's app id, as the custom metadata of its ledgers has it under ``SINK_KEY``.

    Raises:
        IllegalOperationError: The connection is to an embedded store, to which sinks do not write.
        CorruptError: The record or a manifest is damaged or missing.
        PybkError: As the metadata store and ledgers.

    Cost: A read of the metadata store; each manifest is read once in a process.
    """
    if connection.metadata is None:
        raise IllegalOperationError(
            f"sink {app_id!r}: {connection.manager!r} is not a cluster, and sinks write to clusters"
        )
    return set(Sink(connection.manager, connection.metadata, app_id).committed())


def collect_orphans(
    connection: Connection, *, older_than: float = ORPHAN_AGE_S, given: Credentials = NO_CREDENTIALS
) -> dict[str, list[int]]:
    """Delete the orphans of all sinks of a cluster.

    Args:
        connection: The cluster.
        older_than: Only orphans created longer ago than this, seconds. Writes that take longer than this from their
            first ledger to their commit are refused afterwards.
        given: The password or secret of the sinks' ledgers; orphans with another one stay.

    Returns:
        The deleted ledgers by app id, for sinks that had any.

    Raises:
        UsageError: ``older_than`` is out of range.
        PybkError: As the metadata store.

    Cost: Reads the metadata of every ledger of the cluster.
    """
    if not 0 <= older_than < _AGE_S_MAX:
        raise UsageError(f"older_than is {older_than!r}; it takes 0 to {_AGE_S_MAX} seconds")
    if connection.metadata is None:
        raise IllegalOperationError(f"{connection.manager!r} is not a cluster, and sinks write to clusters")
    before_ns = time.time_ns() - int(older_than * 1e9)
    old: dict[str, list[LedgerMetadata]] = {}
    for each in sink_ledgers(connection.metadata):
        if each.creation_time_ns <= before_ns:
            old.setdefault(each.custom_metadata[SINK_KEY].decode(errors="replace"), []).append(each)
    collected = {
        app_id: Sink(connection.manager, connection.metadata, app_id, given=given).collect(ledgers, before_ns)
        for app_id, ledgers in old.items()
    }
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

    Args:
        metadata: The URL of the cluster's metadata.
        cluster_secret: The cluster's secret, or its source; None for none.
        password: The password of the ledgers; orphans with another one stay, and the log names them.
        secret: The secret of the ledgers that were created with one.
        older_than: As for ``collect_orphans``.

    Returns:
        The deleted ledgers by app id of their sink.

    Raises:
        UsageError: The URL, the secret or the age is not valid.
        PybkError: As the metadata store.

    Cost: Reads the metadata of every ledger of the cluster.
    """
    key = cluster_secret if isinstance(cluster_secret, Secret) else Secret(cluster_secret)
    given = CredentialSources.of(password, secret).read()
    cluster = connection(StoreOrCluster(metadata_uri=metadata, secret=key))
    return collect_orphans(cluster, older_than=older_than, given=given)
