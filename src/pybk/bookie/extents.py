"""The extents of one replicated ledger in memory, found by entry id; guarded by the replica's lock.

Extents never overlap, but for those that replace damaged entries of others. One that begins where nothing was staged,
because a commit found no space, is empty and holds nothing.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator

from pybk.group_commit import Completion
from pybk.storage.descriptor import LedgerDescriptor


class ReplicaExtent:
    """One extent: a ledger of the store, whose entry k is entry ``first + k * stride`` of the replicated one.

    Its creation may still wait for the commit ``created``, together with its first entries.
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
        """The last entry given to the log, ``first - stride`` for none."""
        return self.first + self.descriptor.last_pushed * self.stride

    @property
    def last_durable(self) -> int:
        """The last entry that may be read, ``first - stride`` for none."""
        return self.first + self.descriptor.last_durable * self.stride


def _first_of(held: ReplicaExtent) -> int:
    return held.first


class Extents:
    """The extents of one ledger, found by entry id; the caller excludes others."""

    __slots__ = ("_lanes", "_replacements", "_strides")

    def __init__(self) -> None:
        # By stride and residue, each ascending: of a lane at most one extent can hold an entry.
        self._lanes: dict[tuple[int, int], list[ReplicaExtent]] = {}
        self._strides: dict[int, None] = {}
        self._replacements: list[ReplicaExtent] = []  # the newest last, which counts

    def __iter__(self) -> Iterator[ReplicaExtent]:
        """Yield all extents."""
        yield from self._replacements
        for lane in self._lanes.values():
            yield from lane

    def add(self, held: ReplicaExtent) -> None:
        """Add one; of those that replace, the newest last."""
        if held.replaces:
            self._replacements.append(held)
            return
        lane = self._lanes.setdefault((held.stride, held.first % held.stride), [])
        insort(lane, held, key=_first_of)
        self._strides[held.stride] = None

    def remove(self, held: ReplicaExtent) -> None:
        """Remove one."""
        if held.replaces:
            self._replacements.remove(held)
            return
        self._lanes[held.stride, held.first % held.stride].remove(held)

    def holder(self, entry_id: int) -> ReplicaExtent | None:
        """Return the extent that an entry was staged in, None if it was not; of several, the newest."""
        for held in reversed(self._replacements):
            if held.first <= entry_id <= held.last_staged and (entry_id - held.first) % held.stride == 0:
                return held
        for stride in self._strides:
            found = self._before(entry_id, stride)
            if found is not None and entry_id <= found.last_staged:
                return found
        return None

    def bound(self, held: ReplicaExtent, entry_id: int) -> int:
        """Return an entry up to which an extent holds all that follow one that it holds, as far as it goes."""
        bound = held.last_staged
        for other in self._replacements:
            if other is not held and other.last_staged >= entry_id:
                bound = min(bound, max(entry_id, other.first - 1))
        return bound

    def _before(self, entry_id: int, stride: int) -> ReplicaExtent | None:
        """Return the last extent of a lane that begins at or before an entry of it and is not empty."""
        lane = self._lanes.get((stride, entry_id % stride), ())
        for place in range(bisect_right(lane, entry_id, key=_first_of) - 1, -1, -1):
            if lane[place].descriptor.last_pushed >= 0:
                return lane[place]
        return None

    def growing(self, entry_id: int, stride: int) -> ReplicaExtent | None:
        """Return the extent of this stride whose next entry is the given one, None if there is none."""
        lane = self._lanes.get((stride, entry_id % stride), ())
        for place in range(bisect_right(lane, entry_id, key=_first_of) - 1, -1, -1):
            held = lane[place]
            if held.last_staged + stride == entry_id:
                return held
            if held.descriptor.last_pushed >= 0:
                break
        return None

    def missing(self, first: int, stride: int, count: int) -> int:
        """Return how many of ``count`` entries, from ``first`` by ``stride``, are missing before one that is there."""
        if self._ends_before(first, stride):
            return count
        return next((n for n in range(count) if self.holder(first + n * stride) is not None), count)

    def _ends_before(self, first: int, stride: int) -> bool:
        """Return whether there is no entry from the given one on, among those that a run of the stride would meet."""
        for (mine, residue), lane in self._lanes.items():
            if mine != stride or residue == first % stride:
                staged = next((held for held in reversed(lane) if held.descriptor.last_pushed >= 0), None)
                if staged is not None and staged.last_staged >= first:
                    return False
        return True

    def last(self) -> ReplicaExtent | None:
        """Return the extent that holds the highest durable entry, None if nothing is durable."""
        tops = []
        for lane in self._lanes.values():
            tops += [next((held for held in reversed(lane) if held.descriptor.last_durable >= 0), None)]
        return max((held for held in tops if held), key=lambda held: held.last_durable, default=None)
