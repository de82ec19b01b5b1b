"""The parts that a live store is made of, opened, and compared before anything on disk is changed.

Each part may be older than the others, because it was put back from a backup or its device lost its last writes. So an
open compares index, catalog, files and the SSD tier first (``consistency.py``). Only after that may the store remove,
mend or write anything. Up to then the one change is to LMDB's lock files; a salvage also notes durably which LMDB
environments are missing, because opening them makes empty ones.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pybk.errors import CorruptError
from pybk.flags import StorageHint
from pybk.storage.consistency import (
    OlderIndexError,
    compare_catalogs,
    older_environments,
    older_log_files,
    refuse_older,
    short_files,
)
from pybk.storage.directories import (
    INDEX,
    OpenEnvironment,
    check_doubtful,
    check_index_present,
    check_present,
    check_reachable,
    checked_mark,
    missing_files,
    note_lost_environments,
    store_directories,
)
from pybk.storage.format.catalog import CatalogState
from pybk.storage.format.cookie import Cookie
from pybk.storage.format.watermark import Watermark
from pybk.storage.index.catalog_and_index import CatalogAndIndex
from pybk.storage.index.catalog_files import catalog_ids
from pybk.storage.index.index import Index
from pybk.storage.io.filesystem import FileSystem
from pybk.storage.io.lmdb_environment import Environment
from pybk.storage.log.salvage import open_watermark
from pybk.storage.volumes import Directory, Volumes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreParts:
    """The opened parts of one store.

    Attributes:
        volumes: The tier directories and their files.
        index: The index.
        index_environment: The LMDB environment of the index.
        entries: The LMDB environments of the SSD tier, by file id.
        watermark: The durable watermark.
        catalog_and_index: The catalog and the index, which change together.
        newer: The content of a catalog that is newer than the index; None if there is none.
        new_watermark: Whether ``watermark`` is a new one, made because the store's own is lost.
    """

    volumes: Volumes
    index: Index
    index_environment: Environment
    entries: dict[int, Environment]
    watermark: Watermark
    catalog_and_index: CatalogAndIndex
    newer: CatalogState | None
    new_watermark: bool


@dataclass(slots=True)
class PartsOpener:
    """Opens the parts of a store whose lock the caller holds.

    Attributes:
        fs: The file system.
        root: The store's directory.
        cookie: The store's own cookie.
        tiers: Where the tiers are now, if they are not where the store remembers them.
        environment: Opens LMDB environments.
        lost: Takes a sentence for each thing that is missing, if the store is salvaged; None refuses such a store.
    """

    fs: FileSystem
    root: str
    cookie: Cookie
    tiers: Mapping[StorageHint, str | Sequence[str]] | None
    environment: OpenEnvironment
    lost: list[str] | None

    def open(self, undo: ExitStack) -> StoreParts:
        """Open the parts and compare them.

        Args:
            undo: Closes the parts, the last one opened first. Each part is added as soon as it is open, so that an
                interrupt finds all of them there.

        Raises:
            OlderIndexError: The index is older than the catalog and must be made again.
            PybkError, OSError: The parts cannot be opened or do not fit each other.
        """
        parts = self._open_parts(undo)
        try:
            self._compare(parts)
        except CorruptError as error:
            self.raise_if_older(error, parts.newer)
            raise
        return parts

    def raise_if_older(self, error: CorruptError, newer: CatalogState | None) -> None:
        """Raise OlderIndexError if a newer catalog explains damage that was found, so that the index is made again."""
        if newer is not None and self.lost is None:
            raise OlderIndexError(str(error), newer) from error

    def _open_parts(self, undo: ExitStack) -> StoreParts:
        fs, root, cookie = self.fs, self.root, self.cookie
        doubtful: list[Directory] = []
        volumes = Volumes(fs, root, store_directories(fs, root, cookie, self.tiers, doubtful))
        path = os.path.join(volumes.tier_paths(StorageHint.SSD)[0], INDEX)
        check_index_present(fs, path, root)
        index_environment = self.environment(path)
        undo.callback(index_environment.close)
        index = Index(index_environment)
        mark = checked_mark(index, cookie, root)
        watermark = open_watermark(fs, root, cookie.store_id, self.lost)
        undo.callback(watermark.close)
        new_watermark = bool(self.lost)
        files = index.files()
        check_reachable(volumes, files)
        for row in files.values():
            volumes.add(row)
        check_doubtful(volumes, doubtful, files, cookie.store_id)
        volumes.reserve_ids(max([mark.next_file_id, *(file_id + 1 for file_id in catalog_ids(fs, root))]))
        newer, problem = compare_catalogs(volumes, cookie, mark)
        try:
            (check_present if self.lost is None else note_lost_environments)(volumes)
        except CorruptError as error:
            self.raise_if_older(error, newer)
            raise
        entries = {}
        for row in files.values():
            if volumes.tier_of(row).uses_environments:
                entries[row.file_id] = self.environment(volumes.path_of(row))
                undo.callback(entries[row.file_id].close)
        if problem is None:
            catalog_and_index = CatalogAndIndex.open(volumes, index, mark, cookie)
        else:
            wrong = next(index.check(), None)
            if wrong is not None:
                raise CorruptError(f"{problem}; and the index, from which it might be made again, is damaged: {wrong}")
            logger.warning("the catalog of %s is made again from the index: %s", root, problem)
            catalog_and_index = CatalogAndIndex(volumes, index, mark, None, cookie)
        undo.callback(catalog_and_index.close)
        return StoreParts(
            volumes, index, index_environment, entries, watermark, catalog_and_index, newer, new_watermark
        )

    def _compare(self, parts: StoreParts) -> None:
        """Compare files and SSD tier with the index; refuse those that are older, or note them for salvaging."""
        volumes, mark = parts.volumes, parts.catalog_and_index.mark
        files = parts.catalog_and_index.files
        if self.lost is None:
            refuse_older(volumes, files, parts.entries, mark)
            return
        if parts.newer is not None:
            self.lost.append(f"the index of {self.root} is older than its catalog")
        older = older_log_files(volumes, files.values())
        self.lost += [
            f"{volumes.path_of(row)} is older than the index: it ends after {older[row]} bytes" for row in older
        ]
        short = short_files(volumes, files.values())
        self.lost += [
            f"{volumes.path_of(row)} has {size} bytes, and the index says {row.bytes}" for row, size in short.items()
        ]
        gone = missing_files(volumes)
        present = [row for row in files.values() if row not in gone]
        self.lost += older_environments(volumes, present, parts.entries, mark).values()
