"""One replicated ledger as its handles see it: what is known of it here, and the checks of what bookies say."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pybk.digest import EntryDigest
from pybk.entry import ENTRY_HEADER_BYTES, EntryBatch, gather
from pybk.errors import DigestMismatchError, UnauthorizedError
from pybk.keys import LedgerKeys
from pybk.ledger import LedgerMetadata, LedgerState
from pybk.replication.entry_runs import length_at, whole
from pybk.replication.messages import EntryRun
from pybk.seal import LedgerSeal
from pybk.storage.descriptor import LedgerDescriptor

if TYPE_CHECKING:
    from pybk.ledger import Bookie
    from pybk.metadata.store import Watch


class RemoteLedger(LedgerDescriptor):
    """A ledger whose entries lie on bookies.

    Attributes:
        version: The metadata store's, of ``metadata``.
        description: What never changes about it, as bookies check it.
        on_followed: Called when somebody waits for it to go on.
        ends_are_sealed: Says whether the cluster takes sealed metadata.
        followed: What the followers of this ledger in this client share, once one of them waited.
        looked: Whether a follower has looked how far it is; from then on followers are told.
        newest: The newest entry that a bookie told of.
        entry_bytes: About how long its entries are, 0 if not known.

    Threads: as ``LedgerDescriptor``; metadata, version and LAC are moved forward by whoever drives the client.
    """

    __slots__ = (
        "_digest",
        "_keys",
        "description",
        "ends_are_sealed",
        "entry_bytes",
        "followed",
        "looked",
        "newest",
        "on_followed",
        "version",
    )

    def __init__(self, metadata: LedgerMetadata, version: int, description: bytes) -> None:
        last = metadata.last_entry_id if metadata.state is LedgerState.CLOSED else -1
        super().__init__(metadata, last_checked=last, last_add_confirmed=last, length=metadata.length)
        self.version = version
        self.description = description
        self.on_followed: Callable[[RemoteLedger], None] | None = None
        self.ends_are_sealed: Callable[[], bool] = lambda: False
        self.followed: FollowedLedger | None = None
        self.looked = False
        self.entry_bytes = 0
        self.newest: EntryRun | None = None
        self._keys: LedgerKeys | None = None
        self._digest: EntryDigest | None = None

    # ---- keys ----------------------------------------------------------------------------------------------------

    def unlock(self, keys: LedgerKeys, seal: LedgerSeal) -> None:
        """Have entries and the end checked and made with a seal, and rights shown with keys."""
        self._keys = keys
        self._digest = seal.digest
        self.sealer = seal

    def check_by(self, digest: EntryDigest) -> None:
        """Have entries checked with a digest, and no rights shown."""
        self._digest = digest

    @property
    def keys(self) -> LedgerKeys:
        """The ledger's keys."""
        if self._keys is None:
            raise UnauthorizedError(f"ledger {self.ledger_id} was not opened with its password")
        return self._keys

    @property
    def unlocked(self) -> bool:
        """Whether its keys are known here."""
        return self._keys is not None

    @property
    def digest(self) -> EntryDigest:
        """The digest of its entries."""
        if self._digest is None:
            raise UnauthorizedError(f"ledger {self.ledger_id} was not opened with its password")
        return self._digest

    @property
    def seals(self) -> bool:
        """Whether its end is to be sealed when it is closed here."""
        return self.sealer is not None and (self.metadata.key_format > 0 or self.ends_are_sealed())

    def sealed(self, closed: LedgerMetadata, last_entry: bytes | memoryview) -> LedgerMetadata:
        """Return the last metadata of the ledger with its seal, if its end is to be sealed.

        Args:
            closed: The metadata to be written.
            last_entry: The last entry, encoded and checked, or its header and digest.
        """
        return self.sealer.sealed(closed, last_entry) if self.sealer is not None and self.seals else closed

    @property
    def is_final(self) -> bool:
        """Whether it is closed, so that its last entry is known."""
        return self.metadata.state is LedgerState.CLOSED

    # ---- moving on -----------------------------------------------------------------------------------------------

    def renew(self, metadata: LedgerMetadata, version: int, *, anyway: bool = False) -> None:
        """Take newer metadata over; a closed ledger's last entry is final (D4: nobody reads beyond it).

        Args:
            metadata: The metadata.
            version: The metadata store's.
            anyway: Also if the ledger is closed: bookies or tier may have changed.
        """
        if version < self.version or (self.metadata.state is LedgerState.CLOSED and not anyway):
            return
        self.metadata = self.metadata_pushed = metadata
        self.version = version
        self.meter = None
        if metadata.state is LedgerState.CLOSED:
            self.last_durable = metadata.last_entry_id
            self.length_durable = metadata.length
            self.confirm(metadata.last_entry_id)
            self.wake_followers()

    def acknowledged(self, last: int, length: int) -> None:
        """Take note that the quorum holds all entries up to ``last``."""
        self.last_durable = last
        self.length_durable = length
        self.confirm(last)

    def written(self, run: EntryRun) -> None:
        """Take note of a bookie's last entry, sound and confirmed or not: who follows the ledger reads it next."""
        if run.first > self.last_durable and not self.is_final:
            self.last_durable = run.first
            self.length_durable = length_at(whole(run))
            self.newest = run

    def heard(self, lac: int, newest: EntryRun | None = None) -> None:
        """Take over the LAC, and the newest entry, that a bookie reported of this ledger, and wake its followers.

        Args:
            lac: The last add confirmed.
            newest: The entry, checked; None if none came.
        """
        if newest is not None:
            self.written(newest)
        self.confirm(lac)
        self.last_durable = max(self.last_durable, self.last_add_confirmed)

    def newest_from(self, entry_id: int) -> EntryBatch | None:
        """Return the newest entry that a bookie told of, if it is this one."""
        run = self.newest
        return None if run is None or run.first != entry_id else self.batch_of(run, whole(run))

    def when_advanced(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once at the next change, which bookies are asked to tell."""
        super().when_advanced(callback)
        if self.on_followed is not None:
            self.on_followed(self)

    # ---- what bookies say ----------------------------------------------------------------------------------------

    def batch_of(self, run: EntryRun, body: memoryview) -> EntryBatch:
        """Return a run as a batch over its bytes, unchecked."""
        return batch_of(run, body, self.ledger_id, self.digest.size)

    def sound_part(self, run: EntryRun, body: memoryview) -> EntryRun:
        """Return the entries of a run before the first that is not what its writer made."""
        digest = self._digest
        if digest is None:
            good = self._named_right(run, body)
            if good == len(run.sizes):
                return run
            return EntryRun(run.first, run.stride, run.sizes[:good], (body[: sum(run.sizes[:good])],))
        try:
            if len(run.sizes) == 1:
                digest.check(body, 0, run.sizes[0], run.first)
            else:
                digest.check_many(self.batch_of(run, body))
        except DigestMismatchError:
            start = good = 0
            for number, size in enumerate(run.sizes):
                try:
                    digest.check(body, start, start + size, run.first + number * run.stride)
                except DigestMismatchError:
                    break
                start += size
                good += 1
            return EntryRun(run.first, run.stride, run.sizes[:good], (body[:start],))
        return run

    def _named_right(self, run: EntryRun, body: memoryview) -> int:
        """Return how many entries say that they are this ledger's of these ids; more is not seen without a key."""
        sizes = np.array(run.sizes, np.int64)
        if not len(sizes) or int(sizes.min()) < ENTRY_HEADER_BYTES or int(sizes.sum()) != len(body):
            return 0
        ids = gather(body, np.cumsum(sizes) - sizes, 16).view(">i8").reshape(-1, 2)
        wanted = run.first + np.arange(len(sizes), dtype=np.int64) * run.stride
        wrong = np.flatnonzero((ids[:, 0] != self.ledger_id) | (ids[:, 1] != wanted))
        return int(wrong[0]) if len(wrong) else len(sizes)

    def lac_in(self, entry: memoryview, entry_id: int) -> int | None:
        """Return the last add confirmed that an entry proves; None if the entry is not what its writer made."""
        try:
            self.digest.check(entry, 0, len(entry), entry_id)
        except DigestMismatchError:
            return None
        return int.from_bytes(entry[16:24], "big", signed=True)


class FollowedLedger:
    """What the followers of one ledger in one client share.

    Attributes:
        ledger_id: The ledger.
        members: The ledger as each reader that ever followed it has it; guarded by the lock of ``Following``.
        watch: The watch of its metadata, None until the first follower has set it.
        reading: The long poll under way, or its pause; None if nobody waits.
        asked_ns: When its bookies were, or will be, asked.
        beyond: The LAC that it waits to be passed.
        ensemble: The bookies that it may ask.
        vain: Whether the last long poll ended without an entry.
        soon: How many of the last answers came too soon, one after the other.
        failing: Whether the last long poll failed.
    """

    __slots__ = (
        "__weakref__",
        "asked_ns",
        "beyond",
        "ensemble",
        "failing",
        "ledger_id",
        "members",
        "reading",
        "setting",
        "soon",
        "vain",
        "watch",
    )

    def __init__(self, ledger_id: int) -> None:
        self.ledger_id = ledger_id
        self.members: weakref.WeakSet[RemoteLedger] = weakref.WeakSet()
        self.setting = threading.Lock()
        self.watch: Watch | None = None
        self.reading: object | None = None
        self.asked_ns = 0
        self.beyond = -1
        self.ensemble: tuple[Bookie, ...] = ()
        self.vain = False
        self.soon = 0
        self.failing = False

    def waiting(self) -> list[RemoteLedger]:
        """Return the members that a follower waits for; the caller holds the lock of ``Following``."""
        return [member for member in self.members if member.advanced_callbacks]


def batch_of(run: EntryRun, body: memoryview, ledger_id: int, digest_bytes: int) -> EntryBatch:
    """Return a run as a batch over its bytes, unchecked."""
    sizes = np.array(run.sizes, np.int64)
    ids = run.first + np.arange(len(sizes), dtype=np.int64) * run.stride
    return EntryBatch(ledger_id, ids, body, sizes.cumsum() - sizes, sizes, digest_bytes)
