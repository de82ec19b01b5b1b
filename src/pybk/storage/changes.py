"""Changes of ledgers as a whole: create, close, fence, force, delete, move. Each is a log record first."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from pybk.errors import (
    CorruptError,
    DigestMismatchError,
    IllegalOperationError,
    LedgerExistsError,
    LedgerFencedError,
    NoSuchLedgerError,
    PybkError,
    StorageError,
    StorageFullError,
    StorageRefusedError,
)
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.ledger import LedgerMetadata, LedgerState
from pybk.seal import names
from pybk.storage.compaction.mover import Unmoved, UnmovedError
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.format.record import RecordKind, encode_control
from pybk.storage.log.commit import Commit
from pybk.storage.log.log import Log
from pybk.storage.store_reader import StoreReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pybk.storage.compaction.scheduler import Scheduler
    from pybk.storage.compaction.tier_policy import TierQueue

logger = logging.getLogger(__name__)

MOVED_LEDGERS_MAX: Final = 1024
MOVED_BYTES_MAX: Final = 64 << 20
"""So much is moved together, with one commit of the index; it is in memory 16 MiB at a time."""

CHANGED_LEDGERS_MAX: Final = 8192
"""Ledgers changed since the last checkpoint that are kept in memory before the next one is begun."""


class ChangingView(StoreReader):
    """What changing ledgers needs of a live store.

    Threads: any.
    """

    log: Log
    scheduler: Scheduler
    tier_queue: TierQueue | None
    next_ledger_id: int
    next_creation_sequence: int
    _ids: threading.Lock
    _tail_added: int
    _tail_checked: int

    def new_ledger_id(self) -> int:
        """Return a ledger id that was never given before."""
        with self._ids:
            ledger_id = self.next_ledger_id
            self.next_ledger_id += 1
        return ledger_id

    def new_creation_sequence(self) -> int:
        """Return the next creation sequence."""
        with self._ids:
            sequence = self.next_creation_sequence
            self.next_creation_sequence += 1
        return sequence

    def create(self, metadata: LedgerMetadata, *, when_full: bool = False) -> LedgerDescriptor:
        """Create a ledger; durable on return.

        Args:
            metadata: The ledger's.
            when_full: Create it even while the store takes no entries for want of space.

        Raises:
            LedgerExistsError: The id is taken.
            StorageFullError: There is no room.
        """
        if not when_full:
            self.check_space()
        descriptor = self._register(metadata)
        try:
            self._change(descriptor, metadata)
        except BaseException:
            with self._lock:
                descriptor.deleted = True
                self._descriptors.pop(metadata.ledger_id, None)
            raise
        return descriptor

    def stage_create(self, metadata: LedgerMetadata, *, when_full: bool = False) -> tuple[LedgerDescriptor, Commit]:
        """Stage the creation of a ledger in the commit that is forming, which may hold entries of it, too.

        If that commit fails, the ledger never was: nothing can be staged of it, and nothing may be asked of it.

        Args:
            metadata: The ledger's.
            when_full: Create it even while the store takes no entries for want of space.

        Raises:
            LedgerExistsError: The id is taken.
            StorageFullError: There is no room.
        """
        if not when_full:
            self.check_space()
        descriptor = self._register(metadata)
        descriptor.created = False
        commit = self._stage_change(descriptor, metadata, creates=descriptor)
        assert commit is not None, "nothing was said that might have changed"
        return descriptor, commit

    def _register(self, metadata: LedgerMetadata) -> LedgerDescriptor:
        """Make the descriptor of a ledger to be created, and take its id."""
        descriptor = LedgerDescriptor(metadata)
        with self._lock:
            found = self._find(metadata.ledger_id)
            if found is not None:
                raise LedgerExistsError(
                    f"ledger {metadata.ledger_id} exists; choose another id, or none to be given one"
                )
            self._descriptors[metadata.ledger_id] = descriptor
        with self._ids:
            self.next_ledger_id = max(self.next_ledger_id, metadata.ledger_id + 1)
        return descriptor

    def _change(self, descriptor: LedgerDescriptor, metadata: LedgerMetadata) -> None:
        """Make new metadata of a ledger durable and then visible."""
        self._finish_change(descriptor, self._stage_change(descriptor, metadata))

    def _stage_change(
        self,
        descriptor: LedgerDescriptor,
        metadata: LedgerMetadata,
        *,
        unless_changed: tuple[LedgerDescriptor, PybkError | None] | None = None,
        creates: LedgerDescriptor | None = None,
    ) -> Commit | None:
        """Stage new metadata; the caller holds ``descriptor.lock``, or is the only one who knows the descriptor."""
        body = metadata.encode()

        def encode(lsn: int) -> bytes:
            return encode_control(RecordKind.LEDGER, metadata.ledger_id, metadata.version, body, lsn=lsn)

        apply = partial(self._changed, descriptor, metadata)
        commit = self.log.stage_control(encode, apply, unless_changed=unless_changed, creates=creates)
        if commit is not None:
            descriptor.metadata_pushed = metadata
        return commit

    def _finish_change(self, descriptor: LedgerDescriptor, commit: Commit | None) -> None:
        """Wait for a change that was staged."""
        if commit is None:
            return
        self.log.wait(commit)
        if commit.error is not None:
            descriptor.metadata_pushed = descriptor.metadata
            raise commit.error.with_traceback(None)

    def _changed(self, descriptor: LedgerDescriptor, metadata: LedgerMetadata) -> None:
        """Apply a durable metadata change; called by the log's driver, maybe twice."""
        descriptor.metadata = metadata
        if self.tier_queue is not None:
            self.tier_queue.changed(metadata)
        descriptor.created = True
        descriptor.meter = None
        descriptor.changed = True
        self._note_change(descriptor)
        if metadata.state is LedgerState.CLOSED:
            descriptor.confirm(metadata.last_entry_id)
        descriptor.wake_followers()

    def _note_change(self, descriptor: LedgerDescriptor) -> None:
        with self._lock:
            self._dirty[descriptor.ledger_id] = descriptor
            count = len(self._dirty)
        if count % CHANGED_LEDGERS_MAX == 0:
            self.scheduler.wake()

    def has_deleted(self) -> bool:
        """Tell whether a deleted ledger waits for the next checkpoint."""
        with self._lock:
            return any(descriptor.deleted for descriptor in self._dirty.values())

    @property
    def tail_bytes(self) -> int:
        """Bytes of log that the next open would have to read."""
        return self._tail_added - self._tail_checked

    def wants_checkpoint(self) -> bool:
        """Tell whether the tail is long, or many ledgers changed, or one waits to be removed."""
        return (
            self.tail_bytes * 2 >= self.config.unchecked_tail_bytes
            or len(self._dirty) >= CHANGED_LEDGERS_MAX
            or self.has_deleted()
        )

    def close_ledger(self, descriptor: LedgerDescriptor, *, fence: bool) -> None:
        """Close a ledger behind everything staged so far; durable on return. A closed ledger stays as it is.

        The end is sealed if a handle has opened the ledger with its password.

        Args:
            descriptor: The ledger.
            fence: Refuse whoever may still be writing: its appends raise ``LedgerFencedError`` from now on.
        """
        commit = None
        while commit is None:
            with descriptor.lock:
                metadata = descriptor.metadata_pushed
                if metadata.state is LedgerState.CLOSED:
                    if descriptor.metadata is not metadata:
                        self.log.flush()
                    return
                if descriptor.deleted:
                    raise NoSuchLedgerError(f"ledger {descriptor.ledger_id} was deleted")
                if self.log.error is not None:
                    raise self.log.error.with_traceback(None)
                commit = self._stage_close(descriptor, fence=fence)
        self._finish_change(descriptor, commit)

    def _stage_close(self, descriptor: LedgerDescriptor, *, fence: bool) -> Commit | None:
        """Stage the metadata of a ledger that ends with what was pushed, or with what is durable if pushing failed."""
        if fence and isinstance(descriptor.error, StorageRefusedError):  # which may pass: then the writer would go on
            # Nothing more can be staged, so what is durable then is all.
            self.log.flush(kept=descriptor.deferred)
            descriptor.restart()
        failed = descriptor.error
        if fence and failed is None:
            descriptor.error = failed = LedgerFencedError(
                f"ledger {descriptor.ledger_id} was opened for recovery by another handle; stop writing to it"
            )
        if failed is None or isinstance(failed, LedgerFencedError):
            descriptor.account_staged()
            last, length = descriptor.last_pushed, descriptor.length_pushed
        else:
            # Nothing more can be staged, so what is durable then is all.
            self.log.flush(kept=descriptor.deferred)
            last, length = descriptor.last_durable, descriptor.length_durable
        metadata = descriptor.metadata_pushed
        closed = self._sealed(descriptor, metadata.closed_at(last, length))
        return self._stage_change(descriptor, closed, unless_changed=(descriptor, failed))

    def _sealed(self, descriptor: LedgerDescriptor, closed: LedgerMetadata) -> LedgerMetadata:
        """Return a ledger's last metadata with its seal, if it can be made here; the caller holds the ledger's lock."""
        sealer = descriptor.sealer
        if sealer is None or not (closed.key_format or self.feature_level >= FeatureLevel.SEALS):
            return closed
        if names(descriptor.last_prefix, closed):
            return sealer.sealed(closed, descriptor.last_prefix)
        last = closed.last_entry_id
        if last > descriptor.last_durable:
            self.log.flush()  # an entry can be read only once it is durable
        try:
            batch = self.read_batch(descriptor, last, last, 1, digest_bytes=sealer.digest.size, direct=False)
            sealer.digest.check_many(batch)
        except (CorruptError, DigestMismatchError) as error:
            # Refusing to close would make the entries before it unreadable, too.
            logger.warning("ledger %d is closed without a seal, because of its last entry: %s", closed.ledger_id, error)
            return closed
        return sealer.sealed(closed, batch.buffer[int(batch.offsets[0]) :])

    def reseal(self, descriptor: LedgerDescriptor, sealed: LedgerMetadata) -> None:
        """Make the seal of a closed ledger durable.

        Args:
            descriptor: The ledger.
            sealed: Its metadata with the seal, as it was when the ledger was checked.

        Raises:
            IllegalOperationError: Its end is another by now.
            NoSuchLedgerError: It was deleted.
        """
        with descriptor.lock:
            if descriptor.deleted:
                raise NoSuchLedgerError(f"ledger {descriptor.ledger_id} was deleted")
            metadata = descriptor.metadata_pushed
            wanted = metadata.with_seal(sealed.seal, sealed.last_digest)
            if replace(wanted, tier=sealed.tier, version=sealed.version) != sealed:
                raise IllegalOperationError(
                    f"ledger {descriptor.ledger_id} was changed while it was checked; try again"
                )
            commit = self._stage_change(descriptor, replace(wanted, version=metadata.version + 1))
        self._finish_change(descriptor, commit)

    def force(self, descriptor: LedgerDescriptor) -> int:
        """Make everything pushed so far durable and confirmed; return the last add confirmed."""
        with descriptor.lock:
            if descriptor.error is not None:
                raise descriptor.error.with_traceback(None)
            descriptor.account_staged()
            last = descriptor.last_pushed
            if last <= descriptor.last_add_confirmed:
                return descriptor.last_add_confirmed

            def encode(lsn: int) -> bytes:
                return encode_control(RecordKind.FORCE, descriptor.ledger_id, last, lsn=lsn)

            apply = partial(self._forced, descriptor, last)
            commit = self.log.stage_control(encode, apply, unless_changed=(descriptor, None))
        if commit is None:
            return self.force(descriptor)
        self._finish_change(descriptor, commit)
        return last

    def _forced(self, descriptor: LedgerDescriptor, last: int) -> None:
        """Apply a durable force; called by the log's driver, maybe twice.

        The next checkpoint must write the ledger's row, because its mark goes past the record that says so.
        """
        descriptor.confirm(last)
        descriptor.changed = True
        self._note_change(descriptor)

    def delete(self, descriptor: LedgerDescriptor) -> None:
        """Delete a ledger; durable on return, its space comes back with the next checkpoint."""

        def encode(lsn: int) -> bytes:
            return encode_control(RecordKind.DELETE, descriptor.ledger_id, 0, lsn=lsn)

        with descriptor.lock:
            if descriptor.deleted:
                raise NoSuchLedgerError(f"ledger {descriptor.ledger_id} was deleted")
            before, gone = descriptor.error, NoSuchLedgerError(f"ledger {descriptor.ledger_id} was deleted")
            descriptor.error = gone
            try:
                commit = self.log.stage_control(encode, partial(self._deleted, descriptor))
            except BaseException:
                descriptor.error = before
                raise
        try:
            self._finish_change(descriptor, commit)
        except StorageError as error:
            with descriptor.lock:
                # Not if it is another: then entries of the ledger failed with it, and more would leave a gap.
                if descriptor.error is gone and not descriptor.deleted:
                    descriptor.error = before
            if isinstance(error, StorageFullError):
                raise StorageFullError(
                    f"ledger {descriptor.ledger_id} was not deleted, for a delete is a record in the log: {error}; "
                    "free some space by other means first, and keep some with StoreConfig(free_bytes_low=...)"
                ) from error
            raise
        self.scheduler.wake()

    def _deleted(self, descriptor: LedgerDescriptor) -> None:
        descriptor.deleted = True
        descriptor.changed = True
        self._note_change(descriptor)
        descriptor.wake_followers()

    def move(self, descriptor: LedgerDescriptor, tier: StorageHint) -> None:
        """Move a ledger to another tier; durable on return. The ledger takes appends and reads during the move.

        Raises as ``move_all`` does.
        """
        if descriptor.deleted:
            raise NoSuchLedgerError(f"ledger {descriptor.ledger_id} was deleted")
        self.move_all([descriptor], tier)

    def move_all(self, descriptors: Iterable[LedgerDescriptor], tier: StorageHint) -> None:
        """Move ledgers to another tier, in ascending order of their ids; those that were deleted are left out.

        Durable on return. The ledgers take appends and reads during the move. Up to ``MOVED_LEDGERS_MAX`` ledgers or
        ``MOVED_BYTES_MAX`` bytes form a group, which shares files of the tier, one commit of the log, and one of
        catalog and index.

        Args:
            descriptors: The ledgers; only those of one group are held at a time.
            tier: The tier.

        Raises:
            StorageRefusedError: There was no room, descriptor or memory for a group now; groups before it were moved.
                Call it again for the same ledgers.
            UnmovedError: Damaged records stay where they are; everything else was moved. The metadata of their ledgers
                name the target, to which a ledger belongs from the moment its move is asked for. Call it again for the
                same ledgers and tier once the files are restored: it moves what lies elsewhere.
        """
        unmoved: list[Unmoved] = []
        with self.scheduler.moving():
            for group in _groups(descriptors):
                try:
                    self._move_group(group, tier)
                except UnmovedError as error:
                    unmoved += error.unmoved
        if unmoved:
            raise UnmovedError(unmoved, tier)

    def _move_group(self, descriptors: Sequence[LedgerDescriptor], tier: StorageHint) -> None:
        staged = []
        for descriptor in descriptors:
            with descriptor.lock:
                metadata = descriptor.metadata_pushed
                if not descriptor.deleted and metadata.tier is not tier:
                    moved = replace(metadata, tier=tier, version=metadata.version + 1)
                    staged.append((descriptor, self._stage_change(descriptor, moved)))
        for descriptor, commit in staged:
            self._finish_change(descriptor, commit)
        self.scheduler.move(descriptors, tier)

    def check_space(self) -> None:
        """Raise StorageFullError while the store is read-only for want of space."""
        full = self.scheduler.full
        if full is not None:
            raise StorageFullError(full)


def _groups(descriptors: Iterable[LedgerDescriptor]) -> Iterator[list[LedgerDescriptor]]:
    """Yield ledgers in groups that are moved together."""
    group: list[LedgerDescriptor] = []
    nbytes = 0
    for descriptor in descriptors:
        group.append(descriptor)
        nbytes += descriptor.length_durable
        if len(group) >= MOVED_LEDGERS_MAX or nbytes >= MOVED_BYTES_MAX:
            yield group
            group, nbytes = [], 0
    if group:
        yield group
