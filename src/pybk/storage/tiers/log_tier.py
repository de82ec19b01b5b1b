"""Log files as a tier: entries with the hint NVME stay where the log wrote them, while they fill a log file well."""

from __future__ import annotations

from typing import ClassVar

from pybk.storage.tiers.tier import Tier
from pybk.storage.volumes import LOG


class LogTier(Tier):
    """Log files. Moves never write them; the log does."""

    kind: ClassVar[str] = LOG
    mixes_hints: ClassVar[bool] = True
