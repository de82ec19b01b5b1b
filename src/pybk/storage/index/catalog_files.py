"""The catalog files of a store: one file per catalog, in the store's main directory, named by its file id."""

from __future__ import annotations

import logging
import os
import re
from typing import Final

from pybk.errors import CorruptError, PybkError
from pybk.storage.format.catalog import CatalogState, read_catalog
from pybk.storage.io.filesystem import FileSystem

logger = logging.getLogger(__name__)

CATALOG_PREFIX: Final = "catalog-"
_FILE_ID: Final = re.compile("[0-9a-f]{16}")


def catalog_path(root: str, file_id: int) -> str:
    """Return the path of a catalog file."""
    return os.path.join(root, f"{CATALOG_PREFIX}{file_id:016x}")


def catalog_ids(fs: FileSystem, root: str) -> list[int]:
    """Return the ids of the catalog files in a store's directory, ascending."""
    names = fs.list_directory(root)
    stems = (name.removeprefix(CATALOG_PREFIX) for name in names if name.startswith(CATALOG_PREFIX))
    return sorted(int(stem, 16) for stem in stems if _FILE_ID.fullmatch(stem))


def newest_catalog(fs: FileSystem, root: str, store_id: bytes) -> CatalogState:
    """Return the contents of the newest intact catalog in a store's directory; others may be unfinished or damaged.

    Raises:
        CorruptError: No catalog is intact.
    """
    states: list[CatalogState] = []
    errors: list[str] = []
    for file_id in catalog_ids(fs, root):
        try:
            states.append(read_catalog(fs, catalog_path(root, file_id), store_id, file_id))
        except PybkError as error:
            errors.append(str(error))
    if not states:
        raise CorruptError(
            f"{root} has no whole catalog, so nothing says which ledgers there are; restore it from a backup: "
            f"{'; '.join(errors) or 'no file begins with ' + CATALOG_PREFIX}"
        )
    for problem in errors:
        logger.warning("a catalog was passed over: %s", problem)
    return max(states, key=lambda state: (state.mark.next_lsn, state.mark.next_file_id, state.mark.catalog_file_id))
