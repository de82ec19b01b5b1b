"""Files of a store or a backup in whose place something else lies: a typed error, soon, and without much memory."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pybk.admin.cli import main
from pybk.backup import back_up
from pybk.errors import CorruptError, PybkError
from pybk.flags import StorageHint
from pybk.storage.io.filesystem import open_regular, read_regular
from tests.remedies import COMMAND
from tests.storage.real_store import open_quick, python_path
from tests.waiting import WAIT_S

_OPEN = """
import json, resource, sys
from pybk import LedgerManager, PybkError
from pybk.backup import restore_backup
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
found = {}
for path in sys.argv[2:]:
    try:
        if sys.argv[1] == "store":
            LedgerManager.open(path).close()
        else:
            restore_backup(path, path + "-restored")
        found[path] = "done"
    except PybkError as error:
        found[path] = type(error).__name__
print(json.dumps(found))
"""

KINDS = ("fifo", "device", "directory", "sparse")


def put(kind: str, path: Path) -> None:
    """Put something in the place of a file."""
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 64 << 30)


def outcomes(what: str, source: Path, name: str, directory: Path) -> dict[str, str]:
    """Return what an open of a copy is like, by what lies in the place of a file."""
    copies = {kind: directory / kind for kind in KINDS}
    for kind, copy in copies.items():
        shutil.copytree(source, copy)
        put(kind, next(path for path in sorted(copy.rglob("*")) if path.name.startswith(name)))
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, what, *map(str, copies.values())],
        capture_output=True,
        text=True,
        check=True,
        timeout=4 * WAIT_S,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    found = json.loads(done.stdout)
    return {kind: found[str(copy)] for kind, copy in copies.items()}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", ["cookie", "catalog-", "watermark", "directories"])
def test_a_store_with_something_else_in_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        manager.create_ledger(insecure=True).append(b"entry")
    found = outcomes("store", tmp_path / "store", name, tmp_path)
    refusals = {"CorruptError", "CookieError", "StorageFailedError"}
    # All but the watermark can be made again from others if they are regular files and damaged.
    assert found.pop("sparse") in refusals | ({"done"} if name != "watermark" else set()), found
    assert set(found.values()) <= refusals, found


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
@pytest.mark.parametrize("name", ["cookie", "hdd/cookie", "catalog-*", "directories"])
def test_what_lies_in_place_of_a_file_is_named_and_the_store_opens_once_it_is_moved_away(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    with open_quick(store) as manager:
        manager.create_ledger(insecure=True, storage_hints={StorageHint.HDD}).append(b"entry")
        manager.checkpoint()
    (path,) = store.glob(name)
    put(kind, path)
    says = {"fifo": "a FIFO", "device": "a character device", "directory": "a directory"}[kind]
    for words in (("store", "verify"), ("ledger", "list")):
        assert main([*words, str(store)]) != 0
        assert f"{says}, and not a" in "".join(capsys.readouterr()), words
    with pytest.raises(PybkError) as raised:
        open_quick(store)
    text = str(raised.value)
    assert f"{path} is {says}, and not a" in text
    assert "move it away" in text
    assert "mend the device" not in text
    path.rename(tmp_path / "away")
    try:
        open_quick(store).close()
    except CorruptError as error:
        (command,) = COMMAND.findall(str(error))
        assert main(shlex.split(command)[1:]) == 0, "the next open says what makes the file again"
        open_quick(store).close()


def test_a_store_with_something_else_in_place_of_a_log_file_is_refused(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        manager.create_ledger(insecure=True).append(b"entry")
    found = outcomes("store", tmp_path / "store", "0000", tmp_path)
    assert found.pop("sparse") == "CorruptError"
    assert set(found.values()) <= {"CorruptError", "StorageFailedError"}, found


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", ["base-", "run-", "pack-"])
def test_a_backup_with_something_else_in_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager, manager.create_ledger(insecure=True) as writer:
        writer.append(b"entry")
    back_up(tmp_path / "store", tmp_path / "backup")
    found = outcomes("backup", tmp_path / "backup", name, tmp_path)
    assert set(found.values()) <= {"CorruptError", "StorageFailedError"}, found


def test_what_is_no_regular_file_is_named(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, says in ((fifo, "a FIFO, and not a regular file"), (tmp_path, "a directory"), ("/dev/zero", "device")):
        for flags in (os.O_RDONLY, os.O_RDWR):
            with pytest.raises(OSError, match=says if flags == os.O_RDONLY or path != tmp_path else "directory"):
                open_regular(str(path), flags)
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_regular(str(file), 5) == b"12345"
    with pytest.raises(OSError, match="has more than 4 bytes, and no more are read"):
        read_regular(str(file), 4)
