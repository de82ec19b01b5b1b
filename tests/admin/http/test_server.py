"""The administration interface on a port of its own: real requests to a store and to a cluster."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pybk import LedgerManager, UsageError
from pybk.admin.http import AdminServer, Scope, Token, server
from pybk.admin.http.application import CHANGES_PER_SECOND
from pybk.admin.http.messages import BODY_BYTES_MAX
from tests.certificates import Authority
from tests.client.test_limbo_repair import service_of
from tests.cluster.inside import Inside, inside
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
        self.headers = dict(response.getheaders())
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
        ("limit=0", "from 1 to 1000"),
        ("limit=x", "it takes a whole number"),
        ("after=-2", "from -1 up"),
        ("state=shut", "one of open, in_recovery, closed"),
        ("first=1", "has no parameter 'first'; it takes after, ledger_type, limit, state"),
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
    assert (status, problem["code"]) == (404, "no_such_bookie")

    status, settings = of_cluster.ask("POST", "/api/v1/repairs:pause", {"seconds": 60, "by": "me"}, scope=Scope.OPERATE)
    assert (status, settings["repair"]["paused_by"]) == (200, "me")
    assert of_cluster.ask("POST", "/api/v1/repairs:resume", scope=Scope.OPERATE)[0] == 200
    assert of_cluster.get("/api/v1/repairs") == {"total": 0, "repairs": []}

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
    for given in ("Bearer wrong", "Bearer", f"Basic {TOKENS[Scope.ADMIN][1]}", "Bearer \xff"):
        assert of_cluster.ask("POST", path, body, Authorization=given)[0] == 401
        assert of_cluster.ask("GET", "/api/v1/cluster", Authorization=given)[0] == 401, "a bad token is not ignored"
    with caplog.at_level(logging.INFO):
        assert of_cluster.ask("POST", path, body, scope=Scope.ADMIN)[0] == 200
    assert "POST /api/v1/repairs:pause by admin from 127.0.0.1" in caplog.text
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
    status, body = of_store.ask("HEAD", "/livez")
    assert (status, body) == (200, b"")


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


def test_a_port_that_is_taken_is_named(store: LedgerManager) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port} cannot be listened on"):
            AdminServer(store, port=port)


def test_slow_and_too_many_connections_are_closed(store: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 2)
    with asking(store) as client:
        port = client.connection.port
        with ExitStack() as slow:
            held = [slow.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(3)]
            for each in held:
                each.sendall(b"GET /livez HTTP/1.1\r\n")
            assert [each.recv(1) for each in held] == [b""] * 3, "one is too many, and two took too long"
        assert client.get("/livez") == b"ok\n"


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
