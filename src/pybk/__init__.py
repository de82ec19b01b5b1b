"""Apache BookKeeper's ledgers as a library: durable, authenticated, append-only logs inside your process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pybk.version import __version__ as __version__

if TYPE_CHECKING:
    from pybk.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """Import all public names at the first use of one.

        That takes half a second, which ``pybk --help`` and imports of single modules do not have to wait for.
        """
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module  # `from pybk import public` would ask this function for `public`
        from importlib.util import find_spec

        if find_spec(f"{__name__}.{name}") is not None:  # `from pybk import keys`, in what all public names import
            return import_module(f"{__name__}.{name}")
        public = import_module(f"{__name__}.public")
        found = {each: getattr(public, each) for each in ("__all__", *public.__all__)}
        globals().update(found)
        try:
            return found[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        """Return the public names."""
        return sorted((*__getattr__("__all__"), "__all__", "__version__"))
