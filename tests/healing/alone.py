"""Parts of a bookie's self-healing, each with a thread that drives it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pybk.healing.auditor_driver import AuditorDriver
from pybk.healing.chores import ChoreThread
from pybk.healing.repair_worker import RepairWorker
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.metrics import Metrics
from pybk.spans import OnSpan
from tests.internals import cluster_backend_of, service_of


class LoneWorker(RepairWorker):
    """The worker of a bookie, from its creation until ``stop``."""

    def __init__(
        self,
        manager: LedgerManager,
        recover: Callable[[int], LedgerMetadata] | None = None,
        on_span: OnSpan | None = None,
    ) -> None:
        backend, self._thread = cluster_backend_of(manager), ChoreThread()
        super().__init__(backend.driver, backend.membership, service_of(manager), self._thread, recover, on_span)
        self._thread.start((self,))

    def stop(self) -> None:
        """Stop; returns when the copies under way have ended."""
        self.begin_stop()
        self._thread.stop()
        self.close()


@contextmanager
def auditor_of(metadata: ClusterMetadata) -> Iterator[AuditorDriver]:
    """Have a candidate for auditor until the ``with`` block ends."""
    thread = ChoreThread()
    auditor = AuditorDriver(metadata, "the auditor", Metrics(), thread.wake)
    try:
        thread.start((auditor,))
        yield auditor
    finally:
        thread.stop()
        auditor.close()
