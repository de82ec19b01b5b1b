"""``python -m bench [CONTEST ...]``: hold contests and print their figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tabulate import tabulate

from bench import appending, lifecycle, reading
from bench.contest import Contest, Figure, Scale, hold

CONTESTS: Final = {contest.name: contest for contest in (*appending.CONTESTS, *reading.CONTESTS, *lifecycle.CONTESTS)}
HEADERS: Final = ["work", "by", "median", "lowest", "highest", "unit", "target", "reached"]
GIB: Final = 1 << 30
MIB: Final = 1 << 20


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Entries have 1 KiB; appends are durable.")
    parser.add_argument("contest", nargs="*", help=f"which: {', '.join(CONTESTS)}; all of them when left out")
    parser.add_argument("--quick", action="store_true", help="one short round of everything, to see that it works")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--directory", type=Path, default=Path("build"), help="on the disk to measure; ./build by default"
    )
    parser.add_argument("--rounds", type=int, help="turns that each takes; 5 by default")
    parser.add_argument("--seconds", type=float, help="length of a turn; 0.6 by default")
    parser.add_argument("--ledgers", type=int, help="ledgers created in `ledgers`; 5000 by default")
    parser.add_argument("--reopen-gib", type=float, help="size of the store in `reopen`; 1 by default")
    parser.add_argument("--memory-gib", type=float, help="payload written in `memory`; 1 by default")
    parsed = parser.parse_args(arguments)
    unknown = sorted(set(parsed.contest) - set(CONTESTS))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(CONTESTS)}")
    return parsed


def scale_of(arguments: argparse.Namespace) -> Scale:
    """Return how much is to be done."""
    quick: bool = arguments.quick
    return Scale(
        rounds=arguments.rounds or (1 if quick else 5),
        seconds=arguments.seconds or (0.1 if quick else 0.6),
        entries=8 << 10 if quick else 64 << 10,
        ledgers=arguments.ledgers or (200 if quick else 5000),
        reopen_bytes=int((arguments.reopen_gib or (1 / 16 if quick else 1)) * GIB),
        memory_bytes=int((arguments.memory_gib or (1 / 16 if quick else 1)) * GIB),
    )


def number(value: float) -> str:
    """Return a figure with as many digits as make sense."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rows(contest: Contest, figures: Sequence[Figure]) -> list[list[str]]:
    """Return a contest's rows of the table."""
    found = []
    for figure in figures:
        title = contest.title if figure is figures[0] else ""
        values = map(number, (figure.median, min(figure.rounds), max(figure.rounds)))
        head = [title, figure.contestant, *values, figure.unit]
        for text, ratio in figure.targets or [("", 0.0)]:
            found.append([*head, text, f"{ratio:.2f}{'' if ratio >= 1 else ' (!)'}" if text else ""])
            head = [""] * len(head)
    return found


def machine() -> dict[str, object]:
    """Return what the figures depend on."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold the contests and print their figures; returns the exit code."""
    parsed = parse(arguments)
    scale = scale_of(parsed)
    chosen = [CONTESTS[name] for name in parsed.contest] or list(CONTESTS.values())
    made_on = machine()
    begin = time.perf_counter()
    parsed.directory.mkdir(parents=True, exist_ok=True)

    def tell(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    table: list[list[str]] = []
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parsed.directory) as directory:
        for contest in chosen:
            reached = hold(contest, scale, Path(directory), tell)
            figures += reached
            table += rows(contest, reached)
    tell("")
    if parsed.json:
        document = {"machine": made_on, "scale": asdict(scale), "figures": [asdict(figure) for figure in figures]}
        print(json.dumps(document, indent=1))
        return 0
    align = ["left", "left", "right", "right", "right", "left", "left", "right"]
    print(tabulate(table, headers=HEADERS, disable_numparse=True, colalign=align))
    print(
        f"\nEntries of 1 KiB; {scale.rounds} rounds in turn, medians; reached: 1 and more is the target or better.\n"
        f"{scale.reopen_bytes / GIB:.3g} GiB opened again, {scale.memory_bytes / GIB:.3g} GiB written for the memory. "
        f"Python {made_on['python']}, {made_on['cores']} cores, load {made_on['load']:.1f}, "
        f"{time.perf_counter() - begin:.0f} s."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
