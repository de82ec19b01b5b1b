"""The routes of current activity: rates by ledger type and by bookie, free space, and events.

All values are at most about a second old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from pybk.admin.http.events import Event
from pybk.admin.http.history import Series
from pybk.admin.http.rates import Load, ProcessUse, Rates
from pybk.admin.http.routes import Route, route
from pybk.admin.http.view import View
from pybk.operations.cluster_checks import space_by_tiers
from pybk.values import INT64_MAX

_ROOT: Final = "/api/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeInfo:
    """The appends to, and reads from, the ledgers of a type.

    Attributes:
        ledger_type: The type; ``.other`` for all types without a line of their own.
        open: The number of open ledgers, those in recovery included; null if they are not counted.
        closed: The number of closed ledgers; null if they are not counted.
        rates: The rates of appends and reads.
    """

    ledger_type: str
    open: int | None
    closed: int | None
    rates: Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class TypePage:
    """The appends and reads of all ledgers.

    Attributes:
        seen_ns: The time of the values, nanoseconds since 1970.
        whose: The owner of the rates: a ``store``, the ``bookies`` together, or this process alone as
            ``client`` of the cluster, because it does not know the HTTP ports of the bookies.
        answering: The number of bookies that answered; 0 unless the rates are theirs.
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
        append_entries: Entries that became durable there in a second.
        append_p99_s: The latency that 99 % of them did not exceed, seconds; null without any.
        sync_p99_s: The longest time that 99 % of the syncs of its log took, seconds; null without any.
        limbo_ledgers: The number of its ledgers that are in limbo; null if it did not report it.
        process: The resources that its process uses; null if it did not report them.
    """

    append_entries: float
    append_p99_s: float | None
    sync_p99_s: float | None
    limbo_ledgers: int | None
    process: ProcessUse | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The free space of the devices of a cluster that have the same tiers, or of a device of the store.

    Attributes:
        name: The tiers of the devices, or the directory of the store's.
        free_bytes: The free bytes, of all bookies that run.
        capacity_bytes: All bytes, used and free; null if they are not known.
        days_left: The days until it is full at the present rate; null if it does not fill, or was observed for less
            than a minute.
    """

    name: str
    free_bytes: int
    capacity_bytes: int | None
    days_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """Events, in the order in which this process learned of them.

    Attributes:
        events: The events.
        next: The value of ``after`` for a request for later events.
    """

    events: tuple[Event, ...]
    next: int


@route("GET", f"{_ROOT}/load", cluster=False)
def load(view: View) -> Load:
    """Return the load of this process in the last second."""
    return view.seen().load


@route("GET", f"{_ROOT}/loads")
def loads(view: View) -> Mapping[str, BookieLoad]:
    """Return the load of each bookie whose HTTP port is known and answers."""
    return {
        name: BookieLoad(
            append_entries=each.total.append_entries,
            append_p99_s=each.total.append_p99_s,
            sync_p99_s=each.sync_p99_s,
            limbo_ledgers=each.limbo_ledgers,
            process=each.process,
        )
        for name, each in view.seen().loads.items()
    }


@route("GET", f"{_ROOT}/types", cluster=False)
def types(view: View) -> TypePage:
    """Return the rates of appends and reads, by ledger type."""
    seen = view.seen()
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
    seen = view.seen()
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

    They begin with the first request to this process. Rates and free space are recorded even without requests.

    Args:
        since: Only values after this moment, milliseconds since 1970.
    """
    return view.history.since(since)


@route("GET", f"{_ROOT}/events", cluster=False)
def events(view: View, after: Annotated[int, Meta(ge=0, le=INT64_MAX)] = 0) -> EventPage:
    """Return the last events, at most 200.

    Args:
        after: Only events after this one, by ``number``.
    """
    found = view.events.after(after)
    return EventPage(events=found, next=found[-1].number if found else after)


ACTIVITY: Final[tuple[Route, ...]] = (load, loads, types, space, series, events)
"""The routes of this module."""
