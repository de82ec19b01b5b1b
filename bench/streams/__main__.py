"""``python -m bench.streams [CONTEST ...]``: hold contests of logs and print their figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from bench import report
from bench.contest import Scale
from bench.streams import blobs, events, lists, logs, merging, subscriptions, wal

MODULES: Final = (wal, events, logs, lists, merging, subscriptions, blobs)
CONTESTS: Final = {contest.name: contest for module in MODULES for contest in module.CONTESTS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold the contests and print their figures; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.streams", description="Records have 1 KiB, blobs 1 GiB; appends are durable."
    )
    report.add_options(parser, CONTESTS)
    parsed, chosen = report.parse(parser, CONTESTS, arguments)
    quick: bool = parsed.quick
    scale = Scale(
        rounds=parsed.rounds or (1 if quick else 9),
        seconds=parsed.seconds or (0.1 if quick else 0.5),
        entries=2 << 10 if quick else 64 << 10,
        ledgers=50 if quick else 10_000,
        reopen_bytes=0,
        memory_bytes=0,
        blob_bytes=2 << 20 if quick else 1 << 30,
    )
    report.run(chosen, scale, parsed, "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
