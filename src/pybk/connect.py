"""Builds the cluster backend of ``LedgerManager.connect``, and that of ``open(..., metadata=...)`` with its bookie."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from pybk.bookie.local_reader import LocalReader
from pybk.bookie.server import BookieServer
from pybk.client.backend import ClusterBackend
from pybk.client.membership import Membership
from pybk.config import StoreConfig
from pybk.errors import MetadataError, PybkError, UsageError
from pybk.flags import StorageHint
from pybk.healing.service import Autorecovery
from pybk.metadata.cluster import ClusterIdentity, ClusterMetadata
from pybk.metadata.epochs import outdated
from pybk.metadata.url import open_metadata
from pybk.metrics import Metrics
from pybk.storage.directories import find_cookie
from pybk.storage.io.filesystem import OsFileSystem
from pybk.transport.client_links import Links
from pybk.transport.cluster_keys import ClusterKeys
from pybk.transport.curve import check_address

logger = logging.getLogger(__name__)


def open_cluster(
    url: str, secret: bytes | None, *, create: bool, mending: bool = False
) -> tuple[ClusterMetadata, ClusterKeys | None]:
    """Open a cluster's metadata store.

    Args:
        url: ``zk://host:port,host:port/path`` or ``lmdb:///path``.
        secret: The cluster's secret, None for a cluster without one.
        create: Create the cluster if it does not exist.
        mending: Open it even if its metadata store was put back to an older state.

    Raises:
        UsageError: The URL or the secret is invalid.
        MetadataError: The store cannot be reached, or the cluster has another secret.
        MetadataOutdatedError: The store was put back to an older state, or emptied.
    """
    if secret is not None and not isinstance(secret, bytes):
        raise UsageError(f"cluster_secret takes bytes, not {type(secret).__name__}")
    store = open_metadata(url, create=create)
    try:
        if secret is None:
            return ClusterMetadata(store, create=create, mending=mending), None

        def key_for(identity: ClusterIdentity) -> bytes:
            return ClusterKeys.derive(secret, identity.cluster_id).metadata_key

        metadata = ClusterMetadata(store, key_for=key_for, create=create, mending=mending)
        return metadata, ClusterKeys.derive(secret, metadata.cluster_id)
    except BaseException:
        store.close()
        raise


def open_cluster_for(
    path: str, url: str, secret: bytes | None, tiers: Mapping[StorageHint, str | Sequence[str]] | None = None
) -> tuple[ClusterMetadata, ClusterKeys | None]:
    """Open a cluster's metadata store for the bookie of a directory; a new directory may create the cluster.

    Raises:
        MetadataOutdatedError: The directory was used before, and there is no cluster: its metadata store was emptied.
        UsageError, MetadataError: As ``open_cluster``.
    """
    used = find_cookie(OsFileSystem(), os.path.abspath(path), tiers) is not None
    try:
        return open_cluster(url, secret, create=not used)
    except MetadataError as error:
        if not used or type(error) is not MetadataError:
            raise
        raise outdated(f"{error}, but {path} is a bookie's directory that was used before") from error


def connect(
    url: str, secret: bytes | None, config: StoreConfig, *, near: str | None = None, directory: str | None = None
) -> ClusterBackend:
    """Return the backend of a process that is only a client of a cluster; raises as ``open_cluster``.

    Args:
        url: As for ``open_cluster``.
        secret: As for ``open_cluster``.
        config: Settings of handles.
        near: Name of a bookie, such as one on this host, that ensembles and reads prefer while it is registered.
        directory: The directory of that bookie, to read entries from its files if this process may; None: all entries
            are requested from bookies.
    """
    metadata, keys = open_cluster(url, secret, create=False)
    with ExitStack() as undo:
        undo.callback(metadata.close)
        local_reader = None
        if near is not None and directory is not None:
            local_reader = _open_local_reader(directory, metadata.cluster_id, near, config)
        if local_reader is not None:
            undo.callback(local_reader.close)
        backend = ClusterBackend(
            url, Membership(metadata, near), lambda: Links(keys), config, local_reader=local_reader
        )
        undo.pop_all()
    return backend


def _open_local_reader(directory: str, cluster_id: bytes, bookie_id: str, config: StoreConfig) -> LocalReader | None:
    """Return a reader of a bookie's files; None, with a warning in the log, if they cannot be read."""
    try:
        return LocalReader.open(directory, cluster_id=cluster_id, bookie_id=bookie_id, config=config)
    except (PybkError, OSError) as error:
        logger.warning("bookie %s is asked for what it has, as its directory cannot be read: %s", bookie_id, error)
        return None


def join(
    path: str,
    listen: Sequence[str],
    url: str,
    secret: bytes | None,
    config: StoreConfig,
    *,
    tiers: Mapping[StorageHint, str | Sequence[str]] | None = None,
    bookie_id: str | None = None,
    rack: str = "",
    moved: bool = False,
    replace_lost: bool = False,
    advertise: Sequence[str] = (),
    autorecovery: bool = True,
) -> ClusterBackend:
    """Return the backend of a process that is also a bookie, which serves when this returns.

    With ``autorecovery`` it also repairs the cluster in the background, until it is closed.

    Raises:
        PybkError: As ``open_cluster`` and ``BookieServer.open``.
    """
    for address in listen:  # before anything is made
        check_address(address, secret=secret is not None)
    for address in advertise:
        check_address(address, secret=True)
    metadata, keys = open_cluster_for(path, url, secret, tiers)
    metrics = Metrics()
    with ExitStack() as undo:
        undo.callback(metadata.close)
        bookie = BookieServer.open(
            path,
            listen,
            metadata=metadata,
            keys=keys,
            config=config,
            tiers=tiers,
            bookie_id=bookie_id,
            rack=rack,
            moved=moved,
            replace_lost=replace_lost,
            advertise=advertise,
            metrics=metrics,
        )
        undo.callback(bookie.close)
        membership = Membership(metadata, bookie.bookie.bookie_id, metrics)
        backend = ClusterBackend(url, membership, lambda: Links(keys), config, bookie)
        undo.pop_all()
        undo.callback(backend.close)
        if autorecovery:
            backend.companion = Autorecovery(backend, bookie)
        undo.pop_all()
    return backend
