"""Broken rules of bookies, quorums, copying and reading; ids are those of ``docs/design/replication.md``."""

from __future__ import annotations

from tests.simulator.client_mutants import READS_UNFENCED
from tests.simulator.mutating import Mutant, Piece

BOOKIE = "bookie:BookieMachine."

BOOKIE_MUTANTS = (
    Mutant(
        "H1",
        "the fence of one ledger says nothing of another one's (AB3)",
        (Piece(BOOKIE + "_fence", "self._doubtful.discard(ledger_id)", "self._doubtful.clear()"),),
    ),
    Mutant(
        "H2",
        "who adds to one ledger does not hear of another one's deletion (C11)",
        (Piece(BOOKIE + "ledger_deleted", "of == ledger_id", "True"),),
    ),
    Mutant(
        "E1",
        "a fence that failed is made again before it is answered (AB3)",
        (Piece(BOOKIE + "_fence", "ledger_id not in self._doubtful", "True"),),
    ),
    Mutant(
        "E2",
        "what could not be synced is not acknowledged (K11)",
        (Piece(BOOKIE + "_sync", "Reply(_status_of(error))", "Reply(Status.OK)"),),
    ),
    Mutant(
        "E3",
        "what could not be staged is not acknowledged (K11)",
        (Piece(BOOKIE + "_add", "status = _status_of(error)", "status = Status.OK"),),
    ),
    Mutant(
        "E4",
        "what the storage cannot read is unknown (K5)",
        (Piece(BOOKIE + "_read_entries", "(Status.UNKNOWN, None)", "(Status.NO_SUCH_ENTRY, None)"),),
    ),
    Mutant(
        "E5",
        "a fence that failed is not answered as done (AB3)",
        (Piece(BOOKIE + "_fence", "(False, effects)", "(True, effects)"),),
    ),
    Mutant(
        "E6",
        "what a failed sync left is synced before it is said to be unknown for ever (I10)",
        (
            Piece(
                BOOKIE + "_sync",
                "acks, self._acks = self._acks, []",
                "acks, self._acks = self._acks, []\nself._dirty.clear()",
            ),
        ),
    ),
    Mutant(
        "E7",
        "what was staged before an error is synced before it is said to be unknown for ever (I10)",
        (
            Piece(BOOKIE + "_add", "self._dirty.add(ledger_id)", "pass"),
            Piece(
                BOOKIE + "_note_lac",
                "if lac > before or _1: ...",
                "self._dirty.add(ledger_id)\nif lac > before or _1: ...",
            ),
        ),
    ),
    Mutant(
        "M5",
        "a fence reaches ledgers never seen (AB3)",
        (
            Piece(
                BOOKIE + "_fence",
                "state is not None and state.fenced and (ledger_id not in self._doubtful)",
                "state is None or (state.fenced and ledger_id not in self._doubtful)",
            ),
            READS_UNFENCED,
        ),
    ),
    Mutant(
        "M7",
        "fencing covers every write set (C6)",
        (
            Piece(
                "quorum:Quorum.covered",
                "return all((mask & ~known).bit_count() < self.ack_quorum for mask in self.masks())",
                "return known.bit_count() >= self.ack_quorum",
            ),
            READS_UNFENCED,
        ),
    ),
    Mutant(
        "M11",
        "a bookie that may have lost entries is in limbo (D6)",
        (Piece("tests.simulator.disk:ModelReplicas.forget", "self.limbo = True", "self.limbo = False"),),
    ),
    Mutant(
        "M14",
        "a fence outlives a restart (I12)",
        (
            Piece(
                "tests.simulator.disk:ModelReplicas.crash",
                "self.packet = None",
                "self.packet = None; self.fenced = False",
            ),
        ),
    ),
    Mutant(
        "M15",
        "recovery closes by compare-and-set (AR9)",
        (
            Piece(
                "tests.simulator.metadata:SimMetadata._write",
                "effect.version == self.version",
                "(effect.version == self.version or effect.metadata.state == 'closed')",
            ),
        ),
    ),
    Mutant(
        "M17",
        "what cannot be read is unknown (K5)",
        (
            Piece(
                "tests.simulator.disk:ModelReplicas.read",
                "unknown = entry_id in self.corrupt or entry_id in self.staged",
                "unknown = entry_id in self.staged",
            ),
        ),
    ),
    Mutant(
        "C7",
        "copies are added as recovery does (BK #4163)",
        (
            Piece(
                "rereplication:RereplicationMachine._write",
                "recovery=True",
                "recovery=False",
            ),
        ),
    ),
    Mutant(
        "C11",
        "an add never makes a ledger that was deleted (BK #4462)",
        (
            Piece(
                BOOKIE + "_add",
                "state = self._replicas.state(ledger_id)",
                (
                    "state = self._replicas.state(ledger_id)\n"
                    "if state is None:\n"
                    "    self._replicas.create(ledger_id, header)\n"
                    "    state = self._replicas.state(ledger_id)"
                ),
            ),
        ),
    ),
    Mutant(
        "C12",
        "requests name the instance (BK #4812, K12)",
        (Piece("tests.simulator.bookies:SimBookie.deliver", "to != self.bookie", "False"),),
    ),
    Mutant(
        "C15",
        "fragments are copied to their ends (BK #3917)",
        (
            Piece(
                "rereplication:fragment_end",
                "metadata.fragments[index + 1].first_entry_id - 1",
                "metadata.fragments[index + 1].first_entry_id - 2",
            ),
        ),
    ),
    Mutant(
        "K8",
        "read-only bookies are fenced (BK #208)",
        (
            Piece(
                BOOKIE + "_fence",
                "state = self._replicas.state(ledger_id)",
                ("if self.read_only:\n    return (False, [])\nstate = self._replicas.state(ledger_id)"),
            ),
        ),
    ),
    Mutant(
        "K9",
        "a fenced ledger takes no adds of its writer (AB2, BK #4701)",
        (Piece(BOOKIE + "_refused", "state is not None and state.fenced", "False"),),
    ),
    Mutant(
        "K11",
        "an acknowledgement follows the sync",
        (
            Piece(
                BOOKIE + "_add",
                "self._acks.append((sender, ledger_id))",
                "effects.append(Respond(sender, Reply(Status.OK)))",
            ),
        ),
    ),
    Mutant(
        "K12",
        "in limbo nothing is denied (D6)",
        (
            Piece(
                BOOKIE + "_read",
                "before.limbo and status in NEGATIVE and (before.gap or not request.fence)",
                "False and (before.gap or not request.fence)",
            ),
        ),
    ),
    Mutant(
        "L1",
        "in limbo nothing can be forced (D6)",
        (Piece(BOOKIE + "_force", "state is not None and state.limbo", "False"),),
    ),
    Mutant(
        "L2",
        "what is acknowledged, and what is forced, is synced",
        (Piece(BOOKIE + "_sync", "self._replicas.commit()", "None"),),
    ),
    Mutant(
        "B1",
        "a bookie's LAC never goes down (I13)",
        (Piece(BOOKIE + "_note_lac", "lac > before or (packet and lac == before)", "True"),),
    ),
    Mutant(
        "B2",
        "what was taken and is not synced is synced before it is denied (I17)",
        (
            Piece(BOOKIE + "_read", "status is not Status.OK and ledger_id in self._dirty", "False"),
            Piece(
                "tests.simulator.disk:ModelReplicas.read",
                "unknown = entry_id in self.corrupt or entry_id in self.staged",
                "unknown = entry_id in self.corrupt",
            ),
            Piece(BOOKIE + "_fence", "self._sync() if ledger_id in self._dirty else []", "[]"),
        ),
    ),
    Mutant(
        "P1",
        "copies are swapped in when they are durable (I3)",
        (
            Piece(
                "rereplication:RereplicationMachine._advance",
                "self._reader is not None or self._adding or self._writing or self._ended or self._resting",
                "self._reader is not None or self._writing or self._ended or self._resting",
            ),
        ),
    ),
    Mutant(
        "P2",
        "an open last fragment is not copied",
        (
            Piece(
                "rereplication:fragment_end",
                "metadata.last_entry_id if metadata.state is LedgerState.CLOSED else None",
                "metadata.last_entry_id if metadata.state is LedgerState.CLOSED else 0",
            ),
        ),
    ),
    Mutant(
        "P3",
        "a swap is a compare-and-set of the fragment as it is now",
        (
            Piece(
                "rereplication:RereplicationMachine._metadata_found",
                "self._metadata, self._version, self._last = found, version, last",
                "self._metadata, self._version, self._last = self._metadata if self._writing else found, version, last",
            ),
        ),
    ),
    Mutant(
        "S1",
        "a LAC is read from enough bookies to cover it",
        (
            Piece(
                "reader:LacMachine.step",
                "self._beyond is None and self._quorum.covered(self._known)",
                "self._beyond is None",
            ),
        ),
    ),
    Mutant(
        "S2",
        "a reader gets each entry once",
        (Piece("reader:ReadMachine._take_entries", "rest = since(run, strand.next)", "rest = run"),),
    ),
    Mutant(
        "S3",
        "a replica without an entry is not the end of a read",
        (
            Piece(
                "reader:ReadMachine._take_entries",
                "self._ask(strand, now_ns) or self._exhausted(strand)",
                "self._exhausted(strand)",
            ),
        ),
    ),
    Mutant(
        "S4",
        "a read that has its bytes ends before the first entry that was not read",
        (Piece("reader:ReadMachine._end_if_done", "min", "max"),),
    ),
    Mutant(
        "L6",
        "what was never forced is denied to recoveries alone (D6)",
        (Piece(BOOKIE + "_read", "(before.gap or not request.fence)", "before.gap"),),
    ),
    Mutant(
        "L7",
        "where more than the unforced may be lost nothing is denied to recoveries, too (D6)",
        (Piece(BOOKIE + "_read", "(before.gap or not request.fence)", "not request.fence"),),
    ),
    Mutant(
        "L8",
        "what was never forced is denied after a durable fence alone (D6)",
        (
            Piece(
                BOOKIE + "_read",
                "if request.fence: ...",
                "if request.fence and (not (before is not None and before.limbo)): ...",
            ),
        ),
    ),
    Mutant(
        "L9",
        "a fenced ledger's writer forces no more (D6)",
        (Piece(BOOKIE + "_force", "state is not None and state.fenced", "False"),),
    ),
    Mutant(
        "L10",
        "what was never forced is denied to recoveries, or they come to no end (I10)",
        (Piece(BOOKIE + "_read", "(before.gap or not request.fence)", "True"),),
    ),
    Mutant(
        "G1",
        "limbo outlives restarts where more than the unforced may be lost (D6)",
        (
            Piece(
                "tests.simulator.disk:ModelReplicas.crash",
                "self.limbo = self.limbo or self.deferred",
                "self.limbo, self.gap = self.deferred, False",
            ),
        ),
    ),
    Mutant(
        "G2",
        "limbo ends when everything was copied (D6)",
        (Piece("tests.simulator.disk:ModelReplicas.repair", "self.durable.setdefault(entry_id, entry)", "pass"),),
    ),
    Mutant(
        "G3",
        "a closed ledger leaves limbo fenced, as its fence may be lost (I12)",
        (Piece("tests.simulator.disk:ModelReplicas.repair", "(self.gap and closed)", "False"),),
    ),
    Mutant(
        "G4",
        "an open fragment does not leave limbo: its writer counts on what is lost (D6)",
        (
            Piece(
                "tests.simulator.bookies:SimBookie._has_end",
                "fragment_end(metadata, number) is not None",
                "True",
            ),
        ),
    ),
    Mutant(
        "L11",
        "a bookie that may have lost entries reports a LAC to recoveries alone (D6)",
        (Piece(BOOKIE + "_read_lac", "before is not None and before.gap", "False"),),
    ),
    Mutant(
        "L5",
        "in limbo a bookie takes no adds of writers (D6)",
        (Piece(BOOKIE + "_refused", "state is not None and state.limbo", "False"),),
    ),
)

BOOKIE_SURVIVORS = (
    # A recovery writes back every entry that it takes, and closes once Qa bookies have it durably (AR5). So the copy
    # that it was read from may be lost: nobody counts on it, because its bookie acknowledges it after the sync alone
    # (AB1). Denials are another matter: B2. The rule is kept, because other reads count the copies of bookies (SD2).
    # ``test_campaign.py`` tries it in seeds in which such entries are returned, which is one of twenty.
    Mutant(
        "B3",
        "entries that are not durable yet are unknown to recoveries, too (AB4)",
        (
            Piece(
                "tests.simulator.disk:ModelReplicas.read",
                "entry = self.durable.get(entry_id)",
                "entry = self.durable.get(entry_id) or (self.staged.get(entry_id) if recovery else None)",
            ),
        ),
    ),
)
