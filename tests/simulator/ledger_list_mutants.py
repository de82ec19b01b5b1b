"""Broken rules of ledger lists, and a seed that notices each.

``python -m tests.simulator.ledger_list_mutants [NAME ...]`` looks for the first seed that notices each.
"""

from __future__ import annotations

import sys

from tests.simulator.ledger_lists import (
    ADOPT_SEEDS,
    CLASH_SEEDS,
    GIVE_UP_SEEDS,
    LOSS_SEEDS,
    MERGE_SEEDS,
    PAGE_SEEDS,
    run,
)
from tests.simulator.mutating import Mutant, Piece, mutated

LIST = "pybk.streams.ledger_list:"
WORLD = "tests.simulator.ledger_lists:World."
RECORD = "pybk.streams.list_record:ListRecord."
BOUNDS = "pybk.streams.list_record:"
SEEDS_MAX = 2_000

LEDGER_LIST_MUTANTS = (
    Mutant(
        "T1",
        "a writer appends only to a ledger that is listed",
        (Piece(LIST + "_list_ledger", "isinstance(result, Written)", "True"),),
    ),
    Mutant(
        "T2a",
        "a take-over fences both open segments",
        (Piece(LIST + "_recovered", "record.open_segments", "record.open_segments[-1:]"),),
    ),
    Mutant("T2b", "a take-over has a new epoch", (Piece(RECORD + "taken_over", "self.epoch + 1", "self.epoch"),)),
    Mutant(
        "T2c",
        "a writer that was taken over adds no segments",
        (Piece(LIST + "_check_epoch", "record.epoch != epoch", "False"),),
    ),
    Mutant(
        "T3",
        "a writer switches once everything before is acknowledged",
        (Piece("tests.simulator.ledger_lists:World.drain", "ledger.acknowledged = len(ledger.entries)", "pass"),),
    ),
    Mutant(
        "T4a",
        "a ledger whose listing is unknown is kept while it may be listed yet",
        (Piece(LIST + "_list_ledger", "now is None or now.version != found.version", "True"),),
    ),
    Mutant(
        "T4b",
        "a ledger that is listed after a lost answer is not deleted",
        (Piece(LIST + "_list_ledger", "now is not None and (yield from _lists(_1, _2, _3))", "False"),),
    ),
    Mutant(
        "T5a",
        "a sweep keeps the ledger that may be listed next",
        (Piece(LIST + "sweep", "number < record.next_segment", "number <= record.next_segment"),),
    ),
    Mutant(
        "T5b",
        "a sweep keeps ledgers that are listed",
        (Piece(LIST + "sweep", "each not in listed", "True"),),
    ),
    Mutant(
        "T6",
        "a ledger is deleted after it was removed from the list",
        (
            Piece(
                LIST + "truncate",
                "record = yield from _updated(_1, _2)",
                (
                    "found = yield from _read(name)\n"
                    "yield from _deleted(found.record.truncated(seq, (), force=True).pending_deletes)\n"
                    "record = yield from _updated(_1, _2)"
                ),
            ),
        ),
    ),
    Mutant(
        "T7", "truncation does not move backwards", (Piece(RECORD + "truncated", "max(seq, self.first_seq)", "seq"),)
    ),
    Mutant(
        "T8a",
        "records that a checkpoint needs are kept",
        (Piece(RECORD + "truncated", "self.checkpoints and seq > self.checkpoints[0].seq + 1", "False"),),
    ),
    Mutant(
        "T8b",
        "a take-over deletes the blobs that its predecessor was writing",
        (Piece(RECORD + "taken_over", "(*closed.pending_deletes, *self.uploads)", "closed.pending_deletes"),),
    ),
    Mutant(
        "T8c",
        "a checkpoint of records that a cut dropped is refused",
        (Piece(RECORD + "checkpointed", "checkpoint.seq > kept_seq", "False"),),
    ),
    Mutant(
        "T9a",
        "records that a subscription needs are kept",
        (Piece(RECORD + "truncated", "lowest is not None and lowest.seq < first and not force", "False"),),
    ),
    Mutant(
        "T9b",
        "an owner of an earlier epoch does not change a bound",
        (Piece(BOUNDS + "_owned", "found.epoch > epoch or (found.epoch < epoch and not claim)", "False"),),
    ),
    Mutant(
        "T9d",
        "the bound is lowered before the cursor moves backwards",
        (Piece("tests.simulator.subscribers:Subscribers._begin", "seq >= max(owned.seq, process.raised)", "True"),),
    ),
    Mutant(
        "T9e",
        "a subscription begins with a record that is there",
        (Piece(LIST + "lower_cursor", "max(cursor.seq, record.first_seq)", "cursor.seq"),),
    ),
    Mutant(
        "T13a",
        "a rename is one change",
        (
            Piece(
                "tests.simulator.ledger_lists:World.apply",
                "isinstance(step, RemoveList | MoveList)",
                "isinstance(step, RemoveList)",
            ),
        ),
    ),
    Mutant(
        "T13b",
        "a rename fences the writer",
        (Piece(LIST + "rename", "ends = yield from _recovered(found.record)", "ends = {}"),),
    ),
    Mutant(
        "T13c",
        "an owner operates on the list of its uid",
        (
            Piece(
                "tests.simulator.ledger_lists:World.read_list",
                "process.uid not in (None, found.record.uid)",
                "False",
            ),
        ),
    ),
    Mutant(
        "T13d",
        "a rename whose answer was lost counts if the log has the name",
        (Piece(LIST + "rename", "other.record.uid == uid", "True"),),
    ),
    Mutant(
        "T13e",
        "a sweep leaves the ledgers of a renamed log alone",
        (Piece(LIST + "sweep", "return []", "return (yield from _deleted(each for each, _ in ledgers))"),),
    ),
    Mutant(
        "T10",
        "records after a cut have a higher generation",
        (Piece(RECORD + "generation_after", "self.generation + 1", "self.generation"),),
    ),
    Mutant(
        "T10b",
        "a log with subscriptions is not cut",
        (Piece(RECORD + "check_cut", "if bounds:\n    raise _1", "pass"),),
    ),
    Mutant(
        "T12",
        "a sweep keeps the blobs that the present owner may name yet",
        (Piece(LIST + "sweep", "epoch < record.epoch", "epoch <= record.epoch"),),
    ),
    Mutant(
        "T14",
        "a deleted log says so before it is empty",
        (
            Piece(
                RECORD + "emptied",
                "bare.truncated(self.end_seq, ()).ended().marked_dropped()",
                "bare.truncated(self.end_seq, ()).ended()",
            ),
        ),
    ),
    Mutant(
        "T14b",
        "a deleted log that was sealed and truncated to its end leaves nothing",
        (
            Piece(
                LIST + "drop",
                "record.emptied() != record",
                "not record.dropped or not record.sealed or record.segments",
            ),
        ),
        CLASH_SEEDS,
    ),
    Mutant(
        "T15a",
        "a writer does not recover a segment that another has fenced",
        (Piece(WORLD + "step", "ledger.recovering not in ('', process.name)", "False"),),
        LOSS_SEEDS,
    ),
    Mutant(
        "T15b",
        "futures of records that the recovered segment does not hold are not resolved",
        (Piece(LIST + "held_of", "bisect_left(first_seqs, end_seq)", "len(first_seqs)"),),
        LOSS_SEEDS,
    ),
    Mutant(
        "T15c",
        "records that the recovered segment holds are not appended again",
        (Piece(LIST + "held_of", "bisect_left(first_seqs, end_seq)", "0"),),
        LOSS_SEEDS,
    ),
    Mutant(
        "T15d",
        "a transaction of which a part was kept counts as one that was not",
        (Piece("tests.simulator.ledger_lists:ModelLedger.end", "self.entries[:whole]", "self.entries"),),
        LOSS_SEEDS,
    ),
    Mutant(
        "T15e",
        "what is appended again comes first, under the same numbers",
        (
            Piece(
                WORLD + "resend",
                "process.next_seq = end_seq",
                "process.next_seq = end_seq + sum(len(records) for _, _, records in owed[held:])",
            ),
        ),
        LOSS_SEEDS,
    ),
    Mutant(
        "T15f",
        "a lost segment is recovered before the log continues in another",
        (
            Piece(
                LIST + "_closed",
                "recovered: SegmentEnd = yield RecoverOwn(segment)",
                "recovered = SegmentEnd(None, None, 0)",
            ),
        ),
        LOSS_SEEDS,
    ),
    Mutant(
        "T16a",
        "a page is written before the record that names it",
        (
            Piece(
                LIST + "_paged",
                "name: str = yield WritePage(number, rows)",
                "name = f'p.{number}-0'\nif number % 4:\n    name = yield WritePage(number, rows)",
            ),
        ),
        PAGE_SEEDS,
    ),
    Mutant(
        "T16b",
        "a sweep keeps the page that may be named next",
        (
            Piece(
                LIST + "sweep",
                "SEQ_MAX if record.sealed else record.next_segment",
                "SEQ_MAX if record.sealed else record.next_segment + 1",
            ),
        ),
        PAGE_SEEDS,
    ),
    Mutant(
        "T16c",
        "a sweep keeps pages that are named",
        (Piece(LIST + "named_parts", "(each.name for each in record.pages)", "()"),),
        PAGE_SEEDS,
    ),
    Mutant(
        "T16d",
        "a sweep keeps ledgers that pages list",
        (Piece(LIST + "sweep", "record.ledgers | in_pages", "record.ledgers"),),
        PAGE_SEEDS,
    ),
    Mutant(
        "T16f",
        "the ledgers of a page that is removed are deleted before it is forgotten",
        (Piece(LIST + "_delete_page", "gone = set((yield from _deleted(ledgers)))", "gone = set(ledgers)"),),
        PAGE_SEEDS,
    ),
    Mutant(
        "T16e",
        "a cut removes the page of which it takes segments back",
        (Piece(RECORD + "cut", "each.last_seq < seq", "each.first_seq <= seq"),),
        PAGE_SEEDS,
    ),
    Mutant(
        "T17a",
        "an owner admits what was listed before it",
        (Piece(LIST + "claim_cursor", "record = yield from _admitted(name, changed)", "record = changed.record"),),
        PAGE_SEEDS,
    ),
    Mutant(
        "T17b",
        "a lower bound is admitted before the cursor moves backwards",
        (Piece(LIST + "lower_cursor", "record = yield from _admitted(name, changed)", "record = changed.record"),),
        PAGE_SEEDS,
    ),
    Mutant(
        "T17c",
        "a truncation looks at bounds that have records of their own",
        (Piece(LIST + "_bounds", "not record.admissions", "True"),),
        PAGE_SEEDS,
    ),
    Mutant(
        "T17d",
        "a raised bound whose answer was lost may be listed",
        (Piece("tests.simulator.subscribers:Subscribers._begin", "process.raised = seq", "pass"),),
        PAGE_SEEDS,
    ),
    Mutant(
        "T18a",
        "a commit that was made changes nothing a second time",
        (
            Piece(LIST + "_has_committed", "last >= epoch", "last > epoch"),
            Piece(RECORD + "adopted", "assert last is None or last < epoch, _1", "pass"),
        ),
        ADOPT_SEEDS,
    ),
    Mutant(
        "T18b",
        "the record says that a commit is made when it lists its ledgers",
        (Piece(RECORD + "adopted", "{**kept, query: Producer(_1, _2, _3)}", "kept"),),
        ADOPT_SEEDS,
    ),
    Mutant(
        "T18c",
        "a commit has a new epoch",
        (Piece(RECORD + "adopted", "self.epoch + 1", "self.epoch"),),
        ADOPT_SEEDS,
    ),
    Mutant(
        "T18d",
        "a commit lists its ledgers in their order",
        (
            Piece(
                LIST + "adopt",
                "record.adopted(ends, ledgers, _1, _2, _3, _4)",
                "record.adopted(ends, ledgers[::-1], _1, _2, _3, _4)",
            ),
        ),
        ADOPT_SEEDS,
    ),
    Mutant(
        "T18e",
        "a commit recovers open segments",
        (
            Piece(
                LIST + "adopt",
                "ends = yield from _recovered(found.record)",
                "ends = {each.number: SegmentEnd(None, None, 0) for each in found.record.open_segments}",
            ),
        ),
        ADOPT_SEEDS,
    ),
    Mutant(
        "T18f",
        "pages of a commit are kept while its record may be written yet",
        (Piece(LIST + "_commit", "now is not None and now.version == found.version", "False"),),
        ADOPT_SEEDS,
    ),
    Mutant(
        "T19",
        "a sweep keeps ledgers of commits that may be made yet",
        (Piece(LIST + "_is_past", "last is not None and epoch < last", "last is None or epoch <= last + 1"),),
        ADOPT_SEEDS,
    ),
    Mutant(
        "T19b",
        "a commit lists nothing that is given up",
        (Piece(LIST + "_missing", "each.ledger_id in record.pending_deletes", "False"),),
        GIVE_UP_SEEDS,
    ),
    Mutant(
        "T19c",
        "what is given up is named in the record before it is deleted",
        (Piece(LIST + "_given_up", "found.record.dropping(new)", "found.record"),),
        GIVE_UP_SEEDS,
    ),
    Mutant(
        "T19d",
        "what the log lists is not given up",
        (Piece(LIST + "_given_up", "each not in listed", "True"),),
        GIVE_UP_SEEDS,
    ),
    Mutant(
        "T20a",
        "a merge replaces only what it has copied",
        (
            Piece(
                LIST + "_has_members", "listed[at : at + len(members)] == members", "at + len(members) <= len(listed)"
            ),
        ),
        CLASH_SEEDS,
    ),
    Mutant(
        "T20b",
        "a ledger of a merge that is listed after a lost answer is not deleted",
        (Piece(LIST + "merge", "any((each.ledger_id == made.ledger.ledger_id for each in listed))", "False"),),
        MERGE_SEEDS,
    ),
    Mutant(
        "T20c",
        "a merged segment has the records of its members in their order",
        (Piece(RECORD + "merged", "each.number not in gone", "each.number != members[-1].number"),),
        MERGE_SEEDS,
    ),
    Mutant(
        "T20d",
        "a merge keeps the other segments of a page",
        (Piece(LIST + "_with_merge", "in_order((*left, made.row))", "(made.row,)"),),
        MERGE_SEEDS,
    ),
    Mutant(
        "T20e",
        "pages of a merge are kept while its record may be written yet",
        (Piece(LIST + "_settled", "now is not None and now.version == found.version", "False"),),
        MERGE_SEEDS,
    ),
    Mutant(
        "T21a",
        "a run of merges changes nothing after another has begun",
        (
            Piece(LIST + "_check_run", "record.last_epoch(MERGES) != run", "False"),
            Piece(LIST + "merge", "(yield CheckDetached(made.ledger, MERGES, made.run))", "True"),
        ),
        MERGE_SEEDS,
    ),
    Mutant(
        "T21b",
        "a merge changes nothing in a sealed log",
        (Piece(LIST + "_check_run", "_check_not_sealed(record, 'its segments are not merged')", "pass"),),
        CLASH_SEEDS,
    ),
    Mutant(
        "T21c",
        "a sweep keeps ledgers of merges that may be listed yet",
        (Piece(LIST + "_is_past", "epoch < last", "epoch <= last"),),
        MERGE_SEEDS,
    ),
    Mutant(
        "T22a",
        "ledgers of merged segments are kept until their time is over",
        (Piece(RECORD + "pages_over", "each.until_ns <= now_ns", "True"),),
        MERGE_SEEDS,
    ),
    Mutant(
        "T22b",
        "a sweep keeps ledgers of merged segments",
        (Piece(LIST + "_ledgers_of_pages", "(each.page for each in record.replaced)", "()"),),
        MERGE_SEEDS,
    ),
    Mutant(
        "T22c",
        "a sweep keeps the pages of merged segments",
        (Piece(LIST + "named_parts", "(each.page for each in record.replaced)", "()"),),
        MERGE_SEEDS,
    ),
    Mutant(
        "T22d",
        "a deleted log deletes the ledgers of merged segments",
        (Piece(RECORD + "emptied", "(*self.gone_pages, *(each.page for each in self.replaced))", "self.gone_pages"),),
        MERGE_SEEDS,
    ),
    Mutant("T11", "a sealed log is not taken over", (Piece(LIST + "take_over", "record.sealed", "False"),)),
)

KILLED_AT = {
    "T1": 1,
    "T2a": 3,
    "T2b": 3,
    "T2c": 6,
    "T3": 105,
    "T4a": 44,
    "T4b": 12,
    "T5a": 3,
    "T5b": 0,
    "T6": 3,
    "T7": 0,
    "T8a": 24,
    "T8b": 6,
    "T8c": 968,
    "T9a": 7,
    "T9b": 34,
    "T9d": 7,
    "T9e": 1,
    "T10": 9,
    "T10b": 34,
    "T12": 6,
    "T11": 95,
    "T13a": 5,
    "T13b": 959,
    "T13c": 215,
    "T13d": 5,
    "T13e": 5,
    "T14": 0,
    "T14b": 5_000_317,
    "T15a": 1_000_118,
    "T15b": 1_000_004,
    "T15c": 1_000_005,
    "T15d": 1_000_022,
    "T15e": 1_000_004,
    "T15f": 1_000_004,
    "T16a": 2_000_000,
    "T16b": 2_000_005,
    "T16c": 2_000_000,
    "T16d": 2_000_000,
    "T16e": 2_000_013,
    "T16f": 2_000_000,
    "T17a": 2_000_968,
    "T17b": 2_000_506,
    "T17c": 2_000_011,
    "T17d": 2_000_758,
    "T18a": 3_000_002,
    "T18b": 3_000_000,
    "T18c": 3_000_000,
    "T18d": 3_000_000,
    "T18e": 3_000_000,
    "T18f": 3_000_018,
    "T19": 3_000_000,
    "T19b": 6_000_001,
    "T19c": 6_000_038,
    "T19d": 6_000_000,
    "T20a": 5_000_066,
    "T20b": 4_000_076,
    "T20c": 4_000_000,
    "T20d": 4_000_000,
    "T20e": 4_000_278,
    "T21a": 4_000_008,
    "T21b": 5_000_005,
    "T21c": 4_000_000,
    "T22a": 4_000_004,
    "T22b": 4_000_003,
    "T22c": 4_000_003,
    "T22d": 4_000_011,
}
"""The first seed that notices each mutant."""


def notices(mutant: Mutant, seed: int) -> str:
    """Run a seed with a mutant, and return how it was noticed, or nothing."""
    with mutated(mutant):
        _, error = run(seed)
    return "" if error is None else f"{type(error).__name__}: {error}"


def main() -> int:
    """Print the first seed that notices each mutant."""
    for mutant in LEDGER_LIST_MUTANTS:
        if sys.argv[1:] and mutant.name not in sys.argv[1:]:
            continue
        for seed in range(mutant.first, mutant.first + SEEDS_MAX):
            how = notices(mutant, seed)
            if how:
                sys.stdout.write(f'    "{mutant.name}": {seed},  # {how[:80]}\n')
                break
        else:
            sys.stdout.write(f"    # {mutant.name} survives {SEEDS_MAX} seeds\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
