"""Exports, checks and restores a cluster's metadata, and rebuilds them from bookies' directories."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from pybk.credentials import ClusterSecret
from pybk.errors import UsageError
from pybk.manager.arguments import path_of, progress_of
from pybk.metadata.reports import MetadataCheckReport, MetadataExportReport, MetadataRestoreReport
from pybk.operations import metadata_restore
from pybk.threads.call_threads import asyncio_form
from pybk.values import flag_of

# ---- export and check ------------------------------------------------------------------------------------------------


def export_metadata(
    url: str,
    path: str | os.PathLike[str],
    *,
    cluster_secret: ClusterSecret | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> MetadataExportReport:
    """Write a cluster's metadata to a new file: every key that is not leased, as it is stored, with its MAC.

    From LMDB it is one snapshot. From ZooKeeper it is read in pages, so changes that are made meanwhile may be in it or
    not; the ids are read last. It does not have the cluster's secret, but has the salt of the ledgers' passwords.

    Args:
        url: The URL of the metadata.
        path: The file, which must not exist. Its owner alone can read it.
        cluster_secret: The cluster's secret, None for none; a wrong one is refused.
        progress: Called with the number of values written, as both arguments, because the total is not known.

    Raises:
        UsageError: The file exists.
        MetadataError, OSError: The store cannot be read, or the file cannot be written; no file is left.

    Durability: The file is durable on return.
    Threads: Any.
    """
    return metadata_restore.export(url, path_of(path), cluster_secret, progress_of(progress))


export_metadata_async = asyncio_form(export_metadata)


def check_metadata(
    source: str | os.PathLike[str],
    *,
    cluster_secret: ClusterSecret | None = None,
    repair: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> MetadataCheckReport:
    """Decode and verify everything in a cluster's metadata store, or in an export of it.

    Args:
        source: The URL of the store, or the path of an export.
        cluster_secret: The cluster's secret, None for none.
        repair: Whether to replace damaged values of deleted ids first, which is possible while the cluster is in use;
            their ids without a ledger then count as deleted. False changes nothing.
        progress: Called with the number of values checked, as both arguments.

    Returns:
        The problems, none for sound metadata, and the numbers of checked values.

    Raises:
        MetadataForgedError: The secret is not the cluster's.
        CorruptError: The file is not a whole export.
        MetadataError: The store cannot be read, or there is no cluster.
        UsageError: ``repair`` is True, and ``source`` is an export.

    Durability: Repaired values are durable on return.
    Threads: Any.
    """
    repair = flag_of(repair, "repair")
    return metadata_restore.check(path_of(source), cluster_secret, progress_of(progress), repair=repair)


check_metadata_async = asyncio_form(check_metadata)


# ---- restore and rebuild ---------------------------------------------------------------------------------------------


def restore_metadata(
    url: str,
    source: str | os.PathLike[str] | None = None,
    *,
    cluster_secret: ClusterSecret | None = None,
    directories: Sequence[str | os.PathLike[str]] = (),
    all_directories: bool = False,
    new_epoch: bool = True,
    overwrite: bool = False,
    write: bool = False,
) -> MetadataRestoreReport:
    """Restore an export to an empty metadata store, or accept a store that was put back to an older state as it is.

    Every bookie and every client must be closed. Afterwards new ids are above all known ones, and bookies accept the
    store. At its start each bookie fences the ledgers that are not closed. Unless all directories were given, it also
    puts all its ledgers in limbo, as after a loss, because the restored ensembles may be outdated.

    Args:
        url: The URL of the metadata store to restore to.
        source: The export; None accepts the contents of the store.
        cluster_secret: The cluster's secret, None for none.
        directories: Directories of bookies, for ledgers and entries that are newer than the export; as for
            ``rebuild_metadata``.
        all_directories: As for ``rebuild_metadata``.
        new_epoch: False restores an export that is known to be the newest state, such as to move a cluster to another
            store: ids and epoch stay, no ledger is fenced, and bookies still refuse the store if it is older.
        overwrite: Whether to remove the contents of the store before an export is restored.
        write: Whether to make the changes; False returns the changes that would be made, and makes none.

    Returns:
        The changes that were made or would be.

    Raises:
        SafetyCheckError: Bookies are registered in the store, and ``write`` is True; nothing was written.
        UsageError: The store is not empty and ``overwrite`` is False, or an argument is wrong.
        MetadataForgedError: The secret is not that of the export, the store or the directories.
        CorruptError: The file is not a whole export.
        CookieError, StoreLockedError: As for ``rebuild_metadata``.

    Durability: On return everything is durable. After a stop the store cannot be used until this was repeated.
    Threads: Any.
    """
    flags = _flags(all_directories=all_directories, new_epoch=new_epoch, overwrite=overwrite, write=write)
    if not flags["new_epoch"] and (source is None or directories):
        raise UsageError("new_epoch=False restores an export unchanged: give source, and no directories")
    export = None if source is None else path_of(source)
    with metadata_restore.MetadataRestore(
        url, cluster_secret, export, [path_of(each) for each in directories], **flags
    ) as restore:
        return restore.run()


restore_metadata_async = asyncio_form(restore_metadata)


def rebuild_metadata(
    url: str,
    directories: Sequence[str | os.PathLike[str]],
    *,
    cluster_secret: ClusterSecret | None = None,
    all_directories: bool = False,
    write: bool = False,
) -> MetadataRestoreReport:
    """Rebuild the metadata of a cluster from the directories of its bookies, in an empty or an incomplete store.

    Every bookie and every client must be closed. Ledgers that the store lacks are made again, in recovery: the next
    client that opens one with its password finds its end. With ``all_directories``, ensembles of ledgers in the store
    are corrected as well, if bookies lack entries that they should hold by the metadata.

    Args:
        url: The URL of the metadata store.
        directories: Directories of bookies of one cluster.
        cluster_secret: The cluster's secret, None for none.
        all_directories: Whether all other directories are lost for good. If not, bookies put all their ledgers in limbo
            when they start, and no recovery can decide, until this was repeated with all directories.
        write: Whether to make the changes; False returns the changes that would be made, and makes none.

    Returns:
        The changes that were made or would be, and the ledgers and entries that cannot be brought back.

    Raises:
        SafetyCheckError: As for ``restore_metadata``.
        UsageError: No directory is given, or they are of several clusters.
        MetadataForgedError: The secret is not the cluster's.
        StoreLockedError: A bookie serves from one of the directories.
        CookieError: A directory is not a bookie's, is of another cluster than the store's, or of a removed bookie.
        CorruptError: A directory is damaged.

    Durability: As for ``restore_metadata``.
    Threads: Any.
    Cost: Opens every directory as a start does. Memory grows with the number of ledgers and their extents.
    """
    flags = _flags(all_directories=all_directories, new_epoch=True, overwrite=False, write=write)
    if isinstance(directories, str | bytes | os.PathLike) or not directories:
        raise UsageError(f"directories is {directories!r:.100}; it takes a list of bookies' directories")
    paths = [path_of(each) for each in directories]
    with metadata_restore.MetadataRestore(url, cluster_secret, None, paths, **flags) as restore:
        return restore.run()


rebuild_metadata_async = asyncio_form(rebuild_metadata)


# ---- the end ---------------------------------------------------------------------------------------------------------


def destroy_metadata(url: str, cluster_id: str, *, cluster_secret: ClusterSecret | None = None) -> int:
    """Delete all metadata of a cluster for good: none of its ledgers can be found any more.

    The directories of its bookies stay, and no bookie starts in them with a cluster that is made later.

    Args:
        url: The URL of the metadata.
        cluster_id: The id of the cluster in hexadecimal, which guards against deleting another one.
        cluster_secret: The cluster's secret, None for none.

    Returns:
        The number of values that were deleted.

    Raises:
        SafetyCheckError: A bookie is registered there; nothing was deleted.
        UsageError: The store has another cluster; nothing was deleted.
        MetadataForgedError: The secret is not the cluster's.
        MetadataError: The store cannot be reached, or there is no cluster; or another process changed a value
            meanwhile, and a part was deleted: repeat it.

    Durability: The deletion is durable on return; if it was stopped, it can be repeated.
    Threads: Any.
    """
    return metadata_restore.destroy(url, cluster_secret, cluster_id)


destroy_metadata_async = asyncio_form(destroy_metadata)


def _flags(**flags: bool) -> dict[str, bool]:
    for name, value in flags.items():
        flag_of(value, name)
    return flags
