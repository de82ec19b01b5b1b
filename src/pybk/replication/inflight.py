"""Batches in flight to one ensemble: which bookies were sent them, which acknowledged, and what is confirmed.

Theory of operation. The writer and the recovery machine each own one ``Inflight``, and call it from their steps. It
sends adds, counts answers and detects failed bookies; it decides nothing about metadata, and learns of a new ensemble
by ``exchange``, after the metadata names it (C1). A batch is pending until each of its write sets has an ack quorum of
durable acknowledgements from the current ensemble; batches are confirmed in order (AW3, I15). ``exchange`` undoes all
acknowledgements of replaced bookies before any batch is looked at again (AW5, C2). Places move from live to ``failed``,
and from there to replaced or ``dead`` (given up). What a bookie misses is reported before it leaves (C13).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pybk.ledger import Bookie
from pybk.replication.messages import Add, Effect, EntryRun, Reply, Send, Status, UnderReplicated
from pybk.replication.quorum import Quorum, places


class Batch(NamedTuple):
    """Consecutive entries that are sent and acknowledged together.

    Attributes:
        first: Id of the first entry.
        last: Id of the last entry.
        length: Payload bytes of the ledger up to and including the last entry.
        runs: The entries, as ``runs.cut`` makes them.
    """

    first: int
    last: int
    length: int
    runs: tuple[EntryRun, ...]


@dataclass(slots=True, eq=False)
class Pending:
    """A batch that is not confirmed; sets of places are bits."""

    first: int
    last: int
    length: int
    runs: tuple[EntryRun, ...]
    masks: tuple[int, ...]
    takers: int
    acked: int = 0
    durable: int = 0
    seen: int = 0
    """Acknowledgements that the force under way covers: those that had come when it was sent."""
    confirmed: bool = False


class Sent(NamedTuple):
    """What a token stands for: a batch sent to the bookie that had a place then."""

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
        next_token: Gives a token that was never used.
        recovery: Whether adds are marked as a recovery's, and so taken by fenced ledgers.
        lac_sent: The LAC that every add carries; None: the last add confirmed as it moves. Recovery freezes it (D4).
        straggler_bytes: Confirmed bytes that a bookie may owe before it counts as failed.

    Attributes:
        ensemble: The current ensemble.
        lac: Last add confirmed.
        length: Payload bytes up to there.
        acked_last: Last entry acknowledged, durable or not.
        pending: Batches not confirmed, ascending.
        failed: Places whose bookies failed and were neither replaced nor given up.
        dead: Places whose bookies were given up, as nobody could replace them.
        avoided: Bookies that failed.
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
        self._ledger_id = ledger_id
        self._next_token = next_token
        self._recovery = recovery
        self._lac_sent = lac_sent
        self._straggler_bytes = straggler_bytes
        self._masks = quorum.masks()
        self._sent: dict[int, Sent] = {}
        self._owed = [0] * quorum.ensemble_size
        self._missing: dict[int, int] = {}

    @property
    def live(self) -> int:
        """Places whose bookies take what is sent."""
        return self.quorum.everyone & ~self.dead & ~self.failed

    @property
    def lac_to_send(self) -> int:
        """The LAC that an add sent now carries."""
        return self.lac if self._lac_sent is None else self._lac_sent

    def submit(self, batch: Batch, *, deferred: bool = False) -> list[Effect]:
        """Take a batch that follows the last one, and send it to all that take it and have not failed (AW2)."""
        count = len(self._masks)
        masks = tuple(self._masks[run.first % count] for run in batch.runs)
        takers = 0
        for mask in masks:
            takers |= mask
        pending = Pending(batch.first, batch.last, batch.length, batch.runs, masks, takers)
        self.pending.append(pending)
        return self._send(pending, takers & self.live, deferred=deferred)

    def _send(self, pending: Pending, to: int, *, deferred: bool = False, again: bool = False) -> list[Effect]:
        """Send a batch to places, each the runs that it takes."""
        effects: list[Effect] = []
        add = None
        size = 0
        for place in places(to):
            if add is None or len(pending.masks) > 1:
                runs = pending.runs
                if len(pending.masks) > 1:
                    runs = tuple(run for run, mask in zip(runs, pending.masks, strict=True) if mask >> place & 1)
                add = Add(self._ledger_id, runs, self.lac_to_send, self._recovery, deferred)
                size = sum(len(part) for run in runs for part in run.body)
            token = self._next_token()
            bookie = self.ensemble[place]
            self._sent[token] = Sent(pending, place, bookie, size, deferred, again)
            effects.append(Send(token, bookie, add))
        return effects

    def answered(self, token: int, reply: Reply) -> list[Effect] | None:
        """Count an answer; what it says about the ledger as a whole is for the caller.

        Args:
            token: The request's.
            reply: The answer.

        Returns:
            What to do; None if the token is none of an add.
        """
        sent = self._sent.pop(token, None)
        if sent is None:
            return None
        pending, place, bookie, size, deferred, again = sent
        if self.ensemble[place] != bookie:
            return []  # AW3: it is no longer of the ensemble
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
        self.fail(place, pending.first)
        return []

    def unanswered(self, token: int) -> bool:
        """Count a missing answer as a failure of the bookie; tell whether the token is one of an add."""
        sent = self._sent.pop(token, None)
        if sent is None:
            return False
        if self.ensemble[sent.place] == sent.bookie:
            self.fail(sent.place, sent.pending.first)
        return True

    def fail(self, place: int, first: int) -> None:
        """Count a place's bookie as failed, also if the quorum acknowledged long ago what it misses (C13).

        Args:
            place: The place.
            first: The first entry that it may miss.
        """
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
        """Let go of a batch; who has not acknowledged it yet owes its bytes."""
        self.lac, self.length = batch.last, batch.length
        batch.confirmed = True
        missing = batch.takers & ~batch.acked & self.live
        if missing:
            for place in places(missing):
                self._owed[place] += self._bytes_for(batch, place)
                if self._owed[place] > self._straggler_bytes:
                    self.fail(place, batch.first)
        batch.runs = ()

    @staticmethod
    def _bytes_for(batch: Pending, place: int) -> int:
        """Count the bytes of a batch that a place takes."""
        return sum(
            len(part)
            for run, mask in zip(batch.runs, batch.masks, strict=True)
            if mask >> place & 1
            for part in run.body
        )

    def acknowledge(self) -> bool:
        """Move ``acked_last`` over the batches that their quorums acknowledged, durable or not; tell if it moved."""
        before = self.acked_last
        for batch in self.pending:
            if not self.quorum.acked(batch.acked, batch.masks):
                break
            self.acked_last = max(self.acked_last, batch.last)
        return self.acked_last > before

    def exchange(self, replacements: Mapping[int, Bookie]) -> list[Effect]:
        """Put bookies into places, and send them what is pending, lowest entry first (AW5, AW6).

        All acknowledgements of those replaced are undone before any batch is looked at again (C2). What those that
        leave miss of confirmed entries is for the caller to record before (``leaving``).

        Args:
            replacements: The new bookies by place.

        Returns:
            What to do.
        """
        effects: list[Effect] = []
        bits = 0
        for place in replacements:
            bits |= 1 << place
            self.ensemble[place] = replacements[place]
            self._owed[place] = 0
            self._missing.pop(place, None)
        self.failed &= ~bits
        self.dead &= ~bits
        for batch in self.pending:
            batch.acked &= ~bits
            batch.durable &= ~bits
            batch.seen &= ~bits
        for batch in self.pending:
            effects += self._send(batch, batch.takers & bits)
        return effects

    def leaving(self, places_left: Iterable[int]) -> list[Effect]:
        """Record what the bookies of places miss that are about to be replaced (C13).

        That is done before the metadata name another ensemble: if the writer ends in between, its recovery looks at the
        bookies of the last ensemble alone.
        """
        return [effect for place in sorted(places_left) for effect in self.misses(place, beyond_confirmed=False)]

    def give_up(self, place: int, *, closing: bool = False) -> list[Effect]:
        """Go on without the bookie of a place, as there is no other, and tell from where on it misses entries.

        Args:
            place: The place.
            closing: Nothing that is not confirmed will be of the ledger.
        """
        bit = 1 << place
        self.failed &= ~bit
        if self.dead & bit:
            return []
        effects = self.misses(place, beyond_confirmed=not closing)
        self.dead |= bit
        self._owed[place] = 0
        return effects

    def misses(self, place: int, *, beyond_confirmed: bool) -> list[Effect]:
        """Tell from which entry on a place's bookie may miss entries of its fragment.

        Args:
            place: The place.
            beyond_confirmed: Whether it stays in the ensemble, so that it misses all that comes, too.
        """
        bookie = self.ensemble[place]
        firsts = [
            sent.pending.first
            for sent in self._sent.values()
            if sent.place == place and sent.bookie == bookie and sent.pending.confirmed
        ]
        noted = self._missing.get(place, self.lac + 1)
        if noted <= self.lac:
            firsts.append(noted)
        if beyond_confirmed:
            firsts.append(self.lac + 1)
        return [UnderReplicated(bookie, min(firsts))] if firsts else []

    def lacking(self, replacements: Mapping[int, Bookie]) -> str:
        """Return what to say if some write set would have no ack quorum of live bookies, "" if each would have one.

        Args:
            replacements: Bookies that are to take places, by place.
        """
        live = self.quorum.everyone & ~self.dead
        for place in replacements:
            live |= 1 << place
        if self.quorum.writable(live):
            return ""
        found = [str(bookie) for place, bookie in enumerate(self.ensemble) if live >> place & 1]
        return (
            f"entries from {self.lac + 1} on need {self.quorum.ack_quorum} bookies of every {self.quorum.write_quorum} "
            f"in an ensemble of {self.quorum.ensemble_size}; found were {', '.join(found) or 'none'}: start more "
            "bookies"
        )
