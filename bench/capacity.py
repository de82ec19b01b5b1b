"""``python -m bench.capacity``: what entries, ledgers and clients take of disk, memory and file descriptors.

Nothing here is a time, so a busy machine shows the same. ``docs/admin/capacity.md`` has the figures.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.cluster.bookies import Cluster
from bench.payloads import PASSWORD, PAYLOAD
from pybk import LedgerManager, StorageHint, StoreConfig

BATCH: Final = 256
SIZES: Final = (100, 1024, 16 << 10)
KIB: Final = 1 << 10
MIB: Final = 1 << 20
CONFIG: Final = StoreConfig(background=False)


# ---- what is measured ------------------------------------------------------------------------------------------------


def disk_bytes(directory: Path, pattern: str = "*") -> int:
    """Return what the files below a directory whose names match take on their disk."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob(pattern) if path.is_file())


def own_bytes(pid: int) -> int:
    """Return the memory of a process that is no page of a file."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith("Anonymous:"))


def descriptors(pid: int) -> int:
    """Return how many file descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def written_bytes(directory: Path) -> int:
    """Return the bytes that the log has written: its files are allocated before they are used, and end in zeros."""
    return sum(len(path.read_bytes().rstrip(b"\0")) for path in directory.rglob("*.log"))


# ---- a store ---------------------------------------------------------------------------------------------------------


def empty_bytes(directory: Path) -> int:
    """Return the size of a store without ledgers."""
    with LedgerManager.open(directory, config=CONFIG) as manager:
        manager.checkpoint()
    return disk_bytes(directory)


def entry_bytes(directory: Path, size: int, count: int, batch: int, hint: StorageHint) -> tuple[float, float]:
    """Return the bytes per entry in the log, and on disk once a checkpoint has moved the entries, without the index."""
    payloads = [random.Random(number).randbytes(size) for number in range(batch)]
    with LedgerManager.open(directory, config=CONFIG) as manager:
        with manager.create_ledger(password=PASSWORD, storage_hints={hint}) as writer:
            for _ in range(count // batch):
                if batch == 1:
                    writer.append(payloads[0])
                else:
                    writer.append_many(payloads)
        logged = written_bytes(directory)
        manager.checkpoint()
    entries = disk_bytes(directory / "ssd" / "entries") if hint is StorageHint.SSD else 0
    return logged / count, (disk_bytes(directory, "*.log") + disk_bytes(directory, "*.cold") + entries) / count


def ledger_bytes(directory: Path, count: int) -> dict[str, float]:
    """Return the bytes of index, catalog and entries for each closed ledger of one entry of 1 KiB."""
    before = empty_bytes(directory / "empty")
    store = directory / "store"
    with LedgerManager.open(store, config=CONFIG) as manager:
        for _ in range(count):
            with manager.create_ledger(password=PASSWORD) as writer:
                writer.append(PAYLOAD)
        manager.checkpoint()
    return {
        "index": disk_bytes(store / "ssd" / "index") / count,
        "catalog": disk_bytes(store, "catalog-*") / count,
        "entry": (disk_bytes(store, "*.log") + disk_bytes(store, "*.cold")) / count,
        "empty store": before,
    }


# ---- a cluster -------------------------------------------------------------------------------------------------------


def cluster_figures(directory: Path, ledgers: int, writers: int, clients: int) -> dict[str, float]:
    """Return what ledgers, open writers and connected clients take of a cluster of three bookies."""
    with Cluster(directory, curve=True) as cluster, ExitStack() as ending:
        pid = cluster.pids[0]
        # Its length, because space for deletes is reserved past it.
        metadata = directory / "metadata" / "data.mdb"
        found: dict[str, float] = {"bookie at rest, own memory": own_bytes(pid), "its descriptors": descriptors(pid)}
        size, memory = metadata.stat().st_size, own_bytes(pid)
        for _ in range(ledgers):
            with cluster.client.create_ledger(password=PASSWORD) as writer:
                writer.append(PAYLOAD)
        found["metadata per ledger"] = (metadata.stat().st_size - size) / ledgers
        found["bookie per closed ledger, own memory"] = (own_bytes(pid) - memory) / ledgers
        memory = own_bytes(pid)
        opened = [cluster.client.create_ledger(password=PASSWORD) for _ in range(writers)]
        for writer in opened:
            writer.append(PAYLOAD)
        found["bookie per open ledger, own memory"] = (own_bytes(pid) - memory) / writers
        memory, files = own_bytes(pid), descriptors(pid)
        for _ in range(clients):
            client = ending.enter_context(LedgerManager.connect(cluster.url, cluster_secret=cluster.secret))
            with client.create_ledger(password=PASSWORD) as writer:
                writer.append(PAYLOAD)
        found["bookie per client, own memory"] = (own_bytes(pid) - memory) / clients
        found["bookie per client, descriptors"] = (descriptors(pid) - files) / clients
        return found


# ---- the command -----------------------------------------------------------------------------------------------------


def figures(directory: Path, *, quick: bool = False) -> dict[str, str]:
    """Measure everything in a directory; return the figures by what they are of."""
    count = 4 * BATCH if quick else 32 * BATCH
    found = {}
    for size in SIZES:
        for batch in (1, BATCH):
            for hint in StorageHint:
                place = directory / f"{size}-{batch}-{hint.value}"
                logged, kept = entry_bytes(place, size, count if batch > 1 else count // 8, batch, hint)
                name = f"entry of {size} bytes, {'one by one' if batch == 1 else f'{batch} at a time'}, {hint.value}"
                found[name] = f"{logged:,.0f} in the log, {kept:,.0f} after a checkpoint"
    for name, size_bytes in ledger_bytes(directory / "ledgers", 200 if quick else 10_000).items():
        found[f"store, {name}"] = f"{size_bytes:,.0f} bytes"
    (directory / "cluster").mkdir()
    counts = (50, 20, 3) if quick else (5_000, 1_000, 20)
    for name, value in cluster_figures(directory / "cluster", *counts).items():
        found[name] = f"{value:,.1f}" if "descriptors" in name else f"{value / KIB:,.1f} KiB"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.capacity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few entries and ledgers, to see that it works")
    parser.add_argument("--directory", type=Path, help="where it is measured")
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=parsed.directory) as directory:
        for name, text in figures(Path(directory), quick=parsed.quick).items():
            print(f"{name}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
