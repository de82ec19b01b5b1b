"""Entries as readers get them: one by one, or as a batch over one buffer. See ``docs/format.md``."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

ENTRY_HEADER_BYTES: Final = 32
"""Bytes of an encoded entry before its digest."""

Int64s = npt.NDArray[np.int64]

_unpack_header = Struct(">qqqq").unpack_from
_new_tuple = tuple.__new__


class Entry(NamedTuple):
    """One entry; ``length`` is the ledger's payload bytes up to and including this entry."""

    ledger_id: int
    entry_id: int
    last_add_confirmed: int
    length: int
    payload: bytes


def decode_entry(buffer: memoryview, start: int, end: int, digest_bytes: int) -> Entry:
    """Decode the entry at ``buffer[start:end]``, which an ``EntryDigest`` has checked.

    Args:
        buffer: Bytes, contiguous.
        start: Where the encoded entry starts in ``buffer``, bytes.
        end: Where it ends, bytes.
        digest_bytes: Size of the ledger's digest.

    Returns:
        The entry; its payload is a copy.

    Cost: Half a microsecond and the copy.
    """
    # The named tuple's own constructor parses its arguments, for as long as all the rest takes.
    return _new_tuple(
        Entry, (*_unpack_header(buffer, start), buffer[start + ENTRY_HEADER_BYTES + digest_bytes : end].tobytes())
    )


def gather(buffer: memoryview, offsets: Int64s, size: int) -> npt.NDArray[np.void]:
    """Copy equally long pieces out of a buffer.

    Args:
        buffer: Bytes, contiguous.
        offsets: Where each piece starts, ``(n,)`` int64, bytes; from 0 to ``len(buffer) - size``.
        size: Bytes of a piece, at least 1.

    Returns:
        The pieces, ``(n,)`` void of ``size`` bytes.

    Raises:
        IndexError: A piece ends beyond the buffer.

    Cost: 10 ns per piece.
    """
    # Windows that overlap, one starting at each byte: indexing them copies whole pieces instead of single bytes.
    windows = np.ndarray((max(len(buffer) - size + 1, 0),), f"V{size}", buffer, 0, (1,))
    return windows[offsets]


class EntryBatch:
    """Entries of one ledger in one buffer; nothing is copied until an entry is asked for.

    Entries are in the order of their ids, but need not be adjacent in the buffer. Whoever holds a batch leaves it
    unchanged.

    Args:
        ledger_id: Ledger of all the entries.
        entry_ids: ``(n,)`` int64.
        buffer: Holds the encoded entries and possibly other bytes between them; contiguous.
        offsets: Where each encoded entry starts in ``buffer``, ``(n,)`` int64, bytes.
        sizes: Encoded size of each entry, ``(n,)`` int64, bytes.
        digest_bytes: Size of the ledger's digest.

    Attributes:
        ledger_id: As given.
        entry_ids: As given.
        buffer: As given, read-only.
        offsets: As given.
        sizes: As given.
        digest_bytes: As given.

    Threads: any.
    """

    __slots__ = ("buffer", "digest_bytes", "entry_ids", "ledger_id", "offsets", "sizes")

    def __init__(
        self,
        ledger_id: int,
        entry_ids: Int64s,
        buffer: memoryview,
        offsets: Int64s,
        sizes: Int64s,
        digest_bytes: int,
    ) -> None:
        self.ledger_id = ledger_id
        self.entry_ids = entry_ids
        self.buffer = buffer if buffer.readonly else buffer.toreadonly()
        self.offsets = offsets
        self.sizes = sizes
        self.digest_bytes = digest_bytes

    def __repr__(self) -> str:
        """Name the ledger and the entries."""
        ids = self.entry_ids
        which = f"entries {ids[0]} to {ids[-1]}" if len(ids) else "no entries"
        return f"<EntryBatch ledger {self.ledger_id}, {which}, {self.payload_bytes} payload bytes>"

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self.entry_ids)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> EntryBatch: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Entry | EntryBatch:
        """Return an entry by its place in the batch, counted from the end if negative; or a slice, copying nothing."""
        if isinstance(index, slice):
            ids, offsets, sizes = self.entry_ids[index], self.offsets[index], self.sizes[index]
            return EntryBatch(self.ledger_id, ids, self.buffer, offsets, sizes, self.digest_bytes)
        start = int(self.offsets[index])
        return decode_entry(self.buffer, start, start + int(self.sizes[index]), self.digest_bytes)

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries, each with a copy of its payload."""
        buffer = self.buffer
        skipped = ENTRY_HEADER_BYTES + self.digest_bytes
        for start, end in zip(self.offsets.tolist(), (self.offsets + self.sizes).tolist(), strict=True):
            yield _new_tuple(Entry, (*_unpack_header(buffer, start), buffer[start + skipped : end].tobytes()))

    @property
    def payload_offsets(self) -> Int64s:
        """Where each payload starts in ``buffer``, ``(n,)`` int64, bytes."""
        return self.offsets + (ENTRY_HEADER_BYTES + self.digest_bytes)

    @property
    def payload_sizes(self) -> Int64s:
        """Size of each payload, ``(n,)`` int64, bytes."""
        return self.sizes - (ENTRY_HEADER_BYTES + self.digest_bytes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads together."""
        return int(self.sizes.sum()) - len(self) * (ENTRY_HEADER_BYTES + self.digest_bytes)

    def payload(self, index: SupportsIndex) -> memoryview:
        """Return the payload of an entry, by its place in the batch, without copying it."""
        start = int(self.offsets[index])
        return self.buffer[start + ENTRY_HEADER_BYTES + self.digest_bytes : start + int(self.sizes[index])]
