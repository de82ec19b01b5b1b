"""The bookie's machine over a model of its disk."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest

from pybk.errors import StorageFailedError, StorageFullError
from pybk.replication import bookie as bookie_module
from pybk.replication.bookie import POLL_NS_MAX, BookieEffect, BookieMachine, LookUp, Respond
from pybk.replication.messages import (
    Add,
    CompareLacs,
    EntryRun,
    Force,
    LacReply,
    LacsAbove,
    Read,
    ReadLac,
    ReadReply,
    Reply,
    Request,
    Status,
    WakeAt,
    WriteLac,
)
from tests.replication.driving import LEDGER, run
from tests.simulator.disk import ModelReplicas


class Disk(ModelReplicas):
    """The model of the simulator; it can fail, and says how often it synced."""

    def __init__(self) -> None:
        super().__init__(Random(1), deferred=False, short=0.0)
        self.syncs = 0
        self.error: Exception | None = None

    def commit(self) -> None:
        if self.error is not None:
            raise self.error
        self.syncs += 1
        super().commit()

    def fence(self, ledger_id: int, description: object) -> None:
        if self.error is not None:
            raise self.error
        super().fence(ledger_id, description)


class Bookie:
    """A machine whose replies are read by the names of who asked."""

    def __init__(self, *, known: bool = True, polls_max: int = 10) -> None:
        self.disk = Disk()
        self.disk.known = known
        self.machine = BookieMachine(self.disk, polls_max=polls_max)
        self.now = 0

    def ask(self, sender: str, request: Request) -> list[BookieEffect]:
        return self.machine.receive(sender, request, b"description", self.now)

    def reply(self, request: Request) -> Any:
        """Return the reply to a request that is answered at once."""
        (effect,) = self.ask("me", request)
        assert isinstance(effect, Respond)
        return effect.reply

    def add(self, first: int, last: int, *, lac: int = -1, recovery: bool = False, deferred: bool = False) -> Add:
        return Add(LEDGER, (run(first, last),), lac, recovery, deferred)


def read(first: int = 0, last: int = 99, *, fence: bool = False) -> Read:
    return Read(LEDGER, first, last, 1, 1 << 20, fence)


def test_adds_are_acknowledged_by_one_sync_for_all() -> None:
    bookie = Bookie()
    assert bookie.ask("a", bookie.add(0, 3)) == []
    assert bookie.ask("b", bookie.add(4, 4)) == []
    assert bookie.disk.durable == {}
    assert bookie.machine.commit() == [Respond("a", Reply(Status.OK)), Respond("b", Reply(Status.OK))]
    assert sorted(bookie.disk.durable) == [0, 1, 2, 3, 4]
    assert bookie.disk.syncs == 1
    assert bookie.machine.commit() == []
    assert bookie.disk.syncs == 1


def test_the_same_entries_again_are_acknowledged_and_others_are_not() -> None:
    """I14."""
    bookie = Bookie()
    bookie.ask("a", bookie.add(0, 1))
    bookie.machine.commit()
    assert bookie.ask("a", bookie.add(0, 1)) == []
    assert bookie.machine.commit() == [Respond("a", Reply(Status.OK))]
    other = EntryRun(1, 1, array("q", [5]), (b"other",))
    assert bookie.reply(Add(LEDGER, (other,), -1)).status is Status.CONFLICT


def test_an_unknown_ledger_is_looked_up_once_and_then_made() -> None:
    bookie = Bookie(known=False)
    assert bookie.ask("a", bookie.add(0, 0)) == [LookUp(LEDGER)]
    assert bookie.ask("b", bookie.add(1, 1)) == []
    assert bookie.machine.commit() == []
    assert bookie.machine.ledger_looked_up(LEDGER, True, 0) == []
    assert len(bookie.machine.commit()) == 2
    assert bookie.ask("c", bookie.add(2, 2)) == []


def test_requests_that_wait_for_a_look_up_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    bookie = Bookie(known=False)
    adds = [bookie.add(number, number) for number in range(3)]
    monkeypatch.setattr(bookie_module, "PARKED_BYTES_MAX", sum(sum(add.runs[0].sizes) for add in adds[:2]))
    for _ in range(2):
        assert bookie.ask("a", adds[0]) == [LookUp(LEDGER)]
        assert bookie.ask("b", adds[1]) == []
        assert bookie.reply(adds[2]).status is Status.REFUSED
        unknown = Reply(Status.UNKNOWN)
        assert bookie.machine.ledger_looked_up(LEDGER, None, 0) == [Respond("a", unknown), Respond("b", unknown)]


@pytest.mark.parametrize(("exists", "status"), [(False, Status.DELETED), (None, Status.UNKNOWN)])
def test_an_add_makes_no_ledger_that_does_not_exist(exists: bool | None, status: Status) -> None:
    """C11."""
    bookie = Bookie(known=False)
    bookie.ask("a", bookie.add(0, 0))
    assert bookie.machine.ledger_looked_up(LEDGER, exists, 0) == [Respond("a", Reply(status))]
    assert bookie.disk.state(LEDGER) is None


def test_a_deletion_overrides_an_earlier_look_up() -> None:
    bookie = Bookie(known=False)
    bookie.ask("a", bookie.add(0, 0))
    bookie.machine.ledger_deleted(LEDGER)
    assert bookie.machine.ledger_looked_up(LEDGER, True, 0) == [Respond("a", Reply(Status.DELETED))]
    assert bookie.ask("a", bookie.add(0, 0)) == [LookUp(LEDGER)]


def test_a_deletion_answers_waiting_requests() -> None:
    bookie = Bookie()
    bookie.ask("a", bookie.add(0, 0))
    bookie.ask("p", ReadLac(LEDGER, beyond=5, wait_ns=10))
    assert bookie.machine.ledger_deleted(LEDGER) == [
        Respond("a", Reply(Status.DELETED)),
        Respond("p", LacReply(Status.DELETED)),
    ]
    assert bookie.machine.commit() == []


def test_a_fence_comes_after_accepted_adds_and_before_its_reply() -> None:
    """AB2, AB3."""
    bookie = Bookie()
    bookie.ask("a", bookie.add(0, 0, lac=-1))
    effects = bookie.ask("r", ReadLac(LEDGER, fence=True))
    assert effects[0] == Respond("a", Reply(Status.OK))
    assert isinstance(effects[1], Respond)
    assert effects[1].reply.status is Status.OK
    assert bookie.disk.fenced
    assert bookie.reply(bookie.add(1, 1)).status is Status.FENCED
    assert bookie.ask("r", bookie.add(1, 1, recovery=True)) == []
    assert bookie.machine.commit() == [Respond("r", Reply(Status.OK))]


def test_a_fence_reaches_ledgers_never_seen_and_read_only_bookies() -> None:
    """AB3, K8."""
    for request in (ReadLac(LEDGER, fence=True), read(fence=True)):
        bookie = Bookie(known=False)
        bookie.machine.read_only = True
        assert bookie.reply(request).status is Status.NO_SUCH_LEDGER
        assert bookie.disk.fenced
        assert bookie.reply(bookie.add(0, 0)).status is Status.FENCED


def test_a_fence_that_is_not_durable_is_not_acknowledged() -> None:
    for request in (ReadLac(LEDGER, fence=True), read(fence=True)):
        bookie = Bookie()
        bookie.disk.error = StorageFailedError("sync")
        assert bookie.reply(request).status is Status.UNKNOWN
        bookie.disk.error = None
        bookie.disk.fenced = True
        assert bookie.reply(request).status in (Status.OK, Status.NO_SUCH_ENTRY)


def test_a_read_only_bookie_takes_recoveries_alone() -> None:
    bookie = Bookie()
    bookie.machine.read_only = True
    assert bookie.reply(bookie.add(0, 0)).status is Status.READ_ONLY
    assert bookie.ask("r", bookie.add(0, 0, recovery=True)) == []


def test_in_limbo_nothing_is_denied_and_nothing_new_is_taken() -> None:
    """D6."""
    bookie = Bookie()
    bookie.disk.limbo = True
    assert bookie.reply(bookie.add(0, 0)).status is Status.LIMBO
    assert bookie.reply(read()).status is Status.UNKNOWN
    assert bookie.reply(Force(LEDGER)).status is Status.LIMBO
    assert bookie.reply(ReadLac(LEDGER, fence=True)).status is Status.OK
    assert bookie.ask("r", bookie.add(0, 0, recovery=True)) == []


def test_in_limbo_for_unforced_entries_recoveries_are_denied_what_is_not_here_and_others_are_not() -> None:
    """D6: it was never forced, and behind the fence it never will be, not even when the limbo is over."""
    bookie = Bookie()
    bookie.disk.limbo = True
    assert bookie.reply(read()).status is Status.UNKNOWN
    assert bookie.reply(read(fence=True)).status is Status.NO_SUCH_ENTRY
    assert bookie.disk.fenced
    assert bookie.reply(read()).status is Status.UNKNOWN
    assert bookie.reply(bookie.add(0, 0)).status is Status.FENCED
    for bookie.disk.limbo in (True, False):
        assert bookie.reply(Force(LEDGER)).status is Status.FENCED


def test_in_limbo_nothing_is_denied_before_the_fence_is_durable() -> None:
    """D6."""
    bookie = Bookie()
    bookie.disk.limbo = True
    bookie.disk.error = StorageFullError("fence")
    assert bookie.reply(read(fence=True)).status is Status.UNKNOWN


def test_where_durable_entries_may_be_lost_nothing_is_denied_to_recoveries_either() -> None:
    """D6."""
    bookie = Bookie()
    bookie.disk.limbo = bookie.disk.gap = True
    assert bookie.reply(read(fence=True)).status is Status.UNKNOWN


def test_where_durable_entries_may_be_lost_only_recoveries_get_a_lac() -> None:
    """D6: it may be too low, and would count as that of a bookie which knows."""
    bookie = Bookie()
    bookie.ask("a", bookie.add(0, 2, lac=1))
    bookie.machine.commit()
    bookie.disk.limbo = True
    assert bookie.reply(ReadLac(LEDGER)).status is Status.OK
    bookie.disk.gap = True
    assert bookie.reply(ReadLac(LEDGER)) == LacReply(Status.UNKNOWN)
    assert bookie.reply(ReadLac(LEDGER, beyond=5, wait_ns=100)) == LacReply(Status.UNKNOWN)
    told = bookie.reply(ReadLac(LEDGER, fence=True))
    assert (told.status, told.lac) == (Status.OK, 1)


def test_entries_about_to_be_acknowledged_are_not_denied() -> None:
    """I17."""
    bookie = Bookie()
    bookie.ask("a", bookie.add(0, 1))
    effects = bookie.ask("r", read(fence=False))
    assert effects[0] == Respond("a", Reply(Status.OK))
    assert isinstance(effects[1], Respond)
    assert isinstance(effects[1].reply, ReadReply)
    assert effects[1].reply.run is not None
    assert effects[1].reply.run.last == 1


def test_durable_entries_are_read_without_a_sync() -> None:
    bookie = Bookie()
    bookie.ask("a", bookie.add(0, 1))
    bookie.machine.commit()
    bookie.ask("a", bookie.add(2, 2))
    assert bookie.reply(read(0, 1)).status is Status.OK
    assert bookie.disk.syncs == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [(StorageFullError("full"), Status.READ_ONLY), (StorageFailedError("sync"), Status.UNKNOWN)],
)
def test_entries_that_could_not_be_synced_are_not_acknowledged(error: Exception, status: Status) -> None:
    bookie = Bookie()
    bookie.ask("a", bookie.add(0, 0))
    bookie.disk.error = error
    assert bookie.machine.commit() == [Respond("a", Reply(status))]


def test_deferred_adds_are_acknowledged_at_once_and_synced_by_force() -> None:
    bookie = Bookie()
    assert bookie.reply(bookie.add(0, 0, deferred=True)) == Reply(Status.OK)
    assert bookie.machine.commit() == []
    assert bookie.disk.durable == {}
    assert bookie.ask("f", Force(LEDGER)) == []
    assert bookie.machine.commit() == [Respond("f", Reply(Status.OK))]
    assert sorted(bookie.disk.durable) == [0]


def test_deferred_adds_can_be_read_by_a_recovery() -> None:
    bookie = Bookie()
    bookie.ask("a", bookie.add(0, 0, deferred=True))
    assert bookie.reply(read(fence=True)).run is not None


def test_the_lac_only_rises() -> None:
    """I13."""
    bookie = Bookie()
    for lac, known in ((3, 3), (1, 3), (5, 5)):
        bookie.ask("a", bookie.add(lac + 1, lac + 1, lac=lac))
        bookie.ask("a", WriteLac(LEDGER, lac, b"packet %d" % lac))
        assert bookie.reply(ReadLac(LEDGER)).lac == known


def test_the_lac_is_proven_by_the_last_entry_and_by_the_packet() -> None:
    bookie = Bookie()
    bookie.ask("a", bookie.add(0, 2))
    bookie.machine.commit()
    bookie.ask("a", WriteLac(LEDGER, 2, b"packet"))
    reply = bookie.reply(ReadLac(LEDGER))
    assert (reply.lac, reply.packet, reply.entry_id) == (2, b"packet", 2)
    assert reply.entry == bookie.disk.durable[2]
    assert Bookie(known=False).reply(ReadLac(LEDGER)) == LacReply(Status.NO_SUCH_LEDGER)


def test_a_comparison_names_the_ledgers_with_a_higher_lac() -> None:
    bookie = Bookie()
    bookie.ask("a", bookie.add(4, 4, lac=3))
    for lac, above in ((2, [LEDGER]), (3, []), (4, [])):
        request = CompareLacs(array("q", (LEDGER,)), array("q", (lac,)))
        assert bookie.machine.compare_lacs(request) == LacsAbove(array("q", above))
    assert bookie.machine.commit(), "it syncs nothing"
    unknown = Bookie(known=False).machine.compare_lacs(CompareLacs(array("q", (LEDGER,)), array("q", (-1,))))
    assert unknown == LacsAbove(array("q")), "no entry of it was acknowledged here"


def test_a_comparison_names_the_ledgers_whose_lac_may_be_lost() -> None:
    """D6."""
    bookie = Bookie()
    bookie.ask("a", bookie.add(4, 4, lac=3))
    request = CompareLacs(array("q", (LEDGER,)), array("q", (99,)))
    bookie.disk.limbo = True
    assert bookie.machine.compare_lacs(request) == LacsAbove(array("q")), "deferred entries alone may be lost"
    bookie.disk.gap = True
    assert bookie.machine.compare_lacs(request) == LacsAbove(array("q", (LEDGER,)))


def test_long_polls_are_answered_when_the_lac_moves() -> None:
    bookie = Bookie()
    assert bookie.ask("p", ReadLac(LEDGER, beyond=3, wait_ns=100)) == [WakeAt(100)]
    assert bookie.ask("q", ReadLac(LEDGER, beyond=8, wait_ns=50)) == [WakeAt(50)]
    assert bookie.ask("a", bookie.add(4, 4, lac=3)) == []
    (ack,) = bookie.machine.commit()
    assert ack == Respond("a", Reply(Status.OK, watched=True))
    effects = bookie.ask("a", WriteLac(LEDGER, 4))
    assert isinstance(effects[0], Respond)
    assert effects[0].sender == "p"
    assert isinstance(effects[0].reply, LacReply)
    assert effects[0].reply.lac == 4
    assert effects[1] == Respond("a", Reply(Status.OK, watched=True))


def test_long_polls_are_answered_at_their_deadline() -> None:
    """Also if the ledger is fenced meanwhile, which does not change the LAC (BK #2052)."""
    bookie = Bookie()
    bookie.ask("p", ReadLac(LEDGER, beyond=3, wait_ns=100))
    bookie.ask("q", ReadLac(LEDGER, beyond=3, wait_ns=200))
    assert len(bookie.ask("r", ReadLac(LEDGER, fence=True))) == 1
    effects = bookie.machine.woken(100)
    assert [effect.sender for effect in effects if isinstance(effect, Respond)] == ["p"]
    assert effects[-1] == WakeAt(200)
    assert len(bookie.machine.woken(200)) == 1
    assert bookie.machine.woken(300) == []


def test_too_many_do_not_wait() -> None:
    bookie = Bookie(polls_max=1)
    bookie.ask("p", ReadLac(LEDGER, beyond=3, wait_ns=100))
    assert bookie.reply(ReadLac(LEDGER, beyond=3, wait_ns=100)).lac == -1
    bookie.machine.woken(100)
    assert bookie.ask("q", ReadLac(LEDGER, beyond=3, wait_ns=100)) == [WakeAt(100)]


def test_polls_are_bounded_by_owner_expire_and_end_with_it() -> None:
    disk = Disk()
    machine = BookieMachine(disk, polls_max=10, owner_polls_max=3, owner_of=lambda sender: sender[0])
    forever = ReadLac(LEDGER, beyond=3, wait_ns=1 << 62)
    for number in range(3):
        assert machine.receive(("p", number), forever, None, 0) == [WakeAt(POLL_NS_MAX)]
    (refused,) = machine.receive(("p", 4), forever, None, 0)
    assert isinstance(refused, Respond)  # answered at once
    for number in range(7 - 4):
        assert len(machine.receive(("q", number), forever, None, 5)) == 1
    machine.owner_ended("p")
    machine.owner_ended("nobody")
    assert machine.receive(("p", 9), forever, None, 7)[0] == WakeAt(POLL_NS_MAX)
    effects = machine.woken(POLL_NS_MAX + 5)
    assert [effect.sender for effect in effects if isinstance(effect, Respond)] == [("q", 0), ("q", 1), ("q", 2)]
    assert effects[-1] == WakeAt(POLL_NS_MAX + 7)
    assert len(machine.woken(POLL_NS_MAX + 7)) == 1
    assert machine.woken(1 << 62) == []


def test_polls_that_were_answered_leave_nothing() -> None:
    bookie = Bookie(polls_max=1 << 20)
    for lac in range(3000):
        bookie.ask("p", ReadLac(LEDGER, beyond=lac, wait_ns=1000))
        assert len(bookie.ask("a", WriteLac(LEDGER, lac + 1))) == 2
    polls = bookie.machine.polls
    assert (polls.count, polls.by_ledger, polls.by_owner) == (0, {}, {})
    assert len(polls.deadlines) <= 100


def test_a_poll_beside_many_that_wait_costs_no_pass_over_them() -> None:
    bookie = Bookie(polls_max=1 << 20)
    bookie.ask("p", ReadLac(LEDGER, beyond=0, wait_ns=1000))
    deadlines = bookie.machine.polls.deadlines
    for lac in range(1, 300):
        bookie.ask("p", ReadLac(LEDGER, beyond=lac, wait_ns=1000))
    assert bookie.machine.polls.deadlines is deadlines
    assert len(deadlines) == 300


def test_a_fence_that_failed_is_made_again_until_it_is_durable() -> None:
    """AB3: in memory it may be there, and refuse adds; the bookie must not answer that it is."""
    for request in (ReadLac(LEDGER, fence=True), read(fence=True)):
        bookie = Bookie()
        bookie.disk.error = StorageFailedError("sync")
        for _ in range(2):
            assert bookie.reply(request).status is Status.UNKNOWN
            bookie.disk.fenced = True
        bookie.disk.error = None
        assert bookie.reply(request).status is not Status.UNKNOWN
        assert bookie.disk.fence_durable


def test_a_fence_that_failed_for_one_ledger_holds_up_no_other() -> None:
    bookie = Bookie()
    bookie.disk.fenced = bookie.disk.fence_durable = True
    bookie.machine.receive("r", ReadLac(LEDGER + 1, fence=True), b"description", 0)
    bookie.disk.error = StorageFailedError("sync")
    assert bookie.reply(ReadLac(LEDGER, fence=True)).status is Status.OK


def test_entries_that_the_storage_cannot_read_are_unknown() -> None:
    """K5."""
    bookie = Bookie()
    bookie.disk.errors = 1.0
    assert bookie.reply(read()) == ReadReply(Status.UNKNOWN, None, -1)
    assert bookie.reply(ReadLac(LEDGER)) == LacReply(Status.UNKNOWN)


@pytest.mark.parametrize("deferred", [False, True])
def test_entries_that_a_failed_sync_left_staged_are_synced_before_they_are_read(deferred: bool) -> None:
    """Or it would be unknown for ever, and no recovery could find the ledger's end (I10)."""
    bookie = Bookie()
    bookie.ask("a", bookie.add(0, 1, deferred=deferred))
    bookie.ask("f", Force(LEDGER))
    bookie.disk.error = StorageFullError("full")
    assert {effect.reply.status for effect in bookie.machine.commit() if isinstance(effect, Respond)} == {
        Status.READ_ONLY
    }
    assert bookie.reply(read()).status is not Status.OK
    bookie.disk.error = None
    assert bookie.reply(read()).run.last == 1


def test_entries_staged_before_an_error_are_synced_before_they_are_read() -> None:
    """I10."""
    bookie = Bookie()
    other = EntryRun(2, 1, array("q", [5]), (b"other",))
    bookie.ask("a", Add(LEDGER, (other,), -1))
    bookie.machine.commit()
    two = Add(LEDGER, (run(0, 1), run(2, 2)), -1)
    assert bookie.reply(two).status is Status.CONFLICT
    assert bookie.reply(read(0, 1)).run.last == 1


def test_a_deletion_does_not_answer_requests_about_another_ledger() -> None:
    bookie = Bookie()
    bookie.ask("a", bookie.add(0, 0))
    bookie.ask("p", ReadLac(LEDGER, beyond=5, wait_ns=10))
    assert bookie.machine.ledger_deleted(LEDGER + 1) == []
    assert bookie.machine.commit() == [Respond("a", Reply(Status.OK, watched=True))]


def holding(*, fenced: bool = False) -> Bookie:
    """Return a bookie that has entries 0 to 3."""
    bookie = Bookie()
    bookie.ask("a", bookie.add(0, 3))
    bookie.machine.commit()
    if fenced:
        bookie.disk.fence(LEDGER, b"")
    return bookie


def test_entries_are_dropped_and_a_fence_stays() -> None:
    """SD5."""
    for fenced in (False, True):
        bookie = holding(fenced=fenced)
        assert bookie.machine.announce_drop(LEDGER)
        assert bookie.machine.drop_entries(LEDGER) == (True, [])
        assert bookie.disk.durable == {}
        state = bookie.disk.state(LEDGER)
        assert (state is not None and state.fenced) == fenced
        status = Status.NO_SUCH_ENTRY if fenced else Status.NO_SUCH_LEDGER
        assert bookie.reply(read()).status is status
        assert bookie.machine.drop_entries(LEDGER) == (False, []), "an announcement is for one drop"


def test_entries_that_are_added_after_the_announcement_keep_the_copy() -> None:
    """SD3."""
    bookie = holding(fenced=True)
    bookie.machine.announce_drop(LEDGER)
    assert bookie.reply(bookie.add(4, 4)).status is Status.FENCED
    bookie.ask("a", bookie.add(0, 0, recovery=True))
    bookie.machine.commit()
    assert bookie.machine.drop_entries(LEDGER) == (False, [])
    assert sorted(bookie.disk.durable) == [0, 1, 2, 3]
    bookie.machine.announce_drop(LEDGER)
    assert bookie.machine.drop_entries(LEDGER)[0]


def test_an_add_that_was_refused_keeps_no_copy() -> None:
    bookie = holding(fenced=True)
    bookie.machine.announce_drop(LEDGER)
    assert bookie.reply(bookie.add(4, 4)).status is Status.FENCED
    assert bookie.machine.drop_entries(LEDGER)[0]


def test_what_was_added_before_the_announcement_is_acknowledged_before_the_drop() -> None:
    bookie = holding()
    bookie.ask("b", bookie.add(4, 4))
    bookie.machine.announce_drop(LEDGER)
    assert bookie.machine.drop_entries(LEDGER) == (True, [Respond("b", Reply(Status.OK))])
    assert bookie.disk.durable == {}


def test_no_copy_is_dropped_unannounced_in_limbo_unknown_or_deleted() -> None:
    bookie = holding()
    assert bookie.machine.drop_entries(LEDGER) == (False, [])
    bookie.disk.limbo = True
    assert not bookie.machine.announce_drop(LEDGER)
    assert not Bookie(known=False).machine.announce_drop(LEDGER)
    bookie.disk.limbo = False
    bookie.machine.announce_drop(LEDGER)
    bookie.machine.ledger_deleted(LEDGER)
    assert bookie.machine.drop_entries(LEDGER) == (False, [])
