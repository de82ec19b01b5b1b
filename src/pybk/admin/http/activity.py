"""The routes of what is under way: rates by ledger type and by bookie, free space, named logs, and events.

All but the logs come from what was seen a second ago; the logs come from the metadata store, a page at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Final

from msgspec import Meta

from pybk.admin.http.events import Event
from pybk.admin.http.history import Series
from pybk.admin.http.rates import Load, Rates
from pybk.admin.http.routes import Route, route
from pybk.admin.http.view import View
from pybk.backend.ledger_backend import LedgerBackend
from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.manager.ledger_manager import backend_of
from pybk.operations.cluster_checks import space_by_tiers
from pybk.streams.ledger_steps import bounds_of
from pybk.streams.list_record import ListKind, ListRecord
from pybk.values import INT64_MAX

LOGS_MAX: Final = 200
"""The most logs of a page."""

_ROOT: Final = "/api/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeInfo:
    """The appends to, and reads from, the ledgers of a type.

    Attributes:
        ledger_type: The type; ``.other`` stands for many.
        open: How many are open, or in recovery; null if nobody counts them.
        closed: How many are closed; null if nobody counts them.
        rates: What is appended and read.
    """

    ledger_type: str
    open: int | None
    closed: int | None
    rates: Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class TypePage:
    """The appends and reads of all ledgers.

    Attributes:
        seen_ns: When it was seen, nanoseconds since 1970.
        whose: Whose rates these are: of a ``store``, of the ``bookies`` together, or of this process alone as
            ``client`` of the cluster, because it does not know the HTTP ports of the bookies.
        answering: How many bookies answered; 0 unless the rates are theirs.
        total: The rates of all types.
        types: The types, the busiest first.
    """

    seen_ns: int
    whose: str
    answering: int
    total: Rates
    types: tuple[TypeInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieLoad:
    """The load of a bookie.

    Attributes:
        append_entries: Entries that became durable there, a second.
        append_p99_s: The latency that 99 % of them did not exceed, seconds; null without any.
        sync_p99_s: How long 99 % of the syncs of its log took at most, seconds; null without any.
        limbo_ledgers: How many of its ledgers are in limbo; null if it did not say so.
    """

    append_entries: float
    append_p99_s: float | None
    sync_p99_s: float | None
    limbo_ledgers: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The free space of the devices of a cluster that have the same tiers, or of a device of the store.

    Attributes:
        name: The tiers of the devices, or the directory of the store's.
        free_bytes: How many bytes are free, in all bookies that run.
        capacity_bytes: How many bytes it has, used and free; null if that is not known.
        days_left: In how many days it is full if it fills as of late; null if it does not, or not seen for a minute.
    """

    name: str
    free_bytes: int
    capacity_bytes: int | None
    days_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """Events, in the order in which this process got to know of them.

    Attributes:
        events: The events.
        next: What ``after`` is to get those that come later.
    """

    events: tuple[Event, ...]
    next: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionInfo:
    """A durable subscription of a log.

    Attributes:
        name: Its name.
        needs_from: It has acknowledged all records before this one, and maybe later ones.
        backlog_max: The most records of the log's closed ledgers that it has not acknowledged.
    """

    name: str
    needs_from: int
    backlog_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogInfo:
    """A named log, as its record has it; nothing is read from its ledgers.

    Attributes:
        name: Its name.
        first_seq: Its first record.
        end_seq: The sequence number after the last record of its closed ledgers.
        bytes: Payload bytes of its closed ledgers.
        ledgers: How many ledgers it has.
        open: Whether its last ledger is open: it has records after ``end_seq`` that are not counted here.
        sealed: Whether it has ended for good.
        subscriptions: Its durable subscriptions.
        trouble: Why its record cannot be used, and the rest is empty; empty if it can.
    """

    name: str
    first_seq: int
    end_seq: int
    bytes: int
    ledgers: int
    open: bool
    sealed: bool
    subscriptions: tuple[SubscriptionInfo, ...]
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Named logs by name.

    Attributes:
        logs: The logs.
        next: What ``after`` is for the next page; null at the end.
    """

    logs: tuple[LogInfo, ...]
    next: str | None


@route("GET", f"{_ROOT}/load", cluster=False)
def load(view: View) -> Load:
    """Return what this process alone did in the last second."""
    return view.seen.load


@route("GET", f"{_ROOT}/loads")
def loads(view: View) -> Mapping[str, BookieLoad]:
    """Return what each bookie does, of those whose HTTP ports are known and that answer."""
    return {
        name: BookieLoad(
            append_entries=each.total.append_entries,
            append_p99_s=each.total.append_p99_s,
            sync_p99_s=each.sync_p99_s,
            limbo_ledgers=each.limbo_ledgers,
        )
        for name, each in view.seen.loads.items()
    }


@route("GET", f"{_ROOT}/types", cluster=False)
def types(view: View) -> TypePage:
    """Return what is appended and read, by ledger type."""
    seen = view.seen
    names = dict.fromkeys((*seen.types, *seen.ledgers))
    found = []
    for name in names:
        counts = seen.ledgers.get(name)
        found.append(
            TypeInfo(
                ledger_type=name,
                open=None if counts is None else counts.open,
                closed=None if counts is None else counts.closed,
                rates=seen.types.get(name, Rates()),
            )
        )
    whose = "bookies" if seen.loads else "client" if view.manager.is_cluster else "store"
    return TypePage(seen_ns=seen.seen_ns, whose=whose, answering=len(seen.loads), total=seen.total, types=tuple(found))


@route("GET", f"{_ROOT}/space", cluster=False)
def space(view: View) -> tuple[Space, ...]:
    """Return the free space, by the tiers of a cluster's devices, or by device of a store."""
    seen = view.seen
    found = space_by_tiers(seen.bookies)
    return tuple(
        Space(
            name=name,
            free_bytes=free.free_bytes,
            capacity_bytes=found[name].capacity_bytes if name in found else None,
            days_left=view.history.days_left(name),
        )
        for name, free in sorted(seen.free.items())
    )


@route("GET", f"{_ROOT}/series", cluster=False)
def series(view: View, since: Annotated[int, Meta(ge=0, le=INT64_MAX)] = 0) -> Series:
    """Return rates and latencies of the last quarter of an hour, second by second.

    They begin with the first request to this process. What is read, appended and free is kept also while nobody asks.

    Args:
        since: Only what came after this moment, milliseconds since 1970.
    """
    return view.history.since(since)


@route("GET", f"{_ROOT}/events", cluster=False)
def events(view: View, after: Annotated[int, Meta(ge=0, le=INT64_MAX)] = 0) -> EventPage:
    """Return the last events, at most 200.

    Args:
        after: Only those after this one, by ``number``.
    """
    found = view.events.after(after)
    return EventPage(events=found, next=found[-1].number if found else after)


@route("GET", f"{_ROOT}/logs", cluster=False)
def logs(
    view: View, after: str = "", limit: Annotated[int, Meta(ge=1, le=LOGS_MAX)] = 50, contains: str = ""
) -> LogPage:
    """Return a page of the named logs, with their subscriptions.

    Args:
        after: The last log of the page before.
        limit: How many, 1 to 200.
        contains: Only logs whose names contain this, in letters of any case.
    """
    backend, group = backend_of(view.manager), ListKind.LOG.group
    all_names = (each.partition("/")[2] for each in backend.record_names(f"{group}/"))
    names = sorted(each for each in all_names if contains.casefold() in each.casefold())
    wanted = list(islice((name for name in names if name > after), limit))
    found = []
    for name in wanted:
        record = backend.read_record(f"{group}/{name}")
        if record is not None and record.value is not None:  # it may have been deleted meanwhile
            found += _log_infos(backend, name, record.value)
    more = bool(wanted) and wanted[-1] < names[-1]
    return LogPage(logs=tuple(found), next=wanted[-1] if more else None)


def _log_infos(backend: LedgerBackend, name: str, value: bytes) -> list[LogInfo]:
    """Return what the record of a log says; nothing of a log that was deleted."""
    try:
        record = ListRecord.decode(value, where=f"the record of log {name!r}")
        bounds = bounds_of(backend, record)
    except (CorruptError, UnsupportedFormatError) as error:
        return [
            LogInfo(
                name=name,
                first_seq=0,
                end_seq=0,
                bytes=0,
                ledgers=0,
                open=False,
                sealed=False,
                subscriptions=(),
                trouble=str(error),
            )
        ]
    if record.dropped:
        return []
    end = max(record.end_seq, record.first_seq)
    return [
        LogInfo(
            name=name,
            first_seq=record.first_seq,
            end_seq=end,
            bytes=record.nbytes,
            ledgers=record.segment_count,
            open=bool(record.open_segments),
            sealed=record.sealed,
            subscriptions=tuple(
                SubscriptionInfo(name=each.name, needs_from=each.seq, backlog_max=max(0, end - each.seq))
                for each in bounds
            ),
        )
    ]


ACTIVITY: Final[tuple[Route, ...]] = (load, loads, types, space, series, events, logs)
"""The routes of this module."""
