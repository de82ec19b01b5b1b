"""The peers: other ways to make bytes durable on the same disk, each synced at every write."""

from __future__ import annotations

import os
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import lmdb
from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from bench.payloads import ENTRY_BYTES

RAW_BYTES: Final = 64 << 20
LMDB_MAP_BYTES: Final = 64 << 30


class Peer(ABC):
    """Something that keeps entries, numbered from 0.

    Threads: any may append; each must use its own reader.
    """

    name: str

    @abstractmethod
    def append(self, payloads: Sequence[bytes]) -> None:
        """Append; durable on return."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Self:
        """Return the peer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


class ReadablePeer(Peer):
    """A peer that finds entries again."""

    @abstractmethod
    def scan(self) -> int:
        """Read all entries in order; return how many there are."""

    @abstractmethod
    def getter(self) -> Callable[[int], bytes]:
        """Return what reads one entry by its number; for the calling thread."""


class Raw(Peer):
    """``pwrite`` and ``fdatasync`` into a zero-filled file, over and over; one file for each thread."""

    name = "raw"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._local = threading.local()
        self._lock = threading.Lock()
        self._files: list[int] = []

    def _open(self) -> int:
        with self._lock:
            number = len(self._files)
            file = os.open(self._directory / f"raw-{number}", os.O_RDWR | os.O_CREAT, 0o600)
            self._files.append(file)
        zeros = bytes(1 << 20)
        for offset in range(0, RAW_BYTES, len(zeros)):
            os.pwrite(file, zeros, offset)
        os.fsync(file)
        self._local.offset = 0
        self._local.file = file
        return file

    def append(self, payloads: Sequence[bytes]) -> None:
        """Write at the end, which comes back to the beginning when the file is full."""
        local = self._local
        file = getattr(local, "file", None)
        if file is None:
            file = self._open()
        size = len(payloads) * ENTRY_BYTES
        offset = local.offset
        if offset + size > RAW_BYTES:
            offset = 0
        if len(payloads) == 1:
            os.pwrite(file, payloads[0], offset)
        else:
            os.pwritev(file, payloads, offset)
        os.fdatasync(file)
        local.offset = offset + size

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)


class Sqlite(ReadablePeer):
    """``sqlite3`` with a write-ahead log and ``synchronous=FULL``; a connection for each thread."""

    name = "sqlite3"

    def __init__(self, directory: Path) -> None:
        self._path = directory / "sqlite3"
        self._local = threading.local()
        self._lock = threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        self._connection().execute("create table entries (id integer primary key, payload blob)")

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self._path, isolation_level=None, timeout=60, check_same_thread=False)
            connection.execute("pragma journal_mode=wal")
            connection.execute("pragma synchronous=full")
            self._local.connection = connection
            with self._lock:
                self._connections.append(connection)
        return connection

    def append(self, payloads: Sequence[bytes]) -> None:
        """Insert, in one transaction."""
        connection = self._connection()
        if len(payloads) == 1:
            connection.execute("insert into entries (payload) values (?)", payloads)
            return
        connection.execute("begin immediate")
        connection.executemany("insert into entries (payload) values (?)", ((payload,) for payload in payloads))
        connection.execute("commit")

    def scan(self) -> int:
        """Select all."""
        return sum(1 for _ in self._connection().execute("select id, payload from entries order by id"))

    def getter(self) -> Callable[[int], bytes]:
        """Return a select by primary key."""
        connection = self._connection()

        def get(number: int) -> bytes:
            payload: bytes = connection.execute("select payload from entries where id = ?", (number + 1,)).fetchone()[0]
            return payload

        return get

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()


class Lmdb(ReadablePeer):
    """``lmdb``, a synced transaction for each append."""

    name = "lmdb"

    def __init__(self, directory: Path) -> None:
        self._environment = lmdb.open(str(directory / "lmdb"), map_size=LMDB_MAP_BYTES)
        self._next = 0

    def append(self, payloads: Sequence[bytes]) -> None:
        """Put, in one transaction; only one runs at a time."""
        with self._environment.begin(write=True) as transaction:
            first = self._next
            if len(payloads) == 1:
                transaction.put(first.to_bytes(8, "big"), payloads[0], append=True)
            else:
                items = [((first + i).to_bytes(8, "big"), payload) for i, payload in enumerate(payloads)]
                transaction.cursor().putmulti(items, append=True)
            self._next = first + len(payloads)

    def scan(self) -> int:
        """Go over all with a cursor."""
        with self._environment.begin() as transaction:
            return sum(1 for _ in transaction.cursor())

    def getter(self) -> Callable[[int], bytes]:
        """Return a get, in one read transaction for all."""
        get = self._environment.begin().get

        def get_one(number: int) -> bytes:
            payload = get(number.to_bytes(8, "big"))
            assert payload is not None
            return payload

        return get_one

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()


class Rocks(ReadablePeer):
    """RocksDB by ``rocksdict``, every write synced; threads share syncs."""

    name = "rocksdict"

    def __init__(self, directory: Path) -> None:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        self._database = Rdict(str(directory / "rocksdict"), options)
        self._write_options = WriteOptions()
        self._write_options.sync = True
        self._database.set_write_options(self._write_options)
        self._lock = threading.Lock()
        self._next = 0

    def append(self, payloads: Sequence[bytes]) -> None:
        """Put, in one batch."""
        with self._lock:
            first = self._next
            self._next += len(payloads)
        if len(payloads) == 1:
            self._database.put(first.to_bytes(8, "big"), payloads[0])
            return
        batch = WriteBatch(raw_mode=True)
        for number, payload in enumerate(payloads, first):
            batch.put(number.to_bytes(8, "big"), payload)
        self._database.write(batch, self._write_options)

    def scan(self) -> int:
        """Iterate over all."""
        return sum(1 for _ in self._database.items())

    def getter(self) -> Callable[[int], bytes]:
        """Return a get."""
        get = self._database.get

        def get_one(number: int) -> bytes:
            payload = get(number.to_bytes(8, "big"))
            assert isinstance(payload, bytes)
            return payload

        return get_one

    def close(self) -> None:
        """Close the database."""
        self._database.close()


PEERS: Final[tuple[type[Raw | Sqlite | Lmdb | Rocks], ...]] = (Raw, Sqlite, Lmdb, Rocks)
READABLE_PEERS: Final[tuple[type[Sqlite | Lmdb | Rocks], ...]] = (Sqlite, Lmdb, Rocks)
