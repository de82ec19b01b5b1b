"""``pybk metadata``: export, check, restore and rebuild."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from pybk import LedgerManager
from pybk.admin.cli import main
from tests.cluster.inside import SECRET, inside

PASSWORD = b"p"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cluster of three closed bookies with one ledger, whose metadata were exported to ``export``."""
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    with inside(tmp_path) as cluster:
        with cluster.connect().create_ledger(password=PASSWORD) as writer:
            writer.append(b"entry")
        url = cluster.url
    assert main(["metadata", "export", url, str(tmp_path / "export")]) == 0
    return url


def directories(tmp_path: Path) -> list[str]:
    return [str(tmp_path / f"bookie-{place}") for place in range(3)]


def readable(tmp_path: Path, url: str) -> None:
    """Check that the ledger can be read once the bookies run; they find the cluster that there is."""
    bookies = [
        LedgerManager.open(path, listen="tcp://127.0.0.1:*", metadata=url, cluster_secret=SECRET)
        for path in directories(tmp_path)
    ]
    with (
        LedgerManager.connect(url, cluster_secret=SECRET) as client,
        client.open_ledger(0, password=PASSWORD) as reader,
    ):
        assert [entry.payload for entry in reader.read(0, 0)] == [b"entry"]
    for manager in bookies:
        manager.close()


def test_an_export_says_what_it_has_and_is_checked(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["metadata", "export", url, str(tmp_path / "another")]) == 0
    assert "1 ledger" in capsys.readouterr().out
    assert main(["metadata", "export", url, str(tmp_path / "export")]) == 2
    assert "not overwritten" in capsys.readouterr().err
    for source in (url, str(tmp_path / "export")):
        assert main(["metadata", "check", source]) == 0
        assert "0 problems" in capsys.readouterr().out
        assert main(["metadata", "check", source, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ledgers"] == 1
    (tmp_path / "export").write_bytes(b"{}\n")
    assert main(["metadata", "check", str(tmp_path / "export")]) == 1
    assert main(["metadata", "check", str(tmp_path)]) == 2
    capsys.readouterr()
    assert main(["metadata", "check", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith(
        "pybk: nowhere does not exist; PATH takes the metadata URL of a cluster: "
    )


def test_an_emptied_store_is_rebuilt_once_somebody_agrees(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(tmp_path / "metadata")
    command = ["metadata", "rebuild", url, *directories(tmp_path), "--all-directories"]
    assert main(command) == 3
    assert "nothing was changed" in capsys.readouterr().err
    assert main([*command, "--dry-run"]) == 0
    assert not (tmp_path / "metadata").exists()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for answer, status in (("y", 3), (url, 0)):
        monkeypatch.setattr(sys.stdin, "readline", lambda answer=answer: f"{answer}\n", raising=False)
        assert main(command) == status
    said = capsys.readouterr().out
    assert "1 ledger made again from directories, in recovery: 0" in said
    assert "no bookie keeps pointers" in said
    readable(tmp_path, url)


def test_an_export_is_restored(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = str(tmp_path / "export")
    assert main(["metadata", "restore", url, export, "--yes"]) == 2
    assert "is not empty" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "metadata")
    assert main(["metadata", "restore", url, export, "--new-epoch", "--same-epoch"]) == 2
    assert main(["metadata", "restore", url, export, "--yes", "--json", "--new-epoch"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["written"], done["limbo"], done["known"]) == (True, True, 1)
    assert not any("no bookie keeps pointers" in note for note in done["notes"]), "the export has what there was"
    readable(tmp_path, url)
    shutil.rmtree(tmp_path / "metadata")
    assert main(["metadata", "restore", url, export, "--yes", "--same-epoch"]) == 0  # older than what bookies saw
    assert main(["metadata", "check", url]) == 0
    with pytest.raises(Exception, match="put back to an older state"):
        readable(tmp_path, url)
    assert main(["metadata", "check", url]) == 1
    options = [option for path in directories(tmp_path) for option in ("--directory", path)]
    assert main(["metadata", "restore", url, *options, "--all-directories", "--yes"]) == 0
    readable(tmp_path, url)
