"""What helpers get of a cluster or a store: what commands show, and no secrets."""

from __future__ import annotations

import json
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pybk.admin.cli import main, whole_parser
from pybk.admin.cli.support import CLUSTER_COMMANDS, STORE_COMMANDS
from tests.cluster.inside import SECRET, inside
from tests.storage.real_store import open_quick

LOOKING = ("status", "check", "show", "orphans", "upgrade", "list", "files", "permissions")


def content(path: Path) -> dict[str, Any]:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as bundle:
        found = {}
        for member in bundle.getmembers():
            file = bundle.extractfile(member)
            assert file is not None
            found[Path(member.name).stem] = json.loads(file.read())
        return found


def test_a_bundle_has_commands_that_only_look() -> None:
    known = {" ".join(words) for words, _ in whole_parser().commands()}
    for command in (*CLUSTER_COMMANDS, *STORE_COMMANDS):
        words = [word for word in command.split() if not word.startswith("--")]
        assert " ".join(words) in known
        assert words[-1] in LOOKING
        assert not {"--finalize", "--narrow"} & set(command.split())


def test_a_bundle_of_a_cluster_and_of_a_store_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    with inside(tmp_path / "cluster") as cluster:
        with cluster.connect().create_ledger(password=b"the ledger's password") as writer:
            writer.append(b"an entry's payload")
        assert main(["support", "bundle", cluster.url, str(tmp_path / "c.tar.gz")]) == 0
        assert main(["support", "bundle", cluster.url, str(tmp_path / "c.tar.gz")]) == 2, "it exists"
    found = content(tmp_path / "c.tar.gz")
    assert found["cluster-status"]["printed"]["verdict"] == "warn"
    assert len(found["bookie-list---removed"]["printed"]["bookies"]) == 3
    assert set(found) == {"about", *(each.replace(" ", "-") for each in CLUSTER_COMMANDS)}
    for hidden in (SECRET.decode(), "the ledger's password", "an entry's payload"):
        assert hidden not in json.dumps(found)
    with open_quick(tmp_path / "store") as manager:
        manager.create_ledger(insecure=True).append(b"an entry's payload")
        assert main(["support", "bundle", str(tmp_path / "store"), str(tmp_path / "s.tar.gz"), "--json"]) == 0
    assert content(tmp_path / "s.tar.gz")["store-status"]["printed"]["problems"] == []
    assert main(["support", "bundle", str(tmp_path / "nothing"), str(tmp_path / "n.tar.gz")]) == 5
    assert "there is no store" in content(tmp_path / "n.tar.gz")["store-files"]["error"]


def test_a_bundle_has_the_ends_of_logs_and_what_ports_answer(tmp_path: Path) -> None:
    open_quick(tmp_path / "store").close()
    log = tmp_path / "service.log"
    log.write_text("early\n" + "x" * (1 << 20) + "\nlate: zk://user:s3cret@host/path\n")
    words = [
        str(tmp_path / "store"),
        str(tmp_path / "b.tar.gz"),
        "--log",
        str(log),
        "--metrics",
        "http://127.0.0.1:9/m",
    ]
    assert main(["support", "bundle", *words]) == 5, "nothing listens at the port of discard"
    found = content(tmp_path / "b.tar.gz")
    [text] = [value["text"] for name, value in found.items() if name.startswith("log-")]
    assert "early" not in text
    assert "late: zk://...@host/path" in text
    [answer] = [value for name, value in found.items() if name.startswith("metrics-")]
    assert "refused" in answer["error"]
