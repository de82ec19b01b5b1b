"""Makes ``store.tar.xz``: a whole closed store, with a file of every format that there is.

Run it only for a new format version, and keep the old one:
``python -m tests.golden.make_store tests/golden/store.tar.xz``.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

from pybk import DigestType, LedgerManager, StorageHint, StoreConfig, WriteFlag

PASSWORD = b"golden"


def payload(ledger_id: int, entry_id: int) -> bytes:
    """Return what an entry of the golden store holds."""
    return b"ledger %d entry %d " % (ledger_id, entry_id) * (1 + entry_id % 5)


def make(root: Path) -> None:
    """Make the store: ledgers of all digests in all tiers, closed, open and deferred, checkpointed and in the tail."""
    with LedgerManager.open(root, config=StoreConfig(background=False)) as manager:
        for hint in StorageHint:
            for digest_type in DigestType:
                writer = manager.create_ledger(
                    password=PASSWORD,
                    ledger_type="golden",
                    storage_hints={hint},
                    digest_type=digest_type,
                    insecure=True,
                    custom_metadata={"hint": hint.value.encode()},
                )
                writer.append_many(payload(writer.ledger_id, number) for number in range(20))
                writer.append(payload(writer.ledger_id, 20))
                if digest_type is not DigestType.XXH3:
                    writer.close()
        manager.checkpoint()
        tail = manager.create_ledger(password=PASSWORD, ledger_type="tail", write_flags=WriteFlag.DEFERRED_FORCE)
        tail.append_many(payload(tail.ledger_id, number) for number in range(5))
        tail.force()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        make(Path(directory) / "store")
        with tarfile.open(sys.argv[1], "w:xz") as archive:
            archive.add(Path(directory) / "store", "store")
