"""Scenarios 22 and 23: a bit that flips where nobody reads, and a bookie that is slow while replicas are audited."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from pybk import DigestMismatchError, RepairReason, ScrubKind
from tests.cluster.child import PASSWORD, payload
from tests.cluster.scenarios.catalog import scenario
from tests.cluster.scenarios.stage import Figures, Stage, stage
from tests.healing.test_embedded_scrub import flip
from tests.storage.real_store import contents

_SLOW_MS = 2000
"""How much longer each read of a check takes."""

_ENTRY = 7


@scenario(22, "a bit flips where nobody reads")
def scenario_22_flipped(directory: Path) -> Figures:
    with stage(directory, ledgers=30, load=False) as it:
        victim = it.followers()[0]
        damaged, wanted = next(
            (each, payload(each, _ENTRY)) for each in sorted(it.named(victim)) if len(payload(each, _ENTRY)) > 40
        )
        held = it.copy_bytes(victim, damaged)
        flip(it.bookie(victim).directory, wanted)
        it.admin.pause_repair(600, "a scenario")  # so that what is found stays to be seen
        checked = _scrub(it, ScrubKind.DEEP)
        (mark,) = it.marks()
        assert (mark.ledger_id, mark.bookie.bookie_id) == (damaged, victim)
        assert RepairReason.DAMAGED in mark.causes_by_reason()
        assert mark.first_entry_id <= _ENTRY
        assert it.figures(victim)["health"] == "degraded"
        found = {each.name: {one.ledger_id for one in each.damaged} for each in it.admin.scrub_status()}
        assert {name: ledgers for name, ledgers in found.items() if ledgers} == {victim: {damaged}}
        with pytest.raises(DigestMismatchError):  # what it still gives is no copy to any reader
            it.copy_bytes(victim, damaged)
        assert contents(it.client, damaged, PASSWORD)[_ENTRY] == wanted
        it.admin.resume_repair(by="a scenario")
        mended = it.until(lambda: not it.marks(), "the repair")
        assert it.copied() == [(victim, damaged)], "one bookie copies one ledger"
        assert it.copy_bytes(victim, damaged) == held
        it.until(lambda: it.figures(victim)["health"] == "ok", "the end of the damage")
        _scrub(it, ScrubKind.DEEP)
        assert not it.marks()
        assert not any(each.damaged for each in it.admin.scrub_status())
        it.check()
        return {"all checked after s": checked, "mended after s": mended}


@scenario(23, "a bookie is slow while replicas are audited")
def scenario_23_slow(directory: Path) -> Figures:
    with stage(directory, bookies=3, ledgers=3, load=False) as it:
        slow, forgetful = it.followers()
        lacking = min(it.named(forgetful))
        for name in it.cluster.bookies:
            it.bookie(name).child.order(f"slow_checks {_SLOW_MS if name == slow else 0}")
        it.bookie(forgetful).child.order(f"forget {lacking}")
        audited = [_scrub(it, ScrubKind.QUICK) for _ in range(2)]
        it.until(lambda: (forgetful, lacking) in it.copied(), "the repair of what a bookie lacks")
        it.until_whole()
        assert set(it.copied()) == {(forgetful, lacking)}, "a bookie was marked because it is slow"
        assert not it.marks()
        it.bookie(slow).child.order("slow_checks 0")
        it.check()
        return {"audited after s": audited, "false marks": 0, "bookies that lacked a ledger and were marked": 1}


def _scrub(it: Stage, kind: ScrubKind) -> float:
    """Ask for checks of everything, wait until they are over, and return how many seconds that took."""
    began_ns = time.time_ns()
    it.admin.scrub(kind, "a scenario")
    return it.until(partial(_is_checked, it, kind, began_ns), f"{kind} checks of everything")


def _is_checked(it: Stage, kind: ScrubKind, since_ns: int) -> bool:
    """Return whether everything was checked since a moment; what checks is the auditor, or each bookie."""
    quick = kind is ScrubKind.QUICK
    parts = [each.kinds.get(kind) for each in it.admin.scrub_status() if (each.name == "auditor") is quick]
    return bool(parts) and all(each is not None and each.oldest_ns >= since_ns for each in parts)
