"""Walks through the runbooks about ledgers and their repairs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pybk import LedgerState, Passwords, back_up, health
from pybk.metadata.underreplication import RepairState
from tests.admin.dev.walking import PASSWORD, Cluster, Walk, cluster, pybk, walk

pytestmark = pytest.mark.sampled(one_in=8, using="cluster", group="runbooks")

pytest.importorskip("prometheus_client")

__all__ = ["cluster", "walk"]

ABANDON = """
import sys
from pybk import LedgerManager, Secret
url, file, password = sys.argv[1:]
manager = LedgerManager.connect(url, cluster_secret=Secret(file=file))
writer = manager.create_ledger(password=password.encode())
writer.append(b"entry" * 100)
print(writer.ledger_id, flush=True)
sys.stdin.read()
"""


def abandon(cluster: Cluster) -> int:
    """Have a process write a ledger, and kill it; return the ledger, which stays open."""
    arguments = [cluster.profile.metadata, cluster.profile.secret_file, PASSWORD.decode()]
    with subprocess.Popen(
        [sys.executable, "-c", ABANDON, *arguments],
        env=cluster.local.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdout is not None
        ledger_id = int(writer.stdout.readline())
        writer.kill()
    return ledger_id


# ---- ledgers ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_entries_lost(cluster: Cluster, walk: Walk, tmp_path: Path) -> None:
    [ledger] = cluster.append(1, bookies=1)
    [name] = cluster.holders(ledger)
    back_up(cluster.client, tmp_path / "backup", passwords=Passwords(PASSWORD))
    directory = cluster.directory(name)
    cluster.dev("kill", name)
    directory.rename(tmp_path / "device")
    cluster.until(lambda: cluster.admin.status().lost == (ledger,))
    assert f"entries are lost of ledgers: {ledger}" in walk("cluster status", status=1)
    assert name in walk("ledger show", LEDGER=ledger)
    (tmp_path / "device").rename(directory)
    cluster.dev("start", name)
    cluster.until(lambda: not cluster.admin.status().lost)
    cluster.check(ledger)

    cluster.dev("wipe", name)
    cluster.until(lambda: cluster.admin.status().lost == (ledger,))
    said = walk("restore", TARGET=tmp_path / "backup", URL=cluster.profile.metadata, LEDGER=ledger)
    new = int(said.split(f"ledger {ledger} is ledger ")[1])
    cluster.check(new)
    cluster.until(lambda: cluster.naming(name) == [ledger])
    assert f"bookie {name} is removed" in walk("bookie remove", NAME=name, LEDGER=ledger, yes=True)
    assert "removed" in walk("bookie list --removed")
    assert str(ledger) in walk("repair list --reason lost")
    walk("ledger delete", LEDGER=ledger, yes=True)
    cluster.until(lambda: not cluster.admin.repairs())
    cluster.dev("start", name)
    cluster.until_whole()
    cluster.check(new)
    pybk("ledger", "delete", str(new), "--yes")  # it has one copy, which other walks may damage


@pytest.mark.long
def test_no_live_copy(cluster: Cluster, walk: Walk) -> None:
    with cluster.settings(grace_s=600):
        [ledger] = cluster.append(1, bookies=1)
        [name] = cluster.holders(ledger)
        cluster.dev("kill", name)
        cluster.until(lambda: cluster.admin.status().short.get("0"))
        assert "no running bookie has a sound copy" in walk("cluster status", status=1)
        [line] = [line for line in walk("bookie list").splitlines() if line.startswith(name)]
        assert " no " in line
        cluster.dev("start", name)
        cluster.until(lambda: not cluster.admin.status().short.get("0"))
        cluster.check(ledger)
    pybk("ledger", "delete", str(ledger), "--yes")
    cluster.until_whole()


@pytest.mark.long
def test_one_copy_left(cluster: Cluster, walk: Walk) -> None:
    [ledger] = cluster.append(1)
    pybk("repair", "pause", "--for", "1h")
    first, second, _ = cluster.holders(ledger)
    cluster.dev("kill", first, second)
    cluster.until(lambda: cluster.admin.status().short.get("1"))
    assert "of which one copy is left" in walk("cluster status", status=1)
    assert "repairs are paused" in walk("repair list")
    walk("repair resume")
    cluster.until(lambda: not cluster.admin.status().short.get("1"))
    cluster.dev("start", first, second)
    cluster.until_whole()


@pytest.mark.long
def test_open_abandoned(cluster: Cluster, walk: Walk) -> None:
    with cluster.settings(open_grace_s=1, recover_abandoned=False):
        ledger, other = abandon(cluster), abandon(cluster)
        [name, *_] = set(cluster.holders(ledger)).intersection(cluster.holders(other))
        cluster.dev("kill", name)
        cluster.until(lambda: set(cluster.admin.status().waiting) == {ledger, other})
        assert str(ledger) in walk("cluster status", status=1)
        assert "open" in walk("ledger show", LEDGER=ledger)
        cluster.check(ledger)  # as its owner
        cluster.until(lambda: cluster.admin.status().waiting == (other,))
        walk("cluster settings set")
        cluster.until(lambda: not cluster.admin.status().waiting)
        cluster.until(lambda: cluster.client.ledger_metadata(other).state is LedgerState.CLOSED)
    cluster.dev("start", name)
    cluster.until_whole()
    cluster.check(other)


def test_damage(cluster: Cluster, walk: Walk) -> None:
    with cluster.settings(grace_s=600):  # so that the copies of b3 are needed after its restart
        cluster.append_until(lambda names: "b3" in names)
        cluster.dev("restart", "b3")
        cluster.dev("corrupt", "b3", "--records", "20")  # some may be of copies that nobody needs any more
        walk("scrub run")
        cluster.until(lambda: "pybk_scrub_damaged_records_total" in cluster.local.get("b3", "/metrics"))
        cluster.until_whole()
    walk("bookie drain", NAME="b3")
    walk("bookie remove", NAME="b3", yes=True)
    cluster.dev("wipe", "b3")
    cluster.dev("start", "b3")
    cluster.until_whole()
    assert "b3" in walk("scrub status")


def test_a_ledger_was_deleted_by_mistake(cluster: Cluster, walk: Walk, tmp_path: Path) -> None:
    [ledger, other] = cluster.append(2)
    back_up(cluster.client, tmp_path / "backup", passwords=Passwords(PASSWORD))
    pybk("ledger", "delete", str(ledger), "--yes")
    assert "1" in walk("backup show", TARGET=tmp_path / "backup")
    said = walk("restore", TARGET=tmp_path / "backup", URL=cluster.profile.metadata, LEDGER=ledger)
    cluster.check(int(said.split(f"ledger {ledger} is ledger ")[1]))
    cluster.check(other)
    cluster.until_whole()


# ---- repairs ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_repair_stalled(cluster: Cluster, walk: Walk) -> None:
    cluster.dev("fill", "b4")
    cluster.until(lambda: cluster.bookie("b4").read_only)
    cluster.append_until(lambda names: "b4" not in names)  # a client may not know yet that it is read-only
    cluster.dev("kill", "b1")
    cluster.until(lambda: RepairState.NO_TARGET in {each.state for each in cluster.admin.repairs()})
    assert "no_target" in walk("repair list --stuck")
    cluster.dev("fill", "b4", "--end")
    cluster.until(lambda: not cluster.admin.repairs())
    assert "no_target" not in walk("repair list --stuck")
    cluster.dev("start", "b1")
    cluster.until_whole()


@pytest.mark.long
def test_repair_hold(cluster: Cluster, walk: Walk) -> None:
    def holds() -> set[str]:
        return {code for code in cluster.codes() if code.startswith("hold_") and code != "hold_session_young"}

    cluster.dev("kill", "b1", "b2")
    cluster.until(holds)
    assert "repairs are on hold" in walk("cluster status", status=1)
    cluster.dev("start", "b1", "b2")
    cluster.until(lambda: not holds())
    cluster.until_whole()
    cluster.dev("kill", "b3", "b4")
    cluster.until(holds)
    walk("repair resume", NAME="b3 b4")
    cluster.until(lambda: not holds())
    cluster.dev("start", "b3", "b4")
    pybk("repair", "resume")  # forgets the losses, as they run again
    cluster.until_whole()


def test_repair_paused(cluster: Cluster, walk: Walk) -> None:
    pybk("repair", "pause", "--for", "3h", "--by", "somebody")
    assert "repairs are paused by somebody" in walk("repair status")
    walk("repair resume")
    assert "not paused" in walk("cluster status", status=(0, 1))


def test_no_auditor(cluster: Cluster, walk: Walk) -> None:
    cluster.dev("kill", *cluster.NAMES)
    cluster.until(lambda: not cluster.admin.status().auditor)
    assert "no auditor reports" in walk("cluster status", status=1)
    assert " no " in walk("bookie list")
    cluster.dev("start", *cluster.NAMES)
    cluster.until(lambda: cluster.admin.status().auditor)
    cluster.until_whole()


@pytest.mark.long
def test_auditor_silent(cluster: Cluster, walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SILENT_S", 4.0)
    name = cluster.admin.status().auditor
    fault = Path(cluster.profile.directory, "faults", f"{name}.silent")
    fault.touch()
    cluster.until(lambda: "auditor_silent" in cluster.codes())
    assert f"the auditor, {name}, has not reported for" in walk("cluster status", status=1)
    member = cluster.local.status()[name]
    os.kill(member["pid"], signal.SIGUSR1)
    cluster.until(lambda: "rest_or_work" in Path(member["log"]).read_text())
    cluster.dev("kill", name)  # its thread would not end
    cluster.until(lambda: cluster.admin.status().auditor not in ("", name) and "auditor_silent" not in cluster.codes())
    fault.unlink()
    cluster.dev("start", name)
    cluster.until_whole()
