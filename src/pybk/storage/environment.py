"""The seam to LMDB: an ordered map of bytes to bytes with one writer and transactions.

Tests put a map in memory in the place of :class:`LmdbEnvironment`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol


class ReadTransaction(Protocol):
    """The map as it was when the transaction began; used by one thread, and only inside its ``with``.

    Every method raises CorruptError for a damaged map and StorageFailedError for anything else that fails.
    """

    def get(self, key: bytes) -> bytes | None:
        """Return a key's value, copied, or None. Keys have 1 to 511 bytes."""
        ...

    def floor(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Return the largest key that is not greater than ``key``, with its value, or None."""
        ...

    def items(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys from ``start`` up to and without ``stop``, ascending, with their values.

        Nothing may be written while it is being iterated.
        """
        ...


class WriteTransaction(ReadTransaction, Protocol):
    """The map with this transaction's own changes; used by one thread."""

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key's value.

        Raises:
            StorageFullError: The map or the disk is full; the transaction cannot be committed any more.
        """
        ...

    def delete(self, key: bytes) -> bool:
        """Remove a key; say whether it was there."""
        ...


class Environment(Protocol):
    """An ordered, transactional map on disk. Threads: any; one write transaction at a time, the others wait."""

    def read(self) -> AbstractContextManager[ReadTransaction]:
        """Begin a read transaction, which ends with the ``with``."""
        ...

    def write(self) -> AbstractContextManager[WriteTransaction]:
        """Begin a write transaction: committed and on disk when the ``with`` ends, dropped when it ends by an exception.

        Raises:
            StorageFullError: No room to commit: the map is as before, and writing may be tried again.
            StorageFailedError: The commit failed, or one did before: the map is as before or as written, and this
                environment writes no more. Reading goes on.
        """
        ...

    def close(self) -> None:
        """Close it, once every transaction has ended; closing again does nothing."""
        ...
