"""The document of all commands: each that it names exists, and it names each that exists."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest

from pybk import LedgerManager
from pybk.admin.cli import ALIASES, whole_parser
from pybk.admin.cli.output import EXIT_STATUSES
from pybk.admin.http import AdminServer
from pybk.admin.http.api import OWN_ROUTES, ROUTES
from tests.paths import ROOT
from tests.remedies import COMMAND, filled, remedies

TEXT = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
TEXT = re.sub(r"^```\{.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
SHELL, PATHS, ALL = "BookKeeper's shell", "BookKeeper's HTTP paths", "All commands"
COMMANDS = {" ".join(words): parser for words, parser in whole_parser().commands()}
PROBES = {"GET /livez", "GET /readyz", "GET /healthz", "GET /metrics"}

BOOKKEEPER_COMMANDS = 51
BOOKKEEPER_PATHS = 30


def rows(section: str) -> list[list[str]]:
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_each_row_has_its_command_or_route_or_its_reasoned_no() -> None:
    for section in (SHELL, PATHS):
        for row in rows(section):
            assert len(row) == 3, row
            names, ours, why = row
            assert names
            if ours == "**no**":
                assert len(why) > 20, f"{names}: why is there none?"
            else:
                assert quoted(ours), row
                assert re.fullmatch(r"`[^`]+`(, `[^`]+`)*", ours), row


@pytest.mark.parametrize(("section", "count"), [(SHELL, BOOKKEEPER_COMMANDS), (PATHS, BOOKKEEPER_PATHS)])
def test_each_name_of_bookkeeper_stands_there_once(section: str, count: int) -> None:
    names = [name for row in rows(section) for name in row[0].split(", ")]
    assert sorted(set(names)) == sorted(names)
    assert len(names) == count


def test_each_command_that_is_named_exists() -> None:
    nouns = {command.split()[0] for command in COMMANDS}
    named = [text for text in quoted(TEXT) if re.match(r"pybk [a-z]", text)]
    assert len(named) > 60
    for text in named:
        words = re.findall(r"^pybk ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)*)", text)[0].split()
        known = [" ".join(words[:count]) for count in (3, 2, 1)]
        ours = next((each for each in known if each in COMMANDS), None)
        assert ours or (len(words) == 1 and words[0] in nouns), text
        for option in re.findall(r"(--[a-z-]+)", text):
            assert ours is None or option in COMMANDS[ours].format_help(), text


def test_each_command_that_a_text_of_the_code_names_exists() -> None:
    texts = [filled(text, "log") for found in remedies("").values() for text in found]
    named = {command for text in texts for command in COMMAND.findall(text)}
    assert len(named) > 20
    nouns = {command.split()[0] for command in COMMANDS} | set(ALIASES)
    for command in named:
        words = re.sub(r"( --|[^a-z -]).*", "", command, flags=re.DOTALL).split()[1:]
        known = any(" ".join(words[:count]) in COMMANDS for count in (3, 2, 1))
        assert known or (len(words) == 1 and words[0] in nouns), command


def test_each_route_that_is_named_exists() -> None:
    known = {f"{each.method} {each.template}" for each in (*ROUTES, *OWN_ROUTES)} | PROBES
    named = {text for text in quoted(TEXT) if re.match(r"(GET|POST) /", text)}
    assert len(named) > 20
    assert named <= known


def test_each_command_stands_in_the_list() -> None:
    lines = [f"| `pybk {command}` | {parser.description} |" for command, parser in COMMANDS.items()]
    table = SECTIONS[ALL].splitlines()
    missing = [line for line in lines if line not in table]
    assert not missing, "put this into docs/reference/commands.md:\n" + "\n".join(missing)
    assert len([line for line in table if line.startswith("| `")]) == len(lines), "a command of the list is gone"


def test_the_nouns_that_do_not_ask_are_named() -> None:
    assert not [each for each in COMMANDS if each.startswith("dev ") and "--yes" in COMMANDS[each].format_help()]
    assert "`pybk dev` does not ask, not for `purge` and `wipe` either," in TEXT


def test_the_exit_statuses_are_those_of_the_code() -> None:
    said = dict(re.findall(r"^\| (\d) \| (.*) \|$", TEXT, re.MULTILINE))
    assert said == {str(status): text for status, text in EXIT_STATUSES.items() if status < 100}


def test_the_probes_exist(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager, closing(AdminServer(manager)) as server:
        for probe in sorted(PROBES):
            with urlopen(server.url + probe.removeprefix("GET ")) as response:
                assert response.status == 200
