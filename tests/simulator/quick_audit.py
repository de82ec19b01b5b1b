"""Quick audits in virtual time: bookies that are slow, hang, are in limbo, deny entries for a while, or have lost some.

The auditor's machine, the checks of replicas and the samples are the real ones. A bookie is marked only if it lacks an
entry or has it damaged, and did ten minutes before; and what it lost for good at the ends of a ledger is marked.

``python -m tests.simulator.quick_audit [SEEDS]`` runs seeds and looks for the first that notices each mutant.
"""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Final

from pybk.healing import quick_audit  # by its module, because mutants replace its functions
from pybk.healing.auditor import AuditorMachine, Elected, LeaseExtended, PublishMark, ReplicaChecked, SavedState
from pybk.healing.quick_audit import Sample, Suspects
from pybk.healing.situation import SECOND_NS
from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata
from pybk.replication.messages import Answered, EntryRun, Event, Read, ReadEnded, ReadReply, Send, Status, Unanswered
from pybk.replication.replica_check import ReplicaCheckMachine
from tests.healing.clusters import bookie, ledger
from tests.simulator.mutating import Mutant, Piece, mutated

BEGIN_NS: Final = 10**18
TIMEOUT_NS: Final = 5 * SECOND_NS
SLOW_NS: Final = 2 * SECOND_NS
LATE_NS: Final = 5 * SECOND_NS
"""How late the auditor takes a result at most."""

ROUND_NS: Final = 900 * SECOND_NS
ROUNDS: Final = 5
PASSING_ROUNDS: Final = (0, 3)
"""The rounds in which a bookie lacks something while it is audited, and not any more when it is audited again."""

BOOKIES: Final = 4
LEDGERS: Final = 6
LAST: Final = 9


class FalseMarkError(AssertionError):
    """A bookie was marked that has all entries, or one that lost some was not."""


class World:
    """Bookies with ledgers, their faults, and one auditor. All bookies are asked in one virtual time."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.lateness = Random(f"late {seed}")
        self.now = BEGIN_NS
        self.machine = AuditorMachine()
        self.machine.step(Elected(SavedState(), BEGIN_NS + (1 << 60), BEGIN_NS), BEGIN_NS)
        self.ledgers: dict[int, LedgerMetadata] = {}
        self.lost: dict[tuple[int, Bookie], set[int]] = defaultdict(set)
        self.damaged: dict[tuple[int, Bookie], set[int]] = defaultdict(set)
        self.since: dict[tuple[int, Bookie], int] = {}
        """Since when a bookie lacks something of a ledger."""
        self.marks: set[tuple[int, Bookie]] = set()
        self.suspects: Suspects = {}
        self.slow, self.hanging, self.limbo = (bookie(each) for each in self.random.sample(range(BOOKIES), 3))
        for ledger_id in range(LEDGERS):
            members = self.random.sample(range(BOOKIES), 3)
            fragments = [(0, members), (5, members)] if ledger_id % 2 else [(0, members)]
            self.ledgers[ledger_id] = ledger(ledger_id, *fragments, last=LAST)

    # ---- bookies -------------------------------------------------------------------------------------------------

    def reply(self, request: Read, at: Bookie) -> tuple[int, ReadReply | None]:
        """Return after how long a bookie answers a read of one entry, and how; None for a time-out."""
        if at == self.hanging and self.random.random() < 0.7:
            return TIMEOUT_NS, None
        delay = SLOW_NS if at == self.slow else self.random.randrange(50_000_000)
        key, entry = (request.ledger_id, at), request.first
        if entry in self.lost[key]:
            return delay, ReadReply(Status.NO_SUCH_ENTRY)
        if at == self.limbo and self.random.random() < 0.3:
            return delay, ReadReply(Status.UNKNOWN)  # and the probe after it may succeed as little
        if entry in self.damaged[key] and request.checked:
            return delay, ReadReply(Status.UNKNOWN)
        return delay, ReadReply(Status.OK, EntryRun(entry, 1, array("q", [40]), [bytes(40)]))

    def check(self, metadata: LedgerMetadata, sample: Sample) -> ReplicaCheckMachine:
        """Run the check of one replica to its end; time passes meanwhile."""
        machine = ReplicaCheckMachine(
            metadata,
            sample.place,
            sample.first,
            sample.last,
            bytes_max=1 << 20,
            window=1,
            checked=sample.bookie != self.limbo,
            entries=sample.entries,
        )
        numbers, waiting = count(), list[tuple[int, int, Event]]()
        effects = machine.start(self.now)
        while not any(isinstance(effect, ReadEnded) for effect in effects):
            for effect in effects:
                if isinstance(effect, Send):
                    assert isinstance(effect.request, Read)
                    delay, reply = self.reply(effect.request, effect.bookie)
                    came = Unanswered(effect.token) if reply is None else Answered(effect.token, reply)
                    heappush(waiting, (self.now + delay, next(numbers), came))
            self.now, _, event = heappop(waiting)
            effects = machine.step(event, self.now)
        return machine

    # ---- audits --------------------------------------------------------------------------------------------------

    def audit(self, ledger_id: int) -> None:
        """Audit a ledger at all of its bookies, and give the results to the auditor."""
        metadata = self.ledgers[ledger_id]
        samples: defaultdict[Bookie, list[Sample]] = defaultdict(list)
        failed = quick_audit.failed_entries(self.suspects, ledger_id)
        for sample in quick_audit.samples_of(metadata, self.random, failed):
            samples[sample.bookie].append(sample)
        quick_audit.forget_others(self.suspects, ledger_id, samples.keys())
        for at, mine in samples.items():
            result = quick_audit.result_of([self.check(metadata, sample) for sample in mine])
            quick_audit.note_result(self.suspects, ledger_id, at, result, self.now)
            self.machine.step(LeaseExtended(self.now + LATE_NS), self.now)
            taken_ns = self.now + self.lateness.randrange(LATE_NS)
            for effect in self.machine.step(ReplicaChecked(ledger_id, at, self.now, *result), taken_ns):
                if isinstance(effect, PublishMark):
                    self.marked((effect.key.ledger_id, effect.key.bookie))

    def marked(self, key: tuple[int, Bookie]) -> None:
        """Judge a mark."""
        since = self.since.get(key)
        if since is None or not (self.lost[key] or self.damaged[key]):
            raise FalseMarkError(f"ledger {key[0]} is marked at {key[1]}, which has all of it")
        if self.now - since < 600 * SECOND_NS:
            raise FalseMarkError(f"ledger {key[0]} is marked at {key[1]} after {(self.now - since) // SECOND_NS} s")
        self.marks.add(key)

    def harm(self, key: tuple[int, Bookie], entry: int, *, damages: bool) -> None:
        """Have a bookie damage or lose an entry of a ledger."""
        (self.damaged if damages else self.lost)[key].add(entry)
        self.since[key] = self.now

    def mend(self, key: tuple[int, Bookie]) -> None:
        """Have a bookie be whole again, because a copy that was under way has ended."""
        for kind in (self.lost, self.damaged):
            kind.pop(key, None)
        self.since.pop(key)

    def run(self) -> None:
        """Audit all ledgers in each round, while one bookie lacks an entry for good, and one twice for a moment."""
        keys = [
            (ledger_id, at)
            for ledger_id, metadata in self.ledgers.items()
            for at in metadata.fragments[0].ensemble
            if at not in (self.hanging, self.limbo)
        ]
        passing, lasting = self.random.sample(keys, 2)
        damages, entry = self.random.random() < 0.5, self.random.choice((0, LAST))
        self.harm(lasting, self.random.choice((0, LAST)), damages=self.random.random() < 0.5)
        for number in range(ROUNDS):
            begin = self.now
            if number in PASSING_ROUNDS:
                self.harm(passing, entry, damages=damages)
            for ledger_id in self.ledgers:
                self.audit(ledger_id)
            if number in PASSING_ROUNDS:
                self.mend(passing)
            for key, suspect in sorted(self.suspects.items()):
                self.now = max(self.now, suspect.due_ns)
                if key in self.suspects:
                    self.audit(key[0])
            if lasting not in self.marks:
                raise FalseMarkError(f"ledger {lasting[0]} is not marked at {lasting[1]}, which lost entries of it")
            self.now = max(self.now, begin + ROUND_NS)


QUICK: Final = "pybk.healing.quick_audit:"
AUDITOR: Final = "pybk.healing.auditor:AuditorMachine."

QUICK_MUTANTS: Final = (
    Mutant(
        "Q1",
        "a time-out is no evidence that an entry is missing",
        (Piece(QUICK + "result_of", "return (Check.UNKNOWN, 0)", "return (Check.MISSING, 0)"),),
    ),
    Mutant(
        "Q2",
        "a bookie is marked after two audits that are ten minutes apart",
        (Piece(AUDITOR + "_replica_checked", "event.checked_ns - since < SUSPICION_NS", "False"),),
    ),
    Mutant(
        "Q3",
        "the first and the last entry are read",
        (
            Piece(
                QUICK + "_drawn",
                "{min((span.first for span in spans)), max((span.last for span in spans))}",
                "set()",
            ),
        ),
    ),
    Mutant(
        "Q4",
        "what a bookie denies counts",
        (Piece(QUICK + "result_of", "return (Check.MISSING, min(missing))", "return (Check.UNKNOWN, 0)"),),
    ),
    Mutant(
        "Q5",
        "a bookie that has all entries is trusted again",
        (Piece(AUDITOR + "_replica_checked", "self._suspicions.pop((key, each), None)", "pass"),),
    ),
    Mutant(
        "Q6",
        "the times of audits count, and not those at which their results are taken",
        (
            Piece(
                AUDITOR + "_replica_checked",
                "(event.checked_ns, event.first_entry_id)",
                "(now_ns, event.first_entry_id)",
            ),
        ),
    ),
)

KILLED_AT: Final = {"Q1": 0, "Q2": 0, "Q3": 0, "Q4": 1, "Q5": 0, "Q6": 4}
"""The first seed that notices each mutant."""


def run(seed: int) -> Exception | None:
    """Run a seed; return what was broken."""
    try:
        World(seed).run()
    except Exception as error:  # noqa: BLE001  # whatever a machine raises is a failure of the seed
        return error
    return None


def main() -> int:
    """Run seeds, and print those that fail, and the first that notices each mutant."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    failures = {seed: error for seed in range(seeds) if (error := run(seed)) is not None}
    for seed, error in failures.items():
        sys.stdout.write(f"seed {seed}: {type(error).__name__}: {error}\n")
    sys.stdout.write(f"{seeds} seeds, {len(failures)} failures\n")
    for mutant in QUICK_MUTANTS:
        with mutated(mutant):
            first = next((seed for seed in range(seeds) if run(seed) is not None), None)
        sys.stdout.write(f'    "{mutant.name}": {first},\n')
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
