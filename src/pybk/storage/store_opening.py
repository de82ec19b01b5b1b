"""The parts that a live store is made of, opened, and compared before anything on disk is changed.

A part of a store may be put back from a backup, or its device may lose its last writes. Each part names how far it has
come, so an open compares index, catalog, files and the SSD tier first:

- The index names the checkpoint of the catalog that it belongs to. A catalog that goes further is newer: a stop between
  catalog and index left it so, or an older index was put back. In the first case everything that the index names is
  still there, because old locations are freed after the index has changed; then the newer checkpoint is removed.
  Otherwise the index is made again from the catalog.
- A catalog that does not reach that checkpoint is older, damaged or lost. It is made again from the index.
- A log file, or an environment of the SSD tier, that has not come as far as the index says is older than the index. A
  log file or cold segment that is shorter than the index says was cut.

Only after that may the store remove, mend or write anything. Up to then the one change is to LMDB's lock files; a
salvage also notes durably which LMDB environments are missing, because opening them makes empty ones.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final, NamedTuple

from pybk.errors import CorruptError
from pybk.flags import StorageHint
from pybk.storage import log as logs
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
from pybk.storage.format.catalog import (
    CatalogState,
    CatalogWriter,
    catalog_ids,
    catalog_path,
    check_catalog,
    read_catalog,
)
from pybk.storage.format.cookie import Cookie
from pybk.storage.format.index_rows import CheckpointMark, FileRow
from pybk.storage.format.log_file import BLOCK_BYTES, COMMIT_HEADER_BYTES, Watermark, decode_commit_header, padding
from pybk.storage.index.catalog_and_index import CatalogAndIndex
from pybk.storage.index.index import Index
from pybk.storage.io.filesystem import FileSystem
from pybk.storage.io.lmdb_environment import Environment
from pybk.storage.tiers import LOG
from pybk.storage.tiers.lmdb_tier import catalog_location, read_entries_mark
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
        tiers: The directories of the tiers now, if they are not where the store remembers them.
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
            undo: Closes the parts, the last one opened first. Each part is added as soon as it is open, because an
                interrupt has to find all of them there.

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
        """Raise OlderIndexError if a newer catalog explains damage that was found; the index is made again then."""
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
        if self.lost is None:
            watermark = Watermark.open(fs, os.path.join(root, "watermark"), cookie.store_id, writable=True)
        else:
            watermark = logs.open_watermark(fs, root, cookie.store_id, self.lost)
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


_READ_WHOLE_BYTES: Final = 1 << 20
"""A catalog up to this length is checked whole at each open, which takes some 10 ms; of a longer one its end."""


class OlderIndexError(CorruptError):
    """The index is older than the catalog and names entries that are gone, so it must be made again.

    Attributes:
        state: The catalog's content.
    """

    def __init__(self, message: str, state: CatalogState) -> None:
        super().__init__(message)
        self.state = state


class CatalogFinding(NamedTuple):
    """The result of a comparison of a store's catalogs with its index.

    Attributes:
        newer: The content of a catalog that is newer than the index; None if there is none.
        problem: Why the catalog that the index names must be made again; None if it need not be.
    """

    newer: CatalogState | None
    problem: str | None


def compare_catalogs(volumes: Volumes, cookie: Cookie, mark: CheckpointMark) -> CatalogFinding:
    """Compare the index's mark with the catalogs.

    Raises:
        UnsupportedFormatError: A catalog is of a newer format.
        OSError: A catalog cannot be read.
    """
    fs, root = volumes.fs, volumes.root
    problem: str | None = None
    newest: CatalogState | None = None
    try:
        newest = _newer_in_place(fs, catalog_path(root, mark.catalog_file_id), cookie, mark)
    except (CorruptError, FileNotFoundError) as error:
        problem = str(error)
    for file_id in catalog_ids(fs, root):
        if file_id <= mark.catalog_file_id:
            continue
        try:
            newest = read_catalog(fs, catalog_path(root, file_id), cookie.store_id, file_id)
        except CorruptError as error:
            logger.info("a catalog that was never finished is passed over: %s", error)
    return CatalogFinding(newest, problem)


def _newer_in_place(fs: FileSystem, path: str, cookie: Cookie, mark: CheckpointMark) -> CatalogState | None:
    """Check the catalog that the index names; return its content if it is newer than the index."""
    with closing(CatalogWriter.examine(fs, path, cookie.store_id, mark.catalog_file_id, mark.catalog_bytes)) as catalog:
        found = catalog.last_mark()
        further = catalog.goes_further()
    if found._replace(catalog_file_id=mark.catalog_file_id, catalog_bytes=mark.catalog_bytes) != mark:
        raise CorruptError(f"{path} has another checkpoint at {mark.catalog_bytes} bytes than the index names")
    if further:
        return read_catalog(fs, path, cookie.store_id, mark.catalog_file_id, at_least=mark.catalog_bytes)
    if mark.catalog_bytes <= _READ_WHOLE_BYTES:
        check_catalog(fs, path, cookie.store_id, mark.catalog_file_id, at_least=mark.catalog_bytes)
    return None


# ---- files -------------------------------------------------------------------------------------------------------


def older_log_files(volumes: Volumes, rows: Iterable[FileRow]) -> dict[FileRow, int]:
    """Return the log files that end before the index says that they do, each with where it ends, bytes.

    A log file is filled from its start and zero after its end, so an older copy ends in zeros. Costs one read for a
    file that is whole.
    """
    found = {}
    for row in rows:
        if row.kind == LOG:
            end = log_file_end(volumes, row)
            if end < row.bytes:
                found[row] = end
    return found


def log_file_end(volumes: Volumes, row: FileRow) -> int:
    """Return where an older copy of a log file ends, bytes; ``row.bytes`` for one that is none.

    A file that is missing, short or damaged is not checked here; reading it raises an error.
    """
    path = volumes.path_of(row)
    if row.bytes <= BLOCK_BYTES or not volumes.fs.exists(path):
        return row.bytes
    with closing(volumes.fs.open(path)) as file:
        if file.size < row.bytes or any(file.read(row.bytes - BLOCK_BYTES, BLOCK_BYTES)):
            return row.bytes
        offset = BLOCK_BYTES
        while offset < row.bytes:
            header = decode_commit_header(memoryview(file.read(offset, COMMIT_HEADER_BYTES)), 0, row.file_id)
            if header is None:
                break
            size = COMMIT_HEADER_BYTES + header.body_bytes
            offset += size + padding(size)
        for at in range(offset, row.bytes, 1 << 20):
            if any(file.read(at, min(1 << 20, row.bytes - at))):
                return row.bytes  # something follows, so it is damaged and not old
        return min(offset, row.bytes)


def short_files(volumes: Volumes, rows: Iterable[FileRow]) -> dict[FileRow, int]:
    """Return the files that are shorter than the index says, each with its size, bytes; LMDB environments left out.

    Missing files are not among them. Cost: asks for each file's size.
    """
    found = {}
    for row in rows:
        tier = volumes.tier_of(row)
        if tier.uses_environments:
            continue
        try:
            size = tier.file_bytes(volumes.fs, volumes.path_of(row))
        except FileNotFoundError:
            continue
        if size < row.bytes:
            found[row] = size
    return found


def older_environments(
    volumes: Volumes, rows: Iterable[FileRow], entries: Mapping[int, Environment], mark: CheckpointMark
) -> dict[FileRow, str]:
    """Return the environments of the SSD tier that do not fit the index, each with the problem.

    Raises:
        CorruptError: The mark of one is damaged.
    """
    found = {}
    for row in rows:
        if row.file_id not in entries:
            continue
        with entries[row.file_id].read() as transaction:
            there = read_entries_mark(transaction)
        path = volumes.path_of(row)
        if there.puts < row.bytes:
            found[row] = (
                f"{path} is older than the index: {there.puts} transactions put entries there, the index relies on "
                f"{row.bytes}"
            )
        elif there.removed_at > catalog_location(mark):
            found[row] = f"{path} is newer than the index: entries were removed there that the index names"
    return found


def refuse_older(
    volumes: Volumes, files: Mapping[int, FileRow], entries: Mapping[int, Environment], mark: CheckpointMark
) -> None:
    """Refuse a store that has a part older than the index.

    Raises:
        CorruptError: A log file or cold segment is shorter than the index says, a log file or the SSD tier is older
            than the index, or the SSD tier is newer in what was removed.
    """
    for row, size in short_files(volumes, files.values()).items():
        if volumes.tier_of(row).is_placeholder(volumes.fs, volumes.path_of(row), size):
            continue  # an older pybk left the size of the missing file in the index
        raise CorruptError(
            f"{volumes.path_of(row)} has {size} bytes, but the index says that it has {row.bytes}: it was cut, or is "
            f"an older copy; restore it from a backup, or run `pybk store rebuild-index {os.fspath(volumes.root)}`, "
            "with --accept-loss to continue without the entries that it lists as missing",
            path=volumes.path_of(row),
            offset=size,
        )
    remedy = (
        f"put the newer one back; or run `pybk store rebuild-index {os.fspath(volumes.root)}`, with --accept-loss to "
        "continue without the entries that it lists as missing"
    )
    for row, end in older_log_files(volumes, files.values()).items():
        raise CorruptError(
            f"{volumes.path_of(row)} is older than the index: it ends after {end} of {row.bytes} bytes; {remedy}",
            path=volumes.path_of(row),
            offset=end,
        )
    for row, what in older_environments(volumes, files.values(), entries, mark).items():
        raise CorruptError(f"{what}; {remedy}", path=volumes.path_of(row))
