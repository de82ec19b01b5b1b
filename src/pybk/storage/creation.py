"""A store's directories: made, found again, and checked to be what they are taken for."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from pybk.errors import CookieError, CorruptError
from pybk.flags import StorageHint
from pybk.storage.catalog import CatalogWriter
from pybk.storage.cookie import Cookie, check_cookie, read_cookie, write_cookie
from pybk.storage.environment import Environment
from pybk.storage.filesystem import FileSystem
from pybk.storage.index import Index
from pybk.storage.index_rows import FileRow, Mark
from pybk.storage.volumes import (
    COLD,
    ENTRIES,
    LOG,
    Directory,
    Volumes,
    load_directories,
    plan_directories,
    save_directories,
)
from pybk.storage.watermark import Watermark

logger = logging.getLogger(__name__)

MAIN: Final = "main"
INDEX: Final = "index"
SCRYPT_COST: Final = 1 << 14

OpenEnvironment = Callable[[str], Environment]


_CATALOG: Final = "catalog-"


def catalog_path(root: str, file_id: int) -> str:
    """Return the path of a catalog file."""
    return os.path.join(root, f"{_CATALOG}{file_id:016x}")


def main_cookie(fs: FileSystem, root: str) -> Cookie | None:
    """Return the store's own cookie, None where there is no store."""
    if not fs.exists(root):
        return None
    cookie = read_cookie(fs, root)
    if cookie is not None and (cookie.tier != MAIN or cookie.salt is None or cookie.scrypt_cost is None):
        raise CookieError(
            f"{root} is directory {cookie.directory} of tier {cookie.tier} of store {cookie.store_id.hex()}, not "
            "a store; open the store's own directory"
        )
    return cookie


def store_directories(
    fs: FileSystem, root: str, cookie: Cookie, tiers: Mapping[StorageHint, str | Sequence[str]] | None
) -> list[Directory]:
    """Return the tier directories of an existing store, each checked to be what it is taken for.

    Raises:
        CookieError: A directory is missing, or belongs to another store or another place.
    """
    directories = plan_directories(root, tiers) if tiers is not None else load_directories(fs, root)
    for directory in directories:
        found = read_cookie(fs, directory.path) if fs.exists(directory.path) else None
        expected = replace(cookie, tier=directory.tier.value, directory=directory.number, salt=None, scrypt_cost=None)
        if found is None:
            raise CookieError(
                f"{directory.path} is not there or has no cookie, but store {root} keeps its {directory.tier} tier "
                "there; mount the device, or name where it is now: LedgerManager.open(path, tiers={...})"
            )
        check_cookie(found, replace(expected, instance=found.instance), directory.path)
    return directories


def checked_mark(index: Index, cookie: Cookie, root: str) -> Mark:
    """Return the index's mark.

    Raises:
        CorruptError: There is none, or it is another store's.
    """
    mark = index.mark()
    if mark is None or mark.store_id != cookie.store_id.hex():
        raise CorruptError(
            f"the index of {root} is {'empty' if mark is None else 'of another store'}; run `pybk rebuild-index "
            f"{root}` to make it again from the files"
        )
    return mark


def remove_leftovers(volumes: Volumes, mark: Mark) -> None:
    """Remove the files that an interrupted checkpoint made and the index does not name.

    Raises:
        CorruptError: A file that the index names is not there.
    """
    found = {**volumes.found(LOG), **volumes.found(COLD)}
    for file_id, row in found.items():
        volumes.reserve_ids(file_id + 1)
        if file_id not in volumes.rows and not (row.kind == LOG and file_id >= mark.first_log_file_id):
            logger.info("removing %s, which an interrupted checkpoint left", volumes.path_of(row))
            volumes.fs.unlink(volumes.path_of(row))
    for name in volumes.fs.list_directory(volumes.root):
        path = os.path.join(volumes.root, name)
        if name.startswith(_CATALOG) and path != catalog_path(volumes.root, mark.catalog_file_id):
            logger.info("removing %s, in whose place there is another, or which was never finished", path)
            volumes.fs.unlink(path)
    for file_id, row in volumes.rows.items():
        if row.kind != ENTRIES and file_id not in found:
            raise CorruptError(
                f"{volumes.path_of(row)} is missing, and the index says that entries lie in it; restore it from a "
                f"backup, or run `pybk rebuild-index {volumes.root}` to go on without it"
            )


def create_store(
    fs: FileSystem,
    root: str,
    tiers: Mapping[StorageHint, str | Sequence[str]] | None,
    environment: OpenEnvironment,
) -> Cookie:
    """Make an empty store; its own cookie comes last, so that a store is there whole or not at all."""
    directories = plan_directories(root, tiers)
    volumes = Volumes(fs, root, directories)
    cookie = Cookie(secrets.token_bytes(16), secrets.token_bytes(16), MAIN, 0, secrets.token_bytes(16), SCRYPT_COST)
    for directory in directories:
        fs.make_directory(directory.path)
        fs.sync_directory(os.path.dirname(directory.path))
    strays = [volumes.path_of(row) for kind in (LOG, COLD) for row in volumes.found(kind).values()]
    if strays:
        raise CookieError(
            f"{root} has no cookie, but {strays[0]} is there: these are files of a store that lost its cookie; "
            "restore the cookie from a backup, or choose another directory"
        )
    for directory in directories:
        write_cookie(
            fs,
            directory.path,
            replace(
                cookie,
                tier=directory.tier.value,
                directory=directory.number,
                instance=secrets.token_bytes(16),
                salt=None,
                scrypt_cost=None,
            ),
        )
    save_directories(fs, root, directories)
    rows = [
        volumes.new_file(ENTRIES, StorageHint.SSD)._replace(directory=number)
        for number in range(len(volumes.tier_paths(StorageHint.SSD)))
    ]
    for row in rows:
        environment(volumes.path_of(row)).close()
    _first_mark(fs, volumes, cookie, rows, environment)
    watermark = os.path.join(root, "watermark")
    if fs.exists(watermark):  # of a making that was interrupted
        fs.unlink(watermark)
    Watermark.create(fs, watermark, cookie.store_id).close()
    write_cookie(fs, root, cookie)
    fs.sync_directory(os.path.dirname(root))
    return cookie


def _first_mark(
    fs: FileSystem, volumes: Volumes, cookie: Cookie, rows: list[FileRow], environment: OpenEnvironment
) -> None:
    """Write the first catalog and the first index of a new store."""
    catalog_id = volumes.new_id()
    path = catalog_path(volumes.root, catalog_id)
    if fs.exists(path):
        fs.unlink(path)
    mark = Mark(
        store_id=cookie.store_id.hex(),
        first_log_file_id=catalog_id,
        next_lsn=1,
        durable_lsn=0,
        next_file_id=volumes.next_file_id,
        next_ledger_id=0,
        next_creation_sequence=0,
        catalog_file_id=catalog_id,
        catalog_bytes=0,
    )
    catalog = CatalogWriter.create(fs, path, cookie.store_id, catalog_id)
    try:
        mark = mark._replace(catalog_bytes=catalog.append([], [], mark, rows))
    finally:
        catalog.close()
    opened = environment(os.path.join(volumes.tier_paths(StorageHint.SSD)[0], INDEX))
    try:
        with Index(opened).update() as update:
            for row in rows:
                update.put_file(row)
            update.put_mark(mark)
    finally:
        opened.close()
