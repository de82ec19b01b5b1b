"""``python -m bench.cluster [CONTEST ...]``: hold contests of a cluster and print their figures."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Final

from bench import report
from bench.cluster import appending, lifecycle, reading, slowness, zookeeper
from bench.contest import Scale

CONTESTS: Final = {
    contest.name: contest
    for contest in (*appending.CONTESTS, *reading.CONTESTS, *lifecycle.CONTESTS, *slowness.CONTESTS)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold the contests and print their figures; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster",
        description="Three bookie processes and a client on this machine; entries have 1 KiB and an HMAC, are written "
        "to 3 bookies, and count when 2 have synced them. Each contestant is shown without CURVE and with it.",
    )
    report.add_options(parser, CONTESTS)
    parsed, chosen = report.parse(parser, CONTESTS, arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no bookie is left behind
    quick: bool = parsed.quick
    scale = Scale(
        rounds=parsed.rounds or (1 if quick else 5),
        seconds=parsed.seconds or (0.1 if quick else 0.6),
        entries=2 << 10 if quick else 64 << 10,
        ledgers=0,
        reopen_bytes=0,
        memory_bytes=0,
    )
    missing = "" if zookeeper.is_there() else "ZooKeeper is left out: it takes Java, pyspark and kazoo. "
    report.run(chosen, scale, parsed, missing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
