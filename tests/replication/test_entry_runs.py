"""Cutting entries by residue, and taking runs apart."""

from __future__ import annotations

from array import array

import pytest

from pybk.ledger.digest import DigestType, entry_digest
from pybk.replication.entry_runs import cut, entries_of, length_at, since
from pybk.replication.messages import EntryRun
from pybk.replication.quorum import Quorum

ENTRIES = [b"%d:" % number * (number + 1) for number in range(11)]
SIZES = [len(entry) for entry in ENTRIES]


def by_id(runs: tuple[EntryRun, ...]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for run in runs:
        for entry_id, entry in zip(range(run.first, run.last + 1, run.stride), entries_of(run), strict=True):
            assert entry_id not in found
            found[entry_id] = bytes(entry)
    return found


@pytest.mark.parametrize("count", [1, 2, 4, 5, 11])
@pytest.mark.parametrize("first", [0, 3, 2**40])
@pytest.mark.parametrize("shape", [(3, 3, 2), (5, 3, 2), (4, 2, 2)])
def test_every_entry_is_in_the_run_of_its_residue(shape: tuple[int, int, int], first: int, count: int) -> None:
    quorum = Quorum(*shape)
    pieces = [piece for entry in ENTRIES[:count] for piece in (entry[:1], entry[1:])]
    runs = cut(first, SIZES[:count], pieces, quorum)
    assert by_id(runs) == {first + i: entry for i, entry in enumerate(ENTRIES[:count])}
    for run in runs:
        assert len(run.body) == 1
        assert run.stride == (1 if shape[0] == shape[1] else shape[0])


def test_one_piece_is_not_copied() -> None:
    body = b"".join(ENTRIES)
    (run,) = cut(0, SIZES, [body], Quorum(3, 3, 2))
    assert run.body[0] is body


@pytest.mark.parametrize("stride", [1, 3])
def test_the_rest_of_a_run(stride: int) -> None:
    run = EntryRun(10, stride, array("q", SIZES[:5]), (b"".join(ENTRIES[:2]), b"".join(ENTRIES[2:5])))
    everything = by_id((run,))
    for entry_id in range(run.last + 3):
        rest = since(run, entry_id)
        wanted = {number: entry for number, entry in everything.items() if number >= entry_id}
        assert ({} if rest is None else by_id((rest,))) == wanted
    assert since(EntryRun(0, 1, array("q"), ()), 0) is None


def test_an_entry_carries_the_length_of_its_ledger() -> None:
    digest = entry_digest(DigestType.XXH3, 7, b"")
    assert length_at(digest.prefix(3, 2, 123456789012, b"x") + b"x") == 123456789012
