"""Start threads, and say what to do when the operating system gives no more of them."""

from __future__ import annotations

import threading

from pybk.errors import StorageRefusedError


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        StorageRefusedError: The operating system gives no more threads to this process.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # it came while ``start`` waited, with its lock given away
            raise error.__context__ from None
        raise StorageRefusedError(
            f"starting the thread {thread.name} was refused: {error!r}; end threads or processes, or raise the limit "
            "of them (ulimit -u, pids.max), then try again"
        ) from error
