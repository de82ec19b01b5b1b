"""Fragments of a ledger: which one holds an entry, where each ends, and how an ensemble change adds one.

A fragment is a range of entries that one ensemble holds. It begins at ``first_entry_id`` and ends before the next one
begins (I5); the last one ends where the ledger is closed, and has no end while the ledger is open.
"""

from __future__ import annotations

from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata, LedgerState


def fragment_of(fragments: tuple[Fragment, ...], entry_id: int) -> Fragment:
    """Return the fragment that holds an entry."""
    for fragment in reversed(fragments):
        if fragment.first_entry_id <= entry_id:
            return fragment
    raise ValueError(f"entry {entry_id} is before the first fragment, {fragments[0].first_entry_id}")


def fragment_end(metadata: LedgerMetadata, index: int) -> int | None:
    """Return the last entry of a fragment (C15: it, and not the LAC, bounds a copy), or None if it has no end yet.

    Args:
        metadata: The ledger's metadata.
        index: The index of the fragment.
    """
    if index + 1 < len(metadata.fragments):
        return metadata.fragments[index + 1].first_entry_id - 1
    return metadata.last_entry_id if metadata.state is LedgerState.CLOSED else None


def fragment_ranges(fragments: tuple[Fragment, ...], first: int, last: int) -> list[tuple[Fragment, int, int]]:
    """Return the fragments that overlap a range, each with the first and last entry of the range that it holds."""
    ends = [each.first_entry_id - 1 for each in fragments[1:]] + [last]
    return [
        (fragment, max(first, fragment.first_entry_id), min(last, end))
        for fragment, end in zip(fragments, ends, strict=True)
        if max(first, fragment.first_entry_id) <= min(last, end)
    ]


def with_ensemble(fragments: tuple[Fragment, ...], first: int, ensemble: tuple[Bookie, ...]) -> tuple[Fragment, ...]:
    """Return the fragments, with a new last one whose ensemble holds the entries from ``first`` on.

    It replaces a last fragment that begins at ``first``, because that one holds no confirmed entry.
    """
    if fragments[-1].first_entry_id == first:
        fragments = fragments[:-1]
    return (*fragments, Fragment(first, ensemble))
