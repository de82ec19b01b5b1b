"""The lengths in a ledger's entries, as several sources say them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType, entry_digest
from pybk.ledger.entry import EntryBatch
from pybk.ledger.ledger_check import LastEntry, LengthCheck, contradictions
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState

LEDGER = 3


def metadata_of(entries: int, length: int) -> LedgerMetadata:
    return LedgerMetadata(
        ledger_id=LEDGER,
        digest_type=DigestType.CRC32C,
        creation_time_ns=0,
        creation_sequence=0,
        tier=StorageHint.NVME,
        key_salt=b"",
        verifier=b"",
        state=LedgerState.CLOSED,
        last_entry_id=entries - 1,
        length=length,
    )


def batch(first: int, stride: int, *entries: tuple[int, int]) -> EntryBatch:
    """Return entries, each of a payload size and with a length of the ledger up to it."""
    digest = entry_digest(DigestType.CRC32C, LEDGER)
    encoded = [
        digest.prefix(first + number * stride, -1, length, bytes(size)) + bytes(size)
        for number, (size, length) in enumerate(entries)
    ]
    sizes = np.array([len(each) for each in encoded], np.int64)
    ids = first + np.arange(len(encoded), dtype=np.int64) * stride
    return EntryBatch(LEDGER, ids, memoryview(b"".join(encoded)), sizes.cumsum() - sizes, sizes, digest.size)


def test_runs_in_any_order_that_continue_each_other_have_marks_at_both_ends_alone() -> None:
    metadata = metadata_of(6, 60)
    lengths = LengthCheck(metadata)
    lengths.add(batch(4, 1, (10, 50), (10, 60)), 1)
    lengths.add(batch(0, 1, (10, 10), (10, 20)), 1)
    lengths.add(batch(2, 1, (10, 30), (10, 40)), 1)
    assert lengths.marks() == ((-1, 0), (5, 60))
    assert lengths.problems == []
    assert lengths.last is not None
    assert lengths.last.length == 60
    assert list(contradictions(metadata, lengths.marks())) == []
    (said,) = contradictions(replace(metadata, length=61), lengths.marks())
    assert "up to entry 5 is 60 or 61" in said


def test_nothing_read_has_no_marks() -> None:
    lengths = LengthCheck(metadata_of(6, 60))
    assert (lengths.marks(), lengths.last) == ((), None)


def test_entries_missing_between_runs_are_not_a_contradiction() -> None:
    metadata = metadata_of(6, 60)
    lengths = LengthCheck(metadata)
    lengths.add(batch(0, 1, (10, 10)), 1)
    lengths.add(batch(5, 1, (10, 60)), 1)
    assert lengths.marks() == ((-1, 0), (0, 10), (4, 50), (5, 60))
    assert (lengths.problems, list(contradictions(metadata, lengths.marks()))) == ([], [])


@pytest.mark.parametrize(
    ("stride", "runs", "says"),
    [
        (1, [batch(0, 1, (10, 10), (10, 21))], "entry 1 says that the ledger has 21 bytes up to it"),
        (1, [batch(0, 1, (10, 10)), batch(1, 1, (10, 21))], "entry 1 says that the ledger has 11 bytes before it"),
        (3, [batch(0, 3, (10, 10), (10, 15))], "entry 3 says that the ledger has 15 bytes up to it"),
        (3, [batch(0, 3, (10, 30)), batch(3, 3, (10, 35))], "entry 3 says that the ledger has 25 bytes before it"),
        (1, [batch(0, 1, (10, 5))], "entry 0 says that the ledger has 5 bytes up to it"),
    ],
    ids=["in a run", "between runs", "in a stripe", "between runs of a stripe", "below zero"],
)
def test_lengths_that_do_not_add_up_are_problems(stride: int, runs: list[EntryBatch], says: str) -> None:
    lengths = LengthCheck(metadata_of(6, 60))
    for run in runs:
        lengths.add(run, stride)
    lengths.marks()
    assert says in lengths.problems[0]


def test_copies_and_fragments_that_say_different_lengths_contradict_each_other() -> None:
    metadata = metadata_of(4, 40)
    sources = [batch(0, 1, (10, 10), (10, 20)), batch(0, 1, (10, 10), (10, 20)), batch(2, 1, (11, 32), (8, 40))]
    marks: list[tuple[int, int]] = []
    lengths = LengthCheck(metadata)
    for each in sources:
        lengths = LengthCheck(metadata)
        lengths.add(each, 1)
        marks += lengths.marks()
    (said,) = contradictions(metadata, marks)
    assert "up to entry 1 is 20 or 21" in said
    assert isinstance(lengths.last, LastEntry)
    assert list(contradictions(replace(metadata, state=LedgerState.OPEN, last_entry_id=-1, length=0), marks[:4])) == []
    (said,) = contradictions(metadata, [(-1, 1)])
    assert "up to entry -1 is 0 or 1" in said
