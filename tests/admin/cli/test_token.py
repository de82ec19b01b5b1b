"""``pybk token``: a token that is added to a file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pybk.admin.cli import main
from pybk.admin.http import Scope, read_tokens
from pybk.admin.http.tokens import find_token


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
