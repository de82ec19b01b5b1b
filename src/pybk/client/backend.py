"""The backend whose ledgers live on bookies, for ``LedgerManager.connect`` and ``open(..., metadata=...)``.

Theory of operation
-------------------

One ``ClusterBackend`` is one client of a cluster. It owns these parts, and most of its calls only combine them:

| part | task |
|---|---|
| ``Membership`` | which bookies are available; reads and writes of the metadata store |
| ``BookieWire`` | the links to the bookies; checks replies |
| ``Driver`` | runs the conversations, one for each writer, read and recovery: performs the effects of their machines |
| ``Followers`` | long polls and metadata watches for readers that wait for the next entry |
| ``LimboRepair`` | fills up the ledgers in limbo of the bookie in this process; absent without a bookie |
| local reader | reads entries from the files of a bookie on this host; absent if there is none |

A call of a handle runs as follows.

- **Append.** ``log_of`` returns the ``AppendQueue`` of the ledger's ``Writing``. From then on handles stage entries
  there, and this module is not involved until ``force`` or ``close_ledger``.
- **Read.** ``read_verified`` tries the entry that the last long poll brought, then the local reader, then the bookies.
- **Recovery, close, move, re-replication.** Each is a conversation that ``Driver.run`` completes before it returns.
- **Metadata.** A change is a compare-and-set on the version that this client read. If another client was faster, the
  metadata are read again and the change is repeated or refused.

Locks: none here. A descriptor has its own (``LedgerDescriptor.lock``), and the driver serializes all conversations. The
two weak dictionaries are changed by any thread, with single operations of ``dict``; readers copy the references first.

``close`` waits for appends first. Then limbo repair and followers stop, and the driver ends what is still under way
with ``ClosedError``. Last, the links, the bookie and the metadata store are closed, each even if closing another
failed. A forked child never closes them: they are the parent's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakSet, WeakValueDictionary

from pybk.backend import BackendIdentity, Lock, NamedRecord, Quorums, Replicated, ReplicatedLedgers
from pybk.client.broadcast import find_writer, flush, move, proven_lac, repair
from pybk.client.driver import Driver
from pybk.client.followed_report import FollowedReport
from pybk.client.follower import Followers
from pybk.client.limbo_repair import LimboBookie, LimboRepair
from pybk.client.reader import LacComparing, LacReading, Reading, Recovering
from pybk.client.remote_ledger import RemoteLedger
from pybk.client.rereplication import Rereplicator
from pybk.client.wire import BookieWire
from pybk.client.writer import Writing
from pybk.errors import (
    ClosedError,
    EntryUnknownError,
    ForkedProcessError,
    IllegalOperationError,
    LedgerRecoveryError,
    MetadataError,
    MetadataExistsError,
    MetadataVersionError,
    NoSuchBookieError,
    NoSuchLedgerError,
    PybkError,
    UnauthorizedError,
    VersionConflictError,
    without_frames,
)
from pybk.feature_level import FeatureLevel
from pybk.health import (
    ClusterSight,
    Health,
    client_health,
)
from pybk.ledger.entry import ENTRY_HEADER_BYTES
from pybk.ledger.keys import KeyRing
from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata, LedgerState
from pybk.metrics import READ_REPAIRS, Gauge, MetricKey
from pybk.replication.fragments import fragment_of
from pybk.threads.group_commit import Completion
from pybk.transport.cluster_keys import RightsKey

if TYPE_CHECKING:
    from pybk.client.append_queue import AppendQueue
    from pybk.client.membership import Membership
    from pybk.config import StoreConfig
    from pybk.flags import StorageHint
    from pybk.ledger.digest import EntryDigest
    from pybk.ledger.entry import Entry, EntryBatch
    from pybk.ledger.keys import LedgerKeys, LedgerSeal
    from pybk.metadata.registration import BookieRegistration
    from pybk.metadata.store import Watch
    from pybk.storage.descriptor import LedgerDescriptor
    from pybk.transport.client_links import Links

STRAGGLER_BYTES: Final = 16 << 20
"""The confirmed bytes that a bookie may leave unacknowledged before it is replaced."""

_COMPARED_MIN: Final = 4
"""The least ledgers whose ends are compared first; of fewer each is asked, because the comparison costs as much."""

_ENTRIES_GUESSED: Final = 64
"""Entries that the first read of a ledger asks for, while their size is unknown."""

_CUT_OFF: Final = "the manager was closed while this was under way; open it again, and check whether it was done"


logger = logging.getLogger(__name__)

_BACKENDS: Final[WeakSet[ClusterBackend]] = WeakSet()


def _mark_forked() -> None:
    for backend in _BACKENDS:
        backend.after_fork()


os.register_at_fork(after_in_child=_mark_forked)


class InProcessBookie(LimboBookie, Protocol):
    """The bookie that serves in this process."""

    def health(self) -> Health:
        """Return its health."""

    def close(self) -> None:
        """Stop serving."""


class Companion(Protocol):
    """A service that works for the cluster in the background of a bookie's process, and uses its client."""

    def begin_stop(self) -> None:
        """Begin no more work; returns at once."""

    def stop(self) -> None:
        """Stop; returns when all threads have ended. The driver is closed by then, so nothing is under way."""


class LocalEntries(Protocol):
    """A bookie of this host whose files this process may read."""

    def read_verified(
        self, ledger_id: int, first: int, last: int, max_bytes: int, *, digest: EntryDigest, direct: bool
    ) -> EntryBatch | None:
        """Return at least one entry from ``first`` on, all verified; None if they must be read from the bookies."""

    def close(self) -> None:
        """Close the files."""


class ClusterBackend(ReplicatedLedgers):
    """The ledgers of a cluster; ``LedgerBackend`` documents the calls.

    Args:
        where: Names the metadata store in messages; it contains no secret.
        membership: The available bookies, and the metadata store.
        make_links: Makes the links to the bookies.
        config: Settings of handles.
        bookie: The bookie of this process, closed with this backend; None if this process is not a bookie.
        local_reader: Reads the files of a bookie on this host, before bookies are asked; closed with this backend.
            None if all reads go to the bookies.

    Threads: any.
    """

    read_only = False
    changes_by_password = True
    single_writer = False

    def __init__(
        self,
        where: str,
        membership: Membership,
        make_links: Callable[[], Links],
        config: StoreConfig,
        bookie: InProcessBookie | None = None,
        local_reader: LocalEntries | None = None,
    ) -> None:
        self.where = where
        self.config = config
        self.metrics = membership.metrics
        self.metrics.add_gauges(self._gauges)
        self.ended = False
        self.forked = False
        self.membership: Final = membership
        self.bookie: Final = bookie
        self.local_reader = local_reader
        """Reads the files of a bookie on this host; None without one."""
        self._metadata = membership.metadata
        store_id, salt, cost = self.identity
        self.key_ring: Final = KeyRing(store_id, salt, cost=cost)
        self.wire = BookieWire(make_links, membership)
        """The requests to bookies that are under way."""
        self.driver: Final = Driver(self.wire, membership)
        self._followers = Followers(self.driver, membership)
        self._open_ledgers: WeakValueDictionary[int, RemoteLedger] = WeakValueDictionary()
        """The descriptors that handles still refer to, by ``id``: a ledger has one for each handle."""
        self._writings: WeakValueDictionary[int, Writing] = WeakValueDictionary()
        """The writers of this client, by ledger id; a handle and its futures keep theirs alive by its append queue."""
        self._limbo_repair = None if bookie is None else LimboRepair(self.driver, membership, bookie)
        self._report = FollowedReport(self._metadata)
        self.companion: Companion | None = None
        """The service that works in the background; stopped by ``close``."""
        membership.on_change = self._bookies_changed
        _BACKENDS.add(self)

    # ---- the backend itself --------------------------------------------------------------------------------------

    @property
    def identity(self) -> BackendIdentity:
        """The identity of the cluster."""
        found = self._metadata.identity
        return BackendIdentity(found.cluster_id, found.salt, found.cost)

    @property
    def feature_level(self) -> FeatureLevel:
        """The feature level of the cluster."""
        return self._metadata.feature_level

    def check_usable(self) -> None:
        """Raise if the manager is closed."""
        if self.forked:
            raise self._fork_error()
        if self.ended:
            raise ClosedError(f"the manager of {self.where} is closed; open it again")

    def _bookies_changed(self) -> None:
        """Have each writer that lacks a bookie, or names one that leaves, look for another one.

        Those that name a bookie that is away or leaves show the others that they live, or their ledgers could be taken
        for abandoned (H12).
        """

        def look_again() -> None:
            leaving = self.membership.leaving
            for writing in self._live_writings():
                writing.bookies_changed(time.monotonic_ns(), leaving)
                if not all(map(self.membership.keeps, writing.ensemble)):
                    writing.announce()

        self.driver.post(look_again)

    def check_writable(self) -> None:
        """Raise if the manager is closed."""
        self.check_usable()

    def after_fork(self) -> None:
        """Make every handle raise in a forked child, and replace locks that a thread of the parent may hold."""
        self.forked = self.ended = True
        self.metrics.after_fork()
        self._followers.end()
        self.driver.after_fork()
        error = self._fork_error()
        for ledger in self._ledgers():
            ledger.lock = threading.Lock()
            ledger.location_lock = threading.Lock()
        for writing in self._live_writings():
            writing.appender.after_fork(error)

    def _fork_error(self) -> ForkedProcessError:
        return ForkedProcessError(f"{self.where} was opened before this process was forked; open it here again")

    def close(self) -> None:
        """Wait for outstanding appends, record what bookies miss, and stop all parts; open ledgers stay open."""
        for writing in self._live_writings():
            if writing.appender.error is None:
                self._finish_appends(writing)
        self.ended = True
        with ExitStack() as closing:  # the rest is closed even if one step fails; callbacks run last to first
            closing.callback(self._metadata.close)
            if self.local_reader is not None:
                closing.callback(self.local_reader.close)
            if self.bookie is not None:
                closing.callback(self.bookie.close)
            closing.callback(self.wire.close)
            closing.callback(self.membership.close)
            closing.callback(self._report.close)
            if self.companion is not None:
                closing.callback(self.companion.stop)
                self.companion.begin_stop()
            if self._limbo_repair is not None:
                self._limbo_repair.stop()
            self._followers.end()
            error = ClosedError("the manager is closed; open it again")
            self.driver.close(error, ClosedError(_CUT_OFF, outcome_unknown=True))
            for ledger in self._ledgers():
                ledger.wake_followers()

    def _finish_appends(self, writing: Writing) -> None:
        """Wait for a writer's appends; a failure is logged here, and raised to the threads that wait for them."""
        try:
            if writing.ledger.deferred:
                self.force_writing(writing, writing.ledger.last_pushed)
            else:
                writing.appender.flush()
        except PybkError as error:
            logger.warning("ledger %d: the entries appended last may be lost: %s", writing.ledger.ledger_id, error)

    def health(self) -> Health:
        """Return the health of this process's bookie if it has one, else of the cluster as this client sees it.

        Cost: The first call makes three requests to the metadata store, and watches the auditor's report; later ones
        make none. Whether a bookie takes entries is known from its registration and that report, so it may be known up
        to ten seconds late.
        """
        writings = self._live_writings()
        outstanding = sum(writing.appender.outstanding_bytes for writing in writings)
        if self.bookie is not None:
            health = self.bookie.health()
            return replace(health, outstanding_bytes=health.outstanding_bytes + outstanding)
        registered = self.membership.bookies
        sight = ClusterSight(
            where=self.where,
            bookies=len(registered),
            writable=frozenset(name for name, each in registered.items() if not each.read_only),
            seen=self._report.now(),
            away=self.membership.not_writable,
            ensembles=tuple(each.ledger.metadata.ensemble_size for each in writings if not each.completion.done),
            paused_until_ns=self._paused_until_ns(),
        )
        return client_health(sight, outstanding, time.time_ns())

    def _paused_until_ns(self) -> int:
        """Return when a pause of the repairs ends, as the settings say that this client knows."""
        try:
            return self._metadata.current_settings().repair.paused_until_ns
        except PybkError as error:
            logger.warning("whether repairs are paused is not known: %s", error)
            return 0

    def catch_up(self) -> None:
        """Do nothing: each call reads the state of its ledger anew."""

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def quorums(self, asked: tuple[int | None, int | None, int | None]) -> Quorums:
        """Replace each None by its default."""
        return Quorums.of(asked)

    def verifier(self, keys: LedgerKeys) -> bytes:
        """Return the public half of the key that proves the right to write to bookies."""
        return RightsKey(keys.right_key).public

    def new_ledger_id(self) -> int:
        """Return an id that no ledger of the cluster ever had."""
        return self._metadata.new_ledger_id()

    def new_creation_sequence(self) -> int:
        """Return the time in nanoseconds, so that ledgers of one process sort in the order of their creation."""
        return time.time_ns()

    def create(self, metadata: LedgerMetadata, *, entries_when_full: int = 0) -> RemoteLedger:
        """Choose an ensemble, and write the metadata of a new ledger, and marks for its members that are away.

        A mark says that the member misses entries. The marks are durable before a writer is made, and so before the
        first entry is acknowledged (AW11). If they cannot be written, the ledger stays open and empty.
        """
        choice = self.membership.ensemble(metadata)
        ensemble = tuple(map(choice.bookies.__getitem__, range(metadata.ensemble_size)))
        metadata = replace(metadata, fragments=(Fragment(0, ensemble),))
        ledger = self.hold(metadata, self._metadata.create_ledger(metadata))
        for missed in choice.missed:
            self.membership.report_missing(ledger, missed)
        ledger.away = choice.away
        return ledger

    def hold(self, metadata: LedgerMetadata, version: int) -> RemoteLedger:
        """Return a new descriptor of a ledger, which this client follows while a handle refers to it."""
        ledger = RemoteLedger(metadata, version, self._metadata.describe(metadata))
        ledger.on_followed = self._followers.follow
        ledger.ends_are_sealed = lambda: self.feature_level >= FeatureLevel.SEALS
        self._open_ledgers[id(ledger)] = ledger
        return ledger

    def _ledgers(self) -> list[RemoteLedger]:
        """Return the descriptors in use; other threads may open more meanwhile."""
        return [ledger for reference in self._open_ledgers.valuerefs() if (ledger := reference()) is not None]

    def _live_writings(self) -> list[Writing]:
        """Return the writers of this client; other threads may create more meanwhile."""
        return [writing for reference in self._writings.valuerefs() if (writing := reference()) is not None]

    def _gauges(self) -> list[Gauge]:
        return [(MetricKey("writer_lag_bytes"), max((each.lag_bytes for each in self._live_writings()), default=0))]

    def writing(self, ledger: RemoteLedger) -> Writing:
        """Return the writer of a ledger that a ``LedgerWriter`` of this client has open."""
        writing = self._writings.get(ledger.ledger_id)
        assert writing is not None, "the ledger was created by this client"
        assert writing.ledger is ledger, "a ledger has one writer"
        return writing

    def descriptor(self, ledger_id: int) -> RemoteLedger:
        """Return a ledger as the metadata store has it now."""
        return self.hold(*self._metadata.read_ledger(ledger_id))

    def unlock(self, descriptor: LedgerDescriptor, keys: LedgerKeys, seal: LedgerSeal) -> None:
        """Give the ledger its keys: they prove rights, verify entries, and seal the metadata at close."""
        _remote(descriptor).unlock(keys, seal)

    def log_of(self, descriptor: LedgerDescriptor) -> AppendQueue:
        """Return the append queue of a new writer for a ledger that was just created."""
        ledger = _remote(descriptor)
        writing = Writing(
            self.driver,
            ledger,
            self.metrics,
            straggler_bytes=STRAGGLER_BYTES,
            patience_s=self.config.bookie_patience_seconds,
            outstanding_bytes_max=self.config.max_outstanding_bytes,
            on_span=self.config.on_span,
        )
        self._writings[ledger.ledger_id] = writing
        if any(map(self.membership.keeps, ledger.away)) or not self.membership.leaving.isdisjoint(writing.ensemble):
            self._bookies_changed()  # one came back, or was drained, before this writer could be notified of it
        return writing.appender

    def recover(self, descriptor: LedgerDescriptor) -> None:
        """Fence the ledger, find its end, complete its last entries, and close it; nothing if it is closed."""
        ledger = _remote(descriptor)
        if ledger.metadata.state is not LedgerState.CLOSED:
            recovering = Recovering(self.driver, ledger)
            self.driver.run(recovering, recovering.machine.start)

    def has_writer(self, ledger_id: int) -> bool | None:
        """Return whether a ledger has a writer that lives; None if that is unknown (``find_writer``).

        Args:
            ledger_id: The ledger.

        Raises:
            NoSuchLedgerError: It was deleted, or never created.

        Cost: One round trip to the metadata store, and one short request to each bookie of an open ledger.
        """
        ledger = self.descriptor(ledger_id)
        if ledger.metadata.state is LedgerState.CLOSED:
            return False
        return find_writer(self.driver, ledger, self.membership.find)

    def recover_abandoned(self, ledger_id: int) -> LedgerMetadata:
        """Recover a ledger as a member of the cluster, without its password; nothing if it is closed.

        Its writer, if it still lives, is fenced. The end has no seal until the owner reseals the ledger.

        Args:
            ledger_id: The ledger.

        Returns:
            The metadata of the closed ledger.

        Raises:
            NoSuchLedgerError: It was deleted, or never created.
            UnauthorizedError: There is no cluster secret, or the setting ``recover_abandoned`` is off.
            OwnerNeededError: Only the password can decide where the ledger ends: its owner has to open the ledger.
            LedgerRecoveryError: Too few bookies answer; try again when they are back.
            NotEnoughBookiesError, MetadataError: As for other recoveries.

        Durability: The end is durable on return.
        Cost: Reads the last fragment from all of its bookies, and sends it to all of them.
        """
        self.check_usable()
        if not self.wire.has_secret:
            raise UnauthorizedError(
                f"ledger {ledger_id} cannot be recovered without its password: a member proves its right by the "
                f"cluster's secret, and {self.where} has none; open the ledger with its password"
            )
        ledger = self.descriptor(ledger_id)
        ledger.as_member = True
        self.recover(ledger)
        return ledger.metadata

    def close_ledger(self, descriptor: LedgerDescriptor) -> None:
        """Wait for all appends, then close the ledger after the last confirmed entry."""
        ledger = _remote(descriptor)
        writing = self.writing(ledger)
        if writing.completion.done:
            if writing.completion.error is not None:
                raise without_frames(writing.completion.error)
            return
        if ledger.deferred:
            self.force(descriptor)
        else:
            writing.appender.flush()
        self._know_last(ledger)
        self.driver.run(writing, writing.close)

    def _know_last(self, ledger: RemoteLedger) -> None:
        """Read the last entry of a ledger that is about to be closed, if an interrupt left its digest unknown."""
        last = ledger.last_add_confirmed
        if last >= 0 and ledger.seals and ledger.last_prefix[8:16] != last.to_bytes(8, "big"):
            batch = self.read_verified(ledger, last, last, 1, digest=ledger.digest, direct=False)
            ledger.last_prefix = bytes(batch.buffer[int(batch.offsets[0]) :][: ENTRY_HEADER_BYTES + ledger.digest.size])

    def proven_lac(self, descriptor: LedgerDescriptor) -> int:
        """Ask all bookies of the last fragment, because a ledger may be closed at an end that hides entries."""
        return proven_lac(self.driver, _remote(descriptor))

    def reseal(self, descriptor: LedgerDescriptor, sealed: LedgerMetadata) -> None:
        """Write the seal by compare-and-set; repeat it if only tier or bookies changed since the ledger was checked."""
        ledger = _remote(descriptor)
        while True:
            found = self._metadata.read_ledger(ledger.ledger_id)
            wanted = found.metadata.with_seal(sealed.seal, sealed.last_digest)
            same = replace(wanted, tier=sealed.tier, version=sealed.version, fragments=sealed.fragments)
            if same != sealed:
                raise IllegalOperationError(f"ledger {ledger.ledger_id} was changed while it was checked; try again")
            wanted = replace(wanted, version=wanted.version + 1)
            try:
                ledger.renew(wanted, self._metadata.write_ledger(wanted, found.version), anyway=True)
            except MetadataVersionError:
                continue
            return

    def force(self, descriptor: LedgerDescriptor) -> int:
        """Have the bookies sync everything pushed so far; return the last add confirmed."""
        ledger = _remote(descriptor)
        writing = self.writing(ledger)
        if ledger.is_final:
            return ledger.last_add_confirmed  # closing forced everything
        with ledger.lock:
            if ledger.error is not None:
                raise without_frames(ledger.error)
            ledger.account_staged()
            last = ledger.last_pushed
        self.force_writing(writing, last)
        return ledger.last_add_confirmed

    def force_writing(self, writing: Writing, last: int) -> None:
        """Make a writer's entries up to ``last`` durable on an ack quorum, where they are not yet confirmed."""
        if last > writing.ledger.last_add_confirmed:
            commit = Completion()
            self.driver.do(lambda: writing.force(last, commit), commit)
            if commit.error is not None:
                raise without_frames(commit.error)

    def delete(self, descriptor: LedgerDescriptor) -> None:
        """Replace the metadata by a tombstone; each bookie drops the entries once it has read the tombstone."""
        ledger_id = descriptor.ledger_id
        proof = RightsKey(_remote(descriptor).keys.right_key).sign_deletion(ledger_id)
        while True:
            try:
                self._metadata.delete_ledger(ledger_id, self._metadata.read_ledger(ledger_id).version, proof)
                break
            except MetadataVersionError:
                continue
        gone = NoSuchLedgerError(f"ledger {ledger_id} was deleted")
        held = [ledger for ledger in self._ledgers() if ledger.ledger_id == ledger_id]
        for ledger in held:
            ledger.deleted = True
        writing = self._writings.get(ledger_id)
        if writing is not None:
            # The driver may be finishing the appends of the ledger at this moment, so only the driver may fail them.
            # This thread does not wait for it: a signal handler may have interrupted the driver to delete the ledger.
            self.driver.post(partial(writing.deleted, gone))
        for ledger in held:
            ledger.wake_followers()

    def move(self, descriptor: LedgerDescriptor, tier: StorageHint) -> None:
        """Write the tier to the metadata, for bookies that join later; then move the replicas that exist."""
        ledger = _remote(descriptor)
        while ledger.metadata.tier is not tier:
            moved = replace(ledger.metadata, tier=tier, version=ledger.metadata.version + 1)
            try:
                ledger.renew(moved, self._metadata.write_ledger(moved, ledger.version), anyway=True)
            except MetadataVersionError:
                ledger.renew(*self._metadata.read_ledger(ledger.ledger_id), anyway=True)
        move(self.driver, ledger, tier)

    def move_all(self, descriptors: Iterable[LedgerDescriptor], tier: StorageHint) -> None:
        """Move ledgers one after the other, because each has its own bookies."""
        for descriptor in descriptors:
            self.move(descriptor, tier)

    def replicate(self, what: int | str) -> Replicated:
        """Re-replicate a ledger, or all ledgers whose ensembles name a bookie, as if it were lost."""
        replicator = Rereplicator(self.driver, self.membership)
        if isinstance(what, str):
            self._check_known(what)
            return replicator.replicate(self._ledgers_on(what), what)
        return replicator.replicate([self._metadata.read_ledger(what)], None)

    def _check_known(self, bookie_id: str) -> None:
        """Raise unless the cluster knows a bookie of this name: registered, with a cookie, or named by a ledger.

        Raises:
            NoSuchBookieError: The name is unknown; the message lists the known ones.
        """
        known = {cookie.bookie.bookie_id for cookie in self._metadata.list_cookies()} | self.membership.bookies.keys()
        if bookie_id not in known and not any(self._ledgers_on(bookie_id)):
            names = ", ".join(sorted(known)) or "none"
            raise NoSuchBookieError(f"no bookie of {self.where} is called {bookie_id!r:.100}; there are {names}")

    def _ledgers_on(self, bookie_id: str) -> Iterator[tuple[LedgerMetadata, int]]:
        """Yield the ledgers whose fragments name a bookie."""
        for found in self._metadata.sound_ledgers():
            if any(bookie.bookie_id == bookie_id for each in found.metadata.fragments for bookie in each.ensemble):
                yield found

    def metadata(self, ledger_id: int) -> LedgerMetadata:
        """Return a ledger's metadata as the metadata store has them now."""
        return self._metadata.read_ledger(ledger_id).metadata

    def ledgers(self, after: int = -1) -> Iterator[LedgerMetadata]:
        """Yield the ledgers as the metadata store has them."""
        for found in self._metadata.sound_ledgers(after=after):
            yield found.metadata

    def confirmed(self, ledger_id: int) -> None:
        """Return None: only the bookies know the last add confirmed."""

    def bookies(self) -> list[BookieRegistration]:
        """Return the registrations in the metadata store."""
        return self._metadata.list_bookies()

    # ---- named records -------------------------------------------------------------------------------------------

    def read_record(self, name: str) -> NamedRecord | None:
        """Return a pointer of the cluster's metadata."""
        group, _, rest = name.partition("/")
        found = self._metadata.read_pointer(group, rest)
        return None if found is None else NamedRecord(name, found.version, found.value)

    def read_records(self, names: Sequence[str]) -> list[NamedRecord | None]:
        """Return pointers of the cluster's metadata."""
        group = names[0].partition("/")[0]
        found = self._metadata.read_pointers(group, [each.partition("/")[2] for each in names])
        return [
            None if each is None else NamedRecord(name, each.version, each.value)
            for name, each in zip(names, found, strict=True)
        ]

    def write_record(self, name: str, value: bytes | None, version: int | None) -> int:
        """Change a pointer of the cluster's metadata."""
        group, _, rest = name.partition("/")
        try:
            if value is not None:
                return self._metadata.write_pointer(group, rest, value, version)
            assert version is not None, "only a record that exists is removed"
            self._metadata.delete_pointer(group, rest, version)
        except MetadataVersionError as error:
            raise VersionConflictError(
                f"the named record {name!r} has another version than {version}; read it again, and decide anew",
                outcome_unknown=error.outcome_unknown,
            ) from error
        return version

    def rename_record(self, name: str, target: str, value: bytes, version: int) -> None:
        """Rename a pointer of the cluster's metadata."""
        (group, _, rest), (_, _, target_rest) = name.partition("/"), target.partition("/")
        try:
            self._metadata.rename_pointer(group, rest, target_rest, value, version)
        except (MetadataExistsError, MetadataVersionError) as error:
            raise VersionConflictError(
                f"the named record {name!r} has another version than {version}, or {target!r} exists; read them again",
                outcome_unknown=error.outcome_unknown,
            ) from error

    def watch_record(self, name: str, callback: Callable[[], None]) -> Watch:
        """Watch a pointer of the cluster's metadata."""
        group, _, rest = name.partition("/")
        return self._metadata.watch_pointer(group, rest, callback)

    def try_lock(self, name: str, owner: str) -> Lock | None:
        """Take a lock of the cluster."""
        return self._metadata.try_lock(name, owner)

    def break_lock(self, name: str) -> None:
        """Take a lock of the cluster away from its holder."""
        self._metadata.break_lock(name)

    def watch_lock(self, name: str, callback: Callable[[], None]) -> Watch:
        """Watch a lock of the cluster."""
        return self._metadata.watch_lock(name, callback)

    def lock_owner(self, name: str) -> str | None:
        """Return the owner of a lock of the cluster."""
        return self._metadata.lock_owner(name)

    def watch_group(self, group: str, callback: Callable[[str | None], None]) -> Watch:
        """Watch the pointers of a group; the metadata store does not say which of them changed."""
        return self._metadata.watch_pointers(group, partial(callback, None))

    def record_names(self, prefix: str) -> list[str]:
        """Return names of pointers of one group."""
        group, _, rest = prefix.partition("/")
        names = self._metadata.pointer_names(group)
        return sorted(f"{group}/{name}" for name in names if name.startswith(rest))

    def records(self, prefix: str) -> list[NamedRecord]:
        """Return pointers of one group."""
        group, _, rest = prefix.partition("/")
        found = self._metadata.list_pointers(group)
        return sorted(
            NamedRecord(f"{group}/{name}", each.version, each.value) for name, each in found if name.startswith(rest)
        )

    # ---- entries -------------------------------------------------------------------------------------------------

    def look(self, descriptor: LedgerDescriptor, *, follows: bool = False) -> None:
        """Update the LAC and then the state of an open ledger; in this order, because an end in the metadata is final.

        A follower that waits has a callback registered, so it looks once: ``Followers`` reports every later change. If
        that look fails because too few bookies answer, the long poll of ``Followers`` finds the entries that it missed.
        A reader that does not wait gets no report, and looks each time.
        """
        ledger = _remote(descriptor)
        writing = self._writings.get(ledger.ledger_id)
        if ledger.is_final or (writing is not None and writing.ledger is ledger):
            return
        waits = bool(ledger.advanced_callbacks)
        if not follows:
            self.look_at_bookies(ledger)
        elif not (waits and ledger.looked):
            try:
                self.look_at_bookies(ledger)
            except (LedgerRecoveryError, EntryUnknownError, MetadataError) as error:
                logger.warning("ledger %d: its last add confirmed cannot be read now: %s", ledger.ledger_id, error)
            ledger.looked = waits

    def look_at_bookies(self, ledger: RemoteLedger) -> None:
        """Advance a ledger to the last add confirmed that its bookies know."""
        reading = LacReading(self.driver, ledger, rank=self.membership.rank())
        error = None
        try:
            self.driver.run(reading, reading.machine.start)
        except PybkError as failed:
            error = failed
        self._followers.renew(ledger)
        if not ledger.is_final:
            if error is not None:
                raise error
            writing = self._writings.get(ledger.ledger_id)  # a writer in this client knows the latest LAC
            known = -1 if writing is None else writing.ledger.last_add_confirmed
            ledger.advance(max(reading.last_add_confirmed, known))

    def moved(self, descriptors: Sequence[LedgerDescriptor]) -> list[LedgerDescriptor]:
        """Ask each bookie once for all open ledgers, then the metadata store for their versions.

        In this order, because a version that is still the same proves that the bookies that were asked are those of the
        last ensemble. The ledgers that this client writes count as moved.
        """
        self.check_usable()
        ledgers = [each for each in map(_remote, descriptors) if not each.is_final]
        asked = [each for each in ledgers if each.ledger_id not in self._writings]
        if len(asked) < _COMPARED_MIN:
            return list(descriptors)
        versions = {id(each): each.version for each in asked}
        comparing = LacComparing(self.driver, asked)
        self.driver.run(comparing, comparing.machine.start)
        same = [each for each in asked if each.ledger_id in comparing.same]
        now = self._metadata.ledger_versions([each.ledger_id for each in same], latest=True)
        unmoved = {id(each) for each, version in zip(same, now, strict=True) if version == versions[id(each)]}
        return [each for each in ledgers if id(each) not in unmoved]

    def read_verified(
        self, descriptor: LedgerDescriptor, first: int, last: int, max_bytes: int, *, digest: EntryDigest, direct: bool
    ) -> EntryBatch:
        """Read from the nearest replica with sound copies; replicas that were found damaged are repaired afterwards."""
        ledger = _remote(descriptor)
        newest = ledger.newest_from(first)
        if newest is not None:
            return newest
        if self.local_reader is not None and first <= ledger.last_add_confirmed:
            upto = min(last, ledger.last_add_confirmed)
            found = self.local_reader.read_verified(
                ledger.ledger_id, first, upto, max_bytes, digest=digest, direct=direct
            )
            if found is not None:
                return found
        last = min(last, first + self._guess(ledger, max_bytes) - 1)
        return self._read(ledger, first, last, max_bytes, self.membership.rank())

    def _read(
        self, ledger: RemoteLedger, first: int, last: int, max_bytes: int, rank: Mapping[Bookie, int]
    ) -> EntryBatch:
        """Read from the bookies with the lowest ranks that have sound copies, and have the others repaired."""
        shared = self.membership.reads_are_shared
        reading = Reading(self.driver, ledger, first, last, max_bytes, rank, shared=shared)
        self.driver.run(reading, reading.machine.start)
        batch = reading.batch()
        ledger.entry_bytes = max(1, int(batch.sizes.sum()) // len(batch))
        if reading.bad:
            self.metrics.add(READ_REPAIRS, repair(self.driver, ledger, batch, reading.bad))
        return batch

    @staticmethod
    def _guess(ledger: RemoteLedger, max_bytes: int) -> int:
        """Estimate how many entries have ``max_bytes`` bytes, from those read last."""
        if ledger.entry_bytes:
            return max(1, max_bytes // ledger.entry_bytes)
        return min(_ENTRIES_GUESSED, max_bytes)

    def locate(self, descriptor: LedgerDescriptor, entry_id: int) -> Entry | tuple[memoryview, int, int] | None:
        """Return an entry that one bookie returned; None if ``read_verified`` is to read it.

        If that bookie returned no sound copy, it is asked again and then the others, and a damaged copy is repaired.
        """
        assert isinstance(descriptor, RemoteLedger), "descriptors of a cluster backend are its own"
        metadata = descriptor.metadata
        newest = descriptor.newest
        if (
            entry_id
            == metadata.last_entry_id  # ``read_verified`` is for the last entry, which is compared with the seal
            or self.local_reader is not None
            or self.config.on_span is not None
            or (newest is not None and newest.first == entry_id)
        ):
            return None  # the others need no request, or report one
        fragment = metadata.fragments[-1]
        if entry_id < fragment.first_entry_id:
            fragment = fragment_of(metadata.fragments, entry_id)
        size, copies = metadata.ensemble_size, metadata.write_quorum
        bookie = self.membership.nearest(fragment.ensemble, entry_id % size, copies)
        entry = self.driver.read_entry(descriptor, bookie, entry_id, 1 if size == copies else size)
        if entry is not None:
            return entry
        batch = self._read(descriptor, entry_id, entry_id, 1, {**self.membership.rank(), bookie: 0})
        return batch.buffer, int(batch.offsets[0]), int(batch.offsets[0] + batch.sizes[0])

    def write_buffered(self, descriptor: LedgerDescriptor) -> None:
        """Have the bookies sync the entries of a deferred writer, and update the LAC."""
        ledger = _remote(descriptor)
        if not ledger.is_final:
            flush(self.driver, ledger)
            self.look_at_bookies(ledger)

    def check_space(self) -> None:
        """Do nothing, because a bookie that is full refuses adds itself."""

    def wait_for_admission(self, descriptor: LedgerDescriptor) -> None:
        """Wait until fewer bytes are outstanding; a deferred ledger is forced, or no entry would be confirmed."""
        ledger = _remote(descriptor)
        writing = self.writing(ledger)
        if ledger.deferred:
            self.force_writing(writing, ledger.last_pushed)  # the caller may hold the ledger's lock
        else:
            writing.appender.wait_for_space()


def _remote(descriptor: LedgerDescriptor) -> RemoteLedger:
    assert isinstance(descriptor, RemoteLedger), "descriptors of a cluster backend are its own"
    return descriptor
