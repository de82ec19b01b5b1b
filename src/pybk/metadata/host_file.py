"""The file ``sessions`` of an LMDB metadata store: locks and heartbeats of the host's processes.

Theory of operation
-------------------

All locks are locks of the open file description (``F_OFD_SETLK``), so two stores of one process exclude each other as
well. The kernel drops them when the process dies, but not while it is stopped. A forked child shares the locks of its
parent; it closes the file without unlocking it (``_close_inherited``).

Slots. The file is an array of slots of 16 bytes: the time of the last heartbeat (CLOCK_MONOTONIC, nanoseconds) and
the process id. A session's process keeps its slot locked. A locked slot with an old heartbeat belongs to a process
that is stopped, frozen or starved.

The write lock is a lock far beyond all slots. A lock has no payload, so its *length* carries the ticket of its holder:
``process id << 32 | counter``, with a counter that differs each time. Waiting processes read the ticket with
``F_OFD_GETLK``. A holder that was stopped (SIGSTOP) would block every writer, and this module may not kill it. So a
waiting process (``resume_stopped_writer``)

1. checks that the holder is stopped and has this file open, and that it still holds the same ticket,
2. writes the ticket into slot 0, and
3. sends SIGCONT.

The holder finishes its change, releases the lock, finds its ticket in slot 0, and stops itself again
(``release_write_lock``). Because of the ticket, a process that a user resumed meanwhile does not stop itself after a
later change.
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
"""The first slot of a session; slot 0 holds the ticket of the stopped writer that was resumed last."""

_AWAITED_SLOT: Final = 0
_WRITE_LOCK_AT: Final = 1 << 40
"""The offset of the write lock, beyond all slots."""

_TICKET_BITS: Final = 32
"""The bits of a ticket below the process id, which are a counter."""

SLOT: Final = struct.Struct("<QQ")
"""One slot of the file."""

_FLOCK: Final = struct.Struct("hhqqi4x")

_guard: Final = threading.RLock()
_open: Final[weakref.WeakSet[HostFile]] = weakref.WeakSet()


def _close_inherited() -> None:
    for file in list(_open):
        file._drop()
    _open.clear()
    _guard.release()


class HostFile:
    """The slots and the write lock; see this module. Threads: any.

    Args:
        path: The file; created if it is missing.
        access: Permissions of a new file; a process that can open it can lock any slot.

    Attributes:
        path: The file.
        forked: Whether this process is a forked child, which cannot use the file.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: str, access: Access = PRIVATE) -> None:
        self.path = path
        self.forked = False
        self._tickets = secrets.randbits(_TICKET_BITS)
        with _guard:
            self.fd = access.open_or_create(path)
            """The descriptor of the file."""
            _open.add(self)

    def descriptor(self) -> int:
        """Return the file's descriptor.

        Raises:
            ForkedProcessError: This is a forked child.
            ClosedError: The file is closed.
        """
        if self.forked:
            raise ForkedProcessError(f"{self.path}: opened before the fork that made this process; open it again here")
        if self.fd < 0:
            raise ClosedError(f"{self.path}: this metadata store is closed")
        return self.fd

    def try_lock(self, slot: int) -> bool:
        """Lock a slot and write a heartbeat into it; return False if another process has it."""
        if not self._try_lock(slot * SLOT.size, SLOT.size):
            return False
        self.heartbeat(slot)
        return True

    def unlock(self, slot: int) -> None:
        """Unlock a slot of this process."""
        self._unlock(slot * SLOT.size, SLOT.size)

    def locked(self, slot: int) -> bool:
        """Return whether another process has a slot locked."""
        return self._holder(slot * SLOT.size, SLOT.size) != 0

    def try_write_lock(self) -> int:
        """Take the write lock without waiting; return the ticket, or 0 if another process has the lock."""
        self._tickets = (self._tickets + 1) % (1 << _TICKET_BITS)
        ticket = os.getpid() << _TICKET_BITS | self._tickets
        return ticket if self._try_lock(_WRITE_LOCK_AT, ticket) else 0

    def release_write_lock(self, ticket: int) -> None:
        """Release the write lock; stop this process again if it was resumed only to release it.

        Args:
            ticket: The ticket of ``try_write_lock``; 0 to stop nothing.
        """
        self._unlock(_WRITE_LOCK_AT, 0)
        if ticket and self._read(_AWAITED_SLOT)[0] == ticket:
            os.kill(os.getpid(), signal.SIGSTOP)

    def writer_pid(self) -> int:
        """Return the id of the other process that holds the write lock, 0 if none does."""
        return self._holder(_WRITE_LOCK_AT, 1) >> _TICKET_BITS

    def resume_stopped_writer(self) -> None:
        """Resume the holder of the write lock if it is stopped; without the permission to signal it, do nothing."""
        ticket = self._holder(_WRITE_LOCK_AT, 1)
        pid = ticket >> _TICKET_BITS
        # A stopped process keeps the lock until it is resumed, so the second check of the ticket is not too early.
        if ticket and is_stopped(pid) and self._is_user(pid) and self._holder(_WRITE_LOCK_AT, 1) == ticket:
            os.pwrite(self.descriptor(), SLOT.pack(ticket, os.getpid()), _AWAITED_SLOT * SLOT.size)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def heartbeat(self, slot: int) -> None:
        """Write the current time into a slot that this process has locked."""
        os.pwrite(self.descriptor(), SLOT.pack(time.monotonic_ns(), os.getpid()), slot * SLOT.size)

    def age_ns(self, slot: int) -> int:
        """Return the nanoseconds since the last heartbeat in a slot; all processes of a host share the clock."""
        return time.monotonic_ns() - self._read(slot)[0]

    def close(self) -> None:
        """Unlock all slots and the write lock, and close the file. Idempotent."""
        with _guard:
            _open.discard(self)
            fd, self.fd = self.fd, -1
            if fd >= 0:
                # Closing alone does not unlock if a child was forked just now and has not closed its copy yet.
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, 0, 0))
                os.close(fd)

    def _try_lock(self, start: int, size: int) -> bool:
        try:
            fcntl.fcntl(self.descriptor(), fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, start, size))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, start: int, size: int) -> None:
        fcntl.fcntl(self.descriptor(), fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, start, size))

    def _holder(self, start: int, size: int) -> int:
        """Return the length of the lock that another process has there, 0 for none."""
        found = fcntl.fcntl(self.descriptor(), fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, start, size))
        kind, _, _, length, _ = _FLOCK.unpack(found)
        return 0 if kind == fcntl.F_UNLCK else int(length)

    def _read(self, slot: int) -> tuple[int, int]:
        data = os.pread(self.descriptor(), SLOT.size, slot * SLOT.size)
        written, pid = SLOT.unpack(data.ljust(SLOT.size, b"\0"))
        return written, pid

    def _is_user(self, pid: int) -> bool:
        """Return whether a process has this file open: in another container the id may be that of another process."""
        mine = os.fstat(self.descriptor())
        try:
            files = [os.stat(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            return False
        return any(os.path.samestat(mine, file) for file in files)

    def _drop(self) -> None:
        self.forked = True
        fd, self.fd = self.fd, -1
        # Closed and not unlocked: the locks belong to the open file description, which the parent keeps.
        with contextlib.suppress(OSError):
            os.close(fd)


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_inherited)


def _lock(kind: int, start: int, size: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, size, 0)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])
    except OSError:
        return False
