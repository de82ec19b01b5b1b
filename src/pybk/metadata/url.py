"""Opening a metadata store by its URL."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from pybk.errors import MetadataError, UsageError
from pybk.metadata.lmdb_store import HOST_FILE, LmdbMetadataStore
from pybk.metadata.store import MetadataStore
from pybk.storage.io.filesystem import OsFileSystem
from pybk.storage.io.permissions import access_of

if TYPE_CHECKING:
    from pybk.metadata.zookeeper_store import ZooKeeperMetadataStore

_KNOWN: Final = (
    "lmdb:///absolute/path for the processes of one host, lmdb:///absolute/path?group=NAME for the members of a group, "
    "or zk://host:port[,host:port]/path for ZooKeeper"
)
_GROUP: Final = "group"


class LmdbLocation(NamedTuple):
    """Where an LMDB metadata store is.

    Attributes:
        path: Its directory.
        group: The group that the URL shares it with, by name or number; None if the URL names no group.
    """

    path: str
    group: str | None


def open_metadata(
    url: str, *, timeout_s: float = 10.0, session_timeout_s: float | None = None, create: bool = True
) -> MetadataStore:
    """Open a metadata store.

    Args:
        url: ``lmdb:///absolute/path``, a directory that is made if it is missing; or ``zk://host:port,host:port/path``.
            ``lmdb:///absolute/path?group=NAME`` makes it for the members of a group; without that a new one is made for
            its owner alone, and one that exists is used as it is.
        timeout_s: Deadline of each call, seconds.
        session_timeout_s: Seconds after which a process that gives no sign of life has lost its leases; None for the
            store's own: 5 for LMDB, 10 for ZooKeeper, which may bring it to between 2 and 20 of its ticks.
        create: Make the directory of an LMDB store if it is missing.

    Returns:
        The store; close it.

    Raises:
        UsageError: The URL names no metadata store, the group does not exist or this process is not a member of it, or
            ZooKeeper is asked for and its client is not installed.
        MetadataUnreachableError: No server answered in time.
        CorruptError, UnsupportedFormatError, OSError: The directory cannot be used.
    """
    for name, value in (("timeout_s", timeout_s), ("session_timeout_s", session_timeout_s)):
        if value is not None and not 0.05 <= value <= 3600:
            raise UsageError(f"{name} is {value!r}; it takes 0.05 to 3600 seconds")
    parts = _split(url)
    options = {} if session_timeout_s is None else {"session_timeout_s": session_timeout_s}
    if parts.scheme == "lmdb":
        path, group = lmdb_location(url)
        if not create and not os.path.isdir(path):
            raise MetadataError(f"there is no metadata store at {url}: check the URL, or start the first bookie")
        access = access_of(os.path.join(path, HOST_FILE), group)
        try:
            OsFileSystem(access).make_directory(path)
        except OSError as error:
            raise MetadataError(f"{path} cannot be made: {error}; name a directory that can") from error
        return LmdbMetadataStore(path, timeout_s=timeout_s, access=access, **options)
    if parts.query:
        raise UsageError(f"metadata URL {url!r} has a query, which ZooKeeper's has not; use {_KNOWN}")
    if parts.scheme == "zk":
        return _zookeeper()(_hosts(url, parts.netloc), _root(url, parts.path), timeout_s=timeout_s, **options)
    raise UsageError(f"metadata URL {url!r} is of no known kind; use {_KNOWN}")


def lmdb_location(url: str) -> LmdbLocation:
    """Return where the LMDB metadata store of a URL is.

    Raises:
        UsageError: The URL names no LMDB metadata store.
    """
    parts = _split(url)
    path = unquote(parts.path)
    if parts.scheme != "lmdb" or parts.netloc or len(path) < 2 or "\0" in path:
        raise UsageError(f"metadata URL {url!r} needs three slashes and an absolute path; use {_KNOWN}")
    group = None
    if parts.query:
        name, _, value = parts.query.partition("=")
        group = unquote(value)
        if name != _GROUP or not group or "&" in value:
            raise UsageError(f"metadata URL {url!r} has the query {parts.query!r}; use {_KNOWN}")
    return LmdbLocation(path, group)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"metadata URL {url!r}: {error}; use {_KNOWN}") from error
    if parts.fragment:
        raise UsageError(f"metadata URL {url!r} has a fragment; use {_KNOWN}")
    return parts


def _zookeeper() -> type[ZooKeeperMetadataStore]:
    try:
        from pybk.metadata.zookeeper_store import ZooKeeperMetadataStore
    except ModuleNotFoundError as error:
        raise UsageError('ZooKeeper needs the kazoo package: pip install "pybk[zookeeper]"') from error
    return ZooKeeperMetadataStore


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
