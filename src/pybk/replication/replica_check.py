"""Check of one replica: reads all entries that a bookie should have of a fragment, from that bookie alone.

Theory of operation. The machine keeps two reads outstanding. An entry that does not come is missing if the bookie
denies it, damaged if its bytes are wrong, and unknown otherwise. With ``checked`` the bookie verifies record checksums,
and an entry that fails is read once more unchecked, which separates damaged from unknown. This is not BookKeeper's
Auditor, which looks for lost bookies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import Final, NamedTuple

from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata
from pybk.replication.fragments import fragment_of
from pybk.replication.messages import (
    Answered,
    Effect,
    EntriesRead,
    EntryRun,
    Event,
    Read,
    ReadEnded,
    ReadReply,
    Send,
    Status,
    Unanswered,
)
from pybk.replication.quorum import Quorum

_ASKED_MAX: Final = 2
"""Reads under way: the bookie performs one while the answer to the other is checked."""

_SILENT_MAX: Final = 2
"""Reads without an answer after which the bookie counts as unreachable."""


class Span(NamedTuple):
    """Entries ``first``, ``first + step``, … ``last``."""

    first: int
    last: int
    step: int

    @property
    def entries(self) -> int:
        """Number of the entries."""
        return (self.last - self.first) // self.step + 1

    def __str__(self) -> str:
        """Name the entries."""
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}-{self.last}" + (f" by {self.step}" if self.step > 1 else "")


class ReplicaProblem(NamedTuple):
    """The faults of one bookie's copies of a ledger.

    Attributes:
        bookie: The bookie.
        first_entry_id: The first entry of the fragment.
        missing: Entries that it denies.
        damaged: Entries that it has with wrong bytes.
        unknown: Entries that it can neither return nor deny.
        silent: Whether it stopped answering; entries that were not reached are then in none of the lists.
    """

    bookie: Bookie
    first_entry_id: int
    missing: tuple[Span, ...]
    damaged: tuple[Span, ...]
    unknown: tuple[Span, ...]
    silent: bool


class ReplicasCheck(NamedTuple):
    """The result of a check of all copies of a ledger.

    Attributes:
        ledger_id: The ledger.
        copies: Sound copies of entries that were read.
        read_bytes: Their encoded bytes.
        problems: The faults, by bookie and fragment.
    """

    ledger_id: int
    copies: int
    read_bytes: int
    problems: tuple[ReplicaProblem, ...]


class ReplicaCheckMachine:
    """Reads all entries that one bookie of a fragment should hold, and lists those of which it returns no sound copy.

    Ends with ``ReadEnded``; ``EntriesRead`` reports the sound entries before.

    Args:
        metadata: The ledger's metadata.
        place: The bookie's place in the ensemble.
        first: First entry; it selects the fragment.
        last: Last entry, inclusive, of the same fragment.
        bytes_max: Encoded bytes that one reply may have.
        window: Entries asked for at a time, about as many as ``bytes_max`` holds.
        checked: Have the bookie verify record checksums, because the reader has no ledger password.
        entries: Read only these of the entries that the bookie should have; None reads all.

    Attributes:
        bookie: The bookie.
        missing: Entries that it denies.
        damaged: Entries that it holds with wrong bytes.
        unknown: Entries that it can neither return nor deny: it cannot read them, or is in limbo.
        silent: Whether it stopped answering; entries that were not reached are then in none of the lists.

    Threads: one at a time.
    """

    def __init__(
        self,
        metadata: LedgerMetadata,
        place: int,
        first: int,
        last: int,
        *,
        bytes_max: int,
        window: int,
        checked: bool,
        entries: Iterable[int] | None = None,
    ) -> None:
        self.bookie = fragment_of(metadata.fragments, first).ensemble[place]
        self._ledger_id = metadata.ledger_id
        self._bytes_max = bytes_max
        self._checked = checked
        self._tokens = count(1)
        spans = spans_of(metadata, place, first, last) if entries is None else [Span(each, each, 1) for each in entries]
        self._waiting = deque(
            Span(low, min(low + (window - 1) * span.step, span.last), span.step)
            for span in spans
            for low in range(span.first, span.last + 1, window * span.step)
        )
        self._asked: dict[int, tuple[Span, bool]] = {}
        self._silences = 0
        self._ended = False
        self.silent = False
        self._missing: list[Span] = []
        self._damaged: list[Span] = []
        self._unknown: list[Span] = []

    @property
    def missing(self) -> tuple[Span, ...]:
        """See the class."""
        return joined(self._missing)

    @property
    def damaged(self) -> tuple[Span, ...]:
        """See the class."""
        return joined(self._damaged)

    @property
    def unknown(self) -> tuple[Span, ...]:
        """See the class."""
        return joined(self._unknown)

    def start(self, now_ns: int) -> list[Effect]:
        """Begin.

        Args:
            now_ns: The time.
        """
        return self._advance()

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform.

        Args:
            event: What happened.
            now_ns: The time.
        """
        if self._ended or not isinstance(event, Answered | Unanswered) or event.token not in self._asked:
            return []
        span, probing = self._asked.pop(event.token)
        reply = event.reply if isinstance(event, Answered) else None
        if not isinstance(reply, ReadReply):
            self._silences += 1
            self._waiting.appendleft(span)
            if self._silences >= _SILENT_MAX:
                self.silent = True
                self._waiting.clear()
            return self._advance()
        self._silences = 0
        if probing:
            self._note_probe(span, reply)
            return self._advance()
        effects: list[Effect] = []
        after = _after(reply.run, span)
        if after != span.first and reply.run is not None:
            effects.append(EntriesRead(reply.run))
        if after <= span.last:
            effects += self._rest(Span(after, span.last, span.step), reply, moved=after != span.first)
        return effects + self._advance()

    def _advance(self) -> list[Effect]:
        """Ask for more, or end."""
        effects: list[Effect] = []
        while self._waiting and len(self._asked) < _ASKED_MAX:
            effects += self._ask(self._waiting.popleft(), probing=False)
        if not self._asked and not self._waiting:
            self._ended = True
            effects.append(ReadEnded(None, Status.OK, ()))
        return effects

    def _ask(self, span: Span, *, probing: bool) -> list[Effect]:
        token = next(self._tokens)
        self._asked[token] = span, probing
        checked = self._checked and not probing
        read = Read(self._ledger_id, span.first, span.last, span.step, self._bytes_max, checked=checked)
        return [Send(token, self.bookie, read)]

    def _rest(self, rest: Span, reply: ReadReply, *, moved: bool) -> list[Effect]:
        """Note why the first entry of a span did not come, and continue after it; ask again if it did not fit."""
        if reply.status is Status.OK and moved:
            self._waiting.appendleft(rest)
            return []
        if reply.status is Status.NO_SUCH_LEDGER:
            self._missing.append(rest)
            return []
        one = Span(rest.first, rest.first, rest.step)
        if rest.first < rest.last:
            self._waiting.appendleft(Span(rest.first + rest.step, rest.last, rest.step))
        if reply.status is Status.NO_SUCH_ENTRY:
            self._missing.append(one)
        elif reply.damaged:
            self._damaged.append(one)
        elif self._checked:
            return self._ask(one, probing=True)  # a record may be there whose checksum is wrong
        else:
            self._unknown.append(one)
        return []

    def _note_probe(self, one: Span, reply: ReadReply) -> None:
        """Note an entry as damaged if it comes without the bookie's check, else as unknown."""
        if reply.damaged or _after(reply.run, one) > one.last:
            self._damaged.append(one)
        else:
            self._unknown.append(one)


def spans_of(metadata: LedgerMetadata, place: int, first: int, last: int) -> list[Span]:
    """Return the entries of a range that a bookie takes, one span per residue.

    Args:
        metadata: The ledger's metadata.
        place: The bookie's place in the ensemble.
        first: First entry.
        last: Last entry, inclusive.
    """
    quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
    step = len(quorum.masks())
    residues = sorted(quorum.residues(place)) if step > 1 else [0]
    lows = (first + (residue - first) % step for residue in residues)
    return [Span(low, last - (last - low) % step, step) for low in lows if low <= last]


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return spans in order, with adjacent ones merged."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.first % span.step, span.first)):
        if found and found[-1].step == span.step and found[-1].last + span.step == span.first:
            found[-1] = found[-1]._replace(last=span.last)
        else:
            found.append(span)
    return tuple(sorted(found))


def _after(run: EntryRun | None, span: Span) -> int:
    """Return the first entry of a span that did not come."""
    if run is None or not len(run.sizes) or run.first != span.first or (run.stride != span.step and len(run.sizes) > 1):
        return span.first
    return run.last + span.step
