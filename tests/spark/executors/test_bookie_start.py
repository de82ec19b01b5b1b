"""Bookies of executors; a sleeping process stands in for the executor, because nothing here needs Spark."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pybk.config import StoreConfig
from pybk.errors import EntryUnknownError, PybkError, UsageError
from pybk.ledger.ledger_metadata import Bookie
from pybk.manager.connect import connect as connect_backend
from pybk.manager.ledger_manager import LedgerManager
from pybk.spark.executors import bookie_process, bookie_start
from pybk.spark.executors.bookie_settings import BookieSettings
from pybk.spark.executors.bookie_start import ensure_bookie
from pybk.spark.executors.executor import (
    DOWN,
    Executor,
    ExecutorBookie,
    Process,
    executor_bookie,
    is_locked,
    read_state,
)
from tests.cluster.inside import SECRET, make_cluster
from tests.internals import metadata_of
from tests.storage.real_store import contents, numbered
from tests.waiting import PROCESS_S, WAIT_S, stop, wait_until

pytestmark = pytest.mark.sampled(one_in=8, using="begin")

Begin = Callable[[], "Sleeper"]


class Sleeper:
    """What stands for an executor: its bookie sees its end.

    Attributes:
        executor: The executor.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        self.executor = Executor.of(self._process.pid)

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Start executors; they and their bookies are ended after the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ExitStack() as stack:

        def begin() -> Sleeper:
            sleeper = Sleeper()
            stack.callback(sleeper.kill)
            return sleeper

        yield begin
    locks = [str(path) for path in (tmp_path / "bookies").glob("*.lock")]
    wait_until(lambda: not any(map(is_locked, locks)))


@pytest.fixture
def settings(tmp_path: Path) -> BookieSettings:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET + b"\n")
    return BookieSettings(
        metadata=make_cluster(tmp_path / "cluster"), directory=str(tmp_path / "bookies"), secret_file=str(secret)
    )


def connect(settings: BookieSettings) -> LedgerManager:
    return LedgerManager.connect(settings.metadata, cluster_secret=SECRET)


def write(client: LedgerManager) -> int:
    """Write a ledger of one copy and return its id."""
    with client.create_ledger(ensemble_size=1, insecure=True) as writer:
        writer.append_many(numbered(9))
    return writer.ledger_id


def write_one(client: LedgerManager) -> list[Bookie]:
    """Write a ledger and return who has it."""
    return list(client.ledger_metadata(write(client)).fragments[0].ensemble)


def kill(bookie: ExecutorBookie) -> None:
    """Kill a bookie's process and wait until it is gone."""
    process = Process.of(bookie.pid)
    os.kill(bookie.pid, signal.SIGKILL)
    wait_until(lambda: not process.is_alive())


def ended(bookie: ExecutorBookie) -> bool:
    """Return whether a bookie has ended and is not started again."""
    return not is_locked(f"{bookie.directory}.lock")


def supervisor_of(bookie: ExecutorBookie) -> int:
    return int(Path(f"/proc/{bookie.pid}/stat").read_text().rpartition(")")[2].split()[1])


def back(settings: BookieSettings, executor: Executor, before: ExecutorBookie) -> ExecutorBookie:
    """Wait until an executor has another process of its bookie."""

    def look() -> ExecutorBookie | None:
        found = executor_bookie(executor, settings.metadata)
        return None if found is None or found.pid == before.pid else found

    found = wait_until(look)
    assert found is not None
    return found


def test_an_executor_has_one_bookie_for_all_its_tasks(begin: Begin, settings: BookieSettings) -> None:
    executor = begin().executor
    found: list[ExecutorBookie] = []
    threads = [
        threading.Thread(target=lambda: found.append(ensure_bookie(settings, executor)), daemon=True) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROCESS_S)
    assert len(found) == 4
    assert len(set(found)) == 1
    other = ensure_bookie(settings, begin().executor)
    assert other.pid != found[0].pid
    assert {other.directory, found[0].directory} == {f"{settings.directory}/slot-0", f"{settings.directory}/slot-1"}
    with connect(settings) as client:
        with client.create_ledger(ensemble_size=2, write_quorum=2, ack_quorum=2, insecure=True) as writer:
            writer.append(b"x")
        ensemble = client.ledger_metadata(writer.ledger_id).fragments[0].ensemble
    assert set(ensemble) == {found[0].bookie, other.bookie}


def test_a_bookie_has_the_tiers_and_the_location_that_its_options_name(
    begin: Begin, settings: BookieSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_BOOKIE_RACK", "zone/rack")  # what a host sets for its executors
    (tmp_path / "ssd").mkdir()
    tier = {"tier.ssd": f"{tmp_path}/ssd", "store.default_tier": "ssd"}
    settings = replace(settings, options=tier)
    executor = begin().executor
    found = ensure_bookie(settings, executor)
    with connect(settings) as client:
        assert [there.rack for there in metadata_of(client).list_bookies()] == ["zone/rack"]
        ledger_id = write(client)
    assert os.listdir(tmp_path / "ssd") == ["slot-0"]
    assert "ssd" not in os.listdir(found.directory)
    kill(found)
    assert back(settings, executor, found).bookie == found.bookie
    with LedgerManager(
        connect_backend(settings.metadata, SECRET, StoreConfig(), near=found.bookie_id, directory=found.directory)
    ) as near:
        assert contents(near, ledger_id) == numbered(9)


def read_again(client: LedgerManager, ledger_id: int) -> None:
    """Read a ledger of nine entries; a busy bookie may answer too late, and then nothing is known of an entry."""

    def found() -> bool:
        try:
            return contents(client, ledger_id) == numbered(9)
        except EntryUnknownError:
            return False

    wait_until(found)


def test_a_bookie_ends_with_its_executor(begin: Begin, settings: BookieSettings) -> None:
    sleeper = begin()
    found = ensure_bookie(settings, sleeper.executor)
    process = Process.of(found.pid)
    with connect(settings) as client:
        metadata = metadata_of(client)
        assert [there.bookie for there in metadata.list_bookies()] == [found.bookie]
        sleeper.kill()
        wait_until(lambda: not process.is_alive())
        assert metadata.list_bookies() == [], "it said that it leaves"
    wait_until(lambda: ended(found))
    assert executor_bookie(sleeper.executor, settings.metadata) is None
    assert not [name for name in os.listdir(os.path.dirname(sleeper.executor.file("", "lock"))) if "executor" in name]
    assert "Traceback" not in Path(f"{found.directory}.log").read_text()


@pytest.mark.parametrize("with_bookie", [True, False])
def test_a_later_executor_takes_over_what_a_killed_one_had(
    begin: Begin, settings: BookieSettings, with_bookie: bool
) -> None:
    sleeper = begin()
    first = ensure_bookie(settings, sleeper.executor)
    with connect(settings) as client:
        ledger_id = write(client)
        if with_bookie:
            kill(first)
        sleeper.kill()
        second = ensure_bookie(settings, begin().executor)
        assert second.bookie == first.bookie
        assert second.directory == first.directory
        assert second.pid != first.pid
        there = metadata_of(client).list_bookies()
        assert [(found.bookie, found.addresses) for found in there] == [(second.bookie, (second.address,))]
    with connect(settings) as client:
        read_again(client, ledger_id)
        assert write_one(client) == [second.bookie]


def test_a_bookie_that_takes_long_to_end_is_waited_for(begin: Begin, settings: BookieSettings) -> None:
    sleeper = begin()
    first = ensure_bookie(settings, sleeper.executor)
    stop(first.pid)
    sleeper.kill()
    timer = threading.Timer(1.0, os.kill, (first.pid, signal.SIGCONT))
    timer.start()
    try:
        assert ensure_bookie(settings, begin().executor).bookie == first.bookie
    finally:
        timer.join()


def test_a_bookie_that_was_killed_comes_back_by_itself(begin: Begin, settings: BookieSettings) -> None:
    executor = begin().executor
    first = ensure_bookie(settings, executor)
    with connect(settings) as client:
        ledger_id = write(client)
    kill(first)
    second = back(settings, executor, first)
    assert (second.bookie, second.directory) == (first.bookie, first.directory)
    assert "SIGKILL killed its process" in Path(f"{first.directory}.log").read_text()
    kill(second)
    assert ensure_bookie(settings, executor).bookie == first.bookie, "it is waited for"
    with connect(settings) as client:
        read_again(client, ledger_id)


def test_tasks_do_not_wait_for_a_bookie_that_cannot_come_back(
    begin: Begin, settings: BookieSettings, tmp_path: Path
) -> None:
    executor = begin().executor
    first = ensure_bookie(settings, executor)
    (tmp_path / "secret").write_bytes(b"Tr0ub4dor, of some other cluster!")
    kill(first)
    state = executor.file(settings.metadata, "json")
    wait_until(lambda: "MetadataForgedError" in (read_state(state) or {}).get(DOWN, ""))
    assert executor_bookie(executor, settings.metadata, WAIT_S * 10) is None
    (tmp_path / "secret").write_bytes(SECRET)
    assert back(settings, executor, first).bookie == first.bookie


def test_a_bookie_serves_without_its_supervisor_and_comes_back_with_one(begin: Begin, settings: BookieSettings) -> None:
    executor = begin().executor
    first = ensure_bookie(settings, executor)
    os.kill(supervisor_of(first), signal.SIGKILL)
    wait_until(lambda: supervisor_of(first) == 1)
    assert ensure_bookie(settings, executor) == first
    kill(first)
    wait_until(lambda: ended(first))
    assert executor_bookie(executor, settings.metadata) is None
    second = ensure_bookie(settings, executor)
    assert second.bookie == first.bookie
    kill(second)
    assert back(settings, executor, second).bookie == first.bookie


def test_a_directory_that_was_lost_is_another_bookie(begin: Begin, settings: BookieSettings) -> None:
    sleeper = begin()
    first = ensure_bookie(settings, sleeper.executor)
    sleeper.kill()
    wait_until(lambda: ended(first))
    shutil.rmtree(settings.directory)
    second = ensure_bookie(settings, begin().executor)
    assert second.directory == first.directory
    assert second.bookie_id != first.bookie_id


def test_a_bookie_that_lingers_gives_what_it_has_to_others(begin: Begin, settings: BookieSettings) -> None:
    settings = replace(settings, linger_s=60.0)
    sleeper = begin()
    first = ensure_bookie(settings, sleeper.executor)
    with connect(settings) as client:
        ledger_id = write(client)
        later, last = begin(), begin()
        second = ensure_bookie(settings, later.executor)
        sleeper.kill()
        metadata = metadata_of(client)
        wait_until(lambda: [there.bookie for there in metadata.list_bookies() if there.read_only] == [first.bookie])
        assert write_one(client) == [second.bookie]
        done = client.replicate(first.bookie_id)
        assert done.fragments <= 1, "the cluster may have copied it already"
        assert done.left == ()
        assert client.ledger_metadata(ledger_id).fragments[0].ensemble == (second.bookie,)
        read_again(client, ledger_id)
    third = ensure_bookie(settings, last.executor)
    assert third.bookie == first.bookie, "it need not linger once another takes its directory"
    for bookie in third, second:  # else they linger, too, and the end of the test waits for them
        os.kill(bookie.pid, signal.SIGTERM)


@pytest.mark.long
def test_the_cluster_empties_a_bookie_that_lingers_and_the_next_one_takes_entries(
    begin: Begin, settings: BookieSettings
) -> None:
    settings = replace(settings, linger_s=PROCESS_S)
    sleeper = begin()
    first = ensure_bookie(settings, sleeper.executor)
    with connect(settings) as client:
        ledger_id = write(client)
        second = ensure_bookie(settings, begin().executor)
        sleeper.kill()
        wait_until(lambda: ended(first), "the bookie to be drained", PROCESS_S, pause_s=0.1)
        assert client.ledger_metadata(ledger_id).fragments[0].ensemble == (second.bookie,)
        read_again(client, ledger_id)
        os.kill(second.pid, signal.SIGTERM)
        wait_until(lambda: ended(second))
        third = ensure_bookie(settings, begin().executor)
        assert third.bookie == first.bookie
        wait_until(lambda: not any(there.read_only for there in metadata_of(client).list_bookies()))
    with connect(settings) as client:
        assert write_one(client) == [third.bookie]
    os.kill(third.pid, signal.SIGTERM)
    wait_until(lambda: ended(third))


@pytest.mark.parametrize("process_of", [supervisor_of, lambda bookie: bookie.pid])
def test_a_bookie_ends_at_sigterm(
    begin: Begin, settings: BookieSettings, process_of: Callable[[ExecutorBookie], int]
) -> None:
    executor = begin().executor
    found = ensure_bookie(settings, executor)
    process = Process.of(found.pid)
    os.kill(process_of(found), signal.SIGTERM)
    wait_until(lambda: ended(found))
    assert not process.is_alive()
    assert executor_bookie(executor, settings.metadata) is None


def test_the_secret_is_in_no_argument_and_no_file(
    begin: Begin, settings: BookieSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    settings = replace(settings, secret_file=None)
    executor = begin().executor
    found = ensure_bookie(settings, executor)
    assert found.bookie_id.encode() not in Path(f"/proc/{found.pid}/cmdline").read_bytes()
    assert settings.metadata.encode() in Path(f"/proc/{found.pid}/cmdline").read_bytes()
    assert SECRET not in Path(f"/proc/{found.pid}/cmdline").read_bytes()
    for folder in (settings.directory, os.path.dirname(executor.file(settings.metadata, "json"))):
        for path in filter(Path.is_file, Path(folder).rglob("*")):
            assert SECRET not in path.read_bytes(), path


def test_why_a_bookie_does_not_start_is_said(begin: Begin, settings: BookieSettings, tmp_path: Path) -> None:
    executor = begin().executor
    (tmp_path / "secret").write_bytes(b"Tr0ub4dor, of some other cluster!")
    with pytest.raises(PybkError, match="MetadataForgedError") as caught:
        ensure_bookie(settings, executor)
    assert "Tr0ub4dor" not in str(caught.value)
    assert executor_bookie(executor, settings.metadata) is None
    assert not os.path.exists(executor.file(settings.metadata, "lock")), "nothing is left behind"
    (tmp_path / "secret").write_bytes(SECRET)
    ensure_bookie(settings, executor)
    with pytest.raises(UsageError, match="slot-0, not /elsewhere"):
        ensure_bookie(replace(settings, directory="/elsewhere"), executor)


def test_a_wrong_secret_raises_though_a_bookie_serves(
    begin: Begin, settings: BookieSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = begin().executor
    monkeypatch.setattr(Executor, "of_task", lambda: executor)
    found = json.loads(bookie_start.ensure_from_json(str(settings)))
    assert found == {"bookie": asdict(ensure_bookie(settings, executor))}
    (tmp_path / "secret").write_bytes(b"Tr0ub4dor, of some other cluster!")
    assert "MetadataForgedError" in json.loads(bookie_start.ensure_from_json(str(settings)))["error"]
    assert "Tr0ub4dor" not in bookie_start.ensure_from_json(str(settings))


def test_other_users_cannot_read_a_slot(begin: Begin, settings: BookieSettings) -> None:
    os.mkdir(settings.directory, 0o755)  # made by the administrator of the host
    old = os.umask(0o022)
    try:
        found = ensure_bookie(settings, begin().executor)
    finally:
        os.umask(old)
    modes = {name: os.stat(f"{found.directory}{name}").st_mode & 0o777 for name in ("", ".log", ".lock", ".json")}
    assert modes == {"": 0o700, ".log": 0o600, ".lock": 0o600, ".json": 0o600}


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("lmdb:///srv/metadata", "127.0.0.1"),
        ("zk://127.0.0.1:2181,127.0.0.2:2181/x", "127.0.0.1"),
        ("zk://localhost:2181/x", "127.0.0.1"),
        ("zk://[::1]:2181/x", "127.0.0.1"),
    ],
)
def test_a_bookie_listens_where_others_reach_it(url: str, host: str) -> None:
    assert bookie_process.own_host(url) == host


def test_a_host_that_only_ipv6_reaches_is_refused() -> None:
    with pytest.raises(UsageError, match="IPv4"):
        bookie_process.own_host("zk://[2001:db8::1]:2181/x")


def test_settings_are_checked_and_travel_as_text(settings: BookieSettings) -> None:
    assert BookieSettings.of(str(settings)) == settings
    assert replace(settings, directory=settings.directory + "/") == settings
    for text in ("null", "[]", "{}", '{"metadata": "lmdb:///m"}', '{"secret": "s"}', "x"):
        with pytest.raises(UsageError):
            BookieSettings.of(text)
    for wrong in ({"metadata": "/m"}, {"directory": "bookies"}, {"secret_file": "secret"}, {"linger_s": -1.0}):
        with pytest.raises(UsageError):
            replace(settings, **wrong)
