"""What commands say of a value that cannot be: the value, what is taken instead, or what to do."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk.admin.cli import main, whole_parser
from pybk.admin.console import bookie_ports
from pybk.errors import UsageError

URL = "lmdb:///nowhere"


def commands(parser: argparse.ArgumentParser, *words: str) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield all commands with their parsers."""
    nouns = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    for each in nouns:
        for name, found in each.choices.items():
            yield from commands(found, *words, name)
    if not nouns:
        yield words, parser


COMMANDS = dict(commands(whole_parser()))


def arguments_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments without a flag that have to be given."""
    return [each for each in parser._actions if not each.option_strings and each.nargs not in ("?", "*")]


def takes_path(parser: argparse.ArgumentParser) -> bool:
    """Return whether a command has to be given a PATH."""
    return "path" in [each.dest for each in arguments_of(parser)]


def some(action: argparse.Action) -> str:
    """Return a value that may be given."""
    return next(iter(action.choices)) if action.choices else "1"


def given(parser: argparse.ArgumentParser, **values: str) -> list[str]:
    """Return what has to be given to a command, with these values of some arguments."""
    groups = [each._group_actions[0] for each in parser._mutually_exclusive_groups if each.required]
    flags = [each for each in (*parser._actions, *groups) if (each.required or each in groups) and each.option_strings]
    return [
        *(values.get(each.dest, some(each)) for each in arguments_of(parser)),
        *(word for each in flags for word in (each.option_strings[-1], some(each))),
    ]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command prints that is refused because of its words."""
    try:
        status = main(list(words))
    except SystemExit as end:
        status = int(end.code or 0)
    printed = capsys.readouterr()
    assert status == 2, (words, printed)
    return printed.err


@pytest.mark.parametrize(
    "words",
    [words for words, each in COMMANDS.items() if takes_path(each)],
    ids=" ".join,
)
def test_an_empty_path_is_none(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    parser = COMMANDS[words]
    line = given(parser)
    line[[each.dest for each in arguments_of(parser)].index("path")] = ""
    text = said(capsys, *words, *line)
    assert "PATH is empty; it takes " in text or "FILE: '' is not accepted, it takes the name of a file" in text
    assert not list(tmp_path.iterdir())


FILES = [
    (words, option.option_strings[-1])
    for words, parser in COMMANDS.items()
    for option in parser._actions
    if option.metavar == "FILE" and option.option_strings and option.default is None
]


@pytest.mark.parametrize("option", sorted({option for _, option in FILES}))
def test_an_empty_name_of_a_file_is_none(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = next(words for words, each in FILES if each == option)
    text = said(capsys, *words, *given(COMMANDS[words], path=URL), f"{option}=")
    assert "'' is not accepted, it takes the name of a file" in text


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            ("secret", "new", "missing/x"),
            "missing/x cannot be made: No such file or directory; name a file in ",
        ),
        (("secret", "new", ""), "'' is not accepted, it takes the name of a file"),
        (
            ("config", "check", "missing"),
            "and cannot be read: No such file or directory; name a file that ",
        ),
        (("config", "check", "text"), 'it has lines such as metadata = "..." below [cluster]'),
        (("store", "verify", "store", "--passwords", "text"), 'it has lines such as default = "..."'),
        (("backup", "show", "store", "--storage-options", "text"), 'it has lines such as key = "..."'),
        (("log", "cat", "store", "log", "--first=-1"), "'-1' is not a place; it takes a sequence number, "),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_an_error_names_the_value_and_what_to_do(
    words: tuple[str, ...],
    remedy: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("text\n")
    Path("text").chmod(0o600)
    Path("store").mkdir()
    assert remedy in said(capsys, *words)


def test_the_ports_of_bookies_need_a_file_of_urls(tmp_path: Path) -> None:
    file = tmp_path / "ports"
    with pytest.raises(UsageError, match=r"ports .* cannot be read: No such file or directory; name a file that"):
        bookie_ports(str(file))
    for text in ("text\n", "b1 = 1\n"):
        file.write_text(text)
        with pytest.raises(UsageError, match=r'ports is .*; it takes a line for each bookie, such as b1 = "http://'):
            bookie_ports(str(file))
