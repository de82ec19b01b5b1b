"""``python -m bench.spark.looks``: what a look of a streaming query of ledgers costs, and how large its offset is.

The cluster has one bookie, an LMDB metadata store, and the metadata of closed ledgers that have no entries anywhere: a
look reads no entries. The query reads one of several types, whose ledgers alternate. Then micro-batches follow, each
with a new ledger of this type and one of another.

Then a look at open logs that rest is measured, with three bookies in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from pybk import LedgerManager
from pybk.flags import LedgerType
from pybk.manager.ledger_reader import LedgerReader
from pybk.metadata.cluster import ClusterMetadata
from pybk.spark.connection import close_connections, connection
from pybk.spark.log_source.log_catalog import LogCatalog
from pybk.spark.log_source.log_options import log_options
from pybk.spark.options import source_options
from pybk.spark.source.columns import schema_of
from pybk.spark.source.stream import StreamReader
from pybk.streams.log import Log

READ: Final = "read"
ENTRIES: Final = 10
WAIT_S: Final = 300.0
POLL_S: Final = 0.005
LOOKS: Final = 20
BOOKIES: Final = 3


class Ledgers:
    """Makes the metadata of closed ledgers.

    Args:
        manager: A client of the cluster.
        metadata: Its metadata.
    """

    def __init__(self, manager: LedgerManager, metadata: ClusterMetadata) -> None:
        with manager.create_ledger(ledger_type=READ, ensemble_size=1, insecure=True) as writer:
            writer.append_many([b"entry"] * ENTRIES)
        self._metadata = metadata
        self._like = manager.ledger_metadata(writer.ledger_id)

    def make(self, kind: str) -> int:
        """Make a ledger of a type, and return its id."""
        ledger_id = self._metadata.new_ledger_id()
        now = time.time_ns()
        self._metadata.create_ledger(
            replace(
                self._like,
                ledger_id=ledger_id,
                ledger_type=LedgerType(kind),
                creation_time_ns=now,
                creation_sequence=now,
            )
        )
        return ledger_id


class Query:
    """A streaming query in the driver, which plans micro-batches and reads nothing.

    Args:
        url: The metadata URL of the cluster.
    """

    def __init__(self, url: str) -> None:
        options = source_options({"metadataUri": url, "ledgerType": READ}, streaming=True)
        self._reader = StreamReader(options, schema_of(options))
        self._limit = self._reader.getDefaultReadLimit()
        self.offset: dict[str, Any] = self._reader.initialOffset()

    def look(self) -> dict[str, Any]:
        """Return where the next micro-batch would end."""
        found: dict[str, Any] = self._reader.latestOffset(self.offset, self._limit)
        return found

    def batch(self) -> bool:
        """Plan a micro-batch, and return whether there was something to read."""
        end = json.loads(json.dumps(self.look()))
        tasks = self._reader.partitions(self.offset, end)
        moved, self.offset = end != self.offset, end
        return bool(tasks) and moved


def taken(call: Callable[[], object], times: int = 1) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of one of several calls."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    return (time.perf_counter() - wall) / times, (time.process_time() - cpu) / times


def size(offset: dict[str, Any]) -> int:
    """Return the bytes of an offset in a checkpoint."""
    return len(json.dumps(offset, separators=(",", ":")))


def seen_after(query: Query) -> float:
    """Plan micro-batches until one has something to read; return the seconds until then."""
    begin = time.perf_counter()
    while not query.batch():
        if time.perf_counter() - begin > WAIT_S:
            raise RuntimeError(f"no look has seen a new ledger within {WAIT_S:.0f} s")
        time.sleep(POLL_S)
    return time.perf_counter() - begin


def measure(directory: Path, count: int, types: int, batches: int) -> None:
    """Print the figures."""
    url = f"lmdb://{directory.resolve()}/metadata"
    bookie = LedgerManager.open(directory / "bookie", listen="tcp://127.0.0.1:*", metadata=url, autorecovery=False)
    with bookie, LedgerManager.connect(url) as manager:
        metadata = connection(source_options({"metadataUri": url, "ledger": "0"}, streaming=True).where).metadata
        assert metadata is not None
        ledgers = Ledgers(manager, metadata)
        for number in range(count):
            ledgers.make(READ if number % types == 0 else f"other{number % types}")
        query: Query | None = None

        def begin() -> None:
            nonlocal query
            query = Query(url)

        wall, cpu = taken(begin)
        assert query is not None
        print(f"{count} ledgers of {types} types: the first look {wall:.2f} s, {cpu:.2f} s of CPU")
        print(f"the first offset {size(query.offset)} bytes")
        query.batch()
        print(f"the offset after the first micro-batch {size(query.offset)} bytes")
        seen = []
        for _ in range(3):
            ledgers.make(READ)
            ledgers.make("other1")
            seen.append(seen_after(query))
        wall, cpu = taken(query.look, 20)
        print(f"a look without changes {1e3 * cpu:.2f} ms of CPU, {1e3 * wall:.2f} ms")
        print(f"a new ledger is seen after {1e3 * max(seen):.0f} ms at most of {len(seen)}")
        costs, sizes = [], []
        for _ in range(batches):
            ledgers.make(READ)
            ledgers.make("other1")
            cpu = time.process_time()
            seen_after(query)
            costs.append(time.process_time() - cpu)
            sizes.append(size(query.offset))
        if batches >= 100:
            first, last = statistics.median(costs[50:150]), statistics.median(costs[-100:])
            print(f"micro-batches about the hundredth {1e3 * first:.2f} ms of CPU, about the last {1e3 * last:.2f} ms")
            print(f"offsets of {batches} micro-batches: {max(sizes)} bytes at most")
        close_connections()


def measure_open(directory: Path, counts: Sequence[int]) -> None:
    """Print what a look costs at logs that are open and rest, and what asking for the end of each would cost."""
    url = f"lmdb://{directory.resolve()}/metadata"
    with ExitStack() as opened:
        for number in range(BOOKIES):
            where = directory / f"bookie-{number}"
            bookie = LedgerManager.open(where, listen="tcp://127.0.0.1:*", metadata=url, autorecovery=False)
            opened.enter_context(bookie)
        manager = opened.enter_context(LedgerManager.connect(url))
        names = [f"log-{number}" for number in range(max(counts))]
        for name in names:
            log = opened.enter_context(Log.open(manager, name, insecure=True))
            opened.enter_context(log.writer()).append(b"record")
        for count in counts:
            given = {"metadataUri": url, "subscribe": ",".join(names[:count])}
            catalog = LogCatalog(log_options(given, streaming=True), follow=True)
            catalog.look()
            while any(state.end_seq == 0 for state in catalog.look(now=False).values()):
                time.sleep(POLL_S)
            wall, cpu = taken(partial(catalog.look, now=False), LOOKS)
            readers = [reader for name in names[:count] if (reader := catalog.view(name).reader) is not None]
            asked = taken(partial(_ask_each, readers))[1]
            print(
                f"a look at {count} open logs {1e3 * cpu:.1f} ms of CPU, bookies included, {1e3 * wall:.1f} ms; "
                f"asking for each end {1e3 * asked:.0f} ms of CPU"
            )
            catalog.close()
        close_connections()


def _ask_each(readers: Sequence[LedgerReader]) -> None:
    for reader in readers:
        reader.read_last_add_confirmed()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.spark.looks", description=__doc__)
    parser.add_argument("--ledgers", type=int, default=100_000, help="0 leaves ledgers out")
    parser.add_argument("--open", type=int, nargs="*", default=[10, 300, 1000], help="open logs of a look")
    parser.add_argument("--types", type=int, default=50)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--directory", type=Path, default=Path("build"), help="on the disk to measure")
    parsed = parser.parse_args()
    parsed.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parsed.directory) as directory:
        places = [Path(directory) / name for name in ("ledgers", "logs")]
        for place in places:
            place.mkdir()
        if parsed.ledgers:
            measure(places[0], parsed.ledgers, parsed.types, parsed.batches)
        if parsed.open:
            measure_open(places[1], parsed.open)


if __name__ == "__main__":
    main()
