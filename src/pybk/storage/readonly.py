"""A read-only view of a store that another process writes: reads durable entries, without writing or locking."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Self

from pybk.config import StoreConfig
from pybk.errors import CookieError, CorruptError, NoSuchEntryError, NoSuchLedgerError
from pybk.flags import StorageHint
from pybk.ledger.entry import EntryBatch
from pybk.metrics import Metrics
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.directories import INDEX, OpenEnvironment, checked_mark, find_cookie, store_directories
from pybk.storage.format.cookie import Cookie
from pybk.storage.format.index_rows import CheckpointMark
from pybk.storage.format.log_file import BLOCK_BYTES, Watermark, decode_file_header
from pybk.storage.index.index import Index
from pybk.storage.io.filesystem import FileSystem, OsFileSystem
from pybk.storage.io.lmdb_environment import LMDB_FILE, Environment, LmdbEnvironment
from pybk.storage.log.recovery import OpenLogFile, apply_commit, scan_commits
from pybk.storage.store_cut import CutTail, StoreCut, merged, rows_of
from pybk.storage.store_reader import StoreReader
from pybk.storage.tiers import LOG
from pybk.storage.volumes import Volumes
from pybk.threads import start_thread

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 16

_COMMIT_LOOK_SECONDS: Final = 0.02
"""The interval at which followers look for new commits while commits come."""

_REST_LOOK_SECONDS: Final = 0.25
"""The longest pause: looks become rarer while no commit comes, so that waiting costs next to nothing."""

_LOOKS_AT_REST: Final = 16
"""The pause before the next look is this fraction of the time for which no commit has come."""

_INDEX_LOOK_SECONDS: Final = 10.0
"""The interval of looks at the index, too, which may have changed while the watermark stays the same."""
_STEP_BYTES: Final = 256 << 10


def open_environment_read_only(path: str) -> Environment:
    """Open an LMDB environment that another process may be writing.

    Raises:
        CorruptError: It is damaged, or its file is not there.
    """
    file = os.path.join(path, LMDB_FILE)
    if not os.path.exists(file) or not os.path.getsize(file):
        raise CorruptError(
            f"{file} is missing or empty; run `pybk store rebuild-index` on the store, with --accept-loss to continue "
            "without the entries that it lists as missing",
            path=path,
        )
    return LmdbEnvironment(path, read_only=True)


class ReadOnlyStore(StoreReader):
    """A store read by a process that does not own it; any number may do so.

    It knows the index, and follows the log from the index's mark up to the durable watermark. While anything follows a
    ledger, one thread looks at the watermark for all followers: every 20 ms while commits come, and every 250 ms when
    none came for 4 seconds. No system call reports that a mapped file was changed, so it has to look.

    Threads: any.
    """

    @classmethod
    def open(
        cls,
        root: str,
        *,
        config: StoreConfig,
        tiers: Mapping[StorageHint, str | Sequence[str]] | None = None,
        fs: FileSystem | None = None,
        environment: OpenEnvironment = open_environment_read_only,
    ) -> Self:
        """Open a store that exists.

        Raises:
            CookieError: There is no store, or a directory is not the store's.
            CorruptError: The index is damaged.
        """
        fs = fs or OsFileSystem()
        root = os.path.abspath(root)
        cookie = find_cookie(fs, root, tiers)
        if cookie is None:
            raise CookieError(f"there is no store at {root}: check the path; opening it for writing makes one")
        volumes = Volumes(fs, root, store_directories(fs, root, cookie, tiers))
        index_environment = environment(os.path.join(volumes.tier_paths(StorageHint.SSD)[0], INDEX))
        entries: dict[int, Environment] = {}
        try:
            index = Index(index_environment)
            mark = checked_mark(index, cookie, root)
            for row in index.files().values():
                volumes.add(row)
                if volumes.tier_of(row).uses_environments:
                    entries[row.file_id] = environment(volumes.path_of(row))
            watermark = Watermark.open(fs, os.path.join(root, "watermark"), cookie.store_id, writable=False)
            return cls(cookie, config, volumes, index, index_environment, entries, watermark, mark)
        except BaseException:
            for opened in (index_environment, *entries.values()):
                opened.close()
            raise

    def __init__(
        self,
        cookie: Cookie,
        config: StoreConfig,
        volumes: Volumes,
        index: Index,
        index_environment: Environment,
        entries: Mapping[int, Environment],
        watermark: Watermark,
        mark: CheckpointMark,
    ) -> None:
        super().__init__(fs=volumes.fs, config=config, volumes=volumes, index=index, entries=entries, metrics=Metrics())
        self.cookie = cookie
        self.store_id = cookie.store_id
        self.feature_level = cookie.level
        self.restored = bool(cookie.incarnation)
        self._index_environment = index_environment
        self._watermark = watermark
        self._catching = threading.Lock()
        self._rebuilding = False
        self._follower: threading.Thread | None = None  # guarded by the lock
        self._stop = threading.Lock()  # locked until closing; cheaper to wait for than an Event
        self._stop.acquire()
        self._start_at(mark)
        self.catch_up()

    def _start_at(self, mark: CheckpointMark) -> None:
        self._mark = mark
        self._file_id = mark.first_log_file_id - 1
        self._offset = 0
        self._lsn = mark.next_lsn

    def catch_up(self) -> None:
        """Apply the commits that became durable since the last call.

        Raises:
            CorruptError: The log or the index is damaged.
        """
        with self._catching:
            for _ in range(_ATTEMPTS):
                mark = checked_mark(self.index, self.cookie, self.volumes.root)
                try:
                    if not self._rebuilding and _log_begins_there(mark, self._mark):
                        self._look_elsewhere(mark)
                    elif self._rebuilding or mark != self._mark:
                        self._restart(mark)
                    if self.follow():
                        if self._rebuilding:
                            self._resynchronized()
                        return
                except FileNotFoundError:
                    self._rebuilding = True
                except CorruptError:
                    self._rebuilding = True
                    # The index may have moved on while the log was read from an older mark: the two do not fit then.
                    if checked_mark(self.index, self.cookie, self.volumes.root) == mark:
                        raise
            raise CorruptError(
                f"the log of {self.volumes.root} ends before LSN {self._lsn}, but commits up to "
                f"{self._watermark.stored_lsn()} were durable; run `pybk store verify {self.volumes.root}`"
            )

    def cut(self) -> StoreCut:
        """Return the state after one commit, which is not older than the last that was acknowledged before the call.

        Call it while no ledger or record is followed, because a follower's thread applies commits, too.

        Raises:
            CorruptError: The log or the index is damaged.

        Cost: As ``store_cut.merged``.
        """
        while True:
            self.catch_up()
            with self.index.snapshot() as snapshot:
                mark = snapshot.mark()
                if mark is None or not _log_begins_there(mark, self._mark):
                    continue  # a checkpoint came between; what it wrote is newer than what was read of the log
                with self.lock:
                    rows = rows_of(self._dirty.values())
                    changed = list(self._dirty.values())
                next_id = max([mark.next_ledger_id, *(ledger_id + 1 for ledger_id in rows)])
                sequences = (each.metadata.creation_sequence + 1 for each in changed)
                sequence = max([mark.next_creation_sequence, *sequences])
                tail = CutTail(self._lsn - 1, next_id, sequence, rows, tuple(self.named.tail()))
                return merged(snapshot, tail)

    def keep_looking(self) -> None:
        """Start a thread that polls for new commits until no ledger is followed any more."""
        with self.lock:
            if self._follower is None and not self.ended:
                follower = threading.Thread(target=self._follow_for_all, name="pybk-follow", daemon=True)
                start_thread(follower)
                self._follower = follower

    def _follow_for_all(self) -> None:
        """Poll for new commits and apply them, which wakes the followers of their ledgers; the body of the thread."""
        try:
            moved_at = whole_at = asked_at = time.monotonic()
            pause = _COMMIT_LOOK_SECONDS
            while not self._stop.acquire(timeout=pause):
                now = time.monotonic()
                if self._watermark.stored_lsn() >= self._lsn:
                    moved_at = whole_at = now
                    self.catch_up()
                elif now >= whole_at + _INDEX_LOOK_SECONDS:
                    whole_at = now
                    self.catch_up()
                elif now >= asked_at + 1.0:
                    asked_at = now
                    if self._nothing_follows():
                        return
                pause = min(max(_COMMIT_LOOK_SECONDS, (now - moved_at) / _LOOKS_AT_REST), _REST_LOOK_SECONDS)
        except Exception as error:  # noqa: BLE001  # each follower looks for itself now, and raises what it meets
            logger.warning("%s: following the log failed, so followers look again: %s", self.volumes.root, error)
            with self.lock:
                self._follower = None
                descriptors = list(self._descriptors.values())
            for descriptor in descriptors:
                descriptor.wake_followers()

    def _nothing_follows(self) -> bool:
        """Return whether no ledger is followed and no record watched; the thread that looks has to end then."""
        with self.lock:
            if self.named.watched or any(descriptor.advanced_callbacks for descriptor in self._descriptors.values()):
                return False
            self._follower = None
        return True

    def _look_elsewhere(self, mark: CheckpointMark) -> None:
        """Note that entries may have moved to other files, after a commit of the index without a checkpoint.

        The part of the log that was read stays valid, so it is not read again for each moved ledger.
        """
        if mark == self._mark:
            return
        files = self.index.files()
        for row in files.values():
            self.volumes.add(row)
        for file_id, row in list(self.volumes.rows.items()):
            if file_id not in files and not (row.kind == LOG and file_id >= mark.first_log_file_id):
                self.volumes.forget(file_id)
        with self.lock:
            descriptors = list(self._descriptors.values())
        for descriptor in descriptors:
            with descriptor.location_lock:
                descriptor.forget_pages()
        self._mark = mark

    def _restart(self, mark: CheckpointMark) -> None:
        """Restart from a newer checkpoint: the tail is in the index now, and its entries may have moved."""
        self._rebuilding = True
        files = self.index.files()
        for row in files.values():
            self.volumes.add(row)
        for file_id in [known for known in self.volumes.rows if known not in files]:
            self.volumes.forget(file_id)
        self._start_at(mark)
        self.named.forget()
        with self.lock:
            self._dirty.clear()
            descriptors = list(self._descriptors.values())
        for descriptor in descriptors:
            self._reset(descriptor)

    def _reset(self, descriptor: LedgerDescriptor) -> None:
        """Reset a descriptor to the state in the index; to an empty state if the index does not have the ledger."""
        row = self.index.ledger(descriptor.ledger_id)
        if row is None:
            descriptor.rebase(-1, 0)
            return
        descriptor.metadata = row.metadata
        descriptor.rebase(row.last_entry_id, row.length)
        descriptor.confirm(row.last_add_confirmed)

    def _resynchronized(self) -> None:
        """Mark ledgers as deleted that neither index nor log have after both were read again."""
        with self.lock:
            unknown = [d for d in self._descriptors.values() if d.ledger_id not in self._dirty and not d.deleted]
        for descriptor in unknown:
            if self.index.ledger(descriptor.ledger_id) is None:
                descriptor.deleted = True
                descriptor.wake_followers()
        self._rebuilding = False

    def follow(self) -> bool:
        """Apply commits up to the durable watermark; return whether all were found."""
        durable = self._watermark.stored_lsn()
        while self._lsn <= durable:
            before = self._lsn
            if self._offset:
                row = self.volumes.rows[self._file_id]
                path = self.volumes.path_of(row)
                file = OpenLogFile(self._file_id, path, self.volumes.view(self._file_id))
                reach = self._populating(file.data, self._offset)
                for commit in scan_commits(file, self._offset, self._lsn, durable, reach):
                    apply_commit(self, file, commit)
                    self._offset = commit.offset + commit.size
                    self._lsn = commit.lsn + 1
            if self._lsn <= durable and not self._next_file() and self._lsn == before:
                return False
        return True

    def _populating(self, view: memoryview, ready: int) -> Callable[[int], None]:
        """Return a function that populates a map from ``ready`` up to its argument, in steps of 256 KiB."""

        def reach(stop: int) -> None:
            nonlocal ready
            if stop > ready:
                stop = max(stop, ready + _STEP_BYTES)
                self.volumes.populate(view, ready, stop)
                ready = stop

        return reach

    def _next_file(self) -> bool:
        """Continue in the file that begins with the next LSN, if it exists."""
        for file_id, row in self.volumes.found(LOG).items():
            if file_id <= self._file_id or row.bytes < BLOCK_BYTES:
                continue
            path = self.volumes.path_of(row)
            # Not by the map that is kept: a file that is being preallocated still grows.
            view = self.fs.view(path)
            self.volumes.populate(view, 0, BLOCK_BYTES)
            header = decode_file_header(view, store_id=self.store_id, file_id=file_id, where=path)
            if header is not None and header.first_lsn == self._lsn:
                self.volumes.add(row)
                self._file_id = file_id
                self._offset = BLOCK_BYTES
                return True
        return False

    def refresh(self, descriptor: LedgerDescriptor) -> None:
        """Read the locations of a ledger's entries again, because the writer moved them."""
        super().refresh(descriptor)
        self.catch_up()
        for row in self.index.files().values():
            self.volumes.add(row)

    def read_batch(
        self, descriptor: LedgerDescriptor, first: int, last: int, max_bytes: int, *, digest_bytes: int, direct: bool
    ) -> EntryBatch:
        """Read as any store does; retry once if another thread was applying changes of the writer."""
        try:
            return super().read_batch(descriptor, first, last, max_bytes, digest_bytes=digest_bytes, direct=direct)
        except (CorruptError, NoSuchEntryError, NoSuchLedgerError):
            self.catch_up()
            return super().read_batch(descriptor, first, last, max_bytes, digest_bytes=digest_bytes, direct=direct)

    def location_of(self, descriptor: LedgerDescriptor, entry_id: int) -> tuple[int, int, int, int]:
        """Find an entry as any store does; retry once if another thread was applying changes of the writer."""
        try:
            return super().location_of(descriptor, entry_id)
        except (CorruptError, NoSuchEntryError, NoSuchLedgerError):
            self.catch_up()
            return super().location_of(descriptor, entry_id)

    def close(self) -> None:
        """Close what was opened."""
        self.end()
        if self._stop.locked():
            self._stop.release()
        with self.lock:
            follower = self._follower
        if follower is not None:
            follower.join()
        self.volumes.close()
        self._watermark.close()
        for environment in self.entries.values():
            environment.close()
        self._index_environment.close()


def _log_begins_there(mark: CheckpointMark, other: CheckpointMark) -> bool:
    """Return whether replay begins at the same position for two marks, which may differ in catalog and file ids."""
    return mark == other._replace(
        catalog_file_id=mark.catalog_file_id, catalog_bytes=mark.catalog_bytes, next_file_id=mark.next_file_id
    )
