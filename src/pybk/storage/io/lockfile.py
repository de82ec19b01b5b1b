"""An exclusive file lock that a process holds and its forked children do not.

``flock`` locks the open file description, which a forked child shares: a child that outlived its parent would still
hold the parent's lock. So the child closes the descriptors of locks that it inherited.
"""

from __future__ import annotations

import fcntl
import os
import threading
from typing import Final

from pybk.errors import StoreLockedError
from pybk.storage.io.permissions import PRIVATE, Access

# Descriptors of held locks. Reentrant, because a signal handler may fork.
_lock_guard: Final = threading.RLock()
_lock_fds: Final[set[int]] = set()


def _drop_inherited_locks() -> None:
    # Closed and not unlocked, because the parent shares the open file description and keeps the lock.
    for fd in _lock_fds:
        os.close(fd)
    _lock_fds.clear()
    _lock_guard.release()


os.register_at_fork(
    before=_lock_guard.acquire, after_in_parent=_lock_guard.release, after_in_child=_drop_inherited_locks
)


def _locked(path: str, fd: int) -> StoreLockedError:
    """Return the error that names the holder of a file's lock; the caller holds ``_lock_guard``."""
    found = os.fstat(fd)
    held = (os.fstat(each) for each in _lock_fds)
    if any((each.st_dev, each.st_ino) == (found.st_dev, found.st_ino) for each in held):
        return StoreLockedError(
            f"{path}: locked by this very process ({os.getpid()}), in which another manager has it open; use that "
            "manager, or close it first",
            pid=os.getpid(),
        )
    text = os.pread(fd, 20, 0)
    pid = int(text) if text.isdigit() else None
    holder = "another process" if pid is None else f"process {pid}"
    if pid == os.getpid():  # process ids are unique only within one PID namespace
        holder = f"another process, which has the id {pid} in its own container"
    return StoreLockedError(f"{path}: locked by {holder}; close the store there first, or open it read-only", pid=pid)


class FileLock:
    """The exclusive lock of a file. Threads: any.

    Any process that can open the file can hold the lock, so the file has the permissions of the store's other files.
    """

    __slots__ = ("_fd",)

    def __init__(self, path: str, access: Access = PRIVATE) -> None:
        """Take the lock, making the file if it is missing, and write this process's id into it.

        Raises:
            StoreLockedError: Another process, or this process itself, holds the lock; the error names the holder.
            OSError: The file cannot be opened or written.
        """
        with _lock_guard:
            fd = access.open_or_create(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
            except BlockingIOError:
                error = _locked(path, fd)
                os.close(fd)
                raise error from None
            except BaseException:
                os.close(fd)
                raise
            _lock_fds.add(fd)
            self._fd = fd

    def release(self) -> None:
        """Release the lock; does nothing if it was released before, or in a forked child."""
        with _lock_guard:
            # If absent, the lock was released or a fork closed it, and the number may now belong to another file.
            if self._fd in _lock_fds:
                _lock_fds.remove(self._fd)
                # A close is not enough while a child that was just forked has not yet closed its own descriptor.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                os.close(self._fd)
            self._fd = -1
