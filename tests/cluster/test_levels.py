"""Clusters of members of several versions: the first released one, run from the repository's history, and this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest

from pybk.admin.cli import main
from pybk.bookie.directory_identity import CLUSTER_KEY
from pybk.errors import NotEnoughBookiesError
from pybk.feature_level import FeatureLevel
from pybk.flags import LedgerType
from pybk.manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from tests.client.test_limbo_repair import PASSWORD, check, fill, service_of
from tests.cluster.inside import SECRET, inside
from tests.internals import cluster_backend_of
from tests.paths import ROOT
from tests.waiting import wait_until

FIRST_RELEASE = "6d45d92"

WRITE = """
import sys
from pybk import LedgerManager
url, count = sys.argv[1:]
with LedgerManager.connect(url, cluster_secret=sys.stdin.buffer.read()) as manager:
    with manager.create_ledger(password=b"correct horse", ensemble_size=3) as writer:
        writer.append_many([b"entry %d " % number * 20 for number in range(int(count))])
    print(writer.ledger_id)
"""

READ = """
import sys
from pybk import LedgerManager
url, ledger_id, count = sys.argv[1:]
with LedgerManager.connect(url, cluster_secret=sys.stdin.buffer.read()) as manager:
    with manager.open_ledger(int(ledger_id), password=b"correct horse") as reader:
        found = [entry.payload for entry in reader.read(0, int(count) - 1)]
    assert found == [b"entry %d " % number * 20 for number in range(int(count))], found
"""


@pytest.fixture(scope="module")
def first_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the sources of the first released version."""
    made = subprocess.run(["git", "archive", FIRST_RELEASE, "src"], cwd=ROOT, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"the repository's history lacks {FIRST_RELEASE}: {made.stderr.decode()}")
    target = tmp_path_factory.mktemp("first-release")
    with tarfile.open(fileobj=BytesIO(made.stdout)) as archive:
        archive.extractall(target, filter="data")
    return target / "src"


def run_old(source: Path, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program on an older version."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        input=SECRET.decode(),
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )


@contextmanager
def old_bookie(source: Path, directory: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    """Run a bookie of an older version, named like its directory."""
    command = [sys.executable, "-c", "import sys; from pybk.admin.cli import main; sys.exit(main())"]
    command += [
        "bookie",
        str(directory),
        "--listen",
        "tcp://127.0.0.1:*",
        "--metadata",
        url,
        "--id",
        directory.name,
        "--json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYBK_CLUSTER_SECRET": SECRET.decode()}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def serving(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["addresses"]


def level_of(manager: LedgerManager) -> FeatureLevel:
    return cluster_backend_of(manager).feature_level


def test_members_of_two_versions_work_together_until_the_level_is_raised(
    tmp_path: Path, first_release: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with inside(tmp_path, count=0, level=FeatureLevel.BASE) as cluster:
        monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
        with old_bookie(first_release, tmp_path / "old", cluster.url) as old:
            serving(old)
            for place in (1, 2):
                cluster.bookies.append(cluster.open_bookie(place))
            client = cluster.connect()
            assert level_of(client) is FeatureLevel.BASE
            ours = fill(client, 30, ensemble_size=3)
            read = run_old(first_release, READ, cluster.url, ours, 30)
            assert read.returncode == 0, read.stderr
            wrote = run_old(first_release, WRITE, cluster.url, 30)
            assert wrote.returncode == 0, wrote.stderr
            theirs = int(wrote.stdout)
            check(client, theirs, 30)
            assert main(["upgrade", cluster.url, "--finalize"]) == 1
            assert "bookie old runs pybk before 0.2" in capsys.readouterr().out
            assert level_of(client) is FeatureLevel.BASE
        wait_until(lambda: "old" not in cluster_backend_of(client).membership.bookies)
        cluster.bookies.append(cluster.open_bookie(3))
        assert main(["upgrade", cluster.url, "--finalize"]) == 0
        wait_until(lambda: level_of(client) is FeatureLevel.SEALS)
        for ledger_id in (ours, theirs, fill(client, 30, ensemble_size=3)):
            check(client, ledger_id, 30)
        refused = run_old(first_release, READ, cluster.url, theirs, 30)
        assert "UnsupportedFormatError" in refused.stderr
        with old_bookie(first_release, tmp_path / "old", cluster.url) as old:
            assert old.wait(60) != 0
            assert old.stderr is not None
            assert "format 2" in old.stderr.read()


def test_a_bookie_that_is_too_old_is_named_and_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with inside(tmp_path, count=2) as cluster:
        monkeypatch.setattr("pybk.bookie.server.NEWEST_LEVEL", FeatureLevel.BASE)
        old = cluster.open_bookie(2)
        client = cluster.connect()
        with pytest.raises(NotEnoughBookiesError, match="bookie-2 too old for the cluster's feature level"):
            client.create_ledger(password=PASSWORD, ensemble_size=3)
        old.close()


def test_a_bookie_keeps_a_copy_of_the_clusters_own_value(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster:
        replicas = service_of(cluster.bookies[0]).replicas
        kept = [found for found in replicas.store.ledgers() if found.ledger_type == LedgerType.BOOKIE]
        metadata = cluster_backend_of(cluster.bookies[0]).membership.metadata
        assert isinstance(metadata, ClusterMetadata)
        about = json.loads(kept[0].custom_metadata[CLUSTER_KEY])
        assert {"cluster_id", "salt", "cost", "level", "proofs"} <= set(about)
        assert kept[0].custom_metadata[CLUSTER_KEY] == metadata.about
