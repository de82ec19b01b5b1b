"""The writer of one ledger: acknowledgements in order, ensemble changes, force, close.

Theory of operation. The client's driver calls ``submit``, ``force``, ``close`` and ``step``, one at a time, and
performs the effects that they return. ``Inflight`` counts acknowledgements; this machine decides about metadata.
States:

- STEADY: adds are sent and confirmed. A failed bookie leads to CHOOSING, a close to CLOSING.
- CHOOSING: The machine has returned ``ChooseBookies``. Confirming continues, because the ensemble has not changed yet.
  Places without a replacement are given up. The machine enters CHANGING if there is any replacement, else STEADY. If a
  write set then has no ack quorum, the machine keeps its pending entries. It tries the failed bookies at once, whenever
  bookies register, and every ``LOOK_NS``, until its patience has passed; then it ends (AW10).
- A bookie that leaves the cluster is replaced likewise, without waiting for an add to fail there, because an idle
  writer sends none. It keeps its place if no other bookie can take that (AW12).
- CHANGING: the new ensemble, from LAC + 1 on, is being written (AW5). Nothing is confirmed until the outcome is known
  (C3), and new bookies get no entries before (C1). While the metadata store does not answer, the writer keeps its
  pending entries and asks again, until its patience has passed; then it ends (AW10). After success ``Inflight``
  replaces the bookies and resends the pending entries to the new ones alone (AW6), and the machine returns to STEADY.
- CLOSING: LAC and length are being written by one compare-and-set (AW7). FENCED answers are ignored here, because
  the compare-and-set decides whose end it is (AW4).
- ENDED: after ``Done`` or ``Failed``. After ``Done``, late answers still report bookies that miss entries (C13).

A refused compare-and-set, and one whose outcome is unknown, are both resolved by what the store holds (C9, C10). The
wanted value means success; if the ledger is still open, the change is made again on the new metadata; a recovery or
another client's close ends the writer (AW8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from itertools import count
from typing import Final

from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata, LedgerState
from pybk.replication.fragments import with_ensemble
from pybk.replication.inflight import Batch, Inflight, Pending
from pybk.replication.messages import (
    CHANGE_REASONS,
    Acknowledged,
    Answered,
    BookiesChosen,
    ChangeReason,
    ChooseBookies,
    Confirmed,
    Done,
    Effect,
    Event,
    Failed,
    Force,
    MetadataRead,
    MetadataRefused,
    MetadataUnreachable,
    MetadataWritten,
    ReadMetadata,
    Reason,
    Reply,
    Send,
    Status,
    Unanswered,
    WakeAt,
    Woken,
    WriteLac,
    WriteMetadata,
)
from pybk.replication.placement import usable
from pybk.replication.quorum import Quorum, places

METADATA_TRIES: Final = 8
"""The least number of times that the metadata store is asked for the outcome of a change, whatever the patience."""

METADATA_RETRY_NS: Final = 100_000_000
"""The wait before the metadata store is asked again; doubles with each try up to ``LOOK_NS``."""

REVIVE_NS: Final = 10_000_000_000
REVIVE_NS_MAX: Final = 600_000_000_000
"""The wait before the places of bookies that were given up are filled again; doubles with each try up to this maximum.

It is reset when bookies register or leave.

Tries may not be frequent, because each one that finds a bookie adds a fragment to the metadata.
"""

LOOK_NS: Final = 1_000_000_000
"""The wait before the next search for bookies while a write set has no ack quorum; also the longest wait for the
metadata store.
"""

_UNHEARD: Final = -2
"""Stands for the LAC that a bookie knows which has heard nothing of the writer; no LAC is equal to it."""

_ENDS: Final = {
    Status.FENCED: Reason.FENCED,
    Status.UNAUTHORIZED: Reason.UNAUTHORIZED,
    Status.CONFLICT: Reason.CONFLICT,
    Status.DELETED: Reason.DELETED,
}
"""Answers after which no entry can be written to the ledger any more."""


class _WriterPhase(Enum):
    """The states of the writer; the theory of operation explains them."""

    STEADY = 0
    CHOOSING = 1
    CHANGING = 2
    CLOSING = 3
    ENDED = 4


class WriterMachine:
    """Writes one open ledger, as its only writer.

    Entries are submitted in batches and confirmed in order. A bookie that fails is replaced from the first entry that
    is not confirmed. Without a replacement it is given up if every write set keeps an ack quorum. Its place is filled
    when a bookie registers, or after a pause. The same bookie may fill it, because a bookie that only did not answer
    for a while stays registered. Without an ack quorum the writer keeps its pending entries and tries the failed
    bookies again, as long as its patience lasts, before it ends (AW10). After ``Done`` the machine only takes answers
    to adds and reports bookies that miss entries (C13); after ``Failed`` it does nothing.

    Args:
        metadata: The ledger's metadata: open, with at least one fragment.
        version: Their version in the metadata store.
        straggler_bytes: Confirmed bytes that a bookie may leave unacknowledged; a bookie that owes more is replaced.
        patience_ns: The longest wait for bookies while a write set has no ack quorum, or for the metadata store while a
            change is under way; then the writer ends.
        deferred: Adds are acknowledged before they are durable, and confirmed by ``force`` only.
        away: Bookies of the first ensemble that were not registered when the ledger was created; the creation has
            recorded that they miss entries. Nothing is sent to them, and their places are filled like those of bookies
            that were given up (AW11).
        seal: Returns the closed metadata with the seal (I18); a function of its argument alone. None adds no seal.

    Attributes:
        metadata: The ledger's metadata as last read or written; never a change whose outcome is not known.
        last_submitted: Last entry submitted, -1 for none.

    Threads: one at a time.
    """

    def __init__(
        self,
        metadata: LedgerMetadata,
        version: int,
        *,
        straggler_bytes: int,
        patience_ns: int = 0,
        deferred: bool = False,
        away: frozenset[Bookie] = frozenset(),
        seal: Callable[[LedgerMetadata], LedgerMetadata] | None = None,
    ) -> None:
        self.metadata = metadata
        self.last_submitted = -1
        self._version = version
        self._patience_ns = patience_ns
        self._deferred = deferred
        self._seal = seal
        self._tokens = count(1)
        quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        self._inflight = Inflight(
            metadata.ledger_id,
            quorum,
            metadata.fragments[-1].ensemble,
            lac=-1,
            length=0,
            next_token=self._tokens.__next__,
            straggler_bytes=straggler_bytes,
            away=away,
        )
        self._phase = _WriterPhase.STEADY
        self._places: tuple[int, ...] = ()
        """The places that ``ChooseBookies`` named; valid only in CHOOSING."""
        self._replacements: dict[int, Bookie] = {}
        """The bookies that the change under way adds, by place; valid only in CHANGING."""
        self._wanted = metadata
        """The metadata of the compare-and-set under way, to recognise it if its outcome is not known (C9)."""
        self._tries, self._away_until_ns = 0, 0
        """Consecutive failures of the metadata store, and the time when the writer ends without an outcome."""
        self._stuck_at = -2
        """The last acknowledged entry when a write set last had no ack quorum; -2 if that never happened."""
        self._give_up_at_ns = 0
        """The time when the writer ends, if no further entry is acknowledged by then and bookies are still too few."""
        self._retry_at_ns: int | None = None
        """The time when the metadata store is asked again."""
        self._revive_at_ns = -REVIVE_NS_MAX
        """The time of the next, or the last, try to fill the places of bookies that were given up."""
        self._wake_at_ns: int | None = None
        """The time of the last wake-up that was asked for and has not come."""
        self._revive_ns = REVIVE_NS
        """The wait before that try; reset after a time without such places, and when bookies register or leave."""
        self._close_asked = False
        self._leaving = frozenset[Bookie]()  # those that are known to leave the cluster
        self._lac_wanted = False
        """True if the LAC is sent once nothing is pending: a reader waits at some bookie for it to move, it was to be
        sent during an ensemble change, or a bookie has come in."""
        self._lac_sent = -1
        """The LAC that the bookies know from an add or ``WriteLac``, never above the LAC; ``_UNHEARD`` if a bookie has
        come in."""
        self._force_target = -1
        """The entry up to which ``force`` was called; forces are sent while the LAC is below it."""
        self._forces: dict[int, tuple[int, Bookie, int]] = {}
        """Forces under way by token: the place, and its bookie and the first unconfirmed entry when it was sent."""
        self._steps = {
            Answered: self._answered,
            Unanswered: self._unanswered,
            BookiesChosen: self._bookies_chosen,
            MetadataWritten: self._metadata_written,
            MetadataRefused: self._metadata_refused,
            MetadataRead: self._metadata_found,
            MetadataUnreachable: self._metadata_unreachable,
            Woken: self._woken,
        }

    @property
    def version(self) -> int:
        """The version of ``metadata`` in the metadata store."""
        return self._version

    @property
    def last_add_confirmed(self) -> int:
        """Last entry that is confirmed; -1 for none."""
        return self._inflight.lac

    @property
    def ended(self) -> bool:
        """True if the ledger was closed, or the writer failed."""
        return self._phase is _WriterPhase.ENDED

    @property
    def lag_bytes(self) -> int:
        """Confirmed bytes that the slowest bookie of the ensemble has not acknowledged."""
        return self._inflight.lag_bytes

    def submit(self, batch: Batch, now_ns: int) -> list[Effect]:
        """Send a batch to the bookies; ignored once the writer has ended or is closing.

        Args:
            batch: The entries, which follow those submitted before.
            now_ns: The time.
        """
        if self._phase is _WriterPhase.ENDED or self._close_asked:
            return []
        self.last_submitted = batch.last
        self._lac_sent = self._inflight.lac
        return self._inflight.submit(batch, deferred=self._deferred)

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform.

        Args:
            event: What happened.
            now_ns: The time.
        """
        if self._phase is _WriterPhase.ENDED:
            return self._late(event)
        effects = self._advance(self._steps[type(event)](event, now_ns))  # type: ignore[operator]
        return self._with_wake_up(effects, now_ns) if effects or self._inflight.dead or self._leaving else effects

    def close(self, now_ns: int) -> list[Effect]:
        """Close the ledger at the last add confirmed; pending entries do not become part of it (AW7).

        Args:
            now_ns: The time.
        """
        if self._phase is _WriterPhase.ENDED:
            return []
        self._close_asked = True
        return self._advance([])

    def force(self, now_ns: int) -> list[Effect]:
        """Make all entries submitted so far durable once they are acknowledged, which confirms them.

        Args:
            now_ns: The time.
        """
        if self._phase is _WriterPhase.ENDED:
            return []
        self._force_target = self.last_submitted
        return self._advance([])

    def send_lac(self) -> list[Effect]:
        """Send the bookies the last add confirmed, unless they know it or a pending batch will cause another add.

        During an ensemble change it is sent later, when it is known to which bookies. The driver asks only once.
        """
        inflight = self._inflight
        if self._phase in (_WriterPhase.CHOOSING, _WriterPhase.CHANGING):
            self._lac_wanted = True
        if self._phase is not _WriterPhase.STEADY or inflight.pending or inflight.lac == self._lac_sent:
            return []
        return self.announce()

    def announce(self) -> list[Effect]:
        """Send the bookies the last add confirmed even if they know it, to show that the writer lives (H12).

        A bookie that has restarted knows no session of a writer that has appended nothing since. During an ensemble
        change the bookies of the old ensemble get it, because the metadata name no other (C1).
        """
        inflight = self._inflight
        if self._phase in (_WriterPhase.CLOSING, _WriterPhase.ENDED):
            return []
        self._lac_sent = inflight.lac
        self._lac_wanted = False
        request = WriteLac(self.metadata.ledger_id, inflight.lac)
        return [Send(next(self._tokens), inflight.ensemble[place], request) for place in places(inflight.live)]

    def bookies_changed(self, now_ns: int, leaving: frozenset[Bookie] = frozenset()) -> list[Effect]:
        """Try to fill the places of bookies that leave or were given up; called when registrations have changed.

        The pauses between tries are reset, because this try may fail: the choice may precede the registration of the
        new bookie, an old request to that bookie may time out only now, or the bookie may not answer yet.

        Args:
            now_ns: The time.
            leaving: The bookies that leave the cluster; they serve, and take no entries.
        """
        self._leaving = leaving
        self._revive_ns = REVIVE_NS
        self._revive_at_ns = min(self._revive_at_ns, now_ns + REVIVE_NS)
        return self._fill_places()

    def _late(self, event: Event) -> list[Effect]:
        """Handle an answer that came after the ledger was closed (C13)."""
        if self.metadata.state is LedgerState.CLOSED:
            if isinstance(event, Answered) and isinstance(event.reply, Reply):
                if self._inflight.answered(event.token, event.reply) is None:
                    self._force_answered(event.token, event.reply)
            elif isinstance(event, Unanswered):
                self._unanswered(event, 0)
        return self._give_up_failed()

    # ---- events ----------------------------------------------------------------------------------------------------

    def _answered(self, event: Answered, now_ns: int) -> list[Effect]:
        """Handle an answer to an add, a force or a WriteLac."""
        reply = event.reply
        if type(reply) is not Reply:
            return []
        reason = _ENDS.get(reply.status)
        # While the end is written, a bookie may learn of it first and answer FENCED; the metadata decide whose it is.
        if reason is not None and (reason is not Reason.FENCED or self._phase is not _WriterPhase.CLOSING):
            return self._end(reason, f"a bookie answered {reply.status.name}")  # AW4
        self._lac_wanted |= reply.watched
        effects = self._inflight.answered(event.token, reply)
        return self._force_answered(event.token, reply) if effects is None else effects

    def _force_answered(self, token: int, reply: Reply) -> list[Effect]:
        """Count an answer to a force; answers to ``WriteLac`` are ignored."""
        if token in self._forces:
            failure = CHANGE_REASONS.get(reply.status, ChangeReason.REFUSED)
            self._forced(token, None if reply.status is Status.OK else failure)
        return []

    def _unanswered(self, event: Unanswered, now_ns: int) -> list[Effect]:
        """Count a missing answer to an add or a force as a failure of the bookie."""
        if not self._inflight.unanswered(event.token) and event.token in self._forces:
            self._forced(event.token, ChangeReason.NO_ANSWER)
        return []

    def _forced(self, token: int, failure: ChangeReason | None) -> None:
        """Count a force: entries that the bookie had acknowledged before are durable, or the bookie failed."""
        place, bookie, first = self._forces.pop(token)
        if self._inflight.ensemble[place] != bookie:
            return
        if failure is not None:
            self._inflight.fail(place, first, failure)
            return
        bit = 1 << place
        for batch in self._inflight.pending:
            if batch.seen & bit:
                batch.durable |= bit

    def _bookies_chosen(self, event: BookiesChosen, now_ns: int) -> list[Effect]:
        """Begin the ensemble change with the bookies that were found, and give up the other places."""
        if self._phase is not _WriterPhase.CHOOSING:
            return []
        self._phase, self._tries = _WriterPhase.STEADY, 0
        if self._close_asked:
            return []
        inflight = self._inflight
        self._replacements = usable(event.bookies, self._places, inflight.ensemble)
        given_up = places(inflight.dead)
        effects: list[Effect] = []
        for place in self._places:
            if place not in self._replacements and inflight.failed >> place & 1:
                effects += inflight.give_up(place)
        lacking = inflight.lacking(self._replacements, event.why)
        if lacking:
            return effects + self._without_quorum(lacking, now_ns)
        if self._wanting:
            self._revive_later(now_ns)
        for place in self._replacements:
            inflight.why.setdefault(place, ChangeReason.READ_ONLY)  # it did not fail
        if self._replacements:
            self._phase = _WriterPhase.CHANGING
            effects += inflight.leaving({*self._replacements, *given_up})
            effects += self._write(self._changed(self.metadata))
        else:
            effects += inflight.leaving(given_up)  # they are left out for longer
        return effects

    def _without_quorum(self, lacking: str, now_ns: int) -> list[Effect]:
        """Try the failed bookies again, at once or after a pause; end when the patience has passed (AW10)."""
        inflight = self._inflight
        if self._stuck_at != inflight.acked_last:  # the LAC of a deferred ledger moves with forces alone
            self._stuck_at, self._give_up_at_ns = inflight.acked_last, now_ns + self._patience_ns
            inflight.avoided.clear()
            return self._choose()  # they may be back
        if now_ns >= self._give_up_at_ns:
            return self._end(Reason.NOT_ENOUGH_BOOKIES, lacking)
        self._revive_at_ns = min(now_ns + LOOK_NS, self._give_up_at_ns)
        return [effect for place in places(inflight.failed) for effect in inflight.give_up(place)]

    def _revive_later(self, now_ns: int) -> None:
        """Schedule the next try to fill the places of bookies that were given up, each time after a longer pause."""
        if self._revive_at_ns > now_ns:
            return
        if now_ns - self._revive_at_ns > REVIVE_NS_MAX:
            self._revive_ns = REVIVE_NS
        self._revive_at_ns = now_ns + self._revive_ns
        self._revive_ns = min(2 * self._revive_ns, REVIVE_NS_MAX)

    def _with_wake_up(self, effects: list[Effect], now_ns: int) -> list[Effect]:
        """Add the wake-up for places that were given up, unless it is set: a machine has one wake-up at a time."""
        for effect in effects:
            if isinstance(effect, WakeAt):
                self._wake_at_ns = effect.time_ns
        wanting = self._wanting
        if wanting and self._revive_at_ns < 0:
            self._revive_later(now_ns)  # its bookie was away from the start (AW11), or leaves
        if self._phase is _WriterPhase.STEADY and wanting and self._wake_at_ns != self._revive_at_ns:
            self._wake_at_ns = self._revive_at_ns
            effects.append(WakeAt(self._revive_at_ns))
        return effects

    def _changed(self, metadata: LedgerMetadata) -> LedgerMetadata:
        """Return metadata with the change to write: closed at the LAC, or a new ensemble from LAC + 1 on (AW5)."""
        if self._phase is _WriterPhase.CLOSING:
            closed = metadata.closed_at(self._inflight.lac, self._inflight.length)
            return closed if self._seal is None else self._seal(closed)
        ensemble = list(self._inflight.ensemble)
        for place, bookie in self._replacements.items():
            ensemble[place] = bookie
        fragments = with_ensemble(metadata.fragments, self._inflight.lac + 1, tuple(ensemble))
        return replace(metadata, fragments=fragments, version=metadata.version + 1)

    def _write(self, wanted: LedgerMetadata) -> list[Effect]:
        """Start a compare-and-set; nothing is confirmed until its outcome is known (C3)."""
        self._wanted = wanted
        return [WriteMetadata(wanted, self._version)]

    def _metadata_written(self, event: MetadataWritten, now_ns: int) -> list[Effect]:
        """Make the change effective, now that the metadata have it (C1)."""
        if self._phase not in (_WriterPhase.CHANGING, _WriterPhase.CLOSING):
            return []
        self.metadata, self._version, self._tries = self._wanted, event.version, 0
        if self._phase is _WriterPhase.CLOSING:
            return self._done(self.metadata, event.version)
        self._phase = _WriterPhase.STEADY
        self._lac_sent, self._lac_wanted = _UNHEARD, True  # a bookie that comes in without an add would know no writer
        return self._inflight.exchange(self._replacements)

    def _metadata_refused(self, event: MetadataRefused, now_ns: int) -> list[Effect]:
        """Resolve a refusal: re-replication changed old fragments, or a recovery took the ledger (AW8)."""
        if self._phase not in (_WriterPhase.CHANGING, _WriterPhase.CLOSING):
            return []
        return self._resolve(event.metadata, event.version, now_ns)

    def _metadata_found(self, event: MetadataRead, now_ns: int) -> list[Effect]:
        """Resolve a compare-and-set whose outcome was not known, from the metadata that were read back (C10)."""
        if self._phase not in (_WriterPhase.CHANGING, _WriterPhase.CLOSING):
            return []
        return self._resolve(event.metadata, event.version, now_ns)

    def _resolve(self, found: LedgerMetadata | None, version: int, now_ns: int) -> list[Effect]:
        """Compare the stored metadata with the wanted ones: the change is done, must be written again, or is lost."""
        if found == self._wanted:
            return self._metadata_written(MetadataWritten(version), now_ns)
        if found is None:
            return self._end(Reason.DELETED, "the ledger was deleted")
        if found.state is LedgerState.OPEN:
            # Only this writer adds fragments to an open ledger; re-replication may have changed earlier ones.
            self.metadata, self._version = found, version
            return self._write(self._changed(found))
        end = (found.state, found.last_entry_id, found.length)
        if self._phase is _WriterPhase.CLOSING and end == (
            LedgerState.CLOSED,
            self._inflight.lac,
            self._inflight.length,
        ):
            return self._done(found, version)
        return self._end(Reason.FENCED, f"another client recovers or closed the ledger; it is {found.state.value}")

    def _metadata_unreachable(self, event: MetadataUnreachable, now_ns: int) -> list[Effect]:
        """Retry later, with a growing pause: the outcome of the change, or the available bookies, are not known."""
        if self._phase is _WriterPhase.STEADY:
            return []
        self._tries += 1
        if self._tries == 1:
            self._away_until_ns = now_ns + self._patience_ns
        if self._tries > METADATA_TRIES:
            if self._phase is _WriterPhase.CHOOSING:
                return self._bookies_chosen(BookiesChosen({}), now_ns)
            if now_ns >= self._away_until_ns:
                return self._end(Reason.METADATA_UNREACHABLE, f"the metadata store did not answer {self._tries} times")
        self._retry_at_ns = now_ns + min(METADATA_RETRY_NS << (self._tries - 1), LOOK_NS)
        return [WakeAt(self._retry_at_ns)]

    def _woken(self, event: Woken, now_ns: int) -> list[Effect]:
        """Ask the metadata store again, or try to fill the places of bookies that were given up."""
        self._wake_at_ns = None
        if self._phase is _WriterPhase.STEADY:
            if now_ns < self._revive_at_ns or not self._wanting:
                return []
            return self.announce() + self._fill_places()  # a network that failed has ended sessions (H12)
        if self._retry_at_ns is None or now_ns < self._retry_at_ns:
            return []
        self._retry_at_ns = None
        return self._choose() if self._phase is _WriterPhase.CHOOSING else [ReadMetadata()]

    # ---- next step -------------------------------------------------------------------------------------------------

    def _advance(self, effects: list[Effect]) -> list[Effect]:
        """Confirm batches, then start what is due; nothing is confirmed while metadata are being written (C3)."""
        inflight = self._inflight
        if self._phase in (_WriterPhase.STEADY, _WriterPhase.CHOOSING):
            if inflight.pending and inflight.confirm():
                effects.append(Confirmed(inflight.lac))
            if self._deferred:
                effects += self._advance_deferred()
        if self._phase is _WriterPhase.CLOSING:
            return effects + self._give_up_failed()
        if self._phase is not _WriterPhase.STEADY:
            return effects
        if self._close_asked:
            self._phase = _WriterPhase.CLOSING
            effects += inflight.leaving(places(inflight.dead))
            return effects + self._give_up_failed() + self._write(self._changed(self.metadata))
        if inflight.failed:
            return effects + self._choose()
        if self._lac_wanted:
            effects += self.send_lac()
        return effects

    def _advance_deferred(self) -> list[Effect]:
        """Report acknowledged entries, and send forces once all entries up to the target are acknowledged."""
        inflight = self._inflight
        effects: list[Effect] = [Acknowledged(inflight.acked_last)] if inflight.acknowledge() else []
        if (
            self._forces
            or inflight.lac >= self._force_target
            or inflight.failed
            or self._phase is not _WriterPhase.STEADY
        ):
            return effects
        batches: list[Pending] = [batch for batch in inflight.pending if batch.first <= self._force_target]
        if all(inflight.quorum.acked(batch.acked & inflight.live, batch.masks) for batch in batches):
            request = Force(self.metadata.ledger_id)
            for batch in batches:
                batch.seen = batch.acked
            for place in places(inflight.live):
                token = next(self._tokens)
                self._forces[token] = (place, inflight.ensemble[place], inflight.lac + 1)
                effects.append(Send(token, inflight.ensemble[place], request))
        return effects

    def _fill_places(self) -> list[Effect]:
        """Ask for bookies for the places of those that leave or were given up, unless something is under way."""
        if self._phase is not _WriterPhase.STEADY or not self._wanting or self._close_asked:
            return []
        self._inflight.avoided.clear()
        return self._choose()

    @property
    def _wanting(self) -> int:
        """The places to be filled whose bookies were given up or leave, and did not fail just now."""
        inflight = self._inflight
        if not self._leaving:
            return inflight.dead
        leaving = (place for place in places(inflight.live) if inflight.ensemble[place] in self._leaving)
        return inflight.dead | sum(1 << place for place in leaving)

    def _choose(self) -> list[Effect]:
        """Ask for bookies for the places of those that failed, leave, or were given up."""
        inflight = self._inflight
        self._phase = _WriterPhase.CHOOSING
        self._places = tuple(places(inflight.failed | self._wanting))
        return [ChooseBookies(self._places, tuple(inflight.ensemble), frozenset(inflight.avoided | self._leaving))]

    def _done(self, metadata: LedgerMetadata, version: int) -> list[Effect]:
        """End with the ledger closed, and drop pending batches, which are not part of it."""
        self._phase = _WriterPhase.ENDED
        self.metadata = metadata
        self._inflight.pending.clear()
        return [Done(metadata, version)]

    def _give_up_failed(self) -> list[Effect]:
        """Report the entries that failed bookies miss; known failures are reported before the end is written (C13)."""
        return [
            effect for place in places(self._inflight.failed) for effect in self._inflight.give_up(place, closing=True)
        ]

    def _end(self, reason: Reason, detail: str) -> list[Effect]:
        """End without success."""
        self._phase = _WriterPhase.ENDED
        self._inflight.pending.clear()
        return [Failed(reason, f"ledger {self.metadata.ledger_id}: {detail}")]
