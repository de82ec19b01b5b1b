"""What opening a small store costs: counted in what is read and decoded, never in seconds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import CorruptError
from pybk.storage.format import cookie
from pybk.storage.index import index
from pybk.storage.io.filesystem import OsFileSystem
from tests.storage.real_store import numbered, open_quick


def test_an_open_decodes_no_cookie_again_and_the_rows_of_files_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    for owner, name in ((cookie, "decode_cookie"), (index, "file_uses"), (OsFileSystem, "list_directory")):
        real = getattr(owner, name)

        def counted(*arguments: Any, real: Any = real, name: str = name, **named: Any) -> Any:
            counts[name] += 1
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, counted)
    with open_quick(tmp_path, background=False) as manager, manager.create_ledger(password=b"p") as writer:
        writer.append_many(numbered(10))
    counts.clear()
    for _ in range(2):
        with open_quick(tmp_path, background=False):
            pass
        assert counts["decode_cookie"] == 0, "it was decoded when the store was made, in this process"
        assert counts["file_uses"] == 2
        assert counts["list_directory"] <= 10
        counts.clear()


def test_a_cookie_that_changed_is_decoded_again(tmp_path: Path) -> None:
    with open_quick(tmp_path, background=False):
        pass
    path = tmp_path / cookie.COOKIE_NAME
    sound = path.read_bytes()
    found = cookie.read_cookie(OsFileSystem(), str(tmp_path))
    path.write_bytes(sound.replace(b'"directory": 0', b'"directory": 1'))
    with pytest.raises(CorruptError):
        cookie.read_cookie(OsFileSystem(), str(tmp_path))
    path.write_bytes(sound)
    assert cookie.read_cookie(OsFileSystem(), str(tmp_path)) == found
