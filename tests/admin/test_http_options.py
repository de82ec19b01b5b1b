"""Programs that serve HTTP: their options, and a bookie's own port."""

from __future__ import annotations

import json
import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk.admin.http import AdminServer, Scope, Token
from pybk.admin.http.probes import TURN_SECONDS
from pybk.admin.http_options import HttpSettings
from pybk.errors import UsageError
from pybk.options.kinds import host_and_port
from tests.admin.http.test_server import TOKENS, Client
from tests.certificates import Authority
from tests.cluster.inside import SECRET, Inside, inside, make_cluster
from tests.cluster.processes import Child
from tests.internals import service_of
from tests.storage.real_store import python_path
from tests.waiting import wait_until


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster", count=1) as found:
        yield found


def serving(cluster: Inside, settings: HttpSettings) -> AdminServer:
    [manager] = cluster.bookies
    return settings.serve(manager, service_of(manager))


LOOPBACK = HttpSettings(listen="127.0.0.1:0")
BEYOND = HttpSettings(listen="0.0.0.0:0")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("[::1]:0", ("::1", 0)),
        ("bookie-1.example.org:1", ("bookie-1.example.org", 1)),
    ],
)
def test_an_address_has_a_host_and_a_port(text: str, found: tuple[str, int]) -> None:
    assert host_and_port(text) == found


@pytest.mark.parametrize("text", ["", "9464", ":9464", "::1:9464", "localhost:", "localhost:65536", "localhost:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # OptionType says what it takes
        host_and_port(text)


def test_a_bookie_shows_itself_and_nothing_else(cluster: Inside) -> None:
    with closing(serving(cluster, LOOPBACK)) as server, Client(server.url) as client:
        found = client.get("/api/v1/bookies/self")
        assert (found["name"], found["state"], found["reasons"]) == ("bookie-0", "ok", [])
        assert found["addresses"] == list(service_of(cluster.bookies[0]).addresses)
        assert client.get("/healthz?verbose")["verdict"] == "ok"
        for path in ("/api/v1/cluster", "/api/v1/bookies", "/api/v1/settings"):
            assert client.ask("GET", path)[0] == 404, path
        assert client.get("/api/v1/openapi.json")["paths"].keys() == {
            f"/api/v1/{each}" for each in ("bookies/self", "load", "series", "events")
        }


def test_a_bookie_that_hangs_is_not_live(cluster: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    bookie = service_of(cluster.bookies[0])
    with closing(serving(cluster, LOOPBACK)) as server, Client(server.url) as client:
        assert client.ask("GET", "/livez") == (200, b"ok\n")
        monkeypatch.setattr(type(bookie), "turned_ns", property(lambda _: 1, lambda *_: None))
        status, text = client.ask("GET", "/livez")
        assert (status, b"has not turned for" in text) == (503, True)
        assert TURN_SECONDS == 30, "as docs/reference/http.md says"


def test_a_bookie_that_is_to_end_is_not_ready(cluster: Inside) -> None:
    with closing(serving(cluster, LOOPBACK)) as server, Client(server.url) as client:
        assert client.ask("GET", "/readyz") == (200, b"ok\n")
        service_of(cluster.bookies[0]).keeper.retire()
        wait_until(lambda: client.ask("GET", "/readyz")[0] == 503)
        assert client.ask("GET", "/livez")[0] == 200


def test_others_get_nothing_but_probes_from_a_bookie_without_tokens(cluster: Inside) -> None:
    with (
        closing(serving(cluster, BEYOND)) as server,
        Client(server.url.replace("0.0.0.0", "127.0.0.1")) as client,
    ):
        assert client.ask("GET", "/readyz", Host="10.1.2.3:9464") == (200, b"ok\n"), "as a kubelet asks"
        for path in ("/metrics", "/api/v1/bookies/self", "/api/v1/openapi.json"):
            assert client.ask("GET", path)[0] == 401, path


def test_tokens_beyond_this_host_take_a_certificate_and_are_read_again(cluster: Inside, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKENS[Scope.READ][0].line())
    with pytest.raises(UsageError, match="tokens and a certificate are needed"):
        serving(cluster, replace(BEYOND, tokens=str(file)))
    with pytest.raises(UsageError, match="has no certificate"):
        serving(cluster, replace(BEYOND, key=str(file)))
    authority = Authority(tmp_path)
    settings = replace(BEYOND, tokens=str(file), certificate=str(authority.sign("server")))
    context = ssl.create_default_context(cafile=str(authority.file))
    with closing(serving(cluster, settings)) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        with Client(url, context) as client:
            assert client.ask("GET", "/api/v1/bookies/self", scope=Scope.READ)[0] == 200
        other = Token.new("other", Scope.READ)
        file.write_text(other[0].line())
        Authority(tmp_path, "second").sign("server")
        server.reload(settings.read_tokens())
        with Client(url, ssl.create_default_context(cafile=str(tmp_path / "second.pem"))) as client:
            assert client.ask("GET", "/api/v1/bookies/self", scope=Scope.READ)[0] == 401
            assert client.ask("GET", "/api/v1/bookies/self", Authorization=f"Bearer {other[1]}")[0] == 200


def test_tokens_are_not_taken_later_without_a_certificate(cluster: Inside) -> None:
    with closing(serving(cluster, BEYOND)) as server, Client(server.url.replace("0.0.0.0", "127.0.0.1")) as client:
        with pytest.raises(UsageError, match="has no certificate"):
            server.reload([TOKENS[Scope.READ][0]])
        assert client.ask("GET", "/api/v1/bookies/self", scope=Scope.READ)[0] == 401
        server.reload([])


def test_a_host_that_cannot_be_one_is_named(cluster: Inside) -> None:
    with pytest.raises(UsageError, match="cannot be listened on"):
        serving(cluster, HttpSettings(listen=f"{'a' * 64}.example:0"))


def test_the_process_of_a_bookie_serves_its_metrics(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    url = make_cluster(tmp_path / "cluster")
    arguments = ["bookie", str(tmp_path / "b1"), "--id=b1", "--listen=tcp://127.0.0.1:*", f"--metadata={url}", "--json"]
    with Child([*arguments, "--http=127.0.0.1:0"], SECRET, tmp_path / "log", module="pybk") as child:
        child.wait_for(lambda: child.lines)
        said: dict[str, Any] = json.loads(child.lines[0])
        with Client(said["http"]) as client:
            text = client.get("/metrics").decode()
            assert 'pybk_registered{store="b1"} 1.0' in text.splitlines()
            assert client.get("/api/v1/bookies/self")["name"] == "b1"
        child.signal(signal.SIGTERM)
        assert child.join() == 0


def test_a_bookie_without_the_packages_for_http_serves_its_clients(tmp_path: Path) -> None:
    url = make_cluster(tmp_path / "cluster")
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['starlette'] = None\n")
    arguments = ["bookie", str(tmp_path / "b1"), "--id=b1", "--listen=tcp://127.0.0.1:*", f"--metadata={url}", "--json"]
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{python_path()}"}
    with Child([*arguments, "--http=127.0.0.1:0"], SECRET, tmp_path / "log", module="pybk", variables=path) as child:
        child.wait_for(lambda: child.lines)
        assert json.loads(child.lines[0])["http"] == ""
        assert "its HTTP port does not serve: HTTP takes starlette: pip install 'pybk[http]'" in child.complaint()
        child.signal(signal.SIGTERM)
        assert child.join() == 0


def test_parts_of_http_without_a_port_are_refused(tmp_path: Path) -> None:
    url = make_cluster(tmp_path / "cluster")
    arguments = ["bookie", str(tmp_path / "b1"), "--listen=tcp://127.0.0.1:*", f"--metadata={url}"]
    with Child([*arguments, "--http-tokens=tokens"], SECRET, tmp_path / "log", module="pybk") as child:
        assert child.join() == 2
    assert "[http] tokens is given, and [http] listen is not" in child.complaint()
