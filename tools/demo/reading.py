"""Reading of ledgers and comparison with the input."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, islice
from typing import Final, NamedTuple

from demo.source import Source
from demo.writing import KINDS
from pybk.errors import PybkError
from pybk.manager.ledger_reader import LedgerReader

BATCH_BYTES: Final = 1 << 20


class LostEntryError(PybkError):
    """An entry is missing, or differs from the line that was written."""


class ReadBack(NamedTuple):
    """The result of reading a ledger.

    Attributes:
        entries: The number of entries; all equal the input.
        payload_bytes: Their payload bytes.
        seconds: The time of reading and verifying, without the comparison with the input.
    """

    entries: int
    payload_bytes: int
    seconds: float


def lines_of(source: Source, kind: int, skip: int) -> Iterator[bytes]:
    """Yield the lines of the ledgers of a kind, without the first ``skip``."""
    return islice(chain.from_iterable(source.chunks(len(KINDS), kind)), skip, None)


def read_back(reader: LedgerReader, expected: Iterator[bytes]) -> ReadBack:
    """Read a ledger to its end and compare it byte for byte with the lines that it should hold.

    Raises:
        LostEntryError: An entry is not the line that was written.
    """
    first = payload_bytes = 0
    seconds = 0.0
    last = reader.last_add_confirmed
    while first <= last:
        begin = time.perf_counter()
        batch = reader.read_batch(first, max_bytes=BATCH_BYTES)
        seconds += time.perf_counter() - begin
        for index, entry_id in enumerate(batch.entry_ids.tolist()):
            payload = bytes(batch.payload(index))
            if entry_id != first + index or payload != next(expected, None):
                raise LostEntryError(f"ledger {reader.ledger_id} entry {entry_id} is not the line that was written")
            payload_bytes += len(payload)
        first += len(batch)
    return ReadBack(last + 1, payload_bytes, seconds)
