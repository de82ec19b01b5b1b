"""Clusters of members of several versions: older ones, run from the repository's history, and this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from pybk import Log, LogEnd
from pybk.admin.cli import main
from pybk.bookie.directory_identity import CLUSTER_KEY
from pybk.errors import NotEnoughBookiesError
from pybk.feature_level import NEWEST_LEVEL, FeatureLevel
from pybk.flags import LedgerType
from pybk.ledger.ledger_metadata import Bookie
from pybk.manager.connect import open_cluster
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.underreplication import RepairReason
from tests.client.test_limbo_repair import PASSWORD, check, fill
from tests.cluster.inside import SECRET, inside
from tests.internals import cluster_backend_of, service_of
from tests.paths import ROOT
from tests.waiting import PROCESS_S, wait_until

pytestmark = pytest.mark.sampled(one_in=8, using="older", group="processes")

RELEASES = {FeatureLevel.BASE: "6d45d92", FeatureLevel.SEALS: "b8415ad", FeatureLevel.HEALING: "a2f9c75"}
"""A version of each older level: the first that was released, and the last one."""

RECENT = max(RELEASES)

SAID_OF = {
    FeatureLevel.BASE: "pybk before 0.2",
    FeatureLevel.SEALS: "which knows feature levels up to 1",
    FeatureLevel.HEALING: "which knows feature levels up to 2",
}
REFUSED_BY = {
    FeatureLevel.BASE: "format 2",
    FeatureLevel.SEALS: "feature level 4; this pybk knows levels up to 1",
    FeatureLevel.HEALING: "feature level 4; this pybk knows levels up to 2",
}

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


MARK = """
import sys
from pybk import LedgerManager
from pybk.ledger import Bookie
try:
    from pybk.connect import open_cluster
except ImportError:
    from pybk.cluster import open_cluster
url, ledger_id, first = sys.argv[1:]
with open_cluster(url, sys.stdin.buffer.read(), create=False)[0] as metadata:
    metadata.mark_under_replicated(int(ledger_id), Bookie("old", bytes(16)), int(first))
    print(*(f"{mark.ledger_id}:{mark.first_entry_id}" for mark in metadata.list_under_replicated()))
"""

OLD = Bookie("old", bytes(16))


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Callable[[FeatureLevel], Path]:
    """Return what returns the sources of the version of a level."""

    @cache
    def sources(level: FeatureLevel) -> Path:
        made = subprocess.run(["git", "archive", RELEASES[level], "src"], cwd=ROOT, capture_output=True, check=False)
        if made.returncode:
            pytest.skip(f"the repository's history lacks {RELEASES[level]}: {made.stderr.decode()}")
        target = tmp_path_factory.mktemp(f"level-{int(level)}")
        with tarfile.open(fileobj=BytesIO(made.stdout)) as archive:
            archive.extractall(target, filter="data")
        return target / "src"

    return sources


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
        try:
            yield process
        finally:
            process.kill()


def serving(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["addresses"]


def level_of(manager: LedgerManager) -> FeatureLevel:
    return cluster_backend_of(manager).feature_level


@pytest.mark.parametrize(
    "level", [*(pytest.param(level, marks=pytest.mark.long) for level in RELEASES if level < RECENT), RECENT]
)
def test_members_of_two_versions_work_together_until_the_level_is_raised(
    tmp_path: Path,
    older: Callable[[FeatureLevel], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: FeatureLevel,
) -> None:
    source = older(level)
    with inside(tmp_path, count=0, level=level) as cluster:
        monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
        with old_bookie(source, tmp_path / "old", cluster.url) as old:
            serving(old)
            for place in (1, 2):
                cluster.bookies.append(cluster.open_bookie(place))
            client = cluster.connect()
            assert level_of(client) is level
            ours = fill(client, 30, ensemble_size=3)
            read = run_old(source, READ, cluster.url, ours, 30)
            assert read.returncode == 0, read.stderr
            wrote = run_old(source, WRITE, cluster.url, 30)
            assert wrote.returncode == 0, wrote.stderr
            theirs = int(wrote.stdout)
            check(client, theirs, 30)
            assert main(["upgrade", cluster.url, "--finalize"]) == 1
            assert f"bookie old runs {SAID_OF[level]}" in re.sub(r"pybk 0\S+, ", "", capsys.readouterr().out)
            assert level_of(client) is level
        wait_until(lambda: "old" not in cluster_backend_of(client).membership.bookies)
        cluster.bookies.append(cluster.open_bookie(3))
        assert main(["upgrade", cluster.url, "--finalize"]) == 0
        wait_until(lambda: level_of(client) is NEWEST_LEVEL)
        for ledger_id in (ours, theirs, fill(client, 30, ensemble_size=3)):
            check(client, ledger_id, 30)
        refused = run_old(source, READ, cluster.url, theirs, 30)
        assert "UnsupportedFormatError" in refused.stderr
        with old_bookie(source, tmp_path / "old", cluster.url) as old:
            assert old.wait(PROCESS_S) != 0
            assert old.stderr is not None
            assert REFUSED_BY[level] in old.stderr.read()


LOG = """
import sys
from pybk import LedgerManager, Log, LogEnd
url = sys.argv[1]
with LedgerManager.connect(url, cluster_secret=sys.stdin.buffer.read()) as manager:
    with Log.open(manager, "log", password=b"correct horse", quorums=(1, 1, 1)) as log:
        with log.reader() as reader:
            found = [each.data for each in iter(lambda: reader.read(timeout=0), None)]
        assert found == [b"%d" % number for number in range(200)], found
        with log.subscribe("sub") as subscription:
            record = subscription.read(0)
            assert record.seq == 5, record
            subscription.ack(record)
        with log.writer() as writer:
            writer.append(b"200")
            writer.roll()
"""


def test_a_log_of_a_cluster_that_is_not_finalized_is_read_and_written_by_the_older_version(
    tmp_path: Path, older: Callable[[FeatureLevel], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record has more segments than a page, and becomes one of pages only once the level is raised."""
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    with inside(tmp_path, count=1, level=RECENT) as cluster:
        options: dict[str, Any] = {"password": PASSWORD, "quorums": (1, 1, 1)}
        with cluster.connect() as manager, Log.open(manager, "log", **options) as log:
            with log.writer() as writer:
                for number in range(200):
                    writer.append(b"%d" % number)
                    writer.roll()
            with log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
                subscription.ack_through(4)
        done = run_old(older(RECENT), LOG, cluster.url)
        assert done.returncode == 0, done.stderr
        assert main(["upgrade", cluster.url, "--finalize"]) == 0
        with cluster.connect() as manager, Log.open(manager, "log", **options) as log:
            with log.writer() as writer:
                writer.append(b"201")
            assert len(log.segments()) == 202
            with log.reader() as reader:
                found = [each.data for each in iter(lambda: reader.read(timeout=0), None)]
            assert found == [b"%d" % number for number in range(202)]
            with log.subscribe("sub") as subscription:
                record = subscription.read(0)
                assert record is not None
                assert record.seq == 6
        refused = run_old(older(RECENT), LOG, cluster.url)
        assert "UnsupportedFormatError" in refused.stderr


def test_a_bookies_directory_can_be_given_back_to_the_version_of_the_day_before(
    tmp_path: Path, older: Callable[[FeatureLevel], Path]
) -> None:
    level = RECENT
    with inside(tmp_path, count=1, level=level) as cluster:
        ledger_id = fill(cluster.connect(), 30, ensemble_size=1)
        cluster.bookies.pop().close()
        with old_bookie(older(level), cluster.directory / "bookie-0", cluster.url) as old:
            serving(old)
            check(cluster.connect(), ledger_id, 30)


@pytest.mark.long
@pytest.mark.parametrize("level", [FeatureLevel.BASE, FeatureLevel.SEALS])
def test_marks_are_read_and_written_by_members_that_know_no_reasons(
    tmp_path: Path, older: Callable[[FeatureLevel], Path], level: FeatureLevel
) -> None:
    with inside(tmp_path, count=0, level=level) as cluster:
        metadata, _ = open_cluster(cluster.url, SECRET, create=False)
        with metadata:
            metadata.mark_under_replicated(7, OLD, 5)
            metadata.mark_under_replicated(8, OLD, 0, reason=RepairReason.LOST)
            for ledger_id, first, found in ((7, 9, "7:5"), (7, 3, "7:3"), (8, 4, "8:4")):
                marked = run_old(older(level), MARK, cluster.url, ledger_id, first)
                assert marked.returncode == 0, marked.stderr
                assert found in marked.stdout.split()
            assert [(mark.ledger_id, mark.causes) for mark in metadata.marks()] == [
                (7, ((RepairReason.MISSING, 3),)),
                (8, ((RepairReason.MISSING, 4),)),
            ]


def test_a_bookie_that_is_too_old_is_named_and_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with inside(tmp_path, count=2) as cluster:
        monkeypatch.setattr("pybk.bookie.keeper.NEWEST_LEVEL", FeatureLevel.BASE)
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
