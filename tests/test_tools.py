"""The commands in ``tools``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pybk.admin.cli import NOUNS
from tests.paths import ROOT
from tests.waiting import PROCESS_S


def java(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run ``tools/java`` in a project that has fetched nothing, where only some commands are."""
    return tool("java", *arguments, path=path)


def tool(name: str, *arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a tool in a project that has fetched nothing, where only some commands are."""
    script = shutil.copy(ROOT / "tools" / name, path / f"tools-{name}")
    environment = {"PATH": str(path)}
    return subprocess.run([script, *arguments], env=environment, capture_output=True, text=True, timeout=PROCESS_S)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A directory with what the script itself needs: no Java, and no package manager that could fetch one."""
    tmp_path /= "tools"
    tmp_path.mkdir()
    for name in ("bash", "dirname", "env", "sed"):
        (tmp_path / name).symlink_to(
            next(found for place in ("/usr/bin", "/bin") if (found := Path(place, name)).exists())
        )
    return tmp_path


def fake_java(commands: Path, version: str) -> None:
    """Make a Java that says that it is of a version."""
    (commands / "java").write_text(
        f"#!/bin/sh\necho '    java.home = /opt/java'\necho '    java.specification.version = {version}'\n"
    )
    (commands / "java").chmod(0o755)


def test_a_java_that_is_new_enough_is_found(commands: Path) -> None:
    fake_java(commands, "17")
    assert java("home", path=commands).stdout == "/opt/java\n"
    told = java("run", "env", path=commands).stdout
    assert "JAVA_HOME=/opt/java\n" in told
    assert f"PATH=/opt/java/bin:{commands}\n" in told


@pytest.mark.parametrize("version", [None, "1.8", "11"])
def test_without_java_it_says_what_to_do(commands: Path, version: str | None) -> None:
    if version is not None:
        fake_java(commands, version)
    done = java("home", path=commands)
    assert done.returncode == 1
    assert "no Java 17 or newer was found" in done.stderr
    assert "apt install openjdk-17-jre-headless" in done.stderr


def test_without_java_a_command_runs_and_its_last_line_says_what_was_left_out(commands: Path) -> None:
    done = java("run", "bash", "-c", "echo ran; exit 3", path=commands)
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert done.stderr.splitlines()[-1].startswith("left out, because there is no Java 17 or newer: ")


def test_a_prometheus_on_the_path_is_found(commands: Path) -> None:
    (commands / "promtool").symlink_to("/bin/true")
    assert tool("prometheus", "find", path=commands).returncode == 1, "promtool alone is not enough"
    (commands / "prometheus").symlink_to("/bin/true")
    for order in ("find", "home"):
        assert tool("prometheus", order, path=commands).stdout == f"{commands}\n"


def test_without_prometheus_it_says_what_to_do(commands: Path) -> None:
    done = tool("prometheus", "find", path=commands)
    assert (done.returncode, done.stdout) == (1, "")
    done = tool("prometheus", "home", path=commands)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no promtool and prometheus were found" in done.stderr
    assert "apt install prometheus" in done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of its own under git, with the checks of this one."""
    (tmp_path / "tools").mkdir()
    for name in ("references", "prose", "commits"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    (tmp_path / "docs" / "design").mkdir(parents=True)
    (tmp_path / "docs" / "design" / "replication.md").write_text("| C1 | A rule |\n")
    (tmp_path / "docs" / "design" / "ledger_lists.md").write_text("| T1 | Another rule |\n")
    git(tmp_path, "init", "--quiet")
    return tmp_path


def git(project: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=project, check=True, capture_output=True, text=True).stdout.strip()


def run_check(project: Path, name: str) -> tuple[int, str]:
    git(project, "add", "--all")
    command = [sys.executable, str(project / "tools" / name)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert not done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("# See C1, T1 and docs/design/replication.md.\n", []),
        ("# See C2.\n", ["C2"]),
        ('"""See ``storage/lost.py`` and :class:`Lost`."""\n', ["storage/lost.py", "Lost"]),
        ('value = "C2 in storage/lost.py is a value"\n', []),
    ],
)
def test_references_that_lead_nowhere_are_found(project: Path, source: str, missing: list[str]) -> None:
    (project / "module.py").write_text(source)
    status, output = run_check(project, "references")
    assert status == bool(missing)
    assert [line.rpartition(" ")[2] for line in output.splitlines() if "there is no" in line] == missing


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("module.py", "# The leader writes, and the followers wait.\n", ""),
        ("module.py", "# Whoever waits, writes; it goes on beside the others.\n", "beside"),
        ("module.py", 'told = "nobody is told"\n', ""),
        ("notes.md", "The store goes on.\n", "goes on"),
        ("notes.md", "```\nthe store goes on\n```\n", ""),
        ("notes.md", "`tell` is a method of a file.\n", ""),
    ],
)
def test_words_that_are_ruled_out_are_found(project: Path, name: str, text: str, found: str) -> None:
    (project / name).write_text(text)
    status, output = run_check(project, "prose")
    assert status == bool(found)
    assert f"{name}:1: {found!r}" in output or not found


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("log: sync twice\n\nBecause once is not enough.", ""),
        ("log: sync twice", "no body"),
        (f"log: {'x' * 70}\n\nBecause.", "75 characters"),
        ("Sync twice\n\nBecause.", "`area: what`"),
    ],
)
def test_commit_messages_that_break_the_rule_are_found(project: Path, message: str, problem: str) -> None:
    git(project, "commit", "--quiet", "--allow-empty", "--message", "The first one.")
    script = project / "tools" / "commits"
    start = git(project, "rev-parse", "HEAD")
    script.write_text(re.sub(r'^START = ".*"$', f'START = "{start}"', script.read_text(), flags=re.MULTILINE))
    git(project, "commit", "--quiet", "--allow-empty", "--message", message)
    status, output = run_check(project, "commits")
    assert status == bool(problem)
    assert problem in output


def test_completion_is_that_of_the_table(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "tools" / "completion"), str(tmp_path)]
    run = subprocess.run(script, capture_output=True, text=True, timeout=PROCESS_S)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    for path in sorted(tmp_path.iterdir()):
        kept = ROOT / "src" / "pybk" / "admin" / "completion" / path.name
        assert path.read_text("utf-8") == kept.read_text("utf-8"), "run tools/completion, and commit what it writes"


def test_the_manual_pages_have_all_nouns_and_are_pages(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "tools" / "manpages"), str(tmp_path / "man1")]
    run = subprocess.run(script, capture_output=True, text=True, timeout=PROCESS_S)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (tmp_path / "man1").iterdir()}
    assert set(pages) == {"pybk", *(f"pybk-{noun.name}" for noun in NOUNS)}
    assert pages["pybk-bookie"].startswith('.TH PYBK-BOOKIE "1"')
    assert "pybk bookie drain" in pages["pybk-bookie"]
    assert "\\-\\-wait" in pages["pybk-bookie"]
    groff = shutil.which("groff")
    if groff is not None:
        for name in pages:
            command = [groff, "-man", "-Tutf8", "-wmac", str(tmp_path / "man1" / f"{name}.1")]
            made = subprocess.run(command, capture_output=True, timeout=PROCESS_S)
            assert (made.returncode, made.stderr) == (0, b"")
