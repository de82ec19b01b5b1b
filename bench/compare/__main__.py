"""``python -m bench.compare BASE [ROW ...]``: is this working tree slower than commit BASE?

Two processes do the same work with the two commits' ``pybk``, by turns on one disk, and each round gives one ratio.
Where a process gets its memory makes it up to 6 % faster or slower for its whole life, so each row runs several pairs
of processes, one after the other, and each pair counts with the median of its rounds. glibc's ``malloc`` keeps what is
freed (``MALLOC``): else some processes, by the addresses that they got, give the buffers of each scan back to the
kernel, and take two to three times as long for its page faults. A row fails when the 95 % interval of the median pair
lies wholly below 0.97.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Final

from tabulate import tabulate

from bench.compare.rows import rows
from bench.compare.side import CALLS, TURNS
from bench.contest import Scale

ROOT: Final = Path(__file__).resolve().parents[2]
PAIRS: Final = 9
ROUNDS: Final = 3
FLOOR: Final = 0.97
CONFIDENCE: Final = 0.95

MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""What both sides have in their environment."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; returns 1 if a row fails, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("row", nargs="*", help="rows that begin with this; all of them when left out")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs of processes for each row; {PAIRS} by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of each process; {ROUNDS} by default")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a turn; 0.3 by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--directory", type=Path, default=Path("build"), help="on the disk to measure; ./build by default"
    )
    parsed = parser.parse_args(arguments)
    chosen = [name for name in rows() if not parsed.row or name.startswith(tuple(parsed.row))]
    if not chosen:
        parser.error(f"no row begins with {parsed.row}; there are {', '.join(rows())}")
    parsed.directory.mkdir(parents=True, exist_ok=True)
    scale = Scale(parsed.rounds, parsed.seconds, 16 << 10, 1000, 1 << 26, 1 << 26)
    with installed(parsed.base) as places:
        compared = []
        for name in chosen:
            compared.append(compare(name, places, scale, parsed.directory, parsed.pairs))
            print(compared[-1], file=sys.stderr)
    if parsed.json:
        print(json.dumps([asdict(row) | {"failed": row.failed} for row in compared], indent=1))
    else:
        _print(compared, parsed.base)
    return int(any(row.failed for row in compared))


@dataclass(frozen=True, slots=True)
class Compared:
    """One row of both commits.

    Attributes:
        name: The row.
        unit: Of the medians.
        base: Median figure of the base commit.
        head: That of the working tree.
        ratio: Median of the pairs' ratios; above 1 the working tree is faster.
        low: Lower end of the ratio's interval.
        high: Its upper end.
        base_calls: Python functions that the base commit calls per operation.
        head_calls: The same of the working tree.
    """

    name: str
    unit: str
    base: float
    head: float
    ratio: float
    low: float
    high: float
    base_calls: float
    head_calls: float

    def __str__(self) -> str:
        """Return the row as a line."""
        return f"{self.name}: {self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}){' SLOWER' if self.failed else ''}"

    @property
    def failed(self) -> bool:
        """Whether the working tree is slower, beyond doubt."""
        return self.high < FLOOR


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the distribution-free interval that has the median of what was sampled with ``CONFIDENCE``.

    It is that of the order statistics, as the number of samples below the median is binomial; of fewer than six
    samples it is the whole range.
    """
    count = len(ratios)
    left_out = 0
    while sum(math.comb(count, below) for below in range(left_out + 2)) / 2**count <= (1 - CONFIDENCE) / 2:
        left_out += 1
    ordered = sorted(ratios)
    return ordered[left_out], ordered[count - 1 - left_out]


@contextmanager
def installed(commit: str) -> Iterator[tuple[Path, Path]]:
    """Install a commit and the working tree, which may change meanwhile, each with its core; removed afterwards."""
    made = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if made.returncode:
        raise SystemExit(f"{commit} is not a commit of this repository: {made.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="pybk-compare-") as target:
        base, head = Path(target) / "base", Path(target) / "head"
        with tarfile.open(fileobj=BytesIO(made.stdout)) as archive:
            archive.extractall(base, filter="data")
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).exists():
                (head / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, head / name)
        for tree in (base, head):
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--target", tree / "installed", tree], check=True)
        yield base / "installed", head / "installed"


@contextmanager
def side(name: str, source: Path, scale: Scale, directory: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    """Run one side of a row; it is ready on entry."""
    place = tempfile.mkdtemp(prefix="compare-", dir=directory)
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.compare.side", name, place, json.dumps(asdict(scale)), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **MALLOC, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])},
    )
    try:
        with process:
            _answer(process)
            yield process
    finally:
        process.kill()
        shutil.rmtree(place)


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit(f"one side ended with exit code {process.wait()}; its error is above")
    return line


def _ask(process: subprocess.Popen[str], seconds: float) -> float:
    assert process.stdin is not None
    process.stdin.write(f"{seconds}\n")
    process.stdin.flush()
    return float(_answer(process))


def compare(name: str, places: tuple[Path, Path], scale: Scale, directory: Path, pairs: int) -> Compared:
    """Let pairs of processes take turns at one row, the working tree's first in every second pair and round."""
    unit = rows()[name][0].unit
    figures: list[list[float]] = [[], []]
    ratios = []
    for number in range(pairs):
        print(f"{name}: pair {number + 1} of {pairs}", file=sys.stderr)
        before, after = _take_turns(name, places, scale, directory, base_first=number % 2 == 0)
        ratios.append(statistics.median(b / a if unit == "ms" else a / b for b, a in zip(before, after, strict=True)))
        figures[0] += before
        figures[1] += after
    calls = []
    for source in places:
        with side(name, source, scale, directory, CALLS) as process:
            calls.append(_ask(process, scale.seconds))
    medians = statistics.median(figures[0]), statistics.median(figures[1])
    return Compared(name, unit, *medians, statistics.median(ratios), *interval(ratios), *calls)


def _take_turns(
    name: str, places: tuple[Path, Path], scale: Scale, directory: Path, *, base_first: bool
) -> tuple[list[float], list[float]]:
    """Return the figures that two new processes reached by turns, without a first round, which warms up."""
    order = (0, 1) if base_first else (1, 0)
    figures: tuple[list[float], list[float]] = [], []
    with ExitStack() as stack:
        sides = {which: stack.enter_context(side(name, places[which], scale, directory, TURNS)) for which in order}
        for number in range(scale.rounds + 1):
            for which in order if number % 2 else order[::-1]:
                figure = _ask(sides[which], scale.seconds)
                if number:
                    figures[which].append(figure)
    return figures


def _print(compared: Sequence[Compared], base: str) -> None:
    table = [
        [
            row.name,
            f"{row.base:,.5g}",
            f"{row.head:,.5g}",
            row.unit,
            f"{row.ratio:.3f}",
            f"{row.low:.3f} to {row.high:.3f}",
            f"{row.base_calls:.1f} -> {row.head_calls:.1f}",
            "SLOWER" if row.failed else "",
        ]
        for row in compared
    ]
    headers = ["row", base[:12], "working tree", "unit", "ratio", "95 % interval", "calls per operation", ""]
    print(tabulate(table, headers, disable_numparse=True))
    slower = sum(row.failed for row in compared)
    print(f"{slower} of {len(compared)} rows are slower: their interval lies wholly below {FLOOR}")


if __name__ == "__main__":
    sys.exit(main())
