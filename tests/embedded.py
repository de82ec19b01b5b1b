"""The store under a manager, for tests that look beneath the API."""

from __future__ import annotations

from pybk.local_backend import StoreBackend
from pybk.manager import LedgerManager
from pybk.storage.readonly import ReadOnlyStore
from pybk.storage.store import Store


def view_of(manager: LedgerManager) -> Store | ReadOnlyStore:
    """Return the store, live or read-only."""
    backend = manager._backend
    assert isinstance(backend, StoreBackend)
    return backend.store


def store_of(manager: LedgerManager) -> Store:
    """Return the live store."""
    store = view_of(manager)
    assert isinstance(store, Store)
    return store
