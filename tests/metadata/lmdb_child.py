"""A process of the LMDB tests, ``lmdb_child.py PATH TASK SESSION_TIMEOUT``; it prints a line for what it does."""

from __future__ import annotations

import os
import random
import sys
import threading
from contextlib import suppress

from pybk.errors import MetadataExistsError, MetadataVersionError
from pybk.metadata.lmdb_store import LmdbMetadataStore
from tests.waiting import WAIT_S


def report(line: str) -> None:
    """Write a line for the test to read."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def lease(store: LmdbMetadataStore) -> None:
    """Hold a leased key, and take it again after losing it, until the input ends."""
    lost = threading.Event()
    store.on_session_end(lost.set)
    store.create("lease", b"child", leased=True)
    report("leased")
    lost.wait()
    report("lost")
    sys.stdin.read()


def count(store: LmdbMetadataStore) -> None:
    """Count a key up until killed, and print each number that took effect."""
    with suppress(MetadataExistsError):
        store.create("counter", b"0")
    while True:
        node = store.get("counter")
        assert node is not None
        try:
            store.put("counter", str(int(node.value) + 1).encode(), node.version)
        except MetadataVersionError:
            continue
        report(str(int(node.value) + 1))


def churn(store: LmdbMetadataStore) -> None:
    """Create, change, rename and remove keys and leases, a thousand times or until killed, and say when done."""
    own = f"churn/{os.getpid()}"
    chance = random.Random(os.getpid())
    versions: dict[str, int] = {}
    for number in range(1000):
        key = f"{own}/{number % 20}/{chance.randrange(5)}"
        if key not in versions:
            versions[key] = store.create(key, b"v", leased=chance.random() < 0.2)
        elif chance.random() < 0.5:
            versions[key] = store.put(key, b"w", versions[key])
        elif chance.random() < 0.5:
            store.delete(key, versions.pop(key))
        else:
            store.rename(key, f"{key}-{number}", b"x", versions.pop(key))
    report("done")
    sys.stdin.read()


if __name__ == "__main__":
    {"lease": lease, "count": count, "churn": churn}[sys.argv[2]](
        LmdbMetadataStore(sys.argv[1], timeout_s=WAIT_S, lease_time_s=float(sys.argv[3]))
    )
