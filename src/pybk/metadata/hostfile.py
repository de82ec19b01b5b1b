"""Who of a host is alive: a file of slots, each locked by its owner, who writes the time into it now and then.

The kernel drops the locks of a process that dies. A process that was stopped keeps its lock, but its time stands still.

Locks are those of the open file (``F_OFD_SETLK``), so that two trees of one process keep each other out. A forked child
shares them; so it closes what it inherited.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
import weakref
from typing import Final

from pybk.errors import ClosedError, ForkedProcessError

WRITER_SLOT: Final = 0
"""Locked by whoever changes the store."""

_SLOT: Final = struct.Struct("<QQ")
_FLOCK: Final = struct.Struct("hhqqi4x")

_guard: Final = threading.RLock()
_open: Final[weakref.WeakSet[HostFile]] = weakref.WeakSet()


def _close_inherited() -> None:
    for file in list(_open):
        file._drop()
    _open.clear()
    _guard.release()


class HostFile:
    """The slots; see this module. Threads: any.

    Args:
        path: The file, made if it is missing.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.forked = False
        with _guard:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _open.add(self)

    def try_lock(self, slot: int) -> bool:
        """Lock a slot, and write this process and the time into it, unless somebody else has it."""
        try:
            fcntl.fcntl(self._usable(), fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, slot))
        except (BlockingIOError, PermissionError):
            return False
        self.beat(slot)
        return True

    def unlock(self, slot: int) -> None:
        """Let go of a slot."""
        fcntl.fcntl(self._usable(), fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, slot))

    def locked(self, slot: int) -> bool:
        """Tell whether somebody else has a slot locked."""
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(self._usable(), fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, slot)))
        return bool(kind != fcntl.F_UNLCK)

    def beat(self, slot: int) -> None:
        """Write the time into a slot of one's own."""
        os.pwrite(self._usable(), _SLOT.pack(time.monotonic_ns(), os.getpid()), slot * _SLOT.size)

    def age_ns(self, slot: int) -> int:
        """Return how long ago the owner of a slot wrote the time, nanoseconds; the clock is one for all of a host."""
        return time.monotonic_ns() - self._read(slot)[0]

    def pid(self, slot: int) -> int:
        """Return the process that had a slot last."""
        return self._read(slot)[1]

    def close(self) -> None:
        """Let go of all slots; again does nothing."""
        with _guard:
            _open.discard(self)
            fd, self._fd = self._fd, -1
            if fd >= 0:
                # Closing would do, but for a child that was forked this moment and has not closed its own yet.
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
                os.close(fd)

    def _read(self, slot: int) -> tuple[int, int]:
        data = os.pread(self._usable(), _SLOT.size, slot * _SLOT.size)
        written, pid = _SLOT.unpack(data.ljust(_SLOT.size, b"\0"))
        return written, pid

    def _usable(self) -> int:
        if self.forked:
            raise ForkedProcessError(f"{self.path}: opened before the fork that made this process; open it again here")
        if self._fd < 0:
            raise ClosedError(f"{self.path}: this metadata store is closed")
        return self._fd

    def _drop(self) -> None:
        self.forked = True
        fd, self._fd = self._fd, -1
        # Closed, not unlocked: the locks belong to the open file, which the parent shares and keeps.
        with contextlib.suppress(OSError):
            os.close(fd)


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_inherited)


def _lock(kind: int, slot: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, slot * _SLOT.size, _SLOT.size, 0)


def is_stopped(pid: int) -> bool:
    """Tell whether a process was stopped by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])
    except OSError:
        return False
