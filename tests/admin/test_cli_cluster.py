"""The command line and clusters: bookies by themselves, and ledgers listed and printed by a metadata URL."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pybk import LedgerManager
from pybk.admin.cli import main
from tests.private_files import write_private
from tests.waiting import PROCESS_S

pytestmark = pytest.mark.sampled(one_in=3, using="start")

SECRET = b"0123456789abcdef0123456789abcdef"
PYBK = [sys.executable, "-m", "pybk.admin"]

Bookie = subprocess.Popen[str]
Start = Callable[..., Bookie]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `pybk bookie`; what still runs is killed at the end."""
    processes: list[Bookie] = []

    def begin(*arguments: object, **environment: str) -> Bookie:
        process = subprocess.Popen(
            [*PYBK, "bookie", *map(str, arguments)],
            env={**os.environ, "PYBK_LOG_LEVEL": "warning", "PYBK_BOOKIE_DRAIN_S": "0", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    try:
        yield begin
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("PYBK_PASSWORD", raising=False)
    monkeypatch.delenv("PYBK_CLUSTER_SECRET", raising=False)
    return f"lmdb://{tmp_path}/meta"


def says(process: Bookie) -> str:
    """Return the line that a bookie prints when it serves."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return line


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_bookies_serve_until_a_signal_ends_them(tmp_path: Path, url: str, start: Start) -> None:
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    (tmp_path / "secret").chmod(0o600)
    common = ("--listen", "tcp://127.0.0.1:*", "--metadata", url)
    by_file = start(tmp_path / "a", *common, "--id", "a", "--rack", "/r1", "--cluster-secret-file", tmp_path / "secret")
    assert re.fullmatch(r"bookie a serves at tcp://127\.0\.0\.1:\d+\n", says(by_file))
    by_variable = start(
        tmp_path / "b",
        *common,
        *("--id", "b", "--listen", f"ipc://{tmp_path}/socket", "--json"),
        PYBK_CLUSTER_SECRET=SECRET.decode(),
    )
    said = json.loads(says(by_variable))
    assert (said["bookie"], said["addresses"][1]) == ("b", f"ipc://{tmp_path}/socket")
    with LedgerManager.connect(url, cluster_secret=SECRET) as client:
        with client.create_ledger(ensemble_size=2, password=b"p") as writer:
            writer.append(b"entry")
        assert {bookie.bookie_id for bookie in writer.metadata.fragments[0].ensemble} == {"a", "b"}
        by_file.terminate()
        by_variable.send_signal(signal.SIGINT)
        for process in (by_file, by_variable):
            assert process.communicate(timeout=PROCESS_S) == ("", "")
            assert process.returncode == 0
    again = start(tmp_path / "a", *common, PYBK_CLUSTER_SECRET=SECRET.decode())
    assert says(again).startswith("bookie a serves")


def test_the_reason_that_a_bookie_does_not_serve_is_one_line(tmp_path: Path, url: str, start: Start) -> None:
    with LedgerManager.open(tmp_path / "embedded") as manager:
        manager.create_ledger(insecure=True)
    with LedgerManager.open(tmp_path / "a", listen="tcp://127.0.0.1:*", metadata=url, cluster_secret=SECRET):
        common = ("--listen", "tcp://127.0.0.1:*", "--metadata", url)
        for arguments, variables, message, status in (
            ((tmp_path / "b", *common), {}, "--cluster-secret-file FILE or PYBK_CLUSTER_SECRET", 2),
            ((tmp_path / "b", *common), {"PYBK_CLUSTER_SECRET": "x" * 32}, "PYBK_CLUSTER_SECRET", 2),
            ((tmp_path / "embedded", *common), {"PYBK_CLUSTER_SECRET": SECRET.decode()}, "embedded", 2),
            ((tmp_path / "a", *common), {"PYBK_CLUSTER_SECRET": SECRET.decode()}, str(os.getpid()), 4),
            ((tmp_path / "c", "--listen", "tcp://0.0.0.0:*", "--metadata", f"{url}-2"), {}, "secret", 2),
            ((url, *common), {}, "directory", 2),
        ):
            process = start(*arguments, **variables)
            out, err = process.communicate(timeout=PROCESS_S)
            assert (process.returncode, out) == (status, ""), message
            assert err.startswith("pybk: ")
            assert err.count("\n") == 1
            assert message in err
            assert "x" * 32 not in err


def test_no_secret_is_taken_by_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bookie", "serve", "--help"])
    told = capsys.readouterr().out
    assert "--cluster-secret-file" in told
    assert "PYBK_CLUSTER_SECRET" in told
    with pytest.raises(SystemExit):
        main(["bookie", "dir", "--listen", "tcp://127.0.0.1:*", "--metadata", "lmdb:///m", "--cluster-secret", "x"])
    assert "unrecognized arguments: --cluster-secret x" in capsys.readouterr().err


@pytest.fixture
def cluster(tmp_path: Path, url: str) -> Iterator[LedgerManager]:
    """A cluster of one bookie with a closed ledger and an open one."""
    with LedgerManager.open(
        tmp_path / "a", listen="tcp://127.0.0.1:*", metadata=url, cluster_secret=SECRET, bookie_id="a"
    ) as manager:
        with manager.create_ledger(ensemble_size=1, password=b"s3cret", ledger_type="orders") as writer:
            writer.append_many([b"first\n", b"second\n"])
        writer = manager.create_ledger(ensemble_size=1, insecure=True)
        writer.append(b"confirmed\n")
        writer.append(b"not known to be\n")
        yield manager
        writer.append(b"still open")


def test_ls_of_a_cluster(
    cluster: LedgerManager, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    status, out, err = run(capsys, "ls", url)
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:7] == ["ledger", "type", "state", "quorums", "copies", "bookies", "entries"]
    assert lines[2][:10] == ["0", "orders", "closed", "1/1/1", "1", "a", "2", "13", "HMAC_SHA256", "yes"]
    assert lines[3][:6] == ["1", "open", "1/1/1", "1", "a", "HMAC_SHA256"]
    first, second = json.loads(run(capsys, "ls", "--json", url)[1])["ledgers"]
    (fragment,) = first["fragments"]
    assert (first["entries"], fragment["first"], fragment["bookies"]) == (2, 0, ["a"])
    assert fragment["conditions"] == ["runs"]
    assert second["entries"] is None
    assert (first["sealed"], second["sealed"]) == (True, None)


def test_ls_refuses_a_bookie_that_the_cluster_never_had(
    cluster: LedgerManager, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    assert run(capsys, "ls", url, "--bookie", "a")[0] == 0
    status, out, err = run(capsys, "ls", url, "--bookie", "nobody")
    assert (status, out) == (2, "")
    assert "the cluster has no bookie 'nobody', and had none: `pybk bookie list" in err


def test_cat_of_a_cluster(
    cluster: LedgerManager,
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_private(tmp_path / "secret", SECRET)
    secret = ("--cluster-secret-file", tmp_path / "secret")
    status, out, err = run(capsys, "cat", url, 0, *secret)
    assert (status, out) == (2, "")
    assert "--secret-file FILE, --password-file FILE, or in PYBK_SECRET or PYBK_PASSWORD" in err
    status, out, err = run(capsys, "cat", url, 0)
    assert (status, out) == (2, "")
    assert "--cluster-secret-file FILE or PYBK_CLUSTER_SECRET" in err
    assert run(capsys, "cat", url, 1, *secret)[1].startswith("confirmed\n")  # and its writer continues
    monkeypatch.setenv("PYBK_PASSWORD", "s3cret")
    assert run(capsys, "cat", url, 0, *secret) == (0, "first\nsecond\n", "")
    assert run(capsys, "cat", url, 0, "--first", 1, *secret) == (0, "second\n", "")


def test_cat_without_bookies_is_to_be_tried_again(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    with (
        LedgerManager.open(
            tmp_path / "a", listen="tcp://127.0.0.1:*", metadata=url, cluster_secret=SECRET, bookie_id="a"
        ) as manager,
        manager.create_ledger(ensemble_size=1, insecure=True) as writer,
    ):
        writer.append(b"entry")
    status, out, err = run(capsys, "cat", url, 0)
    assert (status, out) == (4, "")
    assert "start the bookies that are missing" in err


@pytest.mark.parametrize("command", [["ls"], ["cat"]])
def test_looking_makes_no_cluster(
    command: list[str], tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *command, url, *([0] if command == ["cat"] else []))
    assert (status, out) == (2, "")
    assert url in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["verify", "dump", "rebuild-index"])
def test_commands_for_directories_refuse_a_url(command: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, command, url)
    assert status == 2
    assert "directory" in err
