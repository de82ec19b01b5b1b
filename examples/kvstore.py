"""A small key-value store whose write-ahead log is a ledger.

The data lives in a dict. A write is appended to a ledger of type ``kv.wal`` and shows in the dict when it is durable,
so nobody reads what a crash could take back. A snapshot is a ledger of type ``kv.snapshot`` that names the first log
it does not contain; the logs before that one are deleted. Recovery loads the newest complete snapshot and replays the
logs that it does not contain.

The ledgers are the only files, so there is nothing else that could disagree with them after a crash.

``python kvstore.py STORE put KEY VALUE | get KEY | delete KEY | list | snapshot | load``; ``load`` takes ``KEY=VALUE``
lines from the standard input and answers each with ``ok KEY`` once it is durable.
"""

from __future__ import annotations

import argparse
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Self

from pybk import LedgerManager, LedgerReader, LedgerWriter, PybkError, StorageHint, UsageError
from pybk.credentials import Secret

WAL = "kv.wal"
SNAPSHOT = "kv.snapshot"
SNAPSHOT_BATCH = 1000

_OPERATION = struct.Struct("<BII")
_PUT, _DELETE, _END = 1, 2, 3

Operations = Mapping[bytes, bytes | None]
"""What one write does: new values by key, None to delete; all of it happens or nothing."""


class DamagedStoreError(Exception):
    """The ledgers are sound, but this program did not write their contents."""


def encode(operations: Operations) -> bytes:
    """Return the log entry of one write."""
    parts = []
    for key, value in operations.items():
        parts += [_OPERATION.pack(_DELETE if value is None else _PUT, len(key), len(value or b"")), key, value or b""]
    return b"".join(parts)


def decode(payload: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield what a log entry does."""
    position = 0
    while position < len(payload):
        if position + _OPERATION.size > len(payload):
            raise DamagedStoreError(f"an operation at byte {position} of {len(payload)} is cut off")
        kind, key_bytes, value_bytes = _OPERATION.unpack_from(payload, position)
        middle = position + _OPERATION.size + key_bytes
        end = middle + value_bytes
        if kind not in (_PUT, _DELETE) or end > len(payload):
            raise DamagedStoreError(f"operation {kind} at byte {position} of {len(payload)} is none, or ends at {end}")
        yield payload[middle - key_bytes : middle], payload[middle:end] if kind == _PUT else None
        position = end


class Wal:
    """A log in use: its writer, and how many writes are not in the dict yet."""

    def __init__(self, writer: LedgerWriter, generation: int) -> None:
        self.writer = writer
        self.generation = generation
        self.in_flight = 0


class KeyValueStore:
    """Keys and values are bytes; a write is durable when its call returns.

    Threads: any; writes of different threads share syncs.

    Args:
        path: Directory of the store, made if there is none.
        password: Authenticates every entry; needed again to open the store.
        snapshot_bytes: A snapshot is made when this much log was written since the last.
    """

    def __init__(self, path: str, password: bytes, *, snapshot_bytes: int = 64 << 20) -> None:
        self._password = password
        self._snapshot_bytes = snapshot_bytes
        self._changed = threading.Condition()
        self._snapshotting = threading.Lock()
        # Value and position of each key's last write. Positions order writes whose threads come back in another order;
        # deleted keys stay, with None, until a snapshot, for the same reason.
        self._data: dict[bytes, tuple[tuple[int, int], bytes | None]] = {}
        self._manager = LedgerManager.open(path)
        try:
            self._wal_bytes = self._recover()
            self.wal = Wal(self._create(WAL), 1)
        except BaseException:
            self._manager.close()
            raise

    # ---- reading and writing -------------------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        """Return a key's value, None if it has none."""
        with self._changed:
            found = self._data.get(key)
        return found[1] if found else None

    def items(self) -> list[tuple[bytes, bytes]]:
        """Return all keys with their values, sorted."""
        with self._changed:
            return sorted((key, value) for key, (_, value) in self._data.items() if value is not None)

    def put(self, key: bytes, value: bytes) -> None:
        """Give a key a value."""
        self.write({key: value})

    def delete(self, key: bytes) -> None:
        """Forget a key."""
        self.write({key: None})

    def write(self, operations: Operations) -> None:
        """Put and delete several keys as one: after a crash, all of it is there or nothing.

        Raises:
            PybkError: Nothing changed in memory, and ``outcome_unknown`` says whether it may be there after reopening;
                or the write was done and the snapshot that was due then failed.
        """
        payload = encode(operations)
        with self._changed:
            wal = self.wal
            future = wal.writer.append_async(payload)
            wal.in_flight += 1
        position = None
        try:
            position = (wal.generation, future.result())
        finally:
            with self._changed:
                wal.in_flight -= 1
                if position is not None:
                    self._apply(position, operations)
                self._changed.notify_all()
                self._wal_bytes += len(payload)
                full = self._wal_bytes >= self._snapshot_bytes
        if full:
            self.snapshot(wait=False)

    def _apply(self, position: tuple[int, int], operations: Operations) -> None:
        for key, value in operations.items():
            found = self._data.get(key)
            if found is None or found[0] < position:
                self._data[key] = (position, value)

    # ---- snapshots -----------------------------------------------------------------------------------------------

    def snapshot(self, *, wait: bool = True) -> None:
        """Write all data into a new ledger and delete the logs that it replaces; writes continue meanwhile.

        Args:
            wait: When another thread is making a snapshot: wait and make another, or leave it at that.
        """
        if not self._snapshotting.acquire(blocking=wait):
            return
        try:
            self._snapshot()
        finally:
            self._snapshotting.release()

    def _snapshot(self) -> None:
        writer = self._create(WAL)
        with self._changed:
            old, self.wal = self.wal, Wal(writer, self.wal.generation + 1)
            self._wal_bytes = 0
            # The new log holds what comes from now on; the snapshot must hold all that the old one does.
            while old.in_flight:
                self._changed.wait()
            self._data = {
                key: (position, value)
                for key, (position, value) in self._data.items()
                if value is not None or position[0] > old.generation
            }
            data = [(key, value) for key, (_, value) in self._data.items() if value is not None]
        old.writer.close()
        with self._create(SNAPSHOT, wal=str(writer.ledger_id).encode()) as snapshot:
            for low in range(0, len(data), SNAPSHOT_BATCH):
                snapshot.append_many(encode({key: value}) for key, value in data[low : low + SNAPSHOT_BATCH])
            # A ledger is closed whatever happens; only this entry says that nothing is missing.
            snapshot.append(_OPERATION.pack(_END, len(data), 0))
        self._forget_before(snapshot.ledger_id, writer.ledger_id)

    def _create(self, ledger_type: str, **custom: bytes) -> LedgerWriter:
        hint = StorageHint.HDD if ledger_type == SNAPSHOT else StorageHint.NVME
        return self._manager.create_ledger(
            password=self._password, ledger_type=ledger_type, storage_hints={hint}, custom_metadata=custom
        )

    def _forget_before(self, snapshot_id: int, wal_id: int) -> None:
        """Delete what a complete snapshot replaces."""
        old_snapshots = [number for number in self._manager.list_ledgers(SNAPSHOT) if number < snapshot_id]
        old_logs = [number for number in self._manager.list_ledgers(WAL) if number < wal_id]
        for ledger_id in old_snapshots + old_logs:
            self._manager.delete_ledger(ledger_id)

    # ---- recovery ------------------------------------------------------------------------------------------------

    def _recover(self) -> int:
        """Load the newest complete snapshot and replay the logs after it; return the bytes of these logs."""
        # Ids are given in the order of creation, so the newest ledger has the highest.
        for ledger_id in sorted(self._manager.list_ledgers(SNAPSHOT), reverse=True):
            with self._manager.open_ledger(ledger_id, password=self._password) as reader:
                complete = self._load(reader)
            if complete:
                self._forget_before(ledger_id, int(reader.metadata.custom_metadata["wal"]))
                break
            self._manager.delete_ledger(ledger_id)
        replayed = 0
        for ledger_id in sorted(self._manager.list_ledgers(WAL)):
            # Opening fences a writer that might still exist, recovers the ledger and closes it.
            with self._manager.open_ledger(ledger_id, password=self._password) as reader:
                for entry in reader.read(0, reader.last_add_confirmed):
                    replayed += len(entry.payload)
                    self._replay(decode(entry.payload))
        return replayed

    def _load(self, reader: LedgerReader) -> bool:
        """Load a snapshot; return False, with nothing loaded, if its end is missing."""
        last = reader.last_add_confirmed
        if last < 0:
            return False
        (end,) = reader.read(last, last)
        if len(end.payload) != _OPERATION.size or _OPERATION.unpack(end.payload) != (_END, last, 0):
            return False
        for entry in reader.read(0, last - 1):
            self._replay(decode(entry.payload))
        return True

    def _replay(self, operations: Iterable[tuple[bytes, bytes | None]]) -> None:
        for key, value in operations:
            if value is None:
                self._data.pop(key, None)
            else:
                self._data[key] = ((0, 0), value)

    # ---- closing -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the store; what was written is durable already."""
        with self._snapshotting:
            try:
                self.wal.writer.close()
            finally:
                self._manager.close()

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the store."""
        self.close()


def load(store: KeyValueStore, lines: Iterable[bytes]) -> None:
    """Put ``KEY=VALUE`` lines, and answer each when it is durable."""
    for line in lines:
        key, _, value = line.rstrip(b"\n").partition(b"=")
        store.put(key, value)
        sys.stdout.buffer.write(b"ok " + key + b"\n")
        sys.stdout.buffer.flush()


def run(store: KeyValueStore, command: str, operands: list[bytes]) -> int:
    """Run one command; return the exit code."""
    match command, operands:
        case "put", [key, value]:
            store.put(key, value)
        case "get", [key]:
            found = store.get(key)
            if found is None:
                return 1
            sys.stdout.buffer.write(found + b"\n")
        case "delete", [key]:
            store.delete(key)
        case "list", []:
            for key, value in store.items():
                sys.stdout.buffer.write(key + b"=" + value + b"\n")
        case "snapshot", []:
            store.snapshot()
        case "load", []:
            load(store, sys.stdin.buffer)
        case _:
            print(f"kvstore: {command} does not take {len(operands)} operands", file=sys.stderr)
            return 2
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="A key-value store with a ledger as its write-ahead log.")
    parser.add_argument("store", help="directory of the store")
    parser.add_argument("command", choices=["put", "get", "delete", "list", "snapshot", "load"])
    parser.add_argument("operand", nargs="*")
    parser.add_argument("--snapshot-bytes", type=int, default=64 << 20, help="log bytes after which a snapshot is made")
    arguments = parser.parse_args()
    try:
        password = Secret(variable="KVSTORE_PASSWORD").read()
        if not password:
            raise UsageError(
                "put the password into KVSTORE_PASSWORD, or the name of its file into KVSTORE_PASSWORD_FILE"
            )
        with KeyValueStore(arguments.store, password, snapshot_bytes=arguments.snapshot_bytes) as store:
            return run(store, arguments.command, [operand.encode() for operand in arguments.operand])
    except PybkError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
