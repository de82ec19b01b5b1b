"""``pybk log``: named logs are created, listed, written, read, followed, truncated, renamed, sealed and deleted."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pybk import (
    LedgerManager,
    Log,
    LogFencedError,
    LogLockedError,
    LogSealedError,
    NewRecord,
    SegmentMerge,
    StoreConfig,
)
from pybk.admin.cli import main
from pybk.manager.ledger_manager import backend_of
from tests.waiting import PROCESS_S


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYBK_PASSWORD", "secret")
    return tmp_path / "store"


class Shell:
    """Runs commands on a store."""

    def __init__(self, capture: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
        self._capture = capture
        self._monkeypatch = monkeypatch
        self._store = store

    def run(self, verb: str, *arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = main(["log", verb, str(self._store), *map(str, arguments)])
        out, err = self._capture.readouterr()
        return status, out.decode(), err.decode()

    def out(self, verb: str, *arguments: object, stdin: bytes = b"") -> str:
        status, out, err = self.run(verb, *arguments, stdin=stdin)
        assert (status, err) == (0, "")
        return out

    def error(self) -> str:
        return self._capture.readouterr()[1].decode()

    def json(self, verb: str, *arguments: object, stdin: bytes = b"") -> Any:
        return json.loads(self.out(verb, *arguments, "--json", stdin=stdin))


@pytest.fixture
def shell(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, store: Path) -> Shell:
    return Shell(capfdbinary, monkeypatch, store)


def test_the_life_of_a_log(shell: Shell) -> None:
    assert shell.out("create", "orders") == "log orders is created\n"
    assert shell.run("create", "orders")[0] == 2
    out = shell.out("append", "orders", "--key", "k", "--txid", 7, stdin=b"a\nb\nc")
    assert out.startswith("3 records appended, up to 1:3:0:2")
    assert shell.out("cat", "orders") == "a\nb\nc\n"
    assert shell.out("cat", "orders", "--first", 1, "--last", 1) == "b\n"
    assert shell.out("cat", "orders", "--first", "txid=8") == "b\nc\n"
    assert shell.out("cat", "orders", "--first", "1:3:0:2") == "c\n"
    assert shell.out("tail", "orders", "-n", 1) == "c\n"
    assert shell.json("append", "orders", stdin=b"d\n")["appended"] == 1
    assert shell.out("truncate", "orders", 1, "--yes") == "log orders begins with record 1\n"
    assert shell.json("truncate", "orders", "txid=8", "--yes")["first_seq"] == 1
    [row] = shell.json("list")["logs"]
    assert (row["name"], row["first_seq"], row["last_seq"], row["sealed"]) == ("orders", 1, 3, False)
    assert shell.out("rename", "orders", "orders/eu") == "log orders has the name orders/eu now\n"
    assert [row["name"] for row in shell.json("list", "orders/")["logs"]] == ["orders/eu"]
    assert "orders/eu" in shell.out("list")
    assert shell.out("seal", "orders/eu") == "log orders/eu is sealed after record 3\n"
    assert shell.out("tail", "orders/eu", "-f") == "b\nc\nd\n", "a sealed log ends"
    status, _, err = shell.run("append", "orders/eu", stdin=b"e\n")
    assert (status, "sealed" in err) == (2, True)
    assert shell.out("delete", "orders/eu", "--steal", "--yes") == "log orders/eu is deleted\n"
    assert shell.json("list")["logs"] == []
    assert shell.run("cat", "orders/eu")[0] == 2


def test_small_segments_are_merged(shell: Shell) -> None:
    for each in b"abcde":
        shell.out("append", "orders", stdin=b"%c\n" % each)
    assert shell.out("merge", "orders", "--segment-records", 2) == (
        "4 segments merged into 2 ledgers; log orders has 3 segments\n"
    )
    found = shell.json("merge", "orders", "--segment-bytes", "1MiB", "--segment-age", "1d", "--keep", "0s")
    assert (found["ledgers"], found["replaced"], found["records"], found["segments"]) == (1, 3, 5, 1)
    assert shell.json("merge", "orders")["replaced"] == 0
    assert shell.out("cat", "orders") == "a\nb\nc\nd\ne\n"
    for each in b"fg":
        shell.out("append", "orders", stdin=b"%c\n" % each)
    shell.out("seal", "orders")
    status, _, err = shell.run("merge", "orders")
    assert (status, "its segments are not merged" in err) == (2, True)


def test_a_watch_of_merges_outlasts_what_passes(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in b"ab":
        shell.out("append", "orders", stdin=b"%c\n" % each)
    real = Log.merge_segments
    errors: list[BaseException | None] = [LogLockedError("another merges"), None]
    errors += [LogFencedError("another has begun"), KeyboardInterrupt()]

    def merge_segments(log: Log, **arguments: Any) -> SegmentMerge:
        error = errors.pop(0)
        if error is not None:
            raise error
        return real(log, **arguments)

    monkeypatch.setattr(Log, "merge_segments", merge_segments)
    status, out, err = shell.run("merge", "orders", "--watch", "0s")
    assert status == 130
    assert out == "2 segments merged into 1 ledger; log orders has 1 segment\n"
    assert err.splitlines() == [
        "pybk: another merges; the next look tries again",
        "pybk: another has begun; the next look tries again",
    ]
    errors += [LogLockedError("another merges"), LogSealedError("sealed")]
    assert shell.run("merge", "orders")[::2] == (4, "pybk: another merges\n")
    assert shell.run("merge", "orders", "--watch", "0s")[::2] == (2, "pybk: sealed\n")


def test_a_log_is_made_again(shell: Shell, store: Path) -> None:
    shell.out("append", "orders", stdin=b"a\nb\nc")
    assert shell.out("sweep") == "0 ledgers deleted\n"
    assert "sound" in shell.run("rebuild", "orders")[2]
    with LedgerManager.open(store) as manager:
        found = backend_of(manager).read_record("logs/orders")
        assert found is not None
        backend_of(manager).write_record("logs/orders", None, found.version)
    assert shell.run("cat", "orders")[0] == 2
    assert shell.json("rebuild", "orders", "--first", 1)["last_seq"] == 2
    assert shell.out("cat", "orders") == "b\nc\n"
    assert shell.json("sweep", "orders")["deleted"] == []


def test_a_record_is_printed_with_all_it_carries(shell: Shell, store: Path) -> None:
    day = datetime(2026, 1, 31, 12, tzinfo=UTC)
    with Log.open(store, "log") as log, log.writer() as writer:
        writer.append(b"early", time_ns=1)
        at = int(day.timestamp()) * 10**9
        writer.append_many([NewRecord(b"data", txid=3, key=b"key", headers=[("name", b"value")], time_ns=at)])
    record = shell.json("cat", "log", "--first", f"time={day.isoformat()}")
    assert record == {
        "position": "1:2:0:1",
        "data": "ZGF0YQ==",
        "time_ns": at,
        "txid": 3,
        "key": "a2V5",
        "headers": [["name", "dmFsdWU="]],
    }
    with pytest.raises(SystemExit):
        shell.run("cat", "log", "--first", "yesterday")
    with pytest.raises(SystemExit):
        shell.run("cat", "log", "--first", "time=2026-01-31T12:00")
    assert "names no time zone; write it as 2026-01-31T12:00Z" in shell.error()


def test_settings_are_shown_and_changed(shell: Shell) -> None:
    shell.out("create", "orders")
    kept = shell.json("settings", "orders")
    assert (kept["quorums"], kept["digest_type"], kept["storage_hints"], kept["segment_bytes"]) == (
        None,
        None,
        [],
        None,
    )
    assert "segment_bytes    default" in shell.out("settings", "orders")
    options = ("--quorums", "3/2/2", "--digest", "CRC32C", "--storage-hint", "hdd", "--segment-age", 60.5)
    assert "quorums          3/2/2" in shell.out("settings", "orders", *options)
    shell.out("settings", "orders", "--segment-bytes", 4096, "--segment-records", 9)
    kept = shell.json("settings", "orders")
    assert (kept["quorums"], kept["digest_type"], kept["storage_hints"]) == ("3/2/2", "CRC32C", ["hdd"])
    assert (kept["segment_bytes"], kept["segment_age_s"], kept["segment_records"]) == (4096, 60.5, 9)
    kept = shell.json("settings", "orders", "--defaults", "--segment-records", 5)
    assert (kept["quorums"], kept["segment_bytes"], kept["segment_records"]) == (None, None, 5)
    for wrong in ("3/2", "1/2/3", "3/2/0", "x/y/z"):
        with pytest.raises(SystemExit):
            shell.run("settings", "orders", "--quorums", wrong)
        assert "such as 3/2/2" in shell.error()
    assert shell.json("settings", "orders") == kept


def test_subscriptions_are_listed_while_their_owners_live(shell: Shell, store: Path) -> None:
    with Log.open(store, "log") as log, log.writer() as writer:
        for number in range(10):
            writer.append(b"%d" % number)
        with log.subscribe("late", start=4) as late, log.subscribe("quick", start=0) as quick:
            late.ack([5, 7])
            quick.ack_through(8, properties={"offset": 8})
            first, second = shell.json("subscriptions", "log")["subscriptions"]
    assert first == {"name": "late", "first_unacked": 4, "backlog": 4, "acked_ranges": 2, "properties": {}}
    assert second == {
        "name": "quick",
        "first_unacked": 9,
        "backlog": 1,
        "acked_ranges": 0,
        "properties": {"offset": 8},
    }
    assert "late" in shell.out("subscriptions", "log")


def test_logs_of_another_password_are_listed_by_name_alone(shell: Shell, store: Path) -> None:
    shell.run("append", "mine", stdin=b"a\n")
    with Log.open(store, "other", password=b"another") as log, log.writer() as writer:
        writer.append(b"b")
    mine, other = json.loads(shell.run("list", "--json")[1])["logs"]
    assert (mine["name"], mine["last_seq"]) == ("mine", 0)
    assert other == {"name": "other", "other_password": True}
    status, out, err = shell.run("list")
    text = "pybk: 1 log has a secret or password that was not given: --secret-file FILE or --password-file FILE\n"
    assert (status, err) == (0, text)
    assert "other" in out


def test_a_log_without_a_password_has_to_be_asked_for(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYBK_PASSWORD")
    for verb in ("create", "append"):
        status, _, err = shell.run(verb, "open", stdin=b"a\n")
        assert (status, "insecure" in err) == (2, True)
    assert shell.out("append", "open", "--insecure", stdin=b"a\n").startswith("1 record appended")
    assert shell.out("cat", "open") == "a\n"


def test_a_wrong_password_is_refused(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.out("append", "orders", stdin=b"a\n")
    monkeypatch.setenv("PYBK_PASSWORD", "another")
    for verb, *arguments in (
        ("cat",),
        ("tail",),
        ("seal",),
        ("merge",),
        ("rename", "new"),
        ("delete", "--yes"),
        ("truncate", "1"),
    ):
        status, _, err = shell.run(verb, "orders", *arguments)
        assert (status, "the password is not that of log 'orders'" in err) == (2, True), verb
    monkeypatch.delenv("PYBK_PASSWORD")
    status, _, err = shell.run("cat", "orders")
    assert (status, "log 'orders' has a password, and none was given" in err) == (2, True)


def test_what_a_shell_closes_or_does_not_encode_is_no_traceback(store: Path) -> None:
    pybk = f"{sys.executable} -m pybk log"
    for line, status in (
        (f"{pybk} append {store} log <&-", 0),
        (f"echo a | {pybk} append {store} log --key $'\\xff'", 0),
        (f"{pybk} cat {store} log >&-", 0),
        (f"{pybk} cat {store} absent 2>&-", 2),
    ):
        found = subprocess.run(["bash", "-c", line], capture_output=True, timeout=PROCESS_S)
        assert (found.returncode, b"Traceback" in found.stderr) == (status, False), line
    with Log.open(store, "log", mode="r") as log:
        assert [(record.key, record.data) for record in log.reader()] == [(b"\xff", b"a")]


def test_tail_follows_another_process(store: Path) -> None:
    with Log.open(store, "log") as log, log.writer() as writer:
        writer.append(b"first")
        command = [sys.executable, "-m", "pybk", "log", "tail", str(store), "log", "-f"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"first\n"
            writer.append(b"second")
            assert child.stdout.readline() == b"second\n"
            writer.seal()
            assert child.stdout.read() == b""
            assert child.wait(PROCESS_S) == 0


def test_an_interrupt_ends_a_tail_without_a_traceback(store: Path) -> None:
    with Log.open(store, "log") as log, log.writer() as writer:
        writer.append(b"first")
        command = [sys.executable, "-m", "pybk", "log", "tail", str(store), "log", "-f"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                assert child.stdout.readline() == b"first\n"
                child.send_signal(signal.SIGINT)
                assert child.communicate(timeout=PROCESS_S) == (b"", b"")
            finally:
                child.kill()
            assert child.returncode == 130


def test_a_line_that_is_too_long_is_named_with_what_was_appended(shell: Shell) -> None:
    status, out, err = shell.run("append", "orders", stdin=b"a\n" + bytes(StoreConfig().max_entry_bytes))
    assert (status, out, err.startswith("pybk: line 2: the record has ")) == (2, "", True)
    assert "split it, or append it by a program" in err
    assert "1 line before it, up to record" in err
    assert shell.out("cat", "orders") == "a\n"


def test_a_log_without_records_is_sealed_without_records(shell: Shell) -> None:
    shell.out("create", "orders")
    assert shell.out("seal", "orders") == "log orders is sealed without records\n"
