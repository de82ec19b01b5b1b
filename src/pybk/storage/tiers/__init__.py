"""The interface of a storage tier: writing, reading, checking and freeing of entries in its files.

A tier keeps records of entries in files of one kind (``FileRow.kind``). The index says in which file each record lies;
its tier does everything else with the file. A reader, the mover, compaction, ``verify`` and
``rebuild-index`` ask ``volumes`` for the tier of a file's kind, or for the tier that takes a storage hint.

A further tier is one module, and one line in ``volumes.TIERS``. The module provides:

- ``kind``, ``hints`` and the attributes of ``Tier`` whose defaults do not fit. ``kind`` stands in the index and the
  catalog for as long as a file exists, so it never changes.
- ``writer``: a ``TierWriter``. It takes a row for each file from ``TierVolumes.new_file``, makes the file durable in
  ``finish``, and makes its row known by ``TierVolumes.add``.
- ``load``, ``plain_record`` and ``stored_record``: reading. ``FileTier`` provides them for records, in the format of
  ``docs/reference/format.md``, that lie at ``RunLocation.offset`` in a file that can be mapped.
- ``rows``: all records of a file, from the file alone, because ``rebuild-index`` has no index.
- ``check``: the damage of a file that reading its entries does not find, for ``verify``.
- ``dump``: what ``pybk store dump`` prints of a file. The default prints the headers of the records that ``rows``
  returns.
- For records that do not lie in files of a directory, as in an object store: ``file_name`` and ``file_ids``,
  ``exists``, ``file_bytes``, ``disk_bytes``, ``unlink``, ``replace_missing`` and ``is_placeholder``.

Records keep their header wherever they lie, so a tier that stores whole records gets identity and checksums from
``checked_record``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

from pybk.deferral import np
from pybk.errors import CorruptError, UsageError
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    RECORD_HEADER_BYTES,
    RecordHeader,
    RecordKind,
    RunLocations,
    check_body,
    decode_header,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from pybk.config import StoreConfig
    from pybk.feature_level import FeatureLevel
    from pybk.flags import StorageHint
    from pybk.storage.format.index_rows import CheckpointMark, FileRow
    from pybk.storage.io.filesystem import FileSystem, Mapped
    from pybk.storage.io.lmdb_environment import Environment

LOG: Final = "log"
COLD: Final = "cold"
ENTRIES: Final = "entries"

Run = tuple[int, ...]
"""A row of ``location_dtype()``: where a record lies."""

DumpRow = dict[str, Any]
"""The fields that ``pybk store dump`` prints of one thing, by name; ``what`` names its kind."""

LocationWords = tuple[int, int, int, int]
"""A row of ``location_dtype()`` as four words: first entry, count and stride, offset and file, body and flags."""

_FILE_ID: Final = re.compile("[0-9a-f]{16}")


class Loaded(NamedTuple):
    """Plain bodies of some records: ``body_starts`` is where each begins in ``buffer``, ``(r,)`` int64, bytes."""

    buffer: memoryview
    runs: RunLocations
    body_starts: npt.NDArray[np.int64]


class ReservedFile(NamedTuple):
    """A file of allocated blocks that is to become a file of a tier: the number of its directory, and its path."""

    directory: int
    path: str


class FileDamage(NamedTuple):
    """Damage of a file; ``ledger_id`` and the entries are None if the damage is of the file and not of a record."""

    message: str
    path: str
    offset: int | None = None
    ledger_id: int | None = None
    first_entry_id: int | None = None
    last_entry_id: int | None = None


class TierVolumes(Protocol):
    """The parts of ``Volumes`` that tiers use."""

    @property
    def root(self) -> str:
        """The store's directory."""

    @property
    def rows(self) -> Mapping[int, FileRow]:
        """The known files."""

    def path_of(self, row: FileRow) -> str:
        """Return the path of a file."""

    def directory_of(self, row: FileRow) -> str:
        """Return the directory of a file."""

    def new_file(self, kind: str, tier: StorageHint) -> FileRow:
        """Return the row of a new file, with an id of its own, in a directory of a tier."""

    def add(self, row: FileRow) -> None:
        """Make a file known."""

    def drop(self, file_id: int) -> None:
        """Unlink a file."""

    def view(self, file_id: int) -> memoryview:
        """Return the map of a whole file."""

    def mapped(self, file_id: int) -> Mapped:
        """Return the map of a whole file."""

    def is_reused(self, file_id: int) -> bool:
        """Return whether no map of a file may be handed out, because its bytes may be others later."""

    def populate(self, view: memoryview, start: int, stop: int) -> None:
        """Bring a range of a map into memory."""

    def populate_once(self, mapped: Mapped, start: int, stop: int) -> None:
        """Bring a range of a map into memory, unless that was done before."""

    def read(self, file_id: int, start: int, end: int) -> memoryview:
        """Read bytes of a file into private memory, through the page cache."""

    def read_direct(self, file_id: int, start: int, end: int) -> memoryview:
        """Read bytes of a file into private memory, past the page cache."""


class TierFiles(Protocol):
    """The opened files of a store; ``entries`` are the LMDB environments by file id."""

    @property
    def fs(self) -> FileSystem:
        """The file system."""

    @property
    def store_id(self) -> bytes:
        """The 16 bytes of the store."""

    @property
    def volumes(self) -> TierVolumes:
        """The directories and files."""

    @property
    def entries(self) -> Mapping[int, Environment]:
        """The LMDB environments, by file id."""


@dataclass(frozen=True, slots=True)
class OpenedFiles:
    """``TierFiles`` for callers that have no open store, such as ``verify``."""

    fs: FileSystem
    store_id: bytes
    volumes: TierVolumes
    entries: Mapping[int, Environment]


class ReadStore(TierFiles, Protocol):
    """The parts of a store that reading entries uses."""

    def still_there(self, ledger_id: int, first: int, file_id: int) -> bool:
        """Return whether the index, read anew, still names a record in a file."""


class TierStore(TierFiles, Protocol):
    """The parts of a live store that writing and freeing use."""

    @property
    def config(self) -> StoreConfig:
        """The settings."""

    @property
    def feature_level(self) -> FeatureLevel:
        """The level whose formats the store is written in."""


def checked_record(
    buffer: memoryview, start: int, ledger_id: int, first: int, file_id: int, root: str
) -> tuple[RecordHeader, memoryview]:
    """Return header and stored body of one record, checked for identity and damage.

    Args:
        buffer: Holds the record.
        start: The place where it begins.
        ledger_id: The ledger that it must be of.
        first: The entry that it must begin with.
        file_id: Names the file in errors.
        root: Names the store in errors.

    Raises:
        CorruptError: The record is damaged, or is another one.
    """
    where = f"file {file_id:016x}"
    header = decode_header(buffer, start, where=where)
    if header.kind != RecordKind.ENTRIES or header.ledger_id != ledger_id or header.first_entry_id != first:
        raise CorruptError(
            f"{where}: offset {start} holds ledger {header.ledger_id} from entry {header.first_entry_id}, "
            f"not ledger {ledger_id} from entry {first}; run `pybk store rebuild-index {root}`, with --accept-loss to "
            "continue without the entries that it lists as missing"
        )
    body = buffer[start + RECORD_HEADER_BYTES : start + RECORD_HEADER_BYTES + header.body_bytes]
    check_body(header, body, where=where)
    return header, body


def dumped_record(header: RecordHeader, offset: int, *, sound: bool | None = None) -> DumpRow:
    """Return how ``pybk store dump`` has a record.

    Args:
        header: The record's header.
        offset: The place where it begins in its file.
        sound: Whether the body has its checksum; None if the body was not looked at.
    """
    return {
        "what": "record",
        "offset": offset,
        "kind": RecordKind(header.kind).name.lower() if header.kind in list(RecordKind) else header.kind,
        "ledger": header.ledger_id,
        "first": header.first_entry_id,
        "count": header.entry_count,
        "lsn": header.lsn,
        "codec": header.codec,
        "bytes": header.body_bytes,
        "sound": sound,
    }


class TierWriter(ABC):
    """Writes records of many ledgers to one tier, in order of ledger and entry; then ``finish``, or ``abort``.

    Nothing is durable before ``finish`` returns. Every method raises StorageFullError or OSError if the tier takes no
    more; call ``abort`` then.

    Threads: one.
    """

    @abstractmethod
    def add(self, ledger_id: int, first: int, sizes: list[int], parts: Sequence[bytes | memoryview]) -> Run:
        """Write consecutive encoded entries as one record; return where it lies.

        Args:
            ledger_id: The ledger.
            first: Id of the first entry.
            sizes: Bytes of each entry.
            parts: The entries, in order.
        """

    @abstractmethod
    def add_body(self, ledger_id: int, first: int, count: int, body: bytes) -> Run:
        """Write a record whose plain body exists already and was checked; return where it lies."""

    @abstractmethod
    def finish(self) -> list[FileRow]:
        """Sync everything; return the rows of files made or changed, which the caller puts in the index."""

    @abstractmethod
    def abort(self) -> None:
        """Remove the files that were written; nothing names them."""


class Tier(ABC):
    """One kind of files that hold entries. Instances have no state; each call gets the store as an argument.

    Threads: any, except where a call says otherwise.

    Attributes:
        kind: The ``FileRow.kind`` of its files.
        hints: The storage hints whose moved entries are written here.
        files_are_freed_whole: Whether a file is unlinked once it has no live entries, and packed when it has few;
            otherwise records are freed one by one, by ``free_records``.
        mixes_hints: Whether a file holds entries of ledgers of any hint; packing sends each to its own tier then.
        files_are_merged: Whether small files are packed together once there are many.
        is_written_by_moves: Whether moves make its files; a move that fails removes them then.
        uses_environments: Whether its files are LMDB environments, which are made and opened with the store. Their
            ``FileRow.bytes`` counts transactions; the size of any other file is at least its ``FileRow.bytes``.
    """

    kind: ClassVar[str]
    hints: ClassVar[frozenset[StorageHint]] = frozenset()
    files_are_freed_whole: ClassVar[bool] = True
    mixes_hints: ClassVar[bool] = False
    files_are_merged: ClassVar[bool] = False
    is_written_by_moves: ClassVar[bool] = False
    uses_environments: ClassVar[bool] = False

    # ---- files ---------------------------------------------------------------------------------------------------

    def file_name(self, file_id: int) -> str:
        """Return the name of a file in its directory."""
        return f"{file_id:016x}.{self.kind}"

    def file_ids(self, directory: str, names: Sequence[str]) -> Iterable[int]:
        """Return the ids of the tier's files in a directory of the store, whether the index names them or not.

        Args:
            directory: The path of the directory.
            names: The names in it, listed once for all tiers.
        """
        ids = []
        for name in names:
            stem, _, suffix = name.partition(".")
            if suffix == self.kind and _FILE_ID.fullmatch(stem):
                ids.append(int(stem, 16))
        return ids

    def exists(self, fs: FileSystem, path: str) -> bool:
        """Return whether a file exists."""
        return fs.exists(path)

    def file_bytes(self, fs: FileSystem, path: str) -> int:
        """Return the size of a file; raise FileNotFoundError if it is missing."""
        return fs.file_bytes(path)

    def disk_bytes(self, fs: FileSystem, path: str) -> int:
        """Return the bytes that a file takes on the store's devices; 0 if it is missing."""
        return fs.disk_bytes(path) if fs.exists(path) else 0

    def unlink(self, fs: FileSystem, path: str) -> None:
        """Remove a file; raise FileNotFoundError if it is missing."""
        fs.unlink(path)

    def replace_missing(self, fs: FileSystem, path: str) -> None:
        """Create a durable placeholder for a missing file, so that the store opens.

        Reading the file's entries must raise CorruptError.
        """
        with closing(fs.create(path, BLOCK_BYTES)) as file:
            file.sync()

    def is_placeholder(self, fs: FileSystem, path: str, size: int) -> bool:
        """Return whether a file of ``size`` bytes is one that ``replace_missing`` made: a block of zeros."""
        if size != BLOCK_BYTES:
            return False
        with closing(fs.open(path)) as file:
            return not any(file.read(0, size))

    # ---- reading -------------------------------------------------------------------------------------------------

    @abstractmethod
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
        """Bring the plain bodies of some records of one file into one buffer.

        Args:
            store: The store.
            ledger_id: The ledger they belong to.
            runs: Records, all in one file.
            direct: Read past the page cache, into private memory.
            check: Check headers, identity and body checksums.
            bytes_max: Plain bytes after which no further compressed record is unpacked, because only then their plain
                sizes are known. The result may have fewer records, at least one.

        Raises:
            KeyError, FileNotFoundError: The file is gone, because its entries were moved.
            CorruptError: A record is damaged.
        """

    @abstractmethod
    def plain_record(
        self, store: ReadStore, ledger_id: int, words: LocationWords
    ) -> tuple[memoryview, LocationWords] | None:
        """Return a buffer that holds one uncompressed record, and its words as of that buffer.

        If the buffer is a map of the whole file, the words are the same object. With None the caller uses ``load``,
        because the record was moved, or because this tier has no faster path for single records.
        """

    @abstractmethod
    def stored_record(self, files: TierFiles, ledger_id: int, run: Run) -> tuple[memoryview, int]:
        """Return a buffer with one record in its stored form, and where the record begins; nothing is checked.

        Raises:
            KeyError, FileNotFoundError: The file or the record is not there.
        """

    # ---- repair --------------------------------------------------------------------------------------------------

    @abstractmethod
    def rows(self, files: TierFiles, row: FileRow) -> RunLocations:
        """Return the records of entries in a file, as ``(records,)`` of ``footer_dtype()``, from the file alone.

        Their headers are sound; their bodies need not be checked. Of a damaged file, the records that can be found are
        returned.

        Raises:
            FileNotFoundError: It is not there.
            UnsupportedFormatError: The file has a newer format.
        """

    def check(self, files: TierFiles, row: FileRow) -> Iterator[FileDamage]:
        """Yield the damage of a file; ``verify`` also reads every entry.

        Raises:
            StorageError: The file is damaged as a whole.
            FileNotFoundError: It is not there.
        """
        if self.file_bytes(files.fs, files.volumes.path_of(row)) < row.bytes:
            path = files.volumes.path_of(row)
            yield FileDamage(f"{path} is shorter than the {row.bytes} bytes that the index names", path)

    def dump(self, files: TierFiles, row: FileRow) -> Iterator[DumpRow]:
        """Yield what a file holds, in order, for ``pybk store dump``, which prints a file without checking it.

        Raises:
            PybkError: The rest of the file cannot be read.
            FileNotFoundError: It is not there.
        """
        for ledger_id, *run in self.rows(files, row).tolist():
            buffer, start = self.stored_record(files, ledger_id, tuple(run))
            yield dumped_record(decode_header(buffer, start, where=files.volumes.path_of(row)), start)

    # ---- writing and freeing -------------------------------------------------------------------------------------

    def block_bytes(self, config: StoreConfig) -> int:
        """Return the entry bytes that a record gets, unless one entry alone is longer."""
        return config.cold_block_bytes

    def size_is_known(self, hint: StorageHint, config: StoreConfig) -> bool:
        """Return whether the space that records take is known before they are written."""
        return True

    def writer(
        self, store: TierStore, hint: StorageHint, *, when_full: bool = False, reserved: ReservedFile | None = None
    ) -> TierWriter:
        """Return a writer of entries with a storage hint, one of ``hints``.

        Args:
            store: The store.
            hint: The hint.
            when_full: Use the space that the tier has allocated for entries that cannot stay where they are.
            reserved: Becomes the only file that the writer makes; given only to a tier whose files are freed whole.
        """
        raise UsageError(f"files of kind {self.kind} are not written by moves")

    def free_records(
        self, store: TierStore, file_id: int, records: Collection[tuple[int, int]], mark: CheckpointMark
    ) -> None:
        """Free records that the index names no longer; only called unless ``files_are_freed_whole``.

        Args:
            store: The store.
            file_id: The file that they lie in.
            records: Ledger and first entry id of each.
            mark: The mark of the index that ceased to name them.

        Raises:
            StorageFullError, OSError: They are not freed; the caller retries before it writes to this tier.
        """
        raise UsageError(f"files of kind {self.kind} are freed whole")

    def beyond_end(self, runs: RunLocations, row: FileRow) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which records end beyond the size that the index has for their file, ``(r,)`` bool."""
        beyond: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            runs["offset"].astype(np.int64) + RECORD_HEADER_BYTES + runs["body"] > row.bytes
        )
        return beyond

    def all_record_bytes(self, store: TierStore, row: FileRow) -> int | None:
        """Return the bytes of all records of a file, live or not; None if that is near its size.

        Raises:
            CorruptError: The file is damaged.
        """
        return None
