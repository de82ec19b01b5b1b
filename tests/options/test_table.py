"""The table of commands and options: what it declares is what the code has."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from pybk.admin.cli import NOUNS, whole_parser
from pybk.admin.cli.check_verb import CHECKS
from pybk.admin.cli.command_parser import CommandParser, fill
from pybk.admin.command import completion_of
from pybk.admin.http.tokens import Scope
from pybk.flags import StorageHint
from pybk.healing.scrub_schedule import ScrubKind
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerState
from pybk.options.rows import THE_TABLE, Row, Table
from tests.waiting import PROCESS_S

COMMANDS = dict(whole_parser().commands())


def row_of(command: str, flag: str) -> Row:
    rows = THE_TABLE.commands[tuple(command.split())].rows
    return next(row for row in rows if flag in (*row.flags, row.metavar))


def test_each_command_of_the_table_has_its_function_and_the_other_way_round() -> None:
    declared = {" ".join(words) for words in COMMANDS}
    found = set()
    for noun in NOUNS:
        verbs = import_module(f"pybk.admin.cli.{noun.name}").VERBS
        found |= {f"{noun.name} {words}".strip() for words in verbs}
        assert all(callable(run) for run in verbs.values())
    assert found == declared


def test_each_option_is_declared_once_in_a_command() -> None:
    for words, command in THE_TABLE.commands.items():
        names = [name for row in command.rows for name in row.flags or [row.key or row.metavar] if not row.section]
        assert len(names) == len(set(names)), words


@pytest.mark.parametrize(
    ("command", "flag", "choices"),
    [
        ("ledger list", "--tier", list(StorageHint)),
        ("ledger list", "--state", list(LedgerState)),
        ("spark tier", "TIER", list(StorageHint)),
        ("spark tier", "--hint", list(StorageHint)),
        ("dev fill", "--tier", list(StorageHint)),
        ("scrub run", "--kind", [each.value for each in ScrubKind]),
        ("log settings", "--digest", [each.name for each in DigestType]),
        ("log settings", "--storage-hint", list(StorageHint)),
        ("token", "--scope", [each.name.lower() for each in Scope]),
    ],
)
def test_the_choices_are_those_of_the_code(command: str, flag: str, choices: list[str]) -> None:
    assert row_of(command, flag).choices == choices


def test_a_flag_has_the_same_choices_in_all_commands_as_completion_takes_it() -> None:
    found: dict[str, list[str]] = {}
    for command in THE_TABLE.commands.values():
        for row in command.rows:
            for flag in row.flags:
                assert found.setdefault(flag, row.choices) == row.choices, (command.words, flag)


def test_the_checks_of_a_cluster_are_named() -> None:
    assert row_of("cluster check", "NAME").help == f"of {', '.join(CHECKS)}; default: all"


def test_what_the_table_says_is_read() -> None:
    table = Table("""
@common
  -q --quiet | {}, and print no notes
noun,other THING (show) | what they do
noun show @common | show it: `A | B`
  THING?:whole | a thing
  == title
  --for TIME:seconds =1h >seconds ^! ! | such as
      2h
  --one >what:one ^ | one
  @common | show
@service
  [part]
  key --flag A:B...:x,y = reload | what | none
""")
    assert [(each.name, each.verb, each.verbs_name) for each in table.verbs()] == [
        ("noun", "show", "THING"),
        ("other", "show", "THING"),
    ]
    show = table.commands["noun", "show"]
    assert show.text == "show it: `A | B`"
    before, thing, given, one, after = show.rows
    assert (thing.flags, thing.metavar, thing.count, thing.kind) == ([], "THING", "?", "whole")
    assert (before.flags, before.help, before.title) == (["-q", "--quiet"], ", and print no notes", "")
    assert (after.help, after.is_switch) == ("show, and print no notes", True)
    assert (given.flags, given.metavar, given.kind, given.default) == (["--for"], "TIME", "seconds", "1h")
    assert (given.dest, given.excludes, given.words, given.title) == ("seconds", "^!", {"!"}, "title")
    assert (given.help, given.is_switch) == ("such as 2h", False)
    assert (one.dest, one.const, one.excludes) == ("what", "one", "^")
    [option] = table.rows("service")
    assert (option.section, option.key, option.flags) == ("part", "key", ["--flag"])
    assert (option.metavar, option.count, option.choices, option.default) == ("A:B", "...", ["x", "y"], "")
    assert (option.words, option.help, option.shown_default) == ({"reload"}, "what", "none")


@pytest.mark.parametrize("row", ["THING:of_no_kind", "--flag X:of_no_kind"])
def test_a_kind_that_does_not_exist_is_found_before_a_command_runs(row: str) -> None:
    command = Table(f"noun | what it does\n  {row} | help\n").commands["noun",]
    with pytest.raises(KeyError):
        fill(CommandParser(), command)


IMPORTS = """
import sys
before = set(sys.modules)
sys.argv = ["pybk", "completion", "SHELL"]
from pybk.admin.command import main
assert main() == 0
print("\\n" + " ".join(sorted(set(sys.modules) - before - {"__future__", "_thread"})))
"""


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_is_printed_without_imports(shell: str) -> None:
    program = IMPORTS.replace("SHELL", shell)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PROCESS_S)
    assert (run.returncode, run.stderr) == (0, "")
    text, _, imported = run.stdout.rstrip().rpartition("\n")
    assert text.rstrip() == completion_of(shell).rstrip()
    others = [name for name in imported.split() if name.split(".")[0] != "pybk"]
    assert others == [], "what an interpreter has anyway, and pybk"
    assert len(imported.split()) < 10
