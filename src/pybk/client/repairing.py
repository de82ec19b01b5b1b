"""Repair after a read: bookies whose copy of an entry was not sound are sent the one that was."""

from __future__ import annotations

import logging
from array import array
from itertools import count
from typing import TYPE_CHECKING

from pybk.client.engine import Conversation
from pybk.replication.messages import Add, Answered, Effect, Event, Repaired, Run, Send, Unanswered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pybk.client.engine import Engine
    from pybk.client.ledger import RemoteLedger
    from pybk.entry import EntryBatch
    from pybk.ledger import Bookie

logger = logging.getLogger(__name__)


class RepairMachine:
    """Sends entries to bookies, as a recovery does, and waits for all answers, whatever they are.

    Args:
        adds: To whom which.
    """

    def __init__(self, adds: Iterable[tuple[Bookie, Add]]) -> None:
        tokens = count(1)
        self._adds = {next(tokens): each for each in adds}

    def start(self, now_ns: int) -> list[Effect]:
        """Begin."""
        return [Send(token, bookie, add) for token, (bookie, add) in self._adds.items()]

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Count an answer."""
        assert isinstance(event, Answered | Unanswered)
        bookie, add = self._adds.pop(event.token)
        said = event.reply.status.name if isinstance(event, Answered) else "nothing"
        logger.warning("ledger %d: %s was sent a sound entry %d: %s", add.ledger_id, bookie, add.runs[0].first, said)
        return [] if self._adds else [Repaired()]


class Repairing(Conversation[RepairMachine]):
    """Repairs entries; nobody waits for it."""

    def take(self, effect: Effect) -> None:
        """End, as all have answered."""
        assert type(effect) is Repaired
        self.end()


def repair(engine: Engine, ledger: RemoteLedger, batch: EntryBatch, bad: Iterable[tuple[Bookie, int]]) -> None:
    """Send sound entries of a batch to bookies that have no sound copies; returns at once, any thread.

    Args:
        engine: The driver.
        ledger: The ledger, opened with its password, which gives the right to this.
        batch: What was read.
        bad: Bookies and the entries that they could not give.
    """
    places = {entry_id: number for number, entry_id in enumerate(batch.entry_ids.tolist())}
    adds = []
    for bookie, entry_id in bad:
        number = places.get(entry_id)
        if number is not None:
            start, size = int(batch.offsets[number]), int(batch.sizes[number])
            run = Run(entry_id, 1, array("q", (size,)), (bytes(batch.buffer[start : start + size]),))
            adds.append((bookie, Add(ledger.ledger_id, (run,), ledger.last_add_confirmed, recovery=True)))
    if adds:
        repairing = Repairing(engine, ledger, RepairMachine(adds))
        engine.start(repairing, repairing.machine.start)
        engine.baton.kick()
