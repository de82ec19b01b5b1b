"""One ledger in memory: the object whose lock orders its appends, its fence and its close.

A process holds one descriptor per ledger. It knows what was pushed, what is durable, what is confirmed, and where the
entries lie that the index does not know yet (the *tail*).
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import numpy as np

from pybk.errors import NoSuchLedgerError, PybkError, StorageRefusedError
from pybk.flags import WriteFlag
from pybk.group_commit import Completion
from pybk.ledger import LedgerMetadata
from pybk.storage.format.record import LOCATION_DTYPE, RunLocations

if TYPE_CHECKING:
    from pybk.metrics import MetricsScope
    from pybk.seal import LedgerSeal

LOCATION_WORDS: Final = 4

_FEW: Final = 32
"""Below this many numbers, Python adds them quicker than numpy."""


class Page(NamedTuple):
    """Runs in the shape that point lookups want: ``firsts`` sorted, and four words per run (``docs/format.md``)."""

    firsts: array[int]
    words: array[int]
    last_entry_id: int

    @classmethod
    def of(cls, locations: RunLocations) -> Page:
        """Make a page of a non-empty, sorted run array."""
        last = locations[-1]
        firsts = array("q", np.ascontiguousarray(locations["first"]).tobytes())
        return cls(
            firsts, array("q", locations.tobytes()), int(last["first"]) + int(last["stride"]) * (int(last["count"]) - 1)
        )


class LedgerDescriptor:
    """State of one ledger.

    Threads: ``lock`` guards what appends change; ``location_lock`` guards where entries lie. A thread that needs both
    takes ``lock`` first. ``last_add_confirmed`` only grows and may be read without a lock. ``created`` is False until
    the commit that creates the ledger is durable, if entries of it may be staged before. ``last_prefix`` is the header
    and digest of the entry that a writer staged last, if it is known; ``sealer`` seals the ledger when it is closed,
    once a handle has opened it with its password.
    """

    __slots__ = (
        "__weakref__",
        "advanced_callbacks",
        "changed",
        "created",
        "deferred",
        "deleted",
        "error",
        "generation",
        "last_add_confirmed",
        "last_durable",
        "last_indexed",
        "last_prefix",
        "last_pushed",
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
        self.sealer: LedgerSeal | None = None
        self.error: PybkError | None = None
        self.created = True
        self.deleted = False
        self.changed = False
        self.generation = 0
        self.staging: StagedEntries | None = None
        self.tail_firsts = array("q")
        self.tail = array("q")
        self.page_firsts: list[int] = []
        self.pages: list[Page] = []
        self.advanced_callbacks: list[Callable[[], None]] = []
        self.ticket: object | None = None
        """The ``Ticket`` of the append that holds ``lock`` now, if it had to wait for space; compared by identity."""

    def reset_pushed(self) -> None:
        """Take what is durable as all that was pushed: nobody is writing."""
        self.last_pushed = self.last_durable
        self.length_pushed = self.length_durable
        self.last_prefix = b""

    def readmit(self) -> bool:
        """Take entries again after the last durable one, after entries were refused for now.

        This waits for nothing: the thread that holds the lock may be waiting for maintenance, and staged entries for a
        driver. Entries that were acknowledged before they were refused stay staged until they are durable.

        Returns:
            Whether nothing is left to do.
        """
        taken = list[bool]()
        try:
            # One call into C takes the lock and keeps the answer: an interrupt between the two would leave it locked.
            taken.extend(map(self.lock.acquire, (False,)))
            if True not in taken:
                return False
            if self.error is None or self.final_error is not None:
                return True
            if not isinstance(self.error, StorageRefusedError) or not (
                self.staging is None or self.staging.completion.done
            ):
                return False
            self.restart()
        finally:
            if True in taken:
                self.lock.release()
        return True

    def restart(self) -> None:
        """Take what is durable as all that was pushed, and take entries again; the caller holds ``lock``."""
        self.staging = None
        self.reset_pushed()
        self.error = None

    @property
    def final_error(self) -> PybkError | None:
        """Why the ledger takes nothing more for good; None also while it is refused for now, or being deleted."""
        error = self.error
        if isinstance(error, StorageRefusedError) and self.created:
            return None
        if isinstance(error, NoSuchLedgerError) and not self.deleted:
            return None
        return error

    def account_staged(self) -> None:
        """Bring what was pushed up to what was staged, after an exception between the two; the caller holds ``lock``.

        Each reader of the pushed entries calls it first.
        """
        staged = self.staging
        if staged is not None and staged.last() > self.last_pushed:
            self.last_pushed, self.length_pushed = staged.last(), staged.length()

    def publish(self, first: int, count: int, length: int, words: tuple[int, int, int, int]) -> None:
        """Record that a run is durable at its place; called in entry order, by the log's leader."""
        with self.location_lock:
            firsts = self.tail_firsts
            if first > self.last_durable and (not firsts or firsts[-1] < first):
                del self.tail[len(firsts) * LOCATION_WORDS :]  # what an interrupted call left
                self.tail.extend(words)
                firsts.append(first)
            self.last_durable = max(self.last_durable, first + count - 1)
            self.length_durable = length
        if not self.deferred:
            self.confirm(self.last_durable)

    def confirm(self, last_add_confirmed: int) -> None:
        """Move the last add confirmed forward, never back, and wake who follows."""
        if last_add_confirmed > self.last_add_confirmed:
            self.last_add_confirmed = last_add_confirmed
            if self.advanced_callbacks:
                self.wake_followers()

    def wake_followers(self) -> None:
        """Call and forget the callbacks of those who wait for the ledger to move."""
        if self.advanced_callbacks:
            with self.location_lock:
                callbacks, self.advanced_callbacks = self.advanced_callbacks, []
            for callback in callbacks:
                callback()

    def when_advanced(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once, from some thread, at the next change of LAC or state; it must not block."""
        with self.location_lock:
            self.advanced_callbacks.append(callback)

    def forget_callback(self, callback: Callable[[], None]) -> None:
        """Call it no more; does nothing if it was called."""
        with self.location_lock:
            if callback in self.advanced_callbacks:
                self.advanced_callbacks.remove(callback)

    def tail_snapshot(self) -> RunLocations:
        """Return a copy of the tail as runs."""
        with self.location_lock:
            return np.frombuffer(self.tail.tobytes(), LOCATION_DTYPE)

    def tail_from(self, entry_id: int, locations_max: int) -> RunLocations | None:
        """Return a copy of up to ``runs_max`` tail runs, the first holding ``entry_id``; None if it is not there."""
        with self.location_lock:
            firsts = self.tail_firsts
            if not firsts or entry_id < firsts[0] or entry_id > self.last_durable:
                return None
            index = bisect_right(firsts, entry_id) - 1
            words = self.tail[index * LOCATION_WORDS : (index + locations_max) * LOCATION_WORDS]
        return np.frombuffer(words.tobytes(), LOCATION_DTYPE)

    def find(self, entry_id: int) -> tuple[int, int, int, int] | None:
        """Return the four words of the run that holds ``entry_id``, from tail or cached page; None: ask the index."""
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
        """Begin again from what the index knows, with an empty tail."""
        with self.location_lock:
            del self.tail_firsts[:], self.tail[:]
            self.last_indexed = self.last_durable = last_indexed
            self.length_durable = length
            self.forget_pages()

    def checkpointed(self, last_indexed: int) -> None:
        """Forget the tail up to and including ``last_indexed``, which the index now knows."""
        with self.location_lock:
            drop = bisect_right(self.tail_firsts, last_indexed)
            del self.tail_firsts[:drop]
            del self.tail[: drop * LOCATION_WORDS]
            self.last_indexed = max(self.last_indexed, last_indexed)
            self.forget_pages()

    def indexed(self, version: int, last_add_confirmed: int) -> None:
        """Note that the index has the ledger's metadata of this version, and this last add confirmed.

        A newer change, a force or a delete, which another thread may apply meanwhile, stays noted: each sets
        ``changed`` last.
        """
        self.changed = False
        if self.metadata.version != version or self.last_add_confirmed > last_add_confirmed or self.deleted:
            self.changed = True

    def remember(self, page: Page, generation: int) -> None:
        """Keep an index page for later lookups, unless entries were moved since ``generation`` was read."""
        with self.location_lock:
            if generation == self.generation:
                number = bisect_right(self.page_firsts, page.firsts[0])
                if number == 0 or self.page_firsts[number - 1] != page.firsts[0]:
                    self.page_firsts.insert(number, page.firsts[0])
                    self.pages.insert(number, page)

    def forget(self, first_entry_id: int) -> None:
        """Drop the cached page that begins with this entry, if it is still there."""
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

    An entry is staged when its size is appended to ``sizes``, which comes last and in one step. What an interrupt left
    in ``parts`` before that counts for nothing.

    Attributes:
        completion: The commit or batch that they are part of.
        descriptor: The ledger.
        first: Id of the first entry.
        base_length: Payload bytes of the ledger before them.
        overhead: Bytes of each entry that are not payload.
        sizes: Encoded bytes of each entry, ``array("q")``.
        parts: The encoded bytes, two parts for each entry of ``sizes``; an entry that came in one is followed by an
            empty one.
        encoded_bytes: Sum of ``sizes``; set by ``freeze``.
        length_at_end: Payload bytes of the ledger up to and including them; set when they are written or sent.
        staged_ns: When the first of them was staged, on the monotonic clock.

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

    takes_more: ClassVar[bool] = True
    """Whether entries that are staged later may join them."""

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
        self.encoded_bytes = 0
        self.length_at_end = 0
        self.parts: list[bytes | memoryview] = []
        self.staged_ns = staged_ns

    def trim(self) -> None:
        """Drop the parts that an interrupt left after those of the last staged entry."""
        del self.parts[2 * len(self.sizes) :]

    def freeze(self) -> None:
        """Take the entries as they are; none may join them any more. May be repeated."""
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
