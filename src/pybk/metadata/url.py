"""Opens a metadata store by its URL; ``SCHEMES`` lists the stores.

A new store is one line in ``SCHEMES`` and the module that the line names. The module has a function ``open_url(url:
StoreUrl, options: StoreOptions) -> MetadataStore``, which raises UsageError (``StoreUrl.invalid``) for a URL that it
cannot use. It is imported with the first URL of its scheme, so its dependencies may be optional ones.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from pybk.errors import UsageError
from pybk.metadata.lease_time import checked_seconds
from pybk.metadata.store import CALL_TIMEOUT_S, MetadataStore, StoreOptions, StoreUrl, without_secrets


class UrlScheme(NamedTuple):
    """A kind of metadata store.

    Attributes:
        module: The module that opens URLs of this scheme.
        form: The form of such a URL, for error messages.
        extra: The extra of this package that installs the module's dependencies; empty if they are always installed.
    """

    module: str
    form: str
    extra: str = ""


SCHEMES: Final = {
    "lmdb": UrlScheme(
        "pybk.metadata.lmdb_store",
        "lmdb:///absolute/path for the processes of one host, lmdb:///absolute/path?group=NAME for the members of a "
        "group",
    ),
    "zk": UrlScheme(
        "pybk.metadata.zookeeper_store",
        "zk://host:port[,host:port]/path[?tls_ca=FILE&auth_file=FILE] for ZooKeeper",
        "zookeeper",
    ),
}


def open_metadata(
    url: str, *, timeout_s: float = CALL_TIMEOUT_S, lease_time_s: float | None = None, create: bool = True
) -> MetadataStore:
    """Open a metadata store.

    Args:
        url: ``lmdb:///absolute/path``, a directory that is created if it is missing; or
            ``zk://host:port,host:port/path``. ``lmdb:///absolute/path?group=NAME`` creates the directory for the
            members of a group. Without it a new directory is for its owner alone, and an existing one keeps its modes.
            For TLS and access control lists of ZooKeeper see ``docs/reference/metadata.md``.
        timeout_s: Deadline of each call, seconds.
        lease_time_s: Seconds of silence after which a process loses its leases; None for the store's default. See
            ``pybk.metadata.lease_time``.
        create: Whether to create the directory of an LMDB store if it is missing.

    Returns:
        The store; the caller closes it.

    Raises:
        UsageError: The URL is invalid, the group does not exist or this process is not a member of it, or the package
            that the store needs is not installed.
        MetadataUnreachableError: No server answered in time.
        MetadataError, CorruptError, UnsupportedFormatError, OSError: The directory cannot be used.
    """
    checked_seconds("timeout_s", timeout_s)
    if lease_time_s is not None:
        checked_seconds("lease_time_s", lease_time_s)
    parsed, scheme = parse_url(url), scheme_of(url)
    try:
        module = import_module(scheme.module)
    except ModuleNotFoundError as error:
        if not scheme.extra:
            raise
        raise UsageError(
            f'{parsed.parts.scheme}:// needs the package {error.name}: pip install "pybk[{scheme.extra}]"'
        ) from error
    store: MetadataStore = module.open_url(parsed, StoreOptions(timeout_s, lease_time_s, create))
    return store


def scheme_of(url: str) -> UrlScheme:
    """Return the kind of metadata store that a URL names; raises UsageError if there is none of its scheme."""
    parsed = parse_url(url)
    scheme = SCHEMES.get(parsed.parts.scheme)
    if scheme is None:
        raise parsed.invalid(f" has an unknown scheme, {parsed.parts.scheme!r:.50}")
    return scheme


def parse_url(url: str) -> StoreUrl:
    """Return the parts of a metadata store's URL; raises UsageError if it is not a URL, or has a fragment."""
    forms = ", or ".join(scheme.form for scheme in SCHEMES.values())
    if not isinstance(url, str):
        raise UsageError(f"metadata URL {without_secrets(repr(url))[:100]} is not a string; use {forms}")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"metadata URL {without_secrets(url)!r:.300}: {error!s:.100}; use {forms}") from None
    parsed = StoreUrl(url, parts, forms)
    if parts.fragment:
        raise parsed.invalid(" has a fragment")
    return parsed
