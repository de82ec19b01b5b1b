"""Permissions of the files of a store or of an LMDB metadata store.

The directories and files that pybk makes are accessible to their owner alone (directories 0700, files 0600), or to the
members of one group as well (directories 2770, files 0660; the setgid bit lets new files inherit the group). The
process's umask has no effect on them. The mode of the lock file records which of the two applies: versions without
groups never made it group-writable, so a group-writable lock file belongs to a shared store, and later opens need not
name the group again.

Only ``differences`` with ``change=True`` changes the mode of a file that exists.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pybk.errors import UsageError

_OTHERS: Final = 0o007
_NOT_OWNER: Final = 0o077
_GID_MAX: Final = (1 << 32) - 2


class Access(NamedTuple):
    """The owner and group permissions with which directories and files are made.

    Attributes:
        gid: The group whose members have access as well; None gives access to the owner alone.
    """

    gid: int | None = None

    @property
    def directory_mode(self) -> int:
        """Mode of new directories."""
        return 0o700 if self.gid is None else 0o2770

    @property
    def file_mode(self) -> int:
        """Mode of new files."""
        return 0o600 if self.gid is None else 0o660

    def make_directory(self, path: str) -> None:
        """Make a directory with these permissions; its parent must exist.

        Raises:
            OSError: It exists, or cannot be made.
        """
        os.mkdir(path, 0o700)
        if self.gid is not None:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self._share(fd, self.directory_mode)
            finally:
                os.close(fd)

    def create_file(self, path: str) -> int:
        """Make a file with these permissions, open it for reading and writing, and return the descriptor.

        Raises:
            OSError: It exists, or cannot be made.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self.file_mode)
        try:
            self.share_file(fd)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return fd

    def open_or_create(self, path: str) -> int:
        """Open a file for reading and writing and return the descriptor; make the file if it is missing.

        A file that exists keeps its mode.

        Raises:
            OSError: It can be neither opened nor made.
        """
        while True:
            try:
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                try:
                    return self.create_file(path)
                except FileExistsError:
                    if os.path.islink(path):  # a dangling link: a retry would never succeed
                        raise

    def share_file(self, fd: int) -> None:
        """Give the group of this access, if it has one, to a file that was made with ``file_mode``."""
        self._share(fd, self.file_mode)

    def _share(self, fd: int, mode: int) -> None:
        """Set the group and mode of a new file or directory, because the umask may have removed bits."""
        if self.gid is not None:
            os.chown(fd, -1, self.gid)
            os.chmod(fd, mode)

    def wanted_mode(self, mode: int) -> int:
        """Return the permission bits that a file or directory of mode ``mode`` should have.

        For private access, bits of the owner that are missing in ``mode`` stay missing.
        """
        bits = stat.S_IMODE(mode)
        if self.gid is not None:
            return self.directory_mode if stat.S_ISDIR(mode) else self.file_mode
        return bits & ~_NOT_OWNER if stat.S_ISDIR(mode) else bits & 0o600

    def is_exceeded_by(self, mode: int, gid: int) -> bool:
        """Return whether a mode and group give access to more users than those of new files do."""
        return bool(mode & (_OTHERS if self.gid is not None and gid == self.gid else _NOT_OWNER))


PRIVATE: Final = Access()
"""Access for the owner alone."""


def access_of(lock: str, group: str | int | None) -> Access:
    """Return the access with which files next to a lock file are to be made.

    Args:
        lock: The lock file of a store or a metadata store; it may be missing.
        group: A group's name or number; None keeps an existing store as it is, and makes a new one private.

    Raises:
        UsageError: The group does not exist, or this process is not a member of it.
    """
    if group is not None:
        return Access(_usable_group(group_id(group), lock))
    try:
        found = os.stat(lock)
    except OSError:  # usually the store does not exist yet; opening the lock file reports any other error
        return PRIVATE
    return Access(_usable_group(found.st_gid, lock)) if found.st_mode & stat.S_IWGRP else PRIVATE


def group_id(group: str | int) -> int:
    """Return the number of a group.

    Raises:
        UsageError: There is no such group.
    """
    if isinstance(group, int):
        if isinstance(group, bool) or not 0 <= group <= _GID_MAX:
            raise UsageError(f"group is {group!r}; it takes a group's name, or a number from 0 to {_GID_MAX}")
        return group
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):
        if group.isascii() and group.isdecimal() and int(group) <= _GID_MAX:
            return int(group)
        raise UsageError(
            f"there is no group {group!r:.100} on this host; name one that `getent group` lists, or a number"
        ) from None


def group_name(gid: int) -> str:
    """Return the name of a group, or its number if it has no name."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _usable_group(gid: int, lock: str) -> int:
    """Return a group's number; raise UsageError if this process may not give files to the group."""
    if os.geteuid() != 0 and gid != os.getegid() and gid not in os.getgroups():
        raise UsageError(
            f"{os.path.dirname(lock)}: user {_user_name(os.geteuid())} is not a member of group {group_name(gid)}, so "
            "it cannot share files with that group; add the user to the group and log in again, or name another group"
        )
    return gid


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def paths_too_open(access: Access, paths: Iterable[str]) -> list[str]:
    """Return the paths, each with its mode, that are accessible to more users than ``access`` allows.

    Missing paths are left out.

    Raises:
        OSError: The mode of a path cannot be read.
    """
    found = []
    for path in paths:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            continue
        if access.is_exceeded_by(status.st_mode, status.st_gid):
            found.append(f"{path} ({stat.S_IMODE(status.st_mode):04o})")
    return found


def excess_warning(access: Access, place: str, exceeded: list[str]) -> str:
    """Return the warning that an open logs about the result of ``paths_too_open``; it names the command to run."""
    whom = "their owner" if access.gid is None else f"group {group_name(access.gid)}"
    group = "" if access.gid is None else f" --group {group_name(access.gid)}"
    return (
        f"{place}: open to more users than {whom}: {', '.join(exceeded)}; an open changes no modes, "
        f"`pybk permissions {place} --narrow{group}` narrows these and all files of the store"
    )


# ---- showing and narrowing ---------------------------------------------------------------------------------------


_MAIN_NAMES: Final = re.compile(r"(LOCK|cookie|directories|watermark|catalog-[0-9a-f]{16}|reserve-catalog)(\..*)?")
_TIER_NAMES: Final = re.compile(
    r"(cookie(\..*)?|[0-9a-f]{16}\.[a-z]+(\..*)?|(index|entries)([.-].*)?|reserve-([0-9]+|pack))"
)
_LMDB_NAMES: Final = re.compile(r"(data|lock)\.mdb")
_METADATA_NAMES: Final = re.compile(r"(data|lock)\.mdb|sessions")


class PermissionDifference(NamedTuple):
    """A file or directory whose permissions differ from the wanted ones.

    Attributes:
        path: The path.
        mode: Its permission bits.
        wanted: The bits that it should have.
        group: The name of its group.
        problem: Why the permissions could not be changed; None if they were changed, or were only compared.
    """

    path: str
    mode: int
    wanted: int
    group: str
    problem: str | None = None


def store_paths(root: str, tiers: Iterable[str]) -> Iterator[str]:
    """Yield every directory and file that pybk made for a store; files with other names are left out."""
    yield root
    yield from _named(root, _MAIN_NAMES)
    for tier in tiers:
        yield tier
        for path in _named(tier, _TIER_NAMES):
            yield path
            if os.path.isdir(path) and not os.path.islink(path):
                yield from _named(path, _LMDB_NAMES)


def metadata_paths(directory: str) -> Iterator[str]:
    """Yield every directory and file of an LMDB metadata store."""
    yield directory
    yield from _named(directory, _METADATA_NAMES)


def _named(directory: str, names: re.Pattern[str]) -> Iterator[str]:
    for name in sorted(os.listdir(directory)):
        if names.fullmatch(name):
            yield os.path.join(directory, name)


def differences(access: Access, paths: Iterable[str], *, change: bool = False) -> list[PermissionDifference]:
    """Return the paths whose permissions differ from ``access``.

    Args:
        access: The wanted access.
        paths: The paths; the first is the main directory, whose owner should own all others.
        change: Change the permissions of each path to the wanted ones. A symbolic link, a file with several hard links
            and a file of another owner are not changed; they, and paths that cannot be changed, are returned with a
            ``problem``.

    Raises:
        OSError: A directory cannot be listed.
    """
    found = []
    owner: int | None = None
    for path in paths:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue  # removed since it was listed
        owner = status.st_uid if owner is None else owner
        if stat.S_ISLNK(status.st_mode):
            found.append(
                PermissionDifference(path, stat.S_IMODE(status.st_mode), 0, "", "a symbolic link is not followed")
            )
            continue
        wanted = access.wanted_mode(status.st_mode)
        mode = stat.S_IMODE(status.st_mode)
        if mode == wanted and access.gid in (None, status.st_gid):
            continue
        problem = _change(path, status, access, owner) if change else None
        found.append(PermissionDifference(path, mode, wanted, group_name(status.st_gid), problem))
    return found


def _change(path: str, status: os.stat_result, access: Access, owner: int) -> str | None:
    """Change a path's permissions to the wanted ones; return the problem, None if there is none."""
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        return f"it has {status.st_nlink} hard links, so other paths lead to the same file; copy it first"
    if access.gid is None and status.st_uid != owner:
        return f"it belongs to user {_user_name(status.st_uid)}, not to {_user_name(owner)}; change its owner first"
    try:
        # A descriptor ensures that the file that was examined is changed; O_PATH works without the right to read it.
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            opened = os.fstat(fd)
            if not os.path.samestat(opened, status) or opened.st_nlink != status.st_nlink:
                return "it was replaced meanwhile; run the command again"
            name = f"/proc/self/fd/{fd}"
            if access.gid is not None and status.st_gid != access.gid:
                os.chown(name, -1, access.gid)
            os.chmod(name, access.wanted_mode(status.st_mode))
        finally:
            os.close(fd)
    except OSError as error:
        owned = "; run the command as its owner" if error.errno in (errno.EPERM, errno.EACCES) else ""
        return f"{error.strerror}{owned}"
    return None
