"""The drop of surplus copies: a bookie finds entries of ledgers that no longer name it, and deletes them.

Theory of operation
-------------------

``SurplusDrops`` runs in the process of a bookie. Each ``look`` takes the next page of the ledgers of which the bookie
has entries or a fence, and reads their metadata at once. So a *pass* over all of them costs one request per page. It is
paced by ``pause_s``, the time to the next page, so a pass takes ``delay_s``.

| metadata of the ledger | action |
|---|---|
| not closed, or a fragment names the bookie | none |
| closed, no fragment names it, and entries are here | noted with its version and the time |
| the same again at the same version, after ``delay_s`` | the copy is dropped by ``SurplusDropMachine`` |
| the same, but a mark says that a bookie misses entries of it | kept: re-replication is due |
| deleted | none: the bookie drops the ledger by its tombstone |
| no key | an *orphan*: listed, and never deleted, because a missing key proves nothing |

Notes are kept in memory alone, because a restart only makes each copy stay longer. ``docs/design/replication.md``
(*Surplus copies*) has the rules and why they suffice.
"""

from __future__ import annotations

import logging
import threading
import time
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.client.driver import Conversation
from pybk.client.machine_errors import error_of
from pybk.client.remote_ledger import RemoteLedger
from pybk.errors import PybkError, StorageError
from pybk.healing import chores
from pybk.healing.chores import Rounds
from pybk.metadata.ledgers import LEDGERS_PAGE
from pybk.replication.messages import AnnounceDrop, Done, DropAnnounced, DropEnded, DropEntries, Effect, Event, Failed
from pybk.replication.surplus import SurplusDropMachine, is_surplus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pybk.bookie.server import BookieServer
    from pybk.client.driver import Driver
    from pybk.client.membership import Membership
    from pybk.metadata.ledgers import StoredLedger
    from pybk.replication.bookie import BookieEffect

logger = logging.getLogger(__name__)

DELAY_SECONDS: Final = 3600.0
"""The time for which a copy is kept after it was found surplus, and the duration of a pass over all ledgers."""


class SurplusCopy(NamedTuple):
    """A copy that was found surplus.

    Attributes:
        version: The version of the ledger's metadata, unchanged since the copy was found surplus.
        since: The time when it was found, by the monotonic clock.
        size_bytes: Its payload bytes, about.
    """

    version: int
    since: float
    size_bytes: int


class _Drop(Conversation[SurplusDropMachine]):
    """The conversation that drops one copy."""

    def __init__(self, driver: Driver, ledger: RemoteLedger, machine: SurplusDropMachine, host: BookieServer) -> None:
        super().__init__(driver, ledger, machine)
        self._host: Final = host

    def take(self, effect: Effect) -> None:
        """Have the bookie do its part; end when the machine has ended, with its error if it failed."""
        if type(effect) is AnnounceDrop:
            self._host.post(self._announce)
        elif type(effect) is DropEntries:
            self._host.post(self._drop)
        elif type(effect) is Done:
            self.end()
        elif type(effect) is Failed:
            self.end(error_of(effect))

    def _announce(self) -> list[BookieEffect]:
        """Announce the drop; runs in the bookie's serving thread."""
        self._pass(DropAnnounced(self._host.machine.announce_drop(self.ledger.ledger_id)))
        return []

    def _drop(self) -> list[BookieEffect]:
        """Drop the entries; runs in the bookie's serving thread."""
        dropped, effects = False, list["BookieEffect"]()
        try:
            dropped, effects = self._host.machine.drop_entries(self.ledger.ledger_id)
        except StorageError as error:
            logger.warning("ledger %d: its surplus copy cannot be dropped now: %s", self.ledger.ledger_id, error)
        finally:
            self._pass(DropEnded(dropped))
        return effects

    def _pass(self, event: Event) -> None:
        self.driver.post(lambda: self.driver.pass_event(self, event))


class SurplusDrops(Rounds):
    """Finds and drops the surplus copies of the bookie of this process; see the module. A chore.

    Args:
        driver: Runs the drops.
        membership: Reads the metadata.
        bookie: The bookie.
        delay_s: Seconds for which a copy is kept after it was found surplus.

    Attributes:
        copies: The copies that were found surplus and are still there, by ledger.
        orphans: Ledgers of which the bookie has entries or a fence, and the metadata store has no key.
        dropped: The number of copies that were dropped.
        stopping: An event that ends a ``look`` before its next drop; any thread may set it.

    Threads: one at a time calls ``look`` or does what is ``due``; any may read the attributes.
    """

    def __init__(
        self, driver: Driver, membership: Membership, bookie: BookieServer, *, delay_s: float = DELAY_SECONDS
    ) -> None:
        super().__init__(self._look_round, "no surplus copies are dropped now")
        self._driver = driver
        self._membership = membership
        self._bookie = bookie
        self._random = Random()
        self._left: list[int] = []
        """The ledgers of this pass that were not looked at, descending."""
        self._looked_at = time.monotonic()
        self.delay_s = delay_s
        self.copies: dict[int, SurplusCopy] = {}
        self.orphans: set[int] = set()
        self.dropped = 0
        self.stopping = threading.Event()

    @property
    def surplus_bytes(self) -> int:
        """The payload bytes, about, of the surplus copies that were found and not dropped yet."""
        return sum(copy.size_bytes for copy in list(self.copies.values()))

    @property
    def passed(self) -> bool:
        """True if the last ``look`` took the last page of a pass; then ``orphans`` has all of them."""
        return not self._left

    @property
    def pause_s(self) -> float:
        """Seconds until the next ``look``, by which a pass over all ledgers takes ``delay_s``."""
        return self.delay_s / max(1, -(-len(self._bookie.replicas.ledgers()) // LEDGERS_PAGE))

    def _look_round(self) -> Iterator[float]:
        """Look at one page, once that is due and the cluster is quiet; yields the seconds to rest before it continues.

        Nothing is dropped while there is no auditor, while it holds repairs, or while repairs are paused: each of these
        says that what the metadata name may not be what there is.
        """
        yield chores.LOOK_S
        metadata = self._membership.metadata
        self.delay_s = metadata.current_settings().repair.surplus_delay_s
        if time.monotonic() >= self._looked_at + self.pause_s and metadata.is_quiet(time.time_ns()):
            self._looked_at = time.monotonic()
            for _ in self._drop_page():
                yield 0.0
            if self.passed:
                metadata.record_orphans(self._bookie.bookie, self.orphans)

    def look(self) -> int:
        """Look at the next page of ledgers, and drop the copies that were surplus for long enough.

        Returns:
            The number of dropped copies. A copy that cannot be dropped now stays noted, and the next pass tries it
            again.

        Raises:
            MetadataError: The metadata store cannot be reached; the next call takes the same page.

        Cost: One read of the metadata store for the page; for each drop a read of the marks, a write, about a dozen
            reads of single entries from other bookies, and a synced write of this bookie for each extent.
        """
        return sum(self._drop_page())

    def _drop_page(self) -> Iterator[bool]:
        """Look at the next page, and yield after each copy that is due whether it was dropped."""
        if not self._left:
            self._begin_pass()
        page = self._left[: -LEDGERS_PAGE - 1 : -1]
        for found in self.find_surplus(page):
            if self.stopping.is_set():
                break
            if self._is_due(found):
                yield self._drop(found)
        del self._left[-len(page) :]

    def _begin_pass(self) -> None:
        """List the ledgers for another pass, and forget those that are gone."""
        ids = self._bookie.replicas.ledgers()
        known = set(ids)
        self.copies = {ledger_id: copy for ledger_id, copy in self.copies.items() if ledger_id in known}
        self.orphans &= known
        self._left = ids[::-1]

    def find_surplus(self, page: Sequence[int]) -> list[StoredLedger]:
        """Note the surplus copies of a page of ledgers, and the orphans.

        Args:
            page: Ids of ledgers.

        Returns:
            The ledgers whose surplus copies were noted before, at the same version of the metadata.
        """
        metadata = self._membership.metadata

        def log(ledger_id: int, error: PybkError) -> None:
            logger.warning("whether the copy of ledger %d is surplus cannot be told: %s", ledger_id, error)

        surplus = []
        without: list[int] = []
        for ledger_id, found in zip(page, metadata.read_ledgers(page, damaged=log), strict=True):
            if found is None:
                without.append(ledger_id)
            elif is_surplus(found.metadata, self._bookie.bookie):
                surplus += [found] if self._note(found) else []
                continue
            self.copies.pop(ledger_id, None)
        versions = metadata.ledger_versions(without)
        self.orphans -= set(page)
        self.orphans |= {ledger_id for ledger_id, version in zip(without, versions, strict=True) if version is None}
        return surplus

    def _note(self, found: StoredLedger) -> bool:
        """Note a surplus copy, unless there are no entries here; return whether it was noted before at this version."""
        ledger_id = found.metadata.ledger_id
        noted = self.copies.get(ledger_id)
        if noted is not None and noted.version == found.version:
            return True
        self.copies.pop(ledger_id, None)
        entries = self._bookie.replicas.count_entries(ledger_id)
        if entries:
            size_bytes = found.metadata.length * entries // max(1, found.metadata.last_entry_id + 1)
            self.copies[ledger_id] = SurplusCopy(found.version, time.monotonic(), size_bytes)
        return False

    def _is_due(self, found: StoredLedger) -> bool:
        """Return whether a copy was surplus at this version for long enough (SD1), and its ledger has no mark."""
        ledger_id = found.metadata.ledger_id
        if time.monotonic() - self.copies[ledger_id].since < self.delay_s:
            return False
        return not self._membership.metadata.is_marked(ledger_id)

    def _drop(self, found: StoredLedger) -> bool:
        """Drop one copy; return whether that was done, and log why not."""
        ledger_id = found.metadata.ledger_id
        ledger = RemoteLedger(found.metadata, found.version, self._membership.metadata.describe(found.metadata))
        machine = SurplusDropMachine(found.metadata, found.version, self._bookie.bookie, self._random)
        drop = _Drop(self._driver, ledger, machine, self._bookie)
        try:
            self._driver.run(drop, machine.start)
        except PybkError as error:
            logger.info("%s", error)
            return False
        del self.copies[ledger_id]
        self.dropped += 1
        logger.info("ledger %d: its surplus copy at %s was dropped", ledger_id, self._bookie.bookie)
        return True
