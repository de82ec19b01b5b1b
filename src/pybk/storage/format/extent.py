"""Extents: the ledgers of a bookie's store, each a part of a replicated ledger.

A bookie keeps a replicated ledger as one or more ledgers of its store, the *extents*: the k-th entry of an extent's
ledger is entry ``first + k * stride`` of the replicated ledger, with the bytes that its writer encoded. The store knows
only dense ledgers. Checks of entries use ``Extent`` to find the replicated entry ids, which the entries' headers carry.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.ledger.ledger_metadata import LedgerMetadata

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

EXTENT_FORMAT: Final = 1
EXTENT_KEY: Final = ".extent"
"""Key of the custom metadata that holds the extent of a ledger of a bookie's store."""

STRIDE_MAX: Final = (1 << 32) - 1
"""Largest distance of two adjacent entries of an extent: it is stored in 32 bits. Messages have the same limit."""

_LAYOUT: Final = struct.Struct("<B2x?IqqI4x")


class Extent(NamedTuple):
    """The entries of a replicated ledger that a ledger of a bookie's store holds.

    Attributes:
        ledger_id: The replicated ledger.
        first: Replicated entry id of the extent's entry 0.
        stride: Difference of the replicated ids of adjacent entries.
        write_flags: The replicated ledger's write flags; the bookie's own ledgers have no flags.
        replaces: Whether it replaces entries that were found damaged in earlier extents.
    """

    ledger_id: int
    first: int
    stride: int
    write_flags: int
    replaces: bool = False

    def encode(self) -> bytes:
        """Return the value of ``EXTENT_KEY``."""
        return _LAYOUT.pack(EXTENT_FORMAT, self.replaces, self.stride, self.ledger_id, self.first, self.write_flags)

    @classmethod
    def of(cls, metadata: LedgerMetadata) -> Self | None:
        """Return the extent of a ledger; None if the ledger is not an extent.

        Raises:
            CorruptError: The custom metadata is not a valid extent.
            UnsupportedFormatError: It is of another format.
        """
        return cls.decode(metadata.custom_metadata, where=f"ledger {metadata.ledger_id}")

    @classmethod
    def decode(cls, custom: Mapping[str, bytes], *, where: str) -> Self | None:
        """Decode as ``of`` does; ``where`` names the place in errors."""
        data = custom.get(EXTENT_KEY)
        if data is None:
            return None
        if data[:1] and data[0] != EXTENT_FORMAT:
            raise UnsupportedFormatError(
                f"{where}: an extent of format {data[0]}; this pybk reads {EXTENT_FORMAT}: open the bookie's directory "
                "with the pybk that wrote it, or newer"
            )
        if len(data) == _LAYOUT.size:
            _, replaces, stride, ledger_id, first, write_flags = _LAYOUT.unpack(data)
            extent = cls(ledger_id, first, stride, write_flags, replaces)
            if extent.encode() == data and ledger_id >= 0 and first >= 0 and stride >= 1:
                return extent
        raise CorruptError(f"{where}: {data[:64]!r} names no extent; restore the bookie's directory from a copy")

    def entry_ids(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Map entry ids of the extent to those of the replicated ledger, ``(n,)`` int64."""
        return ids * self.stride + self.first
