"""How the checks of stored entries proceed, for people: what their notes say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pybk.healing.scrub import PARTS, ScrubKind, ScrubSchedule
from pybk.healing.scrubbing import decoded_notes
from pybk.storage.repair.record_check import DamagedEntries
from pybk.values import FrozenDict

_NOTHING_ASKED: Final[Mapping[ScrubKind, int]] = FrozenDict({})


@dataclass(frozen=True, slots=True)
class ScrubProgress:
    """How one kind of check proceeds.

    Attributes:
        oldest_ns: Everything that was there then was checked since, nanoseconds since 1970; if something was not
            checked yet, when checks began.
        asked: The share, 0 to 1, that is not checked yet of what a person asked for last.
        under_way: Whether a part is under way.
    """

    oldest_ns: int
    asked: float
    under_way: bool


@dataclass(frozen=True, slots=True)
class ScrubStatus:
    """How the checks of one store, or the quick audits of a cluster, proceed.

    Attributes:
        name: The bookie, the directory of the store, or ``"auditor"``.
        noted_ns: When that was noted, nanoseconds since 1970; 0 if nothing was noted yet.
        kinds: By kind of check.
        damaged: What was found damaged, and is so still; at most 1000 records.
    """

    name: str
    noted_ns: int
    kinds: Mapping[ScrubKind, ScrubProgress]
    damaged: tuple[DamagedEntries, ...] = ()


def status_of_notes(
    name: str, notes: Mapping[str, Any] | None, asked_ns: Mapping[ScrubKind, int] = _NOTHING_ASKED
) -> ScrubStatus:
    """Return the status of a store from the notes of its checks; damaged notes count as none.

    Args:
        name: Whose notes they are.
        notes: The notes; None for none.
        asked_ns: By kind, what a person asked for last, as the settings have it.
    """
    if notes is None:
        return ScrubStatus(name, 0, FrozenDict({}))
    try:
        schedules, damaged = decoded_notes(notes)
        noted_ns = int(notes["noted_ns"])
    except (KeyError, TypeError, ValueError):
        return ScrubStatus(name, 0, FrozenDict({}))
    kinds = FrozenDict({kind: progress_of(schedule, asked_ns.get(kind, 0)) for kind, schedule in schedules.items()})
    return ScrubStatus(name, noted_ns, kinds, tuple(known for _, known in damaged.values()))


def status_of_quick(notes: Mapping[str, Any] | None, asked_ns: Mapping[ScrubKind, int] = _NOTHING_ASKED) -> ScrubStatus:
    """Return the status of the quick audits of a cluster from what the auditor has noted; as ``status_of_notes``."""
    name = "auditor"
    if notes is None:
        return ScrubStatus(name, 0, FrozenDict({}))
    try:
        progress = progress_of(ScrubSchedule.decode(notes["quick"]), asked_ns.get(ScrubKind.QUICK, 0))
        return ScrubStatus(name, int(notes["noted_ns"]), FrozenDict({ScrubKind.QUICK: progress}))
    except (KeyError, TypeError, ValueError):
        return ScrubStatus(name, 0, FrozenDict({}))


def progress_of(schedule: ScrubSchedule, asked_ns: int = 0) -> ScrubProgress:
    """Return how one kind of check proceeds; all of what was asked for after the schedule was noted is left."""
    asked = 1.0 if asked_ns > schedule.asked_ns else sum(map(schedule.is_asked, range(PARTS))) / PARTS
    return ScrubProgress(schedule.oldest_ns, asked, schedule.part >= 0)
