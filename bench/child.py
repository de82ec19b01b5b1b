"""A process that writes: ``python -m bench.child fill|memory STORE BYTES``.

``fill`` says so when that many payload bytes are durable, and goes on until it is killed; ``memory`` prints the most
memory it had resident, in MiB.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from bench.payloads import BATCH, ENTRY_BYTES, PASSWORD, PAYLOADS
from pybk import LedgerManager


def peak_mib() -> float:
    """Return the most memory this process had resident, in MiB."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM; resident memory is measured on Linux only")
    return int(found[1]) / 1024


def main() -> None:
    """Write."""
    what, store, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
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
