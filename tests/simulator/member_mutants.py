"""Broken rules of a member's recovery, which has no password; ids are those of ``docs/design/replication.md``."""

from __future__ import annotations

from tests.simulator.mutating import Mutant, Piece

RECOVERY = "recovery:RecoveryMachine."

MEMBER_MUTANTS = (
    Mutant(
        "Q1",
        "a member has the bookies check the records of what it reads (AM1)",
        (Piece(RECOVERY + "_read", "checked=self._member", "checked=False"),),
    ),
    Mutant(
        "Q2",
        "a member has the bookies check the record of the entry that has the length (AM1)",
        (Piece(RECOVERY + "_ask_length", "self._member", "False"),),
    ),
    Mutant(
        "Q3",
        "a member takes no LAC (AM2)",
        (
            Piece(
                RECOVERY + "_note_lac",
                "self._claimed = max(self._claimed, lac)",
                "self._lac = max(self._lac, lac)",
            ),
        ),
    ),
    Mutant(
        "Q4",
        "a member does not close before a LAC that it was told (AM3)",
        (Piece(RECOVERY + "_finish", "self._claimed > self._inflight.lac", "False"),),
    ),
    Mutant(
        "Q5",
        "a member gives up if two copies differ (AM4)",
        (Piece(RECOVERY + "_compare", "first != copy", "False"),),
    ),
    Mutant(
        "Q6",
        "a member hears all bookies of an entry with fewer than Qa equal copies (AM4)",
        (Piece(RECOVERY + "_is_heard", "not self._masks[entry_id % self._stride] & ~heard", "True"),),
    ),
    Mutant(
        "Q7",
        "QC denials end the ledger for a member also if a bookie returned a copy (AM4)",
        (Piece(RECOVERY + "_decide", "self._member and self._is_denied(self._next)", "False"),),
    ),
    Mutant(
        "Q8",
        "a member gives up if a bookie holds other bytes, and does not replace the bookie (AM5)",
        (Piece(RECOVERY + "_request_ended", "reply.status is Status.CONFLICT and self._member", "False"),),
    ),
    Mutant(
        "Q10",
        "a member asks each bookie for all that it has, not only for what no other returned (AM4)",
        (Piece(RECOVERY + "_ask", "return self._ask_each()", "pass"),),
    ),
    Mutant(
        "Q11",
        "a member waits for a bookie to be fenced, or its time to be over, before it reads (AM3)",
        (Piece(RECOVERY + "_fenced", "self._member and self._fences", "False"),),
    ),
)

MEMBER_SURVIVORS = (
    # A member hears all bookies of an entry before it takes a copy of which there are fewer than Qa. So a bookie that
    # holds other bytes was silent when it was read, while another one lied, and its answer to the add came after the
    # close, too. With two faults nothing is promised (D8); unit tests show the rule.
    Mutant(
        "Q9",
        "a member closes once all of its adds were answered (AM5)",
        (Piece(RECOVERY + "_finish", "self._inflight.sent or self._length_asked", "False"),),
    ),
    # It saves time alone: without it, a bookie that hangs costs the timeout of a read for each entry that too few have.
    Mutant(
        "Q12",
        "a silent bookie is not waited for again and again (AM4)",
        (
            Piece(
                RECOVERY + "_note_entries",
                "self._silent & ~bit if isinstance(reply, ReadReply) else self._silent | bit",
                "0",
            ),
        ),
    ),
)
