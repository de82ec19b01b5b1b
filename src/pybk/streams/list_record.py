"""The record of a ledger list: the ledgers of a log, as one value that is changed by compare-and-set.

This module decides and checks, without input or output: each change of a list is a method of ``ListRecord`` that
returns the next record. ``pybk.streams.ledger_list`` has the order in which changes are written, and ledgers created,
fenced, closed and deleted. ``docs/design/ledger_lists.md`` has the format of the bytes.

The records of a log have dense sequence numbers. The list divides them into segments; each segment is one ledger:

    truncated        CLOSED           CLOSED        OPEN
    ...........|----------------|--------------|----------->
               ^ first_seq                     ^ end_seq

Segments have numbers, which grow by one and are never used again. ``epoch`` is the number of the last take-over: the
writer of that epoch alone may add segments. ``generation`` grows when records are dropped at the end (``cut``), so a
sequence number that is given again has a higher generation.

**Names** of logs and blobs are paths such as ``orders/eu``, which sort and list by prefix.

**Bounds** are the records from which on each durable subscription of a log needs them (rule T9). A log's record of
format 1 has them itself. From format 2 on they are in records of their own, ``SHARDS`` of them, each with the bounds of
some subscriptions; together they are a *set*, which the log's record names. So raising a bound writes the bounds of a
few subscriptions only, however many there are, and not the log's record. Each change takes bounds and returns the next
ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple
from zlib import crc32

from pybk.credentials import cut_value
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    LogFencedError,
    RewoundError,
    StorageRefusedError,
    TruncateGuardError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.streams.format import NOTHING_YET, Highest, Origin
from pybk.values import FrozenDict, decode_json, encode_json

NAME_BYTES_MAX: Final = 120
_NO_PARTS: Final = frozenset({"", ".", ".."})


def checked_name(name: object, what: str = "a log") -> str:
    """Return the name of a log, or of ``what``; raises UsageError if it is not valid.

    A name has 1 to 120 bytes in UTF-8, in parts separated by ``/``, none of them empty, ``.`` or ``..``. It has no
    control characters, no spaces around it, and does not begin with a full stop, which is reserved.
    """
    if not isinstance(name, str):
        raise UsageError(f"the name of {what} takes a string, not {type(name).__name__}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"the name {cut_value(name, 50)} cannot be encoded as UTF-8: {error.reason}") from error
    if not 1 <= size <= NAME_BYTES_MAX:
        raise UsageError(f"the name {cut_value(name, 50)} has {size} bytes in UTF-8; it takes 1 to {NAME_BYTES_MAX}")
    if not _NO_PARTS.isdisjoint(name.split("/")) or name.startswith("."):
        raise UsageError(
            f"the name {name!r} has an empty part, or one of full stops, or begins with one; choose another"
        )
    if name != name.strip() or not name.isprintable():
        raise UsageError(
            f"the name {name!r} has spaces around it, or characters that cannot be printed; choose another"
        )
    return name


def title_of(name: str, *, of_cursor: bool) -> str:
    """Return the name, for errors, of a log, or of the subscription whose cursor a ledger list is."""
    if not of_cursor:
        return f"log {name!r}"
    log, _, subscription = name.rpartition("@")
    return f"subscription {subscription!r} of log {log!r}"


def cursor_list_name(log: str, subscription: str) -> str:
    """Return the name of the ledger list of a subscription's cursor; the name of a subscription has no ``@``."""
    return f"{log}@{subscription}"


SHARDS: Final = 16
"""Records of a set of bounds."""

_FORMAT: Final = 1


class CursorBound(NamedTuple):
    """The bound of a durable subscription: the records of a log that it needs.

    Attributes:
        name: The subscription's.
        seq: The first record that it may need; at most the first record that it has not acknowledged.
        uid: The uid of the ledger list that keeps its cursor, hexadecimal: a subscription that is made again under the
            same name is another.
        epoch: The epoch of its owner in that list; an owner of an earlier epoch changes nothing here.
    """

    name: str
    seq: int
    uid: str
    epoch: int = 0


Bounds = tuple[CursorBound, ...]
"""Bounds of different subscriptions, by name."""


def bound_of(bounds: Bounds, name: str) -> CursorBound | None:
    """Return the bound of a subscription; None if there is no such subscription."""
    return next((each for each in bounds if each.name == name), None)


def subscribed(bounds: Bounds, cursor: CursorBound) -> Bounds:
    """Return bounds with one more subscription, unless they have one of that name."""
    if bound_of(bounds, cursor.name) is not None:
        return bounds
    return tuple(sorted((*bounds, cursor)))


def claimed(bounds: Bounds, log: str, name: str, uid: str, epoch: int) -> Bounds:
    """Return bounds in which a subscription of a log has a new owner.

    Raises:
        LogFencedError: It has a later owner, or was deleted.
    """
    return _with_bound(bounds, _owned(bounds, log, name, uid, epoch, claim=True)._replace(epoch=epoch))


def needing(bounds: Bounds, log: str, cursor: CursorBound) -> Bounds:
    """Return bounds in which a subscription of a log needs records from ``cursor.seq`` on.

    Raises:
        LogFencedError: The subscription has a later owner, or was deleted.
    """
    _owned(bounds, log, cursor.name, cursor.uid, cursor.epoch)
    return _with_bound(bounds, cursor)


def unsubscribed(bounds: Bounds, name: str, uid: str) -> Bounds:
    """Return bounds without a subscription."""
    return tuple(each for each in bounds if (each.name, each.uid) != (name, uid))


def _owned(bounds: Bounds, log: str, name: str, uid: str, epoch: int, *, claim: bool = False) -> CursorBound:
    found = bound_of(bounds, name)
    if found is None or found.uid != uid:
        raise LogFencedError(f"subscription {name!r} of log {log!r} was deleted; subscribe again")
    if found.epoch > epoch or (found.epoch < epoch and not claim):
        raise LogFencedError(
            f"subscription {name!r} of log {log!r} was taken over: its epoch is {found.epoch}, not {epoch}"
        )
    return found


def _with_bound(bounds: Bounds, cursor: CursorBound) -> Bounds:
    return tuple(cursor if each.name == cursor.name else each for each in bounds)


# ---- records of bounds -----------------------------------------------------------------------------------------------


def shard_of(name: str) -> int:
    """Return the number of the record of a set that has the bound of a subscription."""
    return crc32(name.encode()) % SHARDS


def encode_bounds(bounds: Bounds) -> bytes:
    """Return a record of a set as JSON."""
    return encode_json({"format": _FORMAT, "bounds": [list(each) for each in bounds]})


def decode_bounds(data: bytes, *, where: str) -> Bounds:
    """Decode the result of ``encode_bounds``; ``where`` names the record in errors.

    Raises:
        CorruptError: The bytes are not bounds.
        UnsupportedFormatError: A newer pybk wrote them.
    """
    return decode_json(
        data, lambda values: tuple(CursorBound(*each) for each in values["bounds"]), where=where, number=_FORMAT
    )


LIST_FORMAT: Final = 1
PAGED_FORMAT: Final = 2
"""The format of a record that names pages and a set of bounds."""

_REPLACED_FORMAT: Final = 3
"""The format, in bytes, of such a record that also names replaced segments: a version that does not know them would
delete their ledgers at once."""

PAGE_SEGMENTS: Final = 128
"""Segments of a page. A record itself has up to as many closed segments, and names as many pages at 16 thousand
segments."""

SEQ_MAX: Final = (1 << 63) - 2
UID_BYTES: Final = 16
_PAGE_FORMAT: Final = 1
_OPEN_MAX: Final = 2
"""Segments that are open at a time, always the last ones; a roll overlaps them."""

RECORD_BYTES_MAX: Final = 384 << 10
"""Bytes of a record to which segments, or versions of a blob, are added; a metadata store takes 448 KiB."""

PROPERTIES_BYTES_MAX: Final = 16 << 10
"""Bytes of the names and values of properties, in UTF-8."""

META_BYTES_MAX: Final = 4 << 10
"""Bytes of the text of a checkpoint, in UTF-8, and of the metadata of a blob, as JSON."""


class ListKind(StrEnum):
    """The kind of a ledger list: the purpose that it serves."""

    WAL = "wal"
    LOG = "log"
    CURSOR = "cursor"

    @property
    def group(self) -> str:
        """The group of their records among the named records."""
        return f"{self}s"


class SegmentEnd(NamedTuple):
    """The records and bytes of a segment, from its entries; final once its ledger is closed.

    Attributes:
        first_seq: Its first record; None for a segment without records.
        last_seq: Its last record, not counting a transaction that was not committed; None as ``first_seq``.
        nbytes: Payload bytes of its ledger.
        highest: The highest event time and transaction id of the log up to there.
    """

    first_seq: int | None
    last_seq: int | None
    nbytes: int
    highest: Highest = NOTHING_YET


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment: one ledger of a list.

    Attributes:
        number: Its number, from 1 up.
        ledger_id: Its ledger.
        epoch: The epoch of the writer that added it.
        generation: The generation of its records.
        first_seq: Its first record, or, for an empty segment, the record with which it will begin; None for a segment
            that a roll added and whose predecessor is not closed yet.
        last_seq: Its last record; None while it is OPEN. Its ledger may have more, which were cut off.
        nbytes: Payload bytes of its ledger; 0 while it is OPEN.
        created_ns: The time when it was added, nanoseconds since 1970.
        closed_ns: The time when it was closed; 0 while it is OPEN.
        before: The highest event time and transaction id before it, if the log adopted its ledger, or a merge wrote it,
            which is closed then (rules T18 and T20); None for a ledger of the log's writer.
    """

    number: int
    ledger_id: int
    epoch: int
    generation: int
    first_seq: int | None
    last_seq: int | None = None
    nbytes: int = 0
    created_ns: int = 0
    closed_ns: int = 0
    before: Highest | None = None

    @property
    def origin(self) -> Origin | None:
        """The place in the log where its entries begin, if they are relative; None for a ledger of the log's writer."""
        if self.before is None:
            return None
        assert self.first_seq is not None, "an adopted ledger is closed"
        return Origin(self.first_seq, self.before)

    @property
    def is_open(self) -> bool:
        """True if its writer may still append to it; a take-over has to fence it then."""
        return self.last_seq is None


_ROW_FIELDS: Final = len(Segment.__slots__) - 1
_fields_of: Final = attrgetter(*Segment.__slots__[:-1])


def _row_of(segment: Segment) -> tuple[Any, ...]:
    fields: tuple[Any, ...] = _fields_of(segment)
    return fields if segment.before is None else (*fields, segment.before)


def _segment_of(row: list[Any]) -> Segment:
    return Segment(*row[:_ROW_FIELDS], *(Highest(*before) for before in row[_ROW_FIELDS:]))


class Detached(NamedTuple):
    """A ledger that is to be adopted, closed.

    Attributes:
        ledger_id: The ledger.
        records: The number of its records, at least one.
        nbytes: Payload bytes of its ledger.
        highest: The highest event time and transaction id of its records.
    """

    ledger_id: int
    records: int
    nbytes: int
    highest: Highest


class Producer(NamedTuple):
    """The last commit of a query, or the last records of an idempotent producer, as a list keeps them.

    Attributes:
        epoch: Its last epoch: for a query, the number of its last commit.
        seq: The last record of the log as of then.
        time_ns: The time of that, nanoseconds since 1970; an earlier one if it is to be forgotten earlier.
    """

    epoch: int
    seq: int
    time_ns: int = 0


MERGES: Final = ".merges"
"""The name under which a list has the number of its last run of merges among its producers; no query has that name."""

QUERY_IDLE_SECONDS: Final = 30 * 86_400.0
"""Seconds after its last commit after which a log forgets a query, at the next commit of another one, unless the commit
says that it need not be remembered so long."""

QUERIES_BYTES_MAX: Final = RECORD_BYTES_MAX // 2
"""Bytes of the queries in a record to which further ones are added; the rest of the record is for segments."""


class Checkpoint(NamedTuple):
    """A snapshot, in a blob, of the state that results from the records up to one.

    Attributes:
        seq: The last record that it covers.
        generation: The generation of the log when it was made.
        ledger_id: The blob.
        meta: The application's.
        created_ns: The time when it was made, nanoseconds since 1970.
    """

    seq: int
    generation: int
    ledger_id: int
    meta: str
    created_ns: int


class Page(NamedTuple):
    """Closed segments that have left the record: a record of its own, which never changes.

    Attributes:
        name: The page's; it begins with the number of the segment that was added when the page was written.
        number: The number of its first segment.
        last_number: The number of its last one.
        first_seq: The first record of its first segment.
        last_seq: The last record of its last one.
        segments: The number of its segments that were not truncated.
        nbytes: Payload bytes of these.
    """

    name: str
    number: int
    last_number: int
    first_seq: int
    last_seq: int
    segments: int
    nbytes: int


Rows = tuple[Segment, ...]
"""The segments of a page."""


class Replaced(NamedTuple):
    """Segments in place of which a merge listed another; readers that have opened their ledgers may still read these.

    Attributes:
        page: The name of a page that has them.
        until_ns: The time from which on their ledgers may be deleted, nanoseconds since 1970.
    """

    page: str
    until_ns: int


_NO_ROWS: Final[Mapping[str, Rows]] = FrozenDict({})


@dataclass(frozen=True, slots=True)
class ListRecord:
    """A ledger list at one moment.

    Attributes:
        name: The name of the log.
        kind: The kind of the list.
        uid: 16 random bytes, made with the list: a log that is created again under the same name is another.
        start_seq: The sequence number of the first record that the log ever had.
        first_seq: The first record that was not truncated.
        end_seq: The sequence number after the last record of the closed segments.
        epoch: The number of the last take-over; 0 before the first.
        generation: The number of times that records were dropped at the end.
        highest: The highest event time and transaction id of the records before ``end_seq``, dropped ones too.
        next_segment: The number of the segment that is added next. A ledger of this list with a lower number that is
            not listed will never be listed, so it can be deleted (rule T5).
        cuts: Generations, ascending, and the last record of earlier generations that the cut of each kept, ascending as
            well: of two cuts, one that kept no more than an earlier one stands for both.
        sealed: Whether the log has ended for good.
        properties: The application's.
        segments: The segments by number, without gaps in sequence numbers. At most the last two are open.
        pending_deletes: Ledgers that were removed from the list; they may still have to be deleted.
        checkpoints: The checkpoints by the record that they cover, ascending. Records after the oldest one are not
            truncated (rule T8).
        uploads: Blobs that the present owner writes; a new owner deletes those of its predecessor.
        cursors: Its durable subscriptions, by name. Records from the lowest bound on are not truncated (rule T9).
        dropped: Whether the deletion of the log was begun; it exists only for a deletion that continues this one (rule
            T14).
        format: 1, or 2 for a record that names pages and a set of bounds.
        pages: The segments before ``segments``, by number (rule T16). Empty if no closed segment is left.
        gone_pages: Pages that were removed from the list, whose ledgers may still have to be deleted.
        bound_set: The set of records that has the bounds of subscriptions instead of ``cursors``; empty for none.
        admissions: The number of times that bounds were added or lowered in that set (rule T17).
        producers: The last commit of each query, by its name (rule T18); as ``MERGES`` the last run of merges (T21).
        replaced: The segments that merges have replaced, whose ledgers are kept for some time (rule T22).
    """

    name: str
    kind: ListKind
    uid: bytes
    start_seq: int
    first_seq: int
    end_seq: int
    epoch: int = 0
    generation: int = 0
    highest: Highest = NOTHING_YET
    next_segment: int = 1
    cuts: tuple[tuple[int, int], ...] = ()
    sealed: bool = False
    properties: Mapping[str, str] = field(default_factory=dict, hash=False)
    segments: tuple[Segment, ...] = ()
    pending_deletes: tuple[int, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    uploads: tuple[int, ...] = ()
    cursors: tuple[CursorBound, ...] = ()
    dropped: bool = False
    format: int = LIST_FORMAT
    pages: tuple[Page, ...] = ()
    gone_pages: tuple[str, ...] = ()
    bound_set: str = ""
    admissions: int = 0
    producers: Mapping[str, Producer] = field(default_factory=dict, hash=False)
    replaced: tuple[Replaced, ...] = ()
    _encoded: bytes | None = field(default=None, init=False, repr=False, compare=False)
    """The encoded record, once it was encoded, or if it was decoded."""

    def __post_init__(self) -> None:
        """Check the invariants; a record that breaks them is neither written nor used."""
        object.__setattr__(self, "properties", FrozenDict(self.properties))
        object.__setattr__(self, "producers", FrozenDict(self.producers))
        problem = _problem_of(self)
        if problem:
            raise CorruptError(f"the ledger list of {self.name!r}: {problem}; restore its record")

    # ---- what it says --------------------------------------------------------------------------------------------

    @property
    def open_segments(self) -> tuple[Segment, ...]:
        """The segments that are open, at most two."""
        return tuple(each for each in self.segments[-_OPEN_MAX:] if each.is_open)

    @property
    def ledgers(self) -> frozenset[int]:
        """The ledgers that are listed, except those of pages."""
        blobs = (each.ledger_id for each in self.checkpoints)
        return frozenset((*(each.ledger_id for each in self.segments), *blobs, *self.uploads))

    def kept_of(self, generation: int) -> int:
        """Return the last record that the cuts after a generation kept; ``SEQ_MAX`` if there was none."""
        return min((seq for number, seq in self.cuts if number > generation), default=SEQ_MAX)

    def segment_of(self, seq: int) -> Segment | None:
        """Return the closed segment that holds a record, or the open one that can hold it; None otherwise."""
        for each in reversed(self.segments):
            if each.first_seq is not None and each.first_seq <= seq:
                return each if each.last_seq is None or seq <= each.last_seq else None
        return None

    def page_of(self, seq: int) -> Page | None:
        """Return the page that has the segment of a record; None if no page has it."""
        found = bisect_left(self.pages, seq, key=lambda each: each.last_seq)
        return self.pages[found] if found < len(self.pages) and self.pages[found].first_seq <= seq else None

    def page_numbered(self, number: int) -> Page | None:
        """Return the page that has the segment of a number; None if no page has it."""
        found = bisect_left(self.pages, number, key=lambda each: each.last_number)
        return self.pages[found] if found < len(self.pages) and self.pages[found].number <= number else None

    @property
    def segment_count(self) -> int:
        """The number of segments, with those in pages."""
        return len(self.segments) + sum(each.segments for each in self.pages)

    @property
    def nbytes(self) -> int:
        """Payload bytes of all closed segments."""
        return sum(each.nbytes for each in self.segments) + sum(each.nbytes for each in self.pages)

    def left_of(self, bounds: Bounds) -> Bounds:
        """Return bounds, raised to the first record that was not dropped."""
        first = self.first_seq
        return tuple(each if each.seq >= first else each._replace(seq=first) for each in bounds)

    def guard_of(self, bounds: Bounds) -> int:
        """Return the first record that a checkpoint or a subscription needs; ``SEQ_MAX`` if there is none."""
        needed = (each.seq for each in bounds)
        return min((*needed, *(each.seq + 1 for each in self.checkpoints[:1])), default=SEQ_MAX)

    # ---- changes -------------------------------------------------------------------------------------------------

    def taken_over(self, ends: Mapping[int, SegmentEnd], ledger_id: int, now_ns: int) -> ListRecord:
        """Return the record after a take-over: a new epoch, and a new open segment.

        Args:
            ends: The end to which each open segment was recovered, by its number.
            ledger_id: The ledger of the new segment, which has no record yet.
            now_ns: The time, nanoseconds since 1970.
        """
        closed = self.closed(ends, now_ns)
        pending = (*closed.pending_deletes, *self.uploads)
        return replace(closed, uploads=(), pending_deletes=pending)._added(
            ledger_id, self.epoch + 1, closed.end_seq, now_ns
        )

    def rolled(self, ledger_id: int, now_ns: int) -> ListRecord:
        """Return the record with one more open segment; the one before it stays open until ``closed``.

        Raises:
            StorageRefusedError: The record is so long that its remaining bytes are reserved for closing and taking
                over.
        """
        self._check_room()
        first_seq = None if self.open_segments else self.end_seq
        return self._added(ledger_id, self.epoch, first_seq, now_ns)

    def _check_room(self) -> None:
        if len(self.encode()) > RECORD_BYTES_MAX:
            raise StorageRefusedError(
                f"log {self.name!r} has {self.segment_count} segments, and its record {RECORD_BYTES_MAX} bytes: "
                "truncate the log, or open it with larger segment_bytes"
            )

    def closed(self, ends: Mapping[int, SegmentEnd], now_ns: int) -> ListRecord:
        """Return the record with closed segments, given the end of each.

        They are closed in order, because each has to continue where the one before it ended (rule T3).
        """
        segments: list[Segment] = []
        gone: list[int] = []
        end_seq, highest = self.end_seq, self.highest
        for each in self.segments:
            end = ends.get(each.number)
            if end is None or not each.is_open:
                segments.append(each)
                continue
            if end.first_seq is None or end.last_seq is None:
                gone.append(each.ledger_id)
                continue
            if end.first_seq != end_seq:
                raise CorruptError(
                    f"log {self.name!r}: segment {each.number} (ledger {each.ledger_id}) begins with record "
                    f"{end.first_seq}, but record {end_seq} comes next; restore its record, or the ledgers before"
                )
            segments.append(
                replace(each, first_seq=end_seq, last_seq=end.last_seq, nbytes=end.nbytes, closed_ns=now_ns)
            )
            end_seq, highest = end.last_seq + 1, Highest(*map(max, highest, end.highest))
        if segments and segments[-1].first_seq is None and (len(segments) == 1 or not segments[-2].is_open):
            segments[-1] = replace(segments[-1], first_seq=end_seq)  # a roll added it before this end was known
        pending = (*self.pending_deletes, *gone)
        return replace(self, segments=tuple(segments), end_seq=end_seq, highest=highest, pending_deletes=pending)

    def last_epoch(self, query: str) -> int | None:
        """Return the number of the last commit of a query; None if there is none, or none that it remembers."""
        found = self.producers.get(query)
        return None if found is None else found.epoch

    def adopted(
        self,
        ends: Mapping[int, SegmentEnd],
        ledgers: Sequence[Detached],
        query: str,
        epoch: int,
        now_ns: int,
        remember_s: float = QUERY_IDLE_SECONDS,
    ) -> ListRecord:
        """Return the record after a commit of a query: a new epoch, and its ledgers after all others (rule T18).

        Args:
            ends: As for ``taken_over``.
            ledgers: Those that are adopted, in the order of their records.
            query: The query.
            epoch: The number of the commit, higher than that of the query's last one.
            now_ns: The time, nanoseconds since 1970.
            remember_s: Seconds after which the query may be forgotten, unless it makes another commit.

        Raises:
            StorageRefusedError: As ``rolled``; or the query is new, and the record has as many as it takes.
        """
        last = self.last_epoch(query)
        assert last is None or last < epoch, "an epoch is committed once"
        self._check_room()
        closed = self.closed(ends, now_ns)
        owner, number, end_seq, highest = self.epoch + 1, closed.next_segment, closed.end_seq, closed.highest
        rows: list[Segment] = []
        for each in ledgers:
            last_seq = end_seq + each.records - 1
            row = Segment(number, each.ledger_id, owner, self.generation, end_seq, last_seq, each.nbytes)
            rows.append(replace(row, created_ns=now_ns, closed_ns=now_ns, before=highest))
            number, end_seq, highest = number + 1, last_seq + 1, Highest(*map(max, highest, each.highest))
        idle_ns = int(QUERY_IDLE_SECONDS * 1e9)
        kept = {
            name: each for name, each in self.producers.items() if name == MERGES or now_ns - each.time_ns <= idle_ns
        }
        if last is None and len(encode_json(kept)) > QUERIES_BYTES_MAX:
            raise StorageRefusedError(
                f"log {self.name!r} remembers the last commits of {len(kept)} queries, and takes no further one, such "
                f"as {query!r}; it forgets a query {QUERY_IDLE_SECONDS / 86_400:.0f} days after its last commit: "
                "let runs of one job share a name with ascending numbers, or be remembered for a shorter time"
            )
        return replace(
            closed,
            epoch=owner,
            next_segment=number,
            end_seq=end_seq,
            highest=highest,
            segments=(*closed.segments, *rows),
            uploads=(),
            pending_deletes=(*closed.pending_deletes, *self.uploads),
            producers={**kept, query: Producer(epoch, end_seq - 1, now_ns - idle_ns + int(remember_s * 1e9))},
        )

    def truncated(
        self, seq: int, bounds: Bounds, rows: Mapping[str, Rows] = _NO_ROWS, *, force: bool = False
    ) -> ListRecord:
        """Return the record that begins with ``seq``; segments that end before it are removed.

        A lower ``seq`` than ``first_seq`` changes nothing. The caller has checked that the record before ``seq``
        exists.

        Args:
            seq: The first record to keep.
            bounds: The bounds of all subscriptions.
            rows: The segments of the page that has record ``seq``, if any, by the page's name.
            force: Whether to drop records even if subscriptions need them; these then begin with ``seq``.

        Raises:
            TruncateGuardError: A checkpoint that is kept, or a subscription, needs records that would be dropped.
        """
        if self.checkpoints and seq > self.checkpoints[0].seq + 1:
            raise TruncateGuardError(
                f"log {self.name!r}: records before {seq} cannot be dropped, because the oldest checkpoint covers "
                f"those up to {self.checkpoints[0].seq}, and a restart from it replays the others: make another first"
            )
        first = max(seq, self.first_seq)
        lowest = min(bounds, key=lambda each: each.seq, default=None)
        if lowest is not None and lowest.seq < first and not force:
            raise TruncateGuardError(
                f"log {self.name!r}: records before {seq} cannot be dropped, because subscription {lowest.name!r} may "
                f"need those from {lowest.seq} on; have it acknowledge them (which the log knows some seconds later, "
                "or once the subscription is closed), delete it, or truncate with force=True (--force)"
            )
        gone = {each.number for each in self.segments if each.last_seq is not None and each.last_seq < first}
        cursors = tuple(each._replace(seq=max(each.seq, first)) for each in self.cursors)
        # Of the cuts before the first record the last one stands for all: what one of them made void is dropped anyway.
        before = [each for each in self.cuts if each[1] < first - 1]
        changed = self._without_pages(first, rows) if self.pages else self
        return changed._without(gone, first_seq=first, cursors=cursors, cuts=(*before[-1:], *self.cuts[len(before) :]))

    def _without_pages(self, first: int, rows: Mapping[str, Rows]) -> ListRecord:
        """Return the record without pages that end before a record, and without what the page before it has dropped."""
        gone = tuple(each.name for each in self.pages if each.last_seq < first)
        pages = self.pages[len(gone) :]
        dropped: Rows = ()
        if pages and first > max(pages[0].first_seq, self.first_seq):
            live = [each for each in rows[pages[0].name] if _last_of(each) >= self.first_seq]
            dropped = tuple(each for each in live if _last_of(each) < first)
            nbytes = pages[0].nbytes - sum(each.nbytes for each in dropped)
            pages = (pages[0]._replace(segments=len(live) - len(dropped), nbytes=nbytes), *pages[1:])
        pending = (*self.pending_deletes, *(each.ledger_id for each in dropped))
        return replace(
            self, first_seq=first, pages=pages, gone_pages=(*self.gone_pages, *gone), pending_deletes=pending
        )

    def with_cursors(self, bounds: Bounds) -> ListRecord:
        """Return a record of format 1 with other bounds of subscriptions.

        Raises:
            StorageRefusedError: A subscription was added, and the record is as long as it may be.
        """
        if len(bounds) > len(self.cursors) and len(self.encode()) > RECORD_BYTES_MAX:
            raise StorageRefusedError(
                f"log {self.name!r} has {len(self.cursors)} subscriptions and {len(self.segments)} segments, and its "
                f"record {RECORD_BYTES_MAX} bytes: delete subscriptions, or truncate the log"
            )
        return replace(self, cursors=self.left_of(bounds))

    def admitted(self) -> ListRecord:
        """Return the record after a bound was added or lowered; each result is different (rule T17)."""
        return replace(self, admissions=self.admissions + 1)

    def uploading(self, ledger_id: int) -> ListRecord:
        """Return the record that names a blob that is being written."""
        if ledger_id in self.uploads:
            return self
        return replace(self, uploads=(*self.uploads, ledger_id))

    def given_up(self, ledger_id: int) -> ListRecord:
        """Return the record without a blob that was being written."""
        if ledger_id not in self.uploads:
            return self
        left = tuple(each for each in self.uploads if each != ledger_id)
        return replace(self, uploads=left, pending_deletes=(*self.pending_deletes, ledger_id))

    def checkpointed(self, checkpoint: Checkpoint, keep: int) -> ListRecord:
        """Return the record with one more checkpoint, and the newest ``keep`` of all.

        Args:
            checkpoint: The new one.
            keep: The number to keep.

        Raises:
            RewoundError: A cut dropped records that the checkpoint covers.
            UsageError: A newer checkpoint exists.
        """
        if checkpoint in self.checkpoints:
            return self
        kept_seq = self.kept_of(checkpoint.generation)
        if checkpoint.seq > kept_seq:
            raise RewoundError(
                f"log {self.name!r}: the checkpoint covers records up to {checkpoint.seq}, and was begun before those "
                f"after {kept_seq} were dropped; make another",
                seq=kept_seq,
            )
        self.check_checkpoint(checkpoint.seq)
        if checkpoint.seq < self.first_seq - 1:
            raise UsageError(
                f"log {self.name!r}: a checkpoint of record {checkpoint.seq} is of no use, because those after it were "
                f"dropped up to {self.first_seq - 1}; make one that covers these"
            )
        kept = (*self.checkpoints, checkpoint)[-keep:]
        dropped = tuple(each.ledger_id for each in self.checkpoints if each not in kept)
        return replace(
            self,
            checkpoints=kept,
            uploads=tuple(each for each in self.uploads if each != checkpoint.ledger_id),
            pending_deletes=(*self.pending_deletes, *dropped),
        )

    def check_checkpoint(self, seq: int) -> None:
        """Raise UsageError if a checkpoint exists that is newer than one of record ``seq``."""
        if self.checkpoints and seq < self.checkpoints[-1].seq:
            raise UsageError(
                f"log {self.name!r}: a checkpoint of record {seq} is older than the newest one, of "
                f"{self.checkpoints[-1].seq}"
            )

    def check_cut(self, seq: int, end_seq: int, bounds: Bounds) -> None:
        """Raise UsageError unless the log, whose last record is the one before ``end_seq``, can end with ``seq``."""
        if self.checkpoints and seq < self.checkpoints[-1].seq:
            raise TruncateGuardError(
                f"log {self.name!r} cannot end with record {seq}: a checkpoint covers those up to "
                f"{self.checkpoints[-1].seq}"
            )
        if bounds:
            raise TruncateGuardError(
                f"log {self.name!r} cannot end with record {seq}: subscription {bounds[0].name!r} may have "
                "acknowledged later ones, whose sequence numbers would be given again; delete its subscriptions first"
            )
        if not self.first_seq - 1 <= seq < end_seq:
            raise UsageError(
                f"log {self.name!r} cannot end with record {seq}; it has records {self.first_seq} to {end_seq - 1}"
            )

    def generation_after(self, seq: int) -> int:
        """Return the generation after a cut: a higher one, unless ``seq`` is the last record and none is dropped."""
        return self.generation if seq == self.end_seq - 1 else self.generation + 1

    def cut(self, seq: int, ledger_id: int, now_ns: int, rows: Mapping[str, Rows] = _NO_ROWS) -> ListRecord:
        """Return the record in which ``seq`` is the last record, with a new open segment.

        All segments have to be closed. Those after ``seq`` are removed; the one that holds ``seq`` ends there, although
        its ledger has more entries. If a page has it, its segments are in the record again.

        Args:
            seq: The last record.
            ledger_id: The ledger of the new segment.
            now_ns: The time, nanoseconds since 1970.
            rows: As for ``truncated``.
        """
        generation, cuts = self.generation_after(seq), self.cuts
        if generation > self.generation:
            cuts = (*(each for each in cuts if each[1] < seq), (generation, seq))
        found = self.page_of(seq)
        back = () if found is None else tuple(each for each in rows[found.name] if _last_of(each) >= self.first_seq)
        pages = tuple(each for each in self.pages if each.last_seq < seq)
        gone_pages = (*self.gone_pages, *(each.name for each in self.pages if each.first_seq > seq))
        segments = (*back, *self.segments)
        gone = {each.number for each in segments if each.first_seq is not None and each.first_seq > seq}
        shorter = self._without(
            gone,
            segments=segments,
            last=seq,
            end_seq=seq + 1,
            generation=generation,
            cuts=cuts,
            pages=pages,
            gone_pages=gone_pages,
        )
        return shorter._added(ledger_id, self.epoch, seq + 1, now_ns)

    def ended(self) -> ListRecord:
        """Return the sealed record; all segments have to be closed."""
        return replace(self, sealed=True)

    def marked_dropped(self) -> ListRecord:
        """Return the record of a log whose deletion begins; all its parts still exist."""
        return replace(self, dropped=True)

    def emptied(self) -> ListRecord:
        """Return the record of a deleted log without records, blobs and subscriptions; all segments are closed."""
        blobs = (*(each.ledger_id for each in self.checkpoints), *self.uploads)
        bare = replace(self, checkpoints=(), uploads=(), cursors=(), pending_deletes=(*self.pending_deletes, *blobs))
        gone_pages = (*self.gone_pages, *(each.page for each in self.replaced))
        bare = replace(bare, replaced=(), gone_pages=gone_pages)
        return bare.truncated(self.end_seq, ()).ended().marked_dropped()

    def check_rename(self, bounds: Bounds) -> None:
        """Raise IllegalOperationError if the log, with the bounds of its subscriptions, cannot get another name."""
        if bounds:
            raise IllegalOperationError(
                f"log {self.name!r} has {len(bounds)} subscriptions, such as {bounds[0].name!r}, whose "
                "cursors are kept under its name; delete them first, and subscribe under the new name"
            )

    def renamed(self, name: str) -> ListRecord:
        """Return the record of the log under another name; all segments have to be closed."""
        return replace(self, name=name)

    def with_properties(self, changes: Mapping[str, str | None]) -> ListRecord:
        """Return the record with other properties; None removes one.

        Raises:
            UsageError: They are too long, or UTF-8 cannot encode them.
        """
        merged = {**self.properties, **changes}
        kept = {name: value for name, value in merged.items() if value is not None}
        try:
            size = sum(len(text.encode()) for pair in kept.items() for text in pair)
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the properties of log {self.name!r} cannot be encoded as UTF-8: {error.reason}; the text is "
                f"{error.object!r:.50}"
            ) from error
        if size > PROPERTIES_BYTES_MAX:
            raise UsageError(
                f"the properties of log {self.name!r} would have {size} bytes in UTF-8; they take at most "
                f"{PROPERTIES_BYTES_MAX}"
            )
        return replace(self, properties=kept)

    def deleted(self, ledger_ids: Iterable[int]) -> ListRecord:
        """Return the record without these deleted ledgers."""
        gone = set(ledger_ids)
        return replace(self, pending_deletes=tuple(each for each in self.pending_deletes if each not in gone))

    def _added(self, ledger_id: int, epoch: int, first_seq: int | None, now_ns: int) -> ListRecord:
        new = Segment(self.next_segment, ledger_id, epoch, self.generation, first_seq, created_ns=now_ns)
        return replace(self, epoch=epoch, next_segment=self.next_segment + 1, segments=(*self.segments, new))

    def _without(
        self, gone: Container[int], *, segments: Rows | None = None, last: int = SEQ_MAX, **changes: Any
    ) -> ListRecord:
        """Return the record without segments of some numbers, and without records after ``last`` in the others."""
        segments = self.segments if segments is None else segments
        kept = tuple(
            replace(each, last_seq=last) if each.last_seq is not None and each.last_seq > last else each
            for each in segments
            if each.number not in gone
        )
        ledgers = tuple(each.ledger_id for each in segments if each.number in gone)
        return replace(self, segments=kept, pending_deletes=(*self.pending_deletes, *ledgers), **changes)

    # ---- pages ---------------------------------------------------------------------------------------------------

    def surplus(self, most: int) -> Rows:
        """Return the closed segments that are to be moved to a page, if more than ``most`` are in the record itself.

        One closed segment is always left, because the record itself has to have the last one.
        """
        closed = len(self.segments) - len(self.open_segments)
        return self.segments[:most] if closed > most else ()

    def with_page(self, name: str, rows: Rows) -> ListRecord:
        """Return the record in which a page has its first segments."""
        return replace(self, pages=(*self.pages, page_of(name, rows)), segments=self.segments[len(rows) :])

    def in_pages(self, bound_set: str) -> ListRecord:
        """Return the record in format 2, whose bounds are in a set."""
        admissions = 1 if self.cursors else 0  # those of format 1 were all admitted
        return replace(self, format=PAGED_FORMAT, cursors=(), bound_set=bound_set, admissions=admissions)

    def without_page(self, name: str, kept: Iterable[int]) -> ListRecord:
        """Return the record without a removed page; its ledgers are deleted, except some, which are pending."""
        gone_pages = tuple(each for each in self.gone_pages if each != name)
        replaced = tuple(each for each in self.replaced if each.page != name)
        if (gone_pages, replaced) == (self.gone_pages, self.replaced):
            return self
        pending = (*self.pending_deletes, *kept)
        return replace(self, gone_pages=gone_pages, replaced=replaced, pending_deletes=pending)

    # ---- merges --------------------------------------------------------------------------------------------------

    def merging(self, now_ns: int) -> ListRecord:
        """Return the record after a run of merges has begun, which ends those before it; each result is different."""
        last = self.last_epoch(MERGES)
        begun = Producer(1 if last is None else last + 1, self.end_seq - 1, now_ns)
        return replace(self, producers={**self.producers, MERGES: begun})

    def pages_to_merge(self, members: Rows, page_segments: int) -> tuple[Page, ...]:
        """Return the pages that have some segments, and the page before them if it has fewer than a page takes.

        So merges leave no chain of pages with few segments each.
        """
        first, last = members[0].number, members[-1].number
        at = [at for at, each in enumerate(self.pages) if first <= each.last_number and each.number <= last]
        if not at:
            return ()
        low = at[0] - 1 if at[0] and self.pages[at[0] - 1].segments < page_segments else at[0]
        return self.pages[low : at[-1] + 1]

    def merged(
        self, members: Rows, row: Segment, pages: Sequence[Page], new: Iterable[Page], old: Replaced
    ) -> ListRecord:
        """Return the record in which one segment stands in place of consecutive closed ones (rule T20).

        Args:
            members: These; the record lists them.
            row: The one segment.
            pages: The consecutive pages that are replaced: all that have members, and perhaps others.
            new: The pages that have their other segments, and ``row`` if the last member was in a page.
            old: The page that has ``members``.
        """
        gone = {each.number for each in members}
        segments = tuple(each for each in self.segments if each.number not in gone)
        if members[-1] in self.segments:
            segments = in_order((*segments, row))
        at = self.pages.index(pages[0]) if pages else len(self.pages)
        left = (*self.pages[:at], *new, *self.pages[at + len(pages) :])
        return replace(self, segments=segments, pages=left, replaced=(*self.replaced, old))

    def dropping(self, ledger_ids: Iterable[int]) -> ListRecord:
        """Return the record in which ledgers that it does not list any more are to be deleted."""
        return replace(self, pending_deletes=(*self.pending_deletes, *ledger_ids))

    def pages_over(self, now_ns: int) -> tuple[str, ...]:
        """Return the pages of replaced segments whose ledgers may be deleted at a time."""
        return tuple(each.page for each in self.replaced if each.until_ns <= now_ns)

    # ---- bytes ---------------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Return the record as JSON: the same bytes at each call, also for a record that was decoded from them."""
        if self._encoded is None:
            object.__setattr__(self, "_encoded", self._as_json())
        assert self._encoded is not None
        return self._encoded

    def _as_json(self) -> bytes:
        left_out = () if self.format == PAGED_FORMAT else _PAGED_FIELDS
        values = {name: getattr(self, name) for name in _RECORD_FIELDS if name not in left_out}
        if not self.dropped:
            del values["dropped"]
        if self.replaced:
            values["format"] = _REPLACED_FORMAT
        else:
            values.pop("replaced", None)
        return encode_json(values | {"uid": self.uid.hex(), "segments": list(map(_row_of, self.segments))})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> ListRecord:
        """Decode the result of ``encode``; ``where`` names the record in errors.

        Raises:
            CorruptError: The bytes are not a record, or it breaks an invariant.
            UnsupportedFormatError: A newer pybk wrote it.
        """

        def make(values: dict[str, Any]) -> ListRecord:
            if values["format"] not in (LIST_FORMAT, PAGED_FORMAT, _REPLACED_FORMAT):
                raise UnsupportedFormatError(
                    f"{where}: format {values['format']}; this pybk reads formats {LIST_FORMAT} to "
                    f"{_REPLACED_FORMAT}: install a newer pybk"
                )
            return cls(
                **values
                | {
                    "format": min(values["format"], PAGED_FORMAT),
                    "replaced": tuple(Replaced(*each) for each in values.get("replaced", ())),
                    "pages": tuple(Page(*each) for each in values.get("pages", ())),
                    "gone_pages": tuple(values.get("gone_pages", ())),
                    "kind": ListKind(values["kind"]),
                    "uid": bytes.fromhex(values["uid"]),
                    "highest": Highest(*values["highest"]),
                    "cuts": tuple((number, seq) for number, seq in values["cuts"]),
                    "segments": tuple(map(_segment_of, values["segments"])),
                    "pending_deletes": tuple(values["pending_deletes"]),
                    "checkpoints": tuple(Checkpoint(*each) for each in values["checkpoints"]),
                    "uploads": tuple(values["uploads"]),
                    "cursors": tuple(CursorBound(*each) for each in values["cursors"]),
                    "producers": {name: Producer(*each) for name, each in values.get("producers", {}).items()},
                }
            )

        found = decode_json(data, make, where=where)
        object.__setattr__(found, "_encoded", data)
        return found


_RECORD_FIELDS: Final = tuple(each.name for each in fields(ListRecord) if each.init)
_PAGED_FIELDS: Final = ("pages", "gone_pages", "bound_set", "admissions", "producers", "replaced")
"""The fields that a record of format 1 does not have."""


def encode_page(rows: Rows) -> bytes:
    """Return the segments of a page as JSON."""
    return encode_json({"format": _PAGE_FORMAT, "segments": list(map(_row_of, rows))})


def decode_page(data: bytes, *, where: str) -> Rows:
    """Decode the result of ``encode_page``; ``where`` names the page in errors.

    Raises:
        CorruptError: The bytes are not a page.
        UnsupportedFormatError: A newer pybk wrote it.
    """
    return decode_json(
        data, lambda values: tuple(map(_segment_of, values["segments"])), where=where, number=_PAGE_FORMAT
    )


def _last_of(segment: Segment) -> int:
    """Return the last record of a closed segment."""
    assert segment.last_seq is not None, "no open segment is in a page"
    return segment.last_seq


def in_order(segments: Iterable[Segment]) -> Rows:
    """Return segments in the order of their numbers."""
    return tuple(sorted(segments, key=attrgetter("number")))


def page_of(name: str, rows: Rows) -> Page:
    """Return the page of a name that has some closed segments, as a record names it."""
    first, last = rows[0], rows[-1]
    assert first.first_seq is not None
    nbytes = sum(each.nbytes for each in rows)
    return Page(name, first.number, last.number, first.first_seq, _last_of(last), len(rows), nbytes)


def new_list(name: str, kind: ListKind, uid: bytes, start_seq: int) -> ListRecord:
    """Return the record of a log that was never opened for writing."""
    return ListRecord(name, kind, uid, start_seq, start_seq, start_seq)


def _problem_of(record: ListRecord) -> str:
    """Return which invariant a record breaks; empty if none."""
    numbers = [each.number for each in record.segments]
    blobs = [*(each.ledger_id for each in record.checkpoints), *record.uploads]
    ledgers = [*(each.ledger_id for each in record.segments), *blobs, *record.pending_deletes]
    if len(set(ledgers)) < len(ledgers):
        return "a ledger is listed twice, or listed and to be deleted"
    before = record.pages[-1].last_number if record.pages else 0
    if any(low >= high for low, high in pairwise([before, *numbers, record.next_segment])):
        return f"segments {numbers} do not ascend below {record.next_segment}"
    covered = [each.seq for each in record.checkpoints]
    if covered != sorted(covered) or (covered and record.first_seq > covered[0] + 1):
        return f"checkpoints cover records up to {covered}, but records before {record.first_seq} were dropped"
    cursors = [each.name for each in record.cursors]
    if cursors != sorted(set(cursors)) or any(each.seq < record.first_seq for each in record.cursors):
        return (
            f"subscriptions {cursors} are not in order, or need records before {record.first_seq}, which were dropped"
        )
    if not record.open_segments and record.first_seq > record.end_seq:
        return f"it begins with record {record.first_seq}, and ends before {record.end_seq}"
    if not record.start_seq <= record.first_seq:
        return f"it begins with record {record.first_seq}, before the first one, {record.start_seq}"
    if any(each.epoch > record.epoch or each.generation > record.generation for each in record.segments):
        return "a segment is of a later epoch or generation than the list"
    opened = record.open_segments
    closed = record.segments[: len(record.segments) - len(opened)]
    if any(each.is_open and each.before is not None for each in opened):
        return "a segment is open whose ledger was adopted"
    if any(each.is_open for each in closed) or (record.sealed and opened):
        return "more than the last two segments are open, or it is sealed and has an open one"
    problem = _problem_of_pages(record, closed)
    if problem:
        return problem
    first = closed[0].first_seq if closed else record.end_seq
    expected = first
    for each in closed:
        if expected is None or each.first_seq != expected or each.last_seq is None or each.last_seq < expected:
            return f"segment {each.number} has records {each.first_seq} to {each.last_seq}; {expected} comes next"
        expected = each.last_seq + 1
    if expected != record.end_seq:
        return f"the closed segments end before record {expected}, not before {record.end_seq}"
    first = record.pages[0].first_seq if record.pages else first
    if first is None or (closed and first > record.first_seq):
        return f"its first segment begins with record {first}, after record {record.first_seq}"
    if opened and opened[0].first_seq != record.end_seq:
        return f"the open segment begins with record {opened[0].first_seq}, not with {record.end_seq}"
    return ""


def _problem_of_pages(record: ListRecord, closed: Rows) -> str:
    """Return which invariant of pages a record breaks; empty if none.

    Args:
        record: The record.
        closed: Its closed segments.
    """
    if record.format == LIST_FORMAT:
        adopted = record.producers or any(each.before is not None for each in record.segments)
        paged = record.pages or record.gone_pages or record.bound_set or adopted or record.replaced
        return "a record of format 1 names pages, a set of bounds or adopted ledgers" if paged else ""
    if record.cursors:
        return "a record of format 2 has bounds itself"
    if not record.pages:
        return ""
    if not closed or record.pages[0].last_seq < record.first_seq:
        return f"it names pages, but none of the segments after them, or one that ends before {record.first_seq}"
    following = [(each.number, each.first_seq) for each in record.pages[1:]] + [(closed[0].number, closed[0].first_seq)]
    for page, (number, first_seq) in zip(record.pages, following, strict=True):
        if first_seq != page.last_seq + 1 or number <= page.last_number:
            return f"page {page.name} ends with record {page.last_seq}, and record {first_seq} follows"
    return ""
