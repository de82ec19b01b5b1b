"""Reading all ledgers as an auditor does: after its election, and again.

``python -m bench.healing.auditing METADATA`` is the process that is measured. The metadata lie in memory, because only
processor time is measured, and were written in transactions of a thousand ledgers, not one by one as clients do it.
"""

from __future__ import annotations

import json
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bench.cluster.slowness import memory_mib
from bench.healing.planning import closed_ledger
from pybk import Bookie
from pybk.healing.cluster_map import ClusterMap
from pybk.metadata import lmdb_rows as rows
from pybk.metadata.authenticated_values import ValueKind, new_token
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.ledgers import LEDGERS_KEY, ledger_path
from pybk.metadata.lmdb_store import LmdbMetadataStore
from pybk.metadata.url import open_metadata
from pybk.storage.io.lmdb_environment import WriteTransaction

BOOKIES: Final = 200
_PAGE: Final = 500
_BATCH: Final = 1000
_MEMORY: Final = Path("/dev/shm")


class Audit(NamedTuple):
    """What reading all ledgers takes, of each ledger.

    Attributes:
        ledgers: How many there are.
        first_us: Processor time of the first reading, microseconds.
        again_us: That of a reading that finds no change, microseconds.
        own_bytes: Resident memory of the process' own after the first reading, bytes.
    """

    ledgers: int
    first_us: float
    again_us: float
    own_bytes: float


@contextmanager
def filled(ledgers: int) -> Iterator[str]:
    """Yield the URL of a metadata store in memory with closed ledgers on ``BOOKIES`` bookies."""
    with ExitStack() as stack:
        place = _MEMORY if _MEMORY.is_dir() else None
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=place))
        url = f"lmdb://{directory}/metadata"
        store = open_metadata(url)
        assert isinstance(store, LmdbMetadataStore)
        metadata = ClusterMetadata(store)
        bookies = [Bookie(f"bookie-{number:03}", secrets.token_bytes(16)) for number in range(BOOKIES)]
        source = random.Random(1)

        def put(transaction: WriteTransaction, number: int) -> None:
            for ledger_id in batch:
                key = f"{LEDGERS_KEY}/{ledger_path(ledger_id)}"
                payload = closed_ledger(ledger_id, tuple(source.sample(bookies, 3))).encode()
                value = metadata.encoded(ValueKind.LEDGER, key, new_token(), payload)
                rows.put_value(transaction, rows.node_name(key), rows.StoredValue(number, number, 0, value))

        for first in range(0, ledgers, _BATCH):
            batch = range(first, min(first + _BATCH, ledgers))
            store.change(put)
        metadata.close()
        yield url


def read(metadata: ClusterMetadata, cluster: ClusterMap) -> float:
    """Read all ledgers into a map; return the seconds of processor time."""

    def known(ledger_id: int) -> int | None:
        found = cluster.get(ledger_id)
        return None if found is None else found.version

    began = time.process_time()
    cluster.begin_read()
    after = -1
    for page in metadata.ledger_pages(count=_PAGE, known=known):
        ledgers = {each: (stored.metadata, stored.version) for each, stored in page.ledgers.items()}
        cluster.apply_page(after, page.through, ledgers, unknown=page.same)
        after = after if page.through is None else page.through
    return time.process_time() - began


def measured(ledgers: int) -> Audit:
    """Return what a fresh process took."""
    with filled(ledgers) as url:
        command = [sys.executable, "-m", "bench.healing.auditing", url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that reads has failed: {done.stderr}")
    return Audit(*json.loads(done.stdout))


def measure(url: str) -> Audit:
    """Read everything twice."""
    metadata = ClusterMetadata(open_metadata(url))
    cluster, before = ClusterMap(), memory_mib("RssAnon")
    first_s = read(metadata, cluster)
    own_bytes = (memory_mib("RssAnon") - before) * (1 << 20)
    again_s = read(metadata, cluster)
    metadata.close()
    count = len(cluster)
    return Audit(count, first_s * 1e6 / count, again_s * 1e6 / count, own_bytes / count)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
