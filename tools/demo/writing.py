"""Writing of lines into ledgers of different kinds, with reports of acknowledged entries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from demo.source import Source
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter

SINGLES_PER_CHUNK: Final = 16
BATCH_LINES: Final = 504
FORCE_CHUNKS: Final = 4


@dataclass(frozen=True, slots=True)
class LedgerKind:
    """The type, hint, digest and flags of one of the demonstration's ledgers."""

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
    """A report about one ledger: the acknowledged entries, and the work since the last report.

    Attributes:
        kind: The index in ``KINDS``.
        ledger_id: The ledger.
        confirmed: The last entry up to which all are acknowledged as durable.
        entries: The number of entries written since the last report.
        payload_bytes: Their payload bytes.
        seconds: The time that writing them took.
        latencies: The seconds of each single append among them.
        longest: The seconds of the longest call.
    """

    kind: int
    ledger_id: int
    confirmed: int
    entries: int
    payload_bytes: int
    seconds: float
    latencies: list[float]
    longest: float = 0.0


def create(manager: LedgerManager, kind: LedgerKind, secret: bytes) -> LedgerWriter:
    """Create a ledger of a kind."""
    return manager.create_ledger(
        secret=secret,
        ledger_type=kind.ledger_type,
        storage_hints={kind.hint},
        write_flags=kind.write_flags,
        digest_type=kind.digest_type,
        custom_metadata={"made-by": b"demonstration"},
    )


def write_lines(
    manager: LedgerManager,
    source: Source,
    secret: bytes,
    skip: Sequence[int],
    report: Callable[[Progress], None],
) -> list[int]:
    """Write all lines, dealt in chunks, into one new ledger per kind, and close the ledgers.

    Args:
        manager: The manager of the store.
        source: The lines.
        secret: The secret of the new ledgers.
        skip: The number of lines of each kind that were written before.
        report: Called after each chunk is acknowledged.

    Returns:
        The ids of the ledgers.
    """
    writers = [create(manager, kind, secret) for kind in KINDS]
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
    """Append some lines one by one and the others in batches; return the report.

    A ledger with ``DEFERRED_FORCE`` is forced only if ``force`` is set.
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
