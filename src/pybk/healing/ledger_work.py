"""The work of one bookie's worker for a marked ledger, judged by the present state and not by that of the mark.

A worker writes copies to its own bookie alone, so all copies to a bookie have one owner and one throttle. For each
fragment that has an end:

| bookie of the fragment | cause of its mark | the worker of |
|---|---|---|
| is the own one and serves | damaged, missing, missed | this bookie fills it up |
| is absent | lost | any bookie that fits takes its place |
| is leaving | draining | any bookie that fits takes its place |
| serves | misplaced | any bookie takes its place that fits, and gives a write set a zone more |
| serves | rebalance, from the fragment's first entry on | the mark's target takes its place |
| serves | lost, draining | nobody: it is back, and the cause is over |
| absent | damaged, missing, missed alone | nobody yet: it may come back within the grace |
| any | damaged, missing, missed, from an entry after its end on | nobody: without other fragments the cause is over |

A rebalance moves one fragment, and is over once that fragment no longer names the bookie, or names the target.

A fragment without an end is its writer's. If the writer is gone, the ledger has to be recovered first. A mark does not
say where the missing entries end. So the mark of a bookie in such a fragment stays when the earlier fragments are
filled up, and then concerns the last one alone (``partly``). The bookie's worker removes it once it has found that its
bookie misses no entry there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, NamedTuple

from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata, LedgerState
from pybk.metadata.underreplication import RepairReason, UnderReplicatedLedger
from pybk.replication.fragments import fragment_end
from pybk.replication.quorum import Quorum

_AWAY: Final = frozenset({RepairReason.LOST, RepairReason.DRAINING})
_MISPLACED: Final = frozenset({RepairReason.MISPLACED})
_REBALANCE: Final = frozenset({RepairReason.REBALANCE})
_FILLED: Final = frozenset(reason for reason in RepairReason if reason.observed)


class Presence(Enum):
    """The presence of a bookie: whether it can keep its places.

    ``HERE``: this instance serves. ``LEAVING``: it serves, and is being drained. ``ABSENT``: it is not registered, or
    another instance of it is.
    """

    HERE = "here"
    LEAVING = "leaving"
    ABSENT = "absent"


class FragmentWork(NamedTuple):
    """A fragment that the own bookie completes.

    Attributes:
        first_entry_id: Its first entry.
        replaced: The bookie whose place the own bookie takes; None if the own bookie has a place, and gets the entries
            that it misses.
    """

    first_entry_id: int
    replaced: Bookie | None


Fits = Callable[[Fragment, int, frozenset[RepairReason]], bool]
"""A test whether a bookie may take a place of a fragment: it needs space, and the rules of placement must allow it."""


class LedgerWork(NamedTuple):
    """The work that a ledger needs.

    Attributes:
        fragments: The work of the own bookie, in the order of the fragments.
        filled: Marks that are removed once all of ``fragments`` is done, because it filled up the own bookie.
        partly: Marks of the own bookie that it fills up as well, and that stay, because it has a place in the fragment
            without an end, too, and may miss entries of that one.
        over: Marks that are removed now, because their causes are over.
        unended: Bookies with a place in the fragment without an end that are lost, leave, or may miss entries of it.
    """

    fragments: tuple[FragmentWork, ...]
    filled: tuple[UnderReplicatedLedger, ...]
    partly: tuple[UnderReplicatedLedger, ...]
    over: tuple[UnderReplicatedLedger, ...]
    unended: tuple[Bookie, ...]


def ledger_work(
    metadata: LedgerMetadata,
    marks: Sequence[UnderReplicatedLedger],
    own: Bookie,
    presence: Callable[[Bookie], Presence],
    fits: Fits,
) -> LedgerWork:
    """Return the work of a bookie's worker for a ledger.

    Args:
        metadata: The ledger's metadata, read after the marks.
        marks: All marks of the ledger.
        own: The worker's bookie.
        presence: Whether a bookie can keep its places.
        fits: Whether the own bookie may take a place of a fragment, because of one of the reasons.
    """
    fragments: dict[int, FragmentWork] = {}
    filled: list[UnderReplicatedLedger] = []
    partly: list[UnderReplicatedLedger] = []
    over: list[UnderReplicatedLedger] = []
    unended: list[Bookie] = []
    for mark in sorted(marks, key=lambda mark: (mark.reason.rank, mark.bookie)):
        work = _work_of(metadata, mark, own, presence(mark.bookie), fits)
        if work.over:
            over.append(mark)
        elif work.fills:
            (partly if _is_in_open_fragment(metadata, own) else filled).append(mark)
        for each in work.fragments:
            fragments.setdefault(each.first_entry_id, each)
        if work.unended:
            unended.append(mark.bookie)
    ordered = tuple(fragments[first] for first in sorted(fragments))
    if metadata.state is LedgerState.IN_RECOVERY:  # it may have marked bookies of ensembles that are not written yet
        filled, partly, over = [], [], []
    return LedgerWork(ordered, tuple(filled), tuple(partly), tuple(over), tuple(unended))


def live_copies(
    metadata: LedgerMetadata,
    marks: Sequence[UnderReplicatedLedger],
    presence: Callable[[Bookie], Presence],
    *,
    ended: bool = False,
) -> int:
    """Return the fewest live sound copies of an entry of a ledger: on bookies that serve and have no observed damage.

    Args:
        metadata: The ledger's metadata.
        marks: All marks of the ledger.
        presence: Whether a bookie serves.
        ended: Whether to leave out the fragment without an end, which no worker copies.
    """
    quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
    short = {mark.bookie: mark for mark in marks if mark.causes_by_reason().keys() & _FILLED}
    fewest = quorum.write_quorum
    for number, fragment in enumerate(metadata.fragments):
        end = fragment_end(metadata, number)
        sound = 0
        for place, bookie in enumerate(fragment.ensemble):
            misses = bookie in short and (end is None or short[bookie].first_entry_id <= end)
            sound |= (presence(bookie) is not Presence.ABSENT and not misses) << place
        counts = not ended if end is None else end >= fragment.first_entry_id
        if sound != quorum.everyone and counts:
            fewest = min(fewest, *((sound & mask).bit_count() for mask in quorum.masks()))
    return fewest


class _MarkWork(NamedTuple):
    fragments: list[FragmentWork]
    fills: bool
    over: bool
    unended: bool


def _work_of(
    metadata: LedgerMetadata, mark: UnderReplicatedLedger, own: Bookie, presence: Presence, fits: Fits
) -> _MarkWork:
    """Return the work of a bookie's worker for one mark."""
    causes = mark.causes_by_reason()
    fill_from = min((first for reason, first in causes.items() if reason in _FILLED), default=None)
    work: list[FragmentWork] = []
    named = unended = leaving = moving = due = False
    for number, fragment in enumerate(metadata.fragments):
        if mark.bookie not in fragment.ensemble:
            continue
        named = True
        end = fragment_end(metadata, number)
        why = _leaves(mark, presence, fragment)
        leaving |= bool(why - _REBALANCE)
        moving |= why == _REBALANCE
        due |= fill_from is not None and (end is None or end >= fill_from)
        if end is None:
            unended = bool(why) or presence is not Presence.HERE or fill_from is not None
        elif why and (why != _REBALANCE or mark.target == own.bookie_id):
            place = fragment.ensemble.index(mark.bookie)
            if own not in fragment.ensemble and fits(fragment, place, why):
                work.append(FragmentWork(fragment.first_entry_id, mark.bookie))
        elif mark.bookie == own and fill_from is not None and end >= fill_from:
            work.append(FragmentWork(fragment.first_entry_id, None))
    if not named:
        return _MarkWork([], fills=False, over=True, unended=False)
    if leaving or moving or due:
        fills = due and not leaving and mark.bookie == own
        return _MarkWork(work, fills=fills, over=False, unended=unended)
    left = causes.keys() - _FILLED  # others have the places of the entries that it missed
    over = not left or (presence is Presence.HERE and left <= _AWAY | _REBALANCE)
    return _MarkWork([], fills=False, over=over, unended=unended)


def _leaves(mark: UnderReplicatedLedger, presence: Presence, fragment: Fragment) -> frozenset[RepairReason]:
    """Return why the bookie of a mark is to lose its place in a fragment; empty if it keeps it."""
    causes = mark.causes_by_reason()
    if presence is not Presence.HERE:
        return _AWAY & causes.keys()
    if RepairReason.MISPLACED in causes:
        return _MISPLACED
    moves = causes.get(RepairReason.REBALANCE) == fragment.first_entry_id
    if moves and mark.target and all(mark.target != each.bookie_id for each in fragment.ensemble):
        return _REBALANCE
    return frozenset()


def _is_in_open_fragment(metadata: LedgerMetadata, bookie: Bookie) -> bool:
    last = len(metadata.fragments) - 1
    return fragment_end(metadata, last) is None and bookie in metadata.fragments[last].ensemble
