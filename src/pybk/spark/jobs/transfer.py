"""Transfers of ledgers into a cluster by ``copy`` and ``import_``, exactly once.

Theory of operation: a transfer is a sink (``pybk.spark.sink.manifest``) whose app id names the origin, so two transfers
of one origin share a sink record. Each new ledger names its original in its custom metadata, and counts once a commit
of the sink names it. A transfer reads the number of the next commit, then lists the committed ledgers, writes the
missing ones, and commits with that number. If another transfer of the same origin has committed in between, the number
is taken. This commit is then skipped and its ledgers are deleted, so no ledger is duplicated. An interrupted transfer
leaves only orphans; a repeated transfer writes the missing ledgers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pybk.credentials import Credentials, CredentialSources
from pybk.errors import IllegalOperationError, LedgerRecoveryError, NoSuchLedgerError, PybkError, UsageError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerState
from pybk.spark.connection import Connection, StoreOrCluster, connection
from pybk.spark.jobs.ledgers import exact_end_of, existing, unlocks
from pybk.spark.sink.manifest import (
    SINK_KEY,
    Sink,
    WrittenLedger,
    committed_rows,
    member_metadata,
    sink_ledgers,
)
from pybk.spark.sink.sink_record import Attempt
from pybk.values import decode_json, encode_json, flag_of, from_base64, to_base64

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.manager.append_future import AppendFuture
    from pybk.manager.ledger_writer import LedgerWriter
    from pybk.spark.sink.sink_record import ManifestRow

COPY_OF: Final = "pybk.copy-of"
"""The custom metadata of a copy: the id of the source cluster or store, a slash, and the id of the original ledger."""

IMPORT_OF: Final = "pybk.import-of"
"""The custom metadata of an imported ledger: the id of the export, a slash, and the ledger's id in it."""

_OWN: Final = (SINK_KEY, COPY_OF, IMPORT_OF)

Quorums = tuple[int | None, int | None, int | None]

Listing = Callable[[], list["LedgerMetadata"]]
"""A function that returns the present metadata of ledgers."""


@dataclass(frozen=True, slots=True)
class TransferHeader:
    """The properties that a transfer copies from an original ledger to the new one.

    Attributes:
        ledger_id: The id of the original.
        ledger_type: The ledger type.
        storage_hints: The storage hints.
        digest_type: The name of the digest type.
        custom_metadata: The application's custom metadata, without keys of pybk.
        entries: The number of entries to transfer.
        length: The payload bytes of these entries.
        quorums: Ensemble size, write quorum, ack quorum; None for the cluster's default.
    """

    ledger_id: int
    ledger_type: str
    storage_hints: tuple[str, ...]
    digest_type: str
    custom_metadata: dict[str, bytes]
    entries: int
    length: int
    quorums: Quorums

    @classmethod
    def of(cls, metadata: LedgerMetadata, last: int, length: int, quorums: Quorums | None = None) -> TransferHeader:
        """Return the header of a transfer of a ledger up to an entry.

        Args:
            metadata: The metadata of the original.
            last: The id of the last entry to transfer.
            length: The payload bytes of the entries up to ``last``.
            quorums: The new ledger's quorums; None for those of the original.
        """
        own: Quorums = (None, None, None)  # a store's ledger has one copy, so the cluster's defaults apply
        if metadata.fragments:
            own = metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum
        return cls(
            ledger_id=metadata.ledger_id,
            ledger_type=str(metadata.ledger_type),
            storage_hints=tuple(sorted(hint.value for hint in metadata.storage_hints)),
            digest_type=metadata.digest_type.name,
            custom_metadata={key: value for key, value in metadata.custom_metadata.items() if key not in _OWN},
            entries=last + 1,
            length=length,
            quorums=own if quorums is None else quorums,
        )

    def encode(self) -> bytes:
        """Return the header as JSON."""
        custom = {key: to_base64(value) for key, value in self.custom_metadata.items()}
        return encode_json({**asdict(self), "custom_metadata": custom})

    @classmethod
    def decode(cls, data: bytes) -> TransferHeader:
        """Decode the result of ``encode``; raises CorruptError for other data."""
        return decode_json(data, _header_of, where="the header of a ledger")


def _header_of(values: dict[str, Any]) -> TransferHeader:
    custom = {str(key): from_base64(value) for key, value in values.pop("custom_metadata").items()}
    hints, quorums = tuple(values.pop("storage_hints")), values.pop("quorums")
    return TransferHeader(
        **values, custom_metadata=custom, storage_hints=hints, quorums=(quorums[0], quorums[1], quorums[2])
    )


@dataclass(frozen=True, slots=True)
class TransferTarget:
    """The target of a transfer.

    Attributes:
        where: The target cluster.
        given: The password or secret of the new ledgers.
        key: The key of the custom metadata that names the original: ``COPY_OF`` or ``IMPORT_OF``.
        origin: The id of the source cluster or store, or of the export.
        quorums: Ensemble size, write quorum and ack quorum of the manifests that name the ledgers.
    """

    where: StoreOrCluster
    given: CredentialSources
    key: str
    origin: str
    quorums: Quorums = (None, None, None)

    @property
    def app_id(self) -> str:
        """The app id of the sink that commits the new ledgers."""
        return f"{self.key}/{self.origin}"

    def sink(self) -> Sink:
        """Return the sink that commits the new ledgers, over this process's connection to the target."""
        found = connection(self.where)
        if found.metadata is None:
            raise UsageError(f"{self.where} is not a cluster; ledgers can be copied and imported only into a cluster")
        return Sink(found.manager, found.metadata, self.app_id, given=self.given.read(), quorums=self.quorums)

    def there(self) -> dict[int, LedgerMetadata]:
        """Return the committed ledgers of the target by the id of their original; the longest of several copies."""
        return {ledger_id: found[0] for ledger_id, found in self._counting().items()}

    def drop_outdated(self) -> None:
        """Delete the committed ledgers whose original has a longer committed copy.

        Raises:
            PybkError: A ledger could not be deleted; readers see its entries twice.
        """
        for found in self._counting().values():
            for metadata in found[1:]:
                with suppress(NoSuchLedgerError):
                    self.delete_ledger(metadata.ledger_id)

    def _counting(self) -> dict[int, list[LedgerMetadata]]:
        """Return the committed ledgers of the target by the id of their original, the longest copy first."""
        found = connection(self.where)
        assert found.metadata is not None, "``sink`` raises UsageError for a store"
        counting = set(self.sink().committed())
        there: dict[int, list[LedgerMetadata]] = {}
        for metadata in sink_ledgers(found.metadata, self.app_id):
            origin, _, name = metadata.custom_metadata.get(self.key, b"").decode(errors="replace").rpartition("/")
            if metadata.ledger_id in counting and origin == self.origin and name.isdecimal():
                there.setdefault(int(name), []).append(metadata)
        for several in there.values():
            several.sort(key=lambda metadata: (-metadata.last_entry_id, metadata.ledger_id))
        return there

    def create(self, header: TransferHeader) -> LedgerWriter:
        """Create the new ledger of a header, and return its writer; readers of the sink see it after ``commit``."""
        ensemble_size, write_quorum, ack_quorum = header.quorums
        digest_type = DigestType[header.digest_type]
        given = self.given.read()
        return connection(self.where).manager.create_ledger(
            password=given.password,
            secret=given.secret,
            ledger_type=header.ledger_type,
            storage_hints=map(StorageHint, header.storage_hints),
            digest_type=digest_type,
            insecure=digest_type is DigestType.NONE or not given,  # as the original
            custom_metadata={
                **header.custom_metadata,
                SINK_KEY: self.app_id.encode(),
                self.key: f"{self.origin}/{header.ledger_id}".encode(),
            },
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
        )

    def delete(self, ledger_id: int) -> None:
        """Delete a ledger that is not committed; if that fails, the ledger remains an orphan of the sink."""
        with suppress(PybkError):
            self.delete_ledger(ledger_id)

    def delete_ledger(self, ledger_id: int) -> None:
        """Delete a ledger of the target."""
        given = self.given.read()
        connection(self.where).manager.delete_ledger(ledger_id, password=given.password, secret=given.secret)

    def commit(self, number: int, written: Sequence[WrittenLedger]) -> None:
        """Commit ledgers, all or none; returns without effect if an earlier attempt has committed these ledgers.

        Args:
            number: The number of the last commit plus one.
            written: The ledgers to commit.

        Raises:
            IllegalOperationError: Another job has committed with this number; these ledgers were deleted.
        """
        oldest_ns = min((each.created_ns for each in written), default=time.time_ns())
        if self.sink().commit(Attempt(number, oldest_ns), written):
            return
        # If the metadata store's answer was lost, a repeated commit finds its own record, which is a success.
        if not {each.ledger_id for each in written} <= set(self.sink().committed()):
            raise IllegalOperationError(
                f"another job has committed ledgers of {self.origin} in {self.where} meanwhile, so those of this job "
                "were deleted: wait until the other job has ended, and run this one again for the remaining ledgers"
            )


def finish(writer: LedgerWriter, header: TransferHeader, pending: AppendFuture[range] | None) -> WrittenLedger:
    """Close a new ledger, and check that it has the entries and bytes of its header.

    Args:
        writer: The writer of the new ledger.
        header: The header of the transfer.
        pending: The future of the last append; None if nothing was appended.

    Raises:
        LedgerRecoveryError: The ledger has another number of entries or bytes, for example because it was closed
            elsewhere.
        PybkError: An append or the close failed.
    """
    if pending is not None:
        pending.result()
    writer.close()
    found = writer.last_add_confirmed + 1, writer.length
    if found != (header.entries, header.length):
        raise LedgerRecoveryError(
            f"ledger {writer.ledger_id}, made from ledger {header.ledger_id}, has {found[0]} entries of {found[1]} "
            f"bytes instead of {header.entries} of {header.length}: the entries that were read are incomplete"
        )
    return WrittenLedger(writer.ledger_id, header.entries, header.length, writer.metadata.creation_time_ns)


def safest_quorums(headers: Iterable[TransferHeader]) -> Quorums:
    """Return the quorums that tolerate the loss of most bookies; they make the manifest as safe as any ledger."""
    quorums = [header.quorums for header in headers]
    return max(quorums, key=lambda each: (each[1] or 0, each[2] or 0), default=(None, None, None))


def is_there(metadata: LedgerMetadata | None, header: TransferHeader) -> bool:
    """Return whether a committed ledger is a complete copy: closed, with the entries and bytes of the header."""
    return (
        metadata is not None
        and metadata.state is LedgerState.CLOSED
        and (metadata.last_entry_id + 1, metadata.length) == (header.entries, header.length)
    )


@dataclass(slots=True)
class TransferPlan:
    """The ledgers to transfer, and those that are left out.

    Attributes:
        ledgers: The ledgers to transfer, with their headers.
        not_opened: Ids of ledgers left out because they have another password.
        still_open: Ids of ledgers left out because they are not closed.
        failed: Ids of ledgers left out for other reasons, each with the reason.
        places: The merged ledgers that have the entries of some of the ledgers, and the first entry there.
    """

    ledgers: list[tuple[LedgerMetadata, TransferHeader]] = field(default_factory=list)
    not_opened: list[int] = field(default_factory=list)
    still_open: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def headers(self) -> list[TransferHeader]:
        """The headers of the ledgers to transfer."""
        return [header for _, header in self.ledgers]

    def place(self, ledger_id: int) -> tuple[int, int]:
        """Return the ledger that has the entries of a ledger, and the first entry there."""
        return self.places.get(ledger_id, (ledger_id, 0))


def plan_transfer(
    found: Connection,
    given: Credentials,
    wanted: Listing,
    *,
    open_too: bool,
    quorums: Quorums | None = None,
) -> TransferPlan:
    """Return the ledgers that a transfer copies, each with its last entry.

    Args:
        found: The connection to the source.
        given: The password or secret of the ledgers.
        wanted: Lists the requested ledgers; ledgers that a sink has not committed are ignored.
        open_too: Also transfer ledgers that are not closed, up to their last add confirmed.
        quorums: The quorums of the new ledgers; None for those of the originals.
    """
    plan, open_too = TransferPlan(), flag_of(open_too, "open_too")
    for metadata, stored, first in visible_in(found, wanted):
        ledger_id = metadata.ledger_id
        if metadata.state is not LedgerState.CLOSED and not open_too:
            plan.still_open.append(ledger_id)
        elif not unlocks(found.manager, stored, given):
            plan.not_opened.append(ledger_id)
        else:
            try:
                last, length = exact_end_of(found, metadata, given)
            except NoSuchLedgerError:
                continue  # deleted meanwhile
            except PybkError as error:
                plan.failed.append((ledger_id, str(error)))
            else:
                plan.ledgers.append((metadata, TransferHeader.of(metadata, last, length, quorums)))
                if stored is not metadata:
                    plan.places[ledger_id] = stored.ledger_id, first
    return plan


def visible(found: Connection, wanted: Listing) -> list[LedgerMetadata]:
    """Return the ledgers of ``visible_in`` alone; arguments as there."""
    return [each.metadata for each in visible_in(found, wanted)]


class VisibleLedger(NamedTuple):
    """A ledger, and where its entries are.

    Attributes:
        metadata: The ledger.
        stored: The ledger that has its entries: itself, or a merged one of a sink.
        first: The id there of its first entry.
    """

    metadata: LedgerMetadata
    stored: LedgerMetadata
    first: int


def visible_in(found: Connection, wanted: Listing) -> list[VisibleLedger]:
    """Return the listed ledgers, except those that a sink has written and not committed, and where their entries are.

    Of the ledgers of one commit, all are returned or none. In place of a merged ledger its members are, also while
    their own ledgers are kept.

    Args:
        found: The connection to the source.
        wanted: Lists the ledgers; called again while some may have been committed or merged after the last listing.
    """
    listed = wanted()
    if found.metadata is None:
        return [VisibleLedger(each, each, 0) for each in listed]
    apps = {app for app in map(_app, listed) if app is not None}
    rows = _rows(found, apps)
    there = {each.ledger_id: each for each in listed}
    sought: set[int] = set()
    # Before each further listing, a ledger that was sought may have been deleted because it was merged, again perhaps.
    while missing := {row.stored_in for row in rows.values()} - there.keys() - sought:
        sought |= missing
        there = {each.ledger_id: each for each in wanted()}
        now = _rows(found, apps)
        rows = {name: now[name] for name in rows if name in now}
    shown = [VisibleLedger(each, each, 0) for each in there.values() if _app(each) is None]
    for (app, ledger_id), row in rows.items():
        holder, own = there.get(row.holder), there.get(ledger_id)
        if holder is not None:  # the own ledger is deleted soon
            shown.append(VisibleLedger(member_metadata(holder, row), holder, row.first))
        elif own is not None and _app(own) == app:
            shown.append(VisibleLedger(own, own, 0))
    return sorted(shown, key=lambda each: each.metadata.ledger_id)


def follow_merges(found: Connection, plan: TransferPlan, gone: Sequence[TransferHeader]) -> list[TransferHeader]:
    """Note in a plan where merges have put ledgers that were not found at their place, and return these.

    Of the others, those that were deleted are left out, and those that exist are noted as failed.

    Args:
        found: The connection to the source.
        plan: The plan; changed.
        gone: The headers of the ledgers.

    Raises:
        PybkError: As the metadata store, and the manifests of the sinks that wrote the ledgers.
    """
    apps = {metadata.ledger_id: _app(metadata) for metadata, _ in plan.ledgers}
    rows = _rows(found, {app for header in gone if (app := apps[header.ledger_id]) is not None})
    moved: list[TransferHeader] = []
    for header in gone:
        ledger_id, before = header.ledger_id, plan.place(header.ledger_id)
        row = rows.get((apps[ledger_id], ledger_id))
        if row is not None and (row.stored_in, row.first) != before:
            plan.places[ledger_id] = row.stored_in, row.first
            moved.append(header)
        elif existing(found, before[:1]):
            plan.failed.append((ledger_id, "it exists, but it or its new copy was not found: copy again"))
    return moved


def _rows(found: Connection, apps: Iterable[str]) -> dict[tuple[str | None, int], ManifestRow]:
    """Return the committed ledgers of sinks as their records name them now, by app id and ledger."""
    if found.metadata is None:  # a store, to which no sink writes
        return {}
    return {(app, row.ledger_id): row for app in apps for row in committed_rows(found, app)}


def _app(metadata: LedgerMetadata) -> str | None:
    """Return the app id of the sink that wrote a ledger, None if no sink did."""
    app = metadata.custom_metadata.get(SINK_KEY)
    return None if app is None else app.decode(errors="replace")


def rounds(headers: Sequence[TransferHeader], most_bytes: int, most: int) -> list[list[TransferHeader]]:
    """Return headers in groups of at most ``most`` ledgers and ``most_bytes`` bytes, but of at least one ledger."""
    groups: list[list[TransferHeader]] = []
    held = 0
    for header in headers:
        if not groups or len(groups[-1]) >= most or held + header.length > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(header)
        held += header.length
    return groups
