"""Space that is allocated before it is needed: log files, and what a store whose disk is full works with.

Log files are allocated, zeroed and synced before the log needs them. A synced write to a file that grows must also
commit the file's size and blocks. So the log takes files that are complete on disk before their first commit. A file
passes through these states, in this order:

- *queued*: made by maintenance, or by the leader if none is ready: allocated, zeroed unless commits are large, synced,
  and its directory synced. Its id is above that of the current file, and the log may take it. Two are kept.
- *current*: taken by the log's leader, in the one step that sets ``current_id``. If memory runs out between that
  step and the first commit, the next call returns the same file.
- *left*: the log writes no more to it (``leave_log_file``). Maintenance gives the unused blocks back and closes it;
  the file itself lives until a checkpoint finds nothing live in it.
- *reserved*: one of the files of ``LogReserve``, taken only if there is no space for another file.
- *doomed*: a queued file that the log passed over as too small, or that is not needed any more. It reads as zeros,
  which replay ignores wherever the file stands, so it may be unlinked any time; maintenance does it, or the next open.

Two locks: ``_lock`` guards the lists and is held for moments; ``making`` is held while files are made or unlinked,
which takes milliseconds, and is always taken first. The leader takes ``making`` only if no file is ready.

A failure to make a file is a refusal, not a failure of the store, even if a sync failed: nothing in it was
acknowledged.

The reserve of the log
----------------------

A store whose disk is full must still take deletes, changes of named records, the ends of ledgers, and the ledgers with
which a log is taken over, because these are how it is emptied; and each of them is a record in the log. So the store
keeps ``RESERVE_FILES`` files, allocated on the log's device, under names that are not those of log files:

- *ready*: named ``reserve-N``. Its bytes may be those of an earlier use.
- *taken*: zeroed, synced, and then renamed to a log file with a new id, in that order: a stop leaves the reserve as it
  was or a log file of zeros. ``ReserveUse`` says which commits may have the last ones.
- *put back*: renamed to ``reserve-N`` again, once a checkpoint or a compaction finds nothing live in it, or an open
  finds that it is not part of the log. Its blocks are never free meanwhile, so no other program can take them.

A reader may be at work in a file that is put back. So no map of such a file is handed out (``Volumes.is_reused``):
its bytes are copied, and count only if it has its name afterwards, because it is renamed before it is zeroed.

By its size, which no other log file has, every process sees that a log file was taken from the reserve.

The reserve for packing
-----------------------

Packing writes the live records of a file to a new file before the old one can be dropped. So each directory of log
files and cold segments that holds much keeps a file of allocated blocks, ``reserve-pack``:

- *ready*: its contents do not count; they may be those of an earlier use.
- *taken*: the live records of one file are written to it as a cold segment. Once the segment is complete, cut to its
  size and synced, the file is renamed to the segment (``ColdSegmentWriter``). Whatever stops before leaves a reserve,
  and no bytes of an earlier use ever lie in a file with the name of a segment.
- *put back*: the file that was packed has no live entries any more, and is renamed to ``reserve-pack`` instead of being
  unlinked. Its blocks are never free meanwhile, so no other program can take them. What it has beyond the size of the
  reserve is cut off, and is the space that packing frees.

A reader may still have a map of the file that was put back. So the reserve is neither written nor cut before no process
has it open (``FileSystem.is_unused``); until then it counts as missing.

A reserve takes a sixteenth of its directory's files at most when it is allocated, and no more than a log file or a
segment of one checkpoint. It keeps its size while the directory shrinks to four times that, because what is left may
be files as large as before.

A file with fewer blocks than the reserve leaves a smaller one, which gets the missing blocks of what was freed
(``PackReserve.renew``). Another program may be faster.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.config import MIB, StoreConfig
from pybk.errors import StorageFullError, StorageRefusedError
from pybk.flags import StorageHint
from pybk.storage.format.log_file import BLOCK_BYTES, RESERVED_FILE_BYTES
from pybk.storage.io.failures import Troubles, is_full, is_refused, refused, storage_error, syncing, undoing
from pybk.storage.io.filesystem import allocate_file
from pybk.storage.tiers import COLD, LOG, ReservedFile

if TYPE_CHECKING:
    from pybk.storage.format.index_rows import FileRow
    from pybk.storage.io.filesystem import File, FileSystem
    from pybk.storage.volumes import Volumes

logger = logging.getLogger(__name__)

FIRST_FILE_BYTES: Final = MIB
_MAKING: Final = "making log files"
_STEP_BYTES: Final = 128 << 10
"""The zeros, in bytes, between two pauses of writing them; an append that waits for them takes up to thrice as long."""

_SMALL_FILE_BYTES: Final = 4 * MIB
"""Size of a file that an append waits for."""

_FILES_QUEUED: Final = 2
LARGE_COMMIT_BYTES: Final = 128 << 10
_SHARE_AT_REST: Final = 16
"""A file preallocated for a log at rest takes this part of the store at most."""


RESERVE_FILES: Final = 6
"""Some hold the first entries of the logs that one process has taken over while the next one takes them over."""


class ReserveUse(enum.Enum):
    """The reserved files that a commit may use: the value is the number of files that must stay ready for others."""

    NONE = RESERVE_FILES
    """It has entries that the store refuses while space is short."""
    FURTHER_ENTRIES = 2
    """The commit has acknowledgements of a subscription, which may write many such commits."""
    FIRST_ENTRY = 1
    """It has the first entry of a ledger with which a log is taken over. A file with entries stays as they do."""
    CONTROLS = 0
    """It has no entries."""


class LogReserve:
    """The reserved log files of one store. Threads: any; the caller of ``fill`` and ``take`` holds ``making``.

    Args:
        volumes: The store's directories; the reserve lies in the first one of the log.
    """

    def __init__(self, volumes: Volumes) -> None:
        self._volumes = volumes
        self._directory = volumes.tier_paths(StorageHint.NVME)[0]

    def ready(self) -> list[str]:
        """Return the paths of the files that are ready."""
        missing = _missing(self._volumes)
        return [path for path in _paths(self._volumes) if path not in missing]

    @property
    def is_whole(self) -> bool:
        """True if every file is ready."""
        return not _missing(self._volumes)

    def fill(self) -> None:
        """Make the files that are missing, as far as there is space.

        Raises:
            StorageRefusedError: There is no space or descriptor, or making one failed; it is removed again.
            OSError: Syncing the directory failed.
        """
        missing = _missing(self._volumes)
        for path in missing:
            allocate_file(self._volumes.fs, path, RESERVED_FILE_BYTES)
        if missing:
            self._sync_directory(f"making reserve files in {self._directory}")

    def take(self, bytes_min: int, use: ReserveUse) -> tuple[FileRow, File]:
        """Make a reserved file the next log file, durably; returns it, open for writing.

        Args:
            bytes_min: Bytes that are to be written to it.
            use: The use of the commit that needs it.

        Raises:
            StorageFullError: Too few are ready, or ``bytes_min`` are more than it has.
            StorageRefusedError: It could not be opened, zeroed or renamed; nothing was changed.
            OSError: Syncing the directory failed.
        """
        ready = self.ready()
        if bytes_min > RESERVED_FILE_BYTES or len(ready) <= use.value:
            raise StorageFullError(
                f"{self._directory} has no space for a log file of {bytes_min} bytes, and the space that is reserved "
                f"for deletes ({RESERVE_FILES} files of {RESERVED_FILE_BYTES} bytes, {len(ready)} of them unused) "
                "does not suffice; free some space, then try again"
            )
        fs, path = self._volumes.fs, ready[0]
        row = self._volumes.new_file(LOG, StorageHint.NVME)._replace(directory=0, bytes=RESERVED_FILE_BYTES)
        doing = f"taking the reserve file {path}"
        try:
            file = fs.open(path, writable=True)
            try:
                file.write_zeros(0, RESERVED_FILE_BYTES)
                file.sync()
                fs.rename(path, self._volumes.path_of(row))
            except BaseException:
                file.close()
                raise
        except OSError as error:
            raise (storage_error if is_full(error) else refused)(error, doing) from error
        try:
            self._sync_directory(doing)
        except BaseException:
            file.close()
            raise
        return row, file

    def _sync_directory(self, doing: str) -> None:
        try:
            with syncing(self._directory):
                self._volumes.fs.sync_directory(self._directory)
        except OSError as error:
            if is_refused(error):
                raise refused(error, doing) from error
            raise


def was_reserved(volumes: Volumes, row: FileRow) -> bool:
    """Return whether a log file was taken from the reserve."""
    return row.directory == 0 and volumes.fs.file_bytes(volumes.path_of(row)) == RESERVED_FILE_BYTES


def put_back(volumes: Volumes, row: FileRow) -> bool:
    """Rename a log file that was taken from the reserve, and is not part of the log any more, to a reserved file.

    Returns:
        False, with nothing done, if it was not taken from the reserve, is not needed there, or has given blocks back.

    Raises:
        OSError: It could not be renamed.
    """
    path, missing = volumes.path_of(row), _missing(volumes)
    if not missing or not was_reserved(volumes, row) or volumes.fs.disk_bytes(path) < RESERVED_FILE_BYTES:
        return False
    volumes.fs.rename(path, missing[0])
    return True


def _paths(volumes: Volumes) -> list[str]:
    directory = volumes.tier_paths(StorageHint.NVME)[0]
    return [os.path.join(directory, f"reserve-{number}") for number in range(RESERVE_FILES)]


def _missing(volumes: Volumes) -> list[str]:
    """Return the paths of the reserved files that are not ready."""
    return [path for path in _paths(volumes) if not _is_ready(volumes, path)]


def _is_ready(volumes: Volumes, path: str) -> bool:
    try:
        return volumes.fs.file_bytes(path) == RESERVED_FILE_BYTES
    except FileNotFoundError:  # not there, or taken by another thread just now
        return False


class LogFile(NamedTuple):
    """A log file that is open for writing."""

    row: FileRow
    file: File


class LogFileSupply:
    """Makes log files and keeps track of those in use.

    Sizes double from 1 MiB up to ``log_file_bytes`` while the log fills its files, and begin again when it rests, so
    that a small store stays small. Zeros are written in steps with pauses, in which syncs of the log pass.
    While commits are large, files are only allocated: a commit of 564 KiB takes 306 µs in an allocated file and 289 µs
    in a zeroed one, which does not justify the zeros: they would double the bytes that the device has to write.

    Threads: the log's leader takes files, the maintenance thread makes and removes them.
    """

    def __init__(self, volumes: Volumes, config: StoreConfig, on_use: Callable[[], None], troubles: Troubles) -> None:
        self._volumes = volumes
        self._troubles = troubles
        self._config = config
        self.on_use = on_use
        """Wakes maintenance, after a file was taken, left or removed."""
        self._lock = threading.Lock()
        self.making = threading.Lock()
        """Held while files are made or removed."""
        # Open files by ascending id: those that the log left, the current one, those queued. Guarded by _lock.
        self._open: list[LogFile] = []
        self.current_id = 0
        """The file that the log writes to; 0 before the first."""
        self._doomed: list[LogFile] = []
        self._next_bytes = FIRST_FILE_BYTES
        self._zeroed = True
        self._ended_early = False
        self.unzeroed: set[int] = set()
        """Files that are only allocated, by id."""
        self._left: dict[int, int] = {}
        self.reserve = LogReserve(volumes)
        """Files for changes that free space. Guarded by ``making``."""

    # ---- the log -----------------------------------------------------------------------------------------------

    def next_log_file(self, bytes_min: int, after: int, *, use: ReserveUse = ReserveUse.NONE) -> tuple[int, File]:
        """Return the first file of at least this size with an id above ``after``, making it now if none is ready.

        Args:
            bytes_min: Bytes that it must have.
            after: The id of the file before it.
            use: The reserved files that may be taken if there is no space for another.

        Raises:
            StorageRefusedError: There is no space or descriptor for a file, or making it failed; nothing was written.
            OSError: Syncing its directory failed.
        """
        with self._lock:
            # A file that a checkpoint ended long before it was full does not justify a larger one.
            grows = not self._ended_early
            chosen = self._current(after)
            if chosen is None:
                queued = self.queued()
                chosen = next((made for made in queued if made.file.size >= bytes_min), None)
                if chosen is not None:
                    # Files that are too small stay until maintenance unlinks them; they are zeros, not part of the log.
                    self._doomed += queued[: queued.index(chosen)]
            if chosen is not None:
                self.current_id = chosen.row.file_id
                self._ended_early = False
                wanted = 2 * chosen.file.size if grows else chosen.file.size
                self._next_bytes = min(max(wanted, FIRST_FILE_BYTES), self._config.log_file_bytes)
        if chosen is None:
            try:
                self._make_now(bytes_min)
            except StorageFullError:
                if use is ReserveUse.NONE:
                    raise
                chosen = self._take_reserved(bytes_min, use)
            else:
                return self.next_log_file(bytes_min, after, use=use)
        self._volumes.add(chosen.row)
        self.on_use()
        return chosen.row.file_id, chosen.file

    def _current(self, after: int) -> LogFile | None:
        """Return the file that a call chose which then failed, if one did; the caller holds ``_lock``."""
        wanted = self.current_id
        if wanted <= after or wanted in self._left:
            return None
        return next((made for made in self._open if made.row.file_id == wanted), None)

    def queued(self) -> list[LogFile]:
        """Return the files that the log may still take; the caller holds ``_lock``."""
        return [made for made in self._open if made.row.file_id > self.current_id and made not in self._doomed]

    def _take_reserved(self, bytes_min: int, use: ReserveUse) -> LogFile:
        with self.making:
            taken = LogFile(*self.reserve.take(bytes_min, use))
            with self._lock:
                self._open.append(taken)
                self.current_id = taken.row.file_id
        return taken

    def has_reserve(self, use: ReserveUse) -> bool:
        """Return whether a reserved file that is in use takes commits of this use."""
        return use is not ReserveUse.NONE and len(self.reserve.ready()) >= use.value

    def retire(self, file_id: int) -> None:
        """Remove a file in which nothing is live; a log file that was reserved is put back."""
        row = self._volumes.rows.get(file_id)
        with self.making:
            self.forget(file_id)
            if row is None or row.kind != LOG or row.directory or not self._volumes.exists(row):
                self._volumes.drop(file_id)
                return
            self._volumes.forget(file_id)
            if not put_back(self._volumes, row):
                self._volumes.unlink(row)

    def restore(self) -> None:
        """Make the files that the reserve lacks; raises as ``LogReserve.fill``."""
        if not self.reserve.is_whole:
            with self.making:
                self.reserve.fill()

    def _make_now(self, bytes_min: int) -> None:
        try:
            with self.making:
                with self._lock:
                    ready = any(made.file.size >= bytes_min for made in self.queued())
                if not ready:
                    self._make_fitting(bytes_min)
        except StorageRefusedError as error:
            if not isinstance(error, StorageFullError):
                self._troubles.note(_MAKING, error)
            self.on_use()
            raise

    def _make_fitting(self, bytes_min: int) -> None:
        try:
            self.make(max(bytes_min, min(self._next_bytes, _SMALL_FILE_BYTES)), 0.0)
        except StorageRefusedError as error:
            # Tried again before a commit is refused: entries of deferred ledgers in it were acknowledged already.
            logger.warning("making a log file of %d bytes instead: %s", bytes_min, error)
            self.make(bytes_min, 0.0)

    def leave_log_file(self, file_id: int, used_bytes: int, commits: int) -> None:
        """Note that the log has left a file, with the bytes and commits that it wrote to the file."""
        with self._lock:
            self._left[file_id] = used_bytes
            size = next((made.file.size for made in self._open if made.row.file_id == file_id), used_bytes)
            self._ended_early = 2 * used_bytes < size
            self._zeroed = used_bytes < LARGE_COMMIT_BYTES * commits
        self.on_use()

    # ---- maintenance -----------------------------------------------------------------------------------------

    def prefer_zeros(self) -> None:
        """Take preallocated files without zeros out of the queue, because many commits are small by now.

        After a burst of large commits the log would use such files up with small ones, each of which is slower there.
        """
        with self.making:
            with self._lock:
                self._zeroed = True
                stale = [made for made in self.queued() if made.row.file_id in self.unzeroed]
            self.discard(stale)

    def has_better(self) -> bool:
        """Return whether the log writes to a file without zeros while one with zeros is ready."""
        with self._lock:
            return self.current_id in self.unzeroed and any(
                made.row.file_id not in self.unzeroed for made in self.queued()
            )

    def preallocate(self, *, pause: bool) -> None:
        """Make files until enough are ready, as far as they leave ``free_bytes_ok`` to others.

        Raises:
            StorageRefusedError: There is no space or descriptor, or making one failed; it is removed again.
            OSError: Syncing its directory failed.
        """
        while True:
            with self.making:
                self._bury()
                with self._lock:
                    count = len(self.queued())
                    size = self._next_bytes
                volumes = self._volumes
                free = min(map(volumes.fs.free_bytes, volumes.tier_paths(StorageHint.NVME)))
                space = free - self._config.free_bytes_ok
                size = min(size, space - space // 8)
                if count >= _FILES_QUEUED or size < FIRST_FILE_BYTES:
                    return
                self.make(size, 1.0 if pause else 0.0)

    def make(self, size: int, pause_ratio: float) -> None:
        """Make one durable file of zeros and put it in the queue; the caller holds ``making``.

        Args:
            size: Bytes of the file.
            pause_ratio: Length of the pause after each step of zeros, in parts of the time of the step. There are
                pauses only while another file is ready, because the log would wait for this one otherwise.
        """
        size += -size % BLOCK_BYTES
        size += BLOCK_BYTES * (size == RESERVED_FILE_BYTES)  # by this size an open recognizes reserved files
        volumes = self._volumes
        zeroed = self._zeroed
        row = volumes.new_file(LOG, StorageHint.NVME)._replace(bytes=size)
        path = volumes.path_of(row)
        if volumes.fs.free_bytes(volumes.directory_of(row)) < size + size // 8:
            raise StorageFullError(
                f"{volumes.directory_of(row)} has no space for a log file of {size} bytes; free some space or "
                "delete ledgers, then append again"
            )
        try:
            file = volumes.fs.create(path, size)
            try:
                if zeroed:
                    self._fill(file, size, pause_ratio)
                file.sync()
            except BaseException as error:
                self._remove(file, path, error)
                raise
        except OSError as error:
            # Nothing in it was acknowledged, so even a failed sync leaves nothing in doubt.
            raise (storage_error if is_full(error) else refused)(error, f"making the log file {path}") from error
        try:
            with syncing(path):
                volumes.fs.sync_directory(volumes.directory_of(row))
        except BaseException as error:
            self._remove(file, path, error)
            if is_refused(error):
                raise refused(error, f"making the log file {path}") from error
            raise
        with self._lock:
            self._open.append(LogFile(row, file))
            if not zeroed:
                self.unzeroed.add(row.file_id)
        self._troubles.clear(_MAKING)

    def _remove(self, file: File, path: str, error: BaseException) -> None:
        """Remove a file that could not be made whole."""
        file.close()
        with undoing(error):
            self._volumes.fs.unlink(path)

    def _fill(self, file: File, size: int, pause_ratio: float) -> None:
        offset = 0
        while offset < size:
            with self._lock:
                pauses = pause_ratio > 0 and len(self.queued()) > 0
            step = min(_STEP_BYTES if pauses else size, size - offset)
            began = time.monotonic()
            file.write_zeros(offset, step)
            offset += step
            if pauses:
                time.sleep((time.monotonic() - began) * pause_ratio)

    def rest(self, store_bytes: Callable[[], int]) -> None:
        """Keep the preallocated files small relative to the store, as nothing was appended for a while.

        Args:
            store_bytes: Returns the size of the store, which costs a look at each file; called only if a file might be
                too large.
        """
        with self._lock:
            largest = max((made.row.bytes for made in self.queued()), default=0)
        if max(largest, self._next_bytes) <= FIRST_FILE_BYTES:
            return
        size = max(FIRST_FILE_BYTES, store_bytes() // _SHARE_AT_REST)
        with self.making:
            with self._lock:
                self._next_bytes = min(self._next_bytes, size)
                large = [made for made in self.queued() if made.row.bytes > size]
            self.discard(large)
        if large:
            self.on_use()

    def give_back(self) -> bool:
        """Remove the preallocated files, because space is short; return whether there were any."""
        with self.making:
            with self._lock:
                queued = self.queued()
            self.discard(queued)
        return bool(queued)

    def discard(self, files: list[LogFile]) -> None:
        """Remove files, except those that the log began to use meanwhile; the caller holds ``making``."""
        with self._lock:
            queued = self.queued()
            self._doomed += [made for made in files if made in queued]
        self._bury()

    def _bury(self) -> None:
        """Unlink the files that the log will not use; may be repeated. The caller holds ``making``.

        One that cannot be unlinked is tried again later, and removed by the next open at the latest: it is zeros. For
        the same reason no sync follows.
        """
        volumes = self._volumes
        with self._lock:
            doomed = list(self._doomed)
        for made in doomed:
            made.file.close()
            path = volumes.path_of(made.row)
            try:
                if volumes.fs.exists(path):
                    volumes.fs.unlink(path)
            except OSError as error:
                logger.warning("%s, preallocated and not needed, cannot be removed: %s", path, error)
                continue
            with self._lock:
                self._open = [other for other in self._open if other is not made]
                self._doomed = [other for other in self._doomed if other is not made]
                self.unzeroed.discard(made.row.file_id)

    def used_bytes(self, file_id: int) -> int | None:
        """Return how much of a file the log used before it left it, None while it may write to it."""
        with self._lock:
            return self._left.get(file_id)

    def adopt(self, row: FileRow, used_bytes: int) -> None:
        """Note a log file of an earlier process, to which the log does not write any more."""
        file = self._volumes.fs.open(self._volumes.path_of(row), writable=True)
        with self._lock:
            self._left[row.file_id] = used_bytes
            self.current_id = max(self.current_id, row.file_id)
            self._open.append(LogFile(row, file))

    def tidy(self) -> None:
        """Remove files that the log skipped; close those that it left, and free their unused blocks."""
        with self.making:
            self._bury()
        while (left := self._take_left()) is not None:
            (row, file), used = left
            # What was reserved is to be put back whole, unless it is not needed.
            keeps = was_reserved(self._volumes, row) and not self.reserve.is_whole
            _give_back_unused(file, file.size if keeps else used)

    def _take_left(self) -> tuple[LogFile, int] | None:
        """Return a file that the log has left and that is still open, and the bytes used in it."""
        with self._lock:
            for number, made in enumerate(self._open):
                if made.row.file_id in self._left:
                    del self._open[number]
                    return made, self._left[made.row.file_id]
        return None

    def forget(self, file_id: int) -> None:
        """Forget a file that was unlinked."""
        with self._lock:
            self._left.pop(file_id, None)
            self.unzeroed.discard(file_id)

    def close(self) -> None:
        """Remove the files that were never begun and close the others."""
        try:
            self.give_back()
        finally:
            self.tidy()


def _give_back_unused(file: File, used_bytes: int) -> None:
    """Free the unused blocks of a log file to which the log does not write any more, and close it."""
    try:
        if used_bytes < file.size:
            file.punch(used_bytes, file.size - used_bytes)
    except OSError as error:  # nothing durable is in doubt: it was not used
        logger.warning("blocks of a log file that was left cannot be given back: %s", error)
    finally:
        file.close()


PACK_RESERVE: Final = "reserve-pack"
"""Name of the reserve for packing of a directory."""

_PACKED_TIERS: Final = (StorageHint.NVME, StorageHint.HDD)
_PACK_BYTES_MIN: Final = MIB
_PACK_SHARE: Final = 16
"""A reserve that is allocated takes this part of its directory's files at most."""

_PACK_SHARE_KEPT: Final = 4
"""A reserve that takes no more than this part of its directory's files is not made smaller."""

_SPARE_SHARE: Final = 4
"""This part of the free space is left when a file is packed, because the index and the log need space, too."""

_INDEX_BYTES: Final = 512 << 10
_INDEX_SHARE: Final = 16
"""The index's changes take this part of the packed bytes, if records are longer than 512 bytes."""


class PackReserve:
    """The pack reserves of one store, one in each directory of log files and cold segments that holds much.

    Threads: one at a time, which the scheduler ensures.
    """

    def __init__(self, volumes: Volumes, config: StoreConfig) -> None:
        self._volumes = volumes
        self._bytes_max = max(config.log_file_bytes, config.unchecked_tail_bytes // 2)
        self._left_free = config.free_bytes_ok
        self._sizes: dict[str, int] = {}
        """The bytes that the reserve of each directory is to have."""
        self._allocated: dict[str, int] = {}
        """The bytes of each reserve that was allocated and not used since: some file systems report fewer blocks."""

    def restore(self) -> None:
        """Allocate the reserves that are missing, as far as there is space, and cut those that are too large.

        Raises:
            StorageRefusedError: There is no space or descriptor, or it was refused for another reason.
            OSError: Syncing a directory failed.
        """
        for tier in _PACKED_TIERS:
            for number, directory in enumerate(self._volumes.tier_paths(tier)):
                self._sizes[directory] = self._wanted(tier, number, directory)
                self._restore(directory, self._sizes[directory])

    def _wanted(self, tier: StorageHint, number: int, directory: str) -> int:
        rows = list(self._volumes.rows.values())
        held = sum(
            row.bytes for row in rows if (row.tier, row.directory) == (tier.value, number) and row.kind in (LOG, COLD)
        )
        wanted = 1 << (held // _PACK_SHARE).bit_length() >> 1
        wanted = 0 if wanted < _PACK_BYTES_MIN else min(wanted, self._bytes_max)
        kept = self._sizes.get(directory)
        if kept is None:
            kept = min(_blocks(self._volumes.fs, os.path.join(directory, PACK_RESERVE)), self._bytes_max)
        return max(wanted, kept if held >= _PACK_SHARE_KEPT * kept else 0)

    def _restore(self, directory: str, wanted: int) -> None:
        fs, path = self._volumes.fs, os.path.join(directory, PACK_RESERVE)
        whole = self._allocated.get(directory) == wanted and fs.exists(path)
        if not whole and _blocks(fs, path) < wanted and fs.free_bytes(directory) >= wanted + self._left_free:
            allocate_file(fs, path, wanted)
            with syncing(directory):
                fs.sync_directory(directory)
            self._allocated[directory] = wanted
        else:
            self._cut(path, wanted)

    def _cut(self, path: str, size: int) -> None:
        """Free the blocks of a reserve beyond its size, unless a process has it open."""
        fs = self._volumes.fs
        if not _ready_bytes(fs, path) or fs.file_bytes(path) <= size:
            return
        with _changing(path):
            if not size:
                fs.unlink(path)
                return
            with closing(fs.open(path, writable=True)) as file:
                file.truncate(size)

    def renew(self, row: FileRow) -> None:
        """Give the reserve in a file's directory its size at once, with blocks that packing has just made free.

        Raises:
            StorageRefusedError: Another program has taken the blocks, or it was refused for another reason.
        """
        directory = self._volumes.directory_of(row)
        path, wanted = os.path.join(directory, PACK_RESERVE), self._sizes[directory]
        self._cut(path, wanted)
        if 0 < _ready_bytes(self._volumes.fs, path) < wanted:
            with _changing(path), closing(self._volumes.fs.open(path, writable=True)) as file:
                file.reserve(wanted)
                file.sync()

    def bytes_for(self, row: FileRow) -> int:
        """Return the bytes of a cold segment that fits in the reserve of a file's directory, and free space."""
        directory = self._volumes.directory_of(row)
        ready = _ready_bytes(self._volumes.fs, os.path.join(directory, PACK_RESERVE))
        free = self._volumes.fs.free_bytes(directory)
        return ready + free - free // _SPARE_SHARE if ready else 0

    def take(self, row: FileRow) -> ReservedFile:
        """Return the reserve in a file's directory; a writer that does not finish leaves it as it is."""
        directory = self._volumes.directory_of(row)
        self._allocated.pop(directory, None)
        return ReservedFile(row.directory, os.path.join(directory, PACK_RESERVE))

    def put_back(self, row: FileRow) -> bool:
        """Make a file in which nothing is live the reserve of its directory, if that lacks one."""
        return put_back_packed(self._volumes, row, self._sizes.get(self._volumes.directory_of(row), 0))

    def index_bytes(self) -> int:
        """Return the bytes of changes of the index that are to be reserved for packing."""
        largest = max(self._sizes.values(), default=0)
        return _INDEX_BYTES + largest // _INDEX_SHARE if largest else 0


def put_back_packed(volumes: Volumes, row: FileRow, wanted: int) -> bool:
    """Rename a file in which nothing is live to the reserve of its directory.

    Args:
        volumes: The store's directories.
        row: The file; nothing names it.
        wanted: The bytes that the reserve is to have.

    Returns:
        False, with nothing done, if the reserve has them or has more than the file, or if the file is no log file or
        cold segment of those tiers, or one of ``LogReserve``.

    Raises:
        OSError: It could not be renamed.
    """
    fs, path = volumes.fs, volumes.path_of(row)
    if row.kind not in (LOG, COLD) or row.tier not in map(str, _PACKED_TIERS) or not fs.exists(path):
        return False
    if row.kind == LOG and fs.file_bytes(path) == RESERVED_FILE_BYTES:
        return False
    reserve = os.path.join(volumes.directory_of(row), PACK_RESERVE)
    if _blocks(fs, reserve) >= min(wanted, fs.disk_bytes(path)):
        return False
    fs.rename(path, reserve)
    return True


@contextmanager
def _changing(path: str) -> Iterator[None]:
    """Raise StorageRefusedError for an error of changing a reserve, because nothing is in it."""
    try:
        yield
    except OSError as error:
        raise (storage_error if is_full(error) else refused)(error, f"changing {path}") from error


def _ready_bytes(fs: FileSystem, path: str) -> int:
    """Return the allocated bytes of a reserve; 0 if it is missing or a process has it open."""
    return _blocks(fs, path) if fs.exists(path) and fs.is_unused(path) else 0


def _blocks(fs: FileSystem, path: str) -> int:
    return fs.disk_bytes(path) if fs.exists(path) else 0
