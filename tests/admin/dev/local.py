"""Local clusters as ``pybk dev`` makes them, whose profiles and directories are in the test's own directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from pybk import LedgerManager
from pybk.admin.cli import main
from pybk.admin.profiles import Profile
from pybk.credentials import Secret
from tests.paths import ROOT
from tests.storage.real_store import python_path
from tests.waiting import PROCESS_S, WAIT_S

SCALED = ROOT / "tests" / "admin" / "dev" / "scaled"


class Commands:
    """Runs ``pybk``, each time in a process of its own.

    Args:
        directory: Where profiles and local clusters are.
        scaled: Whether bookies that are started wait for tenths of seconds where they would wait for seconds.
    """

    def __init__(self, directory: Path, *, scaled: bool = False) -> None:
        self.directory = directory
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYBK_")}
        self.environment = {
            **kept,
            "PYTHONPATH": f"{SCALED}{os.pathsep}{python_path()}" if scaled else python_path(),
            "XDG_CONFIG_HOME": str(directory / "config"),
            "XDG_STATE_HOME": str(directory / "state"),
        }

    def ask(self, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """Run a command in a directory, of which nothing is imported."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "pybk", *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            env=self.environment,
            timeout=PROCESS_S,
        )

    def run(self, *words: str) -> str:
        """Run a command that succeeds, and return what it prints."""
        done = self.ask(*words)
        assert done.returncode == 0, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout


class Local(Commands):
    """A local cluster of the profile ``dev``."""

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the processes by name, as the command says when it runs in this process."""
        said = StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
            for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
                patch.setenv(name, self.environment[name])
            main(["dev", "status", "--json"])
        return {each["name"]: each for each in json.loads(said.getvalue())["members"]}

    def get(self, name: str, path: str) -> str:
        """Return what the HTTP port of a process answers."""
        with urlopen(f"{self.status()[name]['http']}{path}", timeout=WAIT_S) as answer:
            found: bytes = answer.read()
        return found.decode()

    def connect(self) -> LedgerManager:
        """Return a client."""
        path = self.directory / "config" / "pybk" / "profiles" / "dev.toml"
        values = dict(line.split(" = ") for line in path.read_text().splitlines())
        profile = Profile(name="dev", **{name: json.loads(value) for name, value in values.items()})
        return LedgerManager.connect(profile.metadata, cluster_secret=Secret(file=profile.secret_file))


@contextmanager
def local_cluster(directory: Path, *options: str, scaled: bool = False) -> Iterator[Local]:
    """Run a local cluster; ``options`` are those of ``pybk dev up``, and ``scaled`` is of ``Commands``."""
    local = Local(directory, scaled=scaled)
    try:
        local.run("dev", "up", "--any-port", *options)
        yield local
    finally:
        local.ask("dev", "purge")
