"""Ledger lists: in which order the ledgers of a log are created, listed, fenced, closed and deleted.

A log is longer than a ledger, and outlives its writers. Its ledgers are listed in one record (``list_record``), which
is changed by compare-and-set. Each operation here is a generator: it yields steps and is sent their results, and does
no input or output itself. ``pybk.streams.ledger_steps`` performs the steps with a ledger manager; the simulator in the
tests performs them in every order that faults allow.

Rules, which the steps' order keeps:

- **T1** A writer appends to a ledger only after the compare-and-set that lists it has succeeded.
- **T2** A take-over first fences every open segment, which are at most two, because a roll overlaps them. Then it
  creates a ledger, and its compare-and-set makes it the owner: the epoch grows.
- **T3** Each segment begins with the record after its predecessor's last one: a writer switches only when everything
  that it appended before is acknowledged, so no fence can take it away.
- **T4** The outcome of a compare-and-set whose answer was lost is read from the record. The ledger that it lists is
  deleted only once the record shows that it never will be listed.
- **T5** A segment is added with the number ``next_segment``, which then grows. So an unlisted ledger with a lower
  number never becomes listed, and may be deleted; nor does any unlisted ledger of a sealed log.
- **T6** Ledgers are removed from the list first and deleted then; ``pending_deletes`` names those in between.
- **T7** The first record that is kept never moves backwards.
- **T8** Records after the oldest checkpoint are kept. One compare-and-set lists a checkpoint and drops what it covers.
  Its blob is closed before, and is named in the record from its beginning, so that a later owner deletes it if it is
  never listed.
- **T9** Records from the bound of a durable subscription on are kept. The bound is listed before the subscription's
  cursor exists, and lowered before the cursor moves backwards. It is raised only to a record before which the cursor
  has durably acknowledged all, and only by the subscription's present owner: a new one lists its epoch first. So a
  cursor whose uid the log's record does not name never will be named, and may be deleted.
- **T10** Records after a cut that dropped some have a higher generation. A log with subscriptions is not cut.
- **T11** A sealed log is not taken over, and its record names no further ledgers.
- **T12** A blob's description names the epoch of its writer, and the record names a blob first while it has that epoch.
  So a blob of an earlier epoch that the record does not name never will be named, and may be deleted. Ledgers of a list
  whose record is gone are kept: the record may be restored, or made again from them.
- **T13** A log gets another name by one change of both names, after its writer was fenced. Its uid stays the same. An
  owner operates on the list of its uid alone, whatever list has the name then.
- **T14** The record of a log that is deleted says so before anything of the log is deleted. From then on the log exists
  for nobody but those who delete what is left, so that no reader takes its end for that of a sealed log.
- **T15** A writer recovers a segment of its own only after its ledger ended because too few bookies answered, the
  metadata store did not, or the client was interrupted, while the record has its epoch, and unless somebody else has
  fenced the ledger: a foreign fence always ends it. A ledger that is closed where its writer was about to close it
  counts as closed by the writer, if the answer was lost. What it appended and the recovered segment does not hold
  follows in the next segment, first and under the same numbers; a transaction of which a part was kept counts as one
  that was not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from pybk.errors import LogExistsError, LogFencedError, LogSealedError, NoSuchLogError, UsageError
from pybk.frozen_dict import FrozenDict
from pybk.streams.list_record import Checkpoint, CursorBound, ListKind, ListRecord, Segment, SegmentEnd, new_list
from pybk.streams.names import title_of

T = TypeVar("T")


class ReadList(NamedTuple):
    """Read the record, as of now. Result: ``Found``, or None if there is no such list."""


class Found(NamedTuple):
    """A record and the version that the next ``WriteList`` names."""

    record: ListRecord
    version: int


class WriteList(NamedTuple):
    """Replace the record if it has a version; None creates it.

    Result: ``Written``; ``CONFLICT``; or ``UNKNOWN`` if the answer was lost, so that it may take effect at any time
    while the version stays.
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
    """Whether the record was written is not known."""


CONFLICT: Final = Conflict()
UNKNOWN: Final = Unknown()


class ReadOther(NamedTuple):
    """Read the record of another name, as of now. Result: as for ``ReadList``."""

    name: str


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
        when_full: Whether it is made although a store is short of space, because a log is taken over to truncate it.
    """

    number: int
    epoch: int
    generation: int
    predecessor: int | None
    when_full: bool


class RecoverLedger(NamedTuple):
    """Fence the writer of a segment's ledger, and close it.

    Result: its ``SegmentEnd``; None if the ledger was deleted, because the record does not list it any more.
    """

    segment: Segment


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
    """The writer of a segment's ledger has ended because what it needs did not answer, so the end is not known."""


LOST: Final = Lost()


class RecoverOwn(NamedTuple):
    """Close the ledger of a lost segment of this writer, by recovery (T15). Result: its ``SegmentEnd``.

    It raises LogFencedError if anybody else has begun to recover the ledger, or closed or deleted it.
    """

    segment: Segment


class DeleteLedger(NamedTuple):
    """Delete a ledger that is not listed. Result: whether it is gone; False means to try again some other time."""

    ledger_id: int


Step = (
    ReadList
    | ReadOther
    | WriteList
    | RemoveList
    | MoveList
    | CreateLedger
    | RecoverLedger
    | SwitchTo
    | CloseLedger
    | RecoverOwn
    | DeleteLedger
)
Steps = Generator[Step, Any, T]
Clock = Callable[[], int]


class Owned(NamedTuple):
    """What a take-over, a roll or a cut results in.

    Attributes:
        record: The record that listed the segment first.
        segment: The open segment that the writer appends to.
    """

    record: ListRecord
    segment: Segment


def create(
    name: str, kind: ListKind, uid: bytes, start_seq: int, properties: Mapping[str, str] = FrozenDict({})
) -> Steps[ListRecord]:
    """Create a list without segments, unless it exists; returns the record that exists then."""
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
        settled = yield from _list_ledger(name, ledger_id, changed, found.version)
        if settled is not None and settled.epoch == changed.epoch:
            yield from _delete_pending(name, settled)
            return Owned(settled, settled.segments[-1])


def roll(name: str, epoch: int, current: int, now_ns: Clock) -> Steps[Owned]:
    """Continue in a new ledger: create, list, switch, and only then close the old one, so that appends never wait.

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
        settled = yield from _list_ledger(name, ledger_id, changed, found.version)
        if settled is not None:
            _check_owner(settled, epoch)
            owned = Owned(settled, settled.segments[-1])
    yield SwitchTo(owned.segment)
    yield from close(name, epoch, now_ns, keep=owned.segment.number)
    return owned


def close(name: str, epoch: int, now_ns: Clock, *, keep: int | None = None, seal: bool = False) -> Steps[ListRecord]:
    """Close the open segments but one, and say in the record where they end.

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
        force: Drop records that subscriptions need, too.

    Raises:
        UsageError: A cut has dropped the record before ``seq`` since.
        LogFencedError, NoSuchLogError: As ``roll``.
        TruncateGuardError: A checkpoint or a subscription needs records before ``seq``.
    """

    def truncated(record: ListRecord) -> ListRecord:
        _check_epoch(record, epoch)
        if seq > record.kept_of(generation) + 1:
            raise UsageError(f"log {name!r} was cut after record {record.kept_of(generation)}; there is no {seq - 1}")
        return record.truncated(seq, force=force)

    record = yield from update(name, truncated)
    return (yield from _delete_pending(name, record))


def cut(name: str, epoch: int, seq: int, now_ns: Clock) -> Steps[Owned]:
    """Drop the records after ``seq``; those that follow have a higher generation if there were any.

    Raises:
        UsageError: There is no such record to end with; nothing was dropped.
        LogFencedError, NoSuchLogError: As ``roll``.
    """
    yield from close(name, epoch, now_ns)
    while True:
        found = yield from _read_owned(name, epoch)
        found.record.check_cut(seq, found.record.end_seq)
        ledger_id = yield from _create_ledger(found.record, epoch, found.record.generation_after(seq))
        changed = found.record.cut(seq, ledger_id, now_ns())
        settled = yield from _list_ledger(name, ledger_id, changed, found.version)
        if settled is not None:
            _check_owner(settled, epoch)
            yield from _delete_pending(name, settled)
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
    """List a checkpoint whose blob is closed, and drop what the checkpoints that are kept do not need (rule T8).

    Without ``truncate``, checkpoints are dropped and records are not.
    """

    def listed(record: ListRecord) -> ListRecord:
        _check_owner(record, epoch)
        return record.checkpointed(made, keep, truncate=truncate)

    record = yield from update(name, listed)
    return (yield from _delete_pending(name, record))


def add_cursor(name: str, cursor: CursorBound) -> Steps[CursorBound]:
    """List a subscription before its cursor exists, unless there is one of that name (rule T9).

    Returns:
        What is listed under that name then.
    """
    record = yield from update(name, lambda found: found.subscribed(cursor))
    return next(each for each in record.cursors if each.name == cursor.name)


def claim_cursor(name: str, cursor: str, uid: str, epoch: int) -> Steps[CursorBound]:
    """List the epoch of a subscription's new owner, so that no earlier one changes its bound any more (rule T9).

    Raises:
        LogFencedError: The subscription has a later owner, or was deleted.
    """
    record = yield from update(name, lambda found: found.claimed(cursor, uid, epoch))
    return next(each for each in record.cursors if each.name == cursor)


def move_cursor(name: str, cursor: CursorBound) -> Steps[int]:
    """Change the first record that a subscription needs (rule T9); the caller is its owner.

    Returns:
        The first record that it has then: a later one, if records were dropped.

    Raises:
        LogFencedError: As ``claim_cursor``.
    """
    record = yield from update(name, lambda found: found.needing(cursor))
    return max(cursor.seq, record.first_seq)


def remove_cursor(name: str, cursor: str, uid: str) -> Steps[None]:
    """Remove a subscription; its cursor is deleted then."""
    yield from update(name, lambda found: found.unsubscribed(cursor, uid))


def begin_drop(name: str, locked: Container[str]) -> Steps[ListRecord]:
    """Say in the record that the log is deleted, before its subscriptions are (rule T14).

    Args:
        name: The list.
        locked: The subscriptions whose owners are kept away.

    Returns:
        The record. If it names a subscription that is not ``locked``, nothing was changed.
    """

    def marked(record: ListRecord) -> ListRecord:
        return record.marked_dropped() if all(each.name in locked for each in record.cursors) else record

    return (yield from update(name, marked, of_dropped=True))


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
            ends = yield from _recovered(record)
            if ends is not None:
                yield WriteList(record.closed(ends, 0).emptied(), found.version)
        elif not record.dropped or not record.sealed or record.segments:
            yield WriteList(record.emptied(), found.version)
        elif record.pending_deletes:
            record = yield from _delete_pending(name, record)
            if record.pending_deletes:
                return
        else:
            yield RemoveList(found.version)


def rename(name: str, target: str, now_ns: Clock) -> Steps[None]:
    """Fence the writer of a log, and give the log another name (rule T13).

    Raises:
        NoSuchLogError: It does not exist, or was deleted or renamed meanwhile.
        LogExistsError: There is a log of the new name.
        IllegalOperationError: It has subscriptions.
    """
    uid = b""
    while True:
        found: Found | None = yield ReadList()
        other: Found | None = yield ReadOther(target)
        if other is not None and other.record.uid == uid:
            return  # by an attempt whose answer was lost
        if found is None or found.record.dropped or uid not in (b"", found.record.uid):
            raise absent(f"log {name!r}", found)
        if other is not None:
            raise LogExistsError(f"log {target!r} exists; delete it, or choose another name for {name!r}")
        uid = found.record.uid
        found.record.check_rename()
        ends = yield from _recovered(found.record)
        if ends is None:
            continue
        renamed = found.record.closed(ends, now_ns()).renamed(target)
        if isinstance((yield MoveList(renamed, found.version)), Written):
            return


def sweep(uid: bytes, ledgers: Iterable[tuple[int, int]], blobs: Iterable[tuple[int, int]] = ()) -> Steps[list[int]]:
    """Delete ledgers of a list that are not listed and never will be (rules T5 and T12); returns them.

    None is deleted if the list does not have this name any more, because it may have another one (rule T13).

    Args:
        uid: The list's.
        ledgers: Id and segment number of ledgers whose descriptions name the list.
        blobs: Id and epoch of blobs whose descriptions name the list.
    """
    found: Found | None = yield ReadList()
    if found is None or found.record.uid != uid:
        return []
    record = found.record
    never_listed = [ledger_id for ledger_id, number in ledgers if record.sealed or number < record.next_segment]
    never_listed += [ledger_id for ledger_id, epoch in blobs if record.sealed or epoch < record.epoch]
    return (yield from _deleted(each for each in never_listed if each not in record.ledgers))


def absent(title: str, found: Found | None) -> NoSuchLogError:
    """Return the error of a list that does not exist, or that was deleted.

    Args:
        title: What errors call it; see ``names.title_of``.
        found: Its record, if there is one yet.
    """
    if found is not None and found.record.dropped:
        return NoSuchLogError(f"{title} is being deleted; if that was interrupted, delete it again to complete it")
    return NoSuchLogError(f"{title} does not exist: never created, or deleted or renamed")


def update(name: str, change: Callable[[ListRecord], ListRecord], *, of_dropped: bool = False) -> Steps[ListRecord]:
    """Write what ``change`` makes of the record, which must come to the same if it is applied twice.

    Args:
        name: The list.
        change: Returns the next record.
        of_dropped: Change a log that was deleted, too.

    Returns:
        The record, in which the change has taken effect.
    """
    unknown = False
    while True:
        found = yield from _read(name, of_dropped=of_dropped)
        try:
            changed = change(found.record)
        except LogFencedError as error:
            error.outcome_unknown = unknown
            raise
        if changed == found.record:
            return changed
        result = yield WriteList(changed, found.version)
        if isinstance(result, Written):
            return changed
        unknown = unknown or isinstance(result, Unknown)


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


def _recovered(record: ListRecord) -> Steps[dict[int, SegmentEnd] | None]:
    """Fence the writer of every open segment, the older first (rule T2); None if the record has changed since."""
    ends = {}
    for each in record.open_segments:
        end: SegmentEnd | None = yield RecoverLedger(each)
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
    """Return how many transactions of a lost segment the list holds (rule T15); the others are appended again.

    Args:
        first_seqs: The first record of each transaction that was not acknowledged, ascending.
        end_seq: The record before which the list ends, now that the segment is recovered: transactions that were cut
            do not count.
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


def _list_ledger(name: str, ledger_id: int, changed: ListRecord, version: int) -> Steps[ListRecord | None]:
    """Write the record that lists a new ledger, and find out whether it took effect (rule T4).

    Returns:
        The record that lists the ledger; None if it will never be listed, and the ledger is deleted.
    """
    while True:
        result = yield WriteList(changed, version)
        if isinstance(result, Written):
            return changed
        found: Found | None = yield ReadList()
        if found is not None and ledger_id in found.record.ledgers:
            return found.record
        if found is None or found.version != version:
            # The compare-and-set can succeed no more. If it did before, a take-over has removed the empty segment.
            yield DeleteLedger(ledger_id)
            return None


def _delete_pending(name: str, record: ListRecord) -> Steps[ListRecord]:
    """Delete the ledgers that were removed from the list, and forget those that are gone (rule T6)."""
    gone = yield from _deleted(record.pending_deletes)
    if not gone:
        return record
    return (yield from update(name, lambda found: found.deleted(gone), of_dropped=record.dropped))


def _deleted(ledger_ids: Iterable[int]) -> Steps[list[int]]:
    gone = []
    for each in ledger_ids:
        if (yield DeleteLedger(each)):
            gone.append(each)  # noqa: PERF401  # a comprehension cannot yield
    return gone
