"""The page in a browser: over a cluster, over a store that is mounted under a prefix, and when things go wrong.

``PYBK_SCREENSHOTS=1 pytest tests/admin/page`` writes the pictures of the documents.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from playwright.sync_api import Browser, Page, expect

from pybk import LedgerManager, Log, LogEnd
from pybk.admin.cli import main
from pybk.admin.http import AdminServer, BookiePorts, Scope, Token, asgi_app
from pybk.healing import auditor, situation
from pybk.health import REASON_STATES
from tests.admin.page.browser import MOUNTED, Watched, mount, running, watched
from tests.cluster.inside import SECRET, Inside, inside
from tests.cluster.processes import Cluster
from tests.paths import ROOT
from tests.storage.real_store import open_quick
from tests.waiting import wait_until

pytestmark = pytest.mark.sampled(one_in=6, using="browser")

HOSTILE: Final = "<img src=x onerror=alert(1)>"
IMAGES: Final = ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running() as browser:
        yield browser


class Shown(NamedTuple):
    """A cluster under load, and where its page is."""

    cluster: Inside
    url: str
    token: str
    """One with the scope ``operate``."""


def load(manager: LedgerManager, ended: threading.Event) -> None:
    """Append to ledgers of some types until the end, and read."""
    types = ("orders", "clicks", "mail")
    writers = [manager.create_ledger(password=b"p", ledger_type=each) for each in types]
    readers = [manager.open_ledger(each.ledger_id, password=b"p", recover=False) for each in writers]
    size = 1
    while not ended.wait(0.05):
        for number, (writer, reader) in enumerate(zip(writers, readers, strict=True)):
            writer.append(b"x" * 100 * (size % 7 + number))
            if reader.read_last_add_confirmed() >= 0:
                list(reader.read(0, 0))
        size += 1
    for reader in readers:
        reader.close()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Shown]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(situation, "SESSION_NS_MIN", 0)
        patch.setattr(auditor, "SAVE_NS", 10**9)
        cluster = stack.enter_context(inside(tmp_path_factory.mktemp("cluster"), count=4, autorecovery=True))
        servers = [stack.enter_context(closing(AdminServer(each))) for each in cluster.bookies]
        urls = {f"bookie-{number}": server.url for number, server in enumerate(servers)}
        manager = cluster.connect()
        operator, text = Token.new("operator", Scope.OPERATE)
        with Log.open(manager, "orders/eu", password=b"p") as log, log.writer() as writer:
            writer.append(b"one")
            writer.append(HOSTILE.encode(), key=b"<b>key</b>")
            writer.append(b"\xff\x00")
            log.subscribe("billing", start=LogEnd.EARLIEST).close()
        ended = threading.Event()
        thread = threading.Thread(target=load, args=(manager, ended))
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)
        server = stack.enter_context(
            closing(
                AdminServer(
                    manager, name="harbour", ports=BookiePorts(urls=lambda: urls), tokens=[operator], password=b"p"
                )
            )
        )
        yield Shown(cluster, f"{server.url}/", text)


def opened(tab: Watched, url: str) -> Page:
    tab.page.goto(url)
    expect(tab.page.locator("#seen")).to_contain_text("live")
    return tab.page


def test_it_shows_a_cluster(browser: Browser, shown: Shown) -> None:
    with watched(browser, color_scheme="light", viewport={"width": 1280, "height": 900}) as tab:
        page = opened(tab, shown.url)
        expect(page.locator("#verdict")).to_contain_text("OK")
        expect(page).to_have_title(f"● OK {DASH} harbour {DASH} pybk")
        expect(page.get_by_role("heading", level=1)).to_have_text("pybk harbour")
        expect(page.get_by_role("contentinfo")).to_contain_text(f" at {shown.cluster.url}")
        expect(page.locator("#bookies tbody tr")).to_have_count(4)
        expect(page.locator("#whose")).to_contain_text("4 bookies")
        expect(page.locator("#types tbody tr", has_text="orders")).to_contain_text("ms")
        expect(page.locator("#logs")).to_contain_text("billing")
        expect(page.locator("#space tbody tr")).to_have_count(1)  # all tiers are on one device
        expect(page.locator("#charts canvas")).to_have_count(4)

        page.locator("#by").select_option("type")
        page.get_by_text("Appends a second as a table").click()
        table = page.locator("#charts table", has_text="Minute").first
        expect(table).to_contain_text("orders")
        expect(table.locator("tbody tr").first).to_contain_text(":")
        assert tab.axe() == []
        page.locator("#by").select_option("all")
        page.get_by_text("Appends a second as a table").click()
        take_picture(page, "light")

        page.emulate_media(color_scheme="dark")
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        assert tab.axe() == []
        take_picture(page, "dark")
        assert (tab.said, tab.hosts()) == ([], {shown.url.split("/")[2]}), "no error, and nothing from elsewhere"


def test_ledgers_and_logs_are_found(browser: Browser, shown: Shown) -> None:
    with shown.cluster.connect() as manager:
        ids = [manager.create_ledger(password=b"p", ledger_type="searched").ledger_id for _ in range(51)]
        manager.open_ledger(ids[-1], password=b"p").close()  # which closes it for its writer
        with Log.open(manager, "<b>searched</b>", password=b"p") as log, log.writer() as writer:
            writer.append(b"one")
    with watched(browser) as tab:
        page = opened(tab, shown.url)
        rows, found = page.locator("#ledgers tbody tr"), page.locator("#found")
        expect(found).to_contain_text("50 ledgers, and more on the next page.")
        page.get_by_label("Id or type").fill("searched")
        page.get_by_role("button", name="Find").click()
        expect(rows.first).to_contain_text("searched")
        expect(rows).to_have_count(50)
        page.get_by_role("button", name="Next page").click()
        expect(found).to_have_text(f"1 ledger after {ids[-2]}.")
        expect(rows).to_have_count(1)
        expect(page.get_by_role("button", name="Next page")).to_be_hidden()
        page.get_by_label("State").select_option("closed")
        page.get_by_role("button", name="Find").click()
        expect(rows).to_have_count(1)
        expect(rows.first).to_contain_text("closed")
        expect(page.locator("#fragments")).to_be_hidden()

        page.get_by_label("Id or type").fill(str(ids[0]))
        page.get_by_role("button", name="Find").click()
        expect(page.locator("#fragments caption")).to_have_text(f"The fragments of ledger {ids[0]}")
        expect(page.locator("#fragments tbody tr")).to_contain_text("bookie-")
        assert tab.axe() == []
        page.get_by_label("Id or type").fill("123456789")
        page.get_by_role("button", name="Find").click()
        expect(found).to_contain_text("123456789")
        expect(rows).to_have_count(0)

        expect(page.locator("#logs")).to_contain_text("billing")
        page.get_by_label("Show those whose name contains").fill("SEARCHED")
        page.get_by_label("Show those whose name contains").press("Enter")
        expect(page.locator("#logs tbody tr")).to_have_count(1)
        expect(page.locator("#logs tbody th")).to_have_text("<b>searched</b>")
        assert [each for each in tab.said if "404" not in each] == []


def test_a_bookie_and_its_process_are_shown(browser: Browser, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    with watched(browser) as tab:
        page = opened(tab, shown.url)
        expect(page.locator("#one-bookie")).to_be_hidden()
        expect(page.locator("#metadata")).to_contain_text("answers")
        process = page.locator("#processes tbody tr", has_text="bookie-2")
        expect(process).to_contain_text("iB")
        expect(process).to_contain_text("%")
        expect(page.locator("#processes tbody tr")).to_have_count(5)  # four bookies, and the one that shows them
        page.locator("#bookies").get_by_role("link", name="bookie-2").click()
        expect(page.get_by_role("heading", name="Bookie bookie-2")).to_be_visible()
        facts = page.locator("#bookie-facts")
        expect(facts).to_contain_text("runs")
        expect(facts).to_contain_text("Client sessions")
        expect(facts.locator("div", has_text="Memory").locator("dd")).to_contain_text("iB")
        expect(page.locator("#bookie-tiers tbody tr")).to_have_count(3)
        expect(page.locator("#bookie-commands")).to_contain_text("ledger list")
        commands = page.locator("#bookie-commands code").all_inner_texts()
        for each in commands:
            assert main(shlex.split(each)[1:]) in (0, 1), f"{each} runs as it is shown"
        assert tab.axe() == []
        page.locator("#one-bookie").get_by_role("link", name="Close").click()
        expect(page.locator("#one-bookie")).to_be_hidden()
        page.goto(f"{shown.url}#bookie=nobody")
        expect(page.locator("#no-bookie")).to_have_text("It does not belong to the cluster.")
        assert tab.said == []


def test_a_log_is_shown_and_its_records_to_those_who_may_operate(browser: Browser, shown: Shown) -> None:
    with watched(browser) as tab:
        page = opened(tab, shown.url)
        page.locator("#logs").get_by_role("link", name="orders/eu").first.click()
        expect(page.get_by_role("heading", name="Log orders/eu")).to_be_visible()
        expect(page.locator("#log-facts")).to_contain_text("closed")
        expect(page.locator("#log-subscriptions")).to_contain_text("billing")
        expect(page.locator("#log-ledgers tbody tr")).to_have_count(1)
        expect(page.locator("#lags canvas")).to_have_count(1)
        page.get_by_text("Backlog of subscriptions, at most as a table").click()
        expect(page.locator("#lags details tbody td").first).to_have_text("3")

        expect(page.locator("#records")).to_be_hidden()
        page.get_by_role("button", name="Show records").click()
        expect(page.locator("#refused")).to_contain_text("operate")
        page.locator("#token").fill(shown.token)
        page.keyboard.press("Enter")
        expect(page.locator("#ask")).to_be_hidden()
        page.get_by_role("button", name="Show records").click()
        rows = page.locator("#records tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.nth(1)).to_contain_text(HOSTILE)
        expect(rows.nth(1)).to_contain_text("<b>key</b>")
        expect(rows.nth(2)).to_contain_text("hex ff00")
        assert page.locator("main img, main b").count() == 0, "a record is text"
        page.get_by_label("Records from").fill("1")
        page.get_by_role("button", name="Show records").click()
        expect(rows).to_have_count(2)
        assert tab.axe() == []
        page.goto(f"{shown.url}#log=nothing")
        expect(page.locator("#no-log")).to_contain_text("no log has the name")
        expect(page.locator("#records")).to_be_hidden()
        assert [each for each in tab.said if "401" not in each and "404" not in each] == []


def take_picture(page: Page, name: str) -> None:
    """Write a picture for the documents, if that is wanted."""
    if os.environ.get("PYBK_SCREENSHOTS"):
        wait_until(lambda: page.evaluate("document.querySelectorAll('#charts .u-legend').length") == 4)
        page.wait_for_timeout(20_000 if name == "light" else 500)  # so that the lines have a shape
        page.evaluate("window.scrollTo(0, 0)")
        below = page.evaluate("document.querySelector('#charts').closest('section').getBoundingClientRect().bottom")
        page.screenshot(
            path=IMAGES / f"page-{name}.png",
            full_page=True,
            clip={"x": 0, "y": 0, "width": 1280, "height": below + 12},
        )


def test_the_keyboard_reaches_everything_and_a_narrow_screen_shows_it(browser: Browser, shown: Shown) -> None:
    with watched(browser, color_scheme="light", viewport={"width": 360, "height": 740}) as tab:
        page = opened(tab, shown.url)
        wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide == [360, 360], "no sideways scrolling"
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the content")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.locator("#theme")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        expect(page.locator("#theme")).to_have_text("Theme: dark")
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        reached = set()
        for _ in range(20):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.ariaLabel || ''"))
        assert {"filter", "by"} <= reached
        page.locator("#filter").fill("bookie-2")
        expect(page.locator("#bookies tbody tr")).to_have_count(1)
        page.reload()
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        assert tab.said == []


def test_it_says_when_it_is_stale_and_rests_while_nobody_looks(browser: Browser, shown: Shown) -> None:
    with watched(browser) as tab:
        tab.page.clock.install()
        hidden = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}});"
        page = opened(tab, shown.url)
        page.route("**/api/**", lambda route: route.abort())
        page.clock.run_for(12_000)
        expect(page.locator("#seen")).to_contain_text("stale")
        page.unroute("**/api/**")
        page.route("**/api/**", lambda route: route.fulfill(status=502, content_type="text/html", body="<p>no"))
        page.clock.run_for(2_000)
        expect(page.locator("#seen")).to_contain_text("status 502 without JSON, maybe of a proxy on the way")
        page.unroute("**/api/**")
        page.clock.run_for(2_000)
        expect(page.locator("#seen")).to_contain_text("live")

        page.evaluate(f"{hidden.format('true')} document.dispatchEvent(new Event('visibilitychange'))")
        page.clock.run_for(3_000)
        page.wait_for_load_state("networkidle")
        tab.asked.clear()
        page.clock.run_for(60_000)
        assert tab.asked == []
        page.evaluate(f"{hidden.format('false')} document.dispatchEvent(new Event('visibilitychange'))")
        wait_until(lambda: page.evaluate("1") and any("cluster" in each for each in tab.asked))


def show(capsys: pytest.CaptureFixture[str], figures: str) -> None:
    """Write figures to the terminal: they are what people want to know, and a machine that is busy has others."""
    with capsys.disabled():
        sys.stdout.write(f" [{figures}] ")


def test_a_killed_bookie_is_seen_and_named(
    browser: Browser, shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(Cluster(tmp_path, url=shown.cluster.url)) as processes, watched(browser) as tab:
        doomed = processes.bookies["doomed"] = processes.make("doomed")
        doomed.start()
        page = opened(tab, shown.url)
        row = page.locator("#bookies tbody tr", has_text="doomed")
        expect(row).to_contain_text("runs")
        expect(page.locator("#verdict")).to_contain_text("OK")
        doomed.kill()
        killed = time.monotonic()
        expect(page.locator("#verdict")).to_contain_text("WARN")
        show(capsys, f"a kill was seen after {time.monotonic() - killed:.1f} s")
        expect(row).to_contain_text("does not run")
        reason = page.locator("#reasons li", has_text="doomed")
        expect(reason).to_contain_text("pybk bookie list")
        expect(page.locator("#events")).to_contain_text("bookie doomed: does not run")


def test_a_store_that_is_mounted_is_shown_to_those_who_have_a_token(browser: Browser, tmp_path: Path) -> None:
    token, text = Token.new("me", Scope.READ)
    with open_quick(tmp_path / "store") as manager, watched(browser) as tab:
        manager.create_ledger(password=b"p", ledger_type="orders").close()
        manager.create_ledger(password=b"p", ledger_type=HOSTILE).close()
        mount(tab.page, asgi_app(manager, tokens=[token], open_reads=False))
        page = tab.page
        page.goto(MOUNTED)
        expect(page.locator("#ask")).to_be_visible()
        page.locator("#token").fill("wrong")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#refused")).to_contain_text("not valid")
        page.locator("#token").fill(text)
        page.keyboard.press("Enter")
        expect(page.locator("#verdict")).to_contain_text("OK")
        expect(page.locator("#ask")).to_be_hidden()
        expect(page.locator("#types tbody tr", has_text="orders")).to_contain_text("1")
        expect(page.locator("#types")).to_contain_text(HOSTILE)
        expect(page).to_have_title(f"● OK {DASH} {manager.store_id.hex()[:8]} {DASH} pybk")
        assert page.locator("main img").count() == 0, "a name is text"
        assert page.locator("section:visible #bookies").count() == 0, "a store has none"
        assert all(each.startswith(MOUNTED) for each in tab.asked)
        assert all("401" in each for each in tab.said), tab.said


def big(bookies: int, types: int) -> dict[str, Any]:
    """Return what the interface would send of a large cluster."""
    names = ("append_entries", "append_bytes", "append_p50_s", "append_p99_s", "read_entries", "read_bytes")
    rates: dict[str, float | None] = {**dict.fromkeys(names, 1.5), "read_p99_s": None}
    nothing: dict[str, list[int]] = {name: [] for name in ("lost", "waiting", "no_target", "stuck", "reasons", "holds")}
    numbers = dict.fromkeys(("paused_until_ns", "queued_bytes", "done_bytes", "rate", "misplaced"), 0)
    cluster: dict[str, Any] = {"verdict": "ok", "auditor": "b0", "short": {}, "eta_s": None, **nothing, **numbers}
    overview = {
        "seen_ns": 1,
        "name": "a",
        "id": "00",
        "location": "zk://a",
        "is_cluster": True,
        "state": "ok",
        "reasons": [],
        "trouble": "",
        "opens_logs": False,
        "command": "pybk COMMAND zk://a",
    }
    bookie = {"state": "active", "registered": True, "read_only": False, "location": "zone/rack", "version": "1"}
    space = {"free_bytes": {"ssd": 1}, "capacity_bytes": {"ssd": 2}}
    load = {"append_entries": 1.0, "append_p99_s": 0.1, "sync_p99_s": 0.1, "limbo_ledgers": 0}
    return {
        "overview": {**overview, "cluster": cluster},
        "bookies": [{"bookie": {"bookie_id": f"b{each}"}, **bookie, **space} for each in range(bookies)],
        "loads": {f"b{each}": dict(load) for each in range(bookies)},
        "types": {
            "whose": "bookies",
            "answering": bookies,
            "total": rates,
            "types": [
                {"ledger_type": f"t{each}", "open": 1, "closed": 1, "rates": dict(rates)} for each in range(types)
            ],
        },
        "space": [],
    }


DASH: Final = "\N{EN DASH}"

UPDATES: Final = """async (found) => {
    const app = await import('./app.js'), took = [];
    const names = ['append_entries', 'append_p50_s', 'append_p99_s', 'read_entries', 'read_p99_s'];
    for (let round = 0; round < 12; round++) {
        found.overview.seen_ns++;
        for (const each of Object.values(found.loads)) each.append_entries = round + Math.random() * 1000;
        for (const each of found.types.types) each.rates.append_entries = round + Math.random() * 1000;
        const first = round ? 900 + 2 * round : 0;
        const at = Array.from({length: round ? 2 : 900}, (_, second) => (first + second) * 1000);
        const values = () => Object.fromEntries(names.map((each) => [each, at.map(Math.random)]));
        const line = (by, name) => ({by, name, ...values()});
        const lines = [line('all', ''), ...Array.from({length: 16}, (_, each) => line('type', `t${each}`))];
        const began = performance.now();
        app.update(found, {at_ms: at, lines}, {events: [], next: 0});
        document.body.getBoundingClientRect();
        took.push(performance.now() - began);
    }
    return took;
}"""


def test_a_thousand_bookies_and_their_types_are_shown(
    browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_quick(tmp_path / "store") as manager, watched(browser) as tab:
        mount(tab.page, asgi_app(manager))
        page = opened(tab, MOUNTED)
        page.route("**/api/**", lambda route: route.abort())
        first, *later = page.evaluate(UPDATES, big(1000, 200))
        assert page.locator("#bookies tbody tr").count() == 1000
        assert page.locator("#types tbody tr").count() == 201
        figures = (
            f"1000 bookies, 200 types: first {first:.0f} ms, then {sorted(later)[len(later) // 2]:.0f} ms an update"
        )
        show(capsys, figures)


UPDATED_OFTEN: Final = """async (found) => {
    const app = await import('./app.js'), quiet = {at_ms: [], lines: []};
    const event = (number, at) => ({number, time_ns: at, level: 'info', event: 'mine', message: '', bookie: ''});
    const now = Date.now() * 1e6;
    app.update(found, quiet, {events: [event(1, now - 2 * 86400e9), event(2, now), event(3, now)], next: 3});
    for (let again = 0; again < 250; again++) app.update(found, quiet, {events: [], next: 3});
    const rows = [...document.querySelectorAll('#events tbody tr')].map((row) => row.innerText.split('\\t'));
    return rows.filter((cells) => cells[2] === 'mine').map((cells) => cells[0]);
}"""


def test_events_stay_while_none_is_new_and_old_ones_have_their_day(browser: Browser, tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager, watched(browser) as tab:
        mount(tab.page, asgi_app(manager))
        page = opened(tab, MOUNTED)
        page.route("**/api/**", lambda route: route.abort())
        times = page.evaluate(UPDATED_OFTEN, big(1, 1))
    assert len(times) == 3
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:", times[-1]), "it is of two days ago"


def test_numbers_and_names_that_look_like_something_else_are_shown_as_they_are(
    browser: Browser, tmp_path: Path
) -> None:
    found = big(1, 1)
    found["overview"]["command"] = "pybk COMMAND 'lmdb:///srv/NAME COMMAND'"
    found["bookies"][0] |= {"state": "draining", "until_ns": 0, "since_ns": 1}
    found["types"]["types"][0] |= {"ledger_type": "all"}
    found["types"]["types"][0]["rates"]["append_entries"] = 99.7
    with open_quick(tmp_path / "store") as manager, watched(browser) as tab:
        mount(tab.page, asgi_app(manager))
        page = opened(tab, MOUNTED)
        page.route("**/api/**", lambda route: route.abort())
        page.evaluate(
            "async (found) => (await import('./app.js')).update(found, {at_ms: [], lines: []}, {events: [], next: 0})",
            found,
        )
        expect(page.locator("#work tbody tr")).to_contain_text("pybk bookie ok-to-stop 'lmdb:///srv/NAME COMMAND' b0")
        rows = [row.split("\t") for row in page.locator("#types tbody").inner_text().splitlines()]
    assert [(row[0], row[3]) for row in rows] == [("all", "1.5"), ("all", "100")]
    assert rows[0][7] == "1.5"
    assert rows[1][7] != "1.5", "bookies do not know reads by type"


def test_a_long_name_is_cut_and_shown_whole_on_demand(browser: Browser, tmp_path: Path) -> None:
    long = f"{'x' * 120}{'y' * 120}"
    with open_quick(tmp_path / "store") as manager, watched(browser) as tab:
        manager.create_ledger(password=b"p", ledger_type=long).close()
        with Log.open(manager, "orders", password=b"p") as log:
            log.subscribe(long[60:180]).close()
        mount(tab.page, asgi_app(manager))
        page = opened(tab, MOUNTED)
        for table, name in (("types", long), ("logs", long[60:180])):
            cell = page.locator(f"#{table} [title='{name}']")
            expect(cell).to_have_text(f"{'x' * 23}…{'y' * 24}")
            shown = page.locator(f"#{table}")
            assert shown.evaluate("(table) => table.scrollWidth <= table.parentElement.clientWidth"), table


def test_ledgers_that_wait_for_their_repair_are_shown_with_the_reason(browser: Browser, tmp_path: Path) -> None:
    found = big(1, 1)
    why = "bookie b0 is absent, and its copies are made elsewhere unless it returns within 500 s"
    found["overview"]["cluster"] |= {"short": {"2": 548}, "held": 548, "held_because": [why], "queued_bytes": 0}
    with open_quick(tmp_path / "store") as manager, watched(browser) as tab:
        mount(tab.page, asgi_app(manager))
        page = opened(tab, MOUNTED)
        page.route("**/api/**", lambda route: route.abort())
        page.evaluate(
            "async (found) => (await import('./app.js')).update(found, {at_ms: [], lines: []}, {events: [], next: 0})",
            found,
        )
        expect(page.locator("#repair")).to_contain_text(
            f"nothing is copied yet; 548 ledgers lack copies and wait; {why}"
        )
        assert page.locator("#progress").evaluate("(bar) => bar.value") == 0
        expect(page.locator("#work tbody tr", has_text="548 ledgers")).to_contain_text(why)


def test_the_commands_that_it_shows_exist(browser: Browser, shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    with watched(browser) as tab:
        page = opened(tab, shown.url)
        found = page.evaluate("import('./app.js').then((app) => [app.COMMANDS, app.DRAIN_COMMANDS])")
    by_code, others = found
    assert by_code.keys() <= REASON_STATES.keys()
    for command in {*by_code.values(), *others}:
        words = [each for each in command.split() if not each.isupper()]
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0, command
        assert f"usage: pybk {' '.join(words)}" in capsys.readouterr().out
