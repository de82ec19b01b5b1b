"""Who of a host is alive: a file of slots, each locked by its owner, who writes the time into it now and then.

The kernel drops the locks of a process that dies. A process that was stopped keeps its lock, but its time stands still.

The first slot is the turn to change the store. Whoever was stopped while it was its turn is let run until it has
finished, and stops itself again: SIGKILL would end it, and waiting for it would stop everybody else. Whoever waits
writes down which turn is waited for, so that a process that was resumed meanwhile does not stop in a later one.

Locks are those of the open file (``F_OFD_SETLK``), so that two trees of one process keep each other out. A forked child
shares them; so it closes what it inherited.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import threading
import time
import weakref
from typing import Final

from pybk.errors import ClosedError, ForkedProcessError

WRITER_SLOT: Final = 0
"""Locked by whoever changes the store."""

SESSION_SLOTS: Final = 2
"""The first slot of a session; the one before says whose turn somebody waits for."""

_WAITED_SLOT: Final = 1

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

    def usable(self) -> int:
        """Return the descriptor.

        Raises:
            ForkedProcessError: This is a forked child.
            ClosedError: The file is closed.
        """
        if self.forked:
            raise ForkedProcessError(f"{self.path}: opened before the fork that made this process; open it again here")
        if self._fd < 0:
            raise ClosedError(f"{self.path}: this metadata store is closed")
        return self._fd

    def try_lock(self, slot: int) -> int:
        """Lock a slot, and write this process and the time into it, unless somebody else has it.

        Returns:
            What was written, 0 if somebody else has it.
        """
        try:
            fcntl.fcntl(self.usable(), fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, slot))
        except (BlockingIOError, PermissionError):
            return 0
        return self.beat(slot)

    def unlock(self, slot: int) -> None:
        """Let go of a slot."""
        fcntl.fcntl(self.usable(), fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, slot))

    def end_turn(self, turn: int) -> None:
        """Let go of the turn that ``try_lock`` gave, and stop if it was finished only as somebody waited for it."""
        self.unlock(WRITER_SLOT)
        if self._read(_WAITED_SLOT)[0] == turn:
            os.kill(os.getpid(), signal.SIGSTOP)

    def let_finish(self) -> None:
        """Let whoever has the turn finish it, if it was stopped; where this may not be done, nothing happens."""
        turn, pid = self._read(WRITER_SLOT)
        if is_stopped(pid) and self._is_user(pid):
            os.pwrite(self.usable(), _SLOT.pack(turn, os.getpid()), _WAITED_SLOT * _SLOT.size)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def locked(self, slot: int) -> bool:
        """Tell whether somebody else has a slot locked."""
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(self.usable(), fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, slot)))
        return bool(kind != fcntl.F_UNLCK)

    def beat(self, slot: int) -> int:
        """Write the time into a slot of one's own, and return it, in nanoseconds."""
        now = time.monotonic_ns()
        os.pwrite(self.usable(), _SLOT.pack(now, os.getpid()), slot * _SLOT.size)
        return now

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
        data = os.pread(self.usable(), _SLOT.size, slot * _SLOT.size)
        written, pid = _SLOT.unpack(data.ljust(_SLOT.size, b"\0"))
        return written, pid

    def _is_user(self, pid: int) -> bool:
        """Tell whether a process has this file open; a number may mean another process in another container."""
        mine = os.fstat(self.usable())
        try:
            files = [os.stat(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            return False
        return any(os.path.samestat(mine, file) for file in files)

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
