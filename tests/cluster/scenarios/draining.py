"""Scenarios 15 to 19: bookies that are drained, restarted meanwhile, and removed."""

from __future__ import annotations

import json
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from pybk import BookieState, ClusterAdmin, SafetyCheckError
from pybk.client.membership import Membership
from pybk.client.remote_ledger import RemoteLedger
from pybk.replication.messages import Event, WriteMetadata
from tests.cluster.child import PASSWORD
from tests.cluster.scenarios.absence import LARGE, SLOW
from tests.cluster.scenarios.catalog import scenario
from tests.cluster.scenarios.stage import LOOK_S, SHAPE, Figures, Stage, bookies_of, stage
from tests.internals import cluster_backend_of
from tests.waiting import WAIT_S

REFUSED = 3
"""The exit status of a command that a safety check refused."""


def state_of(admin: ClusterAdmin, name: str) -> BookieState:
    """Return the state of a bookie, also of one that was removed."""
    return next(each.state for each in admin.bookies(removed=True) if each.name == name)


@scenario(15, "a bookie is drained under load")
def scenario_15_drain(directory: Path) -> Figures:
    with stage(directory, repair=dict(SLOW), **LARGE) as it:
        victim = it.followers()[0]
        held = len(it.named(victim))
        drain = it.run("bookie", "drain", it.cluster.url, victim, "--wait", "--json")
        began = time.monotonic()
        removable, quarter = 0, 0.0
        eta = None
        while drain.alive:
            check_copies(it)
            left = len(it.named(victim))
            removable += _is_removable(it, victim) and len(it.named(victim)) > 0
            if eta is None and left <= held * 3 // 4:
                eta, quarter = it.status().eta_s, time.monotonic()
            time.sleep(LOOK_S)
        assert drain.join() == 0, drain.complaint()
        ended = time.monotonic()
        assert removable == 0, "the bookie could have been removed before its drain had ended"
        steps = [json.loads(line) for line in drain.lines]
        for name in ("ledgers_left", "bytes_left"):
            values = [step[name] for step in steps]
            assert values == sorted(values, reverse=True), f"{name} is not monotone: {values}"
        assert steps[-1]["ledgers_left"] == 0
        it.admin.ok_to_remove(victim)  # the wait ends when the bookie can be removed
        it.until_whole()
        it.check()
        return {
            "ledgers": held,
            "drained after s": round(ended - began, 1),
            "steps": len(steps),
            "eta at a quarter s": None if eta is None else round(eta, 1),
            "it took s": round(ended - quarter, 1),
        }


def check_copies(it: Stage) -> None:
    """Check that each place of each ledger is on a bookie that runs; one that is drained does.

    Whether it is registered does not count: on a busy machine a lease of a second ends now and then.
    """
    there = {each.bookie for each in it.admin.bookies() if it.bookie(each.name).alive}
    short = [each.ledger_id for each in it.ledgers() if not there.issuperset(bookies_of(each))]
    assert not short, f"ledgers {short[:5]} have fewer copies than they should have"


def _is_removable(it: Stage, name: str) -> bool:
    try:
        it.admin.ok_to_remove(name)
    except SafetyCheckError:
        return False
    return True


@scenario(16, "one of three bookies is to be drained")
def scenario_16_refused(directory: Path) -> Figures:
    with stage(directory, bookies=3, ledgers=5) as it:
        before = it.admin.bookies()[0]
        command = it.run("bookie", "drain", it.cluster.url, before.name, "--wait")
        assert command.join(WAIT_S) == REFUSED, command.complaint()
        said = command.complaint()
        assert "an ensemble of 3 needs 3 other writable bookies; there are 2" in said, said
        after = it.admin.bookies()[0]
        assert (after.state, after.since_ns, after.read_only) == (before.state, before.since_ns, False)
        it.check()
        return {"exit status": REFUSED, "text": said.strip().splitlines()[-1]}


@scenario(17, "a bookie is restarted while it is drained, and the drain is cancelled")
def scenario_17_restarted(directory: Path) -> Figures:
    with stage(directory, ledgers=20) as it:
        it.admin.pause_repair(600, "a scenario")
        victim = it.followers()[0]
        it.admin.drain(victim)
        it.bookie(victim).kill()
        it.bookie(victim).start()
        it.until(lambda: it.seen(victim).read_only, "the bookie to be read-only")
        assert it.seen(victim).state is BookieState.DRAINING, "the state of the bookie is forgotten"
        it.load.more()
        assert it.admin.cancel_drain(victim).state is BookieState.ACTIVE
        active = it.until(lambda: not it.seen(victim).read_only, "the bookie to take entries again")
        it.bookie(victim).terminate()
        it.bookie(victim).start()
        assert it.seen(victim).state is BookieState.ACTIVE
        assert not it.seen(victim).read_only
        it.admin.resume_repair(by="a scenario")
        it.until_whole()
        it.check()
        return {"takes entries again after s": active}


@scenario(18, "a writer chooses a bookie that is drained since")
def scenario_18_stale(directory: Path) -> Figures:
    with stage(directory, bookies=4, ledgers=5, load=False) as it:
        stale = it.cluster.connect()
        victim = it.followers()[0]
        membership = cluster_backend_of(stale).membership
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(membership, "refresh", lambda: None)  # what it knows of bookies is of before the drain
            it.admin.drain(victim)
            it.until(lambda: it.seen(victim).read_only, "the bookie to be read-only")
            written = _count_writes(membership)
            writers = [stale.create_ledger(password=PASSWORD, **SHAPE) for _ in range(10)]
        for writer in writers:
            writer.append(b"an entry")
            it.until(partial(_has_left, it, victim, writer.ledger_id), "another ensemble")
            writer.append(b"another entry")
        assert written, "no ledger chose the bookie"
        assert set(written.values()) == {1}, f"changes of ensembles: {written}"
        for writer in writers:
            writer.close()
        it.until_whole()
        it.check()
        return {"ledgers that chose it": len(written), "ensemble changes of each": 1}


def _has_left(it: Stage, name: str, ledger_id: int) -> bool:
    return name not in it.ensemble(ledger_id)


def _count_writes(membership: Membership) -> Counter[int]:
    """Return what counts the metadata that a client writes from now on, by ledger."""
    written: Counter[int] = Counter()
    write = membership.write

    def counted(ledger: RemoteLedger, effect: WriteMetadata) -> Event:
        written[ledger.ledger_id] += 1
        return write(ledger, effect)

    setattr(membership, "write", counted)  # noqa: B010  # a method, which mypy protects
    return written


@scenario(19, "the directory of a bookie that was removed is started")
def scenario_19_removed(directory: Path) -> Figures:
    with stage(directory, bookies=4, ledgers=20, load=False) as it:
        victim = it.followers()[0]
        assert it.run("bookie", "drain", it.cluster.url, victim, "--wait").join(WAIT_S) == 0
        remove = it.run("bookie", "remove", it.cluster.url, victim, "--yes")
        assert remove.join(WAIT_S) == 0, f"the drain was waited for until that is possible: {remove.complaint()}"
        assert state_of(it.admin, victim) is BookieState.REMOVED
        bookie = it.bookie(victim)
        if bookie.alive:
            bookie.terminate()
        status = bookie.begin().join(WAIT_S)
        assert status == 2, bookie.child.complaint()
        said = bookie.child.complaint().strip().splitlines()[-1]
        assert "removed" in said, said
        del it.cluster.bookies[victim]
        it.until_whole()
        it.check()
        return {"exit status": status, "text": said}
