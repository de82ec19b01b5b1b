"""Check of the replicas in the directories of bookies that have ended, entry by entry."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, pairwise
from typing import Final, NamedTuple

from demo.reading import LostEntryError
from demo.source import Source
from pybk.bookie.replicas import Replicas
from pybk.client.remote_ledger import RemoteLedger
from pybk.config import StoreConfig
from pybk.credentials import Credentials
from pybk.ledger.digest import entry_digest
from pybk.ledger.entry import EntryBatch
from pybk.ledger.keys import KeyRing, LedgerSeal, keys_of
from pybk.ledger.ledger_metadata import Fragment, LedgerMetadata
from pybk.metadata.cluster import ClusterIdentity
from pybk.replication.entry_runs import whole
from pybk.replication.messages import Status

READ_BYTES: Final = 1 << 20


class ReplicaContents(NamedTuple):
    """The entries of a fragment that a bookie holds.

    Attributes:
        bookie_id: The bookie.
        entries: The number of entries that it holds, all with valid digests and equal to the input.
        payload_bytes: Their payload bytes.
        missing: The ids of the fragment's entries that it does not hold.
    """

    bookie_id: str
    entries: int
    payload_bytes: int
    missing: list[int]


def fragments_of(metadata: LedgerMetadata) -> Iterator[tuple[Fragment, int, int]]:
    """Yield the fragments of a closed ledger, each with its first and last entry."""
    ends = [fragment.first_entry_id for fragment in metadata.fragments] + [metadata.last_entry_id + 1]
    for fragment, (first, end) in zip(metadata.fragments, pairwise(ends), strict=True):
        yield fragment, first, end - 1


def unlocked(metadata: LedgerMetadata, identity: ClusterIdentity, secret: bytes) -> RemoteLedger:
    """Return the ledger with the key that verifies its entries' digests."""
    ring = KeyRing(identity.cluster_id, identity.salt, cost=identity.cost)
    keys = keys_of(ring, Credentials(secret=secret), metadata)
    assert keys is not None, "the ledger was made with a secret"
    ledger = RemoteLedger(metadata, 0, b"")
    ledger.unlock(keys, LedgerSeal(keys, entry_digest(metadata.digest_type, metadata.ledger_id, keys.entry_key)))
    return ledger


class BookieDirectory:
    """The directory of a bookie that has ended.

    Args:
        bookie_id: The bookie.
        path: Its directory.
    """

    def __init__(self, bookie_id: str, path: str) -> None:
        self.bookie_id = bookie_id
        self.replicas = Replicas.open(path, config=StoreConfig())
        """The replicas in the directory."""

    def close(self) -> None:
        """Close the directory, so that another process can open it."""
        self.replicas.close()

    def check(self, ledger: RemoteLedger, first: int, last: int, source: Source) -> ReplicaContents:
        """Read the entries of a fragment, verify each digest, and compare each entry with its line of the input.

        Raises:
            DigestMismatchError: The digest of an entry does not match.
            LostEntryError: An entry differs from the line that was written, or cannot be read.
        """
        lines = islice(chain.from_iterable(source.repeated()), first, None)
        missing = []
        payload_bytes = 0
        at = first
        while at <= last:
            batch = self._read(ledger, at, last)
            if batch is None:
                missing.append(at)
                next(lines)
                at += 1
                continue
            ledger.digest.check_many(batch)
            for index, entry_id in enumerate(batch.entry_ids.tolist()):
                payload = bytes(batch.payload(index))
                if entry_id != at + index or payload != next(lines):
                    raise LostEntryError(
                        f"ledger {ledger.ledger_id} entry {entry_id} of {self.bookie_id} is not the line that was "
                        "written"
                    )
                payload_bytes += len(payload)
            at += len(batch)
        return ReplicaContents(self.bookie_id, last - first + 1 - len(missing), payload_bytes, missing)

    def _read(self, ledger: RemoteLedger, first: int, last: int) -> EntryBatch | None:
        """Return entries from ``first`` on; None if the bookie does not hold entry ``first``."""
        status, run = self.replicas.read(ledger.ledger_id, first, last, 1, READ_BYTES)
        if run is not None:
            return ledger.batch_of(run, whole(run))
        if status in (Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER):
            return None
        raise LostEntryError(
            f"ledger {ledger.ledger_id} entry {first} of {self.bookie_id} cannot be read: {status.name}"
        )
