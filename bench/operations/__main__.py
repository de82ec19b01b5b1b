"""``python -m bench.operations [FIGURE ...]``: measure what watching costs, and print a line for each figure."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.operations import paging, watching

FIGURES: Final = ("watched", "page")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print; returns the exit code, which is 1 if a watcher was not answered."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.operations",
        description="Probes, scrapes and a page beside appends, and pages of many ledgers.",
    )
    parser.add_argument("figure", nargs="*", help=f"which: {', '.join(FIGURES)}; all of them when left out")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, to see that it works")
    parser.add_argument("--directory", type=Path, default=Path("build"), help="on the disk to measure")
    parsed = parser.parse_args(arguments)
    unknown = sorted(set(parsed.figure) - set(FIGURES))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    chosen = parsed.figure or FIGURES
    parsed.directory.mkdir(parents=True, exist_ok=True)
    found = watching.Watched()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parsed.directory) as directory:
        if "watched" in chosen:
            found = watching.measure(Path(directory), *(1, 2.0) if parsed.quick else (7, 15.0))
            _print_watched(found)
        if "page" in chosen:
            _print_page(2000 if parsed.quick else 1_000_000)
    return 1 if found.failed else 0


def _print_watched(found: watching.Watched) -> None:
    asked = ", ".join(f"{rate:.0f} {name}" for name, rate in sorted(found.answered.items()))
    print(f"a second: {asked}; not answered: {found.failed or 'none'}")
    _print("one append at a time, p99, while nobody watches", statistics.median(found.alone_ms), "ms", "")
    _print(f"the same while watched, median of {len(found.ratios)}", statistics.median(found.ratios), "x", "<= 1.1")
    print(f"  each: {', '.join(f'{each:.2f}' for each in found.ratios)}")
    _print("  the watcher asks a bystander instead", statistics.median(found.bystander_ratios), "x", "")
    print(f"  each: {', '.join(f'{each:.2f}' for each in found.bystander_ratios)}")
    _print("p50 while watched", statistics.median(found.p50_ratios), "x", "")
    _print("bookies and console, for being watched", found.cpu_percent, "% of a core", "")
    _print("the watcher itself", found.watcher_percent, "% of a core", "")
    _print("a bookie's resident memory grew by", found.grown_mib, "MiB", "<= 20")


def _print_page(ledgers: int) -> None:
    found = paging.measured(ledgers)
    _print(f"{paging.LIMIT} of {ledgers} ledgers, p50 of {paging.PAGES}", found["p50_ms"], "ms", "<= 300")
    _print("  the longest", found["max_ms"], "ms", "")
    _print("  the console's own memory grew by", found["grown_mib"], "MiB", "")


def _print(what: str, value: float, unit: str, target: str) -> None:
    load = os.getloadavg()[0]
    print(f"{what:60} {value:9.3f} {unit:12} {target and f'target {target}':16} load {load:.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
