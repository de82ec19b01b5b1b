"""Makes ``stores/LEVEL-*.tar.gz``: whole stores of one version of pybk, each with what must be read from it.

Run it with the version whose formats are to be kept, once, and never again for that version::

    PYTHONPATH=CHECKOUT/src:. python -m tests.golden.make_stores tests/golden/stores base [NAME ...]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pybk import DigestType, LedgerManager, StorageHint, StoreConfig, WriteFlag
from pybk.ledger import keys
from tests.internals import descriptor_of, digest_of, store_of

PASSWORD = b"golden"
CONFIG = StoreConfig(
    background=False,
    log_file_bytes=1 << 20,
    unchecked_tail_bytes=4 << 20,
    cold_block_bytes=4 << 10,
    ssd_block_bytes=4 << 10,
    free_bytes_low=0,
    free_bytes_ok=0,
)
LISTEN = "ipc://bookie.sock"

Expected = dict[str, Any]


def payload(ledger_id: int, entry_id: int) -> bytes:
    """Return what an entry holds."""
    return b"ledger %d entry %d " % (ledger_id, entry_id) * (1 + entry_id % 40)


class Filling:
    """Writes to a manager and remembers what must be read from it."""

    def __init__(self, manager: LedgerManager) -> None:
        self.manager = manager
        self.expected: Expected = {"entries": {}, "closed": [], "deleted": []}
        self._writers: dict[int, Any] = {}

    def create(self, hint: StorageHint, digest_type: DigestType, **options: Any) -> int:
        """Create a ledger."""
        writer = self.manager.create_ledger(
            password=PASSWORD,
            ledger_type="golden",
            storage_hints={hint},
            digest_type=digest_type,
            insecure=True,
            custom_metadata={"hint": hint.value.encode()},
            **options,
        )
        self._writers[writer.ledger_id] = writer
        self.expected["entries"][str(writer.ledger_id)] = 0
        return int(writer.ledger_id)

    def create_all(self) -> list[int]:
        """Create a ledger of each digest in each tier."""
        return [self.create(hint, digest_type) for hint in StorageHint for digest_type in DigestType]

    def append(self, ledger_ids: list[int], count: int) -> None:
        """Append some entries to each ledger, a batch and then one more."""
        for ledger_id in ledger_ids:
            given = self.expected["entries"][str(ledger_id)]
            writer = self._writers[ledger_id]
            writer.append_many(payload(ledger_id, number) for number in range(given, given + count - 1))
            writer.append(payload(ledger_id, given + count - 1))
            self.expected["entries"][str(ledger_id)] = given + count

    def group(self, ledger_ids: list[int], count: int, values: dict[str, bytes | None]) -> None:
        """Append a group of some entries to each ledger and of changes of named records, once there are groups."""
        from pybk.storage.named_records import NamedChange
        from pybk.storage.transaction_group import LedgerEntries

        store = store_of(self.manager)
        entries = []
        for ledger_id in ledger_ids:
            given = self.expected["entries"][str(ledger_id)]
            writer = self._writers[ledger_id]
            payloads = [payload(ledger_id, number) for number in range(given, given + count)]
            entries.append(LedgerEntries(descriptor_of(writer), digest_of(writer), payloads))
            self.expected["entries"][str(ledger_id)] = given + count
        changes = []
        named = self.expected.setdefault("named", {})
        for name, value in values.items():
            row = store.named.get(name)
            changes.append(NamedChange(name, row and row.version, value))
            named[name] = None if value is None else value.decode()
        store.append_group(entries, changes)

    def deferred(self) -> None:
        """Write a ledger whose entries are confirmed by force."""
        ledger_id = self.create(StorageHint.NVME, DigestType.CRC32C, write_flags=WriteFlag.DEFERRED_FORCE)
        self.append([ledger_id], 5)
        self._writers[ledger_id].force()

    def close(self, ledger_ids: list[int]) -> None:
        """Close ledgers."""
        for ledger_id in ledger_ids:
            self._writers[ledger_id].close()
        self.expected["closed"] += ledger_ids

    def delete(self, ledger_id: int) -> None:
        """Delete a ledger."""
        self.manager.delete_ledger(ledger_id)
        del self.expected["entries"][str(ledger_id)]
        self.expected["deleted"].append(ledger_id)

    def fence(self, ledger_id: int) -> None:
        """Fence and close a ledger by recovery."""
        self.manager.open_ledger(ledger_id, password=PASSWORD)
        self.expected["closed"].append(ledger_id)


def tail_only(filling: Filling) -> None:
    """Write what no checkpoint has seen."""
    filling.append(filling.create_all(), 21)
    filling.deferred()


def checkpointed(filling: Filling) -> None:
    """Write, close some, fence one, delete one, checkpoint; everything lies in its tier."""
    ledgers = filling.create_all()
    filling.append(ledgers, 21)
    filling.deferred()
    filling.close(ledgers[::2])
    filling.fence(ledgers[1])
    filling.manager.checkpoint()
    filling.delete(ledgers[5])
    filling.manager.checkpoint()


def mixed(filling: Filling) -> None:
    """Write, checkpoint, move, write more, so that log, index and all tiers have a part of what there is."""
    ledgers = filling.create_all()
    filling.append(ledgers, 21)
    filling.close(ledgers[:2])
    filling.manager.checkpoint()
    filling.append(ledgers[2:], 7)
    filling.manager.move_ledger(ledgers[0], StorageHint.HDD)
    filling.manager.move_ledger(ledgers[4], StorageHint.NVME)
    filling.manager.checkpoint()
    filling.append(ledgers[3:], 3)
    filling.fence(ledgers[3])
    filling.delete(ledgers[6])
    filling.append(filling.create_all(), 2)
    filling.deferred()


def grouped(filling: Filling) -> None:
    """Write groups over ledgers of all tiers and named records, before and after a checkpoint, and others between."""
    ledgers = filling.create_all()
    filling.append(ledgers[::2], 3)
    filling.group(ledgers, 2, {"offset": b"1", "gone": b"1"})
    filling.manager.checkpoint()
    filling.append(ledgers[1::2], 2)
    filling.group(ledgers[::-1], 1, {"offset": b"2", "gone": None})
    filling.group(ledgers[:1], 30, {})
    filling.append(ledgers, 2)
    filling.group([], 0, {"offset": b"3", "other": b"1"})


def empty(filling: Filling) -> None:
    """Write nothing."""


STORES: dict[str, Callable[[Filling], None]] = {
    "empty": empty,
    "tail": tail_only,
    "checkpointed": checkpointed,
    "mixed": mixed,
    "grouped": grouped,
}
"""By name; ``grouped`` needs feature level SEALS."""


def make_store(root: Path, name: str, end: str) -> None:
    """Make an embedded store in this process, which ends by closing it or by stopping where it is."""
    filling = Filling(LedgerManager.open(root / "store", config=CONFIG))
    STORES[name](filling)
    save(root, filling.expected)
    if end == "killed":
        os._exit(0)
    filling.manager.close()


def make_bookie(root: Path) -> None:
    """Make the directory of a bookie, and the metadata of its cluster next to it."""
    os.chdir(root)
    (root / "metadata").mkdir()
    filling = Filling(
        LedgerManager.open(root / "store", config=CONFIG, metadata=f"lmdb://{root / 'metadata'}", listen=[LISTEN])
    )
    ledgers = [
        filling.create(StorageHint.NVME, digest_type, ensemble_size=1, write_quorum=1, ack_quorum=1)
        for digest_type in DigestType
    ]
    filling.append(ledgers, 21)
    filling.close(ledgers[:1])
    filling.fence(ledgers[1])
    filling.manager.checkpoint()
    filling.append(ledgers[2:], 4)
    save(root, filling.expected)
    filling.manager.close()


def save(root: Path, expected: Expected) -> None:
    """Write down what must be read."""
    (root / "expected.json").write_text(json.dumps(expected, sort_keys=True))


def pack(root: Path, target: Path) -> None:
    """Pack a directory; sockets and locks are left out."""
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.name not in ("lock.mdb", "LOCK", "sessions"):
                archive.add(path, str(path.relative_to(root)))


def main() -> None:
    """Make all archives, or in a child process one store."""
    if sys.argv[1] == "--one":
        root, name, end = Path(sys.argv[2]), sys.argv[3], sys.argv[4]
        keys.SCRYPT_COST = 1 << 10  # type: ignore[misc]  # each test derives keys anew
        if name == "bookie":
            make_bookie(root)
        else:
            make_store(root, name, end)
        return
    target, level, only = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    for name, end in [*((name, end) for name in STORES for end in ("closed", "killed")), ("bookie", "closed")]:
        if only and name not in only:
            continue
        root = Path(tempfile.mkdtemp())
        paths = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))
        subprocess.run(
            [sys.executable, "-m", "tests.golden.make_stores", "--one", str(root), name, end],
            check=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        pack(root, target / f"{level}-{name}-{end}.tar.gz")
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
