"""Apache BookKeeper's ledgers as a library: durable, authenticated, append-only logs inside your process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pybk.version import __version__ as __version__

if TYPE_CHECKING:
    from pybk.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """Import the module of a public name at its first use, or a module of the package.

        All public names together take a second, which a program that uses a few does not have to wait for.
        """
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module  # `from pybk import public_homes` would ask this function for it
        from importlib.util import find_spec

        homes = import_module(f"{__name__}.public_homes").HOMES
        if name in homes:
            found = getattr(import_module(homes[name]), name)
        elif name == "__all__":
            found = sorted(homes)
        elif find_spec(f"{__name__}.{name}") is not None:  # `from pybk import keys`
            return import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        """Return the public names."""
        return sorted((*__getattr__("__all__"), "__all__", "__version__"))
