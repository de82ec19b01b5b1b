"""The administration interface on a port of its own: real requests to a store and to a cluster."""

from __future__ import annotations

import gc
import http.client
import json
import logging
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pybk import LedgerManager, UsageError
from pybk.admin import http as http_interface
from pybk.admin.http import AdminServer, Scope, Token, application, connections, probes, view
from pybk.admin.http.admission import BODY_BYTES_MAX, CHANGES_PER_SECOND
from pybk.admin.http.application import ANSWERS_MAX
from pybk.admin.http_options import HttpSettings
from pybk.health import Health
from pybk.log_events import NOT_LIMITED
from pybk.metadata.settings import ClusterSettings
from pybk.operations.cluster_admin import ClusterAdmin
from tests.certificates import Authority
from tests.cluster.inside import Inside, inside
from tests.internals import service_of
from tests.storage.real_store import open_quick
from tests.waiting import wait_until

TOKENS = {scope: Token.new(scope.name.lower(), scope) for scope in Scope}


class Client:
    """Asks a server, with one connection, until ``close``."""

    def __init__(self, url: str, context: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.connection = (
            http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
            if context is None
            else http.client.HTTPSConnection(parts.hostname, parts.port, timeout=60, context=context)
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def ask(
        self, method: str, path: str, body: object = None, *, scope: Scope | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Return status and body of a response; the body of JSON decoded."""
        headers = {name.replace("_", "-"): each for name, each in headers.items()}
        if scope is not None:
            headers["Authorization"] = f"Bearer {TOKENS[scope][1]}"
        if body is not None:
            headers.setdefault("Content-Type", "application/json")
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        self.connection.request(method, path, content, headers)
        response = self.connection.getresponse()
        self.headers = response.headers
        found = response.read()
        return response.status, json.loads(found) if "json" in self.headers["Content-Type"] and found else found

    def get(self, path: str) -> Any:
        status, found = self.ask("GET", path)
        assert status == 200, found
        return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "store") as manager:
        yield manager


@contextmanager
def asking(manager: LedgerManager, **options: Any) -> Iterator[Client]:
    """Serve a manager, and ask."""
    serving = AdminServer(manager, tokens=[token for token, _ in TOKENS.values()], **options)
    with closing(serving), Client(serving.url) as client:
        yield client


@pytest.fixture
def of_store(store: LedgerManager) -> Iterator[Client]:
    with asking(store) as client:
        yield client


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path, count=4) as cluster:
        yield cluster


@pytest.fixture
def of_cluster(cluster: Inside) -> Iterator[Client]:
    with asking(cluster.connect()) as client:
        yield client


def test_a_store_is_shown(store: LedgerManager, of_store: Client) -> None:
    with store.create_ledger(password=b"p", ledger_type="orders", custom_metadata={"k": b"\xff"}) as writer:
        writer.append(b"12345")
    found = of_store.get("/api/v1/cluster")
    assert (found["is_cluster"], found["state"], found["cluster"], found["reasons"]) == (False, "ok", None, [])
    assert (found["id"], found["name"]) == (store.store_id.hex(), store.store_id.hex()[:8])
    with asking(store, name="books") as another:
        assert another.get("/api/v1/cluster")["name"] == "books"
    (ledger,) = of_store.get("/api/v1/ledgers")["ledgers"]
    assert ledger == of_store.get(f"/api/v1/ledgers/{writer.ledger_id}")
    wanted = {"state": "closed", "ledger_type": "orders", "last_add_confirmed": 0, "length": 5, "sealed": True}
    assert {name: ledger[name] for name in wanted} == wanted
    assert ledger["custom_metadata"] == {"k": "ff"}
    assert not {"key_salt", "verifier", "seal"} & ledger.keys(), "nothing of the keys is shown"
    status, problem = of_store.ask("GET", "/api/v1/bookies")
    assert (status, problem["code"]) == (404, "no_such_route")
    status, problem = of_store.ask("GET", "/api/v1/ledgers/77")
    assert (status, problem["code"], problem["retryable"]) == (404, "NoSuchLedgerError", False)
    assert of_store.headers["Content-Type"] == "application/problem+json"


def test_ledgers_come_in_pages(store: LedgerManager, of_store: Client) -> None:
    for number in range(5):
        store.create_ledger(password=b"p", ledger_type="even" if number % 2 == 0 else "odd").close()
    seen, after = [], -1
    while True:
        page = of_store.get(f"/api/v1/ledgers?after={after}&limit=2")
        seen.append([each["ledger_id"] for each in page["ledgers"]])
        if page["next"] is None:
            break
        after = page["next"]
    assert seen == [[0, 1], [2, 3], [4]]
    assert [each["ledger_id"] for each in of_store.get("/api/v1/ledgers?ledger_type=odd")["ledgers"]] == [1, 3]
    assert of_store.get("/api/v1/ledgers?state=open")["ledgers"] == []
    for query, said in (
        ("limit=0", "Expected `int` >= 1 - at `$.limit`"),
        ("limit=1001", "Expected `int` <= 1000 - at `$.limit`"),
        ("limit=x", "Expected `int`, got `str` - at `$.limit`"),
        ("limit=1_0", "at `$.limit`"),
        ("limit=%201", "at `$.limit`"),
        ("limit=%D9%A1", "at `$.limit`"),
        ("after=-2", "Expected `int` >= -1 - at `$.after`"),
        ("state=shut", "Invalid enum value 'shut' - at `$.state`"),
        ("first=1", "Object contains unknown field `first`"),
    ):
        status, problem = of_store.ask("GET", f"/api/v1/ledgers?{query}")
        assert status == 400
        assert said in problem["detail"]


def test_a_cluster_is_administered(cluster: Inside, of_cluster: Client) -> None:
    client = cluster.connect()
    with client.create_ledger(password=b"p") as writer:
        writer.append(b"entry")
    (ledger,) = of_cluster.get("/api/v1/ledgers")["ledgers"]
    assert len(ledger["fragments"][0]["bookies"]) == 3
    assert of_cluster.get("/api/v1/cluster")["cluster"]["bookies"] == {"active": 4}
    names = [each["bookie"]["bookie_id"] for each in of_cluster.get("/api/v1/bookies")["bookies"]]
    assert names == [f"bookie-{number}" for number in range(4)]
    assert of_cluster.get("/api/v1/bookies/bookie-1:ok-to-stop")["ok"]

    status, bookie = of_cluster.ask(
        "POST", "/api/v1/bookies/bookie-1:maintenance", {"seconds": 60}, scope=Scope.OPERATE
    )
    assert (status, bookie["state"]) == (200, "maintenance")
    assert of_cluster.get("/api/v1/bookies/bookie-1")["state"] == "maintenance"
    status, bookie = of_cluster.ask("POST", "/api/v1/bookies/bookie-1:end-maintenance", scope=Scope.OPERATE)
    assert (status, bookie["state"]) == (200, "active")

    status, problem = of_cluster.ask("GET", "/api/v1/bookies/bookie-1:ok-to-remove")
    assert (status, problem["code"]) == (409, "SafetyCheckError")
    assert problem["failures"]
    status, problem = of_cluster.ask("GET", "/api/v1/bookies/nobody")
    assert (status, problem["code"]) == (404, "NoSuchBookieError")
    for method, action in (("GET", "drain"), ("GET", "ok-to-stop"), ("POST", "drain"), ("POST", "remove")):
        status, problem = of_cluster.ask(method, f"/api/v1/bookies/nobody:{action}", scope=Scope.ADMIN)
        assert (status, problem["code"]) == (404, "NoSuchBookieError"), action
        assert "there are bookie-0, bookie-1" in problem["detail"]

    status, settings = of_cluster.ask("POST", "/api/v1/repairs:pause", {"seconds": 60, "by": "me"}, scope=Scope.OPERATE)
    assert (status, settings["repair"]["paused_by"]) == (200, "me")
    assert of_cluster.ask("POST", "/api/v1/repairs:resume", scope=Scope.OPERATE)[0] == 200
    assert of_cluster.get("/api/v1/repairs") == {"total": 0, "repairs": [], "held": 0, "held_because": []}

    change = {"values": {"repair.grace_s": 5, "placement.min_zones": 2}, "by": "me"}
    status, settings = of_cluster.ask("POST", "/api/v1/settings:change", change, scope=Scope.ADMIN)
    assert (status, settings["repair"]["grace_s"], settings["placement"]["min_zones"]) == (200, 5.0, 2)
    for values, said in (({"repair.grace": 5}, "no setting 'repair.grace'"), ({"repair.grace_s": -1}, "from 0.0 to")):
        status, problem = of_cluster.ask("POST", "/api/v1/settings:change", {"values": values}, scope=Scope.ADMIN)
        assert status == 400
        assert said in problem["detail"]
    assert of_cluster.get("/api/v1/settings")["repair"]["grace_s"] == 5.0


def test_changes_need_a_token_with_their_scope(of_cluster: Client, caplog: pytest.LogCaptureFixture) -> None:
    path, body = "/api/v1/repairs:pause", {"seconds": 60, "by": "me"}
    status, problem = of_cluster.ask("POST", path, body)
    assert (status, problem["code"]) == (401, "no_token")
    assert of_cluster.headers["WWW-Authenticate"] == "Bearer"
    status, problem = of_cluster.ask("POST", path, body, scope=Scope.READ)
    assert (status, problem["code"]) == (403, "scope_too_small")
    for scope, wanted in ((None, 401), (Scope.READ, 403), (Scope.OPERATE, 400)):
        assert of_cluster.ask("POST", path, b"{", scope=scope)[0] == wanted, "what has no right is not read"
    for given in ("Bearer wrong", "Bearer", f"Basic {TOKENS[Scope.ADMIN][1]}", "Bearer \xff"):
        assert of_cluster.ask("POST", path, body, Authorization=given)[0] == 401
        assert of_cluster.ask("GET", "/api/v1/cluster", Authorization=given)[0] == 401, "a bad token is not ignored"
    with caplog.at_level(logging.INFO):
        assert of_cluster.ask("POST", path, body, scope=Scope.ADMIN)[0] == 200
    [made] = [each for each in caplog.records if "POST /api/v1/repairs:pause by admin from 127.0.0.1" in each.message]
    assert NOT_LIMITED.items() <= vars(made).items(), "none is left out"
    assert TOKENS[Scope.ADMIN][1] not in caplog.text


def test_pages_of_other_sites_get_nothing(of_store: Client) -> None:
    status, problem = of_store.ask("GET", "/api/v1/cluster", Host="evil.example")
    assert (status, problem["code"]) == (421, "other_host")
    status, problem = of_store.ask("GET", "/api/v1/cluster", Origin="http://evil.example")
    assert (status, problem["code"]) == (403, "other_origin")
    host = f"127.0.0.1:{of_store.connection.port}"
    assert of_store.ask("GET", "/api/v1/cluster", Origin=f"http://{host}", Host=host)[0] == 200
    assert of_store.ask("GET", "/livez", Host="evil.example")[0] == 421


def test_bodies_are_json_objects_of_bounded_size(of_cluster: Client) -> None:
    path = "/api/v1/repairs:pause"
    for body, kind, wanted in (
        (b'{"seconds": 1, "by": "me"}', "text/plain", 415),
        (b"{", "application/json", 400),
        (b"[" * 60_000, "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"seconds": "soon", "by": "me"}', "application/json", 400),
        (b'{"seconds": 1}', "application/json", 400),
        (b'{"seconds": 1, "by": "me", "to": 1}', "application/json", 400),
        (b'{"seconds": true, "by": "me"}', "application/json", 400),
        (b'{"seconds": "60", "by": "me"}', "application/json", 400),
        (b'{"seconds": 0, "by": "me"}', "application/json", 400),
        (b'{"seconds": 86401, "by": "me"}', "application/json", 400),
        (b'{"seconds": NaN, "by": "me"}', "application/json", 400),
        (b'{"seconds": 1e999, "by": "me"}', "application/json", 400),
        (b'{"seconds": 60, "by": ""}', "application/json", 400),
        (b" " * (BODY_BYTES_MAX + 1), "application/json", 413),
    ):
        status, problem = of_cluster.ask("POST", path, body, scope=Scope.ADMIN, Content_Type=kind)
        assert status == wanted, problem
    status, problem = of_cluster.ask("PUT", path, b"{}", scope=Scope.ADMIN)
    assert (status, of_cluster.headers["Allow"]) == (405, "POST")


def test_changes_have_a_rate(of_cluster: Client) -> None:
    found = [of_cluster.ask("POST", "/api/v1/repairs:resume", {}, scope=Scope.ADMIN) for _ in range(3)]
    assert [status for status, _ in found] == [200, 200, 200]
    assert len(found) < CHANGES_PER_SECOND


def test_what_has_not_changed_is_not_sent_again(of_store: Client) -> None:
    of_store.get("/api/v1/ledgers")
    tag = of_store.headers["ETag"]
    assert of_store.ask("GET", "/api/v1/ledgers", If_None_Match=tag) == (304, b"")
    assert of_store.ask("GET", "/api/v1/ledgers", If_None_Match='"other"')[0] == 200
    for given in (f'"other", {tag}', f"W/{tag}", "*"):
        assert of_store.ask("GET", "/api/v1/ledgers", If_None_Match=given) == (304, b""), given
    for path in ("/", "/metrics", "/api/v1/openapi.json"):
        of_store.get(path)
        assert of_store.ask("GET", path, If_None_Match=f'"other", {of_store.headers["ETag"]}')[0] in (
            (200, 304) if path == "/metrics" else (304,)
        )


def test_head_has_all_of_get_but_the_body(of_store: Client) -> None:
    for path in ("/livez", "/api/v1/ledgers", "/api/v1/openapi.json", "/metrics", "/", "/app.js"):
        of_store.get(path)
        wanted = of_store.headers
        assert of_store.ask("HEAD", path) == (200, b""), path
        assert set(of_store.headers) == set(wanted)
        assert of_store.headers["Content-Type"] == wanted["Content-Type"]
    assert of_store.ask("HEAD", "/api/v1/ledgers/77") == (404, b"")
    assert of_store.ask("POST", "/api/v1/ledgers")[0] == 405
    assert set(of_store.headers["Allow"].split(", ")) == {"GET", "HEAD"}


def test_settings_are_changed_by_those_alone_who_know_them(of_cluster: Client) -> None:
    path = "/api/v1/settings:change"
    before = of_cluster.get("/api/v1/settings")
    tag = of_cluster.headers["ETag"]
    assert before["repair"]["grace_s"] == 600.0

    def change(seconds: int, if_match: str) -> int:
        body = {"values": {"repair.grace_s": seconds}}
        return int(of_cluster.ask("POST", path, body, scope=Scope.ADMIN, If_Match=if_match)[0])

    assert change(5, '"other"') == change(5, f"W/{tag}") == 412
    assert of_cluster.get("/api/v1/settings") == before
    assert change(5, f'"other", {tag}') == 200
    assert of_cluster.headers["ETag"] != tag
    newer = of_cluster.headers["ETag"]
    status, problem = of_cluster.ask("POST", path, {"values": {"repair.grace_s": 7}}, scope=Scope.ADMIN, If_Match=tag)
    assert (status, problem["code"]) == (412, "changed_meanwhile")
    of_cluster.get("/api/v1/settings")
    assert of_cluster.headers["ETag"] == newer, "the answer to a change has the tag of the settings, too"
    assert change(7, newer) == 200
    assert change(8, "*") == 200
    assert of_cluster.get("/api/v1/settings")["repair"]["grace_s"] == 8.0


def test_others_are_served_only_with_tokens_and_a_certificate(store: LedgerManager, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tokens = [token for token, _ in TOKENS.values()]
    pair = (str(authority.sign("server")),) * 2
    given: tuple[dict[str, Any], ...] = ({}, {"tokens": tokens}, {"certificate": pair})
    for options in given:
        with pytest.raises(UsageError, match="tokens and a certificate are needed"):
            AdminServer(store, "0.0.0.0", **options)
    context = ssl.create_default_context(cafile=str(authority.file))
    with (
        closing(AdminServer(store, "0.0.0.0", tokens=tokens, certificate=pair)) as serving,
        Client(serving.url.replace("0.0.0.0", "127.0.0.1"), context) as client,
    ):
        assert client.ask("GET", "/livez") == (200, b"ok\n"), "probes need no token"
        assert client.ask("GET", "/api/v1/cluster")[0] == 401
        assert client.ask("GET", "/metrics")[0] == 401
        assert client.ask("GET", "/api/v1/cluster", scope=Scope.READ)[0] == 200
    with pytest.raises(UsageError, match="cannot be used"):
        AdminServer(store, tokens=tokens, certificate=(str(authority.file), pair[1]))


def test_a_key_that_every_user_may_read_is_refused(store: LedgerManager, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    file = authority.sign("server")
    context = ssl.create_default_context(cafile=str(authority.file))
    for mode in (0o644, 0o602):
        file.chmod(mode)
        with pytest.raises(UsageError, match=f"its mode {mode:04o} lets every user of this host read or change it"):
            AdminServer(store, certificate=(str(file), str(file)))
    file.chmod(0o640)
    with closing(AdminServer(store, certificate=(str(file), str(file)))) as serving:
        file.chmod(0o644)
        with pytest.raises(UsageError, match="its mode 0644 lets every user"):
            serving.reload(())
        with Client(serving.url, context) as client:
            assert client.ask("GET", "/livez") == (200, b"ok\n")


def test_a_port_that_is_taken_is_named(store: LedgerManager) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port} cannot be listened on"):
            AdminServer(store, port=port)


def test_slow_and_too_many_connections_are_closed(store: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 2)
    with asking(store) as client:
        port = client.connection.port
        with ExitStack() as slow:
            held = [slow.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(3)]
            for each in held:
                each.sendall(b"GET /livez HTTP/1.1\r\n")
            assert list(map(ended, held)) == [True] * 3, "one is too many, and two took too long"
        assert client.get("/livez") == b"ok\n"


def ended(connection: socket.socket) -> bool:
    """Wait for what a connection has; return whether it is its end."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def said(client: Client, request: bytes, *, ends: bool = True) -> bytes:
    """Return all that the server answers to bytes on a connection of their own, until it closes that.

    Args:
        client: A client of the server.
        request: The bytes.
        ends: Whether the client says that nothing else will come.
    """
    found = b""
    with socket.create_connection(("127.0.0.1", client.connection.port), timeout=60) as connection:
        try:
            connection.sendall(request)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                found += part
        except TimeoutError:
            raise
        except OSError:  # it did not wait for all of them
            return found
    return found


def test_a_request_has_its_time_as_a_whole(store: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.5)
    with asking(store) as client, socket.create_connection(("127.0.0.1", client.connection.port)) as slow:
        slow.sendall(b"GET /livez HTTP/1.1\r\n")
        slow.settimeout(0.1)
        until = time.monotonic() + 60
        while time.monotonic() < until:  # each byte comes in time
            try:
                slow.sendall(b"x")
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() < until


def test_connections_leave_descriptors_to_the_rest_of_the_process(
    store: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 600.0)
    with closing(AdminServer(store)) as serving, Client(serving.url) as resting, Client(serving.url) as client:
        assert resting.ask("GET", "/livez") == (200, b"ok\n")
        monkeypatch.setattr(connections, "descriptor_max", lambda: 0)
        assert client.ask("GET", "/livez") == (200, b"ok\n")
        assert resting.connection.sock is not None
        assert ended(resting.connection.sock), "it gave its place to a connection that would leave too few"


@pytest.mark.parametrize("tls", [False, True])
def test_a_probe_is_answered_although_one_peer_holds_all_connections(
    store: LedgerManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 600.0)
    authority = Authority(tmp_path)
    pair = (str(authority.sign("server")),) * 2 if tls else None
    with asking(store, certificate=pair) as first, ExitStack() as held:
        for _ in range(connections.CONNECTIONS_MAX):
            one = held.enter_context(socket.create_connection(("127.0.0.1", first.connection.port), timeout=60))
            one.sendall(b"\x16\x03\x01" if tls else b"GET /livez HTTP/1.1\r\n")
        context = ssl.create_default_context(cafile=str(authority.file)) if tls else None
        with Client(f"http://127.0.0.1:{first.connection.port}", context) as client:
            assert client.ask("GET", "/livez") == (200, b"ok\n")


def test_a_client_that_holds_a_connection_with_tls_does_not_hold_the_end(
    store: LedgerManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 600.0)
    authority = Authority(tmp_path)
    with ExitStack() as stack:
        pair = (str(authority.sign("server")),) * 2
        serving = AdminServer(store, certificate=pair)
        context = ssl.create_default_context(cafile=str(authority.file))
        client = stack.enter_context(Client(serving.url, context))
        assert client.ask("GET", "/livez") == (200, b"ok\n")
        began = time.monotonic()
        serving.close()
        assert time.monotonic() - began < 300


def test_a_certificate_that_cannot_be_used_leaves_the_one_before(store: LedgerManager, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    file, other = authority.sign("server"), authority.sign("other")
    context = ssl.create_default_context(cafile=str(authority.file))
    certificate = file.read_bytes().partition(b"-----BEGIN CERTIFICATE-----")
    (tmp_path / "certificate").write_bytes(certificate[1] + certificate[2])
    with closing(AdminServer(store, certificate=(str(tmp_path / "certificate"), str(file)))) as serving:
        renewed = other.read_bytes().partition(b"-----BEGIN CERTIFICATE-----")
        (tmp_path / "certificate").write_bytes(renewed[1] + renewed[2])  # the key was not written yet
        with pytest.raises(UsageError, match="cannot be used"):
            serving.reload(())
        with Client(serving.url, context) as client:
            assert client.ask("GET", "/livez") == (200, b"ok\n")
        file.write_bytes(authority.sign("locked", password=b"word").read_bytes())
        with pytest.raises(UsageError, match="cannot be used"):
            serving.reload(())


def test_requests_that_servers_read_differently_are_refused(of_store: Client) -> None:
    host, second = b"Host: localhost\r\n", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for headers in (
        host + b"X : 1\r\nContent-Length: 51\r\n",
        host + b"X: 1\rContent-Length: 51\r\n",
        host + b"no field\r\nContent-Length: 51\r\n",
        host + b"Content-Length: 51\r\nContent-Length: 0\r\n",
        host + b"Content-Length: 51\r\nTransfer-Encoding: chunked\r\n",
        host + b"Content-Length: +51\r\n",
    ):
        found = said(of_store, b"GET /livez HTTP/1.1\r\n" + headers + b"\r\n" + second)
        assert found.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413")), (headers, found)
        assert found.count(b"HTTP/1.1 ") == 1, headers
    second = second.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    folded = said(
        of_store, b"GET /livez HTTP/1.1\r\n" + host + b"X: 1\r\n Content-Length: 51\r\n\r\n" + second, ends=False
    )
    assert folded.count(b"HTTP/1.1 200") == 2, "what belongs to a line before it is no line (RFC 9112, 5.2)"
    for headers in (host * 2, b"Host: evil.example\r\n" + host, b""):
        assert said(of_store, b"GET /livez HTTP/1.1\r\n" + headers + b"\r\n").startswith(b"HTTP/1.1 400"), headers
    long = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 1000) for number in range(33))
    found = said(of_store, b"GET /livez HTTP/1.1\r\n" + host + long + b"\r\n")
    assert found.startswith((b"HTTP/1.1 400", b"HTTP/1.1 200")) or not found, "it is bounded unless it comes at once"
    assert not said(of_store, b"GET /livez HTTP/1.1\r\n" + host), "its end did not come"


def test_what_is_no_request_is_refused_and_a_method_that_a_path_lacks_is_a_problem(of_store: Client) -> None:
    for request in (
        b"GET /livez extra HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nno field\r\n\r\n",
        b"GET /" + b"x" * 400_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"x" * 70_000,
    ):
        found = said(of_store, request)
        assert found.startswith(b"HTTP/1.1 400") or (len(request) > 70_000 and not found), found
    for request in (
        b"BREW /livez HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"QUERY /api/v1/types HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
    ):
        head, _, body = said(of_store, request).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 405"), head
        assert b"content-type: application/problem+json" in head
        problem = json.loads(body)
        assert (problem["status"], problem["code"], problem["retryable"]) == (405, "other_method", False)


def test_a_target_that_names_another_host_is_not_answered(of_store: Client) -> None:
    for target in (b"http://evil.example/livez", b"http://localhost/api/v1/cluster"):
        found = said(of_store, b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
        assert found.startswith(b"HTTP/1.1 404"), target


def test_what_follows_a_refusal_is_not_logged_as_a_defect(of_store: Client, caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /api/v1/cluster HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", of_store.connection.port), timeout=60) as connection:
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 405")
        connection.sendall(b"no chunk\r\n")
        while connection.recv(65536):
            pass
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_a_body_that_was_cut_changes_nothing(of_cluster: Client) -> None:
    token = TOKENS[Scope.ADMIN][1].encode()
    head = b"POST /api/v1/repairs:pause HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Authorization: Bearer " + token + b"\r\n"
    body = b'{"seconds": 60, "by": "me"}'
    assert said(of_cluster, head + b"Content-Length: 99\r\n\r\n" + body) == b""
    assert of_cluster.get("/api/v1/settings")["repair"]["paused_by"] == ""
    with socket.create_connection(("127.0.0.1", of_cluster.connection.port), timeout=60) as waiting:
        waiting.sendall(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert waiting.recv(100).startswith(b"HTTP/1.1 100"), "the client sends the body after this alone"
        waiting.sendall(body)
        assert waiting.recv(100).startswith(b"HTTP/1.1 200")


def test_a_refusal_does_not_wait_for_the_body(of_store: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 50.0)
    head = b"GET /api/v1/cluster HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
    lengths = {b"-1": 400, b"+2": 400, b"70000": 413, b"99999999999": 413, b"2\r\nContent-Length: 3": 400}
    for length, status in lengths.items():
        with socket.create_connection(("127.0.0.1", of_store.connection.port), timeout=60) as waiting:
            began = time.monotonic()
            waiting.sendall(head + length + b"\r\n\r\n")
            assert waiting.recv(100).startswith(b"HTTP/1.1 %d" % status), length
            assert time.monotonic() - began < connections.REQUEST_SECONDS


def test_an_origin_that_is_no_url_is_another_one(of_store: Client) -> None:
    for origin in ("http://[", "null", "http://evil.example:x", ""):
        status, problem = of_store.ask("GET", "/api/v1/cluster", Origin=origin)
        assert (status, problem["code"]) == (403, "other_origin"), origin


def test_names_of_hosts_have_no_case(store: LedgerManager) -> None:
    with asking(store, hosts=["Console.Example"]) as client:
        assert client.ask("GET", "/livez", Host="console.example:1")[0] == 200
        assert client.ask("GET", "/livez", Host="CONSOLE.example")[0] == 200


def test_what_cannot_be_looked_at_is_not_ready(
    store: LedgerManager, of_store: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert of_store.ask("GET", "/readyz")[0] == 200
    whole = type(store).health

    def fails(manager: LedgerManager) -> Health:
        raise OSError("a device is gone")

    monkeypatch.setattr(type(store), "health", fails)
    monkeypatch.setattr(probes, "TURN_SECONDS", 2.0)
    wait_until(lambda: of_store.ask("GET", "/readyz")[0] == 503)
    assert of_store.ask("GET", "/livez")[0] == 200
    monkeypatch.setattr(type(store), "health", whole)
    wait_until(lambda: of_store.ask("GET", "/readyz")[0] == 200)


def test_a_process_is_live_while_nothing_can_be_seen(
    cluster: Inside, of_cluster: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(ClusterAdmin, "status", lambda _: answered.wait(60))
    monkeypatch.setattr(view, "SEEN_SECONDS", 0.1)
    try:
        assert of_cluster.ask("GET", "/livez") == (200, b"ok\n")
        status, problem = of_cluster.ask("GET", "/readyz")
        assert (status, problem["code"], problem["retryable"]) == (503, "not_seen", True)
    finally:
        answered.set()


def test_probes_are_answered_while_requests_wait_for_the_metadata_store(
    cluster: Inside, of_cluster: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert of_cluster.get("/readyz") == b"ok\n"
    answers = threading.Event()
    waiting = threading.Semaphore(0)
    settings = ClusterAdmin.settings

    def late(admin: ClusterAdmin) -> ClusterSettings:
        waiting.release()
        assert answers.wait(300)
        return settings(admin)

    monkeypatch.setattr(ClusterAdmin, "settings", late)
    url = f"http://127.0.0.1:{of_cluster.connection.port}"
    found: list[int] = []

    def ask() -> None:
        with Client(url) as client:
            found.append(client.ask("GET", "/api/v1/settings")[0])

    threads = [threading.Thread(target=ask) for _ in range(ANSWERS_MAX)]
    try:
        for each in threads:
            each.start()
        for _ in threads:
            assert waiting.acquire(timeout=60)
        with ExitStack() as rest:
            for _ in range(
                connections.CONNECTIONS_MAX
            ):  # others than the probes find no place, and keep their connections
                other = rest.enter_context(Client(url))
                status, problem = other.ask("GET", "/api/v1/settings")
                assert (status, problem["code"], other.headers["Retry-After"]) == (503, "busy", "1")
            with Client(url) as client:
                for probe in ("/livez", "/readyz", "/healthz"):
                    assert client.ask("GET", probe)[0] == 200, probe
    finally:
        answers.set()
        for each in threads:
            each.join()
    assert found == [200] * ANSWERS_MAX
    with Client(url) as client:
        assert client.ask("GET", "/api/v1/settings")[0] == 200, "the places are free again"


def test_a_probe_without_a_place_does_not_wait_for_a_look(of_cluster: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(ClusterAdmin, "status", lambda _: answered.wait(300))
    monkeypatch.setattr(view, "SEEN_SECONDS", 300.0)
    monkeypatch.setattr(application, "ANSWERS_MAX", 0)
    try:
        assert of_cluster.ask("GET", "/livez") == (200, b"ok\n")
        assert [of_cluster.ask("GET", each)[0] for each in ("/readyz", "/healthz")] == [503, 503]
    finally:
        answered.set()


def test_a_client_that_does_not_take_its_response_holds_no_probe(
    store: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 600.0)
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 3)
    with asking(store) as client, ExitStack() as held:
        for _ in range(3):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            held.enter_context(one)
            one.connect(("127.0.0.1", client.connection.port))
            one.sendall(b"GET /uPlot.iife.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        with Client(f"http://127.0.0.1:{client.connection.port}") as another:
            assert another.ask("GET", "/livez") == (200, b"ok\n")


def test_a_client_is_live_and_ready_without_bookies(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster, asking(cluster.connect()) as client:
        assert client.get("/api/v1/cluster")["state"] == "failed", "one bookie is too few"
        assert client.ask("GET", "/livez")[0] == client.ask("GET", "/readyz")[0] == 200


def test_texts_and_lists_of_json_that_are_none_are_refused(of_cluster: Client) -> None:
    for path, body in (
        ("/api/v1/repairs:pause", b'{"seconds": 5, "by": "\\ud800"}'),
        ("/api/v1/repairs:resume", b'{"accept_loss_of": ["\\ud800"]}'),
        ("/api/v1/settings:change", b'{"values": {"repair.paused_by": "\\ud800"}}'),
        ("/api/v1/settings:change", b'{"values": {"repair.accepted_losses": 5}}'),
    ):
        status, problem = of_cluster.ask("POST", path, body, scope=Scope.ADMIN)
        assert status == 400, problem


def test_probes_follow_the_health(store: LedgerManager, of_store: Client) -> None:
    assert of_store.get("/livez") == b"ok\n"
    assert of_store.get("/readyz") == b"ok\n"
    assert of_store.get("/healthz") == b"ok\n"
    found = of_store.get("/healthz?verbose")
    assert (found["verdict"], found["reasons"], found["trouble"]) == ("ok", [], "")
    assert b"pybk_state" in of_store.get("/metrics")
    store.close()
    wait_until(lambda: of_store.ask("GET", "/readyz")[0] == 503)


def test_a_bookie_in_limbo_is_not_ready(cluster: Inside) -> None:
    client = cluster.connect()
    writer = client.create_ledger(password=b"p")
    writer.append(b"entry")
    place = int(client.ledger_metadata(writer.ledger_id).fragments[0].ensemble[0].bookie_id[-1])
    service_of(cluster.bookies[place]).replicas.put_in_limbo({writer.ledger_id: None})
    with asking(cluster.bookies[place]) as of_bookie:
        status, said = of_bookie.ask("GET", "/readyz")
        assert status == 503
        assert b"limbo" in said
        assert of_bookie.ask("GET", "/readyz?allow=limbo")[0] == 200
        assert of_bookie.ask("GET", "/livez")[0] == 200, "a restart would not help"


def test_a_server_takes_no_signals_over_and_leaves_logging_as_it_is(store: LedgerManager) -> None:
    def found() -> list[object]:
        loggers = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")]
        return [
            *(signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)),
            *((each.level, list(each.handlers), each.propagate) for each in loggers),
            threading.current_thread() is threading.main_thread() and signal.set_wakeup_fd(-1),
        ]

    before, others = found(), set(threading.enumerate())  # of servers of other tests, which may still end
    with asking(store) as client:
        assert client.get("/livez") == b"ok\n"
        assert found() == before
    assert found() == before
    own = [each for each in threading.enumerate() if each.name.startswith("pybk-http") and each not in others]
    assert not own


def test_a_connection_sends_what_is_small_at_once(store: LedgerManager) -> None:
    with asking(store) as client:
        assert client.get("/livez") == b"ok\n"
        [place] = [each for each in places() if each.connection.fileno() >= 0]
        found = place.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert found, "head and body of a response would wait for each other"


def test_a_waiting_probe_keeps_its_place(cluster: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may hold all connections while a request without a body is being answered."""
    answered = threading.Event()
    monkeypatch.setattr(ClusterAdmin, "status", lambda _: answered.wait(300))
    monkeypatch.setattr(probes, "SEEN_SECONDS", 300.0)
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 600.0)
    found: list[int] = []
    with asking(cluster.connect()) as client, ExitStack() as others:
        asked = threading.Thread(target=lambda: found.append(client.ask("GET", "/livez")[0]))
        asked.start()
        try:
            wait_until(lambda: any(not each.waits for each in places()))
            for _ in range(4):
                one = others.enter_context(socket.create_connection(("127.0.0.1", client.connection.port)))
                one.sendall(b"GET /livez HTTP/1.1\r\n")
        finally:
            answered.set()
            asked.join()
    assert found == [200]


def places() -> list[connections.Place]:
    """Return the places of the connections of all servers of this process."""
    return [each for each in gc.get_objects() if isinstance(each, connections.Place)]


@pytest.mark.parametrize("package", ["msgspec", "starlette", "uvicorn"])
def test_without_the_extra_what_serves_says_what_to_install(
    store: LedgerManager, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("AdminServer", "asgi_app"):
        monkeypatch.delitem(vars(http_interface), name, raising=False)  # as in a process that has not used it yet
        with pytest.raises(UsageError, match=rf"HTTP takes {package}: pip install 'pybk\[http\]'"):
            getattr(http_interface, name)
    with pytest.raises(UsageError, match=r"pip install 'pybk\[http\]'"):
        HttpSettings(listen="127.0.0.1:0").serve(store)
    assert http_interface.Token is Token, "commands make tokens nevertheless"
