"""Bytes of any length in one ledger: written like a file, sealed when it is closed, read like a file at any position.

A blob is a closed ledger. Its first entry is a header; each further entry is a chunk of the same size, except the last,
so position ``p`` lies in entry ``1 + p // chunk``. The length follows from the ledger's metadata, which the close seals
under the ledger's password: a blob that is not closed, or that was cut short, is not taken for a whole one.
"""

from __future__ import annotations

import io
import struct
from collections import deque
from typing import Final

from pybk.errors import ClosedError, CorruptError, DigestMismatchError, PybkError, UnsupportedFormatError
from pybk.futures import AppendFuture
from pybk.reader import LedgerReader
from pybk.writer import LedgerWriter

BLOB_FORMAT: Final = 1
CHUNK_BYTES: Final = 1 << 20
_MAGIC: Final = b"pybkblob"
_HEADER: Final = struct.Struct("<8sBxxxI")
_AHEAD: Final = 16
"""Chunks that are appended and not awaited."""


class BlobWriter(io.RawIOBase):
    """Writes a blob; nothing of it counts before ``finish`` returns.

    Threads: one.

    Args:
        writer: The writer of a new ledger.
        chunk_bytes: Bytes of a chunk.

    Attributes:
        ledger_id: The blob's ledger.
    """

    def __init__(self, writer: LedgerWriter, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__()
        self.ledger_id = writer.ledger_id
        self._writer = writer
        self._chunk_bytes = chunk_bytes
        self._buffer = bytearray()
        self._written = 0
        self._outstanding: deque[AppendFuture[int]] = deque()
        self._outstanding.append(writer.append_async(_HEADER.pack(_MAGIC, BLOB_FORMAT, chunk_bytes)))

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._written

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Append bytes to the blob; returns how many, which is all.

        Raises:
            PybkError: As ``LedgerWriter.append``.
        """
        if self.closed:
            raise ClosedError("the blob is closed; write another")
        view = memoryview(data).cast("B")
        at = 0
        if self._buffer:
            at = self._chunk_bytes - len(self._buffer)
            self._buffer += view[:at]
            if len(self._buffer) == self._chunk_bytes:
                self._append(bytes(self._buffer))
                self._buffer.clear()
        while len(view) - at >= self._chunk_bytes:
            self._append(bytes(view[at : at + self._chunk_bytes]))
            at += self._chunk_bytes
        self._buffer += view[at:]
        self._written += len(view)
        return len(view)

    def _append(self, chunk: bytes) -> None:
        while len(self._outstanding) >= _AHEAD:
            self._outstanding.popleft().result()
        self._outstanding.append(self._writer.append_async(chunk))

    def finish(self) -> None:
        """Write what is left, close the ledger, and seal it: the blob is complete when this returns.

        Closing the file alone does not complete the blob, because files are also closed when they are dropped.

        Raises:
            PybkError: The blob is not complete, and does not count.
        """
        super().close()
        if self._buffer:
            self._append(bytes(self._buffer))
        while self._outstanding:
            self._outstanding.popleft().result()
        self._writer.close()


class BlobReader(io.RawIOBase):
    """Reads a blob at any position, each chunk verified.

    Threads: one.

    Args:
        reader: A reader of the blob's ledger, which this closes.

    Raises:
        CorruptError: The ledger is not a whole blob.
        UnsupportedFormatError: A newer pybk wrote it.
    """

    def __init__(self, reader: LedgerReader) -> None:
        super().__init__()
        self._reader = reader
        where = f"ledger {reader.ledger_id}"
        if not reader.is_closed or reader.last_add_confirmed < 0:
            raise CorruptError(f"{where} is not a blob that was written to its end; write it again")
        header = next(reader.read(0, 0)).payload
        if len(header) != _HEADER.size or header[: len(_MAGIC)] != _MAGIC:
            raise CorruptError(f"{where} is not a blob: its first entry is not a blob's header")
        _, number, self._chunk_bytes = _HEADER.unpack(header)
        if number != BLOB_FORMAT:
            raise UnsupportedFormatError(
                f"{where} has blob format {number}; this pybk reads format {BLOB_FORMAT}: install a newer pybk"
            )
        self.size: Final = reader.length - len(header)
        """Bytes of the blob."""
        self._position = 0
        if -(-self.size // self._chunk_bytes) != reader.last_add_confirmed:
            raise CorruptError(f"{where}: {self.size} bytes do not fill {reader.last_add_confirmed} chunks")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, which may lie beyond the end; returns it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} is before the beginning of the blob")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview | bytearray) -> int:  # type: ignore[override]
        """Read bytes into a buffer; returns how many, 0 at the end.

        Raises:
            CorruptError: A chunk is damaged or missing.
            DigestMismatchError: A chunk was changed.

        Cost: Reads whole chunks, all that are wanted in one batch.
        """
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self.size - self._position)
        if wanted <= 0:
            return 0
        first, last = self._position // self._chunk_bytes, (self._position + wanted - 1) // self._chunk_bytes
        batch = self._reader.read_batch(1 + first, last=1 + last, max_bytes=max(wanted, self._chunk_bytes) + (1 << 16))
        done, skipped = 0, self._position - first * self._chunk_bytes
        for start, size in zip(batch.payload_offsets.tolist(), batch.payload_sizes.tolist(), strict=True):
            take = min(size - skipped, wanted - done)
            view[done : done + take] = batch.buffer[start + skipped : start + skipped + take]
            done += take
            skipped = 0
        self._position += done
        return done

    def problem(self) -> PybkError | None:
        """Read the blob to its end; returns what is damaged, None if nothing is."""
        buffer = bytearray(8 << 20)
        self.seek(0)
        try:
            while self.readinto(buffer):
                pass
        except (CorruptError, DigestMismatchError) as error:
            return error
        return None

    def close(self) -> None:
        """Let go of the ledger."""
        if not self.closed:
            super().close()
            self._reader.close()
