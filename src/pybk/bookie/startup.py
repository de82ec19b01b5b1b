"""How a bookie starts: its directory is the one that the cluster knows, and no other serves in its place."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Final

from pybk.errors import CookieError
from pybk.ledger import INSTANCE_BYTES, Bookie
from pybk.replication.messages import Reply, Status
from pybk.transport.codec import Ping
from pybk.transport.links import Links

if TYPE_CHECKING:
    from pybk.bookie.replicas import Replicas
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.transport.cluster_keys import ClusterKeys

_PROBE_MS: Final = 500
_PROBE_NS: Final = _PROBE_MS * 1_000_000


def introduce(
    replicas: Replicas,
    metadata: ClusterMetadata,
    keys: ClusterKeys | None,
    bookie_id: str | None,
    *,
    moved: bool,
    replace_lost: bool,
) -> Bookie:
    """Make sure that a directory is the one that the cluster knows, and record that its bookie starts."""
    known = replicas.identity
    instance = secrets.token_bytes(INSTANCE_BYTES) if known is None else known.instance
    name = bookie_id or (f"bookie-{instance[:4].hex()}" if known is None else known.bookie_id)
    if known is None and replicas.store.salvage is not None and not replace_lost:
        instance = _lost_instance(replicas, metadata, bookie_id)
    cluster_id = metadata.cluster_id
    if known is not None:
        recorded = metadata.read_cookie(name)
        if recorded is not None:
            replicas.check(cluster_id, recorded.bookie.bookie_id, recorded.bookie.instance, recorded.boots)
        else:
            replicas.check(cluster_id, name, instance, 0)
    bookie = Bookie(name, instance)
    cookie = metadata.claim_cookie(bookie, replace=replace_lost)
    _check_alone(bookie, metadata, keys)
    boots = replicas.begin(cluster_id, name, instance, cookie.boots, moved=moved, about=metadata.about)
    if not metadata.record_boot(bookie, boots):
        raise CookieError(
            f"{replicas.store.volumes.root} was started {boots} times, but the cluster knows of later starts of "
            f"{bookie}: it is an older copy; bring back the directory that was last used, or begin with an empty one"
        )
    return bookie


def _lost_instance(replicas: Replicas, metadata: ClusterMetadata, bookie_id: str | None) -> bytes:
    """Return the instance of a directory that lost it: the recorded one, if somebody says whose directory it is.

    They need not be right: whichever bookie it goes on as, it doubts everything that this one ever held.
    """
    recorded = None if bookie_id is None else metadata.read_cookie(bookie_id)
    if recorded is None:
        raise CookieError(
            f"{replicas.store.volumes.root} lost what was stored last, and with it whose directory it is: give the "
            "name of its bookie, as the metadata store has it (bookie_id=...), or begin with an empty directory"
        )
    return recorded.bookie.instance


def _check_alone(bookie: Bookie, metadata: ClusterMetadata, keys: ClusterKeys | None) -> None:
    """Check that the bookie does not serve already, from a directory of which this one is a copy.

    Raises:
        CookieError: It answers where it is registered.
    """
    found = metadata.find_bookie(bookie.bookie_id)
    if found is None or found.bookie != bookie:
        return
    with Links(keys) as links:
        link = links.connect(bookie, found.addresses[0], found.public_key or None)
        link.send(0, Ping(), _PROBE_NS)
        until = time.monotonic_ns() + _PROBE_NS
        while time.monotonic_ns() < until:
            for _, _, reply in links.poll(_PROBE_MS):
                if isinstance(reply, Reply) and reply.status is Status.OK:
                    raise CookieError(
                        f"{bookie} serves at {found.addresses[0]} already; end that process first, and do not "
                        "start a bookie on a copy of its directory"
                    )
                return
