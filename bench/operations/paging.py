"""How soon a page of ledgers of a large cluster is there, and what the console needs for it."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import subprocess
import sys
import time
from contextlib import closing
from typing import Final
from urllib.parse import urlsplit

from bench.cluster.slowness import memory_mib
from bench.healing.planning import filled

LIMIT: Final = 1000
PAGES: Final = 50
TIMEOUT_S: Final = 60.0


def measured(ledgers: int) -> dict[str, float]:
    """Return milliseconds of a page of ``LIMIT`` ledgers from random places, and MiB that the console grew by."""
    with filled(ledgers) as url:
        command = [sys.executable, "-m", "pybk.admin", "console", url, "--http", "127.0.0.1:0", "--json"]
        with subprocess.Popen([*command, "--log-level", "error"], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                place = urlsplit(json.loads(process.stdout.readline())["http"])
                assert place.hostname is not None
                with closing(http.client.HTTPConnection(place.hostname, place.port, timeout=TIMEOUT_S)) as connection:
                    _rows(connection, -1, ledgers)
                    before = memory_mib("RssAnon", process.pid)
                    took = _times(connection, ledgers)
                    grown = memory_mib("RssAnon", process.pid) - before
            finally:
                process.kill()
    return {"p50_ms": statistics.median(took), "max_ms": max(took), "grown_mib": grown}


def _times(connection: http.client.HTTPConnection, ledgers: int) -> list[float]:
    source = random.Random(1)
    took = []
    for _ in range(PAGES):
        after = source.randrange(-1, max(0, ledgers - LIMIT))
        began = time.perf_counter()
        _rows(connection, after, ledgers)
        took.append(1e3 * (time.perf_counter() - began))
    return took


def _rows(connection: http.client.HTTPConnection, after: int, ledgers: int) -> None:
    connection.request("GET", f"/api/v1/ledgers?limit={LIMIT}&after={after}")
    answer = connection.getresponse()
    body = json.loads(answer.read())
    expected = min(LIMIT, ledgers - after - 1)
    if answer.status != http.client.OK or len(body["ledgers"]) != expected:
        raise RuntimeError(f"a page of {expected} ledgers was answered with {answer.status}: {str(body)[:300]}")
