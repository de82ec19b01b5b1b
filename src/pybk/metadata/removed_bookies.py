"""Removes keys that removed bookies have left in the metadata store: their positions, and the records of their scrubs.

A bookie writes these keys about itself. Only that instance reads them, or other members while it belongs to the
cluster. An instance that was removed is refused at its start, so its keys are not read any more. A new instance may
take the name, and writes the same keys. So a key is removed only if its value names the removed instance, and only at
the version that was read. The cookie stays, because it is what refuses the instance.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from pybk.errors import MetadataVersionError, PybkError
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.deletions import DELETION_POSITIONS_KEY
from pybk.metadata.durable_positions import POSITIONS_KEY
from pybk.metadata.registration import BookieState, name_in_key
from pybk.metadata.scrub_records import SCRUB_KEY
from pybk.values import decode_json, to_base64

_ROOTS: Final = (POSITIONS_KEY, DELETION_POSITIONS_KEY, SCRUB_KEY)


def collect_removed(metadata: ClusterMetadata) -> int:
    """Remove the positions and the records of scrubs of bookies that were removed and do not run.

    A removed bookie that still runs is about to end, and will write its position. A value that cannot be read stays.

    Returns:
        The number of keys that were removed.

    Cost: Some round trips for all bookies together. It may be repeated at any time, by several processes.
    """
    running = {each.bookie for each in metadata.list_bookies()}
    removed = {
        name_in_key(cookie.bookie.bookie_id): cookie.bookie
        for cookie in metadata.list_cookies(removed=True)
        if cookie.state is BookieState.REMOVED and cookie.bookie not in running
    }
    return sum(
        _remove(metadata, f"{root}/{name}", removed[name])
        for root in (_ROOTS if removed else ())
        for name in sorted(removed.keys() & set(metadata._store.children(root)))
    )


def _remove(metadata: ClusterMetadata, key: str, bookie: Bookie) -> bool:
    """Remove a key if its value names a bookie's instance; return whether it was removed."""
    node = metadata._store.get(key, latest=True)
    if node is None:
        return False
    try:
        _, payload = metadata.decoded(key, node.value)
        instance = decode_json(payload, lambda values: values["instance"], where=f"metadata key {key!r}")
    except PybkError:  # checks of the metadata report it
        return False
    if instance != to_base64(bookie.instance):
        return False
    with suppress(MetadataVersionError):  # it was replaced or removed
        metadata._delete(key, node.version, reused=True)
        return True
    return False
