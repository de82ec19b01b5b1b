"""All mutants, and a seed that kills each: the tests run that seed alone.

``python -m tests.simulator.mutants [NAME ...]`` looks for the first seed that kills each, and prints the table anew.
"""

from __future__ import annotations

import sys

from tests.simulator.away_mutants import AWAY_MUTANTS
from tests.simulator.bookie_mutants import BOOKIE_MUTANTS, BOOKIE_SURVIVORS
from tests.simulator.client_mutants import CLIENT_MUTANTS, CLIENT_SURVIVORS
from tests.simulator.member_mutants import MEMBER_MUTANTS, MEMBER_SURVIVORS
from tests.simulator.mutating import kills
from tests.simulator.seal_mutants import SEAL_MUTANTS
from tests.simulator.surplus_mutants import SURPLUS_MUTANTS

SEEDS_MAX = 20_000

MUTANTS = (*CLIENT_MUTANTS, *BOOKIE_MUTANTS, *SEAL_MUTANTS, *MEMBER_MUTANTS, *SURPLUS_MUTANTS, *AWAY_MUTANTS)

SURVIVORS = (*CLIENT_SURVIVORS, *BOOKIE_SURVIVORS, *MEMBER_SURVIVORS)

KILLED_AT = {
    "A1": 300_000_004,
    "A10": 300_000_001,
    "A2": 300_000_000,
    "A3": 300_000_000,
    "A4": 300_000_005,
    "A5": 300_000_007,
    "A6": 300_000_000,
    "A7": 300_000_022,
    "A8": 300_000_085,
    "A9": 300_000_001,
    "B1": 2,
    "B2": 7,
    "C1": 2,
    "C10": 104,
    "C11": 47,
    "C12": 920,
    "C13": 33,
    "C14": 1613,
    "C15": 2,
    "C16": 13,
    "C2": 3,
    "C3": 193,
    "C4": 944,
    "C7": 4,
    "C9": 104,
    "D1": 100_000_000,
    "D10": 100_000_040,
    "D11": 100_000_000,
    "D12": 100_004_476,
    "D13": 100_001_007,
    "D14": 100_000_009,
    "D15": 100_000_023,
    "D16": 100_000_000,
    "D2": 100_000_495,
    "D3": 100_000_026,
    "D4": 100_000_127,
    "D5": 100_000_023,
    "D6": 100_000_042,
    "D7": 100_001_409,
    "D8": 100_000_036,
    "D9": 100_000_099,
    "E1": 64,
    "E2": 13,
    "E3": 59,
    "E4": 156,
    "E5": 64,
    "E6": 1109,
    "E7": 5048,
    "G1": 309,
    "G2": 52,
    "G3": 52,
    "G4": 2280,
    "H1": 877,
    "H2": 180,
    "K11": 0,
    "K12": 108,
    "K8": 21,
    "K9": 0,
    "L1": 190,
    "L10": 14,
    "L11": 19388,
    "L12": 1894,
    "L2": 0,
    "L3": 222,
    "L4": 25,
    "L5": 338,
    "L6": 238,
    "L7": 108,
    "L8": 204,
    "L9": 13854,
    "M1": 727,
    "M10": 8,
    "M11": 52,
    "M12": 5,
    "M14": 4,
    "M15": 5,
    "M16": 365,
    "M17": 48,
    "M19": 153,
    "M2": 460,
    "M20": 22,
    "M21": 5,
    "M3": 127,
    "M4": 6559,
    "M5": 0,
    "M6": 55,
    "M7": 14,
    "M8": 61,
    "M9": 213,
    "N1": 450,
    "N10": 2069,
    "N2": 2218,
    "N3": 1786,
    "N4": 1786,
    "N6": 560,
    "N7": 2069,
    "N8": 2301,
    "N9": 2205,
    "P1": 2,
    "P2": 4,
    "P3": 788,
    "Q1": 371,
    "Q10": 1243,
    "Q11": 83,
    "Q2": 1905,
    "Q3": 331,
    "Q4": 83,
    "Q5": 1209,
    "Q6": 169,
    "Q7": 169,
    "Q8": 467,
    "R1": 728,
    "R2": 9,
    "R4": 43,
    "R5": 14,
    "S1": 189,
    "S2": 134,
    "S3": 60,
    "S4": 123,
    "W1": 61,
    "W10": 400_000_004,
    "W11": 400_000_402,
    "W12": 400_000_104,
    "W2": 677,
    "W3": 3,
    "W4": 38,
    "W5": 200_000_000,
    "W6": 200_000_009,
    "W7": 200_000_015,
    "W8": 200_000_135,
    "W9": 200_000_040,
    "Z1": 4,
    "Z10": 0,
    "Z11": 0,
    "Z12": 0,
    "Z13": 0,
    "Z14": 0,
    "Z15": 0,
    "Z16": 0,
    "Z17": 0,
    "Z18": 0,
    "Z19": 0,
    "Z2": 4,
    "Z3": 40,
    "Z4": 0,
    "Z5": 1,
    "Z6": 4,
    "Z7": 0,
    "Z8": 0,
    "Z9": 1,
}


def main() -> int:
    names = sys.argv[1:]
    for mutant in (*MUTANTS, *SURVIVORS):
        if names and mutant.name not in names:
            continue
        how = ""
        for seed in range(mutant.first, mutant.first + SEEDS_MAX):
            how = kills(mutant, seed)
            if how:
                print(f'    "{mutant.name}": {seed},  # {how[:80]}', flush=True)
                break
        if not how:
            print(f"    # {mutant.name} survives {SEEDS_MAX} seeds", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
