"""``python -m bench.spark [CONTEST ...]``: hold contests in Spark and print their figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from bench import report
from bench.contest import Scale
from bench.payloads import ENTRY_BYTES
from bench.spark import auditing, counting, locality, logs, reading, starting, writing

MODULES: Final = (reading, logs, counting, writing, locality, auditing, starting)
CONTESTS: Final = {contest.name: contest for module in MODULES for contest in module.CONTESTS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold the contests and print their figures; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.spark",
        description="Spark with local[2] on this machine; entries have 1 KiB, and each turn takes all of them.",
    )
    report.add_options(parser, CONTESTS)
    parser.add_argument("--gib", type=float, help="payload read or written in a turn; 1 by default")
    parsed, chosen = report.parse(parser, CONTESTS, arguments)
    quick: bool = parsed.quick
    gib = parsed.gib or (1 / 64 if quick else 1)
    scale = Scale(
        rounds=parsed.rounds or (1 if quick else 5),
        seconds=parsed.seconds or 0.0,
        entries=int(gib * (1 << 30)) // ENTRY_BYTES,
        ledgers=0,
        reopen_bytes=0,
        memory_bytes=0,
    )
    report.run(chosen, scale, parsed, f"{gib:.3g} GiB in a turn. ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
