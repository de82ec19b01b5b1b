"""Flags that an application sets for a ledger: its type, its tier, and how it is written and read."""

from __future__ import annotations

from enum import STRICT, IntFlag, StrEnum
from typing import ClassVar, Final

from pybk.deferral import without
from pybk.errors import UsageError

LEDGER_TYPE_BYTES_MAX: Final = 255

_BOOKIE_TYPES: Final = frozenset({".fence", ".limbo", ".bookie"})
_SYSTEM_TYPES: Final = _BOOKIE_TYPES | {".metadata"}


@without(is_bookie_record="call pybk.flags.is_bookie_record(ledger_type)")
class LedgerType(str):
    """The name of a ledger's purpose; any string of at most 255 UTF-8 bytes, the empty one being the default.

    Names that begin with "." are reserved for pybk, and only the system types below are valid.

    Args:
        name: The type's name.

    Raises:
        UsageError: The name is too long, cannot be encoded as UTF-8, or is a reserved name but not a system type.
    """

    __slots__ = ()

    METADATA: ClassVar[LedgerType]
    """Ledgers in which the system keeps its own metadata."""

    FENCE: ClassVar[LedgerType]
    """A mark in a bookie's store: the replicated ledger that it names is fenced."""

    LIMBO: ClassVar[LedgerType]
    """A mark in a bookie's store: the replicated ledger that it names may lack something durable there."""

    BOOKIE: ClassVar[LedgerType]
    """A bookie's own record in its store, which names the bookie and its cluster."""

    def __new__(cls, name: str = "") -> LedgerType:
        """Check the name."""
        if type(name) is cls:
            return name
        if not isinstance(name, str):
            raise UsageError(f"ledger_type is {name!r:.100}; it takes a string")
        try:
            size = len(name.encode())
        except UnicodeEncodeError as error:
            raise UsageError(
                f"ledger type {name!r} cannot be encoded as UTF-8: {error.reason}; choose another"
            ) from error
        if size > LEDGER_TYPE_BYTES_MAX:
            raise UsageError(
                f"ledger type {name[:20]!r}... has {size} bytes; the limit is {LEDGER_TYPE_BYTES_MAX}: shorten it"
            )
        if name.startswith(".") and name not in _SYSTEM_TYPES:
            raise UsageError(f'ledger type {name!r} begins with ".", which is reserved for the system; choose another')
        return super().__new__(cls, name)

    @property
    def is_system(self) -> bool:
        """Return whether the type is one of the system's own."""
        return self.startswith(".")


def is_bookie_record(ledger_type: LedgerType) -> bool:
    """Return whether bookies mark their own records with a type; no replicated ledger may have it."""
    return str(ledger_type) in _BOOKIE_TYPES


LedgerType.METADATA = LedgerType(".metadata")
LedgerType.FENCE = LedgerType(".fence")
LedgerType.LIMBO = LedgerType(".limbo")
LedgerType.BOOKIE = LedgerType(".bookie")


class StorageHint(StrEnum):
    """The tier where a ledger's entries should live."""

    NVME = "nvme"
    """The log itself: entries are written once."""

    SSD = "ssd"
    """A B+tree."""

    HDD = "hdd"
    """Cold segments."""


class Flags(IntFlag, boundary=STRICT):
    """A set of flags that is a number: ``int(flags)`` and back, where unknown bits are refused."""

    @classmethod
    def _missing_(cls, value: object) -> Flags:
        if isinstance(value, int):
            known = 0
            for flag in cls:
                known |= flag.value
            # Also true of all negative numbers, which the enum itself would take for the complement of a set.
            if value & ~known:
                what = f"has the unknown bits {value & ~known:#x}" if value > 0 else "is negative"
                raise ValueError(f"{cls.__name__} {value:#x} {what}; the known bits are {known:#x}")
        found: Flags = super()._missing_(value)
        return found


class WriteFlag(Flags):
    """The way in which entries are written; recorded in the ledger's metadata."""

    NONE = 0
    """An append is acknowledged when it is durable."""

    DEFERRED_FORCE = 1
    """An append is acknowledged before it is durable. The last add confirmed moves only when ``force()`` or ``close()``
    has made everything up to there durable. An entry that was acknowledged more than 100 ms before the end of the
    process survives it, however the process ends.
    """


class ReadFlag(Flags):
    """The way in which entries are read; belongs to the handle."""

    NONE = 0
    """Through the page cache and the reader's cache."""

    DONT_CACHE = 1
    """Without a trace in the page cache or in the reader's cache."""
