"""Work in the background: a ledger that moves between tiers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from bench.payloads import BATCH, ENTRY_BYTES, PASSWORD, PAYLOADS
from pybk import LedgerManager, StorageHint

MOVED_BYTES: Final = 16 << 20


@contextmanager
def moves(manager: LedgerManager) -> Iterator[None]:
    """Move a ledger of 16 MiB between log files and cold segments over and over, and checkpoint."""
    ended = threading.Event()
    with manager.create_ledger(password=PASSWORD) as other:
        for _ in range(MOVED_BYTES // (ENTRY_BYTES * BATCH)):
            other.append_many(PAYLOADS)

    def work() -> None:
        while not ended.is_set():
            for tier in (StorageHint.HDD, StorageHint.NVME):
                manager.move_ledger(other.ledger_id, tier)
                manager.checkpoint()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
