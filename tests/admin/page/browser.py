"""A headless Chromium that shows the page, and reports what goes wrong in it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect, sync_playwright
from starlette.types import ASGIApp

from tests.admin.http.test_asgi import ask
from tests.paths import ROOT
from tests.waiting import WAIT_S

MOUNTED: Final = "http://localhost/ops/"
"""Where ``mount`` has an application; no server is there."""


def programs() -> tuple[Path, Path]:
    """Return Chromium and the folder of axe-core; without them the test is skipped, with what to do about it."""
    done = subprocess.run([ROOT / "tools" / "chromium", "find"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(
            "there is no headless Chromium or no axe-core here; `tools/chromium home` fetches them, or says why not"
        )
    chromium, axe = done.stdout.split()
    return Path(chromium), Path(axe)


@contextmanager
def running() -> Iterator[Browser]:
    """Run a browser."""
    chromium, _ = programs()
    expect.set_options(timeout=WAIT_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=WAIT_S * 1000)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, what its console said, and what it asked for.

    Attributes:
        page: The page.
        said: Errors and warnings.
        asked: The URLs of its requests.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.set_default_timeout(WAIT_S * 1000)
        page.on("console", lambda each: self.said.append(each.text) if each.type in ("error", "warning") else None)
        page.on("pageerror", lambda each: self.said.append(str(each)))
        page.on("request", self._ask)

    def _ask(self, request: Request) -> None:
        self.asked.append(request.url)

    def hosts(self) -> set[str]:
        """Return the hosts of its requests."""
        return {urlsplit(each).netloc for each in self.asked}

    def axe(self) -> list[str]:
        """Return what axe-core finds in the page."""
        _, folder = programs()
        self.page.evaluate((folder / "axe.min.js").read_text(encoding="utf-8"))
        found: Any = self.page.evaluate("axe.run().then((found) => found.violations)")
        return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found]


@contextmanager
def watched(browser: Browser, **options: Any) -> Iterator[Watched]:
    """Open a page, in a context of its own; options as for ``Browser.new_context``."""
    options.setdefault("reduced_motion", "reduce")
    context = browser.new_context(**options)
    try:
        yield Watched(context.new_page())
    finally:
        context.close()


def mount(page: Page, application: ASGIApp) -> None:
    """Have an application answer the requests below ``MOUNTED``, as a server of ASGI with a mount does."""
    pool = ThreadPoolExecutor(1)  # a thread in which no event loop runs

    def answer(route: Route) -> None:
        parts = urlsplit(route.request.url)
        path = parts.path.removeprefix("/ops") + (f"?{parts.query}" if parts.query else "")
        headers = {"host": "localhost"}
        for name in ("authorization", "if-none-match"):
            if name in route.request.headers:
                headers[name] = route.request.headers[name]
        asked = pool.submit(ask, application, route.request.method, path, (b"",), "/ops", **headers)
        status, found, body = asked.result()
        route.fulfill(status=status, headers=found, body=body)

    page.route(f"{MOUNTED}**", answer)
