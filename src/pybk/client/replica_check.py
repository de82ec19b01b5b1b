"""Audits: whether one bookie has everything that it should have of a fragment, as its writer made it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pybk.client.driver import Conversation
from pybk.client.reader import REPLY_BYTES_MAX
from pybk.client.remote_ledger import RemoteLedger, batch_of
from pybk.ledger_check import LengthCheck
from pybk.replication.entry_runs import whole
from pybk.replication.messages import Effect, EntriesRead
from pybk.replication.replica_check import ReplicaCheckMachine

if TYPE_CHECKING:
    from pybk.client.backend import ClusterBackend
    from pybk.client.driver import Driver
    from pybk.digest import EntryDigest
    from pybk.metadata.ledgers import StoredLedger

_WINDOW_MIN: Final = 64


class ReplicaCheck(Conversation[ReplicaCheckMachine]):
    """Reads one bookie's part of a fragment, and keeps nothing of it but how much it is, and what its lengths say.

    Attributes:
        entries: Entries that are as they should be.
        bytes: Their encoded bytes.
        lengths: What they say of the ledger's length.
    """

    entries = 0
    bytes = 0

    def __init__(self, driver: Driver, ledger: RemoteLedger, machine: ReplicaCheckMachine) -> None:
        super().__init__(driver, ledger, machine)
        self.lengths: Final = LengthCheck(ledger.metadata)

    def take(self, effect: Effect) -> None:
        """Count what came; end with the machine."""
        if type(effect) is EntriesRead:
            self.entries += len(effect.run.sizes)
            self.bytes += sum(effect.run.sizes)
            self.lengths.add(batch_of(effect.run, whole(effect.run), self.ledger.ledger_id, 0), effect.run.stride)
        else:
            self.end()


def check_replica(
    backend: ClusterBackend,
    stored: StoredLedger,
    place: int,
    first: int,
    last: int,
    *,
    digest: EntryDigest | None,
    entry_bytes: int,
) -> ReplicaCheck:
    """Read what one bookie should have, from it alone, and check it.

    Args:
        backend: The cluster.
        stored: The ledger as the metadata store has it.
        place: The bookie's place in the ensemble.
        first: First entry; it also selects the fragment.
        last: Last entry, inclusive, of the same fragment.
        digest: Checks the entries; None has the bookie check its records, and only the entries' names here.
        entry_bytes: About how long entries are.

    Returns:
        What came; its machine knows what did not.
    """
    ledger = RemoteLedger(stored.metadata, stored.version, backend.membership.metadata.describe(stored.metadata))
    if digest is not None:
        ledger.check_by(digest)
    machine = ReplicaCheckMachine(
        stored.metadata,
        place,
        first,
        last,
        bytes_max=REPLY_BYTES_MAX,
        window=max(_WINDOW_MIN, REPLY_BYTES_MAX // max(entry_bytes, 1)),
        checked=digest is None or digest.size == 0,
    )
    check = ReplicaCheck(backend.driver, ledger, machine)
    backend.driver.run(check, machine.start)
    return check
