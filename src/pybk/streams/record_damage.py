"""Entries of a log that cannot be read: where they begin and end, and the errors that name them and the remedies."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import Final, NamedTuple

from pybk.errors import CorruptError, DigestMismatchError, PybkError
from pybk.manager.ledger_reader import LedgerReader
from pybk.streams.format import Origin
from pybk.streams.ledger_steps import DAMAGE, LedgerSteps, first_seq_of
from pybk.streams.list_record import ListKind, Segment

_ENTRIES_MAX: Final = 1024
"""Entries after a damaged one among which one that can be read is looked for."""


class Place(NamedTuple):
    """An entry, and its first record."""

    seq: int
    entry: int


def first_damaged(reader: LedgerReader, entry: int, last: int) -> int:
    """Return the first entry that cannot be read, of some of which one cannot.

    Cost: Reads as many batches as the logarithm of their number.
    """
    while entry < last:
        middle = (entry + last) // 2
        try:
            entry = int(reader.read_batch(entry, last=middle).entry_ids[-1]) + 1
        except DAMAGE:
            last = middle
    return entry


def next_sound(reader: LedgerReader, entry: int, end: int, origin: Origin | None) -> Place | None:
    """Return the first entry that can be read, of those from one on and before another.

    Args:
        reader: The ledger of a segment.
        entry: The entry to begin with.
        end: The entry after the last.
        origin: That of the ledger, if the log adopted it.

    Returns:
        None if there is none, or if too many cannot be read.
    """
    for each in range(entry, min(end, entry + _ENTRIES_MAX)):
        with suppress(*DAMAGE):
            return Place(first_seq_of(reader, each, origin), each)
    return None


def unreadable_error(
    steps: LedgerSteps, reader: LedgerReader, segment: Segment, entry: int, seq: int, error: PybkError
) -> PybkError:
    """Return the error for a record that cannot be read.

    Args:
        steps: The log's.
        reader: The ledger of the segment.
        segment: Has the record.
        entry: The entry that is damaged.
        seq: The record.
        error: What reading the entry raised.
    """
    after = next_sound(reader, entry + 1, reader.last_add_confirmed + 1, segment.origin)
    next_seq = _after(segment) if after is None else after.seq
    text = (
        f"{steps.title}: record {seq} cannot be read, because entry {entry} of segment {segment.number} is damaged "
        f"({error}); restore ledger {reader.ledger_id} from a backup{_gives_up(steps, next_seq)}"
    )
    if isinstance(error, CorruptError):
        return CorruptError(text, path=error.path, offset=error.offset)
    return DigestMismatchError(text)


def missing_error(steps: LedgerSteps, segment: Segment, seq: int) -> CorruptError:
    """Return the error for a record whose segment is listed, but whose ledger is gone."""
    return CorruptError(
        f"{steps.title}: record {seq} cannot be read, because ledger {segment.ledger_id} of segment {segment.number} "
        f"is missing; restore the ledger from a backup{_gives_up(steps, _after(segment))}"
    )


def _after(segment: Segment) -> int | None:
    """Return the record after a closed segment."""
    return None if segment.last_seq is None else segment.last_seq + 1


def _gives_up(steps: LedgerSteps, seq: int | None) -> str:
    """Return the remedies that do without all records before one."""
    kind, name = steps.spec.kind, shlex.quote(steps.name)
    if seq is None or kind is ListKind.CURSOR:
        return ""
    return (
        f"; `pybk {kind} truncate PATH {name} {seq}` gives all records before {seq} up, and "
        f"`pybk {kind} cat PATH {name} --first {seq}` prints the others"
    )
