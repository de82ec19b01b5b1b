"""A commit in memory: what was staged to become durable together, and who waits for it."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from pybk.errors import PybkError

if TYPE_CHECKING:
    from pybk.storage.descriptor import LedgerDescriptor

_FEW: Final = 32
"""Below this many numbers, Python adds them quicker than numpy."""

Control = tuple[Callable[[int], bytes], Callable[[], None]]
"""A control record: what returns its bytes for an LSN, and what applies it once it is durable, maybe twice."""


class StagedEntries:
    """Consecutive entries of one ledger in one commit.

    ``parts`` holds two pieces for each entry of ``sizes``; what came in one piece is followed by empty ones. An entry
    is staged when its size is there, which comes last and at once; what an exception left before that counts for
    nothing.
    """

    __slots__ = (
        "base_length",
        "commit",
        "descriptor",
        "encoded_bytes",
        "first",
        "length_at_end",
        "overhead",
        "parts",
        "sizes",
        "staged_ns",
    )

    takes_more: ClassVar[bool] = True
    """Whether entries that are staged later may join the run."""

    def __init__(
        self,
        commit: Commit,
        descriptor: LedgerDescriptor,
        first: int,
        base_length: int,
        overhead: int,
        staged_ns: int,
    ) -> None:
        self.commit = commit
        self.descriptor = descriptor
        self.first = first
        self.base_length = base_length
        self.overhead = overhead
        self.sizes = array("q")
        self.encoded_bytes = 0
        self.length_at_end = 0
        self.parts: list[bytes | memoryview] = []
        self.staged_ns = staged_ns

    def trim(self) -> None:
        """Drop what an exception left behind the last staged entry."""
        del self.parts[2 * len(self.sizes) :]

    def seal(self) -> None:
        """Take what is staged as all there will be."""
        count = len(self.sizes)
        if len(self.parts) != 2 * count:
            self.trim()
        if count == 1:
            self.encoded_bytes = self.sizes[0]
        else:
            self.encoded_bytes = sum(self.sizes) if count < _FEW else int(np.sum(self.sizes))

    def last(self) -> int:
        """Return the id of the last staged entry, ``first - 1`` for none."""
        return self.first + len(self.sizes) - 1

    def length(self) -> int:
        """Return the payload bytes of the ledger up to the last staged entry."""
        return self.base_length + sum(self.sizes) - self.overhead * len(self.sizes)


class GroupPart(NamedTuple):
    """The entries of one ledger in a group; the fields are the arguments of ``Log.stage`` that have these names."""

    descriptor: LedgerDescriptor
    first_entry_id: int
    sizes: array[int]
    parts: Sequence[bytes | memoryview]
    base_length: int
    overhead: int


class StagedGroup:
    """Entries and control records in one commit that are replayed all or not at all.

    Attributes:
        low: Where in the commit's runs the group's runs begin.
        high: Where they end.
        controls: Its control records.
        staged: Whether the group counts. It is set last and at once: an interrupt before leaves nothing of the group.
    """

    __slots__ = ("controls", "high", "low", "staged")

    def __init__(self, low: int, high: int, controls: Sequence[Control]) -> None:
        self.low = low
        self.high = high
        self.controls = controls
        self.staged = False


class GroupEntries(StagedEntries):
    """The entries of one ledger in a group, which no other entries join."""

    __slots__ = ("group",)

    takes_more = False

    def __init__(self, commit: Commit, group: StagedGroup, part: GroupPart, staged_ns: int) -> None:
        super().__init__(commit, part.descriptor, part.first_entry_id, part.base_length, part.overhead, staged_ns)
        self.group = group
        self.sizes = part.sizes
        # An odd number of pieces has ``Log.stage_entry`` open another run, as it does after an interrupt.
        self.parts = [*part.parts, b""]

    def seal(self) -> None:
        """Take the entries as they are; none if the group was not staged."""
        if not self.group.staged:
            del self.sizes[:]
        super().seal()

    def last(self) -> int:
        """Return the id of the last entry, ``first - 1`` if the group was not staged."""
        return super().last() if self.group.staged else self.first - 1


class Commit:
    """What becomes durable together.

    ``done`` is set once everything in it is durable and published, or ``error`` is set. ``wakers`` belongs to who
    waits in event loops: one waker per loop. ``behind`` is what was forming when this one failed, and failed with it.
    ``buffered_ns`` is when the first entry was staged that nobody waits for, on the monotonic clock; 0 for none.
    """

    __slots__ = (
        "base",
        "behind",
        "buffered_ns",
        "buffers",
        "callbacks",
        "controls",
        "creations",
        "done",
        "error",
        "file_id",
        "groups",
        "lsn",
        "padded",
        "payload_bytes",
        "places",
        "records",
        "runs",
        "size",
        "start",
        "waiters",
        "wakers",
        "wanted",
    )

    # Set when the commit is written: its records, each run with where in it its record begins and how long its body
    # is, its bytes without and with padding, its file, the offset of its header there, and the offset at which
    # writing starts.
    records: list[bytes | memoryview]
    places: list[tuple[StagedEntries, int, int]]
    size: int
    padded: int
    file_id: int
    base: int
    start: int

    def __init__(self) -> None:
        # What creates ledgers goes ahead of entries, which may be of these ledgers; what ends them goes behind.
        self.creations: list[tuple[LedgerDescriptor, Callable[[int], bytes], Callable[[], None]]] = []
        self.runs: list[StagedEntries] = []
        self.controls: list[Control] = []
        self.groups: list[StagedGroup] = []
        self.payload_bytes = 0
        self.waiters: list[threading.Lock] = []
        self.callbacks: list[Callable[[], None]] = []
        self.wakers: dict[Any, Any] = {}
        self.wanted = False
        self.buffered_ns = 0
        self.done = False
        self.error: PybkError | None = None
        self.behind: Commit | None = None
        self.lsn = 0
        self.buffers: list[bytes | memoryview] = []

    @classmethod
    def finished(cls, error: PybkError | None) -> Commit:
        """Return a commit of nothing that is done already."""
        commit = cls()
        commit.done = True
        commit.error = error
        return commit

    def is_done(self) -> bool:
        """Tell whether it is done now; another thread may have finished it since the last look."""
        return self.done

    def is_empty(self) -> bool:
        """Tell whether nothing was staged."""
        return not self.runs and not self.controls and not self.creations and not self.groups

    def wake(self) -> None:
        """Release who waits for it, as it is done; a waiter released twice has left its lock behind."""
        for waiter in self.waiters:
            if waiter.locked():
                waiter.release()

    def fail(self, error: PybkError) -> None:
        """Have it fail, and its ledgers take no more; may be repeated."""
        self.error = error
        for descriptor in self.ledgers():
            descriptor.error = error

    def ledgers(self) -> list[LedgerDescriptor]:
        """Return the ledgers that it creates or holds entries of, some maybe twice."""
        return [*(run.descriptor for run in self.runs), *(created for created, _, _ in self.creations)]

    @classmethod
    def of_acknowledged(cls, error: PybkError, *refused: Commit) -> Commit | None:
        """Return a commit of the acknowledged entries of refused ones; None if there are none. May be repeated.

        An append to a deferred ledger is acknowledged before the entry is written. A refusal that the store survives
        must not lose the entry, so its run waits for another attempt.

        Args:
            error: Why the commits were refused.
            refused: The commits, in order.
        """
        runs = [run for commit in refused for run in commit.runs if run.descriptor.deferred and run.descriptor.created]
        if not runs:
            return None
        kept = cls()
        kept.error = error
        kept.runs = list(dict.fromkeys(runs))  # those of an attempt that was interrupted come twice
        for run in kept.runs:
            run.commit = kept
            kept.payload_bytes += sum(run.sizes)
        return kept

    def release_buffers(self) -> None:
        """Drop what was to be written: a ledger remembers its last run, which need not keep all its bytes."""
        self.buffers = []
        self.groups = []
        for run in self.runs:
            if run.commit is self:
                run.parts = []
