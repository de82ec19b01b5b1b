"""Bytes of any length in one ledger: written like a file, sealed when it is closed, read like a file at any position.

A blob is a closed ledger. Its first entry is a header; then come chunks of the same size, except the last, so position
``p`` lies in entry ``1 + p // chunk``; its last entry is a trailer with the length and a digest of the content. The
close seals the trailer, and the number of entries, under the ledger's password: a blob that is not closed, or that was
cut short, is not taken for a whole one.
"""

from __future__ import annotations

import io
import struct
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from xxhash import xxh3_128

from pybk.errors import ClosedError, CorruptError, DigestMismatchError, PybkError, UnsupportedFormatError, UsageError
from pybk.ledger.entry import EntryBatch
from pybk.manager.append_future import AppendFuture
from pybk.manager.handle import fork_error, in_children
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.manager.ledger_reader import LedgerReader
from pybk.manager.ledger_writer import LedgerWriter

BLOB_FORMAT: Final = 1
CHUNK_BYTES: Final = 1 << 20
_MAGIC: Final = b"pybkblob"
_HEADER: Final = struct.Struct("<8sBxxxI")
_END_MAGIC: Final = b"pybkbend"
_TRAILER: Final = struct.Struct("<8sQ16s")
_AHEAD: Final = 16
"""Chunks that are appended and not awaited."""

_FETCH_BYTES: Final = 4 << 20
"""Bytes that a thread reads ahead at a time."""

_FETCHES: Final = 2
_ENTRY_BYTES: Final = 128
"""More than an entry has besides its payload."""


def usual_chunk_bytes(manager: LedgerManager) -> int:
    """Return the bytes of a chunk for those who name none."""
    return min(CHUNK_BYTES, backend_of(manager).config.max_entry_bytes)


def bytes_of(data: object) -> memoryview:
    """Return a view of what is to be written; raise UsageError if it has no bytes in a row."""
    try:
        return memoryview(data).cast("B")  # type: ignore[arg-type]  # anything with a buffer
    except TypeError:
        hint = "encode it first, as text.encode(), or write it to io.TextIOWrapper(file)"
        raise UsageError(
            f"write takes bytes or another contiguous bytes-like object, not {type(data).__name__}"
            + (f": {hint}" if isinstance(data, str) else "")
        ) from None


class BlobWriter(io.RawIOBase):
    """Writes a blob; nothing of it counts before ``finish`` returns.

    Threads: one.

    Args:
        writer: The writer of a new ledger.
        chunk_bytes: Bytes of a chunk.

    Attributes:
        ledger_id: The blob's ledger.
        chunk_bytes: As given.
    """

    def __init__(self, writer: LedgerWriter, chunk_bytes: int) -> None:
        super().__init__()
        self.ledger_id = writer.ledger_id
        self._writer = writer
        self.chunk_bytes = chunk_bytes
        self._digest = xxh3_128()
        self._buffer = bytearray()
        self._written = 0
        self._forked = False
        in_children(self, BlobWriter._disable)
        self._outstanding: deque[AppendFuture[int]] = deque()
        self._outstanding.append(writer.append_async(_HEADER.pack(_MAGIC, BLOB_FORMAT, chunk_bytes)))

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._written

    @property
    def digest(self) -> bytes:
        """XXH3-128 of what was written."""
        return self._digest.digest()

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Append bytes to the blob; returns how many, which is all.

        Raises:
            UsageError: The data is not bytes; nothing was written.
            PybkError: As ``LedgerWriter.append``.
        """
        if self._forked:
            raise fork_error("the blob")
        if self.closed:
            raise ClosedError("the blob is closed; write another")
        view = bytes_of(data)
        self._digest.update(view)
        at = 0
        if self._buffer:
            at = min(self.chunk_bytes - len(self._buffer), len(view))
            self._buffer += view[:at]
            if len(self._buffer) == self.chunk_bytes:
                self._append(bytes(self._buffer))
                self._buffer.clear()
        while len(view) - at >= self.chunk_bytes:
            self._append(bytes(view[at : at + self.chunk_bytes]))
            at += self.chunk_bytes
        self._buffer += view[at:]
        self._written += len(view)
        return len(view)

    def _disable(self) -> None:
        """Refuse calls in a forked child."""
        self._forked = True

    def _append(self, chunk: bytes) -> None:
        while len(self._outstanding) >= _AHEAD:
            self._outstanding.popleft().result()
        self._outstanding.append(self._writer.append_async(chunk))

    def finish(self) -> None:
        """Write what is left and the trailer, close the ledger, and seal it: the blob is complete when this returns.

        Closing the file alone does not complete the blob, because files are also closed when they are dropped.

        Raises:
            PybkError: The blob is not complete, and does not count.
        """
        super().close()
        if self._buffer:
            self._append(bytes(self._buffer))
        self._append(_TRAILER.pack(_END_MAGIC, self._written, self.digest))
        while self._outstanding:
            self._outstanding.popleft().result()
        self._writer.close()


class BlobReader(io.RawIOBase):
    """Reads a blob at any position, each chunk verified.

    Threads: one.

    Args:
        reader: A reader of the blob's ledger, which this closes.

    Attributes:
        size: Bytes of the blob.
        digest: XXH3-128 of its content, as the trailer says.
        chunk_bytes: Bytes of a chunk.

    Raises:
        CorruptError: The ledger is not a whole blob.
        UnsupportedFormatError: A newer pybk wrote it.
    """

    def __init__(self, reader: LedgerReader) -> None:
        super().__init__()
        self._reader = reader
        self._threads: ThreadPoolExecutor | None = None
        where = f"ledger {reader.ledger_id}"
        last = reader.last_add_confirmed
        if not reader.is_closed or last < 1:
            raise CorruptError(f"{where} is not a blob that was written to its end; write it again")
        header = next(reader.read(0, 0)).payload
        if len(header) != _HEADER.size or header[: len(_MAGIC)] != _MAGIC:
            raise CorruptError(f"{where} is not a blob: its first entry is not a blob's header")
        _, number, self.chunk_bytes = _HEADER.unpack(header)
        if number != BLOB_FORMAT:
            raise UnsupportedFormatError(
                f"{where} has blob format {number}; this pybk reads format {BLOB_FORMAT}: install a newer pybk"
            )
        trailer = next(reader.read(last, last)).payload
        if len(trailer) != _TRAILER.size or trailer[: len(_END_MAGIC)] != _END_MAGIC:
            raise CorruptError(f"{where} is not a blob that was written to its end: its last entry is not a trailer")
        _, self.size, self.digest = _TRAILER.unpack(trailer)
        length = reader.metadata.length
        if -(-self.size // self.chunk_bytes) != last - 1 or length != len(header) + self.size + len(trailer):
            raise CorruptError(f"{where}: {length} bytes in {last + 1} entries are not {self.size} in chunks")
        self._position = 0
        self._last_chunk = last - 2
        self._batches: list[EntryBatch] = []
        """The chunks that were read last, which are consecutive."""
        self._fetching: deque[tuple[int, Future[list[EntryBatch]]]] = deque()
        """What threads read ahead: the first chunk, and the batches from there."""
        self._hash = xxh3_128()
        self._hashed = 0
        """Bytes from the beginning that were read in order, and are in ``_hash``."""
        in_children(self, BlobReader._disable)

    def _disable(self) -> None:
        """Forget in a forked child what was read, and what threads of the parent read ahead."""
        self._batches, self._fetching, self._threads = [], deque(), None

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
            DigestMismatchError: A chunk was changed; or all were read in order, and are not what was written.

        Cost: Reads whole chunks. While they are read in order, two threads read and verify the next 8 MiB meanwhile.
        """
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self.size - self._position)
        if wanted <= 0:
            return 0
        chunk, skipped = divmod(self._position, self.chunk_bytes)
        batch = self._batch_of(chunk, (self._position + wanted - 1) // self.chunk_bytes)
        first = 1 + chunk - int(batch.entry_ids[0])
        done = 0
        for start, size in zip(
            batch.payload_offsets[first:].tolist(), batch.payload_sizes[first:].tolist(), strict=True
        ):
            take = min(size - skipped, wanted - done)
            view[done : done + take] = batch.buffer[start + skipped : start + skipped + take]
            done += take
            skipped = 0
            if done == wanted:
                break
        self._verify(view[:done])
        self._position += done
        return done

    def _batch_of(self, chunk: int, last: int) -> EntryBatch:
        """Return a batch that has a chunk; read it, and maybe chunks up to ``last``, unless they were read already."""
        for batch in self._batches:
            if batch.entry_ids[0] <= 1 + chunk <= batch.entry_ids[-1]:
                return batch
        follows = bool(self._batches) and chunk == self._batches[-1].entry_ids[-1]
        self._batches = []
        while self._fetching and not self._batches:
            first, fetching = self._fetching.popleft()
            if first == chunk:
                self._batches = fetching.result()
            else:
                fetching.cancel()
        if not self._batches:
            self._batches = [self._fetch(chunk, max(chunk, last))[0]]
        if follows:
            self._read_ahead()
        return self._batches[0]

    def _fetch(self, chunk: int, last: int) -> list[EntryBatch]:
        """Read and verify chunks, as many batches as it takes."""
        batches = []
        while chunk <= last:
            most = (last - chunk + 1) * (self.chunk_bytes + _ENTRY_BYTES)
            batches.append(self._reader.read_batch(1 + chunk, last=1 + last, max_bytes=most))
            chunk = int(batches[-1].entry_ids[-1])
        return batches

    def _read_ahead(self) -> None:
        """Have threads read what comes next."""
        count = max(_FETCH_BYTES // self.chunk_bytes, 1)
        first = int(self._batches[-1].entry_ids[-1]) if not self._fetching else self._fetching[-1][0] + count
        if self._threads is None and first <= self._last_chunk:
            self._threads = ThreadPoolExecutor(_FETCHES, "pybk-blob")
        while self._threads is not None and len(self._fetching) < _FETCHES and first <= self._last_chunk:
            last = min(first + count - 1, self._last_chunk)
            self._fetching.append((first, self._threads.submit(self._fetch, first, last)))
            first += count

    def _verify(self, data: memoryview) -> None:
        """Add what was read at the position to the digest, if all before was; compare the digest at the end."""
        if self._position != self._hashed:
            return
        self._hash.update(data)
        self._hashed += len(data)
        if self._hashed == self.size and self._hash.digest() != self.digest:
            raise DigestMismatchError(
                f"ledger {self._reader.ledger_id}: the blob's content has digest {self._hash.hexdigest()}, "
                f"not {self.digest.hex()} as its trailer says; restore it"
            )

    def readall(self) -> bytes:
        """Read to the end."""
        data = bytearray(max(self.size - self._position, 0))
        view, at = memoryview(data), 0
        while count := self.readinto(view[at:]):
            at += count
        return bytes(data)

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
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)
            self._reader.close()
