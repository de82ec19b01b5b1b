"""Self-healing in the process of a bookie: everything that works for the cluster there in the background."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from pybk.healing.auditing import Auditing
from pybk.healing.bookie_scrub import BookieScrub
from pybk.healing.quick_auditing import QuickAuditing
from pybk.healing.repairing import Repairer
from pybk.healing.report_gauges import report_gauges
from pybk.healing.scrub import ScrubKind
from pybk.healing.scrubbing import StoreScrub, scrub_gauges
from pybk.healing.surplus_dropping import SurplusDropping
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
        auditing: The candidate for the cluster's auditor.
        repairer: The worker.
        surplus: The drop of surplus copies.
        scrub: The checks of the bookie's own store.
        quick_auditing: The audits of all bookies, while this process leads.
        writer_watch: Looks for signs of life of writers, while this process leads.

    Raises:
        StorageRefusedError: The operating system gives no thread.

    Threads: any.
    """

    def __init__(self, backend: ClusterBackend, bookie: BookieServer) -> None:
        driver, membership, on_span = backend.driver, backend.membership, backend.config.on_span
        with ExitStack() as undo:
            self.auditing: Final = Auditing(membership.metadata, bookie.bookie.bookie_id, membership.metrics)
            undo.callback(self.auditing.stop)
            self.repairer: Final = Repairer(driver, membership, bookie, backend.recover_abandoned, on_span)
            undo.callback(self.repairer.stop)
            self.surplus: Final = SurplusDropping(driver, membership, bookie)
            undo.callback(self.surplus.stop)
            share = self.repairer.foreground_share
            self.scrub: Final = StoreScrub(BookieScrub(bookie, membership.metadata, backend.metrics, share), on_span)
            undo.callback(self.scrub.stop)
            self.quick_auditing: Final = QuickAuditing(backend, self.auditing)
            undo.callback(self.quick_auditing.stop)
            self.writer_watch: Final = WriterWatch(backend, self.auditing)
            undo.callback(self.writer_watch.stop)
            self._settings_watch: Final = membership.metadata.watch_settings(lambda _: self._settings_changed())
            undo.pop_all()
        self._ended = False
        membership.metrics.add_gauges(self._gauges)

    def _gauges(self) -> Iterator[Gauge]:
        if self._ended:
            return
        leads, report = self.auditing.leads, self.auditing.report
        yield MetricKey("auditor_leader"), leads
        if leads and report is not None:
            yield from report_gauges(report, self.auditing.reported_ns)
            yield MetricKey("repair_grace_ns"), self.auditing.grace_ns
        yield MetricKey("repair_throttle_ratio"), self.repairer.foreground_share()
        yield MetricKey("surplus_bytes"), self.surplus.drops.surplus_bytes
        if (oldest_ns := self.quick_auditing.oldest_ns) is not None:
            yield from scrub_gauges(ScrubKind.QUICK, oldest_ns, self.quick_auditing.period_s)

    def _settings_changed(self) -> None:
        """Have those that rest for long see the settings of the cluster; called by a thread of the metadata store."""
        self.repairer.wake()
        self.scrub.wake()

    def begin_stop(self) -> None:
        """Begin nothing more; returns at once. What is under way ends when the client's driver is closed."""
        self._ended = True
        self._settings_watch.cancel()
        self.repairer.begin_stop()
        self.surplus.begin_stop()
        self.scrub.begin_stop()
        self.quick_auditing.begin_stop()
        self.writer_watch.begin_stop()

    def stop(self) -> None:
        """Stop; returns when all threads have ended."""
        self._settings_watch.cancel()
        with ExitStack() as stopping:
            stopping.callback(self.auditing.stop)
            stopping.callback(self.repairer.stop)
            stopping.callback(self.surplus.stop)
            stopping.callback(self.scrub.stop)
            stopping.callback(self.quick_auditing.stop)
            self.writer_watch.stop()
