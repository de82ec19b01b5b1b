"""The command line: what it prints, its exit status, and what it keeps to itself."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pybk.admin.cli import main
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.storage.format.index_rows import ledger_key
from pybk.storage.io.lmdb_environment import LmdbEnvironment
from tests.private_files import write_private
from tests.sealing import tamper
from tests.storage.repair.test_rebuild import files_of, fill, index_of, lose_an_ssd_record, open_store
from tests.storage.repair.test_verify import flip
from tests.waiting import WAIT_S


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PYBK_PASSWORD", raising=False)
    with open_store(tmp_path / "store") as manager:
        with manager.create_ledger(
            ledger_type="orders",
            storage_hints={StorageHint.SSD},
            digest_type=DigestType.HMAC_SHA256,
            password=b"s3cret",
            custom_metadata={"app": b"shop"},
        ) as writer:
            writer.append_many([b"first", b"", b"third\n"])
        manager.create_ledger(digest_type=DigestType.CRC32C).append(b"open")
    return tmp_path / "store"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_ls(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "ls", store)
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:8] == ["ledger", "type", "state", "tier", "entries", "bytes", "digest", "sealed"]
    assert lines[2][:8] == ["0", "orders", "closed", "ssd", "3", "11", "HMAC_SHA256", "yes"]
    assert lines[3][:6] == ["1", "open", "nvme", "1", "4", "CRC32C"]
    status, out, _ = run(capsys, "ls", "--json", store)
    first, second = json.loads(out)["ledgers"]
    assert (first["ledger"], first["entries"], first["storage_hints"]) == (0, 3, ["ssd"])
    assert first["custom_metadata"] == {"app": base64.b64encode(b"shop").decode()}
    assert second["state"] == "open"


def test_ls_shows_which_closed_ledgers_are_sealed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(store) as manager:
        manager.open_ledger(1, recover=True).close()
        manager.create_ledger(insecure=True).append(b"open")
    tamper(store, 1, seal=b"", last_digest=b"")
    lines = [line.split() for line in run(capsys, "ls", store)[1].splitlines()]
    assert [line[6:8] for line in lines[2:4]] == [["HMAC_SHA256", "yes"], ["no", lines[3][7]]]
    rows = json.loads(run(capsys, "ls", "--json", store)[1])["ledgers"]
    assert [row["sealed"] for row in rows] == [True, False, None]


def test_ls_counts_the_bytes_of_the_entries_that_it_counts(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(store) as manager:
        for forced in (0, 1, 2):
            writer = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
            if forced:
                writer.append(b"forced")
                writer.force()
            if forced < 2:
                writer.append(b"not forced")
    rows = json.loads(run(capsys, "ls", "--json", store)[1])["ledgers"]
    assert [(row["entries"], row["bytes"]) for row in rows] == [(3, 11), (1, 4), (0, 0), (1, None), (1, 6)]


def test_verify_counts_one_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(tmp_path) as manager:
        manager.create_ledger(insecure=True).append(b"entry")
    assert run(capsys, "verify", tmp_path)[1].startswith("no problems in 1 ledger, 1 entry, ")


def test_cat(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(capsys, "cat", store, 1) == (0, "open", "")
    password = tmp_path / "password"
    for text in ("s3cret", "s3cret\n", "s3cret\r\n"):
        write_private(password, text.encode())
        assert run(capsys, "cat", store, 0, "--password-file", password) == (0, "firstthird\n", "")
    monkeypatch.setenv("PYBK_PASSWORD", "s3cret")
    assert run(capsys, "cat", store, 0, "--first", 1, "--last", 2) == (0, "third\n", "")
    assert run(capsys, "cat", store, 0, "--lines", "--last", 1) == (0, "first\n\n", "")
    _, out, _ = run(capsys, "cat", store, 0, "--headers")
    assert out.splitlines()[:2] == ["entry 0, last add confirmed -1, length 5, 5 bytes", "first"]
    _, out, _ = run(capsys, "cat", store, 0, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [base64.b64decode(row["payload"]) for row in rows] == [b"first", b"", b"third\n"]
    assert [row["entry_id"] for row in rows] == [0, 1, 2]


def test_a_long_type_is_cut_in_tables_and_whole_in_json(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = f"{'x' * 120}{'y' * 120}"
    with open_store(store) as manager:
        manager.create_ledger(ledger_type=long, insecure=True).close()
    out = run(capsys, "ls", store)[1]
    assert max(map(len, out.splitlines())) < 200
    assert f"{'x' * 23}…{'y' * 23}" in out
    assert long in run(capsys, "ls", store, "--json")[1]


def test_tail_prints_the_last_entries(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(store) as manager, manager.create_ledger(insecure=True) as writer:
        writer.append_many([b"%d" % number for number in range(30)])
    assert run(capsys, "ledger", "tail", store, writer.ledger_id, "-n", 2, "--lines") == (0, "28\n29\n", "")
    assert run(capsys, "ledger", "tail", store, writer.ledger_id, "-n", 0) == (0, "", "")
    assert len(run(capsys, "ledger", "tail", store, writer.ledger_id, "--headers")[1].splitlines()) == 20
    assert len(run(capsys, "ledger", "tail", store, writer.ledger_id, "-n", 99, "--json")[1].splitlines()) == 30


def test_tail_follows_a_ledger_until_it_is_closed(tmp_path: Path) -> None:
    with open_store(tmp_path) as manager, manager.create_ledger(insecure=True) as writer:
        writer.append_many([b"first", b"second"])
        command = [
            sys.executable,
            "-m",
            "pybk",
            "ledger",
            "tail",
            str(tmp_path),
            str(writer.ledger_id),
            "-f",
            "-n",
            "1",
        ]
        with subprocess.Popen([*command, "--lines"], stdout=subprocess.PIPE) as tail:
            assert tail.stdout is not None
            assert tail.stdout.readline() == b"second\n"
            writer.append(b"third")
            assert tail.stdout.readline() == b"third\n"
            writer.close()
            assert tail.stdout.read() == b""
            assert tail.wait(WAIT_S) == 0


def test_cat_says_what_is_wrong_in_one_line(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_private(tmp_path / "wrong", b"wrong")
    write_private(tmp_path / "long", bytes(1 << 17))
    secret = write_private(tmp_path / "right", b"s3cret")
    key = write_private(tmp_path / "key", bytes(32))
    with open_store(store) as manager:
        manager.create_ledger(insecure=True)
        manager.create_ledger(insecure=True).close()
    for arguments, says in (
        ((store, 0), "--password-file FILE, or in PYBK_SECRET or PYBK_PASSWORD"),
        (
            (store, 0, "--password-file", tmp_path / "wrong"),
            "the password is not that of ledger 0: give the right one (in a shell: --password-file FILE); ",
        ),
        (
            (store, 0, "--secret-file", key),
            "ledger 0 has a password, not a secret: pass password=... (in a shell: --password-file FILE), with the ",
        ),
        ((store, 0, "--password-file", tmp_path / "long"), "password"),
        ((store, 0, "--password-file", tmp_path / "missing"), f"{tmp_path / 'missing'} is to hold"),
        ((store, 7), "ledger 7"),
        ((store, 1, "--last", 5), "--last 5 cannot be read: ledger 1 has the confirmed entries 0 to 0 so far"),
        (
            (store, 0, "--password-file", secret, "--first", 99),
            "--first 99 cannot be read: ledger 0 has the entries 0 to 2",
        ),
        ((store, 0, "--password-file", secret, "--first", 8, "--last", 9), "--first 8 and --last 9 cannot "),
        ((store, 0, "--password-file", secret, "--first", 2, "--last", 0), "--first 2 is after --last 0"),
        ((store, 2, "--last", 0), "--last 0 cannot be read: ledger 2 has no confirmed entries yet"),
        ((store, 3, "--first", 1), "--first 1 cannot be read: ledger 3 is closed and has no entries"),
        ((tmp_path, 0), "no store"),
    ):
        status, out, err = run(capsys, "cat", *arguments)
        assert (status, out) == (2, "")
        assert err.startswith("pybk: ")
        assert err.count("\n") == 1
        assert says in err
        assert err.count("--password-file") <= 1, "one remedy"
        assert "read_last_add_confirmed" not in err, "no call of the library"


def test_dump(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "dump", "--json", store)
    assert (status, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    records = [(row["kind"], row["ledger"], row["first"], row["count"]) for row in rows if row["what"] == "record"]
    assert records == [
        ("ledger", 0, 0, 0),
        ("entries", 0, 0, 3),
        ("ledger", 0, 1, 0),
        ("ledger", 1, 0, 0),
        ("entries", 1, 0, 1),
    ]
    assert {row["what"] for row in rows} == {"store", "directory", "catalog", "file", "commit", "record"}
    _, out, _ = run(capsys, "dump", store)
    assert len(out.splitlines()) == len(rows)
    assert "kind=entries  ledger=0  first=0  count=3" in out


def test_verify(store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = run(capsys, "verify", store)
    assert (status, err) == (0, "")
    assert out.startswith("no problems in 2 ledgers, 4 entries")
    assert "durable watermark" in out
    assert "password" in out
    monkeypatch.setenv("PYBK_PASSWORD", "s3cret")
    assert "password" not in run(capsys, "verify", store)[1]
    status, out, _ = run(capsys, "verify", "--json", store)
    assert (status, json.loads(out)["sound"], json.loads(out)["entries"]) == (0, True, 4)
    flip(files_of(store, "log")[0], 4096 + 64 + 10)
    status, out, _ = run(capsys, "verify", store)
    assert status == 1
    assert "problem" in out
    status, out, _ = run(capsys, "verify", "--json", store)
    assert status == 1
    assert json.loads(out)["problems"][0]["path"].endswith(".log")


def test_rebuild_index_reports_the_contents_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(tmp_path) as manager:
        manager.create_ledger(insecure=True).append_many([b"entry"] * 7)
    status, out, err = run(capsys, "rebuild-index", tmp_path)
    assert (status, err) == (0, "")
    assert "0 ledgers, 0 entries, and the next open takes 7 entries of 1 ledger from the log" in out
    assert "kept" not in out


def test_rebuild_index(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    (index_of(tmp_path) / "data.mdb").write_bytes(b"garbage")
    status, out, err = run(capsys, "ls", tmp_path)
    assert (status, out) == (1, "")
    assert "pybk store rebuild-index" in err
    status, out, err = run(capsys, "rebuild-index", tmp_path)
    assert (status, err) == (0, "")
    assert "index.damaged-1" in out
    assert run(capsys, "verify", tmp_path)[0] == 0

    lose_an_ssd_record(tmp_path)
    status, out, _ = run(capsys, "rebuild-index", "--json", tmp_path)
    assert status == 1
    (lost,) = json.loads(out)["lost"]
    assert (lost["ledger_id"], lost["first_entry_id"]) == (4, 0)
    status, out, _ = run(capsys, "rebuild-index", tmp_path)
    assert status == 1
    assert "--accept-loss" in out
    status, out, _ = run(capsys, "rebuild-index", "--accept-loss", tmp_path)
    assert status == 0
    assert "index.damaged-2" in out, "an index that says other things than the new one is kept"
    assert run(capsys, "cat", tmp_path, 4)[0] == 2, "another password"
    monkeypatch.setenv("PYBK_PASSWORD", "p")
    status, out, err = run(capsys, "cat", tmp_path, 4)
    assert (status, out) == (1, "")
    assert "pybk: " in err


def test_damage_of_the_index_names_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(tmp_path) as manager:
        manager.create_ledger(insecure=True).close()
    environment = LmdbEnvironment(str(index_of(tmp_path)))
    with environment.write() as transaction:
        transaction.put(ledger_key(0), b"damaged")
    environment.close()
    status, out, err = run(capsys, "ls", tmp_path)
    assert (status, out) == (1, "")
    assert err.startswith(f"pybk: {tmp_path}: index key ")
    assert "PATH" not in err


def test_reading_commands_work_while_a_writer_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(tmp_path) as manager:
        writer = manager.create_ledger(digest_type=DigestType.XXH3)
        writer.append(b"now")
        assert run(capsys, "cat", tmp_path, 0) == (0, "now", "")
        assert run(capsys, "ls", tmp_path)[0] == 0
        assert run(capsys, "dump", tmp_path)[0] == 0
        assert run(capsys, "verify", tmp_path)[0] == 0
        status, _, err = run(capsys, "rebuild-index", tmp_path)
        assert status == 4, "it can be tried again"
        assert str(os.getpid()) in err


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["cat", "path"], ["cat", "path", "x"], ["ls", "path", "--password", "s3cret"]]
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("pybk")
    assert (error.count("\n"), error.count("--help\n")) == (1, 1)


def test_output_whose_reader_has_gone_ends_the_command_quietly(tmp_path: Path) -> None:
    with open_store(tmp_path) as manager:
        manager.create_ledger(digest_type=DigestType.XXH3).append_many([b"x" * 1000] * 3000)
    code = "import sys; from pybk.admin.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "cat", str(tmp_path), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10) == b"x" * 10
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(WAIT_S) == 141


def test_the_files_and_the_status_of_a_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "store", "files", store, "--json")
    files = [row for row in json.loads(out)["files"] if row["what"] == "file"]
    assert (status, [Path(row["path"]).suffix for row in files][:1]) == (0, [".log"])
    assert "log" in run(capsys, "store", "files", store)[1]
    status, out, _ = run(capsys, "store", "status", store, "--json")
    found = json.loads(out)
    assert (status, found["problems"], found["file_bytes"]) == (0, [], sum(row["bytes"] for row in files))
    assert found["durable_lsn"] > 0
    assert "durable lsn" in run(capsys, "store", "status", store)[1]
