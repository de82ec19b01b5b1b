"""Where the directories of tests lie: in memory, where a sync takes no time, or on the disk.

Most files keep theirs in memory. On the disk are those of tests of the storage, which are about what a disk does, and
of the files that the seed of the sample draws, one of ``ONE_IN``, so that tests meet each other at the times that users
have there. Everything is on the disk where all cases are tried, where memory does not do, and where the environment's
``TMPDIR`` or the option ``--basetemp`` says where directories lie.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.sampling import all_are_tried, sample

MEMORY: Final = Path("/dev/shm")
ONE_IN: Final = 4
OF_DISKS: Final = "tests/storage/"
_FREE_BYTES: Final = 4 << 30
"""Many times what the directories of four workers hold at once."""
DISK: Final = "PYBK_TEST_DISK"
"""The environment's variable with the directory on the disk, for workers; set where directories lie in memory."""


def choose(config: pytest.Config) -> None:
    """Have directories of this process and of those that it starts lie in memory, if nothing says that they do not."""
    if DISK in os.environ or os.environ.get("TMPDIR") or config.option.basetemp is not None or all_are_tried():
        return
    if memory_does():
        os.environ[DISK] = tempfile.gettempdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def described() -> str:
    """Return where directories lie, for the head of a run."""
    if DISK not in os.environ:
        return f"directories: in {tempfile.gettempdir()}"
    return f"directories: in {MEMORY}, of some files in {_disk()} (of all files: `TMPDIR={_disk()} make test`)"


def _disk() -> str:
    return os.environ[DISK]


def memory_does() -> bool:
    """Return whether there is enough memory, and programs that tests write there can be run."""
    with suppress(OSError, StopIteration, ValueError):
        found = os.statvfs(MEMORY)
        free = found.f_bavail * found.f_frsize
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        return min(free, available // 2) >= _FREE_BYTES and not found.f_flag & os.ST_NOEXEC
    return False


def on_the_disk(file: str) -> bool:
    """Return whether this run has the directories of a file's tests on the disk, and others in memory."""
    drawn = sample(f"disk {file}", range(ONE_IN), ONE_IN) == [0]
    return DISK in os.environ and (drawn or file.startswith(OF_DISKS))


@contextmanager
def of_the_disk() -> Iterator[Path]:
    """Have directories lie on the disk; yield a new one there, which the caller removes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", _disk())
        patch.setattr(tempfile, "tempdir", _disk())
        yield Path(tempfile.mkdtemp(prefix="pytest-of-one-file-")).resolve()
