"""What is done with the handles of streams in a forked child, which has none of its parent's threads.

It is done before anything else in the child, so that calls need not look whether the process was forked: buffers are
emptied, locks that a thread of the parent may hold are replaced, and connections are closed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from pybk.errors import ForkedProcessError

T = TypeVar("T")

_DISABLED_BY: Final[WeakKeyDictionary[Any, Callable[[Any], None]]] = WeakKeyDictionary()


def in_children(handle: T, disable: Callable[[T], None]) -> None:
    """Have a function called with a handle in each forked child, as long as the handle is there.

    Args:
        handle: It is hashed by identity, and not kept alive.
        disable: Must not refer to the handle, wait, or raise.
    """
    _DISABLED_BY[handle] = disable


def fork_error(what: str) -> ForkedProcessError:
    """Return the error that a forked child gets for a handle of its parent."""
    return ForkedProcessError(f"{what} was opened before the fork that made this process; open it again here")


def _after_fork() -> None:
    for handle, disable in list(_DISABLED_BY.items()):
        disable(handle)


os.register_at_fork(after_in_child=_after_fork)
