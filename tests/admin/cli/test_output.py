"""Progress, questions and colours of the command line."""

from __future__ import annotations

import argparse
import io
import json
import sys

import pytest

from pybk.admin.cli import output
from pybk.admin.cli.output import coloured, confirm, print_table, progress_bar
from pybk.errors import SafetyCheckError


class Terminal(io.StringIO):
    """A terminal on which a person has typed something."""

    def isatty(self) -> bool:
        return True


def line(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"quiet": False, "progress": "auto", "yes": False, **given})


def test_progress_is_shown_on_terminals_or_as_json_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(parsed: argparse.Namespace, stream: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_bar(parsed, "copy") as show:
            for done in (1 << 20, 2 << 20):
                show(done, 4 << 20)
        return stream.getvalue()

    monkeypatch.setattr(output, "PROGRESS_AFTER_SECONDS", 3600.0)
    assert written(line(), Terminal()) == "", "it does not last long"
    monkeypatch.setattr(output, "PROGRESS_AFTER_SECONDS", 0.0)
    assert "copy" in written(line(), Terminal())
    assert written(line(), io.StringIO()) == "", "no terminal"
    assert written(line(quiet=True), Terminal()) == ""
    assert written(line(progress="none"), Terminal()) == ""
    first, second = written(line(progress="json"), io.StringIO()).splitlines()
    shown = json.loads(second)
    assert shown.pop("seconds") >= 0
    assert shown == {"progress": "copy", "done": 2 << 20, "total": 4 << 20, "unit": "B"}
    assert json.loads(first)["done"] == 1 << 20


def test_what_destroys_asks_for_the_name_on_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(typed: str, terminal: type[io.StringIO]) -> str:
        monkeypatch.setattr(sys, "stdin", terminal(typed))
        shown = terminal()
        monkeypatch.setattr(sys, "stderr", shown)
        confirm(line(), "b1", "bookie b1 is removed for good")
        return shown.getvalue()

    assert ask("b1\n", Terminal) == "bookie b1 is removed for good. Type b1 to do it: "
    for typed in ("b2\n", "y\n", "\n", ""):
        with pytest.raises(SafetyCheckError, match="b1 was not typed; nothing was changed"):
            ask(typed, Terminal)
    with pytest.raises(SafetyCheckError, match="give --yes; nothing was changed"):
        ask("b1\n", io.StringIO)
    confirm(line(yes=True), "b1", "bookie b1 is removed for good")


def test_a_table_has_nothing_that_terminals_obey(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([(1, "a\x1b[2J\nb\u202ec ü", None)], ("ledger", "type", "copies"))
    *_, row = capsys.readouterr().out.splitlines()
    assert row.split("  ")[-1].strip() == r"a\x1b[2J\nb\u202ec ü"


def test_verdicts_are_coloured_on_terminals_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert coloured("bad") == "bad"
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert coloured("bad") == "\x1b[31mbad\x1b[0m"
    assert coloured("something else") == "something else"
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("bad") == "bad"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert coloured("bad") == "bad"
