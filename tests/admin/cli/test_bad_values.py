"""What commands say of a value that cannot be: the value, what is taken instead, or what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from pybk.admin.cli import main
from pybk.admin.standalone_console import bookie_ports
from pybk.errors import UsageError
from pybk.options.rows import THE_TABLE, Command, Row
from tests.storage.real_store import open_quick

URL = "lmdb:///nowhere"


COMMANDS = {words: each for words, each in THE_TABLE.commands.items() if not THE_TABLE.verbs(*words)}


def arguments_of(command: Command) -> list[Row]:
    """Return the arguments without a flag that have to be given."""
    return [each for each in command.rows if not each.flags and not each.section and each.count not in ("?", "*")]


def takes_path(command: Command) -> bool:
    """Return whether a command has to be given a PATH."""
    return "PATH" in [each.metavar for each in arguments_of(command)]


def some(row: Row) -> str:
    """Return a value that may be given."""
    return next(iter(row.choices), "1")


def given(command: Command, **values: str) -> list[str]:
    """Return what has to be given to a command, with these values of some arguments, by their metavars."""
    one_of = {each.excludes: each for each in reversed(command.rows) if each.excludes.startswith("^!")}
    flags = [each for each in command.rows if each.flags and ("!" in each.words or each in one_of.values())]
    return [
        *(values.get(each.metavar, some(each)) for each in arguments_of(command)),
        *(word for each in flags for word in (each.flags[-1], some(each))),
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
    command = COMMANDS[words]
    line = given(command, PATH="")
    text = said(capsys, *words, *line)
    assert "PATH is empty; it takes " in text or "FILE: '' is not accepted, it takes the name of a file" in text
    assert not list(tmp_path.iterdir())


FILES = [
    (words, row.flags[-1])
    for words, command in COMMANDS.items()
    for row in command.rows
    if row.metavar == "FILE" and row.flags and row.default is None
]


@pytest.mark.parametrize("option", sorted({option for _, option in FILES}))
def test_an_empty_name_of_a_file_is_none(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = next(words for words, each in FILES if each == option)
    text = said(capsys, *words, *given(COMMANDS[words], PATH=URL), f"{option}=")
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
        (("ledger", "list", "store", "--limit", "1" + "0" * 24), "'1" + "0" * 24 + "' is not accepted, it takes "),
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


@pytest.mark.parametrize("words", ["log cat", "log tail", "wal cat"])
def test_a_name_that_has_no_bytes_in_utf_8_is_refused(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    open_quick(tmp_path).close()
    assert "the name '\\udcff' cannot be encoded as UTF-8" in said(capsys, *words.split(), str(tmp_path), "\udcff")
