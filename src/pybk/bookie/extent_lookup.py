"""The extents of one replicated ledger in memory, found by entry id; guarded by the replica's lock.

Extents never overlap, except those that replace damaged entries of others. An extent is empty if none of its entries
was staged because a commit found no space.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from pybk.storage.descriptor import LedgerDescriptor
from pybk.threads.group_commit import Completion

_first_of: Final = attrgetter("first")


class ReplicaExtent:
    """One extent: a ledger of the store whose entry k is entry ``first + k * stride`` of the replicated ledger.

    Attributes:
        created: The commit that makes the extent durable together with its first entries; None once it is durable.
        descriptor: The ledger of the store.
        first: The first entry id, of the replicated ledger.
        stride: The distance of its entry ids, at least 1.
        replaces: Whether its entries replace damaged ones of other extents.
    """

    __slots__ = ("created", "descriptor", "first", "replaces", "stride")

    def __init__(
        self, descriptor: LedgerDescriptor, created: Completion | None, first: int, stride: int, replaces: bool
    ) -> None:
        self.created = created
        self.descriptor = descriptor
        self.first = first
        self.stride = stride
        self.replaces = replaces

    @property
    def last_staged(self) -> int:
        """The last entry id staged in the log, ``first - stride`` if none was; at least ``last_durable``."""
        return self.first + self.descriptor.last_pushed * self.stride

    @property
    def last_durable(self) -> int:
        """The last durable entry id, up to which reads are answered; ``first - stride`` if none is."""
        return self.first + self.descriptor.last_durable * self.stride


class Extents:
    """The extents of one ledger, found by entry id; the caller holds the replica's lock."""

    __slots__ = ("_lanes", "_replacements", "_strides")

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int], list[ReplicaExtent]] = {}
        """Extents that replace nothing, by stride and ``first % stride``, each list ascending by ``first``.

        Extents of one lane never overlap, so at most one of them holds a given entry.
        """
        self._strides: dict[int, None] = {}
        """Every stride that a lane has or had; a dict, for a fixed order."""
        self._replacements: list[ReplicaExtent] = []
        """Extents that replace damaged entries, oldest first. The newest copy of an entry is the valid one."""

    def __iter__(self) -> Iterator[ReplicaExtent]:
        """Yield all extents, those that replace damaged entries first."""
        yield from self._replacements
        for lane in self._lanes.values():
            yield from lane

    def add(self, extent: ReplicaExtent) -> None:
        """Add an extent; one that replaces damaged entries becomes the newest of its kind."""
        if extent.replaces:
            self._replacements.append(extent)
            return
        lane = self._lanes.setdefault((extent.stride, extent.first % extent.stride), [])
        insort(lane, extent, key=_first_of)
        self._strides[extent.stride] = None

    def remove(self, extent: ReplicaExtent) -> None:
        """Remove an extent."""
        if extent.replaces:
            self._replacements.remove(extent)
            return
        self._lanes[extent.stride, extent.first % extent.stride].remove(extent)

    def holder(self, entry_id: int) -> ReplicaExtent | None:
        """Return the newest extent that holds an entry, staged or durable; None if none holds it."""
        for extent in reversed(self._replacements):
            if extent.first <= entry_id <= extent.last_staged and (entry_id - extent.first) % extent.stride == 0:
                return extent
        for stride in self._strides:
            lane = self._lanes.get((stride, entry_id % stride), ())
            for place in range(bisect_right(lane, entry_id, key=_first_of) - 1, -1, -1):
                extent = lane[place]
                last = extent.descriptor.last_pushed
                if last >= 0:  # no other one of the lane can hold it
                    if entry_id <= extent.first + last * extent.stride:
                        return extent
                    break
        return None

    def bound(self, extent: ReplicaExtent, entry_id: int) -> int:
        """Return the last id up to which ``extent`` has the valid copies from ``entry_id`` on.

        Any other extent of replacements ends the range, even an older one, which costs the caller one more step.
        """
        bound = extent.last_staged
        for other in self._replacements:
            if other is not extent and other.last_staged >= entry_id:
                bound = min(bound, max(entry_id, other.first - 1))
        return bound

    def end(self, entry_id: int, stride: int) -> ReplicaExtent | None:
        """Return the extent that ends right before an entry, if none holds an entry of its lane from there on.

        The adds of a writer continue such an extent, so it is searched first. None proves nothing.
        """
        lane = self._lanes.get((stride, entry_id % stride))
        if not lane or len(self._strides) != 1:
            return None
        extent = lane[-1]
        count = extent.descriptor.last_pushed + 1
        return extent if count and extent.first + count * stride == entry_id else None

    def growing(self, entry_id: int, stride: int) -> ReplicaExtent | None:
        """Return the extent of this stride to which an entry can be appended, None if there is none."""
        lane = self._lanes.get((stride, entry_id % stride), ())
        for place in range(bisect_right(lane, entry_id, key=_first_of) - 1, -1, -1):
            extent = lane[place]
            if extent.last_staged + stride == entry_id:
                return extent
            if extent.descriptor.last_pushed >= 0:
                break
        return None

    def missing(self, first: int, stride: int, count: int) -> int:
        """Return how many of ``count`` entries, from ``first`` by ``stride``, come before one that is in an extent."""
        if self._ends_before(first, stride):
            return count
        return next((n for n in range(count) if self.holder(first + n * stride) is not None), count)

    def _ends_before(self, first: int, stride: int) -> bool:
        """Return whether no extent that a run of this stride can meet holds an entry from ``first`` on.

        Replacements need not be searched, because the entries that they replace are in a lane.
        """
        for (mine, residue), lane in self._lanes.items():
            if mine != stride or residue == first % stride:
                staged = next((extent for extent in reversed(lane) if extent.descriptor.last_pushed >= 0), None)
                if staged is not None and staged.last_staged >= first:
                    return False
        return True

    def last(self) -> ReplicaExtent | None:
        """Return the extent with the highest durable entry, None if nothing is durable.

        A newer copy of this entry may be in an extent of replacements, which is not searched.
        """
        tops = []
        for lane in self._lanes.values():
            tops += [next((extent for extent in reversed(lane) if extent.descriptor.last_durable >= 0), None)]
        return max((extent for extent in tops if extent), key=lambda extent: extent.last_durable, default=None)
