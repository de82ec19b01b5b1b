"""The SSD tier: one LMDB environment in each of its directories, with one row per record and a row of its version.

Above level BASE, the version row (``EntriesMark``) shows that an environment was replaced by an older copy. It counts
the transactions that put records, and holds the catalog location at which records were last removed. The index stores
in the file's row the count that it relies on. So an environment is older than the index if its count is lower, and the
index is older than the environment if records were removed at a catalog location that the index has not reached.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from pybk.deferral import np
from pybk.errors import CorruptError, StorageFullError
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.storage import format as layouts
from pybk.storage.format.index_rows import (
    CheckpointMark,
    FileRow,
    decode_value,
    dump_json,
    encode_value,
    entries_key,
    load_json,
)
from pybk.storage.format.log_file import (
    RECORD_HEADER_BYTES,
    RecordKind,
    RunLocations,
    decode_header,
    encode_entries,
    encode_entries_header,
)
from pybk.storage.io.lmdb_environment import LMDB_FILE, ReadTransaction, WriteTransaction
from pybk.storage.tiers import (
    ENTRIES,
    DumpRow,
    FileDamage,
    Loaded,
    LocationWords,
    ReadStore,
    ReservedFile,
    Run,
    Tier,
    TierFiles,
    TierStore,
    TierWriter,
    checked_record,
    dumped_record,
)

if TYPE_CHECKING:
    from pybk.config import StoreConfig
    from pybk.storage.io.filesystem import FileSystem
    from pybk.storage.io.lmdb_environment import WriteTransaction

ENTRIES_MARK_KEY: Final = b"M"
"""The key of the row; the keys of records have 16 bytes."""

CatalogLocation = tuple[int, int]
"""A point in the history of the catalog: the catalog's file id, and its length in bytes. Pairs only grow."""


class EntriesMark(NamedTuple):
    """The row: the number of transactions that put records, and the catalog location of the last removal."""

    puts: int
    removed_at: CatalogLocation


NO_MARK: Final = EntriesMark(0, (0, 0))
"""The mark of an environment without the row: one of level BASE, or a new one."""


def catalog_location(mark: CheckpointMark) -> CatalogLocation:
    """Return the catalog location that an index has reached, from its mark."""
    return mark.catalog_file_id, mark.catalog_bytes


def read_entries_mark(transaction: ReadTransaction) -> EntriesMark:
    """Return the mark of an environment; CorruptError if its row is damaged."""
    value = transaction.get(ENTRIES_MARK_KEY)
    if value is None:
        return NO_MARK
    where = "the mark of the SSD tier"
    fields = load_json(decode_value(ENTRIES_MARK_KEY, value), where=where)
    puts, removed_at = fields.get("puts"), fields.get("removed_at")
    if type(puts) is not int or not isinstance(removed_at, list) or len(removed_at) != len(NO_MARK.removed_at):
        raise CorruptError(f"{where} is {fields}; restore the environment from a backup")
    return EntriesMark(puts, (int(removed_at[0]), int(removed_at[1])))


def write_entries_mark(transaction: WriteTransaction, mark: EntriesMark) -> None:
    """Set the mark of an environment."""
    transaction.put(ENTRIES_MARK_KEY, encode_value(ENTRIES_MARK_KEY, dump_json(mark._asdict())))


_TRANSACTION_BYTES: Final = 16 << 20
ENTRIES_RESERVE_BYTES: Final = 512 << 10
"""The space that each environment has allocated in advance, because deleting records must not need free space."""

REFUGE_BYTES: Final = 512 << 10
"""The space that each has allocated besides, for entries of log files that are needed again when there is no other."""

_FREED_AT_ONCE_MIN: Final = 32
_FREED_BYTES: Final = 16 << 10
"""The pages that LMDB copies at most to delete a record: its leaf, and some above and next to it."""

_KEY_END: Final = b"\xff" * 17
LOST_SUFFIX: Final = ".lost"
"""A file of an environment's name and this suffix says, durably, that the environment was missing and a salvage made it
anew. Opening it makes an empty one, which alone would not show that entries are missing."""


def environment_is_there(fs: FileSystem, path: str) -> bool:
    """Return whether an LMDB environment has a file that is not empty, because LMDB treats an empty one as new."""
    file = os.path.join(path, LMDB_FILE)
    return fs.exists(file) and fs.file_bytes(file) > 0


class LmdbTier(Tier):
    """LMDB environments as a tier. They are created with the store; records are freed by deleting their keys."""

    kind: ClassVar[str] = ENTRIES
    hints: ClassVar[frozenset[StorageHint]] = frozenset({StorageHint.SSD})
    files_are_freed_whole: ClassVar[bool] = False
    uses_environments: ClassVar[bool] = True

    # ---- files ---------------------------------------------------------------------------------------------------

    def file_name(self, file_id: int) -> str:
        """Return the name of the environment of a directory."""
        return ENTRIES

    def file_ids(self, directory: str, names: Sequence[str]) -> Iterable[int]:
        """Return nothing: an environment does not carry its id, which the catalog alone knows."""
        return ()

    def exists(self, fs: FileSystem, path: str) -> bool:
        """Return whether the environment exists, and is not a placeholder that a salvage made for a missing one."""
        return environment_is_there(fs, path) and not fs.exists(path + LOST_SUFFIX)

    def disk_bytes(self, fs: FileSystem, path: str) -> int:
        """Return 0: LMDB reuses free pages, so the size of its file does not show the space that entries take."""
        return 0

    def replace_missing(self, fs: FileSystem, path: str) -> None:
        """Let the empty environment that LMDB created count as existing, in place of the missing one."""
        fs.unlink(path + LOST_SUFFIX)

    # ---- reading -------------------------------------------------------------------------------------------------

    def load(
        self,
        store: ReadStore,
        ledger_id: int,
        runs: RunLocations,
        *,
        direct: bool = False,
        check: bool = False,
        bytes_max: int = 1 << 62,
    ) -> Loaded:
        """Return copies of the records, in one transaction."""
        file_id = int(runs["file"][0])
        firsts = runs["first"].tolist()
        root = store.volumes.root
        with store.entries[file_id].read() as transaction:
            values = [transaction.get(entries_key(ledger_id, first)) for first in firsts]
        records: list[bytes] = []
        for first, body_bytes, value in zip(firsts, runs["body"].tolist(), values, strict=True):
            if value is None:
                if not store.still_there(ledger_id, first, file_id):
                    raise KeyError(file_id)
                raise CorruptError(
                    f"ledger {ledger_id} from entry {first} is missing in {root}'s SSD tier; run "
                    f"`pybk store verify {root}` and restore the tier from a backup"
                )
            if check or len(value) != RECORD_HEADER_BYTES + body_bytes:
                checked_record(memoryview(value), 0, ledger_id, first, file_id, root)
            records.append(value)
        sizes = np.array([len(record) for record in records], np.int64)
        return Loaded(memoryview(b"".join(records)), runs, np.cumsum(sizes) - sizes + RECORD_HEADER_BYTES)

    def plain_record(
        self, store: ReadStore, ledger_id: int, words: LocationWords
    ) -> tuple[memoryview, LocationWords] | None:
        """Return a copy of the record, and words with offset 0."""
        first, count_stride, place, body_flags = words
        file_id = place >> 32
        with store.entries[file_id].read() as transaction:
            value = transaction.get(entries_key(ledger_id, first))
        if value is None:
            return None
        buffer = memoryview(value)
        header = decode_header(buffer, 0, where=f"file {file_id:016x}")
        if header.ledger_id != ledger_id or header.first_entry_id != first or header.body_bytes != body_flags:
            return None
        return buffer, (first, count_stride, file_id << 32, body_flags)

    def stored_record(self, files: TierFiles, ledger_id: int, run: Run) -> tuple[memoryview, int]:
        """Return a copy of the record."""
        file_id = run[4]
        with files.entries[file_id].read() as transaction:
            value = transaction.get(entries_key(ledger_id, run[0]))
        if value is None:
            raise KeyError(file_id)
        return memoryview(value), 0

    # ---- repair --------------------------------------------------------------------------------------------------

    def rows(self, files: TierFiles, row: FileRow) -> RunLocations:
        """Return the records whose keys match their headers."""
        path = files.volumes.path_of(row)
        rows = []
        with files.entries[row.file_id].read() as transaction:
            for key, value in transaction.items(b"\0", _KEY_END):
                if key == ENTRIES_MARK_KEY:
                    continue
                try:
                    header = decode_header(memoryview(value), 0, where=path)
                except CorruptError:
                    continue  # its entries will be missing
                own_key = entries_key(header.ledger_id, header.first_entry_id)
                if header.kind == RecordKind.ENTRIES and key == own_key:
                    rows.append((header.ledger_id, *header.location(0, row.file_id)))
        return np.array(rows, layouts.footer_dtype())

    def check(self, files: TierFiles, row: FileRow) -> Iterator[FileDamage]:
        """Check the one row that is not a record: the mark. An environment that did not open was reported before."""
        environment = files.entries.get(row.file_id)
        if environment is not None:
            with environment.read() as transaction:
                read_entries_mark(transaction)
        yield from ()

    def dump(self, files: TierFiles, row: FileRow) -> Iterator[DumpRow]:
        """Yield the mark and the records, in the order of their keys."""
        with files.entries[row.file_id].read() as transaction:
            for key, value in transaction.items(b"\0", _KEY_END):
                if key == ENTRIES_MARK_KEY:
                    yield {"what": "entries mark", **read_entries_mark(transaction)._asdict()}
                    continue
                yield dumped_record(decode_header(memoryview(value), 0, where=files.volumes.path_of(row)), 0)

    # ---- writing and freeing -------------------------------------------------------------------------------------

    def block_bytes(self, config: StoreConfig) -> int:
        """Return the entry bytes of a record; a point read copies a whole record."""
        return config.ssd_block_bytes

    def size_is_known(self, hint: StorageHint, config: StoreConfig) -> bool:
        """Return False, because LMDB may reuse free pages."""
        return False

    def writer(
        self, store: TierStore, hint: StorageHint, *, when_full: bool = False, reserved: ReservedFile | None = None
    ) -> TierWriter:
        """Return a writer that spreads ledgers over the environments."""
        return _RowsWriter(store, 0 if when_full else REFUGE_BYTES)

    def free_records(
        self, store: TierStore, file_id: int, records: Collection[tuple[int, int]], mark: CheckpointMark
    ) -> None:
        """Delete the records' keys, in as many transactions as the space for the pages that LMDB copies requires."""
        environment, left = store.entries[file_id], sorted(records)
        room = store.fs.free_bytes(store.volumes.path_of(store.volumes.rows[file_id])) + environment.reserved_bytes()
        count = max(_FREED_AT_ONCE_MIN, room // _FREED_BYTES)
        while left:
            with environment.write() as transaction:
                for ledger_id, first in left[:count]:
                    transaction.delete(entries_key(ledger_id, first))
                if store.feature_level > FeatureLevel.BASE:
                    # An index from before this deletion names these keys; the environment must show that it is newer.
                    found = read_entries_mark(transaction)
                    write_entries_mark(transaction, found._replace(removed_at=catalog_location(mark)))
            del left[:count]

    def beyond_end(self, runs: RunLocations, row: FileRow) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return False for each record, because rows have no offset, and ``FileRow.bytes`` counts transactions here."""
        return np.zeros(len(runs), np.bool_)


class _RowsWriter(TierWriter):
    """Puts records in transactions of 16 MiB."""

    def __init__(self, store: TierStore, kept_bytes: int) -> None:
        self._store = store
        self._kept_bytes = kept_bytes
        self._environments = sorted(store.entries)
        self.puts: list[tuple[bytes, bytes]] = []
        """Keys and values that no transaction has written yet."""
        self._put_bytes = 0
        self._changed: dict[int, FileRow] = {}

    def add(self, ledger_id: int, first: int, sizes: list[int], parts: Sequence[bytes | memoryview]) -> Run:
        """Put a record."""
        header, body = encode_entries(ledger_id, first, sizes, parts)
        return self._put(ledger_id, first, len(sizes), header, body)

    def add_body(self, ledger_id: int, first: int, count: int, body: bytes) -> Run:
        """Put a record in its stored form."""
        return self._put(ledger_id, first, count, encode_entries_header(ledger_id, first, count, body), body)

    def _put(self, ledger_id: int, first: int, count: int, header: bytes, body: bytes) -> Run:
        file_id = self._environments[ledger_id % len(self._environments)]
        self.puts.append((entries_key(ledger_id, first), header + body))
        self._put_bytes += len(body)
        if self._put_bytes >= _TRANSACTION_BYTES:
            self._flush()
        return first, count, 1, 0, file_id, len(body), 0

    def _flush(self) -> None:
        for number, file_id in enumerate(self._environments):
            mine = [(key, value) for key, value in self.puts if _ledger_of(key) % len(self._environments) == number]
            if mine:
                self._check_space(file_id, sum(len(value) for _, value in mine))
                with self._store.entries[file_id].write() as transaction:
                    for key, value in mine:
                        transaction.put(key, value)
                    if self._store.feature_level > FeatureLevel.BASE:
                        self._count_puts(file_id, transaction)
        self.puts = []
        self._put_bytes = 0

    def _check_space(self, file_id: int, nbytes: int) -> None:
        """Raise StorageFullError if the environment would need the space that is kept for others."""
        room = room_of(self._store, file_id) - self._kept_bytes
        needed = 2 * nbytes  # pages are not full
        if room < needed:
            volumes = self._store.volumes
            path = volumes.path_of(volumes.rows[file_id])
            raise StorageFullError(
                f"{path} has room for {max(room, 0)} bytes, and {nbytes} bytes of entries there may take {needed}; "
                "free space on the device or delete ledgers"
            )

    def _count_puts(self, file_id: int, transaction: WriteTransaction) -> None:
        """Count this transaction in the environment and in the file's row, by which the index requires it."""
        mark = read_entries_mark(transaction)
        mark = mark._replace(puts=mark.puts + 1)
        write_entries_mark(transaction, mark)
        self._changed[file_id] = self._store.volumes.rows[file_id]._replace(bytes=mark.puts)

    def finish(self) -> list[FileRow]:
        """Commit the remaining records; return the rows of the environments with the new counts."""
        if self.puts:
            self._flush()
        return list(self._changed.values())

    def abort(self) -> None:
        """Do nothing: records that were put stay there unused until they are put again."""


def room_of(store: TierStore, file_id: int) -> int:
    """Return the bytes that an environment can take without those that deletes are to find; negative if it lacks some.

    Entries may take twice their size of it.
    """
    volumes, environment = store.volumes, store.entries[file_id]
    free = store.fs.free_bytes(volumes.path_of(volumes.rows[file_id]))
    return free + environment.reserved_bytes() + environment.reusable_bytes() - ENTRIES_RESERVE_BYTES


def _ledger_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "big") ^ (1 << 63)
