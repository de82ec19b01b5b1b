"""What is under way: rates from counters, their history, events, logs, and what bookies say of themselves."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import pytest

from pybk import LedgerManager, Log, LogEnd
from pybk.admin.http import AdminServer, BookiePorts, bookie_loads, view
from pybk.admin.http.bookie_loads import BookieLoads
from pybk.admin.http.events import EVENTS_MAX, Events
from pybk.admin.http.history import LINES_MAX, SAMPLES_MAX, FreeSpace, History, Sample
from pybk.admin.http.json_values import as_json
from pybk.admin.http.rates import TYPES_MAX, RateMeter, Rates, decode_load, together
from pybk.errors import CorruptError
from pybk.log_events import log_event
from pybk.metrics import APPENDED_ENTRIES, BOOKIE_REQUEST, LOG_SYNC, OTHER_TYPES, READ_LATENCY, Metrics
from tests.admin.http.test_server import asking
from tests.cluster.inside import inside
from tests.storage.real_store import open_quick
from tests.waiting import wait_until

SECOND = 10**9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "store") as manager:
        yield manager


def test_rates_are_those_since_the_last_look() -> None:
    metrics, meter = Metrics(), RateMeter()
    orders = metrics.scope("orders", "nvme")
    orders.appended(10, 1000, 5_000_000)
    first = meter.measure(0, metrics.snapshot())
    assert not first.total, "what was before the first look is not of the last second"
    orders.appended(30, 600, 1_000_000)
    orders.appended(2, 40, 80_000_000)
    metrics.scope("orders", "hdd").appended(8, 80, 1_000_000)
    metrics.observe(READ_LATENCY, 2_000_000, 3, "mail")
    metrics.observe(LOG_SYNC, 7_000_000)
    load = meter.measure(2 * SECOND, metrics.snapshot())
    assert (load.total.append_entries, load.total.append_bytes) == (20.0, 360.0)
    assert load.types.keys() == {"orders"}, "nothing of the type mail was read to its end"
    rates = load.types["orders"]
    assert rates.append_p50_s == pytest.approx(1e-3, rel=0.13)
    assert rates.append_p99_s == pytest.approx(80e-3, rel=0.13)
    assert load.total.read_p99_s == pytest.approx(2e-3, rel=0.13)
    assert load.sync_p99_s == pytest.approx(7e-3, rel=0.13)
    assert load.limbo_ledgers is None
    assert decode_load(json.loads(json.dumps(as_json(load)))) == load
    assert not meter.measure(3 * SECOND, metrics.snapshot()).total

    reads = (("op", "read"),)
    metrics.observe(BOOKIE_REQUEST, 3_000_000, 4, labels=reads)
    total = meter.measure(4 * SECOND, metrics.snapshot()).total
    assert total.read_entries == 4.0, "of a bookie, requests"
    assert total.read_p99_s == pytest.approx(3e-3, rel=0.13)


def test_rates_of_very_many_types_are_sent_together() -> None:
    metrics, meter = Metrics(), RateMeter()
    meter.measure(0, metrics.snapshot())
    for number in range(TYPES_MAX + 5):
        metrics.add(APPENDED_ENTRIES, 100 + number, f"type-{number}")
    types = meter.measure(SECOND, metrics.snapshot()).types
    assert len(types) == TYPES_MAX + 1
    assert types[OTHER_TYPES].append_entries == 100 + 101 + 102 + 103 + 104, "the least busy ones"


def sample(second: int, types: dict[str, Rates], **free: FreeSpace) -> Sample:
    return Sample(second * SECOND, together(types.values()), types, {}, free)


def test_the_history_is_bounded_and_lines_are_few() -> None:
    history = History()
    many = {f"type-{number}": Rates(append_entries=1.0) for number in range(LINES_MAX + 4)}
    history.add(sample(1, many))
    found = history.since()
    assert len(found.lines) == 1 + LINES_MAX + 1
    others = next(each for each in found.lines if each.name == OTHER_TYPES)
    assert others.append_entries == (4.0,)
    for second in range(2, SAMPLES_MAX + 2):
        history.add(sample(second, {"late": Rates(append_entries=2.0), "idle": Rates()}))
    found = history.since()
    assert len(found.at_ms) == SAMPLES_MAX
    assert [(each.by, each.name) for each in found.lines] == [("all", ""), ("type", OTHER_TYPES)], (
        "the first sample is gone with its lines"
    )
    history.add(sample(SAMPLES_MAX + 2, {"late": Rates(append_entries=2.0)}))
    last = history.since((SAMPLES_MAX + 1) * 1000)
    assert last.at_ms == ((SAMPLES_MAX + 2) * 1000,)
    assert next(each for each in last.lines if each.name == "late").append_entries == (2.0,)


def test_days_left_compare_the_same_bookies() -> None:
    history = History()
    two, three = frozenset("ab"), frozenset("abc")
    history.add(sample(0, {}, ssd=FreeSpace(900, three)))
    history.add(sample(100, {}, ssd=FreeSpace(500, two)))
    assert history.days_left("ssd") is None, "a bookie that is gone fills nothing"
    history.add(sample(200, {}, ssd=FreeSpace(400, two)))
    assert history.days_left("ssd") == pytest.approx(400 / 86_400), "a byte a second"
    assert history.days_left("hdd") is None


def test_events_are_kept_by_name_and_bounded(caplog: pytest.LogCaptureFixture) -> None:
    events, others = Events(), Events()
    events.begin()
    others.begin()
    try:
        logger = logging.getLogger("pybk.somewhere")
        logger.warning("no event")
        logger.warning("it is %s", "read-only", extra=log_event("bookie.read_only"))
        (found,) = events.after()
        assert (found.event, found.message, found.level) == ("bookie.read_only", "it is read-only", "warning")
        for number in range(EVENTS_MAX + 1):
            events.add("cluster.verdict", f"{number} " + "x" * 10_000)
        kept = events.after()
        assert len(kept) == EVENTS_MAX
        assert max(len(each.message) for each in kept) == 500
        assert events.after(kept[-2].number) == kept[-1:]
        assert kept[-1].number < 1 << 53, "a page loses nothing of it"
        assert abs(kept[0].time_ns - time.time_ns()) < 3600 * 10**9
        assert others.take_in(as_json(kept[:2]), "b1") == kept[1].number
        assert [each.bookie for each in others.after()] == ["", "b1", "b1"]
        with pytest.raises(KeyError):
            others.take_in([{"level": "info"}], "b1")
    finally:
        events.close()
        others.close()
    logging.getLogger("pybk").warning("later", extra=log_event("bookie.read_only"))
    assert events.after() == kept


def test_a_store_shows_its_rates(store: LedgerManager, tmp_path: Path) -> None:
    with asking(store) as client:
        client.get("/api/v1/load")  # the first request begins to measure
        with store.create_ledger(password=b"p", ledger_type="orders") as writer:
            writer.append(b"entry")

        def appended() -> tuple[dict[str, Any], dict[str, Any]] | None:
            """Return the series, and that of the ledger's type once the append is in it."""
            found = client.get("/api/v1/series")
            lines = [each for each in found["lines"] if each["name"] == "orders" and any(each["append_entries"])]
            return (found, lines[0]) if lines else None

        series = wait_until(appended)
        assert series is not None
        found, orders = series
        assert any(orders["append_p99_s"])
        assert client.get(f"/api/v1/series?since={found['at_ms'][-1]}")["at_ms"] != found["at_ms"]
        types = client.get("/api/v1/types")
        assert types["whose"] == "store"
        assert all(each["free_bytes"] > 0 for each in client.get("/api/v1/space"))
        assert client.ask("GET", "/api/v1/loads")[0] == 404


def test_ledgers_that_cannot_be_counted_stop_nothing(store: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise CorruptError("a row of the index")

    monkeypatch.setattr(store, "ledgers", fails)
    with asking(store) as client:
        first = client.get("/api/v1/cluster")["seen_ns"]
        wait_until(lambda: client.get("/api/v1/cluster")["seen_ns"] > first)
        assert client.get("/api/v1/types")["types"] == []


def test_logs_are_listed_with_what_their_subscriptions_need(store: LedgerManager) -> None:
    for name in ("a", "b", "c"):
        with Log.open(store, name, password=b"p") as log, log.writer() as writer:
            for number in range(5):
                writer.append(b"%d" % number)
            if name == "b":
                log.subscribe("reader", start=LogEnd.EARLIEST).close()
    with asking(store) as client:
        page = client.get("/api/v1/logs?limit=2")
        assert [each["name"] for each in page["logs"]] == ["a", "b"]
        a, b = page["logs"]
        assert (a["end_seq"] - a["first_seq"], a["open"], a["sealed"], a["subscriptions"]) == (5, False, False, [])
        (subscription,) = b["subscriptions"]
        assert subscription == {"name": "reader", "needs_from": b["first_seq"], "backlog_max": 5}
        assert page["next"] == "b"
        page = client.get("/api/v1/logs?limit=2&after=b")
        assert ([each["name"] for each in page["logs"]], page["next"]) == (["c"], None)
        assert client.ask("GET", "/api/v1/logs?limit=0")[0] == 400
        found = [
            [each["name"] for each in client.get(f"/api/v1/logs?contains={text}")["logs"]] for text in ("B", "x", "")
        ]
        assert found == [["b"], [], ["a", "b", "c"]]


def test_a_cluster_shows_what_its_bookies_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookie_loads, "LOADS_SECONDS", 0.1)
    monkeypatch.setattr(view, "VIEW_SECONDS", 0.3)
    with inside(tmp_path, count=3) as cluster, ExitStack() as stack:
        servers = [stack.enter_context(closing(AdminServer(bookie))) for bookie in cluster.bookies]
        urls = {f"bookie-{number}": server.url for number, server in enumerate(servers)}
        urls["nobody"] = "http://127.0.0.1:9"
        manager = cluster.connect()
        writer = manager.create_ledger(password=b"p", ledger_type="orders")
        with asking(manager, ports=BookiePorts(urls=lambda: urls)) as client:
            assert client.get("/api/v1/types")["whose"] in ("client", "bookies")

            def loads() -> dict[str, dict[str, float]]:
                writer.append(b"entry")
                found: dict[str, dict[str, float]] = client.get("/api/v1/loads")
                return found

            wait_until(lambda: [each["append_entries"] > 0 for each in loads().values()] == [True] * 3, pause_s=0.05)

            def all_answer() -> bool:
                """Return whether all bookies answered in the last round; a busy one may be late."""
                types = client.get("/api/v1/types")
                return (types["whose"], types["answering"]) == ("bookies", 3)

            wait_until(all_answer, pause_s=0.05)
            lines = client.get("/api/v1/series")["lines"]
            assert {each["name"] for each in lines if each["by"] == "bookie"} == set(urls) - {"nobody"}
            cluster.bookies[0].close()
            wait_until(lambda: "bookie-0: does not run" in str(client.get("/api/v1/events")))


class Dripping(StreamRequestHandler):
    """A bookie that sends a byte of its headers now and then, for ever."""

    def handle(self) -> None:
        """Send until the client goes."""
        with suppress(OSError):
            self.connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while True:
                self.connection.sendall(b"x")
                time.sleep(0.05)


def test_bookies_that_drip_hold_no_round(store: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookie_loads, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(bookie_loads, "LOADS_SECONDS", 0.01)
    with ThreadingTCPServer(("127.0.0.1", 0), Dripping) as dripping, closing(AdminServer(store)) as server:
        dripping.daemon_threads = True
        threading.Thread(target=dripping.serve_forever, daemon=True).start()
        urls = {f"b{number}": f"http://127.0.0.1:{dripping.server_address[1]}" for number in range(10)}
        rounds: list[int] = []

        def asked() -> dict[str, str]:
            rounds.append(len(rounds))
            return {**urls, "well": server.url}

        loads = BookieLoads(BookiePorts(urls=asked), Events())
        try:
            wait_until(lambda: len(rounds) > 3)
            wait_until(lambda: loads.fresh().keys() == {"well"})
        finally:
            loads.close()
            dripping.shutdown()


def test_the_files_of_the_page_are_served_without_a_token(store: LedgerManager) -> None:
    with asking(store) as client:
        assert client.get("/").startswith(b"<!doctype html>")
        assert client.headers["Content-Security-Policy"].startswith("default-src 'self';")
        tag = client.headers["ETag"]
        assert client.ask("GET", "/", If_None_Match=tag) == (304, b"")
        assert client.ask("HEAD", "/app.js") == (200, b"")
        assert client.headers["Content-Type"] == "text/javascript; charset=utf-8"
        assert client.ask("GET", "/../setup.cfg")[0] == 404
        assert client.ask("GET", "/", Host="evil.example")[0] == 421
