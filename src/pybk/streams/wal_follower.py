"""``WalFollower``: the records of a write-ahead log as they become durable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Self

from pybk.manager.handle import Handle, fork_error
from pybk.streams.format import Records
from pybk.streams.log_record import WalRecord, wal_records
from pybk.streams.record_reader import RecordReader
from pybk.threads import in_children
from pybk.threads.call_threads import in_thread


class WalFollower(Handle):
    """Yields records as they become durable, here or in another process; made by ``WriteAheadLog.follow``.

    Use it with ``for``, or in an event loop with ``async for``, which reads in threads, but holds no thread while it
    waits. It ends when the log is sealed, after its timeout, or when ``close`` is called.

    Threads: one at a time; ``close`` and ``applied`` from any.

    Attributes:
        applied: Generation and LSN of the last record that was yielded, as ``promote`` takes them; None before the
            first.
    """

    def __init__(self, name: str, begin: Callable[[], RecordReader], timeout: float | None) -> None:
        """Use ``WriteAheadLog.follow`` instead."""
        self._name = name
        self._begin = begin
        self._timeout = timeout
        self._reader: RecordReader | None = None
        self._ready: Iterator[WalRecord] = iter(())
        self._ready_generation = 0
        self.applied: tuple[int, int] | None = None
        self._closed = False
        in_children(self, WalFollower._disable)

    def _disable(self) -> None:
        """Refuse calls in a forked child."""

        def refuse() -> RecordReader:
            raise fork_error(f"the log {self._name!r}")

        self._ready, self._reader, self._begin = iter(()), None, refuse

    def __repr__(self) -> str:
        """Name the log and the last record that was yielded."""
        return f"<WalFollower of {self._name!r} after {self.applied}{', closed' if self._closed else ''}>"

    def close(self) -> None:
        """End it: a call that waits for a record ends the iteration."""
        self._closed = True
        if self._reader is not None:
            self._reader.close()

    # ---- iterating -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        """Return the follower itself."""
        return self

    def __next__(self) -> WalRecord:
        """Return the next record; errors as for ``WriteAheadLog.follow``."""
        while (record := self._taken()) is None:
            reader = self._begun()
            try:
                found = reader.read(timeout=self._timeout)
            except BaseException:
                reader.close()
                raise
            if not self._has_more(reader, found):
                raise StopIteration
        return record

    def __aiter__(self) -> Self:
        """Return the follower itself."""
        return self

    async def __anext__(self) -> WalRecord:
        """Return the next record as ``__next__`` does, without blocking the event loop."""
        while (record := self._taken()) is None:
            reader = await in_thread(self._begun)
            try:
                found = await reader.read_async(timeout=self._timeout)
            except BaseException:
                reader.close()
                raise
            if not self._has_more(reader, found):
                raise StopAsyncIteration
        return record

    def _taken(self) -> WalRecord | None:
        """Return a record that was read already."""
        for record in self._ready:
            self.applied = self._ready_generation, record.lsn
            return record
        return None

    def _begun(self) -> RecordReader:
        if self._reader is None:
            self._reader = self._begin()
            if self._closed:
                self._reader.close()
        return self._reader

    def _has_more(self, reader: RecordReader, found: Records | None) -> bool:
        """Keep records that were read, to be taken; if there are none, let go of the log, and return False.

        Raises:
            ClosedError: There are none because the log was closed or promoted here.
        """
        if found is not None:
            self._ready, self._ready_generation = reader.kept(wal_records(found)), reader.generation
            return True
        try:
            if not self._closed:
                reader.check_over()
        finally:
            self.close()
        return False
