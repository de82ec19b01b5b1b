"""Broken rules of the writer and of recovery; ids are those of ``docs/design/replication.md``."""

from __future__ import annotations

from tests.simulator.mutating import Mutant, Piece
from tests.simulator.plan import DRAIN_SEEDS, PATIENT_SEEDS

RECOVERY = "recovery:RecoveryMachine."
WRITER = "writer:WriterMachine."
READS_UNFENCED = Piece(
    RECOVERY + "_read",
    "fence=True",
    "fence=False",
)
NOT_FROZEN = Piece(
    RECOVERY + "_begin_reading",
    "lac_sent=self._lac",
    "lac_sent=None",
)
COUNTED_BEFORE_CAS = Piece(
    WRITER + "_advance",
    "(_WriterPhase.STEADY, _WriterPhase.CHOOSING)",
    "(_WriterPhase.STEADY, _WriterPhase.CHOOSING, _WriterPhase.CHANGING)",
)
SAME_REPLY = "found == self._wanted"

CLIENT_MUTANTS = (
    Mutant("M1", "recovery reads fence (D1)", (READS_UNFENCED,)),
    Mutant(
        "M2",
        "recovery's LAC is at least the first entry of the last fragment, less one (D2)",
        (Piece(RECOVERY + "_metadata_written", "self._lac = fragment.first_entry_id - 1", "self._lac = -1"),),
    ),
    Mutant(
        "M3",
        "recovery's ensembles are written when it closes, not before (D3)",
        (
            Piece(
                RECOVERY + "_bookies_chosen",
                "return effects + self._advance(now_ns)",
                (
                    "early = [WriteMetadata(replace(self._metadata, fragments=self._fragments), self._version)]\n"
                    "effects += self._advance(now_ns)\n"
                    "return effects + (early if replacements and self._phase is _RecoveryPhase.READING else [])"
                ),
            ),
        ),
    ),
    Mutant(
        "M4",
        "recovery reads from the ensemble that it fenced (AR3, D3)",
        (
            Piece(
                RECOVERY + "_bookies_chosen",
                "effects += inflight.exchange(replacements)",
                "effects += inflight.exchange(replacements); self._ensemble = tuple(inflight.ensemble)",
            ),
        ),
    ),
    Mutant(
        "M6",
        "a bookie that is silent or answers UNKNOWN does not deny an entry (AR4)",
        (Piece(RECOVERY + "_note_entries", "status in NEGATIVE", "status is not Status.OK"),),
    ),
    Mutant(
        "M8",
        "acknowledgements of replaced bookies are undone (AW5)",
        (Piece("inflight:Inflight.exchange", ("batch.acked &= ~bits\nbatch.durable &= ~bits"), "batch.seen &= ~bits"),),
    ),
    Mutant(
        "M9",
        "nothing is sent to new bookies before the metadata names them (AW5, C1)",
        (
            Piece(
                WRITER + "_bookies_chosen",
                "effects += self._write(self._changed(self.metadata))",
                "effects += self._write(self._changed(self.metadata)) + inflight.exchange(self._replacements)",
            ),
            Piece(WRITER + "_metadata_written", "return self._inflight.exchange(self._replacements)", "return []"),
            COUNTED_BEFORE_CAS,
        ),
    ),
    Mutant(
        "M10",
        "entries are confirmed in order (AW3, I15)",
        (
            Piece(
                "inflight:Inflight.confirm",
                "while pending and acked(pending[0].durable, pending[0].masks):\n"
                "        self._confirmed(pending.popleft())",
                "for batch in [each for each in pending if acked(each.durable, each.masks)]:\n"
                "        pending.remove(batch)\n"
                "        self._confirmed(batch)",
            ),
        ),
    ),
    Mutant("M12", "recovery's adds carry a frozen LAC (D4)", (NOT_FROZEN,)),
    Mutant(
        "M16",
        "an ambiguous change is settled, not taken for failed (C9)",
        (
            Piece(
                WRITER + "_metadata_unreachable",
                ("self._tries += 1\n"),
                (
                    "if self._phase is _WriterPhase.CHANGING:\n"
                    "    self._phase = _WriterPhase.STEADY\n"
                    "    return []\n"
                    "self._tries += 1\n"
                ),
            ),
        ),
    ),
    Mutant(
        "M19",
        "acknowledgements of replaced bookies do not count (AW3)",
        (Piece("inflight:Inflight.answered", "self.ensemble[place] != bookie", "False"),),
    ),
    Mutant(
        "M20",
        "what recovery finds is written back (AR5)",
        (
            Piece(
                RECOVERY + "_write_back",
                "return self._inflight.submit(Batch(first, self._next - 1, length_at(entries[-1]), runs))",
                (
                    "self._inflight.lac, self._inflight.length = (self._next - 1, length_at(entries[-1]))\n"
                    "return [] and Batch(first, self._next - 1, length_at(entries[-1]), runs)"
                ),
            ),
        ),
    ),
    Mutant(
        "M21",
        "a writer does not close over a recovery whose LAC moves (D4)",
        (
            Piece(
                WRITER + "_resolve",
                "found.state is LedgerState.OPEN",
                "found.state is LedgerState.OPEN or (self._phase is _WriterPhase.CLOSING and found.state != 'closed')",
            ),
            NOT_FROZEN,
        ),
    ),
    Mutant(
        "C1",
        "bookies that no metadata name are not written to (BK #1591)",
        (
            Piece(
                WRITER + "_bookies_chosen",
                (
                    "self._phase = _WriterPhase.CHANGING\n"
                    "effects += inflight.leaving({*self._replacements, *given_up})\n"
                    "effects += self._write(self._changed(self.metadata))"
                ),
                "effects += inflight.exchange(self._replacements)",
            ),
        ),
    ),
    Mutant(
        "C2",
        "all acknowledgements are undone before any batch is looked at (BK #3005)",
        (
            Piece(
                "inflight:Inflight.exchange",
                (
                    "for batch in self.pending:\n"
                    "    batch.acked &= ~bits\n"
                    "    batch.durable &= ~bits\n"
                    "    batch.seen &= ~bits"
                ),
                (
                    "for batch in list(self.pending):\n"
                    "    self.confirm()\n"
                    "    batch.acked &= ~bits\n"
                    "    batch.durable &= ~bits\n"
                    "    batch.seen &= ~bits"
                ),
            ),
        ),
    ),
    Mutant(
        "C3",
        "nothing is confirmed while the change is being written (BK #4097)",
        (COUNTED_BEFORE_CAS,),
    ),
    Mutant(
        "C4",
        "what is pending is sent to whoever takes a place, even if he had it before (BK #4459)",
        (
            Piece(
                "inflight:Inflight.exchange",
                "bits |= 1 << place",
                (
                    "if self.ensemble[place] == replacements[place]:\n"
                    "    self.dead &= ~(1 << place)\n"
                    "    self.failed &= ~(1 << place)\n"
                    "    continue\n"
                    "bits |= 1 << place"
                ),
            ),
        ),
    ),
    Mutant(
        "C9",
        "a refusal that shows one's own change is a success (Pravega #4721)",
        (Piece(WRITER + "_resolve", "found.state is LedgerState.OPEN", "False"),),
    ),
    Mutant(
        "C10",
        "a close whose reply was lost is a close (BK #2179)",
        (
            Piece(
                WRITER + "_resolve",
                ("if found == self._wanted:\n    return self._metadata_written(MetadataWritten(version), now_ns)"),
                (
                    "if found is not None and found.state == 'closed':\n"
                    "    return self._end(Reason.FENCED, '')\n"
                    "if found == self._wanted:\n"
                    "    return self._metadata_written(MetadataWritten(version), now_ns)"
                ),
            ),
        ),
    ),
    Mutant(
        "C13",
        "failures after the quorum count, too (BK #1390)",
        (
            Piece(
                "inflight:Inflight.fail",
                "self._missing[place] = min(first, self._missing.get(place, first))",
                (
                    "if first <= self.lac:\n"
                    "    return\n"
                    "self._missing[place] = min(first, self._missing.get(place, first))"
                ),
            ),
        ),
    ),
    Mutant(
        "C14",
        "after a change all pending batches are looked at again",
        (
            Piece(
                WRITER + "step",
                "effects = self._advance(self._steps[type(event)](event, now_ns))",
                (
                    "if isinstance(event, MetadataWritten):\n"
                    "    return self._metadata_written(event, now_ns)\n"
                    "return self._with_wake_up(self._advance(self._steps[type(event)](event, now_ns)), now_ns)"
                ),
            ),
        ),
    ),
    Mutant(
        "C16",
        "recovery with too few bookies fails, and does not close short (BOOKKEEPER-150)",
        (
            Piece(
                RECOVERY + "_bookies_chosen",
                "return effects + self._end(Reason.NOT_ENOUGH_BOOKIES, lacking)",
                "return effects + self._close(self._metadata, self._version)",
            ),
        ),
    ),
    Mutant(
        "L3",
        "a force covers what was acknowledged when it was sent",
        (Piece(WRITER + "_forced", "batch.seen & bit", "True"),),
    ),
    Mutant(
        "L12",
        "the late force of a replaced bookie does not count (AW3)",
        (
            Piece(WRITER + "_forced", "self._inflight.ensemble[place] != bookie", "False"),
            Piece("inflight:Inflight.exchange", "batch.seen &= ~bits", "pass"),
        ),
    ),
    Mutant(
        "N1",
        "a recovery records what the bookies lack that it fenced (C13)",
        (Piece(RECOVERY + "_lagging", "held < last", "False"),),
    ),
    Mutant(
        "N2",
        "a bookie that answers the fence after the close is looked at, too (C13)",
        (Piece(RECOVERY + "_late", "self._lagging(place)", "[]"),),
    ),
    Mutant(
        "N7",
        "a bookie that did not answer the fence is recorded with the whole last fragment (C13)",
        (Piece(RECOVERY + "_lagging", "first - 1", "last"),),
    ),
    Mutant(
        "N3",
        "a recovery records who failed to take what it wrote back (C13)",
        (Piece(RECOVERY + "_give_up_failed", "places(self._inflight.failed)", "()"),),
    ),
    Mutant(
        "N4",
        "adds of a recovery that fail after the close count (C13)",
        (Piece(RECOVERY + "_late", "self._note_add(event.token, reply)", "pass"),),
    ),
    Mutant(
        "N6",
        "what a bookie lacks begins after the last entry that it had when it was fenced (C13)",
        (Piece(RECOVERY + "_lagging", "held + 1", "held + 2"),),
    ),
    Mutant(
        "N8",
        "what a bookie misses that a writer replaces is recorded before the metadata name another (C13)",
        (
            Piece(WRITER + "_bookies_chosen", "effects += inflight.leaving({*self._replacements, *given_up})", "pass"),
            Piece(
                WRITER + "_metadata_written",
                "return self._inflight.exchange(self._replacements)",
                "return self._inflight.leaving(self._replacements) + self._inflight.exchange(self._replacements)",
            ),
        ),
    ),
    Mutant(
        "N9",
        "a bookie of the last ensemble that was slow in the one before is recorded from there on (C13)",
        (Piece(RECOVERY + "_lagging", "fragment.ensemble[place] != bookie", "first <= self._lac"),),
    ),
    Mutant(
        "N10",
        "a recovery records what bookies lack before it writes back, as another one may close the ledger (C13)",
        (
            Piece(RECOVERY + "_begin_reading", "set(self._fences.values())", "set(range(len(self._ensemble)))"),
            Piece(
                RECOVERY + "_close",
                "[WriteMetadata(self._wanted, version, joining)]",
                "[effect for place in self._stored_last for effect in self._lagging(place)]"
                " + [WriteMetadata(self._wanted, version, joining)]",
            ),
        ),
    ),
    Mutant(
        "L4",
        "deferred entries are confirmed by force alone",
        (Piece("inflight:Inflight.answered", "not deferred", "True"),),
    ),
    Mutant(
        "W1",
        "a refused change ends a writer whose ledger is in recovery (AW8)",
        (
            Piece(
                WRITER + "_resolve",
                (
                    "if found.state is LedgerState.OPEN:\n"
                    "    self.metadata, self._version = (found, version)\n"
                    "    return self._write(self._changed(found))"
                ),
                (
                    "if found.state is LedgerState.IN_RECOVERY and self._phase is _WriterPhase.CHANGING:\n"
                    "    self._phase = _WriterPhase.STEADY\n"
                    "    return self._inflight.exchange(self._replacements)\n"
                    "if found.state is LedgerState.OPEN:\n"
                    "    self.metadata, self._version = (found, version)\n"
                    "    return self._write(self._changed(found))"
                ),
            ),
        ),
    ),
    Mutant(
        "W2",
        "a refused change keeps what a replication changed (I11)",
        (
            Piece(
                WRITER + "_resolve",
                "self.metadata, self._version = found, version",
                "found, self._version = self.metadata, version",
            ),
        ),
    ),
    Mutant(
        "W3",
        "a new fragment begins after the last confirmed entry (AW5)",
        (Piece(WRITER + "_changed", "self._inflight.lac + 1", "self.last_submitted + 1"),),
    ),
    Mutant(
        "W4",
        "a writer closes at the last confirmed entry (AW7)",
        (
            Piece(
                WRITER + "_changed",
                "metadata.closed_at(self._inflight.lac, _1)",
                "metadata.closed_at(self.last_submitted, _1)",
            ),
        ),
    ),
    Mutant(
        "R1",
        "recovery's close keeps what a replication changed (I11)",
        (Piece(RECOVERY + "_close", "found.fragments[:-1] + own", "self._metadata.fragments[:-1] + own"),),
    ),
    Mutant(
        "R2",
        "a single denial does not end the ledger (AR4)",
        (Piece("quorum:Quorum.negatives_needed", "self.write_quorum - self.ack_quorum + 1", "1"),),
    ),
    Mutant(
        "R4",
        "the length is that of the last entry",
        (Piece(RECOVERY + "_begin_reading", "self._length_known = self._lac < 0", "self._length_known = True"),),
    ),
    Mutant(
        "R5",
        "all bookies of the last fragment are asked, and all windows are covered before anything is read",
        (
            Piece(RECOVERY + "_fenced", "self._quorum.covered(self._known)", "True"),
            READS_UNFENCED,
        ),
    ),
    Mutant(
        "W5",
        "a writer waits for bookies until its patience has passed (AW10)",
        (Piece(WRITER + "_without_quorum", "now_ns >= self._give_up_at_ns", "True"),),
        PATIENT_SEEDS,
    ),
    Mutant(
        "W6",
        "a writer keeps what is pending while it waits for bookies (AW10)",
        (
            Piece(
                WRITER + "_without_quorum",
                "self._revive_at_ns = min(now_ns + LOOK_NS, self._give_up_at_ns)",
                "self._revive_at_ns = min(now_ns + LOOK_NS, self._give_up_at_ns); inflight.pending.clear()",
            ),
        ),
        PATIENT_SEEDS,
    ),
    Mutant(
        "W7",
        "a writer that waits for bookies tries those again that failed (AW10)",
        (Piece(WRITER + "_fill_places", "self._inflight.avoided.clear()", "pass"),),
        PATIENT_SEEDS,
    ),
    Mutant(
        "W8",
        "a writer that waits for bookies looks for them before its patience has passed (AW10)",
        (
            Piece(
                WRITER + "_without_quorum",
                "self._revive_at_ns = min(now_ns + LOOK_NS, self._give_up_at_ns)",
                "self._revive_at_ns = self._give_up_at_ns + LOOK_NS",
            ),
        ),
        PATIENT_SEEDS,
    ),
    Mutant(
        "W9",
        "the patience begins anew with each entry that is acknowledged (AW10)",
        (Piece(WRITER + "_without_quorum", "self._stuck_at != inflight.acked_last", "self._stuck_at == -2"),),
        PATIENT_SEEDS,
    ),
    Mutant(
        "W10",
        "a writer leaves a bookie that is drained while it writes nothing (AW12)",
        (Piece(WRITER + "_wanting", "inflight.ensemble[place] in self._leaving", "False"),),
        DRAIN_SEEDS,
    ),
    Mutant(
        "W11",
        "a writer that could not leave a bookie tries it again after a pause (AW12)",
        (
            Piece(WRITER + "_woken", "not self._wanting", "not self._inflight.dead"),
            Piece(WRITER + "_with_wake_up", "self._wanting", "self._inflight.dead"),
        ),
        DRAIN_SEEDS,
    ),
    Mutant(
        "W12",
        "what a bookie misses that a writer leaves is recorded before the metadata name another one (AW12, C13)",
        (
            Piece(
                WRITER + "_bookies_chosen",
                "{*self._replacements, *given_up}",
                "{*(each for each in self._replacements if inflight.failed >> each & 1), *given_up}",
            ),
        ),
        DRAIN_SEEDS,
    ),
)

CLIENT_SURVIVORS = (
    # The acknowledgements that a force covers are undone with the others when a bookie is replaced, and a force is not
    # sent before the last one was answered or given up: a late answer finds nothing that it could count for. L12 breaks
    # both. A late *failure* would count against the new bookie, which a unit test shows.
    Mutant(
        "L13",
        "the force of a replaced bookie does not count (AW3)",
        (Piece(WRITER + "_forced", "self._inflight.ensemble[place] != bookie", "False"),),
    ),
    # Recoveries fence the last fragment, which nobody changes while the ledger is in recovery: a bookie whose fragments
    # have all ended was not fenced. The rule is kept, so that nothing rests on which bookies recoveries fence.
    Mutant(
        "G5",
        "a ledger in recovery does not leave limbo, as its fence may be lost (I12)",
        (
            Piece(
                "tests.simulator.bookies:SimBookie._has_end",
                "metadata.state is LedgerState.IN_RECOVERY",
                "False",
            ),
        ),
    ),
    # The mark makes a writer's next change fail at once. Without it the writer may still change its ensemble during the
    # recovery, but then the recovery's closing compare-and-set meets another version, finds the ledger open, and ends
    # undecided. The mark is kept: it saves such rounds, and limbo is lifted for adds only while the metadata are open
    # (D6).
    Mutant(
        "R3",
        "recovery marks the ledger before it fences (AR1)",
        (
            Piece(
                RECOVERY + "_mark",
                "return [WriteMetadata(self._wanted, version)]",
                "self._wanted = found; return self._metadata_written(version, 0)",
            ),
        ),
    ),
    # A fenced writer can acknowledge nothing any more: the bookies that do not know of the fence are fewer than an ack
    # quorum of any write set (coverage), and its next change of ensemble is refused. Withdrawing at once saves the
    # detour, and gives the application the right reason.
    Mutant(
        "V1",
        "an answer that the ledger is fenced ends the writer (AW4)",
        (
            Piece(
                WRITER + "_answered",
                "reason is not Reason.FENCED or self._phase is not _WriterPhase.CLOSING",
                "reason is not Reason.FENCED",
            ),
        ),
    ),
    # With a frozen LAC nothing that only a recovery confirmed is visible to anybody, so that a writer may close below
    # it: everything that it acknowledged itself is kept. It is refused all the same, so that a recovery that has begun
    # decides.
    Mutant(
        "V2",
        "a writer does not close a ledger that is being recovered (M13)",
        (
            Piece(
                WRITER + "_resolve",
                "found.state is LedgerState.OPEN",
                "found.state is LedgerState.OPEN or (self._phase is _WriterPhase.CLOSING and found.state != 'closed')",
            ),
        ),
    ),
    # Writing the same again is refused no more than once, and comes to the same metadata; the comparison saves the
    # round.
    Mutant(
        "V3",
        "a refused change that is there already is not written again (C9)",
        (Piece(WRITER + "_resolve", "found == self._wanted", "False"),),
    ),
    # Recovery's reads fence, so a denial comes only from bookies that are fenced, and acknowledgements are contiguous:
    # coverage by the first phase is then a matter of liveness. M7 and R5 break it with reads that do not fence.
    Mutant(
        "V4",
        "the fencing phase covers every write set",
        (Piece(RECOVERY + "_fenced", "self._quorum.covered(self._known)", "True"),),
    ),
)
