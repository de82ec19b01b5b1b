"""Runs seeds: ``python -m tests.simulator --seeds N [--seed S]``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from tests.simulator.world import World

LAST_EVENTS = 40
LINE = 200


def run(seed: int, *, traced: bool = False) -> tuple[World, Exception | None]:
    """Run a seed, and return what came of it."""
    world = World(seed, traced=traced)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001  # whatever a machine raises is a failure of the seed
        return world, error
    return world, None


def explain(seed: int) -> None:
    """Print what is known about a seed that failed."""
    world, error = run(seed, traced=True)
    for line in world.clock.trace[-LAST_EVENTS:]:
        print(line[:LINE])
    print(f"seed {seed}: {type(error).__name__}: {error}")
    print(f"  {world.plan}")
    print(f"  commit {_commit()}; again: python -m tests.simulator --seed {seed}")


def _commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description="Run the replication simulator.")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--sums", action="store_true", help="print a checksum of the events of each seed")
    arguments = parser.parse_args()
    events = failures = 0
    began = time.perf_counter()
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        world, error = run(seed, traced=arguments.trace or arguments.sums)
        events += world.clock.events
        if arguments.trace:
            print("\n".join(world.clock.trace))
        if arguments.sums:
            print(f"{seed} {world.clock.events} {world.clock.trace_sum:08x}")
        if error is not None:
            failures += 1
            explain(seed)
    seconds = time.perf_counter() - began
    print(f"{arguments.seeds} seeds, {events} events, {failures} failures, {events / seconds:,.0f} events/s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
