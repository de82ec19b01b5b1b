"""``pybk backup`` and ``pybk restore``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pybk.admin.cli import main
from tests.cluster.inside import SECRET, inside
from tests.private_files import write_private
from tests.storage.real_store import contents, numbered, open_quick

PASSWORD = b"s3cret"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with open_quick(tmp_path / "store") as manager:
        manager.create_ledger(password=PASSWORD).append_many(numbered(100))
    return tmp_path / "store"


def run(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """Run a command with ``--json`` and return what it prints."""
    assert main([*map(str, words), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_backup_is_made_continued_verified_shown_and_restored(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, new = tmp_path / "backup", tmp_path / "new"
    assert run(capsys, "backup", store, backup, "--dry-run")["entries"] == 100
    assert not backup.exists()
    assert run(capsys, "backup", store, backup)["unauthenticated"] == 1
    assert main(["backup", "verify", str(backup), "--strict"]) == 1
    assert "checked by checksum only" in capsys.readouterr().out
    monkeypatch.setenv("PYBK_PASSWORD", PASSWORD.decode())
    with open_quick(store) as manager:
        manager.create_ledger(password=PASSWORD).append_many(numbered(5))
    assert main(["backup", "make", str(store), str(backup)]) == 0
    assert "run 2: 5 entries with" in capsys.readouterr().out
    assert run(capsys, "backup", "verify", backup, "--strict")["complete"]
    assert [each["run"] for each in run(capsys, "backup", "show", backup)["runs"]] == [1, 2]
    assert main(["backup", "show", str(backup)]) == 0
    assert "ended (UTC)" in capsys.readouterr().out
    assert run(capsys, "restore", backup, new, "--dry-run", "--run", 1)["ledgers"] == 1
    assert run(capsys, "restore", backup, new, "--strict")["entries"] == 105
    with open_quick(new) as manager:
        assert contents(manager, 0, PASSWORD) == numbered(100)
    assert main(["restore", str(backup), str(new)]) == 2
    assert "is not empty" in capsys.readouterr().err
    for words in (["--ledger", "99"], ["--new-ids"]):
        assert main(["restore", str(backup), str(tmp_path / "another"), *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"pybk: {words[0]} is for the ledgers of a cluster; ")
        assert error.endswith(": leave it out\n")


def test_damage_is_exit_status_1(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backup = tmp_path / "backup"
    assert main(["backup", str(store), str(backup)]) == 0
    pack = backup / "pack-00000001"
    pack.write_bytes(pack.read_bytes()[:-1])
    assert main(["backup", "verify", str(backup)]) == 1
    assert main(["restore", str(backup), str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists()
    assert "not those that the backup wrote" in capsys.readouterr().err


def test_ledgers_of_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    backup = tmp_path / "backup"
    with inside(tmp_path / "one") as one, inside(tmp_path / "two") as two:
        with one.connect().create_ledger(password=PASSWORD) as writer:
            writer.append_many(numbered(50))
        open_one = one.connect().create_ledger(password=PASSWORD)
        open_one.append(b"an entry")
        assert main(["backup", one.url, str(backup)]) == 1
        assert f"left out: ledger {open_one.metadata.ledger_id} is not closed" in capsys.readouterr().err
        monkeypatch.setenv("PYBK_PASSWORD", PASSWORD.decode())
        assert run(capsys, "backup", one.url, backup)["entries"] == 1
        assert main(["restore", str(backup), two.url, "--run", "1", "--json"]) == 1  # that run has not all
        ids = json.loads(capsys.readouterr().out)["ids"]
        assert ids == {str(writer.metadata.ledger_id): writer.metadata.ledger_id}
        assert main(["restore", str(backup), two.url, "--new-ids"]) == 0
        assert "is ledger" in capsys.readouterr().out
        assert contents(two.connect(), next(iter(ids.values())), PASSWORD) == numbered(50)


def test_old_runs_are_removed_after_a_question(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backup = tmp_path / "backup"
    for _ in range(3):
        assert main(["backup", str(store), str(backup)]) == 0
    capsys.readouterr()
    assert main(["backup", "prune", str(backup)]) == 2
    assert "--keep N, --keep-for TIME" in capsys.readouterr().err
    assert main(["backup", "prune", str(backup), "--keep", "2", "--dry-run"]) == 0
    assert "run 1 of" in (text := capsys.readouterr().out)
    assert "2 runs kept, from run 2 on; nothing was changed" in text
    assert main(["backup", "prune", str(backup), "--keep", "2"]) == 3
    assert "are removed for good, and this is not a terminal" in capsys.readouterr().err
    assert main(["backup", "prune", str(backup), "--keep-for", "1d", "--yes"]) == 0
    assert "no run is removed; 3 runs kept" in capsys.readouterr().out
    found = run(capsys, "backup", "prune", backup, "--keep", 1, "--yes")
    assert ([each["run"] for each in found["removed"]], [each["run"] for each in found["kept"]]) == ([1, 2], [3])
    assert [each["run"] for each in run(capsys, "backup", "show", backup)["runs"]] == [3]
    assert main(["restore", str(backup), str(tmp_path / "new")]) == 0


def test_damaged_entries_are_left_out_by_choice_and_all_commands_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_quick(tmp_path / "store") as manager:
        writer = manager.create_ledger(password=PASSWORD)
        for number in range(10):
            writer.append(b"to be damaged: %d" % number)
    for path in (tmp_path / "store").rglob("*.log"):
        path.write_bytes(path.read_bytes().replace(b"to be damaged: 7", b"to be Damaged: 7"))
    store, backup = str(tmp_path / "store"), str(tmp_path / "backup")
    assert main(["backup", store, backup]) == 1
    assert "entry 7 of ledger 0 cannot be copied" in capsys.readouterr().err
    text = "left out: entries 7 to 9 of ledger 0 are left out"
    for words in (
        ["backup", store, backup, "--skip-damaged"],
        ["backup", "verify", backup],
        ["restore", backup, str(tmp_path / "new")],
    ):
        assert main(words) == 1
        assert text in capsys.readouterr().err
    assert main(["backup", "show", backup]) == 0
    assert "left out" in capsys.readouterr().out
    with open_quick(tmp_path / "new") as manager:
        assert contents(manager, 0, PASSWORD) == [b"to be damaged: %d" % number for number in range(7)]


def test_options_of_a_url_come_from_a_file_that_the_command_or_the_environment_names(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.get_filesystem_class("memory")

    class Guarded(memory):  # type: ignore[misc,valid-type]  # known at run time
        """A file system that asks for a key, as those of object stores do."""

        def __init__(self, key: str = "", **options: Any) -> None:
            super().__init__(**options)
            if key != "s3cret":
                raise ValueError(f"the key {key!r} is wrong")

    fsspec.register_implementation("memory", Guarded, clobber=True)
    try:
        url = f"memory://{tmp_path}"
        assert main(["backup", "make", str(store), url]) == 2
        assert "the key '' is wrong" in capsys.readouterr().err
        options = write_private(tmp_path / "options", b'key = "s3cret"\n')
        assert main(["backup", "make", str(store), url, "--storage-options", str(options)]) == 0
        said = capsys.readouterr().out
        monkeypatch.setenv("PYBK_STORAGE_OPTIONS_FILE", str(options))
        assert [each["run"] for each in run(capsys, "backup", "show", url)["runs"]] == [1]
        assert main(["restore", url, str(tmp_path / "new")]) == 0
        said += "".join(capsys.readouterr())
        options.chmod(0o644)
        assert main(["backup", "verify", url]) == 2
        assert "its mode 0644 lets every user" in capsys.readouterr().err
        assert "s3cret" not in said
    finally:
        fsspec.register_implementation("memory", memory, clobber=True)
    with open_quick(tmp_path / "new") as manager:
        assert contents(manager, 0, PASSWORD) == numbered(100)
