"""Ledger lists: the order in which the ledgers of a log are created, listed, fenced, closed and deleted.

A log is longer than a ledger, and outlives its writers. Its ledgers are listed in one record (``list_record``), which
is changed by compare-and-set. Each operation here is a generator: it yields steps and is sent their results, and does
no input or output itself. ``pybk.streams.ledger_steps`` performs the steps with a ledger manager; the simulator in the
tests performs them in every order that faults allow.

The order of the steps keeps these rules:

- **T1** A writer appends to a ledger only after the compare-and-set that lists it has succeeded.
- **T2** A take-over first fences every open segment, which are at most two, because a roll overlaps them. Then it
  creates a ledger, and lists it by a compare-and-set, which makes it the owner and raises the epoch.
- **T3** Each segment begins with the record after its predecessor's last one: a writer switches only when all records
  that it appended before are acknowledged, so no fence can remove them.
- **T4** The outcome of a compare-and-set whose answer was lost is read from the record. The ledger that it lists is
  deleted only once the record shows that the ledger will never be listed.
- **T5** A segment is added with the number ``next_segment``, which then grows. So an unlisted ledger with a lower
  number never becomes listed, and may be deleted; the same holds for any unlisted ledger of a sealed log.
- **T6** Ledgers are removed from the list first and deleted then; ``pending_deletes`` names those in between.
- **T7** The first record that is kept never moves backwards.
- **T8** Records after the oldest checkpoint are kept. One compare-and-set lists a checkpoint and drops the records that
  it covers. Its blob is closed before that, and the record names the blob before its first byte is written. So a later
  owner deletes the blob if it is never listed.
- **T9** Records from the bound of a durable subscription on are kept. The bound is listed before the subscription's
  cursor exists, and lowered before the cursor moves backwards. It is raised only to a record before which the cursor
  has durably acknowledged all records, and only by the subscription's present owner; a new owner lists its epoch first.
  So a cursor whose uid the log's record does not name will never be named, and may be deleted.
- **T10** Records after a cut that dropped some have a higher generation. A log with subscriptions is not cut.
- **T11** A sealed log is not taken over, and its record names no further ledgers.
- **T12** A blob's description names the epoch of its writer, and the record names a blob first while it has that epoch.
  So a blob of an earlier epoch that the record does not name will never be named, and may be deleted. Ledgers of a list
  whose record is gone are kept: the record may be restored, or made again from them.
- **T13** A log gets another name by one change of both names, after its writer was fenced. Its uid stays the same. An
  owner operates on the list of its uid alone, whatever list has the name then.
- **T14** The record of a log that is deleted says so before anything of the log is deleted. From then on the log exists
  only for a deletion that continues this one, because a reader must not take its end for that of a sealed log.
- **T15** A writer recovers a segment of its own only after its ledger ended because too few bookies answered, the
  metadata store did not, or the client was interrupted, while the record has its epoch, and unless another client has
  fenced the ledger: a foreign fence always ends the writer. A ledger that is closed where its writer was about to close
  it counts as closed by the writer, if the answer was lost. Records that it appended and that the recovered segment
  does not hold begin the next segment, under the same numbers. A transaction of which the segment holds only a part
  counts as not held.
- **T16** Closed segments move from the record to pages, which never change. A page is written before the record that
  names it, and its name has the number of the first segment that this record adds. So a page that the record does not
  name will never be named if its number is below ``next_segment``, or if the log is sealed, and may be removed. The
  same holds for sets of bounds. A reader that finds no page of a record that it read before reads the record again.
- **T17** Bounds that have records of their own are changed by compare-and-set of these. After one was added, claimed or
  lowered, the list's record is changed (``admissions``), and only then the cursor opens or moves backwards. An
  operation that drops records, or renames or deletes the log, reads the record, then all bounds, and then changes the
  record by compare-and-set. So either the operation has seen the bound, or a higher one to which its owner has raised
  it since; or the cursor begins with the records that are left.
- **T18** A log adopts *detached* ledgers, which other processes filled and closed, by one compare-and-set. From then on
  the record names all ledgers of one commit of a query, in order, after the segments before. It has a new epoch, after
  every open segment was fenced (T2), and the number of the commit as the query's last one, which was lower before. So a
  commit is made once: the record shows whether a commit took effect whose answer was lost, and the same commit changes
  nothing a second time. A list forgets a query that makes no commit for long; no ledger is listed twice even then.
- **T19** A detached ledger names its query and commit. So one that no record names will never be named once the query's
  last commit is a later one, the log is sealed, or its deletion was begun, and may be deleted then. So may one whose
  commit is given up: a compare-and-set adds it to ``pending_deletes`` first, and no commit lists a ledger that is
  there. A commit that is under way then has listed it before, or does not take effect.
- **T20** A merge lists one ledger in place of consecutive closed segments of one generation, its *members*, by one
  compare-and-set. This changes nothing if the record does not list all members as they were copied, because of a
  truncation, a cut or another merge. The ledger holds the records of the members under the same sequence numbers, and
  has the number of the last member. So a position that names a member still names its record, by the sequence number.
- **T21** A run of merges begins by a compare-and-set that gives it a number, higher than those before; each of its
  ledgers names it. A merge takes effect only while the record has that number as the last one, and the log is not
  sealed. So a ledger of a merge that no record names will never be named once a later run has begun, or the log is
  sealed, and may be deleted then (as T19 says of commits).
- **T22** The record names the members of a merge in a page, with a time. Their ledgers are deleted only after that,
  so a reader that has opened one reads it to its end. A reader that does not find a ledger reads the record again, and
  continues by the sequence number in the ledger that is listed then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

from pybk.errors import (
    IllegalOperationError,
    LogExistsError,
    LogFencedError,
    LogSealedError,
    NoSuchLedgerError,
    NoSuchLogError,
    UsageError,
)
from pybk.streams.list_record import (
    LIST_FORMAT,
    MERGES,
    QUERY_IDLE_SECONDS,
    SEQ_MAX,
    Bounds,
    Checkpoint,
    CursorBound,
    Detached,
    ListKind,
    ListRecord,
    Page,
    Replaced,
    Rows,
    Segment,
    SegmentEnd,
    bound_of,
    claimed,
    in_order,
    needing,
    new_list,
    page_of,
    subscribed,
    title_of,
    unsubscribed,
)
from pybk.values import FrozenDict

T = TypeVar("T")

DISCARDED_MAX: Final = 1000
"""The most ledgers that are named at a time among those to be deleted, which takes 20 bytes of the record for each."""


class PageGoneError(Exception):
    """A page that a record names does not exist, so the record has changed since it was read."""


class ReadList(NamedTuple):
    """Read the present record, or that of another name. Result: ``Found``, or None if there is no such list."""

    other: str | None = None


class Found(NamedTuple):
    """A record as it was read.

    Attributes:
        record: The record.
        version: The version that the next ``WriteList`` names.
        page_segments: The number of segments of a page, if records of format 2 may be written; else 0.
    """

    record: ListRecord
    version: int
    page_segments: int = 0


class WriteList(NamedTuple):
    """Replace the record if it has a version; None creates it.

    Result: ``Written``; ``CONFLICT``; or ``UNKNOWN`` if the answer was lost; the write may then take effect as long as
    the record has this version.
    """

    record: ListRecord
    version: int | None


class RemoveList(NamedTuple):
    """Remove the record if it has a version. Result: as for ``WriteList``."""

    version: int


class Written(NamedTuple):
    """The record was written; its new version."""

    version: int


class Conflict(NamedTuple):
    """The record has another version; nothing was written."""


class Unknown(NamedTuple):
    """The outcome is unknown: the record may or may not have been written."""


CONFLICT: Final = Conflict()
UNKNOWN: Final = Unknown()


class MoveList(NamedTuple):
    """Remove the record if it has a version, and create ``record`` under the name in it, as one change.

    Result: as for ``WriteList``; ``CONFLICT`` also if there is a record of that name.
    """

    record: ListRecord
    version: int


class CreateLedger(NamedTuple):
    """Create the ledger of a segment, with a header entry, both durable. Result: its id.

    Attributes:
        number: The segment's number.
        epoch: The epoch of its writer.
        generation: The generation of its records.
        predecessor: The ledger of the segment before it; None for the first.
        when_full: Whether it is created even if a store is short of space, because a log is taken over to truncate it.
    """

    number: int
    epoch: int
    generation: int
    predecessor: int | None
    when_full: bool


class RecoverLedger(NamedTuple):
    """Fence the writer of a segment's ledger, and close it.

    Result: its ``SegmentEnd``, without records unless ``counts``; None if the ledger was deleted, because the record
    does not list it any more.
    """

    segment: Segment
    counts: bool = True
    """True to count the ledger's records, which reads those at its beginning and its end."""


class SwitchTo(NamedTuple):
    """Append further records to this segment, once those of the one before are acknowledged (T3). Result: None."""

    segment: Segment


class CloseLedger(NamedTuple):
    """Wait for what this writer has appended to a segment, and close its ledger.

    Result: its ``SegmentEnd``; ``LOST`` if the ledger's writer has ended because bookies or the metadata store did not
    answer.
    """

    segment: Segment


class Lost(NamedTuple):
    """The writer of a segment's ledger has ended because bookies or metadata store were away; the end is not known."""


LOST: Final = Lost()


class RecoverOwn(NamedTuple):
    """Close the ledger of a lost segment of this writer, by recovery (T15). Result: its ``SegmentEnd``.

    It raises LogFencedError if another client has begun to recover the ledger, or closed or deleted it.
    """

    segment: Segment


class CheckDetached(NamedTuple):
    """Check that a ledger is closed and is the one that a commit of a query describes. Result: whether it exists.

    Attributes:
        ledger: The ledger, as its writer described it.
        query: The query.
        epoch: The number of the commit.
    """

    ledger: Detached
    query: str
    epoch: int


class DeleteLedger(NamedTuple):
    """Delete a ledger that is not listed. Result: whether it no longer exists; False means to try again later."""

    ledger_id: int


class ReadPage(NamedTuple):
    """Read a page. Result: its segments; None if there is no page of that name."""

    name: str


class WritePage(NamedTuple):
    """Create a page under a name that nothing else has, which begins with a number (T16). Result: the name."""

    number: int
    rows: Rows


class RemovePage(NamedTuple):
    """Remove a page that the record does not name and never will. Result: None; it may be left to ``SweepParts``."""

    name: str


class SweepParts(NamedTuple):
    """Remove pages and sets of bounds of the list that its record will not name any more (T16). Result: None.

    A part that cannot be removed now is left.

    Attributes:
        kept: Names of parts that are not removed.
        below: The bound on the numbers of removed parts, exclusive.
    """

    kept: frozenset[str]
    below: int


class ReadBounds(NamedTuple):
    """Read the bounds of all subscriptions. Result: ``Bounds``."""

    bound_set: str


class ReadShard(NamedTuple):
    """Read that record of a set which has the bound of a subscription. Result: ``Shard``."""

    bound_set: str
    cursor: str


class Shard(NamedTuple):
    """Some bounds, and the version that the next ``WriteShard`` names; None if there is no such record yet."""

    bounds: Bounds
    version: int | None


class WriteShard(NamedTuple):
    """Replace that record of a set which has the bound of a subscription. Result: as for ``WriteList``."""

    bound_set: str
    cursor: str
    bounds: Bounds
    version: int | None


class WriteBounds(NamedTuple):
    """Create a set of bounds under a name that nothing else has, which begins with a number. Result: the name."""

    number: int
    bounds: Bounds


Step = (
    ReadList
    | WriteList
    | RemoveList
    | MoveList
    | CreateLedger
    | RecoverLedger
    | SwitchTo
    | CloseLedger
    | RecoverOwn
    | CheckDetached
    | DeleteLedger
    | ReadPage
    | WritePage
    | RemovePage
    | SweepParts
    | ReadBounds
    | ReadShard
    | WriteShard
    | WriteBounds
)
Steps = Generator[Step, Any, T]
Clock = Callable[[], int]


class Owned(NamedTuple):
    """The result of a take-over, a roll or a cut.

    Attributes:
        record: The record that listed the segment first.
        segment: The open segment that the writer appends to.
    """

    record: ListRecord
    segment: Segment


class Adopted(NamedTuple):
    """The result of a commit.

    Attributes:
        record: The record after it.
        is_new: Whether this call has committed it, as far as is known; False if it was committed before.
    """

    record: ListRecord
    is_new: bool


def create(
    name: str, kind: ListKind, uid: bytes, start_seq: int, properties: Mapping[str, str] = FrozenDict({})
) -> Steps[ListRecord]:
    """Create a list without segments, unless it exists; return the record that exists then."""
    while True:
        found: Found | None = yield ReadList()
        if found is not None:
            return found.record
        yield WriteList(new_list(name, kind, uid, start_seq).with_properties(properties), None)


def take_over(name: str, now_ns: Clock) -> Steps[Owned]:
    """Become the writer: fence the one before, list a new ledger under a new epoch (rules T1, T2).

    Raises:
        NoSuchLogError: The list does not exist.
        LogSealedError: The log has ended for good.
    """
    while True:
        found = yield from _read(name)
        record = found.record
        if record.sealed:
            raise LogSealedError(f"log {name!r} was sealed after record {record.end_seq - 1}; it takes no more")
        ends = yield from _recovered(record)
        if ends is None:
            continue
        ledger_id = yield from _create_ledger(record, record.epoch + 1)
        changed = record.taken_over(ends, ledger_id, now_ns())
        settled = yield from _list_ledger(ledger_id, changed, found)
        if settled is not None and settled.epoch == changed.epoch:
            yield from _delete_pending(name, settled)
            return Owned(settled, settled.segments[-1])


def adopt(
    name: str,
    ledgers: Sequence[Detached],
    query: str,
    epoch: int,
    now_ns: Clock,
    remember_s: float = QUERY_IDLE_SECONDS,
) -> Steps[Adopted]:
    """Commit detached ledgers of a query: list them after its other segments, unless that is done (rules T2 and T18).

    Args:
        name: The list.
        ledgers: The ledgers, in the order of their records; each has some.
        query: The query.
        epoch: The number of the commit.
        now_ns: Returns the time.
        remember_s: As for ``ListRecord.adopted``.

    Raises:
        NoSuchLogError: The list does not exist.
        LogSealedError: The log has ended for good.
        IllegalOperationError: The feature level does not have adopted ledgers.
        NoSuchLedgerError: One of the ledgers was deleted.
    """
    while True:
        found = yield from _read(name)
        if _has_committed(found.record, query, epoch):
            return Adopted(found.record, is_new=False)
        _check_adopts(found)
        missing = yield from _missing(found.record, ledgers, query, epoch)
        if missing is not None:
            if (yield ReadList()) == found:
                raise NoSuchLedgerError(f"ledger {missing} of commit {epoch} of {query!r} was deleted; write it again")
            continue
        ends = yield from _recovered(found.record)
        if ends is None:
            continue
        record = yield from _in_pages(found.record, found.record.next_segment)
        changed = record.adopted(ends, ledgers, query, epoch, now_ns(), remember_s)
        changed = yield from _paged(changed, found.page_segments, record.next_segment)
        adopted = yield from _commit(changed, found, query, epoch)
        if adopted is not None:
            yield from _delete_pending(name, adopted.record)
            return adopted


def _has_committed(record: ListRecord, query: str, epoch: int) -> bool:
    last = record.last_epoch(query)
    return last is not None and last >= epoch


def _check_adopts(found: Found) -> None:
    """Raise unless a log may adopt ledgers."""
    _check_not_sealed(found.record, "it takes no more")
    _check_level(found, "adopts no ledgers")


def _check_not_sealed(record: ListRecord, what: str) -> None:
    if record.sealed:
        raise LogSealedError(f"log {record.name!r} was sealed after record {record.end_seq - 1}; {what}")


def _check_level(found: Found, what: str) -> None:
    """Raise unless records of format 2 may be written; ``what`` says what a log does not do below their level."""
    if not found.page_segments:
        raise IllegalOperationError(
            f"log {found.record.name!r} {what} below the feature level STREAMS; raise the level: `pybk store "
            "upgrade DIRECTORY --finalize`, or `pybk cluster upgrade URL --finalize`"
        )


def _in_pages(record: ListRecord, number: int) -> Steps[ListRecord]:
    """Return a record in format 2, for which a set of bounds is written; ``number`` as for ``WriteBounds``."""
    if record.format != LIST_FORMAT:
        return record
    bound_set: str = yield WriteBounds(number, record.cursors)
    return record.in_pages(bound_set)


def begin_merges(name: str, now_ns: Clock) -> Steps[int]:
    """Begin a run of merges, which ends those before it; returns its number (rule T21).

    Raises:
        NoSuchLogError: The list does not exist.
        LogSealedError: The log has ended for good.
        IllegalOperationError: The feature level does not have merges.
    """

    def begun(record: ListRecord) -> Steps[ListRecord]:
        _check_not_sealed(record, "its segments are not merged")
        return (yield from _in_pages(record, record.next_segment)).merging(now_ns())

    _check_level((yield from _read(name)), "merges no segments")
    record = yield from _updated(name, begun)
    return record.producers[MERGES].epoch


class Merge(NamedTuple):
    """One merge of a run.

    Attributes:
        run: The number of the run.
        members: The segments that it replaces: consecutive closed ones of one generation.
        row: The segment in their place.
        ledger: Its ledger.
        until_ns: The time until which the ledgers of the members are kept, nanoseconds since 1970.
    """

    run: int
    members: Rows
    row: Segment
    ledger: Detached
    until_ns: int


def merge(name: str, made: Merge) -> Steps[ListRecord | None]:
    """List one ledger in place of several segments (rules T20 to T22).

    Returns:
        The record that lists it. None if the record does not list the members any more; the ledger is deleted then.

    Raises:
        NoSuchLogError: The list does not exist. The ledger is deleted unless it may have been listed, because no sweep
            looks for ledgers of lists that are gone.
        LogFencedError: Another run of merges has begun since.
        LogSealedError: The log has ended for good.
        NoSuchLedgerError: The ledger was deleted.
    """
    may_be_listed = False
    while True:
        try:
            found = yield from _read(name)
        except NoSuchLogError:
            if not may_be_listed:
                yield DeleteLedger(made.ledger.ledger_id)
            raise
        record = found.record
        try:
            pages, rows = yield from _rows_to_merge(found, made.members)
        except PageGoneError:
            continue
        listed = (*rows, *record.segments)
        if any(each.ledger_id == made.ledger.ledger_id for each in listed):
            return record  # by an attempt whose answer was lost
        _check_run(record, made.run)
        if not _has_members(listed, made.members):
            yield DeleteLedger(made.ledger.ledger_id)
            return None
        if not (yield CheckDetached(made.ledger, MERGES, made.run)):
            if (yield ReadList()) == found:
                raise NoSuchLedgerError(f"ledger {made.ledger.ledger_id} of a merge of {_title(record)} was deleted")
            continue
        changed, names = yield from _with_merge(found, made, pages, rows)
        outcome = yield from _settled(changed, found, names)
        if isinstance(outcome, Written):
            for page in pages:
                yield RemovePage(page.name)
            return (yield from _delete_pending(name, changed))
        may_be_listed = may_be_listed or isinstance(outcome, Unknown)


def _rows_to_merge(found: Found, members: Rows) -> Steps[tuple[tuple[Page, ...], Rows]]:
    """Return the pages that a merge of some segments replaces, and the segments of these pages.

    Raises:
        PageGoneError: A page is gone.
    """
    pages = found.record.pages_to_merge(members, found.page_segments)
    segments: list[Segment] = []
    for page in pages:
        rows: Rows | None = yield ReadPage(page.name)
        if rows is None:
            raise PageGoneError
        segments += rows[len(rows) - page.segments :]
    return pages, tuple(segments)


def _has_members(listed: Rows, members: Rows) -> bool:
    """Return whether segments are listed one after the other."""
    at = next((at for at, each in enumerate(listed) if each == members[0]), len(listed))
    return listed[at : at + len(members)] == members


def _check_run(record: ListRecord, run: int) -> None:
    """Raise unless a run of merges may change the list (rule T21)."""
    _check_not_sealed(record, "its segments are not merged")
    if record.last_epoch(MERGES) != run:
        raise LogFencedError(f"another run of merges of {_title(record)} has begun; this one changes nothing any more")


def _with_merge(
    found: Found, made: Merge, pages: tuple[Page, ...], rows: Rows
) -> Steps[tuple[ListRecord, tuple[str, ...]]]:
    """Write the pages of the record after a merge, and return it, with the names of these pages (rule T16).

    Args:
        found: The record before.
        made: The merge.
        pages: The pages that have members.
        rows: The segments of these pages.
    """
    record = found.record
    old: str = yield WritePage(record.next_segment, made.members)
    gone = {each.number for each in made.members}
    others = [each for each in rows if each.number not in gone]
    left = tuple(each for each in others if each.last_seq is not None and each.last_seq >= record.first_seq)
    dropped = [each.ledger_id for each in others if each not in left]  # they were truncated while they were open
    if made.members[-1] in rows:
        left = in_order((*left, made.row))
    new: list[Page] = []
    for low in range(0, len(left), found.page_segments):
        part = left[low : low + found.page_segments]
        name: str = yield WritePage(record.next_segment, part)
        new.append(page_of(name, part))
    changed = record.merged(made.members, made.row, pages, new, Replaced(old, made.until_ns)).dropping(dropped)
    return changed, (old, *(each.name for each in new))


def _settled(changed: ListRecord, found: Found, names: Iterable[str]) -> Steps[Written | Conflict | Unknown]:
    """Write a record, and find out whether that took effect.

    Args:
        changed: The record.
        found: The record before.
        names: The pages that were written for it, which are removed if it takes no effect.

    Returns:
        ``CONFLICT`` if it did not and will not; ``UNKNOWN`` if it may have, before the record was changed again.
    """
    outcome: Conflict | Unknown = CONFLICT
    while True:
        result = yield WriteList(changed, found.version)
        if isinstance(result, Written):
            return result
        if isinstance(result, Unknown):
            outcome = UNKNOWN
        now: Found | None = yield ReadList()
        if now is not None and now.version == found.version:
            continue
        if now is not None or outcome is CONFLICT:  # else the record may have another name, and name them
            named = frozenset[str]() if now is None else named_parts(now.record)
            for name in names:
                if name not in named:
                    yield RemovePage(name)
        return outcome


def release(name: str, now_ns: int) -> Steps[ListRecord]:
    """Delete the ledgers of segments that merges replaced and whose time is over (rule T22).

    The record names them until they are deleted, so that no other operation waits for that.
    """
    record = (yield from _read(name)).record
    for page in record.pages_over(now_ns):
        record = yield from _delete_page(name, record, page)
    return record


def check_new(name: str, ledgers: Iterable[Detached], query: str) -> Steps[None]:
    """Check that a list has none of the ledgers of a commit, if it does not know the query, perhaps any more.

    Raises:
        NoSuchLogError: The list does not exist.
        UsageError: It has one of them.
    """
    while True:
        record = (yield from _read(name)).record
        if record.last_epoch(query) is not None:
            return
        in_pages = yield from _ledgers_of_pages(record)
        if in_pages is not None:
            break
    listed = in_pages.union(record.ledgers, record.pending_deletes)
    for each in ledgers:
        if each.ledger_id in listed:
            raise UsageError(
                f"log {record.name!r} has adopted ledger {each.ledger_id} already, and has forgotten the commit "
                "since, or the commit was given up; do not make it again"
            )


def _missing(record: ListRecord, ledgers: Iterable[Detached], query: str, epoch: int) -> Steps[int | None]:
    """Check ledgers that are to be adopted; returns one that does not exist, or that is given up, or None."""
    for each in ledgers:
        if each.ledger_id in record.pending_deletes or not (yield CheckDetached(each, query, epoch)):
            return each.ledger_id
    return None


def _commit(changed: ListRecord, found: Found, query: str, epoch: int) -> Steps[Adopted | None]:
    """Write the record after a commit, and find out whether it took effect (rule T18).

    Args:
        changed: The record.
        found: The record before.
        query: The query.
        epoch: The number of the commit.

    Returns:
        None if this will never take effect, and the commit was not done otherwise.
    """
    while True:
        result = yield WriteList(changed, found.version)
        if isinstance(result, Written):
            return Adopted(changed, is_new=True)
        now: Found | None = yield ReadList()
        if now is not None and now.version == found.version:
            continue
        yield from _remove_unnamed_pages(changed, found, now)
        if now is None or not _has_committed(now.record, query, epoch):
            return None
        return Adopted(now.record, is_new=now.record.producers[query] == changed.producers[query])


def roll(name: str, epoch: int, current: int, now_ns: Clock) -> Steps[Owned]:
    """Continue in a new ledger: create it, list it, switch to it, and then close the old one; appends need not wait.

    A roll that was interrupted by an error is completed by the next one.

    Args:
        name: The list.
        epoch: The writer's.
        current: The number of the segment that the writer appends to.
        now_ns: Returns the time.

    Raises:
        LogFencedError: Another writer took the log over.
        NoSuchLogError: The log was deleted.
    """
    owned: Owned | None = None
    while owned is None:
        found = yield from _read_owned(name, epoch)
        if any(each.number < current for each in found.record.open_segments):
            yield from close(name, epoch, now_ns, keep=current)
            continue
        if found.record.open_segments and found.record.open_segments[-1].number > current:
            owned = Owned(found.record, found.record.open_segments[-1])
            continue
        ledger_id = yield from _create_ledger(found.record, epoch, when_full=False)
        changed = found.record.rolled(ledger_id, now_ns())
        settled = yield from _list_ledger(ledger_id, changed, found)
        if settled is not None:
            _check_owner(settled, epoch)
            owned = Owned(settled, settled.segments[-1])
    yield SwitchTo(owned.segment)
    yield from close(name, epoch, now_ns, keep=owned.segment.number)
    return owned


def close(name: str, epoch: int, now_ns: Clock, *, keep: int | None = None, seal: bool = False) -> Steps[ListRecord]:
    """Close the open segments except one, and record their ends.

    Args:
        name: The list.
        epoch: The writer's.
        now_ns: Returns the time.
        keep: The number of the segment that stays open; None for none.
        seal: Also end the log for good.

    Raises:
        LogFencedError, NoSuchLogError: As ``roll``.
    """
    found = yield from _read(name)
    if found.record.sealed and found.record.epoch == epoch:
        return found.record  # by an attempt that was interrupted
    _check_owner(found.record, epoch)
    ends: dict[int, SegmentEnd] = {}
    for each in found.record.open_segments:
        if each.number != keep:
            ends[each.number] = yield from _closed(name, epoch, each)

    def closed(record: ListRecord) -> ListRecord:
        if record.sealed and record.epoch == epoch:
            return record  # by an attempt whose answer was lost
        _check_owner(record, epoch)
        changed = record.closed(ends, now_ns())
        return changed.ended() if seal else changed

    record = yield from update(name, closed)
    return (yield from _delete_pending(name, record))


def truncate(name: str, epoch: int, generation: int, seq: int, *, force: bool = False) -> Steps[ListRecord]:
    """Drop the records before ``seq``, and delete the ledgers that hold no others (rule T7).

    Args:
        name: The list.
        epoch: The writer's.
        generation: The generation in which the record before ``seq`` was known to be durable.
        seq: The first record to keep.
        force: Whether to drop records even if subscriptions need them.

    Raises:
        UsageError: A cut has dropped the record before ``seq`` since.
        LogFencedError, NoSuchLogError: As ``roll``.
        TruncateGuardError: A checkpoint or a subscription needs records before ``seq``.
    """

    def truncated(record: ListRecord) -> Steps[ListRecord]:
        _check_epoch(record, epoch)
        if seq > record.kept_of(generation) + 1:
            raise UsageError(f"log {name!r} was cut after record {record.kept_of(generation)}; there is no {seq - 1}")
        bounds = yield from _bounds(record)
        return record.truncated(seq, bounds, (yield from _rows_at(record, seq)), force=force)

    record = yield from _updated(name, truncated)
    return (yield from _delete_pending(name, record))


def cut(name: str, epoch: int, seq: int, now_ns: Clock) -> Steps[Owned]:
    """Drop the records after ``seq``; if there were any, later records have a higher generation.

    Raises:
        UsageError: The log has no record ``seq`` to end with; nothing was dropped.
        LogFencedError, NoSuchLogError: As ``roll``.
    """
    yield from close(name, epoch, now_ns)
    while True:
        found = yield from _read_owned(name, epoch)
        found.record.check_cut(seq, found.record.end_seq, (yield from _bounds(found.record)))
        try:
            rows = yield from _rows_at(found.record, seq)
        except PageGoneError:
            continue
        ledger_id = yield from _create_ledger(found.record, epoch, found.record.generation_after(seq))
        changed = found.record.cut(seq, ledger_id, now_ns(), rows)
        settled = yield from _list_ledger(ledger_id, changed, found)
        if settled is not None:
            _check_owner(settled, epoch)
            yield from _delete_pending(name, settled)
            for page in rows:
                yield RemovePage(page)
            return Owned(settled, settled.segments[-1])


def begin_upload(name: str, epoch: int, ledger_id: int) -> Steps[ListRecord]:
    """Name a new blob in the record, before anything is written to it."""

    def named(record: ListRecord) -> ListRecord:
        _check_owner(record, epoch)
        return record.uploading(ledger_id)

    return (yield from update(name, named))


def give_up_upload(name: str, epoch: int, ledger_id: int) -> Steps[ListRecord]:
    """Remove a blob that was not written to its end, and delete it."""

    def given_up(record: ListRecord) -> ListRecord:
        return record.given_up(ledger_id) if record.epoch == epoch else record

    record = yield from update(name, given_up)
    return (yield from _delete_pending(name, record))


def checkpoint(name: str, epoch: int, made: Checkpoint, keep: int, *, truncate: bool = True) -> Steps[ListRecord]:
    """List a checkpoint whose blob is closed, and drop records that the kept checkpoints do not need (rule T8).

    Without ``truncate``, checkpoints are dropped and records are not.
    """

    def listed(record: ListRecord) -> Steps[ListRecord]:
        _check_owner(record, epoch)
        changed = record.checkpointed(made, keep)
        if not truncate or changed is record:
            return changed
        bounds = yield from _bounds(record)
        seq = min(changed.checkpoints[0].seq + 1, changed.guard_of(bounds))
        return changed.truncated(seq, bounds, (yield from _rows_at(record, seq)))

    record = yield from _updated(name, listed)
    return (yield from _delete_pending(name, record))


def add_cursor(name: str, cursor: CursorBound) -> Steps[CursorBound]:
    """List the bound of a subscription before its cursor exists, unless one of that name is listed (rule T9).

    Returns:
        The bound that is listed under that name then.
    """
    changed = yield from _change_bounds(
        name, cursor.name, lambda record, bounds: subscribed(bounds, *record.left_of((cursor,)))
    )
    assert changed.bound is not None
    return changed.bound


def claim_cursor(name: str, cursor: str, uid: str, epoch: int) -> Steps[CursorBound]:
    """List the epoch of a subscription's new owner; no earlier owner can change its bound then (rule T9).

    A bound that was listed before is then admitted, even if its owner ended in between (rule T17).

    Returns:
        The bound that is listed, raised to the first record that was not dropped.

    Raises:
        LogFencedError: The subscription has a later owner, or was deleted.
    """
    changed = yield from _change_bounds(name, cursor, lambda _, bounds: claimed(bounds, name, cursor, uid, epoch))
    record = yield from _admitted(name, changed)
    assert changed.bound is not None
    return record.left_of((changed.bound,))[0]


def raise_cursor(name: str, cursor: CursorBound) -> Steps[int]:
    """Let the log drop the records before ``cursor.seq``, as far as a subscription needs them (rule T9).

    The caller is its owner, and has acknowledged them durably.

    Returns:
        The bound's record then; later than ``cursor.seq`` if records were dropped.

    Raises:
        LogFencedError: As ``claim_cursor``.
    """
    changed = yield from _change_bounds(name, cursor.name, lambda _, bounds: needing(bounds, name, cursor))
    return max(cursor.seq, changed.record.first_seq)


def lower_cursor(name: str, cursor: CursorBound) -> Steps[int]:
    """Make the log keep records for a subscription from ``cursor.seq`` on again (rules T9 and T17).

    The caller is its owner, whose cursor moves backwards afterwards. Result and errors are those of ``raise_cursor``.
    """
    changed = yield from _change_bounds(name, cursor.name, lambda _, bounds: needing(bounds, name, cursor))
    record = yield from _admitted(name, changed)
    return max(cursor.seq, record.first_seq)


def remove_cursor(name: str, cursor: str, uid: str) -> Steps[None]:
    """Remove a subscription; its cursor is deleted then."""
    yield from _change_bounds(name, cursor, lambda _, bounds: unsubscribed(bounds, cursor, uid))


class _Changed(NamedTuple):
    """The result of a change of bounds.

    Attributes:
        record: The list's record: in format 1 that with the bound, else the one that named the set.
        bound: The subscription's; None if it has none any more.
    """

    record: ListRecord
    bound: CursorBound | None


def _change_bounds(name: str, cursor: str, change: Callable[[ListRecord, Bounds], Bounds]) -> Steps[_Changed]:
    """Write the bounds that ``change`` returns; applied twice, it must have the same result.

    Args:
        name: The list.
        cursor: The subscription whose bound is changed.
        change: Given the list's record, and bounds of which one is the subscription's, returns the next ones.
    """
    unknown = False
    while True:
        found = yield from _read(name)
        record, shard = found.record, Shard(found.record.cursors, None)
        if record.bound_set:
            shard = yield ReadShard(record.bound_set, cursor)
        with _fenced_after(unknown=unknown):
            bounds = change(record, shard.bounds)
        if record.bound_set:
            step: Step = WriteShard(record.bound_set, cursor, bounds, shard.version)
        else:
            record = record.with_cursors(bounds)
            step = WriteList(record, found.version)
        result = Written(found.version) if bounds == shard.bounds else (yield step)
        if isinstance(result, Written):
            return _Changed(record, bound_of(bounds, cursor))
        unknown = unknown or isinstance(result, Unknown)


def _admitted(name: str, changed: _Changed) -> Steps[ListRecord]:
    """Change the list's record after a bound was changed: it makes the log keep records for it (rule T17); returns it.

    Raises:
        LogFencedError: The record names another set of bounds now, because it was made again.
    """
    bound_set = changed.record.bound_set
    if not bound_set:
        return changed.record
    record = yield from update(name, lambda found: found.admitted())
    if record.bound_set != bound_set:
        raise LogFencedError(f"the record of log {name!r} was made again meanwhile; subscribe again")
    return record


def _bounds(record: ListRecord) -> Steps[Bounds]:
    """Return the bounds of all subscriptions that were admitted, as of after the record was read (rule T17)."""
    if not record.admissions:
        return record.cursors
    found: Bounds = yield ReadBounds(record.bound_set)
    return record.left_of(found)


def begin_drop(name: str, locked: Container[str]) -> Steps[Bounds]:
    """Mark the log in its record as deleted, before its subscriptions are deleted (rule T14).

    Args:
        name: The list.
        locked: The subscriptions whose locks the caller holds.

    Returns:
        The bounds of all subscriptions. If one of them is not ``locked``, nothing was changed.
    """
    while True:
        found = yield from _read(name, of_dropped=True)
        bounds = yield from _bounds(found.record)
        if found.record.dropped or any(each.name not in locked for each in bounds):
            return bounds
        if isinstance((yield WriteList(found.record.marked_dropped(), found.version)), Written):
            return bounds


def drop(name: str) -> Steps[None]:
    """Delete a log: fence its writer, empty its record, delete its ledgers, remove the record (rules T6 and T14)."""
    uid = b""
    while True:
        found: Found | None = yield ReadList()
        if found is None or uid not in (b"", found.record.uid):
            return  # also if another log has the name by now
        record = found.record
        uid = record.uid
        if record.open_segments:
            ends = yield from _recovered(record, counts=False)  # so that a log with damaged records can be deleted
            if ends is not None:
                yield WriteList(record.closed(ends, 0).emptied(), found.version)
        elif record.emptied() != record:
            yield WriteList(record.emptied(), found.version)
        elif record.pending_deletes or record.gone_pages:
            record = yield from _delete_pending(name, record)
            if record.pending_deletes or record.gone_pages:
                return
        else:
            yield SweepParts(frozenset(), SEQ_MAX)
            yield RemoveList(found.version)


def rename(name: str, target: str, now_ns: Clock) -> Steps[None]:
    """Fence the writer of a log, and give the log another name (rule T13).

    Raises:
        NoSuchLogError: It does not exist, or was deleted or renamed meanwhile.
        LogExistsError: A log of the new name exists.
        IllegalOperationError: It has subscriptions.
    """
    uid = b""
    while True:
        found: Found | None = yield ReadList()
        other: Found | None = yield ReadList(target)
        if other is not None and other.record.uid == uid:
            return  # by an attempt whose answer was lost
        if found is None or found.record.dropped or uid not in (b"", found.record.uid):
            raise absent(f"log {name!r}", found)
        if other is not None:
            raise LogExistsError(f"log {target!r} exists; delete it, or choose another name for {name!r}")
        uid = found.record.uid
        found.record.check_rename((yield from _bounds(found.record)))
        ends = yield from _recovered(found.record)
        if ends is None:
            continue
        renamed = found.record.closed(ends, now_ns()).renamed(target)
        if isinstance((yield MoveList(renamed, found.version)), Written):
            return


def sweep(
    uid: bytes,
    ledgers: Iterable[tuple[int, int]],
    blobs: Iterable[tuple[int, int]] = (),
    detached: Iterable[tuple[int, str, int]] = (),
) -> Steps[list[int]]:
    """Delete ledgers of a list that are not listed and never will be (rules T5, T12 and T19); return them.

    If the list does not have this name any more, none is deleted, because it may have another name (rule T13).

    Args:
        uid: The uid of the list.
        ledgers: Id and segment number of ledgers whose descriptions name the list.
        blobs: Id and epoch of blobs whose descriptions name the list.
        detached: Id, query and number of the commit of detached ledgers whose descriptions name the list.
    """
    while True:
        found: Found | None = yield ReadList()
        if found is None or found.record.uid != uid:
            return []
        record = found.record
        in_pages = yield from _ledgers_of_pages(record)
        if in_pages is not None:
            break
    below = SEQ_MAX if record.sealed else record.next_segment
    yield SweepParts(named_parts(record), below)
    never_listed = [ledger_id for ledger_id, number in ledgers if record.sealed or number < record.next_segment]
    never_listed += [ledger_id for ledger_id, epoch in blobs if record.sealed or epoch < record.epoch]
    never_listed += [ledger_id for ledger_id, query, epoch in detached if _is_past(record, query, epoch)]
    listed = record.ledgers | in_pages
    return (yield from _deleted(each for each in never_listed if each not in listed))


def discard(name: str, ledgers: Iterable[int]) -> Steps[list[int]]:
    """Delete detached ledgers whose commit is given up, unless the list names them; return them (rule T19).

    A commit of them that is under way, or begins later, does not take effect.

    Args:
        name: The list.
        ledgers: The ledgers.

    Raises:
        NoSuchLogError: The list does not exist.
    """
    given, gone = tuple(ledgers), list[int]()
    for low in range(0, len(given), DISCARDED_MAX):
        gone += yield from _discarded(name, given[low : low + DISCARDED_MAX])
    return gone


def _discarded(name: str, ledgers: Sequence[int]) -> Steps[list[int]]:
    gone = yield from _deleted((yield from _given_up(name, ledgers)))
    yield from update(name, lambda found: found.deleted(gone))
    return gone


def _given_up(name: str, ledgers: Sequence[int]) -> Steps[list[int]]:
    """Name ledgers among those that are to be deleted, unless the list names them; return them."""
    while True:
        found = yield from _read(name)
        in_pages = yield from _ledgers_of_pages(found.record)
        if in_pages is None:
            continue
        listed = found.record.ledgers | in_pages
        unlisted = [each for each in ledgers if each not in listed]
        new = [each for each in unlisted if each not in found.record.pending_deletes]
        if not new or isinstance((yield WriteList(found.record.dropping(new), found.version)), Written):
            return unlisted


def _is_past(record: ListRecord, query: str, epoch: int) -> bool:
    """Return whether a commit of a query can be done no more (rule T19)."""
    last = record.last_epoch(query)
    return record.sealed or record.dropped or (last is not None and epoch < last)


def _ledgers_of_pages(record: ListRecord) -> Steps[set[int] | None]:
    """Return the ledgers of all pages; None if one is not there, because the record has changed."""
    found = set[int]()
    for page in record.pages:
        rows: Rows | None = yield ReadPage(page.name)
        if rows is None:
            return None
        found |= {each.ledger_id for each in rows}
    for name in (*record.gone_pages, *(each.page for each in record.replaced)):
        rows = yield ReadPage(name)
        found |= {each.ledger_id for each in rows or ()}
    return found


def named_parts(record: ListRecord) -> frozenset[str]:
    """Return the names of the pages and of the set of bounds that a record names."""
    pages = (each.name for each in record.pages), record.gone_pages, (each.page for each in record.replaced)
    return frozenset((*chain(*pages), record.bound_set))


def absent(title: str, found: Found | None, remedy: str = "") -> NoSuchLogError:
    """Return the error of a list that does not exist, or that was deleted.

    Args:
        title: The name of the list in errors; see ``names.title_of``.
        found: Its record; None if there is none.
        remedy: The remedy if its record was lost.
    """
    if found is not None and found.record.dropped:
        return NoSuchLogError(f"{title} is being deleted; if that was interrupted, delete it again to complete it")
    return NoSuchLogError(f"{title} does not exist: never created, or deleted or renamed{remedy}")


def update(name: str, change: Callable[[ListRecord], ListRecord], *, of_dropped: bool = False) -> Steps[ListRecord]:
    """Write the record that ``change`` returns; a change that is applied twice must have the same result as once.

    Args:
        name: The list.
        change: Returns the next record.
        of_dropped: Whether to change even a log that is being deleted.

    Returns:
        The record, in which the change has taken effect.
    """

    def changed(record: ListRecord) -> Steps[ListRecord]:
        yield from ()
        return change(record)

    return (yield from _updated(name, changed, of_dropped=of_dropped))


def _updated(
    name: str, change: Callable[[ListRecord], Steps[ListRecord]], *, of_dropped: bool = False
) -> Steps[ListRecord]:
    """Write the record that ``change`` returns, as ``update`` does; it may take steps."""
    unknown = False
    while True:
        found = yield from _read(name, of_dropped=of_dropped)
        try:
            with _fenced_after(unknown=unknown):
                changed = yield from change(found.record)
        except PageGoneError:
            continue
        if changed == found.record:
            return changed
        result = yield WriteList(changed, found.version)
        if isinstance(result, Written):
            return changed
        unknown = unknown or isinstance(result, Unknown)


@contextmanager
def _fenced_after(*, unknown: bool) -> Iterator[None]:
    """Have a LogFencedError say whether an attempt before it may have been done."""
    try:
        yield
    except LogFencedError as error:
        error.outcome_unknown = unknown
        raise


def _read(name: str, *, of_dropped: bool = False) -> Steps[Found]:
    found: Found | None = yield ReadList()
    if found is None or (found.record.dropped and not of_dropped):
        raise absent(f"log {name!r}", found)
    return found


def _read_owned(name: str, epoch: int) -> Steps[Found]:
    found = yield from _read(name)
    _check_owner(found.record, epoch)
    return found


def _check_owner(record: ListRecord, epoch: int) -> None:
    _check_epoch(record, epoch)
    if record.sealed:
        raise LogFencedError(f"log {record.name!r} was sealed; it takes no more records")


def _check_epoch(record: ListRecord, epoch: int) -> None:
    if record.epoch != epoch:
        raise LogFencedError(
            f"{_title(record)} was taken over by another owner, of epoch {record.epoch}; this one, of epoch {epoch}, "
            "can change nothing any more: open it again, if this process should have it"
        )


def _title(record: ListRecord) -> str:
    return title_of(record.name, of_cursor=record.kind is ListKind.CURSOR)


def _recovered(record: ListRecord, *, counts: bool = True) -> Steps[dict[int, SegmentEnd] | None]:
    """Fence the writer of every open segment, the older first (rule T2); None if the record has changed since."""
    ends = {}
    for each in record.open_segments:
        end: SegmentEnd | None = yield RecoverLedger(each, counts)
        if end is None:
            return None
        ends[each.number] = end
    return ends


def _closed(name: str, epoch: int, segment: Segment) -> Steps[SegmentEnd]:
    """Close a segment of this writer; one that was lost is recovered, while the log is this writer's (rule T15)."""
    end: SegmentEnd | Lost = yield CloseLedger(segment)
    if not isinstance(end, Lost):
        return end
    yield from _read_owned(name, epoch)
    recovered: SegmentEnd = yield RecoverOwn(segment)
    return recovered


def held_of(first_seqs: Sequence[int], end_seq: int) -> int:
    """Return how many transactions of a lost segment the list holds (T15); the others are appended again.

    Args:
        first_seqs: The first record of each transaction that was not acknowledged, ascending.
        end_seq: The record before which the list ends after the recovery of the segment; transactions that were cut do
            not count.
    """
    return bisect_left(first_seqs, end_seq)


def _create_ledger(
    record: ListRecord, epoch: int, generation: int | None = None, *, when_full: bool = True
) -> Steps[int]:
    predecessor = record.segments[-1].ledger_id if record.segments else None
    if generation is None:
        generation = record.generation
    ledger_id: int = yield CreateLedger(record.next_segment, epoch, generation, predecessor, when_full)
    return ledger_id


def _list_ledger(ledger_id: int, changed: ListRecord, found: Found) -> Steps[ListRecord | None]:
    """Write the record that lists a new ledger, and find out whether it took effect (rule T4).

    Args:
        ledger_id: The ledger.
        changed: The record that lists it.
        found: The record before.

    Returns:
        The record that lists the ledger; None if it will never be listed, and the ledger is deleted.
    """
    number = changed.segments[-1].number
    changed = yield from _paged(changed, found.page_segments, number)
    while True:
        result = yield WriteList(changed, found.version)
        if isinstance(result, Written):
            return changed
        now: Found | None = yield ReadList()
        if now is not None and (yield from _lists(now.record, number, ledger_id)):
            return now.record
        if now is None or now.version != found.version:
            # The compare-and-set can succeed no more. If it did before, a take-over has removed the empty segment.
            yield DeleteLedger(ledger_id)
            yield from _remove_unnamed_pages(changed, found, now)
            return None


def _remove_unnamed_pages(changed: ListRecord, found: Found, now: Found | None) -> Steps[None]:
    """Remove the pages that were written for a record that cannot be written any more, unless another names them.

    Args:
        changed: The record.
        found: The record before.
        now: The record as it is; None if it is gone, perhaps to another name, where it may name them.
    """
    if now is None:
        return
    named = named_parts(now.record)
    for page in changed.pages[len(found.record.pages) :]:
        if page.name not in named:
            yield RemovePage(page.name)


def _lists(record: ListRecord, number: int, ledger_id: int) -> Steps[bool]:
    """Return whether a record lists a ledger as the segment of a number, or may do so in a page that is gone."""
    page = record.page_numbered(number)
    if page is None:
        return ledger_id in record.ledgers
    rows: Rows | None = yield ReadPage(page.name)
    return rows is None or any(each.ledger_id == ledger_id for each in rows)


def put(record: ListRecord, version: int | None, page_segments: int) -> Steps[bool]:
    """Write a record of format 1 that was made from ledgers, in pages if possible; return whether it was written.

    Args:
        record: The record.
        version: The version of the record that it replaces; None for none.
        page_segments: As in ``Found``.
    """
    changed = yield from _paged(record, page_segments, record.next_segment - 1)
    return isinstance((yield WriteList(changed, version)), Written)


def _paged(record: ListRecord, page_segments: int, number: int) -> Steps[ListRecord]:
    """Write the pages of a record that is written next, and return it, in format 2 (rule T16).

    Args:
        record: The record.
        page_segments: As in ``Found``.
        number: The number of the first segment that the record adds.
    """
    if page_segments:
        record = yield from _in_pages(record, number)
    while page_segments and (rows := record.surplus(page_segments)):
        name: str = yield WritePage(number, rows)
        record = record.with_page(name, rows)
    return record


def _rows_at(record: ListRecord, seq: int) -> Steps[Mapping[str, Rows]]:
    """Return the segments of the page that has a record, by its name; empty if it is in no page.

    Raises:
        PageGoneError: The page is gone.
    """
    page = record.page_of(seq)
    if page is None:
        return {}
    rows: Rows | None = yield ReadPage(page.name)
    if rows is None:
        raise PageGoneError
    return {page.name: rows}


def _delete_pending(name: str, record: ListRecord) -> Steps[ListRecord]:
    """Delete the ledgers that were removed from the list, and forget those that are gone (rule T6)."""
    gone = yield from _deleted(record.pending_deletes)
    if gone:
        record = yield from update(name, lambda found: found.deleted(gone), of_dropped=record.dropped)
    for page in record.gone_pages:
        record = yield from _delete_page(name, record, page)
    return record


def _delete_page(name: str, record: ListRecord, page: str) -> Steps[ListRecord]:
    """Delete the ledgers of a page that was removed from the list, or whose time is over, and then the page."""
    rows: Rows | None = yield ReadPage(page)
    ledgers = [each.ledger_id for each in rows or ()]
    gone = set((yield from _deleted(ledgers)))
    left = [each for each in ledgers if each not in gone]
    record = yield from update(name, lambda found: found.without_page(page, left), of_dropped=record.dropped)
    yield RemovePage(page)
    return record


def _deleted(ledger_ids: Iterable[int]) -> Steps[list[int]]:
    gone = []
    for each in ledger_ids:
        if (yield DeleteLedger(each)):
            gone.append(each)  # noqa: PERF401  # a comprehension cannot yield
    return gone
