"""Bit rot: flips bits in the files of a bookie, where scrubs and reads have to find them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Final

from pybk.admin.dump import dump_store
from pybk.storage.format.log_file import RECORD_HEADER_BYTES
from pybk.storage.tiers import COLD, LOG

_TRIES: Final = 10
_PAUSE_SECONDS: Final = 0.2


def flip_bits(directory: str, count: int) -> int:
    """Flip a bit in the middle of some sealed records.

    Sealed records are those that a start does not read again: in cold segments, and in log files before the one at
    which the replay begins. Only records of entries are damaged, each in its body.

    Args:
        directory: The directory of a bookie, which may run.
        count: The most records to damage; the newest ones are taken.

    Returns:
        The number of damaged records.
    """
    tries = 0
    while not (chosen := list(_sealed(directory))[-count:]) and tries < _TRIES:
        time.sleep(_PAUSE_SECONDS)  # a checkpoint may replace files while they are listed
        tries += 1
    for path, offset in chosen:
        with open(path, "r+b", buffering=0) as file:
            found = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([found[0] ^ 1]), offset)
    return len(chosen)


def _sealed(directory: str) -> Iterator[tuple[str, int]]:
    """Yield a path and the offset of a byte in the middle of each sealed record of entries."""
    replay_from, path, sealed = 0, "", False
    for row in dump_store(directory):
        if row["what"] == "catalog":
            replay_from = row["first_log_file_id"]
        elif row["what"] == "file":
            path = row["path"]
            sealed = row["kind"] == COLD or (row["kind"] == LOG and int(row["file"], 16) < replay_from)
        elif row["what"] == "record" and sealed and row["count"] and row["bytes"]:
            yield path, row["offset"] + RECORD_HEADER_BYTES + row["bytes"] // 2
