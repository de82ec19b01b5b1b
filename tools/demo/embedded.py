"""The first act: a process with an embedded store is killed while it writes, and no acknowledged entry is lost."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tabulate import tabulate

from demo.child import Child
from demo.progress import meter
from demo.reading import LostEntryError, ReadBack, lines_of, read_back
from demo.source import Source
from demo.writing import BATCH_LINES, KINDS, LedgerKind, Progress, write_lines
from pybk.errors import PybkError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager

TITLE: Final = "One process, killed while it writes"
WRITER: Final = "demo.embedded_writer"
HEADERS: Final = [
    "ledger",
    "type",
    "digest",
    "hints",
    "flags",
    "tier",
    "entries",
    "bytes",
    "append/s",
    "p50 µs",
    "p99 µs",
    "read/s",
]


@dataclass(slots=True)
class LedgerProgress:
    """The sum of the reports about one ledger.

    Attributes:
        kind: The index of its kind in ``KINDS``.
        skip: The number of lines of its kind that are in an earlier ledger.
        ledger_id: The ledger; -1 until it is known.
        confirmed: The last acknowledged entry.
        entries: The number of written entries.
        payload_bytes: Their payload bytes.
        seconds: The time that writing them took.
        latencies: The seconds of each single append.
    """

    kind: int
    skip: int = 0
    ledger_id: int = -1
    confirmed: int = -1
    entries: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    def add(self, progress: Progress) -> None:
        """Add a report."""
        self.ledger_id = progress.ledger_id
        self.confirmed = progress.confirmed
        self.entries += progress.entries
        self.payload_bytes += progress.payload_bytes
        self.seconds += progress.seconds
        self.latencies += progress.latencies


def write_and_kill(store: str, source: Source, secret: bytes) -> list[LedgerProgress]:
    """Have a child process write the whole input, kill it half-way, and return its reports by kind."""
    written = [LedgerProgress(kind) for kind in range(len(KINDS))]
    seen = 0
    killed = False
    task = {"store": store, "files": source.files, "bytes": source.file_bytes, "secret": secret.hex()}
    with Child(WRITER, task) as child, meter("writing", source.file_bytes // 2, "B") as bar:
        for report in child.reports():
            progress = Progress(*report)
            written[progress.kind].add(progress)
            seen += progress.payload_bytes
            bar.update(progress.payload_bytes)
            if not killed and seen * 2 >= source.file_bytes:
                child.signal(signal.SIGKILL)
                killed = True
        status = child.end()
    if status != -signal.SIGKILL:
        raise PybkError(f"the writer process ended by itself with exit code {status}; its error is above")
    acknowledged = sum(one.confirmed + 1 for one in written)
    print(f"Killed writer process {child.pid} with SIGKILL after it had acknowledged {acknowledged:,} entries.")
    return [one for one in written if one.ledger_id >= 0]


def recover(manager: LedgerManager, source: Source, secret: bytes, written: Iterable[LedgerProgress]) -> list[int]:
    """Recover the ledgers of the killed process and check their entries; return their number of lines by kind."""
    kept = [0] * len(KINDS)
    for one in written:
        with manager.open_ledger(one.ledger_id, secret=secret) as reader:
            found = read_back(reader, lines_of(source, one.kind, one.skip))
        if found.entries <= one.confirmed:
            raise LostEntryError(
                f"ledger {one.ledger_id} has {found.entries} entries after recovery, but {one.confirmed + 1} were "
                "acknowledged"
            )
        kept[one.kind] = found.entries
    return kept


def write_rest(manager: LedgerManager, source: Source, secret: bytes, kept: list[int]) -> list[LedgerProgress]:
    """Write the lines that the killed process did not write into new ledgers."""
    written = [LedgerProgress(kind, skip) for kind, skip in enumerate(kept)]
    with meter("writing the rest", source.file_bytes // 2, "B") as bar:

        def report(progress: Progress) -> None:
            written[progress.kind].add(progress)
            bar.update(progress.payload_bytes)

        write_lines(manager, source, secret, kept, report)
    return written


def read_all(
    manager: LedgerManager,
    source: Source,
    secret: bytes,
    written: list[LedgerProgress],
    tier: StorageHint | None = None,
) -> list[ReadBack]:
    """Move all ledgers to a tier, or each to the tier of its hint, and read them from there."""
    results = []
    with meter(f"reading from {tier.name if tier else 'its own tier'}", len(written), " ledgers") as bar:
        for one in written:
            manager.move_ledger(one.ledger_id, tier or KINDS[one.kind].hint)
            with manager.open_ledger(one.ledger_id, secret=secret) as reader:
                results.append(read_back(reader, lines_of(source, one.kind, one.skip)))
            bar.update(1)
    return results


def check_total(results: list[ReadBack], lines: int) -> None:
    """Raise LostEntryError unless the number of entries that were read equals the number of lines."""
    total = sum(read.entries for read in results)
    if total != lines:
        raise LostEntryError(f"{total:,} entries were read, but the input has {lines:,} lines")


def row(manager: LedgerManager, one: LedgerProgress, read: ReadBack) -> list[object]:
    """Return the row of a ledger in the table."""
    kind: LedgerKind = KINDS[one.kind]
    metadata = manager.ledger_metadata(one.ledger_id)
    latencies = sorted(one.latencies)

    def quantile(share: float) -> str:
        return f"{latencies[int(share * (len(latencies) - 1))] * 1e6:,.0f}" if latencies else "-"

    return [
        one.ledger_id,
        metadata.ledger_type,
        kind.digest_type.name,
        ", ".join(sorted(hint.name for hint in metadata.storage_hints)),
        metadata.write_flags.name if metadata.write_flags else "-",
        metadata.tier.name,
        f"{read.entries:,}",
        f"{read.payload_bytes:,}",
        f"{one.entries / one.seconds:,.0f}" if one.entries else "-",
        quantile(0.5),
        quantile(0.99),
        f"{read.entries / read.seconds:,.0f}" if read.entries else "-",
    ]


def run(directory: str, source: Source) -> None:
    """Play the act in an empty directory.

    Raises:
        LostEntryError: An acknowledged entry is missing or different.
    """
    store = os.path.join(directory, "store")
    secret = secrets.token_bytes(32)
    size = source.file_bytes / (1 << 20)
    print(f"Writing each line of {len(source.files):,} files, {size:,.1f} MiB, as an entry; the store is {store}")
    killed = write_and_kill(store, source, secret)
    begin = time.perf_counter()
    with LedgerManager.open(store) as manager:
        opened = time.perf_counter() - begin
        kept = recover(manager, source, secret, killed)
        acknowledged = sum(one.confirmed + 1 for one in killed)
        print(
            f"Reopened in {opened:.3f} s. All {acknowledged:,} acknowledged entries are back byte for byte, and "
            f"{sum(kept) - acknowledged:,} that were on their way."
        )
        written = killed + [one for one in write_rest(manager, source, secret, kept) if one.ledger_id >= 0]
        results = read_all(manager, source, secret, written)
        table = [row(manager, one, read) for one, read in zip(written, results, strict=True)]
        align = ["right", *["left"] * 5, *["right"] * 6]
        print(tabulate(table, headers=HEADERS, disable_numparse=True, colalign=align))
        print(f"p50 and p99 are of single appends; the others were appended in batches of up to {BATCH_LINES}.\n")
        lines = sum(map(len, source.dealt()))
        check_total(results, lines)
        print(f"All {lines:,} lines, moved to each tier in turn and read again byte for byte:")
        for tier in StorageHint:
            results = read_all(manager, source, secret, written, tier)
            check_total(results, lines)
            seconds = sum(read.seconds for read in results)
            size = sum(read.payload_bytes for read in results) / (1 << 20)
            print(f"  {tier.name:4}  {lines / seconds:12,.0f} entries/s  {size / seconds:8,.0f} MiB/s, verified")
