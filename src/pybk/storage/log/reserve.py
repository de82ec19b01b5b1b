"""Log files that are allocated in advance for changes that free space, so that these need no free space.

A store whose disk is full must still take deletes, changes of named records, the ends of ledgers, and the ledgers with
which a log is taken over, because these are how it is emptied; and each of them is a record in the log. So the store
keeps ``RESERVE_FILES`` files, allocated on the log's device, under names that are not those of log files:

- *ready*: named ``reserve-N``. Its bytes may be those of an earlier use.
- *taken*: zeroed, synced, and then renamed to a log file with a new id, in that order, so that a stop leaves the
  reserve as it was or a log file of zeros. ``ReserveUse`` says which commits may have the last ones.
- *put back*: renamed to ``reserve-N`` again, once a checkpoint or a compaction finds nothing live in it, or an open
  finds that it is not part of the log. Its blocks are never free meanwhile, so no other program can take them.

A reader may be at work in a file that is put back. So no map of such a file is handed out (``Volumes.is_reused``):
its bytes are copied, and count only if it has its name afterwards, because it is renamed before it is zeroed.

By its size, which no other log file has, every process sees that a log file was taken from the reserve.

Threads: any; the caller of ``fill``, ``take`` and, in a live store, ``put_back`` holds ``LogFileSupply.making``.
"""

from __future__ import annotations

import enum
import os
from typing import TYPE_CHECKING, Final

from pybk.errors import StorageFullError
from pybk.flags import StorageHint
from pybk.storage.format.log_file import RESERVED_FILE_BYTES
from pybk.storage.io.failures import is_full, is_refused, refused, storage_error, syncing, undoing
from pybk.storage.tiers.tier import LOG

if TYPE_CHECKING:
    from pybk.storage.format.index_rows import FileRow
    from pybk.storage.io.filesystem import File
    from pybk.storage.volumes import Volumes

RESERVE_FILES: Final = 6
"""Some hold the first entries of the logs that one process has taken over while the next one takes them over."""


class ReserveUse(enum.Enum):
    """Which of the reserved files a commit may use: its value is how many must stay ready for others."""

    NONE = RESERVE_FILES
    """It has entries that the store refuses while space is short."""
    FURTHER_ENTRIES = 2
    """The commit has acknowledgements of a subscription, which may write many such commits."""
    FIRST_ENTRY = 1
    """It has the first entry of a ledger with which a log is taken over. A file with entries stays as they do."""
    CONTROLS = 0
    """It has no entries."""


class LogReserve:
    """The reserved log files of one store.

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
        """Whether every file is ready."""
        return not _missing(self._volumes)

    def fill(self) -> None:
        """Make the files that are missing, as far as there is space.

        Raises:
            StorageRefusedError: There is no space or descriptor, or making one failed; it is removed again.
            OSError: Syncing the directory failed.
        """
        missing = _missing(self._volumes)
        for path in missing:
            try:
                self._make(path)
            except OSError as error:  # nothing is in it, so even a failed sync leaves nothing in doubt
                meaning = storage_error if is_full(error) else refused
                raise meaning(error, f"making the reserve file {path}") from error
        if missing:
            self._sync_directory(f"making reserve files in {self._directory}")

    def _make(self, path: str) -> None:
        fs = self._volumes.fs
        if fs.exists(path):  # left by a making that was interrupted
            fs.unlink(path)
        file = fs.create(path, RESERVED_FILE_BYTES)
        try:
            file.sync()
        except BaseException as error:
            with undoing(error):
                fs.unlink(path)
            raise
        finally:
            file.close()

    def take(self, bytes_min: int, use: ReserveUse) -> tuple[FileRow, File]:
        """Make a reserved file the next log file, durably; returns it, open for writing.

        Args:
            bytes_min: Bytes that are to be written to it.
            use: What for.

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
