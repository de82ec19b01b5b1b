"""Lets appends of one ledger wait for admission, in the order of arrival, in the admission queue of its log."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from pybk.backend.ledger_backend import AppendLog, LedgerBackend
from pybk.errors import TooManyRequestsError
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.log.admission import Ticket

S = TypeVar("S")


class AppendOrder:
    """Makes a writer's appends wait for space in order; used only after an append found too little space.

    Threads: any, except where a method says what the caller holds.
    """

    def __init__(self, backend: LedgerBackend, log: AppendLog, descriptor: LedgerDescriptor) -> None:
        self._backend = backend
        self._log = log
        self._descriptor = descriptor

    def in_turn(self, stage: Callable[[], S | None], nbytes: int, *, wait: bool) -> S:
        """Return what ``stage`` returns once there is space, in the order of the appends that wait for it.

        Args:
            stage: Called with the ledger's lock held; returns None, with nothing done, if there is no space.
            nbytes: Bytes that it needs.
            wait: False raises at once.

        Raises:
            TooManyRequestsError: ``wait`` is False.
        """
        if not wait:
            self.refuse(nbytes)
        lock = self._descriptor.lock

        def when_first(ticket: Ticket) -> S:
            with lock:
                staged = stage()  # space may be back; if not, the lock keeps other appends from joining first
                if staged is not None:
                    return staged
                self._log.admission.join(ticket)
            ticket.wait()
            while True:
                with lock:
                    staged = self._stage_with(ticket, stage)
                if staged is not None:
                    return staged
                self._backend.wait_for_admission(self._descriptor)

        return self._with_ticket(when_first, nbytes)

    def keeping_lock(self, stage: Callable[[], S | None], nbytes: int) -> S:
        """Return what ``stage`` returns once there is space; the caller holds the ledger's lock and keeps it."""

        def when_first(ticket: Ticket) -> S:
            self._log.admission.join(ticket, keeps_lock=True)
            ticket.wait()
            while (staged := self._stage_with(ticket, stage)) is None:
                self._backend.wait_for_admission(self._descriptor)
            return staged

        return self._with_ticket(when_first, nbytes)

    def _with_ticket(self, work: Callable[[Ticket], S], nbytes: int) -> S:
        """Call ``work`` with a ticket, and return its result; the ticket leaves the queue also after an exception."""
        ticket = Ticket(self._descriptor, nbytes)
        try:
            try:
                return work(ticket)
            finally:
                self._log.admission.leave(ticket)
        except BaseException:
            # An exception inside the line above must not leave the ticket in the queue; leaving twice is harmless.
            self._log.admission.leave(ticket)
            raise

    def _stage_with(self, ticket: Ticket, stage: Callable[[], S | None]) -> S | None:
        """Call ``stage`` for the append of this ticket; the caller holds the ledger's lock."""
        before = self._descriptor.ticket
        self._descriptor.ticket = ticket
        try:
            return stage()
        finally:
            self._descriptor.ticket = before

    def refuse(self, size: int) -> NoReturn:
        """Raise ``TooManyRequestsError`` for an append of ``size`` bytes, or the error of a store that is full."""
        self._backend.check_space()
        waiting = self._log.admission.waiting_bytes
        raise TooManyRequestsError(
            f"{self._log.outstanding_bytes} bytes are appended and not durable yet"
            f"{f', {waiting} bytes wait for space' if waiting else ''}, and {size} more are beyond "
            f"max_outstanding_bytes {self._backend.config.max_outstanding_bytes}; wait for some futures, then try again"
        )
