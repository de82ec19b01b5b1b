"""Opening files that are to be regular ones: a FIFO would block, and a device or a sparse file fill the memory."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a file that exists; returns its descriptor, which exec does not inherit.

    Raises:
        OSError: It cannot be opened; EISDIR and EINVAL: it is a directory, or something else that is no regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # without effect on a regular file
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _irregular(path, os.stat(path).st_mode) from error
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _irregular(path, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str, bytes_max: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        bytes_max: The most bytes that it may have.

    Raises:
        OSError: As ``open_regular``; EFBIG: it has more bytes, of which none were read.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > bytes_max:
            raise OSError(errno.EFBIG, f"has {size} bytes, and at most {bytes_max} are read", path)
        return file.read(size)


def _irregular(path: str, mode: int) -> OSError:
    if stat.S_ISDIR(mode):
        return IsADirectoryError(errno.EISDIR, "a directory, and not a file", path)
    kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
    return OSError(errno.EINVAL, f"{kind}, and not a regular file", path)
