"""Quick audits in virtual time: a short campaign, and mutants that it has to notice."""

from __future__ import annotations

import pytest

from tests.simulator.mutating import Mutant, mutated
from tests.simulator.quick_audit import KILLED_AT, QUICK_MUTANTS, run


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("seed", range(12))
def test_a_bookie_is_marked_for_what_it_lacks_and_never_for_what_it_did_not_say(seed: int) -> None:
    error = run(seed)
    assert error is None, f"seed {seed}: {error}"


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("mutant", QUICK_MUTANTS, ids=[mutant.name for mutant in QUICK_MUTANTS])
def test_a_broken_rule_is_noticed(mutant: Mutant) -> None:
    assert run(KILLED_AT[mutant.name]) is None
    with mutated(mutant):
        assert run(KILLED_AT[mutant.name]) is not None
