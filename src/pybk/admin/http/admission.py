"""The checks that a request has to pass before it is answered.

The checks are, in this order: the ``Host`` of the request, against other sites that made a browser resolve their name
to this address; its ``Origin``, against pages of other sites; its token; its right to the route; its body, which is
bounded; its arguments (``routes``); the rate of changes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import Message, Receive

from pybk.admin.http.problems import ProblemError
from pybk.admin.http.routes import Route
from pybk.admin.http.tokens import Scope, Token, find_token
from pybk.values import flag_of

BODY_BYTES_MAX: Final = 64 << 10
"""Limit on the body of a request."""

THREADS: Final = 32
"""The threads that answer requests; as many connections are open at most, so that none waits for a thread."""

CHANGES_PER_SECOND: Final = 20
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""The hosts that a request may name if nothing else is given."""

LATER: Final = {"Retry-After": "1"}
"""The header of a refusal that is only temporary."""


class Admission:
    """Admits requests by their host, their token and the rate of changes.

    Args:
        tokens: The valid tokens.
        hosts: The names that requests may give in ``Host``, in addition to those of loopback; ``"*"`` allows all.
        open_reads: Whether everybody may read.

    Attributes:
        tokens: The valid tokens, which may be set.

    Threads: any.
    """

    def __init__(self, tokens: Iterable[Token], hosts: Collection[str], *, open_reads: bool) -> None:
        self.tokens: tuple[Token, ...] = tuple(tokens)
        self._hosts = LOOPBACK_NAMES.union(each.lower() for each in hosts)
        self._open_reads = flag_of(open_reads, "open_reads")
        self._changes: deque[float] = deque(maxlen=CHANGES_PER_SECOND)
        self._lock = threading.Lock()
        """Guards ``_changes``."""

    def check_host(self, request: Request) -> None:
        """Raise ProblemError for a request to another host, or of a page of another one."""
        given = request.headers.get("host", "")
        host = _host_of(given)
        if "*" not in self._hosts and host not in self._hosts:
            raise ProblemError(
                HTTPStatus.MISDIRECTED_REQUEST,
                "other_host",
                f"Host {host!r:.100} is not one of this interface, {', '.join(sorted(self._hosts))}: use one of these "
                "names, or add this one to its hosts",
            )
        origin = request.headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != given.lower():
            raise ProblemError(
                HTTPStatus.FORBIDDEN, "other_origin", f"a page of {origin!r:.100} may not use this interface"
            )

    def token_of(self, request: Request) -> Token | None:
        """Return the token of a request; None without one, if everybody may read; else raises ProblemError."""
        given = request.headers.get("authorization")
        if given is None and self._open_reads:
            return None
        if given is None:
            raise _unauthorized("a token is needed")
        kind, _, text = given.partition(" ")
        found = find_token(self.tokens, text.strip()) if kind.lower() == "bearer" else None
        if found is None:
            raise _unauthorized("the token is not valid")
        return found

    def check_rate(self) -> None:
        """Raise ProblemError if a request is one change too many in a second."""
        with self._lock:
            now = time.monotonic()
            if len(self._changes) == CHANGES_PER_SECOND and now - self._changes[0] < 1:
                raise ProblemError(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    "too_many_changes",
                    f"more than {CHANGES_PER_SECOND} changes a second; try again in a second",
                    LATER,
                    retryable=True,
                )
            self._changes.append(now)


def check_right(token: Token | None, route: Route) -> None:
    """Raise ProblemError if a token, or none, does not allow a route."""
    if route.scope is Scope.READ:
        return
    needed = f"{route.method} {route.template} needs a token with scope {route.scope.name.lower()}"
    if token is None:
        raise _unauthorized(needed)
    if token.scope < route.scope:
        raise ProblemError(
            HTTPStatus.FORBIDDEN,
            "scope_too_small",
            f"{needed}; that of {token.name} has {token.scope.name.lower()}",
        )


def bounded(request: Request, receive: Receive) -> Receive:
    """Return a receiver of the body of a request; raises ProblemError, before it reads, if that is too long."""
    received = 0

    async def receiving() -> Message:
        nonlocal received
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 9 or int(length) > BODY_BYTES_MAX:
            raise _too_long()
        message = await receive()
        received += len(message.get("body", b""))
        if received > BODY_BYTES_MAX:
            raise _too_long()
        return message

    return receiving


def _too_long() -> ProblemError:
    return ProblemError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_long", f"a body has at most {BODY_BYTES_MAX} bytes")


def _unauthorized(detail: str) -> ProblemError:
    return ProblemError(
        HTTPStatus.UNAUTHORIZED,
        "no_token",
        f"{detail}: send Authorization: Bearer TOKEN",
        {"WWW-Authenticate": "Bearer"},
    )


def _host_of(header: str) -> str:
    """Return the name in a ``Host`` header, without its port, in small letters."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
