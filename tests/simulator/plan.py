"""What one seed tries: the shape of the ledger, the workload and the faults, drawn anew for each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from pybk.replication.quorum import Quorum

MS = 1_000_000

SHAPES = (
    Quorum(3, 3, 2),
    Quorum(3, 3, 2),
    Quorum(3, 3, 2),
    Quorum(2, 2, 1),
    Quorum(3, 2, 2),
    Quorum(4, 4, 2),
    Quorum(5, 3, 2),
    Quorum(3, 3, 1),
    Quorum(3, 3, 3),
    Quorum(4, 3, 2),
    Quorum(4, 2, 2),
    Quorum(6, 3, 2),
    Quorum(5, 5, 3),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one seed tries; probabilities are per message or operation, times in nanoseconds."""

    quorum: Quorum
    spares: int
    batches: tuple[int, ...]
    window: int
    think_ns: int
    recoverers: int
    readers: int
    closes: bool
    deferred: bool
    straggler_bytes: int
    loss: float
    duplication: float
    spurious: float
    slow: float
    short: float
    slow_ns: int
    timeout_ns: int
    clogs: bool
    cuts: bool
    pauses: bool
    kills: bool
    crashes: bool
    loses_data: str
    metadata_loss: float
    metadata_stale: float
    swaps: bool
    fills: bool
    deletes: bool
    faults_ns: int
    fault_every_ns: int
    errors: float = 0.0
    """How often a bookie's storage fails to do what it is asked."""
    ledgers: int = 1
    forces_early: bool = False
    """Whether the writer forces while it still writes."""
    members: int = 0
    """How many of the recoverers are members, which have no password."""
    alters: bool = False
    """Whether damage changes an entry's bytes, which only checks show, and does not make it unreadable."""
    lies: str = ""
    """How one bookie lies, see ``deceit.Liar``; empty for not at all."""
    surplus_ns: int = 0
    """How long a surplus copy is kept at least; 0 for ever."""
    sleeps: bool = False
    """Whether the writer stands still until all surplus copies were dropped."""
    patience_ns: int = 0
    """How long the writer waits for bookies while too few answer."""
    away: int = 0
    """How many bookies are away when the ledger is created, so that its ensemble has some of them."""
    drains: int = 0
    """How many bookies are drained while the ledger is written; none of them takes entries of the writer then."""


LATE_FORCES = 6
LATE_ADDS = 10
"""The seeds with these remainders of 16 are of deferred ledgers whose forces are answered late, and of recoveries whose
fences and adds are."""
MEMBERS = frozenset({11, 19, 27, 35, 41, 49, 51, 57})
"""The seeds with these remainders of 64 have recoveries by members."""


SURPLUS_SEEDS = 100_000_000
"""From this seed on, bookies drop surplus copies."""

PATIENT_SEEDS = 200_000_000
"""From this seed on, writers wait for bookies, all of which may be away at once."""
LONG_NS = 60_000 * MS
"""A patience that outlasts all faults."""

AWAY_SEEDS = 300_000_000
"""From this seed on, ledgers are created while bookies are away."""

DRAIN_SEEDS = 400_000_000
"""From this seed on, bookies are drained, which writers leave also while they write nothing."""


def draw(seed: int) -> Plan:
    """Draw the plan of a seed.

    From ``SURPLUS_SEEDS`` on, bookies drop surplus copies; from ``PATIENT_SEEDS`` on, writers wait for bookies; from
    ``AWAY_SEEDS`` on, ledgers are created while some are away; from ``DRAIN_SEEDS`` on, bookies are drained. What those
    before try stays as it was.
    Each eighth is a recovery in small steps, of a ledger with much in flight; each sixteenth a deferred ledger all of
    whose bookies crash, and that is recovered while its writer lives; another sixteenth a deferred ledger whose bookies
    answer a force after others took their places; and another one a recovery whose fences and adds are answered late.
    In another eighth members recover, without the password.
    """
    plan = _draw(f"{seed}")
    if seed >= DRAIN_SEEDS:
        return _with_drains(seed, plan)
    if seed >= AWAY_SEEDS:
        return _with_away(seed, plan)
    if seed >= PATIENT_SEEDS:
        return _patient(seed, plan)
    if seed >= SURPLUS_SEEDS:
        return _with_drops(seed, plan)
    if seed % 64 in MEMBERS:
        return _members(seed, plan)
    if seed % 16 == 14:
        return _all_crash(plan)
    if seed % 16 == LATE_FORCES:
        return _late_forces(plan)
    if seed % 16 == LATE_ADDS:
        return _late_adds(plan)
    return _small_steps(plan) if seed % 8 == 7 else _with_more(seed, plan)


def sibling_plan(seed: int, number: int, plan: Plan) -> Plan:
    """Draw what else is tried with another ledger of the same bookies: the faults are those of the first one's plan."""
    other = _draw(f"{seed}/{number}")
    fits = other.quorum.ensemble_size <= plan.quorum.ensemble_size + plan.spares and not plan.loses_data
    return replace(
        plan,
        quorum=other.quorum if fits else plan.quorum,
        batches=other.batches,
        window=other.window,
        think_ns=other.think_ns,
        recoverers=other.recoverers,
        readers=other.readers,
        closes=other.closes,
        deferred=other.deferred,
        straggler_bytes=other.straggler_bytes,
        short=other.short,
    )


def _with_more(seed: int, plan: Plan) -> Plan:
    """Add what was not tried at first; drawn apart, so that what the other seeds try stays as it was."""
    random = Random(f"{seed}/plan/more")
    errors = random.choice((0.02, 0.1, 0.3)) if random.random() < 0.15 else 0.0
    ledgers = random.choice((2, 2, 3)) if random.random() < 0.1 else 1
    deletes = plan.deletes or (ledgers > 1 and random.random() < 0.3)
    return replace(plan, errors=errors, ledgers=ledgers, deletes=deletes)


def _members(seed: int, plan: Plan) -> Plan:
    """Let members recover, with owners or alone; in some seeds entries change their bytes, or a bookie lies.

    A member is promised less where a bookie lies (D8), so that everybody is heard in those seeds.
    """
    random = Random(f"{seed}/plan/members")
    recoverers = random.choice((1, 1, 2, 2, 3))
    plan = replace(plan, recoverers=recoverers, members=random.randint(1, recoverers))
    chance = random.random()
    quorum = plan.quorum
    if chance < 0.25 and 1 < quorum.ack_quorum < quorum.write_quorum:
        return replace(plan, loses_data="corrupt", alters=True, fills=False)
    if chance < 0.65 and quorum.ack_quorum > 1:
        how = random.choice(("forges", "tail", "lac", "denies"))
        return _with_liar(plan, "hides" if how == "forges" and random.random() < 0.5 else how)
    return plan


def _with_liar(plan: Plan, how: str) -> Plan:
    if how == "hides":  # time for reads that have no answer, before the faults end
        batches = (1,) * 8
        plan = replace(plan, quorum=Quorum(3, 3, 2), batches=batches, faults_ns=600 * MS, window=6, think_ns=0)
    return replace(
        plan,
        recoverers=plan.members if how == "denies" else plan.recoverers,
        closes=False,
        deferred=False,
        lies=how,
        loss=0.0,
        spurious=0.0,
        slow=0.6 if how == "hides" else 0.3,
        slow_ns=(90 if how == "hides" else 40) * MS,
        timeout_ns=(100 if how == "hides" else 200) * MS,
        clogs=False,
        cuts=False,
        pauses=False,
        crashes=False,
        loses_data="",
        swaps=False,
        fills=False,
        deletes=False,
    )


def _with_drops(seed: int, plan: Plan) -> Plan:
    """Have re-replication replace bookies often, and these drop what they have."""
    random = Random(f"{seed}/plan/surplus")
    loses = plan.quorum.ack_quorum > 1 and random.random() < 0.3
    return replace(
        plan,
        spares=random.choice((1, 2, 3)),
        recoverers=max(plan.recoverers, random.choice((0, 1, 1, 2))),
        closes=random.random() < 0.7,
        swaps=True,
        loses_data=random.choice(("forgets", "wiped")) if loses else plan.loses_data,
        fills=plan.fills and not loses,
        errors=random.choice((0.02, 0.1)) if random.random() < 0.1 else 0.0,
        ledgers=2 if random.random() < 0.1 else 1,
        faults_ns=random.choice((150, 300)) * MS,
        fault_every_ns=random.choice((3, 10)) * MS,
        metadata_loss=random.uniform(0, 0.3) if random.random() < 0.4 else 0.0,
        surplus_ns=random.choice((2, 10, 40)) * MS,
        sleeps=random.random() < 0.4,
    )


def _patient(seed: int, plan: Plan) -> Plan:
    random = Random(f"{seed}/plan/patient")
    return replace(
        plan,
        spares=random.choice((0, 0, 1)),
        batches=(1,) * random.randint(4, 24),
        patience_ns=random.choice((50 * MS, 1500 * MS, LONG_NS, LONG_NS)),
        recoverers=random.choice((0, 0, 0, 1)),
        spurious=random.choice((0.0, 0.0, 0.1)),
        kills=False,
        crashes=True,
        loses_data="",
        fills=False,
        deletes=False,
        fault_every_ns=3 * MS,
    )


def _with_drains(seed: int, plan: Plan) -> Plan:
    """Drain bookies, at most as many as there are spare ones in most seeds; no writer fails for another reason."""
    random = Random(f"{seed}/plan/drains")
    spares = random.choice((1, 2, 3))
    drains = random.randint(1, spares + (random.random() < 0.2))
    return replace(
        plan,
        spares=spares,
        drains=drains,
        patience_ns=random.choice((50 * MS, LONG_NS)) if drains <= spares else 50 * MS,
        deferred=False,
        recoverers=random.choice((0, 0, 0, 1)),
        kills=False,
        pauses=False,
        fills=False,
        deletes=False,
        closes=plan.closes and random.random() < 0.3,
        loses_data="",
    )


def _with_away(seed: int, plan: Plan) -> Plan:
    """Have bookies be away at first; the ensemble has as many of them as it lacks others, and as it may have."""
    random = Random(f"{seed}/plan/away")
    quorum = random.choice([each for each in SHAPES if each.live_min < each.ensemble_size])
    loses = plan.loses_data if quorum.ack_quorum > 1 else ""
    recoverers = max(plan.recoverers, random.choice((0, 1, 1, 2)))
    return replace(
        plan,
        quorum=quorum,
        spares=(spares := random.choice((0, 0, 1))),
        away=random.randint(1, spares + quorum.ensemble_size - quorum.live_min),
        loses_data="" if loses == "corrupt" else loses,
        recoverers=recoverers,
        members=random.randint(1, recoverers) if recoverers and random.random() < 0.2 else 0,
    )


def _late_forces(plan: Plan) -> Plan:
    return replace(
        plan,
        spares=max(plan.spares, 2),
        batches=(1,) * 24,
        window=12,
        think_ns=0,
        recoverers=plan.recoverers // 2,
        closes=True,
        deferred=True,
        forces_early=True,
        straggler_bytes=1 << 20,
        loss=0.0,
        slow=0.3,
        slow_ns=50 * MS,
        timeout_ns=150 * MS,
        spurious=0.05,
        clogs=False,
        cuts=False,
        pauses=False,
        kills=False,
        crashes=False,
        loses_data="",
        metadata_loss=0.0,
        fills=False,
        deletes=False,
        faults_ns=400 * MS,
    )


def _late_adds(plan: Plan) -> Plan:
    return replace(
        plan,
        think_ns=0,
        recoverers=max(plan.recoverers, 1),
        closes=False,
        deferred=False,
        straggler_bytes=1 << 20,
        loss=max(plan.loss, 0.1),
        spurious=0.0,
        slow=0.3,
        slow_ns=60 * MS,
        timeout_ns=80 * MS,
        loses_data="",
        swaps=False,
        fills=False,
        deletes=False,
    )


def _small_steps(plan: Plan) -> Plan:
    return replace(
        plan,
        quorum=Quorum(3, 3, 2),
        spares=max(plan.spares, 1),
        batches=(1,) * 12,
        window=6,
        think_ns=0,
        recoverers=3,
        closes=False,
        deferred=False,
        short=0.9,
        slow=0.6,
        slow_ns=50 * MS,
        timeout_ns=100 * MS,
        spurious=0.05,
        clogs=True,
        loses_data="corrupt",
        faults_ns=100 * MS,
        fault_every_ns=2 * MS,
    )


def _all_crash(plan: Plan) -> Plan:
    return replace(
        plan,
        recoverers=max(plan.recoverers, 1),
        deferred=True,
        pauses=True,
        kills=False,
        crashes=True,
        loses_data="",
        deletes=False,
        faults_ns=400 * MS,
        fault_every_ns=10 * MS,
    )


def _draw(source: str) -> Plan:
    random = Random(f"{source}/plan")

    def sometimes(probability: float) -> bool:
        return random.random() < probability

    quorum = random.choice(SHAPES)
    deferred = sometimes(0.1)
    loses = random.choice(("forgets", "wiped", "corrupt")) if quorum.ack_quorum > 1 and sometimes(0.2) else ""
    if loses == "corrupt" and quorum.ack_quorum == quorum.write_quorum:
        loses = ""  # nobody could take the damaged one's place in every acknowledgement
    sluggish = sometimes(0.4)
    return Plan(
        quorum=quorum,
        spares=random.choice((0, 1, 1, 2, 3)),
        batches=tuple(random.choice((1, 1, 1, 2, 3, 7)) for _ in range(random.randint(1, 8))),
        window=random.randint(1, 6),
        think_ns=random.choice((0, 1, 5, 20)) * MS,
        recoverers=random.choice((0, 1, 1, 2, 2, 3)),
        readers=random.choice((0, 0, 1, 2)),
        closes=sometimes(0.5),
        deferred=deferred,
        straggler_bytes=random.choice((60, 200, 1 << 20, 1 << 20)),
        loss=random.uniform(0, 0.3) if sometimes(0.5) else 0.0,
        duplication=random.uniform(0, 0.1) if sometimes(0.3) else 0.0,
        spurious=random.uniform(0, 0.2) if sometimes(0.5) else 0.0,
        slow=random.uniform(0.3, 0.7) if sluggish else random.uniform(0, 0.3),
        short=random.choice((0.0, 0.2, 0.9)),
        slow_ns=100 * MS if sluggish else random.choice((5, 20, 100)) * MS,
        timeout_ns=random.choice((80, 200) if sluggish else (10, 30, 80)) * MS,
        clogs=sometimes(0.75),
        cuts=sometimes(0.3),
        pauses=sometimes(0.3),
        kills=sometimes(0.1),
        crashes=sometimes(0.5),
        loses_data=loses,
        metadata_loss=random.uniform(0, 0.3) if sometimes(0.4) else 0.0,
        metadata_stale=random.uniform(0, 0.5) if sometimes(0.3) else 0.0,
        swaps=sometimes(0.3),
        fills=sometimes(0.15) and not loses,
        deletes=sometimes(0.03),
        faults_ns=random.choice((100, 200, 400)) * MS,
        fault_every_ns=random.choice((3, 10, 30)) * MS,
    )
