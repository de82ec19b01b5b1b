"""Self-healing in the process of a bookie: all services that work for the cluster in the background."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from pybk.healing.auditor_driver import AuditorDriver
from pybk.healing.chores import ChoreThread
from pybk.healing.quick_audit import QuickAudits
from pybk.healing.repair_report import report_gauges
from pybk.healing.repair_worker import RepairWorker
from pybk.healing.scrub import BookieScrub, StoreScrub, scrub_gauges
from pybk.healing.scrub_schedule import ScrubKind
from pybk.healing.unnamed_copies import SurplusDrops
from pybk.healing.writer_watch import WriterWatch
from pybk.metrics import Gauge, MetricKey

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer
    from pybk.client.backend import ClusterBackend


class Autorecovery:
    """The candidate for auditor, the repair worker, the drop of surplus copies and the scrub of one bookie.

    They work until ``stop``. Autorecovery is BookKeeper's name for its auditor and workers.

    Args:
        backend: The client of the bookie's process.
        bookie: The bookie.

    Attributes:
        auditor: The candidate for the cluster's auditor.
        worker: The worker.
        surplus: The surplus copies that were found and dropped.
        scrub: The checks of the bookie's own store.
        quick_audits: The audits of all bookies, while this process leads.

    Raises:
        StorageRefusedError: The operating system gives no thread.

    Threads: any.
    """

    def __init__(self, backend: ClusterBackend, bookie: BookieServer) -> None:
        driver, membership, on_span = backend.driver, backend.membership, backend.config.on_span
        with ExitStack() as undo:
            self._thread: Final = ChoreThread()
            undo.callback(self._thread.stop)
            name = bookie.bookie.bookie_id
            self.auditor: Final = AuditorDriver(membership.metadata, name, membership.metrics, self._thread.wake)
            undo.callback(self.auditor.close)
            self.worker: Final = RepairWorker(
                driver, membership, bookie, self._thread, backend.recover_abandoned, on_span
            )
            undo.callback(self.worker.close)
            self.surplus: Final = SurplusDrops(driver, membership, bookie)
            share = self.worker.foreground_share
            owner = BookieScrub(bookie, membership.metadata, backend.metrics, share)
            self.scrub: Final = StoreScrub(owner, on_span, self._thread.wake)
            self.quick_audits: Final = QuickAudits(backend, self.auditor)
            self._settings_watch: Final = membership.metadata.watch_settings(lambda _: self._settings_changed())
            undo.callback(self._settings_watch.cancel)
            writers = WriterWatch(backend, self.auditor)
            self._thread.start((self.auditor, self.worker, writers, self.scrub, self.quick_audits, self.surplus))
            undo.pop_all()
        self._ended = False
        membership.metrics.add_gauges(self._gauges)

    def _gauges(self) -> Iterator[Gauge]:
        if self._ended:
            return
        leads, report = self.auditor.leads, self.auditor.report
        yield MetricKey("auditor_leader"), leads
        if leads and report is not None:
            yield from report_gauges(report, self.auditor.reported_ns)
            yield MetricKey("repair_grace_ns"), self.auditor.grace_ns
        yield MetricKey("repair_throttle_ratio"), self.worker.foreground_share()
        yield MetricKey("surplus_bytes"), self.surplus.surplus_bytes
        if (oldest_ns := self.quick_audits.oldest_ns) is not None:
            yield from scrub_gauges(ScrubKind.QUICK, oldest_ns, self.quick_audits.period_s())

    def _settings_changed(self) -> None:
        """Have those that rest for long see the settings of the cluster; called by a thread of the metadata store."""
        self.worker.wake()
        self.scrub.wake()

    def begin_stop(self) -> None:
        """Begin no more work; returns at once. The work under way ends when the client's driver is closed."""
        self._ended = True
        self._settings_watch.cancel()
        self.worker.begin_stop()
        self.surplus.stopping.set()
        self.scrub.begin_stop()
        self._thread.begin_stop()

    def stop(self) -> None:
        """Stop; returns when all threads have ended."""
        self.begin_stop()
        with ExitStack() as stopping:
            stopping.callback(self.auditor.close)
            stopping.callback(self.worker.close)
            stopping.callback(self.scrub.close)
            self._thread.stop()
