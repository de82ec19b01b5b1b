"""How a bookie starts that lost something durable: with what is left, and in doubt about everything that it ever held.

Its peers have the rest (see ``docs/replication.md``). A stop at any point leads here again, until the doubt is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pybk.bookie.ledger_header import LedgerHeader
from pybk.bookie.replicas import Replicas
from pybk.errors import CorruptError, PybkError

if TYPE_CHECKING:
    from pybk.config import StoreConfig
    from pybk.flags import StorageHint
    from pybk.ledger import Bookie, LedgerMetadata
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.metrics import Metrics

logger = logging.getLogger(__name__)

_PAGE: Final = 500


def open_replicas(
    root: str,
    *,
    config: StoreConfig,
    tiers: Mapping[StorageHint, str | Sequence[str]] | None,
    metrics: Metrics | None,
) -> Replicas:
    """Open a bookie's directory, and what is left of it if something durable is missing.

    Raises:
        PybkError: As ``Replicas.open``; CorruptError if the index or the catalog is damaged.
    """
    try:
        return Replicas.open(root, config=config, tiers=tiers, metrics=metrics)
    except CorruptError as error:
        logger.warning("%s does not open, and is salvaged for what is left: %s", root, error)
    return Replicas.open(root, config=config, tiers=tiers, metrics=metrics, salvage=True)


def put_all_in_limbo(replicas: Replicas, metadata: ClusterMetadata, bookie: Bookie, losses: Sequence[str] = ()) -> None:
    """Put everything in limbo that a bookie may ever have held, and then take what was salvaged for its store.

    Args:
        replicas: What the bookie keeps.
        metadata: The cluster's metadata.
        bookie: The bookie.
        losses: What else than a salvage shows that durable entries may be missing, for the log.

    Call it before the bookie answers anything, and after its start was recorded in the metadata store: what is read
    there after that write is not older than the start.

    Raises:
        PybkError: It could not be recorded; the next start salvages again.
    """
    salvage = replicas.store.salvage
    for page, damaged in _pages(metadata):
        # Whether a ledger whose metadata is damaged was held here cannot be known, so it is in doubt, too.
        doubtful: dict[int, LedgerHeader | None] = dict.fromkeys(damaged)
        for each in page:
            if any(bookie in fragment.ensemble for fragment in each.fragments):
                doubtful[each.ledger_id] = LedgerHeader.of(each, metadata.describe(each))
        replicas.doubt(doubtful)
    replicas.doubt(dict.fromkeys(replicas.ledgers()))
    if salvage is not None:
        replicas.store.keep_salvage()
        losses = [*losses, *salvage.lost]
    for lost in losses:
        logger.warning("bookie %s lost something durable: %s", bookie, lost)
    logger.warning(
        "bookie %s: %d ledgers are in limbo until their other bookies have brought back what it lacks",
        bookie,
        len(replicas.in_limbo()),
    )


def _pages(metadata: ClusterMetadata) -> Iterator[tuple[list[LedgerMetadata], list[int]]]:
    """Yield the ledgers of the cluster, and the ids of those whose metadata is damaged."""
    after = -1
    while ids := metadata.list_ledgers(after=after, count=_PAGE):
        damaged: list[int] = []

        def note(ledger_id: int, error: PybkError, damaged: list[int] = damaged) -> None:
            damaged.append(ledger_id)
            logger.warning("ledger %d is taken to be held here, because its metadata is damaged: %s", ledger_id, error)

        yield [found.metadata for found in metadata.read_ledgers(ids, damaged=note) if found is not None], damaged
        after = ids[-1]
