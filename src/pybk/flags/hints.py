"""Storage hints: the tiers."""

from __future__ import annotations

from enum import StrEnum


class StorageHint(StrEnum):
    """Where a ledger's entries should live.

    ``NVME`` is the log itself (one write), ``SSD`` a B+tree, ``HDD`` cold segments.
    """

    NVME = "nvme"
    SSD = "ssd"
    HDD = "hdd"
