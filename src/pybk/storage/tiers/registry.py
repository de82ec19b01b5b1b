"""All tiers. A further tier is a module that implements ``Tier``, and an entry of ``TIERS``."""

from __future__ import annotations

from typing import Final

from pybk.flags import StorageHint
from pybk.storage.tiers import Tier
from pybk.storage.tiers.file_tier import ColdTier, LogTier
from pybk.storage.tiers.lmdb_tier import LmdbTier

TIERS: Final[tuple[Tier, ...]] = (LogTier(), LmdbTier(), ColdTier())
"""All tiers; if two take one hint, the last of them gets its entries."""


def tiers_by_kind() -> dict[str, Tier]:
    """Return all tiers by the kind of their files; callers keep it, because a call would make each read slower."""
    return {tier.kind: tier for tier in reversed(TIERS)}


def tier_of_kind(kind: str) -> Tier:
    """Return the tier that keeps files of a kind; KeyError if there is none."""
    for tier in TIERS:
        if tier.kind == kind:
            return tier
    raise KeyError(kind)


def tier_for(hint: StorageHint) -> Tier:
    """Return the tier that moved entries with a storage hint are written to; KeyError if there is none."""
    for tier in reversed(TIERS):
        if hint in tier.hints:
            return tier
    raise KeyError(hint)
