"""Quick audits: which entries are read, what counts against a bookie, and a cluster that mends what they find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from pybk.healing import auditor, chores, quick_audit
from pybk.healing.auditor import Check
from pybk.healing.quick_audit import Suspect, Suspects, failed_entries, forget_others, note_result, samples_of
from pybk.metadata.settings import ClusterSettings, ScrubSettings
from tests.client.test_limbo_repair import PASSWORD, fill, held
from tests.cluster.inside import Inside, inside
from tests.healing.clusters import bookie, ledger
from tests.healing.quick import repair_quickly
from tests.healing.test_autorecovery import autorecovery_of
from tests.internals import metadata_of, service_of
from tests.waiting import wait_until


def test_first_and_last_and_two_random_entries_of_each_replica_are_read() -> None:
    metadata = ledger(1, (0, [1, 2, 3]), (50, [1, 2, 4]), quorum=(2, 2), last=1000)
    found = samples_of(metadata, Random(1))
    assert [(each.bookie, each.first, each.last) for each in found] == [
        *((bookie(number), 0, 49) for number in (1, 2, 3)),
        *((bookie(number), 50, 1000) for number in (1, 2, 4)),
    ]
    for each in found:
        held_there = [n for n in range(each.first, each.last + 1) if each.place in (n % 3, (n + 1) % 3)]
        assert each.entries[0] == held_there[0]
        assert each.entries[-1] == held_there[-1]
        assert set(each.entries) <= set(held_there)
        assert 2 <= len(each.entries) <= 4


def test_the_fragment_without_an_end_is_left_to_its_writer() -> None:
    assert not samples_of(ledger(1, (0, [1, 2, 3]), last=None), Random(1))
    assert {each.last for each in samples_of(ledger(1, (0, [1, 2, 3]), (7, [1, 2, 4]), last=None), Random(1))} == {6}
    assert not samples_of(ledger(1, (0, [1, 2, 3]), last=-1), Random(1))


def test_all_entries_that_failed_are_read_again_where_they_should_be() -> None:
    metadata = ledger(1, (0, [1, 2, 3]), quorum=(2, 2), last=1000)
    suspects: Suspects = {}
    for number, failed in ((1, 500), (2, 700)):
        note_result(suspects, 1, bookie(number), (Check.MISSING, failed), 0)
    note_result(suspects, 2, bookie(1), (Check.MISSING, 900), 0)
    also = failed_entries(suspects, 1)
    assert also == {500, 700}
    for each in samples_of(metadata, Random(1), also):
        there = {failed for failed in also if each.place in (failed % 3, (failed + 1) % 3)}
        assert also & set(each.entries) == there


def test_a_suspect_that_has_lost_its_place_is_forgotten() -> None:
    suspects: Suspects = {}
    for ledger_id, number in ((1, 1), (1, 2), (2, 1)):
        note_result(suspects, ledger_id, bookie(number), (Check.MISSING, 5), 0)
    forget_others(suspects, 1, [bookie(2), bookie(3)])
    assert suspects.keys() == {(1, bookie(2)), (2, bookie(1))}
    forget_others(suspects, 2, ())
    assert suspects.keys() == {(1, bookie(2))}


def test_a_suspect_is_audited_again_after_ten_minutes_even_if_it_is_silent_then() -> None:
    suspects: Suspects = {}
    note_result(suspects, 7, bookie(1), (Check.UNKNOWN, 0), 0)
    assert not suspects, "silence is no failure"
    note_result(suspects, 7, bookie(1), (Check.MISSING, 5), 0)
    due_ns = suspects[7, bookie(1)].due_ns
    assert due_ns > auditor.SUSPICION_NS
    note_result(suspects, 7, bookie(1), (Check.MISSING, 5), due_ns - 1)
    note_result(suspects, 7, bookie(1), (Check.UNKNOWN, 0), due_ns)
    again = suspects[7, bookie(1)]
    assert again.due_ns > due_ns
    assert again.entry_id == 5
    note_result(suspects, 7, bookie(1), (Check.MISSING, 5), again.due_ns)
    assert not suspects, "the auditor marks it"


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    """Three bookies whose replicas are audited when asked, and again a moment later."""
    repair_quickly(monkeypatch)
    monkeypatch.setattr(auditor, "SUSPICION_NS", 2 * 10**8)
    monkeypatch.setattr(quick_audit, "AGAIN_NS", 3 * 10**8)
    monkeypatch.setattr(chores, "LOOK_S", 0.1)
    monkeypatch.setattr(chores, "LEDGER_PAUSE_S", 0.0)
    with inside(tmp_path, count=3, autorecovery=True) as cluster:
        yield cluster


def test_a_bookie_that_denies_entries_is_filled_up(three: Inside) -> None:
    client = three.connect()
    ledger_id, sound = fill(client, 40), fill(client, 40)
    for each in (ledger_id, sound):
        three.wait_for_copies(each, 40)
    metadata = metadata_of(client)
    service = service_of(three.bookies[1])
    service.replicas.delete(ledger_id)

    def asked(settings: ClusterSettings) -> ClusterSettings:
        return replace(settings, scrub=ScrubSettings(quick_asked_ns=1))

    metadata.change_settings(asked)
    everything = list(range(40))
    wait_until(lambda: held(three, ledger_id)[service.bookie.bookie_id] == everything)
    wait_until(lambda: not list(metadata.marks()))
    assert held(three, sound)[service.bookie.bookie_id] == everything
    repairers = [autorecovery_of(manager).worker for manager in three.bookies]
    wait_until(lambda: sum(each.repaired for each in repairers))
    assert sum(each.repaired for each in repairers) == 1
    wait_until(lambda: metadata.read_quick_audit() is not None)


def test_what_cannot_fail_again_is_audited_no_more(three: Inside) -> None:
    client = three.connect()
    kept, deleted = fill(client, 40), fill(client, 40)
    client.delete_ledger(deleted, password=PASSWORD)
    (audits,) = wait_until(
        lambda: [each for each in map(autorecovery_of, three.bookies) if each.quick_audits.oldest_ns is not None]
    )
    suspects = audits.quick_audits.suspects
    suspects[kept, bookie(9)] = suspects[deleted, service_of(three.bookies[0]).bookie] = Suspect(0, 5)
    wait_until(lambda: not suspects)
