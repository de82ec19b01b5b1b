"""The sizes of a ledger: the bookies of an ensemble that take an entry, and the answers that suffice.

The bookies of an ensemble are named by place, ``0 <= place < ensemble_size``; sets of places are bits of an int.
Entries with the same residue ``entry_id % ensemble_size`` go to the same places, so quorums are counted per residue and
not per entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple


class Quorum(NamedTuple):
    """The three sizes of a ledger, ``ensemble_size >= write_quorum >= ack_quorum >= 1``.

    Attributes:
        ensemble_size: Bookies of an ensemble.
        write_quorum: Bookies that an entry is written to.
        ack_quorum: Bookies that acknowledge an entry.
    """

    ensemble_size: int
    write_quorum: int
    ack_quorum: int

    @property
    def everyone(self) -> int:
        """All places, as bits."""
        return (1 << self.ensemble_size) - 1

    @property
    def negatives_needed(self) -> int:
        """The denials that prove that an entry was never acked, because fewer than Qa bookies are left (QC)."""
        return self.write_quorum - self.ack_quorum + 1

    @property
    def live_min(self) -> int:
        """The fewest bookies of an ensemble with which each write set can have an ack quorum."""
        return -(-self.ensemble_size * self.ack_quorum // self.write_quorum)

    def write_set(self, entry_id: int) -> tuple[int, ...]:
        """Return the places that take an entry, the first one first."""
        return _write_set(self, entry_id % self.ensemble_size)

    def mask(self, entry_id: int) -> int:
        """Return the places that take an entry, as bits."""
        return sum(1 << place for place in self.write_set(entry_id))

    def masks(self) -> tuple[int, ...]:
        """Return the places of each write set, as bits, by residue.

        If every bookie takes every entry there is only one write set, and it is returned once.
        """
        return _masks(self)

    def residues(self, place: int) -> tuple[int, ...]:
        """Return the residues of the entries that a place takes."""
        size = self.ensemble_size
        return tuple((place - i) % size for i in range(self.write_quorum))

    def acked(self, acks: int, masks: Iterable[int]) -> bool:
        """Return whether each of some write sets has an ack quorum among the places that acknowledged.

        Args:
            acks: Places that acknowledged, as bits.
            masks: The write sets, as bits.
        """
        needed = self.ack_quorum
        for mask in masks:  # noqa: SIM110  # no generator, because a writer calls this for each answer
            if (acks & mask).bit_count() < needed:
                return False
        return True

    def covered(self, known: int) -> bool:
        """Return whether the responders cover the ensemble: each write set has fewer than Qa non-responders.

        Then no later entry can be acknowledged without one of the responders (C6).

        Args:
            known: Places that answered, as bits.
        """
        return all((mask & ~known).bit_count() < self.ack_quorum for mask in self.masks())

    def kept(self, mask: int, kept: int) -> int:
        """Return how many copies of an acknowledged entry there are at least.

        An acknowledged entry is on Qa bookies of its write set, and at worst on all those whose copies do not count.

        Args:
            mask: The write set of the entry, as bits.
            kept: Places whose bookies serve, and have kept what they acknowledged, as bits.
        """
        return max(0, self.ack_quorum - (mask & ~kept).bit_count())

    def writable(self, live: int) -> bool:
        """Return whether each write set has an ack quorum among the live places.

        Args:
            live: Places, as bits.
        """
        return self.acked(live, self.masks())


@lru_cache(1024)
def _masks(quorum: Quorum) -> tuple[int, ...]:
    """Return ``Quorum.masks``; cached, because a process uses few sizes."""
    count = 1 if quorum.ensemble_size == quorum.write_quorum else quorum.ensemble_size
    return tuple(quorum.mask(residue) for residue in range(count))


@lru_cache(1024)
def _write_set(quorum: Quorum, residue: int) -> tuple[int, ...]:
    """Return ``Quorum.write_set`` of the entries of a residue; cached, as ``_masks`` is."""
    return tuple((residue + i) % quorum.ensemble_size for i in range(quorum.write_quorum))


@lru_cache(1024)
def places(bits: int) -> tuple[int, ...]:
    """Return the places of a set in ascending order; cached, as ``_masks`` is.

    Args:
        bits: The set, as bits.
    """
    return tuple(place for place in range(bits.bit_length()) if bits >> place & 1)
