"""Arithmetic on runs: whether they tile a ledger, the entries that they hold, and their bytes in each file.

Runs are arrays of ``location_dtype()``; none of these functions changes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from pybk.deferral import np
from pybk.storage.format.record import RECORD_HEADER_BYTES, RunLocations, location_dtype

if TYPE_CHECKING:
    import numpy.typing as npt

NOTHING: Final = (-1, 1)
"""Last entry and stride before a ledger's first run."""

_FEW: Final = 64
"""Up to so many runs Python adds numbers faster than numpy."""

_Ids: TypeAlias = "npt.NDArray[np.int64]"


def last_entry(runs: RunLocations) -> tuple[int, int]:
    """Return the last entry id of a non-empty run array, and the stride of its last run."""
    first, count, stride, *_ = runs[-1].item()
    return first + (count - 1) * stride, stride


def untiled(runs: RunLocations, after: tuple[int, int]) -> str | None:
    """Return where runs fail to tile a ledger: unsorted, overlapping, or with gaps other than those of a stride.

    Args:
        runs: ``(r,)``, not empty.
        after: Last entry and stride before them, as from ``last_entry``.

    Returns:
        The problem, None if there is none. Costs about a microsecond for one run.
    """
    first, count, stride, *_ = runs[0].item()
    if count < 1 or stride < 1:
        return f"a run of {count} entries by stride {stride} at entry {first}"
    if first != after[0] + 1 and (first <= after[0] or (stride == 1 and after[1] == 1)):
        return f"entry {first} follows entry {after[0]}"
    if len(runs) == 1:
        return None
    wrong = _disordered(runs)
    if wrong is None:
        firsts, counts, strides = _columns(runs)
        nexts = firsts + strides * (counts - 1) + 1
        gaps = np.flatnonzero((firsts[1:] != nexts[:-1]) & (strides[1:] == 1) & (strides[:-1] == 1))
        if gaps.size:
            wrong = f"entry {firsts[gaps[0] + 1]} follows entry {nexts[gaps[0]] - 1}"
    return wrong


def bytes_by_file(runs: RunLocations) -> dict[int, int]:
    """Return the bytes of the records of some runs, headers included, by the file they lie in."""
    if len(runs) > _FEW:
        files, inverse = np.unique(runs["file"], return_inverse=True)
        sums = np.bincount(inverse, weights=runs["body"].astype(np.float64) + RECORD_HEADER_BYTES)
        return dict(zip(files.tolist(), sums.astype(np.int64).tolist(), strict=True))
    found: dict[int, int] = {}
    for file_id, body in zip(runs["file"].tolist(), runs["body"].tolist(), strict=True):
        found[file_id] = found.get(file_id, 0) + RECORD_HEADER_BYTES + body
    return found


def differing_entries(one: RunLocations, other: RunLocations) -> str | None:
    """Return how the entries of two sorted, non-empty run arrays differ; None if they are the same.

    Costs O(runs) where strides are 1, else O(entries) in time and memory.
    """
    wrong = _disordered(one) or _disordered(other)
    if wrong is not None:
        return wrong
    if _plain(one) and _plain(other):
        same = np.array_equal(_stretches(one), _stretches(other))
    else:
        same = np.array_equal(_entry_ids(one), _entry_ids(other))
    if same:
        return None
    return (
        f"{len(one)} runs from entry {int(one['first'][0])} to {last_entry(one)[0]} hold other entries than "
        f"{len(other)} runs from {int(other['first'][0])} to {last_entry(other)[0]}"
    )


def by_file(runs: RunLocations) -> list[RunLocations]:
    """Split sorted runs where the file changes."""
    if not len(runs):
        return []
    return np.split(runs, np.flatnonzero(np.diff(runs["file"].astype(np.int64))) + 1)


def joined(parts: list[RunLocations]) -> RunLocations:
    """Return runs of several arrays as one sorted array, empty for none."""
    runs = np.concatenate([np.empty(0, location_dtype()), *parts])
    return runs[np.argsort(runs["first"], kind="stable")]


def _columns(runs: RunLocations) -> tuple[_Ids, _Ids, _Ids]:
    return runs["first"].astype(np.int64), runs["count"].astype(np.int64), runs["stride"].astype(np.int64)


def _disordered(runs: RunLocations) -> str | None:
    """Return where runs are empty, unsorted or overlap; None if nowhere."""
    firsts, counts, strides = _columns(runs)
    empty = np.flatnonzero((counts < 1) | (strides < 1))
    if empty.size:
        return f"a run of {counts[empty[0]]} entries by stride {strides[empty[0]]} at entry {firsts[empty[0]]}"
    lasts = firsts + strides * (counts - 1)
    overlaps = np.flatnonzero(firsts[1:] <= lasts[:-1])
    if overlaps.size:
        return f"entry {firsts[overlaps[0] + 1]} follows entry {lasts[overlaps[0]]}"
    return None


def _plain(runs: RunLocations) -> bool:
    return bool(((runs["stride"] == 1) | (runs["count"] == 1)).all())


def _stretches(runs: RunLocations) -> _Ids:
    """Return first and last entry of each stretch of consecutive entries, ``(2, s)``, of plain runs."""
    firsts, counts, _ = _columns(runs)
    ends = firsts + counts
    breaks = np.flatnonzero(firsts[1:] != ends[:-1])
    return np.stack((firsts[np.r_[0, breaks + 1]], ends[np.r_[breaks, len(runs) - 1]]))


def _entry_ids(runs: RunLocations) -> _Ids:
    firsts, counts, strides = _columns(runs)
    starts = np.cumsum(counts) - counts
    number = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    return np.asarray(np.repeat(firsts, counts) + number * np.repeat(strides, counts), np.int64)
