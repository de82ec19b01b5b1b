"""Log files as a tier: entries with the hint NVME stay where the log wrote them, while they fill a log file well."""

from __future__ import annotations

from typing import ClassVar

from pybk.errors import UsageError
from pybk.storage.format.index_rows import FileRow
from pybk.storage.format.record import RunLocations
from pybk.storage.tiers.file_tier import FileTier
from pybk.storage.tiers.tier import LOG, TierFiles


class LogTier(FileTier):
    """Log files. The log writes them; ``repair`` reads them by commits, because a whole commit proves its records."""

    kind: ClassVar[str] = LOG
    mixes_hints: ClassVar[bool] = True

    def rows(self, files: TierFiles, row: FileRow) -> RunLocations:
        """Raise UsageError, because records of a log file are found through its commits: ``inspection.file_rows``."""
        raise UsageError(f"{files.volumes.path_of(row)} is a log file; find its records through its commits")
