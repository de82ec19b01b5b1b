"""``python -m bench [CONTEST ...]``: hold contests and print their figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from bench import appending, lifecycle, reading, report, tails, tiering
from bench.contest import Scale

CONTESTS: Final = {
    contest.name: contest
    for contest in (*appending.CONTESTS, *tails.CONTESTS, *reading.CONTESTS, *lifecycle.CONTESTS, *tiering.CONTESTS)
}
GIB: Final = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold the contests and print their figures; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Entries have 1 KiB; appends are durable.")
    report.add_options(parser, CONTESTS)
    parser.add_argument("--ledgers", type=int, help="ledgers created in `ledgers`; 5000 by default")
    parser.add_argument("--reopen-gib", type=float, help="size of the store in `reopen`; 1 by default")
    parser.add_argument("--memory-gib", type=float, help="payload written in `memory`; 1 by default")
    parser.add_argument("--moved-ledgers", type=int, help="ledgers moved in `tiering`; 10000 by default")
    parser.add_argument("--idle-ledgers", type=int, help="ledgers of the store in `idle`; 100000 by default")
    parser.add_argument("--idle-seconds", type=float, help="length of each turn in `idle`; 60 by default")
    parsed, chosen = report.parse(parser, CONTESTS, arguments)
    quick: bool = parsed.quick
    scale = Scale(
        rounds=parsed.rounds or (1 if quick else 5),
        seconds=parsed.seconds or (0.1 if quick else 0.6),
        entries=8 << 10 if quick else 64 << 10,
        ledgers=parsed.ledgers or (200 if quick else 5000),
        reopen_bytes=int((parsed.reopen_gib or (1 / 16 if quick else 1)) * GIB),
        memory_bytes=int((parsed.memory_gib or (1 / 16 if quick else 1)) * GIB),
        moved_ledgers=parsed.moved_ledgers or (200 if quick else 10_000),
        idle_ledgers=parsed.idle_ledgers or (200 if quick else 100_000),
        idle_seconds=parsed.idle_seconds or (1.0 if quick else 60.0),
    )
    opened, written = (f"{size / GIB:.3g} GiB" for size in (scale.reopen_bytes, scale.memory_bytes))
    report.run(chosen, scale, parsed, f"{opened} opened again, {written} written for the memory. ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
