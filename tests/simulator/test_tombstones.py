"""Tombstones: a short campaign of their simulator, and mutants that it has to notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.sampling import some
from tests.simulator.mutating import Mutant
from tests.simulator.tombstone_mutants import KILLED_AT, TOMBSTONE_MUTANTS, notices
from tests.simulator.tombstones import run

SEEDS = sorted({*range(some(60, 2000)), *KILLED_AT.values()})  # a seed that fails by itself notices no mutant
PARTS = 8


def campaign(seeds: Iterable[int]) -> Counter[str]:
    """Run some seeds, without a broken rule; return what was done in them."""
    done: Counter[str] = Counter()
    for seed in seeds:
        world, error = run(seed)
        assert error is None, f"python -m tests.simulator.tombstones 1 {seed}: {error}"
        done.update(world.done)
    return done


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_tombstone_is_folded_that_a_bookie_needs(part: int) -> None:
    campaign(SEEDS[part::PARTS])


@pytest.mark.long
def test_much_happens_in_all_seeds_together() -> None:
    """A campaign in which nothing happens proves nothing."""
    done = campaign(SEEDS)
    assert done["folded"] > 5 * len(SEEDS)
    assert min(done[what] for what in ("removed", "replaced", "put back", "stored")) > len(SEEDS) // 4


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("mutant", TOMBSTONE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_noticed(mutant: Mutant) -> None:
    assert notices(mutant, KILLED_AT[mutant.name]), mutant.rule
