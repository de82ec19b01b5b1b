"""A process to be measured: ``python -m bench.child fill|memory STORE BYTES``, ``... idle|idle-... STORE SECONDS``.

``fill`` prints a line when that many payload bytes are durable, and writes until it is killed; ``memory`` prints the
most memory it had resident, in MiB. ``idle`` opens a store with a tier policy and prints the processor time that it
takes while nothing happens, in ms per second; ``idle-looked`` lets the policy look at all ledgers before, and
``idle-plain`` has no policy. ``moves STORE`` prints a line when it begins to move a ledger between tiers, and does so
until it is killed.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

from bench.moving import moves
from bench.payloads import BATCH, ENTRY_BYTES, PASSWORD, PAYLOADS
from pybk import LedgerManager, StorageHint, StoreConfig, TierPolicy
from pybk.manager.local_backend import StoreBackend
from pybk.storage.store import Store


def peak_mib() -> float:
    """Return the most memory this process had resident, in MiB."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM; resident memory is measured on Linux only")
    return int(found[1]) / 1024


def idle_ms(what: str, store: str, seconds: float) -> float:
    """Return the processor time that an open store takes while nothing happens, in ms per second."""
    config = StoreConfig(tier_policy=None if what == "idle-plain" else TierPolicy(target=StorageHint.HDD))
    opened = Store.open(store, config=config)
    with LedgerManager(StoreBackend(opened)):
        if what == "idle-looked":
            while opened.tier_queue is not None and opened.tier_queue.looking:
                opened.tier_queue.look()
        began, used = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return 1e3 * (time.process_time() - used) / (time.monotonic() - began)


def main() -> None:
    """Do what the command line says."""
    what, store = sys.argv[1], sys.argv[2]
    if what.startswith("idle"):
        print(idle_ms(what, store, float(sys.argv[3])), flush=True)
        return
    if what == "moves":
        with LedgerManager.open(store) as manager, moves(manager):
            print("moves", flush=True)
            signal.pause()
    size = int(sys.argv[3])
    with LedgerManager.open(store) as manager, manager.create_ledger(password=PASSWORD) as writer:
        for _ in range(max(size // (BATCH * ENTRY_BYTES), 1)):
            writer.append_many(PAYLOADS)
        if what == "memory":
            print(peak_mib(), flush=True)
            return
        print("filled", flush=True)
        while True:
            writer.append_many(PAYLOADS)


if __name__ == "__main__":
    main()
