"""The examples run; ``test_database_example.py`` has the tests of the database."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pybk import LedgerManager, Secret
from pybk.credentials import write_new_secret
from tests.paths import ROOT
from tests.spark import clusters
from tests.spark.queries import LATE
from tests.waiting import PROCESS_S, WAIT_S

EXAMPLES = ROOT / "examples"
PASSWORD = b"s3cret"


def command(name: str, *operands: object) -> list[str]:
    """Return the command line of an example."""
    return [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, operands)]


def run(name: str, *operands: object, cwd: Path, expect: int = 0) -> str:
    """Run an example to its end and return what it printed."""
    done = subprocess.run(
        command(name, *operands), cwd=cwd, capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert done.returncode == expect, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    tests = (Path(__file__), Path(__file__).with_name("test_database_example.py"))
    tested = "quickstart" + "".join(path.read_text(encoding="utf-8") for path in tests)  # test_readme.py runs that one
    assert [path.stem for path in EXAMPLES.rglob("*.py") if path.stem not in tested] == []


@pytest.mark.sampled(one_in=6, group="documents")
def test_producers(tmp_path: Path) -> None:
    text = run("producers", "data", cwd=tmp_path)
    assert "12800 entries by 64 producers" in text
    assert "the follower saw 12800 of them" in text


@pytest.mark.sampled(one_in=6, group="documents")
def test_cluster(tmp_path: Path) -> None:
    first, second, read = run("cluster", "data", cwd=tmp_path).splitlines()
    before, after = (set(line.split(": ")[1].split(", ")) for line in (first, second))
    assert (len(before), len(after), len(before & after)) == (3, 3, 2)
    assert read == "201 entries read"


@pytest.mark.long
@pytest.mark.parametrize("master", ["local[2]", "local-cluster[3,1,1024]"])
def test_pipeline(master: str, tmp_path: Path) -> None:
    """With executors in processes of their own one of them is killed."""
    (tmp_path / "input").write_text("".join(f"{'x' * (number % 7)} {number}\n" for number in range(3000)))
    environment = clusters.environment(tmp_path)

    def pipeline(directory: str) -> subprocess.CompletedProcess[str]:
        where = ("--master", master, "--directory", tmp_path / directory)
        return subprocess.run(
            command("pipeline", tmp_path / "input", *where),
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
            check=False,
            env=environment,
        )

    done = pipeline("all")
    if LATE in done.stderr:
        done = pipeline("again")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "All 3,000 lines are there, and each of 573 words of an hour was counted exactly." in done.stdout
    killed = re.search(r"killed executor \d and its bookie \S+ with SIGKILL", done.stdout)
    assert (killed is not None) == (master != "local[2]")


def test_producers_asked_for_help_make_no_store(tmp_path: Path) -> None:
    assert "STORE" in run("producers", "--help", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tail_follows_a_writer_in_another_process(tmp_path: Path) -> None:
    write_new_secret(str(tmp_path / "secret"))
    given = Secret(file=str(tmp_path / "secret"))
    with LedgerManager.open(tmp_path / "data") as manager, manager.create_ledger(secret=given) as writer:
        writer.append_many([b"one", b"two"])
        with subprocess.Popen(
            command("tail", tmp_path / "data", "--secret-file", tmp_path / "secret"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            watchdog = threading.Timer(PROCESS_S, process.kill)
            watchdog.start()
            assert process.stdout is not None
            assert process.stderr is not None
            assert [process.stdout.readline() for _ in range(2)] == [b"one\n", b"two\n"]
            writer.append(b"three")
            assert process.stdout.readline() == b"three\n"
            writer.close()
            assert process.wait(WAIT_S) == 0, process.stderr.read()
            assert process.stdout.read() == b""
            watchdog.cancel()


def test_tail_says_what_is_wrong(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "data") as manager, manager.create_ledger(password=PASSWORD) as writer:
        writer.append(b"x")
    done = subprocess.run(
        command("tail", tmp_path / "data"), capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("tail: ")
    assert done.stderr.count("\n") == 1
