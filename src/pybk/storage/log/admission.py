"""The queue of appends that wait for admission: first come, first served.

An append must wait while too many bytes are outstanding. If waiting appends only tried again, many small appends would
take each byte that becomes free, and a large append would starve. So an append that has to wait joins a queue with the
bytes that it needs, and later appends may take only the space beyond the bytes that the queue needs.

A large batch and the entries of an advanced ledger wait with their ledger's lock held, because nothing may come between
its parts. Such an append goes ahead of the others of its ledger, which need the lock to continue.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pybk.storage.descriptor import LedgerDescriptor


class Ticket:
    """One append's position in the queue.

    Attributes:
        descriptors: The ledgers appended to; more than one for a group.
        nbytes: Bytes that it needs.
    """

    __slots__ = ("_gate", "descriptors", "nbytes")

    def __init__(self, descriptor: LedgerDescriptor, nbytes: int, *others: LedgerDescriptor) -> None:
        self.descriptors = (descriptor, *others)
        self.nbytes = nbytes
        self._gate = threading.Lock()
        self._gate.acquire()

    def open(self) -> None:
        """Let the append try; the queue calls this with its lock held."""
        if self._gate.locked():
            self._gate.release()

    def wait(self) -> None:
        """Block until the append is first in the queue; call it once."""
        self._gate.acquire()


class Admission:
    """The queue of one log.

    Attributes:
        space: Bytes that may be outstanding after an append without a ticket: the bound less what the queue needs.
        first: The ticket whose append may take all space; None while nothing waits.

    Invariant: A ticket whose append holds its ledger's lock comes before all other tickets of that ledger. So no append
    waits for one that comes later in the queue, and there is no deadlock.

    Threads: any.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self.queue: list[Ticket] = []
        """The tickets that wait, in order."""
        self.space = bytes_max
        self.first: Ticket | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the queue needs."""
        return self._bytes_max - self.space

    def is_full(self, ticket: object | None, outstanding: int, nbytes: int) -> bool:
        """Return whether an append has to wait.

        Args:
            ticket: Its ticket; None if it has not joined the queue.
            outstanding: Bytes that are outstanding now.
            nbytes: Bytes of the append. If nothing is outstanding, one of any size is admitted when its turn has come.
        """
        if ticket is None:
            return outstanding + nbytes > self.space and (outstanding > 0 or self.space < self._bytes_max)
        if ticket is not self.first:
            return True
        return outstanding > 0 and outstanding + nbytes > self._bytes_max

    def join(self, ticket: Ticket, *, keeps_lock: bool = False) -> None:
        """Join the queue, at its end; the caller holds the ledger's lock.

        Args:
            ticket: The append's ticket.
            keeps_lock: Whether the append holds the ledger's lock while it waits; it goes ahead of its ledger's others.
        """
        with self._lock:
            held = set(ticket.descriptors)
            places = (place for place, each in enumerate(self.queue) if not held.isdisjoint(each.descriptors))
            self.queue.insert(next(places, len(self.queue)) if keeps_lock else len(self.queue), ticket)
            self._settle()

    def leave(self, ticket: Ticket) -> None:
        """Leave the queue, and let the next append try; does nothing if the ticket is not in the queue."""
        with self._lock:
            self.queue = [each for each in self.queue if each is not ticket]
            self._settle()

    def _settle(self) -> None:
        """Recompute ``space`` and ``first`` from the queue; the caller holds the lock. Idempotent."""
        self.space = self._bytes_max - sum(each.nbytes for each in self.queue)
        self.first = self.queue[0] if self.queue else None
        if self.first is not None:
            self.first.open()
