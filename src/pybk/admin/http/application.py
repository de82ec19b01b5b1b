"""The interface as an ASGI application: Starlette's router, and the answers; ``admission`` has the refusals.

Requests wait for the metadata store, for as long as that does not answer. So they are answered in threads, and the
event loop keeps running. At most ``ANSWERS_MAX`` are answered at once, and further ones are refused; but a further
probe is answered from known values, without a wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Unpack
from urllib.parse import quote, unquote

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
from pybk.admin.http.admission import LATER, THREADS, Admission, bounded, check_right
from pybk.admin.http.api import OWN_ROUTES, ROUTES
from pybk.admin.http.json_values import as_body
from pybk.admin.http.openapi import openapi_of
from pybk.admin.http.page_files import HEADERS, PageFile, read_page
from pybk.admin.http.problems import JSON, NO_STORE, OPENAPI, ProblemError, problem_of
from pybk.admin.http.routes import Route
from pybk.admin.http.scrapes import Scrapes
from pybk.admin.http.shown import Shown
from pybk.admin.http.tags import has, tag_of
from pybk.admin.http.tokens import Scope, Token
from pybk.admin.http.view import View
from pybk.errors import PybkError
from pybk.log_events import NOT_LIMITED
from pybk.manager.ledger_manager import LedgerManager

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer

logger = logging.getLogger(__name__)

ANSWERS_MAX: Final = 24
"""The most requests that are answered at once. There are more threads than that (``THREADS``), for probes."""

Endpoint = Callable[[Request], Awaitable[Response]]


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
        open_reads: Whether everybody may read; if False, each request needs a token, except those for probes and for
            the page's files.
        bookie: The bookie in this process, to show it alone: probes, metrics and ``bookies/self``, which read nothing
            from the metadata store. None shows the whole cluster, or the store, and has the page.
        store: The label ``store`` of the metrics; that of a bookie is its name.
        **shown: Further things that it shows.

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
        store: str = "",
        **shown: Unpack[Shown],
    ) -> None:
        self.view: Final = View(manager, bookie, **shown)
        self.threads: Final = ThreadPoolExecutor(THREADS, "pybk-http-answer")
        self.admission: Final = Admission(tokens, hosts, open_reads=open_reads)
        self._answering = 0
        """The number of requests that have a place."""
        self._scrapes = Scrapes(manager, store if bookie is None else bookie.bookie.bookie_id)
        page = read_page() if bookie is None else {}
        self._open: Final = {*probes.PROBES, *page}
        """The paths that take no token."""
        routes = ROUTES if bookie is None else OWN_ROUTES
        self._router = self._made_router(page, [each for each in routes if manager.is_cluster or not each.cluster])

    def _made_router(self, page: Mapping[str, PageFile], routes: Collection[Route]) -> Router:
        document = json.dumps(openapi_of(routes)).encode()
        endpoints: dict[str, dict[str, Endpoint]] = {}
        for path, probe in probes.PROBES.items():
            endpoints[path] = {"GET": partial(self._probe, probe)}
        for path, file in page.items():
            endpoints[path] = {"GET": partial(_file, file)}
        endpoints["/metrics"] = {"GET": partial(self._answer, self._scrapes.answer)}
        endpoints[OPENAPI] = {"GET": partial(self._answer, lambda: Response(document, media_type=JSON))}
        for each in routes:
            endpoints.setdefault(each.template, {})[each.method] = partial(self._route, each)
        paths = [
            Path(path.replace("}", ":pybk}"), _by_method(each), methods=[*each]) for path, each in endpoints.items()
        ]
        return Router(paths, redirect_slashes=False, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        """Close this when the server ends; a mounted application is not asked."""
        yield
        self.close()

    def close(self) -> None:
        """Stop looking at the manager, which stays open. Idempotent."""
        self.view.close()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI defines it; errors become responses."""
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        scope = {**scope, "path": _raw_path(scope), "app": self}
        request = Request(scope)
        response: Response
        try:
            self.admission.check_host(request)
            if _path_in(request) not in self._open:
                scope["pybk.token"] = self.admission.token_of(request)
            await self._router(scope, bounded(request, receive), send)
            return
        except ClientDisconnect:  # and maybe did not mean what it has sent so far
            return
        except (HTTPException, PybkError) as error:
            response = problem_of(error).response()
        except Exception:  # a server must survive its handlers
            logger.exception("%s %r failed", request.method, _path_in(request))
            failed = ProblemError(
                HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "a defect of pybk: its log has the traceback"
            )
            response = failed.response()
        await response(scope, receive, send)

    # ---- what answers ------------------------------------------------------------------------------------------------

    async def _probe(self, probe: Callable[[View, Request, bool], Response], request: Request) -> Response:
        await request.body()
        return await self._placed(lambda placed: probe(self.view, request, placed), needed=False)

    async def _route(self, route: Route, request: Request) -> Response:
        check_right(request["pybk.token"], route)
        body = await request.body()
        return await self._answer(lambda: self._called(route, request, body), request)

    async def _answer(self, answer: Callable[[], Response], request: Request) -> Response:
        """Return a response with the hash of its body, or one without a body if the client has the same."""
        await request.body()
        response = await self._placed(lambda _: answer())
        return _tagged(response, tag_of(bytes(response.body)), NO_STORE, request)

    async def _placed(self, answer: Callable[[bool], Response], *, needed: bool = True) -> Response:
        """Have a thread answer, with whether there is a place for it; without one that is needed it is refused."""
        placed = self._answering < ANSWERS_MAX
        if needed and not placed:
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "busy",
                f"{ANSWERS_MAX} requests are being answered, maybe because the metadata store is slow; try again in a "
                "second",
                LATER,
                retryable=True,
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
        self.admission.check_rate()
        began = time.monotonic()
        result = route.function(self.view, **arguments)
        peer = "" if request.client is None else request.client.host
        logger.info(
            "%s %s by %s from %s in %.0f ms",
            request.method,
            _path_in(request),
            request["pybk.token"].name,
            peer,
            (time.monotonic() - began) * 1e3,
            extra=NOT_LIMITED,
        )
        return Response(as_body(result), media_type=JSON)


def _by_method(endpoints: Mapping[str, Endpoint]) -> Endpoint:
    """Return what answers the methods of a path; the router lets no others pass, and servers send HEAD no body."""

    async def answer(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return answer


def _tagged(response: Response, tag: str, headers: Mapping[str, str], request: Request) -> Response:
    """Return a response with its tag, or one without a body and with some headers if the client has the same."""
    response.headers["ETag"] = tag
    if request.method in ("GET", "HEAD") and has(request.headers.get("if-none-match", ""), tag):
        return Response(None, HTTPStatus.NOT_MODIFIED, {"ETag": tag, **headers}, response.media_type)
    return response


async def _file(file: PageFile, request: Request) -> Response:
    """Return a file of the page."""
    await request.body()
    response = Response(file.body, headers=dict(HEADERS), media_type=file.content_type)
    return _tagged(response, file.tag, dict(HEADERS), request)


def _raw_path(scope: AsgiScope) -> str:
    """Return the path of a request as it was sent, because names in it may have a slash or a colon."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"], safe="/:").encode()
    return raw.partition(b"?")[0].decode("latin-1")


def _path_in(request: Request) -> str:
    """Return the path of a request below that of the mount."""
    path: str = request["path"]
    return path.removeprefix(request.get("root_path", ""))


def _members(request: Request, body: bytes) -> dict[str, Any]:
    """Return the members of the JSON object in the body; an empty body has none."""
    if not body:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:  # what a form of another site could send is refused
        raise ProblemError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "not_json", f"a body of type {JSON} is needed")
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProblemError(HTTPStatus.BAD_REQUEST, "not_json", "the body is not a JSON object") from error
