"""The metadata keys of a cluster's secrets, by key epoch: they sign values, and verify values or descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self


@dataclass(frozen=True, slots=True, eq=False)
class MetadataKeys:
    """The metadata keys that a process knows; a cluster without a secret has none.

    Attributes:
        current: The key epoch of the values that are written.
        by_epoch: The keys by which values are accepted, those of the epochs that are not retired; ``current`` among
            them.
        earlier: The keys of retired epochs. They verify only the descriptions of ledgers that were made in them.
        held: The epochs whose secrets this process was given; the other keys were unwrapped with a later one.
        unknown: Epochs that are not retired and whose keys this process does not know.
    """

    current: int
    by_epoch: Mapping[int, bytes] = field(repr=False)
    earlier: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    held: frozenset[int] = frozenset({0})
    unknown: frozenset[int] = frozenset()

    @classmethod
    def first(cls, key: bytes) -> Self:
        """Return the keys of a cluster whose first secret is in use."""
        return cls(0, {0: key})

    @property
    def key(self) -> bytes:
        """The key of the values that are written."""
        return self.by_epoch[self.current]

    @property
    def epochs(self) -> tuple[int, frozenset[int], frozenset[int], frozenset[int]]:
        """The epochs without the keys: the current one, and those that are known, held and unknown."""
        return self.current, frozenset(self.by_epoch), self.held, self.unknown

    def of_an_export(self) -> Self:
        """Return the keys that verify an export of the cluster's owner; values of retired epochs are valid there."""
        return replace(self, by_epoch={**self.earlier, **self.by_epoch}, earlier={})

    @property
    def of_descriptions(self) -> tuple[bytes, ...]:
        """The keys that a ledger's description may have been made with, the current one first."""
        others = (key for epoch, key in self.by_epoch.items() if epoch != self.current)
        return (self.key, *others, *self.earlier.values())
