"""The ledgers that a bookie's directory holds, read while no bookie serves from it, to make metadata from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from pybk.bookie.directory_identity import DirectoryIdentity, SeenEpoch
from pybk.bookie.replicas import Replicas
from pybk.config import StoreConfig
from pybk.errors import CookieError
from pybk.ledger.ledger_metadata import Bookie
from pybk.replication.held_entries import HeldRun
from pybk.storage.directories import find_cookie
from pybk.storage.io.filesystem import OsFileSystem

if TYPE_CHECKING:
    from pybk.flags import StorageHint


class HeldLedger(NamedTuple):
    """The entries that a directory holds of one replicated ledger.

    Attributes:
        description: The ledger's description as its client sent it; empty if the bookie has a fence alone.
        runs: The durable entries.
        tier: The tier of the entries.
        limbo: Whether entries that the bookie acknowledged may be missing.
    """

    description: bytes
    runs: tuple[HeldRun, ...]
    tier: StorageHint | None
    limbo: bool


class Holdings:
    """A bookie's directory, locked.

    Attributes:
        identity: The bookie whose directory it is.
        about: The directory's copy of the cluster's own metadata value; empty if it has none.
        seen: The newest metadata that the bookie has seen; None if it has seen no epoch.
        deleted: Proofs of deletions that the bookie remembers, by ledger.
        known: The replicated ledgers of which it has entries, a fence or a mark.
    """

    def __init__(self, replicas: Replicas, identity: DirectoryIdentity) -> None:
        self._replicas = replicas
        self.identity = identity
        self.about = replicas.about
        self.seen: SeenEpoch | None = replicas.seen
        self.deleted = dict(replicas.deleted)
        self.known = frozenset(replicas.ledgers())

    @property
    def bookie(self) -> Bookie:
        """The bookie."""
        return Bookie(self.identity.bookie_id, self.identity.instance)

    def ledger(self, ledger_id: int) -> HeldLedger:
        """Return the entries that it holds of one of those ledgers."""
        replica = self._replicas.replica(ledger_id)
        assert replica is not None, "the directory is locked"
        runs = [
            HeldRun(extent.first, extent.stride, extent.descriptor.last_durable + 1)
            for extent in replica.extents
            if extent.descriptor.last_durable >= 0
        ]
        header = replica.header
        limbo = replica.limbo or self._replicas.store.has_accepted_loss()
        encoded = b"" if header is None else header.encoded
        return HeldLedger(encoded, tuple(runs), replica.tier(), limbo)


@contextmanager
def open_holdings(path: str) -> Iterator[Holdings]:
    """Open a bookie's directory as a start does, without recording a start.

    Raises:
        StoreLockedError: A bookie serves from it: end it first.
        CookieError: It is not a bookie's directory.
        CorruptError: Durable data are damaged or missing; a start of the bookie would salvage the rest.
    """
    if find_cookie(OsFileSystem(), path, None) is None:
        raise CookieError(f"there is no bookie's directory at {path}; check the path")
    with closing(Replicas.open(path, config=StoreConfig(background=False))) as replicas:
        identity = replicas.identity
        if identity is None:
            raise CookieError(f"{path} belongs to no bookie: no bookie was ever started on it; leave it out")
        yield Holdings(replicas, identity)
