"""Verification of a store and rebuild of its index, for ``pybk store verify`` and ``pybk store rebuild-index``."""

from __future__ import annotations

import os
from collections.abc import Callable

from pybk.credentials import Passwords, Secret, read_credentials
from pybk.errors import CookieError, UsageError
from pybk.manager.arguments import Tiers, path_of, progress_of
from pybk.storage.repair.rebuild import RebuildReport
from pybk.storage.repair.rebuild import rebuild_index as rebuild_store_index
from pybk.storage.repair.verify import VerifyReport, verify_store
from pybk.threads.call_threads import asyncio_form
from pybk.values import flag_of


def verify(
    path: str | os.PathLike[str],
    *,
    password: bytes | None = None,
    secret: bytes | Secret | None = None,
    passwords: Passwords | None = None,
    tiers: Tiers | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check everything that is durable in a store: files, index, entries and seals.

    Nothing is locked or changed. The store may be closed, or open in another process; then it is checked up to the
    durable watermark. A bookie's directory is a store as well.

    Args:
        path: The store's directory.
        password: The password with which the seals, and the digests of HMAC_SHA256 ledgers, are checked.
        secret: Likewise for the ledgers that were created with this secret; it may be given with or without a password.
        passwords: Likewise for ledgers with different passwords; instead of ``password`` and ``secret``.
        tiers: Directories of tiers at other places than the store has recorded, as for ``LedgerManager.open``.
        progress: Called in the calling thread with the bytes read so far and those to read in all.

    Returns:
        The problems, none for a sound store, and the numbers of checked files, ledgers and entries. ``complete`` is
        False if a password was missing.

    Raises:
        CookieError: There is no store at the path, or only one tier of a store; the error names the right argument.
        UsageError: An argument is wrong, or entries are compressed and the extra ``pybk[zstd]`` is not installed.

    Threads: Any.
    Cost: Reads every file once and every entry once more. Memory grows with the number of ledgers, not of entries.
    """
    root = _directory(path)
    if passwords is not None and not isinstance(passwords, Passwords):
        raise UsageError(f"passwords is {type(passwords).__name__}; it takes pybk.Passwords(default, types, ledgers)")
    if passwords is not None and not (password is None and secret is None):
        raise UsageError(
            "password or secret and passwords are both given; Passwords(default=password, secret=secret) holds all"
        )
    given = read_credentials(password, secret)
    known = passwords or Passwords(None if password is None else given.password, secret=given.secret)
    return verify_store(root, passwords=known, tiers=tiers, progress=progress_of(progress))


verify_async = asyncio_form(verify)


def rebuild_index(
    path: str | os.PathLike[str],
    *,
    accept_loss: bool = False,
    tiers: Tiers | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RebuildReport:
    """Rebuild the index of a store from its catalog and its files; no process may have the store open.

    Args:
        path: The store's directory.
        accept_loss: Rebuild the index even if entries, or commits of the log, are missing. Reading missing entries
            raises CorruptError afterwards, and a bookie copies them back from its peers. If commits are missing, each
            ledger of an embedded store that may have had more entries gets one missing entry at its end. Ids of ledgers
            that may have been created in these commits raise CorruptError, and are not used again.
        tiers: Directories of tiers at other places than the store has recorded, as for ``LedgerManager.open``.
        progress: Called in the calling thread with the bytes read so far and those to read in all.

    Returns:
        The result. If entries are missing and ``accept_loss`` is False, nothing is changed and ``made`` is False.

    Raises:
        StoreLockedError: A process has the store open.
        CookieError: There is no store at the path, or a directory belongs to another store.
        CorruptError: The catalog is damaged, and it is unknown what the index should hold; nothing was changed.
            Damage of the log is among the ``problems``.
        StorageFullError: There is not enough space for the new index; nothing was changed.

    Durability: On return the new index is durable. After a crash the store has its old index, the new one, or none;
        without an index, opening the store raises an error, and this function can be called again.
    Threads: Any; one process at a time, which the store's lock ensures.
    Cost: Reads the log files, the footers of cold segments and the whole SSD tier; takes 40 bytes of memory per record.
    """
    flag_of(accept_loss, "accept_loss")
    return rebuild_store_index(_directory(path), accept_loss=accept_loss, tiers=tiers, progress=progress_of(progress))


rebuild_index_async = asyncio_form(rebuild_index)


def _directory(path: str | os.PathLike[str]) -> str:
    """Return the path of a store; raise if it is a URL or the path of a file."""
    root = path_of(path)
    if "://" in root:
        raise UsageError(f"{root} is a URL; give the directory of a store, or of each bookie of a cluster in turn")
    if os.path.exists(root) and not os.path.isdir(root):
        raise CookieError(f"{root} is a file; give the directory of a store")
    return root
