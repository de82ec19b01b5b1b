"""What lies under the public handles, for tests that look beneath the API; only this file knows their private names."""

from __future__ import annotations

from typing import Any

from pybk.backend import LedgerBackend
from pybk.client.backend import ClusterBackend
from pybk.local_backend import StoreBackend
from pybk.manager import LedgerManager
from pybk.reader import LedgerReader
from pybk.storage.readonly import ReadOnlyStore
from pybk.storage.store import Store
from pybk.writer import LedgerWriter


def backend_of(manager: LedgerManager) -> LedgerBackend:
    """Return where a manager's ledgers live."""
    return manager._backend


def cluster_backend_of(manager: LedgerManager) -> ClusterBackend:
    """Return the client of a cluster under a manager."""
    backend = manager._backend
    assert isinstance(backend, ClusterBackend)
    return backend


def store_view_of(handle: LedgerManager | LedgerReader) -> Store | ReadOnlyStore:
    """Return the store under a manager or a reader, live or read-only."""
    backend = handle._backend
    assert isinstance(backend, StoreBackend)
    return backend.store


def store_of(manager: LedgerManager) -> Store:
    """Return the live store under a manager."""
    store = store_view_of(manager)
    assert isinstance(store, Store)
    return store


def descriptor_of(handle: LedgerReader | LedgerWriter) -> Any:
    """Return the state of the ledger that a handle shares with all others of its manager."""
    return handle._descriptor
