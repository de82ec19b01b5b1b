"""Walks through the runbooks about the metadata store and about versions, which take clusters of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pybk import LedgerManager
from pybk.admin.profiles import Profile
from pybk.feature_level import FeatureLevel
from pybk.version import __version__
from tests.admin.dev.walking import PASSWORD, PAUSE_S, PAYLOAD, Walk, pybk, walk
from tests.cluster.inside import SECRET, make_cluster
from tests.cluster.scenarios.stage import stage
from tests.cluster.test_levels import old_bookie, older, serving
from tests.paths import ROOT
from tests.waiting import wait_until
from tests.zookeeper_server import ZooKeeperServer, zookeeper_server

__all__ = ["older", "walk", "zookeeper_server"]


def write_profile(directory: Path, url: str, patch: pytest.MonkeyPatch) -> None:
    """Have the profile of the commands be a cluster."""
    patch.setenv("XDG_CONFIG_HOME", str(directory / "config"))
    secret = directory / "secret"
    secret.touch(0o600)
    secret.write_bytes(SECRET)
    Profile(name="dev", metadata=url, secret_file=str(secret)).write()


# ---- the metadata store ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_metadata_store_is_down(
    zookeeper_server: ZooKeeperServer, walk: Walk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(tmp_path, zookeeper_server.url(), monkeypatch)
    url = Profile.read("dev").metadata
    with stage(tmp_path / "cluster", bookies=3, ledgers=3, load=False, url=url) as it:
        writer = it.client.create_ledger(password=PASSWORD)
        writer.append(PAYLOAD)
        before = {each.ledger_id: each.fragments for each in it.ledgers()}
        zookeeper_server.kill()
        writer.append(PAYLOAD)
        said = walk("cluster status", status=4)  # for longer than sessions and the grace last
        assert "no ZooKeeper server could be reached" in said
        for _ in range(100):
            writer.append(PAYLOAD)
        zookeeper_server.start()
        wait_until(lambda: len(it.metadata.list_bookies()) == len(it.cluster.bookies), pause_s=PAUSE_S)
        wait_until(lambda: it.report().get("phase") == "leading", pause_s=PAUSE_S)
        it.reports()
        walk("cluster probe")
        assert not it.marks()
        assert not it.copied()
        assert before == {each.ledger_id: each.fragments for each in it.ledgers() if each.ledger_id in before}
        assert writer.append(PAYLOAD) == 102
        writer.close()


# ---- versions --------------------------------------------------------------------------------------------------------

LEVEL = FeatureLevel.SEALS
NAMES = ("one", "two")
NEW = ROOT / "src"


class Versions:
    """A cluster of two bookies, each of which runs one version of pybk or another.

    Args:
        directory: Where its files are.
        old: The sources of the older version, which both run at first.
    """

    def __init__(self, directory: Path, old: Path) -> None:
        self.old = old
        self.url = make_cluster(directory, SECRET, level=LEVEL)
        self._directory = directory
        self._running: dict[str, ExitStack] = {}
        self._client = LedgerManager.connect(self.url, cluster_secret=SECRET)

    def begin(self) -> None:
        """Start the bookies, and write a ledger."""
        for name in NAMES:
            self.start(name, self.old)
        with self._client.create_ledger(password=PASSWORD, ensemble_size=len(NAMES)) as writer:
            writer.append(PAYLOAD)
        self._ledger = writer.ledger_id

    def close(self) -> None:
        """End everything."""
        self._client.close()
        for name in NAMES:
            self.stop(name)

    def start(self, name: str, source: Path) -> None:
        """Start a bookie of a version, or end it and start it again."""
        self.stop(name)
        self._running[name] = ending = ExitStack()
        process = ending.enter_context(old_bookie(source, self._directory / name, self.url))
        ending.callback(process.terminate)
        serving(process)

    def stop(self, name: str) -> None:
        """End a bookie, if it runs."""
        if name in self._running:
            self._running.pop(name).close()

    def check(self) -> None:
        """Check that the ledger can be read."""
        with self._client.open_ledger(self._ledger, password=PASSWORD) as reader:
            assert [entry.payload for entry in reader.read(0, 0)] == [PAYLOAD]


def newer(table: str) -> dict[str, bool]:
    """Return by bookie whether what `pybk bookie list` prints has this version, and not the older one."""
    lines = {line.split()[0]: line.split() for line in table.splitlines() if line.startswith(NAMES)}
    assert all((__version__ in words) != ("0.1.9" in words) for words in lines.values()), table
    return {name: __version__ in words for name, words in lines.items()}


@pytest.fixture
def versions(
    older: Callable[[FeatureLevel], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Versions]:
    directory = tmp_path / "cluster"
    write_profile(tmp_path, f"lmdb://{directory}/metadata", monkeypatch)
    old = older(LEVEL)
    (old / "pybk" / "version.py").write_text('__version__ = "0.1.9"\n')  # its number was not raised when it was left
    made = Versions(directory, old)
    try:
        made.begin()
        yield made
    finally:
        made.close()


@pytest.mark.long
def test_version_skew(versions: Versions, walk: Walk) -> None:
    versions.start("one", NEW)
    assert newer(walk("bookie list")) == {"one": True, "two": False}
    assert pybk("cluster", "upgrade", "--finalize", status=1)
    assert "ok to stop" in walk("bookie ok-to-stop", NAME="two")
    versions.start("two", NEW)
    assert "this is the newest level" in walk("cluster upgrade --finalize")
    assert newer(walk("bookie list")) == {"one": True, "two": True}
    versions.check()


@pytest.mark.long
def test_an_upgrade_is_rolled_back(versions: Versions, walk: Walk) -> None:
    versions.start("one", NEW)
    assert newer(walk("bookie list")) == {"one": True, "two": False}
    assert f"({LEVEL.name})" in walk("cluster upgrade", status=1)
    assert "ok to stop" in walk("bookie ok-to-stop", NAME="one")
    versions.start("one", versions.old)
    assert newer(walk("bookie list")) == {"one": False, "two": False}
    versions.check()
