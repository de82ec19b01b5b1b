"""Runs the commands of a page for operators as they are printed, on hosts that are directories of the test.

A page's commands stand in ``console`` blocks, each after ``$ ``, with what it prints below it. There a line ``...``
stands for any lines, and ``…`` for any part of a line. Blocks of Python are run, too, and a block of text after one is
what it prints. A block of TOML, YAML or of a unit is written to the file that the paragraph before it names last.

``pybk`` runs in this process, because the start of Python would take most of the time. A few commands of the system
have stand-ins, since a test has neither systemd nor several hosts: ``systemctl`` starts, stops and reloads what the
unit in ``deploy/systemd`` says, ``pip install`` puts another version in the place of the one that units run, and
``curl`` is ``urllib``. All other commands are run by bash. Absolute paths are below the test's directory.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from pybk.admin.cli import main
from tests.paths import ROOT
from tests.storage.real_store import python_path
from tests.waiting import PROCESS_S, WAIT_S, wait_until

DOCS = ROOT / "docs"
UNIT = (ROOT / "deploy" / "systemd" / "pybk-bookie@.service").read_text(encoding="utf-8")
SCALED = ROOT / "tests" / "docs" / "scaled"
PLACES = ("/etc/", "/var/lib/", "/srv/", "/run/", "/backup/")
"""Absolute paths of pages begin with one of these."""
AGAIN_S = 200.0

_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILES = ("toml", "ini", "yaml")
_SYSTEMCTL = re.compile(r"systemctl (enable --now|disable --now|start|stop|restart|reload|status) pybk-bookie@(\w+)")
_SHELL = re.compile(r"[|<>&;()$*?`{}]")


class Block(NamedTuple):
    """A fenced block: its language, the paragraph before it, and its text."""

    language: str
    before: str
    text: str


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page below ``docs``."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        before = text[: match.start()].rstrip().rpartition("\n\n")[2]
        found.append(Block(match[1], before, match[2]))
    return found


def commands(block: str) -> list[tuple[str, str]]:
    """Return the commands of a ``console`` block, each with what the page says that it prints."""
    found: list[tuple[str, str]] = []
    continues = False
    for line in block.splitlines():
        if continues:
            found[-1] = (f"{found[-1][0]} {line.strip()}", "")
        elif line.startswith("$ "):
            found.append((line.removeprefix("$ ").strip(), ""))
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line.rstrip()}\n")
            continue
        continues = found[-1][0].endswith("\\")
        if continues:
            found[-1] = (found[-1][0].removesuffix("\\").rstrip(), "")
    return found


def matches(shown: str, printed: str) -> bool:
    """Return whether a command printed what its page shows."""
    pattern = ""
    for line in shown.splitlines():
        pattern += r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line).replace("…", ".*") + r" *\n"
    return re.fullmatch(pattern, printed if printed.endswith("\n") or not printed else f"{printed}\n") is not None


class Unit:
    """A bookie that the stand-in for systemd runs.

    Args:
        name: Its name.
        command: What it runs.
        environment: Its variables.
        log: Where its standard error goes.
    """

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._command, self._environment, self.log = command, environment, log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> int:
        """Start it, and wait until it says that it is ready; return 1 if it ends instead."""
        if self.runs:
            return 0
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified, self.log.open("ab") as log:
            notified.bind(f"\0pybk-{os.getpid()}-{id(self)}")
            notified.settimeout(0.05)
            environment = {**self._environment, "NOTIFY_SOCKET": f"@pybk-{os.getpid()}-{id(self)}"}
            self.process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)
            return wait_until(lambda: self._ready(notified), f"{self.name} to be ready", WAIT_S, pause_s=0.0) - 1

    def _ready(self, notified: socket.socket) -> int:
        """Return 1 if it is ready, 2 if it has ended, 0 if neither."""
        try:
            return int(b"READY=1" in notified.recv(4096))
        except TimeoutError:
            return 0 if self.runs else 2

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; return its exit status."""
        if self.process is None:
            return 0
        if self.runs:
            self.process.send_signal(number)
        return self.process.wait(PROCESS_S)

    def reload(self) -> int:
        """Send SIGHUP."""
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)
        return 0


class Hosts:
    """What stands for the hosts of a cluster.

    Args:
        directory: Where absolute paths are.
        environment: Variables of all commands.
        names: What stands for a word of commands and files, such as the name of a host.

    Attributes:
        names: The same, to be added to.
        path: ``PYTHONPATH`` of what the units run.
        units: The bookies that were started, by name.
        programs: Where programs are that are not on the path; None for one that is not there, whose commands are left
            out.
        installed: Called by what installs a version.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str], names: Mapping[str, str] = {}) -> None:
        self.directory = directory
        self.path = python_path()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYBK_", "XDG_"))}
        tools = directory / "tools"
        tools.mkdir(parents=True)
        (tools / "pybk").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m pybk "$@"\n')
        (tools / "pybk").chmod(0o755)
        self.environment = {
            **kept,
            "PYTHONPATH": python_path(),
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(directory),
            **environment,
        }
        self.of_units: dict[str, str] = {"PYBK_BOOKIE_DRAIN_IDLE_S": "0.2"}
        self.names = dict(names)
        self.programs: dict[str, Path | None] = {}
        self.units: dict[str, Unit] = {}
        self.installed: Callable[[], None] | None = None

    def place(self, path: str) -> Path:
        """Return where an absolute path of a page lies."""
        return Path(f"{self.directory}/root{path}")

    def own(self, text: str) -> str:
        """Return a text of a page with this test's paths and names."""
        for name, value in self.names.items():
            text = text.replace(name, value)
        for place in PLACES:
            text = re.sub(rf"(?<![\w/.]){re.escape(place)}", f"{self.directory}/root{place}", text)
            text = text.replace(f"lmdb://{place}", f"lmdb://{self.directory}/root{place}")
        return text

    def shown(self, text: str) -> str:
        """Return what a command printed as a page has it."""
        text = text.replace(f"{self.directory}/root", "")
        for name, value in self.names.items():
            text = text.replace(value, name)
        return text

    # ---- commands ------------------------------------------------------------------------------------------------

    def run(self, command: str) -> tuple[int, str]:
        """Run a command of a page; return its exit status, and what it printed, as the page has it."""
        if given := re.fullmatch(r"export (\w+)=(\S+)", command):
            [self.environment[given[1]]] = shlex.split(self.own(given[2]))
            return 0, ""
        if command == "systemctl daemon-reload":
            return 0, ""
        if found := _SYSTEMCTL.fullmatch(command):
            return self._systemctl(found[1], found[2]), ""
        if command.startswith("/opt/pybk/bin/pip install "):
            assert self.installed is not None
            self.installed()
            return 0, ""
        if command.startswith("curl -s "):
            return self._curl(self.own(command.removeprefix("curl -s ")))
        words = self.own(command)
        for name, path in self.programs.items():
            if command.startswith(f"{name} "):
                if path is None:
                    return 0, ""
                words = f"{path}{words.removeprefix(name)}"
        if command.startswith("pybk ") and not command.startswith("pybk dev ") and not _SHELL.search(command):
            return self._pybk(shlex.split(words)[1:])
        done = subprocess.run(
            ["bash", "-c", words],
            env=self.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=PROCESS_S,
        )
        return done.returncode, self.shown(done.stdout)

    def _pybk(self, words: list[str]) -> tuple[int, str]:
        said = StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
            for name in [name for name in os.environ if name.startswith(("PYBK_", "XDG_"))]:
                patch.delenv(name)
            for name, value in self.environment.items():
                if name == "HOME" or name.startswith("PYBK_"):
                    patch.setenv(name, value)
            status = main(words)
        return status, self.shown(said.getvalue())

    def _curl(self, url: str) -> tuple[int, str]:
        try:
            with urlopen(url, timeout=WAIT_S, context=ssl.create_default_context()) as answer:
                return 0, self.shown(answer.read().decode())
        except HTTPError as error:
            return 0, self.shown(error.read().decode())

    # ---- systemd -------------------------------------------------------------------------------------------------

    def _systemctl(self, verb: str, name: str) -> int:
        if verb in ("start", "enable --now", "restart"):
            if verb == "restart":
                self.units[name].stop()
            self.units[name] = self.unit(name)
            return self.units[name].start()
        if verb == "reload":
            return self.units[name].reload()
        if verb == "status":
            return 0 if self.units[name].runs else 3
        self.units[name].stop()
        return 0

    def unit(self, name: str) -> Unit:
        """Return a bookie as its unit has it, with the version that is installed now."""
        known = self.units.get(name)
        if known is not None and known.runs:
            return known
        drop_ins = self.place(f"/run/systemd/system/pybk-bookie@{name}.service.d")
        changes = [path.read_text(encoding="utf-8") for path in drop_ins.glob("*.conf")]
        line = re.findall(r"^ExecStart=/opt/pybk/bin/pybk (.*)$", "\n".join([UNIT, *changes]), re.MULTILINE)[-1]
        [secret] = re.findall(r"^LoadCredential=cluster-secret:(.*)$", UNIT, re.MULTILINE)
        words = shlex.split(self.own(line.replace("%i", name)))
        credentials = self.directory / "credentials" / name
        credentials.mkdir(parents=True, exist_ok=True)
        if self.place(secret).exists():
            (credentials / "cluster-secret").touch(0o600)
            (credentials / "cluster-secret").write_bytes(self.place(secret).read_bytes())
        environment = {
            **{key: value for key, value in self.environment.items() if not key.startswith("PYBK_")},
            **self.of_units,
            "PYTHONPATH": self.path,
            "CREDENTIALS_DIRECTORY": str(credentials),
        }
        command = [sys.executable, "-P", "-c", "import sys; from pybk.admin.cli import main; sys.exit(main())", *words]
        return Unit(name, command, environment, self.directory / "log" / name)

    def close(self) -> None:
        """Kill what still runs."""
        for unit in self.units.values():
            unit.stop(signal.SIGKILL)

    # ---- pages ---------------------------------------------------------------------------------------------------

    def follow(
        self,
        page: str,
        *,
        before: Mapping[str, Callable[[], object]] = {},
        status: Mapping[str, int] = {},
        again: Mapping[str, int] = {},
    ) -> None:
        """Run all commands of a page in their order, and compare what they print.

        Args:
            page: The page below ``docs``.
            before: What happens before a command, by the beginning of the command; of several that begin so, before
                the first.
            status: The exit status of a command, by its beginning, if it is not 0.
            again: Commands that are repeated while they end with a status, by their beginning, as the page says.
        """
        happens = dict(before)
        printed = ""
        for block in blocks(page):
            if block.language == "console":
                for command, shown in commands(block.text):
                    for begins in [begins for begins in happens if command.startswith(begins)]:
                        happens.pop(begins)()
                    expected = next((value for begins, value in status.items() if command.startswith(begins)), 0)
                    repeated = next((value for begins, value in again.items() if command.startswith(begins)), None)
                    if repeated is None:
                        found, printed = self.run(command)
                    else:
                        found, printed = self._until(command, shown, expected, repeated)
                    assert found == expected, f"$ {command}\nends with {found}:\n{printed}"
                    assert matches(shown, printed), f"$ {command}\nprints\n{printed}\nand {page} says\n{shown}"
            elif block.language == "python":
                printed = self.python(block.text)
            elif block.language == "text":
                assert matches(block.text, printed), f"{page} says\n{block.text}\nand not\n{printed}"
            elif block.language in _FILES:
                self.write(block)
        assert not happens, f"{page} has no command that begins with {sorted(happens)}"

    def python(self, program: str) -> str:
        """Run a program without errors or warnings; return what it prints."""
        done = subprocess.run(
            [sys.executable, "-P", "-c", self.own(program)],
            env=self.environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
            timeout=PROCESS_S,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return self.shown(done.stdout)

    def write(self, block: Block) -> None:
        """Write a file whose path stands last before the block, if one does."""
        paths = re.findall(r"`(~?/[^`]+)`", block.before)
        if paths:
            path = Path(f"{self.directory}{paths[-1][1:]}") if paths[-1].startswith("~") else self.place(paths[-1])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.own(block.text), encoding="utf-8")

    def _until(self, command: str, shown: str, expected: int, repeated: int) -> tuple[int, str]:
        """Repeat a command until it ends, and prints, as its page says."""

        def done() -> tuple[int, str] | None:
            found, printed = self.run(command)
            assert found in (expected, repeated), f"$ {command}\nends with {found}:\n{printed}"
            return (found, printed) if found == expected and matches(shown, printed) else None

        return wait_until(done, f"$ {command}\nto print\n{shown}", AGAIN_S, pause_s=0.1) or (1, "")
