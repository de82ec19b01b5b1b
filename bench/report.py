"""Holding contests as the command line says, and printing what was reached."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tabulate import tabulate

from bench.contest import Contest, Figure, Scale, hold
from pybk.ledger import CORE

HEADERS: Final = ["work", "by", "median", "lowest", "highest", "unit", "target", "reached"]


def add_options(parser: argparse.ArgumentParser, contests: Mapping[str, Contest]) -> None:
    """Add the options that all benchmarks take."""
    parser.add_argument("contest", nargs="*", help=f"which: {', '.join(contests)}; all of them when left out")
    parser.add_argument("--quick", action="store_true", help="one short round of everything, to see that it works")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--directory", type=Path, default=Path("build"), help="on the disk to measure; ./build by default"
    )
    parser.add_argument("--rounds", type=int, help="turns that each takes; 5 by default")
    parser.add_argument("--seconds", type=float, help="length of a turn; 0.6 by default")


def parse(
    parser: argparse.ArgumentParser, contests: Mapping[str, Contest], arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, list[Contest]]:
    """Parse a command line; returns it, and the contests that it asks for."""
    parsed = parser.parse_args(arguments)
    return parsed, choose(parser, parsed, contests)


def choose(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, contests: Mapping[str, Contest]
) -> list[Contest]:
    """Return the contests that a parsed command line asks for."""
    unknown = sorted(set(parsed.contest) - set(contests))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(contests)}")
    return [contests[name] for name in parsed.contest] or list(contests.values())


def run(chosen: Sequence[Contest], scale: Scale, parsed: argparse.Namespace, sizes: str) -> None:
    """Hold contests and print their figures.

    Args:
        chosen: The contests.
        scale: How much is done.
        parsed: The command line.
        sizes: What was done besides, for the line below the table.
    """
    made_on = machine()
    begin = time.perf_counter()
    parsed.directory.mkdir(parents=True, exist_ok=True)

    def show_progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    table: list[list[str]] = []
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parsed.directory) as directory:
        for contest in chosen:
            reached = hold(contest, scale, Path(directory), show_progress)
            figures += reached
            table += rows(contest, reached)
    show_progress("")
    if parsed.json:
        titles = {contest.name: contest.title for contest in chosen}
        document = {
            "machine": made_on,
            "scale": asdict(scale),
            "titles": titles,
            "figures": [asdict(figure) for figure in figures],
        }
        print(json.dumps(document, indent=1))
        return
    align = ["left", "left", "right", "right", "right", "left", "left", "right"]
    print(tabulate(table, headers=HEADERS, disable_numparse=True, colalign=align))
    print(
        f"\nEntries of 1 KiB; {scale.rounds} rounds in turn, medians; reached: 1 and more is the target or better.\n"
        f"{sizes}Python {made_on['python']} of {made_on['prefix']}, {made_on['digests']} digests, "
        f"{made_on['cores']} cores, load {made_on['load']:.1f}, "
        f"{time.perf_counter() - begin:.0f} s."
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
        "prefix": sys.base_prefix,  # names the build: that of a distribution is optimised, others need not be
        "digests": "pure" if CORE is None else "native",
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
