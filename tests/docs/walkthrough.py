"""Does what a page of the documentation shows, as a reader would, and compares what the page says is printed.

``walk`` takes a page of files and commands, in one shell. Such a page has blocks of these kinds, and each is used:

- A ``code-block`` with a caption is a file of that name, which is written. One that comes later replaces it.
- A ``console`` block has commands, each after ``$``, and what they print. ``...`` in a line of its own stands for any
  number of lines. Behind the comment ``% numbers vary``, numbers of the block stand for any others.
- An ``sh`` block installs packages; that is not run, but the extras that it names have to exist.

What a command that runs in the background prints is waited for. ``python`` and ``pybk`` are those of this checkout,
the home directory is the test's own, and a free port stands for port 8000.

``paste`` takes a page of pieces of Python, which run one after the other in one process. A ``text`` block after one
is what it prints. Blocks of other languages, and those whose caption names another library, are shown for comparison.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.paths import ROOT
from tests.ports import free_port
from tests.storage.real_store import python_path
from tests.waiting import PROCESS_S, WAIT_S

DOCS = ROOT / "docs"
CHEAP = ROOT / "tests" / "docs" / "cheap"
NUMBERS_VARY = "% numbers vary"

_BLOCK = re.compile(
    r"^(?P<before>[^\n]*)\n+^(?P<fence>`{3,})(?P<kind>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL
)
_KILLED = re.compile(rb"^\S*bash: line \d+: +\d+ (Killed|Terminated)\b.*\n", re.MULTILINE)
_INSTALLS = re.compile(
    r"python3 -m venv \.venv|\. \.venv/bin/activate|pip install(?: '?\.(?:\[([a-z-]+)\])?'?)?(?: [a-z]+)*"
)
_END = re.compile(rb"\x01(\d+)\x01")


class Block(NamedTuple):
    """A fenced block: the line before it, its language, its caption, and its text."""

    before: str
    kind: str
    caption: str
    text: str


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the blocks of a page below ``docs``."""
    for found in _BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")):
        text, kind, caption = found["text"], found["kind"].strip(), ""
        if kind.startswith("{code-block}"):
            kind = kind.removeprefix("{code-block}").strip()
            while text.startswith(":"):
                option, _, text = text.partition("\n")
                if option.startswith(":caption:"):
                    caption = option.removeprefix(":caption:").strip()
            text = text.removeprefix("\n")
        yield Block(found["before"].strip(), kind, caption, text)


def extras() -> set[str]:
    """Return the names of the extras that pybk can be installed with."""
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+) =$", setup.partition("[options.extras_require]")[2], re.MULTILINE))


def commands_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a console block, each with the lines that it prints."""
    command, printed = "", list[str]()
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, printed
            command, printed = line.removeprefix("$ "), []
        elif line.startswith("> "):
            command += "\n" + line.removeprefix("> ")
        else:
            printed.append(line)
    yield command, printed


def pattern_of(printed: list[str], *, numbers_vary: bool) -> re.Pattern[str]:
    """Return what matches the output that a page shows, a line end after each line."""
    lines = []
    for line in printed:
        if line.strip() == "...":
            lines.append(r"(?:.*\n)*?")
            continue
        escaped = re.escape(line)
        lines.append((re.sub(r"\d+", r"\\d+", escaped) if numbers_vary else escaped) + r" *\n")
    return re.compile("".join(lines))


class Shell:
    """A shell in a directory of the test's own.

    Args:
        directory: Where it works.
        home: Its home, with the commands ``python`` and ``pybk``.
    """

    def __init__(self, directory: Path, home: Path, **environment: str) -> None:
        bin = home / "bin"
        bin.mkdir(parents=True)
        for name, call in (("python", ""), ("pybk", " -m pybk")):
            (bin / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{call} "$@"\n')
            (bin / name).chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYBK_", "XDG_"))}
        (home / ".curlrc").write_text("silent\nshow-error\n")  # no bar of progress, as if on a terminal
        self._said = b""
        self._bash = subprocess.Popen(
            ["bash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={
                **kept,
                "HOME": str(home),
                "PATH": os.pathsep.join([str(bin), str(Path(sys.executable).parent), os.environ["PATH"]]),
                "PYTHONPATH": f"{CHEAP}{os.pathsep}{python_path()}",
                **environment,
            },
            start_new_session=True,
        )
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._in, self._out = self._bash.stdin, self._bash.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)

    def run(self, command: str, pattern: re.Pattern[str]) -> None:
        """Run a command; fail unless it prints what matches, those in the background sooner or later."""
        self._in.write(f"{command}\nprintf '\\001%d\\001' $?\n".encode())
        self._in.flush()
        deadline = time.monotonic() + WAIT_S
        self._read_until(lambda: _END.search(self._said) is not None, deadline, command)
        end = _END.search(self._said)
        assert end is not None
        self._said = self._said[: end.start()] + self._said[end.end() :]
        if "& " in f"{command} ".replace("&& ", ""):
            self._read_until(lambda: pattern.fullmatch(self._printed(pattern)) is not None, deadline, command)
        printed, self._said = self._printed(pattern), b""
        if printed and not printed.endswith("\n"):  # where a terminal would have the prompt
            printed += "\n"
        assert pattern.fullmatch(printed), f"$ {command}\nprints\n{printed}\nand the page says\n{pattern.pattern}"
        assert int(end[1]) in (0, 128 + signal.SIGKILL) or "curl: (" in printed, f"$ {command}\nfails\n{printed}"

    def _printed(self, pattern: re.Pattern[str]) -> str:
        """Return what was printed; that a process was killed is said where the page has it, as on a terminal."""
        return _KILLED.sub(rb"\1\n" if "Killed" in pattern.pattern else b"", self._said).decode()

    def _read_until(self, condition: Callable[[], bool], deadline: float, command: str) -> None:
        while not condition():
            assert time.monotonic() < deadline, f"$ {command}\ndoes not print what the page says: {self._said!r}"
            if self._selector.select(0.5):
                read = os.read(self._out.fileno(), 1 << 16)
                assert read, f"the shell ended after\n$ {command}\n{self._said!r}"
                self._said += read

    def close(self) -> None:
        """Kill it with all that it started."""
        self._selector.close()
        os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()
        self._in.close()
        self._out.close()


@contextmanager
def shell(directory: Path, **environment: str) -> Iterator[Shell]:
    """Have a shell in a new directory below another one."""
    (directory / "work").mkdir()
    found = Shell(directory / "work", directory / "home", **environment)
    try:
        yield found
    finally:
        found.close()


def walk(page: str, directory: Path, files: tuple[str, ...] = (), **environment: str) -> None:
    """Do all that a page shows.

    Args:
        page: Its path below ``docs``.
        directory: A directory of the test's own.
        files: What the page has its reader download, below ``docs``.
        environment: Variables of the shell.
    """
    with shell(directory, **environment) as found:
        for file in files:
            shutil.copy(DOCS / file, directory / "work")
        commands, port = 0, free_port()
        for block in blocks_of(page):
            block = block._replace(text=re.sub(r"\b8000\b", str(port), block.text))
            if block.caption:
                (directory / "work" / block.caption).write_text(block.text, encoding="utf-8")
            elif block.kind == "console":
                for command, printed in commands_of(block.text):
                    found.run(command, pattern_of(printed, numbers_vary=block.before == NUMBERS_VARY))
                    commands += 1
            elif block.kind == "sh":
                check_installs(block.text)
            else:
                assert block.kind.startswith("{drawing}"), f"a block of {page} that nothing runs: {block}"
        assert commands


def check_installs(text: str) -> None:
    """Check a block that installs packages."""
    for line in text.splitlines():
        match = _INSTALLS.fullmatch(line.partition("  #")[0])
        assert match, f"not a command that installs: {line}"
        assert match[1] is None or match[1] in extras(), line


# ---- pieces of Python ------------------------------------------------------------------------------------------------

_RUNNER = """
import ast, asyncio, inspect, json, sys
loop, names = asyncio.new_event_loop(), {"__name__": "__main__"}
asyncio.set_event_loop(loop)
for piece in json.load(open("pieces.json")):
    found = eval(compile(piece, "<page>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.iscoroutine(found):
        loop.run_until_complete(found)
    print("\\x01", end="", flush=True)
"""


def paste(page: str, directory: Path, files: tuple[str, ...] = (), **environment: str) -> None:
    """Run the pieces of Python of a page in one process, with ``await`` as in a notebook; arguments as for ``walk``."""
    pieces, printed = list[str](), list[str]()
    for block in blocks_of(page):
        if block.kind == "python" and block.caption in ("", "pybk"):
            pieces.append(block.text)
            printed.append("")
        elif block.kind == "text":
            printed[-1] += block.text
        elif block.kind == "sh" and not block.caption:
            check_installs(block.text)
        else:
            assert block.caption or "{drawing}" in block.kind, f"a block of {page} that nothing runs: {block}"
    for file in files:
        shutil.copy(DOCS / file, directory)
    (directory / "pieces.json").write_text(json.dumps(pieces), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{CHEAP}{os.pathsep}{python_path()}", **environment},
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = done.stdout.split("\x01")
    for piece, output, said in zip(pieces, found, printed, strict=False):
        shown, output = said.rstrip("\n"), output.rstrip("\n")
        assert shown == output, f"{piece}\nprints\n{output}"
    assert len(found) == len(pieces) + 1
