"""The administration of a cluster: its status, and bookies that are drained, stopped and removed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk import (
    BookieState,
    ClusterAdmin,
    ClusterVerdict,
    IllegalOperationError,
    LedgerManager,
    LedgerWriter,
    RepairReason,
    RepairState,
    SafetyCheckError,
    UsageError,
)
from pybk.errors import NotEnoughBookiesError
from pybk.healing import auditor_driver
from pybk.manager.connect import open_cluster
from pybk.metadata.cluster import ClusterMetadata
from pybk.operations import cluster_admin as cluster_admin_module
from tests.cluster.inside import SECRET, Inside, inside
from tests.healing.quick import repair_quickly
from tests.internals import cluster_backend_of, service_of
from tests.storage.real_store import open_quick
from tests.waiting import wait_until

HOUR = 3_600_000_000_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path, count=4) as cluster:
        yield cluster


@pytest.fixture
def admin(cluster: Inside) -> ClusterAdmin:
    return ClusterAdmin(cluster.connect())


@pytest.fixture
def metadata(cluster: Inside) -> Iterator[ClusterMetadata]:
    metadata, _ = open_cluster(cluster.url, SECRET, create=False)
    with metadata:
        yield metadata


def make_writer(manager: LedgerManager, entries: int = 5, *, size: int = 3, ack: int = 2) -> LedgerWriter:
    """Make a ledger; it has a writer as long as the caller keeps what is returned."""
    writer = manager.create_ledger(password=b"p", ensemble_size=size, write_quorum=size, ack_quorum=ack)
    for number in range(entries):
        writer.append(b"entry %d" % number)
    return writer


def make_ledger(manager: LedgerManager, entries: int = 5, *, size: int = 3, ack: int = 2) -> int:
    with make_writer(manager, entries, size=size, ack=ack) as writer:
        return writer.ledger_id


def bookies_of(manager: LedgerManager, ledger_id: int) -> list[str]:
    return [bookie.bookie_id for bookie in manager.ledger_metadata(ledger_id).fragments[-1].ensemble]


def states(admin: ClusterAdmin) -> dict[str, BookieState]:
    return {each.name: each.state for each in admin.bookies(removed=True)}


def test_a_store_has_no_administration(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager, pytest.raises(UsageError, match="is a store, which has no bookies"):
        ClusterAdmin(manager)


def test_bookies_are_listed_with_what_is_known_of_them(cluster: Inside, admin: ClusterAdmin) -> None:
    first, *_, last = admin.bookies()
    assert (first.name, first.state, first.registered, first.absent) == ("bookie-0", BookieState.ACTIVE, True, False)
    assert first.free_bytes
    assert first.capacity_bytes.keys() == first.free_bytes.keys()
    assert all(free < first.capacity_bytes[tier] for tier, free in first.free_bytes.items())
    assert first.addresses
    assert first.writable
    cluster.bookies[3].close()
    wait_until(lambda: not admin.bookies()[3].registered, "the bookie is not registered any more")
    gone = admin.bookies()[3]
    assert (gone.bookie, gone.absent, gone.free_bytes, gone.addresses) == (last.bookie, True, {}, ())
    assert gone.version == last.version


def test_without_an_auditor_the_status_says_what_is_known(
    cluster: Inside, admin: ClusterAdmin, metadata: ClusterMetadata
) -> None:
    status = admin.status()
    assert (status.verdict, status.auditor, status.absent) == (ClusterVerdict.WARN, "", ())
    assert status.reasons[0].code == "no_auditor"
    assert status.bookies == {BookieState.ACTIVE: 4}
    client = cluster.connect()
    ledger_id = make_ledger(client)
    name = bookies_of(client, ledger_id)[0]
    bookie = next(each.bookie for each in admin.bookies() if each.name == name)
    metadata.mark_under_replicated(ledger_id, bookie, 0, reason=RepairReason.DAMAGED, size_bytes=70)
    (mark,) = metadata.marks_of(ledger_id)
    status = admin.status()
    assert (status.short, status.queued_bytes, status.stuck) == ({"2": 1}, 70, ())
    metadata.update_mark(mark, state=RepairState.LOST)
    status = admin.status()
    assert (status.verdict, status.lost) == (ClusterVerdict.BAD, (ledger_id,))


REPORT: dict[str, Any] = {
    "auditor": "bookie-2",
    "reported_ns": 1 << 62,
    "holds": [],
    "frozen": False,
    "short": {"0": 0, "1": 2},
    "queued_bytes": 70,
    "rate": 10.0,
    "eta_s": 7.0,
    "lost": [],
    "waiting": [],
    "no_target": [],
    "stuck": [9],
    "bookies": [{"bookie_id": "bookie-1", "status": "in_limbo", "absent_ns": 0}],
}
"""What people see of an auditor's report."""


def report_is(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    monkeypatch.setattr(ClusterMetadata, "read_auditor_report", lambda _: {**REPORT, **changed})


def test_the_report_of_the_auditor_is_shown(admin: ClusterAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    report_is(monkeypatch, short={}, stuck=[], bookies=[])
    assert (admin.status().verdict, admin.status().reasons) == (ClusterVerdict.OK, ())
    report_is(monkeypatch, short={}, stuck=[], bookies=[], ensembles=[4])
    status = admin.status()
    assert (status.verdict, [reason.code for reason in status.reasons]) == (ClusterVerdict.OK, ["no_spare_bookie"])
    report_is(monkeypatch)
    status = admin.status()
    assert (status.verdict, status.auditor, status.reported_ns, status.stuck) == (
        ClusterVerdict.WARN,
        "bookie-2",
        1 << 62,
        (9,),
    )
    assert (status.short, status.queued_bytes, status.rate, status.eta_s) == ({"1": 2}, 70, 10.0, 7.0)
    assert status.reasons == (
        ("repair_stuck", "the repair of ledgers failed repeatedly: 9"),
        ("one_copy_left", "ledgers with entries of which one copy is left: 2"),
        ("bookies_in_limbo", "bookies copy back what they may have lost: bookie-1"),
    )
    report_is(monkeypatch, holds=[{"reason": "many_lost", "text": "two were lost"}], lost=[3])
    status = admin.status()
    assert (status.verdict, status.holds, status.lost) == (ClusterVerdict.BAD, ("two were lost",), (3,))
    with pytest.raises(SafetyCheckError, match="repairs are on hold: two were lost"):
        admin.drain("bookie-0")
    absent = {"bookie_id": "bookie-1", "status": "absent", "absent_ns": 100 * 10**9}
    report_is(monkeypatch, short={"2": 548}, reasons={"lost": 3}, bookies=[absent], holds=[])
    status = admin.status()
    [because] = status.held_because
    assert status.held == 545
    assert "bookie bookie-1 is absent, and its copies are made elsewhere unless it returns within" in because
    report_is(monkeypatch, holds=[{"reason": "session_young", "text": "wait"}])
    assert admin.status().verdict is ClusterVerdict.WARN


def test_one_bookie_of_three_that_is_gone_is_a_warning_and_two_are_bad(
    admin: ClusterAdmin, cluster: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.bookies[3].close()
    cluster.bookies[2].close()
    hold = {"reason": "few_writable", "text": "2, and an open ledger has 3; add bookies"}
    report_is(monkeypatch, short={"2": 6}, stuck=[], bookies=[], ensembles=[3], holds=[hold])
    wait_until(lambda: sum(each.registered for each in admin.bookies()) == 2)
    status = admin.status()
    assert status.verdict is ClusterVerdict.WARN
    assert {"hold_few_writable", "under_replicated", "bookies_absent"} <= {each.code for each in status.reasons}
    report_is(monkeypatch, short={"0": 1}, stuck=[], bookies=[], ensembles=[3], holds=[hold])
    assert admin.status().verdict is ClusterVerdict.BAD, "entries are out of reach"
    report_is(monkeypatch, short={"2": 6}, stuck=[], bookies=[], ensembles=[3], holds=[hold])
    cluster.bookies[1].close()
    wait_until(lambda: sum(each.registered for each in admin.bookies()) == 1)
    status = admin.status()
    assert (status.verdict, status.reasons[0].code) == (ClusterVerdict.BAD, "too_few_bookies")
    assert "1 bookies take entries, and each ledger needs 2 or more" in status.reasons[0].text


@pytest.mark.parametrize("in_asyncio", [False, True])
def test_a_refusal_that_passes_by_itself_is_waited_for(
    admin: ClusterAdmin, monkeypatch: pytest.MonkeyPatch, in_asyncio: bool
) -> None:
    def drain(wait_s: float) -> BookieState:
        if in_asyncio:
            return asyncio.run(admin.drain_async("bookie-0", wait_s=wait_s)).state
        return admin.drain("bookie-0", wait_s=wait_s).state

    young, lost = {"reason": "session_young", "text": "wait"}, {"reason": "many_lost", "text": "two"}
    looks: list[int] = []

    def passes(metadata: ClusterMetadata) -> dict[str, Any]:
        looks.append(1)
        return {"holds": [young] if len(looks) < 3 else []}

    monkeypatch.setattr(cluster_admin_module, "RETRY_S", 0.01)
    monkeypatch.setattr(ClusterMetadata, "read_auditor_report", lambda metadata: {"holds": [young, lost]})
    with pytest.raises(SafetyCheckError) as lasting:
        drain(3600.0)
    assert not lasting.value.passing, "a loss does not end by itself"
    monkeypatch.setattr(ClusterMetadata, "read_auditor_report", passes)
    with pytest.raises(SafetyCheckError) as refused:
        drain(0.0)
    assert refused.value.passing
    monkeypatch.setattr(cluster_admin_module, "REQUESTS_SECONDS", 3600.0)
    assert drain(3600.0) is BookieState.DRAINING
    with pytest.raises(SafetyCheckError) as early:
        admin.ok_to_remove("bookie-0")
    assert early.value.passing
    monkeypatch.setattr(cluster_admin_module, "REQUESTS_SECONDS", 0.2)
    assert admin.ok_to_remove("bookie-0", wait_s=3600.0).bookie.bookie_id == "bookie-0"


def test_of_two_drains_at_once_none_relies_on_the_other(
    cluster: Inside, admin: ClusterAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, other, _ = bookies_of(cluster.connect(), make_ledger(cluster.connect()))
    change_cookie = ClusterMetadata.change_cookie

    def also_another(metadata: ClusterMetadata, changed: str, change: Any) -> Any:
        monkeypatch.setattr(ClusterMetadata, "change_cookie", change_cookie)
        metadata.change_cookie(other, lambda found: replace(found, state=BookieState.DRAINING))
        return metadata.change_cookie(changed, change)

    monkeypatch.setattr(ClusterMetadata, "change_cookie", also_another)
    with pytest.raises(SafetyCheckError, match="there are 2"):
        admin.drain(name)
    assert states(admin)[name] is BookieState.ACTIVE


def test_a_drain_is_refused_with_each_check_that_fails(tmp_path: Path) -> None:
    with inside(tmp_path, count=3) as cluster:
        client = cluster.connect()
        admin = ClusterAdmin(client)
        make_ledger(client)
        with pytest.raises(SafetyCheckError, match="needs 3 other writable bookies; there are 2") as refused:
            admin.drain("bookie-1")
        assert len(refused.value.failures) == 1
        assert states(admin)["bookie-1"] is BookieState.ACTIVE
        with pytest.raises(UsageError, match="there are bookie-0, bookie-1, bookie-2"):
            admin.drain("nobody")


def test_a_drain_is_refused_while_zones_would_be_missing(cluster: Inside, admin: ClusterAdmin) -> None:
    make_ledger(cluster.connect(), size=2)
    admin.change_settings(lambda found: replace(found, placement=replace(found.placement, min_zones=2, strict=True)))
    name = bookies_of(cluster.connect(), 0)[0]
    with pytest.raises(SafetyCheckError, match=r"placement\.strict asks for 2 zones"):
        admin.drain(name)


def is_read_only(admin: ClusterAdmin, name: str) -> bool:
    return next(each.read_only for each in admin.bookies() if each.name == name)


def test_a_bookie_is_drained_and_removed(cluster: Inside, admin: ClusterAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    client = cluster.connect()
    ledger_id = make_ledger(client)
    name = bookies_of(client, ledger_id)[0]
    progress = admin.drain(name)
    assert (progress.state, progress.ledgers_left, progress.bytes_left) == (BookieState.DRAINING, 1, 35)
    again = admin.drain(name)
    # What it waits for becomes less meanwhile: the bookie may have become read-only.
    assert replace(again, waits=progress.waits) == progress, "a bookie that is drained already stays so"
    assert admin.cancel_drain(name).state is BookieState.ACTIVE
    monkeypatch.setattr(cluster_admin_module, "REQUESTS_SECONDS", 3600.0)
    admin.drain(name)
    with pytest.raises(SafetyCheckError, match=r"ask again after \d"):
        admin.ok_to_remove(name)
    monkeypatch.setattr(cluster_admin_module, "REQUESTS_SECONDS", 0.0)
    wait_until(lambda: is_read_only(admin, name), "the bookie is read-only")
    with pytest.raises(SafetyCheckError, match=f"1 ledger names it: {ledger_id};"):
        admin.ok_to_remove(name)
    with pytest.raises(SafetyCheckError, match="there is no proof"):
        admin.remove(name)
    client.replicate(name)
    assert admin.drain_progress(name).ledgers_left == 0
    proof = admin.ok_to_remove(name)
    assert (proof.bookie.bookie_id, proof.ledgers) == (name, 1)
    admin.cancel_drain(name)
    wait_until(lambda: not is_read_only(admin, name), "the bookie takes entries again")
    admin.drain(name)
    with pytest.raises(SafetyCheckError, match="the proof is of an earlier drain"):
        admin.remove(name, proof)
    wait_until(lambda: is_read_only(admin, name), "the bookie is read-only")
    assert admin.remove(name, admin.ok_to_remove(name)).state is BookieState.REMOVED
    assert name not in [each.name for each in admin.bookies()]
    assert states(admin)[name] is BookieState.REMOVED


def test_a_proof_holds_when_the_drain_ends_and_no_longer_than_the_drain(
    cluster: Inside, metadata: ClusterMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_admin_module, "REQUESTS_SECONDS", 0.0)
    client = cluster.connect()
    admin, own = ClusterAdmin(client), cluster_backend_of(client).membership.metadata
    admin.drain("bookie-0")
    wait_until(lambda: admin.bookies()[0].read_only, "the bookie is read-only")
    marks = own.marks

    def ended_meanwhile() -> object:
        metadata.change_cookie("bookie-0", lambda found: replace(found, state=BookieState.DRAINED))
        return marks()

    monkeypatch.setattr(own, "marks", ended_meanwhile)
    proof = admin.ok_to_remove("bookie-0")
    assert states(admin)["bookie-0"] is BookieState.DRAINED
    assert (proof.state, proof.state_since_ns) == (BookieState.DRAINING, admin.bookies()[0].since_ns)
    assert admin.remove("bookie-0", proof).state is BookieState.REMOVED
    with pytest.raises(SafetyCheckError, match="the proof is of an earlier drain"):
        admin.remove("bookie-0", proof)


def test_a_bookie_that_was_called_drained_too_early_is_not_removed_yet(
    admin: ClusterAdmin, metadata: ClusterMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An auditor of an earlier version does so, and a removal by force that did not end."""
    monkeypatch.setattr(cluster_admin_module, "REQUESTS_SECONDS", 3600.0)
    for state in (BookieState.DRAINING, BookieState.DRAINED):
        metadata.change_cookie("bookie-0", lambda found, state=state: replace(found, state=state))  # type: ignore[misc]
    wait_until(lambda: admin.bookies()[0].read_only, "the bookie is read-only")
    with pytest.raises(SafetyCheckError, match=r"it is drained since just now: ask again after \d"):
        admin.ok_to_remove("bookie-0")
    with pytest.raises(SafetyCheckError, match=r"it is drained since just now"):
        admin.remove("bookie-0", accept_loss=())
    monkeypatch.setattr(cluster_admin_module, "REQUESTS_SECONDS", 0.0)
    admin.remove("bookie-0", admin.ok_to_remove("bookie-0"))


def test_a_mark_keeps_a_bookie_from_removal(
    cluster: Inside, admin: ClusterAdmin, metadata: ClusterMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_admin_module, "REQUESTS_SECONDS", 0.0)
    bookie = admin.bookies()[0].bookie
    metadata.mark_under_replicated(7, bookie, 0)
    admin.drain("bookie-0")
    wait_until(lambda: admin.bookies()[0].read_only, "the bookie is read-only")
    with pytest.raises(SafetyCheckError, match="1 ledger is marked because of it: 7"):
        admin.ok_to_remove("bookie-0")


def test_an_active_bookie_is_not_removed(cluster: Inside, admin: ClusterAdmin) -> None:
    with pytest.raises(SafetyCheckError, match="it is active, so ledgers may still choose it"):
        admin.ok_to_remove("bookie-0")
    with pytest.raises(SafetyCheckError, match="it runs and is active"):
        admin.remove("bookie-0", accept_loss=())
    with pytest.raises(UsageError, match="takes ids of ledgers"):
        admin.remove("bookie-0", accept_loss=["x"])  # type: ignore[list-item]


def test_a_dead_bookie_is_removed_with_the_ledgers_that_are_given_up(cluster: Inside, admin: ClusterAdmin) -> None:
    client = cluster.connect()
    ledger_id = make_ledger(client, size=1, ack=1)
    (name,) = bookies_of(client, ledger_id)
    cluster.bookies[int(name[-1])].close()
    wait_until(lambda: any(each.absent for each in admin.bookies()), "the bookie is absent")
    with pytest.raises(SafetyCheckError, match=f"1 ledger names it: {ledger_id}"):
        admin.remove(name, accept_loss=[ledger_id + 1])
    assert states(admin)[name] is BookieState.ACTIVE
    assert admin.remove(name, accept_loss=[ledger_id]).state is BookieState.REMOVED
    with pytest.raises(SafetyCheckError, match="it was removed already, and nothing is left to do"):
        admin.ok_to_remove(name)


def test_maintenance_has_an_end(admin: ClusterAdmin) -> None:
    begun = admin.maintenance("bookie-1", 3_600)
    assert begun.state is BookieState.MAINTENANCE
    assert 0 < begun.until_ns - time.time_ns() <= HOUR
    assert admin.maintenance("bookie-1", 7_200).until_ns > begun.until_ns
    with pytest.raises(IllegalOperationError, match="in maintenance"):
        admin.cancel_drain("bookie-1")
    assert admin.end_maintenance("bookie-1").state is BookieState.ACTIVE
    for seconds in (0, -1, 31 * 86_400, float("nan"), "1"):
        with pytest.raises(UsageError, match="it takes a number above 0"):
            admin.maintenance("bookie-1", seconds)  # type: ignore[arg-type]
    admin.drain("bookie-1")
    with pytest.raises(IllegalOperationError, match="cancel its drain"):
        admin.end_maintenance("bookie-1")


def test_bookies_may_stop_while_enough_copies_stay(
    cluster: Inside, admin: ClusterAdmin, metadata: ClusterMetadata
) -> None:
    client = cluster.connect()
    ledger_id = make_ledger(client)
    first, second, third = bookies_of(client, ledger_id)
    assert admin.ok_to_stop(first).ok
    assert admin.ok_to_stop(first).warnings == ()
    both = admin.ok_to_stop(first, second)
    assert both.ok
    new, copies = both.warnings
    assert "ledgers have ensembles of 3: a writer that needs a new ledger of that size could not make it" in new
    assert copies == f"ledger {ledger_id}, entries 0 to 4: sound copies that would be left: 1"
    refused = admin.ok_to_stop(first, second, third)
    assert (refused.ok, refused.refusals) == (
        False,
        (f"ledger {ledger_id}, entries 0 to 4: no sound copy would be left",),
    )
    damaged = next(each.bookie for each in admin.bookies() if each.name == third)
    metadata.mark_under_replicated(ledger_id, damaged, 2, reason=RepairReason.DAMAGED)
    assert not admin.ok_to_stop(first, second).ok, "the copy that would be left is damaged"
    with pytest.raises(UsageError, match="one or more"):
        admin.ok_to_stop()


def test_open_ledgers_keep_an_ack_quorum(cluster: Inside, admin: ClusterAdmin) -> None:
    client = cluster.connect()
    writer = make_writer(client)
    ledger_id = writer.ledger_id
    first, second, _ = bookies_of(client, ledger_id)
    assert admin.ok_to_stop(first).ok
    (refusal,) = admin.ok_to_stop(first, second).refusals
    assert "entries 0 to the end: 1 writable bookies would be left, and its writer needs 2" in refusal
    assert refusal.endswith("appends would wait until they are back")


def test_a_writer_that_has_appended_nothing_keeps_an_ack_quorum(cluster: Inside, admin: ClusterAdmin) -> None:
    client = cluster.connect()
    writer = client.create_ledger(password=b"correct horse", ensemble_size=3)
    first, second, _ = bookies_of(client, writer.ledger_id)
    wait_until(lambda: not admin.ok_to_stop(first, second).ok)
    writer.close()
    assert admin.ok_to_stop(first, second).ok


def test_a_writer_that_can_replace_the_bookies_that_stop_needs_no_ack_quorum(
    cluster: Inside, admin: ClusterAdmin
) -> None:
    client = cluster.connect()
    writer = make_writer(client, size=2)
    ledger_id = writer.ledger_id
    first, second = bookies_of(client, ledger_id)
    found = admin.ok_to_stop(first)
    assert found.refusals == ()
    assert found.warnings == (f"ledger {ledger_id}, entries 0 to the end: sound copies that would be left: 1",)
    assert "no sound copy would be left" in admin.ok_to_stop(first, second).refusals[0]


def stop_spare(cluster: Inside, admin: ClusterAdmin, names: list[str]) -> list[str]:
    """Stop the bookie that is none of these, and return these."""
    spare = next(place for place, each in enumerate(admin.bookies()) if each.name not in names)
    cluster.bookies[spare].close()
    wait_until(lambda: not admin.bookies()[spare].registered)
    return names


def test_a_bookie_that_takes_no_entries_of_an_open_ledger_does_not_count_for_its_writer(
    cluster: Inside, admin: ClusterAdmin, metadata: ClusterMetadata
) -> None:
    client = cluster.connect()
    writer = make_writer(client)
    ledger_id = writer.ledger_id
    first, _, third = stop_spare(cluster, admin, bookies_of(client, ledger_id))
    assert admin.ok_to_stop(first).ok
    service = service_of(cluster.bookies[int(third[-1])])
    service.replicas.put_in_limbo({ledger_id: None})
    assert service.keeper.registered is not None
    service.keeper.registered.update(service.keeper.registration())
    assert not admin.ok_to_stop(first).ok, "it has not said yet which ledger is in limbo"
    metadata.mark_under_replicated(ledger_id + 1, service.bookie, 0)
    assert admin.ok_to_stop(first).ok, "another ledger is in limbo"
    metadata.unmark_under_replicated(metadata.marks_of(ledger_id + 1)[0])
    metadata.mark_under_replicated(ledger_id, service.bookie, 5)
    (refusal,) = admin.ok_to_stop(first).refusals
    assert "entries 0 to the end: 1 writable bookies would be left, and its writer needs 2" in refusal
    assert admin.ok_to_stop(third).ok, "its writer does without it"


def test_a_read_only_bookie_does_not_count_for_a_writer(cluster: Inside, admin: ClusterAdmin) -> None:
    client = cluster.connect()
    writer = make_writer(client)
    ledger_id = writer.ledger_id
    first, _, third = stop_spare(cluster, admin, bookies_of(client, ledger_id))
    assert admin.ok_to_stop(first).ok
    service_of(cluster.bookies[int(third[-1])]).keeper.retire()
    (refusal,) = admin.ok_to_stop(first).refusals
    assert "entries 0 to the end: 1 writable bookies would be left, and its writer needs 2" in refusal
    assert admin.ok_to_stop(third).ok, "its writer does without it"


def test_an_open_ledger_whose_writer_is_gone_needs_no_ack_quorum(cluster: Inside, admin: ClusterAdmin) -> None:
    client = cluster.connect()
    writer = make_writer(client)
    ledger_id = writer.ledger_id
    first, second, third = bookies_of(client, ledger_id)
    client.close()  # which leaves the ledger open, as the death of its process would
    wait_until(lambda: admin.ok_to_stop(first, second).ok, "the bookies to see that its connections have ended")
    found = admin.ok_to_stop(first, second)
    assert found.refusals == ()
    assert found.warnings[1:] == (f"ledger {ledger_id}, entries 0 to the end: sound copies that would be left: 1",)
    (refusal,) = admin.ok_to_stop(first, second, third).refusals
    assert "no sound copy would be left" in refusal


def test_repairs_are_listed_by_urgency(cluster: Inside, admin: ClusterAdmin, metadata: ClusterMetadata) -> None:
    client = cluster.connect()
    safe, urgent = make_ledger(client), make_ledger(client, size=2, ack=1)
    bookies = {each.name: each.bookie for each in admin.bookies()}
    metadata.mark_under_replicated(safe, bookies[bookies_of(client, safe)[0]], 0, reason=RepairReason.DAMAGED)
    metadata.mark_under_replicated(urgent, bookies[bookies_of(client, urgent)[0]], 0, reason=RepairReason.MISSING)
    assert [mark.ledger_id for mark in admin.repairs()] == [urgent, safe]


def test_a_pause_of_repairs_ends(admin: ClusterAdmin) -> None:
    paused = admin.pause_repair(3_600, "ann").repair
    assert paused.paused_by == "ann"
    assert 0 < paused.paused_until_ns - time.time_ns() <= HOUR
    assert any("paused by ann" in reason.text for reason in admin.status().reasons)
    with pytest.raises(UsageError, match="at most 86400"):
        admin.pause_repair(86_401, "ann")
    with pytest.raises(UsageError, match="name of the person"):
        admin.pause_repair(1, "")
    with pytest.raises(UsageError, match="is called 'nobody'"):
        admin.resume_repair(["nobody"])
    resumed = admin.resume_repair(by="bob").repair
    assert (resumed.paused_until_ns, resumed.paused_by, resumed.accepted_losses) == (0, "", ())
    assert admin.settings().changed_by == "bob"


def test_a_loss_is_accepted_until_the_bookie_is_back(cluster: Inside, admin: ClusterAdmin) -> None:
    with pytest.raises(UsageError, match="of a bookie that runs: leave out bookie-2, bookie-3"):
        admin.resume_repair(["bookie-2", "bookie-3"])
    for place in (2, 3):
        cluster.bookies[place].close()
    wait_until(lambda: sum(each.absent for each in admin.bookies()) == 2, "two bookies are absent")
    assert admin.resume_repair(["bookie-2", "bookie-3"]).repair.accepted_losses == ("bookie-2", "bookie-3")
    assert "loss_accepted" not in {reason.code for reason in admin.status().reasons}
    cluster.open_bookie(2)
    (reason,) = (reason for reason in admin.status().reasons if reason.code == "loss_accepted")
    assert reason.text.startswith("bookie-2 runs again")
    assert admin.resume_repair().repair.accepted_losses == ("bookie-3",)
    assert "loss_accepted" not in {reason.code for reason in admin.status().reasons}


def test_a_cluster_without_a_bookie_that_runs_is_bad(cluster: Inside, admin: ClusterAdmin) -> None:
    for manager in cluster.bookies:
        manager.close()
    wait_until(lambda: all(each.absent for each in admin.bookies()), "all bookies are absent")
    status = admin.status()
    assert (status.verdict, status.reasons[0].code) == (ClusterVerdict.BAD, "no_bookie")


def test_what_nobody_acknowledged_is_no_loss_and_what_a_bookie_may_have_lost_is(
    cluster: Inside, admin: ClusterAdmin, metadata: ClusterMetadata
) -> None:
    writer = make_writer(cluster.connect())
    ledger_id, ensemble = writer.ledger_id, writer.metadata.fragments[-1].ensemble
    cluster.wait_for_copies(ledger_id, 5)
    for manager in cluster.bookies:
        manager.close()
    with pytest.raises(NotEnoughBookiesError):
        writer.append(b"never acknowledged")
    wait_until(lambda: len(metadata.marks_of(ledger_id)) == 3)
    for place in range(4):
        cluster.open_bookie(place)
    wait_until(lambda: sum(each.registered for each in admin.bookies()) == 4)
    assert [mark.causes for mark in metadata.marks_of(ledger_id)] == [((RepairReason.MISSED, 5),)] * 3
    assert (admin.status().short, admin.orphans().without_copies) == ({"2": 1}, ())
    for bookie in ensemble:  # as a bookie does that was killed, and may have lost what it acknowledged
        metadata.mark_under_replicated(ledger_id, bookie, 0)
    assert (admin.status().short, admin.orphans().without_copies) == ({"0": 1}, (ledger_id,))


def test_ledgers_without_copies_and_marks_of_deleted_ledgers_are_orphans(
    cluster: Inside, admin: ClusterAdmin, metadata: ClusterMetadata
) -> None:
    client = cluster.connect()
    single, empty, whole, deleted = (
        make_ledger(client, entries, size=size, ack=1) for entries, size in ((5, 1), (0, 1), (5, 3), (5, 3))
    )
    (name,) = bookies_of(client, single)
    marked = client.ledger_metadata(deleted).fragments[0].ensemble[0]
    client.delete_ledger(deleted, password=b"p")
    metadata.mark_under_replicated(deleted, marked, 0)
    metadata.mark_under_replicated(10**6, marked, 0)  # has no key: nothing proves that it was deleted
    found = admin.orphans()
    assert (found.without_copies, found.marks) == ((), (deleted,))
    place = int(name[-1])
    cluster.bookies[place].close()
    wait_until(lambda: admin.orphans().without_copies == (single,))
    assert not {empty, whole} & set(admin.orphans().without_copies), "one has no entries, and one other copies"
    cluster.bookies[place] = cluster.open_bookie(place)
    wait_until(lambda: not admin.orphans().without_copies)
    bookie = client.ledger_metadata(single).fragments[0].ensemble[0]
    metadata.mark_under_replicated(single, bookie, 3, reason=RepairReason.DAMAGED)
    assert admin.orphans().without_copies == (single,), "a copy that was found damaged is not sound"
    assert admin.orphans().marks == (deleted,)
    assert len(list(metadata.marks())) == 3, "nothing is removed because of the list"


def test_in_asyncio(admin: ClusterAdmin) -> None:
    async def run() -> None:
        assert (await admin.status_async()).verdict is ClusterVerdict.WARN
        assert len(await admin.bookies_async()) == 4
        await admin.drain_async("bookie-0")
        assert (await admin.drain_progress_async("bookie-0")).ledgers_left == 0
        await admin.cancel_drain_async("bookie-0")
        assert (await admin.ok_to_stop_async("bookie-0")).ok

    asyncio.run(run())


def test_idle_writers_leave_a_bookie_that_is_drained(tmp_path: Path) -> None:
    with inside(tmp_path, count=5) as cluster:
        client = cluster.connect()
        admin = ClusterAdmin(client)
        writers = [make_writer(client, entries) for entries in (0, 5)]
        names = [set(bookies_of(client, writer.ledger_id)) for writer in writers]
        name = min(names[0] & names[1])
        begun = admin.drain(name)  # its ledgers were looked at before
        left = [text for text in begun.waits if text.startswith("writers of open ledgers have not left it since 2")]
        assert len(left) == 1
        assert all(str(writer.ledger_id) in left[0] for writer in writers)
        for writer in writers:
            wait_until(lambda each=writer: name not in bookies_of(client, each.ledger_id))  # type: ignore[misc]
        assert not any("writers" in text for text in admin.drain_progress(name).waits)
        for writer in writers:
            writer.append(b"one more")
            writer.close()
            assert name not in bookies_of(client, writer.ledger_id)


def test_a_cluster_that_repairs_itself_drains_a_bookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repair_quickly(monkeypatch)
    monkeypatch.setattr(auditor_driver, "ANNOUNCE_S", 0.2)
    monkeypatch.setattr(cluster_admin_module, "REQUESTS_SECONDS", 0.0)
    with inside(tmp_path, count=4, autorecovery=True) as cluster:
        client = cluster.connect()
        admin = ClusterAdmin(client)
        ledgers = [make_ledger(client) for _ in range(5)]
        name = bookies_of(client, ledgers[0])[0]
        wait_until(lambda: admin.status().verdict is ClusterVerdict.OK)
        assert admin.status().auditor
        assert admin.drain(name).ledgers_left
        wait_until(lambda: states(admin)[name] is BookieState.DRAINED)
        assert admin.drain_progress(name).ledgers_left == 0
        assert admin.remove(name, admin.ok_to_remove(name)).state is BookieState.REMOVED
        assert all(name not in bookies_of(client, ledger_id) for ledger_id in ledgers)
        metadata = cluster_backend_of(client).membership.metadata
        wait_until(lambda: metadata.read_position(name) is None, "what the bookie left in the metadata is collected")
        (other, *_) = set(states(admin)) - {name}
        assert metadata.read_position(other) is not None
        bookie = client.ledger_metadata(ledgers[0]).fragments[0].ensemble[0]
        client.delete_ledger(ledgers[0], password=b"p")
        metadata.mark_under_replicated(ledgers[0], bookie, 0)
        wait_until(lambda: not metadata.marks_of(ledgers[0]), "the mark of a deleted ledger is removed")
