"""The records of scrubs in the metadata store: times of checks, and entries that were found damaged.

``scrub/NAME`` is JSON that a bookie writes about its own store, at most once a minute; after a restart its scrub
continues from this record. ``scrub-quick`` is the same for the quick audits of the whole cluster, written by the
auditor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.authenticated_values import AuthenticatedValues, ValueKind
from pybk.metadata.registration import name_in_key
from pybk.values import to_base64

SCRUB_KEY: Final = "scrub"
QUICK_KEY: Final = "scrub-quick"

_INSTANCE: Final = "instance"


class ScrubRecords(AuthenticatedValues):
    """The records of a cluster's scrubs. Threads: any.

    Every method may raise MetadataUnreachableError; reading may also raise CorruptError, MetadataForgedError and
    UnsupportedFormatError.
    """

    def read_scrub(self, bookie: Bookie) -> dict[str, Any] | None:
        """Return the record of a bookie's scrub of its store; None if this instance wrote none."""
        values = self.read_document(ValueKind.SCRUB, _key(bookie.bookie_id))
        return None if values is None or values.get(_INSTANCE) != to_base64(bookie.instance) else values

    def write_scrub(self, bookie: Bookie, values: Mapping[str, Any]) -> None:
        """Replace the record of a bookie's scrub, durably."""
        noted = {**values, _INSTANCE: to_base64(bookie.instance)}
        self.write_document(ValueKind.SCRUB, _key(bookie.bookie_id), noted, leased=False)

    def read_quick_audit(self) -> dict[str, Any] | None:
        """Return the auditors' record of quick audits; None if no auditor wrote one."""
        return self.read_document(ValueKind.SCRUB, QUICK_KEY)

    def write_quick_audit(self, values: Mapping[str, Any]) -> None:
        """Replace the record of quick audits, durably."""
        self.write_document(ValueKind.SCRUB, QUICK_KEY, values, leased=False)


def _key(bookie_id: str) -> str:
    return f"{SCRUB_KEY}/{name_in_key(bookie_id)}"
