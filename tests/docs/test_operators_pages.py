"""The how-tos for operators: their commands run as they are printed, and print what the pages show."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from pybk import ClusterAdmin, LedgerManager, Secret
from pybk.feature_level import NEWEST_LEVEL, FeatureLevel
from pybk.metadata import authenticated_values
from pybk.operations import cluster_admin
from pybk.testing import SECRET, TestCluster
from pybk.version import __version__
from tests.cluster.inside import make_cluster
from tests.docs.operating import SCALED, Hosts
from tests.paths import ROOT
from tests.ports import free_port
from tests.private_files import write_private
from tests.storage.real_store import python_path
from tests.waiting import wait_until
from tests.zookeeper_server import ZooKeeperServer, missing, zookeeper_server

__all__ = ["zookeeper_server"]

PASSWORD = b"the password of the ledgers"
SCALED_PATH = os.pathsep.join([str(SCALED), python_path()])
SCALED_WAITS = ((cluster_admin, "REQUESTS_SECONDS", 1.0), (authenticated_values, "SECRETS_AGE_SECONDS", 1.0))
NAMES = ("b1", "b2", "b3", "b4")

pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl, which makes secrets"),
    pytest.mark.sampled(one_in=6, using="_quick", group="documents"),
]


class Production(Hosts):
    """Four bookies that a page administers, and some ledgers; the times of repairs are scaled down.

    Attributes:
        url: Where the metadata are.
    """

    def __init__(self, directory: Path) -> None:
        self._http = f"127.0.0.1:{free_port()}"
        super().__init__(directory, {"PYBK_PROFILE": "prod"}, {"127.0.0.1:9464": self._http})
        self.path = SCALED_PATH
        self.url = f"lmdb://{self.place('/srv/pybk/metadata')}"

    def begin(self, level: FeatureLevel = NEWEST_LEVEL) -> None:
        """Make the cluster, and start its bookies."""
        for place in ("/etc/pybk", "/var/lib/pybk", "/srv/pybk", "/backup", "/etc/prometheus"):
            self.place(place).mkdir(parents=True)
        secret = self.place("/etc/pybk/cluster-secret")
        secret.touch(0o600)
        secret.write_text(os.urandom(16).hex())
        profile = self.directory / ".config" / "pybk" / "profiles" / "prod.toml"
        profile.parent.mkdir(parents=True)
        profile.write_text(f'metadata = "{self.url}"\nsecret_file = "{secret}"\n')
        make_cluster(self.place("/srv/pybk"), secret.read_bytes(), level)
        for name in (*NAMES, "b5"):
            self.configure(name, self._http if name == "b1" else "127.0.0.1:0")
        with ThreadPoolExecutor() as pool:
            assert set(pool.map(lambda name: self.run(f"systemctl start pybk-bookie@{name}"), NAMES)) == {(0, "")}

    def configure(self, name: str, http: str) -> None:
        """Write the file of options of a bookie."""
        self.place(f"/etc/pybk/{name}.toml").write_text(
            f"""[bookie]
listen = ["tcp://127.0.0.1:*"]

[cluster]
metadata = "{self.url}"
secret_file = "{self.place("/etc/pybk/cluster-secret")}"

[http]
listen = "{http}"
"""
        )

    def fill(self) -> None:
        """Have short graces, and write closed ledgers to three bookies each."""
        assert self.run("pybk cluster settings set repair.grace_s=1 repair.surplus_delay_s=1")[0] == 0
        with self.connect() as client:
            for _ in range(6):
                with client.create_ledger(password=PASSWORD) as writer:
                    writer.append(b"an entry")
            admin = ClusterAdmin(client)
            wait_until(lambda: admin.status().verdict == "ok" and not admin.status().reasons, pause_s=0.1)

    def connect(self) -> LedgerManager:
        """Return a client."""
        secret = Secret(file=str(self.place("/etc/pybk/cluster-secret")))
        return LedgerManager.connect(self.url, cluster_secret=secret)


@contextmanager
def cluster(directory: Path) -> Iterator[Production]:
    """Have a cluster with some ledgers until the end of the block."""
    made = Production(directory)
    try:
        made.begin()
        made.fill()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    """A cluster that several pages share; each leaves it whole."""
    with cluster(tmp_path_factory.mktemp("production")) as made:
        yield made


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands wait as little as the bookies do."""
    for owner, name, value in SCALED_WAITS:
        monkeypatch.setattr(owner, name, value)


# ---- making a cluster ------------------------------------------------------------------------------------------------


def test_three_bookies_on_one_host(tmp_path: Path) -> None:
    host = Hosts(tmp_path, {"PYTHONPATH": SCALED_PATH})
    host.place("/srv").mkdir(parents=True)
    try:
        host.follow("howto/three-bookies.md", again={"pybk bookie list": 0})
    finally:
        host.run("pybk dev purge")
        for file in host.place("/srv/pybk").glob("*.pid"):
            subprocess.run(["kill", "-9", file.read_text().strip()], check=False, stderr=subprocess.DEVNULL)


@pytest.mark.long
def test_three_bookies_on_three_hosts(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The hosts are addresses of this one; without Java, LMDB takes the place of ZooKeeper."""
    if missing() is None:
        server: ZooKeeperServer = request.getfixturevalue("zookeeper_server")
        url = server.url()
    else:
        url = f"lmdb://{tmp_path}/metadata"
    port, http = free_port(), free_port()
    names = {
        "zk://zoo-1.example.org:2181,zoo-2.example.org:2181,zoo-3.example.org:2181/pybk": url,
        **{f"bookie-{number}.example.org:3181": f"127.0.41.{number}:{port}" for number in (1, 2, 3)},
        "127.0.0.1:9464": f"127.0.41.1:{http}",
    }
    three = Hosts(tmp_path, {}, names)
    three.path = SCALED_PATH
    three.place("/etc/pybk").mkdir(parents=True)

    def copy() -> None:
        first = three.place("/etc/pybk/b1.toml").read_text()
        for number in (2, 3):
            file = three.place(f"/etc/pybk/b{number}.toml")
            file.write_text(first.replace("127.0.41.1", f"127.0.41.{number}").replace("rack-1", f"rack-{number}"))

    try:
        three.follow("howto/three-hosts.md", before={"pybk config check": copy})
    finally:
        three.close()


# ---- administering it ------------------------------------------------------------------------------------------------


def test_replace_a_disk(production: Production) -> None:
    production.follow("howto/replace-a-disk.md")


@pytest.mark.long
def test_replace_a_node(tmp_path: Path) -> None:
    with cluster(tmp_path) as made:
        made.follow("howto/replace-a-node.md", before={"pybk repair run": lambda: made.units["b2"].stop()})


@pytest.mark.long
def test_rotate_the_secret(production: Production) -> None:
    again = {"pybk secret switch": 3, "pybk secret status": 0, "pybk secret retire": 3}
    production.follow("howto/rotate-the-secret.md", again=again)


def test_monitor_and_alert(production: Production) -> None:
    pytest.importorskip("prometheus_client")
    found = subprocess.run([ROOT / "tools" / "prometheus", "find"], capture_output=True, text=True, check=False)
    production.programs["promtool"] = None if found.returncode else Path(found.stdout.strip(), "promtool")
    production.follow("howto/monitor-and-alert.md")


def test_back_up_and_restore(production: Production, tmp_path: Path) -> None:
    write_private(production.place("/etc/pybk/passwords.toml"), f'default = "{PASSWORD.decode()}"\n'.encode())
    write_private(production.place("/etc/pybk/new-secret"), SECRET)
    with production.connect() as client, TestCluster(tmp_path / "new") as other:
        production.names |= {
            "zk://zoo-1.example.org:2181/pybk": production.url,
            "zk://zoo-9.example.org:2181/new": other.url,
        }
        ledgers = [each.ledger_id for each in client.ledgers()]
        deleting = partial(client.delete_ledger, ledgers[0], password=PASSWORD)
        production.follow("howto/back-up-and-restore.md", before={"pybk backup show": deleting})
        assert [each.ledger_id for each in other.connect().ledgers()] == ledgers


def older_version(directory: Path) -> Path:
    """Return a copy of the sources that is called an older version, and knows a feature level less."""
    shutil.copytree(ROOT / "src" / "pybk", directory / "pybk", ignore=shutil.ignore_patterns("__pycache__"))
    for file, text, other in (
        ("version.py", f'"{__version__}"', '"0.1.9"'),
        (
            "feature_level.py",
            "NEWEST_LEVEL: Final = FeatureLevel.SECRETS",
            "NEWEST_LEVEL: Final = FeatureLevel.STREAMS",
        ),
    ):
        source = (directory / "pybk" / file).read_text(encoding="utf-8")
        assert source.count(text) == 1
        (directory / "pybk" / file).write_text(source.replace(text, other), encoding="utf-8")
    return directory


@pytest.mark.long
def test_upgrade(tmp_path: Path) -> None:
    made = Production(tmp_path / "hosts")
    made.path = os.pathsep.join([str(SCALED), str(older_version(tmp_path / "older")), str(ROOT)])
    made.installed = lambda: setattr(made, "path", SCALED_PATH)

    def upgrade_others() -> None:
        assert __version__ in made.run("pybk bookie list")[1]
        assert made.run("pybk cluster upgrade --finalize")[0] == 1
        for name in ("b3", "b4"):
            assert made.run(f"systemctl restart pybk-bookie@{name}") == (0, "")

    try:
        made.begin(FeatureLevel.STREAMS)
        made.follow(
            "howto/upgrade.md",
            before={"pybk cluster upgrade": upgrade_others},
            again={"pybk cluster status": 1, "curl": 0, "pybk bookie ok-to-stop": 3},
        )
        assert "0.1.9" not in made.run("pybk bookie list")[1]
    finally:
        made.close()
