"""The interface as an ASGI application, to mount in one that is there, such as FastAPI's; it imports no framework."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, quote

from pybk.admin.http.application import THREADS, AdminApplication
from pybk.admin.http.bookie_loads import BookiePorts
from pybk.admin.http.messages import BODY_BYTES_MAX, TEXT, Request, Response, by_name
from pybk.admin.http.tokens import Token
from pybk.manager.ledger_manager import LedgerManager

Message = MutableMapping[str, Any]
AsgiApplication = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


def asgi_app(
    manager: LedgerManager,
    *,
    tokens: Iterable[Token] = (),
    hosts: Collection[str] = (),
    open_reads: bool = True,
    ports: BookiePorts | None = None,
    name: str = "",
    command: str = "",
) -> AsgiApplication:
    """Return an ASGI application with the administration interface and its page.

    Requests are answered in threads of its own, so that the event loop keeps running, and no request that waits for the
    metadata store holds a thread of others. The server that runs the application limits connections, and has the
    certificates.

    Args:
        manager: The manager of a store or of a cluster; it stays open when the application ends.
        tokens: The valid tokens; without one nothing can be changed.
        hosts: The names that requests may give in ``Host``, besides those of loopback; ``"*"`` allows all.
        open_reads: Whether everybody whom the server lets in may look.
        ports: Where the HTTP ports of the cluster's bookies are, to show what they do; None shows what this process
            does alone.
        name: What people call the cluster or the store, which the page shows; empty for the beginning of its id.
        command: How commands reach it, which the page shows to be copied: ``pybk COMMAND`` with what they need besides;
            empty for its location alone.
    """
    application = AdminApplication(
        manager, tokens=tokens, hosts=hosts, open_reads=open_reads, ports=ports, name=name, command=command
    )
    pool = ThreadPoolExecutor(THREADS, "pybk-http-answer")

    async def answer(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(application, receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"an ASGI scope of type {scope['type']!r}; this application takes http and lifespan")
        request = await _request(scope, receive)
        if request is None:
            return
        if request.path:
            response = await asyncio.get_running_loop().run_in_executor(pool, application.handle, request)
        else:  # the mount without its slash, from where the page's relative URLs would lead elsewhere
            there = f"{scope['root_path'].rpartition('/')[2]}/"
            response = Response(int(HTTPStatus.PERMANENT_REDIRECT), TEXT, b"", (("Location", there),))
        headers = (
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            *response.headers,
        )
        encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await send({"type": "http.response.start", "status": response.status, "headers": encoded})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else response.body})

    return answer


async def _lifespan(
    application: AdminApplication,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """Close the application when the server ends; a mounted one is not asked."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            application.close()
            await send({"type": "lifespan.shutdown.complete"})
            return


async def _request(scope: Message, receive: Callable[[], Awaitable[Message]]) -> Request | None:
    """Read a request; of a body, one byte more than it may have at most. None if the client goes before its end."""
    body, more = b"", True
    while more and len(body) <= BODY_BYTES_MAX:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")[: BODY_BYTES_MAX + 1]
        more = message.get("more_body", False)
    headers = by_name((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    # Servers that follow the specification give the path with the mount's own, which the application does not know.
    raw: bytes = scope.get("raw_path") or quote(scope["path"], safe="/:").encode()
    path = raw.partition(b"?")[0].decode("latin-1")
    root = scope.get("root_path", "")
    if root and path.startswith(root):
        path = path[len(root) :]
    query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
    client = scope.get("client")
    return Request(scope["method"], path, query, headers, body, "" if client is None else str(client[0]))
