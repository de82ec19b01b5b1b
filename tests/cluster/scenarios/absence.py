"""Scenarios 1 to 5: bookies that are killed, that come back in time or late, and many at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from pybk import ClusterVerdict
from tests.cluster.scenarios.catalog import scenario
from tests.cluster.scenarios.stage import LOOK_S, Figures, Stage, names_of, stage
from tests.waiting import wait_until

SLOW: Final[dict[str, Any]] = {"bytes_per_second": 64 << 10, "urgent_bytes_per_second": 64 << 10}
"""Copies that take a while: 64 KiB per second and bookie."""

LARGE: Final[dict[str, Any]] = {"ledgers": 60, "largest": 4000}
"""Ledgers that take some seconds at ``SLOW``."""


@scenario(1, "a bookie is killed")
def scenario_01_killed(directory: Path) -> Figures:
    with stage(directory) as it:
        victim = it.followers()[0]
        held, appended = it.held_bytes(victim), len(it.load.seconds)
        count = len(it.named(victim))
        began = time.monotonic()
        it.bookie(victim).kill()
        wait_until(it.lost, "marks because of the bookie", pause_s=LOOK_S)
        detected = time.monotonic() - began
        assert detected >= it.admin.settings().repair.grace_s, "it was lost within its grace"
        it.until_whole()
        whole = time.monotonic() - began
        copied = it.copied_bytes(set(it.closed))
        assert not it.named(victim)
        assert copied <= 1.05 * held, f"{copied} bytes were copied, and it held {held}"
        it.load.more()
        slowest = it.load.slowest_ms(appended)
        it.check()
        grace = it.admin.settings().repair.grace_s
        return {
            "lost after s": round(detected, 2),
            "grace s": grace,
            "whole after s": round(whole, 2),
            "ledgers": count,
            "copied / held": round(copied / held, 3),
            "longest append ms": slowest,
        }


@scenario(2, "a bookie comes back within its grace")
def scenario_02_back_in_time(directory: Path) -> Figures:
    with stage(directory, repair={"grace_s": 60.0}) as it:
        victim = it.followers()[0]
        before = {each.ledger_id: each.fragments for each in it.ledgers() if each.ledger_id in it.closed}
        it.bookie(victim).kill()
        it.until(lambda: it.standing(victim) == "absent", "the auditor to notice")
        it.reports()
        marked = {mark.ledger_id for mark in it.marks()}
        it.bookie(victim).start()
        back = it.until(lambda: it.standing(victim) == "live", "the auditor to see it again")
        whole = it.until_whole()
        it.reports()
        assert not marked & it.closed.keys(), "closed ledgers were marked"
        assert not {ledger_id for _, ledger_id in it.copied()} & it.closed.keys(), "closed ledgers were copied"
        assert before == {each.ledger_id: each.fragments for each in it.ledgers() if each.ledger_id in it.closed}
        it.check()
        return {
            "copied bytes": it.copied_bytes(set(it.closed)),
            "marks": 0,
            "bytes that writers left out": it.copied_bytes(),
            "seen again after s": back,
            "whole after s": whole,
        }


@scenario(3, "a bookie comes back in the middle of its repair")
def scenario_03_back_late(directory: Path) -> Figures:
    with stage(directory, load=False, repair={**SLOW, "surplus_delay_s": 3.0}, **LARGE) as it:
        victim = it.followers()[0]
        held = len(it.named(victim))
        it.bookie(victim).kill()
        it.until(lambda: len(it.named(victim)) <= held // 2, "half of the repair")
        it.bookie(victim).start()
        dropped = it.until(lambda: not it.lost(), "the marks to be dropped")
        left = len(it.named(victim))
        assert left > 0, "the repair was over before the bookie was back"
        it.until_whole()
        left = len(it.named(victim))
        it.until(lambda: it.figures(victim)["surplus"] + it.figures(victim)["dropped"] >= held - left, "surplus copies")

        def are_dropped() -> bool:  # more than these if a repair was under way whose compare-and-set was refused
            figures = it.figures(victim)
            return bool(figures["dropped"] >= held - left and not figures["surplus"])

        gone = it.until(are_dropped, "the drop of surplus copies")
        it.check()
        return {
            "ledgers": held,
            "kept by the bookie": left,
            "marks dropped after s": dropped,
            "surplus copies": held - left,
            "dropped after s": gone,
        }


@scenario(4, "three of five bookies die")
def scenario_04_three_of_five(directory: Path) -> Figures:
    with stage(directory, load=False) as it:
        victims = it.followers()[:3]
        alive = set(it.cluster.bookies) - set(victims)
        left = {each.ledger_id: len(names_of(each) & alive) for each in it.ledgers()}
        one = {ledger_id for ledger_id, copies in left.items() if copies == 1}
        assert one, "no ledger has one copy left"
        began = time.monotonic()
        for name in victims:
            it.bookie(name).kill()
        it.until(lambda: it.report().get("holds"), "a hold")
        held_after = time.monotonic() - began
        status = it.status()
        assert status.verdict is ClusterVerdict.BAD
        assert any("on hold" in reason.text for reason in status.reasons)
        it.until(lambda: all(it.standing(name) == "lost" for name in victims), "the three to be lost")
        it.until(lambda: one <= {ledger_id for _, ledger_id in it.copied()}, "copies of ledgers with one copy")
        it.reports(5)
        assert {ledger_id for _, ledger_id in it.copied()} == one, "others than ledgers with one copy were copied"
        assert it.report()["holds"]
        for name in victims[:2]:
            it.bookie(name).begin()
        for name in victims[:2]:
            it.bookie(name).serving()
        ended = it.until(lambda: not it.report().get("holds", True), "the end of the hold")
        whole = it.until_whole()
        it.check()
        return {
            "held after s": round(held_after, 2),
            "ledgers with one copy": len(one),
            "with none": sum(copies == 0 for copies in left.values()),
            "hold ended after s": ended,
            "whole after s": whole,
        }


@scenario(5, "a zone fails")
def scenario_05_zone(directory: Path) -> Figures:
    with stage(directory, load=False) as it:
        zone = _zone_without(it, it.leader())
        held = sum(len(it.named(name)) for name in zone)
        for name in zone:
            it.bookie(name).kill()
        it.until(lambda: all(it.standing(name) == "lost" for name in zone), "the bookies of the zone to be lost")
        it.reports(20)
        holds = {each["reason"] for each in it.report()["holds"]}
        assert "zone_absent" in holds, holds
        short = it.status().short
        only = {ledger_id for _, ledger_id in it.copied()}
        twice = {each.ledger_id for each in it.ledgers() if len(names_of(each) & set(zone)) > 1}
        assert only <= twice, "ledgers with more than one copy were copied in spite of the hold"
        it.admin.resume_repair(zone, by="a scenario")
        whole = it.until_whole()
        it.check()
        return {
            "holds": sorted(holds),
            "copies of the zone": held,
            "short meanwhile": dict(short),
            "copied while held": len(only),
            "whole after its loss was accepted s": whole,
        }


def _zone_without(it: Stage, leader: str) -> list[str]:
    """Return the bookies of a zone of two in which the auditor is not."""
    zones: dict[str, list[str]] = {}
    for name in it.cluster.bookies:
        zones.setdefault(it.bookie(name).location.partition("/")[0], []).append(name)
    return next(names for names in zones.values() if len(names) == 2 and leader not in names)
