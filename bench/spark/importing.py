"""``python -m bench.spark.importing BASE``: what a Python worker of Spark imports to read, next to commit BASE.

Each side reads one ledger of an embedded store, and what this has loaded besides Spark and Arrow is imported by new
processes, the two sides by turns. The time is processor time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from bench.compare.__main__ import ROOT, installed

TARGET: Final = 0.4
"""The share of the time of commit 2b789f03 that the import may take."""

_OF_SPARK: Final = "import pyarrow, pyspark.sql.datasource, pyspark.sql.streaming.datasource, pyspark.sql.pandas.types"
"""What every worker of a Python source has loaded."""

_MAKE: Final = """
import sys
from pybk import DigestType, LedgerManager
with LedgerManager.open(sys.argv[1]) as manager:
    with manager.create_ledger(digest_type=DigestType.CRC32C) as writer:
        writer.append(b"entry")
print(writer.ledger_id)
"""

_READ: Final = f"""
import sys
{_OF_SPARK}
before = set(sys.modules)
from pybk.spark.options import source_options
from pybk.spark.source.columns import schema_of
from pybk.spark.source.planning import EntryRange
from pybk.spark.source.batch_reader import new_reader
from pybk.spark.source.reading import LedgerPartition
options = source_options({{"path": sys.argv[1], "ledger": sys.argv[2]}}, streaming=False)
reader = new_reader(options, schema_of(options))
assert sum(batch.num_rows for batch in reader.read(LedgerPartition((EntryRange(int(sys.argv[2]), 0, 0),)))) == 1
print(",".join(name for name in sys.modules if name not in before))
"""

_IMPORT: Final = f"""
import importlib, sys, time
from contextlib import suppress
{_OF_SPARK}
begin = time.process_time_ns()
for name in sys.argv[1].split(","):
    with suppress(ImportError):
        importlib.import_module(name)
print(time.process_time_ns() - begin)
"""


def run(program: str, source: Path, *arguments: str) -> str:
    """Run a program with the pybk of a side, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env={**environment, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT.anchor,
    )
    return done.stdout.strip()


def loaded_by(source: Path, store: str) -> str:
    """Return the modules that a read loads, separated by commas."""
    return run(_READ, source, store, run(_MAKE, source, store))


def measure(base: str, rounds: int) -> None:
    """Print the medians of both sides, and their ratio."""
    times: dict[str, list[float]] = {base[:12]: [], "working tree": []}
    with installed(base) as places, tempfile.TemporaryDirectory() as directory:
        loaded = [loaded_by(place, f"{directory}/{number}") for number, place in enumerate(places)]
        for number in range(rounds + 1):
            for side, place, names in zip(times, places, loaded, strict=True):
                taken = int(run(_IMPORT, place, names)) / 1e6
                if number:  # the first round makes bytecode
                    times[side].append(taken)
    for (side, taken_ms), names in zip(times.items(), loaded, strict=True):
        print(f"{side:<12} {statistics.median(taken_ms):7.1f} ms of CPU, {len(names.split(','))} modules")
    before, now = times.values()
    ratio = statistics.median(b / a for a, b in zip(before, now, strict=True))
    print(f"{ratio:.2f} of {base[:12]}; target: at most {TARGET}")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.spark.importing", description=__doc__)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=11, help="how often each side imports; 11 by default")
    parsed = parser.parse_args()
    measure(parsed.base, parsed.rounds)


if __name__ == "__main__":
    main()
