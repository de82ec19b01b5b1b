"""Classify errors of the operating system: a refusal may be tried again, a failure is final.

An error is final only if it leaves in doubt which bytes are durable: a sync or a synced write failed. If descriptors,
memory, threads or space ran out, the operation is refused, nothing was changed, and the caller may try again. What a
store tries again by itself, while it serves on, are its ``Troubles``: ``health()`` shows them.
"""

from __future__ import annotations

import errno
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Final

from pybk.errors import StorageError, StorageFailedError, StorageFullError, StorageRefusedError

logger = logging.getLogger(__name__)

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


def is_from_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised an error, which then says nothing about what it interrupted.

    Python calls handlers between any two instructions of the main thread, and what they raise looks like an error of
    the interrupted call: a handler's TimeoutError is an OSError. Only the traceback shows the handler's frame.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code in handlers:
            return True
        step = step.tb_next
    return False


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a Python function, method, partial or object that can be called; None for all else."""
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    code = getattr(function, "__code__", None) or getattr(vars(type(handler)).get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None


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
