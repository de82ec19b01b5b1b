"""Files of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from pybk import UsageError
from pybk.admin.http import Scope, Token, read_tokens
from pybk.admin.http.tokens import find_token


def test_a_token_is_found_by_its_text_alone(tmp_path: Path) -> None:
    (reader, reads), (admin, rules) = Token.new("board", Scope.READ), Token.new("me", Scope.ADMIN)
    file = tmp_path / "tokens"
    file.write_text(f"# of the board\n{reader.line()}\n{admin.line()}")
    tokens = read_tokens(file)
    assert tokens == (reader, admin)
    assert find_token(tokens, reads) == reader
    assert find_token(tokens, rules) == admin
    assert find_token(tokens, rules[:-1]) is None
    assert find_token(tokens, "") is None
    assert reads not in file.read_text()


@pytest.mark.parametrize(
    "line", ["me admin", f"me root {'0' * 64}", f"me admin {'0' * 63}", f"me admin {'g' * 64}", "\x00"]
)
def test_a_line_that_is_no_token_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"\n{line}\n")
    with pytest.raises(UsageError, match=r"tokens, line 2, is not a token: .* read, operate, admin"):
        read_tokens(file)


def test_a_file_that_every_user_may_change_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(Token.new("me", Scope.ADMIN)[0].line())
    file.chmod(0o666)
    with pytest.raises(UsageError, match=r"mode 0666 .* lets every user of this host add a token"):
        read_tokens(file)
    file.chmod(0o664)
    assert len(read_tokens(file)) == 1


def test_a_file_that_is_not_there_and_a_bad_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_tokens(tmp_path / "none")
    for name in ("", "a b", "#a", "x" * 101):
        with pytest.raises(UsageError, match="1 to 100 characters"):
            Token.new(name, Scope.READ)
