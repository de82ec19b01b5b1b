"""Writing lines into ledgers of different kinds, and reporting what is acknowledged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pybk.admin.demo.source import Source
from pybk.digest import DigestType
from pybk.flags import StorageHint, WriteFlag
from pybk.manager import LedgerManager
from pybk.writer import LedgerWriter

SINGLES_PER_CHUNK: Final = 16
BATCH_LINES: Final = 504
FORCE_CHUNKS: Final = 4


@dataclass(frozen=True, slots=True)
class LedgerKind:
    """A kind of ledger that the demonstration writes."""

    ledger_type: str
    hint: StorageHint
    digest_type: DigestType
    write_flags: WriteFlag = WriteFlag.NONE


KINDS: Final = (
    LedgerKind("orders", StorageHint.NVME, DigestType.HMAC_SHA256),
    LedgerKind("sessions", StorageHint.SSD, DigestType.CRC32C),
    LedgerKind("archive", StorageHint.HDD, DigestType.XXH3),
    LedgerKind("clicks", StorageHint.NVME, DigestType.HMAC_SHA256, WriteFlag.DEFERRED_FORCE),
)


class Progress(NamedTuple):
    """What was acknowledged of one ledger.

    Attributes:
        kind: Which of ``KINDS``.
        ledger_id: The ledger.
        confirmed: Its entries 0 to this one are acknowledged as durable.
        entries: Entries written since the last report.
        payload_bytes: Payload bytes written since.
        seconds: How long that took.
        latencies: Seconds that each of the single appends among them took.
        longest: Seconds that the longest call took.
    """

    kind: int
    ledger_id: int
    confirmed: int
    entries: int
    payload_bytes: int
    seconds: float
    latencies: list[float]
    longest: float = 0.0


def create(manager: LedgerManager, kind: LedgerKind, password: bytes) -> LedgerWriter:
    """Create a ledger of a kind."""
    return manager.create_ledger(
        password=password,
        ledger_type=kind.ledger_type,
        storage_hints={kind.hint},
        write_flags=kind.write_flags,
        digest_type=kind.digest_type,
        custom_metadata={"made-by": b"demonstration"},
    )


def write_lines(
    manager: LedgerManager,
    source: Source,
    password: bytes,
    skip: Sequence[int],
    report: Callable[[Progress], None],
) -> list[int]:
    """Write all lines into one new ledger per kind, dealt in chunks, and close the ledgers.

    Args:
        manager: The store.
        source: The lines.
        password: Of the new ledgers.
        skip: Lines of each kind that are written already.
        report: Called when a chunk is acknowledged.

    Returns:
        The ledgers' ids.
    """
    writers = [create(manager, kind, password) for kind in KINDS]
    left = list(skip)
    for number, chunk in enumerate(source.dealt()):
        kind = number % len(KINDS)
        gone = min(left[kind], len(chunk))
        left[kind] -= gone
        if gone < len(chunk):
            force = number // len(KINDS) % FORCE_CHUNKS == FORCE_CHUNKS - 1
            report(write_chunk(writers[kind], kind, chunk[gone:], force=force))
    for kind, writer in enumerate(writers):
        begin = time.perf_counter()
        writer.close()
        seconds = time.perf_counter() - begin
        report(Progress(kind, writer.ledger_id, writer.last_add_confirmed, 0, 0, seconds, []))
    return [writer.ledger_id for writer in writers]


def write_chunk(writer: LedgerWriter, kind: int, lines: list[bytes], *, force: bool) -> Progress:
    """Append some lines one by one and the others in batches.

    A ledger with ``DEFERRED_FORCE`` is forced only when ``force`` is set.
    """
    latencies = []
    begin = now = time.perf_counter()
    for line in lines[:SINGLES_PER_CHUNK]:
        writer.append(line)
        before, now = now, time.perf_counter()
        latencies.append(now - before)
    longest = max(latencies, default=0.0)
    for low in range(SINGLES_PER_CHUNK, len(lines), BATCH_LINES):
        writer.append_many(lines[low : low + BATCH_LINES])
        before, now = now, time.perf_counter()
        longest = max(longest, now - before)
    if force and KINDS[kind].write_flags:
        writer.force()
    seconds = time.perf_counter() - begin
    confirmed = writer.last_add_confirmed
    payload_bytes = sum(map(len, lines))
    return Progress(kind, writer.ledger_id, confirmed, len(lines), payload_bytes, seconds, latencies, longest)
