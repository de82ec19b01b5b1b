"""The changes of a cluster's ledgers from one look to the next, at the cost of what has changed.

The metadata store feeds the ids of ledgers that were created, changed or deleted (``watch_ledgers``), and a look reads
the metadata of these. The first look reads all ledgers. So does a look after the feed may have missed some, such as
after a lost connection: it lists all keys, but reads on only where a version differs from the last one seen. Where a
catalog wants one type, ledgers of other types are decoded only as far as their type.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.metadata.ledgers import LEDGERS_PAGE
from pybk.spark.noted_changes import NotedChanges

if TYPE_CHECKING:
    from pybk.errors import PybkError
    from pybk.flags import LedgerType
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.metadata.cluster import ClusterMetadata

_UNKNOWN: Final = -1

logger = logging.getLogger(__name__)


class ChangedLedgers(NamedTuple):
    """The result of a look.

    Attributes:
        ledgers: The metadata of the ledgers that are new or have changed.
        others: The types of ledgers that are new, and not of the type that is wanted; ``ledgers`` may have such, too.
        gone: Ledgers that were deleted, or are not there any more; a late listing or read may lack some that exist.
        deleted: Those of them that are known to be deleted, and so never come back.
    """

    ledgers: list[LedgerMetadata]
    others: dict[int, LedgerType]
    gone: set[int]
    deleted: set[int]


class LedgerChanges:
    """Follows the ledgers of a cluster.

    Args:
        metadata: The cluster's metadata.
        ledger_type: The type of the ledgers that are wanted; None for all types.

    Threads: one.
    """

    def __init__(self, metadata: ClusterMetadata, ledger_type: str | None = None) -> None:
        self.metadata: Final = metadata
        """The cluster's metadata."""
        self._ledger_type: Final = ledger_type
        self._noted: Final = NotedChanges[int](metadata.watch_ledgers)
        self._versions: dict[int, int] = {}
        """The versions of the ledgers' metadata that were read last."""

    def knows(self, ledger_id: int) -> bool:
        """Return whether a look has returned a ledger, which was not deleted since."""
        return ledger_id in self._versions

    def list_again(self) -> None:
        """Have the next look list all keys, so that it sees every change before it, however late the feed is."""
        self._noted.note(None)

    def begin_again(self) -> None:
        """Have the next look return all ledgers."""
        self._versions = dict.fromkeys(self._versions, _UNKNOWN)
        self._noted.note(None)

    def look(self) -> ChangedLedgers:
        """Return the ledgers that have changed since the last look that did not fail; the first time all.

        Damaged metadata is left out, and logged.

        Raises:
            PybkError: The metadata store cannot be read; the next call returns all ledgers.
        """
        changed = self._noted.take()
        try:
            return self._listed() if changed is None else self._read(sorted(changed))
        except BaseException:
            self.begin_again()
            raise

    def _listed(self) -> ChangedLedgers:
        found: list[LedgerMetadata] = []
        others: dict[int, LedgerType] = {}
        deleted, left = set[int](), set(self._versions)
        for page in self.metadata.ledger_pages(known=self._versions.get, ledger_type=self._ledger_type):
            found += [each.metadata for each in page.ledgers.values()]
            others |= {ledger_id: each.ledger_type for ledger_id, each in page.others.items()}
            self._versions.update({ledger_id: each.version for ledger_id, each in page.ledgers.items()})
            self._versions.update({ledger_id: each.version for ledger_id, each in page.others.items()})
            deleted |= page.deleted
            left -= page.ledgers.keys() | page.others.keys() | page.same | page.unknown
        gone = deleted | left
        for ledger_id in gone:
            self._versions.pop(ledger_id, None)
        return ChangedLedgers(found, others, gone, deleted)

    def _read(self, ledger_ids: Sequence[int]) -> ChangedLedgers:
        found: list[LedgerMetadata] = []
        gone, damaged, deleted = set[int](), set[int](), set[int]()

        def left_out(ledger_id: int, error: PybkError) -> None:
            logger.warning("ledger %d is left out of a look: %s", ledger_id, error)
            damaged.add(ledger_id)

        for at in range(0, len(ledger_ids), LEDGERS_PAGE):
            page = ledger_ids[at : at + LEDGERS_PAGE]
            read = self.metadata.read_ledgers(page, damaged=left_out, deleted=deleted.add)
            for ledger_id, each in zip(page, read, strict=True):
                if each is not None:
                    found.append(each.metadata)
                    self._versions[ledger_id] = each.version
                elif ledger_id not in damaged:
                    gone.add(ledger_id)
                    self._versions.pop(ledger_id, None)
        return ChangedLedgers(found, {}, gone, deleted)

    def close(self) -> None:
        """End the feed."""
        self._noted.close()
