"""Scenarios 20, 21 and 24: a disk that is wiped, a device that loses its files, and disks that are full."""

from __future__ import annotations

import shutil
from pathlib import Path

from pybk.flags import StorageHint
from pybk.metadata.underreplication import RepairState
from tests.cluster.scenarios.catalog import scenario
from tests.cluster.scenarios.stage import Figures, stage
from tests.internals import cluster_backend_of

FULL = 0.86
"""The used share of disks above the line at which bookies take no copies, which is 0.85."""


@scenario(20, "the disk of a bookie is wiped, and it is replaced")
def scenario_20_wiped(directory: Path) -> Figures:
    with stage(directory, repair={"grace_s": 60.0}) as it:
        victim = it.followers()[0]
        held, before = it.held_bytes(victim), it.seen(victim).bookie
        bookie = it.bookie(victim)
        bookie.kill()
        bookie.wipe()
        refused = bookie.begin().join()
        assert refused == 2, bookie.child.complaint()
        assert "--replace" in bookie.child.complaint()
        bookie.wipe()
        bookie.begin("tcp://127.0.0.1:*", "--replace")
        bookie.serving()
        after = it.seen(victim).bookie
        assert after != before
        it.load.more()
        whole = it.until_whole()
        copied = it.copied_bytes(set(it.closed))
        assert not any(before in fragment.ensemble for each in it.ledgers() for fragment in each.fragments)
        assert copied <= 1.05 * held
        it.check()
        return {
            "exit status without --replace": refused,
            "whole after s": whole,
            "copied / held": round(copied / held, 3),
        }


@scenario(21, "the files of a device are gone")
def scenario_21_device(directory: Path) -> Figures:
    with stage(directory, load=False, ledgers=0, repair={"grace_s": 60.0}, options=("--tiers",)) as it:
        ssd = it.fill(30, storage_hints=[StorageHint.SSD])
        hdd = it.fill(30, storage_hints=[StorageHint.HDD])
        victim = it.followers()[0]
        held = it.named(victim)
        others = {each: it.copy_bytes(victim, each) for each in held if each in hdd}
        bookie = it.bookie(victim)
        bookie.terminate()
        gone = sorted(path.name for path in (bookie.directory / "ssd" / "entries").iterdir())
        shutil.rmtree(bookie.directory / "ssd" / "entries")
        membership = cluster_backend_of(it.client).membership
        bookie.start()
        it.until(lambda: membership.find(it.seen(victim).bookie) is not None, "the client to find it")
        limbo = it.figures(victim)
        found = {each: it.copy_bytes(victim, each) for each in others}
        assert found == others, f"the other tier does not read: {found}, and before {others}; gone {gone}, now {limbo}"
        ended = it.until(lambda: it.figures(victim)["limbo"] == 0, "the end of limbo")
        assert it.figures(victim)["health"] == "ok"
        it.until_whole()
        assert held == it.named(victim), "ledgers were moved"
        assert all(it.copy_bytes(victim, each) for each in held if each in ssd)
        it.check()
        return {
            "files": gone,
            "ledgers in limbo at first": limbo["limbo"],
            "health then": limbo["health"],
            "limbo ended after s": ended,
        }


@scenario(24, "all disks are above the line when a bookie is lost")
def scenario_24_full(directory: Path) -> Figures:
    with stage(directory, options=("--used", str(FULL))) as it:
        victim = it.followers()[0]
        concerned = it.named(victim)
        it.bookie(victim).kill()
        marked = it.until(lambda: {mark.ledger_id for mark in it.lost()} >= concerned, "marks of all ledgers")
        it.until(lambda: set(it.status().no_target) >= concerned, "ledgers without a target")
        assert {mark.state for mark in it.marks() if mark.ledger_id in concerned} == {RepairState.NO_TARGET}
        it.load.more(500)
        it.reports(10)
        assert not it.copied_bytes(set(it.closed)), "entries were copied to disks above the line"
        assert any("no bookie can take" in reason.text for reason in it.status().reasons), it.status().reasons
        for name in it.cluster.bookies:
            if name != victim:
                it.bookie(name).child.order("used 0.5")
        whole = it.until_whole()
        it.check()
        return {
            "ledgers": len(concerned),
            "without a target after s": marked,
            "whole with space s": whole,
        }
