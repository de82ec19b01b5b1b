"""``python -m bench.cluster.peers [CONTEST ...]``: pybk's cluster compared with Apache BookKeeper, NATS and etcd.

All take turns in one run on one machine: three servers each, entries of 1 KiB that count when two servers have synced
them. BookKeeper and pybk make an HMAC of each entry; only contestants named so encrypt what they send. What is not
installed here, or cannot be fetched, is left out, and the line below the table says so.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from bench import report
from bench.cluster import appending, bookkeeper, etcd, jetstream, reading
from bench.contest import Contest, Contestant, Scale, Target

OTHERS: Final = (jetstream, etcd)
"""What is measured by lone appends alone."""

BATCHES: Final = f"append_many({appending.BATCH}), {appending.BATCHES_UNDER_WAY} under way"

Goal = Callable[[str], Target]


def at_most_theirs(factor: float) -> Goal:
    """Return a target of so many times BookKeeper's figure, where less is better."""
    text = f"<= {factor:g} x {bookkeeper.NAME}"
    return lambda _: Target(text, lambda figures: factor * figures[bookkeeper.NAME], at_most=True)


def theirs(told: str, *, filled: bool = False) -> Contestant:
    """Return BookKeeper as a contestant.

    Args:
        told: What its client does, without the seconds; see ``bookkeeper/Drive.java``.
        filled: Write a ledger first, to be read.
    """
    return Contestant(bookkeeper.NAME, partial(bookkeeper.running, partial(bookkeeper.figure, told), filled))


def contests(is_there: bool, others: Sequence[Contestant]) -> list[Contest]:
    """Return the contests.

    Args:
        is_there: BookKeeper is there, and is a contestant and a target.
        others: Further contestants of lone appends.
    """

    def with_theirs(contestant: Contestant) -> list[Contestant]:
        return [contestant] if is_there else []

    def goals(own: Goal, theirs: Goal) -> list[Goal]:
        return [own, theirs] if is_there else [own]

    outstanding = f"outstanding {appending.OUTSTANDING}"
    cpu = Contestant(bookkeeper.NAME, partial(bookkeeper.running, partial(bookkeeper.cpu_per_100k, outstanding), False))
    return [
        Contest(
            "append",
            "one append at a time, p50",
            "ms",
            [
                *appending.pybk(appending.singly, *goals(appending.at_most_bare(1.2), at_most_theirs(1))),
                *appending.bare(1, 1, appending.median_of),
                *with_theirs(theirs("append")),
                *others,
            ],
        ),
        Contest(
            "random",
            "one random read, p50",
            "ms",
            [
                *reading.pybk(reading.singles, *goals(reading.times_bare(1.5, reading.ROUND_TRIP), at_most_theirs(1))),
                *reading.bare(reading.round_trip, reading.ROUND_TRIP),
                *with_theirs(theirs("random", filled=True)),
            ],
        ),
        Contest(
            "outstanding",
            f"append_async, {appending.OUTSTANDING} outstanding; the bare loop sends them one by one",
            "/s",
            [
                *appending.pybk(appending.outstanding_rate, appending.at_least_bare(0.6)),
                *appending.bare(1, appending.OUTSTANDING, appending.rate_of),
                *with_theirs(theirs(outstanding)),
            ],
        ),
        Contest(
            "batches",
            BATCHES,
            "/s",
            [
                *appending.pybk(appending.in_batches, appending.at_least_bare(0.75)),
                *appending.bare(appending.BATCH, appending.BATCHES_UNDER_WAY, appending.rate_of),
            ],
        ),
        Contest(
            "scan",
            "from end to end, payload",
            "MB/s",
            [*reading.pybk(reading.scan), *with_theirs(theirs("scan", filled=True))],
        ),
        Contest(
            "tail",
            "append to seen by another client that follows, 200/s, p50",
            "ms",
            [
                *reading.following(reading.times_bare(2, reading.QUORUM)),
                *reading.bare(reading.quorum_and_round_trip, reading.QUORUM),
                *with_theirs(theirs("follow")),
            ],
        ),
        Contest(
            "cpu",
            f"append_async, {appending.OUTSTANDING} outstanding, CPU of all processes per 100 k entries",
            "s",
            [
                *appending.pybk(appending.outstanding_cpu, *([at_most_theirs(0.3)] if is_there else [])),
                *with_theirs(cpu),
            ],
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold the contests and print their figures; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster.peers", description=__doc__)
    report.add_options(parser, {contest.name: contest for contest in contests(False, ())})
    parser.add_argument("--without-bookkeeper", action="store_true", help="leave BookKeeper out")
    parsed = parser.parse_args(arguments)
    why = "not wanted" if parsed.without_bookkeeper else bookkeeper.why_not()
    missing = {bookkeeper.NAME: why} | {other.NAME: other.why_not() for other in OTHERS}
    others = [Contestant(other.NAME, other.running) for other in OTHERS if not missing[other.NAME]]
    held = {contest.name: contest for contest in contests(not why, others)}
    chosen = report.choose(parser, parsed, held)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left behind
    quick: bool = parsed.quick
    scale = Scale(
        rounds=parsed.rounds or (1 if quick else 5),
        seconds=parsed.seconds or (0.1 if quick else 2.0),
        entries=2 << 10 if quick else 64 << 10,
        ledgers=0,
        reopen_bytes=0,
        memory_bytes=0,
    )
    told = "".join(f"{name} is left out: {reason}.\n" for name, reason in missing.items() if reason)
    report.run(chosen, scale, parsed, told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
