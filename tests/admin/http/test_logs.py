"""Named logs over HTTP: one of them, the lags of its subscriptions, and a look at its records."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pybk import LedgerManager, Log, LogEnd
from pybk.admin.http import AdminServer, Scope, lags
from pybk.admin.http.lags import LagHistory
from pybk.admin.http.logs import EXCERPT_BYTES, RECORDS_MAX
from pybk.credentials import Secret
from tests.admin.http.test_server import Client, asking
from tests.storage.real_store import open_quick

PEEK = "/api/v1/logs/orders%2Feu:peek"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "store") as manager:
        with Log.open(manager, "orders/eu", password=b"p") as log, log.writer() as writer:
            for number in range(30):
                writer.append(b"record %d" % number, key=b"k")
            log.subscribe("billing", start=LogEnd.EARLIEST).close()
        yield manager


def test_a_log_is_shown_with_its_ledgers_and_subscriptions(store: LedgerManager) -> None:
    with asking(store) as client:
        found = client.get("/api/v1/logs/orders%2Feu")
        (listed,) = client.get("/api/v1/logs")["logs"]
        assert found["log"] == listed
        (segment,) = found["segments"]
        assert segment["first_seq"] == 0
        assert [each["name"] for each in listed["subscriptions"]] == ["billing"]
        status, problem = client.ask("GET", "/api/v1/logs/nothing")
        assert (status, problem["code"]) == (404, "no_such_log")


def test_records_are_shown_for_a_token_that_may_operate_and_where_a_secret_was_given(
    store: LedgerManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with asking(store) as without:
        assert not without.get("/api/v1/cluster")["opens_logs"]
        status, problem = without.ask("POST", PEEK, {}, scope=Scope.ADMIN)
        assert (status, problem["code"]) == (404, "no_secret")
    with asking(store, password=b"other") as wrong:
        assert wrong.ask("POST", PEEK, {}, scope=Scope.OPERATE)[0] == 403
    (tmp_path / "password").write_bytes(b"p\n")
    (tmp_path / "password").chmod(0o600)
    with asking(store, password=Secret(file=str(tmp_path / "password"), private=True)) as client:
        assert client.get("/api/v1/cluster")["opens_logs"]
        for scope, wanted in ((None, 401), (Scope.READ, 403)):
            status, problem = client.ask("POST", PEEK, {}, scope=scope)
            assert status == wanted
            assert "record 1" not in str(problem)
        with caplog.at_level(logging.INFO):
            status, page = client.ask("POST", PEEK, {}, scope=Scope.OPERATE)
        assert status == 200
        assert f"POST {PEEK} by operate" in caplog.text, "each look is logged"
        assert [each["seq"] for each in page["records"]] == list(range(10, 30)), "the last ones"
        assert (page["first_seq"], page["last_seq"]) == (0, 29)
        assert page["records"][0]["data"] == {"size": 9, "text": "record 10", "hex": None}
        assert page["records"][0]["key"]["text"] == "k"
        status, page = client.ask("POST", PEEK, {"first": 3, "limit": 2}, scope=Scope.OPERATE)
        assert [each["data"]["text"] for each in page["records"]] == ["record 3", "record 4"]
        for body in ({"limit": RECORDS_MAX + 1}, {"first": -1}, {"first": None}):
            assert client.ask("POST", PEEK, body, scope=Scope.OPERATE)[0] == 400, body
        status, problem = client.ask("POST", "/api/v1/logs/nothing:peek", {}, scope=Scope.OPERATE)
        assert (status, problem["code"]) == (404, "NoSuchLogError")


def test_records_that_are_long_or_no_text_are_cut_or_hexadecimal(store: LedgerManager) -> None:
    long = "ä".encode() * EXCERPT_BYTES
    with Log.open(store, "odd", insecure=True) as log, log.writer() as writer:
        for data in (b"\xff\x00", b"x" + long, b"", b"cut \xc3"):
            writer.append(data)
    with asking(store, password=b"") as client:
        status, page = client.ask("POST", "/api/v1/logs/odd:peek", {}, scope=Scope.OPERATE)
        assert status == 200, page
    found = [each["data"] for each in page["records"]]
    assert found[0] == {"size": 2, "text": None, "hex": "ff00"}
    assert found[1] == {"size": len(long) + 1, "text": "x" + "ä" * (EXCERPT_BYTES // 2 - 1), "hex": None}
    assert found[2] == {"size": 0, "text": "", "hex": None}
    assert found[3]["text"] is None, "the end of a record was not cut here"


def test_the_lags_of_subscriptions_are_kept(store: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lags, "LAG_SECONDS", 0.0)
    history = LagHistory(store)
    history.note()
    with Log.open(store, "orders/eu", password=b"p") as log:
        log.writer().close()  # which closes the ledger before it, whose records count from now on
        with log.subscribe("billing") as subscription:
            history.note()
            for delivered in subscription.read_many(10):
                subscription.ack(delivered)
    with Log.open(store, "orders/eu", password=b"p") as log:
        log.subscribe("audit", start=LogEnd.EARLIEST).close()
    history.note()
    found = history.of("orders/eu")
    assert len(found.at_ms) == 3
    of = {each.name: each.backlog_max for each in found.lines}
    assert of["audit"][:2] == (None, None), "it did not exist"
    assert of["billing"][1] == of["audit"][2] == 30
    assert history.of("nothing").lines == ()


def test_a_process_says_what_it_uses(store: LedgerManager) -> None:
    with closing(AdminServer(store)) as server, Client(server.url) as client:
        process = client.get("/api/v1/load")["process"]
    assert process["memory_bytes"] > 1 << 20
    assert process["cpu"] >= 0
    assert process["sessions"] is None, "a store has no clients"
