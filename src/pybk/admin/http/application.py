"""The interface as an ASGI application: Starlette's router, and what a request has to pass.

A request passes these, in this order: the ``Host`` it names, against other sites that had a browser resolve their name
to this address; its ``Origin``, against pages of other sites; its token; its right to the route; its arguments; the
rate of changes.

Requests wait for the metadata store, for as long as that does not answer. So they are answered in threads, by which the
event loop keeps running, ``ANSWERS_MAX`` at once, and one without a place is refused; but a probe without a place is
answered by what is known, without a wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlsplit

import msgspec
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.routing import Router
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from pybk.admin.http import probes
from pybk.admin.http.api import OWN_ROUTES, ROUTES
from pybk.admin.http.bookie_loads import BookiePorts
from pybk.admin.http.json_values import as_body
from pybk.admin.http.openapi import openapi_of
from pybk.admin.http.page_files import HEADERS, PageFile, read_page
from pybk.admin.http.problems import JSON, NO_STORE, ProblemError, problem_of
from pybk.admin.http.routes import Route
from pybk.admin.http.scrapes import Scrapes
from pybk.admin.http.tags import has, tag_of
from pybk.admin.http.tokens import Scope, Token, find_token
from pybk.admin.http.view import View
from pybk.errors import PybkError
from pybk.log_events import NOT_LIMITED
from pybk.manager.ledger_manager import LedgerManager

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer

logger = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 64 << 10
"""Limit on the body of a request."""

CHANGES_PER_SECOND: Final = 20
ANSWERS_MAX: Final = 24
"""The most requests that are answered at once. There are more threads than these, ``THREADS``, for probes."""

THREADS: Final = 32
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""The hosts that a request may name if nothing else is given."""

OPENAPI: Final = "/api/v1/openapi.json"

_LATER: Final = (("Retry-After", "1"),)


class _Name(StringConvertor):
    """A name in a path, as it is encoded there; what follows a colon is an action."""

    regex = "[^/:]+"


register_url_convertor("pybk", _Name())


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

    Threads: that of an event loop.
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
        self.tokens: tuple[Token, ...] = tuple(tokens)
        self.threads: Final = ThreadPoolExecutor(THREADS, "pybk-http-answer")
        self._page: Final = read_page() if bookie is None else {}
        self._hosts = LOOPBACK_NAMES.union(each.lower() for each in hosts)
        self._open_reads = open_reads
        self._changes: deque[float] = deque(maxlen=CHANGES_PER_SECOND)
        self._lock = threading.Lock()
        """Guards ``_changes``."""
        self._answering = 0
        """The number of requests that have a place."""
        self._scrapes = Scrapes(manager, store if bookie is None else bookie.bookie.bookie_id)
        routes = ROUTES if bookie is None else OWN_ROUTES
        self._router = self._made_router([each for each in routes if manager.is_cluster or not each.cluster])

    def _made_router(self, routes: Collection[Route]) -> Router:
        document = json.dumps(openapi_of(routes)).encode()
        answers: dict[str, dict[str, Callable[[Request], Awaitable[Response]]]] = {}
        for path, probe in probes.PROBES.items():
            answers[path] = {"GET": partial(self._probe, probe)}
        for path, file in self._page.items():
            answers[path] = {"GET": partial(_sent, file)}
        answers["/metrics"] = {"GET": partial(self._answer, lambda _: self._scrapes.answer())}
        answers[OPENAPI] = {"GET": partial(self._answer, lambda _: Response(document, media_type=JSON))}
        for each in routes:
            answers.setdefault(each.template, {})[each.method] = partial(self._route, each)
        paths = [Path(path.replace("}", ":pybk}"), _Endpoint(each), methods=[*each]) for path, each in answers.items()]
        return Router(paths, redirect_slashes=False, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        """Close this when the server ends; a mounted application is not asked."""
        yield
        self.close()

    def close(self) -> None:
        """Look at the manager no more; it stays open. Idempotent."""
        self.view.close()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI has it; an error is a response, too."""
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        scope = {**scope, "path": _raw_path(scope), "app": self}
        request = Request(scope)
        try:
            self._check_host(request)
            if not (path := _path_in(scope)):  # the mount without its slash, from where the page's files are elsewhere
                there = f"{scope['root_path'].rpartition('/')[2]}/"
                await Response(None, HTTPStatus.PERMANENT_REDIRECT, {"Location": there})(scope, receive, send)
                return
            if path not in probes.PROBES and path not in self._page:
                scope["pybk.token"] = self._token_of(request)
            await self._router(scope, receive, send)
        except ClientDisconnect:  # and maybe did not mean what it has sent so far
            return
        except (ProblemError, PybkError, HTTPException) as error:
            await _respond(_problem(error, request).response(), scope, receive, send)
        except Exception:  # a server must survive its handlers
            logger.exception("%s %r failed", request.method, _path_in(scope))
            failed = ProblemError(
                HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "a defect of pybk: its log has the traceback"
            )
            await _respond(failed.response(), scope, receive, send)

    # ---- what answers ------------------------------------------------------------------------------------------------

    async def _probe(self, probe: Callable[[View, Request, bool], Response], request: Request) -> Response:
        return await self._placed(lambda placed: probe(self.view, request, placed), needed=False)

    async def _route(self, route: Route, request: Request) -> Response:
        self._check_right(route, request)
        body = await _body(request)
        return await self._answer(lambda each: self._called(route, each, body), request)

    async def _answer(self, answer: Callable[[Request], Response], request: Request) -> Response:
        """Return a response with the hash of its body, or one without a body if the client has the same."""
        response = await self._placed(lambda _: answer(request))
        response.headers["ETag"] = tag = tag_of(bytes(response.body))
        if request.method in ("GET", "HEAD") and has(header(request, "if-none-match") or "", tag):
            return Response(None, HTTPStatus.NOT_MODIFIED, {"ETag": tag, **NO_STORE}, response.media_type)
        return response

    async def _placed(self, answer: Callable[[bool], Response], *, needed: bool = True) -> Response:
        """Have a thread answer, with whether there is a place for it; without one that is needed it is refused."""
        placed = self._answering < ANSWERS_MAX
        if needed and not placed:
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "busy",
                f"{ANSWERS_MAX} requests are being answered, maybe because the metadata store is slow; try again in a "
                "second",
                retryable=True,
                headers=_LATER,
            )
        self._answering += placed
        try:
            response = await asyncio.get_running_loop().run_in_executor(self.threads, answer, placed)
        finally:
            self._answering -= placed
        response.headers.update(NO_STORE)
        return response

    def _called(self, route: Route, request: Request, body: bytes) -> Response:
        """Return what the function of a route returns."""
        given = request.query_params if route.method == "GET" else _members(request, body)
        names = {name: unquote(value) for name, value in request.path_params.items()}
        arguments = route.arguments(names, given, request.headers)
        if route.scope is Scope.READ:
            return Response(as_body(route.function(self.view, **arguments)), media_type=JSON)
        self._check_rate()
        began = time.monotonic()
        result = route.function(self.view, **arguments)
        peer = "" if request.client is None else request.client.host
        logger.info(
            "%s %s by %s from %s in %.0f ms",
            request.method,
            _path_in(request.scope),
            request["pybk.token"].name,
            peer,
            (time.monotonic() - began) * 1e3,
            extra=NOT_LIMITED,
        )
        return Response(as_body(result), media_type=JSON)

    # ---- who may do what -------------------------------------------------------------------------------------------

    def _check_host(self, request: Request) -> None:
        host = _host_of(header(request, "host") or "")
        if "*" not in self._hosts and host not in self._hosts:
            raise ProblemError(
                HTTPStatus.MISDIRECTED_REQUEST,
                "other_host",
                f"Host {host!r:.100} is not one of this interface, {', '.join(sorted(self._hosts))}: use one of these "
                "names, or add this one to its hosts",
            )
        origin = header(request, "origin")
        if origin is not None and origin.lower().partition("://")[2] != (header(request, "host") or "").lower():
            raise ProblemError(
                HTTPStatus.FORBIDDEN, "other_origin", f"a page of {origin!r:.100} may not use this interface"
            )

    def _token_of(self, request: Request) -> Token | None:
        """Return the token of a request; None for one without, if everybody may look."""
        given = header(request, "authorization")
        if given is None and self._open_reads:
            return None
        if given is None:
            raise _unauthorized("a token is needed")
        kind, _, text = given.partition(" ")
        found = find_token(self.tokens, text.strip()) if kind.lower() == "bearer" else None
        if found is None:
            raise _unauthorized("the token is not valid")
        return found

    @staticmethod
    def _check_right(route: Route, request: Request) -> None:
        token: Token | None = request["pybk.token"]
        if route.scope is Scope.READ:
            return
        wanted = route.scope.name.lower()
        if token is None:
            raise _unauthorized(f"{route.method} {route.template} needs a token with scope {wanted}")
        if token.scope < route.scope:
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                "scope_too_small",
                f"{route.method} {route.template} needs a token with scope {wanted}; that of {token.name} has "
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


class _Endpoint:
    """The object that answers the methods of a path, as the router calls it."""

    def __init__(self, answers: Mapping[str, Callable[[Request], Awaitable[Response]]]) -> None:
        self._answers = answers

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer a request; HEAD as GET."""
        answer = self._answers["GET" if scope["method"] == "HEAD" else scope["method"]]
        await _respond(await answer(Request(scope, receive)), scope, receive, send)


async def _respond(response: Response, scope: AsgiScope, receive: Receive, send: Send) -> None:
    """Send a response; that to HEAD without its body."""
    if scope["method"] == "HEAD":
        response.body = b""
    await response(scope, receive, send)


def _raw_path(scope: AsgiScope) -> str:
    """Return the path of a request as it was sent, because names in it may have a slash or a colon."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"], safe="/:").encode()
    return raw.partition(b"?")[0].decode("latin-1")


def _path_in(scope: AsgiScope) -> str:
    """Return the path of a request below that of the mount."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def header(request: Request, name: str) -> str | None:
    """Return a header of a request; None without it.

    Several of one name become one, as RFC 9110 joins them: two hosts or tokens are none that is valid, and neither of
    them counts alone, because another server on the way might have gone by the other one.
    """
    found = request.headers.getlist(name)
    return ", ".join(found) if found else None


def _problem(error: ProblemError | PybkError | HTTPException, request: Request) -> ProblemError:
    """Return what a client gets for an error."""
    path = _path_in(request.scope)
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, PybkError):
        return problem_of(error)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ProblemError(HTTPStatus.NOT_FOUND, "no_such_route", f"there is no {path!r:.200}; see {OPENAPI}")
    methods = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    return ProblemError(
        HTTPStatus.METHOD_NOT_ALLOWED, "other_method", f"{path} takes {methods}", headers=(("Allow", methods),)
    )


async def _sent(file: PageFile, request: Request) -> Response:
    """Return a file of the page, without its body if the client has the same."""
    headers = {"ETag": file.tag, **dict(HEADERS)}
    if has(header(request, "if-none-match") or "", file.tag):
        return Response(None, HTTPStatus.NOT_MODIFIED, headers, file.content_type)
    return Response(file.body, headers=headers, media_type=file.content_type)


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


async def _body(request: Request) -> bytes:
    """Return the body; one that is too long is refused before it is read."""
    body, length = b"", request.headers.get("content-length", "0")
    too_long = not length.isdecimal() or len(length) > 9 or int(length) > BODY_BYTES_MAX
    if not too_long:
        async for part in request.stream():
            body += part[: BODY_BYTES_MAX + 1]
            if too_long := len(body) > BODY_BYTES_MAX:
                break
    if too_long:
        raise ProblemError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_long", f"a body has at most {BODY_BYTES_MAX} bytes"
        )
    return body


def _members(request: Request, body: bytes) -> dict[str, Any]:
    """Return the members of the JSON object in the body; an empty body has none."""
    if not body:
        return {}
    kind = (header(request, "content-type") or "").partition(";")[0].strip().lower()
    if kind != JSON:  # what a form of another site could send is refused
        raise ProblemError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "not_json", f"a body of type {JSON} is needed")
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProblemError(HTTPStatus.BAD_REQUEST, "not_json", "the body is not a JSON object") from error
