"""The process that shows a cluster: what it is given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pybk import UsageError
from pybk.admin.http import Scope, Token
from pybk.admin.standalone_console import bookie_ports


@pytest.fixture
def ports(tmp_path: Path) -> str:
    file = tmp_path / "bookies.toml"
    file.write_text('b1 = "http://127.0.0.1:9464"\n')
    return str(file)


def test_the_token_of_bookies_is_read_from_its_owners_file(ports: str, tmp_path: Path) -> None:
    _, text = Token.new("console", Scope.READ)
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(f"{text}\n")
    found = bookie_ports(ports, str(file))
    assert (found.urls(), found.token) == ({"b1": "http://127.0.0.1:9464"}, text)
    assert text not in repr(found)
    for mode in (0o604, 0o602):
        file.chmod(mode)
        with pytest.raises(UsageError, match=f"its mode {mode:04o} lets every user of this host read or change it"):
            bookie_ports(ports, str(file))
    assert bookie_ports(ports).token == ""


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\xff\xfe", "t\u00f6ken".encode(), b"two words", b"a\nb", b"a\r\nX: y"]
)
def test_a_file_without_a_token_is_refused_and_not_shown(ports: str, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_bytes(content)
    with pytest.raises(UsageError, match=f"{re.escape(str(file))} is to hold a token alone") as refused:
        bookie_ports(ports, str(file))
    assert "words" not in str(refused.value)
