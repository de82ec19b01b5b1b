"""Quick audits: a few entries of each replica are read, and only a bookie's own answers count against it.

An audit of a ledger asks each of its bookies for the first and the last entry that it should have of each fragment, and
for two random ones between. The fragment of an open ledger without an end is left to its writer. The checks of all
fragments at one bookie have one result, which the auditor takes (``ReplicaChecked``):

| what the bookie answered | result |
|---|---|
| an entry has a wrong checksum | ``DAMAGED`` from the first such entry on |
| it never had an entry | ``MISSING`` from the first such entry on |
| no answer, or that it cannot decide | ``UNKNOWN``, which is not evidence (H4) |
| all entries, sound | ``SOUND`` |

The auditor marks the bookie once two audits at least ten minutes apart have found the same. So a bookie that failed is
audited again after that time, with the same entries.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.client.remote_ledger import RemoteLedger
from pybk.client.replica_check import check_replica
from pybk.errors import CorruptError, MetadataForgedError, PybkError, UnsupportedFormatError
from pybk.healing import chores
from pybk.healing.auditor import SUSPICION_NS, Check, ReplicaChecked
from pybk.healing.chores import Rounds
from pybk.healing.scrub_schedule import ScrubSchedule, part_of
from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata
from pybk.metadata.ledgers import LEDGERS_PAGE
from pybk.replication.fragments import fragment_end
from pybk.replication.replica_check import ReplicaCheckMachine, Span, spans_of

if TYPE_CHECKING:
    from pybk.client.backend import ClusterBackend
    from pybk.healing.auditor_driver import AuditorDriver
    from pybk.metadata.ledgers import StoredLedger

logger = logging.getLogger(__name__)

RANDOM_ENTRIES: Final = 2
"""Random entries that are read of each replica, next to the first and the last."""

SUSPECTS_MAX: Final = 1000
"""The most suspects that are audited again; others are audited in the next period."""

AGAIN_NS: Final = SUSPICION_NS + 10**9
"""The delay after a failed audit before the next one."""


SILENT_S: Final = 60.0
"""Seconds for which a bookie that did not answer is not asked, because each question would cost two time-outs."""

SAVE_S: Final = 60.0

_ENTRY_BYTES: Final = 1 << 20
"""Has each entry be asked for alone."""


class Sample(NamedTuple):
    """The entries that are read of one replica.

    Attributes:
        bookie: The bookie.
        place: Its place in the ensemble of the fragment.
        first: The first entry of the fragment.
        last: Its last entry.
        entries: The entries to read, ascending.
    """

    bookie: Bookie
    place: int
    first: int
    last: int
    entries: tuple[int, ...]


class Suspect(NamedTuple):
    """A bookie that failed an audit of a ledger.

    Attributes:
        due_ns: The time when it is audited again, by the monotonic clock.
        entry_id: The entry at which it failed.
    """

    due_ns: int
    entry_id: int


Suspects = dict[tuple[int, Bookie], Suspect]
"""The bookies that failed an audit, by ledger and bookie."""


def samples_of(metadata: LedgerMetadata, random: Random, also: Collection[int] = ()) -> list[Sample]:
    """Return the samples that an audit of a ledger reads.

    Args:
        metadata: The ledger.
        random: Draws the random entries.
        also: Entries that are read as well, from the bookies that should have them.
    """
    found = []
    for number, fragment in enumerate(metadata.fragments):
        end = fragment_end(metadata, number)
        if end is None or end < fragment.first_entry_id:
            continue
        for place, bookie in enumerate(fragment.ensemble):
            spans = spans_of(metadata, place, fragment.first_entry_id, end)
            if spans:
                drawn = _drawn(spans, random, also)
                found.append(Sample(bookie, place, fragment.first_entry_id, end, drawn))
    return found


def _drawn(spans: Sequence[Span], random: Random, also: Collection[int]) -> tuple[int, ...]:
    entries = {min(span.first for span in spans), max(span.last for span in spans)}
    for span in random.choices(spans, weights=[span.entries for span in spans], k=RANDOM_ENTRIES):
        entries.add(span.first + random.randrange(span.entries) * span.step)
    ranges = [range(span.first, span.last + 1, span.step) for span in spans]
    entries.update(each for each in also if any(each in entries_there for entries_there in ranges))
    return tuple(sorted(entries))


def result_of(checks: Iterable[ReplicaCheckMachine | None]) -> tuple[Check, int]:
    """Return the result of the checks of one bookie's replicas of a ledger, and the first entry that it concerns.

    Args:
        checks: One for each fragment; None for one that could not be made.
    """
    made = list(checks)
    damaged = [span.first for check in made if check is not None for span in check.damaged]
    if damaged:
        return Check.DAMAGED, min(damaged)
    missing = [span.first for check in made if check is not None for span in check.missing]
    if missing:
        return Check.MISSING, min(missing)
    if any(check is None or is_unknown(check) for check in made):
        return Check.UNKNOWN, 0
    return Check.SOUND, 0


def is_unknown(check: ReplicaCheckMachine) -> bool:
    """Return whether a bookie did not answer, or could not decide."""
    return check.silent or bool(check.unknown)


def failed_entries(suspects: Suspects, ledger_id: int) -> set[int]:
    """Return the entries of a ledger at which bookies failed, which are read again."""
    return {suspect.entry_id for (failed, _), suspect in suspects.items() if failed == ledger_id}


def forget_others(suspects: Suspects, ledger_id: int, bookies: Collection[Bookie]) -> None:
    """Forget the bookies that failed an audit of a ledger, and that are not among those of its present audit.

    These have lost their places, or the ledger was deleted, so nothing would end their suspicion.
    """
    for key in [key for key in suspects if key[0] == ledger_id and key[1] not in bookies]:
        del suspects[key]


def note_result(suspects: Suspects, ledger_id: int, bookie: Bookie, result: tuple[Check, int], now_ns: int) -> None:
    """Note a bookie that failed for another audit, and end the suspicion of one that passed.

    A bookie that did not answer stays noted, and is asked once more later.
    """
    check, entry_id = result
    key = ledger_id, bookie
    again = Suspect(now_ns + AGAIN_NS, entry_id)
    if check is Check.SOUND:
        suspects.pop(key, None)
    elif check is Check.UNKNOWN:
        if key in suspects:
            suspects[key] = again._replace(entry_id=suspects[key].entry_id)
    elif key in suspects and suspects[key].due_ns <= now_ns:
        del suspects[key]  # the auditor has it twice, and marks it
    elif key not in suspects and len(suspects) < SUSPECTS_MAX:
        suspects[key] = again


class QuickAudits(Rounds):
    """Audits a few entries of each replica while this process leads.

    The ledgers are those that the auditor's machine knows, so they cost no listing; their metadata are read in pages
    when they are due. The metadata store has the time when each part was audited last, where the next auditor
    continues. It does not have the suspects, which are audited anew.

    Args:
        backend: The client of this process.
        auditor: The candidate for auditor, which takes the results.
    """

    def __init__(self, backend: ClusterBackend, auditor: AuditorDriver) -> None:
        super().__init__(self._look, "replicas are not audited now")
        self._backend = backend
        self._metadata = backend.membership.metadata
        self._auditor = auditor
        self._random = Random()
        self._schedule: ScrubSchedule | None = None
        self.suspects: Suspects = {}
        """The replicas that failed an audit, and are audited again. Used by the rounds alone."""
        self._silent_until: dict[Bookie, float] = {}
        self._saved_at = float("-inf")
        self.audited = 0
        """Ledgers that were audited."""

    @property
    def oldest_ns(self) -> int | None:
        """The time since which each replica was audited, nanoseconds since 1970; None unless this process leads."""
        schedule = self._schedule
        return None if schedule is None else schedule.oldest_ns

    def period_s(self) -> float:
        """Return the seconds between two audits of a replica; once ``oldest_ns`` is known, it costs no round trip."""
        return self._metadata.current_settings().scrub.quick_s

    def _look(self) -> Iterator[float]:
        """Audit the ledgers that are due, if this process leads and the cluster is quiet."""
        yield chores.LOOK_S
        if not self._auditor.leads:
            self._schedule = None
            self.suspects.clear()
            return
        now_ns = time.time_ns()
        settings = self._metadata.current_settings()
        schedule = self._schedule = self._schedule or self._noted(now_ns)
        schedule.ask(settings.scrub.quick_asked_ns, now_ns)
        period = settings.scrub.quick_s
        due = schedule.due(period, now_ns)
        if not self._metadata.is_quiet(now_ns):
            due = [part for part in due if schedule.is_late(part, period, now_ns)]
        yield from self._audit(self._ledgers_due())
        for part in due:
            schedule.begin(part, now_ns)
            ledger_ids = [each for each in self._auditor.ledger_ids() if part_of(each) == part]
            ledger_ids = [each for each in sorted(ledger_ids) if each >= schedule.ledger_id]
            if not (yield from self._audit(ledger_ids, schedule)):
                return
            schedule.finish()
            self._save(schedule)

    def _ledgers_due(self) -> list[int]:
        """Return the ledgers with bookies that are to be audited again by now."""
        now_ns = time.monotonic_ns()
        return sorted({key[0] for key, suspect in self.suspects.items() if suspect.due_ns <= now_ns})

    def _noted(self, now_ns: int) -> ScrubSchedule:
        """Return the schedule that the auditor before has left; damaged notes count as none."""
        try:
            notes = self._metadata.read_quick_audit()
            return ScrubSchedule(now_ns) if notes is None else ScrubSchedule.decode(notes["quick"])
        except (CorruptError, MetadataForgedError, UnsupportedFormatError, KeyError, TypeError, ValueError) as error:
            logger.warning("quick audits begin again, because their notes are damaged: %r", error)
            return ScrubSchedule(now_ns)

    def _save(self, schedule: ScrubSchedule) -> None:
        self._saved_at = time.monotonic()
        self._metadata.write_quick_audit({"quick": schedule.encode(), "noted_ns": time.time_ns()})

    def _audit(self, ledger_ids: list[int], schedule: ScrubSchedule | None = None) -> Generator[float, None, bool]:
        """Audit ledgers, and note how far that is in a schedule; return False if this process leads no more."""
        for at in range(0, len(ledger_ids), LEDGERS_PAGE):
            page = ledger_ids[at : at + LEDGERS_PAGE]
            for ledger_id, stored in zip(page, self._metadata.read_ledgers(page, damaged=_skipped), strict=True):
                yield chores.LEDGER_PAUSE_S
                if not self._auditor.leads:
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
        """Read the samples of each of a ledger's bookies, and report the results."""
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
            checked_ns = time.monotonic_ns()
            note_result(self.suspects, ledger_id, bookie, result, checked_ns)
            self._auditor.report_check(ReplicaChecked(ledger_id, bookie, checked_ns, *result))
        self.audited += 1

    def _check(self, stored: StoredLedger, sample: Sample) -> ReplicaCheckMachine | None:
        """Read a sample; None if its bookie is not there, or did not answer a moment ago."""
        bookie = sample.bookie
        if self._backend.membership.find(bookie) is None or time.monotonic() < self._silent_until.get(bookie, 0.0):
            return None
        check = check_replica(
            self._backend.driver,
            RemoteLedger(*stored, self._metadata.describe(stored.metadata)),
            sample.place,
            sample.first,
            sample.last,
            digest=None,
            entry_bytes=_ENTRY_BYTES,
            entries=sample.entries,
        )
        if check.machine.silent:
            self._silent_until[bookie] = time.monotonic() + SILENT_S
        return check.machine


def _skipped(ledger_id: int, error: PybkError) -> None:
    logger.warning("ledger %d is not audited, because its metadata cannot be read: %s", ledger_id, error)
