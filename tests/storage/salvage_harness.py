"""A bookie whose store loses something durable, on a simulated disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pybk.bookie.replicas import Replicas
from pybk.bookie.startup import put_all_in_limbo
from pybk.flags import StorageHint
from pybk.ledger import keys
from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata
from pybk.metadata.ledgers import StoredLedger
from pybk.replication.messages import NEGATIVE, Status
from pybk.storage import preallocation
from tests.bookie.replica_harness import ROOT, add, content, describe, entry, make_run
from tests.simdisk import SimEnvironment, SimFileSystem
from tests.storage.store_harness import CONFIG

CLUSTER, INSTANCE = b"cluster", b"i" * 16
BOOKIE = Bookie("b", INSTANCE)
LEDGERS = (1, 2, 3)
OTHER = 4
FENCED = 3
COUNT = 120
SIZE = 4000

Harm = Callable[[SimFileSystem], None]


def open_bookie(fs: SimFileSystem, *, salvage: bool = False) -> Replicas:
    """Open the bookie of a simulated disk, with log files so small that there are several."""
    keys.SCRYPT_COST = 2  # type: ignore[misc]  # nothing that is tested depends on it
    preallocation.FIRST_FILE_BYTES = 1 << 18  # type: ignore[misc]  # as above
    return Replicas.open(ROOT, config=CONFIG, fs=fs, environment=lambda path: SimEnvironment(fs, path), salvage=salvage)


def make_bookie(fs: SimFileSystem, *, checkpoint: bool = False, ssd: bool = False) -> None:
    """Make a bookie with three ledgers, one of them fenced, in three log files; one may be moved to the SSD tier."""
    replicas = open_bookie(fs)
    replicas.record_start(CLUSTER, "b", INSTANCE)
    for ledger_id in LEDGERS:
        replicas.create(ledger_id, describe())
    bring(replicas, 20, recovery=False)
    replicas.fence(FENCED, describe())
    bring(replicas, COUNT)
    if ssd:
        replicas.move(LEDGERS[0], StorageHint.SSD)
    if checkpoint:
        replicas.store.scheduler.checkpoint()
    replicas.close()


def bring(replicas: Replicas, count: int, *, recovery: bool = True) -> None:
    """Add the first entries of all ledgers, as their writers did, or as a recovery or a copy does."""
    for first in range(0, count, 20):
        for ledger_id in LEDGERS:
            run = make_run(first, 20, ledger_id=ledger_id, size=SIZE)
            assert add(replicas, run, ledger_id=ledger_id, recovery=recovery) is Status.OK


def log_files(fs: SimFileSystem) -> list[str]:
    """Return the paths of the log files, the oldest first."""
    folder = f"{ROOT}/nvme"
    return sorted(f"{folder}/{name}" for name in fs.list_directory(folder) if name.endswith(".log"))


def missing(replicas: Replicas) -> int:
    """Return how many entries cannot be read; all others have the right bytes, and none is denied (I17)."""
    unknown = 0
    for ledger_id in LEDGERS:
        assert replicas.state(ledger_id) is not None
        wanted = [entry(entry_id, ledger_id=ledger_id, size=SIZE) for entry_id in range(COUNT)]
        at = 0
        while at < COUNT:
            status, run = replicas.read(ledger_id, at, COUNT - 1, 1, 1 << 20, checked=True, recovery=True)
            assert status not in NEGATIVE, (ledger_id, at)
            found = content(run)
            assert found == wanted[at : at + len(found)]
            at += len(found)
            if status is not Status.OK:
                unknown += 1
                at += 1
    return unknown


class Listed:
    """A metadata store with the ledgers of this bookie, two by two, and one of others."""

    def id_pages(self) -> Iterator[list[int]]:
        ids = [*LEDGERS, OTHER]
        return (ids[at : at + 2] for at in range(0, len(ids), 2))

    def read_ledgers(
        self, ledger_ids: list[int], *, damaged: Callable[[int, Exception], None]
    ) -> list[StoredLedger | None]:
        return [StoredLedger(self._ledger(ledger_id), 0) for ledger_id in ledger_ids]

    def describe(self, metadata: LedgerMetadata) -> bytes:
        return describe().encoded

    def _ledger(self, ledger_id: int) -> LedgerMetadata:
        other = Bookie("other", INSTANCE)
        return LedgerMetadata(
            ledger_id=ledger_id,
            ledger_type=describe().ledger_type,
            digest_type=describe().digest_type,
            creation_time_ns=0,
            creation_sequence=0,
            tier=StorageHint.NVME,
            key_salt=b"",
            verifier=b"",
            fragments=(Fragment(0, (other if ledger_id == OTHER else BOOKIE,)), Fragment(COUNT, (other,))),
        )


def salvage(fs: SimFileSystem, opened: list[Replicas] | None = None) -> Replicas:
    """Start a bookie whose store does not open: the steps of ``BookieService.open``; ``opened`` is notified at once."""
    replicas = open_bookie(fs, salvage=True)
    if opened is not None:
        opened.append(replicas)
    replicas.record_start(CLUSTER, BOOKIE.bookie_id, INSTANCE, 1)
    metadata: Any = Listed()
    put_all_in_limbo(replicas, metadata, BOOKIE)
    assert replicas.state(OTHER) is None
    return replicas
