"""Verify a whole store: every durable entry exists and has the bytes that were written.

Theory of operation. Verification changes nothing and takes no lock, so it runs while another process writes the store.
It checks from the outside in, and a part that cannot be opened is reported and what depends on it is skipped:

1. Open the main cookie, the tier directories, the watermark, the index and the catalog. The index's checkpoint mark, or
   without an index the catalog's, says where the log begins. The watermark or the mark says up to which LSN it is
   durable; bytes after that are not checked, because a live writer may be writing them.
2. Compare the catalog with the index, row by row.
3. Check the log from the mark up to the durable LSN.
4. Check the index's own invariants.
5. Check each ledger: its runs cover it without a gap, each record's checksums, digests and cumulative lengths are
   right, and its end agrees with its metadata and its seal. Ledgers come before files, so damage to a record is
   reported once, with its entries; ``_seen`` holds the records that are reported already.
6. Check the remaining bytes of each file: headers, padding and records that no ledger names.

Why that is right without a lock: a checkpoint changes the index's mark before it removes the files that it replaces. So
``_stable`` reads the mark before and after each check, and repeats a check that found a problem while the mark changed.
A problem between two equal marks is real. After ``READ_TRIES`` tries the problem is reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Final, NamedTuple, TypeVar

import numpy as np

from pybk.config import StoreConfig
from pybk.credentials import Passwords
from pybk.errors import (
    CookieError,
    CorruptError,
    EntryError,
    LedgerError,
    NoSuchLedgerError,
    PybkError,
    SealMismatchError,
    StorageError,
)
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType, EntryDigest, entry_digest
from pybk.ledger.entry import EntryBatch
from pybk.ledger.keys import KeyRing, LedgerKeys, LedgerSeal
from pybk.ledger.ledger_check import LastEntry, SealState, check_last, check_seal, digest_with, end_of, find_seal
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.storage.directories import (
    INDEX,
    OpenEnvironment,
    checked_mark,
    find_cookie,
    lost_cookie,
    main_cookie,
    store_directories,
)
from pybk.storage.format.catalog import CatalogState, catalog_path, newest_catalog, read_catalog
from pybk.storage.format.cookie import COOKIE_NAME, Cookie
from pybk.storage.format.extent import Extent
from pybk.storage.format.index_rows import CheckpointMark, FileRow, LedgerRow
from pybk.storage.format.log_file import RunLocations, Watermark, entry_ends
from pybk.storage.index.index import NOTHING, Index, IndexSnapshot, last_entry, untiled
from pybk.storage.io.filesystem import FileSystem, OsFileSystem
from pybk.storage.io.lmdb_environment import Environment
from pybk.storage.log.recovery import OpenLogFile, load_log_files, log_files
from pybk.storage.readonly import ReadOnlyStore, open_environment_read_only
from pybk.storage.repair.inspection import RecordReader
from pybk.storage.repair.log_check import LogProblem, check_kept_file, check_log_from
from pybk.storage.repair.rebuild import Progress
from pybk.storage.repair.replaced_entries import Replacements
from pybk.storage.store_reader import READ_TRIES
from pybk.storage.tiers import LOG, OpenedFiles
from pybk.storage.volumes import Volumes

_RESTORE: Final = "restore the file from a backup"

_DAMAGE: Final = (StorageError, EntryError, LedgerError)
"""Errors that mean that the store is damaged; any other error is raised to the caller."""

T = TypeVar("T")


class VerifyProblem(NamedTuple):
    """One problem: a message with the remedy, and where it is; a field that does not apply is None."""

    message: str
    path: str | None = None
    offset: int | None = None
    ledger_id: int | None = None
    first_entry_id: int | None = None
    last_entry_id: int | None = None


class VerifyReport(NamedTuple):
    """The result of a verification.

    Attributes:
        problems: The problems; the store is sound if there are none.
        ledgers: Ledgers that were checked.
        entries: Entries that were checked.
        files: Files that were checked, not counting the catalog, the cookies and the watermark.
        durable_lsn: The log was checked up to this LSN.
        unauthenticated: Ledgers whose digests could not be checked, because the right password was not given; their
            records' checksums were checked.
        unsealed: Closed ledgers without a seal: nothing proves where they end.
        seals_unchecked: Sealed ledgers whose right password was not given.
    """

    problems: tuple[VerifyProblem, ...]
    ledgers: int
    entries: int
    files: int
    durable_lsn: int
    unauthenticated: int
    unsealed: int
    seals_unchecked: int

    @property
    def complete(self) -> bool:
        """True if everything could be checked."""
        return not (self.unauthenticated or self.unsealed or self.seals_unchecked)


def verify_store(
    root: str,
    *,
    password: bytes | None = None,
    passwords: Passwords | None = None,
    tiers: Mapping[StorageHint, str | Sequence[str]] | None = None,
    fs: FileSystem | None = None,
    environment: OpenEnvironment = open_environment_read_only,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify a store that is closed, or that another process is writing.

    Args:
        root: The store's directory.
        password: The password of all ledgers that have one.
        passwords: Instead, passwords and secrets of ledgers; needed to check their seals and the entries of HMAC_SHA256
            ledgers. A wrong one that is named for a ledger's id is a problem. None is tried if no other is right.
        tiers: The tier directories, if they have moved since the store was last opened.
        fs: The file system.
        environment: Opens LMDB environments, read-only.
        progress: Called with the bytes that were read and the bytes to read.

    Raises:
        CookieError: There is no store at ``root``, or it is the directory of one tier.
        UsageError: Entries are compressed and the extra ``pybk[zstd]`` is not installed.

    Cost: Reads every file once and every entry once more. Memory grows with the ledgers, not with the entries.
    """
    fs = fs or OsFileSystem()
    root = os.path.abspath(root)
    progress = progress or (lambda done, total: None)
    with closing(_Check(fs, root, passwords or Passwords(password), environment, progress)) as check:
        check.run(tiers)
    return check.result()


class _Check:
    """One call of ``verify_store``. A part that cannot be opened is a problem, and checks that need it are skipped."""

    def __init__(
        self, fs: FileSystem, root: str, passwords: Passwords, environment: OpenEnvironment, progress: Progress
    ) -> None:
        self._fs = fs
        self._root = root
        self._passwords = passwords
        self._environment = environment
        self._progress = progress
        self._problems: list[VerifyProblem] = []
        self._opened: list[Callable[[], None]] = []
        self._entries: dict[int, Environment] = {}
        self._index: Index | None = None
        self._mark: CheckpointMark | None = None
        self._keys: KeyRing | None = None
        self._replacements = Replacements()
        self._seen: set[tuple[int, int]] = set()
        self._counts: dict[int, int] = {}
        self._files = self._durable_lsn = 0
        self._without_password: set[int] = set()
        self._unsealed: set[int] = set()
        self._seals_unchecked: set[int] = set()
        self._done_bytes = self._total_bytes = 0

    def close(self) -> None:
        """Close all files."""
        for close in reversed(self._opened):
            close()

    def result(self) -> VerifyReport:
        """Return the result."""
        return VerifyReport(
            tuple(self._problems),
            len(self._counts),
            sum(self._counts.values()),
            self._files,
            self._durable_lsn,
            len(self._without_password),
            len(self._unsealed),
            len(self._seals_unchecked),
        )

    def run(self, tiers: Mapping[StorageHint, str | Sequence[str]] | None) -> None:
        """Check everything."""
        cookie = self._read_cookie(tiers)
        if cookie is None:
            return
        directories = self._try(lambda: store_directories(self._fs, self._root, cookie, tiers))
        if directories is None:
            return
        self._cookie = cookie
        self._volumes = Volumes(self._fs, self._root, directories)
        self._opened_files = OpenedFiles(self._fs, cookie.store_id, self._volumes, self._entries)
        self._reader = RecordReader(self._opened_files)
        if cookie.salt is not None:
            self._keys = KeyRing(cookie.store_id, cookie.salt, cost=cookie.scrypt_cost or 0)
        durable = self._try(self._watermark) or 0
        self._try(self._open_index)
        catalog = self._try(self._catalog)
        mark = self._mark or (None if catalog is None else catalog.mark)
        if mark is None:
            return
        self._durable_lsn = max(durable, mark.durable_lsn)
        self._plan()
        self._stable(self._check_catalog)
        tail_is_sound = self._stable(partial(self._check_tail, mark))
        if self._index is not None:
            self._stable(self._check_index)
            self._check_ledgers(tiers, report_open=tail_is_sound)
            for row in self._index_files().values():
                self._stable(partial(self._check_file, row))

    def _read_cookie(self, tiers: Mapping[StorageHint, str | Sequence[str]] | None) -> Cookie | None:
        """Return the store's cookie, or what the tiers and catalogs repeat of a lost one; None if nothing does."""
        try:
            own = main_cookie(self._fs, self._root)
            cookie = own or find_cookie(self._fs, self._root, tiers)
        except CookieError:
            raise  # it is the directory of a tier, or no store's: the caller named another one than meant
        except (*_DAMAGE, FileNotFoundError) as error:
            self._add(_problem(error))
            return self._try(lambda: find_cookie(self._fs, self._root, tiers))
        if cookie is None:
            raise CookieError(
                f"there is no store at {self._root}; name the directory that LedgerManager.open was given"
            )
        if own is None:
            self._add(VerifyProblem(lost_cookie(self._root), os.path.join(self._root, COOKIE_NAME)))
        return cookie

    # ---- collecting problems -------------------------------------------------------------------------------------

    def _try(self, call: Callable[[], T]) -> T | None:
        """Return the result of a call; if it finds damage, add a problem and return None."""
        try:
            return call()
        except (*_DAMAGE, FileNotFoundError) as error:
            self._add(_problem(error))
            return None

    def _stable(self, check: Callable[[], Iterable[VerifyProblem]]) -> bool:
        """Run a check, again while it finds problems and the mark changed meanwhile; return whether it found none."""
        problems: list[VerifyProblem] = []
        for _ in range(READ_TRIES):
            before = self._current_mark()
            try:
                problems = list(check())
            except FileNotFoundError as error:
                problems = [
                    _problem(error)
                ]  # repeat: the mark changes before a file is removed, maybe before it was read here
                continue
            except _DAMAGE as error:
                problems = [_problem(error)]
            if not problems or before == self._current_mark():
                break
        for problem in problems:
            self._add(problem)
        return not problems

    def _add(self, problem: VerifyProblem) -> None:
        if problem not in self._problems:
            self._problems.append(problem)

    def _current_mark(self) -> CheckpointMark | None:
        if self._index is None:
            return None
        try:
            return self._index.mark()
        except _DAMAGE:
            return None  # the check of the index reports it

    def _read_bytes(self, size: int) -> None:
        self._done_bytes += size
        self._progress(self._done_bytes, max(self._total_bytes, self._done_bytes))

    # ---- opening -------------------------------------------------------------------------------------------------

    def _watermark(self) -> int:
        path = os.path.join(self._root, "watermark")
        with closing(Watermark.open(self._fs, path, self._cookie.store_id, writable=False)) as watermark:
            return watermark.stored_lsn()

    def _open_index(self) -> None:
        environment = self._environment(os.path.join(self._volumes.tier_paths(StorageHint.SSD)[0], INDEX))
        self._opened.append(environment.close)
        self._index = Index(environment)
        self._mark = checked_mark(self._index, self._cookie, self._root)

    def _index_files(self) -> dict[int, FileRow]:
        """Return the files that the index names, after adding them to the volumes and opening their environments."""
        assert self._index is not None, "the caller looked"
        try:
            files = self._index.files()
        except _DAMAGE as error:
            self._add(_problem(error))
            return {}
        for row in files.values():
            self._volumes.add(row)
            if self._volumes.tier_of(row).uses_environments and row.file_id not in self._entries:
                environment = self._try(partial(self._environment, self._volumes.path_of(row)))
                if environment is not None:
                    self._entries[row.file_id] = environment
                    self._opened.append(environment.close)
        return files

    def _plan(self) -> None:
        """Estimate the bytes to read, for the progress."""
        self._total_bytes = 2 * sum(row.bytes for row in self._volumes.found().values())

    # ---- catalog, index, log -------------------------------------------------------------------------------------

    def _catalog(self) -> CatalogState:
        mark = self._mark
        if mark is None:
            return newest_catalog(self._fs, self._root, self._cookie.store_id)
        path = catalog_path(self._root, mark.catalog_file_id)
        return read_catalog(self._fs, path, self._cookie.store_id, mark.catalog_file_id, at_least=mark.catalog_bytes)

    def _check_catalog(self) -> Iterable[VerifyProblem]:
        """Compare the catalog with the index, if both are of the same checkpoint."""
        if self._index is None or self._mark is None:
            return
        with self._index.snapshot() as index:  # a checkpoint may change the index meanwhile
            self._mark = checked_mark(index, self._cookie, self._root)
            state = self._catalog()
            if state.mark.catalog_bytes == self._mark.catalog_bytes:
                yield from self._differences(state, index, self._mark)

    def _differences(self, state: CatalogState, index: IndexSnapshot, mark: CheckpointMark) -> Iterable[VerifyProblem]:
        path = catalog_path(self._root, mark.catalog_file_id)
        if state.mark != mark or state.files != index.files():
            yield VerifyProblem(
                f"{path} names other files than the index, or another mark; run `pybk store rebuild-index "
                f"{self._root}`",
                path,
            )
        known = state.ledgers
        count = 0
        for row in index.ledgers():
            count += 1
            if known.get(row.metadata.ledger_id) != row:
                yield VerifyProblem(
                    f"{path} says {known.get(row.metadata.ledger_id)} where the index says {row}; {_RESTORE}",
                    path,
                    ledger_id=row.metadata.ledger_id,
                )
        if list(state.named.values()) != index.named():
            yield VerifyProblem(
                f"{path} has other named records than the index; run `pybk store rebuild-index {self._root}`", path
            )
        if count != len(known):
            yield VerifyProblem(f"{path} names {len(known)} ledgers, the index {count}; {_RESTORE}", path)

    def _check_index(self) -> Iterable[VerifyProblem]:
        assert self._index is not None, "the caller looked"
        path = os.path.join(self._volumes.tier_paths(StorageHint.SSD)[0], INDEX)
        for what in self._index.check():
            yield VerifyProblem(f"{path}: {what}; run `pybk store rebuild-index {self._root}`", path)

    def _check_tail(self, mark: CheckpointMark) -> Iterable[VerifyProblem]:
        """Check the log from the mark up to the durable LSN."""
        mark = self._current_mark() or mark
        rows = log_files(self._volumes, mark.first_log_file_id)
        for row in rows.values():
            self._volumes.add(row)
        files = list(load_log_files(self._volumes, rows))
        self._files += len(files)
        problems = check_log_from(files, mark.next_lsn, self._durable_lsn, self._cookie.store_id)
        yield from map(self._log_problem, problems)
        self._read_bytes(sum(len(file.data) for file in files))

    def _log_problem(self, found: LogProblem) -> VerifyProblem:
        where = None if found.header is None else found.header
        message = f"{found.path}: {found.what} at offset {found.offset}; {_RESTORE}"
        if where is None:
            return VerifyProblem(message, found.path, found.offset)
        self._seen.add((found.file_id, found.offset))
        last = where.first_entry_id + (where.entry_count - 1) * where.stride if where.entry_count else None
        first = where.first_entry_id if where.entry_count else None
        return VerifyProblem(message, found.path, found.offset, where.ledger_id, first, last)

    # ---- files ---------------------------------------------------------------------------------------------------

    def _check_file(self, row: FileRow) -> Iterable[VerifyProblem]:
        """Check a file that the index names; damaged records that were reported already are left out."""
        assert self._index is not None, "the caller looked"
        tier = self._volumes.tier_of(row)
        path = self._volumes.path_of(row)
        try:
            if row.kind == LOG:
                file = OpenLogFile.load(self._fs, row.file_id, path)
                problems = [
                    self._log_problem(found)
                    for found in check_kept_file(file, row.bytes, self._cookie.store_id)
                    if (row.file_id, found.offset) not in self._seen
                ]
            else:
                problems = [
                    VerifyProblem(*damage)
                    for damage in tier.check(self._opened_files, row)
                    if (row.file_id, damage.offset) not in self._seen
                ]
        except FileNotFoundError:
            if row.file_id in self._index.files():
                yield VerifyProblem(f"{path} is missing, and the index names it; {_RESTORE}", path)
            return
        yield from problems
        if not tier.uses_environments:  # the rows of an environment were counted as the entries of ledgers
            self._files += 1
            self._read_bytes(row.bytes)

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def _check_ledgers(self, tiers: Mapping[StorageHint, str | Sequence[str]] | None, *, report_open: bool) -> None:
        """Check every entry of every ledger; only the indexed ones if the log cannot be replayed.

        Args:
            tiers: As for ``verify_store``.
            report_open: Report an error of the replay; False if the check of the log has reported it.
        """
        assert self._index is not None, "the caller looked"
        store: ReadOnlyStore | None = None
        try:
            store = ReadOnlyStore.open(
                self._root, config=StoreConfig(), tiers=tiers, fs=self._fs, environment=self._environment
            )
            self._opened.append(store.close)
            ids = [metadata.ledger_id for metadata in store.ledgers()]
        except (*_DAMAGE, FileNotFoundError) as error:
            if report_open:
                self._add(_problem(error))
            store = None
            try:
                ids = [row.metadata.ledger_id for row in self._index.ledgers()]
            except _DAMAGE as damage:
                self._add(_problem(damage))
                return
        self._index_files()
        for ledger_id in ids:
            self._stable(partial(self._check_ledger, store, ledger_id))
        self._problems = [problem for problem in self._problems if not self._is_replaced(problem, store)]

    def _is_replaced(self, problem: VerifyProblem, store: ReadOnlyStore | None) -> bool:
        """Return whether all entries of a damaged record were copied from a peer since; then nothing reads it."""
        ledger_id, first, last = problem.ledger_id, problem.first_entry_id, problem.last_entry_id
        if problem.offset is None or ledger_id is None or first is None or last is None:
            return False
        row, _ = self._known(store, ledger_id)
        return row is not None and self._replacements.hold(row.metadata, first, last)

    def _check_ledger(self, store: ReadOnlyStore | None, ledger_id: int) -> Iterable[VerifyProblem]:
        """Check that all entries of a ledger exist and are sound, and that its end and seal are right."""
        assert self._index is not None, "the caller looked"
        row, tail = self._known(store, ledger_id)
        if row is None:
            return
        self._replacements.add(row.metadata, row.last_entry_id)
        extent = Extent.of(row.metadata) or Extent(ledger_id, 0, 1, 0)
        try:
            seal = self._seal(row.metadata)
        except SealMismatchError as error:  # its digest type is in doubt, so its entries cannot be checked
            yield VerifyProblem(str(error), ledger_id=ledger_id)
            return
        digest = self._digest(row.metadata, extent.ledger_id, seal)
        after = NOTHING
        end: LastEntry | None = LastEntry(0, b"") if extent.first == 0 else None
        pages = self._index.pages(ledger_id) if row.last_entry_id >= 0 and self._index.ledger(ledger_id) else ()
        count = 0
        for runs in (*pages, tail):
            if not len(runs):
                continue
            runs = runs[runs["first"] > after[0]]
            wrong = untiled(runs, after) if len(runs) else None
            if wrong is not None:
                yield VerifyProblem(
                    f"ledger {ledger_id} has a gap: {wrong}; run `pybk store rebuild-index {self._root}`",
                    ledger_id=ledger_id,
                )
                return
            for run in runs.tolist():
                problem, end = self._check_record(row.metadata, run, digest, extent, end)
                if problem is not None:
                    yield problem
                count += run[1]
            after = last_entry(runs) if len(runs) else after
        self._counts[ledger_id] = count
        yield from self._check_end(row, after[0], None if end is None else end.length)
        yield from self._check_seal(row.metadata, seal, end if row.metadata.last_entry_id == after[0] else None)

    def _known(self, store: ReadOnlyStore | None, ledger_id: int) -> tuple[LedgerRow | None, RunLocations]:
        """Return a ledger's row and its runs that are not in the index yet; None for the row if it was deleted."""
        assert self._index is not None, "the caller looked"
        nothing = np.empty(0, np.void)
        if store is None:
            return self._index.ledger(ledger_id), nothing
        try:
            store.catch_up()
            descriptor = store.descriptor(ledger_id)
        except NoSuchLedgerError:
            return None, nothing
        for row in store.volumes.rows.values():
            self._volumes.add(row)
        tail = descriptor.tail_snapshot()
        last = last_entry(tail)[0] if len(tail) else descriptor.last_indexed
        known = LedgerRow(descriptor.metadata, last, descriptor.last_add_confirmed, descriptor.length_durable)
        return known, tail

    def _check_end(self, row: LedgerRow, last: int, length: int | None) -> Iterable[VerifyProblem]:
        """Compare a ledger's end with its row and metadata; ``length`` is None if the last entry is damaged."""
        metadata = row.metadata
        known = [row.last_entry_id, *([metadata.last_entry_id] if metadata.state is LedgerState.CLOSED else [])]
        lengths = [row.length, *([metadata.length] if metadata.state is LedgerState.CLOSED else [])]
        if any(one != last for one in known) or (length is not None and any(one != length for one in lengths)):
            yield VerifyProblem(
                f"ledger {metadata.ledger_id} ends with entry {last} and has {length} bytes, but entries {known} and "
                f"bytes {lengths} are recorded; run `pybk store rebuild-index {self._root}`",
                ledger_id=metadata.ledger_id,
                first_entry_id=last + 1,
                last_entry_id=max(known),
            )

    def _check_seal(
        self, metadata: LedgerMetadata, seal: LedgerSeal | None, end: LastEntry | None
    ) -> Iterable[VerifyProblem]:
        """Check a closed ledger's seal, and its last entry against the seal; ``end`` is None if that is damaged."""
        try:
            state = check_seal(metadata, seal)
        except SealMismatchError as error:
            yield VerifyProblem(str(error), ledger_id=metadata.ledger_id)
            state = SealState.RIGHT  # so that the last entry is compared with the seal, too
        if state is SealState.UNSEALED:
            self._unsealed.add(metadata.ledger_id)
        elif state is SealState.UNCHECKED:
            self._seals_unchecked.add(metadata.ledger_id)
        elif state is SealState.RIGHT and end is not None:
            try:
                check_last(metadata, end)
            except SealMismatchError as error:
                yield VerifyProblem(str(error), ledger_id=metadata.ledger_id)

    def _check_record(
        self,
        metadata: LedgerMetadata,
        run: tuple[int, int, int, int, int, int, int],
        digest: EntryDigest,
        extent: Extent,
        before: LastEntry | None,
    ) -> tuple[VerifyProblem | None, LastEntry | None]:
        """Check a record.

        Args:
            metadata: The ledger's metadata.
            run: The location of the record.
            digest: Checks its entries.
            extent: Maps the ledger's entry ids to those in the entries' headers.
            before: Length and digest of the entry before the record; None if they are not known.

        Returns:
            The problem, or None; and the length and digest of the record's last entry, None if there is a problem.
        """
        ledger_id = metadata.ledger_id
        first, count, stride, offset, file_id, body_bytes, _ = run
        last = first + (count - 1) * stride
        path = self._volumes.path_of(self._volumes.rows[file_id]) if file_id in self._volumes.rows else None
        try:
            body = self._reader.plain_body(ledger_id, run)
            start, ends = entry_ends(body, count, where=str(path))
            starts = np.concatenate((np.array([start], np.int64), ends[:-1]))
            ids = extent.entry_ids(np.arange(first, last + 1, stride, dtype=np.int64))
            batch = EntryBatch(extent.ledger_id, ids, body, starts, ends - starts, digest.size)
            digest.check_many(batch)
            known = before.length if before is not None and extent.stride == 1 else None
            end = end_of(batch, metadata.digest_type, known, dense=extent.stride == 1)
        except (KeyError, FileNotFoundError):
            message = f"ledger {ledger_id} entries {first} to {last} are missing in file {file_id:016x} ({path})"
        except _DAMAGE as error:
            message = f"ledger {ledger_id} entries {first} to {last} are damaged: {error}"
        else:
            self._read_bytes(body_bytes)
            return None, end
        self._seen.add((file_id, offset))
        return VerifyProblem(f"{message}; {_RESTORE}", path, offset, ledger_id, first, last), None

    def _seal(self, metadata: LedgerMetadata) -> LedgerSeal | None:
        """Return the checker of a ledger's seal, None if its password is not known; raises as ``find_seal``."""
        return None if self._keys is None else find_seal(self._keys, _verifier, self._passwords, metadata)

    def _digest(self, metadata: LedgerMetadata, ledger_id: int, seal: LedgerSeal | None) -> EntryDigest:
        """Return the digest that checks a ledger's entries; without the password it checks only their ids and sizes."""
        digest = digest_with(seal, metadata, ledger_id)
        if digest is None:
            self._without_password.add(metadata.ledger_id)
            return entry_digest(DigestType.NONE, ledger_id)
        return digest


def _verifier(keys: LedgerKeys) -> bytes:
    return keys.verifier


def _problem(error: PybkError | FileNotFoundError) -> VerifyProblem:
    """Return the problem that an error describes."""
    if isinstance(error, CorruptError):
        return VerifyProblem(str(error), error.path, error.offset)
    if isinstance(error, FileNotFoundError):
        return VerifyProblem(f"{error.filename} is missing; {_RESTORE}", error.filename)
    return VerifyProblem(str(error))
