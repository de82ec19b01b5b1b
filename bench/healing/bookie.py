"""A bookie to measure: ``python -m bench.healing.bookie DIRECTORY METADATA NAME``; it serves until it gets SIGTERM.

It prints a line once it serves, and answers each line of its input with the bytes that it has stored since its start.
"""

from __future__ import annotations

import logging
import sys
import threading

from pybk.admin.bookie_options import BookieSettings
from pybk.admin.standalone_bookie import serve
from pybk.bookie.server import BookieServer
from pybk.metrics import APPENDED_BYTES


def stored(bookie: BookieServer) -> int:
    """Return how many encoded bytes of entries a bookie has stored since it was opened."""
    counters = bookie.replicas.store.metrics.snapshot().counters
    return sum(value for key, value in counters.items() if key.name == APPENDED_BYTES)


def answer(bookie: BookieServer) -> None:
    """Answer each line of the input."""
    for _ in sys.stdin:
        print(stored(bookie), flush=True)


def ready(bookie: BookieServer, _: str) -> None:
    """Print that a bookie serves, and answer from now on."""
    print("serves", flush=True)
    threading.Thread(target=answer, args=(bookie,), daemon=True).start()


def main() -> None:
    """Serve, and answer."""
    directory, metadata, name = sys.argv[1:]
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    settings = BookieSettings(
        directory=directory, listen=("tcp://127.0.0.1:*",), metadata=metadata, bookie_id=name, drain_s=0
    )
    serve(settings, ready=ready)


if __name__ == "__main__":
    main()
