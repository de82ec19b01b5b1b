"""All replicas of a bookie, in a store of its own.

Limbo is the state of a ledger that may lack entries which this bookie acknowledged (D6). It begins at an unclean start
for ledgers with deferred entries, when a commit with deferred entries fails, when a deletion fails half-way, and for
all ledgers after a durable loss (``put_in_limbo``); ``gap`` then says that durable entries or the fence may be lost,
too. It ends by ``end_limbo``, after ``client/limbo_repair.py`` filled up the ended fragments. A closed ledger with a
gap is fenced again before its mark goes (I12). While a ledger is in limbo, a close leaves the store unclean, because
limbo has to outlive a restart.

A replica is one or more extents, each a ledger of the store. A ledger of type ``.fence`` is a fence, and one of type
``.limbo`` a mark that durable data may be missing. See ``replica.py`` for one ledger.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final

from pybk.bookie.directory_identity import (
    CLUSTER_KEY,
    DELETED_KEY,
    DELETIONS_MAX,
    IDENTITY_KEY,
    SEEN_KEY,
    DirectoryIdentity,
    SeenEpoch,
    decode_deletions,
    encode_deletions,
)
from pybk.bookie.extent_lookup import ReplicaExtent
from pybk.bookie.ledger_header import LedgerHeader, names_bookie_record
from pybk.bookie.replica import Replica, View
from pybk.bookie.replica_state import ReplicasHealth, ReplicaState
from pybk.config import StoreConfig
from pybk.errors import CookieError, CorruptError, UsageError, without_frames
from pybk.feature_level import BOOKIE_STORE_LEVEL
from pybk.flags import LedgerType, StorageHint, WriteFlag, is_bookie_record
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import INSTANCE_BYTES, LedgerMetadata
from pybk.metrics import Metrics
from pybk.replication.messages import EntryRun, Status
from pybk.storage.directories import OpenEnvironment
from pybk.storage.format.extent import EXTENT_KEY, Extent
from pybk.storage.io.filesystem import FileSystem
from pybk.storage.store import Store, open_environment
from pybk.threads.group_commit import Completion

NEWEST: Final = 1000
"""The number of extents, those begun last, whose ledgers a start looks up in the metadata store."""


class Replicas:
    """The replicas of one bookie.

    Threads: any thread may read and query. One thread at a time stages and commits, because ``commit`` makes all
        entries durable that were staged since the last commit.
    """

    @classmethod
    def open(
        cls,
        root: str,
        *,
        config: StoreConfig,
        tiers: Mapping[StorageHint, str | Sequence[str]] | None = None,
        metrics: Metrics | None = None,
        fs: FileSystem | None = None,
        environment: OpenEnvironment = open_environment,
        salvage: bool = False,
    ) -> Replicas:
        """Open a bookie's directory; create it if it does not exist.

        After a ``salvage``, call ``put_in_limbo`` for all ledgers that the bookie may have held, before it answers any
        request, and then ``store.keep_salvage``.

        Raises:
            UsageError: ``tiers`` is malformed, or a path does not name a directory.
            StoreLockedError: Another process has it open.
            CookieError: A directory is not the one that the store recorded, or it is that of an embedded store.
            CorruptError: Durable data are damaged or missing.

        Cost: 30 microseconds per extent, in addition to opening the store.
        """
        store = Store.open(
            root,
            config=config,
            tiers=tiers,
            metrics=metrics,
            fs=fs,
            environment=environment,
            salvage=salvage,
            level=BOOKIE_STORE_LEVEL,
        )
        try:
            return cls(store)
        except BaseException:
            store.close(clean=False)
            raise

    def __init__(self, store: Store) -> None:
        self.store: Final = store
        self._lock = threading.Lock()
        """Guards the fields below except ``_identities``. A replica's lock is taken before it, never after."""
        self._stored: dict[int, array[int]] = {}
        """The store's ledgers that are parts of a replicated ledger, found at the start, by its id."""
        self._replicas: dict[int, Replica] = {}
        """The one object of each ledger that was used since the start; the others are loaded on first use.

        It may be read without the lock, as it has only objects that are loaded whole.
        """
        self._limbo: set[int] = set()
        """Ledgers found in limbo at the start and not brought out of it yet, loaded or not."""
        self._commits: list[Completion] = []
        """The log's commits in which entries were staged since the last ``commit``, in their order."""
        self._identities: list[tuple[DirectoryIdentity, int]] = []
        """Identities and the store's ledgers that carry them; two if a start stopped before it deleted the older."""
        self.about = b""
        """The payload of the cluster's own metadata value, as of the last start; empty if it was never kept."""
        self.seen: SeenEpoch | None = None
        """The newest metadata that the bookie has seen; None before it has seen any epoch."""
        self.deleted: dict[int, bytes] = {}
        """Ledgers that were dropped because they were deleted, the oldest deletion first, with their proofs."""
        self.newest: deque[tuple[int, int]] = deque(maxlen=NEWEST)
        """The extents that were begun last, found at the start, ascending by id in the store, and their ledgers."""
        for metadata in store.ledgers():
            self._take(metadata)

    def _take(self, metadata: LedgerMetadata) -> None:
        """Note a ledger of the store at the start: an identity, or a part of a replicated ledger."""
        extent = Extent.of(metadata)
        if extent is None and metadata.ledger_type == LedgerType.BOOKIE:
            self._identities.append((DirectoryIdentity.of(metadata), metadata.ledger_id))
            if self._identities[-1] == max(self._identities, key=_order_of):
                self.about = metadata.custom_metadata.get(CLUSTER_KEY, b"")
                self.seen, self.deleted = SeenEpoch.of(metadata), decode_deletions(metadata)
            return
        if extent is None:
            raise CookieError(
                f"{self.store.volumes.root} holds ledger {metadata.ledger_id}, which is not part of a replica: the "
                "directory is that of an embedded store; name another for the bookie"
            )
        self._stored.setdefault(extent.ledger_id, array("q")).append(metadata.ledger_id)
        kind = self._kind_of(metadata)
        deferred = extent.write_flags & WriteFlag.DEFERRED_FORCE and kind != LedgerType.FENCE
        if kind == LedgerType.LIMBO or (deferred and not self.store.began_clean):
            self._limbo.add(extent.ledger_id)
        if kind not in (LedgerType.FENCE, LedgerType.LIMBO):
            self.newest.append((metadata.ledger_id, extent.ledger_id))

    def _kind_of(self, metadata: LedgerMetadata) -> LedgerType:
        """Return the kind of a part of a replicated ledger: ``FENCE``, ``LIMBO``, or the type of an extent.

        Older versions stored extents under whatever type the client named, even a type of a bookie's own records. A
        part with such a type is an extent if it has entries, because fences and limbo marks have none.
        """
        kind = metadata.ledger_type
        if not is_bookie_record(kind) or not names_bookie_record(metadata):
            return kind
        if kind == LedgerType.BOOKIE or self.store.descriptor(metadata.ledger_id).last_durable >= 0:
            return LedgerType("")
        return kind

    # ---- whose directory -----------------------------------------------------------------------------------------

    @property
    def identity(self) -> DirectoryIdentity | None:
        """The bookie that the directory belongs to, as of its last start; None for a new directory."""
        return max(self._identities, key=_order_of)[0] if self._identities else None

    @property
    def restored(self) -> bool:
        """True if the directory was restored from a backup, and the bookie was not started on it since.

        It may then lack entries that the bookie acknowledged after the backup, so all its ledgers are put in limbo,
        because of the file ``accepted-loss`` that a restore leaves. It is a deliberate copy of the bookie's directory,
        so neither its inode nor its number of starts is checked.
        """
        identity = self.identity
        return identity is not None and identity.incarnation != self.store.cookie.incarnation

    def check_identity(self, cluster_id: bytes, bookie_id: str, instance: bytes, boots: int) -> None:
        """Check that the directory is the one that the metadata store records.

        Args:
            cluster_id: The cluster.
            bookie_id: The bookie.
            instance: The instance that the metadata store records.
            boots: The number of the last start that the metadata store records. A directory that was salvaged, or
                restored from a backup, may have a lower one, because all its ledgers are put in limbo.

        Raises:
            CookieError: The directory is new, another bookie's, or older; the message names the remedy.
        """
        expected = DirectoryIdentity(cluster_id, bookie_id, instance, boots, 0)
        identity = self.identity
        if identity is None:
            raise CookieError(
                f"{self.store.volumes.root} does not belong to a bookie yet, but the metadata store knows {expected}: "
                "mount or name the directory that it had, or choose another name for a new bookie"
            )
        if self.store.salvage is not None or self.store.has_accepted_loss():
            expected = expected._replace(boots=min(boots, identity.boots))
        identity.check(expected, self.store.volumes.root)

    def record_start(
        self,
        cluster_id: bytes,
        bookie_id: str,
        instance: bytes,
        boots: int = 0,
        *,
        moved: bool = False,
        about: bytes = b"",
    ) -> int:
        """Record a start of the bookie in the directory, and bind a new directory to the bookie; durable on return.

        Before the bookie serves, the caller also records the number of the start in the metadata store.

        Args:
            cluster_id: The cluster.
            bookie_id: The bookie.
            instance: Its instance.
            boots: The last start that the metadata store records.
            moved: The directory was moved since the last start, not copied, so another inode is accepted.
            about: The payload of the cluster's own metadata value, to be kept as a copy.

        Returns:
            The number of this start, above the numbers of all starts before it.

        Raises:
            UsageError: The instance has another size.
            CookieError: The directory is another bookie's, or a copy.
        """
        inode = self.store.fs.inode_number(self.store.volumes.root)
        if len(instance) != INSTANCE_BYTES:
            raise UsageError(f"an instance has {INSTANCE_BYTES} random bytes, not {len(instance)}")
        before = self.identity
        if before is not None:
            self.check_identity(cluster_id, bookie_id, instance, boots)
            if not (moved or (self.restored and self.store.has_accepted_loss())):
                before.check_place(inode, self.store.volumes.root)
            boots = max(boots, before.boots)
        incarnation = self.store.cookie.incarnation
        identity = DirectoryIdentity(cluster_id, bookie_id, instance, boots + 1, inode, incarnation)
        self.about = about
        self._keep_identity(identity)
        return identity.boots

    def note_seen(self, seen: SeenEpoch) -> None:
        """Keep the newest metadata that the bookie has seen; durable on return. Call it after ``record_start``."""
        self.seen = seen
        self._keep_identity()

    def note_about(self, about: bytes) -> None:
        """Keep a copy of the payload of the cluster's own metadata value, which changed; durable on return."""
        if about != self.about:
            self.about = about
            self._keep_identity()

    def remember_deleted(self, proofs: Mapping[int, bytes]) -> None:
        """Record, durably, that ledgers were deleted, because a rebuild of the metadata must not bring them back.

        Args:
            proofs: The proof of each deletion, by ledger. The newest ``DELETIONS_MAX`` deletions are kept.

        Call it after ``record_start``, and before the ledgers are dropped.
        """
        for ledger_id in proofs:
            self.deleted.pop(ledger_id, None)
        kept = list((self.deleted | dict(proofs)).items())[-DELETIONS_MAX:]
        self.deleted = dict(kept)
        self._keep_identity()

    def _keep_identity(self, identity: DirectoryIdentity | None = None) -> None:
        """Write an identity, None for the known one, with all that is kept next to it; durable on return."""
        kept = identity or self.identity
        assert kept is not None, "a start was recorded"
        known = self._identities
        custom = {IDENTITY_KEY: kept.encode(), CLUSTER_KEY: self.about}
        if self.seen is not None:
            custom[SEEN_KEY] = self.seen.encode()
        if self.deleted:
            custom[DELETED_KEY] = encode_deletions(self.deleted)
        made = self.store.create(self._metadata(LedgerType.BOOKIE, custom), when_full=True)
        self._identities = [(kept, made.ledger_id)]
        for _, ledger_id in known:
            self.store.delete(self.store.descriptor(ledger_id))

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def ledgers(self) -> list[int]:
        """Return the ids of the replicated ledgers that the bookie knows, ascending."""
        with self._lock:
            return sorted(self._stored.keys() | self._replicas.keys())

    def in_limbo(self) -> list[int]:
        """Return the ids of the replicated ledgers in limbo, ascending."""
        with self._lock:
            loaded = [replica.ledger_id for replica in self._replicas.values() if replica.limbo]
            return sorted(self._limbo.union(loaded))

    def state(self, ledger_id: int) -> ReplicaState | None:
        """Return the state of a ledger; None if the bookie does not know it."""
        replica = self._replicas.get(ledger_id) or self.replica(ledger_id)
        if replica is None:
            return None
        with replica.lock:
            return replica.state()

    def known_lac(self, ledger_id: int) -> int | None:
        """See ``BookieStorage.known_lac``: a ledger that was not used since the start is not loaded for that."""
        with self._lock:
            replica = self._replicas.get(ledger_id)
            if replica is None:
                return None if ledger_id in self._stored else -1
        with replica.lock:
            return replica.known_lac()

    def create(self, ledger_id: int, header: LedgerHeader) -> None:
        """Make a ledger known, after which entries can be staged; stores nothing."""
        self.known(ledger_id, header)

    def known(self, ledger_id: int, header: LedgerHeader | None) -> Replica:
        """Return the one object of a ledger, which is created if the bookie does not know the ledger."""
        with self._lock:
            replica = self._load(ledger_id)
            if replica is None:
                replica = self._replicas[ledger_id] = self._new(ledger_id, header)
            if replica.header is None:
                replica.header = header
        return replica

    def _new(self, ledger_id: int, header: LedgerHeader | None) -> Replica:
        return Replica(self.store, ledger_id, header, self._keep, self._staged)

    def replica(self, ledger_id: int) -> Replica | None:
        """Return the one object of a ledger, loaded on first use; None if the bookie does not know the ledger."""
        with self._lock:
            found = self._replicas.get(ledger_id)
            return self._load(ledger_id) if found is None else found

    def _load(self, ledger_id: int) -> Replica | None:
        """Return what ``replica`` returns; the caller holds the lock."""
        replica = self._replicas.get(ledger_id)
        stored = self._stored.get(ledger_id)
        if replica is not None or stored is None:
            return replica
        descriptors = [self.store.descriptor(number) for number in stored]
        replica = self._new(ledger_id, None)
        for descriptor in descriptors:
            metadata = descriptor.metadata
            extent = Extent.of(metadata)
            if extent is None:
                raise CorruptError(
                    f"ledger {metadata.ledger_id} was an extent when the bookie started, but is not one now"
                )
            replica.header = replica.header or LedgerHeader.kept(metadata, extent)
            kind = self._kind_of(metadata)
            if kind == LedgerType.FENCE:
                replica.fences.append(descriptor)
            elif kind == LedgerType.LIMBO:
                replica.marks.append(descriptor)
            else:
                replica.extents.add(ReplicaExtent(descriptor, None, extent.first, extent.stride, extent.replaces))
        replica.fenced = bool(replica.fences)
        replica.limbo, replica.gap = ledger_id in self._limbo, bool(replica.marks)
        self._replicas[ledger_id] = replica  # last, because a part of it would deny entries that are here
        return replica

    def put_in_limbo(self, ledgers: Mapping[int, LedgerHeader | None]) -> None:
        """Put ledgers that may lack durable entries in limbo, with a gap; durable on return, with one synced write.

        Args:
            ledgers: Their ids, and the header of each as far as it is known. The bookie need not know the ledgers.

        Raises:
            StorageError: The marks may not be durable.
        """
        for ledger_id, header in ledgers.items():
            replica = self.known(ledger_id, header)
            with replica.lock:
                replica.limbo = replica.gap = True
                if not replica.marks:
                    mark = self._part_of(replica, LedgerType.LIMBO, 0, 1)
                    descriptor, commit = self.store.stage_create(mark, when_full=True)
                    replica.marks.append(descriptor)
                    self._staged(commit)
        self.commit()

    def end_limbo(self, ledger_id: int, *, closed: bool) -> None:
        """End a ledger's limbo, because its lost entries were copied from peers; missing entries are then denied.

        Args:
            ledger_id: The ledger.
            closed: Whether it is closed. The loss may include its fence, so a closed ledger with a gap is fenced again
                (see ``docs/design/replication.md``).

        Durability: The end of a gap is durable on return. A crash later puts a ledger with deferred entries in limbo
            again.

        Raises:
            StorageError: The fence, or the removal of the mark, may not be durable; the ledger stays in limbo.
        """
        replica = self.replica(ledger_id)
        if replica is not None:
            if closed and replica.gap:
                self.fence(ledger_id, replica.header)
            with replica.lock:
                replica.lift()
        with self._lock:
            self._limbo.discard(ledger_id)

    def delete(self, ledger_id: int) -> None:
        """Delete everything of a ledger, its fence included; durable on return. Does nothing for an unknown ledger.

        Raises:
            StorageError: Parts may be left; the ledger is in limbo until another call deletes it.
        """
        replica = self.replica(ledger_id)
        if replica is None:
            return
        with replica.lock:
            if replica.deleted:
                return
            replica.delete()
            self._forget(ledger_id)

    def drop_entries(self, ledger_id: int) -> None:
        """Delete a ledger's entries, because other bookies have its copies; durable on return.

        A fence stays (SD5), and so does limbo. Without either, the bookie knows nothing of the ledger afterwards. A
        crash in the middle leaves some of the entries. Does nothing for an unknown ledger.

        Raises:
            StorageError: Some entries may be left; another call deletes them.

        Cost: One synced write for each extent.
        """
        replica = self.replica(ledger_id)
        if replica is None:
            return
        with replica.lock:
            if replica.deleted:
                return
            replica.drop_entries()
            if not replica.fenced and not replica.limbo:
                replica.deleted = True
                self._forget(ledger_id)

    def _forget(self, ledger_id: int) -> None:
        """Forget a ledger of which nothing is left; the caller holds the replica's lock."""
        with self._lock:
            self._replicas.pop(ledger_id, None)
            self._stored.pop(ledger_id, None)
            self._limbo.discard(ledger_id)

    def count_entries(self, ledger_id: int) -> int:
        """Return the number of entries that the bookie has of a ledger; 0 for an unknown one, and for only a fence.

        Cost: A ledger that was not used since the start is not loaded for that.
        """
        with self._lock:
            replica = self._replicas.get(ledger_id)
            stored = self._stored.get(ledger_id, ()) if replica is None else ()
        if replica is None:
            return sum(self.store.descriptor(number).last_durable + 1 for number in stored)
        return sum(part.last_durable + 1 for part in replica.parts())

    def valid_entries(self, part: LedgerMetadata, first: int, last: int) -> tuple[int, list[int]] | None:
        """Return the valid entries of a part of a replicated ledger, which no other part replaces.

        Args:
            part: A ledger of the store.
            first: The first entry, as the store numbers them.
            last: The last entry, inclusive.

        Returns:
            The replicated ledger, and its entries that are read from this part, ascending; None for none.
        """
        extent = Extent.of(part)
        replica = None if extent is None else self.replica(extent.ledger_id)
        if extent is None or replica is None:
            return None
        with replica.lock:
            replica.note_commit_outcomes()
            valid = [
                entry_id
                for entry_id in range(
                    extent.first + first * extent.stride, extent.first + last * extent.stride + 1, extent.stride
                )
                if (holder := replica.extents.holder(entry_id)) is not None
                and holder.descriptor.ledger_id == part.ledger_id
            ]
        return (extent.ledger_id, valid) if valid else None

    # ---- adding --------------------------------------------------------------------------------------------------

    def stage(self, ledger_id: int, run: EntryRun, durable: bool, *, recovery: bool = False) -> Status:
        """Stage entries; durable when ``commit`` has returned.

        Entries that are stored already are compared byte by byte (I14). A run that begins where an extent ends is
        appended to it; any other run begins a new extent.

        Args:
            ledger_id: The ledger, made known by ``create``.
            run: The entries.
            durable: False for deferred adds, which may stay buffered until another commit.
            recovery: Whether they come from a recovery or a repair. A fenced ledger, and one in limbo, accepts them
                then, and they replace damaged entries.

        Returns:
            ``OK``: staged, or stored before with the same bytes. ``CONFLICT``: an entry is stored with other bytes;
            nothing was staged. ``FENCED``, ``LIMBO``: refused in this state. ``NO_SUCH_LEDGER``: unknown or deleted.
            ``REFUSED``: the sizes or entry headers do not match the run.

        Raises:
            StorageFullError: There is no space; a part of the entries may be staged.
            CorruptError: Stored entries are damaged, and ``recovery`` is False.
            StorageFailedError: A write failed before; the store accepts no more adds.

        Cost: 20 microseconds plus 0.1 per entry; one synced write more for a new extent if not ``durable``.
        """
        replica = self._replicas.get(ledger_id) or self.replica(ledger_id)
        if replica is None:
            return Status.NO_SUCH_LEDGER
        return replica.stage(run, durable=durable, recovery=recovery)

    def _staged(self, commit: Completion) -> None:
        with self._lock:
            if not self._commits or self._commits[-1] is not commit:
                self._commits.append(commit)

    def commit(self) -> None:
        """Make all staged entries durable, with one synced write.

        Raises:
            StorageFullError: There is no space. Nothing that was staged since the last call may be acknowledged.
            StorageFailedError: A write failed. The same holds, and the store accepts no more adds until it is reopened.
        """
        with self._lock:
            commits, self._commits = self._commits, []
        for commit in commits:
            self.store.log.wait(commit)
        for commit in commits:
            if commit.error is not None:
                raise without_frames(commit.error)

    def fence(self, ledger_id: int, header: LedgerHeader | None) -> None:
        """Fence a ledger, also an unknown one: accept adds from recoveries alone; durable on return (AB3, K8).

        The entries that were staged before the fence are durable, too. Fencing again does nothing.

        Raises:
            StorageError: The fence may not be durable; adds of writers are refused nevertheless.
        """
        while True:
            replica = self.known(ledger_id, header)
            with replica.lock:
                if replica.deleted:
                    continue  # deleted since ``known`` returned it: fence the ledger's next object
                replica.fenced = True
                if not replica.fences:
                    metadata = self._part_of(replica, LedgerType.FENCE, 0, 1)
                    replica.fences.append(self.store.create(metadata, when_full=True))
                return

    def move(self, ledger_id: int, tier: StorageHint) -> None:
        """Move this bookie's entries of a ledger to a tier; durable on return. Adds and reads continue meanwhile.

        Raises:
            StorageFullError: The tier has no space; entries that were not moved stay in their tier.
            CorruptError: Damaged entries stay in their tier; all others were moved.
            StorageFailedError: A write failed; the store accepts no more adds.
        """
        replica = self.replica(ledger_id)
        if replica is not None:
            self.store.move_all(sorted(replica.parts(), key=attrgetter("ledger_id")), tier)

    # ---- reading -------------------------------------------------------------------------------------------------

    def read(
        self,
        ledger_id: int,
        first: int,
        last: int,
        stride: int,
        bytes_max: int,
        *,
        checked: bool = False,
        recovery: bool = False,
    ) -> tuple[Status, EntryRun | None]:
        """Read entries ``first``, ``first + stride``, …, up to the first that is missing or does not fit.

        Args:
            ledger_id: The ledger.
            first: The first entry.
            last: The last entry wanted, inclusive.
            stride: Distance of the ids.
            bytes_max: The bytes wanted, about, at most; one entry is returned even if it is longer.
            checked: Verify record checksums, for re-replication; clients verify digests instead.
            recovery: Whether a recovery reads. After a durable fence, missing entries are denied to it even in limbo,
                unless durable entries may be missing (D6).

        Returns:
            ``OK`` and the entries, all or as many as fit. Otherwise the entries before the missing one, None if there
            are none, and the status of the missing one: ``NO_SUCH_ENTRY`` or ``NO_SUCH_LEDGER`` if it is certainly
            absent; ``UNKNOWN`` if it is not durable yet, cannot be read, or may have been lost (I17). Digests are not
            verified.

        Cost: 10 microseconds for one entry, 100 for a batch; entries are copied from the SSD tier alone.
        """
        replica = self._replicas.get(ledger_id) or self.replica(ledger_id)
        if replica is None:
            return Status.NO_SUCH_LEDGER, None
        return replica.read(first, last, stride, bytes_max, checked=checked, recovery=recovery)

    def lac_proof(self, ledger_id: int) -> tuple[int, View] | None:
        """Return the durable entry with the highest id; its header carries the highest last add confirmed.

        Returns:
            Its id and its bytes; None if no entry is here.

        Raises:
            CorruptError: The entry is stored and cannot be read.
        """
        replica = self.replica(ledger_id)
        if replica is None:
            return None
        with replica.lock:
            return replica.last_entry()

    def note_lac(self, ledger_id: int, lac: int, packet: bytes) -> None:
        """Keep the highest last add confirmed, and the packet of the highest that came with one, in memory alone.

        Args:
            ledger_id: The ledger; an unknown one is ignored.
            lac: The last add confirmed.
            packet: The writer's signed packet that proves it; empty if it came without one.
        """
        replica = self._replicas.get(ledger_id) or self.replica(ledger_id)
        if replica is not None:
            with replica.lock:
                replica.note_lac(lac, packet)

    def lac_packet(self, ledger_id: int) -> tuple[int, bytes] | None:
        """Return the highest last add confirmed that came with a packet, and that packet; None for none."""
        replica = self.replica(ledger_id)
        return None if replica is None else replica.packet

    # ---- the store -----------------------------------------------------------------------------------------------

    def _keep(self, replica: Replica, first: int, stride: int, replaces: bool, with_entries: bool) -> ReplicaExtent:
        """Create an extent, durable with its first entries or on return. The caller holds the replica's lock."""
        header = replica.header
        kind = LedgerType("") if header is None else header.stored_type
        metadata = self._part_of(replica, kind, first, stride, replaces=replaces)
        if with_entries:
            return ReplicaExtent(*self.store.stage_create(metadata), first, stride, replaces)
        return ReplicaExtent(self.store.create(metadata), None, first, stride, replaces)

    def _part_of(
        self, replica: Replica, kind: LedgerType, first: int, stride: int, *, replaces: bool = False
    ) -> LedgerMetadata:
        """Return the metadata of a new part of a replicated ledger: an extent, a fence or a limbo mark."""
        header = replica.header
        flags = WriteFlag.NONE if header is None else header.write_flags
        custom = {EXTENT_KEY: Extent(replica.ledger_id, first, stride, int(flags), replaces).encode()}
        if header is not None:
            custom |= header.keep()
        # Later parts go to the tier that the ledger was moved to.
        return self._metadata(kind, custom, header, replica.tier())

    def _metadata(
        self,
        kind: LedgerType,
        custom: Mapping[str, bytes],
        header: LedgerHeader | None = None,
        tier: StorageHint | None = None,
    ) -> LedgerMetadata:
        """Return the metadata of a new ledger of the store."""
        store = self.store
        hints = frozenset[StorageHint]() if header is None else header.storage_hints
        return LedgerMetadata(
            ledger_id=store.new_ledger_id(),
            ledger_type=kind,
            storage_hints=hints,
            digest_type=DigestType.NONE if header is None else header.digest_type,
            creation_time_ns=time.time_ns(),
            creation_sequence=store.new_creation_sequence(),
            custom_metadata=custom,
            tier=tier or next((tier for tier in StorageHint if tier in hints), store.config.default_tier),
            key_salt=b"",
            verifier=b"",
        )

    def health(self) -> ReplicasHealth:
        """Return the state of the disks. Cost: one ``statvfs`` per directory."""
        return ReplicasHealth.of(self.store)

    def close(self) -> None:
        """Commit what is staged, and unlock the directory.

        While a ledger is in limbo, the store is left unclean, because the next start has to find the limbo again.
        """
        self.store.close(clean=not self.in_limbo())


def _order_of(known: tuple[DirectoryIdentity, int]) -> tuple[int, int]:
    return known[0].boots, known[1]
