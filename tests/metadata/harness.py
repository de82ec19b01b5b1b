"""The three kinds of stores, as the conformance suite needs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from pybk.metadata import lmdb_rows
from pybk.metadata.lmdb_store import LmdbMetadataStore
from pybk.metadata.store import MetadataStore
from pybk.metadata.url import open_metadata
from tests.metadata.simulated_store import SimMetadataStore, SimServer
from tests.waiting import WAIT_S
from tests.zookeeper_server import LONG_SESSION_S, ZooKeeperServer, missing


def wait_for(condition: Callable[[], bool], wait_s: float = WAIT_S) -> bool:
    """Wait until something holds; say whether it does."""
    deadline = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Mirror:
    """A copy of the keys below a key and their versions, kept by a feed as its users are to do.

    Args:
        store: The store.
        key: The key.

    Attributes:
        versions: The copy.
        nones: How often everything was read.
        reported: How many keys were reported.
    """

    def __init__(self, store: MetadataStore, key: str) -> None:
        self.versions: dict[str, int] = {}
        self.nones = 0
        self.reported = 0
        self._store = store
        self._key = key
        self.watch = store.watch_below(key, self._take)

    def _take(self, keys: frozenset[str] | None) -> None:
        if keys is None:
            self.nones += 1
            self.versions = versions_below(self._store, self._key)
            return
        self.reported += len(keys)
        found = sorted(keys)
        for key, node in zip(found, self._store.get_many(found), strict=True):
            if node is None:
                self.versions.pop(key, None)
            else:
                self.versions[key] = node.version


def versions_below(store: MetadataStore, key: str) -> dict[str, int]:
    """Return the version of each key below a key, at any depth."""
    below = [f"{key}/{name}" for name in store.children(key)]
    found = {name: node.version for name, node in zip(below, store.get_many(below), strict=True) if node is not None}
    for name in below:
        found.update(versions_below(store, name))
    return found


class World(Protocol):
    """One store, empty."""

    def open(self) -> MetadataStore:
        """Open it; closed at the end of the test."""
        ...

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Let the store call what is due until something holds; say whether it does."""
        ...

    def end_session(self, store: MetadataStore) -> None:
        """End a store's session without the store's doing."""
        ...


class SimWorld:
    """Stores in memory."""

    def __init__(self) -> None:
        self.server = SimServer()

    def open(self) -> SimMetadataStore:
        """See ``World.open``."""
        return self.server.store()

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """See ``World.wait_for``."""
        while not condition():
            if not self.server.deliver():
                return condition()
        return True

    def end_session(self, store: MetadataStore) -> None:
        """See ``World.end_session``."""
        self.server.expire(store.session())


class LmdbWorld:
    """Stores on an LMDB environment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stores: list[MetadataStore] = []

    def open(self) -> MetadataStore:
        """See ``World.open``."""
        store = open_metadata(f"lmdb://{self.path}", lease_time_s=LONG_SESSION_S)
        self.stores.append(store)
        return store

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """See ``World.wait_for``."""
        return wait_for(condition)

    def end_session(self, store: MetadataStore) -> None:
        """See ``World.end_session``: as another process does that finds no sign of life."""
        session = store.session()
        with LmdbWorld(self.path).other() as other:
            other.change(lambda transaction, number: lmdb_rows.end_session(transaction, session))

    def other(self) -> _Other:
        """Return a store that is closed at the end of the ``with``."""
        return _Other(str(self.path))


class _Other:
    def __init__(self, path: str) -> None:
        self.store = LmdbMetadataStore(path)

    def __enter__(self) -> LmdbMetadataStore:
        return self.store

    def __exit__(self, *_: object) -> None:
        self.store.close()


class ZooKeeperWorld:
    """Stores on a real server."""

    def __init__(self, server: ZooKeeperServer) -> None:
        self.url = server.url()
        self.stores: list[MetadataStore] = []

    def open(self) -> MetadataStore:
        """See ``World.open``."""
        store = open_metadata(self.url, lease_time_s=LONG_SESSION_S, timeout_s=WAIT_S)
        self.stores.append(store)
        return store

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """See ``World.wait_for``."""
        return wait_for(condition)

    def end_session(self, store: MetadataStore) -> None:
        """See ``World.end_session``: by a second connection that takes the session over and closes it."""
        end_zookeeper_session(store)


def end_zookeeper_session(store: MetadataStore) -> None:
    """End a session through a second connection with the same session id and password."""
    from kazoo.client import KazooClient

    from pybk.metadata.zookeeper_store import ZooKeeperMetadataStore

    assert isinstance(store, ZooKeeperMetadataStore)
    session = store.session()
    # The client may take its session back before the other connection has closed it: then once more.
    while store.session() == session:
        double = KazooClient(hosts=store.hosts, client_id=store.client.client_id, timeout=LONG_SESSION_S)
        double.start(WAIT_S)
        double.stop()
        double.close()
        wait_for(lambda: store.session_id not in (0, session), 1)


@pytest.fixture(params=["sim", "lmdb", "zookeeper"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A store of each kind, empty."""
    if request.param == "sim":
        yield SimWorld()
        return
    if request.param == "zookeeper":
        reason = missing()
        if reason is not None:
            pytest.skip(reason)
        made: LmdbWorld | ZooKeeperWorld = ZooKeeperWorld(request.getfixturevalue("zookeeper_server"))
    else:
        made = LmdbWorld(tmp_path / "metadata")
    yield made
    for store in made.stores:
        store.close()
