"""Tombstones: a short campaign of their simulator, and mutants that it has to notice."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sampling import some
from tests.simulator.mutating import Mutant
from tests.simulator.tombstone_mutants import KILLED_AT, TOMBSTONE_MUTANTS, notices
from tests.simulator.tombstones import run

SEEDS = some(60, 2000)


def test_no_tombstone_is_folded_that_a_bookie_needs() -> None:
    done: Counter[str] = Counter()
    for seed in {*range(SEEDS), *KILLED_AT.values()}:  # a seed that fails by itself notices no mutant
        world, error = run(seed)
        assert error is None, f"python -m tests.simulator.tombstones 1 {seed}: {error}"
        done.update(world.done)
    # A campaign in which nothing happens proves nothing.
    assert done["folded"] > 5 * SEEDS
    assert min(done[what] for what in ("removed", "replaced", "put back", "stored")) > SEEDS // 4


@pytest.mark.parametrize("mutant", TOMBSTONE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_noticed(mutant: Mutant) -> None:
    assert notices(mutant, KILLED_AT[mutant.name]), mutant.rule
