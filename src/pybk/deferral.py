"""Imports at the first use of a name: a process imports only the modules that it uses.

A package states in its ``__init__`` which of its names are imported late, for type checkers and for the interpreter::

    TYPE_CHECKING = False
    if TYPE_CHECKING:
        from pybk.manager.atomic_group import AtomicGroup as AtomicGroup
    else:
        __getattr__ = deferred(__name__, {"atomic_group": "AtomicGroup"})

A module that needs such a name begins with ``from pybk import manager``, and uses ``manager.AtomicGroup``. ``np`` and
``asyncio`` are numpy and asyncio, imported alike; ``LateModule`` is for other modules.

The error of a name that was removed from a package or a class names what to use instead (``deferred``, ``without``).

All other imports stand at the beginning of a module, except those of packages that may be missing, and of the native
core (``native_core``), which may be missing as well.

An import needs a file descriptor, and a process may have none left. While a store is open, a spare descriptor is closed
for the import (``import_by``).

Threads: any. One thread at a time imports, and none while the process forks (``storage/io/failures.py``): a
child would inherit the lock of the module that another thread was importing.
"""

# The interpreter itself has imported what this module imports, because `pybk --version` waits for it.

from __future__ import annotations

import os
import sys
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping
    from typing import Any, Final, NoReturn, TypeVar

    C = TypeVar("C", bound=type)

    import numpy as np

    Way = Callable[[Callable[[], None]], None]

__all__ = ("LateModule", "asyncio", "deferred", "import_by", "import_rest", "importing", "native_core", "np", "without")

importing: Final = RLock()
"""Held while the module of a name is imported.

Without it, one thread could import a package while another imports a module of that package. Each of these imports
needs the other, and the interpreter would give one of the threads an incomplete package.
"""


def _at_once(call: Callable[[], None]) -> None:
    call()


_way: Final[list[Way]] = [_at_once]
_guard: Final[list[Way]] = [_at_once]


def import_by(way: Way, guard: Way) -> None:
    """Make later imports by ``way(call)``, which makes the call, and waits for those of others by ``guard(call)``."""
    _way[0], _guard[0] = way, guard


_late: Final[dict[str, None]] = {}
"""The modules that ``deferred`` imports late."""


def import_rest(package: str) -> None:
    """Import all modules that ``package`` and the packages below it import late and that are not imported yet.

    A process that runs for long calls it soon after its start. It then needs no file of pybk if these are replaced.
    """
    while left := [name for name in _late if name.startswith(f"{package}.") and name not in sys.modules]:
        for name in left:
            module_of(name)


def module_of(name: str) -> object:
    """Return a module, and import it if need be; wait for another thread that is importing it."""
    found = sys.modules.get(name)
    if found is None:

        def call() -> None:
            with importing:
                __import__(name)

        _way[0](call)
    # A signal in this wait would leave the lock of the module locked. It is made without `importing`, for which the
    # thread that imports the module may wait.
    elif getattr(getattr(found, "__spec__", None), "_initializing", False):

        def wait() -> None:
            __import__(name)

        _guard[0](wait)
    return sys.modules[name]


def deferred(package: str, names: Mapping[str, str], **removed: str) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package, which imports the module of a name at the first use of the name.

    Args:
        package: The package.
        names: The names of each module, separated by spaces, by module relative to the package. The name of the module
            itself stands for the module.
        removed: What to use instead of each name that the package had once, in words.
    """
    homes = homes_of(names)
    _late.update(dict.fromkeys(f"{package}.{module}" for module in names))

    def first_use(name: str) -> object:
        if name in removed:
            raise AttributeError(_removed(f"{package}.{name}", removed[name]))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of(f"{package}.{homes[name]}")
        found = module if homes[name] == name else getattr(module, name)
        setattr(sys.modules[package], name, found)
        return found

    return first_use


def homes_of(names: Mapping[str, str]) -> dict[str, str]:
    """Return the module of each name, given the names of each module as ``deferred`` takes them."""
    return {name: module for module, text in names.items() for name in text.split()}


def _removed(name: str, instead: str) -> str:
    return f"{name} is gone; {instead}"


class _RemovedMember:
    """Stands in a class for a member that it had once: an attribute that does not exist, with an error of its own."""

    def __init__(self, name: str, instead: str) -> None:
        self._name = name
        self._instead = instead

    def __get__(self, instance: object, owner: type) -> NoReturn:
        """Raise AttributeError, which names what to use instead."""
        raise AttributeError(_removed(f"{owner.__name__}.{self._name}", self._instead))


def without(**removed: str) -> Callable[[C], C]:
    """Return a decorator of a class that had some members once.

    Args:
        removed: What to use instead of each, in words.
    """

    def decorate(decorated: C) -> C:
        for name, instead in removed.items():
            setattr(decorated, name, _RemovedMember(name, instead))
        return decorated

    return decorate


def native_core() -> Any:
    """Return the module ``pybk._native``, or None without it; ``PYBK_PURE=1`` in the environment leaves it out."""
    if os.environ.get("PYBK_PURE", "0") not in ("", "0"):
        return None
    try:
        __import__("pybk._native")  # importlib takes a millisecond, for which `pybk --version` would wait
    except ImportError:
        return None
    return sys.modules["pybk._native"]


class LateModule:
    """A stand-in for a module, which imports it when one of its names is used first.

    Args:
        name: The module, absolute.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> object:
        """Return a name of the module, and keep it, so this is called once for each name."""
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        found = getattr(module_of(self._name), name)
        setattr(self, name, found)
        return found


if not TYPE_CHECKING:
    asyncio = LateModule("asyncio")
    np = LateModule("numpy")
