"""Storage hints: the tiers."""

from __future__ import annotations

from enum import StrEnum


class StorageHint(StrEnum):
    """Where a ledger's entries should live."""

    NVME = "nvme"
    """In the log itself, so that they are written once."""

    SSD = "ssd"
    """In a B+tree."""

    HDD = "hdd"
    """In cold segments."""
