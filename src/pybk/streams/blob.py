"""Bytes of any length in one ledger: written like a file, sealed when it is closed, read like a file at any position.

A blob is a closed ledger. Its first entry is a header; then come chunks of the same size, except the last, so position
``p`` lies in entry ``1 + p // chunk``; its last entry is a trailer with the length and a digest of the content. The
close seals the trailer, and the number of entries, under the ledger's password: so a blob that is not closed, or that
was cut short, is never taken for a whole one.
"""

from __future__ import annotations

import io
import struct
from abc import abstractmethod
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Final, Generic, TypeVar

from xxhash import xxh3_128

from pybk.errors import ClosedError, CorruptError, DigestMismatchError, PybkError, UnsupportedFormatError, UsageError
from pybk.ledger.entry import EntryBatch
from pybk.manager.handle import WithBlock, fork_error
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.manager.ledger_reader import LedgerReader
from pybk.manager.ledger_writer import LedgerWriter
from pybk.threads import in_children
from pybk.threads.call_threads import asyncio_form

R = TypeVar("R")

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
    """Return the size of a chunk, in bytes, that is used if the caller gives none."""
    return min(CHUNK_BYTES, backend_of(manager).config.max_entry_bytes)


def bytes_of(data: object) -> memoryview:
    """Return a view of data to write; raise UsageError if it is not a contiguous bytes-like object."""
    try:
        return memoryview(data).cast("B")  # type: ignore[arg-type]  # anything with a buffer
    except TypeError:
        hint = "encode it first, as text.encode(), or write it to io.TextIOWrapper(file)"
        raise UsageError(
            f"write takes bytes or another contiguous bytes-like object, not {type(data).__name__}"
            + (f": {hint}" if isinstance(data, str) else "")
        ) from None


class PieceWriter(io.BufferedIOBase):
    """A file to write to, whose bytes are put in pieces of one size; only the last piece may be smaller.

    Threads: one.

    Args:
        piece_bytes: Bytes of a piece.
    """

    def __init__(self, piece_bytes: int) -> None:
        super().__init__()
        self._piece_bytes = piece_bytes
        self._buffer = bytearray()
        self._written = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        return self._written

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Append bytes; return their number, because all of them are written."""
        view = bytes_of(data)
        at = 0
        if self._buffer:
            at = min(self._piece_bytes - len(self._buffer), len(view))
            self._buffer += view[:at]
            if len(self._buffer) == self._piece_bytes:
                self._put_rest()
        while len(view) - at >= self._piece_bytes:
            self._put(bytes(view[at : at + self._piece_bytes]))
            at += self._piece_bytes
        self._buffer += view[at:]
        self._written += len(view)
        return len(view)

    def _put_rest(self) -> None:
        """Put the rest of the buffer, if it has any."""
        if self._buffer:
            self._put(bytes(self._buffer))
            self._buffer.clear()

    @abstractmethod
    def _put(self, piece: bytes) -> None:
        """Put a piece."""


class BlobWriter(WithBlock, PieceWriter, Generic[R]):
    """Writes a blob, which does not exist before it is published; a subclass implements the publication.

    Leaving its ``with`` publishes it, or ``commit`` does. If an exception leaves the ``with``, if ``abort`` is called,
    or if the file is dropped or only closed, nothing changes; leaving the ``with`` after ``abort`` does nothing.

    Threads: one.

    Args:
        title: The name of the blob in errors.
        writer: The writer of a new ledger.
        chunk_bytes: Bytes of a chunk.
    """

    _ended = True
    """True if it was published or given up, or has not begun."""

    def __init__(self, title: str, writer: LedgerWriter, chunk_bytes: int) -> None:
        super().__init__(chunk_bytes)
        self._title = title
        self._writer = writer
        self._digest = xxh3_128()
        self._forked = False
        in_children(self, BlobWriter._disable)
        self._outstanding = deque([writer.append_async(_HEADER.pack(_MAGIC, BLOB_FORMAT, chunk_bytes))])

    def _disable(self) -> None:
        """Refuse calls in a forked child."""
        self._forked = True

    # ---- writing -------------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Append bytes to the blob; return their number, because all of them are written.

        Raises:
            ClosedError: The file is closed, or the blob was published or given up.
            UsageError: The data is not bytes; nothing was written.
            PybkError: As ``LedgerWriter.append``.
        """
        if self._forked:
            raise fork_error("the blob")
        self._check_open()
        self._digest.update(bytes_of(data))
        with self._explaining():
            return super().write(data)

    write_async = asyncio_form(write, own_thread=True)

    def _check_open(self) -> None:
        self._check_lasts()
        if self.closed:
            raise ClosedError(
                f"the file of {self._title} is closed, which publishes nothing; make another, and end it by commit() "
                "or by leaving its with"
            )

    def _check_lasts(self) -> None:
        if self._ended:
            raise ClosedError(f"the upload of {self._title} has ended, published or given up; make another")

    def _put(self, piece: bytes) -> None:
        while len(self._outstanding) >= _AHEAD:
            self._outstanding.popleft().result()
        self._outstanding.append(self._writer.append_async(piece))

    def _seal(self) -> None:
        """Write what is left and the trailer, close the ledger, and seal it; then the blob can be published.

        Closing the file alone does not do so, because files are also closed when they are dropped.
        """
        with self._explaining():
            self._put_rest()
            self._put(_TRAILER.pack(_END_MAGIC, self._written, self._digest.digest()))
            while self._outstanding:
                self._outstanding.popleft().result()
            self._writer.close()

    def _explaining(self) -> AbstractContextManager[object]:
        """Return a context that replaces errors of the ledger by better ones."""
        return nullcontext()

    # ---- the end -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _publish(self) -> R:
        """Publish the blob, which is sealed."""

    @abstractmethod
    def _abandon(self) -> None:
        """Leave the blob to be given up later, unless it is published; a finaliser may call it."""

    @abstractmethod
    def _give_up(self) -> None:
        """Give up an abandoned blob, and delete its ledger."""

    def commit(self) -> R:
        """Seal the blob, and publish it by one compare-and-set.

        Leaving the ``with`` does it. Closing the file does not publish, because a file is also closed when it is
        dropped, and by a wrapper such as ``io.TextIOWrapper``. A file that is closed cannot be committed, except by
        leaving its ``with``.

        Raises:
            ClosedError: The file is closed, or the blob was published or given up; nothing was published.
            PybkError: If ``outcome_unknown`` is set, the blob may be published; otherwise it is not.

        Durability: On return the blob is durable and published.
        """
        self._check_open()
        return self._commit()

    commit_async = asyncio_form(commit, own_thread=True)

    def _commit(self) -> R:
        """Publish the blob, also if a wrapper of the file has closed it."""
        self._check_lasts()
        try:
            self._ended = True
            self._seal()
            return self._publish()
        except BaseException as error:
            self._abandon()
            if isinstance(error, PybkError) and not error.outcome_unknown:
                with suppress(PybkError):  # a later change, or a sweep, does it
                    self._give_up()
            raise
        finally:
            super().close()

    def abort(self) -> None:
        """Give the upload up, and delete the bytes that were written; nothing else changes."""
        if not self._ended:
            self._abandon()
            self._ended = True
            super().close()
            self._give_up()

    def __del__(self) -> None:
        """Leave the upload to be given up later."""
        if not self._ended:
            self._ended = True
            self._abandon()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Publish the blob; if the block raised, give the upload up, and let the exception pass unchanged.

        A blob that was published or given up in the ``with`` stays as it is.
        """
        if kind is not None:
            with suppress(PybkError):  # a later change, or a sweep, deletes the ledger
                self.abort()
        elif not self._ended:
            self._commit()


class BlobReader(io.RawIOBase):
    """Reads a blob at any position, each chunk verified.

    Threads: one.

    Args:
        reader: A reader of the blob's ledger, which this closes.

    Attributes:
        size: Bytes of the blob.
        digest: XXH3-128 of its content, from the trailer.
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
        """The batches that threads read ahead: the first chunk, and the batches from there."""
        self._hash = xxh3_128()
        self._hashed = 0
        """The number of bytes from the beginning that were read in order, and that ``_hash`` covers."""
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
        """Set the position, which may lie beyond the end; return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} is before the beginning of the blob")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview | bytearray) -> int:  # type: ignore[override]
        """Read bytes into a buffer; return their number, 0 at the end.

        Raises:
            CorruptError: A chunk is damaged or missing.
            DigestMismatchError: A chunk was changed; or all chunks were read in order, and differ from what was
                written.

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

    def close(self) -> None:
        """Release the ledger."""
        if not self.closed:
            super().close()
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)
            self._reader.close()
