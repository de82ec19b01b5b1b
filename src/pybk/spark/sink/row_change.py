"""A change of rows in the manifests of a sink, which merges and retention make while commits change its record.

Manifests never change. So what such a change has found in a manifest, and the manifests that it has written in place of
some, serve as long as the record names these. A commit that came between names one more manifest, or folds some of the
newest: only these are looked at, and written, again. And no manifest that is written has more than ``MANIFEST_ROWS``
rows. So after its first attempt a change has little to do between two commits, however many ledgers a sink has.

Pure, without input or output: ``pybk.spark.sink.manifest`` reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pybk.spark.sink import sink_record

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.spark.sink.sink_record import Chain, ManifestRow, ManifestRows, SinkRecord

Moved = Mapping[int, "ManifestRow | None"]
"""The rows in place of those of some ledgers; None for a ledger that is not named any more."""


class _Sight(NamedTuple):
    """What a change finds in a manifest.

    Attributes:
        found: The rows that it concerns.
        holders: The holders of the others.
    """

    found: ManifestRows
    holders: frozenset[int]


class RowChange:
    """What a change of rows has found in the manifests of a sink, and has written.

    Args:
        concerns: Returns whether the change concerns a row.

    Attributes:
        written: The manifests that it has written, in place of which others.
        rows: The rows of those.

    Threads: one.
    """

    def __init__(self, concerns: Callable[[ManifestRow], bool]) -> None:
        self._concerns = concerns
        self._sights: dict[int, _Sight] = {}
        self.written: dict[Chain, Chain] = {}
        self.rows: dict[int, ManifestRows] = {}
        self._created_ns: dict[int, int] = {}
        self._manifests: set[int] = set()
        """All manifests that it has seen named, or written."""

    def look(self, record: SinkRecord, manifests: Mapping[int, ManifestRows]) -> None:
        """Take in the manifests that a record names now.

        What was written may have been deleted as an orphan if the floor of the record is not older; that is forgotten.

        Args:
            record: The record.
            manifests: The rows of its manifests, and those that it names itself under another key.
        """
        seen, fixed = self._sights, {ledger_id for ledger_id, _ in record.chain}
        self._sights = {
            each: seen[each] if each in seen and each in fixed else self._seen(rows) for each, rows in manifests.items()
        }
        self._manifests |= fixed
        self.written = {
            part: written
            for part, written in self.written.items()
            if all(self._created_ns[each] > record.floor_ns for each, _ in written)
        }

    def _seen(self, rows: ManifestRows) -> _Sight:
        found = [row for row in rows if self._concerns(row)]
        concerned = {row.ledger_id for row in found}
        return _Sight(found, frozenset(row.holder for row in rows if row.ledger_id not in concerned))

    @property
    def found(self) -> ManifestRows:
        """The rows that the change concerns."""
        return [row for each in self._sights.values() for row in each.found]

    @property
    def other_holders(self) -> frozenset[int]:
        """The holders of the other rows."""
        return frozenset[int]().union(*(each.holders for each in self._sights.values()))

    def touches(self, manifest: int, moved: Moved) -> bool:
        """Return whether rows of a manifest change."""
        return any(row.ledger_id in moved for row in self._sights[manifest].found)

    def parts(self, chain: Chain, manifests: Mapping[int, ManifestRows], moved: Moved) -> Iterator[tuple[Chain, bool]]:
        """Yield the manifests of a chain in parts, in their order, each with whether its rows change.

        Manifests of one tier that change and follow each other are one part up to ``MANIFEST_ROWS`` rows; each other
        is one alone. A commit that folds the newest ones changes their part: a large manifest of a higher tier in it
        would be written again after each fold, and between frequent commits there would be no time for that.
        """
        part: Chain = ()
        size = 0
        for each in chain:
            changes = self.touches(each[0], moved)
            rows = len(manifests[each[0]])
            follows = changes and bool(part) and part[-1][1] == each[1]
            if part and not (follows and size + rows <= sink_record.MANIFEST_ROWS):
                yield part, True
                part, size = (), 0
            if changes:
                part, size = (*part, each), size + rows
            else:
                yield (each,), False
        if part:
            yield part, True

    def note(self, part: Chain, written: Sequence[tuple[LedgerMetadata, ManifestRows]]) -> None:
        """Note the manifests that were written in place of a part of a chain, with their rows.

        Several have the tier that commits do not fold, so no commit has all of them to write again.
        """
        tier = sink_record.WHOLE if len(written) > 1 else max(tier for _, tier in part)
        self.written[part] = tuple((each.ledger_id, tier) for each, _ in written)
        self._created_ns |= {each.ledger_id: each.creation_time_ns for each, _ in written}
        self.rows |= {each.ledger_id: rows for each, rows in written}
        self._manifests |= {each.ledger_id for each, _ in written}

    def unnamed(self, chain: Chain) -> list[int]:
        """Return the manifests, of all that it has seen or written, that a chain does not name."""
        return sorted(self._manifests.difference(ledger_id for ledger_id, _ in chain))


def changed(rows: ManifestRows, moved: Moved) -> ManifestRows:
    """Return rows with a change made."""
    return [now for row in rows if (now := moved.get(row.ledger_id, row)) is not None]


def pieces(rows: ManifestRows) -> list[ManifestRows]:
    """Return rows in parts, each for one manifest."""
    most = sink_record.MANIFEST_ROWS
    return [rows[at : at + most] for at in range(0, len(rows), most)]
