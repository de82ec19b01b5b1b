"""Records of the bookies about orphans: ledgers of which they hold entries and the metadata store has no key.

A bookie reads the metadata of all its ledgers in pages, about once in ``repair.surplus_delay_s``, and records the
orphans that it found in one value of its own. The value is leased, so it disappears with the bookie.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Final, NamedTuple

from pybk.errors import MetadataExistsError, MetadataVersionError
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.authenticated_values import AuthenticatedValues, ValueKind
from pybk.metadata.registration import name_in_key
from pybk.values import decode_json, encode_json, from_base64, to_base64

ORPHANS_KEY: Final = "orphans"
LISTED_MAX: Final = 1000
"""The most ledgers that one value names; the others are only counted."""


class OrphanReplicas(NamedTuple):
    """Ledgers of which a bookie has entries or a fence, and the metadata store has neither metadata nor a tombstone.

    Nothing deletes them, because a missing key does not prove that a ledger was deleted.

    Attributes:
        bookie: The bookie.
        total: Their number.
        ledger_ids: The lowest ids, at most ``LISTED_MAX``, ascending.
    """

    bookie: Bookie
    total: int
    ledger_ids: tuple[int, ...]


class OrphanRecords(AuthenticatedValues):
    """The orphans that bookies have recorded. Threads: any. Every method may raise MetadataUnreachableError."""

    def record_orphans(self, bookie: Bookie, ledger_ids: Collection[int]) -> None:
        """Record the orphans of the bookie of this process; an equal record is not written again.

        Cost: One read.
        """
        key = f"{ORPHANS_KEY}/{name_in_key(bookie.bookie_id)}"
        values = {"bookie_id": bookie.bookie_id, "instance": to_base64(bookie.instance), "count": len(ledger_ids)}
        payload = encode_json({**values, "ledger_ids": sorted(ledger_ids)[:LISTED_MAX]})
        while True:
            node = self._store.get(key, latest=True)
            if node is None and not ledger_ids:
                return
            with suppress(MetadataExistsError, MetadataVersionError):  # the value of an earlier session ends
                if node is None:
                    self.create_value(ValueKind.ORPHANS, key, payload, leased=True)
                elif self._payload_of(ValueKind.ORPHANS, key, node.value) != payload:
                    self._put(ValueKind.ORPHANS, key, payload, node.version)
                return

    def list_orphans(self) -> list[OrphanReplicas]:
        """Return the records of the bookies that run, by name.

        Raises:
            CorruptError, MetadataForgedError, UnsupportedFormatError: A value cannot be used.
        """
        keys = [f"{ORPHANS_KEY}/{name}" for name in self._store.children(ORPHANS_KEY)]
        return [
            decode_json(
                self._payload_of(ValueKind.ORPHANS, key, node.value),
                lambda values: OrphanReplicas(
                    Bookie(str(values["bookie_id"]), from_base64(values["instance"])),
                    int(values["count"]),
                    tuple(map(int, values["ledger_ids"])),
                ),
                where=f"metadata key {key!r}",
            )
            for key, node in zip(keys, self._store.get_many(keys), strict=True)
            if node is not None
        ]
