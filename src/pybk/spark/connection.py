"""Connections to stores and clusters: one per process and store or cluster, shared by all its tasks."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk import manager as handles
from pybk import storage
from pybk.config import StoreConfig
from pybk.credentials import Credentials, Secret
from pybk.errors import UsageError
from pybk.flags import LedgerType
from pybk.ledger.keys import LedgerSeal, seal_of
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.local_backend import StoreBackend
from pybk.spark.executors.executor import local_bookie
from pybk.storage.format.extent import Extent

if TYPE_CHECKING:
    from pybk.backend import LedgerBackend
    from pybk.metadata.cluster import ClusterMetadata

_LMDB: Final = "lmdb://"


@dataclass(frozen=True, slots=True)
class StoreOrCluster:
    """The location of ledgers: either the directory of an embedded store, or a cluster.

    It can be pickled; a secret that was given directly, not by file or environment, is pickled with it.

    Attributes:
        path: The store's directory.
        metadata_uri: The URL of the cluster's metadata store.
        secret: The secret of the cluster.
    """

    path: str | None = None
    metadata_uri: str | None = None
    secret: Secret = field(default_factory=Secret)

    def __str__(self) -> str:
        """Return the directory or URL, without secrets."""
        return str(self.metadata_uri if self.path is None else self.path)


class Connection(NamedTuple):
    """A connection to a store or cluster; closed when the process ends.

    Attributes:
        manager: The ledger manager; read-only for an embedded store, which another process may be writing.
        metadata: The cluster's metadata, None for an embedded store.
        backend: The manager's backend, for jobs that read single replicas.
    """

    manager: LedgerManager
    metadata: ClusterMetadata | None
    backend: LedgerBackend


_Key = tuple[StoreOrCluster, str | None, str | None, tuple[int, int] | None]

_open: dict[_Key, Connection] = {}
_opener = os.getpid()
_lock = threading.Lock()


def connection(where: StoreOrCluster, near: str | None = None, directory: str | None = None) -> Connection:
    """Return this process's connection to a store or cluster; the first call opens it.

    Args:
        where: The store or cluster.
        near: The name of the bookie that reads and new ensembles prefer while it is registered; None for none.
        directory: The directory of that bookie, whose files are read directly if possible; None to send it requests.

    Returns:
        The connection. The process shares it, so do not close it. A forked process opens its own. A directory that was
        replaced since the last call is opened again.

    Raises:
        UsageError: The URL or the secret is not valid, or the directory does not exist.
        MetadataError: The cluster cannot be reached, or the secret is wrong.
        CookieError, CorruptError: The store cannot be read.

    Threads: any.
    Cost: A few milliseconds for the first call, a look-up afterwards.
    """
    global _opener
    with _lock:
        if _opener != os.getpid():  # those of the parent cannot be used in this process, which must not close them
            _open.clear()
            _opener = os.getpid()
        key = (where, near, directory, _directory(where))
        found = _open.get(key)
        if found is None:
            _close_replaced(key)
            found = _open[key] = _connect(where, near, directory)
        return found


def _close_replaced(key: _Key) -> None:
    """Close connections to a directory that was replaced, because a process may open a path only once."""
    for old in [old for old in _open if old[0] == key[0] and old[-1] != key[-1]]:
        _open.pop(old).manager.close()


def task_connection(where: StoreOrCluster) -> Connection:
    """Return this process's connection to a store or cluster; it prefers the bookie of this task's executor.

    Entries of that bookie are read from its files, without requests.

    Args:
        where: The store or cluster.

    Returns:
        As ``connection``. Outside of a task, or if the executor has no bookie, no bookie is preferred.

    Raises:
        PybkError: As ``connection``.
    """
    local = None if where.metadata_uri is None else local_bookie(where.metadata_uri)
    return connection(where) if local is None else connection(where, local.bookie_id, local.directory)


def _directory(where: StoreOrCluster) -> tuple[int, int] | None:
    """Return the identity of the store's directory now, because it may be replaced; None if it does not exist."""
    path = where.path
    if path is None and where.metadata_uri is not None and where.metadata_uri.startswith(_LMDB):
        path = where.metadata_uri.removeprefix(_LMDB).partition("?")[0]
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _connect(where: StoreOrCluster, near: str | None, directory: str | None) -> Connection:
    if where.path is not None:
        if not os.path.isdir(where.path):
            raise UsageError(f"there is no directory {where.path} here; each machine that reads a store needs it")
        store = StoreBackend(storage.ReadOnlyStore.open(where.path, config=StoreConfig()))
        return Connection(LedgerManager(store), None, store)
    if where.metadata_uri is None:
        raise UsageError("a place is a path or a metadata URL; give one")
    backend = handles.connect.connect(where.metadata_uri, where.secret, StoreConfig(), near=near, directory=directory)
    return Connection(LedgerManager(backend), backend.membership.metadata, backend)


def refuse_bookie_directory(where: StoreOrCluster, ledgers: Iterable[LedgerMetadata]) -> None:
    """Raise an error if ledgers of a directory show that it is a bookie's, which has only parts of ledgers.

    Args:
        where: The directory, for the error; nothing is checked if it is a cluster.
        ledgers: Some or all of its ledgers.

    Raises:
        UsageError: It is the directory of a bookie.
    """
    if where.path is None:
        return
    for each in ledgers:
        if each.ledger_type in (LedgerType.BOOKIE, LedgerType.FENCE) or Extent.of(each) is not None:
            raise UsageError(
                f"{where} is the directory of a bookie, which has parts of ledgers; give the metadata URL of its "
                "cluster instead"
            )


def ledger_seal(found: Connection, metadata: LedgerMetadata, given: Credentials) -> LedgerSeal | None:
    """Return the verifier of a ledger's entries and seal, None if the password is wrong.

    Args:
        found: The connection to the ledger's store or cluster.
        metadata: The metadata of the ledger.
        given: The password or secret.

    Raises:
        SealMismatchError: The password is right, but the ledger's kind was changed after it was created.

    Cost: As ``pybk.ledger.keys.unlocked``; reads nothing.
    """
    return seal_of(found.backend.key_ring, found.backend.verifier, given, metadata)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


@atexit.register
def close_connections() -> None:
    """Close all connections of this process; later calls of ``connection`` open new ones."""
    with _lock:
        if _opener == os.getpid():
            for found in _open.values():
                found.manager.close()
        _open.clear()


os.register_at_fork(after_in_child=_after_fork)
