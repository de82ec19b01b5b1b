"""The runbooks: there is one for each alert, its commands exist, and some are walked through on a local cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.error import HTTPError

import pytest

from pybk import BookieStatus, ClusterAdmin, LedgerManager
from pybk.admin.cli import whole_parser
from pybk.metadata.underreplication import RepairState
from tests.admin.dev.local import Local, local_cluster
from tests.paths import ROOT
from tests.waiting import wait_until

pytest.importorskip("prometheus_client")

TEXT = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
RUNBOOKS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL))
WALKED = "Walked through by a test."
WALKS = {
    *("Damage", "RepairStalled", "RepairHold", "BookieDown", "ReadOnly", "SyncSlow"),
    *("A refused cookie", "All power was lost"),
}
PAUSE_S = 0.2


# ---- the document ----------------------------------------------------------------------------------------------------


def test_each_alert_has_its_runbook() -> None:
    alerts = re.findall(r"^      - alert: (\w+)$", (ROOT / "deploy/prometheus/alerts.yml").read_text(), re.MULTILINE)
    assert len(alerts) > 20
    assert set(alerts) <= RUNBOOKS.keys()
    for name, text in RUNBOOKS.items():
        assert "**Do" in text or "do, done when:**" in text or "**Look, do:**" in text, name
        assert re.search(r"\*\*.*[Dd]one when:\*\*", text), name


def test_each_command_of_a_runbook_exists() -> None:
    commands = {" ".join(words): parser for words, parser in whole_parser().commands()}
    named = re.findall(r"`pybk ([a-z][^`]*)`", TEXT)
    assert len(named) > 40
    for text in named:
        words = re.match(r"[a-z-]+(?: [a-z-]+)*", text)
        assert words is not None
        parts = words[0].split()
        known = next((each for count in (3, 2, 1) if (each := " ".join(parts[:count])) in commands), None)
        assert known is not None, text
        for option in re.findall(r"--[a-z-]+", text):
            assert option in commands[known].format_help(), text


def test_what_is_said_to_be_walked_through_is() -> None:
    assert {name for name, text in RUNBOOKS.items() if WALKED in text} == WALKS


# ---- the walks -------------------------------------------------------------------------------------------------------


class Cluster:
    """A local cluster of four bookies. What people do is a command; looks are calls, because they are many."""

    def __init__(self, local: Local, client: LedgerManager) -> None:
        self.local = local
        self.client = client
        self.admin = ClusterAdmin(client)
        self.pybk("cluster", "settings", "set", "repair.grace_s=1", "repair.surplus_delay_s=1")

    def pybk(self, *words: str) -> None:
        self.local.run("--profile", "dev", *words)

    def dev(self, *words: str) -> None:
        self.local.run("dev", *words)

    def holds(self) -> set[str]:
        codes = {each.code for each in self.admin.status().reasons}
        return {code for code in codes if code.startswith("hold_") and code != "hold_session_young"}

    def bookie(self, name: str) -> BookieStatus:
        return next(each for each in self.admin.bookies() if each.name == name)

    def is_whole(self) -> bool:
        status = self.admin.status()
        return not status.absent and not any(status.short.values()) and not self.admin.repairs()

    def wait_until_whole(self) -> None:
        wait_until(self.is_whole, pause_s=PAUSE_S)

    def append(self, count: int = 3) -> None:
        """Write closed ledgers to three of the bookies each."""
        for _ in range(count):
            with self.client.create_ledger(password=b"p") as writer:
                writer.append(b"entry" * 100)

    def is_ready(self, name: str) -> bool:
        try:
            return self.local.get(name, "/readyz") == "ok\n"
        except (HTTPError, OSError):
            return False


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with local_cluster(tmp_path_factory.mktemp("runbooks"), "4", scaled=True) as local, local.connect() as client:
        found = Cluster(local, client)
        wait_until(lambda: found.admin.status().auditor, pause_s=PAUSE_S)
        found.append()
        yield found


def test_bookie_down(cluster: Cluster) -> None:
    cluster.dev("kill", "b2")
    wait_until(lambda: cluster.bookie("b2").absent, pause_s=PAUSE_S)
    cluster.dev("start", "b2")
    cluster.wait_until_whole()
    cluster.dev("wipe", "b2")
    refused = cluster.local.ask("dev", "start", "b2")
    assert (refused.returncode, "--replace" in refused.stderr) == (2, True), "a refused cookie"
    cluster.dev("start", "b2", "--replace")
    cluster.wait_until_whole()


def test_read_only(cluster: Cluster) -> None:
    cluster.dev("fill", "b1")
    wait_until(lambda: cluster.bookie("b1").read_only, pause_s=PAUSE_S)
    cluster.dev("fill", "b1", "--end")
    wait_until(lambda: not cluster.bookie("b1").read_only, pause_s=PAUSE_S)


def test_sync_slow(cluster: Cluster) -> None:
    def slowest_s() -> float:
        found = dict(
            re.findall(r"^pybk_log_sync_seconds_(sum|count)\S* (\S+)$", cluster.local.get("b3", "/metrics"), re.M)
        )
        return float(found["sum"]) / float(found["count"])

    cluster.append()
    before = slowest_s()
    cluster.dev("slow", "b3", "--ms", "250")
    cluster.append(8)  # more than those of which b3 is left out
    wait_until(lambda: slowest_s() > before + 0.02, pause_s=PAUSE_S)
    cluster.dev("slow", "b3", "--end")
    cluster.wait_until_whole()


def test_damage(cluster: Cluster) -> None:
    cluster.append()
    cluster.dev("restart", "b3")
    cluster.dev("corrupt", "b3", "--records", "20")  # some may be of copies that nobody needs any more
    cluster.pybk("scrub", "run")
    wait_until(lambda: "pybk_scrub_damaged_records_total" in cluster.local.get("b3", "/metrics"), pause_s=PAUSE_S)
    cluster.wait_until_whole()


def test_repair_stalled(cluster: Cluster) -> None:
    cluster.dev("fill", "b4")
    wait_until(lambda: cluster.bookie("b4").read_only, pause_s=PAUSE_S)
    cluster.append()  # to the other three
    cluster.dev("kill", "b1")
    wait_until(lambda: RepairState.NO_TARGET in {each.state for each in cluster.admin.repairs()}, pause_s=PAUSE_S)
    cluster.dev("fill", "b4", "--end")
    wait_until(lambda: not cluster.admin.repairs(), pause_s=PAUSE_S)
    cluster.dev("start", "b1")
    cluster.wait_until_whole()


def test_repair_hold(cluster: Cluster) -> None:
    cluster.dev("kill", "b1", "b2")
    wait_until(cluster.holds, pause_s=PAUSE_S)
    cluster.dev("start", "b1", "b2")
    wait_until(lambda: not cluster.holds(), pause_s=PAUSE_S)
    cluster.wait_until_whole()


def test_all_power_was_lost(cluster: Cluster) -> None:
    cluster.append()
    names = ("b1", "b2", "b3", "b4")
    cluster.dev("kill", *names)
    cluster.dev("up")
    wait_until(lambda: all(map(cluster.is_ready, names)), pause_s=PAUSE_S)
    cluster.wait_until_whole()
    for ledger in cluster.client.ledgers():
        with cluster.client.open_ledger(ledger.ledger_id, password=b"p") as reader:
            assert next(reader.read(0, 0)).payload == b"entry" * 100
