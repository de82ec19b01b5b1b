"""Rebuild the index from the catalog and the files.

The catalog names the ledgers, their last entries and the files in use. The files give the locations of the entries. The
log after the mark is replayed when the store is opened. If it cannot be, because commits are missing or damaged, what
is left of it goes into a new catalog (``log_remains.py``). The new index is written next to the old one, and replaces
it by a rename when it is complete.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from pybk.errors import CookieError, CorruptError, PybkError
from pybk.flags import StorageHint
from pybk.storage.directories import (
    INDEX,
    OpenEnvironment,
    find_cookie,
    has_log_file,
    mend_cookies,
    note_accepted_loss,
    store_directories,
)
from pybk.storage.format.catalog import CatalogState, CatalogWriter, catalog_ids, catalog_path, newest_catalog
from pybk.storage.format.cold_segment import ColdSegmentWriter, footer_dtype
from pybk.storage.format.cookie import Cookie
from pybk.storage.format.index_rows import CheckpointMark, FileRow, LedgerRow
from pybk.storage.format.log_file import RecordKind, RunLocations, Watermark
from pybk.storage.index.index import Index
from pybk.storage.io.filesystem import FileSystem, OsFileSystem
from pybk.storage.io.lmdb_environment import Environment, LmdbEnvironment
from pybk.storage.io.permissions import access_of
from pybk.storage.log.recovery import Replay, check_control, load_log_files, log_files
from pybk.storage.repair.inspection import RecordReader, file_rows, locations_of
from pybk.storage.repair.log_remains import read_remains
from pybk.storage.repair.tiling import tile
from pybk.storage.store_opening import log_file_end, older_environments
from pybk.storage.tiers import COLD, LOG, OpenedFiles
from pybk.storage.tiers.lmdb_tier import NO_MARK, EntriesMark, environment_is_there, write_entries_mark
from pybk.storage.volumes import Directory, Volumes, load_directories, save_directories

logger = logging.getLogger(__name__)

_LEDGERS_AT_A_TIME: Final = 10_000
_RUN_ENTRIES_MAX: Final = (1 << 32) - 1

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total."""


class LostEntries(NamedTuple):
    """Entries that were acknowledged and that no file holds any more; both ends inclusive."""

    ledger_id: int
    first_entry_id: int
    last_entry_id: int


class RebuildReport(NamedTuple):
    """The result of making the index again.

    Attributes:
        ledgers: Ledgers in it.
        entries: Entries in it, the lost ones included.
        log_ledgers: Ledgers that the log names since the last checkpoint; the next open takes them from there.
        log_entries: Entries that it holds of them, not counted in ``entries``.
        lost: Entries that are missing everywhere.
        problems: The damage of files, a sentence each.
        made: Whether there is a new index; else the rebuild was refused, and nothing was changed.
        old_index: The path of the old index, which is kept; None if there was none, or it said the same and is gone.
    """

    ledgers: int
    entries: int
    log_ledgers: int
    log_entries: int
    lost: tuple[LostEntries, ...]
    problems: tuple[str, ...]
    made: bool
    old_index: str | None


def rebuild_index(
    root: str,
    *,
    accept_loss: bool = False,
    tiers: Mapping[StorageHint, str | Sequence[str]] | None = None,
    fs: FileSystem | None = None,
    environment: OpenEnvironment | None = None,
    progress: Progress | None = None,
) -> RebuildReport:
    """Make the index of a store again; no process may have the store open.

    Args:
        root: The store's directory.
        accept_loss: Continue although entries, or commits of the log, are missing. Their ledgers are kept, and reading
            those entries raises CorruptError. A ledger that may have had more entries gets one lost entry at its end. A
            bookie puts all its ledgers in limbo at its next start.
        tiers: The tier directories, if they are not where the store remembers them.
        fs: The file system.
        environment: Opens LMDB environments; None opens them on disk.
        progress: Called with the bytes done and the bytes in total.

    Returns:
        What was found. Without ``accept_loss`` nothing is changed when entries are missing: see ``made``.

    Raises:
        StoreLockedError: A process has the store open.
        CookieError: There is no store, or a directory is not the store's.
        CorruptError: The catalog is damaged, and it is unknown what the store should hold; nothing was changed.
        StorageFullError: No space for the new index; nothing was changed.

    Durability: On return the new index is in place. After a stop at any point the store has its old index, the new one,
        or none. Opening a store without an index raises an error that says so; then call this function again.
    Cost: Reads the log files, the footers of cold segments and the whole SSD tier; takes 40 bytes of memory per record.
    """
    root = os.path.abspath(root)
    fs = fs or OsFileSystem(access_of(os.path.join(root, "LOCK"), None))
    environment = environment or partial(LmdbEnvironment, access=fs.access)
    cookie = find_cookie(fs, root, tiers)
    if cookie is None:
        raise CookieError(f"there is no store at {root}; name the directory that LedgerManager.open was given")
    lock = fs.lock(os.path.join(root, "LOCK"))
    try:
        return rebuild_locked(fs, root, cookie, tiers, environment, accept_loss=accept_loss, progress=progress)
    finally:
        lock.release()


def rebuild_locked(
    fs: FileSystem,
    root: str,
    cookie: Cookie,
    tiers: Mapping[StorageHint, str | Sequence[str]] | None,
    environment: OpenEnvironment,
    *,
    accept_loss: bool = False,
    progress: Progress | None = None,
    state: CatalogState | None = None,
) -> RebuildReport:
    """Do what ``rebuild_index`` does, for a caller that holds the store's lock.

    Args:
        fs: As for ``rebuild_index``.
        root: As for ``rebuild_index``.
        cookie: The store's cookie.
        tiers: As for ``rebuild_index``.
        environment: As for ``rebuild_index``.
        accept_loss: As for ``rebuild_index``.
        progress: As for ``rebuild_index``.
        state: The content of the catalog; None reads the newest one.
    """
    progress = progress or (lambda done, total: None)
    with closing(_Rebuilder(fs, root, cookie, tiers, environment, progress, state)) as rebuilder:
        return rebuilder.run(accept_loss=accept_loss)


class _Rebuilder:
    """One run of ``rebuild_index``."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        cookie: Cookie,
        tiers: Mapping[StorageHint, str | Sequence[str]] | None,
        environment: OpenEnvironment,
        progress: Progress,
        state: CatalogState | None,
    ) -> None:
        self._fs = fs
        self._root = root
        self._store_id = cookie.store_id
        self._without_cookie: list[Directory] = []
        self._volumes = Volumes(fs, root, store_directories(fs, root, cookie, tiers, self._without_cookie))
        self._environment = environment
        self._progress = progress
        self._entries: dict[int, Environment] = {}
        self._problems: list[str] = []
        self._unopened: list[FileRow] = []
        self._opened_files = OpenedFiles(fs, cookie.store_id, self._volumes, self._entries)
        self._reader = RecordReader(self._opened_files)
        self._cookie = cookie
        self._needs_catalog = self._watermark_is_lost = False
        self._lost_ids: tuple[range, ...] = ()
        """The ids of ledgers that may have been created in lost commits; empty if no commit is missing."""
        self._watermark_path = os.path.join(root, "watermark")
        self._state = self._read_state() if state is None else state
        self._files = dict(self._state.files)

    def close(self) -> None:
        """Close all files."""
        for environment in self._entries.values():
            environment.close()

    def run(self, *, accept_loss: bool) -> RebuildReport:
        """Rebuild the index; see ``rebuild_index``."""
        mark = self._state.mark
        in_log = self._read_log()
        named, others = self._gather()
        placed, lost = self._place(named, others)
        ledgers = self._state.ledgers
        entries = sum(row.last_entry_id + 1 for row in ledgers.values())
        problems = tuple(self._problems)
        found = RebuildReport(
            len(ledgers), entries, len(in_log), sum(in_log.values()), tuple(lost), problems, made=False, old_index=None
        )
        is_lost = lost or self._unopened or self._lost_ids
        if is_lost and not accept_loss:
            return found
        if is_lost or self._watermark_is_lost:
            note_accepted_loss(self._fs, self._root, self._lost_ids)
        self._set_aside_entries()
        self._take_environments()
        if lost:
            self._fill(placed, lost)
        written = self._write_catalog()
        new = self._write_index(placed, written)
        if self._watermark_is_lost:
            Watermark.create(self._fs, self._watermark_path, self._store_id).close()
        mend_cookies(self._fs, self._root, self._cookie, self._volumes.directories)
        self._list_directories()
        return found._replace(made=True, old_index=self._install(new, keep=written != mark))

    def _read_state(self) -> CatalogState:
        """Return the state in the newest sound catalog; if there is none, the state in the index.

        Raises:
            CorruptError: Neither is sound.
        """
        try:
            return newest_catalog(self._fs, self._root, self._store_id)
        except CorruptError as error:
            state = self._state_of_index()
            if state is None:
                raise
            self._problems.append(f"{error}; the catalog is made again from the index, which is sound")
            self._needs_catalog = True
            return state

    def _state_of_index(self) -> CatalogState | None:
        """Return the state in the index, None if the index is missing or damaged."""
        path = os.path.join(self._volumes.tier_paths(StorageHint.SSD)[0], INDEX)
        if not environment_is_there(self._fs, path):
            return None
        try:
            with closing(self._environment(path)) as environment:
                index = Index(environment)
                mark = index.mark()
                if mark is None or mark.store_id != self._store_id.hex() or any(index.check()):
                    return None
                ledgers = {row.metadata.ledger_id: row for row in index.ledgers()}
                return CatalogState(ledgers, index.files(), {row.name: row for row in index.all_named()}, mark)
        except CorruptError as error:
            logger.info("the index is of no use either: %s", error)
            return None

    # ---- reading -------------------------------------------------------------------------------------------------

    def _read_log(self) -> dict[int, int]:
        """Return the result of ``_check_log``; if commits are missing, apply the rest of the log to the state.

        Raises:
            CorruptError: A log file belongs to another store.
        """
        known = len(self._problems)
        durable = self._watermark()
        end_is_lost = self._watermark_is_lost and self._lost_log_files()
        try:
            ledgers = self._check_log(durable)
            if not end_is_lost:
                return ledgers
            self._problems.append("the watermark is lost, and so are log files, so commits may be missing")
        except CorruptError as error:
            del self._problems[known + self._watermark_is_lost :]
            self._problems.append(str(error))
        remains = read_remains(
            self._volumes,
            self._state,
            store_id=self._store_id,
            durable_lsn=max(self._state.mark.durable_lsn, durable),
            end_is_lost=end_is_lost,
        )
        self._problems += remains.problems
        self._state, self._lost_ids, self._needs_catalog = remains.state, remains.lost_ids, True
        self._files = dict(self._state.files)
        return {}

    def _lost_log_files(self) -> bool:
        """Return whether log files are lost: one that the catalog names, or a directory that has none and no cookie."""
        return any(row.kind == LOG and not self._volumes.exists(row) for row in self._state.files.values()) or any(
            directory.tier is StorageHint.NVME and not has_log_file(self._volumes, directory, self._store_id)
            for directory in self._without_cookie
        )

    def _check_log(self, watermark: int) -> dict[int, int]:
        """Return the ledgers that the log names from where the catalog ends, with the entries it holds of each.

        A damaged record of entries is a problem, because the store opens with it and a read of the entries fails. A
        damaged control record is an error, because the store cannot be opened with it.

        Raises:
            CorruptError: The log does not continue there, so the catalog is not of the last checkpoint; or a control
                record is damaged, and it is unknown what happened to its ledger.
        """
        mark = self._state.mark
        rows = log_files(self._volumes, mark.first_log_file_id)
        files, durable = load_log_files(self._volumes, rows), max(mark.durable_lsn, watermark)
        ledgers: dict[int, int] = {}
        for commit in Replay(files, first_lsn=mark.next_lsn, durable_lsn=durable, store_id=self._store_id):
            where = self._volumes.path_of(rows[commit.file_id])
            for record in commit.records:
                header = record.header
                if header.kind != RecordKind.ENTRIES:
                    check_control(record, where=where)
                elif not record.sound:
                    last = header.first_entry_id + header.entry_count - 1
                    self._problems.append(
                        f"{where}: the record of entries {header.first_entry_id} to {last} of ledger "
                        f"{header.ledger_id} at offset {record.body_start} is damaged, so reads of them fail; "
                        "restore the file from a backup"
                    )
                if header.kind in (RecordKind.NAMED, RecordKind.GROUP):
                    continue
                ledgers[header.ledger_id] = ledgers.get(header.ledger_id, 0) + header.entry_count
                if header.kind == RecordKind.DELETE:
                    del ledgers[header.ledger_id]
        return ledgers

    def _watermark(self) -> int:
        """Return the durable LSN that the watermark says; 0 if it is lost, and it is to be made again."""
        try:
            watermark = Watermark.open(self._fs, self._watermark_path, self._store_id, writable=False)
        except CorruptError as error:
            self._problems.append(
                f"{error}; it is made again from the log: commits missing at the log's end would not be noticed now"
            )
            self._watermark_is_lost = True
            return 0
        try:
            return watermark.durable_lsn()
        finally:
            watermark.close()

    def _gather(self) -> tuple[RunLocations, RunLocations]:
        """Return the records in the files that the catalog names, and those in moved files that it does not."""
        found = self._volumes.found()
        taken = [*found, *catalog_ids(self._fs, self._root), self._state.mark.next_file_id - 1]
        self._volumes.reserve_ids(max(taken) + 1)
        for row in self._state.files.values():
            self._volumes.add(row)
            if self._volumes.tier_of(row).uses_environments:
                self._open_entries(row)
            elif row.file_id not in found:
                self._problems.append(f"{self._volumes.path_of(row)} is missing")
                del self._files[row.file_id]
            elif (size := found[row.file_id].bytes) < row.bytes:
                self._problems.append(f"{self._volumes.path_of(row)} was cut: it has {size} of {row.bytes} bytes")
                self._files[row.file_id] = row._replace(bytes=size)
            elif row.kind == LOG and (end := log_file_end(self._volumes, row)) < row.bytes:
                self._problems.append(
                    f"{self._volumes.path_of(row)} is older: it ends after {end} of {row.bytes} bytes"
                )
                self._files[row.file_id] = row._replace(bytes=end)
        strays = [
            row
            for row in found.values()
            if self._volumes.tier_of(row).is_written_by_moves and row.file_id not in self._state.files
        ]
        total = sum(row.bytes for row in (*self._files.values(), *strays))
        known = np.fromiter(self._state.ledgers, np.int64)
        found_rows: list[RunLocations] = [np.empty(0, footer_dtype())]
        done = 0
        for row in (*self._files.values(), *strays):
            self._volumes.add(row)
            rows = self._rows_in(row)
            found_rows.append(rows[np.isin(rows["ledger"], known)])
            done += row.bytes
            self._progress(done, total)
        split = 1 + len(self._files)
        return np.concatenate(found_rows[:split]), np.concatenate(found_rows[:1] + found_rows[split:])

    def _open_entries(self, row: FileRow) -> None:
        path = self._volumes.path_of(row)
        try:
            if not environment_is_there(self._fs, path):
                raise CorruptError(f"{path} is missing or empty", path=path)
            self._entries[row.file_id] = self._environment(path)
        except CorruptError as error:
            self._problems.append(str(error))
            self._unopened.append(row)

    def _rows_in(self, row: FileRow) -> RunLocations:
        if row in self._unopened:
            return np.empty(0, footer_dtype())
        return file_rows(row, self._opened_files)

    # ---- assigning records to ledgers ----------------------------------------------------------------------------

    def _place(self, named: RunLocations, others: RunLocations) -> tuple[dict[int, RunLocations], list[LostEntries]]:
        """Return the runs of each ledger, and the missing entries; stray segments are read only for missing entries."""
        placed: dict[int, RunLocations] = {}
        lost: list[LostEntries] = []
        parts = _by_ledger(named)
        stray_parts = _by_ledger(others)
        nothing = np.empty(0, footer_dtype())
        for ledger_id, row in self._state.ledgers.items():
            runs = locations_of(parts.get(ledger_id, nothing))
            chosen, gaps = self._tile(row, runs)
            if gaps and ledger_id in stray_parts:
                runs = np.concatenate((runs, locations_of(stray_parts[ledger_id])))
                chosen, gaps = self._tile(row, runs)
            placed[ledger_id] = runs[chosen]
            lost += [LostEntries(ledger_id, first, last) for first, last in gaps]
        for runs in placed.values():
            for file_id in np.unique(runs["file"]).tolist():
                self._files.setdefault(file_id, self._volumes.rows[file_id])
        return placed, lost

    def _tile(self, row: LedgerRow, runs: RunLocations) -> tuple[list[int], list[tuple[int, int]]]:
        """Choose the records of a ledger: those in its own tier first, then those written last."""
        ledger_id, tier = row.metadata.ledger_id, row.metadata.tier.value
        files = self._volumes.rows

        def preference(place: int) -> int:
            file_id = int(runs["file"][place])
            known = file_id in self._state.files
            return file_id + (known << 62) + ((files[file_id].tier == tier) << 61)

        def is_sound(place: int) -> bool:
            try:
                self._reader.plain_body(ledger_id, runs[place].item())
            except CorruptError as error:
                logger.info("another copy is looked for: %s", error)
                return False
            return True

        return tile(runs, row.last_entry_id, preference=preference, is_sound=is_sound)

    def _fill(self, placed: dict[int, RunLocations], lost: list[LostEntries]) -> None:
        """Write a cold segment of placeholders for lost entries, and add them to the ledgers' runs."""
        volumes = self._volumes
        row = volumes.new_file(COLD, StorageHint.NVME)
        writer = ColdSegmentWriter(self._fs, volumes.path_of(row), self._store_id, row.file_id, compression=None)
        try:
            for ledger_id, first, last in lost:
                for start in range(first, last + 1, _RUN_ENTRIES_MAX):
                    writer.add_lost(ledger_id, start, min(_RUN_ENTRIES_MAX, last + 1 - start))
            rows = writer.finish()
        except BaseException:
            writer.abort()
            raise
        for ledger_id, mine in _by_ledger(rows).items():
            runs = np.concatenate((placed[ledger_id], locations_of(mine)))
            placed[ledger_id] = runs[np.argsort(runs["first"], kind="stable")]
        self._files[row.file_id] = row._replace(bytes=self._fs.file_bytes(volumes.path_of(row)))

    # ---- writing -------------------------------------------------------------------------------------------------

    def _set_aside_entries(self) -> None:
        """Give entries environments that cannot be opened another name and make empty ones, which syncs both names."""
        for row in self._unopened:
            path = self._volumes.path_of(row)
            if self._fs.exists(path):
                self._fs.rename(path, _free_name(self._fs, path))
            self._entries[row.file_id] = self._environment(path)

    def _take_environments(self) -> None:
        """Accept the SSD tier's environments in their present state, even those older than the index."""
        files = self._state.files.values()
        for row in older_environments(self._volumes, files, self._entries, self._state.mark):
            with self._entries[row.file_id].write() as transaction:
                write_entries_mark(transaction, EntriesMark(row.bytes, NO_MARK.removed_at))

    def _list_directories(self) -> None:
        """Record the tier directories in the store, if its list of them is lost or differs."""
        directories = self._volumes.directories
        try:
            known = load_directories(self._fs, self._root) == directories
        except CorruptError as error:
            logger.warning("the list of tier directories is made again: %s", error)
            known = False
        if not known:
            save_directories(self._fs, self._root, directories)

    def _write_catalog(self) -> CheckpointMark:
        """Append changed file rows to the catalog, if there are any; return the mark for the index."""
        if self._needs_catalog:
            return self._new_catalog()
        if self._files == self._state.files:
            return self._state.mark
        mark = self._state.mark._replace(next_file_id=self._volumes.next_file_id)
        path = catalog_path(self._root, mark.catalog_file_id)
        with closing(
            CatalogWriter.resume(self._fs, path, self._store_id, mark.catalog_file_id, mark.catalog_bytes)
        ) as catalog:
            before = self._state.files
            changed = [row for file_id, row in self._files.items() if before.get(file_id) != row]
            gone = [file_id for file_id in before if file_id not in self._files]
            length = catalog.append((), (), mark, self._files.values(), changed=changed, gone=gone)
            return mark._replace(catalog_bytes=length)

    def _new_catalog(self) -> CheckpointMark:
        """Write a new catalog, because none was sound or the log was not; return the mark for the index."""
        file_id = self._volumes.new_id()
        mark = self._state.mark._replace(catalog_file_id=file_id, next_file_id=self._volumes.next_file_id)
        path = catalog_path(self._root, file_id)
        with closing(CatalogWriter.create(self._fs, path, self._store_id, file_id, cookie=self._cookie)) as catalog:
            state, files = self._state, list(self._files.values())
            length = catalog.append(state.ledgers.values(), (), mark, files, changed=files, named=state.named.values())
            return mark._replace(catalog_bytes=length)

    def _write_index(self, placed: dict[int, RunLocations], mark: CheckpointMark) -> str:
        """Write the new index next to the old one, check it, and return its path."""
        path = os.path.join(self._volumes.tier_paths(StorageHint.SSD)[0], f"{INDEX}.new")
        if self._fs.exists(path):
            self._clear(path)
        with closing(self._environment(path)) as environment:
            index = Index(environment)
            with index.update() as update:
                for file_row in self._files.values():
                    update.put_file(file_row)
                for named in self._state.named.values():
                    update.put_named(named)
                update.put_mark(mark)
            for rows in _chunks(self._state.ledgers.values(), _LEDGERS_AT_A_TIME):
                with index.update() as update:
                    for row in rows:
                        update.put_ledger(row)
                        update.append_locations(row.metadata.ledger_id, placed[row.metadata.ledger_id])
            wrong = list(index.check())
        if wrong:
            raise CorruptError(
                f"the index made from the files of {self._root} contradicts itself: {wrong[0]}; nothing was changed; "
                "restore the store from a backup"
            )
        return path

    def _install(self, new: str, *, keep: bool) -> str | None:
        """Replace the old index by the new one; return where the old one is kept, None if it was removed.

        A sound old index is removed unless ``keep`` is set; a damaged one is always kept.
        """
        fs = self._fs
        directory = os.path.dirname(new)
        path = os.path.join(directory, INDEX)
        kept = _free_name(fs, path) if fs.exists(path) else None
        if kept is not None:
            fs.rename(path, kept)
        fs.rename(new, path)
        fs.sync_directory(directory)
        if kept is not None and not keep and self._is_sound(kept):  # checked last, because damage may crash LMDB
            fs.rename(kept, new)
            self._clear(new)
            return None
        return kept

    def _is_sound(self, path: str) -> bool:
        """Return whether an index has all rows that it should have."""
        try:
            with closing(self._environment(path)) as environment:
                index = Index(environment)
                return index.mark() == self._state.mark and not any(index.check())
        except PybkError as error:
            logger.info("the old index is kept: %s", error)
            return False

    def _clear(self, path: str) -> None:
        """Remove the files of an index that is not needed; its empty directory is reused for the next one."""
        for name in self._fs.list_directory(path):
            self._fs.unlink(os.path.join(path, name))


def _by_ledger(rows: RunLocations) -> dict[int, RunLocations]:
    """Split footer rows by ledger."""
    if not len(rows):
        return {}
    rows = rows[np.argsort(rows["ledger"], kind="stable")]
    parts = np.split(rows, np.flatnonzero(np.diff(rows["ledger"])) + 1)
    return {int(part["ledger"][0]): part for part in parts}


def _chunks(rows: Iterable[LedgerRow], size: int) -> Iterator[list[LedgerRow]]:
    iterator = iter(rows)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def _free_name(fs: FileSystem, path: str) -> str:
    """Return the first of ``path.damaged-1``, ``path.damaged-2``, … that is not taken."""
    return next(name for name in (f"{path}.damaged-{n}" for n in itertools.count(1)) if not fs.exists(name))
