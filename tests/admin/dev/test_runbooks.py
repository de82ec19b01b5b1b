"""The runbooks: there is one for each alert, their commands exist, and those that say so are walked through."""

from __future__ import annotations

import re
from pathlib import Path

from pybk.admin.cli import whole_parser
from tests.admin.dev.walking import RUNBOOKS, TEXT, commands_in, slug
from tests.paths import ROOT

WALKED = "Walked through by a test."


def test_each_alert_has_its_runbook() -> None:
    alerts = re.findall(r"^      - alert: (\w+)$", (ROOT / "deploy/prometheus/alerts.yml").read_text(), re.MULTILINE)
    assert len(alerts) > 20
    assert set(alerts) <= RUNBOOKS.keys()
    for name, text in RUNBOOKS.items():
        assert "**Do" in text or "do, done when:**" in text or "**Look, do:**" in text, name
        assert re.search(r"\*\*.*[Dd]one when:\*\*", text), name


def test_each_command_of_a_runbook_exists() -> None:
    commands = {" ".join(words): parser for words, parser in whole_parser().commands()}
    named = commands_in(TEXT)
    assert len(named) > 40
    for text in named:
        words = re.match(r"[a-z-]+(?: [a-z-]+)*", text)
        assert words is not None
        parts = words[0].split()
        known = next((each for count in (3, 2, 1) if (each := " ".join(parts[:count])) in commands), None)
        assert known is not None, text
        for option in re.findall(r"--[a-z-]+", text):
            assert option in commands[known].format_help(), text


def test_what_is_said_to_be_walked_through_is() -> None:
    """The other files of this name have the walks, whose tests have the names of their runbooks."""
    sources = [path.read_text() for path in Path(__file__).parent.glob("test_runbooks_of_*.py")]
    walks = [found for each in sources for found in re.findall(r"^def test_(\w+)\([^)]*\bwalk: Walk\b", each, re.M)]
    assert sorted(walks) == sorted(slug(name) for name, text in RUNBOOKS.items() if WALKED in text)
