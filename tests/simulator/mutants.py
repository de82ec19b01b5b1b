"""All mutants, and the seed that kills each: the tests run that seed alone.

``python -m tests.simulator.mutants [NAME ...]`` looks for the first seed that kills each, and prints the table anew.
"""

from __future__ import annotations

import sys

from tests.simulator.bookie_mutants import BOOKIE_MUTANTS
from tests.simulator.client_mutants import CLIENT_MUTANTS, SURVIVORS
from tests.simulator.mutating import kills

SEEDS_MAX = 20_000

MUTANTS = (*CLIENT_MUTANTS, *BOOKIE_MUTANTS)

KILLED_AT: dict[str, int] = {}


def main() -> int:
    names = sys.argv[1:]
    for mutant in (*MUTANTS, *SURVIVORS):
        if names and mutant.name not in names:
            continue
        how = ""
        for seed in range(SEEDS_MAX):
            how = kills(mutant, seed)
            if how:
                print(f'    "{mutant.name}": {seed},  # {how[:80]}', flush=True)
                break
        if not how:
            print(f"    # {mutant.name} survives {SEEDS_MAX} seeds", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
