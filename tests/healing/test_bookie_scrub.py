"""The background checks of bookies: damage where nobody reads is found, copied from a peer, and forgotten."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pybk.errors import CorruptError, LedgerDeletedError, MetadataUnreachableError, PybkError
from pybk.healing import scrub
from pybk.healing.scrub import BookieScrub, placed_entries
from pybk.healing.scrub_schedule import ScrubKind
from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata, LedgerState
from pybk.metadata.settings import ClusterSettings, ScrubSettings
from pybk.metrics import SCRUB_BYTES, SCRUB_DAMAGED_RECORDS, Metrics
from pybk.replication.messages import Status
from pybk.storage.repair.record_check import DamagedEntries
from tests.client.test_limbo_repair import PASSWORD, check, fill, payload
from tests.cluster.inside import Inside, inside
from tests.healing.quick import repair_quickly, scrub_quickly
from tests.healing.test_autorecovery import autorecovery_of
from tests.healing.test_embedded_scrub import counted, flip
from tests.internals import metadata_of, service_of
from tests.metadata.records import ledger as closed
from tests.waiting import wait_until


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    """Three bookies that check their entries when asked."""
    repair_quickly(monkeypatch)
    scrub_quickly(monkeypatch)
    monkeypatch.setattr(scrub, "RECHECK_S", 0.1)
    with inside(tmp_path, count=3, autorecovery=True) as cluster:
        yield cluster


def settle(cluster: Inside, **changed: Any) -> None:
    def change(settings: ClusterSettings) -> ClusterSettings:
        return replace(settings, scrub=ScrubSettings(**changed))

    metadata_of(cluster.bookies[0]).change_settings(change)


def test_a_flipped_bit_is_found_in_one_period_and_mended_from_a_peer(three: Inside) -> None:
    client = three.connect()
    ledger_id, other = fill(client, 60), fill(client, 60)
    for each in (ledger_id, other):
        three.wait_for_copies(each, 60)
    bookie = three.bookies[1]
    flip(three.directory / "bookie-1", payload(40))
    settle(three, deep_s=1.0)
    wait_until(lambda: counted(bookie, SCRUB_DAMAGED_RECORDS), "the damage is found")
    read = service_of(bookie).replicas.read
    wait_until(lambda: read(ledger_id, 40, 40, 1, 1 << 20, checked=True)[0] is Status.OK, "there is a new copy")
    wait_until(lambda: not list(metadata_of(client).marks()))
    wait_until(lambda: bookie.health().state == "ok", "nothing waits for a copy")
    found = counted(bookie, SCRUB_DAMAGED_RECORDS)
    checked = counted(bookie, SCRUB_BYTES)
    wait_until(
        lambda: counted(bookie, SCRUB_BYTES) > checked + 4 * 60 * len(payload(40)), "everything is checked again"
    )
    assert counted(bookie, SCRUB_DAMAGED_RECORDS) == found, "what is copied anew is not found again"
    for place in (0, 2):
        assert not counted(three.bookies[place], SCRUB_DAMAGED_RECORDS)
        three.bookies[place].close()
    for number in range(60):  # the bookie alone has everything
        for each in (ledger_id, other):
            assert read(each, number, number, 1, 1 << 20, checked=True)[0] is Status.OK


def test_damage_is_a_reason_of_the_health_until_it_is_mended(three: Inside) -> None:
    client = three.connect()
    ledger_id = fill(client, 60)
    three.wait_for_copies(ledger_id, 60)
    bookie = three.bookies[1]
    autorecovery_of(bookie).worker.begin_stop()
    flip(three.directory / "bookie-1", payload(40))
    settle(three, deep_asked_ns=1)  # whatever the clock of the person says
    wait_until(lambda: bookie.health().state == "degraded")
    assert f"damaged record in ledger {ledger_id}" in bookie.health().reason
    (mark,) = wait_until(lambda: list(metadata_of(client).marks()))
    assert (mark.reason, mark.bookie) == ("damaged", service_of(bookie).bookie)
    assert mark.first_entry_id <= 40
    name = service_of(bookie).bookie
    wait_until(lambda: (metadata_of(client).read_scrub(name) or {}).get("damaged"), "the damage is noted")
    check(client, ledger_id, 60)  # never a wrong byte; the reader sends the damaged copy again, which mends it


def test_changed_settings_and_mended_damage_end_the_rest_of_a_scrub(
    three: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, bookie = three.connect(), three.bookies[1]
    ledger_id = fill(client, 60)
    three.wait_for_copies(ledger_id, 60)
    checks = autorecovery_of(bookie).scrub
    monkeypatch.setattr(scrub, "REST_S", 1e6)
    checks.wake()  # the rest that began before ends
    began_ns = time.time_ns()
    settle(three, deep_s=1.0)
    wait_until(lambda: checks.oldest_ns(ScrubKind.DEEP) > began_ns, "everything is checked by the new period")
    settle(three)  # nothing is due for weeks
    autorecovery_of(bookie).worker.begin_stop()
    flip(three.directory / "bookie-1", payload(40))
    settle(three, deep_asked_ns=1)
    wait_until(lambda: checks.damaged, "the damage is found")
    client.delete_ledger(ledger_id, password=PASSWORD)
    wait_until(lambda: not checks.damaged, "what is not needed any more is forgotten")


@pytest.mark.parametrize("why", ["end", "surplus"])
def test_what_no_bookie_copies_is_not_damage(three: Inside, why: str) -> None:
    client = three.connect()
    bookie = three.bookies[1]
    read = service_of(bookie).replicas.read
    with client.create_ledger(password=PASSWORD) as writer:
        ledger_id = writer.ledger_id
        writer.append_many([payload(number) for number in range(10)])
        # So no entry of these is in one frame with a later one, whose damage would be theirs.
        wait_until(lambda: read(ledger_id, 9, 9, 1, 1 << 20, checked=True)[0] is Status.OK, "the bookie has them")
        writer.append_many([payload(number) for number in range(10, 60)])
        three.wait_for_copies(ledger_id, 60)
    metadata, version = metadata_of(client).read_ledger(ledger_id)
    changed = replace(metadata, version=metadata.version + 1)
    if why == "end":  # a recovery has cut the record from entry 10 on
        changed = replace(changed, last_entry_id=9, length=metadata.length - 1)
    else:  # others have the places of those entries
        (fragment,) = metadata.fragments
        gone = Bookie("gone", b"gone" * 4)
        others = tuple(gone if each == service_of(bookie).bookie else each for each in fragment.ensemble)
        changed = replace(changed, fragments=(fragment, Fragment(10, others)))
    metadata_of(client).write_ledger(changed, version)
    checked = counted(bookie, SCRUB_BYTES)
    flip(three.directory / "bookie-1", payload(40))
    settle(three, deep_asked_ns=1)
    wait_until(lambda: counted(bookie, SCRUB_BYTES) >= checked + 60 * len(payload(40)), "everything is checked")
    assert not counted(bookie, SCRUB_DAMAGED_RECORDS)
    assert not list(metadata_of(client).marks())
    assert bookie.health().state == "ok"


def test_while_it_is_not_known_what_is_needed_all_counts() -> None:
    """And nothing of a ledger that was deleted, although its bookie has it still."""
    a, b, c, d = (Bookie(name, name.encode() * 16) for name in "abcd")
    found: list[LedgerMetadata | PybkError] = [
        closed(7, fragments=(Fragment(0, (a, b, c)),), last_entry_id=99),
        closed(7, fragments=(Fragment(0, (b, c, d)),), last_entry_id=99),
        MetadataUnreachableError("no session"),
        CorruptError("its metadata is damaged"),
        LedgerDeletedError("it was deleted"),
    ]

    def read_ledger(_: int) -> tuple[LedgerMetadata, int]:
        first = found.pop(0)
        if isinstance(first, PybkError):
            raise first
        return first, 1

    replicas = SimpleNamespace(store=None, valid_entries=lambda *_: (7, [3, 4]))
    bookie: Any = SimpleNamespace(replicas=replicas, bookie=a)
    metadata: Any = SimpleNamespace(read_ledger=read_ledger)
    owner = BookieScrub(bookie, metadata, Metrics(), lambda: 1.0)
    damaged = DamagedEntries(1, 0, 9, "its checksum is wrong")
    assert [owner.still_needs(closed(1), damaged) for _ in range(5)] == [True, False, True, True, False]


def test_only_entries_count_whose_write_sets_have_the_bookie() -> None:
    a, b, c, d = (Bookie(name, name.encode() * 16) for name in "abcd")
    fragments = (Fragment(0, (a, b, c)), Fragment(79, (c, a, d)))
    ledger = closed(
        1,
        state=LedgerState.CLOSED,
        ensemble_size=3,
        write_quorum=2,
        ack_quorum=2,
        fragments=fragments,
        last_entry_id=99,
    )
    # Of the first fragment a has the entries 0, 2, 3, 5, ...; of the second one 79, 81, 82, 84, ...
    assert placed_entries(ledger, a, [80]) == [], "it was sent to it with the ensemble before"
    assert placed_entries(ledger, a, range(80, 101, 3)) == [], "an extent has one entry of each stripe"
    assert placed_entries(ledger, a, range(77, 84)) == [77, 78, 79, 81, 82]
    assert placed_entries(ledger, a, [1, 4, 6, 80, 83]) == [6], "those between have new copies"
    assert placed_entries(ledger, a, range(100, 120)) == [], "the ledger ends before"
    assert placed_entries(ledger, d, range(79)) == []
    assert placed_entries(ledger, b, range(78, 90)) == [78]
    for bookie, others in ((a, range(100)), (b, range(79)), (d, range(79, 100))):
        wanted = []
        for entry_id in others:
            fragment = fragments[entry_id >= 79]
            if bookie in (fragment.ensemble[entry_id % 3], fragment.ensemble[(entry_id + 1) % 3]):
                wanted.append(entry_id)
        assert placed_entries(ledger, bookie, range(120)) == wanted
