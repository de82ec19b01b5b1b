"""Syncs that no cut shows to be needed, and what makes the same durable, or why it may be lost.

A site is the system call, the function of the seam that makes it, and the function of pybk that asks for it. What is
said of each is verified: by cuts of a workload in which the file or directory of the sync has lost its changes, at each
moment from the sync to the next one of the same file or directory, or else by a test of the simulated disk, which shows
what the sync is for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple


class Covered(NamedTuple):
    """Why the syncs of a site can be left out.

    Attributes:
        reason: What covers them.
        workload: In which that was verified.
        test: Which shows that they are needed after something that no workload does: its file and function.
    """

    reason: str
    workload: str = ""
    test: str = ""


_FIRST_COMMIT: Final = "the first commit of the environment syncs the whole file"
_SALVAGED_AGAIN: Final = "the next open salvages again, and what it finds is in limbo again"
_MADE_BEFORE: Final = "the names of an environment that was there were synced when it was made, or opened after a kill"

COVERED: Final[Mapping[str, Covered]] = {
    "fdatasync _make_file metadata/lmdb_store.py __init__": Covered(_FIRST_COMMIT, "bookie"),
    "fdatasync _make_file storage/repair/rebuild.py _set_aside_entries": Covered(_FIRST_COMMIT, "harmed"),
    "fdatasync _make_file storage/repair/rebuild.py _write_index": Covered(_FIRST_COMMIT, "harmed"),
    "fsync sync_directory storage/repair/rebuild.py _open_entries": Covered(_MADE_BEFORE, "harmed"),
    "fsync sync_directory storage/repair/rebuild.py _is_sound": Covered(_MADE_BEFORE, "harmed"),
    "fsync sync_directory storage/repair/rebuild.py _state_of_index": Covered(_MADE_BEFORE, "harmed"),
    "fsync sync_directory metadata/lmdb_store.py open_url": Covered(
        "the environment syncs the innermost name again", "bookie"
    ),
    "fsync sync_directory admin/dev/dev_cluster.py save": Covered("the second file is in the same directory", "files"),
    "fsync sync_directory admin/dev/dev_cluster.py make_files": Covered("save syncs the directory", "files"),
    "fsync sync storage/directories.py note_accepted_loss": Covered("the file is empty", "harmed"),
    "fsync sync storage/directories.py note_lost_environments": Covered("the file is empty", "salvage"),
    "fsync sync_directory storage/directories.py note_lost_environments": Covered(
        "the environment, which is made after it, syncs the same directory", "salvage"
    ),
    "fsync sync_directory storage/log/salvage.py keep_watermark": Covered(_SALVAGED_AGAIN, "salvage"),
    "fsync sync_directory storage/log/salvage.py replace_missing": Covered(_SALVAGED_AGAIN, "salvage"),
    "fsync sync storage/tiers/__init__.py replace_missing": Covered(_SALVAGED_AGAIN, "salvage"),
    "write commit storage/store.py _take_older_parts": Covered(_SALVAGED_AGAIN, "salvage"),
    "fsync sync_directory backup/restoring.py run": Covered(
        "the restored store is renamed, and that is synced", "backups"
    ),
    "fsync sync storage/log/recovery.py rewrite_commits": Covered(
        "commits are synced when they are written; this is for a page cache after a failed sync",
        test="tests/storage/test_mutants.py what_was_served_after_a_failed_sync_stays",
    ),
    "write commit storage/tiers/lmdb_tier.py free_records": Covered(
        "rows that are back are those of records nothing names", "ledgers"
    ),
}


def site_of(call: str) -> str:
    """Return the site of a ``Record.call``, which no change of other lines changes."""
    system_call, first, *_, last = call.split(" < ") if call.count(" < ") > 1 else (*call.split(" < "), call)
    return f"{system_call} {first.rsplit(' ', 1)[1]} {re.sub(r':[0-9]+', '', last)}"
