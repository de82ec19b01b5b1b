"""A process of the LMDB tests, ``lmdb_child.py PATH TASK SESSION_TIMEOUT``; it prints a line for what it does."""

from __future__ import annotations

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


if __name__ == "__main__":
    {"lease": lease, "count": count}[sys.argv[2]](
        LmdbMetadataStore(sys.argv[1], timeout_s=WAIT_S, lease_time_s=float(sys.argv[3]))
    )
