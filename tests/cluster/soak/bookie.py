"""A bookie of the soak: tiers on directories of their own, repairs with short times, and reports of itself.

Every ``REPORT_S`` it says ``report`` and a JSON object on its standard output, and ``look`` with what it holds after
each line on its standard input. It closes at SIGTERM, and ends with its standard input.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from pybk.bookie import keeper
from pybk.bookie.server import BookieServer
from pybk.client import limbo_repair
from pybk.config import StoreConfig
from pybk.flags import StorageHint
from pybk.healing import auditor, auditor_driver, chores, repair_worker, scrub, situation
from pybk.healing.autorecovery import Autorecovery
from pybk.healing.scrub_schedule import ScrubKind
from pybk.manager.ledger_manager import LedgerManager
from pybk.metrics import SCRUB_DAMAGED_RECORDS
from tests.internals import cluster_backend_of
from tests.storage.real_store import QUICK

REPORT_S = 1.0

TIERS = {StorageHint.SSD: "ssd", StorageHint.HDD: "hdd"}
"""The directories of the devices besides ``main``, in the bookie's directory."""

SCALED: list[tuple[object, str, float]] = [
    (keeper, "COLLECT_SECONDS", 5.0),
    (limbo_repair, "PAUSE_MAX_SECONDS", 5.0),
    (auditor_driver, "TICK_S", 1.0),
    (auditor_driver, "ANNOUNCE_S", 5.0),
    (auditor, "ASK_AGAIN_NS", 5 * 10**9),
    (auditor, "SUSPICION_NS", 10 * 10**9),
    (repair_worker, "IDLE_S", 1.0),
    (repair_worker, "PAUSE_MIN_S", 1.0),
    (repair_worker, "PAUSE_MAX_S", 10.0),
    (situation, "SESSION_NS_MIN", 3 * 10**9),
    (situation, "FLAPPING_NS", 60 * 10**9),
    (auditor, "FLAPPING_NS", 60 * 10**9),
    (situation, "FLAPPING_PAUSE_NS", 15 * 10**9),
    (chores, "LOOK_S", 2.0),
    (scrub, "FIRST_S", 1.0),
    (scrub, "REST_S", 1.0),
    (scrub, "RECHECK_S", 1.0),
    (scrub, "QUIET_S", 1.0),
]
"""Times that are minutes or hours for people, and seconds here."""


def say(word: str, what: object) -> None:
    """Say a line at once, whole, whichever thread it is."""
    os.write(1, f"{word} {json.dumps(what)}\n".encode())


def facts(manager: LedgerManager) -> dict[str, Any]:
    """Return what a bookie reports of itself all the time."""
    backend = cluster_backend_of(manager)
    companion = backend.companion
    assert isinstance(companion, Autorecovery)
    assert isinstance(backend.bookie, BookieServer)
    counters = manager.metrics().counters
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "leads": companion.auditor.leads,
        "copied_bytes": companion.worker.copied_bytes,
        "repaired": companion.worker.repaired,
        "dropped": companion.surplus.dropped,
        "damaged": sum(value for key, value in counters.items() if key.name == SCRUB_DAMAGED_RECORDS),
        "checked_ns": companion.scrub.oldest_ns(ScrubKind.DEEP),
        "limbo": len(backend.bookie.in_limbo()),
        "rss_bytes": pages * resource.getpagesize(),
        "own_bytes": _own_bytes(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "health": manager.health().state,
    }


def _own_bytes() -> int:
    """Return the memory that no file holds as well: files that are mapped count in the rest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def holdings(manager: LedgerManager) -> dict[str, Any]:
    """Return what a bookie holds: the entries of each ledger, those in limbo, and the orphans that it found."""
    backend = cluster_backend_of(manager)
    bookie: Any = backend.bookie
    companion = backend.companion
    assert isinstance(companion, Autorecovery)
    replicas = bookie.replicas
    return {
        "entries": {ledger_id: replicas.count_entries(ledger_id) for ledger_id in replicas.ledgers()},
        "limbo": replicas.in_limbo(),
        "orphans": sorted(companion.surplus.orphans),
    }


def open_bookie(parsed: argparse.Namespace) -> LedgerManager:
    """Open the bookie, which serves when this returns."""
    secret = os.environ.get("PYBK_CLUSTER_SECRET")
    root = Path(parsed.directory)
    return LedgerManager.open(
        root / "main",
        tiers={tier: str(root / name) for tier, name in TIERS.items()},
        config=StoreConfig(**QUICK),
        metadata=parsed.metadata,
        listen=parsed.listen,
        bookie_id=parsed.id,
        replace=parsed.replace,
        rack=parsed.rack,
        cluster_secret=None if secret is None else secret.encode(),
    )


def main() -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--metadata", required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--rack", default="")
    parser.add_argument("--replace", action="store_true")
    parsed = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    signal.signal(signal.SIGUSR1, lambda *_: faulthandler.dump_traceback(all_threads=True))
    for owner, name, value in SCALED:
        assert hasattr(owner, name), name
        setattr(owner, name, value)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with open_bookie(parsed) as manager:
        bookie: Any = cluster_backend_of(manager).bookie
        os.write(1, (json.dumps({"bookie": parsed.id, "addresses": list(bookie.addresses)}) + "\n").encode())

        def answer() -> None:
            for _ in sys.stdin:
                say("look", holdings(manager))
            os._exit(3)

        threading.Thread(target=answer, daemon=True).start()
        while not ended.wait(REPORT_S):
            say("report", facts(manager))
            if not bookie.serving:
                raise AssertionError(f"bookie {parsed.id} serves no more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
