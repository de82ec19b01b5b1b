"""The long form: ``python -m tests.linearizability --minutes N --seed S [--metadata zk]``.

It runs processes seed after seed, and says at the end how many histories were checked. A history that is not
linearizable ends it, and is shown as a whole.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.inside import inside
from tests.linearizability.campaign import Tally, compare_and_set, promotions, recoveries
from tests.zookeeper_server import ZooKeeperServer, missing


@contextmanager
def _urls(metadata: str, directory: Path) -> Iterator[Callable[[str], str]]:
    """Provide a function that returns the URL of an empty metadata store for a seed."""
    if metadata == "lmdb":
        yield lambda seed: f"lmdb://{directory}/{seed}/metadata"
        return
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    server = ZooKeeperServer()
    server.start()
    try:
        yield lambda seed: server.url()
    finally:
        server.close()


def _run(seed: str, url: Callable[[str], str], directory: Path) -> Iterator[tuple[str, Tally]]:
    """Run all kinds of processes with one seed."""
    yield "compare-and-set", compare_and_set(url(f"{seed}/keys"), directory / "compare-and-set", seed)
    with inside(directory / "cluster", url=url(f"{seed}/cluster"), scheme="ipc") as cluster:
        yield "recovery", recoveries(cluster.url, directory / "recoveries", seed)
        yield "promote in a cluster", promotions(cluster.url, directory / "promotions", seed)
    yield "promote in a store", promotions(str(directory / "store"), directory / "store-promotions", seed)


def main() -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.linearizability", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--metadata", choices=("lmdb", "zk"), default="lmdb")
    parsed = parser.parse_args()
    until = time.monotonic() + 60 * parsed.minutes
    tallies: dict[str, Tally] = {}
    seed = parsed.seed
    with tempfile.TemporaryDirectory(prefix="pybk-") as made, _urls(parsed.metadata, Path(made)) as url:
        while time.monotonic() < until:
            directory = Path(made, str(seed))
            directory.mkdir()
            for kind, tally in _run(str(seed), url, directory):
                tallies[kind] = tallies.get(kind, Tally()).plus(tally)
            shutil.rmtree(directory)
            seed += 1
    for kind, tally in tallies.items():
        sys.stdout.write(f"{kind}: {tally.histories} histories, {tally.operations} operations, ")
        sys.stdout.write(f"{tally.unknown} of unknown outcome\n")
    sys.stdout.write(f"seeds {parsed.seed} to {seed - 1}: all linearizable\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
