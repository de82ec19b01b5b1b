"""A client in a process of its own: ``python -m bench.cluster.child write|follow URL [LEDGER]``.

``write`` appends a batch, prints its ledger's id, and kills itself, so that each recovery has the same work.
``follow`` reads a ledger as it grows, and prints how long each entry took to be seen, which carries the time of its
append.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from typing import Final

from bench.cluster.bookies import SECRET_VARIABLE
from bench.payloads import ENTRY_BYTES, PASSWORD, PAYLOAD
from pybk import LedgerManager

UNCONFIRMED: Final = 1000
_SENT: Final = struct.Struct(f"<d{ENTRY_BYTES - 8}x")


def stamped() -> bytes:
    """Return an entry that carries the time."""
    return _SENT.pack(time.monotonic())


def write(manager: LedgerManager) -> None:
    """Append one batch, and kill this process before it sends the bookies a LAC that covers the batch."""
    writer = manager.create_ledger(password=PASSWORD)
    writer.append_many([PAYLOAD] * UNCONFIRMED)
    print(writer.ledger_id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def follow(manager: LedgerManager, ledger_id: int) -> None:
    """Read to the end of a ledger that another process writes."""
    with manager.open_ledger(ledger_id, password=PASSWORD, recover=False) as reader:
        print("ready", flush=True)
        latencies = [time.monotonic() - _SENT.unpack(entry.payload)[0] for entry in reader.follow()]
    print(json.dumps(latencies), flush=True)


def main() -> None:
    """Do what the command line says."""
    what, url, *operands = sys.argv[1:]
    with LedgerManager.connect(url, cluster_secret=os.environb.get(SECRET_VARIABLE.encode())) as manager:
        if what == "write":
            write(manager)
        else:
            follow(manager, int(operands[0]))


if __name__ == "__main__":
    main()
