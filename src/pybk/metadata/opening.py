"""Opening a metadata store by its URL."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from pybk.errors import MetadataError, UsageError
from pybk.metadata.lmdb import LmdbTree
from pybk.metadata.tree import MetadataTree

if TYPE_CHECKING:
    from pybk.metadata.zookeeper import ZooKeeperTree

_KNOWN: Final = "lmdb:///absolute/path for the processes of one host, or zk://host:port[,host:port]/path for ZooKeeper"


def open_metadata(
    url: str, *, timeout_s: float = 10.0, session_timeout_s: float | None = None, create: bool = True
) -> MetadataTree:
    """Open a metadata store.

    Args:
        url: ``lmdb:///absolute/path``, a directory that is made if it is missing; or ``zk://host:port,host:port/path``.
        timeout_s: Deadline of each call, seconds.
        session_timeout_s: Seconds after which a process that gives no sign of life has lost its leases; None for the
            store's own: 5 for LMDB, 10 for ZooKeeper, which may bring it to between 2 and 20 of its ticks.
        create: Make the directory of an LMDB store if it is missing.

    Returns:
        The store; close it.

    Raises:
        UsageError: The URL names no metadata store, or ZooKeeper is asked for and its client is not installed.
        MetadataUnreachableError: No server answered in time.
        CorruptError, UnsupportedFormatError, OSError: The directory cannot be used.
    """
    for name, value in (("timeout_s", timeout_s), ("session_timeout_s", session_timeout_s)):
        if value is not None and not 0.05 <= value <= 3600:
            raise UsageError(f"{name} is {value!r}; it takes 0.05 to 3600 seconds")
    try:
        parts = urlsplit(url)
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"metadata URL {url!r}: {error}; use {_KNOWN}") from error
    if parts.query or parts.fragment:
        raise UsageError(f"metadata URL {url!r} has a query or a fragment; use {_KNOWN}")
    options = {} if session_timeout_s is None else {"session_timeout_s": session_timeout_s}
    if parts.scheme == "lmdb":
        path = unquote(parts.path)
        if parts.netloc or len(path) < 2 or "\0" in path:
            raise UsageError(f"metadata URL {url!r} needs three slashes and an absolute path; use {_KNOWN}")
        if not create and not os.path.isdir(path):
            raise MetadataError(f"there is no metadata store at {url}: check the URL, or start the first bookie")
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise MetadataError(f"{path} cannot be made: {error}; name a directory that can") from error
        return LmdbTree(path, timeout_s=timeout_s, **options)
    if parts.scheme == "zk":
        return _zookeeper()(_hosts(url, parts.netloc), _root(url, parts.path), timeout_s=timeout_s, **options)
    raise UsageError(f"metadata URL {url!r} is of no known kind; use {_KNOWN}")


def _zookeeper() -> type[ZooKeeperTree]:
    try:
        from pybk.metadata.zookeeper import ZooKeeperTree
    except ModuleNotFoundError as error:
        raise UsageError('ZooKeeper needs the kazoo package: pip install "pybk[zookeeper]"') from error
    return ZooKeeperTree


def _hosts(url: str, netloc: str) -> str:
    """Return ZooKeeper's hosts as its client takes them."""
    if "@" in netloc:
        raise UsageError("a metadata URL takes no user or password; give secrets by file or environment")
    for host in netloc.split(","):
        name, colon, port = host.rpartition(":")
        if not name or not colon or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UsageError(f"metadata URL {url!r}: {host!r} is no host:port; use {_KNOWN}")
    return netloc


def _root(url: str, path: str) -> str:
    """Return the path in ZooKeeper that everything stands below."""
    names = path.strip("/").split("/")
    if not all(names) or any(name in (".", "..", "zookeeper") for name in names):
        raise UsageError(f"metadata URL {url!r} needs a path of its own in ZooKeeper, such as /ledgers; use {_KNOWN}")
    return "/" + "/".join(names)
