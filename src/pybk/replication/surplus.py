"""The drop of a surplus copy: a bookie deletes its entries of a closed ledger whose fragments do not name it.

Theory of operation. Re-replication replaces bookies; a replaced bookie may come back with its entries.
``healing/unnamed_copies.py`` finds such copies, and drives one machine for each that it has seen twice (SD1). The
danger is a re-replication that copies to this very bookie: its adds were acknowledged, and the compare-and-set that
names the bookie may come at any later time. So the machine has this order (see *Surplus copies* in
``docs/design/replication.md``):

1. It reads some entries from each bookie that the fragments name, and asks each for an entry that cannot exist, which
   only a bookie outside limbo denies (SD2).
2. It announces the drop to its own bookie, which from then on notes if entries are added (SD3).
3. It writes the metadata unchanged. This *barrier* takes effect only if the metadata are still those that were judged,
   and afterwards refuses the compare-and-set of every copy that read an older version (SD4).
4. Unless entries were added since step 2, the bookie deletes its entries, and keeps its fence (SD5).

After any failure the machine ends, and the next one begins with step 1. A barrier without a drop is harmless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from random import Random
from typing import Final

from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata, LedgerState
from pybk.replication.fragments import fragment_end
from pybk.replication.messages import (
    NEGATIVE,
    AnnounceDrop,
    Answered,
    Done,
    DropAnnounced,
    DropEnded,
    DropEntries,
    Effect,
    Event,
    Failed,
    MetadataRefused,
    MetadataUnreachable,
    MetadataWritten,
    Read,
    ReadReply,
    Reason,
    Send,
    Status,
    Unanswered,
    WakeAt,
    Woken,
    WriteMetadata,
)
from pybk.replication.replica_check import Span, spans_of

ABSENT_ENTRY: Final = 1 << 62
"""An entry that no ledger has. A bookie denies it, unless the ledger is in limbo there: then it answers *unknown*."""

BOOKIE_NS: Final = 60_000_000_000
"""The longest wait of the machine for its own bookie, which may have stopped serving."""

_RANDOM_ENTRIES: Final = 2
"""Entries of a place that are read besides its first and its last one."""

_ASKED_MAX: Final = 8
"""Reads under way."""


def is_surplus(metadata: LedgerMetadata, bookie: Bookie) -> bool:
    """Return whether a bookie's entries of a ledger are surplus: it is closed, and no fragment names the bookie (SD1).

    Args:
        metadata: The ledger's metadata.
        bookie: Name and instance.
    """
    return metadata.state is LedgerState.CLOSED and all(bookie not in each.ensemble for each in metadata.fragments)


class SurplusDropMachine:
    """Lets one bookie drop its surplus copy of a ledger, after an audit of the copies that the ledger needs.

    Ends with ``Done``, or with ``Failed``, after which the bookie has all or some of its copy, and the drop may be
    tried again.

    Args:
        metadata: The ledger's metadata, for which ``is_surplus`` holds, as they were read last.
        version: Their version.
        own: The bookie of this process, which has the surplus copy.
        source: Draws the entries to audit.

    Threads: one at a time.
    """

    def __init__(self, metadata: LedgerMetadata, version: int, own: Bookie, source: Random) -> None:
        assert is_surplus(metadata, own), "no other copy may be dropped"
        self._metadata = metadata
        self._version = version
        self._own = own
        self._tokens = count(1)
        self._waiting = deque(_audit(metadata, source))
        self._asked: dict[int, tuple[Bookie, Read]] = {}
        self._ended = False

    def start(self, now_ns: int) -> list[Effect]:
        """Begin with the audit.

        Args:
            now_ns: The time.
        """
        return self._advance(now_ns)

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform.

        Args:
            event: What happened.
            now_ns: The time.
        """
        if self._ended:
            return []
        if isinstance(event, Answered | Unanswered):
            return self._audited(event, now_ns)
        if isinstance(event, DropAnnounced):
            return self._announced(event)
        if isinstance(event, MetadataWritten):
            self._version = event.version
            return [DropEntries(), WakeAt(now_ns + BOOKIE_NS)]
        if isinstance(event, DropEnded):
            if not event.dropped:
                return self._fail("entries were added here meanwhile, or its storage failed")
            self._ended = True
            return [Done(self._metadata, self._version)]
        if isinstance(event, MetadataRefused):
            # This holds even if they look as this machine wrote them: another bookie's barrier looks the same, and may
            # have been written before this bookie began to note added entries (SD4).
            return self._fail("its metadata were changed meanwhile")
        if isinstance(event, Woken):
            return self._fail("the bookie did not do what it was asked for")
        assert isinstance(event, MetadataUnreachable)
        return self._fail("the metadata store cannot be reached", Reason.METADATA_UNREACHABLE)

    def _advance(self, now_ns: int) -> list[Effect]:
        """Send further reads, or announce the drop once all answers were sound."""
        effects: list[Effect] = []
        while self._waiting and len(self._asked) < _ASKED_MAX:
            token = next(self._tokens)
            self._asked[token] = self._waiting.popleft()
            effects.append(Send(token, *self._asked[token]))
        return effects if self._asked else [AnnounceDrop(), WakeAt(now_ns + BOOKIE_NS)]

    def _audited(self, event: Answered | Unanswered, now_ns: int) -> list[Effect]:
        """Handle the answer to a read of the audit: the entry must come, or be denied if it cannot exist."""
        asked = self._asked.pop(event.token, None)
        if asked is None:
            return []
        bookie, read = asked
        reply = event.reply if isinstance(event, Answered) else None
        if isinstance(reply, ReadReply) and self._is_sound(read, reply):
            return self._advance(now_ns)
        said = "nothing" if reply is None else reply.status.name
        if read.first == ABSENT_ENTRY:
            return self._fail(f"asked for an entry that cannot exist, {bookie} answered {said} instead of denying it")
        return self._fail(f"asked for entry {read.first}, which it should have, {bookie} answered {said}")

    @staticmethod
    def _is_sound(read: Read, reply: ReadReply) -> bool:
        """Return whether an answer is that of a bookie that has its entries."""
        if read.first == ABSENT_ENTRY:
            return reply.status in NEGATIVE
        return reply.status is Status.OK and reply.run is not None and reply.run.first == read.first

    def _announced(self, event: DropAnnounced) -> list[Effect]:
        """Write the barrier once the bookie notes added entries (SD3)."""
        if not event.ready:
            return self._fail("its entries here are in limbo; the drop waits for its end")
        return self._barrier()

    def _barrier(self) -> list[Effect]:
        """Write the metadata unchanged, which refuses every copy that read them before (SD4)."""
        return [WriteMetadata(replace(self._metadata, version=self._metadata.version + 1), self._version)]

    def _fail(self, detail: str, reason: Reason = Reason.UNDECIDED) -> list[Effect]:
        """End without success."""
        self._ended = True
        ledger_id = self._metadata.ledger_id
        return [Failed(reason, f"ledger {ledger_id}: the surplus copy at {self._own} stays: {detail}")]


def _audit(metadata: LedgerMetadata, source: Random) -> Iterator[tuple[Bookie, Read]]:
    """Yield the reads of the audit: some entries of each place, and of each bookie the one that cannot exist (SD2)."""
    ledger_id = metadata.ledger_id
    bookies: dict[Bookie, None] = {}
    for index, fragment in enumerate(metadata.fragments):
        last = fragment_end(metadata, index)
        assert last is not None, "a closed ledger's fragments have ends"
        for place, bookie in enumerate(fragment.ensemble):
            bookies[bookie] = None
            for entry_id in _drawn(spans_of(metadata, place, fragment.first_entry_id, last), source):
                yield bookie, Read(ledger_id, entry_id, entry_id, 1, 1, checked=True)
    for bookie in bookies:
        yield bookie, Read(ledger_id, ABSENT_ENTRY, ABSENT_ENTRY, 1, 1)


def _drawn(spans: list[Span], source: Random) -> list[int]:
    """Return the first and the last entry of some spans, and a few in between, ascending."""
    if not spans:
        return []
    drawn = {min(span.first for span in spans), max(span.last for span in spans)}
    for _ in range(_RANDOM_ENTRIES):
        span = source.choice(spans)
        drawn.add(span.first + source.randrange(span.entries) * span.step)
    return sorted(drawn)
