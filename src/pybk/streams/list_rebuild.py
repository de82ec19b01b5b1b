"""Rebuilds the record of a ledger list from the descriptions and the first entries of the list's ledgers.

A writer appends to a ledger only once it is listed (rule T1), so a ledger with records was listed at some time. If two
ledgers hold the same record, the one of the higher generation counts, because a cut dropped the record of the other.

An adopted ledger does not show where in the log it was, nor whether the log has adopted it at all. The same holds for
that of a merge. So a list with such ledgers is not rebuilt, as long as they exist.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from pybk.errors import (
    CorruptError,
    DigestMismatchError,
    IllegalOperationError,
    NoSuchLedgerError,
    NoSuchLogError,
    UsageError,
    VersionConflictError,
)
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.streams.blob import BlobReader
from pybk.streams.format import NOTHING_YET, Highest, SegmentHeader
from pybk.streams.ledger_list import put
from pybk.streams.ledger_steps import LedgerSteps, names_of, page_segments_of, payload_of, segment_end
from pybk.streams.list_record import MERGES, Checkpoint, CursorBound, ListKind, ListRecord, Segment, cursor_list_name
from pybk.streams.log_settings import LedgerSpec
from pybk.streams.sweep import Described, described_ledgers

NOT_RESTORED: Final = (
    "records that were dropped at the beginning or the end are back if their ledgers are still there",
    "followers and standbys begin anew, because nothing says which records were dropped at the end",
    "the texts of checkpoints are empty",
    "settings, properties, retention and the seal are gone",
)
"""The differences between a list that was made again and the lost one, in words."""


_NAMED: Final = 20
"""Ledgers that an error names."""


class RebuiltList(NamedTuple):
    """The result of ``rebuild``.

    Attributes:
        first_seq: The first record; the LSN in a write-ahead log.
        last_seq: The last one.
        ledgers: The ledgers that hold them.
        left_out: Ledgers with records that are not in the rebuilt log; a sweep deletes them.
        checkpoints: For each checkpoint, the last record that it covers.
        not_restored: The differences from the lost list, in words.
    """

    first_seq: int
    last_seq: int
    ledgers: tuple[int, ...]
    left_out: tuple[int, ...]
    checkpoints: tuple[int, ...]
    not_restored: tuple[str, ...]


def rebuild(manager: LedgerManager, name: str, spec: LedgerSpec, first_seq: int | None = None) -> RebuiltList:
    """Rebuild the record of a list. A live writer is fenced.

    Args:
        manager: The manager that has the ledgers.
        name: The name of the list.
        spec: Its kind and password.
        first_seq: The first record to keep; earlier records are given up. None for the first record that the ledgers
            have.

    Raises:
        IllegalOperationError: The record is sound, and the log has or had records.
        NoSuchLogError: No ledger names the list.
        CorruptError: Records are missing, or no ledger shows with which record the log continues; or there are ledgers
            that the log may have adopted.
        UsageError: Ledgers of several lists have this name.
        UnauthorizedError: The password is not that of the ledgers.
    """
    steps = LedgerSteps(manager, name, spec)
    version, empty = _replaced(steps)
    try:
        found = _ledgers_of(manager, name, spec, None if empty is None else empty.uid)
    except NoSuchLogError:
        if empty is not None:
            raise _sound(name) from None
        raise
    if empty is not None and not _is_empty(steps, empty, fence=True):
        raise _sound(name)
    ends: dict[int, Highest] = {}
    segments = [segment for each in found if (segment := _segment_of(steps, each, ends)) is not None]
    kept = _continuous(name, segments, first_seq)
    if kept:
        begin = max(first_seq or 0, kept[0].first_seq or 0)
        end = (kept[-1].last_seq or 0) + 1
    elif first_seq is None:
        raise CorruptError(
            f"log {name!r}: no ledger of it has records, so nothing says which number comes next: give it as the first "
            "one to keep, higher than any before"
        )
    else:
        begin = end = first_seq
    generation = 1 + max(each.header.generation for each in found if each.header is not None)
    checkpoints = _checkpoints_of(steps, found, kept, (generation - 1, begin - 1))
    record = ListRecord(
        name,
        spec.kind,
        found[0].uid,
        begin,
        begin,
        end,
        epoch=1 + max(each.epoch for each in found),
        generation=generation,
        next_segment=1 + max(each.header.number for each in found if each.header is not None),
        cuts=((generation, begin - 1),),
        segments=tuple(kept),
        checkpoints=tuple(checkpoints),
        cursors=tuple(_cursors_of(manager, name, spec, begin)),
        highest=Highest(*map(max, *ends.values(), NOTHING_YET, NOTHING_YET)),
    )
    steps.uid = record.uid
    if not steps.perform(put(record, version, page_segments_of(manager))):
        raise VersionConflictError(f"the record of log {name!r} changed meanwhile; look at it, and try again")
    for segment in () if empty is None else empty.segments:
        steps.delete(segment.ledger_id)
    listed = {each.ledger_id for each in kept}
    return RebuiltList(
        begin,
        end - 1,
        tuple(each.ledger_id for each in kept),
        tuple(each.ledger_id for each in segments if each.ledger_id not in listed),
        tuple(each.seq for each in checkpoints),
        NOT_RESTORED,
    )


def _replaced(steps: LedgerSteps) -> tuple[int | None, ListRecord | None]:
    """Return the version of the record that is to be replaced, None if there is none, and the record if it is sound.

    A sound one is replaced only if the log never had records: an open after the record was lost makes the log anew in a
    cluster, which does not look for its ledgers (``sweep.check_not_lost``).

    Raises:
        IllegalOperationError: It is sound, and the log has or had records.
    """
    found = backend_of(steps.manager).read_record(steps.record_name)
    if found is None:
        return None, None
    with suppress(CorruptError):
        record = ListRecord.decode(found.value, where=f"the record of log {steps.name!r}")
        if not record.dropped:
            steps.all_segments()
        if not _is_empty(steps, record, fence=False):
            raise _sound(steps.name)
        return found.version, record
    return found.version, None


def _is_empty(steps: LedgerSteps, record: ListRecord, *, fence: bool) -> bool:
    """Return whether a list never had a record.

    Args:
        steps: The list's.
        record: The list's.
        fence: Close its ledgers, so that its writer appends no more to them. It rolls only by a change of the record.
    """
    ended = record.sealed or record.dropped or record.generation
    held = record.end_seq > record.start_seq or record.first_seq > record.start_seq
    if ended or held or record.checkpoints or record.uploads:
        return False
    for segment in record.segments:
        try:
            with steps.open_segment(segment, recover=fence) as reader:
                end = segment_end(reader, segment, where=f"{steps.title}, ledger {segment.ledger_id}")
        except NoSuchLedgerError:
            return False
        if end.last_seq is not None:
            return False
    return True


def _sound(name: str) -> IllegalOperationError:
    return IllegalOperationError(f"log {name!r} has a sound record, so it is not rebuilt; open the log")


def _ledgers_of(manager: LedgerManager, name: str, spec: LedgerSpec, but: bytes | None) -> list[Described]:
    """Return the ledgers whose descriptions name the list, segments by number; not those of the list of a uid."""
    by_list: defaultdict[bytes, list[Described]] = defaultdict(list)
    for each in described_ledgers(manager, spec.kind):
        by_list[each.uid].append(each)
    # A log that was renamed has ledgers with either name (rule T13).
    lists = [
        ledgers
        for uid, ledgers in by_list.items()
        if uid != but
        and any(each.name == name for each in ledgers)
        and any(each.header is not None or each.may_be_adopted for each in ledgers)
    ]
    if not lists:
        raise NoSuchLogError(f"no ledger belongs to log {name!r}; check the name, or restore its ledgers")
    if len(lists) > 1:
        which = "; ".join(", ".join(str(each.metadata.ledger_id) for each in ledgers) for ledgers in lists)
        raise UsageError(f"{len(lists)} logs had the name {name!r}, with ledgers {which}; delete those of all but one")
    _check_unlisted(manager, spec, lists[0][0].uid, name)
    _check_ordered(name, [each for each in lists[0] if each.may_be_adopted])
    own = [each for each in lists[0] if not each.query]
    return sorted(own, key=lambda each: 0 if each.header is None else each.header.number)


def _check_ordered(name: str, detached: Sequence[Described]) -> None:
    """Raise CorruptError if the log may have listed detached ledgers."""
    if detached:
        which = ", ".join(f"{each.metadata.ledger_id} ({_purpose_of(each)})" for each in detached[:_NAMED])
        more = f", and {len(detached) - _NAMED} more" if len(detached) > _NAMED else ""
        raise CorruptError(
            f"log {name!r} had ledgers that were written for commits or merges, and they do not say where in the log "
            f"they were: {which}{more}. Restore the log's record from an export or a backup of the metadata; or delete "
            "these ledgers, and make the log again without their records"
        )


def _purpose_of(detached: Described) -> str:
    if detached.query == MERGES:
        return "merged segments"
    return f"commit {detached.epoch} of query {detached.query!r}"


def _check_unlisted(manager: LedgerManager, spec: LedgerSpec, uid: bytes, name: str) -> None:
    """Raise IllegalOperationError if the log was renamed: then a record under another name lists its ledgers."""
    for other in names_of(manager, spec.kind):
        with suppress(CorruptError):
            found = LedgerSteps(manager, other, spec).read()
            if found is not None and found.record.uid == uid and other != name:
                raise IllegalOperationError(f"log {name!r} has the name {other!r} now; open that")


def _segment_of(steps: LedgerSteps, found: Described, ends: dict[int, Highest]) -> Segment | None:
    """Recover a ledger, and return its segment; None if it has no records or was deleted meanwhile."""
    header = found.header
    if header is None:
        return None
    metadata = found.metadata
    segment = Segment(
        header.number, metadata.ledger_id, header.epoch, header.generation, None, created_ns=metadata.creation_time_ns
    )
    try:
        reader = steps.open_segment(segment, recover=True)
    except NoSuchLedgerError:
        return None
    with reader:
        where = f"log {steps.name!r}, ledger {metadata.ledger_id}"
        end = segment_end(reader, segment, where=where)
        if end.first_seq is None:
            return None
        if SegmentHeader.decode(payload_of(reader, 0), where=f"{where} entry 0") != header:
            raise CorruptError(f"{where}: its first entry does not say what its description says; restore its metadata")
    ends[header.number] = end.highest
    return replace(segment, first_seq=end.first_seq, last_seq=end.last_seq, nbytes=end.nbytes)


def _continuous(name: str, segments: Iterable[Segment], first_seq: int | None) -> list[Segment]:
    """Return the segments without what cuts dropped, from a record on.

    Raises:
        CorruptError: Records are missing between them.
    """
    kept: list[Segment] = []
    for each in segments:
        begin = each.first_seq or 0
        while kept and (kept[-1].first_seq or 0) >= begin:
            kept.pop()
        if kept and (kept[-1].last_seq or 0) >= begin:
            kept[-1] = replace(kept[-1], last_seq=begin - 1)
        kept.append(each)
    if first_seq is not None:
        kept = [each for each in kept if (each.last_seq or 0) >= first_seq]
    expected = first_seq
    for each in kept:
        begin = each.first_seq or 0
        if expected is not None and begin > expected:
            raise CorruptError(
                f"log {name!r}: records {expected} to {begin - 1} are in no ledger; restore it, or give up what is "
                f"before record {begin}: make that the first one to keep"
            )
        expected = (each.last_seq or 0) + 1
    return kept


def _checkpoints_of(
    steps: LedgerSteps, found: Iterable[Described], kept: Iterable[Segment], before: tuple[int, int]
) -> list[Checkpoint]:
    """Return the checkpoints whose blobs are whole, whose following records are there, and of which no cut dropped any.

    Args:
        steps: The list's.
        found: Its ledgers.
        kept: Its segments.
        before: The present generation, and the record before the first one.
    """
    checkpoints = []
    for each in found:
        if each.covers is None:
            continue
        seq, generation = each.covers
        holders = [part.generation for part in kept if (part.first_seq or 0) <= seq <= (part.last_seq or -1)]
        if not any(holder <= generation for holder in holders) and (generation, seq) != before:
            continue
        ledger_id = each.metadata.ledger_id
        with suppress(CorruptError, DigestMismatchError, NoSuchLedgerError), BlobReader(steps.open_blob(ledger_id)):
            checkpoints.append(Checkpoint(seq, generation, ledger_id, "", each.metadata.creation_time_ns))
    return sorted(checkpoints, key=lambda each: (each.seq, each.ledger_id))


def _cursors_of(manager: LedgerManager, name: str, spec: LedgerSpec, begin: int) -> Iterator[CursorBound]:
    """Yield the bounds of the subscriptions whose cursors are there; none needs a record before the first.

    A list of another kind has no subscriptions, so no cursor has its name.
    """
    prefix = cursor_list_name(name, "")
    for cursor in names_of(manager, ListKind.CURSOR, prefix) if spec.kind is ListKind.LOG else ():
        found = LedgerSteps(manager, cursor, spec.of_cursors()).read()
        if found is not None and not found.record.sealed:  # one that is sealed is being deleted
            yield CursorBound(cursor.removeprefix(prefix), begin, found.record.uid.hex(), found.record.epoch)
