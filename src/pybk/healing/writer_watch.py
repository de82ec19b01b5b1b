"""The search of the auditor's process for signs of life of the writers of open ledgers (H12).

Only ledgers that are open and have too few bookies are examined, which are few. Their metadata are read in pages. The
bookies of the last fragment are asked whether the writer has a session there (``find_writer``), which counts as a sign
of life. Ledgers that already wait for their owner are examined as well, because a writer may return.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pybk.client.broadcast import find_writer
from pybk.client.remote_ledger import RemoteLedger
from pybk.errors import PybkError
from pybk.healing import chores
from pybk.healing.chores import Rounds
from pybk.metadata.ledgers import LEDGERS_PAGE

if TYPE_CHECKING:
    from pybk.client.backend import ClusterBackend
    from pybk.healing.auditor_driver import AuditorDriver
    from pybk.metadata.ledgers import StoredLedger

logger = logging.getLogger(__name__)

LOOK_MIN_S: Final = 1.0
LOOK_MAX_S: Final = 60.0
"""The bounds of the seconds between two looks, which are a tenth of ``repair.open_grace_s``."""


class WriterWatch(Rounds):
    """Looks for signs of life of writers while this process leads.

    Args:
        backend: The client of this process.
        auditor: The candidate for auditor, which takes the results.
    """

    def __init__(self, backend: ClusterBackend, auditor: AuditorDriver) -> None:
        super().__init__(self._look, "signs of life of writers are not looked for now")
        self._backend = backend
        self._metadata = backend.membership.metadata
        self._auditor = auditor
        self._looked_at = float("-inf")

    def _look(self) -> Iterator[float]:
        """Ask about all open ledgers that have places short, once that is due, and report each writer that lives."""
        yield LOOK_MIN_S
        pause_s = min(LOOK_MAX_S, self._metadata.current_settings().repair.open_grace_s / 10)
        leads = self._auditor.leads  # it may end at any time
        if not leads or time.monotonic() < self._looked_at + pause_s:
            return
        self._looked_at = time.monotonic()
        ledger_ids = self._auditor.short_ledgers()
        for at in range(0, len(ledger_ids), LEDGERS_PAGE):
            for stored in self._metadata.read_ledgers(ledger_ids[at : at + LEDGERS_PAGE], damaged=_skipped):
                yield chores.LEDGER_PAUSE_S
                if not self._auditor.leads:
                    return
                if stored is not None and self._lives(stored):
                    self._auditor.report_writer(stored.metadata.ledger_id)

    def _lives(self, stored: StoredLedger) -> bool:
        """Return whether a bookie says that the writer lives; an unknown state is not a sign of life."""
        ledger = RemoteLedger(stored.metadata, stored.version, self._metadata.describe(stored.metadata))
        return find_writer(self._backend.driver, ledger, self._backend.membership.find) is True


def _skipped(ledger_id: int, error: PybkError) -> None:
    logger.warning("the writer of ledger %d is not searched, because its metadata cannot be read: %s", ledger_id, error)
