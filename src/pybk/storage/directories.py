"""A store's directories: making them, finding them, and checking that each is the directory it is expected to be."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Final, NamedTuple

from pybk.errors import CookieError, CorruptError, UnsupportedFormatError, UsageError
from pybk.feature_level import NEWEST_STORE_LEVEL, FeatureLevel
from pybk.flags import StorageHint
from pybk.ledger import keys
from pybk.ledger.keys import SALT_BYTES_MIN
from pybk.storage.format.catalog import (
    CATALOG_PREFIX,
    CatalogWriter,
    catalog_ids,
    catalog_path,
    read_header,
    remove_catalog,
)
from pybk.storage.format.cookie import (
    COOKIE_BYTES_MAX,
    COOKIE_NAME,
    Cookie,
    check_cookie,
    decode_cookie,
    encode_cookie,
    read_cookie,
    write_cookie,
)
from pybk.storage.format.index_rows import CheckpointMark, FileRow, NamedRow
from pybk.storage.format.log_file import BLOCK_BYTES, Watermark, decode_file_header
from pybk.storage.index.index import Index, IndexSnapshot
from pybk.storage.io.filesystem import FileSystem, replace_file
from pybk.storage.io.lmdb_environment import Environment
from pybk.storage.preallocation import put_back, put_back_packed
from pybk.storage.tiers import ENTRIES, LOG
from pybk.storage.tiers.lmdb_tier import LOST_SUFFIX, environment_is_there
from pybk.storage.volumes import (
    TIERS,
    Directory,
    Volumes,
    load_directories,
    named_paths,
    plan_directories,
    save_directories,
)

logger = logging.getLogger(__name__)

MAIN: Final = "main"
INDEX: Final = "index"

OpenEnvironment = Callable[[str], Environment]


ACCEPTED_LOSS: Final = "accepted-loss"
"""A file that ``note_accepted_loss`` makes."""

_PLANNED: Final = "cookie.planned"


def make_directory(fs: FileSystem, path: str) -> None:
    """Make a directory and its missing parents, durably.

    Raises:
        UsageError: Something else has this name, or a parent's.
    """
    try:
        fs.make_directory(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{path} is not a directory and cannot become one: {error}; name another path") from error


def main_cookie(fs: FileSystem, root: str) -> Cookie | None:
    """Return the store's own cookie, None where there is no store."""
    if not fs.exists(root):
        return None
    cookie = read_cookie(fs, root)
    if cookie is not None and (cookie.tier != MAIN or cookie.salt is None or cookie.scrypt_cost is None):
        raise CookieError(
            f"{root} is directory {cookie.directory} of tier {cookie.tier} of store {cookie.store_id.hex()}, not "
            f"a store; give {_store_around(fs, root, cookie)}"
        )
    return cookie


def _store_around(fs: FileSystem, root: str, cookie: Cookie) -> str:
    """Return how an error message names the store of a tier's directory: by its path if the tier lies inside it."""
    parent = os.path.dirname(root)
    try:
        found = read_cookie(fs, parent)
    except (CorruptError, OSError):
        found = None
    if found is not None and found.tier == MAIN and found.store_id == cookie.store_id:
        return f"the store's directory: {parent}"
    return f"the store's directory, which has the files {COOKIE_NAME}, LOCK and watermark"


def find_cookie(fs: FileSystem, root: str, tiers: Mapping[StorageHint, str | Sequence[str]] | None) -> Cookie | None:
    """Return the store's own cookie, None where there is no store.

    A cookie that is lost or damaged is made again, in memory, from the cookies of the tiers and the headers of the
    catalogs, which repeat it above level BASE. Its level is the highest that any of them names.

    Raises:
        CookieError: ``root`` is a tier's directory, the parts name different stores, or the cookie is missing, and
            nothing repeats it.
        CorruptError: The cookie is damaged, and nothing repeats it.
    """
    damage: CorruptError | None = None
    cookie: Cookie | None = None
    try:
        cookie = main_cookie(fs, root)
    except CorruptError as error:
        damage = error
    if cookie is None and damage is None and not _lost_its_cookie(fs, root):
        return None
    others = list(_repeated_cookies(fs, root, tiers))
    if cookie is not None:
        levels = [other.level for other in others if other.store_id == cookie.store_id]
        return replace(cookie, level=max([cookie.level, *levels]))
    known = {(other.store_id, other.salt, other.scrypt_cost, other.incarnation) for other in others}
    if len(known) > 1:
        raise CookieError(
            f"{root} has no sound cookie, and its tiers and catalogs name {len(known)} different stores; put the right "
            "directories in their places, or restore the cookie from a backup"
        )
    if not others:
        raise damage or CookieError(
            f"{os.path.join(root, COOKIE_NAME)} is missing, but {_trace_of(fs, root)} is there, so it is the directory "
            "of a store; neither its tiers nor a catalog repeat the cookie: restore it from a backup"
        )
    logger.warning(
        "%s %s; it is made again from what the tiers and the catalog repeat of it",
        os.path.join(root, COOKIE_NAME),
        "is missing" if damage is None else f"is damaged ({damage})",
    )
    level = max(other.level for other in others)
    return replace(others[0], instance=secrets.token_bytes(16), tier=MAIN, directory=0, level=level)


def lost_cookie(root: str) -> str:
    """Return the text of an error about a store without a cookie of its own, which ``find_cookie`` found elsewhere."""
    return (
        f"{os.path.join(root, COOKIE_NAME)} is missing; run `pybk store rebuild-index {root}`, which makes it again "
        "from what the tiers and the catalog repeat of it"
    )


def _lost_its_cookie(fs: FileSystem, root: str) -> bool:
    """Return whether a directory without a cookie is a store, and not a directory for a new one."""
    return fs.exists(root) and not fs.exists(os.path.join(root, _PLANNED)) and _trace_of(fs, root) is not None


def _trace_of(fs: FileSystem, root: str) -> str | None:
    """Return a file that only a store has in its directory; None if there is none."""
    catalogs = [catalog_path(root, file_id) for file_id in catalog_ids(fs, root)]
    others = (os.path.join(root, name) for name in ("watermark", "directories"))
    return next((path for path in (*catalogs, *others) if fs.exists(path)), None)


def _repeated_cookies(
    fs: FileSystem, root: str, tiers: Mapping[StorageHint, str | Sequence[str]] | None
) -> Iterator[Cookie]:
    """Yield the copies of a store's cookie in the tiers' cookies and the catalogs' headers; nothing at level BASE."""
    try:
        directories = load_directories(fs, root) if tiers is None else _merged_directories(fs, root, tiers)
    except (CorruptError, CookieError):
        directories = plan_directories(root, tiers)
    for directory in directories:
        try:
            found = read_cookie(fs, directory.path) if fs.exists(directory.path) else None
        except CorruptError:
            continue
        if found is not None and found.level > FeatureLevel.BASE and found.tier == directory.tier.value:
            yield found
    for file_id in catalog_ids(fs, root):
        try:
            header = read_header(fs, catalog_path(root, file_id))
        except CorruptError:
            continue
        if header.level > FeatureLevel.BASE:
            salt, cost, incarnation = header.salt, header.scrypt_cost, header.incarnation
            yield Cookie(header.store_id, bytes(16), MAIN, 0, salt, cost, header.level, incarnation)


def store_directories(
    fs: FileSystem,
    root: str,
    cookie: Cookie,
    tiers: Mapping[StorageHint, str | Sequence[str]] | None,
    doubtful: list[Directory] | None = None,
) -> list[Directory]:
    """Return the tier directories of an existing store; checks that each is the expected one.

    Tiers that are not named lie where the store remembers them.

    Args:
        fs: The file system.
        root: The store's directory.
        cookie: The store's own cookie.
        tiers: The directories of tiers now, if they are not where the store remembers them.
        doubtful: Takes the directories whose cookies are lost or damaged, for ``check_doubtful``; None refuses them.

    Raises:
        UsageError: ``tiers`` is malformed.
        CookieError: A directory is missing, not named, or belongs to another store, tier or number.
        CorruptError: The list of directories is damaged or missing, and ``tiers`` is None.
    """
    directories = load_directories(fs, root) if tiers is None else _merged_directories(fs, root, tiers)
    for directory in directories:
        there = fs.exists(directory.path)
        try:
            found = read_cookie(fs, directory.path) if there else None
        except CorruptError:
            if doubtful is None:
                raise
            doubtful.append(directory)
            continue
        if found is None and there and doubtful is not None:
            doubtful.append(directory)
            continue
        expected = replace(cookie, tier=directory.tier.value, directory=directory.number)
        if found is None:
            raise CookieError(
                f"{directory.path} is not there or has no cookie, but store {root} keeps its {directory.tier} tier "
                f"there; mount the device, or name where it is now: {_named_elsewhere(root, directory)}; if it is "
                f"lost, make an empty directory there, and run `pybk store rebuild-index {root}`, with --accept-loss "
                "to continue without the entries that it lists as missing"
            )
        check_cookie(found, replace(expected, instance=found.instance), directory.path)
    return directories


def _named_elsewhere(root: str, directory: Directory) -> str:
    """Return the call that names another directory of a tier, as text."""
    return f"LedgerManager.open({root!r}, tiers={{StorageHint.{directory.tier.name}: DIRECTORY}})"


def check_doubtful(
    volumes: Volumes, doubtful: Iterable[Directory], files: Mapping[int, FileRow], store_id: bytes
) -> None:
    """Check that directories without a sound cookie are the expected ones: they hold files of the store.

    A file that the index names proves it, and so does a log file of the store in a directory of the NVMe tier: the
    index of a store that was never checkpointed names none.

    Raises:
        CookieError: One holds no such file, so it may be another directory, or not mounted.
    """
    for directory in doubtful:
        mine = [row for row in files.values() if (row.tier, row.directory) == (directory.tier.value, directory.number)]
        if not any(volumes.exists(row) for row in mine) and not has_log_file(volumes, directory, store_id):
            raise CookieError(
                f"{directory.path} is not there or has no cookie, but store {volumes.root} keeps its {directory.tier} "
                "tier there; mount the device, or name where it is now: "
                f"{_named_elsewhere(volumes.root, directory)}; if this is the directory, and it is empty, run "
                f"`pybk store rebuild-index {volumes.root}`, which makes its cookie again, with --accept-loss to "
                "continue without the entries that it lists as missing"
            )
        logger.warning(
            "the cookie of %s is lost or damaged; it is made again, because the files that belong there are there",
            directory.path,
        )


def has_log_file(volumes: Volumes, directory: Directory, store_id: bytes) -> bool:
    """Return whether a directory of the NVMe tier has a log file whose header names the store."""
    if directory.tier is not StorageHint.NVME:
        return False
    for row in volumes.found(LOG).values():
        if row.directory != directory.number:
            continue
        path = volumes.path_of(row)
        with closing(volumes.fs.open(path)) as file:
            header = memoryview(file.read(0, min(file.size, BLOCK_BYTES)))
        with suppress(CorruptError, UnsupportedFormatError):
            if decode_file_header(header, store_id=store_id, file_id=row.file_id, where=path) is not None:
                return True  # else it was preallocated and never begun
    return False


def mend_cookies(fs: FileSystem, root: str, cookie: Cookie, directories: Iterable[Directory]) -> None:
    """Write the cookies of the store and its tiers that are missing, damaged or of another level; durable on return.

    Every cookie gets the level of the store; lost or damaged ones are made again. The store's own cookie is written
    first: an older pybk reads that one first, and must not open a store that has a part of a level that it does not
    know.
    """
    if _sound_cookie(fs, root) != cookie:
        write_cookie(fs, root, cookie)
    for directory in directories:
        found = _sound_cookie(fs, directory.path)
        expected = tier_cookie(cookie, directory, secrets.token_bytes(16) if found is None else found.instance)
        if found != expected:
            write_cookie(fs, directory.path, expected)


def _sound_cookie(fs: FileSystem, path: str) -> Cookie | None:
    """Return a directory's cookie, None if it is lost or damaged."""
    try:
        return read_cookie(fs, path)
    except CorruptError:
        return None


def _merged_directories(fs: FileSystem, root: str, tiers: Mapping[StorageHint, str | Sequence[str]]) -> list[Directory]:
    """Return the named directories, and the recorded ones of tiers that are not named."""
    tiers = named_paths(tiers)
    try:
        remembered = load_directories(fs, root)
    except CorruptError as error:
        logger.warning("the tier directories are as named now, for those remembered are lost: %s", error)
        return plan_directories(root, tiers)
    known: dict[StorageHint, list[str]] = {}
    for directory in remembered:
        known.setdefault(directory.tier, []).append(directory.path)
    directories = plan_directories(root, {**known, **tiers})
    named = {(directory.tier, directory.number) for directory in directories}
    for directory in remembered:
        if (directory.tier, directory.number) not in named:
            raise CookieError(
                f"tiers[{directory.tier}] names {sum(d.tier is directory.tier for d in directories)} directories, but "
                f"store {root} has {len(known[directory.tier])} of this tier: {known[directory.tier]}; name every "
                "directory, in this order"
            )
    return directories


def tier_cookie(cookie: Cookie, directory: Directory, instance: bytes) -> Cookie:
    """Return the cookie of a tier directory: above level BASE it repeats the salt, cost and level of the main one."""
    own = replace(cookie, tier=directory.tier.value, directory=directory.number, instance=instance)
    return replace(own, salt=None, scrypt_cost=None) if cookie.level is FeatureLevel.BASE else own


def check_reachable(volumes: Volumes, files: Mapping[int, FileRow]) -> None:
    """Check that the index names no file in another directory, or of an unknown tier.

    Raises:
        CookieError: A file lies in a directory that is not named.
        UnsupportedFormatError: A file is of a tier that this pybk does not have.
    """
    for row in files.values():
        volumes.directory_of(row)
        volumes.tier_of(row)


def check_index_present(fs: FileSystem, path: str, root: str) -> None:
    """Raise CorruptError if there is no index: opening the environment would make an empty one."""
    if not environment_is_there(fs, path):
        raise CorruptError(
            f"{path} is missing or empty, the index of {root}; mount its device, or, if that is lost, run "
            f"`pybk store rebuild-index {root}` to make it again from the files, with --accept-loss to continue "
            "without the entries that it lists as missing",
            path=path,
        )


def checked_mark(index: Index | IndexSnapshot, cookie: Cookie, root: str) -> CheckpointMark:
    """Return the index's mark.

    Raises:
        CorruptError: There is none, or it is another store's.
    """
    mark = index.mark()
    if mark is None or mark.store_id != cookie.store_id.hex():
        raise CorruptError(
            f"the index of {root} is {'empty' if mark is None else 'of another store'}; run `pybk store rebuild-index "
            f"{root}` to make it again from the files"
        )
    return mark


def remove_leftovers(volumes: Volumes, mark: CheckpointMark) -> None:
    """Remove the files that an interrupted checkpoint made and the index does not name."""
    found = volumes.found()
    for file_id, row in found.items():
        volumes.reserve_ids(file_id + 1)
        if file_id not in volumes.rows and not (row.kind == LOG and file_id >= mark.first_log_file_id):
            logger.info("removing %s, which an interrupted checkpoint left", volumes.path_of(row))
            if not (row.kind == LOG and put_back(volumes, row)) and not put_back_packed(volumes, row, 1):
                volumes.unlink(row)
    for name in volumes.fs.list_directory(volumes.root):
        path = os.path.join(volumes.root, name)
        if name.startswith(CATALOG_PREFIX) and path != catalog_path(volumes.root, mark.catalog_file_id):
            logger.info("removing %s, which another catalog replaced, or which was never finished", path)
            remove_catalog(volumes.fs, path)
        elif name.startswith(_PLANNED):  # otherwise a store that lost its cookie might be replaced by a new one
            volumes.fs.unlink(path)


def missing_files(volumes: Volumes) -> list[FileRow]:
    """Return the missing files that the index names. LMDB creates missing files of its own when it is opened."""
    return [row for row in volumes.rows.values() if not volumes.exists(row)]


def note_lost_environments(volumes: Volumes) -> None:
    """Note, durably, which LMDB environments are missing, because opening them makes empty ones."""
    for row in missing_files(volumes):
        if volumes.tier_of(row).uses_environments and not volumes.fs.exists(volumes.path_of(row) + LOST_SUFFIX):
            replace_file(volumes.fs, volumes.path_of(row) + LOST_SUFFIX, b"")


def note_accepted_loss(fs: FileSystem, root: str, ledger_ids: Iterable[range] = ()) -> None:
    """Note, durably, that a rebuild may have made an index without entries that the store had acknowledged.

    A bookie needs this note, because a store with such an index opens as if it had all its entries.

    Args:
        fs: The file system.
        root: The store's directory.
        ledger_ids: The ids of ledgers that may have existed and are lost; added to those that were noted before.
    """
    noted = dict.fromkeys((*_lost_ids(fs, root), *ledger_ids))
    replace_file(fs, os.path.join(root, ACCEPTED_LOSS), "".join(f"{ids.start} {ids.stop}\n" for ids in noted).encode())


def may_be_lost(fs: FileSystem, root: str, ledger_id: int) -> bool:
    """Return whether a ledger that a store does not have may have been created in commits whose loss was accepted."""
    return any(ledger_id in ids for ids in _lost_ids(fs, root))


def _lost_ids(fs: FileSystem, root: str) -> list[range]:
    """Return the ids that ``note_accepted_loss`` noted; none if it was never called, or by an older pybk.

    Raises:
        CorruptError: The file is damaged.
    """
    path = os.path.join(root, ACCEPTED_LOSS)
    if not fs.exists(path):
        return []
    with closing(fs.open(path)) as file:
        lines = file.read(0, file.size).decode("ascii", "replace").splitlines()
    try:
        return [range(*map(int, line.split())) for line in lines]
    except (TypeError, ValueError) as error:
        raise CorruptError(f"{path} is damaged: {error}; restore it from a backup", path=path) from error


def check_present(volumes: Volumes) -> None:
    """Raise CorruptError if a file that the index names is missing."""
    for row in missing_files(volumes):
        raise CorruptError(
            f"{volumes.path_of(row)} is missing or empty, and the index says that entries lie in it; restore it from a "
            f"backup, or run `pybk store rebuild-index {volumes.root}`, with --accept-loss to continue without the "
            "entries that it lists as missing"
        )


class RestoredStore(NamedTuple):
    """The state that a new store takes over from the restored one; the rest is appended to it afterwards.

    Attributes:
        store_id: The 16 bytes of the store.
        salt: Its scrypt salt.
        scrypt_cost: scrypt's N.
        durable_lsn: The LSN of the last commit that was backed up. The log continues after it, because the versions of
            named records are LSNs, and no version is used twice.
        next_ledger_id: The lowest ledger id that was never used.
        next_creation_sequence: The next creation sequence.
        named: The named records.
    """

    store_id: bytes
    salt: bytes
    scrypt_cost: int
    durable_lsn: int
    next_ledger_id: int
    next_creation_sequence: int
    named: Sequence[NamedRow]

    def cookie(self) -> Cookie:
        """Return a main cookie with a new incarnation."""
        return Cookie(
            store_id=self.store_id,
            instance=secrets.token_bytes(16),
            tier=MAIN,
            directory=0,
            salt=self.salt,
            scrypt_cost=self.scrypt_cost,
            level=NEWEST_STORE_LEVEL,
            incarnation=secrets.randbelow((1 << 64) - 1) + 1,
        )


def create_store(
    fs: FileSystem,
    root: str,
    tiers: Mapping[StorageHint, str | Sequence[str]] | None,
    environment: OpenEnvironment,
    restored: RestoredStore | None = None,
    level: FeatureLevel | None = None,
) -> Cookie:
    """Make an empty store; its main cookie is written last, so a store exists completely or not at all.

    The cookie is first written under another name. By its store id a making that was interrupted is recognised, and can
    be taken up again, and no directory of another store is ever mistaken for a leftover.

    Args:
        fs: The file system.
        root: The store's directory.
        tiers: The directories that the tiers get.
        environment: Opens LMDB environments.
        restored: The state that the store takes over from a backup; None for a store of its own.
        level: The feature level of a store of its own; None for the newest.

    Raises:
        UsageError: ``tiers`` is malformed or names a path that is not a directory.
        CookieError: A directory belongs to a store already; nothing was changed.
    """
    directories = plan_directories(root, tiers)
    planned = _planned_cookie(fs, root)
    _check_free(fs, root, directories, planned)
    for directory in directories:
        make_directory(fs, directory.path)
    if planned is None:
        cookie = _new_cookie(NEWEST_STORE_LEVEL if level is None else level) if restored is None else restored.cookie()
        replace_file(fs, os.path.join(root, _PLANNED), encode_cookie(cookie))
    else:
        cookie = planned
        fs.sync_directory(root)  # a process that was killed may have renamed it, and not synced that
        _clear_environments(fs, directories)
    _fill_directories(fs, root, directories, cookie, environment, restored)
    write_cookie(fs, root, cookie)
    fs.unlink(os.path.join(root, _PLANNED))
    fs.sync_directory(root)
    return cookie


def _new_cookie(level: FeatureLevel) -> Cookie:
    """Return the main cookie of a store of its own."""
    return Cookie(
        store_id=secrets.token_bytes(16),
        instance=secrets.token_bytes(16),
        tier=MAIN,
        directory=0,
        salt=secrets.token_bytes(SALT_BYTES_MIN),
        scrypt_cost=keys.SCRYPT_COST,
        level=level,
    )


def _planned_cookie(fs: FileSystem, root: str) -> Cookie | None:
    """Return the cookie of a store whose making was interrupted."""
    path = os.path.join(root, _PLANNED)
    if not fs.exists(path):
        return None
    with closing(fs.open(path)) as file:
        data = file.read(0, min(file.size, COOKIE_BYTES_MAX + 1))
    return decode_cookie(data, where=path)


def _check_free(fs: FileSystem, root: str, directories: Sequence[Directory], planned: Cookie | None) -> None:
    """Raise CookieError if a directory belongs to a store already, unless it was begun for the planned one."""
    for _, _, path in directories:
        if not fs.exists(path):
            continue
        try:
            names = fs.list_directory(path)
        except NotADirectoryError as error:
            raise UsageError(f"{path} is not a directory; name another path") from error
        found = read_cookie(fs, path)
        if found is not None and (planned is None or found.store_id != planned.store_id):
            raise CookieError(
                f"{os.path.join(path, COOKIE_NAME)} says that this is directory {found.directory} of tier {found.tier} "
                f"of store {found.store_id.hex()}, so no new store may take it; name an empty directory, or open that "
                "store (if that one lost its own cookie, restore it from a backup)"
            )
        suffixes = tuple(f".{tier.kind}" for tier in TIERS if not tier.uses_environments)
        for name in names:
            if name.endswith(suffixes) or (found is None and name in (INDEX, ENTRIES)):
                raise CookieError(
                    f"{path} has no cookie of a store, but {os.path.join(path, name)} is there, as of a store that "
                    "lost its cookie; name an empty directory, or restore that store's cookies from a backup"
                )
    for name in fs.list_directory(root):
        if planned is None and name.startswith(CATALOG_PREFIX):
            raise CookieError(
                f"{root} has no cookie, but {os.path.join(root, name)} is there: it is a store that lost its cookie; "
                "restore it from a backup, or choose another directory"
            )


def _clear_environments(fs: FileSystem, directories: Sequence[Directory]) -> None:
    """Remove the LMDB files of an interrupted creation, because the directories may be others now."""
    for directory in directories:
        for name in (INDEX, ENTRIES):
            path = os.path.join(directory.path, name)
            if fs.exists(path):
                for file in fs.list_directory(path):
                    fs.unlink(os.path.join(path, file))
                fs.sync_directory(path)


def _fill_directories(
    fs: FileSystem,
    root: str,
    directories: Sequence[Directory],
    cookie: Cookie,
    environment: OpenEnvironment,
    restored: RestoredStore | None,
) -> None:
    """Write everything of a new store but its own cookie, durably."""
    volumes = Volumes(fs, root, directories)
    for directory in directories:
        write_cookie(fs, directory.path, tier_cookie(cookie, directory, secrets.token_bytes(16)))
    save_directories(fs, root, directories)
    rows = [
        volumes.new_file(ENTRIES, StorageHint.SSD)._replace(directory=number)
        for number in range(len(volumes.tier_paths(StorageHint.SSD)))
    ]
    for row in rows:
        environment(volumes.path_of(row)).close()
    _first_mark(fs, volumes, cookie, rows, environment, restored)
    watermark = os.path.join(root, "watermark")
    if fs.exists(watermark):  # of a making that was interrupted
        fs.unlink(watermark)
    Watermark.create(fs, watermark, cookie.store_id).close()


def _first_mark(
    fs: FileSystem,
    volumes: Volumes,
    cookie: Cookie,
    rows: list[FileRow],
    environment: OpenEnvironment,
    restored: RestoredStore | None,
) -> None:
    """Write the first catalog and the first index of a new store."""
    catalog_id = volumes.new_id()
    path = catalog_path(volumes.root, catalog_id)
    if fs.exists(path):
        fs.unlink(path)
    mark = CheckpointMark(
        store_id=cookie.store_id.hex(),
        first_log_file_id=catalog_id,
        next_lsn=1 if restored is None else restored.durable_lsn + 1,
        durable_lsn=0 if restored is None else restored.durable_lsn,
        next_file_id=volumes.next_file_id,
        next_ledger_id=0 if restored is None else restored.next_ledger_id,
        next_creation_sequence=0 if restored is None else restored.next_creation_sequence,
        catalog_file_id=catalog_id,
        catalog_bytes=0,
    )
    named = () if restored is None else restored.named
    with closing(CatalogWriter.create(fs, path, cookie.store_id, catalog_id, cookie=cookie)) as catalog:
        mark = mark._replace(catalog_bytes=catalog.append([], [], mark, rows, changed=rows, named=named))
    index = os.path.join(volumes.tier_paths(StorageHint.SSD)[0], INDEX)
    with closing(environment(index)) as opened, Index(opened).update() as update:
        for row in rows:
            update.put_file(row)
        for record in named:
            update.put_named(record)
        update.put_mark(mark)
