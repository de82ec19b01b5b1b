"""Scenarios 6 to 8: the auditor is killed, or suspended; and the metadata store is down."""

from __future__ import annotations

import time
from pathlib import Path

from pybk.healing.auditor import SAVE_NS
from tests.cluster.scenarios.absence import LARGE, SLOW
from tests.cluster.scenarios.catalog import NotHere, scenario
from tests.cluster.scenarios.scaled import LEASE_S
from tests.cluster.scenarios.stage import Figures, stage
from tests.zookeeper_server import ZooKeeperServer, missing


@scenario(6, "the auditor is killed in the middle of a repair")
def scenario_06_auditor_killed(directory: Path) -> Figures:
    with stage(directory, load=False, repair={**SLOW, "grace_s": 4.0}, **{**LARGE, "largest": 12_000}) as it:
        victim = it.followers()[0]
        held, count = it.held_bytes(victim), len(it.named(victim))
        it.bookie(victim).kill()
        it.until(lambda: it.standing(victim) == "lost", "the loss")
        saved = time.monotonic() + SAVE_NS / 1e9  # an auditor continues with absences as they were saved last
        it.until(lambda: len(it.named(victim)) <= count * 2 // 3 and time.monotonic() > saved, "a third of the repair")
        assert it.named(victim), "the repair was over before the auditor was killed"
        auditor = it.leader()
        it.bookie(auditor).kill()
        began = time.monotonic()
        it.bookie(auditor).begin()
        it.until(lambda: it.report().get("phase") == "leading" and it.report()["auditor"] != auditor, "another auditor")
        elected = time.monotonic() - began
        assert it.standing(victim) == "lost", "the absence is counted anew"
        it.bookie(auditor).serving()
        whole = it.until_whole()
        copied = it.copied_bytes()
        assert copied <= 1.1 * held, f"{copied} bytes were copied, and the bookie held {held}"
        it.check()
        return {
            "next leads after s": round(elected, 2),
            "lease s": LEASE_S,
            "copied / held": round(copied / held, 3),
            "whole after s": whole,
        }


@scenario(7, "the auditor is suspended")
def scenario_07_auditor_suspended(directory: Path) -> Figures:
    with stage(directory, load=False, repair={**SLOW, "grace_s": 4.0}, **LARGE) as it:
        victim = it.followers()[0]
        count = len(it.named(victim))
        it.bookie(victim).kill()
        it.until(lambda: len(it.named(victim)) <= count * 3 // 4, "a quarter of the repair")
        auditor = it.leader()
        it.bookie(auditor).stop()
        began = time.monotonic()
        it.until(lambda: it.report().get("auditor", auditor) != auditor, "another auditor")
        elected = time.monotonic() - began
        it.until(lambda: it.report().get("phase") == "leading", "that it leads")
        tokens = {mark.token: mark for mark in it.marks()}
        it.bookie(auditor).resume()
        it.until(lambda: not it.figures(auditor)["leads"], "the end of the first auditor")
        it.reports(10)
        auditors = {name for name, each in it.cluster.bookies.items() if each.alive and it.figures(name)["leads"]}
        assert len(auditors) == 1, f"there are auditors {auditors}"
        assert auditors != {auditor}
        whole = it.until_whole()
        it.reports()
        assert not it.marks(), "the auditor that was suspended has made marks"
        assert it.leader() in auditors
        it.check()
        return {"next leads after s": round(elected, 2), "marks then": len(tokens), "whole after s": whole}


@scenario(8, "the metadata store is down")
def scenario_08_store_down(directory: Path) -> Figures:
    lacking = missing()
    if lacking is not None:
        raise NotHere(lacking)
    server = ZooKeeperServer()
    server.start()
    try:
        return _store_down(directory, server)
    finally:
        server.close()


def _store_down(directory: Path, server: ZooKeeperServer) -> Figures:
    """Stop a ZooKeeper server for longer than its sessions and a grace last."""
    with stage(directory, url=server.url(), ledgers=30) as it:
        before = {each.ledger_id: each.fragments for each in it.ledgers()}
        appended = len(it.load.seconds)
        server.pause()
        began = time.monotonic()
        while time.monotonic() - began < 8.0:  # an outage of this length is what is to be survived
            it.load.more(50)
        during = len(it.load.seconds) - appended
        server.resume()
        it.until(lambda: it.report().get("phase") == "leading", "an auditor")
        back = round(time.monotonic() - began - 8.0, 2)
        it.until(lambda: len(it.metadata.list_bookies()) == 5, "all bookies to register")
        it.reports(10)
        assert not it.marks(), "bookies were lost while the metadata store was down"
        assert not it.copied(), "ledgers were copied"
        assert before == {each.ledger_id: each.fragments for each in it.ledgers()}
        slowest = it.load.slowest_ms(appended)
        it.check()
        return {
            "grace s": it.admin.settings().repair.grace_s,
            "down for s": 8.0,
            "appends meanwhile": during,
            "longest append ms": slowest,
            "an auditor again after s": back,
        }
