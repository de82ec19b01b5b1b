"""Builds the cluster backend of ``LedgerManager.connect``, and that of ``open(..., metadata=...)`` with its bookie."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from pybk.bookie.advertising import check_advertised
from pybk.bookie.local_reader import LocalReader
from pybk.bookie.server import BookieServer
from pybk.client.backend import ClusterBackend
from pybk.client.membership import Membership
from pybk.config import StoreConfig
from pybk.credentials import ClusterSecret, cluster_secrets
from pybk.errors import MetadataError, PybkError
from pybk.flags import StorageHint
from pybk.healing.autorecovery import Autorecovery
from pybk.metadata.cluster import ClusterMetadata, KeyFor
from pybk.metadata.epochs import outdated
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.url import open_metadata
from pybk.metrics import Metrics
from pybk.spans import operation
from pybk.storage.directories import find_cookie
from pybk.storage.io.filesystem import OsFileSystem
from pybk.transport.client_links import Links
from pybk.transport.cluster_keys import HeldKeys
from pybk.transport.curve import check_address

logger = logging.getLogger(__name__)


def open_cluster(
    url: str, secret: ClusterSecret | None, *, create: bool, mending: bool = False
) -> tuple[ClusterMetadata, HeldKeys | None]:
    """Open a cluster's metadata store.

    Args:
        url: ``zk://host:port,host:port/path`` or ``lmdb:///path``.
        secret: The cluster's secret, or where it is found; None for a cluster without one.
        create: Create the cluster if it does not exist.
        mending: Open it even if its metadata store was put back to an older state.

    Returns:
        The metadata, and the keys of connections, which follow the secrets of the cluster; None without a secret.

    Raises:
        UsageError: The URL or the secret is invalid.
        MetadataError: The store cannot be reached, or the cluster has another secret.
        MetadataOutdatedError: The store was put back to an older state, or emptied.
    """
    secrets = cluster_secrets(secret)
    store = open_metadata(url, create=create)
    try:
        if secrets is None:
            return ClusterMetadata(store, create=create, mending=mending), None
        held = HeldKeys()
        metadata = ClusterMetadata(
            store,
            key_for=key_for(secrets, held),
            create=create,
            mending=mending,
            on_keys=lambda keys: held.hold([keys.by_epoch[epoch] for epoch in _in_use(keys)]),
        )
        return metadata, held
    except BaseException:
        store.close()
        raise


def _in_use(keys: MetadataKeys) -> list[int]:
    """Return the epochs of the secrets that this process was given, the current one first."""
    return sorted(keys.held, key=lambda epoch: epoch != keys.current)


def key_for(secrets: Callable[[], tuple[bytes, ...]] | None, held: HeldKeys | None = None) -> KeyFor | None:
    """Return the function that derives the metadata keys from a cluster's secrets, as ``ClusterMetadata`` takes it.

    Args:
        secrets: The result of ``cluster_secrets``; None for a cluster without a secret.
        held: Keeps the keys that are derived; None for an object of the function's own.
    """
    if secrets is None:
        return None
    known = HeldKeys() if held is None else held
    return lambda identity: [known.derive(secret, identity.cluster_id).metadata_key for secret in secrets()]


def open_cluster_for(
    path: str, url: str, secret: ClusterSecret | None, tiers: Mapping[StorageHint, str | Sequence[str]] | None = None
) -> tuple[ClusterMetadata, HeldKeys | None]:
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
    url: str,
    secret: ClusterSecret | None,
    config: StoreConfig,
    *,
    near: str | None = None,
    directory: str | None = None,
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
        logger.warning("bookie %s is asked for its entries, because its directory cannot be read: %s", bookie_id, error)
        return None


def join(
    path: str,
    listen: Sequence[str],
    url: str,
    secret: ClusterSecret | None,
    config: StoreConfig,
    *,
    tiers: Mapping[StorageHint, str | Sequence[str]] | None = None,
    bookie_id: str | None = None,
    rack: str = "",
    moved: bool = False,
    replace_lost: bool = False,
    advertise: Sequence[str] = (),
    advertise_check: bool = True,
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
        check_advertised(address)
    with operation(config.on_span, "pybk.bookie.start", location=path) as starting:
        metadata, keys = open_cluster_for(path, url, secret, tiers)
        metrics = Metrics()
        with ExitStack() as undo:
            undo.callback(metadata.close)
            bookie = BookieServer.open(
                path,
                listen,
                metadata=metadata,
                keys=keys,
                config=replace(config, on_span=None),  # requests carry no trace, so what a bookie does has no parent
                tiers=tiers,
                bookie_id=bookie_id,
                rack=rack,
                moved=moved,
                replace_lost=replace_lost,
                advertise=advertise,
                advertise_check=advertise_check,
                metrics=metrics,
            )
            undo.callback(bookie.close)
            membership = Membership(metadata, bookie.bookie.bookie_id, metrics)
            backend = ClusterBackend(
                url, membership, lambda: Links(keys, own=(bookie.bookie, bookie.server)), config, bookie
            )
            undo.pop_all()
            undo.callback(backend.close)
            if autorecovery:
                backend.companion = Autorecovery(backend, bookie)
            undo.pop_all()
        starting.note(bookie=bookie.bookie.bookie_id)
    return backend
