"""Recovery of a ledger that was never closed: fence, find its end, write back, close.

Theory of operation. The client's driver calls ``start`` once and then ``step`` for each event. States:

- MARKING: the metadata is set to IN_RECOVERY, so the old writer's next compare-and-set is refused (AR1).
- FENCING: all bookies of the last fragment are fenced, until those that answered cover every write set (AR2, C6). The
  LAC is the highest answer, at least the entry before the last fragment (D2), and is frozen from now on (D4).
- READING: entries after the LAC are read, with the fence flag (D1), from the ensemble that was fenced (AR3, D3). One
  copy recovers an entry; QC denials end the ledger before it; other answers decide nothing (AR4, C5). Recovered entries
  are written back through ``Inflight`` (AR5). Ensemble changes stay in memory (AR7).
- CLOSING: state, end, length and fragments are written by one compare-and-set (AR9). A refusal is resolved by what
  the store holds: another client's close is adopted; if the last fragment is unchanged, the new metadata are closed.
- DOUBTING: a member met a question that only a password can decide, and reads the metadata once more before it ends.
- ENDED: late answers still report bookies that miss entries (C13).

Two recoveries may run at once: both find every acknowledged entry, and one compare-and-set wins (I1).

A *member's* recovery has no password: it can verify neither digests nor LACs. ``docs/design/replication.md`` has its
rules. In short: bookies check their records for it (AM1); it takes no LAC, and reads the last fragment from its first
entry on (AM2); it takes an entry of which Qa bookies returned equal copies, or one copy if all bookies of the write set
answered and fewer than QC deny it (AM4). Any contradiction ends it, and leaves the ledger to its owner (AM3, AM4, AM5).
It closes without a seal (AM6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from itertools import count
from typing import Final

from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.replication.entry_runs import cut, entries_of, lac_at, length_at
from pybk.replication.fragments import with_ensemble
from pybk.replication.inflight import Batch, Inflight
from pybk.replication.messages import (
    NEGATIVE,
    Answered,
    BookiesChosen,
    BookiesLeave,
    ChooseBookies,
    Done,
    Effect,
    Event,
    Failed,
    LacReply,
    MetadataRead,
    MetadataRefused,
    MetadataUnreachable,
    MetadataWritten,
    Read,
    ReadLac,
    ReadMetadata,
    ReadReply,
    Reason,
    Reply,
    Send,
    Status,
    Unanswered,
    UnderReplicated,
    WakeAt,
    Woken,
    WriteMetadata,
)
from pybk.replication.placement import usable
from pybk.replication.quorum import Quorum, places

READ_ENTRIES_MAX: Final = 4096
"""Entries that one read asks for."""

READ_BYTES_MAX: Final = 1 << 20
"""Encoded bytes that one read asks for, and that are written back in one add."""

UNWRITTEN_MAX: Final = 4 * READ_ENTRIES_MAX
"""Entries that may be read and not confirmed; at this number no more are asked for."""

MEMBER_BYTES_MAX: Final = 64 << 20
"""Bytes that a member may have read and not confirmed; one bookie may be much faster than the others."""

RETRY_NS: Final = 200_000_000
"""Pause before the bookies whose answers did not count are asked again."""

RETRY_FOR_NS: Final = 5 * 10**9
"""The time for which bookies are asked again, from the first round without progress; then the recovery ends undecided.

A round takes as long as its slowest answer, so the bound is a time and not a number of rounds: a stopped bookie is
noticed by the timeout of a request only (5 s). A round that has begun is waited for, so the recovery makes no progress
for at most this time, the pause and two timeouts.
"""

_STRAGGLER_BYTES: Final = 64 << 20
_OWNER: Final = "only its password shows what is right: open it with its password to recover it"


class _RecoveryPhase(Enum):
    """The states of a recovery; the theory of operation explains them."""

    MARKING = 0
    FENCING = 1
    READING = 2
    CLOSING = 3
    DOUBTING = 4
    ENDED = 5


class RecoveryMachine:
    """Finds the end of a ledger, and closes the ledger there.

    All acknowledged entries are kept. Ends with ``Done`` and the metadata, even if another client closed the ledger
    meanwhile; or with ``Failed``, after which the ledger is unchanged or in recovery, and another recovery may begin.

    Args:
        metadata: The ledger's metadata, as read.
        version: Their version in the metadata store.
        seal: Returns the metadata of the closed ledger with the proof of its end, from the last entry as it was read
            (``b""`` for an empty ledger); a function of its arguments alone. None adds no proof.
        member: Whether the client has no password. The machine then ends with ``Reason.OWNER_NEEDED`` where only a
            password can decide.

    Threads: one at a time.
    """

    def __init__(
        self,
        metadata: LedgerMetadata,
        version: int,
        *,
        seal: Callable[[LedgerMetadata, bytes | memoryview], LedgerMetadata] | None = None,
        member: bool = False,
    ) -> None:
        self._metadata = metadata
        self._version = version
        self._wanted = metadata
        self._quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        self._masks = self._quorum.masks()
        self._stride = len(self._masks)
        self._tokens = count(1)
        self._phase = _RecoveryPhase.MARKING
        self._stuck_since_ns: int | None = None
        """The time when a round first ended without progress; None after progress."""
        self._waiting = False
        self._closed = False
        self._stored_last: dict[int, int] = {}
        self._fences: dict[int, int] = {}
        self._known = 0
        self._lac = -1
        self._refusals: dict[int, str] = {}
        self._seal = seal
        self._member = member
        self._claimed = -1
        """The highest LAC that was reported to a member, which cannot verify it (AM3)."""
        self._doubt = ""
        """The contradiction that a member found and only a password can decide; empty for none."""
        self._last_entry: bytes | memoryview = b""

    def start(self, now_ns: int) -> list[Effect]:
        """Begin.

        Args:
            now_ns: The time.
        """
        return self._mark(self._metadata, self._version)

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform.

        Args:
            event: What happened.
            now_ns: The time.
        """
        kind = type(event)
        if self._phase is _RecoveryPhase.ENDED:
            return self._late(event)
        if kind is Answered or kind is Unanswered:
            return self._request_ended(event, now_ns)  # type: ignore[arg-type]
        if isinstance(event, MetadataWritten):
            return self._metadata_written(event.version, now_ns)
        if isinstance(event, MetadataRefused | MetadataRead):
            return self._metadata_refused(event.metadata, event.version, now_ns)
        if isinstance(event, BookiesChosen):
            return self._bookies_chosen(event, now_ns)
        if isinstance(event, Woken):
            return self._woken(now_ns)
        if isinstance(event, BookiesLeave):
            names = ", ".join(map(str, event.bookies))
            return self._end(Reason.UNDECIDED, f"{names} took entries, and leaves the cluster by now; recover it again")
        assert isinstance(event, MetadataUnreachable)
        self._closed = self._phase is _RecoveryPhase.CLOSING  # or it may have
        return self._end(Reason.METADATA_UNREACHABLE, "the metadata store cannot be reached; recover it again later")

    # ---- metadata --------------------------------------------------------------------------------------------------

    def _mark(self, found: LedgerMetadata | None, version: int) -> list[Effect]:
        """Set the state IN_RECOVERY in the metadata, so that ensemble changes of the writer are refused (AR1)."""
        self._version = version
        if found is None:
            return self._end(Reason.DELETED, "the ledger was deleted")
        self._metadata = found
        if found.state is LedgerState.CLOSED:
            return self._done(found, version)
        self._wanted = replace(found, state=LedgerState.IN_RECOVERY, version=found.version + 1)
        return [WriteMetadata(self._wanted, version)]

    def _metadata_written(self, version: int, now_ns: int) -> list[Effect]:
        """Handle the success of a compare-and-set: the ledger is marked, or closed."""
        self._version = version
        if self._phase is _RecoveryPhase.CLOSING:
            return self._done(self._wanted, version)
        if self._phase is not _RecoveryPhase.MARKING:
            return []
        self._metadata = self._wanted
        self._phase = _RecoveryPhase.FENCING
        fragment = self._metadata.fragments[-1]
        self._ensemble = fragment.ensemble
        self._lac = fragment.first_entry_id - 1  # D2: the bookies of an empty last fragment have no earlier entries
        return self._fence(self._quorum.everyone)

    def _metadata_refused(self, found: LedgerMetadata | None, version: int, now_ns: int) -> list[Effect]:
        """Handle a refused compare-and-set: another recovery, the writer or a re-replication changed the metadata."""
        if found is not None and found == self._wanted and self._phase is not _RecoveryPhase.DOUBTING:
            return self._metadata_written(version, now_ns)
        if self._phase is _RecoveryPhase.MARKING:
            return self._mark(found, version)
        if self._phase not in (_RecoveryPhase.CLOSING, _RecoveryPhase.DOUBTING):
            return []
        if found is None:
            return self._end(Reason.DELETED, "the ledger was deleted")
        if found.state is LedgerState.CLOSED:
            return self._done(found, version)
        if self._doubt:
            return self._end(Reason.OWNER_NEEDED, f"{self._doubt}; {_OWNER}")
        if found.state is LedgerState.OPEN or found.fragments[-1] != self._metadata.fragments[-1]:
            return self._end(Reason.UNDECIDED, "its last fragment was changed during the recovery; recover it again")
        return self._close(found, version)

    def _close(self, found: LedgerMetadata, version: int) -> list[Effect]:
        """Write the end and this recovery's ensembles by one compare-and-set (AR9, D3)."""
        self._phase = _RecoveryPhase.CLOSING
        self._version = version
        own = self._fragments[len(self._metadata.fragments) - 1 :]
        closed = found.closed_at(self._inflight.lac, self._inflight.length)
        self._wanted = replace(closed, fragments=found.fragments[:-1] + own)
        if self._seal is not None:
            self._wanted = self._seal(self._wanted, self._last_entry)
        named = {bookie for fragment in found.fragments for bookie in fragment.ensemble}
        joining = frozenset(bookie for fragment in own for bookie in fragment.ensemble) - named
        return [WriteMetadata(self._wanted, version, joining)]

    # ---- fencing ---------------------------------------------------------------------------------------------------

    def _fence(self, bits: int) -> list[Effect]:
        """Send fences to places; at first to all places of the last fragment."""
        request = ReadLac(self._metadata.ledger_id, fence=True)
        effects: list[Effect] = []
        for place in places(bits):
            token = next(self._tokens)
            self._fences[token] = place
            effects.append(Send(token, self._ensemble[place], request))
        return effects

    def _fenced(self, place: int, reply: object, now_ns: int) -> list[Effect]:
        """Handle the reply to a fence: the bookie was fenced, or its reply does not count (AR2)."""
        self._note_stored(place, reply)
        if self._phase is not _RecoveryPhase.FENCING:
            return self._lagging(place)
        if isinstance(reply, LacReply) and (reply.status is Status.OK or reply.status in NEGATIVE):
            self._known |= 1 << place
            self._note_lac(reply.lac)
        else:
            self._note(place, reply)
        if self._quorum.covered(self._known) and not (self._member and self._fences):
            return self._begin_reading(now_ns)
        return [] if self._fences else self._retry(now_ns, "fenced")

    def _note_lac(self, lac: int) -> None:
        """Take the LAC that a bookie returned, which is proven (AR2), or only reported to a member (AM2)."""
        if self._member:
            self._claimed = max(self._claimed, lac)
        else:
            self._lac = max(self._lac, lac)

    def _note_stored(self, place: int, reply: object) -> None:
        """Note the last entry of a fenced bookie, which accepts no further entries of the writer."""
        if isinstance(reply, LacReply) and reply.status is Status.OK:  # else its last entry is not known
            self._stored_last[place] = reply.entry_id

    def _lagging(self, place: int) -> list[Effect]:
        """Report the entries up to the LAC that a bookie lacks, because recovery does not write them back (C13).

        A bookie without a reply that counts may lack all entries of the last consecutive fragments that name it. It is
        reported at once, because a later recovery would find the entries that this one wrote back to the bookie, but
        not the gap before them.
        """
        bookie, first = self._ensemble[place], self._lac + 1
        for fragment in reversed(self._metadata.fragments):
            if fragment.ensemble[place] != bookie:
                break
            first = fragment.first_entry_id
        ends = range(max(first, self._lac - self._stride + 1), self._lac + 1)
        last = max((entry_id for entry_id in ends if place in self._quorum.write_set(entry_id)), default=-1)
        held = self._stored_last.get(place, first - 1)
        return [UnderReplicated(bookie, max(first, held + 1))] if held < last else []

    def _retry(self, now_ns: int, what: str) -> list[Effect]:
        """Ask bookies again later if their answers decide nothing: silence and UNKNOWN are no denials (AR4)."""
        if self._waiting:
            return []
        if self._stuck_since_ns is None:
            self._stuck_since_ns = now_ns
        if now_ns - self._stuck_since_ns >= RETRY_FOR_NS:
            said = ", ".join(f"{self._ensemble[place]}: {self._refusals[place]}" for place in sorted(self._refusals))
            denied = any(text == Status.UNAUTHORIZED.name for text in self._refusals.values())
            reason = Reason.UNAUTHORIZED if denied else Reason.UNDECIDED
            remedy = "recover it when they are back"
            if denied and self._member:
                remedy = f"they do not let members recover ledgers without their passwords; {_OWNER}"
            return self._end(reason, f"too few bookies can be {what} ({said}); {remedy}")
        self._waiting = True
        return [WakeAt(now_ns + RETRY_NS)]

    def _note(self, place: int, reply: object) -> None:
        """Note for the error message why a bookie's reply does not count."""
        status = getattr(reply, "status", None)
        self._refusals[place] = "no answer" if status is None else status.name

    # ---- reading ---------------------------------------------------------------------------------------------------

    def _begin_reading(self, now_ns: int) -> list[Effect]:
        """Begin reading after the last add confirmed, which is final now (AR3, D4)."""
        self._phase = _RecoveryPhase.READING
        self._stuck_since_ns = None
        self._fragments = self._metadata.fragments
        self._inflight = Inflight(
            self._metadata.ledger_id,
            self._quorum,
            self._ensemble,
            lac=self._lac,
            length=0,
            next_token=self._tokens.__next__,
            recovery=True,
            lac_sent=self._lac,
            straggler_bytes=_STRAGGLER_BYTES,
        )
        self._choosing: tuple[int, ...] = ()
        self._next = self._lac + 1
        self._end_at: int | None = None
        self._found: dict[int, memoryview] = {}
        self._found_bytes = 0
        self._denied: dict[int, int] = {}
        self._unknown: dict[int, int] = {}
        first = self._next
        self._heads = {entry % self._stride: entry for entry in range(first, first + self._stride)}
        self._asking = [0] * self._stride
        self._silent = 0
        """Places whose last read had no answer; a member no longer waits for them."""
        self._copies: dict[int, int] = {}
        """Places that returned a copy to a member, by entry."""
        self._upto: dict[tuple[int, int], int] = {}
        """The first entry of each place and residue that the place did not return to a member."""
        self._reads: dict[int, tuple[int, int, int]] = {}
        self._length_asked: dict[int, int] = {}
        self._length_known = self._lac < 0
        self._before: memoryview | None = None
        """The first copy of the last confirmed entry, whose header has the length."""
        waiting = set(self._fences.values())
        heard = (place for place in range(len(self._ensemble)) if place not in waiting)
        effects = [effect for place in heard for effect in self._lagging(place)]
        return effects + self._ask_length() + self._advance(now_ns)

    def _ask_length(self) -> list[Effect]:
        """Read the last confirmed entry, whose header has the ledger's length if no entry follows."""
        if self._length_known:
            return []
        lac = self._lac
        fragment = next(each for each in reversed(self._metadata.fragments) if each.first_entry_id <= lac)
        fence = fragment is self._metadata.fragments[-1]
        request = Read(self._metadata.ledger_id, lac, lac, self._stride, READ_BYTES_MAX, fence, self._member)
        effects: list[Effect] = []
        for place in self._quorum.write_set(lac):
            token = next(self._tokens)
            self._length_asked[token] = place
            effects.append(Send(token, fragment.ensemble[place], request))
        return effects

    def _ask(self) -> list[Effect]:
        """Send reads with the fence flag to all bookies that may have the next entry of each residue."""
        if self._member:
            return self._ask_each()
        effects: list[Effect] = []
        stride = self._stride
        for residue, entry in self._heads.items():
            while entry in self._found or entry < self._next:
                entry += stride
            self._heads[residue] = entry
            if self._end_at is not None or len(self._found) + self._next - self._inflight.lac > UNWRITTEN_MAX:
                continue
            heard = self._denied.get(entry, 0) | self._unknown.get(entry, 0) | self._asking[residue]
            asked = self._masks[residue] & ~heard
            if not asked:
                continue
            effects += self._read(asked, residue, entry)
        return effects

    def _ask_each(self) -> list[Effect]:
        """Ask each bookie for all entries that it has: a member needs several copies, and the denials (AM4)."""
        effects: list[Effect] = []
        pending = self._inflight.pending
        unconfirmed = pending[-1].length - self._inflight.length if pending else 0
        ahead = UNWRITTEN_MAX if self._found_bytes + unconfirmed <= MEMBER_BYTES_MAX else 0
        for residue, mask in enumerate(self._masks):
            lowest = self._next + (residue - self._next) % self._stride
            for place in places(mask & ~self._asking[residue]):
                first = max(self._upto.get((place, residue), 0), lowest)
                heard = (self._denied.get(first, 0) | self._unknown.get(first, 0)) >> place & 1
                due = first - self._inflight.lac <= ahead or (first == lowest and not pending)
                if self._end_at is None and due and not heard:
                    effects += self._read(1 << place, residue, first)
        return effects

    def _read(self, asked: int, residue: int, first: int) -> list[Effect]:
        """Send a read with the fence flag (D1) to places; a member has the bookies check their records (AM1)."""
        self._asking[residue] |= asked
        last = first + (READ_ENTRIES_MAX - 1) * self._stride
        request = Read(
            self._metadata.ledger_id, first, last, self._stride, READ_BYTES_MAX, fence=True, checked=self._member
        )
        effects: list[Effect] = []
        for place in places(asked):
            token = next(self._tokens)
            self._reads[token] = (place, residue, first)
            effects.append(Send(token, self._ensemble[place], request))
        return effects

    def _note_entries(self, place: int, residue: int, first: int, reply: object) -> None:
        """Note the entries that a bookie returned, and its denial of the entry after them (AR4)."""
        bit = 1 << place
        self._asking[residue] &= ~bit
        self._silent = self._silent & ~bit if isinstance(reply, ReadReply) else self._silent | bit
        after, status = first, Status.UNKNOWN
        if isinstance(reply, ReadReply):
            status = reply.status
            run = reply.run
            if run is not None and len(run.sizes) and run.first == first and run.stride == self._stride:
                after = run.last + run.stride
                for entry_id, entry in zip(range(first, after, run.stride), entries_of(run), strict=True):
                    if entry_id >= self._next:
                        self._found_bytes += len(entry) if entry_id not in self._found else 0
                        self._compare(entry_id, self._found.setdefault(entry_id, entry), entry)
                        self._copies[entry_id] = self._copies.get(entry_id, 0) | bit
                self._upto[place, residue] = after
                if status is Status.OK:
                    return
        if status in NEGATIVE:
            self._denied[after] = self._denied.get(after, 0) | bit
        else:
            self._unknown[after] = self._unknown.get(after, 0) | bit
            self._note(place, reply)

    def _compare(self, entry_id: int, first: memoryview, copy: memoryview) -> None:
        """Compare a copy of an entry with the first copy; a member can verify neither by its digest (AM4)."""
        if not self._member:
            return
        self._claimed = max(self._claimed, lac_at(copy))
        if first != copy:
            self._doubt = f"its bookies returned different copies of entry {entry_id}"

    def _is_heard(self, entry_id: int) -> bool:
        """Return whether an entry can be decided: for a member, Qa copies are equal, or all bookies answered (AM4)."""
        copies = self._copies.get(entry_id, 0)
        if not self._member or copies.bit_count() >= self._quorum.ack_quorum:
            return True
        heard = copies | self._denied.get(entry_id, 0) | self._unknown.get(entry_id, 0) | self._silent
        return not self._masks[entry_id % self._stride] & ~heard

    def _is_denied(self, entry_id: int) -> bool:
        """Return whether QC bookies deny an entry, which was then never acked (AR4)."""
        return self._denied.get(entry_id, 0).bit_count() >= self._quorum.negatives_needed

    def _decide(self) -> list[Effect]:
        """Decide the entries in order: write back those that were found, end before one that QC bookies deny (AR4)."""
        effects: list[Effect] = []
        entries: list[memoryview] = []
        size = 0
        while self._end_at is None and self._is_heard(self._next):
            entry = self._found.pop(self._next, None)
            if entry is not None and not (self._member and self._is_denied(self._next)):
                self._forget(self._next, len(entry))
                entries.append(entry)
                size += len(entry)
                self._next += 1
                if size >= READ_BYTES_MAX or len(entries) >= READ_ENTRIES_MAX:
                    effects += self._write_back(entries)
                    entries, size = [], 0
                continue
            if self._is_denied(self._next):  # C5: at once
                self._end_at = self._next - 1
            break
        return effects + (self._write_back(entries) if entries else [])

    def _forget(self, entry_id: int, size: int) -> None:
        """Forget the holders of an entry that is decided, so that a long fragment takes no memory for each entry."""
        self._found_bytes -= size
        for known in (self._copies, self._denied, self._unknown):
            known.pop(entry_id, None)

    def _write_back(self, entries: list[memoryview]) -> list[Effect]:
        """Write entries back unchanged to the bookies of their write sets (AR5)."""
        self._stuck_since_ns = None
        self._length_known = True
        self._last_entry = entries[-1]
        first = self._next - len(entries)
        runs = cut(first, [len(entry) for entry in entries], entries, self._quorum)
        return self._inflight.submit(Batch(first, self._next - 1, length_at(entries[-1]), runs))

    # ---- events ----------------------------------------------------------------------------------------------------

    def _request_ended(self, event: Answered | Unanswered, now_ns: int) -> list[Effect]:
        """Handle a reply, or a missing reply."""
        token = event.token
        reply = event.reply if isinstance(event, Answered) else None
        if token in self._fences:
            return self._fenced(self._fences.pop(token), reply, now_ns)
        if self._phase is _RecoveryPhase.CLOSING:
            self._note_add(token, reply)
            return self._give_up_failed()
        if self._phase is not _RecoveryPhase.READING:
            return []
        effects: list[Effect] = []
        if token in self._reads:
            self._note_entries(*self._reads.pop(token), reply)
        elif token in self._length_asked:
            self._note_length(self._length_asked.pop(token), reply)
        elif isinstance(reply, Reply):
            if reply.status is Status.CONFLICT and self._member:
                self._doubt = "a bookie holds other bytes for an entry than another one returned"
            elif reply.status in (Status.UNAUTHORIZED, Status.DELETED):
                return self._end(Reason[reply.status.name], f"a bookie answered {reply.status.name}")
            effects += self._inflight.answered(token, reply) or []
        else:
            self._inflight.unanswered(token)
        return effects + self._advance(now_ns)

    def _note_length(self, place: int, reply: object) -> None:
        """Take the length from the last confirmed entry."""
        if isinstance(reply, ReadReply) and reply.run is not None and reply.run.first == self._lac:
            entry = entries_of(reply.run)[0]
            self._before = self._before or entry
            self._compare(self._lac, self._before, entry)
            if not self._length_known:
                self._length_known = True
                self._last_entry = entry
                self._inflight.length = length_at(entry)
        else:
            self._note(place, reply)

    def _advance(self, now_ns: int) -> list[Effect]:
        """Take the steps that are due: decide, write back, confirm, change the ensemble, close."""
        inflight = self._inflight
        if self._doubt:
            return self._look_again()
        effects = self._decide()
        inflight.confirm()
        if self._is_complete():
            return effects + self._finish()
        if inflight.failed and not self._choosing:
            self._choosing = tuple(places(inflight.failed | inflight.dead))
            effects.append(ChooseBookies(self._choosing, tuple(inflight.ensemble), frozenset(inflight.avoided)))
        effects += self._ask()
        if not self._reads and not self._length_asked and self._is_stuck():
            effects += self._retry(now_ns, "read")
        return effects

    def _is_complete(self) -> bool:
        """Return whether everything up to the end is confirmed; bookies that fail from then on are not replaced."""
        return self._end_at == self._inflight.lac and self._length_known

    def _finish(self) -> list[Effect]:
        """Close; a member waits for the answers to its adds (AM5), and ends if a higher LAC was reported (AM3)."""
        if self._member and (self._inflight.sent or self._length_asked):
            return []
        if self._claimed > self._inflight.lac:
            end = self._inflight.lac
            self._doubt = f"entries were found up to {end}, but a bookie says that {self._claimed} was confirmed"
            return self._look_again()
        return self._give_up_failed() + self._close(replace(self._metadata), self._version)

    def _look_again(self) -> list[Effect]:
        """Read the metadata (AM7): if another client closed or deleted the ledger, that explains the doubt."""
        self._phase = _RecoveryPhase.DOUBTING
        return [ReadMetadata()]

    def _is_stuck(self) -> bool:
        """Return whether an entry is undecided and no read is under way, so that silent bookies must be asked again."""
        if self._inflight.pending or self._choosing:
            return False
        return self._end_at is None or not self._length_known

    def _woken(self, now_ns: int) -> list[Effect]:
        """Ask the bookies again whose replies did not count."""
        self._waiting = False
        if self._phase is _RecoveryPhase.FENCING:
            return [] if self._fences else self._fence(self._quorum.everyone & ~self._known)
        if self._phase is not _RecoveryPhase.READING:
            return []
        self._unknown.clear()
        length = [] if self._length_asked or self._end_at is None else self._ask_length()
        return length + self._advance(now_ns)

    def _bookies_chosen(self, event: BookiesChosen, now_ns: int) -> list[Effect]:
        """Change the ensemble in memory; reads still use the ensemble that was fenced (AR7, D3)."""
        if self._phase is not _RecoveryPhase.READING or not self._choosing:
            return []
        if self._is_complete():
            return self._advance(now_ns)
        inflight = self._inflight
        replacements = usable(event.bookies, self._choosing, inflight.ensemble)
        effects: list[Effect] = []
        for place in self._choosing:
            if place not in replacements:
                effects += inflight.give_up(place)
        self._choosing = ()
        lacking = inflight.lacking(replacements, event.why)
        if lacking:
            return effects + self._end(Reason.NOT_ENOUGH_BOOKIES, lacking)
        if replacements:
            effects += inflight.leaving(replacements)
            effects += inflight.exchange(replacements)
            self._fragments = with_ensemble(self._fragments, inflight.lac + 1, tuple(inflight.ensemble))
        return effects + self._advance(now_ns)

    def _done(self, metadata: LedgerMetadata, version: int) -> list[Effect]:
        """End with success: the ledger is closed, by this recovery or by another client."""
        self._closed = self._phase is _RecoveryPhase.CLOSING and metadata == self._wanted
        self._phase = _RecoveryPhase.ENDED
        return [Done(metadata, version)]

    def _late(self, event: Event) -> list[Effect]:
        """After the end, handle a late reply to a fence, or to an add if this recovery closed the ledger (C13)."""
        if not isinstance(event, Answered | Unanswered):
            return []
        reply = event.reply if isinstance(event, Answered) else None
        if event.token in self._fences:
            place = self._fences.pop(event.token)
            self._note_stored(place, reply)
            return self._lagging(place)
        if not self._closed:
            return []
        self._note_add(event.token, reply)
        return self._give_up_failed()

    def _note_add(self, token: int, reply: object) -> None:
        """After the end, report the entries of a write-back that a bookie did not store."""
        if isinstance(reply, Reply):
            self._inflight.answered(token, reply)
        else:
            self._inflight.unanswered(token)

    def _give_up_failed(self) -> list[Effect]:
        """Report the entries of write-backs that failed bookies did not store."""
        return [
            effect for place in places(self._inflight.failed) for effect in self._inflight.give_up(place, closing=True)
        ]

    def _end(self, reason: Reason, detail: str) -> list[Effect]:
        """End without success."""
        self._phase = _RecoveryPhase.ENDED
        if reason is Reason.DELETED:
            self._fences.clear()  # a deleted ledger has no missing entries
        return [Failed(reason, f"ledger {self._metadata.ledger_id}: {detail}")]
