"""The end of limbo: a bookie that may have lost entries gets them back from its peers."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

from pybk.client.remote_ledger import RemoteLedger
from pybk.client.rereplication import FragmentCopy
from pybk.errors import NoSuchLedgerError, PybkError
from pybk.ledger import LedgerState
from pybk.replication.fragments import fragment_end
from pybk.replication.rereplication import RereplicationMachine
from pybk.storage.io.failures import start_thread

if TYPE_CHECKING:
    from pybk.client.driver import Driver
    from pybk.client.membership import Membership
    from pybk.ledger import Bookie, LedgerMetadata

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 2.0
"""How often it looks what is in limbo while something is."""

REST_FACTOR: Final = 5
"""How much longer it rests while nothing is: ledgers get into limbo when the bookie starts, and hardly later."""

PAUSE_MAX_SECONDS: Final = 60.0
"""The longest pause before it tries again what could not be mended; the pauses grow."""


class LimboBookie(Protocol):
    """A bookie some of whose ledgers may be in limbo."""

    @property
    def bookie(self) -> Bookie:
        """Its name and instance."""

    def in_limbo(self) -> list[int]:
        """Return the ledgers in limbo."""

    def end_limbo(self, ledger_id: int, *, closed: bool) -> None:
        """End a ledger's limbo, which is closed or, else, was open after the limbo began; any thread."""


class LimboRepair:
    """Brings back what ledgers in limbo may lack, in the background, whenever there are any.

    A fragment that has an end is filled up from its other bookies. The open last fragment of a ledger has to wait: its
    writer is refused here and takes another bookie, or a recovery closes the ledger. It can, as bookies in limbo answer
    its reads: what was never forced was never confirmed. Where durable entries may be missing, they answer nothing, and
    its other bookies have to do.

    A ledger in recovery has to wait, too: the recovery may have fenced it here, and the fence be lost. An open one was
    never fenced, as recoveries mark it before (AR1); a closed one is fenced anew.

    Threads: one of its own, until ``stop``.
    """

    def __init__(self, driver: Driver, membership: Membership, bookie: LimboBookie) -> None:
        self._driver = driver
        self._membership = membership
        self._bookie = bookie
        self._stopping = threading.Event()
        self._pauses: dict[int, tuple[float, float]] = {}
        self._thread = threading.Thread(target=self._run, name="pybk-limbo", daemon=True)
        start_thread(self._thread)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._stopping.wait(RETRY_SECONDS * (1 if self._look() else REST_FACTOR))

    def _look(self) -> bool:
        """Repair the ledgers in limbo, except those that failed a short time ago; return whether there were any."""
        in_limbo = self._bookie.in_limbo()
        self._pauses = {each: self._pauses[each] for each in in_limbo if each in self._pauses}
        for ledger_id in in_limbo:
            if self._stopping.is_set():
                break
            pause, until = self._pauses.get(ledger_id, (RETRY_SECONDS, 0.0))
            if time.monotonic() >= until and self._try(ledger_id):
                self._pauses[ledger_id] = min(2 * pause, PAUSE_MAX_SECONDS), time.monotonic() + pause
        return bool(in_limbo)

    def _try(self, ledger_id: int) -> bool:
        """Repair a ledger, and return whether entries were copied for that, or would have been."""
        try:
            return self._repair(ledger_id)
        except PybkError as error:
            logger.warning("ledger %d stays in limbo at %s: %s", ledger_id, self._bookie.bookie, error)
        except Exception:  # or no ledger would be mended any more
            logger.exception("ledger %d stays in limbo at %s", ledger_id, self._bookie.bookie)
        return True

    def _repair(self, ledger_id: int) -> bool:
        """Fill up the fragments of one ledger, and lift its limbo; False if something may be missing still."""
        try:
            metadata, version = self._membership.metadata.read_ledger(ledger_id)
        except NoSuchLedgerError:
            return False  # dropped when its tombstone was seen twice
        if metadata.state is LedgerState.IN_RECOVERY:
            return False
        own = [number for number, each in enumerate(metadata.fragments) if self._bookie.bookie in each.ensemble]
        if any(fragment_end(metadata, number) is None for number in own):
            return False
        for number in own:
            self._fill(metadata, version, metadata.fragments[number].first_entry_id)
        self._bookie.end_limbo(ledger_id, closed=metadata.state is LedgerState.CLOSED)
        return True

    def _fill(self, metadata: LedgerMetadata, version: int, first_entry_id: int) -> None:
        """Copy a fragment's entries from its other bookies to this one; those that are here are only compared."""
        ledger = RemoteLedger(metadata, version, self._membership.metadata.describe(metadata))
        own = frozenset((self._bookie.bookie,))
        copy = FragmentCopy(
            self._driver, ledger, RereplicationMachine(metadata.ledger_id, first_entry_id, own, stay=own)
        )
        self._driver.run(copy, copy.machine.start)

    def stop(self) -> None:
        """Mend no more; returns when the copy under way has ended."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
