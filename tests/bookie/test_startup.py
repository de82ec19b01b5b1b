"""A bookie that lost log files starts, denies nothing and takes nothing of writers, and gets everything back."""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk.admin.cli import main
from pybk.bookie.replica_state import ReplicaState
from pybk.bookie.replicas import Replicas
from pybk.bookie.server import BookieServer
from pybk.client import limbo_repair
from pybk.client.limbo_repair import LimboRepair
from pybk.config import StoreConfig
from pybk.errors import CookieError, CorruptError, LedgerFencedError
from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.metadata.underreplication import RepairReason
from pybk.operations.store_repair import rebuild_index
from pybk.replication.bookie import BookieMachine, Respond
from pybk.replication.messages import NEGATIVE, Add, EntryRun, Read, ReadReply, Reply, Request, Status
from pybk.testing import TestCluster
from tests.client.test_limbo_repair import PASSWORD, check, fill, payload
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of, service_of
from tests.storage.real_store import QUICK
from tests.waiting import wait_until

COUNT = 300

A_LOG_FILE = pytest.mark.sampled(one_in=3, group="a log file of a bookie is lost")
"""Ways to lose entries of the newest log file, which one rule gives back."""
ANOTHER_NAME = pytest.mark.sampled(one_in=2, group="a bookie is started with another name")


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Keep bookies from repairing limbo before it is set."""
    gate = threading.Event()
    repair_limbo = LimboRepair.repair

    def wait(self: LimboRepair, ledger_id: int) -> bool:
        return gate.is_set() and repair_limbo(self, ledger_id)

    monkeypatch.setattr(LimboRepair, "repair", wait)
    monkeypatch.setattr(limbo_repair, "RETRY_SECONDS", 0.1)
    return gate


def logs(cluster: Inside) -> list[Path]:
    return sorted((cluster.directory / "bookie-0" / "nvme").glob("*.log"))


@contextmanager
def offline(cluster: Inside, **settings: Any) -> Iterator[Replicas]:
    """Open what bookie-0 keeps, while it does not run."""
    replicas = Replicas.open(str(cluster.directory / "bookie-0"), config=StoreConfig(**{**QUICK, **settings}))
    yield replicas
    replicas.close()


def first_log_lost(cluster: Inside) -> None:
    logs(cluster)[0].unlink()


def log_destroyed(cluster: Inside) -> None:
    path = logs(cluster)[0]
    path.write_bytes(b"?" * path.stat().st_size)


def middle_of_log_destroyed(cluster: Inside) -> None:
    path = logs(cluster)[0]
    data = bytearray(path.read_bytes())
    used = len(bytes(data).rstrip(b"\0"))
    for at in range(4096 * (used // 8192), used, 4096):
        data[at : at + 64] = b"?" * 64
    path.write_bytes(data)


def kept_log_lost(cluster: Inside) -> None:
    """Lose a log file that is below the mark, where it stays if it is filled well enough."""
    with offline(cluster, fill_ratio=0.01) as replicas:
        replicas.store.scheduler.checkpoint()
    logs(cluster)[0].unlink()


def cold_files_lost(cluster: Inside) -> None:
    with offline(cluster) as replicas:
        for ledger_id in replicas.ledgers():
            replicas.move(ledger_id, StorageHint.HDD)
    lost = list((cluster.directory / "bookie-0").rglob("*.cold"))
    assert lost
    for path in lost:
        path.unlink()


def watermark_lost(cluster: Inside) -> None:
    (cluster.directory / "bookie-0" / "watermark").unlink()


def index_device_lost(cluster: Inside) -> None:
    """Lose the device of the index and of all entries, and do what ``rebuild-index`` can do about it."""
    with offline(cluster) as replicas:
        for ledger_id in replicas.ledgers():
            replicas.move(ledger_id, StorageHint.SSD)
        replicas.store.scheduler.checkpoint()
    root = cluster.directory / "bookie-0"
    shutil.rmtree(root / "ssd")
    (root / "ssd").mkdir(0o700)
    assert rebuild_index(root, accept_loss=True).lost


def log_device_lost(cluster: Inside) -> None:
    """Lose the device of the log after a start that no checkpoint has, and do what the error of the start says."""
    with offline(cluster) as replicas:
        replicas.store.scheduler.checkpoint()
    cluster.open_bookie(0).close()
    root = cluster.directory / "bookie-0"
    shutil.rmtree(root / "nvme")
    with pytest.raises(CookieError, match=rf"make an empty directory there, and run `pybk store rebuild-index {root}`"):
        cluster.open_bookie(0)
    (root / "nvme").mkdir(0o700)
    assert not rebuild_index(root).made
    assert rebuild_index(root, accept_loss=True).made


def ask(service: BookieServer, request: Request) -> Reply | ReadReply:
    (effect,) = BookieMachine(service.replicas).receive("sender", request, None, 0)
    assert isinstance(effect, Respond)
    assert isinstance(effect.reply, Reply | ReadReply)
    return effect.reply


def entries(service: BookieServer, ledger_id: int, count: int) -> dict[int, bytes]:
    """Return what a bookie has of a ledger; it denies nothing."""
    found = {}
    for entry_id in range(count):
        reply = ask(service, Read(ledger_id, entry_id, entry_id, 1, 1 << 20, checked=True))
        assert reply.status not in NEGATIVE
        if reply.status is Status.OK:
            assert isinstance(reply, ReadReply)
            assert reply.run is not None
            found[entry_id] = b"".join(reply.run.body)
    return found


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(first_log_lost, marks=A_LOG_FILE),
        pytest.param(log_destroyed, marks=A_LOG_FILE),
        pytest.param(middle_of_log_destroyed, marks=A_LOG_FILE),
        kept_log_lost,
        cold_files_lost,
        watermark_lost,
        index_device_lost,
        log_device_lost,
    ],
)
def test_a_bookie_that_lost_something_durable_gets_it_back(
    three: Inside, gate: threading.Event, harm: Callable[[Inside], None], caplog: pytest.LogCaptureFixture
) -> None:
    client = three.connect()
    closed = fill(client, COUNT)
    live = client.create_ledger(password=PASSWORD)
    live.append_many([payload(number) for number in range(COUNT)])
    zombie = three.connect().create_ledger(password=PASSWORD)
    zombie.append_many([payload(number) for number in range(COUNT)])
    check(client, zombie.ledger_id, COUNT)  # which recovers, fences and closes it
    orphan = three.connect().create_ledger(password=PASSWORD)
    orphan.append_many([payload(number) for number in range(COUNT)])
    ledgers = [closed, live.ledger_id, zombie.ledger_id, orphan.ledger_id]
    wait_until_first_has(three, ledgers)
    three.bookies[0].close()
    harm(three)
    with caplog.at_level(logging.WARNING, "pybk"):
        manager = three.open_bookie(0)
    assert "lost durable data" in caplog.text
    assert "bookie-0" in caplog.text
    assert "4 ledgers are in limbo" in caplog.text
    service = service_of(manager)
    assert service.in_limbo() == ledgers
    assert manager.health().state == "in_limbo"
    assert manager.health().reason.startswith("4 ledgers are in limbo")
    before = [entries(service, ledger_id, COUNT + 1) for ledger_id in ledgers]
    if harm is not watermark_lost:
        assert sum(map(len, before)) < 4 * COUNT
    late = refused(service, zombie)
    assert late in (Status.LIMBO, Status.FENCED)
    with pytest.raises(LedgerFencedError):
        zombie.append(b"late")
    for ledger_id in (closed, zombie.ledger_id, orphan.ledger_id):  # the last one is recovered now
        check(three.connect(), ledger_id, COUNT)
    assert replica_of(service, orphan.ledger_id).fenced
    live.append(payload(COUNT))
    gate.set()
    wait_until(lambda: service.in_limbo() == [live.ledger_id])
    live.close()
    wait_until(lambda: not service.in_limbo())
    whole(three, manager, ledgers)
    assert refused(service, zombie) is Status.FENCED
    check(three.connect(), live.ledger_id, COUNT + 1)
    manager.close()
    caplog.clear()
    manager = three.open_bookie(0)
    assert "lost" not in caplog.text
    assert service_of(manager).replicas.store.began_clean
    assert service_of(manager).in_limbo() == []
    assert manager.health().state == "ok"
    whole(three, manager, ledgers)


def test_a_bookie_that_lost_its_index_is_mended_as_its_messages_say(
    three: Inside, capsys: pytest.CaptureFixture[str]
) -> None:
    client = three.connect()
    ledgers = [fill(client, COUNT), fill(client, COUNT, storage_hints=[StorageHint.SSD])]
    wait_until_first_has(three, ledgers)
    service_of(three.bookies[0]).replicas.store.scheduler.checkpoint()
    three.bookies[0].close()
    root = three.directory / "bookie-0"
    remedy = rf"run `pybk store rebuild-index {root}`.*; if that fails, begin an empty directory .*--replace"

    shutil.rmtree(root / "ssd" / "index")  # alone: the files have everything, so nothing is in doubt
    with pytest.raises(CorruptError, match=remedy):
        three.open_bookie(0)
    assert main(["rebuild-index", str(root)]) == 0
    manager = three.open_bookie(0)
    assert manager.health().state == "ok"
    assert [len(entries(service_of(manager), each, COUNT)) for each in ledgers] == [COUNT, COUNT]
    manager.close()

    shutil.rmtree(root / "ssd")  # the whole device, with entries
    with pytest.raises(CookieError, match=rf"make an empty directory there, and run `pybk store rebuild-index {root}`"):
        three.open_bookie(0)
    (root / "ssd").mkdir()
    with pytest.raises(CorruptError, match=remedy):
        three.open_bookie(0)
    capsys.readouterr()
    assert main(["rebuild-index", str(root)]) == 1
    assert "give --accept-loss, which keeps" in capsys.readouterr().out
    assert main(["rebuild-index", str(root), "--accept-loss"]) == 0
    manager = three.open_bookie(0)
    wait_until(lambda: manager.health().state == "ok")
    assert [len(entries(service_of(manager), each, COUNT)) for each in ledgers] == [COUNT, COUNT]
    for each in ledgers:
        check(three.connect(), each, COUNT)


def wait_until_first_has(cluster: Inside, ledgers: list[int]) -> None:
    """Wait until the first bookie has all entries, as two of three suffice for their acknowledgement."""
    replicas = service_of(cluster.bookies[0]).replicas
    wait_until(lambda: all(replicas.count_entries(ledger_id) == COUNT for ledger_id in ledgers))


def replica_of(service: BookieServer, ledger_id: int) -> ReplicaState:
    state = service.replicas.state(ledger_id)
    assert state is not None
    return state


def refused(service: BookieServer, writer: LedgerWriter) -> Status:
    """Return what a bookie says to an add of a writer that knows nothing."""
    run = EntryRun(COUNT, 1, array("q", (64,)), (bytes(64),))
    return ask(service, Add(writer.ledger_id, (run,), COUNT - 1)).status


def whole(cluster: Inside, manager: LedgerManager, ledgers: list[int]) -> None:
    """Assert that a bookie has what its peer has, byte for byte."""
    service, peer = service_of(manager), service_of(cluster.bookies[1])
    for ledger_id in ledgers:
        for entry_id in range(COUNT + 1):
            mine, theirs = (
                ask(each, Read(ledger_id, entry_id, entry_id, 1, 1 << 20, checked=True)) for each in (service, peer)
            )
            assert isinstance(mine, ReadReply)
            assert isinstance(theirs, ReadReply)
            wanted = Status.OK if entry_id < COUNT or ledger_id == ledgers[1] else Status.NO_SUCH_ENTRY
            assert mine.status is wanted
            assert theirs.status is wanted
            if mine.run is not None and theirs.run is not None:
                assert b"".join(mine.run.body) == b"".join(theirs.run.body)


def test_a_bookie_that_was_stopped_in_its_first_start_starts_by_the_same_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Replicas, "record_start", stop)
        with pytest.raises(KeyboardInterrupt):
            TestCluster(tmp_path, 1)
    with TestCluster(tmp_path, 1) as cluster, cluster.connect().create_ledger(ensemble_size=1, insecure=True) as writer:
        writer.append(payload(0))


def test_a_directory_that_lost_its_name_is_opened_with_the_given_one(three: Inside) -> None:
    three.bookies[0].close()
    first_log_lost(three)
    with pytest.raises(CookieError, match=r"lost its newest data.*bookie_id=..."):
        three.open_bookie(0, name=None)
    with pytest.raises(CookieError, match="lost its newest data"):
        three.open_bookie(0, name="nobody")
    assert service_of(three.open_bookie(0)).bookie == service_of(three.bookies[0]).bookie


@pytest.mark.parametrize(
    ("directory", "name", "remedy"),
    [
        pytest.param(0, "bookie-9", "give the bookie the name", marks=ANOTHER_NAME),  # a new name
        pytest.param(0, "bookie-1", "give the bookie the name", marks=ANOTHER_NAME),  # the name of another bookie
        (7, "bookie-0", "replace"),  # another directory, which is empty
    ],
)
def test_a_bookie_is_not_renamed_by_the_way_it_is_started(
    three: Inside, directory: int, name: str, remedy: str
) -> None:
    """Ledgers name it, and a rename is a new bookie and a drain of the old one."""
    ledger_id = fill(three.connect(), 10)
    for manager in three.bookies[:2]:
        manager.close()
    metadata = cluster_backend_of(three.connect()).membership.metadata
    before = metadata.list_cookies()
    with pytest.raises(CookieError, match=remedy):
        three.open_bookie(directory, name=name)
    assert metadata.list_cookies() == before
    for place in (0, 1):
        assert service_of(three.open_bookie(place)).bookie == service_of(three.bookies[place]).bookie
    check(three.connect(), ledger_id, 10)


class Bystander:
    """A bookie that notes when limbo is lifted."""

    def __init__(self, bookie: Bookie) -> None:
        self.bookie = bookie
        self.lifted: list[bool] = []
        self.ledgers: list[int] = []

    def in_limbo(self) -> list[int]:
        return list(self.ledgers)

    def end_limbo(self, ledger_id: int, *, closed: bool) -> None:
        self.lifted.append(closed)


@pytest.mark.parametrize(
    ("state", "ended", "lifted"),
    [
        (LedgerState.OPEN, True, [False]),  # never fenced: recoveries mark the ledger before
        (LedgerState.OPEN, False, []),  # its writer may count on what is lost
        (LedgerState.IN_RECOVERY, True, []),  # a fence may be lost
        (LedgerState.CLOSED, True, [True]),
    ],
)
def test_limbo_ends_where_no_lost_fence_lets_a_writer_in(
    three: Inside, monkeypatch: pytest.MonkeyPatch, state: LedgerState, ended: bool, lifted: list[bool]
) -> None:
    client = three.connect()
    found = client.ledger_metadata(fill(client, 10))
    mine, *others = found.fragments[0].ensemble
    spare = Bookie("spare", b"s" * len(mine.instance))
    fragments = (*found.fragments, Fragment(5, (spare, *others))) if ended else found.fragments
    metadata = replace(found, state=state, fragments=fragments)
    backend = cluster_backend_of(client)
    monkeypatch.setattr(backend.membership.metadata, "read_ledger", lambda ledger_id: (metadata, 0))
    filled = []
    monkeypatch.setattr(LimboRepair, "fill", lambda self, metadata, version, first: filled.append(first))
    bookie = Bystander(mine)
    repair = LimboRepair(backend.driver, backend.membership, bookie)
    repair.repair(metadata.ledger_id)
    repair.stop()
    assert bookie.lifted == lifted
    assert filled == [0] * len(lifted)


def test_limbo_that_waits_is_marked_as_entries_that_may_have_been_acknowledged(
    three: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limbo_repair, "WAIT_SECONDS", 0.0)
    client = three.connect()
    with client.create_ledger(password=PASSWORD) as writer:
        backend, mine = cluster_backend_of(client), writer.metadata.fragments[0].ensemble[0]
        repair = LimboRepair(backend.driver, backend.membership, Bystander(mine))
        assert not repair.repair(writer.ledger_id)
        repair.stop()
        (mark,) = backend.membership.metadata.marks_of(writer.ledger_id)
    assert (mark.bookie, mark.causes_by_reason()) == (mine, {RepairReason.MISSING: 0})


def test_limbo_that_begins_later_is_repaired_and_failed_repairs_are_tried_less_often(
    three: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limbo_repair, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(limbo_repair, "PAUSE_MAX_SECONDS", 0.32)
    tried: dict[int, list[float]] = {1: [], 2: [], 3: []}

    def repair_limbo(self: LimboRepair, ledger_id: int) -> bool:
        tried[ledger_id].append(time.monotonic())
        if ledger_id == 1:
            raise ZeroDivisionError
        if ledger_id == 3:
            bookie.ledgers.remove(3)
        return ledger_id != 2

    monkeypatch.setattr(LimboRepair, "repair", repair_limbo)
    client = three.connect()
    bookie = Bystander(client.ledger_metadata(fill(client, 10)).fragments[0].ensemble[0])
    repair = LimboRepair(cluster_backend_of(client).driver, cluster_backend_of(client).membership, bookie)
    time.sleep(0.1)
    bookie.ledgers += [1, 2, 3]
    wait_until(lambda: len(tried[1]) >= 6)
    repair.stop()
    assert len(tried[3]) == 1
    assert len(tried[2]) > len(tried[1])  # it waits for somebody else
    gaps = [after - before for before, after in itertools.pairwise(tried[1][:6])]
    assert all(gap >= least for gap, least in zip(gaps, (0.02, 0.04, 0.08, 0.16, 0.32), strict=True))
    assert "ledger 1 stays in limbo" in caplog.text
    assert "ZeroDivisionError" in caplog.text
