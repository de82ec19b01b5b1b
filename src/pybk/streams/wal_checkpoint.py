"""Checkpoints of a write-ahead log: written like a file, listed by one compare-and-set, read after a restart.

A checkpoint is a blob and its entry in the log's record. Its commit also moves the truncation point to the oldest
checkpoint that is kept; so the log never lacks a record that a restart from a checkpoint has to replay (rule T8).
"""

from __future__ import annotations

import io
import time
from typing import Final

from pybk.errors import CorruptError, DigestMismatchError, LogFencedError, PybkError
from pybk.streams import ledger_list
from pybk.streams.blob import BlobReader, BlobWriter, usual_chunk_bytes
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import Checkpoint
from pybk.streams.list_writer import ListWriter


class CheckpointWriter(BlobWriter[None]):
    """Writes a checkpoint; made by ``WriteAheadLog.checkpoint``.

    Leaving its ``with`` commits it, or ``commit`` does. If an exception leaves the ``with``, if ``abort`` is called, or
    if the file is dropped or only closed, nothing changes; leaving the ``with`` after ``abort`` does nothing. The bytes
    that a dropped file wrote are deleted by the next call that changes the log, such as a checkpoint or a roll.

    Its commit lists the checkpoint and truncates the log. It raises RewoundError if ``truncate_after`` dropped records
    that the checkpoint covers; it and ``abort`` raise LogFencedError if another writer has the log; the log's next
    owner then deletes the bytes that were written.

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
        """Use ``WriteAheadLog.checkpoint`` instead."""
        self.lsn: Final = lsn
        self._steps = steps
        self._epoch, self._generation = owner
        self._meta = meta
        self._keep = keep
        self._truncate = truncate
        self._owner = writer
        ledger = steps.create_blob(self._epoch, lsn, self._generation)
        self._ledger_id = ledger.ledger_id
        try:
            super().__init__(f"the checkpoint of record {lsn}", ledger, usual_chunk_bytes(steps.manager))
            begun = ledger_list.begin_upload(steps.name, self._epoch, ledger.ledger_id)
            writer.operate(lambda: steps.perform(begun))
            self._ended = False
        except BaseException as error:
            if isinstance(error, LogFencedError) or (isinstance(error, PybkError) and not error.outcome_unknown):
                steps.delete(ledger.ledger_id)
            else:
                self._abandon()
            raise

    def _publish(self) -> None:
        made = Checkpoint(self.lsn, self._generation, self._ledger_id, self._meta, time.time_ns())
        listed = ledger_list.checkpoint(self._steps.name, self._epoch, made, self._keep, truncate=self._truncate)
        self._owner.operate(lambda: self._steps.perform(listed))

    def _abandon(self) -> None:
        self._owner.abandon_blob(self._ledger_id)  # keeps it if it is listed all the same

    def _give_up(self) -> None:
        self._owner.operate(lambda: None)  # every operation gives up the abandoned blobs first


class WalCheckpoint:
    """A checkpoint that was committed; made by ``WriteAheadLog.checkpoints``.

    Attributes:
        lsn: The last record that it covers.
        generation: The generation of the log when it was made.
        meta: The application's text.
        time_ns: The time when it was committed, nanoseconds since 1970.
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
        return io.BufferedReader(BlobReader(self._steps.open_blob(self._ledger_id)), 1 << 20)

    def problem(self) -> PybkError | None:
        """Read it whole; return a description of the damage, None if it is sound.

        Raises:
            NoSuchLedgerError: It was dropped, because newer ones were made.
            PybkError: It could not be read; this does not mean that it is damaged.
        """
        buffer = bytearray(8 << 20)
        try:
            with BlobReader(self._steps.open_blob(self._ledger_id)) as blob:
                while blob.readinto(buffer):
                    pass
        except (CorruptError, DigestMismatchError) as error:
            return error
        return None
