"""Ledgers at the level that seals them, and changes made to metadata without the API."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from pybk.config import StoreConfig
from pybk.feature_level import FeatureLevel
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.store import Store
from tests.internals import store_view_of

PASSWORD = b"a password of the tests"


def open_at(level: FeatureLevel, path: Path, *, read_only: bool = False) -> LedgerManager:
    """Open a store that writes the formats of a level."""
    manager = LedgerManager.open(path, read_only=read_only)
    store_view_of(manager).feature_level = level
    return manager


def open_sealing(path: Path, *, read_only: bool = False) -> LedgerManager:
    """Open a store that seals ledgers."""
    return open_at(FeatureLevel.SEALS, path, read_only=read_only)


def copied(path: Path, name: str) -> Path:
    """Copy a store, as an end by accident would leave it."""
    target = path.with_name(name)
    shutil.copytree(path, target)
    return target


def tamper(path: Path, ledger_id: int, **changes: Any) -> LedgerMetadata:
    """Change a closed store's metadata of a ledger, as somebody with access to its directory can.

    Returns:
        The metadata as it was.
    """
    store = Store.open(str(path), config=StoreConfig())
    try:
        descriptor = store.descriptor(ledger_id)
        before = descriptor.metadata
        store.change_all([(descriptor, replace(before, version=before.version + 1, **changes))])
    finally:
        store.close()
    return before
