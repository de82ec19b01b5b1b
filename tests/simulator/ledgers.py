"""One ledger of the simulation: its metadata, its clients, and what must come of it when the faults stop."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata, LedgerState
from pybk.replication.fragments import fragment_of
from pybk.replication.messages import ChooseBookies, Done, Failed, Reason
from pybk.replication.placement import Candidate, choose, choose_first
from tests.simulator.checker import Checker
from tests.simulator.clients import Reader, Recoverer, Rereplication, Writer
from tests.simulator.deceit import Liar
from tests.simulator.metadata import SimMetadata
from tests.simulator.plan import LONG_NS, MS, Plan
from tests.simulator.seals import seal_of, with_password

if TYPE_CHECKING:
    from tests.simulator.disk import Disk
    from tests.simulator.harness import Harness

REPLICATION_TRIES = 4
PATIENCE_NS = 60_000 * MS
"""How long the cluster may take to get well after the faults stopped."""


class SimLedger:
    """One ledger among those that the same bookies keep.

    Args:
        world: What the ledgers share.
        ledger_id: The ledger.
        plan: What is tried with it.
        first: Whether it is the one that there is in each seed.
    """

    def __init__(self, harness: Harness, ledger_id: int, plan: Plan, *, first: bool) -> None:
        self.ledger_id = ledger_id
        self.name = f"ledger{ledger_id}"
        self.plan = plan
        self.source = f"{harness.seed}" if first else f"{harness.seed}/{ledger_id}"
        self.suffix = "" if first else f"/{ledger_id}"
        self.clock = harness.clock
        self.network = harness.network
        self.bookies = harness.bookies
        self.checker = Checker(self)
        self.disks: dict[Bookie, Disk] = {}
        self.under_replicated: dict[tuple[Bookie, int], None] = {}
        self.away: frozenset[Bookie] = frozenset()
        """The members of the first ensemble that were away, or full, when the ledger was created."""
        self.spurious = plan.spurious
        self.quiet = False
        self.idles = False
        """Whether the writer neither writes nor closes."""
        self.left_idle = False
        """Whether a writer that wrote nothing has left a bookie that is drained."""
        self.random = Random(f"{self.source}/world")
        self.liar: Liar | None = None
        self.deceives = bool(plan.alters or plan.lies)
        """Whether replies may deceive a client that verifies nothing."""

    def populate(self) -> None:
        """Create the ledger and its clients, once there are bookies."""
        plan = self.plan
        self.metadata = SimMetadata(self, self._first_metadata())
        self.writer = Writer(self)
        self.liar = Liar(self, plan.lies) if plan.lies else None
        members = self._members()
        self.recoverers = [Recoverer(self, number, member=number in members) for number in range(plan.recoverers)]
        self.readers = [Reader(self, number) for number in range(plan.readers)]
        for recoverer in self.recoverers:
            within_ns = self.random.choice((20 * MS, plan.faults_ns))
            self.clock.after(int(self.random.random() * within_ns), recoverer.begin)
        for reader in self.readers:
            self.clock.after(int(self.random.random() * 20 * MS), reader.begin)
        self.copiers: list[Rereplication] = []

    def _members(self) -> frozenset[int]:
        """Return which recoverers are members; the last number is the recoverer that comes at the end."""
        plan = self.plan
        random = Random(f"{self.source}/members")
        members = frozenset(random.sample(range(plan.recoverers), min(plan.members, plan.recoverers)))
        if plan.members and not self.deceives and random.random() < 0.5:
            return members | {plan.recoverers}
        return members

    def _first_metadata(self) -> LedgerMetadata:
        quorum = self.plan.quorum
        ensemble = self._first_ensemble()
        metadata = LedgerMetadata(
            ledger_id=self.ledger_id,
            digest_type=DigestType.NONE,
            ensemble_size=quorum.ensemble_size,
            write_quorum=quorum.write_quorum,
            ack_quorum=quorum.ack_quorum,
            creation_time_ns=0,
            creation_sequence=0,
            tier=StorageHint.NVME,
            key_salt=b"",
            verifier=b"",
            fragments=(Fragment(0, ensemble),),
        )
        return with_password(metadata)

    def _first_ensemble(self) -> tuple[Bookie, ...]:
        """Choose the first ensemble, and record what members miss that are away (AW11)."""
        quorum = self.plan.quorum
        ensemble = [bookie.bookie for bookie in self.bookies.values()]
        if not self.plan.away:
            self.random.shuffle(ensemble)
            return tuple(ensemble[: quorum.ensemble_size])
        choice = choose_first(
            [
                Candidate(each.bookie, {StorageHint.NVME: 1}, read_only=each.full, away=not each.up)
                for each in self.bookies.values()
            ],
            quorum=quorum,
            hints=frozenset(),
            source=self.random,
        )
        self.checker.check(len(choice.bookies) == quorum.ensemble_size, f"AW11: {choice} is no ensemble")
        self.away = choice.away
        self.under_replicated = {(each.bookie, each.first_entry_id): None for each in choice.missed}
        found = tuple(choice.bookies[place] for place in range(quorum.ensemble_size))
        self.checker.created(found)
        return found

    def choose(self, effect: ChooseBookies) -> dict[int, Bookie]:
        """Choose from the bookies that are registered; one that has just crashed may still be."""
        registered = [
            Candidate(bookie.bookie, {StorageHint.NVME: 1}, read_only=bookie.full)
            for bookie in self.bookies.values()
            if bookie.up or self.random.random() < 0.2
        ]
        return choose(
            registered,
            places=effect.places,
            ensemble=effect.ensemble,
            excluded=effect.excluded,
            hints=frozenset(),
            source=self.random,
        ).bookies

    def bookies_changed(self) -> None:
        """Notify the writer that a bookie registered."""
        writer = self.writer
        if not writer.paused and not writer.stopped:
            leaving = frozenset(each.bookie for each in self.bookies.values() if each.leaves)
            writer.perform(writer.writer.bookies_changed(self.clock.now, leaving))

    # ---- the end of a run ------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Let clients and the metadata store work without faults from now on."""
        self.quiet = True
        if self.liar is not None and self.liar.how == "denies":
            self.liar.stopped = True  # an owner could not recover, either (D8)
        self.metadata.heal()
        self.spurious = 0.0

    def leave(self) -> None:
        """AW12: a writer that writes nothing leaves the bookies that are drained, as far as others are there."""
        writer = self.writer
        self.idles = True

        def left() -> bool:
            current = self.metadata.current
            if writer.ended or writer.stopped or current is None or current.state is not LedgerState.OPEN:
                return True
            return not any(self.bookies[each.bookie_id].leaves for each in current.fragments[-1].ensemble)

        before = left()
        done = before or self.clock.run(self.clock.now + PATIENCE_NS, left)
        self.left_idle = done and not before and not writer.ended
        enough = sum(not each.leaves for each in self.bookies.values()) >= self.plan.quorum.ensemble_size
        self.checker.check(done or not enough, "AW12: the writer does not leave a bookie that is drained")
        self.idles = False

    def resume(self) -> None:
        """Let paused clients continue."""
        for client in (self.writer, *self.recoverers, *self.readers):
            if client.paused:
                client.resume()

    def settle(self) -> None:
        """I10: the writer finishes, or recoveries close the ledger."""
        self.checker.check_whole()
        until = self.clock.now + PATIENCE_NS
        writer = self.writer
        if self.random.random() < 0.3:
            writer.stopped = True
        awake = not writer.stopped and not writer.asleep
        if awake and not writer.ended:
            self.checker.check(self.clock.run(until, lambda: writer.ended), "I10: the writer neither ends nor fails")
        if awake and not self.recoverers and self.metadata.current is not None:
            self._judge_writer()
            self._wait_for_late_answers()
        last = Recoverer(self, len(self.recoverers), member=len(self.recoverers) in self._members())
        last.begin()
        self.recoverers.append(last)
        clients = [each for each in self.recoverers if each.tries and not each.stopped]
        self.checker.check(
            self.clock.run(until, lambda: all(each.end is not None for each in clients)),
            "I10: a recovery comes to no end",
        )
        current = self.metadata.current
        self.checker.check(current is None or current.state is LedgerState.CLOSED, "I10: the ledger is not closed")
        self._wait_for_late_answers()
        self.checker.check_whole()
        self._check_recorded()
        if self.liar is not None:
            self.liar.stopped = True
        self._reseal()

    def _reseal(self) -> None:
        """I18: the owner of a ledger that a member closed checks it whole, and seals it (``LedgerManager.reseal``)."""
        metadata = self.metadata.current
        if metadata is None or metadata.sealed:
            return
        last = metadata.last_entry_id
        entries = self.checker.entries
        whole = all(self._is_sound(metadata, entry_id) for entry_id in range(last + 1))
        self.checker.check(whole, "I2: the owner cannot read a ledger that a member closed")
        self.checker.check(not self.checker.closed_short(metadata), "I1: an entry shows that a member closed it short")
        sealed = seal_of(metadata).sealed(metadata, entries[last] if last >= 0 else b"")
        self.metadata.apply("owner", replace(sealed, version=sealed.version + 1))

    def _is_sound(self, metadata: LedgerMetadata, entry_id: int) -> bool:
        """Return whether some bookie of an entry's fragment has it as it was written."""
        disks = [self.disks[bookie] for bookie in fragment_of(metadata.fragments, entry_id).ensemble]
        truth = self.checker.entries.get(entry_id)
        return any(disk.has(entry_id) and disk.held(entry_id) == truth for disk in disks)

    def _wait_for_late_answers(self) -> None:
        """Let every request that is under way be answered, or time out."""
        self.clock.run(self.clock.now + 2 * self.plan.timeout_ns)

    def _judge_writer(self) -> None:
        """A writer that nobody disturbed closed its ledger, unless there were too few bookies for it."""
        end = self.writer.end
        if isinstance(end, Failed):
            lasts = end.reason is Reason.NOT_ENOUGH_BOOKIES and self.plan.patience_ns == LONG_NS
            self.checker.check(not lasts, "AW10: all bookies are back, and the writer has not waited for them")
            allowed = [Reason.METADATA_UNREACHABLE] if self.plan.metadata_loss else []
            self.checker.check(end.reason in (Reason.NOT_ENOUGH_BOOKIES, *allowed), f"I10: the writer failed: {end}")

    def _check_recorded(self) -> None:
        """C13: what is missing on a bookie after the ledger was closed is recorded as under-replicated.

        A writer that closed its ledger has recorded all of it. A recovery that did so has recorded what bookies lack of
        what it wrote back. Each recovery that wrote anything has recorded what bookies lack of what was confirmed
        before, where the bookie's answer to the fence shows it. A bookie that knows that it lost what was not forced is
        in limbo, and looks after that itself.
        """
        metadata = self.metadata.current
        if metadata is None or metadata.state is not LedgerState.CLOSED or self.plan.loses_data or self.copiers:
            return
        author = next(
            (each for each in (self.writer, *self.recoverers) if each.name == self.metadata.closed_by), self.writer
        )
        knows = not author.stopped and author.closed_as == metadata  # else it was killed, or does not know that it did
        for entry_id in range(metadata.last_entry_id + 1):
            ensemble = fragment_of(metadata.fragments, entry_id).ensemble
            for place in self.plan.quorum.write_set(entry_id):
                bookie = ensemble[place]
                if not self._misses(bookie, entry_id):
                    continue
                seen = any(each.saw_missing(bookie, entry_id) for each in self.recoverers)
                if seen or (knows and author.answers_for(bookie, entry_id)):
                    recorded = any(who == bookie and first <= entry_id for who, first in self.under_replicated)
                    self.checker.check(recorded, f"C13: {bookie} misses entry {entry_id}, and nobody said so")

    def _misses(self, bookie: Bookie, entry_id: int) -> bool:
        """Return whether a bookie lacks an entry, and does not look after that itself."""
        disk = self.disks[bookie]
        state = disk.state(self.ledger_id)
        limbo = state is not None and state.limbo
        return not limbo and not disk.has(entry_id) and disk.pending(entry_id) is None

    def read_all(self) -> None:
        """Whatever the closed ledger has can be read."""
        metadata = self.metadata.current
        if metadata is None:
            return
        reader = Reader(self, 100 + len(self.readers))
        self.readers.append(reader)
        reader.metadata, reader.lac = metadata, metadata.last_entry_id
        if reader.lac < 0:
            return
        reader.read(0, reader.lac)
        ended = self.clock.run(self.clock.now + PATIENCE_NS, lambda: reader.ended is not None)
        reader.stopped = True
        self.checker.check(ended, "I10: a read comes to no end")
        assert reader.ended is not None
        self.checker.check(reader.ended.missing is None, f"I2: entry {reader.ended.missing} cannot be read")

    def replicate(self) -> None:
        """Give the places of one bookie to others, and fill up where entries were missed."""
        metadata = self.metadata.current
        if metadata is None:
            return
        leaving = self.random.choice(metadata.fragments[-1].ensemble)
        for fragment in metadata.fragments:
            if leaving in fragment.ensemble:
                self._copy(fragment.first_entry_id, frozenset((leaving,)), frozenset())
        for fragment in self.metadata.current.fragments if self.metadata.current else ():
            known = frozenset(each for each in fragment.ensemble if self.bookies[each.bookie_id].bookie == each)
            self._copy(fragment.first_entry_id, frozenset(fragment.ensemble), known)
        self._check_replicated()

    def _copy(self, first: int, lost: frozenset[Bookie], stay: frozenset[Bookie]) -> None:
        copiers = self.copiers
        end: Done | Failed | None = None
        for _ in range(REPLICATION_TRIES):
            copiers.append(Rereplication(self, len(copiers), first, lost, stay))
            copiers[-1].begin()
            ended = self.clock.run(self.clock.now + PATIENCE_NS, lambda: copiers[-1].end is not None)
            self.checker.check(ended, "I10: a replication comes to no end")
            end = copiers[-1].end
            if not isinstance(end, Failed) or end.reason is not Reason.UNDECIDED:
                break
        lacking = isinstance(end, Failed) and end.reason is Reason.NOT_ENOUGH_BOOKIES
        damaged = isinstance(end, Failed) and end.reason is Reason.UNDECIDED and self.plan.loses_data == "corrupt"
        self.checker.check(isinstance(end, Done) or lacking or damaged, f"a replication failed: {end}")

    def _check_replicated(self) -> None:
        """Every entry is on all bookies of its write set that are what they were."""
        metadata = self.metadata.current
        if metadata is None or self.plan.loses_data == "corrupt":
            return
        quorum = self.plan.quorum
        ends = [each.first_entry_id for each in metadata.fragments[1:]] + [metadata.last_entry_id + 1]
        for fragment, end in zip(metadata.fragments, ends, strict=True):
            for entry_id in range(fragment.first_entry_id, end):
                for place in quorum.write_set(entry_id):
                    bookie = fragment.ensemble[place]
                    here = self.bookies[bookie.bookie_id].bookie != bookie or self.disks[bookie].has(entry_id)
                    self.checker.check(here, f"entry {entry_id} was not replicated to {bookie}")
