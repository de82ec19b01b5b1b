"""The file ``scrub`` of a store: when its entries were checked, and which were found damaged.

It is JSON and a checksum, replaced as a whole. Nothing depends on it: without it, checks begin anew.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any, Final

from xxhash import xxh3_64_hexdigest

from pybk.storage.io.filesystem import FileSystem, replace_file

logger = logging.getLogger(__name__)

NOTES_NAME: Final = "scrub"
NOTES_BYTES_MAX: Final = 1 << 20


def save_notes(fs: FileSystem, root: str, values: Mapping[str, Any]) -> None:
    """Replace the notes of a store, durably.

    Raises:
        OSError: That failed; the notes are the old ones.
    """
    body = json.dumps(values, sort_keys=True)
    replace_file(fs, os.path.join(root, NOTES_NAME), f"{body}\n{xxh3_64_hexdigest(body.encode())}\n".encode())


def load_notes(fs: FileSystem, root: str) -> dict[str, Any] | None:
    """Return the notes of a store; None if there are none, or they are damaged, which is logged."""
    path = os.path.join(root, NOTES_NAME)
    if not fs.exists(path):
        return None
    file = fs.open(path)
    try:
        data = file.read(0, min(file.size, NOTES_BYTES_MAX))
    finally:
        file.close()
    body, _, checksum = data.decode("utf-8", "replace").partition("\n")
    if checksum != xxh3_64_hexdigest(body.encode()) + "\n":
        logger.warning("%s is damaged, so the checks of the store's entries begin anew", path)
        return None
    values = json.loads(body)
    return values if isinstance(values, dict) else None
