"""Ledgers written anew in another cluster by ``copy`` and ``import_``, each exactly once.

Theory of operation: a transfer is a sink (``pybk.spark.sink.manifest``) whose app id names the origin, so two transfers
of one origin share a record. Each new ledger names its original in its custom metadata. A transfer reads the number of
the next commit, then lists what is committed, writes what is missing, and commits with that number. If another transfer
of the same origin commits in between, the number is taken: this commit is skipped, its ledgers are deleted, and nothing
exists twice. An interrupted transfer leaves orphans only, and running it again writes what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pybk.credentials import Secret
from pybk.digest import DigestType
from pybk.errors import IllegalOperationError, LedgerRecoveryError, NoSuchLedgerError, PybkError, UsageError
from pybk.flags import StorageHint
from pybk.ledger import LedgerState
from pybk.metadata.authenticated_values import decode_json, encode_json, from_base64, to_base64
from pybk.spark.connection import Connection, StoreOrCluster, connection
from pybk.spark.jobs.ledgers import exact_end_of, unlocks
from pybk.spark.sink.manifest import SINK_KEY, Sink, WrittenLedger, committed, sink_ledgers
from pybk.spark.sink.sink_record import Attempt

if TYPE_CHECKING:
    from pybk.futures import AppendFuture
    from pybk.ledger import LedgerMetadata
    from pybk.writer import LedgerWriter

COPY_OF: Final = "pybk.copy-of"
"""Custom metadata of a copy: the id of the cluster or store that it was copied from, a slash, its ledger id there."""

IMPORT_OF: Final = "pybk.import-of"
"""Custom metadata of an imported ledger: the id of the export, a slash, and the ledger's id in it."""

_OWN: Final = (SINK_KEY, COPY_OF, IMPORT_OF)

Quorums = tuple[int | None, int | None, int | None]

Listing = Callable[[], list["LedgerMetadata"]]
"""Lists ledgers as they are now."""


@dataclass(frozen=True, slots=True)
class TransferHeader:
    """What a ledger takes over from the one that it is written after.

    Attributes:
        ledger_id: That one's id.
        ledger_type: Its type.
        storage_hints: Its hints.
        digest_type: Its digest.
        custom_metadata: The application's own.
        entries: How many entries it is to have.
        length: Their payload bytes.
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
        """Return what is taken over from a ledger, up to an entry.

        Args:
            metadata: The ledger's.
            last: The entry.
            length: Payload bytes up to there.
            quorums: Other ones than the ledger's.
        """
        own: Quorums = (None, None, None)  # a store's ledger has one copy, which says nothing of a cluster
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
        """Decode what ``encode`` made; raises CorruptError if it is something else."""
        return decode_json(data, _header_of, where="the header of a ledger")


def _header_of(values: dict[str, Any]) -> TransferHeader:
    custom = {str(key): from_base64(value) for key, value in values.pop("custom_metadata").items()}
    hints, quorums = tuple(values.pop("storage_hints")), values.pop("quorums")
    return TransferHeader(
        **values, custom_metadata=custom, storage_hints=hints, quorums=(quorums[0], quorums[1], quorums[2])
    )


@dataclass(frozen=True, slots=True)
class TransferTarget:
    """Where ledgers are written anew.

    Attributes:
        where: The cluster.
        password: The new ledgers'.
        key: Custom metadata that says what a ledger was written after: ``COPY_OF`` or ``IMPORT_OF``.
        origin: Where it was read.
        quorums: Ensemble size, write quorum and ack quorum of the manifests that name the ledgers.
    """

    where: StoreOrCluster
    password: Secret
    key: str
    origin: str
    quorums: Quorums = (None, None, None)

    @property
    def app_id(self) -> str:
        """The sink that these ledgers are of."""
        return f"{self.key}/{self.origin}"

    @property
    def sink(self) -> Sink:
        """The sink's record; over this process's connection."""
        found = connection(self.where)
        if found.metadata is None:
            raise UsageError(f"{self.where} is no cluster; ledgers are written anew in clusters")
        password = self.password.read() or b""
        return Sink(found.manager, found.metadata, self.app_id, password=password, quorums=self.quorums)

    def there(self) -> dict[int, LedgerMetadata]:
        """Return the ledgers that are there and count, by what they were written after; of several the longest."""
        return {ledger_id: found[0] for ledger_id, found in self._counting().items()}

    def drop_outdated(self) -> None:
        """Delete ledgers that count and of which there is a longer one.

        Raises:
            PybkError: One could not be deleted: readers have what is in both twice.
        """
        for found in self._counting().values():
            for metadata in found[1:]:
                with suppress(NoSuchLedgerError):
                    self._delete(metadata.ledger_id)

    def _counting(self) -> dict[int, list[LedgerMetadata]]:
        """Return the ledgers that are there and count, by what they were written after, the longest first."""
        found = connection(self.where)
        assert found.metadata is not None, "the sink would not be one"
        counting = set(self.sink.committed())
        there: dict[int, list[LedgerMetadata]] = {}
        for metadata in sink_ledgers(found.metadata, self.app_id):
            origin, _, name = metadata.custom_metadata.get(self.key, b"").decode(errors="replace").rpartition("/")
            if metadata.ledger_id in counting and origin == self.origin and name.isdecimal():
                there.setdefault(int(name), []).append(metadata)
        for several in there.values():
            several.sort(key=lambda metadata: (-metadata.last_entry_id, metadata.ledger_id))
        return there

    def create(self, header: TransferHeader) -> LedgerWriter:
        """Create a ledger; it counts once it is committed."""
        ensemble_size, write_quorum, ack_quorum = header.quorums
        digest_type = DigestType[header.digest_type]
        password = self.password.read() or b""
        return connection(self.where).manager.create_ledger(
            password=password,
            ledger_type=header.ledger_type,
            storage_hints=map(StorageHint, header.storage_hints),
            digest_type=digest_type,
            insecure=digest_type is DigestType.NONE or not password,  # as the ledger that is copied was
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
        """Delete a ledger that does not count; if that cannot be done now, it is an orphan of the sink."""
        with suppress(PybkError):
            self._delete(ledger_id)

    def _delete(self, ledger_id: int) -> None:
        connection(self.where).manager.delete_ledger(ledger_id, password=self.password.read() or b"")

    def commit(self, number: int, written: Sequence[WrittenLedger]) -> None:
        """Make ledgers count, all at once.

        Args:
            number: One more than that of the commit before.
            written: The ledgers.

        Raises:
            IllegalOperationError: Another job committed meanwhile; these ledgers were deleted.
        """
        oldest_ns = min((each.created_ns for each in written), default=time.time_ns())
        if self.sink.commit(Attempt(number, oldest_ns), written):
            return
        # An answer of the metadata store that was lost makes a commit find its own.
        if not {each.ledger_id for each in written} <= set(self.sink.committed()):
            raise IllegalOperationError(
                f"another job has written ledgers of {self.origin} to {self.where} meanwhile, and these were given up: "
                "wait for it, and run this again for what is left"
            )


def finish(writer: LedgerWriter, header: TransferHeader, pending: AppendFuture[range] | None) -> WrittenLedger:
    """Close a ledger, and make sure that it is what it was to be.

    Args:
        writer: The ledger's.
        header: What it was to be.
        pending: Of what was appended last; None if nothing was.

    Raises:
        LedgerRecoveryError: It was closed elsewhere, or is another than its header says.
        PybkError: As appending and closing.
    """
    if pending is not None:
        pending.result()
    writer.close()
    found = writer.last_add_confirmed + 1, writer.length
    if found != (header.entries, header.length):
        raise LedgerRecoveryError(
            f"ledger {writer.ledger_id}, written after ledger {header.ledger_id}, has {found[0]} entries of {found[1]} "
            f"bytes, and was to have {header.entries} of {header.length}: what was read is not whole"
        )
    return WrittenLedger(writer.ledger_id, header.entries, header.length, writer.metadata.creation_time_ns)


def safest_quorums(headers: Iterable[TransferHeader]) -> Quorums:
    """Return the quorums of those ledgers that lose the most bookies without harm: their manifest is as safe."""
    quorums = [header.quorums for header in headers]
    return max(quorums, key=lambda each: (each[1] or 0, each[2] or 0), default=(None, None, None))


def is_there(metadata: LedgerMetadata | None, header: TransferHeader) -> bool:
    """Return whether a ledger was written already, with as many entries and bytes."""
    return (
        metadata is not None
        and metadata.state is LedgerState.CLOSED
        and (metadata.last_entry_id + 1, metadata.length) == (header.entries, header.length)
    )


@dataclass(slots=True)
class TransferPlan:
    """Which ledgers are written anew, and which are not.

    Attributes:
        ledgers: Those that are, with what is taken over from them.
        not_opened: Ledgers whose password is another.
        still_open: Ledgers that are not closed, and left out for that.
        failed: Ledgers that are left out for other reasons, and why.
    """

    ledgers: list[tuple[LedgerMetadata, TransferHeader]] = field(default_factory=list)
    not_opened: list[int] = field(default_factory=list)
    still_open: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)

    @property
    def headers(self) -> list[TransferHeader]:
        """What is taken over from each ledger."""
        return [header for _, header in self.ledgers]


def plan_transfer(
    found: Connection,
    password: bytes | None,
    wanted: Listing,
    *,
    open_too: bool,
    quorums: Quorums | None = None,
) -> TransferPlan:
    """Decide which ledgers are written anew, and how far.

    Args:
        found: Where they are.
        password: Theirs; None stands for the empty one.
        wanted: Lists those that were asked for; what a sink has not committed is as if it were not there.
        open_too: Also those that are not closed, as far as they are confirmed now.
        quorums: Other ones than the ledgers'.
    """
    plan = TransferPlan()
    for metadata in visible(found, wanted):
        ledger_id = metadata.ledger_id
        if metadata.state is not LedgerState.CLOSED and not open_too:
            plan.still_open.append(ledger_id)
        elif not unlocks(found.manager, metadata, password):
            plan.not_opened.append(ledger_id)
        else:
            try:
                last, length = exact_end_of(found, metadata, password)
            except NoSuchLedgerError:
                continue  # deleted meanwhile
            except PybkError as error:
                plan.failed.append((ledger_id, str(error)))
            else:
                plan.ledgers.append((metadata, TransferHeader.of(metadata, last, length, quorums)))
    return plan


def visible(found: Connection, wanted: Listing) -> list[LedgerMetadata]:
    """Return ledgers without those that a sink wrote and has not committed; of each commit all are there, or none.

    Args:
        found: Where they are.
        wanted: Lists the ledgers; called again if some may have been committed after the first listing.
    """
    listed = wanted()
    if found.metadata is None:
        return listed
    counting = {app: committed(found, app) for app in set(map(_app, listed)) if app is not None}
    if set().union(*counting.values()) - {each.ledger_id for each in listed}:
        listed = wanted()
    return [each for each in listed if (app := _app(each)) is None or each.ledger_id in counting.get(app, ())]


def _app(metadata: LedgerMetadata) -> str | None:
    """Return the app id of the sink that wrote a ledger."""
    app = metadata.custom_metadata.get(SINK_KEY)
    return None if app is None else app.decode(errors="replace")


def rounds(headers: Sequence[TransferHeader], most_bytes: int, most: int) -> list[list[TransferHeader]]:
    """Return ledgers in groups of so many bytes and so many ledgers at most, but at least one."""
    groups: list[list[TransferHeader]] = []
    held = 0
    for header in headers:
        if not groups or len(groups[-1]) >= most or held + header.length > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(header)
        held += header.length
    return groups
