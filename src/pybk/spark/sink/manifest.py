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
compare-and-set also drops the seven from the record; then they are deleted (``sink_record.fold``). The new manifest
leaves out ledgers that were deleted since, and retention, which deletes committed ledgers, has manifests written
without them in place of those that name them. So what a sink keeps is in proportion to the ledgers that there are. A
reader that finds a named manifest deleted reads the record again. If the record has changed, the manifest was folded;
if not, the sink is damaged.

A merge and a retention keep what they have written while commits change the record under them (``row_change``), but not
what a collection may have deleted meanwhile: a manifest that is not newer than the floor.

A *merge* has one ledger in place of many small ones. It copies the entries of committed ledgers, its *members*, into a
new ledger, the *holder*, whose custom metadata have ``MERGED_KEY``. Then one compare-and-set of the record names a
manifest that has the holder, and the first entry there, in the rows of the members. Members keep their numbers: to
offsets, consumers, retention and rows they stay the ledgers that they were, and only the place of their entries has
changed. Hence

- a query that has read some of them continues at the same entry, and one that repeats a micro-batch reads the same;
- a reader shows members, never a holder, and takes their entries from the holder as soon as it knows of it;
- a reader that finds a ledger deleted reads the record of its sink again, because a merge may have moved it.

The members' own ledgers are kept until the time that the record has with the merge, and deleted after it. A holder is
deleted as a whole, once retention may delete all its members. A holder that no record names is an orphan. The
compare-and-set of a merge takes effect only if the members' rows are still those that were copied, and the holder is
newer than the floor; so it names neither a ledger twice nor an orphan that may be deleted.

A batch write without an app id is a sink of its own, with one commit. Its record names the ledgers itself, without a
manifest, and is removed once all of them were deleted. Such writes look after what others of their kind have left: each
looks at some records, and the first of a day collects orphans.

The deletion of orphans must not race with a commit whose compare-and-set is still under way, however late that takes
effect. These rules ensure this without synchronised clocks:

- Before it deletes, a collector or an abort changes the record. Every compare-and-set under way is then refused, and
  its commit starts over with the new record.
- The change by a collector raises the record's *floor*. ``decide`` refuses attempts with ledgers created at the floor
  or before, so a ledger that was old enough to be deleted is never committed afterwards. Deletion and refusal compare
  the same creation time, from the ledger's metadata, with the same floor, so wrong clocks do no harm.
- The change by an abort names its ledgers as *given up*, until they are gone. A commit that starts over, or begins
  later, refuses ledgers that are given up or deleted.

Threads: threads share only ``MANIFESTS_READ``, whose values are replaced as a whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.credentials import NO_CREDENTIALS, Credentials
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    LedgerDeletedError,
    MetadataForgedError,
    MetadataUnreachableError,
    MetadataVersionError,
    NoSuchLedgerError,
    PybkError,
    UnsupportedFormatError,
)
from pybk.flags import LedgerType
from pybk.metadata.ledgers import LEDGERS_PAGE
from pybk.spark.connection import Connection
from pybk.spark.places import ITSELF, MERGED_KEY, Place, of_member
from pybk.spark.sink.row_change import Moved, RowChange, changed, pieces
from pybk.spark.sink.sink_record import (
    NAMED_MAX,
    ORPHAN_AGE_S,
    TOO_LATE,
    Attempt,
    Chain,
    LedgerMerge,
    ManifestRow,
    ManifestRows,
    Publish,
    Refuse,
    SinkRecord,
    Skip,
    decide,
    decode_rows,
    encode_rows,
    fold,
    is_one_off,
    with_merges,
    without_names,
)

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.metadata.pointers import Pointer

SINK_KEY: Final = "pybk.sink"
"""The custom metadata of a sink's ledgers: its app id."""

SINKS: Final = "sinks"
"""The group of the records among the cluster's pointers."""

_NAMED: Final = -1
"""The key of the ledgers that a record names itself, among those of its manifests."""

FLOOR_KEPT_S: Final = 2 * ORPHAN_AGE_S
"""The time for which the floor of a write that was never committed is kept: a commit of ledgers that are older than a
day is refused without it."""

LOST_REMEDY: Final = (
    "if its metadata are lost, `pybk metadata rebuild` makes them again from the directories of the bookies; if none of"
    " these has it, its name stays, and does no harm"
)
"""What to do about a ledger that has neither metadata nor a tombstone."""

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


class Released(NamedTuple):
    """The result of deleting what merges have replaced.

    Attributes:
        deleted: The ledgers that were deleted.
        stay: Ledgers whose time is over and that are not known to be deleted, each with the reason; tried again by the
            next call.
    """

    deleted: list[int]
    stay: dict[int, str]


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
        self.app_id: Final = app_id
        """The app id."""
        self._is_one_off = is_one_off(app_id)
        self._given = given
        self._quorums = quorums

    # ---- the record ----------------------------------------------------------------------------------------------

    def record(self) -> SinkRecord:
        """Return the record as the metadata store has it now; an empty one if the store has none."""
        return self._read()[0]

    def _read(self) -> tuple[SinkRecord, int | None]:
        """Return the record and its version; None for a record that was never written."""
        return self.decoded(self.metadata.read_pointer(SINKS, self.app_id))

    def decoded(self, found: Pointer | None) -> tuple[SinkRecord, int | None]:
        """Return the record in a pointer, and its version; an empty one and None without a pointer."""
        if found is None:
            return SinkRecord(), None
        return SinkRecord.decode(found.value, where=f"the record of sink {self.app_id!r}"), found.version

    def swap(self, record: SinkRecord, version: int | None) -> bool:
        """Write a record if its version is still ``version``; return False if it was changed meanwhile."""
        try:
            self.metadata.write_pointer(SINKS, self.app_id, record.encode(), version)
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

        Durability: A commit is durable on return.
        Cost: A small ledger, a compare-and-set, and a read of the metadata of the ledgers.
        """
        manifest = None
        while True:
            record, version = self._read()
            if manifest is not None and all(manifest != ledger_id for ledger_id, _ in record.chain):
                self._delete(
                    (manifest,), NO_CREDENTIALS
                )  # the compare-and-set was refused, so no record will ever name it
            action = decide(record, attempt)
            if isinstance(action, Publish):
                self._check_kept(record, written)
            if isinstance(action, Refuse):
                raise IllegalOperationError(f"sink {self.app_id!r} refuses the commit: {action.reason}")
            if isinstance(action, Skip):
                if action.record == record or self.swap(action.record, version):
                    unnamed = {each.ledger_id for each in written}.difference(self.committed())
                    self._delete(sorted(unnamed), self._given)
                    return False
                continue
            if self._is_one_off and attempt.oldest_ns <= time.time_ns() - int(ORPHAN_AGE_S * 1e9):
                raise IllegalOperationError(f"sink {self.app_id!r} refuses the commit: {TOO_LATE}")
            try:
                manifest, extended, folded = self._extend(action.record, attempt.number, written)
            except NoSuchLedgerError as error:
                self._check_changed(version, error)
                continue
            if self.swap(extended, version):
                self._delete(folded, NO_CREDENTIALS)
                self._collect_sometimes(action.record)
                return True

    def _check_kept(self, record: SinkRecord, written: Sequence[WrittenLedger]) -> None:
        """Raise IllegalOperationError if an abort has given up ledgers that are to be committed."""
        ids = [each.ledger_id for each in written]
        gone = self._deleted_of(ids) | {*ids}.intersection(record.given_up)
        if gone:
            raise IllegalOperationError(
                f"sink {self.app_id!r} refuses the commit: ledger {min(gone)} was given up; write the rows again"
            )

    def _extend(
        self, record: SinkRecord, number: int, written: Sequence[WrittenLedger]
    ) -> tuple[int | None, SinkRecord, tuple[int, ...]]:
        """Name more ledgers, by a manifest that is durable and closed on return, or in the record itself.

        Returns:
            The manifest, None if there is none; the record to write; the manifests that the new one replaces.
        """
        rows = [ManifestRow(*each) for each in written]
        if self._is_one_off and len(rows) <= NAMED_MAX:
            return None, replace(record, named=(*record.named, *rows)), ()
        if not rows:
            return None, record, ()
        kept, folded, tier = fold(record.chain)
        rows = self._not_deleted([row for ledger_id in folded for row in self._rows(ledger_id)]) + rows
        manifest = self._write_manifest(encode_rows(number, rows)).ledger_id
        return manifest, replace(record, chain=(*kept, (manifest, tier))), folded

    def _not_deleted(self, rows: ManifestRows) -> ManifestRows:
        """Return the rows of ledgers that were not deleted; a missing key alone does not prove that."""
        deleted = self._deleted_of(row.stored_in for row in rows)
        return [row for row in rows if row.stored_in not in deleted]

    def _deleted_of(self, ledger_ids: Iterable[int]) -> set[int]:
        """Return those of some ledgers that are known to be deleted; others may be missing, or cannot be read."""
        ids, deleted = sorted({*ledger_ids}), set[int]()
        for at in range(0, len(ids), LEDGERS_PAGE):
            page = ids[at : at + LEDGERS_PAGE]
            found = self.metadata.read_ledgers(page, damaged=lambda *_: None, deleted=deleted.add)
            unknown = [each for each, one in zip(page, found, strict=True) if one is None and each not in deleted]
            deleted.update(each for each in unknown if is_deleted(self.metadata, each))
        return deleted

    def _write_manifest(self, entries: list[bytes], *, like: int | None = None) -> LedgerMetadata:
        """Write a manifest, with the quorums of another one if that is given; return its metadata."""
        ensemble_size, write_quorum, ack_quorum = self._quorums
        old = None if like is None else self.metadata.read_ledgers([like])[0]
        if old is not None:
            ensemble_size, write_quorum = old.metadata.ensemble_size, old.metadata.write_quorum
            ack_quorum = old.metadata.ack_quorum
        with self._manager.create_system_ledger(
            LedgerType.METADATA,
            custom_metadata={SINK_KEY: self.app_id.encode()},
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            insecure=True,  # members of the cluster may read manifests, as they may read its metadata
        ) as writer:
            writer.append_many(entries)
        return writer.metadata

    def _rows(self, manifest: int) -> ManifestRows:
        """Read a manifest."""
        where = f"manifest ledger {manifest} of sink {self.app_id!r}"
        with self._manager.open_ledger(manifest, recover=False) as reader:
            if not reader.is_closed:
                raise CorruptError(f"{where} is not closed, although the record names closed ones only; restore it")
            return decode_rows((entry.payload for entry in reader.read(0, reader.last_add_confirmed)), where=where)

    def abort(self, ledger_ids: Sequence[int]) -> None:
        """Delete the ledgers of a failed attempt, except those that are committed nevertheless.

        Raises:
            PybkError: As the metadata store; ledgers that were not deleted are orphans.
        """
        for low in range(0, len(ledger_ids), LEDGERS_PAGE):
            unnamed = self._give_up(ledger_ids[low : low + LEDGERS_PAGE])
            self._delete(unnamed, self._given)
            self._forget({each for each in unnamed if is_deleted(self.metadata, each)})

    def _give_up(self, ledger_ids: Sequence[int]) -> list[int]:
        """Name ledgers as given up, except those that are committed; return them."""
        while True:
            record, version, named = self._read_committed()
            unnamed = sorted({*ledger_ids}.difference(row.ledger_id for row in named))
            new = {*unnamed}.difference(record.given_up)
            if not new or self.swap(replace(record, given_up=(*record.given_up, *sorted(new))), version):
                return unnamed

    def _forget(self, gone: Collection[int]) -> None:
        """Remove ledgers that are deleted from those that are given up."""
        while True:
            record, version = self._read()
            left = tuple(each for each in record.given_up if each not in gone)
            if left == record.given_up or self.swap(replace(record, given_up=left), version):
                return

    # ---- committed ledgers ---------------------------------------------------------------------------------------

    def committed(self) -> list[int]:
        """Return the committed ledgers, in the order of commits, and of partitions within each.

        Cost: A read of the metadata store; each manifest is read once in a process.
        """
        return [row.ledger_id for row in self.rows()]

    def rows(self) -> ManifestRows:
        """Return the committed ledgers, as ``committed`` does, with their sizes."""
        return self._read_committed()[2]

    def _read_committed(self) -> tuple[SinkRecord, int | None, ManifestRows]:
        """Return the record, its version, and the committed ledgers."""
        record, version, manifests = self._read_manifests()
        return record, version, [row for rows in manifests.values() for row in rows]

    def _read_manifests(self) -> tuple[SinkRecord, int | None, dict[int, ManifestRows]]:
        """Return the record, its version, and the rows of its manifests."""
        while True:
            record, version = self._read()
            try:
                return record, version, self._manifests_of(record)
            except NoSuchLedgerError as error:
                self._check_changed(version, error)

    def _check_changed(self, version: int | None, error: NoSuchLedgerError) -> None:
        """Check that the record has changed, so that a fold may have deleted a manifest that it named before.

        Raises:
            CorruptError: It has not changed, so a manifest that it names is missing.
        """
        if self._read()[1] == version:
            raise CorruptError(
                f"the record of sink {self.app_id!r} names a manifest ledger that does not exist: {error}; restore it"
            ) from error

    def manifests(self, found: Pointer | None) -> dict[int, ManifestRows]:
        """Return the rows of the manifests that the record names, in the order of commits; and its own as the last.

        Args:
            found: The pointer that has the record, as it was read just now.

        Cost: Each manifest is read once in a process.
        """
        record, version = self.decoded(found)
        while True:
            try:
                return self._manifests_of(record)
            except NoSuchLedgerError as error:
                self._check_changed(version, error)
            record, version = self._read()

    def _manifests_of(self, record: SinkRecord) -> dict[int, ManifestRows]:
        sink = (self.metadata.cluster_id, self.app_id)
        read = MANIFESTS_READ.get(sink, {})
        manifests = {
            ledger_id: read[ledger_id] if ledger_id in read else self._rows(ledger_id) for ledger_id, _ in record.chain
        }
        if manifests or read:
            MANIFESTS_READ[sink] = manifests
        return {**manifests, _NAMED: list(record.named)}

    # ---- deleting ------------------------------------------------------------------------------------------------

    def _delete(
        self,
        ledger_ids: Iterable[int],
        given: Credentials,
        *,
        raises: bool = False,
        failed: dict[int, str] | None = None,
    ) -> list[int]:
        """Delete ledgers, and return those deleted; one that cannot be deleted stays, with a warning.

        Args:
            ledger_ids: The ledgers.
            given: Their password or secret.
            raises: Whether MetadataUnreachableError is raised, because each of many further ones would wait as long.
            failed: Gets the reasons for ledgers that were not deleted, also for those that are not there.
        """
        deleted = []
        failed = {} if failed is None else failed
        for ledger_id in ledger_ids:
            try:
                self._manager.delete_ledger(ledger_id, password=given.password, secret=given.secret)
                deleted.append(ledger_id)
            except NoSuchLedgerError as error:
                failed[ledger_id] = f"{error}, which does not prove that it was deleted; {LOST_REMEDY}"
            except PybkError as error:
                if raises and isinstance(error, MetadataUnreachableError):
                    raise
                failed[ledger_id] = str(error)
                logger.warning("sink %r: ledger %d stays: %s", self.app_id, ledger_id, error)
        return deleted

    def _collect_sometimes(self, record: SinkRecord) -> None:
        """Collect orphans if none were collected for a day; errors are logged, because the commit has succeeded."""
        age_ns = int(ORPHAN_AGE_S * 1e9)
        before_ns = time.time_ns() - age_ns
        if before_ns - record.floor_ns > age_ns:
            try:
                self.collect(sink_ledgers(self.metadata, self.app_id), before_ns)
            except PybkError as error:
                logger.warning("sink %r: orphans were not collected: %s", self.app_id, error)

    def shrink(self, before_ns: int) -> list[int]:
        """Delete the manifests if all ledgers that they name were deleted; return the deleted manifests.

        A sink that gets no further commit loses its record, too. If nothing was committed to it, the record has to
        stay for some time, because its floor refuses a commit that comes late.

        Args:
            before_ns: Only what was committed at this time or before counts, nanoseconds since 1970.
        """
        record, version, named = self._read_committed()
        manifests = [ledger_id for ledger_id, _ in record.chain]
        if version is None or not (manifests or self._is_one_off):
            return []
        if record.last < 0 and record.floor_ns > time.time_ns() - int(FLOOR_KEPT_S * 1e9):
            return []
        if (
            record.given_up
            or not self._are_old(record, before_ns)
            or len(self._deleted_of(row.stored_in for row in named)) < len({row.stored_in for row in named})
        ):
            return []
        return self._delete(manifests, NO_CREDENTIALS) if self._emptied(record, version) else []

    def _are_old(self, record: SinkRecord, before_ns: int) -> bool:
        """Return whether the manifests of a record, and the ledgers that it names itself, are from before a time."""
        found = self.metadata.read_ledgers([ledger_id for ledger_id, _ in record.chain])
        created = [each.metadata.creation_time_ns for each in found if each is not None]
        return all(each <= before_ns for each in (*created, *(row.created_ns for row in record.named)))

    def _emptied(self, record: SinkRecord, version: int) -> bool:
        """Have the record name nothing, or remove it; return False if it was changed meanwhile."""
        if not self._is_one_off:
            return self.swap(replace(without_names(record, []), chain=()), version)
        try:
            self.metadata.delete_pointer(SINKS, self.app_id, version)
        except MetadataVersionError:
            return False
        MANIFESTS_READ.pop((self.metadata.cluster_id, self.app_id), None)
        return True

    def claim_retention(self, period_s: float) -> bool:
        """Return whether to apply the retention now, and note that it is; no other process does it meanwhile.

        Args:
            period_s: The least time from one to the next, seconds.
        """
        record, version = self._read()
        now_ns = time.time_ns()
        if record.retained_ns <= now_ns < record.retained_ns + int(period_s * 1e9):
            return False
        return self.swap(replace(record, retained_ns=now_ns), version)

    def allow_retention(self) -> None:
        """Have the next commit apply the retention at once, unless another process changes the record meanwhile."""
        record, version = self._read()
        self.swap(replace(record, retained_ns=0), version)

    def delete_committed(self, ledger_ids: Iterable[int]) -> list[int]:
        """Delete committed ledgers; return those deleted, whose names stay until ``drop_names``.

        One that cannot be deleted stays, with a warning. A merged ledger is deleted as a whole, by its own number.

        Raises:
            MetadataUnreachableError: The metadata store cannot be reached; further ledgers were not deleted.
        """
        return self._delete(ledger_ids, self._given, raises=True)

    def _there(self, ledger_ids: Iterable[int]) -> set[int]:
        """Return those of some ledgers that exist, and whose metadata can be read."""
        ids = sorted({*ledger_ids})
        pages = (ids[at : at + LEDGERS_PAGE] for at in range(0, len(ids), LEDGERS_PAGE))
        return {each.metadata.ledger_id for page in pages for each in self.metadata.read_sound_ledgers(page)}

    def drop_names(self, deleted: Collection[int], gone: Collection[int] = ()) -> None:
        """Drop the names of ledgers that were deleted, and delete what is kept for readers of merged ones among them.

        Args:
            deleted: Ledgers, or members of merged ones, that retention has deleted.
            gone: Ledgers that were found deleted. A merge may have moved the entries of such a one to another ledger
                before; then its name stays.

        Raises:
            PybkError: As the metadata store and ledgers; the names may stay.

        Cost: The manifests that name such ledgers are written again, without them.
        """
        change = RowChange(lambda row: row.ledger_id in deleted or row.stored_in in gone)
        while True:
            record, version, manifests = self._read_manifests()
            change.look(record, manifests)
            dropped, holders = change.found, change.other_holders
            # Commits drop the names of a merged ledger that is gone as well, but not what is kept for its readers.
            if not dropped and all(each.holder in holders for each in record.replaced):
                break
            self._delete(self._left_over(record, dropped, holders), self._given)
            before_ns = time.time_ns() - int(ORPHAN_AGE_S * 1e9)
            is_empty = len(dropped) == sum(map(len, manifests.values()))
            is_over = is_empty and not record.given_up and self._are_old(record, before_ns)
            if is_over and version is not None:
                now = replace(record, chain=()) if self._emptied(record, version) else None
            else:
                moved = dict.fromkeys(row.ledger_id for row in dropped)
                now = self._rewritten(without_names(record, holders), version, manifests, change, moved)
            if now is not None:
                record = now
                break
        self._delete(change.unnamed(record.chain), NO_CREDENTIALS)

    def _left_over(self, record: SinkRecord, dropped: ManifestRows, holders: Collection[int]) -> list[int]:
        """Return the ledgers that are still kept for readers of merged ones of which no name is kept.

        Args:
            record: The record.
            dropped: The rows whose names are dropped.
            holders: The holders of the others.
        """
        gone = {each.holder: each.holders for each in record.replaced if each.holder not in holders}
        kept = {row.ledger_id for row in dropped if row.holder in gone}
        kept.update(each for replaced in gone.values() for each in replaced)
        kept.difference_update(holders)  # whatever the record says
        return sorted(kept - self._deleted_of(kept))

    def _rewritten(
        self,
        record: SinkRecord,
        version: int | None,
        manifests: Mapping[int, ManifestRows],
        change: RowChange,
        moved: Moved,
    ) -> SinkRecord | None:
        """Write manifests with changed rows, and the record, which then names them.

        Args:
            record: The record as it is to be, but for its manifests.
            version: The version that it replaces.
            manifests: The rows of its manifests.
            change: The change; it has what was written before the record was changed by others.
            moved: The rows in place of those of some ledgers.

        Returns:
            The record that was written; None if it was changed meanwhile.
        """
        chain: Chain = ()
        for part, changes in change.parts(record.chain, manifests, moved):
            if changes and part not in change.written:
                rows = changed([row for ledger_id, _ in part for row in manifests[ledger_id]], moved)
                written = [
                    (self._write_manifest(encode_rows(record.last, each), like=part[0][0]), each)
                    for each in pieces(rows)
                ]
                change.note(part, written)
            chain += change.written[part] if changes else part
        record = replace(record, chain=chain, named=tuple(changed(manifests[_NAMED], moved)))
        if not self.swap(record, version):
            return None
        sink = (self.metadata.cluster_id, self.app_id)
        MANIFESTS_READ[sink] = {**MANIFESTS_READ.get(sink, {}), **change.rows}
        return record

    # ---- merging -------------------------------------------------------------------------------------------------

    def merge(self, merges: Sequence[LedgerMerge], keep_s: float) -> list[LedgerMerge]:
        """Name merged ledgers as the holders of their members, all of them at once.

        One whose members have changed since they were copied, or which may be deleted as an orphan, is deleted.

        Args:
            merges: The merges; their ledgers are closed.
            keep_s: The time for which the members' own ledgers are kept from now on, seconds.

        Returns:
            Those that took effect.

        Raises:
            PybkError: As the metadata store and ledgers. With ``outcome_unknown`` they may have taken effect; ledgers
                of those that did not are orphans.

        Durability: The merges are durable on return.
        Cost: The manifests that name members are written again; after a commit that came between, those of them that
            it has folded.
        """
        members = {row.ledger_id for each in merges for row in each.members}
        change = RowChange(lambda row: row.ledger_id in members)
        before: list[LedgerMerge] = []
        moved: dict[int, ManifestRow] = {}
        while True:
            record, version, manifests = self._read_manifests()
            change.look(record, manifests)
            found = change.found
            named = {row.ledger_id: row for row in found}
            # Only this call names their ledgers; names may have been dropped since.
            holders = {row.holder for row in found}
            done = [each for each in merges if each.holder in holders]
            new = [each for each in merges if each.created_ns > record.floor_ns and _are_as_copied(each, named)]
            if new:
                if new != before:
                    change.written.clear()
                    before, moved = new, {row.ledger_id: row for each in new for row in each.rows()}
                other = with_merges(record, new, time.time_ns() + int(keep_s * 1e9))
                now = self._rewritten(other, version, manifests, change, moved)
                if now is None:
                    continue
                record = now
            self._delete(change.unnamed(record.chain), NO_CREDENTIALS)
            effective = [*done, *new]
            self._delete((each.holder for each in merges if each not in effective), self._given)
            return effective

    def release_replaced(self, now_ns: int) -> Released:
        """Delete the own ledgers of members of merged ones whose time is over.

        They stay if the merged ledger does not exist. The record keeps a merge until all of them are known to be
        deleted, so a later call tries those again that could not be deleted.

        Args:
            now_ns: The present time, nanoseconds since 1970.

        Raises:
            MetadataUnreachableError: The metadata store cannot be reached; the record keeps what was not released yet.
            PybkError: As the metadata store and ledgers.
        """
        record, _, named = self._read_committed()
        due = {each.holder: each for each in record.replaced if each.until_ns <= now_ns}
        stored = {row.stored_in for row in named}  # none of these is deleted, whatever the record says
        members: dict[int, list[int]] = {holder: [] for holder in due}
        for row in named:
            if row.holder in members:
                members[row.holder].append(row.ledger_id)
        deleted: list[int] = []
        released: list[int] = []
        there = self._there(due)
        unknown = due.keys() - there
        stay = dict.fromkeys(
            sorted(unknown - self._deleted_of(unknown)), "its metadata cannot be read, so what it replaced is kept"
        )
        for holder in sorted(there):
            unnamed = {*members[holder], *due[holder].holders} - stored
            failed: dict[int, str] = {}
            wanted = sorted(unnamed - self._deleted_of(unnamed))
            deleted += self._delete(wanted, self._given, raises=True, failed=failed)
            for each in self._deleted_of(failed):
                del failed[each]
            stay |= failed
            if not failed:
                released.append(holder)
        self._forget_replaced(released)
        return Released(deleted, stay)

    def _forget_replaced(self, released: Collection[int]) -> None:
        """Remove merges whose members' own ledgers are gone from those that the record keeps."""
        while True:
            record, version = self._read()
            left = tuple(each for each in record.replaced if each.holder not in released)
            if left == record.replaced or self.swap(replace(record, replaced=left), version):
                return

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
            # The floor covers what was given up of these as well.
            given_up = tuple(each for each in record.given_up if each not in old)
            floor_ns = max(record.floor_ns, before_ns)
            if self.swap(replace(record, floor_ns=floor_ns, given_up=given_up), version):
                all_named = {row.ledger_id for row in named}.union(ledger_id for ledger_id, _ in record.chain)
                all_named.update(row.stored_in for row in named)
                all_named.update(holder for each in record.replaced for holder in each.holders)
                unnamed = sorted(old.keys() - all_named)
                manifests = [each for each in unnamed if old[each] == LedgerType.METADATA]
                data = [each for each in unnamed if old[each] != LedgerType.METADATA]
                return self._delete(manifests, NO_CREDENTIALS) + self._delete(data, self._given)


def _are_as_copied(merge: LedgerMerge, named: Mapping[int, ManifestRow]) -> bool:
    return all(named.get(row.ledger_id) == row for row in merge.members)


def is_deleted(metadata: ClusterMetadata, ledger_id: int) -> bool:
    """Return whether a ledger is known to be deleted; False for one that is only missing, or cannot be read."""
    try:
        metadata.read_ledger(ledger_id)
    except LedgerDeletedError:
        return True
    except (NoSuchLedgerError, CorruptError, MetadataForgedError, UnsupportedFormatError):
        return False
    return False


def is_lost(metadata: ClusterMetadata, ledger_id: int) -> bool:
    """Return whether a ledger has neither metadata nor a tombstone, so that nothing proves that it was deleted."""
    try:
        metadata.read_ledger(ledger_id)
    except LedgerDeletedError:
        return False
    except NoSuchLedgerError:
        return True
    except (CorruptError, MetadataForgedError, UnsupportedFormatError):
        return False
    return False


def is_merged(metadata: LedgerMetadata) -> bool:
    """Return whether a ledger has the entries of others of its sink."""
    return MERGED_KEY in metadata.custom_metadata and SINK_KEY in metadata.custom_metadata


def member_metadata(holder: LedgerMetadata, row: ManifestRow) -> LedgerMetadata:
    """Return the metadata that a member of a merged ledger had, as far as those who select and read ledgers need it.

    Its keys, seal and fragments are those of the merged ledger.
    """
    return replace(
        of_member(holder, row.ledger_id),
        creation_time_ns=row.created_ns,
        last_entry_id=row.entries - 1,
        length=row.payload_bytes,
    )


def sink_ledgers(metadata: ClusterMetadata, app_id: str | None = None) -> Iterator[LedgerMetadata]:
    """Yield the ledgers, manifests included, of one sink, or of all sinks if ``app_id`` is None."""
    for found in metadata.sound_ledgers():
        app = found.metadata.custom_metadata.get(SINK_KEY)
        if app is not None and (app_id is None or app == app_id.encode()):
            yield found.metadata


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
    return {row.ledger_id for row in committed_rows(connection, app_id)}


def committed_rows(connection: Connection, app_id: str) -> ManifestRows:
    """Return the committed ledgers of a sink, with their sizes and places; arguments and errors as ``committed``."""
    if connection.metadata is None:
        raise _not_in_a_cluster(connection, app_id)
    return Sink(connection.manager, connection.metadata, app_id).rows()


class FollowedSink:
    """The committed ledgers of one sink, as commits add to them.

    Args:
        connection: The cluster.
        app_id: The sink's app id.

    Attributes:
        app_id: The sink's app id.
        committed: The committed ledgers as of the last look.
        merged: The rows of the members of merged ledgers as of the last look or update.

    Threads: one.
    """

    def __init__(self, connection: Connection, app_id: str) -> None:
        if connection.metadata is None:
            raise _not_in_a_cluster(connection, app_id)
        self.app_id: Final = app_id
        self._sink: Final = Sink(connection.manager, connection.metadata, app_id)
        self._seen: set[int] = set()
        """The manifests whose ledgers are in ``committed``."""
        self._new: dict[int, None] = {}
        """The ledgers that the next look returns."""
        self.committed: set[int] = set()
        self.merged: dict[int, ManifestRow] = {}

    def look(self, found: Pointer | None) -> list[int]:
        """Return the ledgers that were committed since the last look.

        Args:
            found: The pointer that has the sink's record, as ``read_sinks`` has read it just now.

        Raises:
            CorruptError: The record or a manifest is damaged or missing.
            PybkError: As the metadata store and ledgers.

        Cost: Reads the manifests that this process has not read.
        """
        self.update(found)
        new, self._new = self._new, {}
        self.committed.update(new)
        return list(new)

    def update(self, found: Pointer | None) -> None:
        """Take in what the sink has merged; arguments and errors as for ``look``.

        What it has committed is left for the next look.
        """
        manifests = self._sink.manifests(found)
        for manifest, rows in manifests.items():
            if manifest == _NAMED or manifest not in self._seen:
                self.merged.update((row.ledger_id, row) for row in rows if row.holder != ITSELF)
                self._new.update((row.ledger_id, None) for row in rows if row.ledger_id not in self.committed)
        self._seen = {*manifests}

    def has_merged(self, found: Pointer | None) -> bool:
        """Return whether the record in a pointer says that the sink has merged ledgers."""
        return self._sink.decoded(found)[0].has_merged

    def place(self, ledger_id: int) -> Place:
        """Return where the entries of a ledger lie."""
        row = self.merged.get(ledger_id)
        return Place(self.app_id) if row is None else Place(self.app_id, row.holder, row.first)


def places_in_merged(connection: Connection, ledger_ids: Collection[int]) -> dict[int, Place]:
    """Return where merged ledgers of any sink have the entries of some ledgers; those that none has are left out.

    A ledger that was found deleted before the call, because it was merged, is among them: a record names the merged
    ledger before members' own are deleted, and the records are read after that. A listing of ledgers would not do,
    because it may have passed the place of a merged ledger before that was created.

    Args:
        connection: The store or cluster.
        ledger_ids: The ledgers.

    Raises:
        CorruptError: The record or a manifest of a sink is damaged or missing, so it may have one of them.
        PybkError: As the metadata store and ledgers.

    Cost: Reads the records of all sinks but those of batch writes without an app id, and the manifests of those that
        have merged ledgers, each once in a process.
    """
    metadata = connection.metadata
    if metadata is None or not ledger_ids:
        return {}
    names = sorted(name for name in metadata.pointer_names(SINKS) if not is_one_off(name))
    tried: set[int] = set()
    while True:
        places: dict[int, Place] = {}
        for app, pointer in read_sinks(metadata, names).items():
            followed = FollowedSink(connection, app)
            if followed.has_merged(pointer):
                followed.update(pointer)
                places.update((each, followed.place(each)) for each in ledger_ids if each in followed.merged)
        lost = {place.holder for place in places.values() if is_deleted(metadata, place.holder)}
        if lost <= tried:  # else such a one may have been merged again since its record was read
            return {each: place for each, place in places.items() if place.holder not in lost}
        tried |= lost


def read_sinks(metadata: ClusterMetadata, app_ids: Sequence[str]) -> dict[str, Pointer | None]:
    """Return the pointers that have the records of sinks, with every change that took effect before the call.

    Raises:
        CorruptError, MetadataForgedError: A pointer cannot be read.

    Cost: A round trip for the first one, and one for each ``LEDGERS_PAGE`` of the others.
    """
    if not app_ids:
        return {}
    # This read waits for the latest state, so those that follow are not older.
    found = {app_ids[0]: metadata.read_pointer(SINKS, app_ids[0])}
    for at in range(1, len(app_ids), LEDGERS_PAGE):
        page = app_ids[at : at + LEDGERS_PAGE]
        found.update(zip(page, metadata.read_pointers(SINKS, page), strict=True))
    return found


def _not_in_a_cluster(connection: Connection, app_id: str) -> IllegalOperationError:
    return IllegalOperationError(
        f"sink {app_id!r}: {connection.manager!r} is not a cluster, and sinks write to clusters"
    )
