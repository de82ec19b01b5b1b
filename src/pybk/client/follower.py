"""Following ledgers: each ledger has one long poll and one watch for all its followers in this client.

Theory of operation
-------------------

A follower is a thread or task that waits for the next entry of a ledger. Its descriptor calls ``follow``, which makes
it a member of the ledger's ``FollowedLedger``. That object has at most one long poll and one metadata watch, and lives
as long as any descriptor that followed the ledger. A follower is notified of changes as follows:

- **Entries.** ``LacReading`` sends a long poll to as many bookies of the last ensemble as it takes for each ack quorum
  to include one of them. A bookie keeps it until its LAC exceeds ``beyond``, at most for half a minute, or for two
  minutes if the previous poll brought no entry. The reply wakes all followers, and carries the newest entry, which
  saves its read. If a bookie does not answer, another one of the ensemble is asked at once (``LacMachine``).
- **End and ensembles.** The metadata store calls back when the ledger's metadata change. If its last ensemble changed,
  the new one is asked at once.
- **Answers too soon.** A bookie answers at once without a higher LAC if it has no proof yet of the LAC that it knows,
  or if it keeps too many long polls already. It is asked again: first at once, then after pauses that double from 1 ms
  to ``RETRY_NS``.
- **Failures.** If too few bookies answer, they are asked again after ``RETRY_NS``. The metadata are compared then as
  well, in case a callback was lost.

Nothing but a change wakes a follower. All long polls of a client end together, at multiples of ``FOLLOW_NS / 2`` since
it was opened, so many followers wake the client and the bookies seldom.

A follower that arrives while a reply is handled is never missed. ``_answered`` looks for waiting members after it has
cleared ``reading``, under the lock: a follower that comes before is seen there, and one that comes later finds no poll
under way and starts one in ``follow``.

Locks: ``_lock`` guards ``_followed`` and each ``members`` and ``reading``; ``FollowedLedger.setting`` is held while the
watch is set, because that may call the metadata store, during which ``_lock`` is never held.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

from pybk.client.reader import LacReading
from pybk.client.remote_ledger import FollowedLedger
from pybk.errors import LedgerDeletedError, PybkError

if TYPE_CHECKING:
    from pybk.client.driver import Driver
    from pybk.client.membership import Membership
    from pybk.client.remote_ledger import RemoteLedger

logger = logging.getLogger(__name__)

FOLLOW_NS: Final = 28_000_000_000
"""The time for which bookies keep a ledger's first long poll before they answer without a new entry.

A long poll stays at the bookie after its follower has gone, so the first ones are short.
"""

REST_FACTOR: Final = 4
"""The factor on ``FOLLOW_NS`` for the next long polls, until a new entry comes.

The product is below ``POLL_NS_MAX`` of bookies by a margin, so polls end when the client expects it. Bookies
before 0.2 answer after 30 s, and are asked again.
"""

RETRY_NS: Final = 1_000_000_000
"""Pause after a failed long poll. A reply without a new entry that takes less than this came too soon."""

_FIRST_PAUSE_NS: Final = 1_000_000
"""Pause after the second reply in a row that came too soon; each further pause is twice as long."""


class Followers:
    """The long polls and metadata watches of one client; see the module.

    Threads: any.
    """

    def __init__(self, driver: Driver, membership: Membership) -> None:
        self._driver = driver
        self._membership = membership
        self._lock = threading.Lock()
        self._followed: weakref.WeakValueDictionary[int, FollowedLedger] = weakref.WeakValueDictionary()
        self._began_ns = time.monotonic_ns()
        self._compared_ns = self._began_ns
        self._ended = False

    # ---- followers -----------------------------------------------------------------------------------------------

    def follow(self, ledger: RemoteLedger) -> None:
        """Make sure that a ledger's followers are woken at its next entry and its end; the caller is about to wait."""
        if ledger.is_final or self._ended:
            return
        followed = ledger.followed or self._join(ledger)
        if followed.watch is None:
            self._watch(followed)
        if followed.reading is None:
            self._ask(followed)

    def _join(self, ledger: RemoteLedger) -> FollowedLedger:
        """Make a descriptor a member of its ledger's shared state, and give it the LAC that the others know."""
        with self._lock:
            followed = self._followed.get(ledger.ledger_id)
            if followed is None:
                followed = self._followed[ledger.ledger_id] = FollowedLedger(ledger.ledger_id)
            known = max((member.last_add_confirmed for member in followed.members), default=-1)
            followed.members.add(ledger)
            ledger.followed = followed
        ledger.advance(known)
        return followed

    def _members(self, followed: FollowedLedger) -> list[RemoteLedger]:
        with self._lock:
            return list(followed.members)

    # ---- entries -------------------------------------------------------------------------------------------------

    def _ask(self, followed: FollowedLedger, *, pause_ns: int = 0, anew: bool = False) -> None:
        """Send a long poll for the next entry of a ledger.

        Args:
            followed: The ledger.
            pause_ns: Nanoseconds to wait before it is sent.
            anew: Send it even if a long poll is under way, whose reply is still used.
        """
        with self._lock:
            members = list(followed.members)
            if self._ended or not members or (followed.reading is not None and not anew):
                return
            ledger = max(members, key=lambda member: member.version)
            asked_ns = time.monotonic_ns() + pause_ns
            beyond = max(member.last_add_confirmed for member in members)
            reading = LacReading(
                self._driver,
                ledger,
                beyond=beyond,
                wait_ns=self.wait_ns(asked_ns, was_empty=followed.was_empty),
                pause_ns=pause_ns,
                retry_ns=RETRY_NS,
                rank=self._membership.rank(),
            )
            followed.reading = reading
            followed.asked_ns = asked_ns
            followed.beyond = beyond
            followed.ensemble = ledger.metadata.fragments[-1].ensemble
        for member in members:  # one member may know a later LAC than the others
            member.advance(beyond)
        self._driver.start(reading, reading.machine.start)
        self._driver.group.when_done(reading.completion, lambda: self._answered(followed, reading))
        self._driver.group.announce()  # a leader that pauses would send the poll after its pause, up to 1 s later

    def wait_ns(self, now_ns: int, *, was_empty: bool) -> int:
        """Return the time for which bookies may keep a poll sent now; the polls of all ledgers then end together."""
        step_ns = FOLLOW_NS // 2
        return FOLLOW_NS * (REST_FACTOR if was_empty else 1) - (now_ns - self._began_ns) % step_ns

    def _answered(self, followed: FollowedLedger, reading: LacReading) -> None:
        """Give the reply of a long poll to all members, and send the next poll if a follower still waits."""
        error = reading.completion.error
        if error is None:
            for member in self._members(followed):
                member.advance(reading.last_add_confirmed, reading.ledger.newest)
        with self._lock:
            if followed.reading is not reading:
                return  # another ensemble was asked meanwhile
            followed.reading = None
            waited_for = followed.waiting()  # only now: see the module
        moved = reading.last_add_confirmed > followed.beyond
        followed.was_empty = not moved
        if moved:
            followed.soon = 0
        if self._ended or not waited_for:
            return
        pause_ns = 0
        if moved or (error is None and time.monotonic_ns() - followed.asked_ns >= RETRY_NS):
            followed.failing = False
            followed.soon = 0
            if not moved:
                self._compare_metadata(FOLLOW_NS // 4)
        else:
            pause_ns = RETRY_NS if error is not None else self._pause_ns(followed)
        if pause_ns == RETRY_NS:
            self._report(followed, error)
            self._compare_metadata(RETRY_NS // 2)
        self._ask(followed, pause_ns=pause_ns)

    def _pause_ns(self, followed: FollowedLedger) -> int:
        """Count one more reply that came too soon, and return the pause in nanoseconds before the next poll."""
        followed.soon += 1
        return 0 if followed.soon == 1 else min(_FIRST_PAUSE_NS << min(followed.soon - 2, 32), RETRY_NS)

    def _report(self, followed: FollowedLedger, error: PybkError | None) -> None:
        """Log that a ledger cannot be followed normally: once until a poll works again."""
        if not followed.failing:
            followed.failing = True
            logger.warning(
                "ledger %d: bookies do not report its next entry, and are asked again every second: %s",
                followed.ledger_id,
                error or "they answer at once, because they keep too many long polls",
            )

    # ---- metadata ------------------------------------------------------------------------------------------------

    def _watch(self, followed: FollowedLedger) -> None:
        """Watch a ledger's metadata; the watch is cancelled when its last follower is collected."""
        held = weakref.ref(followed)

        def changed() -> None:
            found = held()
            if found is not None and not self._ended:
                self._renew(found)

        with followed.setting:
            if followed.watch is None:
                watch = self._membership.metadata.watch_ledger(followed.ledger_id, changed)
                weakref.finalize(followed, watch.cancel)
                followed.watch = watch

    def renew(self, ledger: RemoteLedger) -> None:
        """Read a ledger's metadata, and wake its followers if it has ended.

        Raises:
            LedgerDeletedError: It was deleted.
        """
        followed = ledger.followed
        members = [ledger] if followed is None else self._members(followed)
        try:
            metadata, version = self._membership.metadata.read_ledger(ledger.ledger_id)
        except LedgerDeletedError:
            for member in members:
                member.deleted = True
                member.wake_followers()
            raise
        for member in members:
            member.renew(metadata, version)
        if followed is not None and followed.reading is not None and not ledger.is_final:
            newest = max(members, key=lambda member: member.version)
            if newest.metadata.fragments[-1].ensemble != followed.ensemble:
                self._ask(followed, anew=True)

    def _renew(self, followed: FollowedLedger) -> None:
        """Read a ledger's metadata for its followers; if it was deleted, they are woken and raise."""
        members = self._members(followed)
        if members:
            try:
                self.renew(members[0])
            except LedgerDeletedError:
                logger.info("ledger %d was deleted while it was followed", followed.ledger_id)

    def _compare_metadata(self, least_ns: int) -> None:
        """Compare the versions of all followed ledgers in another thread, in case a callback was lost.

        Args:
            least_ns: Do nothing if the last comparison was less than this long ago.
        """
        now_ns = time.monotonic_ns()
        if now_ns - self._compared_ns >= least_ns:
            self._compared_ns = now_ns
            self._driver.in_background(self._compare)

    def _compare(self) -> None:
        if self._ended:
            return
        with self._lock:
            known = [
                (followed, {member.version for member in followed.waiting()}) for followed in self._followed.values()
            ]
        known = [(followed, versions) for followed, versions in known if versions]
        try:
            found = self._membership.metadata.ledger_versions([followed.ledger_id for followed, _ in known])
            for (followed, versions), version in zip(known, found, strict=True):
                if versions != {version}:
                    self._renew(followed)
        except PybkError as error:
            logger.warning("the metadata of followed ledgers cannot be read now: %s", error)

    def end(self) -> None:
        """Send no further long polls."""
        self._ended = True
