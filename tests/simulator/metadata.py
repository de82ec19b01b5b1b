"""The metadata store, with requests in flight whose outcome may stay unknown."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.replication.messages import (
    Event,
    MetadataRead,
    MetadataRefused,
    MetadataUnreachable,
    MetadataWritten,
    WriteMetadata,
)
from tests.simulator.plan import MS

if TYPE_CHECKING:
    from tests.simulator.bookies import SimBookie
    from tests.simulator.clients import Client
    from tests.simulator.ledgers import SimLedger

VERSION_OF_NONE = -1


class SimMetadata:
    """One ledger's metadata: the truth, and what clients see of it."""

    name = "metadata"

    def __init__(self, ledger: SimLedger, first: LedgerMetadata) -> None:
        self.ledger = ledger
        self.random = Random(f"{ledger.source}/metadata")
        self.loss = ledger.plan.metadata_loss
        self.stale = ledger.plan.metadata_stale
        self.current: LedgerMetadata | None = first
        self.version = 0
        self.closed_by = ""
        self.history: list[tuple[LedgerMetadata | None, int]] = [(first, 0)]

    def heal(self) -> None:
        """Lose nothing and show nothing old any more."""
        self.loss = self.stale = 0.0

    def is_unreachable(self) -> bool:
        """Return whether an operation now comes to nothing."""
        return self.loss > 0 and self.random.random() < self.loss

    def read(self, client: Client, *, fresh: bool) -> None:
        """Read for a client."""
        if self.random.random() < self.loss:
            self._tell(client, MetadataUnreachable(), slow=True)
            return
        self.ledger.clock.after(self._delay(), self._read, client, fresh)

    def _read(self, client: Client, fresh: bool) -> None:
        at = -1
        if not fresh and self.random.random() < self.stale:
            at = -min(self.random.randint(1, 3), len(self.history))
        self._tell(client, MetadataRead(*self.history[at]))

    def write(self, client: Client, effect: WriteMetadata) -> None:
        """Compare and set for a client: the request may be lost, arrive late, or its reply may be lost."""
        lost = self.random.random() < self.loss
        if lost and self.random.random() < 0.3:
            self._tell(client, MetadataUnreachable(), slow=True)
            return
        delay = self._delay() + (int(self.random.random() * 50 * MS) if lost else 0)
        self.ledger.clock.after(delay, self._write, client, effect, not lost)
        if lost:
            self._tell(client, MetadataUnreachable(), slow=True)

    def _write(self, client: Client, effect: WriteMetadata, answers: bool) -> None:
        event: Event
        if self.current is not None and effect.version == self.version:
            self.apply(client.name, effect.metadata)
            event = MetadataWritten(self.version)
            if self.random.random() < self.loss:
                # Its driver sends it again: it was applied, and is refused the second time.
                event = MetadataRefused(self.current, self.version)
        else:
            event = MetadataRefused(self.current, self.version if self.current is not None else VERSION_OF_NONE)
        if answers:
            self._tell(client, event)

    def apply(self, author: str, metadata: LedgerMetadata) -> None:
        """Put the ledger's next metadata."""
        assert self.current is not None
        old, self.current = self.current, metadata
        self.version += 1
        self.history.append((metadata, self.version))
        self.ledger.checker.metadata_changes(author, old, metadata)
        if metadata.state is LedgerState.CLOSED and old.state is not LedgerState.CLOSED:
            self.closed_by = author
        if metadata.state is not old.state:
            for bookie in self.ledger.bookies.values():
                bookie.repair_soon(self.ledger)

    def is_closed(self) -> bool:
        """Return whether the ledger is there and closed."""
        return self.current is not None and self.current.state is LedgerState.CLOSED

    def delete(self) -> None:
        """Delete the ledger."""
        self.current = None
        self.history.append((None, VERSION_OF_NONE))

    def look_up(self, bookie: SimBookie, life: int, ledger_id: int) -> None:
        """Pass to a bookie whether the ledger exists."""
        exists = None if self.random.random() < self.loss else self.current is not None
        self.ledger.clock.after(self._delay(), bookie.looked_up, life, ledger_id, exists)

    def _tell(self, client: Client, event: Event, *, slow: bool = False) -> None:
        self.ledger.clock.after(self._delay() + (20 * MS if slow else 0), client.deliver_event, event)

    def _delay(self) -> int:
        return int(self.random.random() * (20 * MS if self.random.random() < 0.1 else MS))
