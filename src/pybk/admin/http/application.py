"""The interface without a server: takes requests, and returns responses.

A request passes these, in this order: the ``Host`` it names, against other sites that had a browser resolve their name
to this address; its ``Origin``, against pages of other sites; its token; its right to the route; its arguments; the
rate of changes.

Requests wait for the metadata store, for as long as that does not answer. So ``ANSWERS_MAX`` are answered at once, and
one without a place is refused; but a probe without a place is answered by what is known, without a wait.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from pybk.admin.http import probes
from pybk.admin.http.api import OWN_ROUTES, ROUTES
from pybk.admin.http.bookie_loads import BookiePorts
from pybk.admin.http.json_values import as_body
from pybk.admin.http.messages import BODY_BYTES_MAX, JSON, Request, Response
from pybk.admin.http.openapi import openapi_of
from pybk.admin.http.page_files import HEADERS, PageFile, read_page
from pybk.admin.http.problems import ProblemError, problem_of
from pybk.admin.http.routes import Route, Scope
from pybk.admin.http.scrapes import Scrapes
from pybk.admin.http.tags import has, tag_of
from pybk.admin.http.tokens import Token, find_token
from pybk.admin.http.view import View
from pybk.errors import PybkError
from pybk.log_events import NOT_LIMITED
from pybk.manager.ledger_manager import LedgerManager

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer

logger = logging.getLogger(__name__)

CHANGES_PER_SECOND: Final = 20
ANSWERS_MAX: Final = 24
"""The most requests that are answered at once. Servers have more threads than these, ``THREADS``, for probes."""

THREADS: Final = 32
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""The hosts that a request may name if nothing else is given."""

_DOCUMENTS: Final = ("/api/v1/openapi.json", "/metrics")

_LATER: Final = (("Retry-After", "1"),)
_NO_STORE: Final = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))


class AdminApplication:
    """The administration interface of a manager.

    Args:
        manager: The manager; it is not closed.
        tokens: The valid tokens. Without one nothing can be changed.
        hosts: The names that requests may give in ``Host``, without ports; those of loopback are always among them.
            ``"*"`` allows all, for a server that checks them itself.
        open_reads: Whether everybody may look; else each request but those of probes and of the page's files needs a
            token.
        bookie: The bookie in this process, to show it alone: probes, metrics and ``bookies/self``, for which nothing is
            read from the metadata store. None shows the whole cluster, or the store, and has the page.
        ports: Where the HTTP ports of the cluster's bookies are, to show what they do; None shows what this process
            does alone.
        name: What people call the cluster or the store, which the page shows; empty for the beginning of its id.
        store: The label ``store`` of the metrics; that of a bookie is its name.
        command: How commands reach it, which the page shows to be copied: ``pybk COMMAND`` with what they need besides;
            empty for its location alone.

    Threads: any.
    """

    def __init__(
        self,
        manager: LedgerManager,
        *,
        tokens: Iterable[Token] = (),
        hosts: Collection[str] = (),
        open_reads: bool = True,
        bookie: BookieServer | None = None,
        ports: BookiePorts | None = None,
        name: str = "",
        store: str = "",
        command: str = "",
    ) -> None:
        self.view: Final = View(manager, bookie, ports, name, command)
        self._page: Final = read_page() if bookie is None else {}
        self.tokens: tuple[Token, ...] = tuple(tokens)
        self._hosts = LOOPBACK_NAMES.union(each.lower() for each in hosts)
        self._open_reads = open_reads
        routes = ROUTES if bookie is None else OWN_ROUTES
        self._routes = [each for each in routes if manager.is_cluster or not each.cluster]
        self._changes: deque[float] = deque(maxlen=CHANGES_PER_SECOND)
        self._lock = threading.Lock()
        """Guards ``_changes``."""
        self._places = threading.BoundedSemaphore(ANSWERS_MAX)
        self._scrapes = Scrapes(manager, store if bookie is None else bookie.bookie.bookie_id)
        self._openapi = json.dumps(openapi_of(self._routes)).encode()

    def handle(self, request: Request) -> Response:
        """Answer a request; an error is a response, too.

        HEAD has the response to GET; its server sends that without the body.
        """
        if request.method == "HEAD":
            request = request._replace(method="GET")
        placed = self._places.acquire(blocking=False)
        try:
            return self.answer(request, placed)
        except ProblemError as problem:
            return self._with_headers(problem.response())
        except PybkError as error:
            return self._with_headers(problem_of(error).response())
        except Exception:  # a server must survive its handlers
            logger.exception("%s %r failed", request.method, request.path)
            failed = ProblemError(
                HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "a defect of pybk: its log has the traceback"
            )
            return self._with_headers(failed.response())
        finally:
            if placed:
                self._places.release()

    @staticmethod
    def _with_headers(response: Response) -> Response:
        return response._replace(headers=(*response.headers, *_NO_STORE))

    def answer(self, request: Request, placed: bool) -> Response:
        """Answer a request, which has found a place or not, or raise what ``handle`` turns into a response."""
        self._check_host(request)
        if (probe := probes.PROBES.get(request.path)) is not None and request.method == "GET":
            return self._with_headers(probe(self.view, request, placed))
        if not placed:
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "busy",
                f"{ANSWERS_MAX} requests are being answered, maybe because the metadata store is slow; try again in a "
                "second",
                retryable=True,
                headers=_LATER,
            )
        if (file := self._page.get(request.path)) is not None and request.method == "GET":
            return _sent(file, request)
        token = self._token_of(request)
        if not self._open_reads and token is None:
            raise _unauthorized("a token is needed")
        if request.path in _DOCUMENTS and request.method == "GET":
            return self._with_etag(request, self._document(request))
        route, path = self._routed(request)
        self._check_right(request, route, token)
        arguments = route.arguments(
            path, request.query if request.method == "GET" else _members(request), request.headers
        )
        if route.scope is not Scope.READ:
            self._check_rate()
        began = time.monotonic()
        result = route.function(self.view, **arguments)
        if route.scope is not Scope.READ:
            name = "" if token is None else token.name
            took_ms = (time.monotonic() - began) * 1e3
            logger.info(
                "%s %s by %s from %s in %.0f ms",
                *(request.method, request.path, name, request.peer, took_ms),
                extra=NOT_LIMITED,
            )
        return self._with_etag(request, Response(200, JSON, as_body(result)))

    def _with_etag(self, request: Request, response: Response) -> Response:
        """Return a response with the hash of its body, or one without a body if the client has the same."""
        tag = tag_of(response.body)
        response = self._with_headers(response._replace(headers=(("ETag", tag),)))
        if request.method == "GET" and has(request.headers.get("if-none-match", ""), tag):
            return response._replace(status=int(HTTPStatus.NOT_MODIFIED), body=b"")
        return response

    def _document(self, request: Request) -> Response:
        if request.path == "/metrics":
            return self._scrapes.answer()
        return Response(200, JSON, self._openapi)

    # ---- who may do what -------------------------------------------------------------------------------------------

    def _check_host(self, request: Request) -> None:
        host = _host_of(request.headers.get("host", ""))
        if "*" not in self._hosts and host not in self._hosts:
            raise ProblemError(
                HTTPStatus.MISDIRECTED_REQUEST,
                "other_host",
                f"Host {host!r:.100} is not one of this interface, {', '.join(sorted(self._hosts))}: use one of these "
                "names, or add this one to its hosts",
            )
        origin = request.headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != request.headers.get("host", "").lower():
            raise ProblemError(
                HTTPStatus.FORBIDDEN, "other_origin", f"a page of {origin!r:.100} may not use this interface"
            )

    def _token_of(self, request: Request) -> Token | None:
        """Return the token of a request; None for one without."""
        given = request.headers.get("authorization")
        if given is None:
            return None
        kind, _, text = given.partition(" ")
        found = find_token(self.tokens, text.strip()) if kind.lower() == "bearer" else None
        if found is None:
            raise _unauthorized("the token is not valid")
        return found

    def _check_right(self, request: Request, route: Route, token: Token | None) -> None:
        if route.scope is Scope.READ:
            return
        wanted = route.scope.name.lower()
        if token is None:
            raise _unauthorized(f"{request.method} {route.template} needs a token with scope {wanted}")
        if token.scope < route.scope:
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                "scope_too_small",
                f"{request.method} {route.template} needs a token with scope {wanted}; that of {token.name} has "
                f"{token.scope.name.lower()}",
            )

    def _check_rate(self) -> None:
        with self._lock:
            now = time.monotonic()
            if len(self._changes) == CHANGES_PER_SECOND and now - self._changes[0] < 1:
                raise ProblemError(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    "too_many_changes",
                    f"more than {CHANGES_PER_SECOND} changes a second; try again in a second",
                    retryable=True,
                    headers=_LATER,
                )
            self._changes.append(now)

    # ---- routes ----------------------------------------------------------------------------------------------------

    def _routed(self, request: Request) -> tuple[Route, dict[str, str]]:
        """Return the route of a request, and the names in its path."""
        matches = [(each, found) for each in self._routes if (found := each.pattern.fullmatch(request.path))]
        known = {route.method for route, _ in matches}
        if request.path in probes.PROBES or request.path in self._page or request.path in _DOCUMENTS:
            known.add("GET")
        if not known:
            raise ProblemError(
                HTTPStatus.NOT_FOUND, "no_such_route", f"there is no {request.path!r:.200}; see /api/v1/openapi.json"
            )
        for route, found in matches:
            if route.method == request.method:
                return route, {name: unquote(value) for name, value in found.groupdict().items()}
        methods = ", ".join(sorted(known)).replace("GET", "GET, HEAD")
        raise ProblemError(
            HTTPStatus.METHOD_NOT_ALLOWED,
            "other_method",
            f"{request.path} takes {methods}",
            headers=(("Allow", methods),),
        )

    def close(self) -> None:
        """Look at the manager no more; it stays open. Idempotent."""
        self.view.close()


def _sent(file: PageFile, request: Request) -> Response:
    """Return a file of the page, without its body if the client has the same."""
    headers = (("ETag", file.tag), *HEADERS)
    if has(request.headers.get("if-none-match", ""), file.tag):
        return Response(int(HTTPStatus.NOT_MODIFIED), file.content_type, b"", headers)
    return Response(int(HTTPStatus.OK), file.content_type, file.body, headers)


def _unauthorized(detail: str) -> ProblemError:
    return ProblemError(
        HTTPStatus.UNAUTHORIZED,
        "no_token",
        f"{detail}: send Authorization: Bearer TOKEN",
        headers=(("WWW-Authenticate", "Bearer"),),
    )


def _host_of(header: str) -> str:
    """Return the name in a ``Host`` header, without its port, in small letters."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _members(request: Request) -> dict[str, Any]:
    """Return the members of the JSON object in the body; an empty body has none."""
    if not request.body:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:  # what a form of another site could send is refused
        raise ProblemError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "not_json", f"a body of type {JSON} is needed")
    if len(request.body) > BODY_BYTES_MAX:
        raise ProblemError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_long", f"a body has at most {BODY_BYTES_MAX} bytes"
        )
    try:
        found = json.loads(request.body, parse_constant=_refused)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ProblemError(HTTPStatus.BAD_REQUEST, "not_json", "the body is not a JSON object")
    return found


def _refused(constant: str) -> None:
    """Refuse what Python takes for a number, and JSON does not know."""
    raise ValueError(constant)
