"""Broken rules of ledgers that are created while bookies are away; ids are those of ``docs/design/replication.md``."""

from __future__ import annotations

from tests.simulator.mutating import Mutant, Piece
from tests.simulator.plan import AWAY_SEEDS


def _mutant(name: str, rule: str, *pieces: Piece) -> Mutant:
    return Mutant(name, rule, pieces, AWAY_SEEDS)


AWAY_MUTANTS = (
    _mutant(
        "A1",
        "each write set keeps an ack quorum of registered bookies (AW11)",
        Piece("placement:_vacancies", "quorum.writable(quorum.everyone & ~sum(1 << place for place in each))", "True"),
    ),
    _mutant(
        "A2",
        "that a bookie misses entries is recorded before the first acknowledgement (AW11)",
        Piece("placement:Choice.missed", "sorted(self.away)", "()"),
    ),
    _mutant(
        "A3",
        "the writer sends nothing to bookies that are away (AW11)",
        Piece("inflight:Inflight.__init__", "ensemble[place] in away", "False"),
    ),
    _mutant(
        "A4",
        "bookies that are away are taken only if too few are registered (AW11)",
        Piece("tests.simulator.ledgers:choose_first", "len(writable.bookies) == len(whole)", "False"),
    ),
    _mutant(
        "A5",
        "as few bookies that are away are taken as possible (AW11)",
        Piece("placement:_vacancies", "range(most)", "reversed(range(most))"),
    ),
    _mutant(
        "A9",
        "a read-only bookie is a member where too few take entries, as one that is away (AW11)",
        Piece(
            "tests.simulator.ledgers:choose_first",
            "replace(each, read_only=False, away=True) if each.read_only else each",
            "each",
        ),
    ),
    _mutant(
        "A10",
        "a read-only member counts for no ack quorum, and misses all entries (AW11)",
        Piece(
            "tests.simulator.ledgers:choose_first",
            "replace(each, read_only=False, away=True)",
            "replace(each, read_only=False)",
        ),
    ),
    _mutant(
        "A6",
        "a bookie that was never written to denies truthfully, and proves nothing alone (AR4)",
        Piece("quorum:Quorum.negatives_needed", "self.write_quorum - self.ack_quorum + 1", "1"),
    ),
    _mutant(
        "A7",
        "a bookie that was never written to does not cover the ensemble alone when it is fenced (AR3)",
        Piece("recovery:RecoveryMachine._fenced", "self._quorum.covered(self._known)", "True"),
        Piece("recovery:RecoveryMachine._read", "fence=True", "fence=False"),
    ),
    _mutant(
        "A8",
        "a recovery records what a bookie lacks that was never written to (C13)",
        Piece("recovery:RecoveryMachine._lagging", "held < last", "False"),
    ),
)
