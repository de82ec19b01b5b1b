"""The administration interface over HTTP: routes, probes, metrics; on its own port, or mounted with ASGI."""

from pybk.admin.http.asgi import asgi_app
from pybk.admin.http.bookie_loads import BookiePorts
from pybk.admin.http.routes import Scope
from pybk.admin.http.server import AdminServer
from pybk.admin.http.tokens import Token, read_tokens

__all__ = ["AdminServer", "BookiePorts", "Scope", "Token", "asgi_app", "read_tokens"]
