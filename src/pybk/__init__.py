"""Apache BookKeeper's ledgers as a library: durable, authenticated, append-only logs inside your process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pybk.version import __version__ as __version__

if TYPE_CHECKING:
    from pybk.public import *  # noqa: F403
else:
    from threading import RLock as _RLock

    _importing = _RLock()
    """Held while the module of a name is imported.

    Of two threads that use their first names at the same time, one may import a package, which needs a module of it,
    and the other that module, which needs the package: the interpreter then gives one of them a part of the package.
    """

    def __getattr__(name: str) -> object:
        """Import the module of a public name at its first use, or a module of the package.

        All public names together take a second, which a program that uses a few does not have to wait for.
        """
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module  # `from pybk import public_homes` would ask this function for it
        from importlib.util import find_spec

        homes = import_module(f"{__name__}.public_homes").HOMES
        if name == "__all__":
            return sorted(homes)
        if name not in homes:
            if find_spec(f"{__name__}.{name}") is None:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
            # Such as `from pybk import keys`. What is imported below does that, too, so it takes no lock.
            return import_module(f"{__name__}.{name}")
        with _importing:
            found = globals()[name] = getattr(import_module(homes[name]), name)
        return found

    def __dir__() -> list[str]:
        """Return the public names."""
        return sorted((*__getattr__("__all__"), "__all__", "__version__"))
