"""A database on a write-ahead log, to copy and change: transactions, snapshots, crash recovery, and a hot standby.

1. **The log is the database.** A commit is one record, in JSON: what it writes, which versions it read, and the number
   that its client gave it. The tables in memory are what the records so far amount to; nothing else is on disk.
2. **Apply is deterministic.** ``Tables.apply`` looks at the record and the tables alone. It decides whether the
   versions that a transaction read are still current, so the primary, a restart and a standby all decide alike.
3. **Nothing shows before it is durable.** Threads append without waiting for each other, so their commits share syncs;
   once the log has them on disk, they are applied in its order.
4. **A snapshot is a checkpoint of the log**: a copy of the tables as of one record, written while commits continue. A
   restart reads the newest one and replays the records after it.
5. **A standby applies what it follows**, serves reads that may be stale, and with ``promote`` fences the primary,
   applies what is left, and takes commits.
6. **A commit whose outcome is unknown is sent again with its number**, to the new primary if need be: a connection was
   lost, or an error had ``outcome_unknown``. A number takes effect once, because ``apply`` remembers it.

``server.py`` serves it to clients; ``failover.py`` kills a primary under load, and checks what is left.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from tables import ABSENT, FORMAT, Row, Tables, Writes

from pybk import (
    AppendFuture,
    IllegalOperationError,
    LedgerManager,
    NoSuchLedgerError,
    PybkError,
    Secret,
    TruncatedError,
    WalFollower,
    WalRecord,
    WriteAheadLog,
)

logger = logging.getLogger("database")

LOOK_S = 0.1  # after how long a standby reads again what it could not read
PROMOTE_S = 30.0  # how long a promotion waits for the primary to end


class ConflictError(Exception):
    """Another commit changed what this transaction had read, so nothing was written; read again and repeat it."""


@dataclass(eq=False)
class Staged:
    """A commit that is on its way to the disk."""

    future: AppendFuture[int]
    data: bytes
    outcome: int | None = None


class Database:
    """Keys and values are text. Threads: any; commits of all threads share syncs.

    A primary from which the log was taken serves reads that may be stale, until its next commit fails.

    Args:
        where: A directory, or the manager of a store or a cluster.
        password: The log's.
        standby: Follow the primary, which has the log, until ``promote``.
        checkpoint_records: Commits after which a snapshot is made in the background.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | LedgerManager,
        password: bytes | Secret | None = None,
        *,
        standby: bool = False,
        checkpoint_records: int = 100_000,
    ) -> None:
        self.standby = standby
        self._checkpoint_records = checkpoint_records
        self._tables, self._generation, self._checkpointed = Tables(), 0, 0
        self._failed: PybkError | None = None
        self._staging = threading.Lock()  # taken before _changed
        self._staged: deque[Staged] = deque()
        self._changed = threading.Condition()  # guards the tables
        self._operation = threading.Lock()  # one checkpoint or promotion at a time
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._stop = threading.Event()
        self._following: threading.Thread | None = None
        self._follower: WalFollower | None = None
        with ExitStack() as undo:
            self.wal = WriteAheadLog.open(where, "database", mode="r" if standby else "w", password=password)
            undo.callback(self.wal.close)
            self._load_checkpoint()
            if standby:
                self._start_following()
            else:
                for record in self.wal.replay(self._tables.applied + 1):
                    self._apply(record)
            undo.pop_all()

    def read(self, *keys: str, after: int = 0, timeout: float = 30.0) -> dict[str, Row]:
        """Return the rows of keys, all as of one moment; waits, in seconds, until a record ``after`` is applied."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._failed or self._tables.applied >= after, timeout)
            self._check()
            if not done:
                raise TimeoutError(f"record {after} did not come in {timeout} s; there are {self._tables.applied}")
            return {key: self._tables.rows.get(key, ABSENT) for key in keys}

    @property
    def applied(self) -> int:
        """The last record that reads show."""
        return self._tables.applied

    def commit(self, writes: Writes, expect: Mapping[str, int] | None = None, token: tuple[str, int] = ("", 0)) -> int:
        """Write several keys, all or none; durable, and seen by every read, when it returns.

        Args:
            writes: What to write.
            expect: Versions of rows as ``read`` returned them, which must not have changed since.
            token: A client's name and its number for this commit, which ascend; not needed if it is never sent again.

        Returns:
            The record that made the commit.

        Raises:
            ConflictError: A row has another version; nothing was written.
            PybkError: With ``outcome_unknown``, it may have been written: this database takes no more; open it again,
                or promote the standby, and commit with the same token. Else nothing was written.
        """
        if {*map(type, writes)} - {str} or {*map(type, writes.values())} - {str, type(None)}:
            raise TypeError("keys are text, and so are values, or None to delete; encode others, for example as JSON")
        record = {"format": FORMAT, "token": token, "expect": expect or {}, "writes": writes}
        try:
            outcome = self._commit(json.dumps(record).encode())
        except PybkError as error:
            if error.outcome_unknown:
                self._fail(error)
            raise
        if not outcome:
            raise ConflictError(f"one of {', '.join(expect or ())} was changed meanwhile")
        return outcome

    def _commit(self, data: bytes) -> int:
        """Append a record, wait until it is durable, and apply all records up to it; returns the outcome."""
        with self._staging:  # so that the queue has the order of the log
            self._check()
            if self.standby:
                raise IllegalOperationError("this is a standby, which takes no commits; send them to the primary")
            staged = Staged(self.wal.append_async(data), data)
            self._staged.append(staged)
        error = staged.future.exception()
        with self._changed:
            while staged.outcome is None:  # futures end in the order of the log, so all before this one are done
                first = self._staged.popleft()
                failed = first.future.exception() is not None
                first.outcome = 0 if failed else self._tables.apply(first.future.result(), first.data)
            self._changed.notify_all()
            if self._tables.applied - self._checkpointed >= self._checkpoint_records:
                self._checkpointed = self._tables.applied
                self._background.submit(self._checkpoint_in_background)
        if error is not None:
            raise error
        return staged.outcome

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed.with_traceback(None)

    def _fail(self, error: PybkError) -> None:
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def _apply(self, record: WalRecord) -> None:
        with self._changed:
            self._tables.apply(record.lsn, record.data)
            self._changed.notify_all()

    # ---- snapshots -----------------------------------------------------------------------------------------------

    def checkpoint(self) -> int:
        """Write a snapshot, and drop the records that restarts do not need any more; returns its last record."""
        with self._operation:
            with self._changed:
                tables = self._tables.copy()
            with self.wal.checkpoint(tables.applied) as file:
                tables.dump(file)
            return tables.applied

    def _checkpoint_in_background(self) -> None:
        try:
            self.checkpoint()
        except PybkError as error:  # the log has everything; the next snapshot comes after as many commits
            logger.warning("no snapshot was made: %s", error)

    def _load_checkpoint(self) -> None:
        """Replace the tables by those of the newest checkpoint."""
        while True:
            generation, found, tables = self.wal.generation(), self.wal.latest_checkpoint(), Tables()
            try:
                if found is not None:
                    with found.open() as file:
                        tables = Tables.load(file)
            except NoSuchLedgerError:  # the primary made newer ones meanwhile
                continue
            with self._changed:
                self._tables, self._generation, self._checkpointed = tables, generation, tables.applied
                self._changed.notify_all()
            return

    # ---- the standby ---------------------------------------------------------------------------------------------

    def _start_following(self) -> None:
        self._stop.clear()
        self._following = threading.Thread(target=self._follow, name="follow", daemon=True)
        self._following.start()

    def _stop_following(self) -> None:
        self._stop.set()
        if self._follower is not None:
            self._follower.close()
        if self._following is not None:
            self._following.join()

    def _follow(self) -> None:
        behind = False
        while not self._stop.is_set():
            try:
                if behind:
                    self._load_checkpoint()
                    behind = False
                self._follower = self.wal.follow(self.applied + 1, generation=self._generation)
                if self._stop.is_set():
                    break  # what was to be closed was the one before
                for record in self._follower:
                    self._apply(record)
            except TruncatedError:  # the primary dropped what this standby had not read yet
                behind = True
                self._stop.wait(LOOK_S)
            except PybkError as error:
                if not error.retryable:
                    self._fail(error)
                    break
                self._stop.wait(LOOK_S)

    def promote(self, *, wait: float = PROMOTE_S, steal: bool = False) -> int:
        """Become the primary; returns the last record of the one before. If it raises, this one keeps following.

        Args:
            wait: Seconds to wait for the primary to end, or to be found dead.
            steal: In a cluster, take the log from a primary that is alive; it can acknowledge nothing more.

        Raises:
            LogLockedError, StoreLockedError: The primary is alive.
            IllegalOperationError: This is the primary, or uses a manager that only reads.
        """
        with self._operation:
            if not self.standby:
                raise IllegalOperationError("this is the primary, so it is open for writing already")
            self._check()
            self._stop_following()
            try:
                self.wal.promote(self._apply, applied=(self._generation, self.applied), wait=wait, steal=steal)
            except BaseException:
                self._start_following()  # also if the one before is fenced: another promotion applies what is left
                raise
            self.standby = False  # last: commits come after everything that was applied
            return self.applied

    def close(self) -> None:
        """Close the database; what was committed is durable already."""
        self._stop_following()
        self._background.shutdown()
        self.wal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
