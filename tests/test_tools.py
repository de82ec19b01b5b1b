"""The commands in ``tools``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.waiting import PROCESS_S

JAVA = ROOT / "tools" / "java"


def java(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run ``tools/java`` in a project that has fetched nothing, where only some commands are."""
    script = shutil.copy(JAVA, path / "tools-java")
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
