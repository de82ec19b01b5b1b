"""Broken rules of the drop of surplus copies; ids are those of ``docs/design/replication.md``."""

from __future__ import annotations

from tests.simulator.mutating import Mutant, Piece
from tests.simulator.plan import SURPLUS_SEEDS

BOOKIE = "bookie:BookieMachine."
DROP = "surplus:SurplusDropMachine."
COPY = "rereplication:RereplicationMachine."


def _mutant(name: str, rule: str, *pieces: Piece) -> Mutant:
    return Mutant(name, rule, pieces, SURPLUS_SEEDS)


SURPLUS_MUTANTS = (
    _mutant(
        "D1",
        "a copy is kept for a while after the ledger named the bookie (SD1)",
        Piece("tests.simulator.surplus:Dropper.seen", "now - self.noted[1] >= self.ledger.plan.surplus_ns", "True"),
    ),
    _mutant(
        "D2",
        "what other metadata said counts no more (SD1)",
        Piece(
            "tests.simulator.surplus:Dropper.seen",
            "self.noted is None or self.noted[0] != found.version",
            "self.noted is None",
        ),
    ),
    _mutant(
        "D3",
        "every fragment counts, not the last one alone (SD1)",
        Piece("surplus:is_surplus", "metadata.fragments", "metadata.fragments[-1:]"),
    ),
    _mutant(
        "D4",
        "copies of ledgers that are not closed stay (SD1)",
        Piece("surplus:is_surplus", "metadata.state is LedgerState.CLOSED", "True"),
        Piece(
            "surplus:_audit", "assert last is not None, _1", "last = fragment.first_entry_id if last is None else last"
        ),
    ),
    _mutant(
        "D5",
        "the other copies are audited (SD2)",
        Piece(DROP + "_advance", "self._waiting and len(self._asked) < _ASKED_MAX", "False"),
    ),
    _mutant(
        "D6",
        "an entry that does not come ends the drop (SD2)",
        Piece(
            DROP + "_is_sound",
            "reply.status is Status.OK and reply.run is not None and reply.run.first == read.first",
            "True",
        ),
    ),
    _mutant(
        "D7",
        "a bookie in limbo does not count (SD2)",
        Piece(DROP + "_is_sound", "reply.status in NEGATIVE", "True"),
    ),
    _mutant(
        "D8",
        "a bookie that does not answer, or is another instance, does not count (SD2)",
        Piece(
            DROP + "_audited",
            "isinstance(reply, ReadReply) and self._is_sound(read, reply)",
            "not isinstance(reply, ReadReply) or self._is_sound(read, reply)",
        ),
    ),
    _mutant(
        "D9",
        "entries that are added meanwhile end the drop (SD3)",
        Piece(BOOKIE + "_add", "self._dropping.discard(ledger_id)", "pass"),
    ),
    _mutant(
        "D10",
        "what is added is noted from before the barrier on (SD3)",
        Piece(DROP + "_advance", "[AnnounceDrop(), _1]", "self._barrier()"),
        Piece(DROP + "step", "[DropEntries(), _1]", "[AnnounceDrop()]"),
        Piece(DROP + "_announced", "self._barrier()", "[DropEntries()]"),
    ),
    _mutant(
        "D11",
        "a barrier is written (SD4)",
        Piece(DROP + "_announced", "self._barrier()", "[DropEntries()]"),
    ),
    _mutant(
        "D12",
        "a barrier that was refused is none, whatever the metadata are (SD4)",
        Piece(
            DROP + "step",
            "isinstance(event, MetadataWritten)",
            "isinstance(event, MetadataWritten) or (isinstance(event, MetadataRefused) "
            "and event.metadata == replace(self._metadata, version=self._metadata.version + 1))",
        ),
    ),
    _mutant(
        "D13",
        "a barrier whose outcome is unknown is none (SD4)",
        Piece(
            DROP + "step",
            "self._fail('the metadata store cannot be reached', Reason.METADATA_UNREACHABLE)",
            "[DropEntries()]",
        ),
    ),
    _mutant(
        "D14",
        "a copy whose compare-and-set is refused on a closed ledger begins anew (SD4)",
        Piece(COPY + "_refused", "self._metadata.state is LedgerState.CLOSED", "False"),
    ),
    _mutant(
        "D15",
        "a copy's compare-and-set names the version from before its first add (SD4)",
        Piece(
            COPY + "_metadata_found",
            "return self._read(MetadataRead(found, version), now_ns)",
            (
                "self._metadata, self._version = found, version\n"
                "self._fragment = next(each for each in found.fragments if each.first_entry_id == self._first)\n"
                "return self._read(MetadataRead(found, version), now_ns)"
            ),
        ),
    ),
    _mutant(
        "D16",
        "a fence stays (SD5)",
        Piece(
            "tests.simulator.disk:ModelReplicas.drop_entries",
            "self.known = self.known_durable = self.fence_durable",
            "self.fenced = self.fence_durable = self.known = self.known_durable = False",
        ),
    ),
)
