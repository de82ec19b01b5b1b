"""The results of exporting, checking and restoring a cluster's metadata."""

from __future__ import annotations

from typing import NamedTuple


class MetadataExportReport(NamedTuple):
    """The result of ``export_metadata``.

    Attributes:
        path: The file.
        values: Number of keys.
        ledgers: Number of keys below ``ledgers``, tombstones included.
        bytes: Size of the file.
        sha256: SHA-256 of everything before its last line, in hex; the last line has it as well.
    """

    path: str
    values: int
    ledgers: int
    bytes: int
    sha256: str


class MetadataProblem(NamedTuple):
    """A problem of a cluster's metadata.

    Attributes:
        key: The key.
        problem: The problem and its remedy.
    """

    key: str
    problem: str


class MetadataCheckReport(NamedTuple):
    """The result of ``check_metadata``.

    Attributes:
        values: Number of keys that were read.
        ledgers: Number of ledgers that exist.
        not_closed: Number of ledgers that are open or in recovery.
        tombstones: Number of ledgers that were deleted.
        bookies: Number of bookies that belong to the cluster.
        unknown: Number of keys of a kind that this pybk does not check.
        next_id: The next ledger id that is not reserved; 0 if none was given yet.
        epoch: The metadata epoch as text; empty if the cluster has none yet.
        problems: The problems.
        notes: Observations that need not be problems.
        repaired: Keys whose damaged value was replaced before the check.
    """

    values: int
    ledgers: int
    not_closed: int
    tombstones: int
    bookies: int
    unknown: int
    next_id: int
    epoch: str
    problems: tuple[MetadataProblem, ...]
    notes: tuple[str, ...]
    repaired: tuple[str, ...]


class MetadataRestoreReport(NamedTuple):
    """The result of ``restore_metadata`` and ``rebuild_metadata``, also of a dry run.

    Attributes:
        written: Whether anything was written; False for a dry run.
        values: Keys that the export or the store has.
        known: Ledgers that the export or the store has.
        made: Ledgers that were made again from bookies' directories; they are in recovery.
        corrected: Known ledgers whose ensembles were corrected.
        deleted: Ledgers that got a tombstone, because a bookie remembers their deletion.
        suspects: Those of ``made`` that too few bookies hold. They may have been deleted while their bookies were away;
            no bookie remembers such a deletion.
        undecidable: Ledgers that are not closed and have lost so many bookies that no recovery can find their ends.
        incomplete: Entries that no bookie has: ledger, first, last.
        not_made: Ledgers that cannot be made again: ledger, reason.
        next_id: The next ledger id that will be given.
        epoch: The number of the new epoch; 0 for none, or for a dry run.
        limbo: Whether bookies put all their ledgers in limbo when they start, because not all directories were read.
        notes: Losses, and the next steps.
    """

    written: bool
    values: int
    known: int
    made: tuple[int, ...]
    corrected: tuple[int, ...]
    deleted: tuple[int, ...]
    suspects: tuple[int, ...]
    undecidable: tuple[int, ...]
    incomplete: tuple[tuple[int, int, int], ...]
    not_made: tuple[tuple[int, str], ...]
    next_id: int
    epoch: int
    limbo: bool
    notes: tuple[str, ...]
