"""Following ledgers: each ledger has one long poll and one watch for all its followers in this client.

How a follower learns what changed:

- **Entries.** ``LacReading`` asks so many bookies of the last ensemble that one of them takes part in every
  acknowledgement. Each keeps the request until its LAC passes ``beyond``, or for half a minute, and for two minutes
  while no entry comes. The reply wakes all followers, and carries the newest entry, which they need not read then. A
  bookie that does not answer is replaced by another one of the ensemble at once (``LacMachine``).
- **End and ensembles.** The metadata store calls back when the ledger's metadata change. If the last ensemble is
  another one, the new one is asked at once.
- **Answers too soon.** A bookie may know a LAC of which it has no proof yet, or keep too many long polls already. Then
  it answers at once, and is asked again at once, and after pauses that double up to ``RETRY_NS``.
- **Failures.** If too few bookies answer, they are asked again after ``RETRY_NS``, and the metadata are compared, in
  case that no callback came.

At rest a follower's thread, or task, sleeps: nothing wakes it but a change. All long polls of a client end together, at
multiples of ``FOLLOW_NS / 2`` since it was opened, so that many followers cost few turns of the client and the bookies.
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
"""How long bookies keep a ledger's first question for the next entry before they answer that there is none.

A long poll stays at the bookie when the follower has gone, so the first ones are short.
"""

REST_FACTOR: Final = 4
"""How many times as long they keep the next ones, until there is an entry.

That stays below ``POLL_NS_MAX`` of bookies by a margin, so that polls end when the client expects it. Bookies before
0.2 answer after 30 s, and are asked again.
"""

RETRY_NS: Final = 1_000_000_000
"""Pause before bookies are asked again that did not answer; answers without an entry that come sooner are too soon."""

_FIRST_PAUSE_NS: Final = 1_000_000
"""Pause after the second answer that came too soon; the next ones are twice as long each."""


class Followers:
    """The long polls and watches of one client's followers; see the module.

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
        """Have a ledger's followers woken at its next entry, and when it ends; the caller is one that will wait."""
        if ledger.is_final or self._ended:
            return
        followed = ledger.followed or self._join(ledger)
        if followed.watch is None:
            self._watch(followed)
        if followed.reading is None:
            self._ask(followed)

    def _join(self, ledger: RemoteLedger) -> FollowedLedger:
        """Return what all followers of a ledger share, for one that did not follow it yet."""
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
        """Ask bookies for the next entry of a ledger.

        Args:
            followed: The ledger.
            pause_ns: How long to wait before.
            anew: Also if a long poll is under way; what that one brings still counts.
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
                wait_ns=self._wait_ns(asked_ns, vain=followed.vain),
                pause_ns=pause_ns,
                retry_ns=RETRY_NS,
                rank=self._membership.rank(),
            )
            followed.reading = reading
            followed.asked_ns = asked_ns
            followed.beyond = beyond
            followed.ensemble = ledger.metadata.fragments[-1].ensemble
        for member in members:  # one may have looked since the others did
            member.advance(beyond)
        self._driver.start(reading, reading.machine.start)
        self._driver.group.when_done(reading.completion, lambda: self._answered(followed, reading))

    def _wait_ns(self, now_ns: int, *, vain: bool) -> int:
        """Return how long a poll that is asked now may wait, so that those of all ledgers end together."""
        step_ns = FOLLOW_NS // 2
        return FOLLOW_NS * (REST_FACTOR if vain else 1) - (now_ns - self._began_ns) % step_ns

    def _answered(self, followed: FollowedLedger, reading: LacReading) -> None:
        """Take what a long poll brought, and ask again if a follower still waits."""
        error = reading.completion.error
        if error is None:
            for member in self._members(followed):
                member.advance(reading.last_add_confirmed, reading.ledger.newest)
        with self._lock:
            if followed.reading is not reading:
                return  # another ensemble was asked meanwhile
            followed.reading = None
            waited_for = followed.waiting()  # after that, as a follower that comes now leaves asking to this thread
        moved = reading.last_add_confirmed > followed.beyond
        followed.vain = not moved
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
        """Return how long to wait after one more answer that came too soon."""
        followed.soon += 1
        return 0 if followed.soon == 1 else min(_FIRST_PAUSE_NS << min(followed.soon - 2, 32), RETRY_NS)

    def _report(self, followed: FollowedLedger, error: PybkError | None) -> None:
        """Log once that a ledger cannot be followed as it should be."""
        if not followed.failing:
            followed.failing = True
            logger.warning(
                "ledger %d: bookies do not report its next entry, and are asked again every second: %s",
                followed.ledger_id,
                error or "they answer at once, as they keep too many long polls",
            )

    # ---- metadata ------------------------------------------------------------------------------------------------

    def _watch(self, followed: FollowedLedger) -> None:
        """Have the metadata store report changes of a ledger's metadata for as long as a reader of it is held."""
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
        """Take over a ledger's metadata as they are now; its followers raise if it was deleted."""
        members = self._members(followed)
        if members:
            try:
                self.renew(members[0])
            except LedgerDeletedError:
                logger.info("ledger %d was deleted while it was followed", followed.ledger_id)

    def _compare_metadata(self, least_ns: int) -> None:
        """See in another thread whether metadata of followed ledgers changed, unless that was done just now.

        The callbacks of the metadata store report changes at once; this is for one that was lost.
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
        """Ask no more."""
        self._ended = True
