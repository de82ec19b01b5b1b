"""When the entries of each bookie were checked, and which were found damaged, in the metadata store.

``scrub/NAME`` is JSON that a bookie writes of its own store, at most once a minute; it continues from there after a
restart. ``scrub-quick`` is the same for the quick audits of the whole cluster, written by the auditor.
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
        """Return what a bookie has noted of the checks of its store; None if this instance never did."""
        values = self.read_document(ValueKind.SCRUB, _key(bookie.bookie_id))
        return None if values is None or values.get(_INSTANCE) != to_base64(bookie.instance) else values

    def write_scrub(self, bookie: Bookie, values: Mapping[str, Any]) -> None:
        """Replace what a bookie has noted, durably."""
        noted = {**values, _INSTANCE: to_base64(bookie.instance)}
        self.write_document(ValueKind.SCRUB, _key(bookie.bookie_id), noted, leased=False)

    def read_quick_audit(self) -> dict[str, Any] | None:
        """Return what the auditors have noted of the quick audits; None if none ever did."""
        return self.read_document(ValueKind.SCRUB, QUICK_KEY)

    def write_quick_audit(self, values: Mapping[str, Any]) -> None:
        """Replace what the auditors have noted, durably."""
        self.write_document(ValueKind.SCRUB, QUICK_KEY, values, leased=False)


def _key(bookie_id: str) -> str:
    return f"{SCRUB_KEY}/{name_in_key(bookie_id)}"
