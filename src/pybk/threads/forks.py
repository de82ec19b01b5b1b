"""What becomes of an object in a forked child, which has none of the threads of its parent.

The functions that ``in_children`` was given run first in the child: they empty buffers, replace locks that a thread of
the parent may hold, and close connections. So other calls need not check whether the process was forked, and a close
or a finaliser in the child waits for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_DISABLED_BY: Final[WeakKeyDictionary[Any, Callable[[Any], None]]] = WeakKeyDictionary()


def in_children(handle: T, disable: Callable[[T], None]) -> None:
    """Call a function with an object in each forked child, as long as the object exists.

    Args:
        handle: The object; it is hashed by identity, and not kept alive.
        disable: The function; it must not refer to the object, wait, or raise.
    """
    _DISABLED_BY[handle] = disable


def _after_fork() -> None:
    for handle, disable in list(_DISABLED_BY.items()):
        disable(handle)


os.register_at_fork(after_in_child=_after_fork)
