"""``pybk token``: a token that is added to a file."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pybk.admin.cli import main
from pybk.admin.http import Scope, read_tokens
from pybk.admin.http.tokens import Token, add_token, find_token
from pybk.errors import UsageError


def test_a_token_is_added_to_its_file_and_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens"
    assert main(["token", "anna", "--scope", "operate", "--file", str(file)]) == 0
    first = capsys.readouterr().out.strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text(file.read_text().removesuffix("\n"))  # as an editor may leave it
    assert main(["token", "board", "--file", str(file)]) == 0
    second = capsys.readouterr().out.strip()
    tokens = read_tokens(file)
    found = [find_token(tokens, each) for each in (first, second)]
    assert [each and (each.name, each.scope) for each in found] == [("anna", Scope.OPERATE), ("board", Scope.READ)]
    assert first not in file.read_text()


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_file_has_all_of_a_token_or_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    file = tmp_path / "tokens"
    add_token(str(file), Token.new("anna", Scope.READ)[0])
    file.chmod(0o640)
    before = file.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(5, "the power is cut")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(OSError, match="the power is cut"):
            add_token(str(file), Token.new("board", Scope.READ)[0])
    assert file.read_bytes() == before
    (tmp_path / "link").symlink_to(file)
    add_token(str(tmp_path / "link"), Token.new("board", Scope.READ)[0])
    assert [each.name for each in read_tokens(file)] == ["anna", "board"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_tokens_that_are_added_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    path = str(tmp_path / "tokens")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: add_token(path, Token.new(f"t{number}", Scope.READ)[0]), range(20)))
    assert {each.name for each in read_tokens(path)} == {f"t{number}" for number in range(20)}


@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_what_is_no_regular_file_gets_no_token_and_stays(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "tokens"
    if kind == "directory":
        place.mkdir()
    else:
        os.mkfifo(tmp_path / "fifo" if kind == "link" else place)
    if kind == "link":
        place.symlink_to(tmp_path / "fifo")
    before = place.stat()
    assert main(["token", "anna", "--file", str(place)]) != 0
    says = "a directory, and not a file" if kind == "directory" else "a FIFO, and not a regular file"
    assert f"cannot hold tokens: it is {says}; name a regular file, or a new one" in capsys.readouterr().err
    assert place.stat().st_ino == before.st_ino
    with pytest.raises(UsageError, match=r"cannot be read: .*name a regular file"):
        read_tokens(place)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"alias ll='ls -l'\n", "line 1, is not a token"),
        (b"\xff\xfe", "cannot get another token: .*utf-8"),
        (b"#" * (1 << 20) + b"\n", "cannot get another token: .*more than 1048576 bytes"),
    ],
)
def test_a_file_of_another_kind_gets_no_token(data: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    with pytest.raises(UsageError, match=says):
        add_token(str(file), Token.new("anna", Scope.READ)[0])
    assert file.read_bytes() == data
    with pytest.raises(UsageError):
        read_tokens(file)
