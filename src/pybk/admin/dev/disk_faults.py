"""Faults of a bookie's disks, made in its own process, because slow and full devices cannot be made without root.

``python -m pybk.admin.dev.disk_faults FILE ARGUMENTS`` is ``pybk ARGUMENTS``, whose file system obeys ``FILE``: JSON,
which may change while the process runs. Each durable write takes ``slow_ms`` longer, and directories below a path in
``full`` behave as on a full device: they have no free byte and take no new file. Without the file there are no faults.
LMDB, which has the index and the SSD tier, makes its own calls of the system, so its writes are not slow.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from pybk.admin.cli import main
from pybk.storage.io.filesystem import OsFile, OsFileSystem


@dataclass(frozen=True, slots=True)
class DiskFaults:
    """The faults of a bookie's disks.

    Attributes:
        slow_ms: The additional time of each durable write, milliseconds.
        full: Directories on devices that are full.
    """

    slow_ms: float = 0.0
    full: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str) -> DiskFaults:
        """Return the faults in a file; none without one."""
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
        except FileNotFoundError:
            return cls()
        return cls(found["slow_ms"], tuple(found["full"]))

    def write(self, path: str) -> None:
        """Write the faults; the bookie follows them at its next write. Without any, the file is removed."""
        if self == DiskFaults():
            if os.path.exists(path):
                os.unlink(path)
            return
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        os.replace(f"{path}.new", path)

    def fills(self, path: str) -> bool:
        """Return whether a path lies on a full device."""
        return any(path == each or path.startswith(f"{each}/") for each in self.full)


class _Disk:
    """Reads the file of faults whenever it has changed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._faults = DiskFaults()

    def faults(self) -> DiskFaults:
        try:
            status = os.stat(self._path)
            seen = (status.st_ino, status.st_mtime_ns)
        except FileNotFoundError:
            seen = None
        if seen != self._seen:
            self._faults = DiskFaults.read(self._path)
            self._seen = seen
        return self._faults


def obey(path: str) -> None:
    """Make the file system of this process obey a file of faults from now on."""
    disk = _Disk(path)
    create, write, sync, free = OsFileSystem.create, OsFile.write_durable, OsFile.sync, OsFileSystem.free_bytes

    def slowly(call: Any) -> Any:
        def slow(file: OsFile, *arguments: Any) -> None:
            if disk.faults().slow_ms:
                time.sleep(disk.faults().slow_ms / 1e3)
            call(file, *arguments)

        return slow

    def create_unless_full(system: OsFileSystem, path: str, size: int) -> OsFile:
        if disk.faults().fills(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return create(system, path, size)

    def free_bytes(system: OsFileSystem, path: str) -> int:
        return 0 if disk.faults().fills(path) else free(system, path)

    for owner, name, value in (
        (OsFile, "write_durable", slowly(write)),
        (OsFile, "sync", slowly(sync)),
        (OsFileSystem, "create", create_unless_full),
        (OsFileSystem, "free_bytes", free_bytes),
    ):
        setattr(owner, name, value)


if __name__ == "__main__":
    obey(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
