"""Runs seeds: ``python -m tests.simulator --seeds N [--seed S]``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulator.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description="Run the replication simulator.")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--trace", action="store_true", help="print every event of the seeds")
    arguments = parser.parse_args()
    events = 0
    failures = 0
    began = time.perf_counter()
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        world = World(seed, traced=arguments.trace)
        try:
            world.run()
        except Exception as error:  # noqa: BLE001  # whatever a machine raises is a failure of the seed
            failures += 1
            print(f"seed {seed}: {type(error).__name__}: {error}")
            print(f"  python -m tests.simulator --seed {seed} --trace")
        events += world.clock.events
        if arguments.trace:
            print("\n".join(world.clock.trace))
            print(f"trace {world.clock.trace_sum:08x}")
    seconds = time.perf_counter() - began
    print(f"{arguments.seeds} seeds, {events} events, {failures} failures, {events / seconds:,.0f} events/s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
