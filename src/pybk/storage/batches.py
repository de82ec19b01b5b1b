"""Construction of an ``EntryBatch`` from runs: the position of each entry of some records in one buffer."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from pybk.deferral import np
from pybk.errors import CorruptError
from pybk.ledger.entry import EntryBatch
from pybk.ledger.native import CORE
from pybk.storage.format.log_file import RECORD_HEADER_BYTES, RunLocations

if TYPE_CHECKING:
    import numpy.typing as npt

_one_end = struct.Struct("<I").unpack_from
_two_ends = struct.Struct("<II").unpack_from

_GAP_BYTES: Final = 64 << 10
SPAN_FACTOR: Final = 4
"""The multiple of ``max_bytes`` that one direct read may span, when other ledgers' records lie between."""


def take_locations(runs: RunLocations, max_bytes: int, *, span_max: int) -> RunLocations:
    """Return the leading runs of one file that hold about ``max_bytes``, at least one run.

    Args:
        runs: Sorted runs, not empty.
        max_bytes: Entry bytes wanted.
        span_max: Longest distance in bytes from the first to the last byte.
    """
    other = np.flatnonzero(runs["file"] != runs["file"][0])
    if other.size:
        runs = runs[: other[0]]
    ends = np.cumsum(runs["body"].astype(np.int64))
    count = int(np.searchsorted(ends, max_bytes)) + 1
    starts = runs["offset"].astype(np.int64)
    low = np.minimum.accumulate(starts)
    high = np.maximum.accumulate(starts + runs["body"])
    wide = np.flatnonzero(high - low > span_max)
    if wide.size:
        count = min(count, max(1, int(wide[0])))
    return runs[:count]


def span(runs: RunLocations) -> tuple[int, int]:
    """Return the first byte of the first record of one file, and the end of the last."""
    starts = runs["offset"].tolist()  # quicker than numpy's reductions for the few records of most batches
    last = max(starts)
    return min(starts), last + int(runs["body"][starts.index(last)]) + RECORD_HEADER_BYTES


def spans(runs: RunLocations) -> list[tuple[int, int]]:
    """Return ranges of one file that cover all its records, joined across gaps of up to 64 KiB: (first byte, end)."""
    starts = runs["offset"].astype(np.int64)
    ends = starts + runs["body"] + RECORD_HEADER_BYTES
    if len(runs) == 1:
        return [(int(starts[0]), int(ends[0]))]
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    cuts = np.flatnonzero(starts[1:] - ends[:-1] > _GAP_BYTES) + 1
    lows = starts[np.concatenate(([0], cuts))].tolist()
    highs = ends[np.concatenate((cuts - 1, [len(ends) - 1]))].tolist()
    return list(zip(lows, highs, strict=True))


def locate_entries(
    buffer: memoryview, runs: RunLocations, body_starts: npt.NDArray[np.int64], *, where: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Locate every entry of some plain records.

    Args:
        buffer: Holds the records' bodies.
        runs: The records, ``(r,)`` runs in entry order.
        body_starts: The place where each body starts in ``buffer``, ``(r,)`` int64, bytes.
        where: Names the place in errors.

    Returns:
        Entry ids, offsets and sizes, each ``(n,)`` int64, offsets and sizes in bytes of ``buffer``.

    Raises:
        CorruptError: A record does not fit the buffer, or its table does not fit the record.
    """
    counts = runs["count"].astype(np.int64)
    bodies = runs["body"].astype(np.int64)
    if not len(runs) or min(np.count_nonzero(counts), np.count_nonzero(runs["stride"])) < len(runs):
        raise CorruptError(f"{where}: a run without entries, or of stride 0")
    if int((body_starts + bodies).max()) > len(buffer):
        raise CorruptError(f"{where}: a record ends beyond the {len(buffer)} bytes that are there")
    starts = np.cumsum(counts) - counts
    total = int(counts.sum())
    ids = np.empty(total, np.int64)
    offsets = np.empty(total, np.int64)
    sizes = np.empty(total, np.int64)
    single = counts == 1
    at = starts[single]
    ids[at] = runs["first"][single]
    offsets[at] = body_starts[single]
    sizes[at] = bodies[single]
    for number in np.flatnonzero(~single).tolist():
        count = int(counts[number])
        low = int(starts[number])
        base = int(body_starts[number])
        if 4 * count > int(bodies[number]):
            raise CorruptError(
                f"{where}: a table of {count} entries does not fit a record of {int(bodies[number])} bytes"
            )
        first = base + 4 * count
        ends = np.frombuffer(buffer, "<u4", count, base).astype(np.int64)
        ends += first
        offsets[low] = first
        offsets[low + 1 : low + count] = ends[:-1]
        np.subtract(ends, offsets[low : low + count], out=sizes[low : low + count])
        stride = int(runs["stride"][number])
        run_first = int(runs["first"][number])
        ids[low : low + count] = np.arange(run_first, run_first + stride * count, stride)
        if int(ends[-1]) != base + int(bodies[number]) or int(sizes[low : low + count].min()) < 0:
            raise CorruptError(
                f"{where}: the table of entries {run_first} to {run_first + stride * (count - 1)} is damaged"
            )
    return ids, offsets, sizes


def make_batch(
    ledger_id: int,
    buffer: memoryview,
    located: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]],
    *,
    first: int,
    last: int,
    max_bytes: int,
    digest_bytes: int,
) -> EntryBatch:
    """Make a batch of the located entries ``first`` to ``last`` that fit ``max_bytes``, at least one."""
    ids, offsets, sizes = located
    low = int(np.searchsorted(ids, first))
    high = int(np.searchsorted(ids, last, side="right"))
    fits = int(np.searchsorted(np.cumsum(sizes[low:high]), max_bytes, side="right"))
    high = min(high, low + max(1, fits))
    return EntryBatch(ledger_id, ids[low:high], buffer, offsets[low:high], sizes[low:high], digest_bytes)


def entry_span(
    view: memoryview, words: tuple[int, int, int, int], entry_id: int, table: bytes | None = None
) -> tuple[int, int]:
    """Return where one entry starts and ends in the map of the file its run lies in.

    Args:
        view: The map; with ``table`` only its length is looked at.
        words: The run.
        entry_id: The entry.
        table: A copy of the record's table of ends; None to look at the one in the map.

    Raises:
        CorruptError: The record does not fit the file, or its table does not fit the record.
    """
    if CORE is not None:
        try:
            return CORE.span(view, table, words, entry_id)
        except ValueError:
            pass  # the following finds out what is wrong
    first, count_stride, place, body_bytes = words
    start = (place & 0xFFFFFFFF) + RECORD_HEADER_BYTES
    end = start + body_bytes
    count = count_stride & 0xFFFFFFFF
    if count > 1:
        base = start + 4 * count
        number = (entry_id - first) // (count_stride >> 32 or 1)
        if base > end or end > len(view) or not 0 <= number < count:
            raise CorruptError(f"file {place >> 32:016x}: no entry {entry_id} in the record at {place & 0xFFFFFFFF}")
        ends, at = (view, start) if table is None else (table, 0)
        if number:
            low, high = _two_ends(ends, at + 4 * number - 4)
            start, end = base + low, min(end, base + high)
        else:
            start, end = base, min(end, base + _one_end(ends, at)[0])
    if end > len(view) or start > end:
        raise CorruptError(f"file {place >> 32:016x}: entry {entry_id} ends beyond its record or its file")
    return start, end
