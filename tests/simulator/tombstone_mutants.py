"""Broken rules of tombstones, and a seed that notices each; ids are those of ``pybk.metadata.deletions``.

``python -m tests.simulator.tombstone_mutants [NAME ...]`` looks for the first seed that notices each.
"""

from __future__ import annotations

import sys

from tests.simulator.mutating import Mutant, Piece, mutated
from tests.simulator.tombstones import run

DELETIONS = "pybk.metadata.deletions:Deletions."
LEDGERS = "pybk.metadata.ledgers:Ledgers."
SEEDS_MAX = 400

TOMBSTONE_MUTANTS = (
    Mutant(
        "DT1a",
        "a tombstone is folded when the last bookie is past its page, not the first",
        (Piece(DELETIONS + "oldest_deletion_position", "min(oldest, position)", "max(oldest, position)"),),
    ),
    Mutant(
        "DT1b",
        "a bookie that has recorded nothing is waited for",
        (Piece(DELETIONS + "oldest_deletion_position", "return None", "continue"),),
    ),
    Mutant(
        "DT1c",
        "a page that bookies are not past keeps its tombstones",
        (Piece(DELETIONS + "trim_deletions", "int(name) > (oldest or 0)", "False"),),
    ),
    Mutant(
        "DT2a",
        "a page counts one look after it was read",
        (
            Piece(
                "pybk.bookie.deleted_ledgers:DeletedLedgers.look",
                "min([self._read_before, *self._found.values()])",
                "min([last, *self._found.values()])",
            ),
        ),
    ),
    Mutant(
        "DT2b",
        "a bookie is not past a page with a ledger that is still there",
        (
            Piece(
                "pybk.bookie.deleted_ledgers:DeletedLedgers.look",
                "min([self._read_before, *self._found.values()])",
                "self._read_before",
            ),
        ),
    ),
    Mutant(
        "DT2c",
        "a bookie that has looked at all its ledgers looks at those that came meanwhile",
        (Piece("pybk.bookie.deleted_ledgers:DeletedLedgers.look", "own - self._before", "set()"),),
    ),
    Mutant(
        "DT2d",
        "a bookie looks at the ledgers of the pages before that were not there then",
        (Piece("pybk.bookie.deleted_ledgers:DeletedLedgers.look", "wanted - own", "set()"),),
    ),
    Mutant(
        "DT3a",
        "the id is recorded before the tombstone is removed",
        (
            Piece(
                DELETIONS + "_fold",
                "self._record_deleted(key, chosen)",
                "pass",
            ),
        ),
    ),
    Mutant(
        "DT3b",
        "an id that was recorded is not given again",
        (Piece(LEDGERS + "create_ledger", "self.is_folded(metadata.ledger_id, latest=False)", "False"),),
    ),
    Mutant(
        "DT3c",
        "a ledger whose id was recorded is not one that was never heard of",
        (Piece(LEDGERS + "is_unheard_of", "not self.is_folded(ledger_id)", "True"),),
    ),
    Mutant(
        "DT3d",
        "what two auditors record is joined",
        (Piece(DELETIONS + "_record_deleted", "with_ids(ranges, ledger_ids)", "with_ids([], ledger_ids)"),),
    ),
)

KILLED_AT = {
    "DT1a": 0,
    "DT1b": 2,
    "DT1c": 0,
    "DT2a": 6,
    "DT2b": 0,
    "DT2c": 72,
    "DT2d": 5,
    "DT3a": 0,
    "DT3b": 1,
    "DT3c": 106,
    "DT3d": 0,
}
"""The first seed that notices each mutant."""


def notices(mutant: Mutant, seed: int) -> str:
    """Run a seed with a mutant, and return how it was noticed, or nothing."""
    with mutated(mutant):
        _, error = run(seed)
    return "" if error is None else f"{type(error).__name__}: {error}"


def main() -> int:
    """Print the first seed that notices each mutant."""
    for mutant in TOMBSTONE_MUTANTS:
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
