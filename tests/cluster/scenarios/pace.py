"""Scenarios 9 to 11: the order of copies, their rate, and the appends that they must not slow down."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from pybk.metadata.underreplication import RepairReason
from tests.cluster.scenarios.absence import SLOW
from tests.cluster.scenarios.catalog import scenario
from tests.cluster.scenarios.stage import LOOK_S, Figures, stage
from tests.waiting import wait_until

MIB: Final = 1 << 20
RATE: Final = MIB // 2
"""Bytes per second that each bookie copies."""

_SLOW_MS: Final = 120
"""What a durable write takes longer, so that appends suffer: more than 50 ms and three times the median."""


@scenario(9, "a ledger with one copy is behind many that are misplaced")
def scenario_09_order(directory: Path) -> Figures:
    with stage(directory, bookies=3, zones=1, load=False, largest=1000, repair=dict(SLOW)) as it:
        it.admin.pause_repair(600, "a scenario")
        it.zones(3)
        it.cluster.add(2)
        one = it.fill(1)[0]
        it.change_placement(min_zones=2, repair=True)
        damaged = it.ensemble(one)[1:]
        bookies = {each.name: each.bookie for each in it.admin.bookies()}
        for name in damaged:
            it.metadata.mark_under_replicated(one, bookies[name], 0, reason=RepairReason.DAMAGED)
        it.reports()
        assert not it.copied(), "ledgers were copied during the pause"
        it.admin.resume_repair(by="a scenario")
        it.until(lambda: it.report()["reasons"].get("misplaced", 0) > 50, "misplaced ledgers")
        it.until(lambda: not it.metadata.marks_of(one), "the repair of the ledger with one copy")
        first = {name: [ledger_id for each, ledger_id in it.copied() if each == name].index(one) for name in damaged}
        behind = len({mark.ledger_id for mark in it.marks()})
        assert all(place < 2 for place in first.values()), f"others were copied before: {first}"
        whole = it.until_whole()
        it.check()
        return {
            "its place among each bookie's copies": list(first.values()),
            "behind it": behind,
            "whole after s": whole,
        }


@scenario(10, "copies are throttled under load")
def scenario_10_throttle(directory: Path) -> Figures:
    repair = {"bytes_per_second": RATE, "urgent_bytes_per_second": RATE}
    with stage(directory, ledgers=40, entries=100, largest=8000, repair=repair) as it:
        it.load.more(1000)
        idle = it.load.p99_ms(20)
        victim = it.followers()[0]
        it.bookie(victim).kill()
        wait_until(it.copied, "the first copy", pause_s=LOOK_S)
        began, appended = time.monotonic(), len(it.load.seconds)
        it.until_whole()
        seconds = time.monotonic() - began
        busy = it.load.p99_ms(appended)
        most = max(it.copied_bytes(by=name) for name in it.cluster.bookies)
        # A bucket admits a burst of a tenth of a second, and two copies are under way at its end.
        largest = max(int(line.split()[1]) for _, line in it.said("copied"))
        allowed = 1.1 * RATE * seconds + RATE / 10 + 2 * largest
        assert most <= allowed, f"a bookie copied {most} bytes in {seconds:.1f} s, and {allowed:.0f} are allowed"
        it.check()
        return {
            "rate MiB/s": RATE / MIB,
            "fastest bookie MiB/s": round(most / seconds / MIB, 3),
            "seconds": round(seconds, 1),
            "append p99 ms": busy,
            "without copies": idle,
        }


@scenario(11, "appends become slow during a repair")
def scenario_11_foreground(directory: Path) -> Figures:
    with stage(directory, ledgers=20) as it:
        rates = it.rates()
        full = it.admin.settings().repair.bytes_per_second
        assert set(rates.values()) == {full}, rates
        busy = sorted(it.cluster.bookies)
        it.reports(25)  # samples of a second, of which the median is taken
        for name in busy:
            it.bookie(name).child.order(f"slow {_SLOW_MS}")
        slowed = it.until(lambda: min(it.rates().values()) <= full / 2, "a rate that is halved")
        lowest = min(it.rates().values())
        for name in busy:
            it.bookie(name).child.order("slow 0")
        recovered = it.until(lambda: min(it.rates().values()) == full, "the full rate")
        it.check()
        return {
            "halved after samples of 1 s": slowed,
            "lowest share": round(lowest / full, 3),
            "full again after s": recovered,
        }
