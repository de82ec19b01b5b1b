"""The end of limbo: a bookie that may have lost entries gets them back from its peers."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final, Protocol

from pybk.client.ledger import RemoteLedger
from pybk.client.replicating import Copying
from pybk.errors import NoSuchLedgerError, PybkError
from pybk.ledger import LedgerState
from pybk.replication.copying import CopyMachine, fragment_end

if TYPE_CHECKING:
    from pybk.client.directory import Directory
    from pybk.client.engine import Engine
    from pybk.ledger import Bookie, LedgerMetadata

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 2.0


class LimboBookie(Protocol):
    """A bookie some of whose ledgers may be in limbo."""

    @property
    def bookie(self) -> Bookie:
        """Its name and instance."""

    def in_limbo(self) -> list[int]:
        """Return the ledgers in limbo."""

    def lift_limbo(self, ledger_id: int, *, closed: bool) -> None:
        """End a ledger's limbo, which is closed or, else, was open after the limbo began; any thread."""


class Mender:
    """Brings back what ledgers in limbo may lack, in the background, until none is left.

    A fragment that has an end is filled up from its other bookies. The open last fragment of a ledger has to wait: its
    writer is refused here and takes another bookie, or a recovery closes the ledger. It can, as bookies in limbo answer
    its reads: what was never forced was never confirmed. Where durable entries may be missing, they answer nothing, and
    its other bookies have to do.

    A ledger in recovery has to wait, too: the recovery may have fenced it here, and the fence be lost. An open one was
    never fenced, as recoveries mark it before (AR1); a closed one is fenced anew.

    Threads: one of its own, which ends by itself.
    """

    def __init__(self, engine: Engine, directory: Directory, bookie: LimboBookie) -> None:
        self._engine = engine
        self._directory = directory
        self._bookie = bookie
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pybk-limbo", daemon=True)
        if bookie.in_limbo():
            self._thread.start()

    def _run(self) -> None:
        while (left := self._bookie.in_limbo()) and not self._stopping.is_set():
            for ledger_id in left:
                if self._stopping.is_set():
                    return
                try:
                    self._mend(ledger_id)
                except PybkError as error:
                    logger.warning("ledger %d stays in limbo at %s: %s", ledger_id, self._bookie.bookie, error)
            self._stopping.wait(RETRY_SECONDS)

    def _mend(self, ledger_id: int) -> None:
        """Fill up the fragments of one ledger; lift its limbo if nothing can be missing any more."""
        try:
            metadata, version = self._directory.metadata.read_ledger(ledger_id)
        except NoSuchLedgerError:
            return  # dropped when its tombstone was seen twice
        if metadata.state is LedgerState.IN_RECOVERY:
            return
        own = [number for number, each in enumerate(metadata.fragments) if self._bookie.bookie in each.ensemble]
        if any(fragment_end(metadata, number) is None for number in own):
            return
        for number in own:
            self._fill(metadata, version, metadata.fragments[number].first_entry_id)
        self._bookie.lift_limbo(ledger_id, closed=metadata.state is LedgerState.CLOSED)

    def _fill(self, metadata: LedgerMetadata, version: int, first_entry_id: int) -> None:
        """Copy a fragment's entries from its other bookies to this one; those that are here are only compared."""
        ledger = RemoteLedger(metadata, version, self._directory.metadata.describe(metadata))
        own = frozenset((self._bookie.bookie,))
        copying = Copying(self._engine, ledger, CopyMachine(metadata.ledger_id, first_entry_id, own, stay=own))
        self._engine.run(copying, copying.machine.start)

    def stop(self) -> None:
        """Mend no more; returns when the copy under way has ended."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
