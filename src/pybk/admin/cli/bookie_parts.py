"""The ledgers of a bookie's store: they are parts of the cluster's ledgers, with ids of their own."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk import manager as handles
from pybk import storage
from pybk.config import StoreConfig
from pybk.errors import CorruptError, NoSuchLedgerError, PybkError, UnsupportedFormatError
from pybk.flags import LedgerType
from pybk.storage.format.extent import Extent

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.manager.ledger_manager import LedgerManager

_LEDGER: Final = re.compile(r"\bledger (\d+)(?: entries (\d+) to (\d+))?")


class Part(NamedTuple):
    """The place of a bookie's ledger in a replicated ledger.

    Attributes:
        ledger_id: The cluster's ledger.
        first: The entry of this ledger that is the part's entry 0.
        stride: The distance between entries of this ledger that follow each other in the part.
    """

    ledger_id: int
    first: int
    stride: int

    def entries(self, first: int, last: int) -> tuple[int, int]:
        """Return the entries of the cluster's ledger that correspond to two entries of the part."""
        return self.first + first * self.stride, self.first + last * self.stride


def is_bookie(path: str) -> bool:
    """Return whether a directory is that of a bookie; False if the store there cannot be opened."""
    try:
        with handles.LedgerManager.open(path, read_only=True) as manager:
            return any(True for _ in manager.list_ledgers(LedgerType.BOOKIE))
    except (PybkError, OSError):
        return False


class BookieParts:
    """The parts of a store.

    Args:
        parts: The parts by the ledger ids of the store; empty for a store that is not a bookie's.
    """

    def __init__(self, parts: dict[int, Part]) -> None:
        self._parts = parts

    @classmethod
    def of(cls, path: str, ids: Iterable[int]) -> BookieParts:
        """Return the parts that the ledgers of the store in a directory are; unknown ones are left out."""
        wanted = sorted(set(ids))
        if not wanted:
            return cls({})
        try:
            with handles.LedgerManager.open(path, read_only=True) as manager:
                return cls.of_open(manager, wanted)
        except (PybkError, OSError):
            return cls({})  # a store that cannot be opened is reported by the caller, as it is

    @classmethod
    def of_open(cls, manager: LedgerManager, ids: Iterable[int]) -> BookieParts:
        """Return the parts that the ledgers of an open store are; unknown ones are left out."""
        found = {ledger_id: _extent(manager, ledger_id) for ledger_id in ids}
        return cls({key: Part(each.ledger_id, each.first, each.stride) for key, each in found.items() if each})

    def __bool__(self) -> bool:
        """Return whether any ledger is a part."""
        return bool(self._parts)

    def get(self, ledger_id: int | None) -> Part | None:
        """Return the part that a ledger of the store is; None if it is not a part."""
        return None if ledger_id is None else self._parts.get(ledger_id)

    def named(self, text: str) -> str:
        """Return a text about ledgers of the store, with the cluster's ledgers named instead."""
        return _LEDGER.sub(self._replaced, text)

    def _replaced(self, found: re.Match[str]) -> str:
        part = self._parts.get(int(found[1]))
        if part is None:
            return found[0]
        if found[2] is None:
            return f"a part of ledger {part.ledger_id}"
        first, last = part.entries(int(found[2]), int(found[3]))
        return f"ledger {part.ledger_id} entries {first} to {last}"


class Replacements:
    """The parts of a store that replace damaged entries of other parts.

    Args:
        path: The directory of the store.
    """

    def __init__(self, path: str) -> None:
        self._found: defaultdict[int, list[tuple[int, Extent, int]]] = defaultdict(list)
        with closing(storage.ReadOnlyStore.open(path, config=StoreConfig())) as store:
            for metadata in store.ledgers():
                extent = _extent_of(metadata)
                if extent is not None and extent.replaces:
                    last = extent.first + store.descriptor(metadata.ledger_id).last_durable * extent.stride
                    self._found[extent.ledger_id].append((metadata.ledger_id, extent, last))

    def have(self, ledger_id: int, part: Part, first: int, last: int) -> bool:
        """Return whether newer parts have all entries of a range of a ledger of the store, both ends inclusive."""
        newer = [(extent, end) for number, extent, end in self._found[part.ledger_id] if number > ledger_id]
        begin, end = part.entries(first, last)
        return all(
            any(
                extent.first <= entry_id <= top and (entry_id - extent.first) % extent.stride == 0
                for extent, top in newer
            )
            for entry_id in range(begin, end + 1, part.stride)
        )


def _extent(manager: LedgerManager, ledger_id: int) -> Extent | None:
    """Return the extent that a ledger is; None if it is none, or that cannot be read."""
    try:
        return _extent_of(manager.ledger_metadata(ledger_id))
    except NoSuchLedgerError:
        return None


def _extent_of(metadata: LedgerMetadata) -> Extent | None:
    try:
        return Extent.of(metadata)
    except (CorruptError, UnsupportedFormatError):
        return None
