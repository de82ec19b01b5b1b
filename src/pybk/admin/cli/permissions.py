"""The command ``pybk permissions``: show the files that other users may use, or narrow that.

PATH is a store or the URL of a metadata store.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

from pybk.admin.cli.command_parser import Verbs, is_url
from pybk.admin.cli.output import print_json
from pybk.deferral import LateModule
from pybk.errors import CookieError, MetadataError, UsageError
from pybk.metadata.lmdb_store import HOST_FILE, location_of
from pybk.metadata.url import open_metadata, parse_url
from pybk.storage.directories import find_cookie
from pybk.storage.io.filesystem import OsFileSystem
from pybk.storage.io.permissions import (
    PRIVATE,
    Access,
    PermissionDifference,
    access_of,
    differences,
    group_id,
    group_name,
    metadata_paths,
    store_paths,
)
from pybk.storage.volumes import load_directories

if TYPE_CHECKING:
    from pybk.metadata import zookeeper_store
else:
    zookeeper_store = LateModule("pybk.metadata.zookeeper_store")  # needs an optional package

_DIFFERS: Final = 1


def _permissions(parsed: argparse.Namespace) -> int:
    """Run the command; the exit status is 0 if all permissions are as wanted, or were made so, and 1 otherwise.

    The wanted permissions are those of ``--group``. Without it, ``--narrow`` makes everything private; without
    ``--narrow``, they are those that an open would give to new files.
    """
    if is_url(parsed.path) and parse_url(parsed.path).parts.scheme != "lmdb":
        return _znodes(parsed)
    if is_url(parsed.path):
        location = location_of(parse_url(parsed.path))
        directory, group, lock = location.path, parsed.group or location.group, HOST_FILE
        if not os.path.exists(os.path.join(directory, HOST_FILE)):
            raise MetadataError(f"there is no metadata store at {parsed.path}; check the URL")
    else:
        directory, group, lock = os.path.abspath(parsed.path), parsed.group, "LOCK"
    lock = os.path.join(directory, lock)
    if parsed.narrow:
        access = PRIVATE if group is None else Access(group_id(group))
    else:
        access = access_of(lock, None) if group is None else Access(group_id(group))
    if is_url(parsed.path):
        found = differences(access, metadata_paths(directory), change=parsed.narrow)
    else:
        with _closed_store(directory, lock, access, locked=parsed.narrow) as paths:
            found = differences(access, paths, change=parsed.narrow)
    problems = [one for one in found if one.problem is not None]
    shared = None if access.gid is None else group_name(access.gid)
    if parsed.json:
        rows = [{**one._asdict(), "mode": f"{one.mode:04o}", "wanted": f"{one.wanted:04o}"} for one in found]
        print_json({"path": directory, "group": shared, "narrowed": parsed.narrow, "differences": rows})
    else:
        _print(found, parsed.path, shared, narrowed=parsed.narrow)
    return _DIFFERS if problems or (found and not parsed.narrow) else 0


def _znodes(parsed: argparse.Namespace) -> int:
    """Run the command for a ZooKeeper metadata store."""
    if parsed.group is not None:
        raise UsageError("--group is for files; name the owner of the znodes in the URL, by auth_file=FILE or acl=x509")
    with closing(open_metadata(parsed.path, create=False)) as store:
        if not isinstance(store, zookeeper_store.ZooKeeperMetadataStore) or not store.access.identity:
            raise UsageError(
                "a URL without auth_file or acl names no owner, and the znodes are for everybody who reaches the "
                "servers; name the owner"
            )
        found = store.foreign_znodes(change=parsed.narrow)
        owner = store.access.identity
    problems = [one for one in found if one.problem is not None]
    if parsed.json:
        rows = [one._asdict() for one in found]
        print_json({"path": parsed.path, "owner": owner, "narrowed": parsed.narrow, "differences": rows})
    else:
        for one in found:
            done = "changed" if parsed.narrow and one.problem is None else one.problem or "differs"
            print(f"{one.path}: for {one.access}; {done}")
        advice = "" if parsed.narrow or not found else f"; change them with `pybk permissions '{parsed.path}' --narrow`"
        count = f"{len(found)} znodes are not" if found else "all znodes are"
        if parsed.narrow and found:
            count = f"{len(found) - len(problems)} changed, {len(problems)} not; the znodes are"
        print(f"{parsed.path}: {count} for {owner} alone{advice}")
    return _DIFFERS if problems or (found and not parsed.narrow) else 0


@contextmanager
def _closed_store(root: str, lock: str, access: Access, *, locked: bool) -> Iterator[list[str]]:
    """Provide the paths of a store; with ``locked`` under its lock, so that no process creates files meanwhile."""
    fs = OsFileSystem(access)
    if find_cookie(fs, root, None) is None:
        raise CookieError(f"there is no store at {root}; name the directory that LedgerManager.open was given")
    taken = fs.lock(lock) if locked else None
    try:
        yield list(store_paths(root, [directory.path for directory in load_directories(fs, root)]))
    finally:
        if taken is not None:
            taken.release()


def _print(found: list[PermissionDifference], path: str, group: str | None, *, narrowed: bool) -> None:
    users = "their owner alone" if group is None else f"group {group}"
    for one in found:
        done = "changed to" if narrowed and one.problem is None else "should be"
        wanted = f"{done} {one.wanted:04o}" + ("" if group is None else f" of group {group}")
        outcome = wanted if one.problem is None else f"not changed: {one.problem}"
        print(f"{one.path}: {one.mode:04o} of group {one.group or '?'}, {outcome}")
    changed = sum(one.problem is None for one in found)
    if not found:
        print(f"{path}: all files are for {users}")
    elif narrowed:
        print(f"{path}: {changed} changed, {len(found) - changed} not; the files are for {users}")
    else:
        option = "" if group is None else f" --group {group}"
        print(f"{path}: {len(found)} differ; change them with `pybk permissions {path} --narrow{option}`")


VERBS: Final[Verbs] = {"": _permissions}
"""``pybk permissions``, which has no verbs."""
