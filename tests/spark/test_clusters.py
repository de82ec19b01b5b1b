"""Bookies of the executors of Spark's real clusters, whose executors are killed."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pybk.client.remote_ledger import RemoteLedger
from pybk.errors import PybkError
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.spark.executors.executor import Process, is_locked
from tests.cluster.checker import copies
from tests.cluster.inside import SECRET, make_cluster
from tests.internals import cluster_backend_of, descriptor_of, metadata_of
from tests.spark.clusters import CONF, Driver, driver, standalone
from tests.spark.secret_files import secret_file
from tests.waiting import PROCESS_S, WAIT_S, wait_until
from tests.zookeeper_server import ZooKeeperServer

pytestmark = pytest.mark.sampled(one_in=4, using="local")

PASSWORD = b"the password of all ledgers here"


class StoreOrUrl:
    """A directory with a cluster's metadata, unless they are at a URL, its secret, and its bookies' directories."""

    def __init__(self, directory: Path, url: str = "") -> None:
        self.directory = directory
        self.url = make_cluster(directory / "cluster", url=url)
        self.secret = directory / "secret"
        self.secret.touch(0o600)
        self.secret.write_bytes(SECRET + b"\n")
        self.bookies = directory / "bookies"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of bookies."""
        return {
            "metadata": self.url,
            "directory": str(self.bookies),
            "cluster_secret_file": str(self.secret),
        }

    @property
    def options(self) -> dict[str, str]:
        """Options of reads and writes."""
        return {"metadataUri": self.url, "clusterSecretFile": str(self.secret)}

    def connect(self) -> LedgerManager:
        """Return a client."""
        return LedgerManager.connect(self.url, cluster_secret=SECRET)

    def running(self) -> list[int]:
        """Return the processes of bookies that run here."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                command = command_of(int(entry))
                if b"pybk.spark.executors.bookie_process" in command and self.url.encode() in command:
                    found.append(int(entry))
        return found


def command_of(pid: int) -> bytes:
    """Return the command line of a process, empty if there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def executor_of(bookie: dict[str, Any]) -> int:
    """Return the process of a bookie's executor, which it was started with."""
    return int(command_of(bookie["pid"]).split(b"\0")[-3])


def kill(pid: int) -> None:
    """Kill a process and wait until it is gone."""
    process = Process.of(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not process.is_alive())


# ---- executors on one host, each with a bookie from its first task on ------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> StoreOrUrl:
    return StoreOrUrl(tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="module")
def local(place: StoreOrUrl) -> Iterator[Driver]:
    """A local cluster of two executors with two task slots each."""
    (place.directory / "events").mkdir()
    conf = {
        **CONF,
        "spark.log.level": "INFO",
        "spark.decommission.enabled": "true",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file://{place.directory}/events",
    }
    with driver(place.directory) as found:
        found.ask("begin", master="local-cluster[2,2,1024]", conf=conf, bookies=place.settings)
        yield found
        found.ask("end")
        wait_until(lambda: not place.running(), "the bookies to end with their executors")


def local_reader(local: Driver, place: StoreOrUrl) -> dict[str, dict[str, Any]]:
    """Run tasks until both executors had some; return the bookie of each, and the executor's process in it."""

    def look() -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for executor, pid, bookie in local.ask("run_tasks", count=8, metadata=place.url):
            assert bookie is not None, f"executor {executor} has no bookie"
            assert found.setdefault(executor, {**bookie, "executor_pid": pid}) == {**bookie, "executor_pid": pid}
        return found if len(found) == 2 else {}

    result: dict[str, dict[str, Any]] = wait_until(look)
    return result


def test_each_executor_has_one_bookie_from_its_first_task_on(local: Driver, place: StoreOrUrl) -> None:
    found = local_reader(local, place)
    assert all(bookie["executor"] == executor for executor, bookie in found.items())
    assert sorted(place.running()) == sorted(bookie["pid"] for bookie in found.values())
    started = local.ask("bookies", executors=2)
    assert {bookie["pid"] for bookie in started} == set(place.running())
    assert {bookie["location"] for bookie in started} == {f"executor_localhost_{executor}" for executor in found}
    with place.connect() as client:
        there = {(there.bookie.bookie_id, *there.addresses) for there in metadata_of(client).list_bookies()}
    assert there == {(bookie["bookie_id"], bookie["address"]) for bookie in started}


def test_a_bookie_that_is_killed_comes_back_with_its_directory(local: Driver, place: StoreOrUrl) -> None:
    before = local_reader(local, place)
    with place.connect() as client:
        with client.create_ledger(ensemble_size=2, write_quorum=2, password=PASSWORD) as writer:
            writer.append_many([b"%d" % entry for entry in range(100)])
        for bookie in before.values():
            kill(bookie["pid"])
        after = {bookie["executor"]: bookie for bookie in local.ask("bookies", executors=2)}
        assert identities(after) == identities(before)
        assert {(name, bookie["directory"]) for name, bookie in after.items()} == {
            (name, bookie["directory"]) for name, bookie in before.items()
        }
        assert not {bookie["pid"] for bookie in after.values()} & {bookie["pid"] for bookie in before.values()}
    with place.connect() as client, client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
        assert [entry.payload for entry in reader.read(0, 99)] == [b"%d" % entry for entry in range(100)]


@pytest.mark.long
def test_the_next_executors_take_over_what_others_had_that_ended(local: Driver, place: StoreOrUrl) -> None:
    before = local_reader(local, place)
    processes = [Process.of(bookie["pid"]) for bookie in before.values()]
    with place.connect() as client:
        with client.create_ledger(ensemble_size=2, write_quorum=2, password=PASSWORD) as writer:
            writer.append_many([b"%d" % entry for entry in range(100)])
        for bookie, number in zip(before.values(), (signal.SIGKILL, signal.SIGPWR), strict=True):
            os.kill(bookie["executor_pid"], number)  # SIGPWR is what decommissions an executor
        wait_until(
            lambda: not any(process.is_alive() for process in processes), "the bookies to end with their executors"
        )
        assert metadata_of(client).list_bookies() == [], "they said that they leave"
    after = local_reader(local, place)
    assert not set(before) & set(after)
    assert identities(after) == identities(before)
    assert not {bookie["pid"] for bookie in after.values()} & {bookie["pid"] for bookie in before.values()}
    with place.connect() as client, client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
        assert [entry.payload for entry in reader.read(0, 99)] == [b"%d" % entry for entry in range(100)]


def identities(bookies: dict[str, dict[str, Any]]) -> set[tuple[str, str]]:
    """Return who bookies are."""
    return {(bookie["bookie_id"], bookie["instance"]) for bookie in bookies.values()}


@pytest.mark.long
def test_executors_may_be_held(local: Driver, place: StoreOrUrl) -> None:
    local.ask("bookies", executors=2, hold_slot=True)
    local.ask("bookies", executors=2, hold_slot=True)
    wait_until(lambda: local.ask("active_tasks", group="pybk-bookies") == 2)
    time.sleep(0.5)
    assert local.ask("active_tasks", group="pybk-bookies") == 2, "each is held once"
    assert len(local.ask("run_tasks", count=4, metadata=place.url)) == 4, "other slots are free"
    local.ask("cancel", group="pybk-bookies")
    wait_until(lambda: local.ask("active_tasks", group="pybk-bookies") == 0)


def test_tasks_write_to_the_bookie_of_their_executor_and_read_from_it(local: Driver, place: StoreOrUrl) -> None:
    bookies = local_reader(local, place)
    sink = {"ledgerType": "local_reader", "insecure": "true", "ensembleSize": "1", "writeQuorum": "1", "ackQuorum": "1"}
    local.ask("write", options={**place.options, **sink}, count=1000)
    with place.connect() as client:
        ensembles = {
            ledger_id: client.ledger_metadata(ledger_id).fragments[0].ensemble
            for ledger_id in client.list_ledgers("local_reader")
        }
    holders = {ledger_id: bookie.bookie_id for ledger_id, (bookie,) in ensembles.items()}
    assert set(holders.values()) == {bookie["bookie_id"] for bookie in bookies.values()}, "both executors wrote"
    found = local.ask("read", options={**place.options, "ledgerType": "local_reader"})
    assert sum(rows for _, _, rows in found) == 1000
    assert sorted(ledger for _, ledgers, _ in found for ledger in ledgers) == sorted(holders)
    for executor, ledgers, _ in found:
        assert {holders[ledger] for ledger in ledgers} == {bookies[executor]["bookie_id"]}
    shown = local.ask("explain", options={**place.options, "ledgerType": "local_reader"})
    assert "MapInArrow" in shown
    assert SECRET.decode() not in shown


def test_the_secret_is_in_no_argument_log_or_page(local: Driver, place: StoreOrUrl) -> None:
    local_reader(local, place)
    pages = local.ask("pages")
    assert b"PYBK_BOOKIES" in pages["environment"].encode(), "this is the page that shows settings"
    for name, page in pages.items():
        assert SECRET.decode() not in page, name
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            assert SECRET not in command_of(int(entry))
    files = [place.secret, *filter(Path.is_file, place.directory.rglob("*"))]
    holding = {path for path in files if not path.is_symlink() and SECRET in path.read_bytes()}
    assert holding == {place.secret}
    assert any("events" in str(path) for path in files)


@pytest.mark.long
def test_secrets_of_a_read_are_in_no_plan_log_page_or_event(local: Driver, place: StoreOrUrl) -> None:
    local_reader(local, place)
    with place.connect() as client:
        writer = client.create_ledger(password=PASSWORD, ensemble_size=2, ledger_type="secret")
        writer.append_many([b"x"] * 50)
        writer.close()
    password = secret_file(place.directory / "given", PASSWORD)
    shown = local.ask("read_and_show", options={**place.options, "passwordFile": password, "ledgerType": "secret"})
    assert "BatchScan pybk" in shown
    assert "did you mean passwordFile" in shown
    files = [path for path in place.directory.rglob("*") if path.is_file() and not path.is_symlink()]
    logged = "".join(
        path.read_text(errors="replace") for path in files if str(path) not in (password, str(place.secret))
    )
    assert "BatchScan pybk" in logged
    assert "INFO" in local.log.read_text()
    for secret in (SECRET, PASSWORD):
        assert secret.decode() not in shown + logged


# ---- an executor's host is lost while a writer writes ----------------------------------------------------------------


class Writing(threading.Thread):
    """Appends to a ledger as fast as it is acknowledged."""

    def __init__(self, client: LedgerManager) -> None:
        super().__init__(daemon=True)
        self._writer = client.create_ledger(ensemble_size=2, write_quorum=2, ack_quorum=2, password=PASSWORD)
        self.ledger_id = self._writer.ledger_id
        self.acked = -1
        self._stopping = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Append until told to end."""
        try:
            while not self._stopping.is_set():
                self.acked = self._writer.append(content(self.acked + 1))
            self._writer.close()
        except PybkError as error:
            self.error = error

    def end(self) -> None:
        """Close the ledger."""
        self._stopping.set()
        self.join(WAIT_S)
        assert self.error is None, self.error


def content(entry_id: int) -> bytes:
    return b"entry %d of a ledger; " % entry_id * 20


@pytest.mark.long
def test_an_executor_that_is_lost_under_load_loses_nothing(local: Driver, place: StoreOrUrl, tmp_path: Path) -> None:
    spare = LedgerManager.open(
        tmp_path / "spare", listen="tcp://127.0.0.1:*", metadata=place.url, cluster_secret=SECRET, bookie_id="spare"
    )
    with spare:
        local_reader(local, place)
        lose_one(place, local.ask("bookies", executors=2))
    wait_until(lambda: len(local_reader(local, place)) == 2, "the lost executor to be replaced")


@pytest.mark.long
def test_an_executor_of_a_standalone_cluster_that_is_lost_under_load_loses_nothing(tmp_path: Path) -> None:
    place = StoreOrUrl(tmp_path)
    with standalone(tmp_path, cores=3) as master, driver(tmp_path) as session:
        conf = {**CONF, "spark.executor.cores": "1", "spark.cores.max": "3"}
        session.ask("begin", master=master, conf=conf, bookies=None)
        lose_one(place, session.ask("bookies", executors=3, **place.settings))
        session.ask("end")
        wait_until(lambda: not place.running(), "the bookies to end with their executors")


@pytest.mark.long
def test_bookies_come_and_go_with_executors_that_are_allocated_dynamically(tmp_path: Path) -> None:
    place = StoreOrUrl(tmp_path)
    allocation = {"enabled": "true", "minExecutors": "1", "maxExecutors": "2", "executorIdleTimeout": "2s"}
    conf = {
        **CONF,
        "spark.executor.cores": "1",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        **{f"spark.dynamicAllocation.{name}": value for name, value in allocation.items()},
    }
    with standalone(tmp_path, cores=2) as master, driver(tmp_path) as session:
        session.ask("begin", master=master, conf=conf, bookies=place.settings)
        before = local_reader(session, place)
        wait_until(lambda: len(place.running()) == 1, "an idle executor to end with its bookie")
        after = local_reader(session, place)
        assert identities(after) == identities(before)
        session.ask("end")
        wait_until(lambda: not place.running(), "the bookies to end with their executors")


@pytest.mark.long
def test_bookies_on_two_hosts_come_back_with_zookeeper(tmp_path: Path, zookeeper_server: ZooKeeperServer) -> None:
    place = StoreOrUrl(tmp_path, zookeeper_server.url())
    hosts = ("127.0.0.1", "127.0.0.2")
    with standalone(tmp_path, cores=1, hosts=hosts) as master, driver(tmp_path) as session:
        session.ask("begin", master=master, conf={**CONF, "spark.executor.cores": "1"}, bookies=place.settings)
        before = {bookie["executor"]: bookie for bookie in session.ask("bookies", executors=2)}
        assert {bookie["location"].split("_")[1] for bookie in before.values()} == set(hosts)
        with (
            place.connect() as client,
            client.create_ledger(ensemble_size=2, write_quorum=2, password=PASSWORD) as writer,
        ):
            writer.append_many([b"%d" % entry for entry in range(100)])
        kill(before["0"]["pid"])
        kill(executor_of(before["1"]))
        after = wait_until(lambda: replaced(session.ask("bookies", executors=2), before))
        assert identities(after) == identities(before)
        with place.connect() as client, client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            assert [entry.payload for entry in reader.read(0, 99)] == [b"%d" % entry for entry in range(100)]
        session.ask("end")
        wait_until(lambda: not place.running(), "the bookies to end with their executors")


def replaced(bookies: list[dict[str, Any]], before: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return bookies by executor once none of them is a process of before."""
    pids = {bookie["pid"] for bookie in before.values()}
    return {} if pids & {bookie["pid"] for bookie in bookies} else {bookie["executor"]: bookie for bookie in bookies}


def lose_one(place: StoreOrUrl, started: list[dict[str, Any]]) -> None:
    """Kill an executor, its bookie and the bookie's directory while a writer writes to it; the others copy its part."""
    with place.connect() as client:
        metadata_of(client).change_settings(lambda now: replace(now, repair=replace(now.repair, grace_s=1.0)))
        wait_until(lambda: len(cluster_backend_of(client).membership.bookies) == 3)
        writing = Writing(client)
        wait_until(lambda: writing.acked > 200)
        (fragment,) = client.ledger_metadata(writing.ledger_id).fragments
        used = {bookie.bookie_id for bookie in fragment.ensemble}
        lost = next(bookie for bookie in started if bookie["bookie_id"] in used)
        kill(executor_of(lost))
        os.kill(lost["pid"], signal.SIGKILL)
        wait_until(lambda: not is_locked(f"{lost['directory']}.lock"))
        shutil.rmtree(lost["directory"])
        killed_at = writing.acked
        wait_until(lambda: writing.acked > killed_at + 200, "the writer to go on")
        writing.end()
        wait_until(
            lambda: lost["bookie_id"] not in holders_of(client, writing.ledger_id),
            "the bookies to copy what the lost one had",
            seconds=PROCESS_S,
            pause_s=0.2,
        )
        check_replicas(client, writing, lost["bookie_id"])


def holders_of(client: LedgerManager, ledger_id: int) -> set[str]:
    """Return the names of all bookies of a ledger."""
    fragments = client.ledger_metadata(ledger_id).fragments
    return {bookie.bookie_id for fragment in fragments for bookie in fragment.ensemble}


def check_replicas(client: LedgerManager, writing: Writing, lost: str) -> None:
    """Check that nothing acknowledged is lost, and that each bookie of a fragment has all its entries."""
    metadata = client.ledger_metadata(writing.ledger_id)
    assert metadata.state is LedgerState.CLOSED
    assert metadata.last_entry_id == writing.acked
    assert len(metadata.fragments) == 2
    ledger = descriptor_of(client.open_ledger(writing.ledger_id, password=PASSWORD))
    assert isinstance(ledger, RemoteLedger)
    cluster: Any = SimpleNamespace(secret=SECRET)
    ends = [*(fragment.first_entry_id for fragment in metadata.fragments[1:]), metadata.last_entry_id + 1]
    for fragment, end in zip(metadata.fragments, ends, strict=True):
        wanted = set(range(fragment.first_entry_id, end))
        for bookie in fragment.ensemble:
            assert bookie.bookie_id != lost
            held = copies(cluster, client, bookie, ledger)
            assert wanted <= set(held), f"{bookie} lacks {len(wanted - set(held))} of {len(wanted)} entries"
            assert all(content(entry) in held[entry] for entry in wanted)
