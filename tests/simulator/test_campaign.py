"""A short campaign of the simulator, and what makes its findings worth something."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.replication.messages import Done
from pybk.replication.quorum import Quorum
from tests.internals import has_waited_for_bookies
from tests.paths import ROOT
from tests.sampling import some
from tests.simulator.__main__ import run
from tests.simulator.disk import ModelReplicas
from tests.simulator.harness import Harness
from tests.simulator.mutants import KILLED_AT, MUTANTS, SURVIVORS
from tests.simulator.mutating import Mutant, kills
from tests.simulator.plan import AWAY_SEEDS, DRAIN_SEEDS, PATIENT_SEEDS, SURPLUS_SEEDS, draw
from tests.simulator.real_disk import suits

SEEDS = some(160, 4000)
PART = SEEDS // 16
REAL = some(12, 400)
REAL_SEEDS = (
    *range(REAL),
    *range(SURPLUS_SEEDS, SURPLUS_SEEDS + REAL // 4),
    *range(AWAY_SEEDS, AWAY_SEEDS + REAL // 4),
)
FAILED_ONCE = {
    **dict.fromkeys(
        (1109, 2354, 4266, 4708),
        "a bookie whose sync or stage had failed answered unknown for ever, and no recovery came to an end",
    ),
    30037453: "the judge held to a promise about a ledger that was deleted while its LAC was read",
    40088545: "a reader that could not read the metadata again believed bookies that had been replaced",
    101001233: "the judge took a bookie of an empty fragment, which holds nothing, for one that the ledger counts on",
    10015898: "the judge counted an answer to a fence that came after its timeout, which the library drops",
}
"""Seeds that found a defect, of the library or of the judge, with what it was."""


def campaign(seeds: Iterable[int]) -> list[Harness]:
    """Run some seeds, without a broken invariant; return what they came to."""
    found = []
    for seed in seeds:
        harness, error = run(seed)
        assert error is None, f"python -m tests.simulator --seed {seed}: {error}\n{harness.plan}"
        found.append(harness)
    return found


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_no_invariant_is_broken(first: int) -> None:
    campaign(range(first, first + PART))


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("first", range(SURPLUS_SEEDS, SURPLUS_SEEDS + SEEDS // 4, PART))
def test_no_invariant_is_broken_by_bookies_that_drop_surplus_copies(first: int) -> None:
    campaign(range(first, first + PART))


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("first", range(PATIENT_SEEDS, PATIENT_SEEDS + SEEDS // 2, PART))
def test_no_invariant_is_broken_by_writers_that_wait_for_bookies(first: int) -> None:
    campaign(range(first, first + PART))


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("first", range(AWAY_SEEDS, AWAY_SEEDS + SEEDS // 2, PART))
def test_no_invariant_is_broken_by_ledgers_that_are_created_while_bookies_are_away(first: int) -> None:
    campaign(range(first, first + PART))


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("first", range(DRAIN_SEEDS, DRAIN_SEEDS + SEEDS // 2, PART))
def test_no_invariant_is_broken_by_writers_that_leave_bookies_that_are_drained(first: int) -> None:
    campaign(range(first, first + PART))


@pytest.mark.long
def test_writers_wait_for_bookies_in_seeds_that_are_meant_for_it() -> None:
    found = campaign(range(PATIENT_SEEDS, PATIENT_SEEDS + SEEDS // 2))
    assert sum(has_waited_for_bookies(harness.ledger.writer.writer) for harness in found) > SEEDS // 20


@pytest.mark.long
def test_ledgers_are_created_while_bookies_are_away_in_seeds_that_are_meant_for_it() -> None:
    ledgers = [harness.ledger for harness in campaign(range(AWAY_SEEDS, AWAY_SEEDS + SEEDS // 2))]
    short = [ledger for ledger in ledgers if ledger.away]
    assert {ledger.plan.quorum for ledger in short} >= {Quorum(3, 3, 2), Quorum(6, 3, 2)}
    assert sum(ledger.checker.confirmed >= 0 for ledger in short) > len(ledgers) // 3
    assert sum(bool(ledger.metadata.closed_by.startswith("recoverer")) for ledger in short) > len(ledgers) // 8


@pytest.mark.long
def test_writers_leave_bookies_that_are_drained_in_seeds_that_are_meant_for_it() -> None:
    found = campaign(range(DRAIN_SEEDS, DRAIN_SEEDS + SEEDS // 2))
    assert sum(harness.ledger.left_idle for harness in found) > SEEDS // 40


@pytest.mark.sampled(one_in=3)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("seed", [seed for seed in REAL_SEEDS if suits(draw(seed))])
def test_no_invariant_is_broken_on_the_storage_itself(seed: int) -> None:
    harness, error = run(seed, real=True)
    assert error is None, f"python -m tests.simulator --real --seed {seed}: {error}\n{harness.plan}"


def test_the_seeds_try_what_they_should() -> None:
    """A campaign in which nothing happens proves nothing."""
    plans = [draw(seed) for seed in range(800)]
    assert {plan.quorum.ensemble_size > plan.quorum.write_quorum for plan in plans} == {False, True}
    assert {plan.loses_data for plan in plans} == {"", "forgets", "wiped", "corrupt"}
    for fault in (
        "deferred",
        "clogs",
        "cuts",
        "pauses",
        "kills",
        "crashes",
        "swaps",
        "fills",
        "deletes",
        "forces_early",
    ):
        assert {getattr(plan, fault) for plan in plans} == {False, True}, fault
    assert sum(plan.errors > 0 for plan in plans) > 50
    assert {plan.ledgers for plan in plans} == {1, 2, 3}
    assert {plan.lies for plan in plans} == {"", "forges", "tail", "lac", "denies", "hides"}
    assert sum(plan.alters for plan in plans) > 10
    assert sum(plan.members == plan.recoverers > 0 for plan in plans) > 20
    assert sum(0 < plan.members < plan.recoverers for plan in plans) > 20
    assert sum(plan.deferred and plan.crashes and plan.recoverers > 0 for plan in plans) > 50


@pytest.mark.long
def test_the_seeds_come_to_what_they_should() -> None:
    ledgers = [ledger for seed in range(100) for ledger in run(seed)[0].ledgers.values()]
    members = [each.name for ledger in ledgers for each in ledger.recoverers if each.member]
    assert sum(ledger.metadata.closed_by in members for ledger in ledgers) > 3
    assert sum(ledger.metadata.history[-1][0] is not None for ledger in ledgers) > 50
    assert sum(len(ledger.checker.entries) for ledger in ledgers) > 500
    assert sum(ledger.checker.confirmed + 1 for ledger in ledgers) > 300
    changed = [ledger for ledger in ledgers if ledger.metadata.history[-1][0] and ledger.metadata.version > 2]
    assert len(changed) > 30
    assert sum(isinstance(ledger.writer.end, Done) for ledger in ledgers) > 10
    assert sum(ledger.checker.read_lac >= 0 for ledger in ledgers) > 10
    assert sum(len(ledger.checker.closers) > 1 and ledger.metadata.is_closed() for ledger in ledgers) > 10
    assert sum(isinstance(each.closed_as, LedgerMetadata) for ledger in ledgers for each in ledger.recoverers) > 10


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", sorted(FAILED_ONCE), ids=str)
def test_seeds_that_failed_once_pass(seed: int) -> None:
    harness, error = run(seed)
    assert error is None, f"{FAILED_ONCE[seed]}: {error}\n{harness.plan}"


@pytest.mark.sampled(one_in=2, group="the same seed")
def test_the_same_seed_is_the_same_run_whatever_the_hash_seed() -> None:
    sums = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulator", "--seeds", "8", "--sums"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[:-1]
        for hash_seed in ("1", "2")
    ]
    assert len(sums[0]) == 8
    assert sums[0] == sums[1]
    assert len({line.split()[2] for line in sums[0]}) == 8


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_noticed(mutant: Mutant) -> None:
    """Each by the first seed that showed it; ``python -m tests.simulator.mutants`` finds them anew."""
    assert kills(mutant, KILLED_AT[mutant.name]), mutant.rule
    error = run(KILLED_AT[mutant.name])[1]
    assert error is None, f"the seed fails without the mutant, too: {error}"


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("mutant", SURVIVORS, ids=lambda mutant: mutant.name)
def test_mutants_listed_as_survivors_survive(mutant: Mutant) -> None:
    """If one of these is noticed by now, its reason in the table is wrong: it belongs to the others."""
    assert not any(kills(mutant, seed) for seed in range(50))


RETURNS_STAGED = (19, 67, 95, 108, 119, 131, 135, 137, 143, 175, 183, 207, 226, 264, 300, 325, 337, 343, 346, 447)
"""Seeds in which a recovery reads entries that are staged and not durable; of the first 2000, each twentieth is one."""


def test_a_recovery_that_is_returned_entries_which_are_not_durable_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Survivor B3 where it matters, and with proof that such entries were returned."""
    read = ModelReplicas.read
    returned = 0

    def read_staged(self: ModelReplicas, ledger_id: int, first: int, last: int, *args: int, **options: bool) -> Any:
        nonlocal returned
        durable = self.durable
        if options.get("recovery"):
            self.durable = {**self.staged, **durable}
        try:
            status, run = read(self, ledger_id, first, last, *args, **options)
        finally:
            self.durable = durable
        if run is not None:
            returned += any(entry_id not in durable for entry_id in range(first, run.last + 1, run.stride))
        return status, run

    monkeypatch.setattr(ModelReplicas, "read", read_staged)
    campaign(RETURNS_STAGED)
    assert returned >= len(RETURNS_STAGED) // 2


def test_enough_rules_are_broken() -> None:
    assert len(MUTANTS) >= 50
    assert {mutant.name for mutant in MUTANTS} == set(KILLED_AT)
    tried = sorted(KILLED_AT[mutant.name] - mutant.first for mutant in MUTANTS)
    assert 0 <= tried[0] <= tried[-1] < 20_000
    assert tried[len(tried) // 2] < 1_000
