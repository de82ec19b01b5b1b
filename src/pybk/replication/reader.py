"""Reads of entries with fallback to other replicas, and reads of the last add confirmed.

Theory of operation. ``ReadMachine`` cuts a range into strands: the entries of one residue in one fragment, which the
same bookies hold. Each strand asks one replica for the entries that it lacks. If the replica is slow, the next one is
asked as well (speculation); if it fails or denies, the next one is asked instead. When all replicas of a strand have
failed or denied, the metadata is read again once, because the ensemble may have changed (C17). An entry is denied only
if every bookie of its write set denies it under current metadata; otherwise it is unknown (K5). ``LacMachine`` asks the
last ensemble until the answers cover every write set; or it waits at enough bookies for each ack quorum to include one
of them. ``LacComparisonMachine`` compares those of many ledgers, with one request for each bookie.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Final

from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata, LedgerState
from pybk.replication.entry_runs import since
from pybk.replication.fragments import fragment_of, fragment_ranges
from pybk.replication.messages import (
    COMPARED_MAX,
    NEGATIVE,
    Answered,
    CompareLacs,
    Effect,
    EntriesRead,
    EntryRun,
    Event,
    Failed,
    LacRead,
    LacReply,
    LacsAbove,
    LacsCompared,
    MetadataRead,
    MetadataUnreachable,
    Read,
    ReadEnded,
    ReadLac,
    ReadMetadata,
    ReadReply,
    Reason,
    Send,
    Status,
    Unanswered,
    WakeAt,
    Woken,
)
from pybk.replication.quorum import Quorum, places

NO_RANK: Final[Mapping[Bookie, int]] = MappingProxyType({})
NO_LIMIT: Final = (1 << 63) - 1
"""A number of bytes that is larger than any read returns."""


@dataclass(slots=True, eq=False)
class _Strand:
    """The entries of one residue in one fragment, read from one replica at a time; sets of places are bits."""

    ensemble: tuple[Bookie, ...]
    order: tuple[int, ...]
    """The places of the write set, in the order in which they are asked."""
    first: int
    last: int
    next: int
    """First entry that was not read yet; ``first <= next``, and above ``last`` once all were read."""
    read_bytes: int = 0
    denied: int = 0
    """Places that denied ``next``."""
    failed: int = 0
    """Places that could not return ``next``, or did not answer."""
    asking: int = 0
    """Places with a request under way; several during speculation."""
    asked_ns: int = 0
    """The time when the last request was sent."""
    refreshed: bool = False
    """True once all places have failed or denied, and the metadata were read again or could not be (C17)."""
    current: bool = False
    """True if ``ensemble`` comes from metadata that were read after that; only then is a denial final."""
    ended: bool = False
    missing: Status = Status.OK
    """The reason why ``next`` was not read, once the strand has ended."""


class ReadMachine:
    """Reads a range of a ledger from its replicas, each entry from the first one that has a sound copy.

    Ends with ``ReadEnded``, or ``Failed`` if the ledger was deleted.

    Args:
        metadata: The ledger's metadata.
        first: First entry.
        last: Last entry, inclusive.
        bytes_max: Encoded bytes that one reply may have.
        speculative_ns: Nanoseconds without an answer after which the next replica is asked, too.
        rank: The rank of bookies, 0 for those not named; the lowest are asked first.
        residues: Read only entries whose id modulo the ensemble's size is one of these; None reads all.
        checked: Have bookies verify record checksums, because the reader has no ledger password.
        parts: If every bookie has every entry, cut the range into this number of parts, which are read from different
            bookies at once.
        total_bytes: Encoded bytes, at least 1, after which the read ends; it returns at least one entry.

    Threads: one at a time.
    """

    def __init__(
        self,
        metadata: LedgerMetadata,
        first: int,
        last: int,
        *,
        bytes_max: int,
        speculative_ns: int,
        rank: Mapping[Bookie, int] = NO_RANK,
        residues: frozenset[int] | None = None,
        checked: bool = False,
        parts: int = 1,
        total_bytes: int = NO_LIMIT,
    ) -> None:
        self.metadata = metadata
        self._total_bytes = total_bytes
        self._parts = parts
        self._residues = residues
        self._checked = checked
        self._first = first
        self._last = last
        self._bytes_max = bytes_max
        self._speculative_ns = speculative_ns
        self._rank = rank
        self._quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        self._stride = len(self._quorum.masks())
        self._tokens = count(1)
        self._asked: dict[int, tuple[_Strand, int, int]] = {}
        self._strands: list[_Strand] = []
        self._bad: dict[tuple[Bookie, int], None] = {}
        self._refreshing = False
        self._ended = False

    def start(self, now_ns: int) -> list[Effect]:
        """Begin.

        Args:
            now_ns: The time.
        """
        effects: list[Effect] = []
        for fragment, low, high in fragment_ranges(self.metadata.fragments, self._first, self._last):
            for number, (first, last) in enumerate(self._cut(low, high)):
                turned = number if self._stride == 1 else 0
                strand = _Strand(fragment.ensemble, self._order(fragment.ensemble, first, turned), first, last, first)
                self._strands.append(strand)
                effects += self._ask(strand, now_ns)
        effects.append(WakeAt(now_ns + self._speculative_ns))
        return effects + self._end_if_done()

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform.

        Args:
            event: What happened.
            now_ns: The time.
        """
        if self._ended:
            return []
        effects: list[Effect] = []
        if isinstance(event, Answered | Unanswered):
            asked = self._asked.pop(event.token, None)
            if asked is not None:
                effects = self._take_entries(*asked, event.reply if isinstance(event, Answered) else None, now_ns)
        elif isinstance(event, Woken):
            effects = self._speculate(now_ns)
        elif isinstance(event, MetadataRead):
            effects = self._refresh(event.metadata, now_ns)
        elif isinstance(event, MetadataUnreachable):
            effects = self._refresh(self.metadata, now_ns, current=False)
        return effects + self._end_if_done()

    def _cut(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield the first entry and the bound of each strand: one per residue, or ``parts`` if there is one residue."""
        if self._stride == 1:
            size = -(-(high - low + 1) // self._parts)
            for first in range(low, high + 1, size):
                yield first, min(first + size - 1, high)
            return
        for first in range(low, min(low + self._stride, high + 1)):
            if self._residues is None or first % self._stride in self._residues:
                yield first, high

    def _order(self, ensemble: tuple[Bookie, ...], entry_id: int, turned: int) -> tuple[int, ...]:
        """Return the places of a write set by rank, rotated by ``turned`` so that parts ask different bookies."""
        order = sorted(self._quorum.write_set(entry_id), key=lambda place: self._rank.get(ensemble[place], 0))
        turned %= len(order)
        return (*order[turned:], *order[:turned])

    def _ask(self, strand: _Strand, now_ns: int, place: int | None = None) -> list[Effect]:
        """Ask a replica, by default the next untried one, for the entries that a strand still lacks."""
        if place is None:
            tried = strand.denied | strand.failed | strand.asking
            place = next((each for each in strand.order if not tried >> each & 1), None)
            if place is None:
                return []
        strand.asking |= 1 << place
        strand.asked_ns = now_ns
        token = next(self._tokens)
        self._asked[token] = (strand, place, strand.next)
        request = Read(
            self.metadata.ledger_id,
            strand.next,
            strand.last,
            self._stride,
            min(self._bytes_max, max(0, self._left(strand))),
            checked=self._checked,
        )
        return [Send(token, strand.ensemble[place], request)]

    def _take_entries(self, strand: _Strand, place: int, first: int, reply: object, now_ns: int) -> list[Effect]:
        """Take the entries of an answer, and continue with another replica if it ends too early."""
        if strand.ended:
            return []
        bit = 1 << place
        strand.asking &= ~bit
        effects: list[Effect] = []
        after, status, space = first, Status.UNKNOWN, 0
        if isinstance(reply, ReadReply):
            status = reply.status
            run = reply.run
            if run is not None and len(run.sizes) and run.first == first and run.stride == self._stride:
                after = run.last + run.stride
                rest = since(run, strand.next)
                if rest is not None:
                    effects.append(EntriesRead(rest))
                    strand.next, strand.denied, strand.failed = after, 0, 0
                    strand.read_bytes += _bytes_of(rest)
                    if status is Status.OK:
                        space = self._bytes_max - _bytes_of(run)
            elif status is Status.OK:
                status = Status.UNKNOWN
            if status is Status.UNKNOWN:
                self._bad[strand.ensemble[place], after] = None
        if strand.next > strand.last:
            strand.ended = True
            return effects
        if self._left(strand) <= space:  # the next entry is longer than the space left in the reply
            self._stop_before(strand.next)
            return effects
        if status is Status.OK:
            return effects + (self._ask(strand, now_ns, place) if effects or not strand.asking else [])
        if after == strand.next:
            if status in NEGATIVE:
                strand.denied |= bit
            else:
                strand.failed |= bit
        if strand.asking:
            return effects
        return effects + (self._ask(strand, now_ns) or self._exhausted(strand))

    def _left(self, strand: _Strand) -> int:
        """Return the bytes that are still wanted from a strand's next entry on."""
        return self._total_bytes - sum(each.read_bytes for each in self._strands if each.first < strand.next)

    def _stop_before(self, entry_id: int) -> None:
        """End the strands that have read all their entries before an entry."""
        for strand in self._strands:
            if strand.next >= entry_id:
                strand.ended = True

    def _exhausted(self, strand: _Strand) -> list[Effect]:
        """Read the metadata again once all replicas have failed or denied; after that, end the strand (C17)."""
        if not strand.refreshed:
            if self._refreshing:
                return []
            self._refreshing = True
            return [ReadMetadata()]
        strand.ended = True
        everyone = sum(1 << place for place in strand.order)
        denied = strand.current and strand.denied == everyone
        strand.missing = Status.NO_SUCH_ENTRY if denied else Status.UNKNOWN
        return []

    def _refresh(self, metadata: LedgerMetadata | None, now_ns: int, *, current: bool = True) -> list[Effect]:
        """Try exhausted strands again, with the ensembles of the metadata that were read, or else with the old ones.

        A bookie that lost its place may deny an entry that only its successor holds. So answers of replaced bookies are
        dropped, and a denial is final only if the metadata are current.
        """
        if metadata is None:
            self._ended = True
            return [Failed(Reason.DELETED, f"ledger {self.metadata.ledger_id} was deleted")]
        self._refreshing = False
        self.metadata = metadata
        effects: list[Effect] = []
        for strand in self._strands:
            if strand.ended or strand.asking:
                continue
            strand.refreshed = True
            strand.current = current
            ensemble = fragment_of(metadata.fragments, strand.next).ensemble
            for place in strand.order:
                if ensemble[place] != strand.ensemble[place]:
                    strand.denied &= ~(1 << place)
                    strand.failed &= ~(1 << place)
            strand.ensemble = ensemble
            self._cut_at_fragments(strand)
        for strand in self._strands:
            if not strand.ended and not strand.asking:
                effects += self._ask(strand, now_ns) or self._exhausted(strand)
        return effects

    def _cut_at_fragments(self, strand: _Strand) -> None:
        """Split off the entries of later fragments as strands of their own, because other bookies hold them."""
        step = self._stride
        for fragment in self.metadata.fragments:
            if strand.next < fragment.first_entry_id <= strand.last:
                first = fragment.first_entry_id + (strand.next - fragment.first_entry_id) % step
                last, strand.last = strand.last, fragment.first_entry_id - 1
                if first > last:
                    return
                order = self._order(fragment.ensemble, first, 0)
                strand = _Strand(fragment.ensemble, order, first, last, first, refreshed=True, current=strand.current)
                self._strands.append(strand)

    def _speculate(self, now_ns: int) -> list[Effect]:
        """Ask another replica for each strand whose replica is slow; the slow one may still answer."""
        effects: list[Effect] = [WakeAt(now_ns + self._speculative_ns)]
        for strand in self._strands:
            if not strand.ended and strand.asking and now_ns - strand.asked_ns >= self._speculative_ns:
                effects += self._ask(strand, now_ns)
        return effects

    def _end_if_done(self) -> list[Effect]:
        """Report the end once every strand has ended."""
        if self._ended or not all(strand.ended for strand in self._strands):
            return []
        self._ended = True
        unread = [strand for strand in self._strands if strand.next <= strand.last]
        bad = tuple(self._bad)
        if not unread:
            return [ReadEnded(None, Status.OK, bad)]
        strand = min(unread, key=lambda strand: strand.next)
        return [ReadEnded(strand.next, strand.missing, bad)]


class LacMachine:
    """Reads the last add confirmed of a ledger that may be open.

    Without ``beyond`` it asks the whole last ensemble until the responders cover it, so it misses no LAC that an ack
    quorum knew before it began. With ``beyond`` it waits at enough bookies for each ack quorum to include one of them.
    Ends with ``LacRead`` or ``Failed``.

    Args:
        metadata: The ledger's metadata.
        beyond: Wait until the LAC is above this.
        wait_ns: Nanoseconds to wait at most.
        pause_ns: Nanoseconds to let pass before the first bookie is asked.
        retry_ns: While others wait, bookies that did not answer are asked again at this interval, if there is no other
            bookie to wait at; 0 for never.
        rank: The rank of bookies, 0 for those not named; it waits at those with the lowest rank first.

    Threads: one at a time.
    """

    def __init__(
        self,
        metadata: LedgerMetadata,
        *,
        beyond: int | None = None,
        wait_ns: int = 0,
        pause_ns: int = 0,
        retry_ns: int = 0,
        rank: Mapping[Bookie, int] = NO_RANK,
    ) -> None:
        self._metadata = metadata
        self._pause_ns = pause_ns
        self._retry_ns = retry_ns
        self._retrying = False
        self._lost: list[int] = []
        self._beyond = beyond
        self._request = ReadLac(metadata.ledger_id, False, beyond, wait_ns)
        self._quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        ensemble = metadata.fragments[-1].ensemble
        self._ensemble = ensemble
        self._waiting = sorted(range(len(ensemble)), key=lambda place: rank.get(ensemble[place], 0))
        self._tokens = count(1)
        self._asked: dict[int, int] = {}
        self._enough = len(ensemble) if beyond is None else len(ensemble) - metadata.ack_quorum + 1
        self._known = 0
        self._lac = metadata.fragments[-1].first_entry_id - 1
        self._ended = False

    def start(self, now_ns: int) -> list[Effect]:
        """Begin.

        Args:
            now_ns: The time.
        """
        if self._metadata.state is LedgerState.CLOSED:
            return self._end(self._metadata.last_entry_id)
        if self._beyond is not None and self._lac > self._beyond:
            return self._end(self._lac)
        if self._pause_ns:
            return [WakeAt(now_ns + self._pause_ns)]
        return self._begin()

    def _begin(self) -> list[Effect]:
        """Ask the first bookies."""
        self._pause_ns = 0
        return [effect for _ in range(self._enough) for effect in self._ask()]

    def _ask_lost(self) -> list[Effect]:
        """Ask bookies again that did not answer, because requests wait at too few others."""
        self._retrying = False
        self._waiting, self._lost = self._lost, []
        missing = min(len(self._waiting), max(1, self._enough - len(self._asked)))
        return [effect for _ in range(missing) for effect in self._ask()]

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform.

        Args:
            event: What happened.
            now_ns: The time.
        """
        if isinstance(event, Woken) and not self._ended:
            return self._begin() if self._pause_ns else self._ask_lost()
        if self._ended or not isinstance(event, Answered | Unanswered) or event.token not in self._asked:
            return []
        place = self._asked.pop(event.token)
        reply = event.reply if isinstance(event, Answered) else None
        if isinstance(reply, LacReply) and (reply.status is Status.OK or reply.status in NEGATIVE):
            self._known |= 1 << place
            self._lac = max(self._lac, reply.lac)
            if self._beyond is not None and self._lac > self._beyond:
                return self._end(self._lac)
            if self._beyond is None and self._quorum.covered(self._known):
                return self._end(self._lac)
        elif self._beyond is not None:
            self._lost.append(place)
            if self._waiting:
                return self._ask()
            if self._asked and self._retry_ns and not self._retrying:
                self._retrying = True
                return [WakeAt(now_ns + self._retry_ns)]
        if self._asked:
            return []
        if self._beyond is not None and self._known:
            return self._end(self._lac)
        self._ended = True
        answered = [str(self._ensemble[place]) for place in places(self._known)]
        bookies = f"of its last {len(self._ensemble)} bookies"
        who = f"{bookies} only {', '.join(answered)}" if answered else f"none {bookies}"
        detail = (
            f"ledger {self._metadata.ledger_id}: {who} returned the last add confirmed, which is too few; "
            "read it again later"
        )
        return [Failed(Reason.UNDECIDED, detail)]

    def _ask(self) -> list[Effect]:
        """Ask the next bookie."""
        place = self._waiting.pop(0)
        token = next(self._tokens)
        self._asked[token] = place
        return [Send(token, self._ensemble[place], self._request)]

    def _end(self, lac: int) -> list[Effect]:
        """End with a result."""
        self._ended = True
        return [LacRead(lac)]


class LacComparisonMachine:
    """Finds the ledgers whose last add confirmed has not moved, among many, with one request for each bookie.

    It asks the bookies of the last ensembles which of their ledgers have a higher LAC than the client knows. The LAC of
    a ledger has not moved if the answers cover its ensemble, as for ``LacMachine``, and none of them names it: then no
    ack quorum knew a higher one before this began. Ends with ``LacsCompared`` once the answers cover all ensembles, or
    every bookie has answered or failed to.

    Args:
        known: The metadata of each ledger, and its LAC as far as the client knows.

    Threads: one at a time.
    """

    def __init__(self, known: Iterable[tuple[LedgerMetadata, int]]) -> None:
        self._ledgers: dict[tuple[tuple[Bookie, ...], Quorum], list[int]] = {}
        """The ledgers by ensemble and sizes."""
        self._lacs: dict[Bookie, dict[int, int]] = {}
        self._asked: dict[int, Bookie] = {}
        self._unanswered: Counter[Bookie] = Counter()
        """The requests to each bookie that it has not answered."""
        self._moved: set[int] = set()
        self._ended = False
        for metadata, lac in known:
            ledger_id, last = metadata.ledger_id, metadata.fragments[-1]
            if lac < last.first_entry_id - 1:
                self._moved.add(ledger_id)  # the entries before the fragment are confirmed
            quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
            self._ledgers.setdefault((last.ensemble, quorum), []).append(ledger_id)
            for bookie in last.ensemble:
                lacs = self._lacs.setdefault(bookie, {})
                lacs[ledger_id] = min(lac, lacs.get(ledger_id, lac))

    def start(self, now_ns: int) -> list[Effect]:
        """Begin.

        Args:
            now_ns: The time.
        """
        effects: list[Effect] = []
        for bookie, lacs in self._lacs.items():
            ids, known = array("q", lacs), array("q", lacs.values())
            for at in range(0, len(ids), COMPARED_MAX):
                token = len(effects) + 1
                self._asked[token] = bookie
                self._unanswered[bookie] += 1
                request = CompareLacs(ids[at : at + COMPARED_MAX], known[at : at + COMPARED_MAX])
                effects.append(Send(token, bookie, request))
        return effects or self._end()

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform.

        Args:
            event: What happened.
            now_ns: The time.
        """
        if self._ended or not isinstance(event, Answered | Unanswered) or event.token not in self._asked:
            return []
        bookie = self._asked.pop(event.token)
        reply = event.reply if isinstance(event, Answered) else None
        if isinstance(reply, LacsAbove) and reply.status is Status.OK:
            self._moved.update(reply.ledger_ids)
            self._unanswered[bookie] -= 1
        return [] if self._asked and not all(map(self._is_covered, self._ledgers)) else self._end()

    def _is_covered(self, group: tuple[tuple[Bookie, ...], Quorum]) -> bool:
        """Return whether the answers cover an ensemble."""
        ensemble, quorum = group
        return quorum.covered(sum(1 << place for place, each in enumerate(ensemble) if not self._unanswered[each]))

    def _end(self) -> list[Effect]:
        """End with a result: a ledger that was given with two ensembles has not moved only if both are covered."""
        self._ended = True
        covered: set[int] = set()
        for group, ledger_ids in self._ledgers.items():
            (covered if self._is_covered(group) else self._moved).update(ledger_ids)
        return [LacsCompared(frozenset(covered - self._moved))]


def _bytes_of(run: EntryRun) -> int:
    return sum(map(len, run.body))
