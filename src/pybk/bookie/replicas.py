"""All replicas of a bookie, in a store of its own.

Limbo is the state of a ledger that may lack entries which this bookie acknowledged (D6). It begins at an unclean
start for ledgers with deferred entries, when a commit with deferred entries fails, when a deletion fails half-way,
and for all ledgers after a durable loss (``put_in_limbo``); ``gap`` then says that durable entries or the fence may
be lost, too. It ends by ``end_limbo``, after ``client/limbo_repair.py`` filled up the ended fragments. A closed
ledger with a gap is fenced again before its mark goes (I12). While a ledger is in limbo, a close leaves the store
unclean, so that limbo outlives a restart.

A replica is one or more extents, each a ledger of the store. A ledger of type ``.fence`` is a fence, and one of type
``.limbo`` a mark that something durable may be missing. See ``replica.py`` for one ledger.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final

from pybk.bookie.directory_identity import CLUSTER_KEY, IDENTITY_KEY, DirectoryIdentity
from pybk.bookie.extents import ReplicaExtent
from pybk.bookie.ledger_header import LedgerHeader, names_bookie_record
from pybk.bookie.replica import Replica, View
from pybk.bookie.replica_state import ReplicasHealth, ReplicaState
from pybk.config import StoreConfig
from pybk.digest import DigestType
from pybk.errors import CookieError, CorruptError, UsageError
from pybk.flags import LedgerType, StorageHint, WriteFlag
from pybk.group_commit import Completion
from pybk.ledger import INSTANCE_BYTES, LedgerMetadata
from pybk.metrics import Metrics
from pybk.replication.messages import EntryRun, Status
from pybk.storage.directories import OpenEnvironment
from pybk.storage.format.extent import EXTENT_KEY, Extent
from pybk.storage.io.filesystem import FileSystem
from pybk.storage.store import Store, open_environment


class Replicas:
    """The replicas of one bookie.

    Threads: any may read and ask. One stages and commits: ``commit`` makes all durable that was staged since
        the last one.
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
        """Open a bookie's directory, making it if there is none.

        After a ``salvage``, call ``doubt`` for all ledgers that the bookie may have held, before it answers anything,
        and then ``store.keep_salvage``.

        Raises:
            UsageError: ``tiers`` is malformed, or a path is no directory.
            StoreLockedError: Another process has it open.
            CookieError: A directory is not what it should be, or the store is no bookie's.
            CorruptError: Something that was durable is damaged or missing.

        Cost: 30 microseconds per extent, besides that of opening the store.
        """
        store = Store.open(
            root, config=config, tiers=tiers, metrics=metrics, fs=fs, environment=environment, salvage=salvage
        )
        try:
            return cls(store)
        except BaseException:
            store.close(clean=False)
            raise

    def __init__(self, store: Store) -> None:
        self.store: Final = store
        self._lock = threading.Lock()
        self._stored: dict[int, array[int]] = {}
        self._replicas: dict[int, Replica] = {}
        self._limbo: set[int] = set()
        self._commits: list[Completion] = []
        self._identities: list[tuple[DirectoryIdentity, int]] = []
        for metadata in store.ledgers():
            self._take(metadata)

    def _take(self, metadata: LedgerMetadata) -> None:
        """Note a ledger of the store for what it is."""
        extent = Extent.of(metadata)
        if extent is None and metadata.ledger_type == LedgerType.BOOKIE:
            self._identities.append((DirectoryIdentity.of(metadata), metadata.ledger_id))
            return
        if extent is None:
            raise CookieError(
                f"{self.store.volumes.root} holds ledger {metadata.ledger_id}, which is no bookie's: the directory is "
                "that of an embedded store; name another for the bookie"
            )
        self._stored.setdefault(extent.ledger_id, array("q")).append(metadata.ledger_id)
        kind = self._kind_of(metadata)
        deferred = extent.write_flags & WriteFlag.DEFERRED_FORCE and kind != LedgerType.FENCE
        if kind == LedgerType.LIMBO or (deferred and not self.store.began_clean):
            self._limbo.add(extent.ledger_id)

    def _kind_of(self, metadata: LedgerMetadata) -> LedgerType:
        """Return what a part of a replicated ledger is: ``FENCE``, ``LIMBO``, or the type of an extent.

        Older versions stored extents under whatever type the ledger's description named, also one of a bookie's own
        records. Such a part is an extent if it has entries; a fence and a mark of limbo have none.
        """
        kind = metadata.ledger_type
        if not kind.is_bookie_record or not names_bookie_record(metadata):
            return kind
        if kind == LedgerType.BOOKIE or self.store.descriptor(metadata.ledger_id).last_durable >= 0:
            return LedgerType("")
        return kind

    # ---- whose directory -----------------------------------------------------------------------------------------

    @property
    def identity(self) -> DirectoryIdentity | None:
        """Whose directory it is, None for a new one."""
        return max(self._identities, key=lambda known: known[0].boots)[0] if self._identities else None

    def check_identity(self, cluster_id: bytes, bookie_id: str, instance: bytes, boots: int) -> None:
        """Check that the directory is the one that the metadata store records.

        Args:
            cluster_id: The cluster.
            bookie_id: The bookie.
            instance: Its instance there.
            boots: The number of its last start there; it is no matter to who has salvaged, and doubts everything.

        Raises:
            CookieError: It is a new one, another's, or an older one; names the remedy.
        """
        expected = DirectoryIdentity(cluster_id, bookie_id, instance, boots, 0)
        identity = self.identity
        if identity is None:
            raise CookieError(
                f"{self.store.volumes.root} is no bookie's yet, but the metadata store knows {expected}: mount or name "
                "the directory that it had, or choose another name for a new bookie"
            )
        if self.store.salvage is not None:
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
        """Note that the bookie starts, and bind a new directory to it; durable on return.

        Call it after ``check``, and record the number in the metadata store before serving.

        Args:
            cluster_id: The cluster.
            bookie_id: The bookie.
            instance: Its instance.
            boots: The last start that the metadata store records.
            moved: The directory may be another than at the last start, because it was moved and not copied.
            about: The payload of the cluster's own metadata value, to be kept as a copy.

        Returns:
            The number of this start, above all before it.

        Raises:
            UsageError: The instance has another size.
            CookieError: The directory is another's, or a copy.
        """
        inode = self.store.fs.inode_number(self.store.volumes.root)
        if len(instance) != INSTANCE_BYTES:
            raise UsageError(f"an instance has {INSTANCE_BYTES} random bytes, not {len(instance)}")
        before = self.identity
        if before is not None:
            self.check_identity(cluster_id, bookie_id, instance, boots)
            if not moved:
                before.check_place(inode, self.store.volumes.root)
            boots = max(boots, before.boots)
        identity = DirectoryIdentity(cluster_id, bookie_id, instance, boots + 1, inode)
        known = self._identities
        custom = {IDENTITY_KEY: identity.encode(), CLUSTER_KEY: about}
        made = self.store.create(self._metadata(LedgerType.BOOKIE, custom), when_full=True)
        self._identities = [(identity, made.ledger_id)]
        for _, ledger_id in known:
            self.store.delete(self.store.descriptor(ledger_id))
        return identity.boots

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def ledgers(self) -> list[int]:
        """Return the replicated ledgers of which there is anything here, ascending."""
        with self._lock:
            return sorted(self._stored.keys() | self._replicas.keys())

    def in_limbo(self) -> list[int]:
        """Return the replicated ledgers in limbo, ascending."""
        with self._lock:
            loaded = [replica.ledger_id for replica in self._replicas.values() if replica.limbo]
            return sorted(self._limbo.union(loaded))

    def state(self, ledger_id: int) -> ReplicaState | None:
        """Return what is known of a ledger; None if it is not known."""
        replica = self._replica(ledger_id)
        if replica is None:
            return None
        with replica.lock:
            replica.note_commit_outcomes()
            return ReplicaState(replica.fenced, replica.limbo, replica.gap, replica.lac(), replica.header)

    def create(self, ledger_id: int, header: LedgerHeader) -> None:
        """Make a ledger known, so that entries can be staged; nothing is stored before they are."""
        self._known(ledger_id, header)

    def _known(self, ledger_id: int, header: LedgerHeader | None) -> Replica:
        with self._lock:
            replica = self._load(ledger_id)
            if replica is None:
                replica = self._new(ledger_id, header)
            if replica.header is None:
                replica.header = header
        return replica

    def _new(self, ledger_id: int, header: LedgerHeader | None) -> Replica:
        replica = Replica(self.store, ledger_id, header, self._keep, self._staged)
        self._replicas[ledger_id] = replica
        return replica

    def _replica(self, ledger_id: int) -> Replica | None:
        """Return the one object of a ledger, None if nothing is known of it."""
        with self._lock:
            return self._load(ledger_id)

    def _load(self, ledger_id: int) -> Replica | None:
        """Do what ``_replica`` does; the caller holds the lock."""
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
                    f"ledger {metadata.ledger_id} was an extent when the bookie started, and is none now"
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
        return replica

    def put_in_limbo(self, ledgers: Mapping[int, LedgerHeader | None]) -> None:
        """Put ledgers in limbo, of which something durable may be missing; durable on return, with one synced write.

        Args:
            ledgers: Their ids, and what is known of each; there may be nothing else of them here.

        Raises:
            StorageError: It is not known to be durable.
        """
        for ledger_id, header in ledgers.items():
            replica = self._known(ledger_id, header)
            with replica.lock:
                replica.limbo = replica.gap = True
                if not replica.marks:
                    mark = self._part_of(replica, LedgerType.LIMBO, 0, 1)
                    descriptor, commit = self.store.stage_create(mark, when_full=True)
                    replica.marks.append(descriptor)
                    self._staged(commit)
        self.commit()

    def end_limbo(self, ledger_id: int, *, closed: bool) -> None:
        """End a ledger's limbo, as what it lacked was brought from its peers: what is not here is denied again.

        A fence may be among what was lost. It is made again if the ledger is closed (see ``docs/replication.md``).

        Durability: What was not durable may be lost by the next end by accident, which leads into limbo again.

        Raises:
            StorageError: It stays in limbo, also because that it is not is not known to be durable.
        """
        replica = self._replica(ledger_id)
        if replica is not None:
            if closed and replica.gap:
                self.fence(ledger_id, replica.header)
            with replica.lock:
                replica.lift()
        with self._lock:
            self._limbo.discard(ledger_id)

    def delete(self, ledger_id: int) -> None:
        """Delete everything of a ledger, its fence included; durable on return. Unknown ones are deleted already.

        Raises:
            StorageError: Something may be left; until it is deleted again, the ledger is in limbo.
        """
        replica = self._replica(ledger_id)
        if replica is None:
            return
        with replica.lock:
            if replica.deleted:
                return
            replica.delete()
            with self._lock:
                self._replicas.pop(ledger_id, None)
                self._stored.pop(ledger_id, None)
                self._limbo.discard(ledger_id)

    # ---- adding --------------------------------------------------------------------------------------------------

    def stage(self, ledger_id: int, run: EntryRun, durable: bool, *, recovery: bool = False) -> Status:
        """Stage entries; durable when ``commit`` has returned.

        Entries that are here already are compared. A run that begins where an extent ends is appended to it, and
        otherwise begins another.

        Args:
            ledger_id: The ledger, made known by ``create``.
            run: The entries.
            durable: False if they may stay buffered until something else is committed.
            recovery: They are of a recovery or a repair: taken by fenced ledgers and by those in limbo, and in the
                place of entries that are damaged here.

        Returns:
            ``OK``: staged, or here with the same bytes. ``CONFLICT``: other bytes are here, nothing was staged.
            ``FENCED``, ``LIMBO``: not taken. ``NO_SUCH_LEDGER``: not made known, or deleted. ``REFUSED``: the bytes are
            not the entries that the run says.

        Raises:
            StorageFullError: There is no space; entries may have been staged in part.
            CorruptError: Entries are here, damaged, and ``recovery`` is False.
            StorageFailedError: The store takes nothing more.

        Cost: 20 microseconds and 0.1 per entry; one synced write more for a new extent if not ``durable``.
        """
        replica = self._replica(ledger_id)
        if replica is None:
            return Status.NO_SUCH_LEDGER
        return replica.stage(run, durable=durable, recovery=recovery)

    def _staged(self, commit: Completion) -> None:
        with self._lock:
            if not self._commits or self._commits[-1] is not commit:
                self._commits.append(commit)

    def commit(self) -> None:
        """Make everything staged so far durable, with one synced write.

        Raises:
            StorageFullError: There is no space: of what was staged since the last call, nothing may be acknowledged.
            StorageFailedError: Writing failed, which is final: the same, and the store takes nothing more.
        """
        with self._lock:
            commits, self._commits = self._commits, []
        for commit in commits:
            self.store.log.wait(commit)
        for commit in commits:
            if commit.error is not None:
                raise commit.error.with_traceback(None)

    def fence(self, ledger_id: int, header: LedgerHeader | None) -> None:
        """Take no more adds for a ledger but those of recoveries; durable on return, also for an unknown one (AB3, K8).

        Everything staged before is durable, too. Fencing again does nothing.

        Raises:
            StorageError: It is not known to be durable; adds are refused all the same.
        """
        while True:
            replica = self._known(ledger_id, header)
            with replica.lock:
                if replica.deleted:
                    continue  # just now: the next object of this ledger is another
                replica.fenced = True
                if not replica.fences:
                    metadata = self._part_of(replica, LedgerType.FENCE, 0, 1)
                    replica.fences.append(self.store.create(metadata, when_full=True))
                return

    def move(self, ledger_id: int, tier: StorageHint) -> None:
        """Bring what is here of a ledger to a tier; done, and durable, on return. Adds and reads continue meanwhile.

        Raises:
            StorageFullError: The tier has no space; what was not moved stays where it is.
            CorruptError: Damaged entries stay where they are; everything else was moved.
            StorageFailedError: The store takes nothing more.
        """
        replica = self._replica(ledger_id)
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
        """Read entries ``first``, ``first + stride``, …, as far as they are here without a gap and fit.

        Args:
            ledger_id: The ledger.
            first: The first entry.
            last: The last entry wanted, inclusive.
            stride: Distance of the ids.
            bytes_max: About how many bytes are wanted at most; one entry is returned even if longer.
            checked: Return only what has its checksum; without it the reader finds out by the digests.
            recovery: A recovery asks: behind a durable fence, what may be lost but was never forced is denied (D6).

        Returns:
            ``OK`` and the entries: all, or as many as fit. Else why the entry after those returned is missing:
            ``NO_SUCH_ENTRY`` and ``NO_SUCH_LEDGER`` if that is known, ``UNKNOWN`` if it is here and not durable yet, or
            cannot be read, or might have been lost (I17). None for no entry. Digests are not checked.

        Cost: 10 microseconds for one entry, 100 for a batch; entries are copied from the SSD tier alone.
        """
        replica = self._replica(ledger_id)
        if replica is None:
            return Status.NO_SUCH_LEDGER, None
        return replica.read(first, last, stride, bytes_max, checked=checked, recovery=recovery)

    def lac_proof(self, ledger_id: int) -> tuple[int, View] | None:
        """Return the durable entry with the highest id, whose header carries the highest last add confirmed.

        Returns:
            Its id and its bytes; None if no entry is here.

        Raises:
            CorruptError: It is here and cannot be read.
        """
        replica = self._replica(ledger_id)
        if replica is None:
            return None
        with replica.lock:
            return replica.last_entry()

    def note_lac(self, ledger_id: int, lac: int, packet: bytes) -> None:
        """Keep a last add confirmed, in memory alone, and of the packets the one of the highest.

        Args:
            ledger_id: The ledger; nothing is kept for an unknown one.
            lac: The last add confirmed.
            packet: What proves it, empty if nothing came with it.
        """
        replica = self._replica(ledger_id)
        if replica is not None:
            with replica.lock:
                replica.note_lac(lac, packet)

    def lac_packet(self, ledger_id: int) -> tuple[int, bytes] | None:
        """Return the highest last add confirmed that a packet came with, and that packet; None for none."""
        replica = self._replica(ledger_id)
        return None if replica is None else replica.packet

    # ---- the store -----------------------------------------------------------------------------------------------

    def _keep(self, replica: Replica, first: int, stride: int, replaces: bool, with_entries: bool) -> ReplicaExtent:
        """Make an extent: durable with its first entries, or on return. The caller holds the replica's lock."""
        header = replica.header
        kind = LedgerType("") if header is None else header.stored_type
        metadata = self._part_of(replica, kind, first, stride, replaces=replaces)
        if with_entries:
            return ReplicaExtent(*self.store.stage_create(metadata), first, stride, replaces)
        return ReplicaExtent(self.store.create(metadata), None, first, stride, replaces)

    def _part_of(
        self, replica: Replica, kind: LedgerType, first: int, stride: int, *, replaces: bool = False
    ) -> LedgerMetadata:
        """Return the metadata of a new ledger of the store that is a part of a replicated one."""
        header = replica.header
        flags = WriteFlag.NONE if header is None else header.write_flags
        custom = {EXTENT_KEY: Extent(replica.ledger_id, first, stride, int(flags), replaces).encode()}
        if header is not None:
            custom |= header.keep()
        # What comes later goes where the rest was moved.
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
        """Return the state of the disks."""
        return ReplicasHealth.of(self.store)

    def close(self) -> None:
        """Commit what is staged and give the directory free. With ledgers in limbo, the next start is unclean, too."""
        self.store.close(clean=not self.in_limbo())
