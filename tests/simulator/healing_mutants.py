"""Broken rules of repairs, and a seed that notices each.

``python -m tests.simulator.healing_mutants [NAME ...]`` looks for the first seed that notices each.
"""

from __future__ import annotations

import sys

from tests.simulator.healing import run
from tests.simulator.mutating import Mutant, Piece, mutated

SITUATION = "pybk.healing.situation:"
PLAN = "pybk.healing.plan:"
AUDITOR = "pybk.healing.auditor:AuditorMachine."
MAP = "pybk.healing.cluster_map:ClusterMap."
SEEDS_MAX = 60

HEALING_MUTANTS = (
    Mutant(
        "H1a",
        "a bookie is lost after its grace",
        (Piece(SITUATION + "_absent", "now_ns < since + grace", "False"),),
    ),
    Mutant(
        "H2",
        "many failures hold repairs",
        (
            Piece(SITUATION + "_few_registered", "len(members) - registered >= 2", "False"),
            Piece(SITUATION + "_all_absent", "len(part) >= 2", "False"),
            Piece(SITUATION + "_many_lost", "abs(since - other) <= grace", "False"),
        ),
    ),
    Mutant(
        "H3a",
        "the fewest copies come first",
        (Piece(PLAN + "rank_of", "task.copies", "task.ledger_id % 5"),),
    ),
    Mutant(
        "H3b",
        "one of two copies that is within its grace is waited for",
        (Piece(PLAN + "_Judge._urgent", "write_quorum > 2 or bits.candidates & mask & ~bits.sound", "True"),),
    ),
    Mutant(
        "H4a",
        "a time-out is no evidence",
        (Piece(AUDITOR + "_replica_checked", "event.result is Check.UNKNOWN", "False"),),
    ),
    Mutant(
        "H4b",
        "a ledger that could not be read was not deleted",
        (Piece(MAP + "apply_page", "self._touched.union(unknown)", "self._touched"),),
    ),
    Mutant(
        "H4c",
        "a ledger whose version has not changed was not deleted",
        (Piece(AUDITOR + "_ledgers_read", "event.unknown | event.same", "event.unknown"),),
    ),
    Mutant(
        "H5",
        "the metadata are changed before the mark is removed",
        (
            Piece(
                "pybk.healing.ledger_work:_work_of",
                "return _MarkWork(work, fills=fills, over=False, unended=unended)",
                "return _MarkWork(work, fills=fills, over=bool(work), unended=unended)",
            ),
        ),
    ),
    Mutant(
        "H6a",
        "what was observed is not withdrawn",
        (
            Piece(
                AUDITOR + "_synchronize",
                "reasons = frozenset(reason for reason in mark.causes_by_reason() if reason in DERIVED)",
                "reasons = frozenset(mark.causes_by_reason())",
            ),
        ),
    ),
    Mutant(
        "H6b",
        "a mark whose cause is over is withdrawn",
        (Piece(AUDITOR + "_synchronize", "effects.append(WithdrawMark(key, reasons))", "pass"),),
    ),
    Mutant(
        "H7",
        "a pause ends by itself",
        (
            Piece(
                SITUATION + "Situation.paused",
                "now_ns < self.settings.repair.paused_until_ns",
                "self.settings.repair.paused_until_ns > 0",
            ),
        ),
    ),
    Mutant(
        "H8",
        "an auditor whose lease has ended changes nothing",
        (Piece(AUDITOR + "step", "now_ns >= self._until_ns", "False"),),
    ),
    Mutant(
        "H11a",
        "a ledger that changed is assessed again",
        (Piece(AUDITOR + "_ledgers_changed", "return set(changed)", "return set()"),),
    ),
    Mutant(
        "H11b",
        "the ledgers of a bookie that changed are assessed again",
        (Piece(AUDITOR + "_refresh", "standing[1:] != self._standings[number][1:]", "False"),),
    ),
    Mutant(
        "Z1",
        "zones come before the local bookie",
        (
            Piece(
                "pybk.replication.placement:_Search._ranks",
                "(crowd.zone(where), each.unhinted, crowd.rack(where), crowd.host(where), each.remote)",
                "(each.remote, each.unhinted, crowd.zone(where), crowd.rack(where), crowd.host(where))",
            ),
        ),
    ),
)

AWAY_MUTANTS = (
    Mutant(
        "AW11a",
        "the mark of a member that was away is not withdrawn when it returns",
        (
            Piece(
                AUDITOR + "_synchronize",
                "reasons = frozenset(reason for reason in mark.causes_by_reason() if reason in DERIVED)",
                "reasons = frozenset(mark.causes_by_reason())",
            ),
        ),
    ),
    Mutant(
        "AW11b",
        "a member that was away is replaced once it is lost",
        (Piece(SITUATION + "_absent", "now_ns < since + grace", "True"),),
    ),
    Mutant(
        "AW11c",
        "what a member has missed is copied to it before its mark is removed",
        (
            Piece(
                "pybk.healing.ledger_work:_work_of",
                "return _MarkWork(work, fills=fills, over=False, unended=unended)",
                "return _MarkWork(work, fills=fills, over=True, unended=unended)",
            ),
        ),
    ),
)
"""Broken rules of ledgers that were created while a member was away; scenarios notice them."""

KILLED_AT = {
    "H1a": 0,
    "H2": 3,
    "H3a": 0,
    "H3b": 0,
    "H4a": 8,
    "H4b": 0,
    "H4c": 0,
    "H5": 0,
    "H6a": 0,
    "H6b": 0,
    "H7": 1,
    "H8": 0,
    "H11a": 0,
    "H11b": 0,
    "Z1": 0,
}
"""The first seed that notices each mutant."""


def notices(mutant: Mutant, seed: int) -> str:
    """Run a seed with a mutant, and return how it was noticed, or nothing."""
    with mutated(mutant):
        _, error = run(seed)
    return "" if error is None else f"{type(error).__name__}: {error}"


def main() -> int:
    """Print the first seed that notices each mutant."""
    for mutant in HEALING_MUTANTS:
        if sys.argv[1:] and mutant.name not in sys.argv[1:]:
            continue
        for seed in range(SEEDS_MAX):
            how = notices(mutant, seed)
            if how:
                sys.stdout.write(f'    "{mutant.name}": {seed},  # {how[:80]}\n')
                break
        else:
            sys.stdout.write(f"    # {mutant.name} survives {SEEDS_MAX} seeds\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
