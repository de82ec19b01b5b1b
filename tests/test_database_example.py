"""The database of ``examples/database`` keeps what it acknowledged, whichever process dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from database import ConflictError, Database
from failover import Commit, Load, WrongDataError, check, server
from server import Client, answer
from tables import ABSENT, CLIENTS_MAX, Row, Tables

from demo.progress import meter
from demo.source import Source
from pybk import (
    CheckpointWriter,
    CorruptError,
    IllegalOperationError,
    LedgerManager,
    LogFencedError,
    StoreLockedError,
    UnauthorizedError,
    UnsupportedFormatError,
)
from tests.paths import ROOT
from tests.waiting import PROCESS_S, WAIT_S, stop, wait_until

FOLDER = ROOT / "examples" / "database"
PASSWORD = b"s3cret"
ENVIRONMENT = {"PYBK_PASSWORD": PASSWORD.decode()}
WITH_TOOLS = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
"""The environment of the demonstration, whose parts that it shares with ``make demo`` lie in ``tools``."""


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Return a directory whose path is short, as paths of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="pybk-") as directory:
        yield Path(directory)


# ---- one process -----------------------------------------------------------------------------------------------------


def test_what_was_committed_is_there_after_a_restart(tmp_path: Path) -> None:
    with Database(tmp_path, PASSWORD) as database:
        assert database.commit({"a": "1", "b": "2", "gone": "3"}) == 1
        assert database.checkpoint() == 1
        assert database.commit({"gone": None, "a": "ä\udc80\n"}) == 2
        expected = {"a": Row(2, "ä\udc80\n"), "b": Row(1, "2"), "gone": ABSENT}
        assert database.read(*expected) == expected
    with Database(tmp_path, PASSWORD) as database:
        assert database.read(*expected) == expected
        assert database.applied == 2
    with pytest.raises(UnauthorizedError):
        Database(tmp_path, b"another")


def test_a_transaction_takes_effect_only_if_what_it_read_is_current(tmp_path: Path) -> None:
    with Database(tmp_path, PASSWORD) as database:
        before = database.read("a", "b")
        database.commit({"a": "1"}, {"a": 0})
        with pytest.raises(ConflictError):
            database.commit({"b": "x", "c": "x"}, {"a": before["a"].version})
        assert database.read("b", "c") == {"b": ABSENT, "c": ABSENT}
        database.commit({"b": "x"}, {"a": 1, "b": 0})
    with Database(tmp_path, PASSWORD) as database:
        assert database.read("a", "b", "c") == {"a": Row(1, "1"), "b": Row(3, "x"), "c": ABSENT}


def test_a_commit_that_is_sent_again_takes_effect_once(tmp_path: Path) -> None:
    with Database(tmp_path, PASSWORD) as database:
        first = database.commit({"a": "1"}, {"a": 0}, ("client", 1))
        database.commit({"a": "2"}, token=("another", 1))
        assert database.commit({"a": "1"}, {"a": 0}, ("client", 1)) == first
        with pytest.raises(ConflictError):
            database.commit({"a": "3"}, {"a": 0}, ("client", 2))
        with pytest.raises(ConflictError):
            database.commit({"a": "3"}, {"a": 0}, ("client", 2))
        database.checkpoint()
    with Database(tmp_path, PASSWORD) as database:
        with pytest.raises(ConflictError):
            database.commit({"a": "3"}, {"a": 0}, ("client", 2))
        assert database.commit({"a": "1"}, {"a": 0}, ("another", 1)) == 2
        assert database.read("a") == {"a": Row(2, "2")}


def test_only_text_is_taken(tmp_path: Path) -> None:
    with Database(tmp_path, PASSWORD) as database:
        for writes in ({"a": 1}, {1: "a"}, {"a": b"x"}, {None: "x"}):
            with pytest.raises(TypeError, match="text"):
                database.commit(writes)  # type: ignore[arg-type]
        assert database.applied == 0


def test_tables_refuse_gaps_and_other_formats() -> None:
    tables = Tables()
    record = b'{"format": 1, "token": ["", 0], "expect": {}, "writes": {"a": "1"}}'
    assert tables.apply(1, record) == 1
    for lsn in (1, 3):
        with pytest.raises(CorruptError):
            tables.apply(lsn, record)
    with pytest.raises(UnsupportedFormatError):
        tables.apply(2, record.replace(b"1", b"2", 1))
    assert tables.apply(2, record) == 2


def test_tables_remember_the_clients_of_late() -> None:
    tables = Tables()
    tables.sessions = {f"client {number}": (1, 1) for number in range(CLIENTS_MAX)}
    for lsn, client in enumerate(("client 0", "new"), 1):
        tables.apply(lsn, b'{"format": 1, "token": ["%s", 2], "expect": {}, "writes": {}}' % client.encode())
    assert len(tables.sessions) == CLIENTS_MAX
    assert "client 0" in tables.sessions
    assert "client 1" not in tables.sessions


def test_commits_continue_while_a_snapshot_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Database(tmp_path, PASSWORD) as database:
        dump = Tables.dump

        def commit_and_dump(tables: Tables, file: CheckpointWriter) -> None:
            database.commit({"a": "2"})
            dump(tables, file)

        monkeypatch.setattr(Tables, "dump", commit_and_dump)
        database.commit({"a": "1"})
        assert database.checkpoint() == 1
        newest = database.wal.latest_checkpoint()
        assert newest is not None
        with newest.open() as file:
            assert Tables.load(file).rows == {"a": Row(1, "1")}
    with Database(tmp_path, PASSWORD) as database:
        assert database.read("a") == {"a": Row(2, "2")}


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Switch threads as often as the interpreter can, so that missing locks show."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_commit_while_snapshots_are_made(tmp_path: Path) -> None:
    def work(database: Database, name: str) -> None:
        for number in range(60):
            own = database.commit({f"{name} begins": str(number), f"{name} ends": str(number)})
            assert database.read(f"{name} begins") == {f"{name} begins": Row(own, str(number))}
            while True:
                row = database.read("sum")["sum"]
                try:
                    database.commit({"sum": str(int(row.value or 0) + 1)}, {"sum": row.version})
                    break
                except ConflictError:
                    continue

    names = [f"thread {number}" for number in range(6)]
    with Database(tmp_path, PASSWORD, checkpoint_records=50) as database:
        threads = [threading.Thread(target=work, args=(database, name)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        keys = ["sum", *(f"{name} {what}" for name in names for what in ("begins", "ends"))]
        expected = database.read(*keys)
        assert [row.value for row in expected.values()] == ["360", *["59"] * 12]
    with Database(tmp_path, PASSWORD) as database:
        newest = database.wal.latest_checkpoint()
        assert newest is not None
        assert newest.lsn >= 50
        assert database.read(*keys) == expected


def test_the_server_answers_what_it_cannot_do(tmp_path: Path) -> None:
    with Database(tmp_path, PASSWORD) as database:
        for request, error in (
            ({"writes": {"a": 1}, "expect": {}, "token": ["", 0]}, "text"),
            ({"read": 5, "after": 0}, "iterable"),
            ({"delete": ["a"]}, "not one of this server's"),
            ({"promote": False}, "open for writing already"),
        ):
            found = answer(database, request)
            assert error in found["error"]
            assert not found["elsewhere"]
        assert answer(database, {"writes": {"a": "1"}, "expect": {"a": 7}, "token": ["", 0]}).keys() == {"conflict"}


# ---- the standby -----------------------------------------------------------------------------------------------------


def test_a_standby_reads_and_takes_over(tmp_path: Path) -> None:
    primary = Database(tmp_path, PASSWORD)
    primary.commit({"a": "1"})
    primary.checkpoint()
    with Database(tmp_path, PASSWORD, standby=True) as standby:
        lsn = primary.commit({"b": "2"})
        assert standby.read("a", "b", after=lsn, timeout=WAIT_S) == {"a": Row(1, "1"), "b": Row(2, "2")}
        with pytest.raises(TimeoutError):
            standby.read("a", after=lsn + 1, timeout=0.01)
        with pytest.raises(IllegalOperationError, match="standby"):
            standby.commit({"a": "x"})
        with pytest.raises(StoreLockedError):
            standby.promote(wait=0)
        lsn = primary.commit({"c": "3"})
        assert standby.read("c", after=lsn, timeout=WAIT_S) == {"c": Row(3, "3")}
        primary.close()
        assert standby.promote() == 3
        assert standby.commit({"d": "4"}) == 4
        assert standby.checkpoint() == 4
    with Database(tmp_path, PASSWORD) as database:
        assert [row.value for row in database.read(*"abcd").values()] == ["1", "2", "3", "4"]


def test_a_standby_keeps_following_after_a_promotion_that_failed(tmp_path: Path) -> None:
    with Database(tmp_path, PASSWORD) as primary:
        primary.commit({"a": "1"})
        with (
            LedgerManager.open(tmp_path, read_only=True) as manager,
            Database(manager, PASSWORD, standby=True) as standby,
        ):
            for number in (2, 3):
                with pytest.raises(IllegalOperationError):
                    standby.promote(wait=0)
                lsn = primary.commit({"a": str(number)})
                assert standby.read("a", after=lsn, timeout=WAIT_S) == {"a": Row(lsn, str(number))}
        with pytest.raises(IllegalOperationError, match="open for writing already"):
            primary.promote()
        assert primary.commit({"a": "4"}) == 4


def test_a_standby_that_was_away_for_too_long_begins_with_a_snapshot(tmp_path: Path, sockets: Path) -> None:
    path = str(sockets / "standby")
    with Database(tmp_path, PASSWORD) as primary:
        primary.commit({"a": "0"})
        with server(str(tmp_path), path, ENVIRONMENT, "--standby") as process, closing(Client([path])) as client:
            assert client.request({"read": ["a"], "after": 1}) == {"rows": {"a": [1, "0"]}}
            stop(process.pid)
            for number in range(2, 7):
                assert primary.commit({"a": str(number)}) == number
                primary.wal.roll()
                primary.checkpoint()
            process.send_signal(signal.SIGCONT)
            assert client.request({"read": ["a"], "after": 6}) == {"rows": {"a": [6, "6"]}}


def test_a_primary_that_was_fenced_takes_nothing_more(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/metadata"
    with ExitStack() as stack:
        for name in "abc":
            stack.enter_context(
                LedgerManager.open(tmp_path / name, listen="tcp://127.0.0.1:*", metadata=url, cluster_secret=b"s" * 32)
            )
        clients = [stack.enter_context(LedgerManager.connect(url, cluster_secret=b"s" * 32)) for _ in range(2)]
        primary = Database(clients[0], PASSWORD)
        first = primary.commit({"a": "1"}, token=("client", 1))
        standby = stack.enter_context(Database(clients[1], PASSWORD, standby=True))
        standby.promote(wait=0, steal=True)
        with pytest.raises(LogFencedError) as caught:
            primary.commit({"a": "2"}, {"a": first}, ("client", 2))
        assert caught.value.outcome_unknown
        with pytest.raises(LogFencedError):
            primary.read("a")
        lsn = standby.commit({"a": "2"}, {"a": first}, ("client", 2))
        assert standby.read("a") == {"a": Row(lsn, "2")}


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "input").write_bytes(b"".join(b"line %d \xff\n" % number for number in range(900)))
    return Source.of(str(tmp_path / "input"))


@pytest.mark.long
def test_nothing_is_lost_when_the_server_is_killed_again_and_again(
    tmp_path: Path, sockets: Path, source: Source
) -> None:
    path, store = str(sockets / "primary"), str(tmp_path / "store")
    options = ("--checkpoint-records", "60")
    with meter("committing", 1, "commits") as bar:
        load = Load(source, [path], bar)
    for number in range(4):
        with server(store, path, ENVIRONMENT, *options) as process:
            if not number:
                load.start()
            load.wait_for(len(load.acknowledged) + 100)
            process.kill()
    with server(store, path, ENVIRONMENT, *options), closing(Client([path])) as client:
        load.stop()
        check(client.read, load)
    assert load.resent
    with Database(store, PASSWORD) as database:
        check(database.read, load)


def test_a_loss_would_be_noticed(tmp_path: Path, source: Source) -> None:
    with Database(tmp_path / "store", PASSWORD) as database, meter("committing", 1, "commits") as bar:
        load = Load(source, [], bar)
        lsn = database.commit({"a": "1", "sum": "1"})
        load.added = 1
        load.acknowledged = [Commit({"a": "1"}, lsn)]
        check(database.read, load)
        for commit in (Commit({"a": "2"}, lsn), Commit({"a": "1"}, lsn + 1), Commit({"b": "1"}, lsn)):
            load.acknowledged = [commit]
            with pytest.raises(WrongDataError, match="1 of 1 acknowledged"):
                check(database.read, load)
        load.acknowledged, load.added = [], 2
        with pytest.raises(WrongDataError, match="2 times"):
            check(database.read, load)


@pytest.mark.long
def test_the_demonstration(tmp_path: Path, source: Source) -> None:
    (tmp_path / "place").mkdir()
    done = subprocess.run(
        [
            sys.executable,
            FOLDER / "failover.py",
            source.files[0],
            "--directory",
            tmp_path / "place",
            "--commits",
            "150",
        ],
        env=WITH_TOOLS,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"Killed primary process \d+ with SIGKILL under the load of \d clients", done.stdout)) == 2
    assert len(re.findall(r"Promoted standby process \d+ in", done.stdout)) == 2
    assert done.stdout.count("acknowledged commits at the new primary: lost 0.") == 2
    assert len(re.findall(r"Restarted in .*: lost 0\.", done.stdout)) == 2
    assert list((tmp_path / "place").iterdir()) == []


def test_the_demonstration_without_input(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / "failover.py", tmp_path / "nowhere"],
        env=WITH_TOOLS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("failover: ")
    assert done.stderr.count("\n") == 1


def run(*arguments: object, expect: int = 0) -> str:
    """Run the command line of the server and return what it printed."""
    done = subprocess.run(
        [sys.executable, FOLDER / "server.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == expect, done.stderr
    return done.stdout


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the command line of the server."""
    return subprocess.Popen(
        [sys.executable, FOLDER / "server.py", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )


@pytest.mark.long
def test_the_command_line(tmp_path: Path, sockets: Path) -> None:
    both = f"{sockets}/primary,{sockets}/standby"
    with server(str(tmp_path), f"{sockets}/primary", ENVIRONMENT) as primary:
        assert run("put", both, "a", "5") == "1\n"
        assert run("add", both, "a", "7") == "12\n"
        with server(str(tmp_path), f"{sockets}/standby", ENVIRONMENT, "--standby") as standby:
            wait_until(lambda: run("get", f"{sockets}/standby", "a") == "12\n", seconds=WAIT_S)
            assert run("get", both, "b", expect=1) == ""
            assert run("put", both, "a", expect=2) == ""
            assert '"standby": true' in run("status", f"{sockets}/standby")
            assert run("checkpoint", f"{sockets}/primary") == '{"lsn": 2}\n'
            promoting = start("promote", f"{sockets}/standby")
            assert promoting.stderr is not None
            assert "waiting up to 30 s for the primary to end" in promoting.stderr.readline()
            primary.terminate()
            assert primary.wait(WAIT_S) == 0
            out, err = promoting.communicate(timeout=PROCESS_S)
            assert (promoting.returncode, '"lsn": 2' in out, err) == (0, True, "")
            assert run("add", both, "a", "1") == "13\n"
            run("put", both, "text", "x")
            for operands, value in ((("text", "1"), "'x'"), (("a", "one"), "'one'")):
                adding = start("add", both, *operands)
                out, err = adding.communicate(timeout=PROCESS_S)
                assert (adding.returncode, out) == (1, "")
                assert err.startswith(f"server: {value} is not a whole number")
                assert err.count("\n") == 1
            standby.send_signal(signal.SIGINT)
            assert standby.wait(WAIT_S) == 0
    assert run("get", both, "a", expect=1) == ""
