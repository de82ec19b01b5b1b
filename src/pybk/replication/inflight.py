"""Batches in flight to one ensemble: the bookies that got and acknowledged them, and the confirmed entries.

Theory of operation. The writer and the recovery machine each own one ``Inflight``, and call it from their steps. It
sends adds, counts answers and detects failed bookies. It decides nothing about metadata, and gets a new ensemble by
``exchange``, after the metadata names it (C1). A batch is pending until each of its write sets has an ack quorum of
durable acknowledgements from the current ensemble; batches are confirmed in order (AW3, I15). ``exchange`` undoes all
acknowledgements of replaced bookies before any batch is examined again (AW5, C2). Places move from live to ``failed``,
and from there to replaced or ``dead`` (given up). The entries that a bookie misses are reported before it leaves (C13).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pybk.ledger.ledger_metadata import Bookie
from pybk.replication.messages import (
    CHANGE_REASONS,
    Add,
    ChangeReason,
    Effect,
    EnsembleChanged,
    EntryRun,
    Reply,
    Send,
    Status,
    UnderReplicated,
)
from pybk.replication.quorum import Quorum, places

_new_tuple = tuple.__new__
"""The constructor of the named tuples of each request, without a call of Python."""


class Batch(NamedTuple):
    """Consecutive entries that are sent and acknowledged together.

    Attributes:
        first: Id of the first entry.
        last: Id of the last entry.
        length: Payload bytes of the ledger up to and including the last entry.
        runs: The entries, as ``entry_runs.cut`` makes them.
    """

    first: int
    last: int
    length: int
    runs: tuple[EntryRun, ...]


@dataclass(slots=True, eq=False)
class Pending:
    """A batch that is not confirmed, or that adds under way still refer to; sets of places are bits."""

    first: int
    last: int
    length: int
    runs: tuple[EntryRun, ...]
    """The entries; emptied when the batch is confirmed, because stragglers would keep them in memory."""
    masks: tuple[int, ...]
    """The write set of each run."""
    takers: int
    """All places that take some run: the union of ``masks``."""
    acked: int = 0
    """Places of current bookies that acknowledged the batch, durable or not."""
    durable: int = 0
    """Places of current bookies that hold the batch durably; a subset of ``acked``, always."""
    seen: int = 0
    """Acknowledgements that the force under way covers, because they had come when it was sent."""
    confirmed: bool = False

    def runs_of(self, place: int) -> tuple[EntryRun, ...]:
        """Return the runs that a place of ``takers`` takes; if there is one mask, it takes all."""
        return tuple(run for run, mask in zip(self.runs, self.masks, strict=True) if mask >> place & 1)


class Sent(NamedTuple):
    """An add under way: a batch and the bookie that it was sent to.

    Attributes:
        pending: The batch.
        place: The bookie's place when it was sent.
        bookie: The bookie; if another bookie has the place by now, the answer does not count (AW3).
        size: Encoded bytes of the add.
        deferred: Whether the acknowledgement precedes the sync.
        again: Whether it was sent a second time after ``REFUSED``; it is not sent a third time.
    """

    pending: Pending
    place: int
    bookie: Bookie
    size: int
    deferred: bool
    again: bool


class Inflight:
    """Batches in flight to one ensemble, in the order of their entries.

    Args:
        ledger_id: The ledger.
        quorum: Its sizes.
        ensemble: Its current ensemble.
        lac: Last add confirmed so far.
        length: Payload bytes up to there.
        next_token: Returns a token that was never used.
        recovery: Whether adds are marked as a recovery's, so that fenced bookies take them.
        lac_sent: The LAC that every add of a recovery carries, which freezes it (D4); None for the current LAC.
        straggler_bytes: Confirmed bytes that a bookie may leave unacknowledged before it counts as failed.
        away: Bookies of a new ledger's ensemble that are not registered; they are given up from the start (AW11).

    Attributes:
        ensemble: The current ensemble.
        lac: Last add confirmed.
        length: Payload bytes up to there.
        acked_last: Last entry acknowledged, durable or not; at least ``lac``.
        pending: Batches not confirmed, ascending.
        failed: Places whose bookies failed and were neither replaced nor given up.
        dead: Places whose bookies were given up, because no bookie could replace them; disjoint from ``failed``.
        avoided: Bookies that failed, and are not chosen as replacements.
        why: The reason of the first failure of a place's bookie, by place; only places whose bookie failed.
    """

    def __init__(
        self,
        ledger_id: int,
        quorum: Quorum,
        ensemble: tuple[Bookie, ...],
        *,
        lac: int,
        length: int,
        next_token: Callable[[], int],
        recovery: bool = False,
        lac_sent: int | None = None,
        straggler_bytes: int,
        away: frozenset[Bookie] = frozenset(),
    ) -> None:
        self.quorum = quorum
        self.ensemble = list(ensemble)
        self.lac = lac
        self.length = length
        self.acked_last = lac
        self.pending: deque[Pending] = deque()
        self.failed = 0
        self.dead = 0
        self.avoided: set[Bookie] = set()
        self.why: dict[int, ChangeReason] = {}
        self._ledger_id = ledger_id
        self._next_token = next_token
        self._recovery = recovery
        self._lac_sent = lac_sent
        self._straggler_bytes = straggler_bytes
        self._masks = quorum.masks()
        self._everyone = quorum.everyone
        self.sent: dict[int, Sent] = {}
        """Adds without an answer, by token."""
        self._owed = [0] * quorum.ensemble_size
        """Confirmed bytes that the bookie of each place has not acknowledged; only live places are charged."""
        self._missing: dict[int, int] = {}
        """First entry that the current bookie of a place may miss, by place; only places whose bookie failed.

        For a place that was given up, only entries of the last fragment count. Entries that miss in a fragment with an
        end were reported, and their mark stays until they are copied; a second report would have them copied again.
        """
        self._first = 0
        """First entry of the last fragment."""
        for place in range(quorum.ensemble_size):
            if ensemble[place] in away:
                self.dead |= 1 << place
                self.why[place], self._missing[place] = ChangeReason.AWAY, 0

    @property
    def live(self) -> int:
        """Places whose bookies have neither failed nor been given up."""
        return self._everyone & ~self.dead & ~self.failed

    @property
    def lag_bytes(self) -> int:
        """Confirmed bytes that the slowest bookie has not acknowledged."""
        return max(self._owed)

    def submit(self, batch: Batch, *, deferred: bool = False) -> list[Effect]:
        """Send a batch, which follows the last one, to the live places of its write sets (AW2)."""
        count = len(self._masks)
        masks = []
        takers = 0
        for run in batch.runs:
            mask = self._masks[run.first % count]
            masks.append(mask)
            takers |= mask
        pending = Pending(batch.first, batch.last, batch.length, batch.runs, tuple(masks), takers)
        self.pending.append(pending)
        return self._send(pending, takers & ~(self.dead | self.failed), deferred=deferred)

    def _send(self, pending: Pending, to: int, *, deferred: bool = False, again: bool = False) -> list[Effect]:
        """Send a batch to places, each place the runs whose write set includes it."""
        effects: list[Effect] = []
        add = None
        size = 0
        for place in places(to):
            if add is None or len(pending.masks) > 1:
                runs = pending.runs_of(place) if len(pending.masks) > 1 else pending.runs
                lac = self.lac if self._lac_sent is None else self._lac_sent
                add = Add(self._ledger_id, runs, lac, self._recovery, deferred)
                size = _bytes_of(runs)
            token = self._next_token()
            bookie = self.ensemble[place]
            self.sent[token] = _new_tuple(Sent, (pending, place, bookie, size, deferred, again))
            effects.append(_new_tuple(Send, (token, bookie, add)))
        return effects

    def answered(self, token: int, reply: Reply) -> list[Effect] | None:
        """Count an answer. The caller handles a status that concerns the whole ledger, such as FENCED.

        Args:
            token: The token of the request.
            reply: The answer.

        Returns:
            The effects to perform; None if the token is not that of an add.
        """
        sent = self.sent.pop(token, None)
        if sent is None:
            return None
        pending, place, bookie, size, deferred, again = sent
        if self.ensemble[place] != bookie:
            return []  # AW3: the bookie is no longer in the ensemble
        bit = 1 << place
        if reply.status is Status.OK:
            if pending.confirmed and not pending.acked & bit:
                self._owed[place] = max(self._owed[place] - size, 0)
            pending.acked |= bit
            if not deferred:
                pending.durable |= bit
            return []
        if reply.status is Status.REFUSED and not again and not pending.confirmed and self.live & bit:
            return self._send(pending, bit, deferred=deferred, again=True)
        self.fail(place, pending.first, CHANGE_REASONS.get(reply.status, ChangeReason.REFUSED))
        return []

    def unanswered(self, token: int) -> bool:
        """Count a missing answer as a failure of the bookie; return whether the token is that of an add."""
        sent = self.sent.pop(token, None)
        if sent is None:
            return False
        if self.ensemble[sent.place] == sent.bookie:
            self.fail(sent.place, sent.pending.first, ChangeReason.NO_ANSWER)
        return True

    def fail(self, place: int, first: int, why: ChangeReason) -> None:
        """Count a place's bookie as failed, even if the entries that it misses were confirmed long ago (C13).

        Args:
            place: The place.
            first: The first entry that it may miss.
            why: The reason.
        """
        self.why.setdefault(place, why)
        if self.dead >> place & 1:
            first = max(first, self._first)
        self._missing[place] = min(first, self._missing.get(place, first))
        if not self.dead >> place & 1:
            self.failed |= 1 << place
            self.avoided.add(self.ensemble[place])

    def confirm(self) -> bool:
        """Move the last add confirmed over the batches that are durable at their quorums, in order (AW3).

        Returns:
            Whether it moved.
        """
        acked = self.quorum.acked
        pending = self.pending
        before = self.lac
        while pending and acked(pending[0].durable, pending[0].masks):
            self._confirmed(pending.popleft())
        if self.acked_last < self.lac:
            self.acked_last = self.lac
        return self.lac > before

    def _confirmed(self, batch: Pending) -> None:
        """Release a confirmed batch, and charge its bytes to the live bookies that have not acknowledged it."""
        self.lac, self.length = batch.last, batch.length
        batch.confirmed = True
        missing = batch.takers & ~(batch.acked | self.dead | self.failed)
        if missing:
            for place in places(missing):
                self._owed[place] += _bytes_of(batch.runs_of(place) if len(batch.masks) > 1 else batch.runs)
                if self._owed[place] > self._straggler_bytes:
                    self.fail(place, batch.first, ChangeReason.SLOW)
        batch.runs = ()

    def acknowledge(self) -> bool:
        """Move ``acked_last`` over the batches with an ack quorum, durable or not; return whether it moved."""
        before = self.acked_last
        for batch in self.pending:
            if not self.quorum.acked(batch.acked, batch.masks):
                break
            self.acked_last = max(self.acked_last, batch.last)
        return self.acked_last > before

    def exchange(self, replacements: Mapping[int, Bookie]) -> list[Effect]:
        """Put bookies into places, and send them the pending batches, lowest entry first (AW5, AW6).

        All acknowledgements of replaced bookies are undone before any batch is examined again (C2). The caller calls
        ``leaving`` first, to report the confirmed entries that the replaced bookies miss.

        Args:
            replacements: The new bookies by place.

        Returns:
            What to do.
        """
        effects: list[Effect] = []
        if not self._recovery:
            effects.append(EnsembleChanged(tuple(self.why[place] for place in replacements)))
        bits = 0
        for place in replacements:
            bits |= 1 << place
            self.ensemble[place] = replacements[place]
            self._owed[place] = 0
            self._missing.pop(place, None)
            self.why.pop(place, None)
        self.failed &= ~bits
        self.dead &= ~bits
        self._first = self.lac + 1
        for place in places(self.dead):
            self._missing[place] = max(self._missing[place], self._first)
        for batch in self.pending:
            batch.acked &= ~bits
            batch.durable &= ~bits
            batch.seen &= ~bits
        for batch in self.pending:
            effects += self._send(batch, batch.takers & bits)
        return effects

    def leaving(self, places_left: Iterable[int]) -> list[Effect]:
        """Report the confirmed entries that bookies miss of a fragment that is about to end (C13).

        The caller calls it for the places that are filled anew and for those that were given up, before it writes the
        new ensemble or the end. If the writer were killed in between, its recovery would read only the bookies of the
        last ensemble. A place that was given up is reported again, because its mark may have been removed meanwhile:
        the bookie may have had all entries at that time, but gets none of the later ones (H13).
        """
        return [effect for place in sorted(places_left) for effect in self.misses(place, beyond_confirmed=False)]

    def give_up(self, place: int, *, closing: bool = False) -> list[Effect]:
        """Mark a place as dead, and report the first entry that its bookie misses.

        Args:
            place: The place.
            closing: Whether the ledger ends at the LAC, so that no later entry can be missed.
        """
        bit = 1 << place
        self.failed &= ~bit
        if self.dead & bit:
            return []
        effects = self.misses(place, beyond_confirmed=not closing)
        for effect in effects:
            assert type(effect) is UnderReplicated
            self._missing[place] = max(effect.first_entry_id, self._first)
        self.dead |= bit
        self._owed[place] = 0
        return effects

    def misses(self, place: int, *, beyond_confirmed: bool) -> list[Effect]:
        """Report the first entry of its fragment that a place's bookie may miss.

        Args:
            place: The place.
            beyond_confirmed: Whether the bookie stays in the ensemble without getting adds, and so misses all entries
                after the LAC as well.

        Returns:
            One effect, or none if it misses no entry.
        """
        bookie = self.ensemble[place]
        firsts = [
            sent.pending.first
            for sent in self.sent.values()
            if sent.place == place and sent.bookie == bookie and sent.pending.confirmed
        ]
        noted = self._missing.get(place, self.lac + 1)
        if noted <= self.lac:
            firsts.append(noted)
        if beyond_confirmed:
            firsts.append(self.lac + 1)
        return [UnderReplicated(bookie, min(firsts))] if firsts else []

    def lacking(self, replacements: Mapping[int, Bookie], why: str = "") -> str:
        """Return an error text if some write set would have no ack quorum of live bookies; "" if each would have one.

        Args:
            replacements: The bookies that take places, by place.
            why: The reason why not all places have one; "" if there are too few bookies.
        """
        live = self._everyone & ~self.dead
        for place in replacements:
            live |= 1 << place
        if self.quorum.writable(live):
            return ""
        found = [str(bookie) for place, bookie in enumerate(self.ensemble) if live >> place & 1]
        return (
            f"entries from {self.lac + 1} on need {self.quorum.ack_quorum} bookies of every {self.quorum.write_quorum} "
            f"in an ensemble of {self.quorum.ensemble_size}; found were {', '.join(found) or 'none'}: "
            f"{why or 'start more bookies'}"
        )


def _bytes_of(runs: tuple[EntryRun, ...]) -> int:
    """Return the encoded bytes of runs."""
    size = 0
    for run in runs:
        for part in run.body:
            size += len(part)
    return size
