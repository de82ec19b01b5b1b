"""The administration interface over HTTP: routes, probes, metrics; on its own port, or mounted with ASGI.

``AdminServer`` and ``asgi_app`` need ``pip install "pybk[http]"``; without it, using them raises UsageError.
"""

from __future__ import annotations

from pybk.admin.http.extra import check_installed
from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.admin.http.asgi import asgi_app as asgi_app
    from pybk.admin.http.bookie_loads import BookiePorts as BookiePorts
    from pybk.admin.http.certificates import checked_context as checked_context
    from pybk.admin.http.server import AdminServer as AdminServer
    from pybk.admin.http.tokens import Scope as Scope
    from pybk.admin.http.tokens import Token as Token
    from pybk.admin.http.tokens import read_tokens as read_tokens
else:
    _first_use = deferred(
        __name__,
        {
            "asgi": "asgi_app",
            "bookie_loads": "BookiePorts",
            "certificates": "checked_context",
            "server": "AdminServer",
            "tokens": "Scope Token read_tokens",
        },
    )

    def __getattr__(name: str) -> object:
        """Import the module of a public name at its first use; commands need few, and work without the extra."""
        if name in ("AdminServer", "asgi_app"):
            check_installed()
        return _first_use(name)


__all__ = ["AdminServer", "BookiePorts", "Scope", "Token", "asgi_app", "read_tokens"]
