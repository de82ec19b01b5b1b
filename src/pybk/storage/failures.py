"""What an error of the operating system means to a store: no room, which may pass, or a failure, which is final."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Final

from pybk.errors import StorageError, StorageFailedError, StorageFullError

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Tell whether an error says that there is no room; what was asked for may be asked for again."""
    return isinstance(error, StorageFullError) or (isinstance(error, OSError) and error.errno in _NO_ROOM)


def storage_error(error: OSError, doing: str) -> StorageError:
    """Return the error to raise for one of the operating system.

    Args:
        error: What it raised; its text names the file.
        doing: What failed, as in "closing /data".
    """
    if is_full(error):
        return StorageFullError(f"{doing}: {error}; free space on the device or delete ledgers, then try again")
    return StorageFailedError(f"{doing} failed: {error}; close the store, mend the device, open it again")


@contextmanager
def syncing(path: str) -> Iterator[None]:
    """Make a sync fail with EIO whatever the device says: trying again proves nothing, so it must not look like full.

    Raises:
        OSError: The sync inside the ``with`` failed.
    """
    try:
        yield
    except OSError as error:
        raise OSError(errno.EIO, f"a sync failed ({error})", path) from error


@contextmanager
def undoing(error: BaseException) -> Iterator[None]:
    """Undo something after an error, which stays the one to tell: it may be final when the next is not.

    Args:
        error: What is being raised; gets a note should undoing fail, too.
    """
    try:
        yield
    except OSError as problem:
        error.add_note(f"undoing what was done until then failed, too: {problem}")


def is_from_signal_handler(error: BaseException) -> bool:
    """Tell whether a signal handler raised an error, which then says nothing about what it interrupted.

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
