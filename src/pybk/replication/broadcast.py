"""Requests to several bookies whose order does not matter, such as repairs and moves."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from pybk.ledger.ledger_metadata import Bookie
from pybk.replication.messages import (
    Answered,
    AskWriter,
    BroadcastEnded,
    Effect,
    Event,
    LacReply,
    ReadLac,
    Request,
    Send,
    Status,
    Unanswered,
)


class BroadcastMachine:
    """Sends each bookie its request once, and ends with ``BroadcastEnded`` when all have replied or failed to.

    Args:
        requests: Each bookie with its request.

    Threads: one at a time.
    """

    _fine: frozenset[Status] = frozenset({Status.OK})
    """The answers that do not count as refusals."""

    def __init__(self, requests: Iterable[tuple[Bookie, Request]]) -> None:
        tokens = count(1)
        self._asked = {next(tokens): each for each in requests}
        self._refused: list[tuple[Bookie, Status | None]] = []

    def start(self, now_ns: int) -> list[Effect]:
        """Begin.

        Args:
            now_ns: The time.
        """
        if not self._asked:
            return [BroadcastEnded(())]
        return [Send(token, bookie, request) for token, (bookie, request) in self._asked.items()]

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform.

        Args:
            event: What happened.
            now_ns: The time.
        """
        if not isinstance(event, Answered | Unanswered) or event.token not in self._asked:
            return []
        bookie, _ = self._asked.pop(event.token)
        status = event.reply.status if isinstance(event, Answered) else None
        if status not in self._fine:
            self._refused.append((bookie, status))
        return [] if self._asked else [BroadcastEnded(tuple(self._refused))]


class LacBroadcastMachine(BroadcastMachine):
    """Asks all of several bookies for the last add confirmed, and not only as many as cover an ensemble.

    Args:
        ledger_id: The ledger.
        bookies: The bookies.

    Attributes:
        last_add_confirmed: The highest LAC that one of them proved; -1 for none.
    """

    def __init__(self, ledger_id: int, bookies: Iterable[Bookie]) -> None:
        super().__init__((bookie, ReadLac(ledger_id)) for bookie in bookies)
        self.last_add_confirmed = -1

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform.

        Args:
            event: What happened.
            now_ns: The time.
        """
        if isinstance(event, Answered) and isinstance(event.reply, LacReply):
            self.last_add_confirmed = max(self.last_add_confirmed, event.reply.lac)
        return super().step(event, now_ns)


class LastEntryMachine(BroadcastMachine):
    """Asks several bookies for the last entry that each holds of a ledger.

    Args:
        ledger_id: The ledger.
        bookies: The bookies.

    Attributes:
        held: The last entry of each bookie that answered; -1 for none.
    """

    _fine = frozenset({Status.OK, Status.NO_SUCH_LEDGER})

    def __init__(self, ledger_id: int, bookies: Iterable[Bookie]) -> None:
        super().__init__((bookie, ReadLac(ledger_id)) for bookie in bookies)
        self.held: dict[Bookie, int] = {}

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform.

        Args:
            event: What happened.
            now_ns: The time.
        """
        asked = self._asked.get(event.token) if isinstance(event, Answered) else None
        reply = event.reply if isinstance(event, Answered) else None
        if asked is not None and isinstance(reply, LacReply) and reply.status in self._fine:
            self.held[asked[0]] = reply.entry_id
        return super().step(event, now_ns)


class WriterSearchMachine(BroadcastMachine):
    """Asks several bookies whether the writer of a ledger has a session there.

    Args:
        ledger_id: The ledger.
        bookies: The bookies.
        leaves: The writer of the asking session has failed.

    Attributes:
        found: Whether the writer has a session at one of them; None if that is unknown, because no bookie was asked, or
            some did not answer.
    """

    _fine = frozenset({Status.OK, Status.NO_WRITER})

    def __init__(self, ledger_id: int, bookies: Iterable[Bookie], *, leaves: bool = False) -> None:
        super().__init__((bookie, AskWriter(ledger_id, leaves)) for bookie in bookies)
        self.found: bool | None = False if self._asked else None

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform.

        Args:
            event: What happened.
            now_ns: The time.
        """
        if isinstance(event, Answered | Unanswered) and event.token in self._asked:
            status = event.reply.status if isinstance(event, Answered) else None
            if status is Status.OK:
                self.found = True
            elif status is not Status.NO_WRITER and self.found is False:
                self.found = None
        return super().step(event, now_ns)
