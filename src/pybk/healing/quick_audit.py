"""Quick audits: a few entries of each replica are read, and only what a bookie itself said counts against it; pure.

An audit of a ledger asks each of its bookies for the first and the last entry that it should have of each fragment, and
for two random ones between. The fragment of an open ledger without an end is left to its writer. What the checks of all
fragments at one bookie found is one result, which the auditor takes (``ReplicaChecked``):

| what the bookie answered | result |
|---|---|
| an entry has a wrong checksum | ``DAMAGED`` from the first such entry on |
| it never had an entry | ``MISSING`` from the first such entry on |
| nothing, or that it cannot say | ``UNKNOWN``, which is evidence of nothing (H4) |
| all entries, sound | ``SOUND`` |

The auditor marks the bookie once two audits at least ten minutes apart have found the same. So a bookie that failed is
audited again after that time, with the same entries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from random import Random
from typing import Final, NamedTuple

from pybk.healing.auditor import SUSPICION_NS, Check
from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata
from pybk.replication.fragments import fragment_end
from pybk.replication.replica_check import ReplicaCheckMachine, Span, spans_of

RANDOM_ENTRIES: Final = 2
"""Random entries that are read of each replica, next to the first and the last."""

SUSPECTS_MAX: Final = 1000
"""Bookies of ledgers that are to be audited again; more are audited in the next period."""

AGAIN_NS: Final = SUSPICION_NS + 10**9
"""How long after a failed audit the next one follows."""


class Sample(NamedTuple):
    """What is read of one replica.

    Attributes:
        bookie: The bookie.
        place: Its place in the ensemble of the fragment.
        first: The first entry of the fragment.
        last: Its last entry.
        entries: The entries to read, ascending.
    """

    bookie: Bookie
    place: int
    first: int
    last: int
    entries: tuple[int, ...]


class Suspect(NamedTuple):
    """A bookie that failed an audit of a ledger.

    Attributes:
        due_ns: When it is audited again.
        entry_id: The entry at which it failed.
    """

    due_ns: int
    entry_id: int


Suspects = dict[tuple[int, Bookie], Suspect]
"""By ledger and bookie."""


def samples_of(metadata: LedgerMetadata, random: Random, also: Collection[int] = ()) -> list[Sample]:
    """Return what an audit of a ledger reads.

    Args:
        metadata: The ledger.
        random: Draws the random entries.
        also: Entries that are read as well, from the bookies that should have them.
    """
    found = []
    for number, fragment in enumerate(metadata.fragments):
        end = fragment_end(metadata, number)
        if end is None or end < fragment.first_entry_id:
            continue
        for place, bookie in enumerate(fragment.ensemble):
            spans = spans_of(metadata, place, fragment.first_entry_id, end)
            if spans:
                drawn = _drawn(spans, random, also)
                found.append(Sample(bookie, place, fragment.first_entry_id, end, drawn))
    return found


def _drawn(spans: Sequence[Span], random: Random, also: Collection[int]) -> tuple[int, ...]:
    entries = {min(span.first for span in spans), max(span.last for span in spans)}
    for span in random.choices(spans, weights=[span.entries for span in spans], k=RANDOM_ENTRIES):
        entries.add(span.first + random.randrange(span.entries) * span.step)
    ranges = [range(span.first, span.last + 1, span.step) for span in spans]
    entries.update(each for each in also if any(each in entries_there for entries_there in ranges))
    return tuple(sorted(entries))


def result_of(checks: Iterable[ReplicaCheckMachine | None]) -> tuple[Check, int]:
    """Return what the checks of one bookie's replicas of a ledger found, and the first entry that it is about.

    Args:
        checks: One for each fragment; None for one that could not be made.
    """
    made = list(checks)
    damaged = [span.first for check in made if check is not None for span in check.damaged]
    if damaged:
        return Check.DAMAGED, min(damaged)
    missing = [span.first for check in made if check is not None for span in check.missing]
    if missing:
        return Check.MISSING, min(missing)
    if any(check is None or is_unknown(check) for check in made):
        return Check.UNKNOWN, 0
    return Check.SOUND, 0


def is_unknown(check: ReplicaCheckMachine) -> bool:
    """Return whether a bookie did not answer, or could not say."""
    return check.silent or bool(check.unknown)


def failed_entries(suspects: Suspects, ledger_id: int) -> set[int]:
    """Return the entries of a ledger at which bookies failed, which are read again."""
    return {suspect.entry_id for (failed, _), suspect in suspects.items() if failed == ledger_id}


def forget_others(suspects: Suspects, ledger_id: int, bookies: Collection[Bookie]) -> None:
    """Forget the bookies that failed an audit of a ledger, and that are not among those of its present audit.

    They have lost their places, or the ledger was deleted. Nothing would end their suspicion any more.
    """
    for key in [key for key in suspects if key[0] == ledger_id and key[1] not in bookies]:
        del suspects[key]


def note_result(suspects: Suspects, ledger_id: int, bookie: Bookie, result: tuple[Check, int], now_ns: int) -> None:
    """Have a bookie that failed be audited again, and one that did not be trusted.

    One that did not answer keeps its place, and is asked later once more.
    """
    check, entry_id = result
    key = ledger_id, bookie
    again = Suspect(now_ns + AGAIN_NS, entry_id)
    if check is Check.SOUND:
        suspects.pop(key, None)
    elif check is Check.UNKNOWN:
        if key in suspects:
            suspects[key] = again._replace(entry_id=suspects[key].entry_id)
    elif key in suspects and suspects[key].due_ns <= now_ns:
        del suspects[key]  # the auditor has it twice, and marks it
    elif key not in suspects and len(suspects) < SUSPECTS_MAX:
        suspects[key] = again
