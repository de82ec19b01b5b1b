"""Retention: segments of a log that are dropped by age, by size, or once all subscriptions have acknowledged them.

``Retention`` and ``first_kept`` decide, without input or output. ``RetentionKeeper`` applies the decisions in the
process of the log's writer: after each change of the log's record, such as a roll or a raised bound of a subscription,
and by a timer, so it works without traffic.

Only whole closed segments are dropped, the oldest first. Records that a subscription may still need, and records after
the oldest checkpoint, stay: the record of the log refuses to drop them (rules T8, T9).
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Final, NamedTuple

from pybk.errors import ClosedError, LogFencedError, NoSuchLogError, PybkError, UsageError
from pybk.manager.arguments import whole_from
from pybk.metadata.store import Watch
from pybk.streams import ledger_list
from pybk.streams.ledger_steps import LedgerSteps, cancel_elsewhere
from pybk.streams.list_record import SEQ_MAX, Bounds, ListRecord, Segment
from pybk.streams.list_writer import ListWriter
from pybk.threads import background, in_children, weakly
from pybk.values import FrozenDict, decode_json, encode_json, flag_of

logger = logging.getLogger(__name__)

RETENTION_PROPERTY: Final = "pybk.retention"
"""The property of a list that has its retention, as JSON."""

KEEPER_SECONDS: Final = 30.0
"""The longest interval at which a writer applies the retention of its log, even without changes."""

_KEEPER_SECONDS_MIN: Final = 0.25
_SECONDS_MAX: Final = 1e10
_LOOKS: Final = 4
"""The number of times that it does so in the shortest time that its retention names."""

IDLE_ROLL_SECONDS: Final = 3600.0

_NONE_NOTED: Final[Mapping[int, int]] = FrozenDict()


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The limits beyond which a log drops records by itself; a log without a retention drops none.

    Attributes:
        max_age: Seconds from the close of a segment until it is dropped; None for no limit. A record may get twice as
            old, because its segment is closed at this age. The log's writer looks every 30 seconds, and four times in a
            shorter ``max_age`` or ``idle_roll``.
        max_bytes: Bytes of all segments beyond which the oldest are dropped; None for no limit. The open segment counts
            and stays, so ``segment_bytes`` of the writer should be a fraction of this.
        keep_acked: Whether records are kept until these limits even if all durable subscriptions have acknowledged
            them. If False, such records are dropped; a log without subscriptions keeps its records.
        force_expire: Whether records beyond the limits are dropped even if a subscription has not acknowledged them;
            this is logged, and the subscription counts them.
        idle_roll: Seconds without further records after which the open segment is closed, if it could then be dropped.
    """

    max_age: float | None = None
    max_bytes: int | None = None
    keep_acked: bool = False
    force_expire: bool = False
    idle_roll: float = IDLE_ROLL_SECONDS

    def __post_init__(self) -> None:
        """Check the values; raises UsageError."""
        for name in ("max_age", "idle_roll"):
            value = getattr(self, name)
            if not (value is None and name == "max_age") and not (_is_number(value) and 0 < value <= _SECONDS_MAX):
                raise UsageError(f"{name} is {value!r:.50}; it takes seconds above 0, at most {_SECONDS_MAX:.0e}")
        for name in ("keep_acked", "force_expire"):
            flag_of(getattr(self, name), name)
        if self.max_bytes is not None:
            whole_from(self.max_bytes, 0, "max_bytes", "a number of bytes or None")


class Expired(NamedTuple):
    """The records that retention has dropped.

    Attributes:
        first_seq: The first record that was kept.
        records: The number of records that were dropped.
        nbytes: Bytes of their segments.
        unacked: Subscriptions that may not have acknowledged all of them, each with the most records that this may be;
            empty unless ``force_expire`` is set.
    """

    first_seq: int
    records: int
    nbytes: int
    unacked: Mapping[str, int]


class Held(NamedTuple):
    """The segments that a log holds, and the bounds of the subscriptions that need them.

    Attributes:
        record: Its record.
        segments: All its segments, ascending; those of pages may be read when they are asked for.
        bounds: The bounds of its durable subscriptions.
    """

    record: ListRecord
    segments: Iterable[Segment]
    bounds: Bounds

    @property
    def needed(self) -> int | None:
        """The first record that a subscription needs; None without subscriptions."""
        return min((each.seq for each in self.bounds), default=None)


def dates_of(
    segments: Iterable[Segment], now_ns: int, noted: Mapping[int, int] = _NONE_NOTED
) -> Iterator[tuple[Segment, int]]:
    """Yield segments, each with the time when it was closed, or added if it is open; nanoseconds since 1970.

    Hosts' clocks are wrong at times, but segments are closed in the order of their numbers. So a date in the future is
    corrected: the segment was closed before the next one, and not later than the date was noted. A date before that of
    an earlier segment is corrected as well: the segment was closed no earlier than that one.

    Args:
        segments: The segments of the log, ascending. Those after the one that is yielded are taken only if its date is
            in the future.
        now_ns: The time, nanoseconds since 1970.
        noted: The time when each date that is in the future was first seen.
    """
    latest = 0
    waiting: list[Segment] = []  # dated in the future, so that the date of the next one that is not counts
    for each in segments:
        waiting.append(each)
        if _date_of(each) <= now_ns:
            for dated, date in _believed(waiting, now_ns, noted):
                latest = max(latest, date)
                yield dated, latest
            waiting.clear()
    for dated, date in _believed(waiting, now_ns, noted):
        latest = max(latest, date)
        yield dated, latest


def _date_of(segment: Segment) -> int:
    return segment.created_ns if segment.is_open else segment.closed_ns


def _believed(segments: Sequence[Segment], now_ns: int, noted: Mapping[int, int]) -> list[tuple[Segment, int]]:
    """Return segments with the date of each. The dates of all but the last are in the future, and maybe the last's."""
    following, found = now_ns, list[tuple[Segment, int]]()
    for each in reversed(segments):
        date = _date_of(each)
        if date > now_ns:
            date = min(noted.get(date, now_ns), following)
        found.append((each, date))
        following = date
    return found[::-1]


def first_kept(
    held: Held, retention: Retention, now_ns: int, open_bytes: int, noted: Mapping[int, int] = _NONE_NOTED
) -> int:
    """Return the first record to keep: the first of a segment, or the first that was not dropped before.

    Args:
        held: The segments of the log, and the bounds.
        retention: Its retention.
        now_ns: The time, nanoseconds since 1970.
        open_bytes: Bytes of its open segments.
        noted: As for ``dates_of``.
    """
    record = held.record
    kept = record.first_seq
    total = open_bytes + record.nbytes
    needed = SEQ_MAX if held.needed is None else held.needed
    covered = record.checkpoints[0].seq + 1 if record.checkpoints else SEQ_MAX
    for each, date in dates_of(held.segments, now_ns, noted):
        if each.last_seq is None:
            break
        after = each.last_seq + 1
        is_acked = bool(held.bounds) and after <= needed
        is_old = retention.max_age is not None and now_ns - date > retention.max_age * 1e9
        is_too_much = retention.max_bytes is not None and total > retention.max_bytes
        expires = is_old or is_too_much or (is_acked and not retention.keep_acked)
        if not expires or after > covered or (after > needed and not retention.force_expire):
            break
        kept = max(kept, after)
        total -= each.nbytes
    return kept


def rolls_idle(
    held: Held, retention: Retention, now_ns: int, last_seq: int, noted: Mapping[int, int] = _NONE_NOTED
) -> bool:
    """Return whether the open segment is old enough to be closed, after which it can be dropped.

    Args:
        held: The segments of the log, and the bounds; pages are not read.
        retention: Its retention.
        now_ns: The time, nanoseconds since 1970.
        last_seq: The last record of the log.
        noted: As for ``dates_of``.
    """
    record = held.record
    if not record.open_segments or last_seq < record.end_seq:
        return False
    date = next(date for each, date in dates_of(record.segments, now_ns, noted) if each.is_open)
    age_s = (now_ns - date) / 1e9
    if retention.max_age is not None and age_s > retention.max_age:
        return True
    needed = -1 if held.needed is None else held.needed
    return not retention.keep_acked and last_seq < needed and age_s > retention.idle_roll


def period_of(retention: Retention | None) -> float:
    """Return the interval at which to apply a retention, seconds."""
    if retention is None:
        return KEEPER_SECONDS
    shortest = min(retention.max_age or math.inf, retention.idle_roll) / _LOOKS
    return min(KEEPER_SECONDS, max(_KEEPER_SECONDS_MIN, shortest))


def retention_of(record: ListRecord) -> Retention | None:
    """Return the retention of a log; None if it has none."""
    text = record.properties.get(RETENTION_PROPERTY)
    if text is None:
        return None

    def make(values: dict[str, Any]) -> Retention:
        return Retention(**values)

    return decode_json(text.encode(), make, where=f"the retention of log {record.name!r}")


def set_retention(steps: LedgerSteps, retention: Retention | None) -> None:
    """Store the retention of a log, or None for none, in its record; its writer applies it from then on."""
    if retention is not None and not isinstance(retention, Retention):
        raise UsageError(f"retention is {retention!r:.50}; it takes Retention(...), or None to drop nothing")
    text = None if retention is None else encode_json(asdict(retention)).decode()
    steps.set_properties({RETENTION_PROPERTY: text})


def _drop(steps: LedgerSteps, retention: Retention, expired: Expired, epoch: int, generation: int) -> None:
    """Drop what a retention does not keep, in the name of the log's owner.

    Raises:
        LogFencedError: The log has another epoch.
    """
    force = retention.force_expire
    steps.perform(ledger_list.truncate(steps.name, epoch, generation, expired.first_seq, force=force))
    if expired.unacked:
        logger.warning("log %r dropped records that were not acknowledged: %s", steps.name, dict(expired.unacked))


def apply_at_rest(steps: LedgerSteps, epoch: int) -> None:
    """Apply the retention of a log that has had no writer since a commit, which gave it an epoch.

    An error is logged, because the commit is done; the next commit or writer applies the retention again.
    """

    def expiring(record: ListRecord, segments: Sequence[Segment]) -> tuple[int, Retention | None, Expired]:
        held, retention = Held(record, segments, steps.bounds_of(record)), retention_of(record)
        first = record.first_seq if retention is None else first_kept(held, retention, time.time_ns(), 0)
        return record.generation, retention, _expired(held, first)

    try:
        generation, retention, expired = steps.with_segments(expiring)
        if retention is not None and expired.records:
            _drop(steps, retention, expired, epoch, generation)
    except (LogFencedError, NoSuchLogError):
        return  # what the log has now is the concern of its owner
    except (PybkError, OSError) as error:
        logger.warning("log %r could not drop what its retention allows: %s", steps.name, error)


class Watches:
    """Watches that are cancelled together; one that is added afterwards is cancelled at once. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: list[Watch] | None = []
        in_children(self)

    def add(self, watch: Watch) -> None:
        """Add one."""
        with self._lock:
            if self._watches is not None:
                self._watches.append(watch)
                return
        watch.cancel()

    def cancel(self) -> None:
        """Cancel all; a second call does nothing."""
        with self._lock:
            watches, self._watches = self._watches or [], None
        for each in watches:
            each.cancel()


class RetentionKeeper:
    """Applies the retention of a log, as long as its writer in this process is open.

    Threads: any.
    """

    def __init__(self, writer: ListWriter) -> None:
        self._writer = writer
        self._steps = writer.steps
        self._due = False
        self._is_over = False
        """True once the log has another writer or was deleted, or its manager is closed."""
        self._period_s = KEEPER_SECONDS
        self._timers = 0
        """The number of timers that were set, of which the last one counts."""
        self._noted: dict[int, int] = {}
        """The argument ``noted`` of ``dates_of``: the time when each date that is in the future was first seen."""
        self._watches = Watches()
        self._watches.add(self._steps.watch(weakly(RetentionKeeper.soon, self)))
        self._watched = ""
        """The set of bounds that is watched; empty for none."""
        self._dropped = weakref.finalize(self, cancel_elsewhere, self._watches)
        self._dropped.atexit = False
        self._set_timer()
        self.soon()

    def _set_timer(self) -> None:
        self._timers += 1
        background().call_later(self._period_s, partial(weakly(RetentionKeeper.on_timer, self), self._timers))

    @property
    def _ended(self) -> bool:
        return self._is_over or self._writer.closed

    def soon(self) -> None:
        """Apply the retention in the background."""
        if not self._due and not self._ended:
            self._due = True
            try:
                background().submit(weakly(RetentionKeeper.in_background, self))
            except BaseException:
                self._due = False
                raise

    def on_timer(self, number: int) -> None:
        """Apply the retention in the background, and again some time later."""
        if number == self._timers and not self._ended:
            self._set_timer()
            self.soon()

    def in_background(self) -> None:
        """Apply the retention; if that fails, it is tried again later."""
        self._due = False
        try:
            if not self._ended:
                self.apply()
        except (LogFencedError, NoSuchLogError, ClosedError):
            self._is_over = True
            self._watches.cancel()
        except (PybkError, OSError) as error:
            if not self._ended:
                logger.warning("log %r could not drop what its retention allows: %s", self._steps.name, error)

    def close(self) -> None:
        """Stop applying it."""
        self._dropped.detach()
        self._watches.cancel()

    def apply(self) -> Expired:
        """Drop the segments that the retention no longer keeps.

        Returns:
            The records that were dropped.

        Raises:
            LogFencedError: Another writer has the log.
        """
        record = self._steps.existing().record
        self._steps.release_replaced(record)
        self._watch_bounds(record)
        retention = retention_of(record)
        if self._period_s != (period := period_of(retention)):
            self._period_s = period
            self._set_timer()
        if retention is None:
            return Expired(record.first_seq, 0, 0, {})
        appender = self._writer.appender
        held = Held(record, record.segments, self._steps.bounds_of(record))
        if rolls_idle(held, retention, self._noted_until(record), appender.next_seq - 1, self._noted):
            self._writer.roll()
        expired = self._steps.with_segments(partial(self._expiring, retention))
        if expired.records:
            epoch, generation = appender.epoch, appender.generation
            self._writer.operate(lambda: _drop(self._steps, retention, expired, epoch, generation))
        return expired

    def _expiring(self, retention: Retention, record: ListRecord, segments: Sequence[Segment]) -> Expired:
        """Return the records that the retention does not keep any more."""
        held = Held(record, segments, self._steps.bounds_of(record))
        open_bytes = self._writer.appender.segment_bytes
        first = first_kept(held, retention, self._noted_until(record), open_bytes, self._noted)
        return _expired(held, first)

    def _noted_until(self, record: ListRecord) -> int:
        """Note dates that are in the future now, and forget those that are not any more; returns the time.

        Those of pages were noted before their segments were moved there, or count as noted now.
        """
        now_ns = time.time_ns()
        dates = {*self._noted, *map(_date_of, record.segments)}
        self._noted = {date: self._noted.get(date, now_ns) for date in dates if date > now_ns}
        return now_ns

    def _watch_bounds(self, record: ListRecord) -> None:
        """Apply the retention after changes of bounds that are not in the record itself."""
        if record.bound_set != self._watched and record.admissions:
            self._watched = record.bound_set
            for watch in self._steps.watch_bounds(record, weakly(RetentionKeeper.soon, self)):
                self._watches.add(watch)


def _expired(held: Held, first: int) -> Expired:
    """Return the records that are dropped if a log begins with ``first`` from now on."""
    if first <= held.record.first_seq:
        return Expired(held.record.first_seq, 0, 0, {})
    gone = takewhile(lambda each: each.last_seq is not None and each.last_seq < first, held.segments)
    unacked = {each.name: first - each.seq for each in held.bounds if each.seq < first}
    return Expired(first, first - held.record.first_seq, sum(each.nbytes for each in gone), FrozenDict(unacked))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
