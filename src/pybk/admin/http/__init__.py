"""The administration interface over HTTP: routes, probes, metrics; on its own port, or mounted with ASGI.

``AdminServer`` and ``asgi_app`` need ``pip install "pybk[http]"``; without it, using them raises UsageError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pybk.admin.http.asgi import asgi_app
    from pybk.admin.http.bookie_loads import BookiePorts
    from pybk.admin.http.server import AdminServer
    from pybk.admin.http.tokens import Scope, Token, read_tokens

__all__ = ["AdminServer", "BookiePorts", "Scope", "Token", "asgi_app", "read_tokens"]

_HOMES: Final = {
    "AdminServer": "server",
    "BookiePorts": "bookie_loads",
    "Scope": "tokens",
    "Token": "tokens",
    "asgi_app": "asgi",
    "read_tokens": "tokens",
}


def __getattr__(name: str) -> object:
    """Import the module of a public name at its first use; commands need few, and work without the extra."""
    from importlib import import_module

    from pybk.admin.http.extra import check_installed

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] in ("asgi", "server"):
        check_installed()
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
