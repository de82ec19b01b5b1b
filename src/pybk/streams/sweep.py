"""Finds ledgers of lists that no list names, because their process died, or the record of the list was lost."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from pybk.credentials import Credentials
from pybk.errors import CorruptError, NoSuchLedgerError, NoSuchLogError, UnauthorizedError
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.streams import ledger_list
from pybk.streams.format import DETACHED_KEY, SEGMENT_KEY, DetachedHeader, SegmentHeader
from pybk.streams.ledger_steps import BLOB_KEY, UNREADABLE, LedgerSteps, names_of
from pybk.streams.list_record import MERGES, ListKind
from pybk.streams.log_settings import LedgerSpec
from pybk.values import decode_json

logger = logging.getLogger(__name__)


class Described(NamedTuple):
    """A ledger of a list, as its description has it.

    Attributes:
        metadata: The metadata of the ledger.
        uid: The uid of the list.
        name: The list's name when the ledger was created.
        epoch: The epoch of its writer, or the number of the commit of a detached ledger.
        header: The header of a segment; None for another.
        covers: The last record that the checkpoint of a blob covers, and its generation; None for another.
        query: The query that wrote a detached ledger; empty for another.
    """

    metadata: LedgerMetadata
    uid: bytes
    name: str
    epoch: int
    header: SegmentHeader | None
    covers: tuple[int, int] | None
    query: str = ""

    @property
    def may_be_adopted(self) -> bool:
        """True for a detached ledger, or one of a merge, that its log may have listed, because it is closed."""
        return bool(self.query) and self.metadata.state is LedgerState.CLOSED


def described_ledgers(manager: LedgerManager, kind: ListKind) -> Iterator[Described]:
    """Yield the ledgers of all lists of a kind, ascending; those whose description is damaged are logged."""
    for metadata in backend_of(manager).ledgers():
        if metadata.ledger_type == kind.value:
            try:
                found = _described(metadata)
            except CorruptError as error:
                logger.warning("%s", error)
            else:
                if found is not None:
                    yield found


def _described(metadata: LedgerMetadata) -> Described | None:
    """Return what a ledger's description says; None if it is not of a list."""
    where = f"the custom metadata of ledger {metadata.ledger_id}"
    segment, detached, blob = (metadata.custom_metadata.get(key) for key in (SEGMENT_KEY, DETACHED_KEY, BLOB_KEY))
    if segment is not None:
        header = SegmentHeader.describes(segment, where=where)
        return Described(metadata, header.uid, header.name, header.epoch, header, None)
    if detached is not None:
        uid, name, query, epoch, *_ = DetachedHeader.describes(detached, where=where)
        return Described(metadata, uid, name, epoch, None, None, query)
    if blob is None:
        return None

    def make(values: dict[str, Any]) -> Described:
        covers = values["seq"], values["generation"]
        return Described(metadata, bytes.fromhex(values["uid"]), values["name"], values["epoch"], None, covers)

    return decode_json(blob, make, where=where)


_LOST: Final[WeakKeyDictionary[LedgerManager, dict[ListKind, frozenset[str]]]] = WeakKeyDictionary()
"""The lists whose records were lost, as of the first look of a manager: only what is on disk when a store is opened can
have lost one."""


def check_not_lost(steps: LedgerSteps) -> None:
    """Raise CorruptError if a list has no record, but ledgers with records, because its record was lost then.

    A new list would hide these records. In a cluster nothing is checked, because other processes write at the same
    time, and the ledgers may be too many; there ``rebuild`` replaces the record of a list that has no records yet.

    Cost: One pass over the metadata of a store's ledgers for each manager and kind of list.
    """
    manager, name, kind = steps.manager, steps.name, steps.spec.kind
    if not backend_of(manager).single_writer or steps.read() is not None:
        return
    lost = _LOST.setdefault(manager, {})
    if kind not in lost:
        lost[kind] = frozenset(_unlisted(manager, steps.spec))
    if name not in lost[kind]:
        return
    ledgers = _unlisted(manager, steps.spec).get(name, [])  # some may have been deleted since
    if ledgers and steps.read() is None:
        raise CorruptError(
            f"{steps.title} has no record, but ledgers with records of it: {', '.join(map(str, ledgers))}"
            f"{steps.lost_remedy()}; to begin anew without them, delete these ledgers first"
        )


def _unlisted(manager: LedgerManager, spec: LedgerSpec) -> dict[str, list[int]]:
    """Return the ledgers that have records and are of a list that has no record under any name, by the list's name."""
    backend = backend_of(manager)
    found: defaultdict[bytes, list[Described]] = defaultdict(list)
    for each in described_ledgers(manager, spec.kind):
        if each.header is None and not each.may_be_adopted:
            continue
        with suppress(NoSuchLedgerError):  # it was deleted meanwhile
            confirmed = backend.confirmed(each.metadata.ledger_id)
            if confirmed is not None and confirmed[0] > 0:  # the first entry is the header
                found[each.uid].append(each)
    if found:
        for name in names_of(manager, spec.kind):
            with suppress(*UNREADABLE):  # the error of such a record says itself what makes it again
                listed = LedgerSteps(manager, name, spec).read()
                if listed is not None:
                    found.pop(listed.record.uid, None)
    lost: defaultdict[str, list[int]] = defaultdict(list)
    for ledgers in found.values():
        for each in ledgers:
            lost[each.name].append(each.metadata.ledger_id)
    return lost


_SEGMENTS: Final[WeakKeyDictionary[LedgerManager, dict[ListKind, dict[bytes, list[tuple[int, int]]]]]] = (
    WeakKeyDictionary()
)
"""The ledgers of the lists of a store, and the numbers of their segments, by the list's uid, as of the first look."""


def sweep_left(steps: LedgerSteps) -> None:
    """Delete the segments of a list in a store that processes left which were killed while they took it over (rule T5).

    Cost: One pass over the metadata of the store's ledgers for each manager and kind of list.
    """
    manager, kind = steps.manager, steps.spec.kind
    found = _SEGMENTS.setdefault(manager, {})
    if kind not in found:
        segments: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for each in described_ledgers(manager, kind):
            if each.header is not None:
                segments[each.uid].append((each.metadata.ledger_id, each.header.number))
        found[kind] = dict(segments)
    uid = steps.existing().record.uid
    steps.perform(ledger_list.sweep(uid, found[kind].get(uid, ())))
    found[kind].pop(uid, None)


def sweep(manager: LedgerManager, spec: LedgerSpec, prefix: str = "") -> list[int]:
    """Delete ledgers that no list of a kind names or ever will (rules T5, T12 and T19).

    Args:
        manager: The manager that has the ledgers.
        spec: The kind of the lists, and their password; ledgers of others are left with a warning in the log of
            ``logging``.
        prefix: Only those of lists whose names begin with it.

    Returns:
        The ledgers that were deleted. Ledgers of lists that do not exist are left, because a lost list can be restored.
    """
    segments: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
    blobs: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
    detached: defaultdict[bytes, list[tuple[int, str, int]]] = defaultdict(list)
    for each in described_ledgers(manager, spec.kind):
        if each.query:
            detached[each.uid].append((each.metadata.ledger_id, each.query, each.epoch))
        elif each.header is None:
            blobs[each.uid].append((each.metadata.ledger_id, each.epoch))
        else:
            segments[each.uid].append((each.metadata.ledger_id, each.header.number))
    deleted: list[int] = []
    for name in names_of(manager, spec.kind, prefix):
        steps = LedgerSteps(manager, name, spec)
        try:
            found = steps.read()
        except UNREADABLE as error:
            logger.warning("%s", error)
        else:
            if found is not None:
                uid = found.record.uid
                deleted += steps.perform(ledger_list.sweep(uid, segments[uid], blobs[uid], detached[uid]))
                if not found.record.dropped:
                    steps.release_replaced(found.record)
    return deleted


def sweep_query(steps: LedgerSteps, query: str) -> list[int]:
    """Delete detached ledgers of earlier commits of a query that its log does not name (rule T19); returns them.

    Cost: Reads the metadata of all ledgers.
    """
    return _sweep_detached(steps, steps.existing().record.uid, query)


def sweep_dropped(steps: LedgerSteps) -> None:
    """Delete the detached ledgers that a log has not adopted, after its deletion was begun (rule T19).

    In a cluster, a log that never adopted any is not swept: it seldom has some, and a listing of all ledgers is long.

    Cost: As ``sweep_query``, for a log that adopted ledgers or is in a store.
    """
    record = steps.existing(of_dropped=True).record
    if record.kind is ListKind.LOG and (record.producers or backend_of(steps.manager).single_writer):
        _sweep_detached(steps, record.uid, None)


def give_up_commits(manager: LedgerManager, given: Credentials, before_ns: int) -> dict[str, list[int]]:
    """Delete detached ledgers that no log names, and that were created by a time: their commits are given up (T19).

    Args:
        manager: The manager that has the logs.
        given: The password or secret of the logs; those that have another one are left, with a warning in the log of
            ``logging``.
        before_ns: The time, nanoseconds since 1970.

    Returns:
        The ledgers that were deleted, by query. Merges are left to ``sweep``.

    Cost: Reads the metadata of all ledgers, and the records and pages of the logs that have such ledgers.
    """
    spec = LedgerSpec(ledger_type=ListKind.LOG, given=given, insecure=True)
    old: defaultdict[bytes, dict[int, str]] = defaultdict(dict)
    for each in described_ledgers(manager, ListKind.LOG):
        if each.query not in ("", MERGES) and each.metadata.creation_time_ns <= before_ns:
            old[each.uid][each.metadata.ledger_id] = each.query
    deleted: defaultdict[str, list[int]] = defaultdict(list)
    for name in names_of(manager, ListKind.LOG) if old else ():
        steps = LedgerSteps(manager, name, spec)
        try:
            steps.pin()
            queries = old.get(steps.existing().record.uid)
            if queries:
                steps.check_password()
                for ledger_id in steps.perform(ledger_list.discard(name, queries)):
                    deleted[queries[ledger_id]].append(ledger_id)
        except (*UNREADABLE, NoSuchLogError, UnauthorizedError) as error:
            logger.warning("commits to log %r are not given up: %s", name, error)
    return dict(deleted)


def _sweep_detached(steps: LedgerSteps, uid: bytes, query: str | None) -> list[int]:
    """Delete the detached ledgers of a query, or of all if it is None, that the list of a uid will never name."""
    ledgers = [
        (each.metadata.ledger_id, each.query, each.epoch)
        for each in described_ledgers(steps.manager, steps.spec.kind)
        if each.uid == uid and each.query and query in (None, each.query)
    ]
    return steps.perform(ledger_list.sweep(uid, (), (), ledgers)) if ledgers else []
