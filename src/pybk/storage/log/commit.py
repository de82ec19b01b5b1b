"""One commit of the log in memory: the entries and control records that become durable together."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from pybk.errors import PybkError
from pybk.storage.descriptor import LedgerDescriptor, StagedEntries
from pybk.threads.group_commit import Completion

Control = tuple[Callable[[int], bytes], Callable[[], None]]
"""A control record: its bytes as a function of the LSN, and a function that applies it once durable, maybe twice."""


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
        low: Index in ``Commit.staged`` at which the group's entries begin.
        high: Index after its last entries.
        controls: Its control records.
        staged: Whether the group counts. It is set last and in one step, so an interrupt before it leaves nothing of
            the group.
    """

    __slots__ = ("controls", "high", "low", "staged")

    def __init__(self, low: int, high: int, controls: Sequence[Control]) -> None:
        self.low = low
        self.high = high
        self.controls = controls
        self.staged = False


class GroupEntries(StagedEntries):
    """The entries of one ledger in a group. Entries that are staged later do not join them."""

    __slots__ = ("group",)

    takes_more = False

    def __init__(self, commit: Commit, group: StagedGroup, part: GroupPart, staged_ns: int) -> None:
        super().__init__(commit, part.descriptor, part.first_entry_id, part.base_length, part.overhead, staged_ns)
        self.group = group
        self.sizes = part.sizes
        # An odd number of parts makes ``Log.stage_entry`` call ``_open_entries``, which sees ``takes_more``.
        self.parts = [*part.parts, b""]

    def freeze(self) -> None:
        """Freeze the entries; drop them all if the group was not staged."""
        if not self.group.staged:
            del self.sizes[:]
        super().freeze()

    def last(self) -> int:
        """Return the id of the last entry, ``first - 1`` if the group was not staged."""
        return super().last() if self.group.staged else self.first - 1


class Commit(Completion):
    """Entries and control records that become durable together.

    A commit is *forming* while entries are staged in it, then *in flight*, then *done*: durable and published, or
    failed. See ``log.py`` for the transitions.

    Attributes:
        creations: Control records that create ledgers: the ledger, and the two functions of a ``Control``. They come
            before the entries, which may be of these ledgers; other control records come after them.
        staged: The entries in the order in which they were staged; those of one ledger stand together. None are left
            once the commit is done and its waiters were woken.
        controls: Control records, in order.
        groups: Groups among ``staged``, in order.
        payload_bytes: Encoded bytes of all entries, which count as outstanding until the commit is done.
        buffered_ns: Monotonic time at which the first entry was staged that no thread waits for; 0 for none.
        failed_with: The commit that was forming when this one failed, and so failed, too; None if this did not fail.
        uses_reserve: Whether no control record keeps it from reserved space.

    Set when the commit is written:
        lsn: Its log sequence number.
        records: Its encoded records.
        written: Its entries, each with the offset of their record in the commit, and the bytes of the record's body.
        size: Bytes without padding.
        padded: Bytes with padding.
        file_id: Its log file.
        base: Offset of its header in the file.
        start: Offset at which writing starts: ``base``, or 0 if the file's header is written, too.
        buffers: The bytes to write. Not empty once encoded, so that a repeated step writes the same bytes again.

    Threads: while the commit forms, the log's mutex guards it; after that only the leader uses it.
    """

    __slots__ = (
        "base",
        "buffered_ns",
        "buffers",
        "controls",
        "creations",
        "failed_with",
        "file_id",
        "groups",
        "lsn",
        "padded",
        "payload_bytes",
        "records",
        "size",
        "staged",
        "start",
        "uses_reserve",
        "written",
    )

    records: list[bytes | memoryview]
    written: list[tuple[StagedEntries, int, int]]
    size: int
    padded: int
    file_id: int
    base: int
    start: int

    def __init__(self) -> None:
        super().__init__()
        self.creations: list[tuple[LedgerDescriptor, Callable[[int], bytes], Callable[[], None]]] = []
        self.staged: list[StagedEntries] = []
        self.controls: list[Control] = []
        self.groups: list[StagedGroup] = []
        self.payload_bytes = 0
        self.buffered_ns = 0
        self.failed_with: Commit | None = None
        self.uses_reserve = True
        self.lsn = 0
        self.buffers: list[bytes | memoryview] = []

    def is_empty(self) -> bool:
        """Return whether nothing was staged."""
        return not self.staged and not self.controls and not self.creations and not self.groups

    def fail(self, error: PybkError) -> None:
        """Set the error of the commit and of its ledgers, which then take no entries; may be repeated."""
        self.error = error
        for descriptor in self.ledgers():
            descriptor.error = error

    def ledgers(self) -> list[LedgerDescriptor]:
        """Return the ledgers that the commit creates or has entries of; a ledger may occur twice."""
        return [*(entries.descriptor for entries in self.staged), *(created for created, _, _ in self.creations)]

    @classmethod
    def of_acknowledged(cls, error: PybkError, *refused: Commit) -> Self | None:
        """Return a commit of the acknowledged entries of refused commits; None if there are none. May be repeated.

        An append to a deferred ledger is acknowledged before the entry is written. A refusal, which the store survives,
        must not lose the entry, so it waits for another attempt.

        Args:
            error: Why the commits were refused.
            refused: The commits, in order.
        """
        acknowledged = [
            entries
            for commit in refused
            for entries in commit.staged
            if entries.descriptor.deferred and entries.descriptor.created
        ]
        if not acknowledged:
            return None
        kept = cls()
        kept.error = error
        kept.staged = list(dict.fromkeys(acknowledged))  # an interrupted attempt leaves them twice
        for entries in kept.staged:
            entries.completion = kept
            kept.payload_bytes += sum(entries.sizes)
        return kept

    def release_buffers(self) -> None:
        """Free entries and control records: ledgers, futures and extents refer to the commit long after it is done."""
        self.records = []
        self.written = []
        self.buffers = []
        self.groups = []
        self.creations = []
        self.controls = []
        for entries in self.staged:
            if entries.completion is self:
                entries.parts = []
