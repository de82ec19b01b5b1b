"""Following a ledger: bookies tell when it goes on, the metadata store when it ends."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

from pybk.client.reading import LacReading
from pybk.errors import LedgerDeletedError

if TYPE_CHECKING:
    from pybk.client.directory import Directory
    from pybk.client.engine import Engine
    from pybk.client.ledger import RemoteLedger

FOLLOW_NS: Final = 5_000_000_000
"""How long bookies keep a question for the next entry before they answer that there is none."""


class Following:
    """What is asked for those who wait for ledgers to go on.

    Threads: any.
    """

    def __init__(self, engine: Engine, directory: Directory) -> None:
        self._engine = engine
        self._directory = directory
        self._ended = False

    def follow(self, ledger: RemoteLedger) -> None:
        """Have a ledger's followers woken when it goes on, and when it ends, unless that was asked for already."""
        if ledger.following or ledger.is_final or self._ended:
            return
        ledger.following = True
        if not ledger.watched:
            ledger.watched = True
            self._watch(ledger)
        beyond = ledger.last_add_confirmed
        rank = self._directory.rank()
        reading = LacReading(self._engine, ledger, beyond=beyond, wait_ns=FOLLOW_NS, rank=rank)
        self._engine.start(reading, reading.machine.start)
        self._engine.baton.when_done(reading.commit, lambda: self._told(ledger, reading))

    def _told(self, ledger: RemoteLedger, reading: LacReading) -> None:
        """Take what a question for the next entry brought, and ask again if somebody still waits."""
        ledger.following = False
        if reading.commit.error is None:
            ledger.confirm(reading.last_add_confirmed)
            ledger.last_durable = max(ledger.last_durable, ledger.last_add_confirmed)
            if ledger.advanced_callbacks:
                self.follow(ledger)

    def _watch(self, ledger: RemoteLedger) -> None:
        """Have the metadata store tell when a ledger is closed or deleted, for as long as somebody holds it."""
        held = weakref.ref(ledger)

        def changed() -> None:
            found = held()
            if found is not None and not self._ended:
                self.renew(found)

        watch = self._directory.metadata.watch_ledger(ledger.ledger_id, changed)
        weakref.finalize(ledger, watch.cancel)

    def renew(self, ledger: RemoteLedger) -> None:
        """Read a ledger's metadata, and wake who follows it if it has ended.

        Raises:
            LedgerDeletedError: It was deleted.
        """
        try:
            ledger.renew(*self._directory.metadata.read_ledger(ledger.ledger_id))
        except LedgerDeletedError:
            ledger.deleted = True
            ledger.wake_followers()
            raise

    def end(self) -> None:
        """Ask no more."""
        self._ended = True
