"""Entries of ledgers whose first records are known, so that a search for a record begins near it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from typing import Final

PLACES_MAX: Final = 4096
"""Known entries of one ledger; beyond, every other one is forgotten."""

LEDGERS_MAX: Final = 64
"""Ledgers with known entries; beyond, the one that was searched the longest ago is forgotten."""


class EntryPlaces:
    """What the searches of one log have found so far. An entry of a ledger never changes, so nothing becomes void.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ledgers: OrderedDict[int, list[tuple[int, int]]] = OrderedDict()
        """By ledger, the first records of entries and these entries, ascending."""

    def around(self, ledger_id: int, seq: int) -> tuple[tuple[int, int] | None, int | None]:
        """Return where to search for a record.

        Returns:
            The first record of the last known entry that begins with the record or before it, and that entry; then the
            first known entry that begins after it. None for what is not known.
        """
        with self._lock:
            places = self._ledgers.get(ledger_id)
            if places is None:
                return None, None
            self._ledgers.move_to_end(ledger_id)
            at = bisect_left(places, (seq + 1, 0))
            return places[at - 1] if at else None, places[at][1] if at < len(places) else None

    def learn(self, ledger_id: int, seq: int, entry: int) -> None:
        """Note the first record of an entry."""
        with self._lock:
            places = self._ledgers.setdefault(ledger_id, [])
            at = bisect_left(places, (seq, entry))
            if at < len(places) and places[at] == (seq, entry):
                return
            places.insert(at, (seq, entry))
            if len(places) > PLACES_MAX:
                del places[1::2]
            if len(self._ledgers) > LEDGERS_MAX:
                self._ledgers.popitem(last=False)
