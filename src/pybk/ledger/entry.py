"""Entries as a reader returns them: singly, or as a batch over one buffer. Encoding: ``docs/reference/format.md``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import starmap
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple, SupportsIndex, TypeAlias, cast, overload

from pybk import ledger
from pybk.deferral import np
from pybk.ledger import CORE, CORE_ENCODES
from pybk.values import whole

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

ENTRY_HEADER_BYTES: Final = 32
"""Bytes of an encoded entry before its digest."""

_NATIVE_MIN: Final = 32
"""The number of entries from which on the core saves more time than the check that all lie in its buffer takes."""

Int64s: TypeAlias = "npt.NDArray[np.int64]"

_unpack_header = Struct(">qqqq").unpack_from
_new_tuple = tuple.__new__


class Entry(NamedTuple):
    """One entry.

    Attributes:
        ledger_id: The ledger.
        entry_id: The entry, from 0 up.
        last_add_confirmed: The ledger's last add confirmed as the writer knew it when it wrote this entry.
        length: Payload bytes of the ledger up to and including this entry.
        payload: The application's bytes.
    """

    ledger_id: int
    entry_id: int
    last_add_confirmed: int
    length: int
    payload: bytes


def lengths_of(payloads: list[object]) -> Int64s | None:
    """Return the sizes of payloads in bytes, ``(n,)`` int64; None if one is not of type ``bytes``.

    Args:
        payloads: What was given as payloads, ``(n,)``.

    Cost: 4 ns per payload with the native core, and 70 without.
    """
    if CORE is not None and CORE_ENCODES:
        sizes = CORE.lengths(payloads)
        return None if sizes is None else np.frombuffer(sizes, np.int64)
    if set(map(type, payloads)) - {bytes}:
        return None
    return np.fromiter(map(len, cast("list[bytes]", payloads)), np.int64, len(payloads))


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
    """Entries of one ledger in one buffer; a payload is copied when its entry is taken out, not before.

    Entries are in the order of their ids, but need not be adjacent in the buffer. A batch must not be changed, because
    other batches and the ledger's cache may share its buffer and arrays.

    A batch can be pickled, which copies its entries. PyArrow, Polars, DuckDB and pandas take it as Arrow data, through
    the Arrow PyCapsule interface; the columns are those of ``to_arrow``.

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
        entry_ids: npt.NDArray[np.int64],
        buffer: memoryview,
        offsets: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
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
        """Return the number of entries."""
        return len(self.entry_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the entries' own bytes, which are a small part of the buffer where it is a whole mapped file."""
        encoded = [self.buffer[start:end] for start, end in zip(self.offsets.tolist(), self._ends(), strict=True)]
        starts = np.cumsum(self.sizes) - self.sizes
        return _unpickled, (self.ledger_id, self.entry_ids, b"".join(encoded), starts, self.sizes, self.digest_bytes)

    def __copy__(self) -> EntryBatch:
        """Return the batch itself, because a batch is not changed."""
        return self

    def _ends(self) -> list[int]:
        """Return where each encoded entry ends in ``buffer``, bytes."""
        ends: list[int] = (self.offsets + self.sizes).tolist()
        return ends

    @overload
    def __getitem__(self, index: SupportsIndex) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> EntryBatch: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Entry | EntryBatch:
        """Return the entry at an index, which counts from the end if it is negative; or a slice as a batch.

        A slice is an ``EntryBatch`` over the same buffer and copies nothing.

        Raises:
            IndexError: The batch has no entry at this index.
            TypeError: It is neither a whole number nor a slice.
        """
        if isinstance(index, slice):
            ids, offsets, sizes = self.entry_ids[index], self.offsets[index], self.sizes[index]
            return EntryBatch(self.ledger_id, ids, self.buffer, offsets, sizes, self.digest_bytes)
        number = _whole_index(index)
        start = int(self.offsets[number])
        return decode_entry(self.buffer, start, start + int(self.sizes[number]), self.digest_bytes)

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries, each with a copy of its payload."""
        places = zip(self.offsets.tolist(), self._ends(), strict=True)
        if CORE is not None and len(self) >= _NATIVE_MIN and self._lie_inside():
            return starmap(partial(CORE.decode, Entry, self.buffer, ENTRY_HEADER_BYTES + self.digest_bytes), places)
        return self._decoded(places)

    def _decoded(self, places: Iterable[tuple[int, int]]) -> Iterator[Entry]:
        """Yield the entries at some places."""
        buffer = self.buffer
        skipped = ENTRY_HEADER_BYTES + self.digest_bytes
        for start, end in places:
            yield _new_tuple(Entry, (*_unpack_header(buffer, start), buffer[start + skipped : end].tobytes()))

    def _lie_inside(self) -> bool:
        """Return whether all entries lie in the buffer, and are as long as their header and digest at least."""
        if int(self.offsets.min()) < 0 or int(self.sizes.min()) < ENTRY_HEADER_BYTES + self.digest_bytes:
            return False
        return not (self.offsets > len(self.buffer) - self.sizes).any()

    @property
    def payload_offsets(self) -> npt.NDArray[np.int64]:
        """The offset of each payload in ``buffer``, ``(n,)`` int64, bytes."""
        return self.offsets + (ENTRY_HEADER_BYTES + self.digest_bytes)

    @property
    def payload_sizes(self) -> npt.NDArray[np.int64]:
        """Size of each payload, ``(n,)`` int64, bytes."""
        return self.sizes - (ENTRY_HEADER_BYTES + self.digest_bytes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads together."""
        return int(self.sizes.sum()) - len(self) * (ENTRY_HEADER_BYTES + self.digest_bytes)

    def payload(self, index: SupportsIndex) -> memoryview:
        """Return the payload of the entry at an index, without copying it.

        Raises:
            IndexError: The batch has no entry at this index.
            TypeError: It is not a whole number.
        """
        number = _whole_index(index)
        start = int(self.offsets[number])
        return self.buffer[start + ENTRY_HEADER_BYTES + self.digest_bytes : start + int(self.sizes[number])]

    def to_arrow(self) -> pa.RecordBatch:
        """Return the entries as an Arrow record batch.

        Returns:
            One row an entry, in the batch's order, with the columns ``ledger_id``, ``entry_id``,
            ``last_add_confirmed``, ``length`` (int64) and ``payload`` (binary; large_binary if the payloads have 2 GiB
            or more). No value is null.

        Raises:
            UsageError: PyArrow is not installed; ``pip install 'pybk[arrow]'`` installs it.

        Cost: Copies each payload once, and makes no Python object per entry.
        """
        arrow = ledger.pyarrow()
        headers = np.frombuffer(gather(self.buffer, self.offsets, ENTRY_HEADER_BYTES), ">i8").reshape(-1, 4)
        numbers = headers.astype(np.int64)
        return arrow.RecordBatch.from_arrays(
            [
                *(arrow.array(numbers[:, column]) for column in range(4)),
                ledger.binary_array(self.buffer, self.payload_offsets, self.payload_sizes),
            ],
            names=list(Entry._fields),
        )

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        """Return the schema and the data of ``to_arrow`` as capsules of the Arrow C data interface."""
        capsules: tuple[object, object] = self.to_arrow().__arrow_c_array__(requested_schema)
        return capsules

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return a stream of the one record batch of ``to_arrow`` as a capsule of the Arrow C stream interface."""
        rows = self.to_arrow()
        return ledger.pyarrow().RecordBatchReader.from_batches(rows.schema, [rows]).__arrow_c_stream__(requested_schema)


def _whole_index(index: object) -> int:
    """Return an index as ``int``; raise TypeError for anything but a whole number, such as a bool."""
    number = whole(index)
    if number is None:
        raise TypeError(f"an index into an EntryBatch is a whole number, not {index!r:.100}")
    return number


def _unpickled(
    ledger_id: int, entry_ids: Int64s, buffer: bytes, offsets: Int64s, sizes: Int64s, digest_bytes: int
) -> EntryBatch:
    """Return a batch as ``EntryBatch.__reduce__`` pickled it."""
    return EntryBatch(ledger_id, entry_ids, memoryview(buffer), offsets, sizes, digest_bytes)
