"""The queue of under-replicated ledgers; BookKeeper's LedgerUnderreplicationManager.

A *mark* is a key ``underreplicated/ddd/dddd/dddd/dddd/dddd-INSTANCE``, one for each ledger and bookie, whose value
names the first entry that the bookie may miss. Writers and scrubs add marks; re-replication removes them. A watch
reports changes of one level of keys only, so each new mark also changes the key ``underreplicated-news``, and that is
the key which is watched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from pybk.errors import (
    CorruptError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataVersionError,
    UnsupportedFormatError,
)
from pybk.ledger import Bookie
from pybk.metadata.authenticated_values import (
    AuthenticatedValues,
    ValueKind,
    decode_json,
    encode_json,
    from_base64,
    to_base64,
)
from pybk.metadata.ledgers import leaves_after, ledger_path
from pybk.metadata.store import Node, Watch

logger = logging.getLogger(__name__)

UNDER_REPLICATED_KEY: Final = "underreplicated"
NEWS_KEY: Final = "underreplicated-news"
"""Changed after each new mark, because a watch reports changes of one level of keys only."""


class UnderReplicatedLedger(NamedTuple):
    """A mark: a bookie of a ledger's ensembles misses entries of it.

    Attributes:
        ledger_id: The ledger.
        bookie: The bookie.
        first_entry_id: The first entry that it may miss.
    """

    ledger_id: int
    bookie: Bookie
    first_entry_id: int


class UnderReplication(AuthenticatedValues):
    """The under-replicated ledgers of a cluster. Threads: any.

    Every method may raise MetadataUnreachableError.
    """

    def mark_under_replicated(self, ledger_id: int, bookie: Bookie, first_entry_id: int) -> None:
        """Record durably that a bookie misses entries of a ledger; of several marks, the lowest first entry counts.

        A mark that cannot be decoded is replaced by one of all entries.

        Args:
            ledger_id: The ledger.
            bookie: The bookie.
            first_entry_id: The first entry that it may miss.
        """
        key = missing_key(ledger_id, bookie)
        record = UnderReplicatedLedger(ledger_id, bookie, first_entry_id)
        while True:
            node = self._store.get(key, latest=True)
            try:
                if node is None:
                    self.create_value(ValueKind.UNDER_REPLICATED, key, record_json(record))
                else:
                    self._lower(key, node, record)
                return self._announce()
            except (MetadataExistsError, MetadataVersionError):
                continue

    def list_under_replicated(self, *, after: int = -1, count: int = 1000) -> list[UnderReplicatedLedger]:
        """Return a page of marks, ordered by ledger id. Damaged marks are left out, and logged.

        Args:
            after: The last ledger of the previous page; -1 for the first page.
            count: How many marks are wanted; more are returned if the last ledger has several.
        """
        keys = [key for _, key in leaves_after(self._store, UNDER_REPLICATED_KEY, after, count)]
        records = []
        for key, node in zip(keys, self._store.get_many(keys), strict=True):
            try:
                if node is not None:
                    records.append(self._record(key, node))
            except (CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
                logger.warning("a mark of an under-replicated ledger is left out of a listing: %s", error)
        return records

    def unmark_under_replicated(self, record: UnderReplicatedLedger) -> bool:
        """Remove a mark after its entries were replicated again.

        Returns:
            Whether the mark is gone; False if it names an earlier entry by now, so that entries are still missing.
        """
        key = missing_key(record.ledger_id, record.bookie)
        while (node := self._store.get(key, latest=True)) is not None:
            if self._record(key, node).first_entry_id < record.first_entry_id:
                return False
            try:
                self._delete(key, node.version)
            except MetadataVersionError:
                continue
        return True

    def watch_under_replicated(self, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after marks were added, as ``MetadataStore.watch`` does; removed marks cause no call."""
        return self._store.watch(NEWS_KEY, callback)

    def _announce(self) -> None:
        node = self._store.get(NEWS_KEY)
        with suppress(MetadataExistsError, MetadataVersionError):  # another process has announced at this moment
            if node is None:
                self.create_value(ValueKind.NEWS, NEWS_KEY, b"")
            else:
                self._put(ValueKind.NEWS, NEWS_KEY, b"", node.version)

    def _lower(self, key: str, node: Node, record: UnderReplicatedLedger) -> None:
        """Lower the first entry of the mark at ``key`` to that of ``record``, if that is lower."""
        try:
            if self._record(key, node).first_entry_id <= record.first_entry_id:
                return
        except (CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
            logger.warning("a mark of an under-replicated ledger is replaced by one of all entries: %s", error)
            record = record._replace(first_entry_id=0)
        self._put(ValueKind.UNDER_REPLICATED, key, record_json(record), node.version)

    def _record(self, key: str, node: Node) -> UnderReplicatedLedger:
        def make(values: dict[str, Any]) -> UnderReplicatedLedger:
            bookie = Bookie(str(values["bookie_id"]), from_base64(values["instance"]))
            return UnderReplicatedLedger(int(values["ledger_id"]), bookie, int(values["first_entry_id"]))

        payload = self._payload_of(ValueKind.UNDER_REPLICATED, key, node.value)
        return decode_json(payload, make, where=f"metadata key {key!r}")


def missing_key(ledger_id: int, bookie: Bookie) -> str:
    """Return the key of the record that a bookie misses entries of a ledger."""
    return f"{UNDER_REPLICATED_KEY}/{ledger_path(ledger_id)}-{bookie.instance.hex()}"


def record_json(record: UnderReplicatedLedger) -> bytes:
    """Encode a record."""
    return encode_json(
        {
            "ledger_id": record.ledger_id,
            "bookie_id": record.bookie.bookie_id,
            "instance": to_base64(record.bookie.instance),
            "first_entry_id": record.first_entry_id,
        }
    )
