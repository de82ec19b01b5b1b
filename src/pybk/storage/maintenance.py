"""What a store does in the background: checkpoints, files made ahead, moves, compaction, watching free space.

One job at a time. Every job keeps the order: data synced, catalog synced, index committed, and only then the old place dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from pybk.errors import PybkError, StorageFailedError, StorageFullError
from pybk.flags import StorageHint
from pybk.ledger import LedgerState
from pybk.storage.catalog import CatalogWriter
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.index_rows import FileRow, LedgerRow, Mark, entries_key
from pybk.storage.logfile import BLOCK_BYTES
from pybk.storage.mover import Mover
from pybk.storage.record import RECORD_HEADER_BYTES, Runs
from pybk.storage.volumes import COLD, ENTRIES, LOG

if TYPE_CHECKING:
    from pybk.storage.store import Store

logger = logging.getLogger(__name__)

_TICK_SECONDS: Final = 1.0
_POLICY_SECONDS: Final = 60.0


class Window(NamedTuple):
    """What one checkpoint takes over: ledgers as they were when the log stood still, and the log files left until then."""

    next_lsn: int
    descriptors: list[LedgerDescriptor]
    rows: list[LedgerRow]
    dropped: list[LedgerDescriptor]
    tails: list[Runs]
    log_files: list[FileRow]
    tail_bytes: int


class Maintenance:
    """Runs a store's background jobs.

    Threads: its own, and any thread that asks for a job; jobs exclude each other.
    """

    def __init__(self, store: Store, mark: Mark, catalog: CatalogWriter) -> None:
        self._store = store
        self._mark = mark
        self._catalog = catalog
        self._job = threading.Lock()
        self._wakeup = threading.Lock()  # an Event is Python code: an interrupt inside it would leave it locked for ever
        self._wakeup.acquire()
        self._progress = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._live = store.index.file_bytes_live()
        self._policy_due = time.monotonic() + _POLICY_SECONDS
        self.error: PybkError | None = None
        self.full: str | None = None

    # ---- thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, unless the configuration says that jobs run only when called."""
        if self._store.config.background:
            self._thread = threading.Thread(target=self._run, name="pybk-maintenance", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Have the thread look for work now."""
        if self._wakeup.locked():
            with suppress(RuntimeError):  # somebody else woke it meanwhile
                self._wakeup.release()

    def stop(self) -> None:
        """Stop the thread after its current job."""
        self._stopping = True
        self.wake()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Close what the jobs keep open."""
        self._catalog.close()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.tick()
            except StorageFullError as error:
                self._say(str(error))
            except (PybkError, OSError) as error:
                self._fail(error)
                return
            self._wakeup.acquire(timeout=_TICK_SECONDS)

    def _say(self, full: str | None) -> None:
        if full != self.full:
            logger.warning("%s", full or f"{self._store.volumes.root} has room again and takes appends")
            self.full = full

    def _fail(self, error: BaseException) -> None:
        logger.error("maintenance of %s failed, the store takes no more appends: %s", self._store.volumes.root, error)
        failed = (
            error
            if isinstance(error, PybkError)
            else StorageFailedError(
                f"maintenance of {self._store.volumes.root} failed ({error}); close the store, mend the device, open it again"
            )
        )
        self.error = failed
        self._store.log.fail(failed)
        self._store.log.kick()
        with self._progress:
            self._progress.notify_all()

    def tick(self) -> None:
        """Do what is due: space, files ahead, checkpoint, collection, policy."""
        store = self._store
        self.check_space()
        if self.full is None:
            store.supply.make_ahead(pause=True)
        store.supply.tidy()
        if store.tail_bytes * 2 >= store.config.unchecked_tail_bytes:
            self.checkpoint()
        elif self.full is not None or store.has_deleted():
            self.checkpoint()
            self.collect()
        if store.config.tier_policy is not None and time.monotonic() >= self._policy_due:
            self.apply_policy()
            self._policy_due = time.monotonic() + _POLICY_SECONDS

    def check_space(self) -> None:
        """Turn the store read-only, or back, by the free space of its devices."""
        store = self._store
        limit = store.config.free_bytes_low if self.full is None else store.config.free_bytes_ok
        for directory in store.volumes.directories:
            free = store.fs.free_bytes(directory.path)
            if free < limit:
                self._say(
                    f"{directory.path} has {free} bytes free, fewer than {limit}: the store takes no appends until there is "
                    "more; delete ledgers or free space"
                )
                return
        self._say(None)

    def wait_for_room(self) -> None:
        """Return when the unchecked tail is within its bound again; called by appends that found it full."""
        store = self._store
        if not store.config.background:
            self.checkpoint()
            return
        self.wake()
        with self._progress:
            while store.tail_bytes >= store.config.unchecked_tail_bytes and self.error is None and not self._stopping:
                self._progress.wait(0.1)
        if self.error is not None:
            raise self.error

    # ---- checkpoint ----------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Bring everything that is durable in the log so far into the index, and entries to their tiers.

        Raises:
            StorageFullError: A tier has no room; nothing was changed.
            OSError: Something else failed; the store should be closed.
        """
        with self._job:
            self._checkpoint()
        with self._progress:
            self._progress.notify_all()

    def _checkpoint(self) -> None:
        store = self._store
        window: list[Window] = []
        store.log.cut(lambda: window.append(self._snapshot()))
        taken = window[0]
        store.supply.tidy()
        if not (taken.descriptors or taken.dropped or taken.log_files):
            return
        placed, files = self._place(taken)
        dropped = [gone.ledger_id for gone in taken.dropped if store.index.ledger(gone.ledger_id) is not None]
        purge = self._purge_keys(dropped)
        kept = {row.file_id: row for row in files}
        mark = self._next_mark(taken)
        mark = self._write_catalog(taken.rows, dropped, mark, [*store.index.files().values(), *files])
        with store.index.update() as update:
            for ledger_id in dropped:
                self._count(update.drop_ledger(ledger_id), -1)
            for row, runs in zip(taken.rows, placed, strict=True):
                update.put_ledger(row)
                if len(runs):
                    update.append_runs(row.metadata.ledger_id, runs)
                    self._count(_bytes_by_file(runs), 1)
            for file_row in files:
                update.put_file(file_row)
            update.put_mark(mark)
        self._mark = mark
        for descriptor, row in zip(taken.descriptors, taken.rows, strict=True):
            descriptor.checkpointed(row.last_entry_id)
            if descriptor.metadata.version == row.metadata.version and not descriptor.deleted:
                descriptor.changed = False
        for descriptor in taken.dropped:
            descriptor.changed = False
            descriptor.checkpointed(descriptor.last_durable)
        store.clean([*taken.descriptors, *taken.dropped])
        self._purge(purge)
        for log_file in taken.log_files:
            if log_file.file_id not in kept:
                store.supply.forget(log_file.file_id)
                store.volumes.drop(log_file.file_id)
        store.tail_checked(taken.tail_bytes)
        store.metrics.add("checkpoints", 1)

    def _snapshot(self) -> Window:
        """See what the log holds; called while it stands still."""
        store = self._store
        descriptors, rows, tails, dropped = [], [], [], []
        for _, descriptor in sorted(store.take_dirty().items()):
            if descriptor.deleted:
                dropped.append(descriptor)
                continue
            descriptors.append(descriptor)
            tails.append(descriptor.tail_snapshot())
            rows.append(
                LedgerRow(
                    descriptor.metadata,
                    descriptor.last_durable,
                    descriptor.last_add_confirmed,
                    descriptor.length_durable,
                )
            )
        log_files = []
        for file_id, row in sorted(store.volumes.rows.items()):
            used = store.supply.used_bytes(file_id)
            if row.kind == LOG and used is not None and file_id >= self._mark.first_log_file_id:
                log_files.append(row._replace(bytes=used))
        return Window(store.log.durable_lsn + 1, descriptors, rows, dropped, tails, log_files, store.tail_bytes)

    def _next_mark(self, taken: Window) -> Mark:
        store = self._store
        last = max((row.file_id for row in taken.log_files), default=self._mark.first_log_file_id - 1)
        return self._mark._replace(
            first_log_file_id=last + 1,
            next_lsn=taken.next_lsn,
            durable_lsn=taken.next_lsn - 1,
            next_file_id=store.volumes.next_file_id,
            next_ledger_id=store.next_ledger_id,
            next_creation_sequence=store.next_creation_sequence,
        )

    def _write_catalog(
        self, rows: Iterable[LedgerRow], dropped: Iterable[int], mark: Mark, files: Iterable[FileRow]
    ) -> Mark:
        """Append to the catalog, or begin a new one when most of it is history; return the mark naming it."""
        known = {row.file_id: row for row in files}
        length = self._catalog.append(rows, dropped, mark, known.values())
        return mark._replace(catalog_bytes=length)

    def _place(self, taken: Window) -> tuple[list[Runs], list[FileRow]]:
        """Bring the entries of a window to their tiers.

        Returns:
            The runs of each ledger as they are to be indexed, and the files that are part of the store from now on.
        """
        sizes = [len(runs) for runs in taken.tails]
        if not sum(sizes):
            return taken.tails, []
        runs = np.concatenate(taken.tails)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        tiers = list(StorageHint)
        tier_of = np.array([tiers.index(row.metadata.tier) for row in taken.rows])[owner]
        stays = self._staying(runs, tier_of == tiers.index(StorageHint.NVME), taken.log_files)
        movers: dict[StorageHint, Mover] = {}
        placed: dict[int, list[Runs]] = defaultdict(list)
        files = [row for row in taken.log_files if row.file_id in stays]
        try:
            for number, row in enumerate(taken.rows):
                mine = taken.tails[number]
                if not len(mine):
                    continue
                tier = row.metadata.tier
                for part in _by_file(mine):
                    if tier is StorageHint.NVME and int(part["file"][0]) in stays:
                        placed[number].append(part)
                        continue
                    mover = movers.get(tier)
                    if mover is None:
                        mover = movers[tier] = Mover(self._store, self._store.store_id, tier)
                    placed[number].append(mover.move(row.metadata.ledger_id, part))
            for mover in movers.values():
                files += mover.finish()
        except BaseException:
            for mover in movers.values():
                mover.abort()
            raise
        kept = {row.file_id for row in files}
        result = [np.concatenate(placed[number]) if number in placed else runs[:0] for number in range(len(sizes))]
        damaged = {int(file_id) for part in result for file_id in np.unique(part["file"])} - kept
        files += [row for row in taken.log_files if row.file_id in damaged]
        return result, files

    def _staying(
        self, runs: Runs, nvme: np.ndarray[tuple[int], np.dtype[np.bool_]], log_files: list[FileRow]
    ) -> set[int]:
        """Return the log files that are filled well enough by NVMe ledgers to stay as they are."""
        stays = set()
        for row in log_files:
            mine = nvme & (runs["file"] == row.file_id)
            live = int(runs["body"][mine].astype(np.int64).sum())
            if live and live >= self._store.config.fill_ratio * max(row.bytes - BLOCK_BYTES, 1):
                stays.add(row.file_id)
        return stays

    # ---- moves and collection ------------------------------------------------------------------------------------

    def move(self, descriptor: LedgerDescriptor, tier: StorageHint) -> None:
        """Bring all entries of a ledger, up to those durable now, to a tier."""
        with self._job:
            self._checkpoint()
            if descriptor.deleted or descriptor.last_checked < 0:
                return
            kinds = self._store.volumes.rows
            parts = []
            for page in self._store.index.pages(descriptor.ledger_id):
                elsewhere = np.array([kinds[int(file_id)].tier != tier.value for file_id in page["file"]], np.bool_)
                parts += _by_file(page[elsewhere])
            self._relocate([(descriptor.ledger_id, parts)], tier)

    def _relocate(self, work: list[tuple[int, list[Runs]]], tier: StorageHint) -> None:
        """Move runs of ledgers to a tier and tell the index; the caller holds the job lock."""
        store = self._store
        mover = Mover(store, store.store_id, tier)
        moved: list[tuple[int, Runs, Runs]] = []
        try:
            for ledger_id, parts in work:
                moved += [(ledger_id, part, mover.move(ledger_id, part)) for part in parts]
            files = mover.finish()
        except BaseException:
            mover.abort()
            raise
        moved = [(ledger_id, old, new) for ledger_id, old, new in moved if len(old)]
        if not moved:
            return
        mark = self._mark._replace(next_file_id=store.volumes.next_file_id)
        mark = self._write_catalog([], [], mark, [*store.index.files().values(), *files])
        purge: dict[int, list[bytes]] = defaultdict(list)
        with store.index.update() as update:
            for ledger_id, old, new in moved:
                update.replace_runs(ledger_id, old, new)
                self._count(_bytes_by_file(old), -1)
                self._count(_bytes_by_file(new), 1)
                _keys_of(store, ledger_id, old, new, purge)
            for row in files:
                update.put_file(row)
            update.put_mark(mark)
        self._mark = mark
        for ledger_id in {ledger_id for ledger_id, _, _ in moved}:
            store.moved(ledger_id)
        self._purge(purge)
        self._drop_dead()

    def collect(self) -> None:
        """Free the space of deleted ledgers: drop files without live entries, pack those that are mostly dead."""
        with self._job:
            self._drop_dead()
            for file_id, row in sorted(self._store.index.files().items()):
                live = self._live.get(file_id, 0)
                if row.kind != ENTRIES and live < self._store.config.fill_ratio * (row.bytes - BLOCK_BYTES):
                    self._compact(row)

    def _compact(self, row: FileRow) -> None:
        store = self._store
        work: dict[StorageHint, list[tuple[int, list[Runs]]]] = defaultdict(list)
        for ledger_id, _ in list(store.index.file_ledgers(row.file_id)):
            parts = [page[page["file"] == row.file_id] for page in store.index.pages(ledger_id)]
            parts = [part for part in parts if len(part)]
            work[StorageHint(row.tier)].append((ledger_id, parts))
        for tier, ledgers in work.items():
            self._relocate(ledgers, tier)
        store.metrics.add("compactions", 1)

    def _drop_dead(self) -> None:
        """Forget and unlink files in which nothing lives."""
        store = self._store
        dead = [
            row for row in store.index.files().values() if row.kind in (LOG, COLD) and not self._live.get(row.file_id)
        ]
        if not dead:
            return
        gone = {row.file_id for row in dead}
        rows = [row for row in store.index.files().values() if row.file_id not in gone]
        mark = self._write_catalog([], [], self._mark, rows)
        with store.index.update() as update:
            for row in dead:
                update.drop_file(row.file_id)
            update.put_mark(mark)
        self._mark = mark
        for row in dead:
            self._live.pop(row.file_id, None)
            store.supply.forget(row.file_id)
            store.volumes.drop(row.file_id)

    def _purge_keys(self, ledger_ids: Iterable[int]) -> dict[int, list[bytes]]:
        """Return what deleted ledgers keep in the SSD tier, by file."""
        store = self._store
        purge: dict[int, list[bytes]] = defaultdict(list)
        for ledger_id in ledger_ids:
            for page in store.index.pages(ledger_id):
                _keys_of(store, ledger_id, page, page[:0], purge)
        return purge

    def _purge(self, keys: dict[int, list[bytes]]) -> None:
        for file_id, mine in keys.items():
            with self._store.entries[file_id].write() as transaction:
                for key in mine:
                    transaction.delete(key)

    def _count(self, by_file: dict[int, int], sign: int) -> None:
        for file_id, size in by_file.items():
            self._live[file_id] = self._live.get(file_id, 0) + sign * size

    def apply_policy(self) -> None:
        """Move the closed ledgers that the policy says are due."""
        policy = self._store.config.tier_policy
        if policy is None:
            return
        before_ns = time.time_ns() - int(policy.min_age_seconds * 1e9)
        for metadata in self._store.ledgers():
            if self._stopping:
                return
            due = metadata.state is LedgerState.CLOSED and metadata.creation_time_ns <= before_ns
            if due and metadata.tier is not policy.target and metadata.length >= policy.min_bytes:
                self._store.move(self._store.descriptor(metadata.ledger_id), policy.target)


def _by_file(runs: Runs) -> list[Runs]:
    """Split sorted runs where the file changes."""
    if not len(runs):
        return []
    return np.split(runs, np.flatnonzero(np.diff(runs["file"].astype(np.int64))) + 1)


def _bytes_by_file(runs: Runs) -> dict[int, int]:
    """Return the record bytes of runs by file."""
    files, inverse = np.unique(runs["file"], return_inverse=True)
    sums = np.bincount(inverse, weights=runs["body"].astype(np.float64) + RECORD_HEADER_BYTES)
    return dict(zip(files.tolist(), sums.astype(np.int64).tolist(), strict=True))


def _keys_of(store: Store, ledger_id: int, old: Runs, new: Runs, keys: dict[int, list[bytes]]) -> None:
    """Collect the SSD keys of ``old`` that ``new`` does not use."""
    used = {(int(run["file"]), int(run["first"])) for run in new}
    for run in old:
        file_id, first = int(run["file"]), int(run["first"])
        if file_id in store.entries and (file_id, first) not in used:
            keys[file_id].append(entries_key(ledger_id, first))
