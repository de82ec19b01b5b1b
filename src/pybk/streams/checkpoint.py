"""Checkpoints of a write-ahead log: written like a file, listed by one compare-and-set, read after a restart.

A checkpoint is a blob and its entry in the log's record. Its commit also moves the truncation point to the oldest
checkpoint that is kept, so that the log never lacks a record that a restart from a checkpoint has to replay (rule T8).
"""

from __future__ import annotations

import io
import time
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from pybk.errors import ClosedError, CorruptError, DigestMismatchError, LogFencedError, PybkError
from pybk.streams import ledger_list
from pybk.streams.blob import BlobReader, BlobWriter, usual_chunk_bytes
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import Checkpoint
from pybk.streams.list_writer import ListWriter
from pybk.threads.call_threads import asyncio_form, in_own_thread


class CheckpointWriter(io.BufferedIOBase):
    """Writes a checkpoint; made by ``WriteAheadLog.checkpoint``.

    Leaving its ``with`` commits it, or ``commit`` does. If an exception leaves the ``with``, if ``abort`` is called, or
    if the file is dropped or only closed, nothing changes; leaving the ``with`` after ``abort`` does nothing. What a
    dropped file wrote is deleted by the next call that changes the log, such as a checkpoint or a roll.

    Threads: one.

    Attributes:
        lsn: The last record that the checkpoint covers; a restart replays from the next one.
    """

    def __init__(
        self,
        steps: LedgerSteps,
        owner: tuple[int, int],
        lsn: int,
        meta: str,
        keep: int,
        writer: ListWriter,
        *,
        truncate: bool,
    ) -> None:
        super().__init__()
        self.lsn: Final = lsn
        self._steps = steps
        self._epoch, self._generation = owner
        self._meta = meta
        self._keep = keep
        self._truncate = truncate
        self._writer = writer
        self._ended = True
        ledger = steps.create_blob(self._epoch, lsn, self._generation)
        try:
            self._blob = BlobWriter(ledger, usual_chunk_bytes(steps.manager))
            begun = ledger_list.begin_upload(steps.name, self._epoch, ledger.ledger_id)
            writer.operate(lambda: steps.perform(begun))
            self._ended = False
        except BaseException as error:
            if isinstance(error, LogFencedError) or (isinstance(error, PybkError) and not error.outcome_unknown):
                steps.delete(ledger.ledger_id)
            else:
                writer.abandon_blob(ledger.ledger_id)
            raise

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._blob.tell()

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Append bytes to the checkpoint; returns how many, which is all.

        Raises:
            ClosedError: The file is closed, or the checkpoint was committed or given up.
            UsageError: The data is not bytes; nothing was written.
            PybkError: As ``LedgerWriter.append``.
        """
        self._check_open()
        return self._blob.write(data)

    write_async = asyncio_form(write, own_thread=True)

    def commit(self) -> None:
        """Commit the checkpoint: its blob is sealed, then one compare-and-set lists it and truncates the log.

        Leaving the ``with`` does it. Closing the file does not commit: a file is also closed when it is dropped, and by
        what wraps it, such as ``io.TextIOWrapper``. A file that is closed cannot be committed, except by leaving its
        ``with``.

        Raises:
            ClosedError: The file is closed, or the checkpoint was committed or given up.
            LogFencedError: Another writer has the log.
            RewoundError: ``truncate_after`` dropped records that the checkpoint covers; nothing was listed.
            PybkError: The checkpoint may be listed or not if ``outcome_unknown`` is set, else it is not.
        """
        self._check_open()
        self._commit()

    commit_async = asyncio_form(commit, own_thread=True)

    def _check_open(self) -> None:
        if self._ended:
            raise ClosedError(f"the checkpoint of record {self.lsn} was committed or given up; make another")
        if self.closed:
            raise ClosedError(
                f"the file of the checkpoint of record {self.lsn} is closed, which commits nothing; make another, and "
                "end it by commit() or by leaving its with"
            )

    def _commit(self) -> None:
        """Commit the checkpoint, also if what wraps the file has closed it."""
        if self._ended:
            raise ClosedError(f"the checkpoint of record {self.lsn} was committed or given up; make another")
        steps = self._steps
        try:
            self._ended = True
            self.close()
            self._blob.finish()
            made = Checkpoint(self.lsn, self._generation, self._blob.ledger_id, self._meta, time.time_ns())
            listed = ledger_list.checkpoint(steps.name, self._epoch, made, self._keep, truncate=self._truncate)
            self._writer.operate(lambda: steps.perform(listed))
        except BaseException as error:
            self._writer.abandon_blob(self._blob.ledger_id)  # keeps it if it is listed all the same
            if isinstance(error, PybkError) and not error.outcome_unknown:
                with suppress(PybkError):  # the next owner of the log deletes the blob
                    self._writer.operate(_nothing)
            raise

    def abort(self) -> None:
        """Give the checkpoint up, and delete what was written; nothing else changes.

        Raises:
            LogFencedError, ClosedError: Another writer has the log, or it was closed here; the next owner of the log
                deletes what was written.
        """
        if not self._ended:
            self._writer.abandon_blob(self._blob.ledger_id)
            self._ended = True
            self.close()
            self._writer.operate(_nothing)

    def __del__(self) -> None:
        """Leave a checkpoint that was dropped to be given up later."""
        if not getattr(self, "_ended", True):
            self._ended = True
            self._writer.abandon_blob(self._blob.ledger_id)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Commit the checkpoint, or give it up if an exception is on its way, which is not replaced.

        A checkpoint that was committed or given up in the ``with`` is left as it is.
        """
        if kind is not None:
            with suppress(PybkError):  # the next owner of the log deletes the blob
                self.abort()
        elif not self._ended:
            self._commit()

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    async def __aenter__(self) -> Self:
        """Return the writer itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Commit the checkpoint or give it up as ``__exit__`` does, in a thread."""
        await in_own_thread(self.__exit__, kind, error, traceback)


class WalCheckpoint:
    """A checkpoint that was committed; made by ``WriteAheadLog.checkpoints``.

    Attributes:
        lsn: The last record that it covers.
        generation: The generation of the log when it was made.
        meta: The application's text.
        time_ns: When it was committed, nanoseconds since 1970.
    """

    def __init__(self, steps: LedgerSteps, found: Checkpoint) -> None:
        self._steps = steps
        self._ledger_id = found.ledger_id
        self.lsn: Final = found.seq
        self.generation: Final = found.generation
        self.meta: Final = found.meta
        self.time_ns: Final = found.created_ns

    def __repr__(self) -> str:
        """Return the class, the log and the last record that it covers."""
        return f"<WalCheckpoint of {self._steps.name!r} up to record {self.lsn}>"

    def open(self) -> io.BufferedReader:
        """Return a file to read it from, at any position; each chunk is verified when it is read.

        Raises:
            CorruptError, DigestMismatchError: It is damaged.
            NoSuchLedgerError: It was dropped, because newer ones were made.
        """
        return io.BufferedReader(self._blob(), 1 << 20)

    def _blob(self) -> BlobReader:
        return BlobReader(self._steps.open_blob(self._ledger_id))

    def problem(self) -> PybkError | None:
        """Read it whole; returns what is damaged, None if nothing is.

        Raises:
            NoSuchLedgerError: It was dropped, because newer ones were made.
            PybkError: It could not be read, which says nothing about damage.
        """
        try:
            with self._blob() as blob:
                return blob.problem()
        except (CorruptError, DigestMismatchError) as error:
            return error


def _nothing() -> None:
    """Change nothing: the operation for what every operation does first."""
