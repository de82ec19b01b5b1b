"""Syncs that no cut shows to be needed, and what makes the same durable, or why it may be lost.

A site is the system call, the function of the seam that makes it, and the function of pybk that asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

COVERED: Final[Mapping[str, str]] = {
    "fdatasync __init__ metadata/lmdb_store.py __init__": "the first commit syncs the whole file",
    "fsync sync_directory metadata/lmdb_store.py __init__": "open_url has synced the name of the directory",
    "fsync sync_directory metadata/lmdb_store.py open_url": "the environment syncs the innermost name again",
    "fsync sync storage/format/catalog.py create": "the first records are synced before the index names the catalog",
    "fsync sync_directory storage/format/catalog.py create": "a new store syncs its directory after that",
    "fsync sync admin/dev/cluster.py save": "each start of bookies writes the file of ports again",
    "fsync sync_directory admin/dev/cluster.py save": "the second file is in the same directory",
    "fsync sync_directory admin/dev/cluster.py make_files": "save syncs the directory",
    "fsync sync storage/directories.py note_accepted_loss": "the file is empty",
    "fsync sync_directory storage/directories.py note_accepted_loss": "the creation that follows syncs the directory",
    "fsync sync_directory storage/directories.py create_store": "make_directory has synced the name of the root; the "
    "next open removes a planned cookie that is back",
    "fsync sync_directory storage/format/watermark.py create": "the cookie, which is last, syncs the directory",
    "fsync sync_directory storage/volumes.py save_directories": "the cookie, which is last, syncs the directory",
    "fsync sync_directory backup/restoring.py run": "the restored store is renamed, and that is synced",
    "fsync sync storage/log/recovery.py make_log_durable": "commits are synced when they are written; this is for a "
    "page cache after a failed sync, which no disk of these tests has",
    "fsync sync_directory storage/log/recovery.py make_log_durable": "names are synced before files are used; an "
    "unbegun file that is back is removed again",
    "write commit storage/index/index.py update": "an index that is older than the catalog is made again",
    "write commit storage/tiers/lmdb_tier.py free_records": "rows that are back are those of records nothing names",
}


def site_of(call: str) -> str:
    """Return the site of a ``Record.call``, which no change of other lines changes."""
    system_call, first, *_, last = call.split(" < ") if call.count(" < ") > 1 else (*call.split(" < "), call)
    return f"{system_call} {first.rsplit(' ', 1)[1]} {re.sub(r':[0-9]+', '', last)}"
