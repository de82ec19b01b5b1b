"""Ledger lists under faults: a short campaign, and the mutants that it has to notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.sampling import some
from tests.simulator.ledger_list_mutants import KILLED_AT, LEDGER_LIST_MUTANTS, notices
from tests.simulator.ledger_lists import (
    ADOPT_SEEDS,
    CLASH_SEEDS,
    GIVE_UP_SEEDS,
    LOSS_SEEDS,
    MERGE_SEEDS,
    PAGE_SEEDS,
    run,
)
from tests.simulator.mutating import Mutant

SEEDS = some(130, 2800)
PART = SEEDS // 10


def campaign(seeds: Iterable[int]) -> Counter[str]:
    """Run some seeds, without a broken invariant; return what was done in them."""
    done: Counter[str] = Counter()
    for seed in seeds:
        world, error = run(seed)
        assert error is None, f"python -m tests.simulator.ledger_lists --seed {seed} --seeds 1: {error}"
        done.update(world.done)
    return done


@pytest.mark.sampled(one_in=15)
@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_no_invariant_is_broken(first: int) -> None:
    campaign(range(first, first + PART))


@pytest.mark.sampled(one_in=15)
@pytest.mark.parametrize("first", range(LOSS_SEEDS, LOSS_SEEDS + SEEDS, PART))
def test_no_invariant_is_broken_by_writers_that_recover_their_own_segments(first: int) -> None:
    campaign(range(first, first + PART))


@pytest.mark.sampled(one_in=15)
@pytest.mark.parametrize("first", range(PAGE_SEEDS, PAGE_SEEDS + SEEDS, PART))
def test_no_invariant_is_broken_with_pages_and_bounds_beside_the_record(first: int) -> None:
    campaign(range(first, first + PART))


@pytest.mark.sampled(one_in=15)
@pytest.mark.parametrize("first", range(ADOPT_SEEDS, ADOPT_SEEDS + SEEDS, PART))
def test_no_invariant_is_broken_with_commits_of_detached_ledgers(first: int) -> None:
    campaign(range(first, first + PART))


@pytest.mark.sampled(one_in=15)
@pytest.mark.parametrize("first", range(MERGE_SEEDS, MERGE_SEEDS + SEEDS, PART))
def test_no_invariant_is_broken_with_merges(first: int) -> None:
    campaign(range(first, first + PART))


@pytest.mark.sampled(one_in=15)
@pytest.mark.parametrize("first", range(CLASH_SEEDS, CLASH_SEEDS + SEEDS, PART))
def test_no_invariant_is_broken_where_logs_are_cut_and_sealed_while_segments_are_merged(first: int) -> None:
    campaign(range(first, first + PART))


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("first", range(GIVE_UP_SEEDS, GIVE_UP_SEEDS + SEEDS, PART))
def test_no_invariant_is_broken_where_commits_are_given_up_while_they_are_made(first: int) -> None:
    campaign(range(first, first + PART))


@pytest.mark.long
def test_much_happens_in_all_seeds_together() -> None:
    """A campaign in which nothing happens proves nothing."""
    done = campaign(range(SEEDS))
    assert min(done[what] for what in ("take over", "roll", "truncate", "upload")) > some(30, 100)
    assert min(done[what] for what in ("checkpoint", "cut", "close", "delete")) > some(5, 20)
    assert done["failed"] > 100
    assert done["seal"] > 0
    assert done["rename"] > 100
    assert min(done[what] for what in ("subscribe", "claim", "ack", "raise", "seek", "fenced")) > 100
    done = campaign(range(LOSS_SEEDS, LOSS_SEEDS + SEEDS))
    assert min(done["repair"], done["again"]) > some(5, 100)
    done = campaign(range(PAGE_SEEDS, PAGE_SEEDS + SEEDS))
    assert min(done["WritePage"], done["ReadPage"], done["RemovePage"], done["ReadBounds"]) > some(30, 300)
    assert min(done["raise"], done["seek"], done["failed change"]) > some(30, 300)
    done = campaign(range(ADOPT_SEEDS, ADOPT_SEEDS + SEEDS))
    assert done["adopt"] > some(300, 3000)
    assert min(done["take over"], done["truncate"], done["rename"]) > some(20, 300)
    done = campaign(range(MERGE_SEEDS, MERGE_SEEDS + SEEDS))
    assert min(done["listed merge"], done["release"], done["adopt"]) > some(30, 600)
    done = campaign(range(CLASH_SEEDS, CLASH_SEEDS + SEEDS))
    assert min(done["listed merge"], done["cut"], done["seal"]) > some(10, 300)
    done = campaign(range(GIVE_UP_SEEDS, GIVE_UP_SEEDS + SEEDS))
    assert min(done["adopt"], done["give up"], done["given up"]) > some(30, 600)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("mutant", LEDGER_LIST_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_noticed(mutant: Mutant) -> None:
    assert notices(mutant, KILLED_AT[mutant.name]), mutant.rule


def test_the_same_seed_is_the_same_run() -> None:
    assert run(5)[0].trace == run(5)[0].trace
