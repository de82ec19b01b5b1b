"""The routes of what is under way: rates by ledger type and by bookie, free space, and events.

All come from what was seen a second ago.
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
        whose: The owner of the rates: a ``store``, the ``bookies`` together, or this process alone as
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
        process: What its process uses; null if it did not say so.
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
            process=each.process,
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


ACTIVITY: Final[tuple[Route, ...]] = (load, loads, types, space, series, events)
"""The routes of this module."""
