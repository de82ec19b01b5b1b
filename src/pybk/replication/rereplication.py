"""Re-replication: copies a fragment's entries, byte for byte, to bookies that take the places of others.

Theory of operation. ``client/rereplication.py`` drives one machine for each fragment that has an end. The machine reads
the metadata, asks for bookies, and then alternates: read a window of entries with ``ReadMachine``, add them to the
targets as a recovery does (C7), up to the fragment's end and not the LAC (C15). Re-replication has no ledger password,
so it asks the source bookie to verify record checksums (``checked``). Only when all copies are durable (I3), one
compare-and-set puts the targets into the fragment, and changes nothing else (I11). It names the version that was read
before the first copy, even if a later one was read since. If it is refused, the machine compares the new metadata, and
tries again or ends undecided. If the ledger is closed by then, the targets may have dropped their entries of it, so
everything is copied again (SD4). A copy may take hours, so nothing is written if a target is now leaving the cluster
(``WriteMetadata.joining``). A failed machine leaves the metadata as it was.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Final

from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata, LedgerState
from pybk.replication.fragments import fragment_end
from pybk.replication.messages import (
    Add,
    Answered,
    BookiesChosen,
    BookiesLeave,
    ChooseBookies,
    Done,
    Effect,
    EntriesRead,
    EntryRun,
    Event,
    Failed,
    MetadataRead,
    MetadataRefused,
    MetadataUnreachable,
    MetadataWritten,
    ReadEnded,
    ReadMetadata,
    Reason,
    Reply,
    Send,
    Status,
    Unanswered,
    WakeAt,
    Woken,
    WriteMetadata,
)
from pybk.replication.pace import Pace
from pybk.replication.placement import usable
from pybk.replication.quorum import Quorum
from pybk.replication.reader import ReadMachine

WINDOW_ENTRIES: Final = 4096
"""The most entries that are read and then written in one window."""

WINDOW_ENTRIES_MIN: Final = 16
"""The fewest entries of a window, and those of the first window, when the size of an entry is not known."""

WINDOW_BYTES: Final = 4 << 20
"""Bytes of a window, about; without this limit large entries would fill the memory and escape the pace."""

READ_BYTES_MAX: Final = 1 << 20
"""Bytes that are read with one request, about; with a pace below this, a window is one piece of the pace."""

_SPECULATIVE_NS: Final = 1_000_000_000

PAUSE_NS_MAX: Final = 1_000_000_000
"""The longest pause of the pace until it is asked again, because its rate may have grown meanwhile."""


class RereplicationMachine:
    """Copies the entries that some bookies of a fragment should hold to other bookies, which then replace them.

    The fragment must have an end: it is not the last one, or the ledger is closed. A live bookie that only misses
    entries gets these entries, and keeps its place, if it is in ``stay``. Ends with ``Done`` and the metadata, even if
    no bookie of ``lost`` is in the fragment, or with ``Failed``, after which it may be tried again.

    Args:
        ledger_id: The ledger.
        first_entry_id: First entry of the fragment.
        lost: Bookies to replace, or to give the entries that they miss.
        stay: Bookies of ``lost`` that keep their places.
        target: The bookie that takes the place of the bookie in ``lost``; None has the machine ask for bookies.
        pace: The rate of the copies; None copies as fast as possible.

    Attributes:
        copied_bytes: Encoded bytes that were sent to bookies.
        unfilled: The reason why bookies of ``lost`` keep places that other bookies should have taken; empty if none
            does.

    Threads: one at a time.
    """

    def __init__(
        self,
        ledger_id: int,
        first_entry_id: int,
        lost: frozenset[Bookie],
        *,
        stay: frozenset[Bookie] = frozenset(),
        target: Bookie | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._ledger_id = ledger_id
        self._first = first_entry_id
        self._lost = lost
        self._stay = stay
        self._target = target
        self._pace = pace
        self.copied_bytes = 0
        self.unfilled = ""
        self._resting = False
        self._tokens = count(1)
        self._targets: dict[int, Bookie] = {}
        self._places: tuple[int, ...] = ()
        self._reader: ReadMachine | None = None
        self._read_tokens: dict[int, int] = {}
        self._adding: set[int] = set()
        self._ended = False
        self._chosen = False
        self._wanted: LedgerMetadata | None = None
        self._writing = False

    def start(self, now_ns: int) -> list[Effect]:
        """Begin with reading the metadata, because another re-replication may have done the work.

        Args:
            now_ns: The time.
        """
        return [ReadMetadata()]

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform.

        Args:
            event: What happened.
            now_ns: The time.
        """
        if self._ended:
            return []
        if isinstance(event, Answered | Unanswered):
            return self._request_ended(event, now_ns)
        if isinstance(event, MetadataRead | MetadataRefused):
            return self._metadata_found(event.metadata, event.version, now_ns)
        if isinstance(event, MetadataWritten):
            assert self._wanted is not None
            return self._end(Done(self._wanted, event.version))
        if isinstance(event, BookiesChosen):
            return self._bookies_chosen(event, now_ns)
        if isinstance(event, BookiesLeave):
            names = ", ".join(map(str, event.bookies))
            return self._fail(Reason.UNDECIDED, f"{names} took copies, and leaves the cluster by now; try it again")
        if isinstance(event, Woken):
            return self._read(Woken(), now_ns) if self._reader is not None else self._rested(now_ns)
        assert isinstance(event, MetadataUnreachable)
        return self._fail(Reason.METADATA_UNREACHABLE, "the metadata store cannot be reached; try again later")

    # ---- metadata --------------------------------------------------------------------------------------------------

    def _metadata_found(self, found: LedgerMetadata | None, version: int, now_ns: int) -> list[Effect]:
        """Act on current metadata: plan the copy, let the reader retry, or resolve a refused compare-and-set."""
        if found is None:
            return self._fail(Reason.DELETED, "it was deleted")
        if self._reader is not None and not self._writing:
            return self._read(MetadataRead(found, version), now_ns)  # the version stays that from before the copies
        if self._writing and found == self._wanted:
            return self._end(Done(found, version))
        index = next((i for i, each in enumerate(found.fragments) if each.first_entry_id == self._first), None)
        if index is None:
            return self._end(Done(found, version))
        last = fragment_end(found, index)
        if last is None:
            return self._fail(
                Reason.UNDECIDED, f"its fragment from entry {self._first} on has no end yet; recover the ledger first"
            )
        self._metadata, self._version, self._last = found, version, last
        self._fragment = found.fragments[index]
        if self._writing:
            return self._refused(now_ns)
        bits = [i for i, bookie in enumerate(self._fragment.ensemble) if bookie in self._lost]
        if not bits:
            return self._end(Done(found, version))
        self._targets = {i: self._fragment.ensemble[i] for i in bits if self._fragment.ensemble[i] in self._stay}
        self._places = tuple(i for i in bits if i not in self._targets)
        if not self._places:
            return self._begin(now_ns)
        if self._target is not None:
            return self._bookies_chosen(BookiesChosen(dict.fromkeys(self._places, self._target)), now_ns)
        return [ChooseBookies(self._places, self._fragment.ensemble, self._lost, copies=True)]

    def _bookies_chosen(self, event: BookiesChosen, now_ns: int) -> list[Effect]:
        """Copy to the bookies that were found; places without one stay as they are."""
        if self._chosen:
            return []
        self._chosen = True
        self._targets |= usable(event.bookies, self._places, list(self._fragment.ensemble))
        lost = [str(self._fragment.ensemble[place]) for place in self._places if place not in self._targets]
        if lost:
            self.unfilled = f"no bookie can take the places of {', '.join(lost)}: {event.why or 'start more bookies'}"
        return self._begin(now_ns) if self._targets else self._fail(Reason.NOT_ENOUGH_BOOKIES, self.unfilled)

    def _refused(self, now_ns: int) -> list[Effect]:
        """Try again after a refused compare-and-set, if the targets still fit."""
        ensemble = self._fragment.ensemble
        for place, bookie in self._targets.items():
            if ensemble[place] not in self._lost or (bookie in ensemble and bookie != ensemble[place]):
                return self._fail(Reason.UNDECIDED, "its ensemble was changed meanwhile; try it again")
        if self._metadata.state is LedgerState.CLOSED:
            self._writing = False
            return self._begin(now_ns)  # SD4: the change may have been the barrier of a target that drops its copy
        return self._compare_and_set()

    def _compare_and_set(self) -> list[Effect]:
        """Start the compare-and-set that puts the targets into the fragment, and changes nothing else (I11)."""
        ensemble = list(self._fragment.ensemble)
        for place, bookie in self._targets.items():
            ensemble[place] = bookie
        if tuple(ensemble) == self._fragment.ensemble:
            return self._end(Done(self._metadata, self._version))
        fragments = tuple(
            Fragment(each.first_entry_id, tuple(ensemble)) if each is self._fragment else each
            for each in self._metadata.fragments
        )
        self._wanted = replace(self._metadata, fragments=fragments, version=self._metadata.version + 1)
        self._writing = True
        joining = frozenset(ensemble).difference(self._fragment.ensemble)
        return [WriteMetadata(self._wanted, self._version, joining)]

    # ---- copying ---------------------------------------------------------------------------------------------------

    def _begin(self, now_ns: int) -> list[Effect]:
        """Begin copying with the first entry."""
        self._quorum = Quorum(self._metadata.ensemble_size, self._metadata.write_quorum, self._metadata.ack_quorum)
        self._next = self._first
        self._read_bytes = 0
        return self._window(now_ns)

    def _window(self, now_ns: int) -> list[Effect]:
        """Read the next window; replace the bookies once the fragment's end, and not the LAC, is reached (C15)."""
        self._reader = None
        self._read_tokens.clear()  # a late answer to the window before is no answer to a request of this one
        if self._next > self._last:
            return self._compare_and_set()
        wait_ns = 0 if self._pace is None else self._pace.wait_ns(now_ns)
        if wait_ns:
            self._resting = True
            return [WakeAt(now_ns + min(wait_ns, PAUSE_NS_MAX))]
        first, last = self._next, min(self._next + self._window_entries() - 1, self._last)
        self._next = last + 1
        residues = frozenset(residue for place in self._targets for residue in self._quorum.residues(place))
        self._reader = ReadMachine(
            self._metadata,
            first,
            last,
            bytes_max=self._piece_bytes(),
            speculative_ns=_SPECULATIVE_NS,
            rank=dict.fromkeys(self._lost, 1),
            residues=residues,
            checked=True,
        )
        return self._reads(self._reader.start(now_ns), now_ns)

    def _window_entries(self) -> int:
        """Return the number of entries of the next window, from the mean size of those before, or of all."""
        copied = self._next - self._first
        size, count = self._read_bytes, copied
        if not copied and self._metadata.state is LedgerState.CLOSED:
            size, count = self._metadata.length, self._metadata.last_entry_id + 1
        if not size or not count:
            return WINDOW_ENTRIES_MIN
        piece = self._piece_bytes()
        window = WINDOW_BYTES if piece == READ_BYTES_MAX else piece
        return max(WINDOW_ENTRIES_MIN, min(WINDOW_ENTRIES, window * count // size))

    def _piece_bytes(self) -> int:
        """Return the bytes that are read with one request."""
        return READ_BYTES_MAX if self._pace is None else min(READ_BYTES_MAX, self._pace.piece_bytes)

    def _rested(self, now_ns: int) -> list[Effect]:
        """Continue with the next window after a pause of the pace."""
        if not self._resting:
            return []
        self._resting = False
        return self._window(now_ns)

    def _read(self, event: Event, now_ns: int) -> list[Effect]:
        """Pass an event to the reader."""
        assert self._reader is not None
        return self._reads(self._reader.step(event, now_ns), now_ns)

    def _reads(self, wanted: list[Effect], now_ns: int) -> list[Effect]:
        """Pass on the reader's effects with tokens of this machine, and write the entries that it read."""
        effects: list[Effect] = []
        for effect in wanted:
            if isinstance(effect, Send):
                token = next(self._tokens)
                self._read_tokens[token] = effect.token
                effects.append(Send(token, effect.bookie, effect.request))
            elif isinstance(effect, EntriesRead):
                effects += self._write(effect.run, now_ns)
            elif isinstance(effect, ReadEnded):
                if effect.missing is not None:
                    detail = (
                        f"entry {effect.missing} cannot be read from any of its bookies; try again when more are back"
                    )
                    return effects + self._fail(Reason.UNDECIDED, detail)
                self._reader = None
            elif isinstance(effect, WakeAt | ReadMetadata):
                effects.append(effect)
            elif isinstance(effect, Failed):
                return effects + self._fail(effect.reason, effect.detail)
        return effects + self._advance(now_ns)

    def _write(self, run: EntryRun, now_ns: int) -> list[Effect]:
        """Add entries to the targets in their write sets, as a recovery does, because the ledger may be fenced (C7)."""
        effects: list[Effect] = []
        size = sum(run.sizes)
        self._read_bytes += size
        mask = self._quorum.mask(run.first) if run.stride > 1 else self._quorum.everyone
        add = Add(self._ledger_id, (run,), self._last, recovery=True)
        for place, bookie in self._targets.items():
            if mask >> place & 1:
                token = next(self._tokens)
                self._adding.add(token)
                effects.append(Send(token, bookie, add))
        copied = size * len(effects)
        self.copied_bytes += copied
        if self._pace is not None:
            self._pace.charge(copied, now_ns)
        return effects

    def _advance(self, now_ns: int) -> list[Effect]:
        """Start the next window once this one is read, and durable on all targets."""
        if self._reader is not None or self._adding or self._writing or self._ended or self._resting:
            return []
        return self._window(now_ns)

    def _request_ended(self, event: Answered | Unanswered, now_ns: int) -> list[Effect]:
        """Handle the outcome of a read or an add."""
        if event.token in self._read_tokens:
            token = self._read_tokens.pop(event.token)
            if self._reader is None:
                return []
            forwarded = Answered(token, event.reply) if isinstance(event, Answered) else Unanswered(token)
            return self._read(forwarded, now_ns)
        if event.token not in self._adding:
            return []
        self._adding.discard(event.token)
        reply = event.reply if isinstance(event, Answered) else None
        if not isinstance(reply, Reply) or reply.status is not Status.OK:
            said = reply.status.name if isinstance(reply, Reply) else "nothing"
            return self._fail(Reason.UNDECIDED, f"a bookie that was to take copies answered {said}; try again")
        return self._advance(now_ns)

    def _end(self, done: Done) -> list[Effect]:
        """End with success."""
        self._ended = True
        return [done]

    def _fail(self, reason: Reason, detail: str) -> list[Effect]:
        """End without success."""
        self._ended = True
        return [Failed(reason, f"ledger {self._ledger_id}: {detail}")]
