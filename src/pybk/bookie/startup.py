"""The start of a bookie: open its directory, validate its cookie, and decide whether durable data may be missing.

Theory of operation. ``BookieServer.open`` calls this module in this order, in one thread, before the bookie answers
any request:

1. ``open_replicas`` opens the directory. If durable data are damaged or missing, the store refuses to open, and the
   function opens it again with ``salvage=True``: the store keeps the remaining data, because the peers have the rest.
2. ``accepted_losses`` checks whether ``rebuild-index`` made the index without entries that it had;
   ``own_position.find_losses`` compares the log with the position that the metadata store records. It comes before
   the bookie appends anything, because an append could hide a log that ends too early.
3. ``validate_cookie`` checks that the directory is the one that the metadata store knows under this name, that no
   other process serves from a copy of it, and records the start in the store and in the metadata store.
4. ``put_all_in_limbo`` runs only after a salvage, a restore from a backup, or a found loss. It puts every ledger that
   the bookie may ever have held in limbo (D6), because the lost entries and fences are not known. It lists the ledgers
   after step 3, because the list must not be older than the start.
5. ``BookieServer`` listens, checks that its address is reachable, and registers.

A stop at any point is harmless: until the limbo marks are durable, the next start finds the same loss and repeats these
steps (``docs/design/replication.md``, Starts).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pybk.bookie.ledger_header import LedgerHeader
from pybk.bookie.replicas import Replicas
from pybk.errors import CookieError, CorruptError, PybkError
from pybk.feature_level import NEWEST_LEVEL
from pybk.ledger.ledger_metadata import INSTANCE_BYTES, Bookie
from pybk.log_events import log_event
from pybk.replication.messages import Reply, Status
from pybk.transport.client_links import Links
from pybk.transport.codec import Ping
from pybk.version import __version__

if TYPE_CHECKING:
    from pybk.config import StoreConfig
    from pybk.flags import StorageHint
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.metrics import Metrics
    from pybk.storage.store import Store
    from pybk.transport.cluster_keys import HeldKeys

logger = logging.getLogger(__name__)

_PROBE_MS: Final = 500
_PROBE_NS: Final = _PROBE_MS * 1_000_000
"""The time that another process that serves as this bookie has to answer a ping."""


# ---- the directory -------------------------------------------------------------------------------------------------


def open_replicas(
    root: str,
    *,
    config: StoreConfig,
    tiers: Mapping[StorageHint, str | Sequence[str]] | None,
    metrics: Metrics | None,
) -> Replicas:
    """Open a bookie's directory; if durable data are missing, salvage the rest.

    After a salvage ``store.salvage`` of the result is not None, and the caller has to call ``put_all_in_limbo``.

    Raises:
        PybkError: As ``Replicas.open``; CorruptError if the index or the catalog is damaged, which salvage cannot mend.
    """
    try:
        return Replicas.open(root, config=config, tiers=tiers, metrics=metrics)
    except CorruptError as error:
        logger.warning(
            "%s does not open, and is salvaged for what is left: %s", root, error, extra=log_event("bookie.salvaged")
        )
    try:
        return Replicas.open(root, config=config, tiers=tiers, metrics=metrics, salvage=True)
    except CorruptError as error:
        raise CorruptError(
            f"{error}; if that fails, begin an empty directory under the bookie's name (replace=True, `pybk bookie "
            "--replace`), and its peers have the rest",
            path=error.path,
            offset=error.offset,
        ) from error


# ---- the cookie ----------------------------------------------------------------------------------------------------


def validate_cookie(
    replicas: Replicas,
    metadata: ClusterMetadata,
    keys: HeldKeys | None,
    bookie_id: str | None,
    *,
    moved: bool,
    replace_lost: bool,
    location: str = "",
) -> Bookie:
    """Check that the directory is the one that the cluster knows, record this start, and return the bookie.

    A cookie is BookKeeper's name for the record that binds a bookie's name to one directory. It is kept in the metadata
    store (``claim_cookie``) and in the directory (``DirectoryIdentity``).

    Args:
        replicas: The open directory.
        metadata: The cluster's metadata.
        keys: The cluster's keys; None without a secret.
        bookie_id: The bookie's name; None keeps the directory's, or makes one for a new directory.
        moved: The directory was moved since the last start, so another inode is accepted.
        replace_lost: Claim the name of a bookie whose directory is lost for good.
        location: The location of the bookie, as ``Location`` writes it.

    Durability: On return the start is durable in the directory and in the metadata store.

    Raises:
        CookieError: The directory is another bookie's, of another cluster, a copy, or older than the last start; or
            another process already serves as this bookie; or the bookie was removed from the cluster.
    """
    known = replicas.identity
    instance = secrets.token_bytes(INSTANCE_BYTES) if known is None else known.instance
    name = bookie_id or (f"bookie-{instance[:4].hex()}" if known is None else known.bookie_id)
    if known is None and replicas.store.salvage is not None and not replace_lost:
        instance = _recorded_instance(replicas, metadata, bookie_id)
    cluster_id = metadata.cluster_id
    if known is not None:
        recorded = metadata.read_cookie(name)
        if recorded is not None:
            replicas.check_identity(cluster_id, recorded.bookie.bookie_id, recorded.bookie.instance, recorded.boots)
        else:
            replicas.check_identity(cluster_id, name, instance, 0)
    bookie = Bookie(name, instance)
    cookie = metadata.claim_cookie(bookie, replace=replace_lost)
    _check_not_served(bookie, metadata, keys)
    boots = replicas.record_start(cluster_id, name, instance, cookie.boots, moved=moved, about=metadata.about)
    if not metadata.record_boot(bookie, boots, location=location, level_max=NEWEST_LEVEL, version=__version__):
        raise CookieError(
            f"{replicas.store.volumes.root} was started {boots} times, but the cluster knows of later starts of "
            f"{bookie}: it is an older copy; bring back the directory that was last used, or begin with an empty one"
        )
    return bookie


def _recorded_instance(replicas: Replicas, metadata: ClusterMetadata, bookie_id: str | None) -> bytes:
    """Return the instance that the metadata store records for a name, for a directory that lost its identity.

    A wrong name does no harm: the bookie puts every ledger of that name in limbo, and denies nothing.
    """
    recorded = None if bookie_id is None else metadata.read_cookie(bookie_id)
    if recorded is None:
        raise CookieError(
            f"{replicas.store.volumes.root} lost its newest data, and with it the name of its bookie: give that name "
            "as the metadata store has it (bookie_id=...), or begin with an empty directory"
        )
    return recorded.bookie.instance


def _check_not_served(bookie: Bookie, metadata: ClusterMetadata, keys: HeldKeys | None) -> None:
    """Check that no other process serves as this bookie, from a directory that this one is a copy of.

    Raises:
        CookieError: The bookie answers at the address that it is registered with.
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


# ---- after a loss --------------------------------------------------------------------------------------------------


def accepted_losses(store: Store) -> list[str]:
    """Return the evidence that a restore or ``rebuild-index`` left out entries that were durable; empty for none.

    It stays until ``put_all_in_limbo``, so the start after an interrupted one finds it again.
    """
    if not store.has_accepted_loss():
        return []
    if store.cookie.incarnation:
        return [f"{store.volumes.root} was restored from a backup, or its index was rebuilt without all entries"]
    return [f"the index of {store.volumes.root} was rebuilt without all entries that it had"]


def put_all_in_limbo(replicas: Replicas, metadata: ClusterMetadata, bookie: Bookie, losses: Sequence[str] = ()) -> None:
    """Put every ledger that the bookie may ever have held in limbo (D6), and then end the salvage, if there was one.

    The ledgers are those that name the bookie in an ensemble, those whose metadata is damaged, and those that the
    store has a part of.

    Args:
        replicas: The open directory.
        metadata: The cluster's metadata.
        bookie: The bookie.
        losses: The evidence, other than a salvage, that durable entries may be missing; logged.

    Call it before the bookie answers any request, and after its start was recorded in the metadata store, because only
    then the list of ledgers is not older than the start.

    Durability: The limbo marks are durable on return.

    Raises:
        PybkError: A mark could not be made durable; the next start salvages again.
    """
    store = replicas.store
    salvage = store.salvage
    for page, damaged in _pages(metadata):
        # A ledger whose metadata is damaged may have been held here, so it is put in limbo, too.
        lost: dict[int, LedgerHeader | None] = dict.fromkeys(damaged)
        for each in page:
            if any(bookie in fragment.ensemble for fragment in each.fragments):
                lost[each.ledger_id] = LedgerHeader.of(each, metadata.describe(each))
        replicas.put_in_limbo(lost)
    replicas.put_in_limbo(dict.fromkeys(replicas.ledgers()))
    if salvage is not None:
        store.keep_salvage()
        losses = [*losses, *salvage.lost]
    store.forget_accepted_loss()
    for loss in losses:
        fields = {"bookie": str(bookie)}
        logger.warning("bookie %s lost durable data: %s", bookie, loss, extra=log_event("bookie.loss", **fields))
    ledgers = len(replicas.in_limbo())
    logger.warning(
        "bookie %s: %d ledgers are in limbo until their other bookies have brought back what it lacks",
        bookie,
        ledgers,
        extra=log_event("bookie.limbo.begun", bookie=str(bookie), ledgers=ledgers),
    )


def report_limbo(replicas: Replicas, bookie: Bookie) -> None:
    """Log the number of ledgers that are in limbo since an earlier start, if any are."""
    if ledgers := len(replicas.in_limbo()):
        logger.warning(
            "bookie %s: %d ledgers are in limbo still",
            bookie,
            ledgers,
            extra=log_event("bookie.limbo.begun", bookie=str(bookie), ledgers=ledgers),
        )


def _pages(metadata: ClusterMetadata) -> Iterator[tuple[list[LedgerMetadata], list[int]]]:
    """Yield the metadata of the cluster's ledgers in pages, each with the ids of those whose metadata is damaged."""
    for ids in metadata.id_pages():
        damaged: list[int] = []

        def note(ledger_id: int, error: PybkError, damaged: list[int] = damaged) -> None:
            damaged.append(ledger_id)
            logger.warning("ledger %d is taken to be held here, because its metadata is damaged: %s", ledger_id, error)

        yield [found.metadata for found in metadata.read_ledgers(ids, damaged=note) if found is not None], damaged
