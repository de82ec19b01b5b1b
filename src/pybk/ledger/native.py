"""The functions of the native core, for type checkers; nothing imports this module when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

EntryTuple = TypeVar("EntryTuple", bound=tuple[int, int, int, int, bytes])
"""A named tuple of the numbers of an entry's header and its payload."""


ReadTuple = TypeVar("ReadTuple", bound=tuple[int, int, int, int, int, bool, bool])
"""A named tuple of a read."""


class NativeCore(Protocol):
    """The functions of the core; its docstrings say what they do."""

    TYPES: frozenset[int]
    """The digest types that this processor computes there."""

    ALONE: frozenset[int]
    """Those of them that it computes for a lone entry as fast as Python does."""

    def decode(
        self,
        entry_type: type[EntryTuple],
        buffer: bytes | memoryview,
        prefix_bytes: int,
        start: int,
        end: int,
        /,
    ) -> EntryTuple:
        """Return an encoded entry that was verified, as a named tuple."""

    def make_answer(
        self,
        key: bytes,
        instance: bytes,
        version: int,
        request_id: int,
        entry_id: int,
        stride: int,
        entry: bytes | memoryview,
        /,
    ) -> bytes:
        """Return the message of an answer with one entry."""

    def make_read(
        self,
        key: bytes,
        instance: bytes,
        version: int,
        request_id: int,
        counter: int,
        taken_bytes: int,
        ledger_id: int,
        entry_id: int,
        stride: int,
        /,
    ) -> bytes:
        """Return the message of a read of one entry."""

    def matches(
        self,
        digest_type: int,
        key: bytes,
        ledger_id: int,
        buffer: bytes | memoryview,
        offsets: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        /,
    ) -> bool:
        """Return whether all entries have their ids and digests."""

    def open(
        self,
        entry_type: type[EntryTuple],
        key: bytes,
        buffer: bytes | memoryview,
        digest_type: int,
        ledger_id: int,
        entry_id: int,
        start: int,
        end: int,
        /,
    ) -> EntryTuple | None:
        """Return a copy of an encoded entry as a named tuple, verified; None if it is not what its writer made."""

    def prefix(
        self,
        digest_type: int,
        key: bytes,
        ledger_id: int,
        entry_id: int,
        lac: int,
        length: int,
        payload: bytes | memoryview,
        /,
    ) -> bytes:
        """Return header and digest of one entry."""

    def prefixes(
        self,
        digest_type: int,
        key: bytes,
        ledger_id: int,
        first_entry_id: int,
        lac: int,
        length_before: int,
        payloads: Sequence[bytes],
        /,
    ) -> list[bytes]:
        """Return header and digest of consecutive entries."""

    def encode(
        self,
        digest_type: int,
        key: bytes,
        ledger_id: int,
        first_entry_id: int,
        lac: int,
        length_before: int,
        payloads: Sequence[bytes],
        head: bytes,
        copies: bool,
        /,
    ) -> tuple[list[bytes], int]:
        """Return consecutive entries after a head, in one piece or in many, and the checksum of the pieces."""

    def lengths(self, payloads: Sequence[object], /) -> bytes | None:
        """Return the sizes of payloads as int64; None if one is not of type ``bytes``."""

    def span(
        self, file: memoryview, table: bytes | None, words: tuple[int, int, int, int], entry_id: int, /
    ) -> tuple[int, int]:
        """Return where an entry of a run starts and ends in its file; raise ValueError if it is not there."""

    def take_add(
        self, message: object, key: bytes, instance: bytes, /
    ) -> tuple[int, int, int, int, int, int, int, int, int, int] | None:
        """Return what an add of one entry says, and where the entry is; None for another message."""

    def take_read(
        self, message: bytes | memoryview, key: bytes, instance: bytes, read_type: type[ReadTuple], /
    ) -> tuple[int, int, int, ReadTuple] | None:
        """Return request id, counter, bytes taken and the read in a request; None for another message."""

    def take_reply(self, message: object, key: bytes, instance: bytes, /) -> tuple[int, int, int, int, int, int] | None:
        """Return what a reply with one entry, or without content, says, and where the entry is; None for another."""

    def entry_commit(
        self,
        ledger_id: int,
        entry_id: int,
        lsn: int,
        file_id: int,
        prefix: bytes | memoryview,
        payload: bytes | memoryview,
        /,
    ) -> bytes:
        """Return the bytes of a commit that has one entry and nothing else."""
