"""Mergers in the world of ledger lists: they copy closed segments into one ledger, and list it in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Final

from pybk.streams.format import NOTHING_YET
from pybk.streams.ledger_list import Merge
from pybk.streams.list_record import Detached, ListRecord, Rows, Segment

MERGERS: Final = 2
KEPT_EVENTS: Final = 150
"""The events for which the ledgers of members are kept after a merge was planned."""


class Merger:
    """What a merger's process knows of the run of merges that it makes."""

    def __init__(self) -> None:
        self.run: int | None = None
        """The number of the run; None before it has one."""
        self.made: Merge | None = None
        """The merge whose ledger is written, and that is not listed yet."""


def members_of(record: ListRecord, segments: Sequence[Segment], random: Random) -> Rows:
    """Return some consecutive closed segments of one generation that were not truncated; empty if there are none."""
    closed = [each for each in segments if not each.is_open and (each.first_seq or 0) >= record.first_seq]
    if len(closed) < 2:
        return ()
    low = random.randrange(len(closed) - 1)
    high = random.randint(low + 2, min(len(closed), low + 5))
    same = [each for each in closed[low:high] if each.generation == closed[low].generation]
    members = tuple(closed[low : low + len(same)])
    return members if len(members) > 1 and list(members) == same else ()


def merge_of(run: int, members: Rows, ledger_id: int, until: int) -> Merge:
    """Return the merge of some segments into a ledger."""
    first, last = members[0], members[-1]
    assert first.first_seq is not None
    assert last.last_seq is not None
    row = replace(last, ledger_id=ledger_id, first_seq=first.first_seq, before=NOTHING_YET)
    ledger = Detached(ledger_id, last.last_seq - first.first_seq + 1, row.nbytes, NOTHING_YET)
    return Merge(run, members, row, ledger, until)
