"""A simulated disk: the package's two seams in memory, with power failures, kills and errors at every operation."""

from __future__ import annotations

from tests.simdisk.disk import SimFileSystem
from tests.simdisk.environment import SimEnvironment
from tests.simdisk.faults import READING, WRITING, SimCrash, stopping

__all__ = ["READING", "WRITING", "SimCrash", "SimEnvironment", "SimFileSystem", "stopping"]
