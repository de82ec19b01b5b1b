"""What bookies that were removed have left in the metadata store: their positions, and the notes of their scrubs.

These keys are written by a bookie of itself, and read by that instance alone, or for as long as it belongs to the
cluster. An instance that was removed is refused at its start, so nothing reads them any more. A new instance may take
the name, and writes the same keys. So a key is removed only if its value names the instance that was removed, and only
at the version that was read. The cookie stays, because it is what refuses the instance.
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
    """Remove the positions and the notes of scrubs of bookies that were removed and do not run.

    One that still runs is about to end, and writes its position then. A value that cannot be read is left alone.

    Returns:
        How many keys were removed.

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
    """Remove a key if it is of a bookie's instance; return whether it was."""
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
    with suppress(MetadataVersionError):  # it was replaced, or is gone
        metadata._delete(key, node.version, reused=True)
        return True
    return False
