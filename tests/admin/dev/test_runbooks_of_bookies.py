"""Walks through the runbooks about bookies, appends, and troubles without an alert."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from pybk import Log, LogEnd, MetricKey, NotEnoughBookiesError, back_up
from pybk.admin.cli import main
from pybk.streams import cursor, subscription_lag
from tests.admin.dev.walking import PASSWORD, Cluster, Walk, cluster, pybk, walk
from tests.waiting import WAIT_S

pytestmark = pytest.mark.sampled(one_in=8, using="cluster", group="runbooks")

pytest.importorskip("prometheus_client")

__all__ = ["cluster", "walk"]


def line_of(table: str, name: str) -> str:
    """Return the line of a bookie in what `pybk bookie list` prints."""
    [line] = [line for line in table.splitlines() if line.startswith(name)]
    return line


def is_refused(cluster: Cluster) -> bool:
    """Return whether there are too few bookies for a ledger."""
    try:
        cluster.append(1)
    except NotEnoughBookiesError:
        return True
    return False


# ---- bookies ---------------------------------------------------------------------------------------------------------


def test_bookie_down(cluster: Cluster, walk: Walk) -> None:
    cluster.dev("kill", "b2")
    cluster.until(lambda: cluster.bookie("b2").absent)
    assert " no " in line_of(walk("bookie list"), "b2")
    walk("bookie maintenance", NAME="b2")
    cluster.dev("start", "b2")
    pybk("bookie", "maintenance", "b2", "--end")
    cluster.until_whole()
    walk("repair list")
    cluster.dev("wipe", "b2")
    cluster.dev("start", "b2", "--replace")
    cluster.until_whole()


@pytest.mark.long
def test_too_few_bookies(cluster: Cluster, walk: Walk) -> None:
    pybk("bookie", "drain", "b1")
    cluster.dev("kill", "b2", "b3")  # one that takes entries is left, and no ack quorum
    cluster.until(lambda: cluster.bookie("b2").absent and cluster.bookie("b1").read_only)
    assert "read-only" in line_of(walk("bookie list"), "b1")
    cluster.until(lambda: is_refused(cluster))  # a client may not know yet that b1 is drained
    walk("bookie cancel-drain", NAME="b1")
    cluster.dev("start", "b2", "b3")
    cluster.until(lambda: sum(each.writable for each in cluster.admin.bookies()) == len(cluster.NAMES))
    cluster.append(1)
    cluster.until_whole()


@pytest.mark.long
def test_no_spare_bookie(cluster: Cluster, walk: Walk) -> None:
    cluster.dev("kill", "b3")
    cluster.until(lambda: "no_spare_bookie" in cluster.codes())
    assert "none can take the place of one that fails" in walk("cluster status", status=1)
    cluster.dev("start", "b3")
    cluster.until(lambda: "no_spare_bookie" not in cluster.codes())
    cluster.until_whole()


@pytest.mark.long
def test_read_only(cluster: Cluster, walk: Walk) -> None:
    cluster.dev("fill", "b1")
    cluster.until(lambda: cluster.bookie("b1").read_only)
    assert "read-only" in line_of(walk("bookie list"), "b1")
    cluster.dev("fill", "b1", "--end")
    cluster.until(lambda: not cluster.bookie("b1").read_only)
    cluster.until_whole()
    walk("cluster rebalance")


def test_disk_fills(cluster: Cluster, walk: Walk) -> None:
    def free() -> str:
        [found] = re.findall(r"^free in nvme +(.*)$", walk("bookie show", NAME="b2"), re.MULTILINE)
        return str(found)

    [ledger] = cluster.append(1)
    assert f'"ledger": {ledger}' in walk("ledger list --json")
    cluster.dev("fill", "b2", "--tier", "nvme")
    cluster.until(lambda: free().startswith("0 B"))
    cluster.dev("fill", "b2", "--end")
    cluster.until(lambda: not free().startswith("0 B") and cluster.bookie("b2").writable)
    walk("ledger delete", LEDGER=ledger, yes=True)
    cluster.until_whole()
    walk("cluster rebalance --plan")
    walk("cluster rebalance --apply")
    assert "0 moves left" in walk("cluster rebalance --status")


@pytest.mark.long
def test_limbo_stuck(cluster: Cluster, walk: Walk, tmp_path: Path) -> None:
    back_up(cluster.directory("b1"), tmp_path / "backup")
    ledger = cluster.append_until(lambda names: "b1" in names)  # of which the backup has nothing
    cluster.dev("kill", *cluster.NAMES)
    shutil.rmtree(cluster.directory("b1"))
    pybk("restore", str(tmp_path / "backup"), str(cluster.directory("b1")))
    cluster.dev("start", "b1")
    with pytest.raises(HTTPError) as refused:
        cluster.local.get("b1", "/readyz")
    assert "limbo" in refused.value.read().decode()
    assert [" no " in line_of(walk("bookie list"), name) for name in cluster.NAMES] == [False, True, True, True]
    cluster.dev("start", "b2", "b3", "b4")
    cluster.until(lambda: cluster.is_ready("b1"))
    cluster.until_whole()
    cluster.check(ledger)


# ---- appends ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_sync_slow(cluster: Cluster, walk: Walk) -> None:
    def slowest_s() -> float:
        found = dict(
            re.findall(r"^pybk_log_sync_seconds_(sum|count)\S* (\S+)$", cluster.local.get("b3", "/metrics"), re.M)
        )
        return float(found["sum"]) / float(found["count"])

    cluster.append()
    before = slowest_s()
    cluster.dev("slow", "b3", "--ms", "250")
    cluster.append(8)  # more than those of which b3 is left out
    cluster.until(lambda: slowest_s() > before + 0.02)
    cluster.dev("slow", "b3", "--end")
    cluster.until_whole()
    assert not walk.left


# ---- without an alert ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_refused_cookie(cluster: Cluster, walk: Walk, tmp_path: Path) -> None:
    directory = cluster.directory("b4")

    def refused() -> str:
        done = cluster.local.ask("dev", "start", "b4")
        assert done.returncode == 2, done
        return done.stderr

    instance = cluster.bookie("b4").bookie.instance.hex()
    cluster.dev("stop", "b4")
    directory.rename(tmp_path / "own")
    assert "`pybk dev logs b4` shows the refusal" in refused()
    said = cluster.local.run("dev", "logs", "b4")
    assert len({instance, *re.findall(r"\b[0-9a-f]{32}\b", said)}) == 2, said
    assert f"a bookie starts in {directory}" in said
    assert "start it on its own directories" in said
    shutil.rmtree(directory)
    (tmp_path / "own").rename(directory)
    cluster.dev("start", "b4")
    assert " yes " in line_of(walk("bookie list"), "b4")

    cluster.dev("stop", "b4")
    shutil.copytree(directory, tmp_path / "moved")
    shutil.rmtree(directory)
    (tmp_path / "moved").rename(directory)
    assert "--moved" in refused()
    cluster.dev("start", "b4", "--moved")
    assert cluster.bookie("b4").bookie.instance.hex() == instance
    cluster.until_whole()

    cluster.dev("wipe", "b4")
    assert "--replace" in refused()
    cluster.dev("start", "b4", "--replace")
    assert cluster.bookie("b4").bookie.instance.hex() != instance
    cluster.until_whole()


@pytest.mark.long
def test_subscription_behind(cluster: Cluster, walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_lag, "NOTE_SECONDS", 0.1)
    monkeypatch.setattr(cursor, "BOUND_SECONDS", 0.1)

    def oldest() -> float | None:
        return cluster.client.metrics().gauges.get(MetricKey("subscription_oldest_timestamp_ns"))

    with Log.open(cluster.client, "orders", password=PASSWORD) as log:
        log.subscribe("billing", start=LogEnd.EARLIEST).close()
        writer = log.writer()
        writer.append_many([b"order"] * 3)
        cluster.until(lambda: oldest() is not None)
        assert "billing" in line_of(walk("log list"), "orders")
        assert " 3 " in line_of(walk("log subscriptions", LOG="orders"), "billing")
        with log.subscribe("billing") as subscription:
            subscription.skip_all()
        cluster.until(lambda: oldest() is None)
        writer.close()
    pybk("log", "delete", "orders", "--yes")


@pytest.mark.long
def test_all_power_was_lost(cluster: Cluster, walk: Walk) -> None:
    with cluster.settings(grace_s=600):
        cluster.append()
        before = {each.ledger_id: cluster.ensemble(each.ledger_id) for each in cluster.client.ledgers()}
        cluster.dev("kill", *cluster.NAMES)
        cluster.dev("up")
        cluster.until(lambda: all(map(cluster.is_ready, cluster.NAMES)))
        cluster.until(lambda: walk("cluster status", status=(0, 1)).startswith("the cluster is ok"))
        assert not cluster.admin.repairs()
        assert before == {each.ledger_id: cluster.ensemble(each.ledger_id) for each in cluster.client.ledgers()}
        for ledger in before:
            cluster.check(ledger)


@pytest.mark.long
def test_a_secret_has_leaked(cluster: Cluster, walk: Walk, tmp_path: Path) -> None:
    file = Path(cluster.profile.secret_file)
    following = file.with_name(f"{file.name}.next")
    shutil.copy(file, tmp_path / "leaked")
    following.touch(0o600)
    following.write_text(secrets.token_hex(32))
    walk("secret add")
    cluster.until(lambda: not cluster.admin.secret_status().lacking)
    walk("secret switch")
    walk("secret reseal")
    cluster.until(lambda: "next: `mv FILE.next FILE`" in walk("secret retire", status=(0, 3)))
    assert re.search(r"^values of another secret +0$", walk("secret status"), re.M)
    following.replace(file)
    cluster.append(1)
    assert main(["cluster", "status", cluster.profile.metadata, f"--cluster-secret-file={tmp_path / 'leaked'}"]) == 2
    cluster.dev("restart", "b1")
    cluster.until_whole()
    check_that_a_token_is_refused_once_its_line_is_gone(cluster)


def check_that_a_token_is_refused_once_its_line_is_gone(cluster: Cluster) -> None:
    directory = Path(cluster.profile.directory)
    console = cluster.local.status()["console"]
    token = (directory / "token").read_text()

    def answer() -> int:
        request = Request(f"{console['http']}/api/v1/cluster", headers={"Authorization": f"Bearer {token}"})
        try:
            with urlopen(request, timeout=WAIT_S) as found:
                return int(found.status)
        except HTTPError as error:
            return error.code

    assert answer() == 200
    kept = (directory / "tokens").read_text()
    (directory / "tokens").write_text("")
    os.kill(console["pid"], signal.SIGHUP)
    cluster.until(lambda: answer() == 401)
    (directory / "tokens").write_text(kept)
    os.kill(console["pid"], signal.SIGHUP)
    cluster.until(lambda: answer() == 200)
