"""Errors of the operating system: a refusal may be tried again, a failure is final; and spare file descriptors.

An error is final only if it leaves in doubt which bytes are durable: a sync or a synced write failed. If descriptors,
memory, threads or space ran out, the operation is refused, nothing was changed, and the caller may try again. What a
store tries again by itself, while it serves on, are its ``Troubles``: ``health()`` shows them.

By spare descriptors a store opens its files when the process has used up its limit. They are open on ``/dev/null``, and
one is closed when the operating system refuses a descriptor for a file of the store. Another thread may take the
descriptor meanwhile, for a connection; then the next one is closed. The process's limit is never changed.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, TypeVar

from pybk.deferral import import_by, importing
from pybk.errors import StorageError, StorageFailedError, StorageFullError, StorageRefusedError
from pybk.threads.interrupts import guarded

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_PASSING: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


class IrregularFileError(OSError):
    """Something that is not a regular file lies in the place of one; ``strerror`` says what it is, and the remedy."""


class NotOpenedError(OSError):
    """A directory could not be opened to be synced, so nothing was synced and nothing is in doubt."""


def is_full(error: BaseException) -> bool:
    """Return whether an error says that space is missing; the operation may be tried again."""
    return isinstance(error, StorageFullError) or (isinstance(error, OSError) and error.errno in _NO_ROOM)


def is_passing(error: BaseException) -> bool:
    """Return whether an error says that descriptors, memory or threads ran out; the operation may be tried again.

    Not for an error of a synced write, whose bytes are in doubt whatever its number.
    """
    if isinstance(error, OSError):
        return error.errno in _PASSING
    return isinstance(error, StorageRefusedError) and not isinstance(error, StorageFullError)


def is_refused(error: BaseException) -> bool:
    """Return whether an error means that space, descriptors, memory or threads ran out, so nothing is in doubt."""
    return is_full(error) or is_passing(error)


def storage_error(
    error: OSError, doing: str, remedy: str = "close the store, mend the device, open it again"
) -> StorageError:
    """Return the pybk error for an error of the operating system.

    Args:
        error: The error, whose text names the file.
        doing: The operation that failed, such as "closing /data".
        remedy: The remedy after a failure that is final.
    """
    if is_full(error):
        return StorageFullError(f"{doing}: {error}; free space on the device or delete ledgers, then try again")
    if is_passing(error):
        return refused(error, doing)
    if isinstance(error, IrregularFileError):
        return StorageFailedError(f"{doing} failed: {error.filename} is {error.strerror}")
    return StorageFailedError(f"{doing} failed: {error}; {remedy}")


def refused(error: BaseException, doing: str) -> StorageRefusedError:
    """Return the error for an operation that was refused and may be tried again."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "close files or connections of this process, or raise its limit (ulimit -n)"
    elif isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        remedy = "free memory"
    elif isinstance(error, RuntimeError) or (isinstance(error, OSError) and error.errno == errno.EAGAIN):
        remedy = "end threads or processes, or raise the limit of them (ulimit -u, pids.max)"
    else:
        remedy = "look at the device"
    return StorageRefusedError(f"{doing} was refused: {error!r}; {remedy}, then try again")


@contextmanager
def syncing(path: str) -> Iterator[None]:
    """Turn any error of a sync into EIO: a second sync proves nothing, so a full device must not look like a refusal.

    Raises:
        NotOpenedError: The sync was not begun, as its directory could not be opened.
        OSError: The sync inside the ``with`` failed.
    """
    try:
        yield
    except NotOpenedError:
        raise
    except OSError as error:
        raise OSError(errno.EIO, f"a sync failed ({error})", path) from error


@contextmanager
def undoing(error: BaseException) -> Iterator[None]:
    """Clean up after an error; an error of the clean-up does not replace it, because the first one may be final.

    Args:
        error: The error being raised; gets a note if the clean-up fails, too.
    """
    try:
        yield
    except OSError as problem:
        error.add_note(f"undoing what was done until then failed, too: {problem}")


CHECKING: Final = "checking stored entries"
"""The trouble of damaged records that a scrub has found, until they are mended; it has a code of its own in health."""


class Troubles:
    """Problems of tasks that failed or were refused, and are tried again, by task.

    Threads: any.
    """

    def __init__(self, root: str) -> None:
        """Use ``root`` to name the store in the log."""
        self._root = root
        self._lock = threading.Lock()
        self._found: dict[str, str] = {}

    def note(self, doing: str, problem: object) -> None:
        """Record the problem of a task; logged when it is new."""
        with self._lock:
            new = doing not in self._found
            self._found[doing] = f"{doing}: {problem}"
        if new:
            logger.warning("%s serves on, but %s: %s; it is tried again", self._root, doing, problem)

    def clear(self, doing: str) -> None:
        """Record that a task went well."""
        if doing in self._found:
            with self._lock:
                self._found.pop(doing, None)
            logger.info("%s: %s goes well again", self._root, doing)

    def of(self, doing: str) -> str | None:
        """Return the problem of one task, None if it has none."""
        return self._found.get(doing)

    def all(self) -> tuple[str, ...]:
        """Return all problems of now, one text each."""
        with self._lock:
            return tuple(self._found.values())


# ---- spare descriptors ---------------------------------------------------------------------------------------------

SPARES: Final = 16
KEPT_FOR_SYNCS: Final = 4
"""Spares reserved for syncs, which return them at once; files that stay open may not take these."""

_FOR_IMPORTS: Final = 4
"""Descriptors that are free when an import begins: it needs one, and other threads may take some meanwhile."""

_NEEDED: Final = 56
"""Descriptors that a busy store with one directory for each tier has open, including the spares and some maps."""
_LEFT_MAX: Final = 64
_LEFT_SHARE: Final = 8
"""Connections leave so many descriptors, or this part of the limit if that is less, to the rest of the process."""

_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE)

_guard: Final = threading.RLock()  # reentrant, because a signal handler may fork
held: Final[list[int]] = []
"""The descriptors kept in reserve."""

_users: Final[list[int]] = [0]


def _drop_inherited() -> None:
    while held:
        os.close(held.pop())
    _users[0] = 0
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_drop_inherited)
# After those of ``logging``, which this module imports: a fork takes locks in the reverse order, and an import, which
# has ``importing``, takes that of ``logging``.
os.register_at_fork(before=importing.acquire, after_in_parent=importing.release, after_in_child=importing.release)


def acquire_spares() -> None:
    """Hold spare descriptors until ``release_spares`` was called as often.

    Raises:
        StorageError: The limit of this process leaves too few descriptors for a store.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and os.path.isdir("/proc/self/fd"):
        used = len(os.listdir("/proc/self/fd")) - 1 - len(held)
        if limit - used < _NEEDED:
            raise StorageError(
                f"this process may have {limit} file descriptors (RLIMIT_NOFILE) and has {used} open; a store needs "
                f"{_NEEDED} more: raise the limit before it starts (ulimit -n, LimitNOFILE= of systemd)"
            )
    with importing, _guard:
        _users[0] += 1
        fill_spares()


def release_spares() -> None:
    """Undo one ``acquire_spares``; the last call closes the spare descriptors. In a forked child, does nothing."""
    with _guard:
        _users[0] = max(0, _users[0] - 1)
        while held and not _users[0]:
            os.close(held.pop())


def fill_spares() -> str | None:
    """Replace used spare descriptors; return the reason if that is impossible, else None."""
    if len(held) >= SPARES:
        return None
    with importing, _guard:  # not what a late import was given
        try:
            while _users[0] and len(held) < SPARES:
                held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            return f"{len(held)} of {SPARES} spare file descriptors are left: {error}; close files or connections"
    return None


def with_spare(opening: Callable[[], T], *, keep: int = 0) -> T:
    """Open something that takes descriptors, at the cost of spare ones if there are no others.

    Args:
        opening: Opens it, and leaves nothing open if it raises.
        keep: Spare descriptors to leave to others.

    Raises:
        OSError: As ``opening``; EMFILE and ENFILE once the spare ones are used up.
    """
    while True:
        try:
            return opening()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            with _guard:
                if len(held) <= keep:
                    raise
                os.close(held.pop())


def open_with_spare(path: str, flags: int, mode: int = 0o777, *, keep: int = 0) -> int:
    """Open a file, at the cost of a spare descriptor if there is no other.

    Args:
        path: The file.
        flags: As for ``os.open``; O_CLOEXEC is added.
        mode: As for ``os.open``.
        keep: Spare descriptors to leave to others.

    Raises:
        OSError: As ``os.open``; EMFILE and ENFILE once the spare ones are used up.
    """
    return with_spare(lambda: os.open(path, flags | os.O_CLOEXEC, mode), keep=keep)


def maps_limit(most: int) -> int:
    """Return ``most``, but at most a quarter of the limit on descriptors and at least 16; a kept map has one."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if limit == resource.RLIM_INFINITY else max(16, min(most, limit // 4))


def descriptor_max() -> int:
    """Return the largest descriptor that a connection of a server may have; a larger one is ended.

    The kernel gives the lowest descriptor that is free, so the number of a new connection's shows how few are left.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit - 1 - min(_LEFT_MAX, limit // _LEFT_SHARE)


def import_with_spare(call: Callable[[], None]) -> None:
    """Import something that was not imported at the beginning, at the cost of spare descriptors if there are no others.

    What is half imported cannot always be imported again, as numpy cannot. So the first descriptor is tried before
    anything is imported, and no signal interrupts the import.

    Args:
        call: Imports it, and has one descriptor open at any time.

    Raises:
        OSError: EMFILE and ENFILE once the spare ones are used up.
        BaseException: As ``call``.
    """

    def importing_it() -> None:
        with importing, ExitStack() as tried:
            for _ in range(_FOR_IMPORTS):
                tried.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            tried.close()
            call()

    guarded(with_spare, importing_it)


import_by(import_with_spare, guarded)
