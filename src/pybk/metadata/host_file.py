"""Who of a host is alive: a file of slots, each locked by its owner, who writes the time into it now and then.

The kernel drops the locks of a process that dies. A process that was stopped keeps its lock, but its time stands still.

The turn to change the store is a lock behind all slots, whose length names the process and the turn, so that whoever
waits can tell who has it. A process that was stopped during its turn is let run until it has finished, and stops
itself again: SIGKILL would end it, and waiting for it would stop everybody else. Whoever waits writes down which turn
is waited for, so that a process that was resumed meanwhile does not stop in a later one.

Locks are those of the open file (``F_OFD_SETLK``), so that two trees of one process keep each other out. A forked child
shares them; so it closes what it inherited.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import struct
import threading
import time
import weakref
from typing import Final

from pybk.errors import ClosedError, ForkedProcessError
from pybk.storage.io.permissions import PRIVATE, Access

SESSION_SLOTS: Final = 1
"""The first slot of a session; the one before says which turn somebody waits for."""

_WAITED_SLOT: Final = 0
_TURN_AT: Final = 1 << 40
_TURN_BITS: Final = 32
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
        access: For whom it is made; a process that can open it can lock any slot.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: str, access: Access = PRIVATE) -> None:
        self.path = path
        self.forked = False
        self._turns = secrets.randbits(_TURN_BITS)
        with _guard:
            self._fd = access.open_or_create(path)
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

    def try_lock(self, slot: int) -> bool:
        """Lock a slot, and write this process and the time into it, unless somebody else has it."""
        if not self._try_lock(slot * _SLOT.size, _SLOT.size):
            return False
        self.beat(slot)
        return True

    def unlock(self, slot: int) -> None:
        """Let go of a slot."""
        self._unlock(slot * _SLOT.size, _SLOT.size)

    def locked(self, slot: int) -> bool:
        """Tell whether somebody else has a slot locked."""
        return self._holder(slot * _SLOT.size, _SLOT.size) != 0

    def try_turn(self) -> int:
        """Take the turn to change the store; returns its name, or 0 if somebody else has it."""
        self._turns = (self._turns + 1) % (1 << _TURN_BITS)
        turn = os.getpid() << _TURN_BITS | self._turns
        return turn if self._try_lock(_TURN_AT, turn) else 0

    def end_turn(self, turn: int) -> None:
        """Let go of the turn, and stop if it could be finished only as somebody waited for it.

        Args:
            turn: What ``try_turn`` returned; 0 if it gave none, or that is not known.
        """
        self._unlock(_TURN_AT, 0)
        if turn and self._read(_WAITED_SLOT)[0] == turn:
            os.kill(os.getpid(), signal.SIGSTOP)

    def turn_holder(self) -> int:
        """Return the process that has the turn, 0 for nobody else."""
        return self._holder(_TURN_AT, 1) >> _TURN_BITS

    def let_finish(self) -> None:
        """Let whoever has the turn finish it, if it was stopped; where this may not be done, nothing happens."""
        turn = self._holder(_TURN_AT, 1)
        pid = turn >> _TURN_BITS
        # Whoever is stopped and has the turn has it until it is resumed.
        if turn and is_stopped(pid) and self._is_user(pid) and self._holder(_TURN_AT, 1) == turn:
            os.pwrite(self.usable(), _SLOT.pack(turn, os.getpid()), _WAITED_SLOT * _SLOT.size)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def beat(self, slot: int) -> None:
        """Write the time into a slot of one's own."""
        os.pwrite(self.usable(), _SLOT.pack(time.monotonic_ns(), os.getpid()), slot * _SLOT.size)

    def age_ns(self, slot: int) -> int:
        """Return how long ago the owner of a slot wrote the time, nanoseconds; the clock is one for all of a host."""
        return time.monotonic_ns() - self._read(slot)[0]

    def close(self) -> None:
        """Let go of all slots; again does nothing."""
        with _guard:
            _open.discard(self)
            fd, self._fd = self._fd, -1
            if fd >= 0:
                # Closing would do, but for a child that was forked this moment and has not closed its own yet.
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, 0, 0))
                os.close(fd)

    def _try_lock(self, start: int, size: int) -> bool:
        try:
            fcntl.fcntl(self.usable(), fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, start, size))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, start: int, size: int) -> None:
        fcntl.fcntl(self.usable(), fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, start, size))

    def _holder(self, start: int, size: int) -> int:
        """Return the length of the lock that somebody else has there, 0 for none."""
        found = fcntl.fcntl(self.usable(), fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, start, size))
        kind, _, _, length, _ = _FLOCK.unpack(found)
        return 0 if kind == fcntl.F_UNLCK else int(length)

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


def _lock(kind: int, start: int, size: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, size, 0)


def is_stopped(pid: int) -> bool:
    """Tell whether a process was stopped by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])
    except OSError:
        return False
