"""The texts in the sources that name a command, as patterns of what is printed; and what runs these commands."""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from pybk.admin.cli import main
from tests.paths import ROOT
from tests.storage.real_store import python_path
from tests.waiting import PROCESS_S

SOURCES = ROOT / "src" / "pybk"
COMMAND = re.compile(r"`(pybk [a-z][^`]*)`")
_HOLE = "(?s:.*?)"
"""Stands in a pattern for what a text is filled with."""


def template_of(node: ast.expr) -> str | None:
    """Return a pattern of the texts that a literal stands for; None if it is not a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template_of(part) or _HOLE for part in node.values)
    return None


def texts_in(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield the patterns of the texts in code, each with the function, method or constant that has it."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        name = f"{name}.{node.name}".strip(".")
    elif isinstance(node, ast.AnnAssign) and not name:
        name = ast.unparse(node.target)
    template = template_of(node) if isinstance(node, ast.expr) else None
    if template is not None:
        yield name, template
        return
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):  # a docstring
            yield from texts_in(child, name)


def filled(template: str, hole: str) -> str:
    """Return the text of a pattern, with something in the place of what it is filled with."""
    return re.sub(r"\\(.)", r"\1", template.replace(_HOLE, hole))


@cache
def remedies(part: str) -> dict[str, list[str]]:
    """Return the patterns of all texts in a part of the sources that name a command, by where they are."""
    found: dict[str, list[str]] = {}
    for path in sorted((SOURCES / part).rglob("*.py")):
        source = path.read_text()
        if "`pybk " not in source:  # as in most: to parse and walk them all takes seconds
            continue
        for name, template in texts_in(ast.parse(source), ""):
            if COMMAND.search(filled(template, "x")):
                found.setdefault(f"{path.relative_to(SOURCES)}:{name}", []).append(template)
    return found


class Shell:
    """Runs the commands that errors name, as they are printed.

    Args:
        path: A directory of the test.
        capsys: Captures what is printed.

    Attributes:
        found: The texts whose commands were asked for, by where they are in the sources.
        ended: What the last command of a process of its own has printed.
    """

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self.found: set[str] = set()
        self.ended = ""
        self._capsys = capsys

    def said(self, *words: object, status: int = 2) -> str:
        """Return what a command prints that ends with an exit status."""
        self._capsys.readouterr()
        given = [str(each) for each in words]
        try:
            ended = main(given)
        except SystemExit as end:
            ended = int(end.code or 0)
        out, err = self._capsys.readouterr()
        assert ended == status, (given, ended, out, err)
        return out + err

    def commands(self, where: str, text: str) -> list[str]:
        """Return the commands that a text names, which is that of a place in the sources."""
        printed = [found[0] for each in remedies("")[where] if (found := re.search(each, text))]
        assert printed, (where, text)
        self.found.add(where)
        return [command for each in printed for command in COMMAND.findall(each)]

    def command(self, where: str, text: str) -> str:
        """Return the one command that a text names."""
        (command,) = self.commands(where, text)
        return command

    def run(self, command: str, *more: object, status: int = 0, **stands_for: object) -> str:
        """Run a command as it is printed; returns what it prints.

        Args:
            command: The command.
            more: What a command takes besides, where the text says only which one it is.
            status: The exit status that it ends with.
            stands_for: What each word in capitals stands for; a list for several words.
        """
        words: list[object] = []
        for word in shlex.split(command)[1:]:
            value = stands_for.get(word.removesuffix("..."), word)
            words += value if isinstance(value, list) else [value]
        return self.said(*words, *more, status=status)

    @contextmanager
    def running(self, command: str, *more: object) -> Iterator[subprocess.Popen[str]]:
        """Run a command that ends with SIGINT, in a process of its own, as it is printed."""
        words = [*shlex.split(command)[1:], *map(str, more)]
        process = subprocess.Popen(
            [sys.executable, "-m", "pybk", *words],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PROCESS_S)
            self.ended = out + err
            if process.returncode not in (0, 130, -signal.SIGINT):
                raise AssertionError(f"{words} ended with {process.returncode}: {out}{err}")


Case = Callable[[Shell], None]


class Cases(dict[str, tuple[tuple[str, ...], Case]]):
    """Tests of remedies by name, each with the places in the sources whose commands it runs."""

    def names(self, *where: str) -> Callable[[Case], Case]:
        """Have a test run the commands of some places."""

        def add(case: Case) -> Case:
            self[case.__name__] = where, case
            return case

        return add

    def check(self, name: str, shell: Shell) -> None:
        """Run a test, which is to run the commands of all places that it names."""
        where, case = self[name]
        case(shell)
        assert shell.found == set(where)

    @property
    def covered(self) -> frozenset[str]:
        """All places whose commands are run."""
        return frozenset(place for where, _ in self.values() for place in where)
