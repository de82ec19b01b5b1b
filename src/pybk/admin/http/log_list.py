"""The facts of named logs in their records; nothing is read from their ledgers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from pybk.backend import LedgerBackend
from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.streams.ledger_steps import bounds_of
from pybk.streams.list_record import ListKind, ListRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionInfo:
    """A durable subscription of a log.

    Attributes:
        name: Its name.
        needs_from: The first record that it may need: it has acknowledged all earlier ones, and maybe later ones.
        backlog_max: The most records of the log's closed ledgers that it has not acknowledged.
    """

    name: str
    needs_from: int
    backlog_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """A ledger of a log.

    Attributes:
        ledger_id: The ledger.
        first_seq: Its first record; null if it is not known yet.
        last_seq: Its last record; null while it is open, or if it has none.
        bytes: Its payload bytes; 0 while it is open.
        created_ns: The time when it was added, nanoseconds since 1970.
        closed_ns: The time when it was closed, nanoseconds since 1970; 0 while it is open.
    """

    ledger_id: int
    first_seq: int | None
    last_seq: int | None
    bytes: int
    created_ns: int
    closed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogInfo:
    """The facts of a named log in its record; nothing is read from its ledgers.

    Attributes:
        name: Its name.
        first_seq: Its first record.
        end_seq: The sequence number after the last record of its closed ledgers.
        bytes: Payload bytes of its closed ledgers.
        ledgers: The number of its ledgers.
        open: Whether its last ledger is open: it has records after ``end_seq`` that are not counted here.
        sealed: Whether it has ended for good.
        subscriptions: Its durable subscriptions.
        trouble: The reason why its record cannot be used, in which case the rest is empty; empty if it can.
    """

    name: str
    first_seq: int = 0
    end_seq: int = 0
    bytes: int = 0
    ledgers: int = 0
    open: bool = False
    sealed: bool = False
    subscriptions: tuple[SubscriptionInfo, ...] = ()
    trouble: str = ""


def log_names(manager: LedgerManager, contains: str = "") -> list[str]:
    """Return the names of the logs, in order, whose names contain a text, in letters of any case."""
    all_names = (each.partition("/")[2] for each in backend_of(manager).record_names(f"{ListKind.LOG.group}/"))
    return sorted(each for each in all_names if contains.casefold() in each.casefold())


def log_infos(manager: LedgerManager, names: Iterable[str]) -> Iterator[LogInfo]:
    """Yield the facts of logs in their records; a log that does not exist is left out."""
    for name in names:
        if (found := log_info(manager, name)) is not None:
            yield found[0]


def log_info(
    manager: LedgerManager, name: str, segments_max: int = 0
) -> tuple[LogInfo, tuple[SegmentInfo, ...]] | None:
    """Return the facts of a log in its record, and its newest ledgers; None if it does not exist.

    Args:
        manager: The manager.
        name: The name of the log.
        segments_max: The most ledgers that are returned, of those that the record itself has.
    """
    backend = backend_of(manager)
    kept = backend.read_record(f"{ListKind.LOG.group}/{name}")
    if kept is None or kept.value is None:
        return None
    try:
        record = ListRecord.decode(kept.value, where=f"the record of log {name!r}")
        return None if record.dropped else (_info(backend, record), _segments(record, segments_max))
    except (CorruptError, UnsupportedFormatError) as error:
        return LogInfo(name=name, trouble=str(error)), ()


def _info(backend: LedgerBackend, record: ListRecord) -> LogInfo:
    end = max(record.end_seq, record.first_seq)
    return LogInfo(
        name=record.name,
        first_seq=record.first_seq,
        end_seq=end,
        bytes=record.nbytes,
        ledgers=record.segment_count,
        open=bool(record.open_segments),
        sealed=record.sealed,
        subscriptions=tuple(
            SubscriptionInfo(name=each.name, needs_from=each.seq, backlog_max=max(0, end - each.seq))
            for each in bounds_of(backend, record)
        ),
    )


def _segments(record: ListRecord, most: int) -> tuple[SegmentInfo, ...]:
    return tuple(
        SegmentInfo(
            ledger_id=each.ledger_id,
            first_seq=each.first_seq,
            last_seq=each.last_seq,
            bytes=each.nbytes,
            created_ns=each.created_ns,
            closed_ns=each.closed_ns,
        )
        for each in islice(reversed(record.segments), most)
    )
