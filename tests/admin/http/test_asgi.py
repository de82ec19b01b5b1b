"""The administration interface as an ASGI application, driven as a server drives it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from pybk import LedgerManager, UsageError
from pybk.admin.http import Scope, Token, asgi_app
from pybk.admin.http.admission import BODY_BYTES_MAX
from tests.storage.real_store import open_quick

TOKEN, TEXT = Token.new("me", Scope.ADMIN)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "store") as manager:
        yield manager


def ask(
    application: ASGIApp,
    method: str,
    path: str,
    parts: tuple[bytes, ...] = (b"",),
    root: str = "",
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of a response."""
    sent: list[MutableMapping[str, Any]] = []
    left = list(parts)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    plain, _, query = path.partition("?")
    named = {"host": "localhost", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http",
        "method": method,
        "path": root + plain,
        "root_path": root,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
    }
    asyncio.run(application(scope, receive, send))  # type: ignore[arg-type]
    start, body = sent
    return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}, body["body"]


def test_it_answers_as_the_server_does(manager: LedgerManager) -> None:
    application = asgi_app(manager, tokens=[TOKEN])
    manager.create_ledger(password=b"p").close()
    status, headers, body = ask(application, "GET", "/api/v1/ledgers?limit=1", root="/ops")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert headers["content-length"] == str(len(body))
    assert json.loads(body)["next"] == 0
    assert ask(application, "GET", "/", root="/ops")[2].startswith(b"<!doctype html>")
    assert ask(asgi_app(manager, open_reads=False), "GET", "/")[0] == 200, "the page itself shows nothing"
    assert ask(application, "GET", "/livez", host="evil.example")[0] == 421
    assert ask(asgi_app(manager, hosts=["*"]), "GET", "/livez", host="evil.example")[0] == 200
    assert ask(asgi_app(manager, open_reads=False), "GET", "/api/v1/cluster")[0] == 401


def test_bodies_that_come_in_parts_are_put_together_and_bounded(manager: LedgerManager) -> None:
    application = asgi_app(manager, tokens=[TOKEN])
    named = {"authorization": f"Bearer {TEXT}", "content_type": "application/json"}
    status, _, body = ask(application, "POST", "/api/v1/cluster", (b"{", b"}"), **named)
    assert (status, json.loads(body)["code"]) == (405, "other_method")
    endless = (b"x" * BODY_BYTES_MAX,) * 100
    assert ask(application, "POST", "/api/v1/cluster", endless, **named)[0] in (405, 413)


def test_what_a_client_did_not_finish_is_not_answered(manager: LedgerManager) -> None:
    messages: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": b"{}", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/api/v1/cluster", "headers": [(b"host", b"localhost")]}
    asyncio.run(asgi_app(manager, tokens=[TOKEN])(scope, receive, send))  # type: ignore[arg-type]
    assert not sent


def test_a_path_without_its_raw_form_is_decoded_once(manager: LedgerManager) -> None:
    manager.create_ledger(password=b"p").close()
    assert ask(asgi_app(manager), "GET", "/api/v1/ledgers/0")[0] == 200
    assert ask(asgi_app(manager), "GET", "/api/v1/ledgers/%30")[0] == 400, "the server decoded it before"


def test_the_lifespan_of_its_server_is_followed(manager: LedgerManager) -> None:
    asked = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[str] = []

    async def receive() -> MutableMapping[str, Any]:
        return dict(asked.pop(0))

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message["type"])

    application = asgi_app(manager)
    asyncio.run(application({"type": "lifespan"}, receive, send))  # type: ignore[arg-type]
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert ask(application, "GET", "/readyz")[0] == 503
    assert manager.health().state == "ok", "the manager is its owner's"
    sent.clear()
    asyncio.run(application({"type": "websocket", "path": "/"}, receive, send))  # type: ignore[arg-type]
    assert sent == ["websocket.close"]


@pytest.mark.parametrize("given", ["no", 0, None])
def test_what_is_neither_true_nor_false_does_not_open_reads_to_everybody(manager: LedgerManager, given: Any) -> None:
    with pytest.raises(UsageError, match=rf"open_reads is {given!r}; it takes True or False"):
        asgi_app(manager, open_reads=given)
