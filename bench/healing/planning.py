"""Planning for many ledgers: ``python -m bench.healing.planning METADATA SECONDS`` is the process that is measured.

The metadata of the ledgers are real, and lie in memory, because only reads are measured. The bookies are records: they
are registered, and do not run. The child reads all of it into a map, as an auditor does after its election, plans for
the loss of one bookie, rests as an auditor, and prints what that took.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from bench.cluster.idle import share
from bench.cluster.slowness import memory_mib
from pybk import Bookie, BookieRegistration, DigestType, Fragment, LedgerMetadata, LedgerState, StorageHint
from pybk.healing.auditor_driver import AuditorDriver
from pybk.healing.chores import ChoreThread
from pybk.healing.cluster_map import ClusterMap
from pybk.healing.plan import plan
from pybk.healing.situation import BookieFacts, Situation, Space
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.url import open_metadata
from pybk.metrics import Metrics

BOOKIES: Final = 50
FREE_BYTES: Final = 1 << 40
HOUR_NS: Final = 3600 * 10**9
_PAGE: Final = 500
_MEMORY: Final = Path("/dev/shm")


@contextmanager
def filled(ledgers: int) -> Iterator[str]:
    """Yield the URL of a metadata store in memory with closed ledgers, and bookies that stay registered."""
    with ExitStack() as stack:
        place = _MEMORY if _MEMORY.is_dir() else None
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=place))
        url = f"lmdb://{directory}/metadata"
        metadata = ClusterMetadata(open_metadata(url))
        stack.callback(metadata.close)
        bookies = [Bookie(f"bookie-{number:02}", secrets.token_bytes(16)) for number in range(BOOKIES)]
        for bookie in bookies:
            metadata.claim_cookie(bookie)
            tiers = {StorageHint.SSD: FREE_BYTES}
            metadata.register(BookieRegistration(bookie=bookie, addresses=("tcp://127.0.0.1:1",), tiers=tiers))
        source = random.Random(1)
        for ledger_id in range(ledgers):
            metadata.create_ledger(closed_ledger(ledger_id, tuple(source.sample(bookies, 3))))
        yield url


def closed_ledger(ledger_id: int, ensemble: tuple[Bookie, ...]) -> LedgerMetadata:
    """Return the metadata of a closed ledger of 1 MiB."""
    return LedgerMetadata(
        ledger_id=ledger_id,
        state=LedgerState.CLOSED,
        digest_type=DigestType.HMAC_SHA256,
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        last_entry_id=999,
        length=1 << 20,
        creation_time_ns=1,
        creation_sequence=ledger_id,
        tier=StorageHint.SSD,
        key_salt=secrets.token_bytes(16),
        verifier=secrets.token_bytes(16),
        fragments=(Fragment(0, ensemble),),
    )


def measured(ledgers: int, seconds: float) -> dict[str, float]:
    """Return what a fresh process took: seconds of processor time, MiB, and percent of a core at rest."""
    with filled(ledgers) as url:
        command = [sys.executable, "-m", "bench.healing.planning", url, str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that plans has failed: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def read(metadata: ClusterMetadata) -> ClusterMap:
    """Return the map of all ledgers."""
    cluster = ClusterMap()
    after = -1
    while ledger_ids := metadata.list_ledgers(after=after, count=_PAGE):
        for stored in metadata.read_sound_ledgers(ledger_ids):
            cluster.apply(stored.metadata.ledger_id, stored.metadata, stored.version)
        after = ledger_ids[-1]
    return cluster


def situation(metadata: ClusterMetadata, now_ns: int) -> Situation:
    """Return what is known of the bookies, one of which was lost an hour ago."""
    first, *others = (cookie.bookie for cookie in metadata.list_cookies())
    tiers = {StorageHint.SSD: Space(FREE_BYTES)}
    facts = [BookieFacts(bookie=first, registered=False), *(BookieFacts(bookie=each, tiers=tiers) for each in others)]
    return Situation(
        bookies={each.bookie.bookie_id: each for each in facts},
        absent_since_ns={first: now_ns - HOUR_NS},
        store_since_ns=now_ns - HOUR_NS,
    )


def rest_percent(metadata: ClusterMetadata, seconds: float) -> float:
    """Return the percentage of a core that an auditor takes once it has read everything, while nothing happens."""
    thread = ChoreThread()
    auditor = AuditorDriver(metadata, "bench", Metrics(), thread.wake)
    thread.start((auditor,))
    try:
        while (report := auditor.report) is None or report.phase != "leading":
            time.sleep(0.1)
        return share(seconds, os.getpid())
    finally:
        thread.stop()
        auditor.close()


def measure(url: str, seconds: float) -> dict[str, Any]:
    """Read everything, plan, and rest."""
    metadata = ClusterMetadata(open_metadata(url))
    before, own_before = memory_mib("VmRSS"), memory_mib("RssAnon")
    began = time.process_time()
    cluster = read(metadata)
    reading_s = time.process_time() - began
    known = situation(metadata, now_ns := time.time_ns())
    began = time.process_time()
    planned = plan(cluster, known, now_ns)
    plan_s = time.process_time() - began
    found = {
        "ledgers": len(cluster),
        "tasks": len(planned.tasks),
        "reading_s": reading_s,
        "plan_s": plan_s,
        "growth_mib": memory_mib("VmRSS") - before,
        "own_mib": memory_mib("RssAnon") - own_before,
    }
    del cluster, planned
    found["rest_percent"] = rest_percent(metadata, seconds)
    metadata.close()
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], float(sys.argv[2]))))
