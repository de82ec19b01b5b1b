"""The invariants of the protocol, each checked as soon as something happens that could break it.

The ids are those of ``docs/design/replication.md``.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata, LedgerState
from pybk.replication.entry_runs import entries_of
from pybk.replication.fragments import fragment_end, fragment_of
from pybk.replication.messages import (
    NEGATIVE,
    Add,
    EntryRun,
    Force,
    LacReply,
    Read,
    ReadReply,
    Reply,
    Request,
    Status,
    WriteLac,
)
from pybk.replication.replica_check import spans_of
from tests.simulator.disk import LAC_OFFSET
from tests.simulator.seals import digest_in, forgeries, is_right, seal_of

if TYPE_CHECKING:
    from tests.simulator.disk import Disk
    from tests.simulator.ledgers import SimLedger

_unpack_lac = Struct(">q").unpack_from


class ViolationError(AssertionError):
    """An invariant does not hold."""


class CutShortError(Exception):
    """A member believed a bookie that lied, as others did not answer or lack entries: no more is promised (D8)."""


class Checker:
    """What was promised, and whether it is kept."""

    def __init__(self, ledger: SimLedger) -> None:
        self.ledger = ledger
        self.entries: dict[int, bytes] = {}
        self.lengths: dict[int, int] = {-1: 0}
        self.confirmed = -1
        self.acked: dict[Bookie, dict[int, None]] = {}
        self.deferred: dict[Bookie, dict[int, None]] = {}
        """What was acknowledged before it was durable, and not forced since."""
        self.fenced: dict[Bookie, None] = {}
        self.lacs: dict[Bookie, int] = {}
        self.gone: dict[Bookie, None] = {}
        self.unnamed_since: dict[Bookie, int] = {}
        """When the metadata last named each bookie for entries, in runs where surplus copies are dropped."""
        self.read_lac = -1
        self.closed_at: int | None = None
        self.seals: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        """Seal and last digest of each end that a client would close the ledger with."""
        self.forged: dict[int, None] = {}
        """Entries that a lying bookie made and an honest one holds, because a third did not answer a member's reads."""
        self.closers: dict[str, None] = {}
        """Clients that would close the ledger, or have."""

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            raise ViolationError(what)

    # ---- writer and readers ----------------------------------------------------------------------------------------

    def sent(self, entry_id: int, entry: bytes, length: int) -> None:
        """The writer makes an entry."""
        self.entries[entry_id] = entry
        self.lengths[entry_id] = length

    def created(self, ensemble: tuple[Bookie, ...]) -> None:
        """AW11: a ledger is created with an ack quorum of each write set, however many bookies are away or full."""
        bookies = self.ledger.bookies
        takers = {name for name, bookie in bookies.items() if bookie.up and not bookie.full}
        here = [bookie.bookie_id in takers for bookie in ensemble]
        live = sum(1 << place for place, there in enumerate(here) if there)
        self.check(self.ledger.plan.quorum.writable(live), f"AW11: of {ensemble} too many are away")
        self.check(
            len(ensemble) - sum(here) == max(0, len(ensemble) - len(takers)),
            f"AW11: of {ensemble} more are away than must be",
        )
        away = frozenset(bookie for bookie, there in zip(ensemble, here, strict=True) if not there)
        self.check(away == self.ledger.away, f"AW11: {sorted(away)} are away, noted were {sorted(self.ledger.away)}")

    def writes(self, bookie: Bookie, metadata: LedgerMetadata) -> None:
        """AW11: the writer sends nothing to a bookie that was away from the start, until the metadata name it anew."""
        new = bookie not in self.ledger.away or metadata.version > 0
        self.check(new, f"AW11: the writer writes to {bookie}, which was away")

    def writer_confirms(self, lac: int) -> None:
        """I15, I1, I2, I3: what a writer reports to its application."""
        self.check(lac > self.confirmed, f"I15: confirmed {lac} after {self.confirmed}")
        before, self.confirmed = self.confirmed, lac
        for bookie in self.ledger.away:
            recorded = (bookie, 0) in self.ledger.under_replicated
            self.check(recorded, f"AW11: {lac} is confirmed, and it is not recorded that {bookie} misses entries")
        metadata = self.ledger.metadata.current
        if metadata is None:
            return
        if metadata.state is LedgerState.CLOSED:
            last = metadata.last_entry_id
            self.check(lac <= last, f"I1: {lac} confirmed by the writer, but the ledger is closed at {last}")
        self.check_copies(metadata, before + 1, lac)

    def promised_lac(self, metadata: LedgerMetadata) -> int:
        """Return the last add confirmed that a covering read cannot miss: the one that a confirmed entry carries."""
        current = self.ledger.metadata.current
        if current is None or metadata.fragments[-1] != current.fragments[-1]:
            return -1
        if self.confirmed < 0 or self.ledger.plan.loses_data in ("wiped", "corrupt") or self.ledger.plan.deferred:
            return -1
        lac: int = _unpack_lac(self.entries[self.confirmed], LAC_OFFSET)[0]
        return lac

    def reader_sees_lac(self, lac: int, promised: int) -> None:
        """I6, I16: a reader may now read up to there. Of a ledger that was deleted meanwhile nothing is promised."""
        kept = lac >= promised or self.ledger.metadata.current is None
        self.check(kept, f"a reader was told {lac}, though enough bookies to cover it know {promised}")
        self.read_lac = max(self.read_lac, lac)
        self.check(lac <= self.firm_end(), f"I6: a reader was told {lac}, confirmed is {self.firm_end()}")

    def reader_got(self, run: EntryRun) -> None:
        """I16: what a reader sees."""
        for entry_id, entry in zip(range(run.first, run.last + 1, run.stride), entries_of(run), strict=True):
            self.check(
                bytes(entry) == self.entries.get(entry_id), f"I16: a reader got other bytes for entry {entry_id}"
            )

    def reader_misses(self, entry_id: int, status: Status) -> None:
        """I17: nobody says no of what was confirmed."""
        honest = not self.ledger.plan.loses_data and self.ledger.metadata.current is not None
        lied = honest and status in NEGATIVE and entry_id <= self.confirmed
        self.check(not lied, f"I17: a reader was answered that entry {entry_id} does not exist")

    def firm_end(self) -> int:
        """Return the last entry that is known to be in the ledger for ever."""
        return self.confirmed if self.closed_at is None else self.closed_at

    # ---- bookies ---------------------------------------------------------------------------------------------------

    def replied(self, bookie: Bookie, request: Request, reply: Reply | LacReply | ReadReply) -> None:
        """I4, I6, I12, I13, I14, I17: what a bookie answers."""
        disk = self.ledger.disks[bookie]
        if isinstance(request, Add | WriteLac):
            self.noted(bookie, disk)
        if isinstance(request, Add):
            if reply.status is Status.OK:
                self.added(bookie, disk, request)
        elif isinstance(request, Force):
            if reply.status is Status.OK:
                self.forced(bookie, disk)
        elif getattr(request, "fence", False) and (reply.status is Status.OK or reply.status in NEGATIVE):
            self.check(disk.fence_durable, f"AB3: {bookie} answered a fencing request without being fenced durably")
            self.fenced[bookie] = None
        if reply.status in NEGATIVE and not isinstance(reply, Reply):
            self.denied(bookie, request, reply)

    def added(self, bookie: Bookie, disk: Disk, request: Add) -> None:
        """An add was acknowledged."""
        self.check(request.recovery or bookie not in self.fenced, f"AB2: {bookie} acknowledged an add though fenced")
        # A recovery's fence may make the ledger known again; what it adds counts only if it can be closed.
        self.check(
            request.recovery or bookie not in self.gone, f"C11: {bookie} acknowledged an add to a deleted ledger"
        )
        acked = (self.deferred if request.deferred else self.acked).setdefault(bookie, {})
        for run in request.runs:
            for entry_id in range(run.first, run.last + 1, run.stride):
                held = disk.held(entry_id)
                if request.deferred and held is None:
                    held = disk.pending(entry_id)
                if held is None:
                    raise ViolationError(f"{bookie} acknowledged entry {entry_id}, which is not durable")
                liar = self.ledger.liar
                if liar is not None and liar.silent is not None and liar.made.get(entry_id) == held:
                    self.forged[entry_id] = None
                elif held != self.entries.get(entry_id):
                    raise ViolationError(f"I4, I14: entry {entry_id} of {bookie} is another")
                acked[entry_id] = None

    def forced(self, bookie: Bookie, disk: Disk) -> None:
        """What was acknowledged before counts from now on as durable."""
        for entry_id in self.deferred.pop(bookie, {}):
            self.check(disk.had(entry_id), f"{bookie} forced entry {entry_id}, which is not durable")
            self.acked.setdefault(bookie, {})[entry_id] = None

    def repaired(self, bookie: Bookie, entries: dict[int, bytes]) -> None:
        """A bookie is out of limbo: it has all that the ledger has for it, and of what else it lost nothing counts."""
        disk = self.ledger.disks[bookie]
        here = all(disk.held(entry_id) is not None for entry_id in entries)
        self.check(here, f"D6: {bookie} left limbo without its entries")
        self.check(disk.fenced or bookie not in self.fenced, f"I12: {bookie} left limbo without its fence")
        self.deferred.pop(bookie, None)
        self.acked[bookie] = {entry_id: None for entry_id in self.acked.get(bookie, {}) if disk.held(entry_id)}

    def entries_of(self, bookie: Bookie, metadata: LedgerMetadata) -> dict[int, bytes]:
        """Return what a ledger has for a bookie whose fragments have ended."""
        closed = metadata.state is LedgerState.CLOSED
        count = metadata.last_entry_id + 1 if closed else metadata.fragments[-1].first_entry_id
        return {
            entry_id: self.entries[entry_id]
            for entry_id in range(count)
            for ensemble in (fragment_of(metadata.fragments, entry_id).ensemble,)
            if bookie in [ensemble[place] for place in self.ledger.plan.quorum.write_set(entry_id)]
        }

    def noted(self, bookie: Bookie, disk: Disk) -> None:
        """I6, I13: the last add confirmed that a bookie knows."""
        before, lac = self.lacs.get(bookie, -1), disk.lac
        if lac == before:
            return
        self.check(lac > before, f"I13: the LAC of {bookie} went from {before} to {lac}")
        self.lacs[bookie] = lac
        self.check(lac <= self.firm_end(), f"I6: {bookie} was told {lac}, confirmed is {self.firm_end()}")

    def denied(self, bookie: Bookie, request: Request, reply: LacReply | ReadReply) -> None:
        """I17: a bookie says that it never acknowledged something, or to a recovery, that it never counted for it."""
        state = self.ledger.disks[bookie].state(self.ledger.ledger_id)
        acked = self.acked.get(bookie, {})
        if state is None or not state.limbo or not getattr(request, "fence", False):
            acked = acked | self.deferred.get(bookie, {})
        if isinstance(reply, ReadReply) and reply.status is Status.NO_SUCH_ENTRY:
            assert isinstance(request, Read)
            after = reply.run.last + reply.run.stride if reply.run is not None else request.first
            self.check(after not in acked, f"I17: {bookie} acknowledged entry {after} and denies it")
        else:
            self.check(not acked or bookie in self.gone, f"I17: {bookie} acknowledged entries and denies the ledger")

    def restarted(self, bookie: Bookie, fenced: bool) -> None:
        """I12: a fence outlives a restart; the LAC in memory does not."""
        self.lacs.pop(bookie, None)
        state = self.ledger.disks[bookie].state(self.ledger.ledger_id)
        doubts = state is not None and state.gap  # in limbo a lost fence lets nobody in
        self.check(fenced or doubts or bookie not in self.fenced, f"I12: {bookie} forgot its fence")

    def collected(self, bookie: Bookie) -> None:
        """A bookie has forgotten a deleted ledger."""
        self.gone[bookie] = None
        self.acked.pop(bookie, None)
        self.deferred.pop(bookie, None)
        self.fenced.pop(bookie, None)
        self.lacs.pop(bookie, None)

    # ---- surplus copies --------------------------------------------------------------------------------------------

    def dropping(self, bookie: Bookie, began: int) -> None:
        """SD1, SD2: a bookie is about to drop its copy, after an audit of the others that began then."""
        ledger = self.ledger
        metadata = ledger.metadata.current
        self.forget(bookie)
        if metadata is None:
            return
        self.check(metadata.state is LedgerState.CLOSED, f"SD1: {bookie} drops a copy of a ledger that is not closed")
        mine = self.entries_of(bookie, metadata)
        self.check(not mine, f"SD4: {bookie} drops its copy though the ledger places entries {sorted(mine)} there")
        since = self.unnamed_since.get(bookie, 0)
        kept = ledger.clock.now - since >= ledger.plan.surplus_ns
        self.check(kept, f"SD1: {bookie} drops its copy {ledger.clock.now - since} ns after the ledger named it")
        for other in {each for fragment in metadata.fragments for each in fragment.ensemble}:
            lost_at = ledger.bookies[other.bookie_id].lost_at.get((other, ledger.ledger_id), began)
            self.check(lost_at >= began, f"SD2: {bookie} drops its copy though {other} had lost its own before")
        for number, fragment in enumerate(metadata.fragments):
            end = fragment_end(metadata, number)
            assert end is not None
            for place, other in enumerate(fragment.ensemble):
                spans = spans_of(metadata, place, fragment.first_entry_id, end)
                first = min((span.first for span in spans), default=-1)
                here = first < 0 or ledger.disks[other].had(first)
                self.check(here, f"SD2: {bookie} drops its copy though {other} never had entry {first}")

    def forget(self, bookie: Bookie) -> None:
        """What a bookie acknowledged before it drops its copy promises nothing any more; its fence does."""
        self.acked.pop(bookie, None)
        self.deferred.pop(bookie, None)
        self.lacs.pop(bookie, None)

    def check_swapped(self, old: LedgerMetadata, new: LedgerMetadata) -> None:
        """SD4, I3: a bookie that re-replication names has, or had, all entries of its place."""
        quorum = self.ledger.plan.quorum
        last = new.last_entry_id if new.state is LedgerState.CLOSED else new.fragments[-1].first_entry_id - 1
        for entry_id in range(last + 1):
            before, now = (fragment_of(each.fragments, entry_id).ensemble for each in (old, new))
            for place in quorum.write_set(entry_id):
                if before[place] != now[place]:
                    here = self.ledger.disks[now[place]].had(entry_id)
                    self.check(here, f"SD4: {now[place]} was named without entry {entry_id}")

    # ---- seals -----------------------------------------------------------------------------------------------------

    def closes(self, author: str, closed: LedgerMetadata) -> None:
        """I18: a client would close the ledger; each that has the password makes the same seal of the same end."""
        self.closers[author] = None
        if self.is_member(author):
            self.check(not closed.sealed, f"I18: {author}, a member, closes the ledger with a seal")
            return
        if author.startswith("copier") and not closed.sealed:
            return  # it leaves the end as a member wrote it, or else ``metadata_changes`` says so
        self.check(closed.sealed, f"I18: {author} closes the ledger without a seal")
        end, made = (closed.last_entry_id, closed.length), (closed.seal, closed.last_digest)
        first = self.seals.setdefault(end, made)
        self.check(made == first, f"I18: {author} makes another seal of the end {end} than somebody before")

    def is_member(self, author: str) -> bool:
        """Return whether a client recovers without the password."""
        return any(each.member for each in self.ledger.recoverers if each.name == author)

    def closed_short(self, metadata: LedgerMetadata) -> bool:
        """Return whether an authentic entry of a bookie of the last fragment carries a LAC beyond the ledger's end."""
        disks = [self.ledger.disks[bookie] for bookie in metadata.fragments[-1].ensemble]
        held = [disk.held(entry_id) for disk in disks for entry_id in self.entries if entry_id > metadata.last_entry_id]
        lacs = [_unpack_lac(each, LAC_OFFSET)[0] for each in held if each and each in self.entries.values()]
        return max(lacs, default=-1) > metadata.last_entry_id

    def check_seal(self, author: str, closed: LedgerMetadata) -> None:
        """I18: the end is sealed over the last entry as it was written, and says nothing else of the ledger."""
        if self.is_member(author):
            return
        seal = seal_of(closed)
        self.check(is_right(seal, closed), f"I18: {author} closed the ledger with a wrong seal")
        last = self.entries[closed.last_entry_id] if closed.last_entry_id >= 0 else b""
        here = closed.last_digest == digest_in(last)
        self.check(here, f"I18: {author} sealed another entry than {closed.last_entry_id}, the last")
        for name, forged in forgeries(closed):
            self.check(not is_right(seal, forged), f"I18: a reader takes a forged {name} under the seal")

    # ---- metadata --------------------------------------------------------------------------------------------------

    def metadata_changes(self, author: str, old: LedgerMetadata, new: LedgerMetadata) -> None:
        """I1, I3, I5, I11: what is written to the metadata store."""
        if author.startswith("copier"):
            self.check_swapped(old, new)
        now = self.ledger.clock.now
        if self.ledger.plan.surplus_ns:
            named = {each for fragment in old.fragments for each in fragment.ensemble}
            self.unnamed_since |= {each: now for each in named if self.entries_of(each, old)}
        if not author.startswith("copier"):
            kept = new.fragments[: len(old.fragments) - 1] == old.fragments[:-1]
            self.check(kept, f"I11: {author} changed fragments that have an end: {old.fragments} to {new.fragments}")
        if old.state is LedgerState.CLOSED:
            if author == "owner" and not old.sealed:
                self.check_seal(author, new)
            else:
                kept = (old.seal, old.last_digest) == (new.seal, new.last_digest)
                self.check(kept, f"I18: {author} changed the seal")
            same = (old.state, old.last_entry_id, old.length) == (new.state, new.last_entry_id, new.length)
            self.check(same, f"I11: closed at {old.last_entry_id}, changed to {new.state} at {new.last_entry_id}")
        firsts = [each.first_entry_id for each in new.fragments]
        before = [each.first_entry_id for each in old.fragments]
        grown = firsts == before if old.state is LedgerState.CLOSED else firsts[: len(before)] == before
        self.check(grown, f"I5, I11: fragments from {before} became those from {firsts}")
        if new.state is LedgerState.CLOSED:
            last = new.last_entry_id
            if old.state is not LedgerState.CLOSED:
                self.closed_at = last
                self.check_seal(author, new)
                self.check_forged(new)
                if self.ledger.liar is not None and self.ledger.liar.how == "denies" and last < self.confirmed:
                    raise CutShortError
                self.check(last >= self.confirmed, f"I1: {self.confirmed} was confirmed, and it is closed at {last}")
                self.check(last >= self.read_lac, f"I16: {self.read_lac} was read, and it is closed at {last}")
                self.check(new.length == self.lengths.get(last), f"length {new.length} at {last}")
                for bookie, lac in self.lacs.items():
                    self.check(lac <= last, f"I6: {bookie} was told {lac}, and it is closed at {last}")
            self.check_copies(new, 0, last)
        else:
            self.check_copies(new, 0, self.confirmed)

    def check_whole(self) -> None:
        """End the run if an honest bookie holds a forged entry: what comes of the ledger then is not promised."""
        if self.forged:
            raise CutShortError

    def check_forged(self, closed: LedgerMetadata) -> None:
        """AM5: a forged entry does not take the place of a confirmed one whose bookie was asked to store the former."""
        liar = self.ledger.liar
        for entry_id in self.forged:
            ensemble = fragment_of(closed.fragments, entry_id).ensemble
            honest = [self.ledger.disks[each] for each in ensemble if liar is None or each != liar.bookie]
            true = any(disk.held(entry_id) == self.entries[entry_id] for disk in honest)
            self.check(true or entry_id > self.confirmed, f"AM5: the confirmed entry {entry_id} was forged")

    def check_copies(self, metadata: LedgerMetadata, first: int, last: int) -> None:
        """I2, I3: entries are at an ack quorum of their fragment, and what faults left of it can be read."""
        quorum = self.ledger.plan.quorum
        disks = self.ledger.disks
        for entry_id in range(first, last + 1):
            ensemble = fragment_of(metadata.fragments, entry_id).ensemble
            replicas = [disks[ensemble[place]] for place in quorum.write_set(entry_id)]
            had = sum(each.had(entry_id) for each in replicas)
            if had < quorum.ack_quorum:
                raise ViolationError(f"I3: entry {entry_id} is on {had} bookies of its fragment: {ensemble}")
            if not any(each.has(entry_id) for each in replicas):
                raise ViolationError(f"I2: entry {entry_id} can be read from no bookie of its fragment")
