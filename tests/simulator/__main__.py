"""Runs seeds: ``python -m tests.simulator --seeds N [--seed S] [--every N]``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from random import Random

from tests.simulator.disk import Disk
from tests.simulator.harness import Harness, model_disk
from tests.simulator.plan import Plan, draw
from tests.simulator.real_disk import RealDisk, suits

LAST_EVENTS = 40
LINE = 200


def run(seed: int, *, traced: bool = False, real: bool = False) -> tuple[Harness, Exception | None]:
    """Run a seed, on the model of a disk or on the library's storage, and return what came of it."""
    make_disk: Callable[[Random, Plan], Disk] = RealDisk if real else model_disk
    harness = Harness(seed, traced=traced, make_disk=make_disk)
    try:
        harness.run()
    except Exception as error:  # noqa: BLE001  # whatever a machine raises is a failure of the seed
        return harness, error
    finally:
        harness.close()
    return harness, None


def explain(seed: int, *, real: bool) -> None:
    """Print what is known about a seed that failed."""
    harness, error = run(seed, traced=True, real=real)
    for line in harness.clock.trace[-LAST_EVENTS:]:
        print(line[:LINE])
    print(f"seed {seed}: {type(error).__name__}: {error}")
    print(f"  {harness.plan}")
    print(f"  commit {_commit()}; again: python -m tests.simulator {'--real ' * real}--seed {seed}")


def _commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description="Run the replication simulator.")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--every", type=int, default=0, help="print after each so many seeds where to begin again")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--sums", action="store_true", help="print a checksum of the events of each seed")
    parser.add_argument("--real", action="store_true", help="bookies on the library's storage, on a simulated disk")
    arguments = parser.parse_args()
    events = failures = 0
    began = time.perf_counter()
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        if arguments.real and not suits(draw(seed)):
            continue
        harness, error = run(seed, traced=arguments.trace or arguments.sums, real=arguments.real)
        events += harness.clock.events
        if arguments.trace:
            print("\n".join(harness.clock.trace))
        if arguments.sums:
            print(f"{seed} {harness.clock.events} {harness.clock.trace_sum:08x}")
        if error is not None:
            failures += 1
            explain(seed, real=arguments.real)
        if arguments.every and (seed + 1 - arguments.seed) % arguments.every == 0:
            rate = events / (time.perf_counter() - began)
            print(f"--seed {seed + 1}: {events} events, {failures} failures, {rate:,.0f} events/s", flush=True)
    seconds = time.perf_counter() - began
    print(f"{arguments.seeds} seeds, {events} events, {failures} failures, {events / seconds:,.0f} events/s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
