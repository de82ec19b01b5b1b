"""One replicated ledger at this bookie: its extents, its fence, its limbo, and its last add confirmed.

Theory of operation. An extent is a ledger of the store (``pybk.storage.format.extent``). A run that continues an extent
is appended to it; any other run begins a new one; damaged entries are replaced by an extent of their own.
``Replica.lock`` guards all state of a ledger, so an add and a fence of it are decided one after the other (K9). Staged
entries become readable when the store's commit is durable. A deferred add is acknowledged before the sync, so its
extent is created durably first: after a crash the extent shows that the ledger is in limbo (D6). If a commit with
deferred entries fails, ``note_commit_outcomes`` puts the ledger in limbo as well.
"""

from __future__ import annotations

import logging
import struct
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from pybk.bookie.extent_lookup import Extents, ReplicaExtent
from pybk.bookie.ledger_header import LedgerHeader
from pybk.bookie.replica_state import ReplicaState
from pybk.errors import CorruptError, NoSuchLedgerError, PybkError, StorageFullError
from pybk.flags import StorageHint
from pybk.ledger.digest import KEY_BYTES, DigestType, entry_digest
from pybk.ledger.entry import ENTRY_HEADER_BYTES, EntryBatch, gather
from pybk.replication.entry_runs import whole
from pybk.replication.messages import EntryRun, Status
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.format.extent import STRIDE_MAX
from pybk.storage.io.failures import storage_error
from pybk.storage.store import Store
from pybk.threads.group_commit import Completion
from pybk.transport.logging_limit import LogLimit

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

_LAC_AND_LENGTH: Final = struct.Struct(">qq")
_LAC_AT: Final = 16
_HEADER: Final = struct.Struct(">qqqq")
_ID_MAX: Final = (1 << 63) - 1
_VECTOR_MIN: Final = 16
"""The number of entries from which on numpy checks entry headers faster than a loop does."""

_COMPARED_BYTES: Final = 1 << 20
_new_tuple = tuple.__new__
_DIGEST_BYTES: Final = {kind: entry_digest(kind, 0, bytes(KEY_BYTES)).size for kind in DigestType}

View = bytes | memoryview


class Replica:
    """One replicated ledger at this bookie.

    There is one object per ledger, with one lock for its adds and its fence. Otherwise an add that was checked before
    the fence could be stored after it (K9, a bug of BookKeeper's bookie).

    Args:
        store: The bookie's store.
        ledger_id: The replicated ledger.
        header: The ledger's unchanging facts; None if the bookie has received a fence alone.
        keep: Creates an extent. Its arguments: this replica, the first entry id, the stride, whether the extent
            replaces damaged entries, and whether it becomes durable with its first entries (True) or on return.
        staged: Called with each commit in which entries were staged; ``Replicas.commit`` waits for it.
    """

    def __init__(
        self,
        store: Store,
        ledger_id: int,
        header: LedgerHeader | None,
        keep: Callable[[Replica, int, int, bool, bool], ReplicaExtent],
        staged: Callable[[Completion], None],
    ) -> None:
        self.ledger_id: Final = ledger_id
        self.header = header
        """Never changes once it is not None; set under the lock of ``Replicas``."""
        self.lock = threading.Lock()
        """Guards every field below, and orders the adds and the fence of the ledger (K9)."""
        self.extents = Extents()
        self.fences: list[LedgerDescriptor] = []
        """The store's ledgers that are fences. Not empty only if the fence is durable (AB3)."""
        self.marks: list[LedgerDescriptor] = []
        """The store's ledgers that are limbo marks, at most staged: ``Replicas.commit`` makes them durable."""
        self.fenced = False
        """Adds are accepted from recoveries alone. Set before the fence is durable, and never reset (AB2)."""
        self.limbo = False
        """Acknowledged entries may be missing (D6), so a missing entry is unknown, not absent."""
        self.gap = False
        """Durable entries or the fence may be missing as well. Implies ``limbo``."""
        self.deleted = False
        """Final: a later request for the ledger gets another object."""
        self.packet: tuple[int, bytes] | None = None
        """The highest last add confirmed with a packet, and the packet. Replaced whole, so reads need no lock."""
        self._store = store
        self._keep = keep
        self._staged = staged
        self._deferred: list[Completion] = []
        """Commits with deferred entries whose outcome was not noted yet; if one fails, the ledger is in limbo."""
        self._unborn: list[ReplicaExtent] = []
        """Extents whose creation is staged and was not found durable yet."""
        self._lac: int | None = None
        """See ``lac``; None until it was read from the last entry. Never goes down (I13)."""
        self._lac_unread = False
        """The last entry could not be read, so a higher last add confirmed may be in it."""

    # ---- adding --------------------------------------------------------------------------------------------------

    def stage(self, run: EntryRun, *, durable: bool, recovery: bool) -> Status:
        """See ``Replicas.stage``."""
        body = whole(run)
        ends = [0, *accumulate(run.sizes)]
        if not self._is_sound(run, body, ends):
            return Status.REFUSED
        with self.lock:
            if self._unborn or self._deferred:
                self.note_commit_outcomes()
            if self.deleted or self.header is None:
                return Status.NO_SUCH_LEDGER
            if not recovery and (self.fenced or self.limbo):
                return Status.FENCED if self.fenced else Status.LIMBO  # AB2; D6
            if (end := self.extents.end(run.first, run.stride)) is not None:
                self._append(run, body, ends, 0, len(run.sizes), durable=durable, extent=end)
                return Status.OK
            gaps: list[tuple[int, int]] = []
            damaged: list[int] = []
            at, count = 0, len(run.sizes)
            while at < count:
                entry_id = run.first + at * run.stride
                extent = self.extents.holder(entry_id)
                if extent is None:
                    n = self.extents.missing(entry_id, run.stride, count - at)
                    gaps.append((at, at + n))
                else:
                    n = self._shared(extent, entry_id, run.stride, count - at)
                    wrong = self._wrong(extent, run, body, ends, at, at + n)
                    if wrong is None:
                        return Status.CONFLICT
                    if wrong and not recovery:
                        raise self._damaged(run.first + wrong[0] * run.stride)
                    damaged += wrong
                at += n
            for low, high in gaps:
                growing = self.extents.growing(run.first + low * run.stride, run.stride)
                self._append(run, body, ends, low, high, durable=durable, extent=growing)
            for low, high in _stretches(damaged):
                self._append(run, body, ends, low, high, durable=durable, extent=None, replaces=True)
        return Status.OK

    def _is_sound(self, run: EntryRun, body: memoryview, ends: list[int]) -> bool:
        """Return whether the sizes and headers of a run's entries are valid for this ledger.

        Each header must carry this ledger's id, the entry id that follows from ``first`` and ``stride``, a last add
        confirmed below this id, and a length that is not negative.
        """
        header = self.header
        digest_bytes = 0 if header is None else _DIGEST_BYTES[header.digest_type]
        if run.first < 0 or not 1 <= run.stride <= STRIDE_MAX or not run.sizes or ends[-1] != len(body):
            return False
        if run.first + (len(run.sizes) - 1) * run.stride > _ID_MAX:
            return False
        if min(run.sizes) < ENTRY_HEADER_BYTES + digest_bytes:
            return False
        if len(run.sizes) < _VECTOR_MIN:
            entry_id = run.first
            for start in ends[:-1]:
                said_ledger, said_id, lac, length = _HEADER.unpack_from(body, start)
                if said_ledger != self.ledger_id or said_id != entry_id or not -1 <= lac < entry_id or length < 0:
                    return False
                entry_id += run.stride
            return True
        said = gather(body, np.array(ends[:-1], np.int64), 32).view(">i8").reshape(-1, 4)
        expected = np.arange(len(run.sizes), dtype=np.int64) * run.stride + run.first
        sound = (said[:, 0] == self.ledger_id) & (said[:, 1] == expected)
        sound &= (said[:, 2] >= -1) & (said[:, 2] < expected) & (said[:, 3] >= 0)
        return bool(sound.all())

    def _is_there(
        self, extent: ReplicaExtent, run: EntryRun, body: memoryview, ends: list[int], low: int, high: int
    ) -> bool:
        """Return whether an extent's entries equal entries ``low`` to ``high`` of a run, byte by byte (I14).

        The checksums of their records are verified, too: re-replication could not copy an intact entry out of a
        damaged record. The extent's entries are durable on return, and can be acknowledged.

        Raises:
            CorruptError: A record is damaged.
            StorageError: The entries cannot be made durable.
        """
        first = run.first + low * run.stride
        last = run.first + (high - 1) * run.stride
        if last > extent.last_durable:
            self._store.log.flush()
        if last > extent.last_durable:
            raise self._unsettled(extent, first)
        while low < high:
            batch = self._batch(extent, first, last, run.stride, _COMPARED_BYTES, checked=True)
            count = len(batch)
            if batch.sizes.tolist() != run.sizes[low : low + count].tolist():
                return False
            if b"".join(pieces(batch)) != body[ends[low] : ends[low + count]].tobytes():
                return False
            low += count
            first += count * run.stride
        return True

    def _shared(self, extent: ReplicaExtent, entry_id: int, stride: int, count: int) -> int:
        """Return how many of ``count`` entries, from one that an extent holds, can be read from it at once."""
        if stride % extent.stride:
            return 1
        return min(count, (self.extents.bound(extent, entry_id) - entry_id) // stride + 1)

    def _wrong(
        self, extent: ReplicaExtent, run: EntryRun, body: memoryview, ends: list[int], low: int, high: int
    ) -> list[int] | None:
        """Compare an extent's entries with entries ``low`` to ``high`` of a run.

        Returns:
            The indices in the run of the entries that are damaged in the extent; None if an intact entry has other
            bytes than the run's (I14).
        """
        with suppress(CorruptError):
            if self._is_there(extent, run, body, ends, low, high):
                return []
        wrong: list[int] = []
        at = low
        while at < high:
            upto = min(high, at + self._in_one_record(extent, run, at))
            try:
                if not self._is_there(extent, run, body, ends, at, upto):
                    return None
            except CorruptError:
                if upto > at + 1 and upto != min(high, at + self._in_one_record(extent, run, at)):
                    continue  # they were moved meanwhile, so they may have been several records, not all damaged
                wrong += range(at, upto)
            at = upto
        return wrong

    def _in_one_record(self, extent: ReplicaExtent, run: EntryRun, at: int) -> int:
        """Return how many entries of a run, from entry ``at`` on, the extent has in one record, at least one.

        A record is read whole or not at all, so these entries are all damaged or all intact.
        """
        number = (run.first + at * run.stride - extent.first) // extent.stride
        try:
            record = self._store.locations_from(extent.descriptor, number)[0]
        except CorruptError:
            return 1
        last = int(record["first"]) + (int(record["count"]) - 1) * int(record["stride"])
        return (last - number) // max(1, run.stride // extent.stride) + 1

    def _damaged(self, entry_id: int) -> CorruptError:
        return CorruptError(
            f"ledger {self.ledger_id} entry {entry_id} is damaged here; have it repaired from its other bookies"
        )

    def _append(
        self,
        run: EntryRun,
        body: memoryview,
        ends: list[int],
        low: int,
        high: int,
        *,
        durable: bool,
        extent: ReplicaExtent | None,
        replaces: bool = False,
    ) -> None:
        """Stage entries ``low`` to ``high`` of a run: missing ones, or, if ``replaces``, ones that are damaged here.

        They are appended to ``extent``; None begins a new one.
        """
        entry_id = run.first + low * run.stride
        if extent is None:
            # A deferred add is acknowledged before the sync, so its extent is created durably first: after a crash
            # the extent shows that the ledger is in limbo (D6).
            extent = self._keep(self, entry_id, run.stride, replaces, durable)
            self.extents.add(extent)
            if extent.created is not None:
                self._unborn.append(extent)
        descriptor = extent.descriptor
        start, end, count = ends[low], ends[high], high - low
        lac, length = _LAC_AND_LENGTH.unpack_from(body, ends[high - 1] + _LAC_AT)
        overhead = ENTRY_HEADER_BYTES + _DIGEST_BYTES[descriptor.metadata.digest_type]
        parts: list[View] = [b""] * (2 * count)
        parts[0] = body[start:end]
        with descriptor.lock:
            descriptor.account_staged()
            if extent.last_staged + run.stride != entry_id:
                raise self._unsettled(extent, entry_id)
            while True:
                commit = self._store.log.stage(
                    descriptor,
                    descriptor.last_pushed + 1,
                    run.sizes[low:high],
                    parts,
                    nbytes=end - start,
                    base_length=length - (end - start - overhead * count),
                    overhead=overhead,
                    wanted=durable,
                )
                if commit is not None:
                    break
                self._store.wait_for_admission()
            descriptor.last_pushed += count
            descriptor.length_pushed = length
        self._staged(commit)
        if not durable and commit not in self._deferred:
            self._deferred.append(commit)
        before = self.lac() if self._lac is None else self._lac
        self._lac = lac if lac > before else before

    def _unsettled(self, extent: ReplicaExtent, entry_id: int) -> PybkError:
        """Return the error for entries that were staged before in a commit that failed."""
        return extent.descriptor.error or StorageFullError(
            f"entries of ledger {self.ledger_id} at or before {entry_id} were staged, but there was no space for their "
            "commit; send them again once there is space"
        )

    def note_commit_outcomes(self) -> None:
        """Note the outcomes of commits that have ended since the last call, if any are awaited.

        The caller holds the lock.

        Extents whose creation failed are removed. If a commit with deferred entries failed, acknowledged entries are
        lost, so the ledger is in limbo (D6).
        """
        if self._unborn:
            for extent in self._unborn:
                if extent.created is not None and extent.created.error is not None:
                    self.extents.remove(extent)
                elif extent.descriptor.created:
                    extent.created = None
            self._unborn = [
                extent for extent in self._unborn if extent.created is not None and extent.created.error is None
            ]
        if self._deferred:
            if any(commit.error is not None for commit in self._deferred):
                self.limbo = True
            self._deferred = [commit for commit in self._deferred if not commit.done]

    def state(self) -> ReplicaState:
        """Return the state of the ledger; the caller holds the lock."""
        if self._unborn or self._deferred:
            self.note_commit_outcomes()
        lac = self.lac() if self._lac is None else self._lac
        return _new_tuple(ReplicaState, (self.fenced, self.limbo, self.gap, lac, self.header))

    def parts(self) -> list[LedgerDescriptor]:
        """Return the store's ledgers that are extents of this ledger and whose creation is durable."""
        with self.lock:
            self.note_commit_outcomes()
            return [extent.descriptor for extent in self.extents if extent.created is None]

    def tier(self) -> StorageHint | None:
        """Return the tier of the ledger's entries, None if it has none; the caller holds the lock."""
        return next((extent.descriptor.metadata.tier for extent in self.extents), None)

    # ---- reading -------------------------------------------------------------------------------------------------

    def read(
        self, first: int, last: int, stride: int, bytes_max: int, *, checked: bool, recovery: bool
    ) -> tuple[Status, EntryRun | None]:
        """See ``Replicas.read``."""
        if first == last and not checked:
            with self.lock:
                extent = None if self.deleted else self.extents.holder(first)
            if extent is not None and first <= extent.first + extent.descriptor.last_durable * extent.stride:
                try:
                    entry = self._one(extent, first)
                except PybkError:
                    entry = None  # what follows tries again, and reports it
                if entry is not None:
                    return Status.OK, _new_tuple(EntryRun, (first, stride, array("q", (len(entry),)), (entry,)))
        sizes = array("q")
        body: list[View] = []
        left, entry_id = bytes_max, first
        status = Status.OK
        while entry_id <= last and (not sizes or left >= sizes[-1]):
            found = self._durable_at(entry_id, recovery=recovery)
            if isinstance(found, Status):
                status = found
                break
            extent, upto = found
            try:
                read = self._checked_batch if checked else self._batch
                batch = read(extent, entry_id, min(last, upto), stride, left)
            except PybkError as error:
                status = self._unreadable(entry_id, error)
                break
            if sizes and int(batch.sizes[0]) > left:
                break
            sizes.frombytes(batch.sizes.tobytes())
            body += pieces(batch)
            left -= int(batch.sizes.sum())
            entry_id += len(batch) * stride
        return status, EntryRun(first, stride, sizes, body) if sizes else None

    def _durable_at(self, entry_id: int, *, recovery: bool) -> tuple[ReplicaExtent, int] | Status:
        """Return the extent to read an entry from, and the last id to read from it; or the status to reply (AB4)."""
        with self.lock:
            self.note_commit_outcomes()
            if self.deleted:
                return Status.NO_SUCH_LEDGER
            extent = self.extents.holder(entry_id)
            if extent is not None:
                return (
                    (extent, self.extents.bound(extent, entry_id))
                    if entry_id <= extent.last_durable
                    else Status.UNKNOWN
                )
            # D6: without a gap, lost entries were never forced, and after a durable fence they never will be. So a
            # recovery may count them as never acknowledged.
            denied = not self.limbo or (recovery and bool(self.fences) and not self.gap)
            return Status.NO_SUCH_ENTRY if denied else Status.UNKNOWN

    def _unreadable(self, entry_id: int, error: Exception) -> Status:
        if self.deleted:
            return Status.NO_SUCH_LEDGER
        logger.error("ledger %d entry %d is here and cannot be read: %s", self.ledger_id, entry_id, error)
        return Status.UNKNOWN

    def _checked_batch(self, extent: ReplicaExtent, first: int, last: int, stride: int, bytes_max: int) -> EntryBatch:
        """Read as ``_batch`` does, from records whose checksums match; if one is damaged, read the first entry alone.

        Raises:
            CorruptError: The first entry's record is damaged.
        """
        try:
            return self._batch(extent, first, last, stride, bytes_max, checked=True)
        except CorruptError:
            return self._batch(extent, first, first, stride, 1, checked=True)

    def _batch(
        self, extent: ReplicaExtent, first: int, last: int, stride: int, bytes_max: int, *, checked: bool = False
    ) -> EntryBatch:
        """Read durable entries ``first``, ``first + stride``, … from one extent.

        Args:
            extent: The extent; it has entry ``first``, durable.
            first: The first entry id.
            last: The last entry id wanted, inclusive.
            stride: Distance of the ids.
            bytes_max: About how many bytes are wanted at most.
            checked: Verify the checksums of the records; entries without digests are always verified so.

        Returns:
            At least one entry, and only one if the extent's stride does not divide ``stride``.
        """
        descriptor = extent.descriptor
        low = (first - extent.first) // extent.stride
        step, rest = divmod(stride, extent.stride)
        last = min(last, extent.last_durable)
        high = low if rest else low + (last - first) // stride * step
        size_max = max(bytes_max, 1) * max(step, 1)
        digest_bytes = 0 if checked else _DIGEST_BYTES[descriptor.metadata.digest_type]
        try:
            batch = self._store.read_batch(descriptor, low, high, size_max, digest_bytes=digest_bytes, direct=False)
        except OSError as error:
            raise storage_error(error, f"reading ledger {self.ledger_id} entry {first}") from error
        if step <= 1 or len(batch) == 1:
            return batch
        sizes = batch.sizes[::step]
        count = max(1, int(np.searchsorted(np.cumsum(sizes), bytes_max, side="right")))
        every = slice(0, count * step, step)
        return EntryBatch(
            batch.ledger_id,
            batch.entry_ids[every],
            batch.buffer,
            batch.offsets[every],
            batch.sizes[every],
            batch.digest_bytes,
        )

    def _one(self, extent: ReplicaExtent, entry_id: int) -> memoryview | None:
        """Return one durable entry from the mapped file, without a copy; None if it has to be read by ``_batch``."""
        number = (entry_id - extent.first) // extent.stride
        if extent.descriptor.metadata.digest_type is DigestType.NONE:
            return None  # without a digest only the record's checksum shows damage, and only batches verify it
        try:
            found = self._store.locate(extent.descriptor, number)
        except OSError as error:
            raise storage_error(error, f"reading ledger {self.ledger_id} entry {entry_id}") from error
        if found is None:
            return None
        buffer, start, end = found
        return buffer[start:end]

    # ---- last add confirmed --------------------------------------------------------------------------------------

    def last_entry(self, *, checked: bool = False) -> tuple[int, View] | None:
        """See ``Replicas.lac_proof``; ``checked`` verifies the record's checksum. The caller holds the lock."""
        extent = self.extents.last()
        if extent is None or self.deleted:
            return None
        entry_id = extent.last_durable
        newest = self.extents.holder(entry_id)
        if newest is not None and entry_id <= newest.last_durable:
            extent = newest
        entry = None if checked else self._one(extent, entry_id)
        if entry is None:
            entry = pieces(self._batch(extent, entry_id, entry_id, extent.stride, 1, checked=checked))[0]
        return entry_id, entry

    def lac(self) -> int:
        """Return the highest last add confirmed received so far, including those in entry headers; -1 for none.

        The caller holds the lock. Cost: the first call reads the last entry.
        """
        if self._lac is None:
            try:
                last = self.last_entry(checked=True)  # no client verifies a digest of this value
            except PybkError as error:
                logger.error("the last add confirmed of ledger %d cannot be read: %s", self.ledger_id, error)
                self._lac, self._lac_unread = -1, True
            else:
                self._lac = -1 if last is None else _LAC_AND_LENGTH.unpack_from(last[1], _LAC_AT)[0]
        return self._lac

    def known_lac(self) -> int | None:
        """See ``BookieStorage.known_lac``; the caller holds the lock."""
        return None if self.gap or self._lac_unread else self._lac

    def note_lac(self, lac: int, packet: bytes) -> None:
        """See ``Replicas.note_lac``; the caller holds the lock."""
        if packet and (self.packet is None or lac > self.packet[0]):
            self.packet = lac, packet
        before = self.lac() if self._lac is None else self._lac
        self._lac = lac if lac > before else before  # I13

    # ---- limbo and deleting --------------------------------------------------------------------------------------

    def lift(self) -> None:
        """End limbo by deleting its marks, durably on return; the caller holds the lock."""
        self._delete_all(self.marks)
        self.limbo = self.gap = False

    def delete(self) -> None:
        """Delete everything of the ledger, the fence and the limbo marks last; the caller holds the lock.

        The ledger is in limbo meanwhile, because no entry may be denied if the deletion fails half-way.
        """
        self._settle()
        self.limbo = self.gap = True
        self._delete_extents()
        self._delete_all(self.fences)
        self._delete_all(self.marks)
        self.deleted = True

    def drop_entries(self) -> None:
        """Delete all entries; a fence, limbo marks and a reported LAC (I13) stay. The caller holds the lock.

        Afterwards no record shows that entries were here, because the copy was surplus and does not count (SD5).
        """
        self._settle()
        self._delete_extents()

    def _settle(self) -> None:
        """Wait until the creation of each extent is durable or has failed."""
        for extent in self._unborn:
            if extent.created is not None:
                self._store.log.wait(extent.created)
        self.note_commit_outcomes()

    def _delete_extents(self) -> None:
        for extent in list(self.extents):
            self._delete(extent.descriptor)
            self.extents.remove(extent)

    def _delete_all(self, descriptors: list[LedgerDescriptor]) -> None:
        while descriptors:
            self._delete(descriptors[-1])
            descriptors.pop()

    def _delete(self, descriptor: LedgerDescriptor) -> None:
        with suppress(NoSuchLedgerError):  # an earlier attempt, which failed later, deleted it
            self._store.delete(descriptor)


def _stretches(places: list[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as half-open ranges of consecutive numbers."""
    cuts = [at for at in range(1, len(places)) if places[at] != places[at - 1] + 1]
    return [(places[low], places[high - 1] + 1) for low, high in pairwise([0, *cuts, len(places)]) if low < high]


def pieces(batch: EntryBatch) -> list[memoryview]:
    """Return the bytes of a batch's entries without a copy, adjacent entries as one piece."""
    starts = batch.offsets
    ends = starts + batch.sizes
    cuts = np.flatnonzero(starts[1:] != ends[:-1])
    if not len(cuts):
        return [batch.buffer[int(starts[0]) : int(ends[-1])]]
    begins = (int(starts[0]), *starts[cuts + 1].tolist())
    stops = (*ends[cuts].tolist(), int(ends[-1]))
    return [batch.buffer[begin:stop] for begin, stop in zip(begins, stops, strict=True)]
