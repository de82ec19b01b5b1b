"""The commands over clusters: their status, bookies that are drained and removed, and repairs."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from pybk import (
    BookieState,
    ClusterAdmin,
    ClusterStatus,
    ClusterVerdict,
    LedgerManager,
    RepairReason,
    UsageError,
    destroy_metadata,
)
from pybk.admin.cli import main
from pybk.config import StoreConfig
from pybk.manager.connect import join, open_cluster
from pybk.operations import cluster_admin as cluster_admin_module
from tests.cluster.inside import SECRET, Inside, inside
from tests.storage.real_store import QUICK
from tests.waiting import WAIT_S, wait_until


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    monkeypatch.setattr(cluster_admin_module, "REQUESTS_SECONDS", 0.0)
    with inside(tmp_path, count=4) as cluster:
        yield cluster


def make_ledger(manager: LedgerManager) -> tuple[int, str]:
    """Make a closed ledger; return its id and one of its bookies."""
    with manager.create_ledger(password=b"p") as writer:
        writer.append_many([b"entry"] * 5)
    return writer.ledger_id, writer.metadata.fragments[0].ensemble[0].bookie_id


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    status, out, _ = run(capsys, *arguments, "--json")
    return status, json.loads(out)


def state_of(admin: ClusterAdmin, name: str) -> BookieState:
    return next(each.state for each in admin.bookies(removed=True) if each.name == name)


def test_the_status_of_a_cluster(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "cluster", "status", cluster.url)
    assert status == 1
    assert "the cluster is warn\n  no auditor reports" in out
    assert "4 active" in out
    status, found = run_json(capsys, "cluster", "status", cluster.url)
    assert (status, found["verdict"], found["bookies"], found["schema"]) == (1, "warn", {"active": 4}, 1)


def test_what_is_no_cluster_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "cluster", "status", tmp_path)
    assert (status, "is not a metadata URL" in err) == (2, True)


def test_a_word_that_is_no_verb_is_the_directory_of_a_bookie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bookie", str(tmp_path / "list")])
    assert "--listen, --metadata" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["bookie", "list"])
    assert "pybk bookie list" in capsys.readouterr().err


def test_bookies_are_listed(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run_json(capsys, "bookie", "list", cluster.url)
    found = document["bookies"]
    assert (status, [each["bookie"] for each in found]) == (0, [f"bookie-{place}" for place in range(4)])
    assert found[0]["registered"]
    status, out, _ = run(capsys, "bookie", "list", cluster.url)
    assert (status, "bookie-3" in out, "active" in out) == (0, True, True)


def test_a_bookie_is_drained_and_removed(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    client = cluster.connect()
    admin = ClusterAdmin(client)
    ledger_id, name = make_ledger(client)
    status, out, _ = run(capsys, "bookie", "drain", cluster.url, name)
    assert (status, out) == (0, f"bookie {name} is draining: 1 ledger left, 25 B, 0 stuck\n")
    wait_until(lambda: next(each.read_only for each in admin.bookies() if each.name == name))
    status, _, err = run(capsys, "bookie", "ok-to-remove", cluster.url, name)
    assert (status, f"1 ledger names it: {ledger_id}" in err) == (3, True)
    status, found = run_json(capsys, "bookie", "ok-to-remove", cluster.url, name)
    refusals = [f"1 ledger names it: {ledger_id}"]
    assert (status, found) == (3, {"schema": 1, "ok": False, "bookie": name, "refusals": refusals})
    assert run(capsys, "bookie", "remove", cluster.url, name)[0] == 3
    status, done = run_json(capsys, "repair", "run", cluster.url, "--bookie", name)
    assert (status, done["fragments"], done["left"]) == (0, 1, [])
    status, out, _ = run(capsys, "bookie", "drain", cluster.url, name, "--wait")
    assert (status, "0 ledgers left" in out) == (0, True)
    found = run_json(capsys, "bookie", "ok-to-remove", cluster.url, name)[1]
    assert (found["ok"], found["bookie"], found["refusals"]) == (True, name, [])
    status, out, err = run(capsys, "bookie", "remove", cluster.url, name, "--dry-run", "--quiet")
    assert (status, out, err) == (0, f"bookie {name} would be removed for good\n", "")
    status, planned = run_json(capsys, "bookie", "remove", cluster.url, name, "--dry-run")
    assert (status, planned) == (0, {"schema": 1, "bookie": name, "lost_ledgers": [], "dry_run": True})
    status, _, err = run(capsys, "bookie", "remove", cluster.url, name)
    assert (status, "give --yes; nothing was changed" in err) == (3, True)
    assert state_of(admin, name) is not BookieState.REMOVED
    status, out, _ = run(capsys, "bookie", "remove", cluster.url, name, "--yes")
    assert (status, out) == (0, f"bookie {name} is removed\n")
    assert state_of(admin, name) is BookieState.REMOVED
    assert name in run(capsys, "bookie", "list", cluster.url, "--removed")[1]


def test_a_drain_that_others_cannot_take_exits_with_3(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    client = cluster.connect()
    _, name = make_ledger(client)
    other = next(each.name for each in ClusterAdmin(client).bookies() if each.name != name)
    assert run(capsys, "bookie", "drain", cluster.url, other)[0] == 0
    status, _, err = run(capsys, "bookie", "drain", cluster.url, name)
    assert (status, "3 other writable bookies" in err) == (3, True)
    assert state_of(ClusterAdmin(client), name) is BookieState.ACTIVE
    assert run(capsys, "bookie", "cancel-drain", cluster.url, other)[1] == f"bookie {other} is active\n"
    status, _, err = run(capsys, "bookie", "drain", cluster.url, "nobody")
    assert (status, "there are bookie-0" in err) == (2, True)


def test_a_drain_says_what_open_ledgers_wait_for(
    cluster: Inside, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = cluster.connect()
    _, name = make_ledger(client)
    waits = ("writers of open ledgers have not left it: 5",)
    begun = replace(ClusterAdmin(client).drain(name), bytes_left=0, waits=waits)
    looks = chain([begun, begun], repeat(replace(begun, ledgers_left=0, waits=())))
    monkeypatch.setattr(ClusterAdmin, "drain_progress", lambda admin, name: next(looks))
    status, _, err = run(capsys, "bookie", "drain", cluster.url, name, "--wait")
    assert (status, err.count(waits[0])) == (0, 1)


def test_a_drain_continues_after_ctrl_c(
    cluster: Inside, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(admin: ClusterAdmin, name: str) -> None:
        raise KeyboardInterrupt

    client = cluster.connect()
    _, name = make_ledger(client)
    monkeypatch.setattr(ClusterAdmin, "drain_progress", interrupted)
    status, _, err = run(capsys, "bookie", "drain", cluster.url, name, "--wait")
    assert (status, "the drain continues; `pybk bookie cancel-drain" in err) == (130, True)
    assert state_of(ClusterAdmin(client), name) is BookieState.DRAINING


def test_bookies_are_stopped_only_if_copies_stay(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    make_ledger(cluster.connect())
    names = [f"bookie-{place}" for place in range(4)]
    assert run(capsys, "bookie", "ok-to-stop", cluster.url, names[0])[0] == 0
    status, found = run_json(capsys, "bookie", "ok-to-stop", cluster.url, *names)
    assert (status, found["ok"], len(found["refusals"])) == (3, False, 1)
    status, out, _ = run(capsys, "bookie", "maintenance", cluster.url, names[0], "--for", "2h")
    assert (status, "bookie bookie-0 is maintenance until" in out) == (0, True)
    assert run(capsys, "bookie", "maintenance", cluster.url, names[0], "--end")[1] == "bookie bookie-0 is active\n"


def test_repairs_are_listed_paused_and_resumed(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "repair", "list", cluster.url) == (
        0,
        {"schema": 1, "repairs": [], "held": {"ledgers": 0, "because": []}},
    )
    assert run_json(capsys, "repair", "pause", cluster.url, "--for", "30m", "--by", "ann")[1]["paused_by"] == "ann"
    assert "paused by ann" in run(capsys, "cluster", "status", cluster.url)[1]
    assert "note: repairs are paused by ann" in run(capsys, "repair", "list", cluster.url)[2]
    status, _, err = run(capsys, "repair", "pause", cluster.url, "--for", "2d")
    assert (status, "at most 86400" in err) == (2, True)
    status, _, err = run(capsys, "repair", "resume", cluster.url, "--accept-loss-of", "bookie-1")
    assert (status, "leave out bookie-1" in err) == (2, True)
    cluster.bookies[1].close()
    admin = ClusterAdmin(cluster.connect())
    wait_until(lambda: admin.bookies()[1].absent, "the bookie is absent")
    status, found = run_json(capsys, "repair", "resume", cluster.url, "--accept-loss-of", "bookie-1")
    assert (status, found["paused_until_ns"], found["accepted_losses"]) == (0, 0, ["bookie-1"])


def test_ls_shows_which_copies_are_short(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    client = cluster.connect()
    ledger_id, name = make_ledger(client)
    bookie = next(each for each in client.ledger_metadata(ledger_id).fragments[-1].ensemble if each.bookie_id == name)
    place = int(name.rpartition("-")[2])

    def row() -> dict[str, Any]:
        status, document = run_json(capsys, "ls", cluster.url)
        rows = document["ledgers"]
        assert status == 0
        (found,) = rows
        assert isinstance(found, dict)
        return found

    found = row()
    assert (found["copies"], found["fragments"][0]["conditions"]) == (3, ["runs"] * 3)
    assert bookie.instance.hex() in found["fragments"][0]["instances"]
    metadata, _ = open_cluster(cluster.url, SECRET, create=False)
    with metadata:
        metadata.mark_under_replicated(ledger_id, bookie, 2)
        assert row()["copies"] == 2, "a copy that was found to lack entries does not count"
        metadata.unmark_under_replicated(metadata.marks_of(ledger_id)[0])
    ClusterAdmin(cluster.connect()).pause_repair(3600, "test")  # or the new instance would have its copies soon
    cluster.bookies[place].close()
    wait_until(lambda: f"{name} (absent)" in row()["bookies"])
    assert row()["copies"] == 2
    shutil.rmtree(cluster.directory / f"bookie-{place}")
    directory = str(cluster.directory / f"bookie-{place}")
    listen = ["tcp://127.0.0.1:*"]
    config = StoreConfig(**QUICK)
    with closing(join(directory, listen, cluster.url, SECRET, config, bookie_id=name, replace_lost=True)):
        wait_until(lambda: f"{name} (replaced)" in row()["bookies"])
        assert row()["copies"] == 2
        assert f"{name} (replaced)" in run(capsys, "ls", cluster.url)[1]


def test_a_drain_is_waited_for_until_the_bookie_can_be_removed(
    cluster: Inside, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bookie without ledgers is drained at once, and yet may be named by requests that are under way."""
    monkeypatch.setattr(cluster_admin_module, "REQUESTS_SECONDS", 1.0)
    assert run(capsys, "bookie", "drain", cluster.url, "bookie-3", "--wait")[0] == 0
    assert run(capsys, "bookie", "remove", cluster.url, "bookie-3", "--yes")[0] == 0
    assert not ClusterAdmin(cluster.connect()).drain_progress("bookie-3").done, "it is removed, and not drained"


def test_the_settings_of_a_cluster_are_shown_and_set(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    def change(*values: str) -> tuple[int, str, str]:
        return run(capsys, "cluster", "settings", "set", cluster.url, *values, "--by", "ann")

    assert change("repair.grace_s=10m", "repair.bytes_per_second=64MiB", "--dry-run")[0] == 0
    assert run_json(capsys, "cluster", "settings", "show", cluster.url)[1]["changed_ns"] == 0
    status, out, _ = change("repair.grace_s=5m", "repair.bytes_per_second=64MiB", "placement.strict=true")
    assert (status, out.splitlines()[0]) == (0, "repair.grace_s is 300, and was 600")
    found = run_json(capsys, "cluster", "settings", "show", cluster.url)[1]
    assert (found["repair"]["grace_s"], found["repair"]["bytes_per_second"]) == (300.0, 64 << 20)
    assert (found["placement"]["strict"], found["changed_by"]) == (True, "ann")
    assert "as before" in change("repair.grace_s=300")[1]
    for wrong, says in (
        ("repair.grace=1", "there is no setting 'repair.grace'"),
        ("repair.grace_s", "gives no value"),
        ("repair.grace_s=soon", "a number, of seconds also as 10m"),
        ("placement.strict=perhaps", "true or false"),
        ("placement.min_zones=0", "from 1 to 64"),
    ):
        status, _, err = change(wrong)
        assert (status, says in err, err.count("\n")) == (2, True, 1), err
    assert "repair.grace_s" in run(capsys, "cluster", "settings", "show", cluster.url)[1]


def test_accepted_losses_are_listed_and_withdrawn(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "repair", "losses", cluster.url)[1] == "the loss of no bookie is accepted\n"
    cluster.bookies[1].close()
    admin = ClusterAdmin(cluster.connect())
    wait_until(lambda: admin.bookies()[1].absent, "the bookie is absent")
    assert run(capsys, "repair", "resume", cluster.url, "--accept-loss-of", "bookie-1")[0] == 0
    assert run(capsys, "repair", "losses", cluster.url)[1] == "bookie-1\n"
    status, _, err = run(capsys, "repair", "losses", cluster.url, "--withdraw", "bookie-2")
    assert (status, "the loss of bookie-2 is not accepted; accepted is bookie-1" in err) == (2, True)
    found = run_json(capsys, "repair", "losses", cluster.url, "--withdraw", "bookie-1")
    assert found == (0, {"schema": 1, "accepted_losses": []})
    assert "no auditor" in run(capsys, "repair", "status", cluster.url)[1]


def test_ledgers_are_found_shown_and_deleted(
    cluster: Inside, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = cluster.connect()
    (first, name), (second, _) = make_ledger(client), make_ledger(client)
    open_one = client.create_ledger(password=b"p", ledger_type="orders")
    status, page = run_json(capsys, "ledger", "list", cluster.url, "--state", "closed", "--limit", "1")
    assert (status, [row["ledger"] for row in page["ledgers"]], page["next"]) == (0, [first], first)
    _, page = run_json(capsys, "ledger", "list", cluster.url, "--state", "closed", "--after", first)
    assert ([row["ledger"] for row in page["ledgers"]], page["next"]) == ([second], None)
    _, page = run_json(capsys, "ledger", "list", cluster.url, "--type", "orders", "--tier", "nvme")
    assert [row["ledger"] for row in page["ledgers"]] == [open_one.ledger_id]
    status, _, err = run(capsys, "ledger", "list", cluster.url, "--bookie", "nobody")
    assert (status, "the cluster has no bookie 'nobody'" in err) == (2, True)
    status, out, _ = run(capsys, "ledger", "show", cluster.url, first)
    assert (status, "fragment from entry" in out, name in out) == (0, True, True)
    assert run(capsys, "ledger", "show", cluster.url, 12345)[0] == 2
    monkeypatch.setenv("PYBK_PASSWORD", "p")
    assert "would be deleted" in run(capsys, "ledger", "delete", cluster.url, first, "--dry-run")[1]
    assert run(capsys, "ledger", "delete", cluster.url, first)[0] == 3
    assert list(client.list_ledgers()) == [first, second, open_one.ledger_id]
    assert run(capsys, "ledger", "delete", cluster.url, first, "--yes")[1] == f"1 ledger deleted: {first}\n"
    status, _, err = run(capsys, "ledger", "cat", cluster.url, open_one.ledger_id, "--recover")
    assert (status, "cannot append any more" in err) == (3, True)
    assert run(capsys, "ledger", "cat", cluster.url, open_one.ledger_id, "--recover", "--yes")[0] == 0
    assert client.ledger_metadata(open_one.ledger_id).state.value == "closed"


def test_a_cluster_and_a_bookie_are_probed_shown_and_checked(
    cluster: Inside, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run_json(capsys, "cluster", "probe", cluster.url, "--entries", "3")
    assert (status, found["result"], len(found["bookies"])) == (0, "ok", 3)
    status, found = run_json(capsys, "bookie", "probe", cluster.url, "bookie-2")
    assert (status, found["bookies"]) == (0, ["bookie-2"])
    status, _, err = run(capsys, "bookie", "probe", cluster.url, "nobody")
    assert (status, "is called 'nobody'; there are bookie-0, bookie-1" in err) == (2, True)
    assert list(cluster.connect().list_ledgers()) == [], "a probe leaves nothing"
    status, out, _ = run(capsys, "bookie", "show", cluster.url, "bookie-2")
    assert (status, "ledgers that name it" in out) == (0, True)
    assert run(capsys, "bookie", "show", cluster.url, "nobody")[0] == 2
    status, out, _ = run(capsys, "cluster", "check", cluster.url)
    lines = out.splitlines()
    assert status == 2
    assert "CRIT auditor: no auditor reports | 0" in lines
    assert "OK bookies: all bookies run | 0" in lines
    assert run(capsys, "cluster", "check", cluster.url, "bookies", "lost")[0] == 0
    assert run(capsys, "cluster", "check", cluster.url, "nothing")[0] == 2


def test_repairs_are_listed_by_a_reason_that_exists(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    for reason in RepairReason:
        assert run(capsys, "repair", "list", cluster.url, "--reason", reason)[0] == 0
    with pytest.raises(SystemExit, match="2"):
        main(["repair", "list", cluster.url, "--reason", "foo"])
    error = capsys.readouterr().err
    assert "'foo'" in error
    assert all(reason in error for reason in RepairReason)


def test_a_repair_by_hand_is_planned_first(cluster: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    client = cluster.connect()
    ledger_id, name = make_ledger(client)
    status, plan = run_json(capsys, "repair", "run", cluster.url, "--bookie", name, "--dry-run")
    assert (status, plan["ledgers"], plan["bytes"]) == (0, 1, 25)
    assert name in [each.bookie_id for each in client.ledger_metadata(ledger_id).fragments[0].ensemble]
    assert run_json(capsys, "repair", "run", cluster.url, "--all")[1]["ledgers"] == 0


def test_a_watch_ends_when_the_cluster_is_healthy(
    cluster: Inside, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def status(admin: ClusterAdmin) -> ClusterStatus:
        looks.append(1)
        return ClusterStatus(verdict=ClusterVerdict.WARN if len(looks) < 3 else ClusterVerdict.OK)

    monkeypatch.setattr(ClusterAdmin, "status", status)
    words = ("cluster", "status", cluster.url, "--watch", "0.01", "--exit-when-healthy")
    assert run(capsys, *words)[0] == 0
    assert len(looks) == 3


def test_a_cluster_is_made_once_and_destroyed_once_its_bookies_are_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    url = f"lmdb://{tmp_path}/new"
    status, made = run_json(capsys, "cluster", "init", url)
    assert (status, made["made"]) == (0, True)
    assert run_json(capsys, "cluster", "init", url) == (0, {**made, "made": False})
    monkeypatch.delenv("PYBK_CLUSTER_SECRET")
    status, _, err = run(capsys, "cluster", "init", f"lmdb://{tmp_path}/other")
    assert (status, "a cluster takes a secret" in err, (tmp_path / "other").exists()) == (2, True, False)
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    with LedgerManager.open(tmp_path / "b", listen="tcp://127.0.0.1:*", metadata=url, cluster_secret=SECRET):
        status, _, err = run(capsys, "cluster", "destroy", url, "--yes")
        assert (status, "bookies are registered there" in err) == (3, True)
    assert run_json(capsys, "cluster", "destroy", url, "--dry-run")[1]["deleted"] == 0
    assert run(capsys, "cluster", "destroy", url)[0] == 3
    assert run(capsys, "cluster", "status", url)[0] == 1, "it is there"
    with pytest.raises(UsageError, match="nothing was deleted"):
        destroy_metadata(url, "00" * 16, cluster_secret=SECRET)
    status, done = run_json(capsys, "cluster", "destroy", url, "--yes")
    assert (status, done["cluster"], done["deleted"] > 0) == (0, made["cluster"], True)
    assert run(capsys, "cluster", "status", url)[0] == 2


def test_a_command_ends_when_its_time_is_over(
    cluster: Inside, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClusterAdmin, "status", lambda admin: time.sleep(WAIT_S))
    status, _, err = run(capsys, "cluster", "status", cluster.url, "--timeout", "0.2s")
    assert (status, "0.2 s are over" in err, err.count("\n")) == (4, True, 1)
