"""Where logs and blob stores are: in a store that is opened for them, or with a manager that others use, too."""

from __future__ import annotations

import os
from contextlib import ExitStack

from pybk.config import StoreConfig
from pybk.errors import NoSuchLogError
from pybk.manager.arguments import store_path_of
from pybk.manager.ledger_manager import LedgerManager


def manager_at(
    where: str | os.PathLike[str] | LedgerManager,
    undo: ExitStack,
    *,
    read_only: bool,
    create: bool = True,
    config: StoreConfig | None = None,
) -> LedgerManager:
    """Return a manager as it is, or open the store in a directory.

    Args:
        where: The manager, or the directory.
        undo: Closes what this opens.
        read_only: Open the directory for reading.
        create: Make a store that does not exist.
        config: Settings of the store.

    Raises:
        NoSuchLogError: There is no store, and none is to be made.
        UsageError: ``where`` is the URL of a cluster, or cannot be a directory.
        PybkError: As ``LedgerManager.open``.
    """
    if isinstance(where, LedgerManager):
        return where
    store_path_of(where)
    if not create and not read_only and not _has_files(where):
        raise NoSuchLogError(f"there is no store at {where}: check the path, or open with create=True")
    return undo.enter_context(LedgerManager.open(where, read_only=read_only, config=config))


def _has_files(path: str | os.PathLike[str]) -> bool:
    try:
        return bool(os.listdir(path))
    except FileNotFoundError:
        return False
    except OSError:  # opening it says what is wrong
        return True
