"""One replicated ledger in a client: its metadata and positions as the client knows them, and checks of replies."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pybk.errors import DigestMismatchError, UnauthorizedError
from pybk.ledger.digest import EntryDigest
from pybk.ledger.entry import ENTRY_HEADER_BYTES, EntryBatch, gather
from pybk.ledger.keys import LedgerKeys, LedgerSeal
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.replication.entry_runs import length_at, whole
from pybk.replication.messages import EntryRun
from pybk.storage.descriptor import LedgerDescriptor

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.metadata.store import Watch


class RemoteLedger(LedgerDescriptor):
    """A ledger whose entries are on bookies.

    It has two roles. A handle (``LedgerWriter``, ``LedgerReader``) uses it as its descriptor. The driver uses it to
    address requests and to check replies, with the digest and the keys that ``unlock`` gave it.

    Attributes:
        version: The version of ``metadata`` in the metadata store.
        description: The encoded immutable facts of the ledger, by which bookies check rights.
        on_followed: Called with the ledger when a follower begins to wait for its next change.
        ends_are_sealed: Returns whether the cluster's feature level allows sealed metadata.
        followed: The state that all followers of this ledger in this client share; None until one has waited. It is
            owned here, so it lives as long as a followed ledger.
        looked: Whether a follower has read the LAC and the metadata once; afterwards ``Followers`` reports changes.
        as_member: Whether its bookies are asked by a member without its password, to recover it.
        newest: The newest entry that a bookie returned with its LAC, sound, maybe not confirmed yet.
        entry_bytes: The average length of the entries read last; 0 if none were read.
        away: The members that were away when this client created the ledger; empty otherwise.

    Threads: as ``LedgerDescriptor``; the leader, which runs the driver, moves metadata, version and LAC forward.
    """

    __slots__ = (
        "_digest",
        "_keys",
        "as_member",
        "away",
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
        super().__init__(metadata, last_indexed=last, last_add_confirmed=last, length=metadata.length)
        self.version = version
        self.description = description
        self.on_followed: Callable[[RemoteLedger], None] | None = None
        self.ends_are_sealed: Callable[[], bool] = lambda: False
        self.followed: FollowedLedger | None = None
        self.looked = False
        self.entry_bytes = 0
        self.newest: EntryRun | None = None
        self.as_member = False
        self.away: frozenset[Bookie] = frozenset()
        self._keys: LedgerKeys | None = None
        self._digest: EntryDigest | None = None

    # ---- keys ----------------------------------------------------------------------------------------------------

    def unlock(self, keys: LedgerKeys, seal: LedgerSeal) -> None:
        """Set the ledger's keys: requests prove rights with them, and the seal checks entries and seals the end."""
        self._keys = keys
        self._digest = seal.digest
        self.sealer = seal

    def check_by(self, digest: EntryDigest) -> None:
        """Set the digest that checks entries, without keys: requests prove no rights."""
        self._digest = digest

    @property
    def keys(self) -> LedgerKeys:
        """The ledger's keys.

        Raises:
            UnauthorizedError: The ledger was not opened with its password.
        """
        if self._keys is None:
            raise UnauthorizedError(f"ledger {self.ledger_id} was not opened with its password")
        return self._keys

    @property
    def unlocked(self) -> bool:
        """True if ``unlock`` was called."""
        return self._keys is not None

    @property
    def digest(self) -> EntryDigest:
        """The digest that checks its entries.

        Raises:
            UnauthorizedError: The ledger was not opened with its password.
        """
        if self._digest is None:
            raise UnauthorizedError(f"ledger {self.ledger_id} was not opened with its password")
        return self._digest

    @property
    def seals(self) -> bool:
        """True if this client seals its end when it closes the ledger."""
        return self.sealer is not None and (self.metadata.key_format > 0 or self.ends_are_sealed())

    def sealed(self, closed: LedgerMetadata, last_entry: bytes | memoryview) -> LedgerMetadata:
        """Return closed metadata with the ledger's seal; unchanged if the ledger is not sealed.

        Args:
            closed: The metadata to be written.
            last_entry: The last entry, encoded and verified; its header and digest suffice.
        """
        return self.sealer.sealed(closed, last_entry) if self.sealer is not None and self.seals else closed

    @property
    def is_final(self) -> bool:
        """True if it is closed; its last entry never changes then."""
        return self.metadata.state is LedgerState.CLOSED

    # ---- progress ------------------------------------------------------------------------------------------------

    def renew(self, metadata: LedgerMetadata, version: int, *, anyway: bool = False) -> None:
        """Adopt newer metadata; once a ledger is closed, its last entry is final (D4: no reader goes beyond it).

        Args:
            metadata: The metadata.
            version: Their version in the metadata store; metadata older than those known here are ignored.
            anyway: Adopt them even if the ledger is closed, because its bookies or its tier may have changed.
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
        """Confirm all entries up to ``last``: an ack quorum has them."""
        self.last_durable = last
        self.length_durable = length
        self.confirm(last)

    def note_newest(self, run: EntryRun) -> None:
        """Keep a bookie's last entry, which is sound but maybe not confirmed: followers will read it next."""
        if run.first > self.last_durable and not self.is_final:
            self.last_durable = run.first
            self.length_durable = length_at(whole(run))
            self.newest = run

    def advance(self, lac: int, newest: EntryRun | None = None) -> None:
        """Adopt the LAC and the newest entry that a bookie reported, and wake the followers if the LAC rose.

        Args:
            lac: The last add confirmed.
            newest: The bookie's last entry, verified; None if it sent none.
        """
        if newest is not None:
            self.note_newest(newest)
        self.confirm(lac)
        self.last_durable = max(self.last_durable, self.last_add_confirmed)

    def newest_from(self, entry_id: int) -> EntryBatch | None:
        """Return the newest entry as a batch if it is this one, which saves a read; else None."""
        run = self.newest
        return None if run is None or run.first != entry_id else self.batch_of(run, whole(run))

    def when_advanced(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once at the next change of LAC or state; bookies are asked to report it."""
        super().when_advanced(callback)
        if self.on_followed is not None:
            self.on_followed(self)

    # ---- checks of replies ---------------------------------------------------------------------------------------

    def batch_of(self, run: EntryRun, body: memoryview) -> EntryBatch:
        """Return a run as a batch over its bytes; nothing is verified."""
        return batch_of(run, body, self.ledger_id, self.digest.size)

    def sound_part(self, run: EntryRun, body: memoryview) -> EntryRun:
        """Return the entries of a run before the first that fails its digest.

        Without a digest, as in re-replication, only the entries' ledger and entry ids are compared.
        """
        digest = self._digest
        if digest is None:
            good = self._count_named_correctly(run, body)
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

    def _count_named_correctly(self, run: EntryRun, body: memoryview) -> int:
        """Return how many of the first entries name this ledger and the ids of the run."""
        sizes = np.array(run.sizes, np.int64)
        if not len(sizes) or int(sizes.min()) < ENTRY_HEADER_BYTES or int(sizes.sum()) != len(body):
            return 0
        ids = gather(body, np.cumsum(sizes) - sizes, 16).view(">i8").reshape(-1, 2)
        wanted = run.first + np.arange(len(sizes), dtype=np.int64) * run.stride
        wrong = np.flatnonzero((ids[:, 0] != self.ledger_id) | (ids[:, 1] != wanted))
        return int(wrong[0]) if len(wrong) else len(sizes)

    def lac_in(self, entry: memoryview, entry_id: int) -> int | None:
        """Return the last add confirmed in an entry's header, which its digest proves; None if the digest is wrong."""
        try:
            self.digest.check(entry, 0, len(entry), entry_id)
        except DigestMismatchError:
            return None
        return int.from_bytes(entry[16:24], "big", signed=True)


class FollowedLedger:
    """The state that all followers of one ledger in one client share; see ``pybk.client.follower``.

    Attributes:
        ledger_id: The ledger.
        members: The descriptors of all readers that ever followed the ledger and are still open; guarded by the lock
            of ``Followers``.
        setting: Held to set ``watch``.
        watch: The watch of the ledger's metadata; None until the first follower has set it.
        reading: The conversation of the long poll, which may be in its pause; None if no poll is under way. Guarded by
            the lock of ``Followers``.
        asked_ns: The time at which that poll was, or will be, sent.
        beyond: The LAC that must be exceeded for the poll to end.
        ensemble: The bookies that the poll may ask.
        was_empty: Whether the last poll ended without a new entry.
        soon: The number of replies in a row, up to the last, that came too soon.
        failing: Whether a warning was logged since the last poll that worked.
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
        "was_empty",
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
        self.was_empty = False
        self.soon = 0
        self.failing = False

    def waiting(self) -> list[RemoteLedger]:
        """Return the members on which a follower waits; the caller holds the lock of ``Followers``."""
        return [member for member in self.members if member.advanced_callbacks]


def batch_of(run: EntryRun, body: memoryview, ledger_id: int, digest_bytes: int) -> EntryBatch:
    """Return a run as a batch over its bytes; nothing is verified."""
    sizes = np.array(run.sizes, np.int64)
    ids = run.first + np.arange(len(sizes), dtype=np.int64) * run.stride
    return EntryBatch(ledger_id, ids, body, sizes.cumsum() - sizes, sizes, digest_bytes)
