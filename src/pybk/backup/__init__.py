"""Backups of embedded stores, of bookies' directories and of a cluster's ledgers: made, verified, pruned and restored.

``docs/admin/backup.md`` says what is in a backup and what is not; ``docs/reference/format.md`` has its bytes.
``backing_up`` and ``restoring`` have the theory of operation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

from pybk.backup.backing_up import BackupReport, BackupRun
from pybk.backup.chain import BackupRunInfo, existing_chain
from pybk.backup.pruning import PruneReport, Pruning
from pybk.backup.restoring import RestoreReport, restore_store
from pybk.backup.restoring_ledgers import LedgersRestore
from pybk.backup.source import Source, StoreSource
from pybk.backup.target import Target
from pybk.backup.target_url import open_target
from pybk.backup.verifying import BackupCheckReport, verify_target
from pybk.config import StoreConfig
from pybk.credentials import Passwords, without_credentials
from pybk.deferral import LateModule
from pybk.errors import UsageError
from pybk.manager.arguments import existing_ids, path_of, progress_of, whole_from
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.manager.local_backend import StoreBackend
from pybk.storage.readonly import ReadOnlyStore
from pybk.threads.call_threads import asyncio_form
from pybk.values import flag_of

if TYPE_CHECKING:
    from pybk.backup import cluster_source
else:
    cluster_source = LateModule("pybk.backup.cluster_source")  # an embedded store does not need ZeroMQ


def back_up(
    source: str | os.PathLike[str] | LedgerManager,
    target: str | os.PathLike[str],
    *,
    passwords: Passwords | None = None,
    storage_options: Mapping[str, Any] | None = None,
    skip_damaged: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> BackupReport:
    """Back up a store, or the ledgers of a cluster; the first call copies all entries, later ones the new entries.

    Nothing is locked: writers continue. The backup has everything that was acknowledged before the call; for a store it
    has the state after one commit. It has payloads, but no passwords and no keys.

    Args:
        source: The directory of a store or bookie, whether or not another process has it open; or a manager of this
            process: of an embedded store, or of a cluster, whose ledgers are then backed up.
        target: An empty or new directory, or that of the backup to continue; or a URL of fsspec.
        passwords: Passwords with which the authentication codes of HMAC_SHA256 entries are checked; other digests, and
            all checksums, are checked without them. Open ledgers of a cluster are copied only with their password.
        storage_options: The options of fsspec for a URL.
        skip_damaged: Whether a ledger of a store that has a damaged entry is copied up to the entry before it, and all
            other ledgers whole; the backup and ``left_out`` name the missing entries. If False, a damaged entry ends
            the run.
        dry_run: Whether to return the report without writing anything.
        progress: Called in the calling thread with the payload bytes copied so far and those to copy in all.

    Returns:
        What was copied.

    Raises:
        UsageError: The target is not empty and not a backup, or an argument is wrong.
        CookieError: The store does not exist; or the backup is that of another store or incarnation, or the store was
            put back to an older state than the backup has.
        StoreLockedError: Another backup is being made in the directory.
        StorageRefusedError: Another backup is being made at the URL; or ledgers are deleted faster than copied.
        CorruptError, DigestMismatchError: An entry or the backup is damaged; the backup has its earlier state. The
            error names the ledger and the entry.
        StorageError: The target failed; the next run continues with what was written.

    Durability: The run is durable on return. After a stop at any point the backup has its earlier state.
    Threads: Any; one backup of a target at a time.
    Cost: Reads the new entries, the state of every ledger, and the manifests. Memory: three packs of 32 MiB, and 2 KiB
        for each ledger.
    """
    flag_of(dry_run, "dry_run")
    flag_of(skip_damaged, "skip_damaged")
    known, report_to = _passwords_of(passwords), progress_of(progress)
    with _source_of(source, known) as opened, _target_of(target, storage_options, writes=not dry_run) as kept:
        run = BackupRun(opened, kept, known, report_to, skip_damaged=skip_damaged)
        return run.plan() if dry_run else run.run()


back_up_async = asyncio_form(back_up)


def verify_backup(
    target: str | os.PathLike[str],
    *,
    passwords: Passwords | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BackupCheckReport:
    """Check every manifest, pack and entry that a run of a backup has; change nothing.

    Args:
        target: The directory or the URL of fsspec.
        passwords: Passwords with which the authentication codes of HMAC_SHA256 entries, and seals, are checked.
        storage_options: The options of fsspec for a URL.
        progress: Called in the calling thread with the bytes of packs read so far and those to read in all.

    Returns:
        The problems, none for a sound backup. ``complete`` is False if a password was missing.

    Raises:
        UsageError: The target has no backup, or an argument is wrong.
        CorruptError: A manifest is damaged or missing; the content of the backup is unknown then.
        StorageError: The target failed.

    Threads: Any.
    Cost: Reads the whole backup once.
    """
    known, report_to = _passwords_of(passwords), progress_of(progress)
    with _target_of(target, storage_options, writes=False) as kept:
        return verify_target(kept, known, report_to)


verify_backup_async = asyncio_form(verify_backup)


def list_backup_runs(
    target: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> tuple[BackupRunInfo, ...]:
    """Return the runs of a backup, the oldest first; each can be restored. Only manifests are read, not packs.

    Args:
        target: The directory or the URL of fsspec.
        storage_options: The options of fsspec for a URL.

    Raises:
        UsageError: The target has no backup, or an argument is wrong.
        CorruptError: A manifest is damaged or missing.
        StorageError: The target failed.

    Threads: Any.
    """
    with _target_of(target, storage_options, writes=False) as kept:
        return tuple(existing_chain(kept).runs)


list_backup_runs_async = asyncio_form(list_backup_runs)


def prune_backup(
    target: str | os.PathLike[str],
    *,
    keep: int,
    keep_seconds: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> PruneReport:
    """Remove the oldest runs of a backup, and the packs that no other run needs.

    The runs that are kept stay as they are. A pack is kept as long as one of them needs an entry in it.

    Args:
        target: The directory or the URL of fsspec.
        keep: The number of last runs that are kept, at least 1.
        keep_seconds: The age in seconds up to which runs are kept in addition, with all later runs.
        storage_options: The options of fsspec for a URL.
        dry_run: Whether to return the report without changing anything.

    Returns:
        The runs and packs that were removed, and the runs that are kept.

    Raises:
        UsageError: The target has no backup, or an argument is wrong.
        StoreLockedError: A backup is being made in the directory.
        CorruptError: A manifest is damaged or missing; nothing was changed.
        StorageError: The target failed; call it again.

    Durability: The removal is one step. After a stop at any point the backup has all runs, or those that are kept; the
        next call, or the next run, removes the remaining files of the others.
    Threads: Any. Do not remove a run that is being restored or verified, because the restore or check then fails.
    Cost: Reads the manifests, but no packs.
    """
    flag_of(dry_run, "dry_run")
    kept_runs = whole_from(keep, 1, "keep", "how many runs are kept")
    seconds = None if keep_seconds is None else _seconds_of(keep_seconds)
    with _target_of(target, storage_options, writes=False) as kept:
        pruning = Pruning(kept, keep=kept_runs, keep_seconds=seconds)  # before a missing directory is made
        if dry_run:
            return pruning.plan()
    with _target_of(target, storage_options, writes=True) as kept:
        return Pruning(kept, keep=kept_runs, keep_seconds=seconds).run()


prune_backup_async = asyncio_form(prune_backup)


def restore_backup(
    target: str | os.PathLike[str],
    destination: str | os.PathLike[str] | LedgerManager,
    *,
    run: int | None = None,
    passwords: Passwords | None = None,
    new_ids: bool = False,
    ledgers: Iterable[int] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> RestoreReport:
    """Restore a store to a new directory, or the ledgers of a cluster to a cluster.

    The store keeps its id and its salts, so passwords open its ledgers, and gets a new incarnation. If it is a
    bookie's, the bookie starts with all its ledgers in limbo; from then on its former directory is refused. Ledgers of
    a cluster are written again and closed; each needs its password, and those without it are left out.

    Args:
        target: The backup: a directory or a URL of fsspec.
        destination: The directory, which must be empty or missing; for a cluster's ledgers, a manager that is connected
            to a cluster.
        run: The run to restore; None for the last one.
        passwords: Passwords with which the authentication codes of HMAC_SHA256 entries, and seals, are checked first.
        new_ids: Whether ledgers of a cluster get new ids; if False, they get their former ids, which must be unused.
        ledgers: The ids of the ledgers of a cluster to restore; None for all.
        storage_options: The options of fsspec for a URL.
        dry_run: Whether to return the report without reading packs or writing anything.
        progress: Called in the calling thread with the bytes restored so far and those to restore in all.

    Returns:
        What was restored.

    Raises:
        UsageError: The directory is not empty, the backup, run or ledger does not exist, or an argument is wrong.
        CorruptError, DigestMismatchError, SealMismatchError: The backup is damaged or was changed.
        StoreLockedError: Another restore to this directory is under way.
        StorageError: A device or the target failed.

    After an error, and after a stop at any point, ``destination`` does not exist or is empty.

    Durability: The store is durable on return.
    Threads: Any.
    Cost: Reads the backup once, and writes each entry as an append does.
    """
    flag_of(dry_run, "dry_run")
    known, report_to = _passwords_of(passwords), progress_of(progress)
    flag_of(new_ids, "new_ids")
    chosen = None if ledgers is None else existing_ids(ledgers)
    with _target_of(target, storage_options, writes=False) as kept:
        if isinstance(destination, LedgerManager):
            if not destination.is_cluster:
                raise UsageError(
                    f"{destination.location} is a store; give a new directory, or the manager of a cluster"
                )
            restore = LedgersRestore(
                kept, destination, run=run, passwords=known, new_ids=new_ids, ledgers=chosen, progress=report_to
            )
            return restore.plan() if dry_run else restore.run()
        if new_ids:
            raise UsageError("new_ids is for ledgers of a cluster; those of a store keep their ids")
        if chosen is not None:
            raise UsageError("ledgers is for ledgers of a cluster; a store is restored whole")
        return restore_store(kept, path_of(destination), run=run, passwords=known, progress=report_to, dry_run=dry_run)


restore_backup_async = asyncio_form(restore_backup)


# ---- arguments -------------------------------------------------------------------------------------------------------


@contextmanager
def _source_of(source: str | os.PathLike[str] | LedgerManager, passwords: Passwords) -> Iterator[Source]:
    if isinstance(source, LedgerManager):
        backend = backend_of(source)
        if not isinstance(backend, StoreBackend):
            yield cluster_source.ClusterSource(source, passwords)
            return
        yield StoreSource(backend.store)
        return
    path = path_of(source)
    if "://" in path:
        url = without_credentials(path)
        raise UsageError(f"{url} is a URL; give the manager of a cluster: LedgerManager.connect({url!r})")
    store = ReadOnlyStore.open(path, config=StoreConfig())
    try:
        yield StoreSource(store)
    finally:
        store.close()


@contextmanager
def _target_of(target: str | os.PathLike[str], options: Mapping[str, Any] | None, *, writes: bool) -> Iterator[Target]:
    opened = open_target(path_of(target), writes=writes, storage_options=options)
    try:
        yield opened
    finally:
        opened.close()


def _passwords_of(passwords: Passwords | None) -> Passwords:
    if passwords is None:
        return Passwords()
    if not isinstance(passwords, Passwords):
        raise UsageError(f"passwords is {type(passwords).__name__}; it takes pybk.Passwords(default, types, ledgers)")
    return passwords


def _seconds_of(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value) or value < 0:
        raise UsageError(f"keep_seconds is {value!r:.50}; it takes a number of seconds, from 0 up")
    return float(value)
