"""The thread of the auditor's process that audits a few entries of each replica; ``quick_audit`` says what that means.

Only the process that leads audits. The ledgers are those that the auditor's machine knows, so they cost no listing;
their metadata are read in pages when they are due. When each part was audited last stands in the metadata store, so
that the next auditor continues there; which bookies are suspected does not, so those are audited anew.

A bookie that did not answer is not asked for ``SILENT_S``: what it has is unknown for that long, and each question
would cost two time-outs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from random import Random
from typing import TYPE_CHECKING, Final

from pybk.client.remote_ledger import RemoteLedger
from pybk.client.replica_check import check_replica
from pybk.errors import ClosedError, CorruptError, MetadataForgedError, PybkError, UnsupportedFormatError
from pybk.healing.auditor import Check
from pybk.healing.quick_audit import (
    Sample,
    Suspects,
    failed_entries,
    forget_others,
    note_result,
    result_of,
    samples_of,
)
from pybk.healing.scrub import ScrubSchedule, part_of
from pybk.threads.workers import start_thread

if TYPE_CHECKING:
    from pybk.client.backend import ClusterBackend
    from pybk.healing.auditing import Auditing
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.metadata.ledgers import StoredLedger
    from pybk.replication.replica_check import ReplicaCheckMachine

logger = logging.getLogger(__name__)

LOOK_S: Final = 10.0
"""Seconds between two looks whether something is due."""

PAUSE_S: Final = 0.02
"""Seconds between two ledgers, so that at most fifty metadata are read per second."""

SILENT_S: Final = 60.0
"""Seconds for which a bookie that did not answer is not asked."""

SAVE_S: Final = 60.0

_PAGE: Final = 500
_ENTRY_BYTES: Final = 1 << 20
"""Has each entry be asked for alone."""


class QuickAuditing:
    """Audits a few entries of each replica while this process leads, from its creation until ``stop``.

    Args:
        backend: The client of this process.
        auditing: The candidate for auditor, which takes the results.

    Raises:
        StorageRefusedError: The operating system gives no thread.

    Threads: its own; ``stop`` any.
    """

    def __init__(self, backend: ClusterBackend, auditing: Auditing) -> None:
        self._backend = backend
        self._metadata = backend.membership.metadata
        self._auditing = auditing
        self._random = Random()
        self._schedule: ScrubSchedule | None = None
        self.suspects: Suspects = {}
        """What failed an audit, and is audited again. For the thread alone."""
        self._silent_until: dict[Bookie, float] = {}
        self._saved_at = float("-inf")
        self.audited = 0
        """Ledgers that were audited."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pybk-quick-audit", daemon=True)
        start_thread(self._thread)

    @property
    def oldest_ns(self) -> int | None:
        """Since when every replica was audited, nanoseconds since 1970; None while this process does not lead."""
        schedule = self._schedule
        return None if schedule is None else schedule.oldest_ns

    @property
    def period_s(self) -> float:
        """Seconds between two audits of a replica; once ``oldest_ns`` is known, it costs no round trip."""
        return self._metadata.settings.scrub.quick_s

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                self._look()
            except ClosedError:
                return
            except PybkError as error:
                logger.warning("replicas are not audited now: %s", error)
            except Exception:  # this thread must survive, or replicas would not be audited any more
                logger.exception("replicas are not audited now")

    def _look(self) -> None:
        """Audit what is due, if this process leads and the cluster is quiet."""
        if not self._auditing.leads:
            self._schedule = None
            self.suspects.clear()
            return
        now_ns = time.time_ns()
        settings = self._metadata.settings
        schedule = self._schedule = self._schedule or self._noted(now_ns)
        schedule.ask(settings.scrub.quick_asked_ns, now_ns)
        period = settings.scrub.quick_s
        due = schedule.due(period, now_ns)
        if not self._metadata.is_quiet(now_ns):
            due = [part for part in due if schedule.is_late(part, period, now_ns)]
        self._audit(sorted({key[0] for key, suspect in self.suspects.items() if suspect.due_ns <= now_ns}))
        for part in due:
            schedule.begin(part, now_ns)
            ledger_ids = [each for each in self._auditing.ledger_ids() if part_of(each) == part]
            ledger_ids = [each for each in sorted(ledger_ids) if each >= schedule.ledger_id]
            if not self._audit(ledger_ids, schedule):
                return
            schedule.finish()
            self._save(schedule)

    def _noted(self, now_ns: int) -> ScrubSchedule:
        """Return what the auditor before has left; damaged notes count as none."""
        try:
            notes = self._metadata.read_quick_audit()
            return ScrubSchedule(now_ns) if notes is None else ScrubSchedule.decode(notes["quick"])
        except (CorruptError, MetadataForgedError, UnsupportedFormatError, KeyError, TypeError, ValueError) as error:
            logger.warning("quick audits begin anew, as their notes are damaged: %r", error)
            return ScrubSchedule(now_ns)

    def _save(self, schedule: ScrubSchedule) -> None:
        self._saved_at = time.monotonic()
        self._metadata.write_quick_audit({"quick": schedule.encode(), "noted_ns": time.time_ns()})

    def _audit(self, ledger_ids: list[int], schedule: ScrubSchedule | None = None) -> bool:
        """Audit ledgers, and note how far that is in a schedule; return False if it was cut off."""
        for at in range(0, len(ledger_ids), _PAGE):
            page = ledger_ids[at : at + _PAGE]
            for ledger_id, stored in zip(page, self._metadata.read_ledgers(page, damaged=_skipped), strict=True):
                if self._stopping.wait(PAUSE_S) or not self._auditing.leads:
                    return False
                if stored is None:
                    forget_others(self.suspects, ledger_id, ())
                else:
                    self._audit_ledger(stored)
                if schedule is not None:
                    schedule.reach(ledger_id + 1)
                    if time.monotonic() >= self._saved_at + SAVE_S:
                        self._save(schedule)
        return True

    def _audit_ledger(self, stored: StoredLedger) -> None:
        """Read the samples of each of a ledger's bookies, and report what came of it."""
        ledger_id = stored.metadata.ledger_id
        samples: defaultdict[Bookie, list[Sample]] = defaultdict(list)
        for sample in samples_of(stored.metadata, self._random, failed_entries(self.suspects, ledger_id)):
            samples[sample.bookie].append(sample)
        forget_others(self.suspects, ledger_id, samples.keys())
        for bookie, mine in samples.items():
            result = result_of(self._check(stored, sample) for sample in mine)
            if result[0] in (Check.DAMAGED, Check.MISSING):
                logger.warning(
                    "ledger %d: %s answered that entry %d is %s", ledger_id, bookie, result[1], result[0].name
                )
            note_result(self.suspects, ledger_id, bookie, result, time.time_ns())
            self._auditing.report_check(ledger_id, bookie, *result)
        self.audited += 1

    def _check(self, stored: StoredLedger, sample: Sample) -> ReplicaCheckMachine | None:
        """Read a sample; None if its bookie is not there, or did not answer a moment ago."""
        bookie = sample.bookie
        if self._backend.membership.find(bookie) is None or time.monotonic() < self._silent_until.get(bookie, 0.0):
            return None
        check = check_replica(
            self._backend.driver,
            RemoteLedger(*stored, self._metadata.describe(stored.metadata)),
            *(sample.place, sample.first, sample.last),
            digest=None,
            entry_bytes=_ENTRY_BYTES,
            entries=sample.entries,
        )
        if check.machine.silent:
            self._silent_until[bookie] = time.monotonic() + SILENT_S
        return check.machine

    def begin_stop(self) -> None:
        """Audit no further ledger; returns at once."""
        self._stopping.set()

    def stop(self) -> None:
        """Stop; returns when the thread has ended."""
        self.begin_stop()
        if self._thread.is_alive():
            self._thread.join()


def _skipped(ledger_id: int, error: PybkError) -> None:
    logger.warning("ledger %d is not audited, as its metadata cannot be read: %s", ledger_id, error)
