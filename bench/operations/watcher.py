"""Watches a cluster until its input ends: ``python -m bench.operations.watcher CONSOLE BOOKIE...``, all of them URLs.

It asks for ``PROBES_PER_S`` probes of the bookies in turn, each by a connection of its own, as kubelets do; for
``SCRAPES_PER_S`` of their metrics by connections that stay open, as Prometheus does; and for what an open page asks the
console for. At the end it prints how often, what failed, and its own processor time.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle, product
from typing import Final
from urllib.parse import urlsplit

PROBES_PER_S: Final = 50
SCRAPES_PER_S: Final = 10
PAGE_S: Final = 2.0
"""How often an open page asks."""

PROBES: Final = ("/livez", "/readyz", "/healthz")
ASKED_BY_PAGE: Final = ("cluster", "bookies", "loads", "types", "space", "series?since=0", "events?after=0")
TIMEOUT_S: Final = 10.0


class Watcher:
    """Asks at a steady rate, in threads, until ``end``.

    Attributes:
        counts: How often something was asked for and answered with 200.
        failed: What was answered instead.
    """

    def __init__(self, console: str, bookies: list[str]) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._ended = threading.Event()
        probes = cycle(product(bookies, PROBES))
        scrapes = cycle([_connect(url) for url in bookies])
        page = _connect(console)
        self._threads = [
            threading.Thread(target=self._repeat, args=(seconds, call))
            for seconds, call in (
                (1 / PROBES_PER_S, lambda: self._probe(*next(probes))),
                (1 / SCRAPES_PER_S, lambda: self._ask("scrapes", next(scrapes), "/metrics")),
                (PAGE_S, lambda: self._page(page)),
            )
        ]
        for thread in self._threads:
            thread.start()

    def _repeat(self, seconds: float, call: Callable[[], None]) -> None:
        due = time.monotonic()
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            call()
            due += seconds

    def _probe(self, url: str, path: str) -> None:
        connection = _connect(url)
        self._ask("probes", connection, path)
        connection.close()

    def _page(self, connection: http.client.HTTPConnection) -> None:
        for path in ASKED_BY_PAGE:
            self._ask("page", connection, f"/api/v1/{path}")

    def _ask(self, what: str, connection: http.client.HTTPConnection, path: str) -> None:
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self.failed[f"{path}: {type(error).__name__}"] += 1
            return
        if answer.status == http.client.OK:
            self.counts[what] += 1
        else:
            self.failed[f"{path}: {answer.status}"] += 1

    def end(self) -> None:
        """Stop."""
        self._ended.set()
        for thread in self._threads:
            thread.join()


def _connect(url: str) -> http.client.HTTPConnection:
    place = urlsplit(url)
    assert place.hostname is not None
    return http.client.HTTPConnection(place.hostname, place.port, timeout=TIMEOUT_S)


def main() -> None:
    """Watch."""
    watcher = Watcher(sys.argv[1], sys.argv[2:])
    print("watches", flush=True)
    sys.stdin.read()
    watcher.end()
    print(json.dumps({"counts": watcher.counts, "failed": watcher.failed, "cpu_s": time.process_time()}))


if __name__ == "__main__":
    main()
