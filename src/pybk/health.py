"""The health of a manager: its states, the codes of all reasons, and every rule that decides which reasons hold.

To add a condition, add its code to ``REASON_STATES``, with the state that it causes, and return a ``HealthReason`` from
the rule below that can see it. The Prometheus exporter shows all states in ``HEALTH_STATES``, and each reason's code.

| backend | rule | input |
|---|---|---|
| a live store | ``store_health`` | ``Log.error``, ``Log.refusal``, free space, ``Store.troubles`` |
| a read-only store | ``read_only_store_health`` | none |
| a bookie | ``bookie_health`` | its store's health, whether its thread runs and it is registered, its state, limbo |
| a cluster's client without a bookie | ``client_health`` | the registered bookies, and the auditor's last report |

If several reasons hold, the worst state is returned: ``failed``, ``read_only``, ``in_limbo``, ``degraded``, ``ok``.
A part of the store that works around a failure and retries reports it in ``Store.troubles``
(``pybk.storage.io.failures``), and removes it once the retry succeeds.

``repair_reasons`` returns the reasons in an auditor's report; ``ClusterAdmin.status`` uses it, too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from pybk.ledger.ledger_metadata import DEFAULT_ACK_QUORUM, DEFAULT_ENSEMBLE_SIZE, DEFAULT_WRITE_QUORUM
from pybk.replication.quorum import Quorum
from pybk.storage.io.failures import CHECKING
from pybk.values import FrozenDict, listed

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.metadata.registration import BookieState
    from pybk.storage.readonly import ReadOnlyStore
    from pybk.storage.store import Store

HealthState = Literal["ok", "degraded", "in_limbo", "read_only", "failed"]
"""The values of ``Health.state``; ``Health`` explains each."""

HEALTH_STATES: Final[tuple[HealthState, ...]] = get_args(HealthState)
"""All states, each worse than those before it."""

REASON_STATES: Final[Mapping[str, HealthState]] = FrozenDict(
    {
        # a store
        "store_failed": "failed",
        "store_full": "read_only",
        "opened_read_only": "read_only",
        "trouble": "degraded",
        "damaged_records": "degraded",
        # a bookie
        "not_serving": "failed",
        "removed": "failed",
        "superseded": "failed",
        "metadata_outdated": "read_only",
        "draining": "read_only",
        "drained": "read_only",
        "retired": "read_only",
        "in_limbo": "in_limbo",
        "maintenance": "degraded",
        "maintenance_over": "degraded",
        "not_registered": "degraded",
        # a client: which bookies there are
        "no_bookie": "failed",
        "too_few_bookies": "failed",
        "few_bookies": "degraded",
        "metadata_unreachable": "degraded",
        "report_unreadable": "degraded",
        # a client: the auditor
        "no_auditor": "degraded",
        "auditor_silent": "degraded",
        "auditor_reading": "degraded",
        "repairs_paused": "degraded",
        "loss_accepted": "degraded",
        "hold_store_unreachable": "degraded",
        "hold_session_young": "degraded",
        "hold_few_registered": "degraded",
        "hold_zone_absent": "degraded",
        "hold_rack_absent": "degraded",
        "hold_many_lost": "degraded",
        "hold_few_writable": "degraded",
        "hold_little_space": "degraded",
        "hold_other": "degraded",
        # a client: ledgers and bookies
        "entries_lost": "degraded",
        "no_live_copy": "degraded",
        "one_copy_left": "degraded",
        "under_replicated": "degraded",
        "misplaced": "degraded",
        "waiting_for_owner": "degraded",
        "no_target": "degraded",
        "repair_stuck": "degraded",
        "bookies_lost": "degraded",
        "bookies_absent": "degraded",
        "bookies_in_limbo": "degraded",
        "bookies_flapping": "degraded",
        "bookies_read_only": "degraded",
        # notes
        "no_spare_bookie": "ok",
        "drain_waits": "ok",
    }
)
"""The code of each reason, and the state that it causes; ``ok`` for a note, which causes none.

Codes are stable: alerts and probes may rely on them."""


SILENT_S: Final = 60.0
"""The seconds without a report after which an auditor counts as failed; it reports every 10 s while it works."""


class HealthReason(NamedTuple):
    """A reason why a manager, a bookie or a cluster is not well.

    Attributes:
        code: The kind of reason: a key of ``REASON_STATES``, stable from one version to the next.
        text: A sentence for people.
    """

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a manager at one moment.

    Attributes:
        state: ``"ok"``; ``"degraded"`` (all calls work, and ``reasons`` says what needs attention or is retried);
            ``"in_limbo"`` (a bookie that ended by accident copies entries that it may have lost back from its peers);
            ``"read_only"`` (opened read-only, short of space, or a bookie that is drained); or ``"failed"`` (of a store
            or a bookie: close it and open it again; of a client: too few bookies run for any usual ledger).
        reason: The text of the worst reason; empty for ``"ok"``, also if there are notes.
        outstanding_bytes: Bytes appended and not durable yet.
        tail_bytes: Bytes of log that the next open would replay.
        free_bytes: Free bytes of each device, by the common parent of its tier directories, or by all of these
            directories if another device has the same parent.
        troubles: Failures and refusals that are being retried, one text each. None of them affects durable entries.
        reasons: All reasons, the worst state first, and then notes, which cause no state; ``"ok"`` has only notes.
    """

    state: HealthState
    reason: str
    outstanding_bytes: int
    tail_bytes: int
    free_bytes: Mapping[str, int]
    troubles: tuple[str, ...] = ()
    reasons: tuple[HealthReason, ...] = ()

    @classmethod
    def of(
        cls,
        reasons: Iterable[HealthReason],
        outstanding_bytes: int = 0,
        tail_bytes: int = 0,
        free_bytes: Mapping[str, int] = FrozenDict(),  # it cannot be changed
        troubles: tuple[str, ...] = (),
    ) -> Health:
        """Return the health that follows from reasons; the other arguments are attributes of the result."""
        found = tuple(sorted(reasons, key=lambda each: -HEALTH_STATES.index(REASON_STATES[each.code])))
        state: HealthState = REASON_STATES[found[0].code] if found else "ok"
        text = found[0].text if state != "ok" else ""
        return cls(state, text, outstanding_bytes, tail_bytes, free_bytes, troubles, found)


# ---- stores --------------------------------------------------------------------------------------------------------


def store_health(store: Store, *reasons: HealthReason) -> Health:
    """Return the health of a live store; reads the free space of each directory.

    Args:
        store: The store.
        reasons: Other reasons, for a bookie.
    """
    troubles = store.troubles.all()
    refusal = store.log.refusal
    if refusal is not None:
        troubles = (f"appending: {refusal}", *troubles)
    damage = store.troubles.of(CHECKING)
    found = [
        *reasons,
        *_store_reasons(store),
        *(HealthReason("damaged_records" if each == damage else "trouble", each) for each in troubles),
    ]
    return Health.of(found, store.log.outstanding_bytes, store.tail_bytes, _free_bytes(store), troubles)


def _store_reasons(store: Store) -> Iterator[HealthReason]:
    if store.log.error is not None:
        yield HealthReason("store_failed", str(store.log.error))
    elif store.scheduler.full is not None:
        yield HealthReason("store_full", store.scheduler.full)


def read_only_store_health(store: ReadOnlyStore) -> Health:
    """Return the health of a store that is open read-only."""
    return Health.of([HealthReason("opened_read_only", "opened read-only")], free_bytes=_free_bytes(store))


def _free_bytes(store: Store | ReadOnlyStore) -> dict[str, int]:
    devices = [[each.path for each in directories] for directories in store.volumes.by_device().values()]
    names = Counter(map(os.path.commonpath, devices))
    return {
        name if names[name := os.path.commonpath(paths)] == 1 else ", ".join(paths): store.fs.free_bytes(paths[0])
        for paths in devices
    }


# ---- bookies -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieCondition:
    """The condition of a bookie, on which its health depends in addition to its store.

    Attributes:
        bookie: The bookie, for the texts.
        state: The state in its cookie.
        error: The error that ended the bookie's thread, None while it serves.
        superseded: Whether another process serves under its name.
        registered: Whether it is registered; a bookie that has not begun yet counts as registered.
        outdated: The reason why the metadata store may not be used; None if it may.
        retired: Whether it was made read-only until its next start.
        in_limbo: A function that returns the ledgers in limbo.
    """

    bookie: Bookie
    state: BookieState
    error: BaseException | None
    superseded: bool
    registered: bool
    outdated: Exception | None
    retired: bool
    in_limbo: Callable[[], Sequence[int]] = field(repr=False)


def bookie_health(store: Store, condition: BookieCondition) -> Health:
    """Return the health of a bookie; reads no metadata."""
    return store_health(store, *_bookie_reasons(condition))


def _bookie_reasons(condition: BookieCondition) -> Iterator[HealthReason]:
    bookie, state = condition.bookie, condition.state.value
    if condition.error is not None:
        code = "removed" if state == "removed" else "superseded" if condition.superseded else "not_serving"
        yield HealthReason(code, f"bookie {bookie} serves no more: {condition.error!r}")
        return
    if condition.outdated is not None:
        yield HealthReason("metadata_outdated", str(condition.outdated))
    elif condition.retired:
        yield HealthReason("retired", f"bookie {bookie} was retired: it takes no entries of writers until it restarts")
    if state in ("draining", "drained"):
        yield HealthReason(state, f"bookie {bookie} is {state}: it takes no entries of writers")
    if limbo := condition.in_limbo():
        text = f"{len(limbo)} ledgers are in limbo until bookie {bookie} has got back what it may lack of them"
        yield HealthReason("in_limbo", text)
    if state == "maintenance":
        yield HealthReason("maintenance", f"bookie {bookie} is in maintenance: it gets no copies")
    if not condition.registered:
        yield HealthReason(
            "not_registered",
            f"the session of bookie {bookie} with the metadata store has ended: new clients do not find it until it "
            "has registered again",
        )


# ---- clients -------------------------------------------------------------------------------------------------------


class SeenReport(NamedTuple):
    """The auditor's report as a client read it last.

    Attributes:
        report: The report; None without one.
        age_s: The seconds for which it has not changed.
        trouble: The reason why it could not be read; None if it could.
    """

    report: Mapping[str, Any] | None
    age_s: float = 0.0
    trouble: HealthReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSight:
    """A client's knowledge of its cluster, without requests.

    Attributes:
        where: The name of the metadata store in the texts.
        bookies: The number of registered bookies.
        writable: The names of the bookies that registered as taking entries.
        seen: The auditor's report.
        away: The names of bookies that this client saw registered earlier, and that take no entries now.
        ensembles: The sizes of the ensembles of the ledgers that this client writes.
        paused_until_ns: The time when a pause of the repairs ends; 0 without one.
    """

    where: str
    bookies: int
    writable: frozenset[str]
    seen: SeenReport
    away: frozenset[str] = frozenset()
    ensembles: tuple[int, ...] = ()
    paused_until_ns: int = 0


_TAKE_ENTRIES: Final = frozenset({"live", "in_limbo", "flapping", "maintenance"})
"""The statuses of bookies that take entries of writers."""

_AWAY: Final = frozenset({"absent", "lost", "read_only"})
"""The statuses of bookies that take no entries now, but may be members of new ledgers."""

_LEAVING: Final = frozenset({"draining", "removed"})
"""The statuses of bookies that take no entries and may not be members of new ledgers."""


def client_health(sight: ClusterSight, outstanding_bytes: int, now_ns: int) -> Health:
    """Return the health of a cluster's client that is not a bookie, which is that of its cluster as the client sees it.

    Args:
        sight: The client's knowledge.
        outstanding_bytes: Bytes appended and not acknowledged by an ack quorum yet.
        now_ns: The time, nanoseconds since 1970.
    """
    if not sight.bookies:
        reason = HealthReason("no_bookie", f"no bookie is registered at {sight.where}")
        return Health.of([reason], outstanding_bytes)
    reasons = [*_room_for_ensembles(sight), *_auditor_reasons(sight.seen)]
    if sight.paused_until_ns > now_ns:
        reasons.append(paused_reason(sight.paused_until_ns, "", now_ns))
    return Health.of(reasons, outstanding_bytes)


def _room_for_ensembles(sight: ClusterSight) -> Iterator[HealthReason]:
    """Yield a reason if the writable bookies do not suffice for the open ledgers, and a note if they only just do.

    Bookies that are away or read-only may fill the rest of an ensemble while an ack quorum is writable; this assumes
    the default quorums.
    """
    report = sight.seen.report or {}
    statuses = {str(each["bookie_id"]): each["status"] for each in report.get("bookies", ())}
    refusing = {name for name, status in statuses.items() if status not in _TAKE_ENTRIES}
    count = len(sight.writable - refusing)
    sizes = ensemble_sizes(report, sight.ensembles)
    smallest, largest = min(sizes), max(sizes)
    away = sight.away | {name for name, status in statuses.items() if status in _AWAY}
    away -= {name for name, status in statuses.items() if status in _LEAVING} | (sight.writable - refusing)
    if fewest_for(smallest) <= count < smallest <= count + len(away):
        yield HealthReason(
            "few_bookies",
            f"{count} writable bookies are registered, and the smallest usual ensemble takes {smallest}: new ledgers "
            "are under-replicated from their first entry on, because members are away or read-only "
            f"({listed(sorted(away))}); start these, or others, or free space where they are read-only",
        )
    elif count < smallest:
        yield HealthReason(
            "too_few_bookies",
            f"{count} writable bookies are registered, and the smallest usual ensemble takes {smallest}: start more, "
            "or free space where they are read-only",
        )
    elif count < largest:
        yield HealthReason(
            "few_bookies",
            f"{count} writable bookies are registered, and ensembles have up to {largest}: start more",
        )
    elif count == largest:
        yield no_spare_note(count)


def ensemble_sizes(report: Mapping[str, Any], own: Iterable[int] = ()) -> list[int]:
    """Return the sizes of the ensembles of open ledgers; the default size without open ledgers.

    Args:
        report: The auditor's report; empty without one.
        own: The sizes of the ensembles of ledgers that a client writes itself.
    """
    return [size for size in (*report.get("ensembles", ()), *own) if size] or [DEFAULT_ENSEMBLE_SIZE]


def fewest_for(size: int) -> int:
    """Return the fewest writable bookies with which a ledger can be written, by the default quorums.

    Args:
        size: The size of its ensemble.
    """
    return Quorum(size, min(DEFAULT_WRITE_QUORUM, size), min(DEFAULT_ACK_QUORUM, size)).live_min


def no_spare_note(count: int) -> HealthReason:
    """Return the note that the writable bookies are as many as an ensemble has.

    It is only a note, because a cluster may be planned this way and keeps all its promises. A missing bookie is a
    reason of its own.
    """
    return HealthReason(
        "no_spare_bookie",
        f"{count} writable bookies are registered, as many as an ensemble has: none can take the place of one that "
        "fails; start another",
    )


def _auditor_reasons(seen: SeenReport) -> Iterator[HealthReason]:
    """Yield the reasons in the auditor's report, or the reason why it is not known."""
    if seen.trouble is not None:
        yield seen.trouble
    if seen.report is None:
        if seen.trouble is None:
            yield HealthReason(
                "no_auditor",
                "no auditor reports, so nothing is repaired, and what is missing is not known: open a bookie with "
                "autorecovery",
            )
        return
    yield from silence_reasons(seen.report, seen.age_s)
    yield from repair_reasons(seen.report)


def silence_reasons(report: Mapping[str, Any], age_s: float) -> Iterator[HealthReason]:
    """Yield a reason if an auditor has not reported for ``SILENT_S``.

    Args:
        report: Its last report.
        age_s: The seconds since that report.
    """
    if age_s > SILENT_S:
        text = f"the auditor, {report.get('auditor', '')}, has not reported for {age_s:.0f} s: restart it"
        yield HealthReason("auditor_silent", text)


def paused_reason(until_ns: int, by: str, now_ns: int) -> HealthReason:
    """Return the reason of a pause of the repairs by a person."""
    who = f" by {by}" if by else ""
    return HealthReason("repairs_paused", f"repairs are paused{who} for {(until_ns - now_ns) / 1e9:.0f} s more")


def repair_reasons(report: Mapping[str, Any]) -> Iterator[HealthReason]:
    """Yield the reasons in an auditor's report: holds, ledgers that are not whole, bookies that are not well."""
    for hold in report.get("holds", ()):
        code = f"hold_{hold['reason']}"
        text = f"repairs are on hold, except for entries with one copy: {hold['text']}"
        yield HealthReason(code if code in REASON_STATES else "hold_other", text)
    if report.get("phase") == "reading":
        yield HealthReason(
            "auditor_reading", "the auditor reads all ledgers first, so what is missing is not known yet"
        )
    yield from ledger_reasons(
        report.get("short", {}), {name: report.get(name, ()) for name in ("lost", "waiting", "no_target", "stuck")}
    )
    if misplaced := report.get("misplaced", 0):
        yield HealthReason(
            "misplaced",
            f"ledgers in fewer zones than placement.min_zones asks for: {misplaced}; the setting placement.repair has "
            "them moved",
        )
    for status, (code, text) in _BOOKIE_REASONS.items():
        names = sorted({str(each["bookie_id"]) for each in report.get("bookies", ()) if each["status"] == status})
        if names:
            yield HealthReason(code, f"{text}: {listed(names)}")
    yield from _drain_notes(report)


def _drain_notes(report: Mapping[str, Any]) -> Iterator[HealthReason]:
    """Yield a note for each drain that has not ended, with its age and the ledgers that it waits for."""
    for each in report.get("drains", ()):
        minutes = (report["reported_ns"] - each["since_ns"]) / 60e9
        text = f"the drain of bookie {each['bookie_id']} began {minutes:.0f} min ago: ledgers left {each['ledgers']}"
        if writers := each["writers"]:
            text += f"; open ledgers whose writers have not left it: {listed(writers)}"
        yield HealthReason("drain_waits", text)


_BOOKIE_REASONS: Final = {
    "lost": ("bookies_lost", "bookies count as lost"),
    "absent": ("bookies_absent", "bookies do not run, and are waited for"),
    "in_limbo": ("bookies_in_limbo", "bookies copy back what they may have lost"),
    "flapping": ("bookies_flapping", "bookies were absent several times within an hour"),
    "read_only": ("bookies_read_only", "bookies are read-only"),
}
"""The reason for a bookie of each status; statuses that a person asked for have none."""


def ledger_reasons(short: Mapping[str, int], listed_ids: Mapping[str, Sequence[int]]) -> Iterator[HealthReason]:
    """Yield the reasons of ledgers that are not whole.

    Args:
        short: The numbers of ledgers that are short of copies, by the copies that are left: ``"0"``, ``"1"``, ``"2"``,
            ``"more"``.
        listed_ids: Ledgers by ``lost``, ``waiting``, ``no_target`` and ``stuck``.
    """
    for name, (code, text) in _LEDGER_REASONS.items():
        if ids := listed_ids[name]:
            yield HealthReason(code, f"{text}: {listed(ids)}")
    if none := short.get("0", 0):
        text = f"ledgers with entries that no running bookie has a sound copy of: {none}"
        yield HealthReason("no_live_copy", text)
    if one := short.get("1", 0):
        yield HealthReason("one_copy_left", f"ledgers with entries of which one copy is left: {one}")
    if more := sum(count for copies, count in short.items() if copies not in ("0", "1")):
        yield HealthReason("under_replicated", f"ledgers with fewer copies than they should have: {more}")


_LEDGER_REASONS: Final = {
    "lost": ("entries_lost", "entries are lost of ledgers"),
    "waiting": ("waiting_for_owner", "ledgers wait for a recovery by their owner"),
    "no_target": ("no_target", "no bookie can take the copies of ledgers"),
    "stuck": ("repair_stuck", "the repair of ledgers failed repeatedly"),
}
