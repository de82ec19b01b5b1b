"""Limbo repair: copies the entries that a bookie may have lost back from its peers, and ends the limbo of its ledgers.

Theory of operation
-------------------

*Limbo* is BookKeeper's word (``limbo`` in its bookie) for a ledger of a bookie that ended by accident: it may lack
entries or a fence that it acknowledged, and it does not know which. Until the limbo ends the bookie refuses writers,
and answers reads of entries that it lacks with *unknown* (D6 in ``docs/design/replication.md``). ``LimboRepair`` runs
in the process of the bookie and ends limbo, ledger by ledger:

| metadata of the ledger | action |
|---|---|
| deleted | none: the bookie drops the ledger once it has seen the tombstone twice |
| gone without a tombstone | none, and a line in the log: it is an orphan, whose peers are unknown |
| in recovery | wait: the recovery may have fenced the ledger here, and the fence may be lost |
| a fragment of this bookie has no end yet | wait: the writer replaces this bookie, or a recovery closes the ledger |
| otherwise | copy the entries that this bookie lacks in each of its fragments, then end the limbo |

The writer or recovery that it waits for may have died. So after ``WAIT_SECONDS`` it marks the ledger as
under-replicated, because entries may be missing here. The auditor then looks for a sign of life of the writer, and
without one the ledger waits for its owner, or a member recovers it.

Limbo that waits for a recovery does not block the recovery. Once the recovery has fenced this bookie durably, the
bookie may deny it the entries that it lacks: they were never forced here, and after the fence they never will be, so
this bookie never counts for them. Where durable entries may be missing, the bookie denies nothing, and the other
bookies of the ensemble must suffice.

An open ledger was never fenced, because a recovery marks the metadata before it fences (AR1). A closed ledger may have
been fenced, so ``end_limbo(closed=True)`` fences it again.

A ledger whose repair fails is tried again after a pause that doubles, from ``RETRY_SECONDS`` to ``PAUSE_MAX_SECONDS``.
One thread does all of this, so its fields need no lock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

from pybk.client.remote_ledger import RemoteLedger
from pybk.client.rereplication import FragmentCopy
from pybk.errors import LedgerDeletedError, NoSuchLedgerError, PybkError
from pybk.ledger.ledger_metadata import LedgerState
from pybk.replication.fragments import fragment_end
from pybk.replication.rereplication import RereplicationMachine
from pybk.threads import start_thread
from pybk.values import listed

if TYPE_CHECKING:
    from pybk.client.driver import Driver
    from pybk.client.membership import Membership
    from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 2.0
"""Seconds between two passes while any ledger is in limbo, and the first pause of a ledger that failed."""

REST_FACTOR: Final = 5
"""Factor on that while no ledger is in limbo: ledgers enter limbo when the bookie starts, and hardly ever later."""

WAIT_SECONDS: Final = 10.0
"""Seconds that a ledger in limbo waits for its last fragment's end before it is marked; writers need less."""

PAUSE_MAX_SECONDS: Final = 60.0
"""The longest pause before a ledger that could not be repaired is tried again."""


class LimboBookie(Protocol):
    """A bookie, as the repair of its limbo uses it."""

    @property
    def bookie(self) -> Bookie:
        """Its name and instance."""

    def in_limbo(self) -> list[int]:
        """Return the ledgers in limbo."""

    def end_limbo(self, ledger_id: int, *, closed: bool) -> None:
        """End the limbo of a ledger; any thread.

        Args:
            ledger_id: The ledger.
            closed: Whether it is closed, and so is fenced again; if False, it was open after the limbo began.
        """


class LimboRepair:
    """Repairs ledgers in limbo in the background, from its creation until ``stop``; see the module.

    Args:
        driver: Runs the copies.
        membership: Reads the metadata.
        bookie: The bookie of this process.

    Raises:
        StorageRefusedError: The operating system gives no thread.

    Threads: one of its own; ``stop`` any.
    """

    def __init__(self, driver: Driver, membership: Membership, bookie: LimboBookie) -> None:
        self._driver = driver
        self.membership = membership
        """The bookies of the cluster, and its metadata."""
        self.bookie = bookie
        """The bookie whose ledgers are repaired."""
        self.stopping = threading.Event()
        """Set to end the thread."""
        self.pauses: dict[int, tuple[float, float]] = {}
        """The next pause in seconds, and the monotonic time of the next try, by ledger in limbo that was tried."""
        self.waits: dict[int, float] = {}
        """The monotonic time when a ledger in limbo that waits for an end is marked, by ledger; infinite once it is."""
        self.orphans: set[int] = set()
        """The ledgers in limbo that had neither metadata nor a tombstone when they were looked at."""
        self._thread = threading.Thread(target=self._run, name="pybk-limbo", daemon=True)
        start_thread(self._thread)

    def _run(self) -> None:
        while not self.stopping.is_set():
            self.stopping.wait(RETRY_SECONDS * (1 if self.look() else REST_FACTOR))

    def look(self) -> bool:
        """Repair each ledger in limbo whose pause is over; return whether any ledger is in limbo."""
        in_limbo = self.bookie.in_limbo()
        known = self.orphans.intersection(in_limbo)
        self.orphans = set(known)
        self.pauses = {each: self.pauses[each] for each in in_limbo if each in self.pauses}
        self.waits = {each: self.waits[each] for each in in_limbo if each in self.waits}
        for ledger_id in in_limbo:
            if self.stopping.is_set():
                break
            pause, until = self.pauses.get(ledger_id, (RETRY_SECONDS, 0.0))
            if time.monotonic() >= until and self.try_repair(ledger_id):
                self.pauses[ledger_id] = min(2 * pause, PAUSE_MAX_SECONDS), time.monotonic() + pause
        if new := self.orphans - known:
            logger.warning(
                "%d ledgers stay in limbo at %s, as they have neither metadata nor a tombstone: %s; bring back their "
                "metadata (pybk metadata restore, or rebuild), or empty the bookie and replace it",
                len(new),
                self.bookie.bookie,
                listed(sorted(new)),
            )
        return bool(in_limbo)

    def try_repair(self, ledger_id: int) -> bool:
        """Repair a ledger, or log why that failed; return False if it has to wait, which costs one metadata read."""
        try:
            return self.repair(ledger_id)
        except PybkError as error:
            logger.warning("ledger %d stays in limbo at %s: %s", ledger_id, self.bookie.bookie, error)
        except Exception:  # this thread must survive, or no ledger would be repaired any more
            logger.exception("ledger %d stays in limbo at %s", ledger_id, self.bookie.bookie)
        return True

    def repair(self, ledger_id: int) -> bool:
        """Fill up the fragments of a ledger, and end its limbo; False if that has to wait, see the module."""
        try:
            metadata, version = self.membership.metadata.read_ledger(ledger_id)
        except LedgerDeletedError:
            return False  # the bookie drops it once it has seen the tombstone twice
        except NoSuchLedgerError:
            self.orphans.add(ledger_id)
            return False
        own = [number for number, each in enumerate(metadata.fragments) if self.bookie.bookie in each.ensemble]
        unended = bool(own) and fragment_end(metadata, own[-1]) is None
        if unended or metadata.state is LedgerState.IN_RECOVERY:
            if unended:
                self.wait(ledger_id, metadata.fragments[own[-1]].first_entry_id)
            return False
        for number in own:
            self.fill(metadata, version, metadata.fragments[number].first_entry_id)
        self.bookie.end_limbo(ledger_id, closed=metadata.state is LedgerState.CLOSED)
        return True

    def wait(self, ledger_id: int, first_entry_id: int) -> None:
        """Note that a ledger waits for the end of the fragment that begins with an entry; mark it after a while."""
        now = time.monotonic()
        if now >= self.waits.setdefault(ledger_id, now + WAIT_SECONDS):
            self.membership.metadata.mark_under_replicated(ledger_id, self.bookie.bookie, first_entry_id)
            self.waits[ledger_id] = math.inf

    def fill(self, metadata: LedgerMetadata, version: int, first_entry_id: int) -> None:
        """Copy a fragment's entries from its other bookies to this one; entries that this one has are only compared."""
        ledger = RemoteLedger(metadata, version, self.membership.metadata.describe(metadata))
        own = frozenset((self.bookie.bookie,))
        copy = FragmentCopy(
            self._driver, ledger, RereplicationMachine(metadata.ledger_id, first_entry_id, own, stay=own)
        )
        self._driver.run(copy, copy.machine.start)

    def stop(self) -> None:
        """Stop the thread; returns when the copy under way has ended."""
        self.stopping.set()
        if self._thread.is_alive():
            self._thread.join()
