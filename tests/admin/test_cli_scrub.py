"""The command ``pybk scrub``, over stores and clusters, and the calls of ``ClusterAdmin`` behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk import ClusterAdmin, IllegalOperationError, ScrubKind, StorageHint, UsageError
from pybk.healing import chores
from tests.admin.test_cli_cluster_admin import run, run_json
from tests.client.test_limbo_repair import fill, payload
from tests.cluster.inside import SECRET, Inside, inside
from tests.healing import test_embedded_scrub as embedded
from tests.healing.quick import repair_quickly, scrub_quickly
from tests.healing.test_embedded_scrub import flip
from tests.internals import service_of
from tests.storage.real_store import open_quick
from tests.waiting import wait_until


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    repair_quickly(monkeypatch)
    scrub_quickly(monkeypatch)
    monkeypatch.setattr(chores, "LOOK_S", 0.1)
    monkeypatch.setattr(chores, "LEDGER_PAUSE_S", 0.0)
    with inside(tmp_path, count=3, autorecovery=True) as cluster:
        yield cluster


def test_all_bookies_check_everything_when_asked(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    client = cluster.connect()
    fill(client, 30)
    admin = ClusterAdmin(client)
    for kind in ScrubKind:
        before = {status.name: status for status in admin.scrub_status()}
        assert run(capsys, "scrub", cluster.url, "--kind", kind)[0] == 0
        asked_ns = getattr(client_settings(admin), f"{kind}_asked_ns")

        def is_done(kind: ScrubKind = kind, asked_ns: int = asked_ns) -> bool:
            checked = [status.kinds[kind] for status in admin.scrub_status() if kind in status.kinds]
            return len(checked) == (1 if kind is ScrubKind.QUICK else 3) and all(
                each.oldest_ns >= asked_ns and not each.asked for each in checked
            )

        assert len(before) == 4
        wait_until(is_done)
    keys = [key for manager in cluster.bookies for key in manager.metrics().gauges]
    gauges = [key.labels for key in keys if key.name == "scrub_oldest_timestamp_ns"]
    assert sorted(gauges) == sorted([(("kind", "deep"),)] * 3 + [(("kind", "light"),)] * 3 + [(("kind", "quick"),)]), (
        "each bookie has its own checks, and the auditor the quick ones"
    )
    status, found = run_json(capsys, "scrub", "status", cluster.url)
    assert (status, [each["of"] for each in found["scrubs"]]) == (0, ["bookie-0", "bookie-1", "bookie-2", "auditor"])
    status, out, _ = run(capsys, "scrub", "status", cluster.url)
    assert status == 0
    assert out.count("deep") == out.count("light") == 3
    assert out.count("quick") == 1


def client_settings(admin: ClusterAdmin) -> object:
    return admin.settings().scrub


def test_a_ledger_is_read_from_all_of_its_bookies_now(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    client = cluster.connect()
    ledger_id = fill(client, 30)
    cluster.wait_for_copies(ledger_id, 30)
    admin = ClusterAdmin(client)
    status, found = run_json(capsys, "scrub", cluster.url, "--ledger", ledger_id)
    assert (status, found["copies"], found["problems"]) == (0, 90, [])
    flip(cluster.directory / "bookie-1", payload(20))
    service_of(cluster.bookies[2]).replicas.delete(ledger_id)
    report = admin.scrub_ledger(ledger_id)
    problems = {each.bookie.bookie_id: each for each in report.problems}
    assert [(span.first <= 20 <= span.last) for span in problems["bookie-1"].damaged] == [True]
    assert [str(span) for span in problems["bookie-2"].missing] == ["0-29"]
    assert not admin.repairs(), "one denial is no proof"
    root = cluster.directory / "bookie-1"
    status, found = run_json(capsys, "scrub", root)
    (damaged,) = found["damaged"]
    assert (status, damaged["of_ledger"]) == (1, ledger_id)
    assert damaged["of_first_entry"] <= 20 <= damaged["of_last_entry"]
    _, out, err = run(capsys, "scrub", root)
    assert "of ledger" in out
    assert "shows what is still needed" in err
    status, out, _ = run(capsys, "scrub", cluster.url, "--ledger", ledger_id)
    assert status == 1
    assert "bookie-2" in out
    with pytest.raises(UsageError, match="kind"):
        admin.scrub("whole")  # type: ignore[arg-type]
    with pytest.raises(IllegalOperationError, match="ClusterAdmin"):
        client.scrub()
    with pytest.raises(IllegalOperationError, match="ClusterAdmin"):
        client.scrub_status()


def test_damage_whose_entries_were_copied_from_a_peer_is_not_listed_again(
    cluster: Inside, capsys: pytest.CaptureFixture[str]
) -> None:
    client = cluster.connect()
    ledger_id = fill(client, 30)
    cluster.wait_for_copies(ledger_id, 30)
    root = cluster.directory / "bookie-1"
    flip(root, payload(20))
    assert run(capsys, "scrub", root)[0] == 1
    ClusterAdmin(client).scrub(ScrubKind.DEEP)
    wait_until(lambda: run(capsys, "scrub", root)[0] == 0, "the copies from a peer", pause_s=0.5)
    status, found = run_json(capsys, "scrub", root)
    assert (status, found["damaged"], found["replaced"]) == (0, [], 1)
    assert "1 damaged record more, whose entries were copied from a peer" in run(capsys, "scrub", root)[1]
    cluster.bookies[1].close()  # or its scrub may copy the entries again before they are listed
    flip(root, payload(20))  # all copies of the entry here, also the one that is read
    (damaged,) = wait_until(lambda: run_json(capsys, "scrub", root)[1]["damaged"])
    assert damaged["of_ledger"] == ledger_id


def test_a_store_is_checked_while_another_process_may_write_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        ledger_id = embedded.fill(manager, StorageHint.NVME)
        manager.checkpoint()
        assert not manager.scrub().damaged
        assert manager.scrub_status().kinds[ScrubKind.DEEP].oldest_ns
    assert run(capsys, "scrub", tmp_path)[:1] == (0,)
    status, found = run_json(capsys, "scrub", "status", tmp_path)
    assert (status, found["scrubs"][0]["damaged"]) == (0, [])
    flip(tmp_path, b"7 " + embedded.SECRET)
    status, report = run_json(capsys, "scrub", tmp_path)
    assert (status, [each["ledger_id"] for each in report["damaged"]]) == (1, [ledger_id])
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        manager.scrub()
    status, out, _ = run(capsys, "scrub", "status", tmp_path)
    assert status == 1
    assert "checksum" in out
    assert run(capsys, "scrub", tmp_path, "--kind", "light")[0] == 2


def test_verify_of_a_bookie_names_the_ledgers_of_the_cluster(
    cluster: Inside, capsys: pytest.CaptureFixture[str]
) -> None:
    client = cluster.connect()
    ledgers = {fill(client, 30) for _ in range(3)}
    for ledger_id in ledgers:
        cluster.wait_for_copies(ledger_id, 30)
    root = cluster.directory / "bookie-1"
    status, out, _ = run(capsys, "verify", root)
    assert (status, "parts of ledgers" in out, "password" in out, "reseal" in out) == (
        0,
        True,
        False,
        False,
    )
    flip(root, payload(20))
    status, found = run_json(capsys, "store", "verify", root)
    assert status == 1
    named = {each["of_ledger"] for each in found["problems"] if "of_ledger" in each}
    assert named <= ledgers
    assert named
    part = next(each for each in found["problems"] if "of_ledger" in each)
    assert part["ledger_id"] is None
    assert part["first_entry_id"] <= 20 <= part["last_entry_id"]
    assert f"a part of ledger {part['of_ledger']}" in part["message"]
    _, out, err = run(capsys, "verify", root)
    assert "part of ledger" in out
    assert "pybk scrub status URL" in err
