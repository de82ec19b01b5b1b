"""``python -m bench.healing [FIGURE ...]``: measure a cluster that repairs itself, and print a line for each figure."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.cluster.bookies import Cluster
from bench.cluster.idle import share
from bench.healing import auditing, loss, planning

FIGURES: Final = ("loss", "plan", "audit", "idle")
AUDITED: Final = (10_000, 1_000_000)
"""Ledgers that an auditor reads."""

IDLE_BOOKIES: Final = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.healing",
        description="The loss of a bookie, planning for many ledgers, reading them, and rest.",
    )
    parser.add_argument("figure", nargs="*", help=f"which: {', '.join(FIGURES)}; all of them when left out")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, to see that it works")
    parser.add_argument("--directory", type=Path, default=Path("build"), help="on the disk to measure")
    parser.add_argument("--ledgers", type=int, help="that the lost bookie holds; the plan has twenty times as many")
    parsed = parser.parse_args(arguments)
    unknown = sorted(set(parsed.figure) - set(FIGURES))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    ledgers = parsed.ledgers or (500 if parsed.quick else 5000)
    seconds = 3.0 if parsed.quick else 60.0
    chosen = parsed.figure or FIGURES
    parsed.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parsed.directory) as directory:
        if "loss" in chosen:
            _print_loss(loss.measure(Path(directory), ledgers, 420, *(4.0, 8.0) if parsed.quick else (20.0, 180.0)))
        if "plan" in chosen:
            _print_plan(planning.measured(20 * ledgers, seconds))
        if "audit" in chosen:
            for count in AUDITED[: 1 if parsed.quick else None]:
                _print_audit(auditing.measured(count))
        if "idle" in chosen:
            place = Path(directory) / "idle"
            place.mkdir()
            with Cluster(place, curve=False, bookies=IDLE_BOOKIES) as idle:
                _print(
                    f"{IDLE_BOOKIES} idle bookies with an auditor", share(seconds, *idle.pids), "% of a core", "<= 1"
                )
    return 0


def _print_loss(found: loss.Loss) -> None:
    _print("a lost bookie: copied while nobody else works", found.alone_mb_s, "MB/s", ">= 60")
    _print("  floor: bare loops that send, check, write and sync", found.floor_mb_s, "MB/s", "")
    _print("a lost bookie: copied, of what was lost", found.copied / found.lost, "x", "<= 1.05")
    _print("one append at a time, p99, without repairs", found.p99_without_ms, "ms", "")
    _print("the same during repairs", found.p99_with_ms, "ms", f"<= {1.5 * found.p99_without_ms:.3g}")
    _print("  copied meanwhile", found.beside_mb_s, "MB/s", "")
    _print("processor time of the bookies, per GB copied", found.cpu_s, "s", "")
    _print("  floor: that of the bare loops", found.floor_cpu_s, "s", "")


def _print_plan(found: dict[str, float]) -> None:
    ledgers = f"{found['ledgers']:.0f} ledgers on {planning.BOOKIES} bookies"
    _print(f"plan for {ledgers}, {found['tasks']:.0f} to repair", found["plan_s"], "s of CPU", "<= 2")
    _print("  to read them before that", found["reading_s"], "s of CPU", "")
    _print("resident memory that the process grew by", found["growth_mib"], "MiB", "<= 150")
    _print("  of that its own, without the store's mapped file", found["own_mib"], "MiB", "")
    _print("their auditor at rest", found["rest_percent"], "% of a core", "<= 1")


def _print_audit(found: auditing.Audit) -> None:
    ledgers = f"{found.ledgers} ledgers on {auditing.BOOKIES} bookies"
    _print(f"read {ledgers} after an election", found.first_us, "us of CPU each", "")
    _print("  again, when nothing has changed", found.again_us, "us of CPU each", "")
    _print("  memory of the auditor's map", found.own_bytes, "bytes each", "")


def _print(what: str, value: float, unit: str, target: str) -> None:
    load = os.getloadavg()[0]
    print(f"{what:60} {value:9.3f} {unit:14} {target and f'target {target}':16} load {load:.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
