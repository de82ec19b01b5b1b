"""Replica check: reads one bookie's replica of a fragment, and finds entries that it misses or has damaged.

BookKeeper's Auditor finds bookies that are lost; this checks one that answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from pybk.client.driver import Conversation
from pybk.client.reader import REPLY_BYTES_MAX
from pybk.client.remote_ledger import RemoteLedger, batch_of
from pybk.ledger.ledger_check import LengthCheck
from pybk.replication.entry_runs import whole
from pybk.replication.fragments import fragment_end
from pybk.replication.messages import Effect, EntriesRead
from pybk.replication.replica_check import ReplicaCheckMachine, ReplicaProblem, ReplicasCheck

if TYPE_CHECKING:
    from pybk.client.backend import ClusterBackend
    from pybk.client.driver import Driver
    from pybk.ledger.digest import EntryDigest

_WINDOW_MIN: Final = 64


class ReplicaCheck(Conversation[ReplicaCheckMachine]):
    """Reads one bookie's replica of a fragment; keeps counts and lengths, and not the entries.

    Attributes:
        entries: The number of sound entries that were read.
        bytes: Their encoded bytes.
        lengths: Checks the ledger's length in each entry against the others.
    """

    entries = 0
    bytes = 0

    def __init__(self, driver: Driver, ledger: RemoteLedger, machine: ReplicaCheckMachine) -> None:
        super().__init__(driver, ledger, machine)
        self.lengths: Final = LengthCheck(ledger.metadata)

    def take(self, effect: Effect) -> None:
        """Count sound entries; end when the machine has ended."""
        if type(effect) is EntriesRead:
            self.entries += len(effect.run.sizes)
            self.bytes += sum(effect.run.sizes)
            self.lengths.add(batch_of(effect.run, whole(effect.run), self.ledger.ledger_id, 0), effect.run.stride)
        else:
            self.end()


def check_replica(
    driver: Driver,
    ledger: RemoteLedger,
    place: int,
    first: int,
    last: int,
    *,
    digest: EntryDigest | None,
    entry_bytes: int,
    entries: Iterable[int] | None = None,
) -> ReplicaCheck:
    """Read the entries that one bookie should have, from that bookie alone, and check them.

    Args:
        driver: Sends the reads.
        ledger: The ledger; its password is not needed.
        place: The bookie's position in the ensemble.
        first: First entry; it also selects the fragment.
        last: Last entry, inclusive, of the same fragment.
        digest: Verifies the entries. None: the bookie verifies its record checksums, and only ledger and entry ids are
            compared here.
        entry_bytes: The average encoded length of the entries, which sets how many are asked for at a time.
        entries: Read only these; None reads all.

    Returns:
        The check; its ``machine`` has the ids of the entries that are missing, damaged or unknown.
    """
    if digest is not None:
        ledger.check_by(digest)
    machine = ReplicaCheckMachine(
        ledger.metadata,
        place,
        first,
        last,
        bytes_max=REPLY_BYTES_MAX,
        window=max(_WINDOW_MIN, REPLY_BYTES_MAX // max(entry_bytes, 1)),
        checked=digest is None or digest.size == 0,
        entries=entries,
    )
    check = ReplicaCheck(driver, ledger, machine)
    driver.run(check, machine.start)
    return check


def check_replicas(backend: ClusterBackend, ledger_id: int) -> ReplicasCheck:
    """Read all copies of all entries of a ledger, checked by the bookies; fragments without an end are left out.

    Raises:
        NoSuchLedgerError: It was never created, or was deleted.
    """
    metadata, version = backend.membership.metadata.read_ledger(ledger_id)
    description = backend.membership.metadata.describe(metadata)
    entry_bytes = metadata.length // max(metadata.last_entry_id + 1, 1)
    problems, copies, read_bytes = [], 0, 0
    for number, fragment in enumerate(metadata.fragments):
        first, end = fragment.first_entry_id, fragment_end(metadata, number)
        if end is None or end < first:
            continue
        for place, bookie in enumerate(fragment.ensemble):
            ledger = RemoteLedger(metadata, version, description)
            check = check_replica(backend.driver, ledger, place, first, end, digest=None, entry_bytes=entry_bytes)
            copies += check.entries
            read_bytes += check.bytes
            found = check.machine
            problem = ReplicaProblem(bookie, first, found.missing, found.damaged, found.unknown, found.silent)
            if any(problem[2:]):
                problems.append(problem)
    return ReplicasCheck(ledger_id, copies, read_bytes, tuple(problems))
