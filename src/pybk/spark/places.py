"""Where the entries of ledgers that sinks wrote lie: in the ledgers themselves, or in merged ones.

``pybk.spark.sink.manifest`` explains merges.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata

MERGED_KEY: Final = "pybk.sink-merge"
"""The custom metadata of a ledger that has the entries of others of its sink: their number."""

ITSELF: Final = -1
"""The holder of a ledger that is in no merged one."""


class Place(NamedTuple):
    """Where the entries of a committed ledger lie, as far as a reader of its sink has seen.

    Attributes:
        sink: The app id of the sink.
        holder: The merged ledger that has them; ``ITSELF`` if they were in the ledger itself.
        first: The id of the first one there.
    """

    sink: str
    holder: int = ITSELF
    first: int = 0


def of_member(holder: LedgerMetadata, ledger_id: int) -> LedgerMetadata:
    """Return the metadata of a merged ledger with the number of a member, and without what says that it is merged."""
    custom = {key: value for key, value in holder.custom_metadata.items() if key != MERGED_KEY}
    return replace(holder, ledger_id=ledger_id, custom_metadata=custom)
