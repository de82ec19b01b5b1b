"""Stores and clusters for tests of programs that use pybk; ``docs/howto/testing.md`` shows them and the fixtures.

These stores and clusters protect nothing: the derivation of keys from passwords is cheap, and the secret of the cluster
is always the same. Everything else is as in production.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Self
from unittest import mock

from pybk.config import StoreConfig
from pybk.errors import UsageError
from pybk.manager.ledger_manager import LedgerManager

__all__ = ["LEDGER_SECRET", "SECRET", "TestCluster", "cheap_keys", "open_store", "small_config"]

_SCRYPT_COST: Final = 2
"""The scrypt cost of new stores and clusters; that of production takes 128 MiB and half a second for each password."""

_SMALL: Final[Mapping[str, Any]] = {
    "log_file_bytes": 1 << 20,
    "unchecked_tail_bytes": 4 << 20,
    "cold_block_bytes": 4 << 10,
    "ssd_block_bytes": 4 << 10,
    "free_bytes_low": 0,
    "free_bytes_ok": 0,
}

SECRET: Final = b"the secret of clusters for tests"
"""The secret of each ``TestCluster``."""

LEDGER_SECRET: Final = b"the secret of ledgers for tests.."
"""A secret for ledgers, which need no derivation from a password."""


def small_config() -> StoreConfig:
    """Return settings with small files: a store opens quickly, and a little data reaches all tiers."""
    return StoreConfig(**_SMALL)


@contextmanager
def cheap_keys() -> Iterator[None]:
    """Make stores and clusters that are created in the block derive keys cheaply for ever; one thread at a time."""
    with mock.patch("pybk.ledger.keys.SCRYPT_COST", _SCRYPT_COST):
        yield


@contextmanager
def open_store(directory: str | os.PathLike[str]) -> Iterator[LedgerManager]:
    """Open a store until the end of the block; a new store derives keys cheaply."""
    with cheap_keys():
        manager = LedgerManager.open(directory, config=small_config())
    with manager:
        yield manager


class TestCluster:
    """A cluster whose bookies serve in this process, each with a directory of its own; a context manager.

    Bookies do not repair the cluster by themselves, so a test sees only the effects of its own calls. For
    processes that can be killed, use ``pybk dev up``.

    Args:
        directory: The directory of the cluster: a new one, or that of another cluster made by this class.
        bookies: The number of bookies; their names are ``b1``, ``b2``, ...

    Attributes:
        url: The URL of the metadata store, as ``LedgerManager.connect`` takes it.
        secret: The secret of the cluster.
        bookies: The managers of the bookies that run, by name.

    Raises:
        UsageError: ``bookies`` is less than 1.

    Threads: one at a time.
    """

    __test__ = False  # or pytest would take it for tests

    def __init__(self, directory: str | os.PathLike[str], bookies: int = 3) -> None:
        if bookies < 1:
            raise UsageError(f"{bookies} bookies; a cluster has 1 at least, and 3 for ledgers with the usual ensemble")
        self._directory = os.path.abspath(directory)
        os.makedirs(self._directory, exist_ok=True)
        self.url: Final = f"lmdb://{self._directory}/metadata"
        self.secret: Final = SECRET
        self.bookies: dict[str, LedgerManager] = {}
        self._clients: list[LedgerManager] = []
        try:
            for number in range(1, bookies + 1):
                self.start(f"b{number}")
        except BaseException:
            self.close()
            raise

    def connect(self, config: StoreConfig | None = None) -> LedgerManager:
        """Return a client of the cluster, which is closed with it.

        Args:
            config: Its settings; None for the defaults.
        """
        client = LedgerManager.connect(self.url, cluster_secret=self.secret, config=config)
        self._clients.append(client)
        return client

    def stop(self, name: str) -> None:
        """Close a bookie; its clients notice that.

        Raises:
            UsageError: No bookie of that name runs.
        """
        if name not in self.bookies:
            raise UsageError(f"no bookie {name!r:.50} runs; there are {', '.join(self.bookies) or 'none'}")
        self.bookies.pop(name).close()

    def start(self, name: str) -> None:
        """Start a stopped or a new bookie.

        Raises:
            UsageError: It runs already.
        """
        if name in self.bookies:
            raise UsageError(f"bookie {name!r:.50} runs already")
        with cheap_keys():
            self.bookies[name] = LedgerManager.open(
                os.path.join(self._directory, name),
                listen="tcp://127.0.0.1:*",
                metadata=self.url,
                cluster_secret=self.secret,
                bookie_id=name,
                autorecovery=False,
                config=small_config(),
            )

    def close(self) -> None:
        """Close all clients and bookies. Idempotent."""
        for client in self._clients:
            client.close()
        while self.bookies:
            self.bookies.popitem()[1].close()

    def __enter__(self) -> Self:
        """Return the cluster itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()
