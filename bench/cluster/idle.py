"""``python -m bench.cluster.idle``: the processor time of followers and bookies at rest.

A share of a core is measured over a minute, because what is done at rest is done every 28 or 60 seconds, so it is no
contest of rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from bench.cluster.bookies import Cluster, process_cpu_seconds
from bench.payloads import PASSWORD, PAYLOAD
from pybk import ClosedError, LedgerManager, LedgerReader

FOLLOWERS: Final = 100
BOOKIES: Final = 20
SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 5.0
"""How long what was just started has to come to rest."""

FOLLOWERS_PERCENT: Final = 0.1
BOOKIES_PERCENT: Final = 2.0


# ---- followers -------------------------------------------------------------------------------------------------------


@contextmanager
def threads(readers: Sequence[LedgerReader]) -> Iterator[None]:
    """Have a thread follow each reader."""

    def follow(reader: LedgerReader) -> None:
        with suppress(ClosedError):
            for _ in reader.follow():
                pass

    followers = [threading.Thread(target=follow, args=(reader,)) for reader in readers]
    for follower in followers:
        follower.start()
    try:
        yield
    finally:
        for reader in readers:
            reader.close()
        for follower in followers:
            follower.join()


@contextmanager
def tasks(readers: Sequence[LedgerReader]) -> Iterator[None]:
    """Have a task of one event loop follow each reader."""

    async def follow(reader: LedgerReader) -> None:
        with suppress(ClosedError):
            async for _ in reader.follow_async():
                pass

    async def follow_all() -> None:
        await asyncio.gather(*map(follow, readers))

    loop = threading.Thread(target=lambda: asyncio.run(follow_all()))
    loop.start()
    try:
        yield
    finally:
        for reader in readers:
            reader.close()
        loop.join()


@contextmanager
def nobody(readers: Sequence[LedgerReader]) -> Iterator[None]:
    """Follow nothing."""
    yield
    for reader in readers:
        reader.close()


FORMS: Final = {"nobody": nobody, "threads": threads, "tasks": tasks}


def share(seconds: float, *pids: int) -> float:
    """Return the processor time that processes take together, in percent of one core."""
    time.sleep(min(SETTLE_SECONDS, seconds))
    before, began = sum(map(process_cpu_seconds, pids)), time.monotonic()
    time.sleep(seconds)
    return 100 * (sum(map(process_cpu_seconds, pids)) - before) / (time.monotonic() - began)


def make_ledgers(cluster: Cluster, count: int) -> list[int]:
    """Return the ids of new open ledgers with one entry, whose writer has ended."""
    with LedgerManager.connect(cluster.url, cluster_secret=cluster.secret) as writing:
        writers = [writing.create_ledger(password=PASSWORD) for _ in range(count)]
        for writer in writers:
            writer.append(PAYLOAD)
        return [writer.ledger_id for writer in writers]


def followers(cluster: Cluster, form: str, ids: Sequence[int], seconds: float) -> tuple[float, float]:
    """Return the shares of a core that a client takes with a follower for each id, and that its bookies take."""
    readers = [cluster.client.open_ledger(ledger_id, password=PASSWORD, recover=False) for ledger_id in ids]
    with FORMS[form](readers):
        bookies, began = sum(map(process_cpu_seconds, cluster.pids)), time.monotonic()
        client = share(seconds, os.getpid())
        return client, 100 * (sum(map(process_cpu_seconds, cluster.pids)) - bookies) / (time.monotonic() - began)


# ---- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each figure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster.idle", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for each figure (default {SECONDS:g})")
    parser.add_argument("--followers", type=int, default=FOLLOWERS, help=f"how many (default {FOLLOWERS})")
    parser.add_argument("--bookies", type=int, default=BOOKIES, help=f"how many idle ones (default {BOOKIES})")
    parser.add_argument("--curve", action="store_true", help="with a cluster secret: CURVE, and MACs")
    parser.add_argument("--directory", type=Path, help="where to make the clusters (default: a temporary directory)")
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=parsed.directory) as directory:
        for name in ("three", "many"):
            (Path(directory) / name).mkdir()
        with Cluster(Path(directory) / "three", curve=parsed.curve) as three:
            ids = make_ledgers(three, parsed.followers)
            many = len(ids)
            for form, ledgers in (("nobody", 1), ("threads", 1), ("tasks", 1), ("threads", many), ("tasks", many)):
                followed = [ids[number % ledgers] for number in range(many)]
                client, bookies = followers(three, form, followed, parsed.seconds)
                _print(
                    f"client, {many} readers of {ledgers} ledgers, followed by {form}",
                    client,
                    FOLLOWERS_PERCENT,
                    f"its three bookies {bookies:.3f} %",
                )
        with Cluster(Path(directory) / "many", curve=parsed.curve, bookies=parsed.bookies) as idle:
            _print(f"{parsed.bookies} bookies together", share(parsed.seconds, *idle.pids), BOOKIES_PERCENT, "")
    return 0


def _print(what: str, percent: float, target: float, also: str) -> None:
    print(f"{what:60} {percent:7.3f} % of a core (target {target:g} %)  {also}".rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
