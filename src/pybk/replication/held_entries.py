"""Finds the ensembles that a ledger must have had, from the entries that its bookies hold.

Theory of operation. The write set of entry e is the places ``(e + i) mod E``, so the bookie of a place holds certain
*lanes*, entries that are equal modulo E (one lane of all entries if each entry goes to every place). Wherever the
entries of a bookie in a lane begin or end, a *piece* of the ledger begins. Inside a piece each bookie has all of a lane
or none of it. For one piece, the best ensemble is the assignment of bookies to places that keeps most copies. A lane
that only one bookie holds counts more than all others, because no entry may be left without a bookie. Consecutive
pieces share a fragment as long as one ensemble is the best for each of them.

A place of which no bookie holds entries gets a *filler*. It must not be a bookie that could deny an entry which too few
others hold, because QC denials would end a recovery before that entry. So a real bookie fills a place only if Qa
bookies of each write set hold their entries. Otherwise a bookie that never existed fills the place; it never answers,
like the lost bookie that it stands for.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from pybk.ledger.ledger_metadata import INSTANCE_BYTES, Bookie, Fragment

_ONLY: Final = 1000
"""The weight of a lane that one bookie alone holds; others count 1."""

_NEVER: Final = -1
"""The weight of a bookie at a place of which it holds no entries: less than that of a filler."""


class HeldRun(NamedTuple):
    """Entries that a bookie holds: ``first``, ``first + stride``, …; ``entries`` of them, at least one."""

    first: int
    stride: int
    entries: int

    @property
    def last(self) -> int:
        """The last entry."""
        return self.first + (self.entries - 1) * self.stride


class Quorums(NamedTuple):
    """Ensemble size, write quorum and ack quorum of a ledger."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int


class FoundEnsembles(NamedTuple):
    """The ensembles of a ledger, as far as the entries show them.

    Attributes:
        fragments: The fragments, at least one; the first begins with entry 0.
        last: The last entry that any bookie holds, -1 for none.
        nowhere: Ranges (first and last entry) with entries up to ``last`` that no bookie of their write set holds.
        missing: Bookies of the fragments that lack entries, fillers included, each with the first entry that it lacks.
        undecidable: Whether so many bookies of the last fragment are lost that no recovery can find the ledger's end.
    """

    fragments: tuple[Fragment, ...]
    last: int
    nowhere: tuple[tuple[int, int], ...]
    missing: tuple[tuple[Bookie, int], ...]
    undecidable: bool


class _Lane:
    """The entries that one bookie holds of one lane: ascending, disjoint intervals in steps of the period."""

    def __init__(self, period: int) -> None:
        self._period = period
        self.intervals: list[tuple[int, int]] = []

    def merge(self) -> None:
        """Join intervals that overlap or follow each other."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(self.intervals):
            if merged and first <= merged[-1][1] + self._period:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            else:
                merged.append((first, last))
        self.intervals = merged

    def has(self, entry_id: int) -> bool:
        """Return whether the bookie holds an entry of this lane."""
        at = bisect_right(self.intervals, (entry_id, 1 << 63)) - 1
        return at >= 0 and self.intervals[at][1] >= entry_id


Lanes = dict[Bookie, dict[int, _Lane]]


def unknown_bookie(number: int) -> Bookie:
    """Return the bookie that stands for a lost one: it never existed, and never answers."""
    name = f"unknown-{number}"
    return Bookie(name, hashlib.sha256(b"pybk unknown bookie\0" + name.encode()).digest()[:INSTANCE_BYTES])


def find_ensembles(
    quorums: Quorums,
    held: Mapping[Bookie, Sequence[HeldRun]],
    *,
    fillers: Sequence[Bookie] = (),
    last: int | None = None,
) -> FoundEnsembles:
    """Return the ensembles of a ledger.

    Args:
        quorums: The sizes of the ledger.
        held: The runs that each bookie holds; a bookie without entries has only a fence.
        fillers: Bookies that may fill places of which no bookie holds entries; empty unless all other bookies are known
            to be lost.
        last: The last entry if the ledger is closed; later entries are ignored.

    Cost: A matching of bookies and places for each piece: 0.1 ms for three bookies.
    """
    period, lanes, starts, end = _looked_through(quorums, held, last)
    pieces = _Pieces(quorums, period, lanes, sorted(starts), end)
    fragments: list[Fragment] = []
    missing: list[tuple[Bookie, int]] = []
    nowhere: list[tuple[int, int]] = []
    decidable = True
    for first, before, places in pieces.fragments():
        ensemble, decidable = _filled(quorums, pieces, first, before, places, (*held, *fillers), bool(fillers))
        if not fragments or fragments[-1].ensemble != ensemble:
            fragments.append(Fragment(first, ensemble))
        gap, lacking = pieces.lacking(first, before, ensemble)
        missing += lacking
        nowhere += gap
    first_missing: dict[Bookie, int] = {}
    for bookie, entry_id in missing:
        first_missing.setdefault(bookie, entry_id)
    return FoundEnsembles(tuple(fragments), end, tuple(nowhere), tuple(first_missing.items()), not decidable)


def ensembles_hold(
    quorums: Quorums,
    fragments: Sequence[Fragment],
    held: Mapping[Bookie, Sequence[HeldRun]],
    answering: Collection[Bookie],
    last: int | None,
) -> tuple[bool, tuple[tuple[Bookie, int], ...]]:
    """Return whether a ledger's ensembles can return all entries that bookies hold, and the entries that they lack.

    Args:
        quorums: The sizes of the ledger.
        fragments: The fragments in the metadata.
        held: What each bookie holds of it.
        answering: The bookies that exist, and so would deny entries that they lack.
        last: As for ``find_ensembles``.

    Returns:
        False if too few bookies of its write set hold some entry, because the others might then prove that it does not
        exist; and the bookies that lack entries, each with the first entry that it lacks.
    """
    period, lanes, starts, end = _looked_through(quorums, held, last)
    bounds = sorted(starts | {each.first_entry_id for each in fragments if each.first_entry_id <= max(end, 0)})
    pieces = _Pieces(quorums, period, lanes, bounds, end)
    lacking: dict[Bookie, int] = {}
    sound = True
    for entry_id in pieces.samples(0, end + 1):
        ensemble = next(each.ensemble for each in reversed(fragments) if each.first_entry_id <= entry_id)
        members = [bookie for place, bookie in enumerate(ensemble) if entry_id % period in pieces.residues[place]]
        without = [bookie for bookie in members if not pieces.has(bookie, entry_id)]
        for bookie in without:
            lacking.setdefault(bookie, entry_id)
        copies = len(members) - len(without)
        denials = sum(bookie in answering for bookie in without)
        proof = quorums.write_quorum - quorums.ack_quorum + 1
        if any(pieces.has(bookie, entry_id) for bookie in held):
            sound = sound and (copies >= quorums.ack_quorum or (copies > 0 and denials < proof))
    return sound, tuple(lacking.items())


def _looked_through(
    quorums: Quorums, held: Mapping[Bookie, Sequence[HeldRun]], last: int | None
) -> tuple[int, Lanes, set[int], int]:
    """Return the period of the lanes, the lanes of each bookie, where pieces begin, and the last entry."""
    period = quorums.ensemble_size if quorums.write_quorum < quorums.ensemble_size else 1
    lanes = {bookie: _lanes(runs, period, last) for bookie, runs in held.items()}
    found = [each for of_one in lanes.values() for lane in of_one.values() for each in lane.intervals]
    end = max((last for _, last in found), default=-1) if last is None else last
    return period, lanes, {0} | {first for first, _ in found} | {last + 1 for _, last in found if last < end}, end


def _lanes(runs: Sequence[HeldRun], period: int, last: int | None) -> dict[int, _Lane]:
    """Return the lanes that a bookie holds of a ledger, by residue."""
    lanes: dict[int, _Lane] = {}
    for run in runs:
        end = run.last if last is None else min(run.last, last)
        if end < run.first:
            continue
        whole = period % run.stride == 0
        # A stride that does not divide the period leaves holes in a lane, so each entry is an interval of its own.
        firsts = range(run.first, min(run.first + period, end + 1) if whole else end + 1, run.stride)
        for first in firsts:
            lane = lanes.setdefault(first % period, _Lane(period))
            lane.intervals.append((first, end - (end - first) % period if whole else first))
    for lane in lanes.values():
        lane.merge()
    return lanes


class _Pieces:
    """The pieces of one ledger, and the bookies that hold their lanes."""

    def __init__(self, quorums: Quorums, period: int, lanes: Lanes, starts: list[int], end: int) -> None:
        self._period = period
        self._lanes = lanes
        self._bounds = [*starts, max(end, starts[-1]) + 1]
        self._end = end
        self.residues = [
            {(place - i) % period for i in range(quorums.write_quorum)} for place in range(quorums.ensemble_size)
        ]

    def _entries(self, first: int, before: int) -> range:
        """Return one entry of each lane that a piece has."""
        return range(first, min(first + self._period, before, self._end + 1))

    def has(self, bookie: Bookie, entry_id: int) -> bool:
        """Return whether a bookie holds an entry."""
        lane = self._lanes.get(bookie, {}).get(entry_id % self._period)
        return lane is not None and lane.has(entry_id)

    def _gains(self, first: int, before: int) -> list[list[int]]:
        """Return the weight of each bookie at each place of a piece."""
        gains = [[0] * len(self.residues) for _ in self._lanes]
        for entry_id in self._entries(first, before):
            holders = [row for row, bookie in enumerate(self._lanes) if self.has(bookie, entry_id)]
            for row in holders:
                for place, residues in enumerate(self.residues):
                    if entry_id % self._period in residues:
                        gains[row][place] += _ONLY if len(holders) == 1 else 1
        return gains

    def fragments(self) -> Iterator[tuple[int, int, list[Bookie | None]]]:
        """Yield the fragments: first entry, the first of the next fragment, and the bookie of each place or None."""
        bookies, begin, best = list(self._lanes), self._bounds[0], 0
        total = [[0] * len(self.residues) for _ in bookies]
        chosen: list[Bookie | None] = [None] * len(self.residues)
        for first, before in zip(self._bounds, self._bounds[1:], strict=False):
            gains = self._gains(first, before)
            alone, places = _assign(gains, len(self.residues))
            together = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(total, gains, strict=True)]
            joint, joint_places = _assign(together, len(self.residues))
            if joint == best + alone:
                total, best, places = together, joint, joint_places
            else:
                yield begin, first, chosen
                begin, total, best = first, gains, alone
            chosen = [None if row is None else bookies[row] for row in places]
        yield begin, self._bounds[-1], chosen

    def copies_min(self, first: int, before: int, places: Sequence[Bookie | None]) -> int | None:
        """Return the number of copies of the entry that has fewest; None without entries."""
        fewest: int | None = None
        for entry_id in self.samples(first, before):
            holders = 0
            for place, bookie in enumerate(places):
                if bookie is not None and entry_id % self._period in self.residues[place]:
                    holders += self.has(bookie, entry_id)
            fewest = holders if fewest is None else min(fewest, holders)
        return fewest

    def samples(self, first: int, before: int) -> Iterator[int]:
        """Yield one entry of each lane of each piece between two bounds."""
        for low, high in zip(self._bounds, self._bounds[1:], strict=False):
            if first <= low < before:
                yield from self._entries(low, high)

    def lacking(
        self, first: int, before: int, ensemble: Sequence[Bookie]
    ) -> tuple[list[tuple[int, int]], list[tuple[Bookie, int]]]:
        """Return the ranges with entries that no bookie of their write set holds, and the first each bookie lacks."""
        nowhere: list[tuple[int, int]] = []
        lacking: dict[Bookie, int] = {}
        for low, high in zip(self._bounds, self._bounds[1:], strict=False):
            if not first <= low < before:
                continue
            for entry_id in self._entries(low, high):
                holders = 0
                for place, bookie in enumerate(ensemble):
                    if entry_id % self._period in self.residues[place]:
                        if self.has(bookie, entry_id):
                            holders += 1
                        else:
                            lacking.setdefault(bookie, entry_id)
                if not holders and (not nowhere or nowhere[-1][0] != low):
                    nowhere.append((low, min(high - 1, self._end)))
        return nowhere, sorted(lacking.items(), key=lambda item: item[1])


def _filled(
    quorums: Quorums,
    pieces: _Pieces,
    first: int,
    before: int,
    places: Sequence[Bookie | None],
    real: Sequence[Bookie],
    all_known: bool,
) -> tuple[tuple[Bookie, ...], bool]:
    """Fill the places that are left, and return whether a recovery can fence enough bookies of the ensemble."""
    fewest = pieces.copies_min(first, before, places)
    denials_harmless = all_known and (fewest is None or fewest >= quorums.ack_quorum)
    spare = (bookie for bookie in dict.fromkeys(real) if bookie not in places)
    ensemble, answers = list[Bookie](), list[bool]()
    for place, bookie in enumerate(places):
        chosen = bookie or (next(spare, None) if denials_harmless else None)
        ensemble.append(chosen or unknown_bookie(place))
        answers.append(chosen is not None)
    size, write = quorums.ensemble_size, quorums.write_quorum
    silent = max(sum(not answers[(entry + i) % size] for i in range(write)) for entry in range(size))
    return tuple(ensemble), silent < quorums.ack_quorum


def _assign(gains: Sequence[Sequence[int]], places: int) -> tuple[int, list[int | None]]:
    """Assign rows to places, each row at most once, with the highest sum of weights.

    Returns:
        The sum, and the row of each place; None for a place where no row has a weight.

    This is the Hungarian method, with places as workers, and one more row without weight for each place.
    """
    rows = len(gains)
    columns = rows + places

    def cost(place: int, row: int) -> int:
        if row >= rows:
            return 0
        return -gains[row][place] if gains[row][place] > 0 else -_NEVER

    by_place, by_row, taken = [0] * (places + 1), [0] * (columns + 1), [0] * (columns + 1)
    way = [0] * (columns + 1)
    for place in range(1, places + 1):
        taken[0], at = place, 0
        least, used = [1 << 62] * (columns + 1), [False] * (columns + 1)
        while True:
            used[at] = True
            worker, delta, nearest = taken[at], 1 << 62, 0
            for row in range(1, columns + 1):
                if used[row]:
                    continue
                reduced = cost(worker - 1, row - 1) - by_place[worker] - by_row[row]
                if reduced < least[row]:
                    least[row], way[row] = reduced, at
                if least[row] < delta:
                    delta, nearest = least[row], row
            for row in range(columns + 1):
                if used[row]:
                    by_place[taken[row]] += delta
                    by_row[row] -= delta
                else:
                    least[row] -= delta
            at = nearest
            if not taken[at]:
                break
        while at:
            taken[at], at = taken[way[at]], way[at]
    chosen: list[int | None] = [None] * places
    for row in range(1, rows + 1):
        if taken[row]:
            chosen[taken[row] - 1] = row - 1
    return sum(gains[row][place] for place, row in enumerate(chosen) if row is not None), chosen
