"""``pybk wal``: logs are listed, written, read, followed, truncated, sealed and deleted on the command line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pybk import LedgerManager, LogSettings, PybkError, StoreConfig, WriteAheadLog
from pybk.admin.cli import main, whole_parser
from pybk.manager.ledger_manager import backend_of
from tests.cluster.inside import SECRET, inside
from tests.waiting import PROCESS_S


def run(capfdbinary: pytest.CaptureFixture[bytes], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    out, err = capfdbinary.readouterr()
    return status, out.decode(), err.decode()


def give(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYBK_PASSWORD", "secret")
    return tmp_path / "store"


def test_a_log_without_records_is_made_again_from_a_number(
    store: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with LedgerManager.open(store) as manager:
        wal = WriteAheadLog.open(manager, "orders")
        found = backend_of(manager).read_record("wals/orders")
        assert found is not None
        backend_of(manager).write_record("wals/orders", None, found.version)
        with pytest.raises(PybkError):
            wal.close()
    status, out, _ = run(capfdbinary, "wal", "rebuild", store, "orders", "--first", 5)
    assert (status, out.splitlines()[0]) == (0, "log orders has no records; the next one is LSN 5")


def test_the_life_of_a_log(
    store: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capfdbinary, "wal", "create", store, "orders")[:2] == (0, "log orders is created\n")
    assert "exists" in run(capfdbinary, "wal", "create", store, "orders")[2]
    give(monkeypatch, b"a\nb\nc")
    assert run(capfdbinary, "wal", "append", store, "orders") == (0, "3 records appended, up to LSN 3\n", "")
    assert run(capfdbinary, "wal", "cat", store, "orders") == (0, "a\nb\nc\n", "")
    assert run(capfdbinary, "wal", "cat", store, "orders", "--first", 2, "--last", 2)[1] == "b\n"
    assert run(capfdbinary, "wal", "tail", store, "orders", "-n", 1)[1] == "c\n"
    assert run(capfdbinary, "wal", "truncate", store, "orders", 2, "--yes")[1] == "log orders begins with LSN 2\n"
    status, out, _ = run(capfdbinary, "wal", "list", store, "--json")
    [row] = json.loads(out)["logs"]
    assert (status, row["name"], row["first_lsn"], row["last_lsn"]) == (0, "orders", 2, 3)
    assert "orders" in run(capfdbinary, "wal", "list", store)[1]
    assert json.loads(run(capfdbinary, "wal", "cat", store, "orders", "--first", 3, "--json")[1])["data"] == "Yw=="
    assert run(capfdbinary, "wal", "seal", store, "orders")[1] == "log orders is sealed after LSN 3\n"
    assert run(capfdbinary, "wal", "tail", store, "orders", "-f")[1] == "b\nc\n", "a sealed log ends"
    give(monkeypatch, b"d\n")
    status, _, err = run(capfdbinary, "wal", "append", store, "orders")
    assert (status, "sealed" in err) == (2, True)
    assert run(capfdbinary, "wal", "delete", store, "orders", "--steal", "--yes")[1] == "log orders is deleted\n"
    assert json.loads(run(capfdbinary, "wal", "list", store, "--json")[1])["logs"] == []
    assert run(capfdbinary, "wal", "cat", store, "orders")[0] == 2


def test_a_log_is_made_again(
    store: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, b"a\nb\nc")
    run(capfdbinary, "wal", "append", store, "orders")
    assert run(capfdbinary, "wal", "sweep", store)[:2] == (0, "0 ledgers deleted\n")
    assert "sound" in run(capfdbinary, "wal", "rebuild", store, "orders")[2]
    with LedgerManager.open(store) as manager:
        found = backend_of(manager).read_record("wals/orders")
        assert found is not None
        backend_of(manager).write_record("wals/orders", None, found.version)
    status, out, _ = run(capfdbinary, "wal", "rebuild", store, "orders")
    assert (status, out.splitlines()[0]) == (0, "log orders has records 1 to 3 in ledgers 0")
    assert run(capfdbinary, "wal", "cat", store, "orders")[1] == "a\nb\nc\n"
    assert json.loads(run(capfdbinary, "wal", "sweep", store, "orders", "--json")[1])["deleted"] == []


def test_a_log_without_a_password_has_to_be_asked_for(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYBK_PASSWORD", raising=False)
    give(monkeypatch, b"a\n")
    status, _, err = run(capfdbinary, "wal", "append", tmp_path, "open")
    assert (status, "insecure" in err) == (2, True)
    give(monkeypatch, b"a\n")
    assert "--insecure" in err
    assert run(capfdbinary, "wal", "append", tmp_path, "open", "--insecure")[0] == 0
    give(monkeypatch, b"b\n")
    assert run(capfdbinary, "wal", "append", tmp_path, "open")[0] == 0, "it is there, and has none"
    for insecure in ([], ["--insecure"]):
        assert run(capfdbinary, "wal", "cat", tmp_path, "open", *insecure)[1] == "a\nb\n"
    assert run(capfdbinary, "wal", "truncate", tmp_path, "open", "2", "--insecure", "--yes")[0] == 0
    assert run(capfdbinary, "wal", "cat", tmp_path, "open")[1] == "b\n"


@pytest.mark.parametrize("noun", ["wal", "log"])
def test_all_verbs_of_logs_take_the_same_credentials(noun: str) -> None:
    for words, verb in whole_parser().commands():
        if words[0] == noun:
            for option in ("--password-file", "--secret-file", "--insecure"):
                assert option in verb.format_help(), words


def test_a_wrong_password_is_refused(
    store: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, b"a\n")
    run(capfdbinary, "wal", "append", store, "orders")
    monkeypatch.setenv("PYBK_PASSWORD", "another")
    for verb, *more in (("cat",), ("tail",), ("seal",), ("delete", "--yes")):
        status, _, err = run(capfdbinary, "wal", verb, store, "orders", *more)
        assert (status, "password" in err) == (2, True)


def test_tail_follows_another_process(store: Path) -> None:
    with WriteAheadLog.open(store) as wal:
        wal.append(b"first")
        command = [sys.executable, "-m", "pybk", "wal", "tail", str(store), "wal", "-f"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"first\n"
            wal.append(b"second")
            assert child.stdout.readline() == b"second\n"
            wal.seal()
            assert child.stdout.read() == b""
            assert child.wait(PROCESS_S) == 0


def test_a_line_that_is_too_long_is_named_with_what_was_appended(
    store: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = StoreConfig().max_entry_bytes
    for before, data in ((2, b"a\nb\n" + bytes(size) + b"\nc\n"), (0, bytes(size) + b"\n")):
        give(monkeypatch, data)
        status, out, err = run(capfdbinary, "wal", "append", store, "orders")
        assert (status, out) == (2, "")
        assert err.startswith(f"pybk: line {before + 1}: the record has {size} bytes; it takes at most ")
        assert "split it, or append it by a program" in err
        last = ", up to record 2," if before else ""
        assert err.endswith(f"; {before} lines before it{last} were appended\n")
        assert run(capfdbinary, "wal", "cat", store, "orders")[1] == "a\nb\n"


@pytest.mark.parametrize("noun", ["wal", "log"])
def test_a_dry_run_writes_nothing(
    noun: str, store: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def files() -> dict[Path, bytes]:
        # Readers note themselves in the file of locks of LMDB.
        return {each: each.read_bytes() for each in store.rglob("*") if each.is_file() and each.name != "lock.mdb"}

    give(monkeypatch, b"a\nb\n")
    assert run(capfdbinary, noun, "append", store, "orders")[0] == 0
    before = files()
    for words, text in (
        (("truncate", store, "orders", 1), "nothing is dropped"),
        (("delete", store, "orders"), "would be"),
    ):
        status, out, err = run(capfdbinary, noun, *words, "--dry-run")
        assert (status, text in out) == (0, True), err
        assert files() == before


def test_a_log_without_records_is_sealed_without_records(
    store: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    run(capfdbinary, "wal", "create", store, "orders")
    assert run(capfdbinary, "wal", "seal", store, "orders")[1] == "log orders is sealed without records\n"


@pytest.mark.parametrize("noun", ["wal", "log"])
def test_the_error_of_a_truncation_says_that_the_log_has_no_records(
    noun: str, store: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    run(capfdbinary, noun, "create", store, "orders")
    status, _, err = run(capfdbinary, noun, "truncate", store, "orders", "9", "--yes")
    first = {"wal": 1, "log": 0}[noun]
    shown = f"records before 9 cannot be dropped; it has no records, and the next one is {first}"
    assert (status, err) == (2, f"pybk: log 'orders': {shown}\n")
    dry = run(capfdbinary, noun, "truncate", store, "orders", "9", "--dry-run")
    assert dry[1] == "log orders has no records; nothing is dropped\n"


def test_wrong_arguments_say_what_is_taken(
    store: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for command in (("wal", "list"), ("log", "list"), ("ls",), ("dump",), ("upgrade",)):
        status, _, err = run(capfdbinary, *command, tmp_path / "file")
        assert status == 2
        assert err.startswith(f"pybk: {tmp_path / 'file'} is a file; PATH takes the directory of ")
    with pytest.raises(SystemExit) as caught:
        run(capfdbinary, "wal", "tail", store, "orders", "-n", "-1")
    assert caught.value.code == 2
    assert "'-1' is not accepted" in capfdbinary.readouterr()[1].decode()


def test_a_password_for_a_log_without_one_is_named(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYBK_PASSWORD", raising=False)
    give(monkeypatch, b"a\n")
    run(capfdbinary, "wal", "append", tmp_path, "open", "--insecure")
    monkeypatch.setenv("PYBK_PASSWORD", "secret")
    status, _, err = run(capfdbinary, "wal", "cat", tmp_path, "open")
    assert (status, "log 'open' has no password, and one was given: unset PYBK_PASSWORD" in err) == (2, True)


def test_settings_are_shown_and_changed_while_another_owns_the_log(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_PASSWORD", "secret")
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    with inside(tmp_path) as cluster, cluster.connect() as client, WriteAheadLog.open(client, "orders") as wal:
        wal.append(b"a")
        shown = run(capfdbinary, "wal", "settings", cluster.url, "orders")
        assert shown[0] == 0
        assert "quorums          default\n" in shown[1]
        status, out, err = run(
            capfdbinary, "wal", "settings", cluster.url, "orders", "--quorums", "1/1/1", "--segment-bytes", 9
        )
        assert (status, "quorums          1/1/1\n" in out) == (0, True), err
        assert wal.append(b"b") == 2, "its owner was not fenced"
        assert wal.settings() == LogSettings(quorums=(1, 1, 1), segment_bytes=9)
        kept = json.loads(run(capfdbinary, "wal", "settings", cluster.url, "orders", "--defaults", "--json")[1])
        assert (kept["quorums"], kept["segment_bytes"]) == (None, None)
