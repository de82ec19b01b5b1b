"""Clusters whose bookies all live in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pybk.config import StoreConfig
from pybk.credentials import ClusterSecret
from pybk.feature_level import NEWEST_LEVEL, FeatureLevel
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterIdentity, ClusterMetadata
from pybk.metadata.url import open_metadata
from pybk.transport.cluster_keys import ClusterKeys
from tests.internals import metadata_of, service_of
from tests.storage.real_store import QUICK
from tests.waiting import wait_until

SECRET = b"the secret that a cluster has ---"


def make_cluster(
    directory: Path, secret: bytes | None = SECRET, level: FeatureLevel = NEWEST_LEVEL, url: str = ""
) -> str:
    """Make a cluster in which passwords cost no scrypt; return its metadata URL, by default one in its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    url = url or f"lmdb://{directory}/metadata"

    def key_for(identity: ClusterIdentity) -> list[bytes]:
        assert secret is not None
        return [ClusterKeys.derive(secret, identity.cluster_id).metadata_key]

    key = None if secret is None else key_for
    ClusterMetadata(open_metadata(url), key_for=key, cost=2, level=level).close()
    return url


class Inside:
    """Some bookies of one cluster in this process.

    Attributes:
        url: The metadata store's.
        secret: The cluster's; None for none.
        given: What bookies and clients are given from now on, at first the secret.
        bookies: The managers of the bookies, by place.
        autorecovery: Whether the bookies repair the cluster; most tests want to see what happens without that.
    """

    def __init__(
        self,
        directory: Path,
        *,
        count: int = 3,
        secret: bytes | None = SECRET,
        scheme: str = "tcp",
        level: FeatureLevel = NEWEST_LEVEL,
        url: str = "",
        autorecovery: bool = False,
    ) -> None:
        self.directory = directory
        self.autorecovery = autorecovery
        self.secret = secret
        self.given: ClusterSecret | None = secret
        self.scheme = scheme
        self.url = make_cluster(directory, secret, level, url)
        self._stack = ExitStack()
        # The path of a socket has at most 107 bytes.
        self._sockets = self._stack.enter_context(TemporaryDirectory(prefix="pybk-"))
        with self._stack:
            self.bookies = [self.open_bookie(place) for place in range(count)]
            self._stack = self._stack.pop_all()

    def open_bookie(
        self, place: int, *, name: str | None = "", moved: bool = False, rack: str = "", **settings: Any
    ) -> LedgerManager:
        """Open a bookie; it is closed with the cluster."""
        listen = f"ipc://{self._sockets}/{place}" if self.scheme == "ipc" else "tcp://127.0.0.1:*"
        manager = LedgerManager.open(
            self.directory / f"bookie-{place}",
            listen=listen,
            metadata=self.url,
            cluster_secret=self.given,
            bookie_id=f"bookie-{place}" if name == "" else name,
            moved=moved,
            rack=rack,
            autorecovery=self.autorecovery,
            config=StoreConfig(**{**QUICK, **settings}),
        )
        self._stack.callback(manager.close)
        return manager

    def connect(self, **settings: Any) -> LedgerManager:
        """Return another client; it is closed with the cluster."""
        manager = LedgerManager.connect(
            self.url, cluster_secret=self.given, config=StoreConfig(**{**QUICK, **settings})
        )
        self._stack.callback(manager.close)
        return manager

    def wait_for_copies(self, ledger_id: int, count: int) -> None:
        """Wait until each bookie of a ledger has so many entries: an append returns once a quorum has them.

        Args:
            ledger_id: A ledger each of whose bookies gets every entry.
            count: The number of its entries.
        """
        ensemble = metadata_of(self.bookies[0]).read_ledger(ledger_id).metadata.fragments[0].ensemble
        replicas = [each.replicas for each in map(service_of, self.bookies) if each.bookie in ensemble]
        wait_until(lambda: all(each.count_entries(ledger_id) == count for each in replicas), "all copies")

    def close(self) -> None:
        """Close all clients and bookies."""
        self._stack.close()


@contextmanager
def inside(directory: Path, **arguments: Any) -> Iterator[Inside]:
    """Run a cluster in this process; arguments as for ``Inside``."""
    cluster = Inside(directory, **arguments)
    try:
        yield cluster
    finally:
        cluster.close()
