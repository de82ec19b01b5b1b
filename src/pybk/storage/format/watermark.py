"""The durable watermark: the LSN up to which the log is durable, in a small mapped file that other processes read.

See ``docs/reference/format.md``. A writer stores the LSN first and then its complement. So the complement is always
that of a durable LSN, even if the writer was killed between the two stores.
"""

from __future__ import annotations

import struct
from typing import Final

from pybk.errors import CorruptError
from pybk.storage.io.failures import is_passing
from pybk.storage.io.filesystem import FileSystem, populate, replace_file

WATERMARK_BYTES: Final = 64

_LAYOUT: Final = struct.Struct("<8s16sqqQQQ")
_MAGIC: Final = b"PYBKWM01"
_LSN: Final = 3
_COMPLEMENT: Final = 4
_CLEAN: Final = 5
_TRIES: Final = 100
_REMEDY: Final = (
    "restore the directory from a copy, or run `pybk store rebuild-index` on the store, which makes it again, with "
    "--accept-loss to continue without what it lists as missing"
)


def _populate_nothing(start: int, size: int) -> None:
    """Do nothing for a map that was dropped: touching its words raises ValueError."""


class Watermark:
    """The LSN of the last commit known to be on disk, as a file that is mapped.

    A value that is stored survives the process, but it is not synced: after a power failure the file may hold an older
    LSN, never a newer one. Threads: one advances, any may read.
    """

    __slots__ = ("_path", "_populate", "_view", "_words")

    def __init__(self, fs: FileSystem, view: memoryview, path: str) -> None:
        self._view = view
        self._populate = fs.populator(view)
        # Signed, so that a complement is a small negative number, which is cheap to compute.
        self._words = view.cast("q")
        self._path = path

    @classmethod
    def create(cls, fs: FileSystem, path: str, store_id: bytes) -> Watermark:
        """Make and map the file for a log without commits that was not closed cleanly; durable on return.

        Args:
            fs: The file system.
            path: The file; an existing one is replaced.
            store_id: 16 bytes.
        """
        replace_file(fs, path, _LAYOUT.pack(_MAGIC, store_id, 0, ~0, 0, 0, 0))
        return cls.open(fs, path, store_id, writable=True)

    @classmethod
    def open(cls, fs: FileSystem, path: str, store_id: bytes, *, writable: bool) -> Watermark:
        """Map the file.

        Raises:
            CorruptError: The file is missing, is not a watermark of this store, or holds two numbers that contradict
                each other.
            OSError: It cannot be opened.
        """
        if not fs.exists(path):
            raise CorruptError(f"{path} is missing; {_REMEDY}", path=path)
        view = fs.map_shared(path) if writable else fs.view(path)
        if len(view) != WATERMARK_BYTES:
            raise CorruptError(f"{path}: {len(view)} bytes; a watermark has {WATERMARK_BYTES}; {_REMEDY}", path=path)
        populate(fs, view, 0, WATERMARK_BYTES)
        magic, found_id, _, _, clean, *zeros = _LAYOUT.unpack(view)
        if magic != _MAGIC or clean > 1 or any(zeros):
            raise CorruptError(
                f"{path}: magic {magic!r}, clean end {clean}, then {zeros}; expected {_MAGIC!r}, 0 or "
                f"1, and zeros; {_REMEDY}",
                path=path,
                offset=0,
            )
        if found_id != store_id:
            raise CorruptError(
                f"{path}: watermark of store {found_id.hex()}, expected {store_id.hex()}; {_REMEDY}",
                path=path,
                offset=8,
            )
        watermark = cls(fs, view, path)
        watermark.durable_lsn()
        return watermark

    def advance(self, lsn: int) -> None:
        """Record that the log is durable up to ``lsn``; call it after the sync that made it so. Costs about 1 µs.

        Args:
            lsn: 0 to 2^63 - 1, never less than before.

        Raises:
            CorruptError, StorageError: The file was truncated, or its page cannot be read; nothing was stored.
        """
        words = self._words
        try:
            self._populate(0, WATERMARK_BYTES)
        except OSError as error:
            self._unless_passing(error)
        words[_LSN] = lsn
        words[_COMPLEMENT] = ~lsn

    def durable_lsn(self) -> int:
        """Return an LSN up to which the log is durable; at most one :meth:`advance` old.

        Raises:
            CorruptError: The two numbers contradict each other at every try, or the file was truncated.
            StorageError: The device cannot read it.
        """
        words = self._reachable()
        for _ in range(_TRIES):
            # The writer stores the complement last, and it is read first here: so the LSN is the same or newer.
            durable = ~words[_COMPLEMENT]
            if words[_LSN] >= durable >= 0:
                return durable
        raise CorruptError(
            f"{self._path}: durable LSN {words[_LSN]} is below {~words[_COMPLEMENT]}, which its "
            f"complement gives, or one of the two is negative; {_REMEDY}",
            path=self._path,
            offset=8 * _LSN,
        )

    def _reachable(self) -> memoryview:
        """Return the map as words, once its page is in memory."""
        try:
            self._populate(0, WATERMARK_BYTES)
        except OSError as error:
            self._unless_passing(error)
        return self._words

    def _unless_passing(self, error: OSError) -> None:
        """Raise an error of populating, unless memory is short: a page fault waits for that.

        A durable commit must not be refused.
        """
        if not is_passing(error):
            raise CorruptError(
                f"{self._path} cannot be read or was cut while it was open: {error}; {_REMEDY}", path=self._path
            ) from error

    def stored_lsn(self) -> int:
        """Return the LSN that was stored last; if the file is damaged, compare the LSN with the log.

        If the file is damaged, :meth:`durable_lsn` may return too little, and this may return too much.

        Raises:
            CorruptError: As :meth:`durable_lsn`.
        """
        durable = self.durable_lsn()
        return max(durable, int(self._words[_LSN]))

    @property
    def clean(self) -> bool:
        """True if the store was closed with everything synced and has not been opened since."""
        return self._reachable()[_CLEAN] == 1

    @clean.setter
    def clean(self, clean: bool) -> None:
        self._reachable()[_CLEAN] = int(clean)

    def close(self) -> None:
        """Drop the mapping; closing again does nothing. Every other method raises ValueError after that."""
        self._populate = _populate_nothing  # the populator references the map and its descriptor
        self._words.release()
        self._view.release()
