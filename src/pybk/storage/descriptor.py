"""The state of one ledger in memory. Its lock orders the ledger's appends, its fence and its close.

A process has one descriptor per ledger. It knows the last entry that is

- *pushed*: staged in a commit of the log, or in a batch for bookies;
- *durable*: its commit is synced, or a quorum of bookies has acknowledged it;
- *confirmed*: readers may read it; this is the last add confirmed (LAC). With ``DEFERRED_FORCE``, durable entries are
  confirmed when they are forced, and otherwise at once;
- *indexed*: a checkpoint has written its location to the index.

In a store, neither the confirmed nor the indexed entry is ever after the durable one. The locations of durable entries
that are not indexed yet are the *tail*; this object has the only copy in memory.
"""

from __future__ import annotations

import contextvars
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, cast

from pybk.deferral import np
from pybk.errors import NoSuchLedgerError, PybkError, StorageRefusedError
from pybk.flags import WriteFlag
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.spans import OnSpan, report
from pybk.storage.format.log_file import RunLocations, location_dtype
from pybk.threads.group_commit import Completion

if TYPE_CHECKING:
    from pybk.ledger.digest import EntryDigest
    from pybk.ledger.keys import LedgerSeal
    from pybk.metrics import MetricsScope

LOCATION_WORDS: Final = 4

_FEW: Final = 32
"""Below this many numbers, Python adds them faster than numpy."""


class DisplacedError(Exception):
    """A ledger does not end with the entry that others must follow; nothing was staged."""


class Page(NamedTuple):
    """A page of the index in memory, for point lookups.

    Attributes:
        firsts: Id of the first entry of each location, ascending.
        words: ``LOCATION_WORDS`` numbers for each location, as ``docs/reference/format.md`` defines them.
        last_entry_id: Id of the last entry.
    """

    firsts: array[int]
    words: array[int]
    last_entry_id: int

    @classmethod
    def of(cls, locations: RunLocations) -> Page:
        """Return a page of the given locations: at least one, sorted by first entry."""
        last = locations[-1]
        firsts = array("q", np.ascontiguousarray(locations["first"]).tobytes())
        return cls(
            firsts, array("q", locations.tobytes()), int(last["first"]) + int(last["stride"]) * (int(last["count"]) - 1)
        )


class StagedDelete(NamedTuple):
    """A delete that was staged: its commit, and the ledger's error before it."""

    commit: Completion
    before: PybkError | None


class LedgerDescriptor:
    """State of one ledger.

    Attributes:
        metadata: The ledger's metadata as of the last durable change.
        metadata_pushed: The metadata including changes that are staged; read it after ``settle``. Guarded by ``lock``.
        changing: The commit of the change of metadata that was staged last; None once ``settle`` found that it is done.
            Guarded by ``lock``.
        meter: Counts appends by the ledger's type and tier; None until first used, and after metadata changed.
        lock: Orders appends, fence and close.
        location_lock: Guards where entries lie, and the callbacks.
        deferred: Whether the ledger has ``DEFERRED_FORCE``: appends are acknowledged before they are durable.
        last_pushed: Id of the last entry that was staged. Guarded by ``lock``.
        length_pushed: Payload bytes up to it. Guarded by ``lock``.
        last_durable: Id of the last durable entry. Changed under ``location_lock``.
        length_durable: Payload bytes up to it.
        last_add_confirmed: Only grows, so it may be read without a lock.
        last_indexed: Id of the last entry whose location the index has; ≤ ``last_durable``. Guarded by
            ``location_lock``.
        last_prefix: Prefix of an entry that was appended lately, mostly the last; empty if unknown.
        late_digest: Makes the prefixes of entries that are staged without; None before there are any.
        sealer: Seals the ledger when it is closed; set once a handle has opened it with its password.
        error: Why the ledger takes no entries, for now or for good (``final_error``).
        created: False until the commit that creates the ledger is durable, if entries may be staged before that.
        deleted: Whether a durable record deletes the ledger.
        deleting: The delete that was staged last; None before there is one. Guarded by ``lock``.
        changed: Whether metadata or LAC changed since the index was given them. Each change sets it last.
        generation: Counts how often the locations of entries changed. Guarded by ``location_lock``.
        staging: The entries that were staged last; later ones may join them. Guarded by ``lock`` and the log's mutex.
        tail_firsts: Id of the first entry of each tail location, ascending. Guarded by ``location_lock``.
        tail: ``LOCATION_WORDS`` numbers for each tail location. Guarded by ``location_lock``.
        page_firsts: Id of the first entry of each cached page, ascending. Guarded by ``location_lock``.
        pages: The cached pages of the index, in the same order. Guarded by ``location_lock``.
        advanced_callbacks: Called once, at the next change of LAC or state. Guarded by ``location_lock``.

    Threads: any. A thread that needs both locks takes ``lock`` first.
    """

    __slots__ = (
        "__weakref__",
        "advanced_callbacks",
        "changed",
        "changing",
        "created",
        "deferred",
        "deleted",
        "deleting",
        "entries_when_full",
        "error",
        "generation",
        "last_add_confirmed",
        "last_durable",
        "last_indexed",
        "last_prefix",
        "last_pushed",
        "late_digest",
        "ledger_id",
        "length_durable",
        "length_pushed",
        "location_lock",
        "lock",
        "metadata",
        "metadata_pushed",
        "meter",
        "page_firsts",
        "pages",
        "sealer",
        "staging",
        "tail",
        "tail_firsts",
        "ticket",
    )

    def __init__(
        self, metadata: LedgerMetadata, *, last_indexed: int = -1, last_add_confirmed: int = -1, length: int = 0
    ) -> None:
        self.ledger_id: Final = metadata.ledger_id
        self.metadata = metadata
        self.metadata_pushed = metadata
        self.changing: Completion | None = None
        self.meter: MetricsScope | None = None
        self.lock = threading.Lock()
        self.location_lock = threading.Lock()
        self.deferred = WriteFlag.DEFERRED_FORCE in metadata.write_flags
        self.last_pushed = last_indexed
        self.length_pushed = length
        self.last_durable = last_indexed
        self.length_durable = length
        self.last_add_confirmed = last_add_confirmed
        self.last_indexed = last_indexed
        self.last_prefix = b""
        self.late_digest: EntryDigest | None = None
        self.sealer: LedgerSeal | None = None
        self.error: PybkError | None = None
        self.created = True
        self.entries_when_full = 0
        """The number of its first entries that are taken although the store refuses entries because space is short."""
        self.deleted = False
        self.deleting: StagedDelete | None = None
        self.changed = False
        self.generation = 0
        self.staging: StagedEntries | None = None
        self.tail_firsts = array("q")
        self.tail = array("q")
        self.page_firsts: list[int] = []
        self.pages: list[Page] = []
        self.advanced_callbacks: list[Callable[[], None]] = []
        self.ticket: object | None = None
        """The ``Ticket`` of the append that holds ``lock`` now; None if it did not wait. Guarded by ``lock``."""

    def reset_pushed(self) -> None:
        """Set the last pushed entry to the last durable one; the caller ensures that no entries are staged."""
        self.last_pushed = self.last_durable
        self.length_pushed = self.length_durable
        self.last_prefix = b""

    def settle(self) -> None:
        """Forget a staged change whose commit is done: it was applied, or it failed; the caller holds ``lock``."""
        if self.changing is not None and self.changing.done:
            self.metadata_pushed = self.metadata
            self.changing = None

    def readmit(self) -> bool:
        """Resume appending after the last durable entry, if entries were refused because space was short.

        This never blocks: the thread that holds ``lock`` may itself wait for maintenance, which calls this, and staged
        entries may wait for a leader. Entries that were acknowledged before they were refused stay staged until they
        are durable. The caller is in a guard.

        Returns:
            True if the ledger takes entries again or never will; False if the call must be repeated.
        """
        if not self.lock.acquire(False):
            return False
        try:
            if self.error is None or self.final_error is not None:
                return True
            if not isinstance(self.error, StorageRefusedError) or not (
                self.staging is None or self.staging.completion.done
            ):
                return False
            self.restart()
        finally:
            self.lock.release()
        return True

    def restart(self) -> None:
        """Set the last pushed entry to the last durable one, and accept entries again; the caller holds ``lock``."""
        self.staging = None
        self.reset_pushed()
        self.error = None

    @property
    def final_error(self) -> PybkError | None:
        """The error by which the ledger refuses entries for good; None also while it refuses them only for now."""
        error = self.error
        if isinstance(error, StorageRefusedError) and self.created:
            return None
        if isinstance(error, NoSuchLedgerError) and not self.deleted:
            return None
        return error

    def account_staged(self) -> None:
        """Count staged entries as pushed, after an exception between staging and counting; the caller holds ``lock``.

        To be called before each read of ``last_pushed`` or ``length_pushed``.
        """
        staged = self.staging
        if staged is not None and staged.first + len(staged.sizes) - 1 > self.last_pushed:
            last = staged.last()
            if last > self.last_pushed:  # not so for a group that an error kept from being staged
                self.last_pushed, self.length_pushed = last, staged.length()

    def publish(self, first: int, count: int, length: int, words: tuple[int, int, int, int]) -> None:
        """Record the locations of durable entries; called in entry order, by the log's leader and by replay.

        Args:
            first: Id of the first entry.
            count: The number of entries.
            length: Payload bytes of the ledger up to the last one.
            words: Their location.
        """
        with self.location_lock:
            firsts = self.tail_firsts
            if first > self.last_durable and (not firsts or firsts[-1] < first):
                self.tail.extend(words)
                firsts.append(first)
            if first + count - 1 > self.last_durable:
                self.last_durable = first + count - 1
            self.length_durable = length
        if not self.deferred:
            self.confirm(self.last_durable)

    def confirm(self, last_add_confirmed: int) -> None:
        """Move the last add confirmed forward, never back, and wake the readers that follow the ledger."""
        if last_add_confirmed > self.last_add_confirmed:
            self.last_add_confirmed = last_add_confirmed
            if self.advanced_callbacks:
                self.wake_followers()

    def wake_followers(self) -> None:
        """Call, once, the callbacks that wait for a change of LAC or state."""
        if self.advanced_callbacks:
            with self.location_lock:
                callbacks, self.advanced_callbacks = self.advanced_callbacks, []
            for callback in callbacks:
                callback()

    def when_advanced(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, from some thread, at the next change of LAC or state; it must not block."""
        with self.location_lock:
            self.advanced_callbacks.append(callback)

    def forget_callback(self, callback: Callable[[], None]) -> None:
        """Remove a callback of ``when_advanced``; does nothing if it was called already."""
        with self.location_lock:
            if callback in self.advanced_callbacks:
                self.advanced_callbacks.remove(callback)

    def tail_snapshot(self) -> RunLocations:
        """Return a copy of the tail's locations."""
        with self.location_lock:
            return np.frombuffer(self.tail.tobytes(), location_dtype())

    def tail_from(self, entry_id: int, locations_max: int) -> RunLocations | None:
        """Return a copy of up to ``locations_max`` tail locations from ``entry_id`` on; None if it is not there."""
        with self.location_lock:
            firsts = self.tail_firsts
            if not firsts or entry_id < firsts[0] or entry_id > self.last_durable:
                return None
            index = bisect_right(firsts, entry_id) - 1
            words = self.tail[index * LOCATION_WORDS : (index + locations_max) * LOCATION_WORDS]
        return np.frombuffer(words.tobytes(), location_dtype())

    def find(self, entry_id: int) -> tuple[int, int, int, int] | None:
        """Return the location that has ``entry_id``, from tail or cached pages; None if the index must be read."""
        with self.location_lock:
            firsts = self.tail_firsts
            if firsts and entry_id >= firsts[0]:
                if entry_id > self.last_durable:
                    return None
                words = self.tail
            else:
                number = bisect_right(self.page_firsts, entry_id) - 1
                if number < 0 or entry_id > self.pages[number].last_entry_id:
                    return None
                firsts, words = self.pages[number].firsts, self.pages[number].words
            at = (bisect_right(firsts, entry_id) - 1) * LOCATION_WORDS
            return words[at], words[at + 1], words[at + 2], words[at + 3]

    def rebase(self, last_indexed: int, length: int) -> None:
        """Take over the state in the index, with an empty tail.

        Args:
            last_indexed: Id of the last entry in the index.
            length: Payload bytes of the ledger up to it.
        """
        with self.location_lock:
            del self.tail_firsts[:], self.tail[:]
            self.last_indexed = self.last_durable = last_indexed
            self.length_durable = length
            self.forget_pages()

    def checkpointed(self, last_indexed: int) -> None:
        """Drop the tail up to and including ``last_indexed``, because the index has it now."""
        with self.location_lock:
            drop = bisect_right(self.tail_firsts, last_indexed)
            del self.tail_firsts[:drop]
            del self.tail[: drop * LOCATION_WORDS]
            self.last_indexed = max(self.last_indexed, last_indexed)
            self.forget_pages()

    def indexed(self, version: int, last_add_confirmed: int) -> None:
        """Clear ``changed``, because the index has metadata of this version and this last add confirmed.

        Another thread may apply a newer change, a force or a delete meanwhile. ``changed`` then stays True, because
        each of these sets it last.
        """
        self.changed = False
        if self.metadata.version != version or self.last_add_confirmed > last_add_confirmed or self.deleted:
            self.changed = True

    def remember(self, page: Page, generation: int) -> None:
        """Cache an index page for later lookups, unless entries were moved since ``generation`` was read."""
        with self.location_lock:
            if generation == self.generation:
                number = bisect_right(self.page_firsts, page.firsts[0])
                if number == 0 or self.page_firsts[number - 1] != page.firsts[0]:
                    self.page_firsts.insert(number, page.firsts[0])
                    self.pages.insert(number, page)

    def forget(self, first_entry_id: int) -> None:
        """Drop the cached page that begins with this entry, if it is cached."""
        with self.location_lock:
            number = bisect_right(self.page_firsts, first_entry_id) - 1
            if number >= 0 and self.page_firsts[number] == first_entry_id:
                del self.page_firsts[number], self.pages[number]

    def forget_pages(self) -> None:
        """Drop all cached pages, because entries moved; the caller holds ``location_lock``."""
        self.page_firsts = []
        self.pages = []
        self.generation += 1


class StagedEntries:
    """Consecutive entries of one ledger that are staged and not durable yet.

    An entry is staged once its size is appended to ``sizes``, which comes last and in one step. Parts that an exception
    left without a size are ignored.

    Attributes:
        completion: The commit or batch that they are part of.
        descriptor: The ledger.
        first: Id of the first entry.
        base_length: Payload bytes of the ledger before them.
        overhead: Bytes of each entry that are not payload.
        sizes: Encoded bytes of each entry, ``array("q")``.
        parts: The encoded bytes, two parts for each entry of ``sizes``; after an entry in one part comes an empty one.
        encoded_bytes: Sum of ``sizes``; set when they are frozen.
        length_at_end: Payload bytes of the ledger up to and including them; set when they are written or sent.
        staged_ns: The time when the first of them was staged, on the monotonic clock.

    Threads: guarded by the mutex of the log or queue that they are staged in.
    """

    __slots__ = (
        "base_length",
        "completion",
        "descriptor",
        "encoded_bytes",
        "first",
        "length_at_end",
        "overhead",
        "parts",
        "sizes",
        "staged_ns",
    )

    encoded_bytes: int
    length_at_end: int
    takes_more: ClassVar[bool] = True
    """True if entries that are staged later may join them."""

    def __init__(
        self,
        completion: Completion,
        descriptor: LedgerDescriptor,
        first: int,
        base_length: int,
        overhead: int,
        staged_ns: int,
    ) -> None:
        self.completion = completion
        self.descriptor = descriptor
        self.first = first
        self.base_length = base_length
        self.overhead = overhead
        self.sizes = array("q")
        self.parts: list[bytes | memoryview] = []
        self.staged_ns = staged_ns

    def trim(self) -> None:
        """Drop the parts that an exception left after those of the last staged entry."""
        del self.parts[2 * len(self.sizes) :]

    def freeze(self) -> None:
        """Fix the set of entries; the caller makes sure that no others join."""
        count = len(self.sizes)
        if len(self.parts) != 2 * count:
            self.trim()
        if self.descriptor.late_digest is not None:
            self.add_prefixes(self.descriptor.late_digest)
        if count == 1:
            self.encoded_bytes = self.sizes[0]
        else:
            self.encoded_bytes = sum(self.sizes) if count < _FEW else int(np.sum(self.sizes))

    def add_prefixes(self, digest: EntryDigest) -> None:
        """Make the prefixes of entries that were staged without, whose first part is empty; may be repeated.

        They carry the last add confirmed of now, so those of entries that follow may carry an earlier one.
        """
        parts, descriptor = self.parts, self.descriptor
        count = len(self.sizes)
        if count == 1:
            if not parts[0]:
                length = self.base_length + self.sizes[0] - self.overhead
                parts[0] = digest.prefix(self.first, descriptor.last_add_confirmed, length, cast(bytes, parts[1]))
        elif not all(prefixes := parts[::2]):
            payloads = cast("list[bytes]", parts[1::2])
            for low, high in _runs_of_empty(prefixes):
                before = self.base_length + sum(self.sizes[:low]) - self.overhead * low
                parts[2 * low : 2 * high : 2] = digest.prefixes(
                    self.first + low, descriptor.last_add_confirmed, before, payloads[low:high]
                )
        if count:
            # Also if the prefix was there: that of an earlier entry may have been made since.
            descriptor.last_prefix = cast(bytes, parts[2 * count - 2])

    def last(self) -> int:
        """Return the id of the last staged entry, ``first - 1`` for none."""
        return self.first + len(self.sizes) - 1

    def report_to(self, on_span: OnSpan) -> None:
        """Report a span in a copy of the present context once they are durable, or failed.

        The caller makes sure that the completion is not done, and that no other thread changes its callbacks.
        """
        report_now = partial(contextvars.copy_context().run, self._report, on_span, self.completion)
        self.completion.callbacks.append(report_now)

    def _report(self, on_span: OnSpan, completion: Completion) -> None:
        entries = self.last() - self.first + 1
        if entries:  # an exception may have left none
            metadata = self.descriptor.metadata
            report(
                on_span,
                "pybk.ledger.append",
                self.staged_ns,
                completion.error,
                ledger_id=metadata.ledger_id,
                ledger_type=str(metadata.ledger_type),
                tier=metadata.tier.name,
                first_entry_id=self.first,
                entries=entries,
                bytes=sum(self.sizes),
            )

    def length(self) -> int:
        """Return the payload bytes of the ledger up to the last staged entry."""
        return self.base_length + sum(self.sizes) - self.overhead * len(self.sizes)


def _runs_of_empty(prefixes: list[bytes | memoryview]) -> list[tuple[int, int]]:
    """Return where the empty ones lie: start and end of each run of them, ascending."""
    if not any(prefixes):
        return [(0, len(prefixes))]
    empty = np.fromiter(map(len, prefixes), np.int64, len(prefixes)) == 0
    edges = np.flatnonzero(np.diff(empty, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
