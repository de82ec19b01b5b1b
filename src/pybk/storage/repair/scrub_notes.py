"""The file ``scrub`` of a store: when its entries were checked, and which were found damaged.

It is JSON and a checksum, replaced as a whole. Nothing depends on it: without it, checks begin anew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Final

from pybk.storage.io.filesystem import FileSystem
from pybk.storage.volumes import load_checked, save_checked

logger = logging.getLogger(__name__)

NOTES_NAME: Final = "scrub"


def save_notes(fs: FileSystem, root: str, values: Mapping[str, Any]) -> None:
    """Replace the notes of a store, durably.

    Raises:
        OSError: Writing failed; the notes are the old ones.
    """
    save_checked(fs, os.path.join(root, NOTES_NAME), values)


def load_notes(fs: FileSystem, root: str) -> dict[str, Any] | None:
    """Return the notes of a store; None if there are none, or they are damaged, which is logged."""
    path = os.path.join(root, NOTES_NAME)
    if not fs.exists(path):
        return None
    values = load_checked(fs, path)
    if values is None:
        logger.warning("%s is damaged, so the checks of the store's entries begin anew", path)
    return values if isinstance(values, dict) else None
