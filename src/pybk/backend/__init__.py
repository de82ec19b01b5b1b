"""``LedgerBackend``: the interface of the manager and its handles to the place where ledgers live.

``StoreBackend`` (``pybk.manager.local_backend``) and ``ClusterBackend`` (``pybk.client.backend``) implement it. The
handles are the same for both, and use a backend only through this interface.

It consists of small protocols, each of one subject. Calls that only some backends offer form a *capability*: a protocol
that ``LedgerBackend`` does not inherit. A backend that offers one inherits it. A caller asks with ``isinstance``, once,
before it calls; if the backend lacks the capability, the caller's error names another backend or call. A backend has no
method that always refuses.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from pybk.config import StoreConfig
from pybk.errors import PybkError, UsageError
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.ledger.digest import EncodedEntries, EntryDigest
from pybk.ledger.entry import Entry, EntryBatch
from pybk.ledger.keys import KeyRing, LedgerKeys, LedgerSeal
from pybk.ledger.ledger_metadata import DEFAULT_ACK_QUORUM, DEFAULT_ENSEMBLE_SIZE, DEFAULT_WRITE_QUORUM, LedgerMetadata
from pybk.metrics import Metrics
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.log.log import Admission
from pybk.storage.named_records import NamedChange
from pybk.threads.group_commit import Completion

if TYPE_CHECKING:
    from pybk.health import Health
    from pybk.metadata.registration import BookieRegistration
    from pybk.metadata.store import Watch
    from pybk.storage.transaction_group import LedgerEntries


class BackendIdentity(NamedTuple):
    """The identity of a store or cluster, and the scrypt parameters with which its passwords become keys."""

    store_id: bytes
    salt: bytes
    scrypt_cost: int


class Quorums(NamedTuple):
    """The replication of a ledger: ensemble size ≥ write quorum ≥ ack quorum ≥ 1."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int

    @classmethod
    def of(cls, asked: tuple[int | None, int | None, int | None]) -> Quorums:
        """Replace each None by its default: 3 bookies, 3 copies, 2 acknowledgements, or what the given ones allow.

        Raises:
            UsageError: The values are not valid together.
        """
        ensemble, write, ack = asked
        ensemble = DEFAULT_ENSEMBLE_SIZE if ensemble is None else ensemble
        write = min(DEFAULT_WRITE_QUORUM, ensemble) if write is None else write
        ack = min(DEFAULT_ACK_QUORUM, write) if ack is None else ack
        if not ensemble >= write >= ack >= 1:
            raise UsageError(
                f"ensemble_size {ensemble}, write_quorum {write}, ack_quorum {ack}: each is at least 1, and none "
                "larger than the one before it"
            )
        return cls(ensemble, write, ack)


# ---- what every backend offers ---------------------------------------------------------------------------------------


class BackendState(Protocol):
    """A backend as a whole: its settings, its identity, and whether it can be used. Threads: any."""

    @property
    def config(self) -> StoreConfig:
        """The settings."""

    @property
    def metrics(self) -> Metrics:
        """The metrics of the manager and its handles."""

    @property
    def key_ring(self) -> KeyRing:
        """Derives ledger keys from passwords, with ``identity``; it keeps the result of scrypt for the next ledger."""

    @property
    def identity(self) -> BackendIdentity:
        """The identity and scrypt parameters from which keys are derived."""

    @property
    def feature_level(self) -> FeatureLevel:
        """The level whose formats are written here; it may rise while the backend is in use."""

    @property
    def where(self) -> str:
        """The name of the backend in messages: a directory or a URL."""

    @property
    def read_only(self) -> bool:
        """True if every change is refused."""

    @property
    def single_writer(self) -> bool:
        """True if one process at a time may write; it then knows all changes, and a list of all ledgers is short."""

    @property
    def changes_by_password(self) -> bool:
        """True if deleting or moving a ledger takes its password."""

    @property
    def ended(self) -> bool:
        """True if the backend is closed; reads raise then."""

    @property
    def forked(self) -> bool:
        """True if this process is a fork of the process that opened the backend."""

    def check_usable(self) -> None:
        """Raise if the backend is closed, or was opened before a fork."""

    def check_writable(self) -> None:
        """Raise as ``check_usable``, and if the backend is read-only."""

    def close(self) -> None:
        """Wait for outstanding appends, and release all resources."""

    def health(self) -> Health:
        """Return the health of the backend; see ``pybk.health``."""

    def catch_up(self) -> None:
        """Read the changes that another process has made; needed by a read-only store only."""


class LedgerLifecycle(Protocol):
    """The ledgers of a backend, from their creation to their deletion. Threads: any."""

    def quorums(self, asked: tuple[int | None, int | None, int | None]) -> Quorums:
        """Return ensemble size, write quorum and ack quorum of a new ledger; each None is replaced by its default."""

    def verifier(self, keys: LedgerKeys) -> bytes:
        """Return the verifier of a ledger's keys, which its metadata store to check passwords."""

    def new_ledger_id(self) -> int:
        """Return a ledger id that was never used before."""

    def new_creation_sequence(self) -> int:
        """Return the next creation sequence."""

    def create(self, metadata: LedgerMetadata, *, entries_when_full: int = 0) -> LedgerDescriptor:
        """Create a ledger; durable on return."""

    def descriptor(self, ledger_id: int) -> LedgerDescriptor:
        """Return a ledger's descriptor."""

    def unlock(self, descriptor: LedgerDescriptor, keys: LedgerKeys, seal: LedgerSeal) -> None:
        """Set the keys for all calls with this descriptor, and the seal that is written when the ledger is closed."""

    def recover(self, descriptor: LedgerDescriptor) -> None:
        """Fence the writer, find the end and close the ledger; does nothing for a closed ledger."""

    def close_ledger(self, descriptor: LedgerDescriptor) -> None:
        """Close a ledger after the last entry staged so far, as its writer."""

    def reseal(self, descriptor: LedgerDescriptor, sealed: LedgerMetadata) -> None:
        """Record the seal of a closed ledger, unless its end has changed since it was checked; durable on return."""

    def delete(self, descriptor: LedgerDescriptor) -> None:
        """Delete a ledger; durable on return."""

    def move(self, descriptor: LedgerDescriptor, tier: StorageHint) -> None:
        """Move a ledger to another tier; done on return.

        Raises:
            CorruptError: Damaged entries stay in their present tier; all others were moved.
        """

    def move_all(self, descriptors: Iterable[LedgerDescriptor], tier: StorageHint) -> None:
        """Move ledgers to another tier, given in ascending order of their ids; done on return.

        A backend may consume the iterable at once or in parts.
        """

    def metadata(self, ledger_id: int) -> LedgerMetadata:
        """Return the current metadata of a ledger."""

    def ledgers(self, after: int = -1) -> Iterator[LedgerMetadata]:
        """Yield the metadata of all ledgers with an id above ``after``, ascending."""

    def confirmed(self, ledger_id: int) -> tuple[int, int | None] | None:
        """Return the last add confirmed of a ledger, and its payload bytes up to there if they are known.

        Returns:
            None if only bookies know the last add confirmed.
        """


class LedgerAppends(Protocol):
    """The calls that a writer of a ledger needs. Threads: any."""

    def log_of(self, descriptor: LedgerDescriptor) -> AppendLog:
        """Return the log that makes this ledger's appends durable."""

    def force(self, descriptor: LedgerDescriptor) -> int:
        """Make everything pushed so far durable and confirmed; return the last add confirmed."""

    def check_space(self) -> None:
        """Raise StorageFullError while appends are refused because space is short."""

    def wait_for_admission(self, descriptor: LedgerDescriptor) -> None:
        """Return when an append that found too much outstanding may try again."""


class LedgerReads(Protocol):
    """The calls that a reader of a ledger needs. Threads: any."""

    def look(self, descriptor: LedgerDescriptor, *, follows: bool = False) -> None:
        """Update a ledger's last add confirmed, and whether it was closed or deleted.

        Args:
            descriptor: The ledger.
            follows: The caller waits for more entries and is notified of them, so an entry that is not visible yet may
                be returned later.
        """

    def moved(self, descriptors: Sequence[LedgerDescriptor]) -> list[LedgerDescriptor]:
        """Return those of some ledgers that ``look`` might change now; one of them may be unchanged nevertheless.

        The last add confirmed of each other one is that which ``look`` would find, and its state is unchanged.
        """

    def read_verified(
        self, descriptor: LedgerDescriptor, first: int, last: int, max_bytes: int, *, digest: EntryDigest, direct: bool
    ) -> EntryBatch:
        """Return entries ``first`` to at most ``last``, at least one, about ``max_bytes``, each verified."""

    def locate(self, descriptor: LedgerDescriptor, entry_id: int) -> Entry | tuple[memoryview, int, int] | None:
        """Return an entry, verified, or a buffer, and the start and end of the entry in it.

        None if ``read_verified`` must read it. An entry that is compared with a seal is never returned alone.
        """

    def write_buffered(self, descriptor: LedgerDescriptor) -> None:
        """Write the entries that appends to a ledger have buffered, without confirming them."""


class NamedRecord(NamedTuple):
    """A small value that layers above ledgers change by compare-and-set.

    Attributes:
        name: Its name, ``group/name``.
        version: The version that the next change names.
        value: Its bytes.
    """

    name: str
    version: int
    value: bytes


class NamedRecords(Protocol):
    """The named records of a backend. Threads: any."""

    def read_record(self, name: str) -> NamedRecord | None:
        """Return a named record as of its last change; None if there is none.

        Args:
            name: ``group/name``, the group without a ``/``.
        """

    def read_records(self, names: Sequence[str]) -> list[NamedRecord | None]:
        """Return named records of one group, as ``read_record`` does for each, in few round trips.

        In a cluster they are not older than what this backend has read before.
        """

    def write_record(self, name: str, value: bytes | None, version: int | None) -> int:
        """Change a named record if it has a version, durably.

        Args:
            name: As for ``read_record``.
            value: Its new value; None removes it.
            version: The version that it has; None creates it.

        Returns:
            Its new version.

        Raises:
            VersionConflictError: It has another version. With ``outcome_unknown`` this change may have been made
                before another one.
            MetadataUnreachableError: In a cluster; with ``outcome_unknown`` it may have been made, or may be yet.
            StorageError: In a store; as for an append.
        """

    def rename_record(self, name: str, target: str, value: bytes, version: int) -> None:
        """Give a named record another name and value as one durable change; one of the two names exists at any time.

        Args:
            name: Its name.
            target: Its new name, of the same group.
            value: Its new value.
            version: The version that it has.

        Raises:
            VersionConflictError: It has another version, or there is one of the new name; nothing was changed. With
                ``outcome_unknown`` as ``write_record``.
            MetadataUnreachableError, StorageError: As ``write_record``.
        """

    def watch_record(self, name: str, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after changes of a named record, from some thread; it must not block.

        It may also be called without a change. A read-only store polls while a record is watched or a ledger followed.
        """

    def watch_group(self, group: str, callback: Callable[[str | None], None]) -> Watch:
        """Call ``callback`` after named records of a group were created or removed, as ``watch_record`` does.

        Its argument is the name of a record that may have changed so, or None if that may be any record of the group.
        """

    def record_names(self, prefix: str) -> list[str]:
        """Return the names of the records that ``records`` returns, without reading their values if that is cheaper."""

    def records(self, prefix: str) -> list[NamedRecord]:
        """Return the named records whose names begin with ``prefix``, which begins with ``group/``, by name."""


class Lock(Protocol):
    """An advisory lock that is held; it also ends with the process, and with its session in a cluster."""

    @property
    def held(self) -> bool:
        """True if it is still held, as far as this process knows."""

    def release(self) -> None:
        """Release it; a second call does nothing."""


class Locks(Protocol):
    """The advisory locks of a backend. Threads: any."""

    def try_lock(self, name: str, owner: str) -> Lock | None:
        """Take an advisory lock if it is free; None if it is held, by this process or another.

        Args:
            name: Its name, 1 to 128 bytes.
            owner: Describes the holder, for people.
        """

    def break_lock(self, name: str) -> None:
        """Take a lock away from its holder, if it has one."""

    def watch_lock(self, name: str, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after a lock was released, from some thread; it must not block.

        It may also be called without a release.
        """

    def lock_owner(self, name: str) -> str | None:
        """Return the owner of a lock as its holder gave it; None if the lock is free."""


class LedgerBackend(BackendState, LedgerLifecycle, LedgerAppends, LedgerReads, NamedRecords, Locks, Protocol):
    """The interface to a store or a cluster. ``LedgerManager`` and the handles document the errors of each call.

    Threads: any.
    """


# ---- what some backends offer ----------------------------------------------------------------------------------------


class Replicated(NamedTuple):
    """The result of ``LedgerManager.replicate``.

    Attributes:
        ledgers: How many ledgers were examined.
        fragments: How many fragments were completed.
        left: One text, with its reason, for each fragment or ledger that could not be completed, for example
            because the fragment has no end yet, or too few bookies are available.
    """

    ledgers: int
    fragments: int
    left: tuple[str, ...]


@runtime_checkable
class ReplicatedLedgers(Protocol):
    """A capability: ledgers of which several bookies have copies. Threads: any."""

    def bookies(self) -> list[BookieRegistration]:
        """Return the bookies that are available, by name."""

    def replicate(self, what: int | str) -> Replicated:
        """Re-replicate a ledger, given by its id, or all ledgers of a bookie, given by its name, as if it were lost."""

    def proven_lac(self, descriptor: LedgerDescriptor) -> int:
        """Return the highest last add confirmed that copies of a closed ledger's last entries prove; -1 for none."""


@runtime_checkable
class AtomicGroups(Protocol):
    """A capability: one log under all ledgers, which makes entries of several durable together. Threads: any."""

    def stage_group(self, entries: Sequence[LedgerEntries], changes: Sequence[NamedChange]) -> Callable[[], int]:
        """Append entries to several ledgers and change named records: all of it, or nothing.

        Args:
            entries: The entries, each ledger once.
            changes: The changes, each name once.

        Returns:
            A function that returns once all of it is durable: the new version of the records.

        Raises:
            DisplacedError: A ledger does not end with the entry that those of the group must follow.
            PybkError: As ``Store.append_group``; nothing was staged.
        """


# ---- the logs of writers ---------------------------------------------------------------------------------------------


class AppendLog(Protocol):
    """Makes appended entries durable by group commit; ``pybk.storage.log.log.Log`` documents each call in full.

    Threads: any.
    """

    @property
    def error(self) -> PybkError | None:
        """The error that ended it, after which it refuses all entries; None while it works."""

    @property
    def outstanding_bytes(self) -> int:
        """Bytes staged and not yet durable."""

    @property
    def admission(self) -> Admission:
        """The queue of appends that wait for admission."""

    def stage(
        self,
        descriptor: LedgerDescriptor,
        first_entry_id: int,
        sizes: array[int],
        parts: Sequence[bytes | memoryview],
        *,
        nbytes: int,
        base_length: int,
        overhead: int,
        wanted: bool,
    ) -> Completion | None:
        """Stage entries; None when too much is outstanding. The caller holds ``descriptor.lock``."""

    def stage_entry(
        self,
        descriptor: LedgerDescriptor,
        entry_id: int,
        prefix: bytes,
        payload: bytes,
        base_length: int,
        overhead: int,
        wanted: bool,
    ) -> Completion | None:
        """Stage one entry; None when too much is outstanding. The caller holds ``descriptor.lock``."""

    def wait(self, completion: Completion) -> None:
        """Return when ``completion`` is done; this thread leads the group commit if no other thread does."""

    def when_done(self, completion: Completion, callback: Callable[[], None]) -> None:
        """Have a background thread call ``callback`` once ``completion`` is done."""

    def kick(self) -> None:
        """Have the background thread make staged entries durable, because no thread waits for them."""

    def flush(self) -> None:
        """Return when everything staged before the call is durable; raises if it could not be made so."""


@runtime_checkable
class BatchLog(Protocol):
    """A log that writes a batch as its caller has encoded it: the log of a store is one, a replicated ledger's is not.

    Threads: any.
    """

    def stage_batch(
        self,
        descriptor: LedgerDescriptor,
        first_entry_id: int,
        sizes: array[int],
        body: EncodedEntries,
        *,
        nbytes: int,
        base_length: int,
        overhead: int,
        wanted: bool,
    ) -> Completion | None:
        """Stage two entries or more; None when too much is outstanding. The caller holds ``descriptor.lock``."""


class KeptEntries(Protocol):
    """Entries that a log's writer appends again if their batch is lost.

    Attributes:
        origins: Lost batches that the entries were in before; they are completed with the entries.
    """

    @property
    def origins(self) -> Sequence[Completion]:
        """See above."""


@runtime_checkable
class KeepingLog(Protocol):
    """The append queue of a ledger on bookies, for a log's writer, which keeps the entries that it appends.

    Each batch then has a list ``kept``, until it is acknowledged. If the ledger's writer ends because too few bookies
    answer, or the metadata store does not, its batches are *lost*: neither done nor failed. Callers that wait for one
    keep waiting, until ``settle``.

    Attributes:
        on_lost: Called by the client's leader, which it must not block, when batches are lost. None keeps nothing.

    Threads: any.
    """

    on_lost: Callable[[], None] | None

    @property
    def is_lost(self) -> bool:
        """True if the ledger's writer has ended because bookies or the metadata store did not answer."""

    def keep(self, batch: Completion, kept: KeptEntries) -> None:
        """Add to the entries that a batch keeps; complete their origins with the batch, or now if the batch is done.

        The caller must not be the leader.
        """

    def lost(self) -> list[Completion]:
        """Return the lost batches in order, until they are forgotten; the caller settles them."""

    def forget_lost(self) -> None:
        """Forget the lost batches; the caller has taken them."""

    def settle(self, batches: Iterable[Completion], error: PybkError | None = None) -> None:
        """Complete lost batches, with an error or none; the caller must not be the leader."""
