"""The places of each originator's events in the log."""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, Self

from pybk.adapters.eventsourcing.event_record import Originator

_MAGIC: Final = b"pybkidx1"
_COUNTS: Final = struct.Struct("<QQ")
"""The numbers of upstream applications and of originators that follow."""
_POSITION: Final = struct.Struct("<Hq")
"""The bytes of an upstream application's name, and its last notification that was processed."""
_ORIGINATOR: Final = struct.Struct("<BHQ")
"""A flag whether the originator's id is a UUID, the id's bytes, and the number of its events."""
_PAIR_BYTES: Final = 16


class EventIndex:
    """The log sequence number of each version of each originator, and the positions in upstream applications.

    Memory: some 250 bytes for each originator, and 16 for each event.

    Threads: one at a time.

    Attributes:
        positions: For each upstream application, the last notification that a transaction with events has processed.
    """

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}
        self._pairs: dict[Originator, array[int]] = {}
        """The versions and log sequence numbers of each originator, alternately, in the order of versions."""

    def __contains__(self, event: tuple[Originator, int]) -> bool:
        """Return whether an originator has a version."""
        originator, version = event
        pairs = self._pairs.get(originator)
        return pairs is not None and version <= pairs[-2] and pairs[2 * _place(pairs, version)] == version

    def add(self, originator: Originator, version: int, lsn: int) -> None:
        """Add an event, unless the index has it."""
        pairs = self._pairs.get(originator)
        if pairs is None:
            self._pairs[originator] = array("q", (version, lsn))
        elif version > pairs[-2]:
            pairs.extend((version, lsn))
        elif (originator, version) not in self:
            at = 2 * _place(pairs, version)
            pairs[at:at] = array("q", (version, lsn))

    def remove(self, originator: Originator, version: int) -> None:
        """Remove an event, if the index has it."""
        if (originator, version) in self:
            pairs = self._pairs[originator]
            at = 2 * _place(pairs, version)
            del pairs[at : at + 2]
            if not pairs:
                del self._pairs[originator]

    def track(self, application_name: str, notification_id: int) -> None:
        """Note the position in an upstream application, unless it has moved further."""
        if notification_id > self.positions.get(application_name, notification_id - 1):
            self.positions[application_name] = notification_id

    def lsns(self, originator: Originator, gt: int | None, lte: int | None) -> list[int]:
        """Return the log sequence numbers of the versions after ``gt`` up to ``lte``, in order; None for no limit."""
        pairs = self._pairs.get(originator)
        if pairs is None:
            return []
        first = 0 if gt is None else _place(pairs, gt + 1)
        end = len(pairs) // 2 if lte is None else _place(pairs, lte + 1)
        return pairs[2 * first + 1 : 2 * end : 2].tolist()

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the index."""
        yield _MAGIC
        yield _COUNTS.pack(len(self.positions), len(self._pairs))
        for name, position in self.positions.items():
            encoded = name.encode()
            yield _POSITION.pack(len(encoded), position) + encoded
        for originator, pairs in self._pairs.items():
            is_uuid = isinstance(originator, bytes)
            key = originator if isinstance(originator, bytes) else originator.encode()
            yield _ORIGINATOR.pack(is_uuid, len(key), len(pairs) // 2) + key
            yield _little_endian(pairs).tobytes()

    @classmethod
    def of(cls, data: bytes) -> Self | None:
        """Return the index of these bytes; None if another version of pybk wrote them."""
        if not data.startswith(_MAGIC):
            return None
        index = cls()
        position_count, originator_count = _COUNTS.unpack_from(data, len(_MAGIC))
        at = len(_MAGIC) + _COUNTS.size
        for _ in range(position_count):
            name_bytes, position = _POSITION.unpack_from(data, at)
            at += _POSITION.size + name_bytes
            index.positions[data[at - name_bytes : at].decode()] = position
        for _ in range(originator_count):
            is_uuid, key_bytes, events = _ORIGINATOR.unpack_from(data, at)
            at += _ORIGINATOR.size + key_bytes
            key = data[at - key_bytes : at]
            pairs = array("q", data[at : at + _PAIR_BYTES * events])
            at += _PAIR_BYTES * events
            index._pairs[key if is_uuid else key.decode()] = _little_endian(pairs)
        return index


def _place(pairs: array[int], version: int) -> int:
    """Return the index of the first pair whose version is not lower."""
    return bisect_left(range(len(pairs) // 2), version, key=lambda at: pairs[2 * at])


def _little_endian(pairs: array[int]) -> array[int]:
    """Return numbers converted between this machine's byte order and little-endian order."""
    if sys.byteorder == "big":
        pairs = array("q", pairs)
        pairs.byteswap()
    return pairs
