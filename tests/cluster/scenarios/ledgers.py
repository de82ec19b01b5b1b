"""Scenarios 12 to 14: ledgers of which nothing is left, that are empty, and whose writers are gone."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

from pybk import BookieState, ClusterVerdict, LedgerState
from pybk.metadata.underreplication import RepairState
from tests.cluster.checker import check_writer
from tests.cluster.child import PASSWORD
from tests.cluster.processes import Child
from tests.cluster.scenarios.catalog import scenario
from tests.cluster.scenarios.stage import SHAPE, Figures, stage


@scenario(12, "the only copy of a ledger is gone")
def scenario_12_lost(directory: Path) -> Figures:
    with stage(directory, ledgers=10) as it:
        victim = it.followers()[0]
        one = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}
        ledger_id = next(made for _ in range(100) for made in it.fill(1, **one) if it.ensemble(made) == [victim])
        others = {each.ledger_id for each in it.ledgers() if each.ensemble_size == 1} - {ledger_id}
        it.bookie(victim).kill()
        lost = it.until(lambda: it.status().lost == tuple(sorted({ledger_id})), "the ledger to be lost")
        it.until(lambda: {mark.ledger_id for mark in it.marks()} == {ledger_id}, "all other repairs")
        (mark,) = it.marks()
        it.reports(10)
        assert it.marks() == [mark], "the mark of a lost ledger has changed"
        assert mark.state is RepairState.LOST
        tries = sum(each == ledger_id for _, each in it.copied())
        assert tries <= 2
        assert it.status().verdict is ClusterVerdict.BAD
        assert any(str(ledger_id) in reason.text for reason in it.status().reasons)
        it.bookie(victim).start()
        back = it.until_whole()
        it.check()
        return {
            "lost after s": lost,
            "tries": tries,
            "whole after its return s": back,
            "others of one copy": len(others),
        }


@scenario(13, "a bookie with empty ledgers is drained")
def scenario_13_empty(directory: Path) -> Figures:
    repair = {"open_grace_s": 1.0, "recover_abandoned": True}
    with stage(directory, ledgers=0, load=False, repair=repair) as it:
        for _ in range(10):
            it.client.create_ledger(password=PASSWORD, **SHAPE).close()
        gone = it.cluster.connect()
        for _ in range(10):
            gone.create_ledger(password=PASSWORD, **SHAPE)
        gone.close()
        kept = [it.client.create_ledger(password=PASSWORD, **SHAPE) for _ in range(3)]
        victim = it.followers()[0]
        count = sum(victim in it.ensemble(each.ledger_id) for each in it.ledgers())
        it.admin.drain(victim)

        def is_drained() -> bool:
            for writer in kept:  # the victim may take the first entries; a writer leaves it when it refuses one
                writer.append(b"a sign of life")
            return _state(it.admin.bookies(), victim) is BookieState.DRAINED

        drained = it.until(is_drained, "the end of the drain")
        assert it.admin.drain_progress(victim).ledgers_left == 0
        empty = {each.ledger_id for each in it.ledgers()} - {writer.ledger_id for writer in kept}
        assert it.copied_bytes(empty) == 0, "bytes of empty ledgers were copied"
        whole = it.until_whole()
        for writer in kept:
            writer.close()
        it.check()
        return {"ledgers": count, "drained after s": drained, "copied bytes": 0, "whole after s": whole}


def _state(bookies: object, name: str) -> BookieState:
    assert isinstance(bookies, tuple)
    found: BookieState = next(each.state for each in bookies if each.name == name)
    return found


def _has_written(writer: Child) -> bool:
    return len(writer.said("acked")) > 50


@scenario(14, "a writer and a bookie are killed")
def scenario_14_abandoned(directory: Path) -> Figures:
    with stage(directory, ledgers=10, load=False, repair={"open_grace_s": 2.0}) as it:
        # Two ensembles of four among five bookies share three, so that one of them is not the leader, which is to stay.
        killed, stopped = (it.cluster.writer(window=10, shape=(4, 3, 2)) for _ in range(2))
        for writer in (killed, stopped):
            writer.wait_for(partial(_has_written, writer))
        ids = [int(writer.said("ledger")[0]) for writer in (killed, stopped)]
        both = set(it.ensemble(ids[0])) & set(it.ensemble(ids[1])) - {it.leader()}
        killed.kill()
        stopped.stop()
        it.bookie(min(both)).kill()
        waiting = it.until(lambda: set(it.status().waiting) == set(ids), "ledgers that wait for their owners")
        assert {mark.state for mark in it.marks() if mark.ledger_id in ids} == {RepairState.WAITING_FOR_OWNER}
        it.reports(10)
        assert {it.client.ledger_metadata(each).state for each in ids} == {LedgerState.OPEN}
        it.change(recover_abandoned=True)
        whole = it.until_whole()
        closed = [it.client.ledger_metadata(each) for each in ids]
        assert {each.state for each in closed} == {LedgerState.CLOSED}
        assert not any(each.sealed for each in closed)
        stopped.signal(signal.SIGCONT)
        stopped.wait_for(lambda: stopped.said("error"))
        assert stopped.said("error")[0].split()[0] == "LedgerFencedError"
        for writer in (killed, stopped):
            check_writer(it.cluster, writer)
        it.check()
        return {"waiting after s": waiting, "closed and whole after s": whole}
