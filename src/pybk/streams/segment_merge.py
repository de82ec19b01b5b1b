"""Merges small segments of a log into few, large ledgers, while writers, commits and readers continue.

A merge copies the records of consecutive closed segments into one ledger, whose entries are relative as those of a
detached one. Then one compare-and-set of the log's list names it in their place (rules T20 to T22 of
``pybk.streams.ledger_list``). Records keep their sequence numbers; their positions have another segment and entry.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from pybk.errors import LogLockedError, NoSuchLedgerError, RewoundError, TruncatedError
from pybk.manager.append_future import duration_of
from pybk.manager.ledger_manager import backend_of
from pybk.streams import ledger_list
from pybk.streams.detached_writer import DetachedLedger, DetachedRecords
from pybk.streams.format import DetachedHeader, Highest, Records, highest_before
from pybk.streams.ledger_list import Merge
from pybk.streams.ledger_steps import FIRST_ENTRY, LedgerSteps, payload_of
from pybk.streams.list_record import MERGES, Detached, ListRecord, Rows, Segment
from pybk.streams.log_settings import RollPolicy
from pybk.streams.record_damage import missing_error
from pybk.streams.record_reader import RecordReader

KEEP_SECONDS: Final = 3600.0
"""Seconds for which the ledgers of merged segments are kept for readers, unless the caller says otherwise."""

_KEEP_SECONDS_MAX: Final = 1e9

MEMBERS_MAX: Final = 1024
"""Segments of a merge; their rows are in one page, which a metadata store takes."""

KEPT_MERGES_MAX: Final = 2048
"""Merges of a log whose replaced ledgers are kept at a time; the record of the log names each, and needs space for
segments."""


class SegmentMerge(NamedTuple):
    """The result of ``Log.merge_segments``.

    Attributes:
        ledgers: The number of ledgers that it wrote and the log has now.
        replaced: The number of segments in place of which it has them.
        records: The number of their records.
        nbytes: Payload bytes of these ledgers.
        segments: The number of segments of the log after it.
    """

    ledgers: int
    replaced: int
    records: int
    nbytes: int
    segments: int


class MergePlan(NamedTuple):
    """One merge that is to be made; it can be pickled.

    Attributes:
        run: The number of the run of merges.
        number: The number of this one in that run.
        members: The segments that it replaces.
        keep_s: Seconds for which their ledgers are kept.
    """

    run: int
    number: int
    members: Rows
    keep_s: float

    @property
    def nbytes(self) -> int:
        """Payload bytes of the segments."""
        return sum(each.nbytes for each in self.members)


Copies = Callable[[Sequence[MergePlan]], Iterable[Merge | None]]
"""Makes the copy of each plan as ``copied`` does, in their order."""


def checked_keep(keep_s: object) -> float:
    """Return the seconds for which the ledgers of merged segments are kept; raises UsageError unless they are valid."""
    return duration_of(keep_s, "keep_s", _KEEP_SECONDS_MAX)


def merge_segments(steps: LedgerSteps, policy: RollPolicy, keep_s: float, copies: Copies | None = None) -> SegmentMerge:
    """Merge small segments of a log.

    Args:
        steps: The log's.
        policy: The limits of a merged segment.
        keep_s: Seconds for which the ledgers of the merged segments are kept.
        copies: Makes the copies; None to make them here, each after the one before is listed.

    Raises:
        LogLockedError: Another process merges segments of the log.
        LogFencedError: Another run of merges has begun although this one lives.
        LogSealedError: The log was sealed.
        IllegalOperationError: The feature level does not have merges.
        CorruptError: A record is damaged or missing.
    """
    with _locked(steps):
        steps.release_replaced(steps.existing().record)
        groups = steps.with_segments(lambda record, segments: groups_to_merge(record, segments, policy))
        made: list[Merge] = []
        if groups:
            run = steps.perform(ledger_list.begin_merges(steps.name, time.time_ns))
            plans = [MergePlan(run, number, members, keep_s) for number, members in enumerate(groups)]
            merges = map(partial(copied, steps), plans) if copies is None else copies(plans)
            made = [each for each in merges if each is not None and _is_listed(steps, each)]
    return SegmentMerge(
        len(made),
        sum(len(each.members) for each in made),
        sum(each.ledger.records for each in made),
        sum(each.ledger.nbytes for each in made),
        steps.existing().record.segment_count,
    )


def _is_listed(steps: LedgerSteps, merge: Merge) -> bool:
    """List the ledger of a merge; returns whether that changed the log."""
    return steps.perform(ledger_list.merge(steps.name, merge)) is not None


@contextmanager
def _locked(steps: LedgerSteps) -> Iterator[None]:
    """Keep other processes from merging segments of the log."""
    backend, name = backend_of(steps.manager), f"merge.{steps.name}"
    lock = backend.try_lock(name, f"{os.uname().nodename}, process {os.getpid()}")
    if lock is None:
        raise LogLockedError(
            f"segments of {steps.title} are being merged ({backend.lock_owner(name)}); wait for the end of that"
        )
    try:
        yield
    finally:
        lock.release()


# ---- the segments to merge -------------------------------------------------------------------------------------------


def groups_to_merge(record: ListRecord, segments: Sequence[Segment], policy: RollPolicy) -> list[Rows]:
    """Return the groups of consecutive closed segments that are worth a merge, each within the limits of a segment.

    A segment is merged only with others that have two thirds of its bytes in all. So a merge makes each segment longer
    by as much, and a record is copied a few times only, however often segments are merged. There are only as many
    groups as the record has space for.
    """
    closed = [each for each in segments if not each.is_open and (each.first_seq or 0) >= record.first_seq]
    groups = groups_worth_merging(tuple(closed), partial(_reach, policy=policy))
    return groups[: max(0, KEPT_MERGES_MAX - len(record.replaced))]


class Sized(Protocol):
    """A segment, or another part that may be merged with those after it."""

    @property
    def nbytes(self) -> int:
        """Payload bytes."""


P = TypeVar("P", bound=Sized)


def groups_worth_merging(parts: tuple[P, ...], reach: Callable[[tuple[P, ...], int], int]) -> list[tuple[P, ...]]:
    """Return groups of consecutive parts in which each is merged only with others of two thirds of its bytes in all.

    Args:
        parts: The parts.
        reach: Returns the index after the last part that can be merged with the one of an index and with all between
            them; at least the index after that one.
    """
    found: list[tuple[P, ...]] = []
    low = 0
    while low < len(parts):
        group = parts[low : reach(parts, low)]
        sizes = [each.nbytes for each in group]
        largest = sizes.index(max(sizes))
        if len(group) > 1 and 5 * sizes[largest] <= 3 * sum(sizes):
            found.append(group)
            low += len(group)
        else:
            found += groups_worth_merging(group[:largest], reach)
            low += largest + 1
    return found


def _reach(segments: Rows, low: int, policy: RollPolicy) -> int:
    """Return the index after the last segment that can be merged with one and with all between them.

    It is at least the index after that one. The clocks of hosts differ, so a span of time may be negative.
    """
    first, nbytes = segments[low], 0
    for high in range(low, len(segments)):
        each = segments[high]
        nbytes += each.nbytes
        records = (each.last_seq or 0) - (first.first_seq or 0) + 1
        age_s = (each.closed_ns - first.created_ns) / 1e9
        fits = nbytes <= policy.nbytes and records <= policy.records and age_s <= policy.age_s
        fits = fits and high - low < MEMBERS_MAX
        if high > low and not (fits and each.generation == first.generation):
            return high
    return len(segments)


# ---- copying ---------------------------------------------------------------------------------------------------------


def copied(steps: LedgerSteps, plan: MergePlan) -> Merge | None:
    """Copy the records of segments into one ledger.

    Returns:
        The merge; None if the log was truncated or cut meanwhile, so that it has not all of the records any more.

    Raises:
        CorruptError: A record is damaged or missing.
    """
    first, last = plan.members[0], plan.members[-1]
    assert first.first_seq is not None
    assert last.last_seq is not None
    uid = steps.existing().record.uid
    with _Copy(steps, DetachedHeader(uid, steps.name, MERGES, plan.run, plan.number, 0)) as copy:
        try:
            before = _highest_before(steps, first)
            if before is None:
                return None
            reader = RecordReader(steps, first.first_seq)
            try:
                while reader.seq <= last.last_seq:
                    records = reader.read(last=last.last_seq)
                    if records is None:
                        return None
                    copy.add(records)
            finally:
                reader.close()
        except (TruncatedError, RewoundError):
            return None
        ledger = copy.seal()
    row = replace(
        last,
        ledger_id=ledger.ledger_id,
        first_seq=first.first_seq,
        nbytes=ledger.nbytes,
        created_ns=first.created_ns,
        before=before,
    )
    return Merge(plan.run, plan.members, row, ledger, time.time_ns() + int(plan.keep_s * 1e9))


def _highest_before(steps: LedgerSteps, segment: Segment) -> Highest | None:
    """Return the highest event time and transaction id before a closed segment; None if it is not listed any more.

    Raises:
        CorruptError: Its ledger is missing, although it is listed.
    """
    if segment.before is not None:
        return segment.before
    try:
        with steps.open_segment(segment) as reader:
            where = f"{steps.title}, ledger {segment.ledger_id} entry {FIRST_ENTRY}"
            return highest_before(payload_of(reader, FIRST_ENTRY), where=where)
    except NoSuchLedgerError as error:
        if steps.segment_numbered(steps.existing().record, segment.number) != segment:
            return None
        assert segment.first_seq is not None
        raise missing_error(steps, segment, segment.first_seq) from error


class _Copy:
    """The ledger of a merge; the end of its ``with`` deletes what was not sealed."""

    def __init__(self, steps: LedgerSteps, header: DetachedHeader) -> None:
        self._ledger = DetachedLedger(steps, header)
        self._records = DetachedRecords(self._ledger)

    def __enter__(self) -> _Copy:
        return self

    def __exit__(self, *_: object) -> None:
        self._ledger.close()

    def add(self, records: Records) -> None:
        """Append records; they share entries with those before and after them."""
        self._records.add(records)

    def seal(self) -> Detached:
        """Wait until all records are durable, and close the ledger."""
        return self._records.seal()
