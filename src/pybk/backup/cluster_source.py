"""The ledgers of a cluster as a source: closed ledgers, and the confirmed prefix of open ones.

A run does not have the cluster's state at one moment, because nothing orders the ledgers of different bookies. Each
ledger is copied up to an end that was confirmed. The report names ledgers that cannot be copied; the others are copied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pybk.backup.checking import LedgerChecks
from pybk.backup.manifest import CLUSTER, SourceIdentity
from pybk.backup.source import Cut, LedgerCut
from pybk.client.backend import ClusterBackend
from pybk.client.reader import Reading
from pybk.errors import NoSuchLedgerError, PybkError
from pybk.ledger.digest import DigestType, entry_digest
from pybk.ledger.ledger_check import digest_with
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager, backend_of

if TYPE_CHECKING:
    from pybk.client.remote_ledger import RemoteLedger
    from pybk.credentials import Passwords
    from pybk.ledger.entry import EntryBatch

_NOT_CLOSED: Final = (
    "ledger {} is not closed, and only its password proves up to where it is confirmed: give the password, or close "
    "the ledger"
)


class ClusterSource:
    """The ledgers of a cluster; see ``Source``.

    Args:
        manager: A manager that is connected to the cluster.
        passwords: The known passwords.
    """

    has_replicas = True

    def __init__(self, manager: LedgerManager, passwords: Passwords) -> None:
        backend = backend_of(manager)
        assert isinstance(backend, ClusterBackend), "there are two backends"
        self._manager = manager
        self._backend = backend
        self._checks = LedgerChecks(self.identity, passwords)
        self._read: tuple[int, RemoteLedger] | None = None
        """The ledger that was read last."""

    @property
    def identity(self) -> SourceIdentity:
        """The cluster's id, and the salt and the cost of its passwords."""
        return SourceIdentity(CLUSTER, *self._backend.identity, 0)

    def cut(self) -> Cut:
        """See ``Source``; makes requests to bookies for each ledger that is not closed."""
        ledgers: list[LedgerCut] = []
        left_out: dict[int, str] = {}
        for found in self._backend.ledgers():
            # The fragments and the version belong to the cluster, not to the backup.
            metadata = replace(found, fragments=(), version=0)
            try:
                cut = self._cut_of(metadata)
            except NoSuchLedgerError:
                continue
            except PybkError as error:
                left_out[metadata.ledger_id] = str(error)
                continue
            if cut is None:
                left_out[metadata.ledger_id] = _NOT_CLOSED.format(metadata.ledger_id)
            else:
                ledgers.append(cut)
        return Cut(0, 0, 0, ledgers, (), left_out)

    def _cut_of(self, metadata: LedgerMetadata) -> LedgerCut | None:
        """Return a ledger up to its end, or up to its last add confirmed; None if that takes an unknown password."""
        if metadata.state is LedgerState.CLOSED:
            last = metadata.last_entry_id
            return LedgerCut(metadata, last, last, metadata.length)
        given = self._checks.credentials_of(metadata)
        if given is None:
            return None
        with self._manager.open_ledger(
            metadata.ledger_id, password=given.password, secret=given.secret, recover=False
        ) as reader:
            last = reader.read_last_add_confirmed()
            length = reader.read_batch(last)[0].length if last >= 0 else 0
        return LedgerCut(metadata, last, last, length)

    def read(self, metadata: LedgerMetadata, first: int, last: int, max_bytes: int) -> EntryBatch:
        """See ``Source``; the nearest bookie with a sound copy is read. The scrub repairs damaged copies."""
        ledger_id = metadata.ledger_id
        if self._read is None or self._read[0] != ledger_id:
            ledger = self._backend.descriptor(ledger_id)
            digest = digest_with(self._checks.seal_of(metadata), metadata, ledger_id)
            ledger.check_by(digest or entry_digest(DigestType.NONE, ledger_id))
            self._read = ledger_id, ledger
        ledger, membership = self._read[1], self._backend.membership
        shared = membership.reads_are_shared
        reading = Reading(self._backend.driver, ledger, first, last, max_bytes, membership.rank(), shared=shared)
        try:
            self._backend.driver.run(reading, reading.machine.start)
            return reading.batch()
        except PybkError:
            self._read = None
            self._backend.metadata(ledger_id)  # raises if the ledger was deleted meanwhile
            raise
