"""The routes of the interface, ``/api/v1``; docs/reference/http.md lists them.

Values that are requested often come from ``View.seen()``; other routes read the metadata store, a page at a time.
Nothing here runs in a bookie's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Final

from msgspec import Meta

from pybk.admin.http.activity import ACTIVITY, events, load, series
from pybk.admin.http.json_values import as_body
from pybk.admin.http.logs import LOG_ROUTES
from pybk.admin.http.routes import Route, route
from pybk.admin.http.tags import check_match
from pybk.admin.http.tokens import Scope
from pybk.admin.http.view import View
from pybk.healing.scrub import ScrubStatus
from pybk.healing.scrub_schedule import ScrubKind
from pybk.health import HealthReason
from pybk.ledger.ledger_metadata import LedgerState, LedgerSummary
from pybk.metadata.ledgers import LEDGER_ID_MAX
from pybk.metadata.registration import BOOKIE_ID_BYTES_MAX
from pybk.metadata.settings import NAME_BYTES_MAX, ClusterSettings
from pybk.metadata.underreplication import RepairReason, RepairState, UnderReplicatedLedger
from pybk.operations.cluster_admin import MAINTENANCE_SECONDS_MAX, PAUSE_SECONDS_MAX
from pybk.operations.cluster_checks import BookieStatus, ClusterStatus, DrainProgress, RemovalProof, StopCheck
from pybk.version import __version__

PAGE_MAX: Final = 1000
"""The most entries of a page."""

PageSize = Annotated[int, Meta(ge=1, le=PAGE_MAX)]
BookieName = Annotated[str, Meta(min_length=1, max_length=BOOKIE_ID_BYTES_MAX)]
Person = Annotated[str, Meta(min_length=0, max_length=NAME_BYTES_MAX)]

_ROOT: Final = "/api/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The state of the cluster, or of the store.

    Attributes:
        seen_ns: The time of the values, nanoseconds since 1970.
        name: Its name for people; without a name, the beginning of its id.
        id: Its identity, hexadecimal, which never changes.
        location: The URL of the cluster, or the directory of the store.
        command: The form of commands that reach it; ``COMMAND`` stands for the words after ``pybk``.
        is_cluster: Whether it is a cluster.
        state: The state of this process's manager.
        reasons: The reasons for that state; for a cluster, the reasons for its verdict are in ``cluster``.
        cluster: The state of the cluster; null for a store, or while the state is not known.
        trouble: The reason why ``cluster`` is older than the rest; empty if it is not.
        opens_logs: Whether this interface was given the secret or password of logs, so it can show their records.
    """

    seen_ns: int
    name: str
    id: str
    location: str
    command: str
    is_cluster: bool
    state: str
    reasons: tuple[HealthReason, ...]
    cluster: ClusterStatus | None
    trouble: str
    opens_logs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BookiePage:
    """The bookies of a cluster.

    Attributes:
        seen_ns: The time of the values, nanoseconds since 1970.
        bookies: The bookies.
    """

    seen_ns: int
    bookies: tuple[BookieStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentInfo:
    """A fragment of a ledger.

    Attributes:
        first_entry_id: Its first entry.
        bookies: The names of its bookies.
    """

    first_entry_id: int
    bookies: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerInfo:
    """A ledger.

    Attributes:
        ledger_id: The ledger.
        state: Its state.
        ledger_type: Its type.
        tier: The tier of its entries.
        ensemble_size: Number of bookies in an ensemble.
        write_quorum: Number of bookies that an entry is written to.
        ack_quorum: Number of bookies that must acknowledge an entry.
        created_ns: The creation time, nanoseconds since 1970.
        last_add_confirmed: The last entry that readers may read; null if only its bookies know it.
        length: Its payload bytes up to there; null if they are not known.
        sealed: Whether its end has a seal.
        custom_metadata: The application's metadata, hexadecimal.
        fragments: Its fragments; empty for a ledger of a store.
    """

    ledger_id: int
    state: LedgerState
    ledger_type: str
    tier: str
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    created_ns: int
    last_add_confirmed: int | None
    length: int | None
    sealed: bool
    custom_metadata: Mapping[str, bytes]
    fragments: tuple[FragmentInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPage:
    """Ledgers by ascending id.

    Attributes:
        ledgers: The ledgers.
        next: The value of ``after`` for the next page; null at the end.
    """

    ledgers: tuple[LedgerInfo, ...]
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairInfo:
    """A ledger that waits for its repair.

    Attributes:
        ledger_id: The ledger.
        bookie: The name of the bookie that misses entries, or is to be replaced.
        first_entry_id: The first entry that it may miss.
        reason: The reason.
        state: The state of the repair.
        since_ns: The time of the first report, nanoseconds since 1970; 0 if unknown.
        size_bytes: The bytes to copy, about; 0 if unknown.
        tries: The number of failed repairs.
        error: The error of the last failed repair.
        target: The name of the bookie that takes the copies; empty if any does.
    """

    ledger_id: int
    bookie: str
    first_entry_id: int
    reason: RepairReason
    state: RepairState
    since_ns: int
    size_bytes: int
    tries: int
    error: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPage:
    """The repairs of a cluster, the most urgent first.

    Attributes:
        total: The number of all repairs.
        repairs: The first of them.
        held: The number of further ledgers that have fewer copies than they should, and are not queued yet.
        held_because: The reasons why these are not queued, and until when, a sentence each.
    """

    total: int
    repairs: tuple[RepairInfo, ...]
    held: int
    held_because: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBookie:
    """The bookie of the process that answers, as it sees itself.

    Attributes:
        seen_ns: The time of the values, nanoseconds since 1970.
        name: Its name.
        instance: Its instance, hexadecimal.
        addresses: The addresses at which it serves clients.
        version: Its version of pybk.
        state: Its state.
        reasons: The reasons for that state.
        outstanding_bytes: Bytes that are not durable yet.
        tail_bytes: Bytes of the log that its next start reads.
        free_bytes: Free bytes by directory.
    """

    seen_ns: int
    name: str
    instance: str
    addresses: tuple[str, ...]
    version: str
    state: str
    reasons: tuple[HealthReason, ...]
    outstanding_bytes: int
    tail_bytes: int
    free_bytes: Mapping[str, int]


# ---- the cluster and its bookies ------------------------------------------------------------------------------------


@route("GET", f"{_ROOT}/cluster", cluster=False)
def cluster(view: View) -> Overview:
    """Return the state of the cluster, or of the store."""
    seen = view.seen()
    return Overview(
        seen_ns=seen.seen_ns,
        name=view.name,
        id=view.manager.store_id.hex(),
        location=view.manager.location,
        command=view.command,
        is_cluster=view.manager.is_cluster,
        state=seen.health.state,
        reasons=seen.health.reasons,
        cluster=seen.cluster,
        trouble=seen.trouble,
        opens_logs=bool(view.opens_logs),
    )


@route("GET", f"{_ROOT}/bookies")
def bookies(view: View) -> BookiePage:
    """Return the bookies of the cluster."""
    seen = view.seen()
    return BookiePage(seen_ns=seen.seen_ns, bookies=seen.bookies)


@route("GET", f"{_ROOT}/bookies/{{name}}")
def bookie(view: View, name: BookieName) -> BookieStatus:
    """Return a bookie, even one that was removed.

    Args:
        name: Its name.
    """
    return view.admin.bookie(name)


@route("GET", f"{_ROOT}/bookies/{{name}}:drain")
def drain_progress(view: View, name: BookieName) -> DrainProgress:
    """Return the progress of the drain of a bookie.

    Args:
        name: Its name.
    """
    return view.admin.drain_progress(name)


@route("POST", f"{_ROOT}/bookies/{{name}}:drain", Scope.OPERATE)
def drain(view: View, name: BookieName) -> DrainProgress:
    """Begin to copy all entries of a bookie to others.

    Args:
        name: Its name.
    """
    return view.admin.drain(name)


@route("POST", f"{_ROOT}/bookies/{{name}}:cancel-drain", Scope.OPERATE)
def cancel_drain(view: View, name: BookieName) -> BookieStatus:
    """End the drain of a bookie.

    Args:
        name: Its name.
    """
    return view.admin.cancel_drain(name)


@route("POST", f"{_ROOT}/bookies/{{name}}:maintenance", Scope.OPERATE)
def maintenance(
    view: View, name: BookieName, seconds: Annotated[float, Meta(ge=1, le=int(MAINTENANCE_SECONDS_MAX))]
) -> BookieStatus:
    """Announce that a bookie may be absent for some time.

    Args:
        name: Its name.
        seconds: The seconds for which it may be absent.
    """
    return view.admin.maintenance(name, seconds)


@route("POST", f"{_ROOT}/bookies/{{name}}:end-maintenance", Scope.OPERATE)
def end_maintenance(view: View, name: BookieName) -> BookieStatus:
    """End the maintenance of a bookie.

    Args:
        name: Its name.
    """
    return view.admin.end_maintenance(name)


@route("GET", f"{_ROOT}/bookies/{{name}}:ok-to-stop")
def ok_to_stop(view: View, name: BookieName) -> StopCheck:
    """Return whether a bookie may be stopped.

    Args:
        name: Its name.
    """
    return view.admin.ok_to_stop(name)


@route("GET", f"{_ROOT}/bookies/{{name}}:ok-to-remove")
def ok_to_remove(view: View, name: BookieName) -> RemovalProof:
    """Return the proof that no ledger needs a bookie.

    Args:
        name: Its name.
    """
    return view.admin.ok_to_remove(name)


@route("POST", f"{_ROOT}/bookies/{{name}}:remove", Scope.ADMIN)
def remove(view: View, name: BookieName) -> BookieStatus:
    """Remove a bookie for good, if no ledger needs it.

    Args:
        name: Its name.
    """
    return view.admin.remove(name, view.admin.ok_to_remove(name))


# ---- ledgers --------------------------------------------------------------------------------------------------------


@route("GET", f"{_ROOT}/ledgers", cluster=False)
def ledgers(
    view: View,
    after: Annotated[int, Meta(ge=-1, le=LEDGER_ID_MAX)] = -1,
    limit: PageSize = 100,
    ledger_type: str | None = None,
    state: LedgerState | None = None,
) -> LedgerPage:
    """Return a page of ledgers.

    Args:
        after: The last ledger of the page before.
        limit: The most ledgers, 1 to 1000.
        ledger_type: Only ledgers of this type.
        state: Only ledgers in this state.
    """
    found = list(islice(view.manager.ledgers(ledger_type=ledger_type, state=state, first=after + 1), limit))
    following = found[-1].ledger_id if len(found) == limit else None
    return LedgerPage(ledgers=tuple(map(_ledger_info, found)), next=following)


@route("GET", f"{_ROOT}/ledgers/{{ledger_id}}", cluster=False)
def ledger(view: View, ledger_id: Annotated[int, Meta(ge=0, le=LEDGER_ID_MAX)]) -> LedgerInfo:
    """Return a ledger.

    Args:
        ledger_id: The ledger.
    """
    return _ledger_info(view.manager.ledger_summary(ledger_id))


def _ledger_info(found: LedgerSummary) -> LedgerInfo:
    metadata = found.metadata
    return LedgerInfo(
        ledger_id=metadata.ledger_id,
        state=metadata.state,
        ledger_type=str(metadata.ledger_type),
        tier=metadata.tier.value,
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
        ack_quorum=metadata.ack_quorum,
        created_ns=metadata.creation_time_ns,
        last_add_confirmed=found.last_add_confirmed,
        length=found.length,
        sealed=metadata.sealed,
        custom_metadata=metadata.custom_metadata,
        fragments=tuple(
            FragmentInfo(
                first_entry_id=each.first_entry_id, bookies=tuple(bookie.bookie_id for bookie in each.ensemble)
            )
            for each in metadata.fragments
        ),
    )


# ---- repairs and scrubs ---------------------------------------------------------------------------------------------


@route("GET", f"{_ROOT}/repairs")
def repairs(view: View, limit: PageSize = 100) -> RepairPage:
    """Return the repairs, the most urgent first.

    Args:
        limit: The most repairs, 1 to 1000.
    """
    found = view.admin.repairs()
    status = view.seen().cluster
    return RepairPage(
        total=len(found),
        repairs=tuple(map(_repair_info, found[:limit])),
        held=0 if status is None else status.held,
        held_because=() if status is None else status.held_because,
    )


def _repair_info(mark: UnderReplicatedLedger) -> RepairInfo:
    return RepairInfo(
        ledger_id=mark.ledger_id,
        bookie=mark.bookie.bookie_id,
        first_entry_id=mark.first_entry_id,
        reason=mark.reason,
        state=mark.state,
        since_ns=mark.since_ns,
        size_bytes=mark.size_bytes,
        tries=mark.tries,
        error=mark.error,
        target=mark.target,
    )


@route("POST", f"{_ROOT}/repairs:pause", Scope.OPERATE)
def pause_repairs(
    view: View,
    seconds: Annotated[float, Meta(ge=1, le=int(PAUSE_SECONDS_MAX))],
    by: Annotated[str, Meta(min_length=1, max_length=NAME_BYTES_MAX)],
) -> ClusterSettings:
    """Pause the repairs; they resume by themselves.

    Args:
        seconds: The length of the pause in seconds, at most a day.
        by: The name of the person who pauses them.
    """
    return view.admin.pause_repair(seconds, by)


@route("POST", f"{_ROOT}/repairs:resume", Scope.OPERATE)
def resume_repairs(view: View, by: Person = "", accept_loss_of: tuple[str, ...] = ()) -> ClusterSettings:
    """Resume the repairs.

    Args:
        by: The name of the person who resumes them.
        accept_loss_of: The names of bookies that are gone for good, for whose return repairs do not wait.
    """
    return view.admin.resume_repair(accept_loss_of, by)


@route("GET", f"{_ROOT}/scrubs")
def scrubs(view: View) -> tuple[ScrubStatus, ...]:
    """Return the progress of the checks of stored entries."""
    return view.admin.scrub_status()


@route("POST", f"{_ROOT}/scrubs:run", Scope.OPERATE)
def run_scrub(view: View, kind: ScrubKind = ScrubKind.DEEP, by: Person = "") -> ClusterSettings:
    """Ask all bookies to check all their entries now.

    Args:
        kind: The kind of check.
        by: The name of the person who asks.
    """
    return view.admin.scrub(kind, by)


# ---- settings -------------------------------------------------------------------------------------------------------


@route("GET", f"{_ROOT}/settings")
def settings(view: View) -> ClusterSettings:
    """Return the settings of the cluster."""
    return view.admin.settings()


@route("POST", f"{_ROOT}/settings:change", Scope.ADMIN)
def change_settings(
    view: View,
    values: Mapping[str, Any],
    by: Person = "",
    if_match: str = "*",
) -> ClusterSettings:
    """Change settings of the cluster; all members follow.

    Args:
        values: The new values by name, such as ``repair.grace_s``.
        by: The name of the person who changes them.
        if_match: The ``ETag`` of the settings to change; the response has status 412 if they were changed meanwhile.
    """

    def changed(old: ClusterSettings) -> ClusterSettings:
        check_match(if_match, as_body(old))
        return old.changed(values)

    return view.admin.change_settings(changed, by)


# ---- a bookie of its own --------------------------------------------------------------------------------------------


@route("GET", f"{_ROOT}/bookies/self")
def own_bookie(view: View) -> OwnBookie:
    """Return the bookie whose port this is, as it sees itself."""
    seen, bookie = view.seen(), view.bookie
    assert bookie is not None, "the route is on a bookie's own port alone"
    return OwnBookie(
        seen_ns=seen.seen_ns,
        name=bookie.bookie.bookie_id,
        instance=bookie.bookie.instance.hex(),
        addresses=tuple(bookie.addresses),
        version=__version__,
        state=seen.health.state,
        reasons=seen.health.reasons,
        outstanding_bytes=seen.health.outstanding_bytes,
        tail_bytes=seen.health.tail_bytes,
        free_bytes=seen.health.free_bytes,
    )


ROUTES: Final[tuple[Route, ...]] = (
    *(cluster, bookies, bookie, drain_progress, drain, cancel_drain, maintenance, end_maintenance),
    *(ok_to_stop, ok_to_remove, remove, ledgers, ledger, repairs, pause_repairs, resume_repairs, scrubs, run_scrub),
    *(settings, change_settings),
    *ACTIVITY,
    *LOG_ROUTES,
)
"""All routes of the interface; the more special of two that match the same path comes first."""

OWN_ROUTES: Final[tuple[Route, ...]] = (own_bookie, load, series, events)
"""The routes on a bookie's own port."""
