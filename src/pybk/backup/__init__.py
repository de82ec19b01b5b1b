"""Backups of embedded stores, of bookies' directories and of a cluster's ledgers: made, verified and restored.

``docs/backup.md`` says what is in a backup and what is not; ``docs/format.md`` has its bytes. ``backing_up`` and
``restoring`` have the theory of operation.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pybk.arguments import existing_ids, flag_of, path_of, progress_of
from pybk.backup.backing_up import BackupReport, BackupRun
from pybk.backup.chain import BackupRunInfo, existing_chain
from pybk.backup.restoring import RestoreReport, restore_store
from pybk.backup.restoring_ledgers import LedgersRestore
from pybk.backup.source import Source, StoreSource
from pybk.backup.target import Target, open_target
from pybk.backup.verifying import BackupCheckReport, verify_target
from pybk.config import StoreConfig
from pybk.credentials import Passwords
from pybk.errors import UsageError
from pybk.local_backend import StoreBackend
from pybk.manager import LedgerManager, backend_of
from pybk.storage.readonly import ReadOnlyStore


def back_up(
    source: str | os.PathLike[str] | LedgerManager,
    target: str | os.PathLike[str],
    *,
    passwords: Passwords | None = None,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> BackupReport:
    """Back up a store, or the ledgers of a cluster; the first call copies everything, later ones what is new.

    Nothing is locked: writers continue. Everything that was acknowledged before the call is in the backup; of a store
    it has the state after one commit. Passwords and keys are not in it, payloads are.

    Args:
        source: The directory of a store or bookie, whether or not another process has it open; or a manager of this
            process: of an embedded store, or of a cluster, whose ledgers are backed up then.
        target: An empty or new directory, or that of the backup that is continued; or a URL of fsspec.
        passwords: Check the authentication codes of HMAC_SHA256 entries while they are copied; those of other entries,
            and all checksums, are checked without it. Open ledgers of a cluster are copied only with their password.
        storage_options: As fsspec takes them for a URL.
        dry_run: Return what would be copied; nothing is written.
        progress: Called with the payload bytes copied so far and to copy in all, in the calling thread.

    Returns:
        What was copied.

    Raises:
        UsageError: The target is not empty and is no backup, or an argument is wrong.
        CookieError: There is no store; or the backup is that of another store or incarnation, or the store was put
            back to an older state than the backup has.
        StoreLockedError: Another backup is being made in the directory.
        CorruptError, DigestMismatchError: An entry or the backup is damaged; the backup has its state from before.
        StorageError: The target failed; run it again, and it continues with what was written.

    Durability: The run is durable on return. After a stop at any point the backup has its state from before.
    Threads: Any; one backup of a target at a time.
    Cost: Reads the new entries, the state of every ledger, and the manifests. Memory: three packs of 32 MiB, and 2 KiB
        for each ledger.
    """
    flag_of(dry_run, "dry_run")
    known, report_to = _passwords_of(passwords), progress_of(progress) or _ignore
    with _source_of(source, known) as opened, _target_of(target, storage_options, writes=not dry_run) as kept:
        run = BackupRun(opened, kept, known, report_to)
        return run.plan() if dry_run else run.run()


async def back_up_async(
    source: str | os.PathLike[str] | LedgerManager,
    target: str | os.PathLike[str],
    *,
    passwords: Passwords | None = None,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> BackupReport:
    """Back up as ``back_up`` does, in a thread, which also calls ``progress``."""
    return await asyncio.to_thread(
        back_up,
        source,
        target,
        passwords=passwords,
        storage_options=storage_options,
        dry_run=dry_run,
        progress=progress,
    )


def verify_backup(
    target: str | os.PathLike[str],
    *,
    passwords: Passwords | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BackupCheckReport:
    """Check every manifest, pack and entry of a backup as of its last run; nothing is changed.

    Args:
        target: The directory or the URL of fsspec.
        passwords: Check the authentication codes of HMAC_SHA256 entries, and seals, of the ledgers that have them.
        storage_options: As fsspec takes them for a URL.
        progress: Called with the bytes of packs read so far and to read in all, in the calling thread.

    Returns:
        The problems, none for a sound backup. ``complete`` is False if a password was missing.

    Raises:
        UsageError: There is no backup, or an argument is wrong.
        CorruptError: A manifest is damaged or missing, so that it is unknown what the backup should hold.
        StorageError: The target failed.

    Threads: Any.
    Cost: Reads the whole backup once.
    """
    known, report_to = _passwords_of(passwords), progress_of(progress) or _ignore
    with _target_of(target, storage_options, writes=False) as kept:
        return verify_target(kept, known, report_to)


async def verify_backup_async(
    target: str | os.PathLike[str],
    *,
    passwords: Passwords | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BackupCheckReport:
    """Verify as ``verify_backup`` does, in a thread, which also calls ``progress``."""
    return await asyncio.to_thread(
        verify_backup, target, passwords=passwords, storage_options=storage_options, progress=progress
    )


def list_backup_runs(
    target: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> tuple[BackupRunInfo, ...]:
    """Return the runs of a backup, the oldest first; each can be restored. Reads the manifests, and no packs.

    Args:
        target: The directory or the URL of fsspec.
        storage_options: As fsspec takes them for a URL.

    Raises:
        UsageError: There is no backup, or an argument is wrong.
        CorruptError: A manifest is damaged or missing.
        StorageError: The target failed.

    Threads: Any.
    """
    with _target_of(target, storage_options, writes=False) as kept:
        return tuple(existing_chain(kept).runs)


async def list_backup_runs_async(
    target: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> tuple[BackupRunInfo, ...]:
    """Return the runs as ``list_backup_runs`` does, in a thread."""
    return await asyncio.to_thread(list_backup_runs, target, storage_options=storage_options)


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

    The store has the id and the salts that it had, so that passwords open its ledgers, and a new incarnation. As a
    bookie it starts with all its ledgers in limbo; after that the bookie's former directory is refused. Ledgers of a
    cluster are written anew and closed; each takes its password, and others are left out.

    Args:
        target: The backup: a directory or a URL of fsspec.
        destination: The directory, which must not exist, or be empty; for a cluster's ledgers, a manager that is
            connected to a cluster.
        run: The run to restore; None for the last.
        passwords: Check the authentication codes of HMAC_SHA256 entries, and seals, before anything is restored.
        new_ids: Give ledgers of a cluster new ids; otherwise they get those that they had, which must be unused.
        ledgers: The ids of the ledgers of a cluster to restore; None for all.
        storage_options: As fsspec takes them for a URL.
        dry_run: Return what would be restored, without reading the packs; nothing is written.
        progress: Called with the bytes restored so far and to restore in all, in the calling thread.

    Returns:
        What was restored.

    Raises:
        UsageError: The directory is not empty, there is no backup or no such run or ledger, or an argument is wrong.
        CorruptError, DigestMismatchError, SealMismatchError: The backup is damaged or was changed.
        StoreLockedError: Another restore to this directory is under way.
        StorageError: A device or the target failed.

    After an error, and after a stop at any point, there is nothing at ``destination``.

    Durability: The store is durable on return.
    Threads: Any.
    Cost: Reads the backup once, and writes each entry as an append does.
    """
    flag_of(dry_run, "dry_run")
    known, report_to = _passwords_of(passwords), progress_of(progress) or _ignore
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


async def restore_backup_async(
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
    """Restore as ``restore_backup`` does, in a thread, which also calls ``progress``."""
    return await asyncio.to_thread(
        restore_backup,
        target,
        destination,
        run=run,
        passwords=passwords,
        new_ids=new_ids,
        ledgers=ledgers,
        storage_options=storage_options,
        dry_run=dry_run,
        progress=progress,
    )


# ---- arguments -------------------------------------------------------------------------------------------------------


@contextmanager
def _source_of(source: str | os.PathLike[str] | LedgerManager, passwords: Passwords) -> Iterator[Source]:
    if isinstance(source, LedgerManager):
        backend = backend_of(source)
        if not isinstance(backend, StoreBackend):
            from pybk.backup.cluster_source import ClusterSource  # an embedded store does not need ZeroMQ
            from pybk.client.backend import ClusterBackend

            assert isinstance(backend, ClusterBackend), "there are two backends"
            yield ClusterSource(source, backend, passwords)
            return
        yield StoreSource(backend.store)
        return
    path = path_of(source)
    if "://" in path:
        raise UsageError(f"{path} is a URL; give the manager of a cluster: LedgerManager.connect({path!r})")
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


def _ignore(done: int, total: int) -> None:
    """Show no progress."""
