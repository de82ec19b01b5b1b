"""What a soak deletes: the oldest ledgers, each read once more before it goes.

Without it the number of ledgers grows as long as the soak lasts, each loss takes longer to repair than the last one,
and memory that grows with the ledgers looks like memory that is never given back.
"""

from __future__ import annotations

import threading
from collections import Counter

from pybk.errors import NoSuchLedgerError, PybkError
from tests.cluster.child import PASSWORD, payload
from tests.cluster.nemesis import LARGEST
from tests.cluster.soak.members import SoakCluster, Written

KEPT = 500
"""How many closed ledgers stay."""

PAUSE_S = 0.2


class Retention:
    """Reads and deletes the oldest closed ledgers while there are more than ``KEPT``, until ``end``.

    Attributes:
        counts: How many ledgers and entries were read before they went, and which errors had them stay for longer.
        wrong: What was read and must not be.
    """

    def __init__(self, cluster: SoakCluster) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._cluster = cluster
        self._client = cluster.connect()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(PAUSE_S):
            closed = [each for each in list(self._cluster.book.ledgers.values()) if each.closed is not None]
            staying = [each for each in closed if not each.deleting]
            # The oldest come first: the book keeps the order in which ledgers were created.
            for each in staying[: max(0, len(staying) - KEPT)]:
                if self._ended.is_set():
                    return
                try:
                    self._retire(each)
                except PybkError as error:
                    self.counts[f"retirements ended by {type(error).__name__}"] += 1
                    break

    def _retire(self, written: Written) -> None:
        """Read a ledger, compare each of its entries, and delete it."""
        ledger_id = written.ledger_id
        try:
            with self._client.open_ledger(ledger_id, password=PASSWORD) as reader:
                found = [entry.payload for entry in reader]
        except NoSuchLedgerError:
            if not written.deleting:
                self.wrong.append(f"ledger {ledger_id}: it is gone, and nobody deleted it")
                written.deleting = True
            return
        if found != [payload(ledger_id, number, LARGEST) for number in range(written.entries)]:
            self.wrong.append(f"ledger {ledger_id}: {len(found)} entries were read, or others than were written")
        written.deleting = True
        self._client.delete_ledger(ledger_id, password=PASSWORD)
        written.deleted = True
        self.counts["ledgers retired"] += 1
        self.counts["entries of retired ledgers"] += len(found)

    def end(self) -> None:
        """Stop deleting."""
        self._ended.set()
        self._thread.join()
        self._client.close()
