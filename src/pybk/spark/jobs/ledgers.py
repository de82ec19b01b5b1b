"""Which ledgers a job is about, where they are, and whether their password is known."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from pybk.credentials import Passwords, Secret
from pybk.errors import NoSuchLedgerError, UsageError
from pybk.flags import LedgerType
from pybk.ledger import LedgerMetadata, LedgerState
from pybk.ledger_check import find_seal
from pybk.seal import LedgerSeal
from pybk.spark.connection import Connection, StoreOrCluster, connection
from pybk.storage.format.extent import Extent

if TYPE_CHECKING:
    from pybk.manager import LedgerManager

_PAGE: Final = 500

StoreOrUrl = str | StoreOrCluster
"""Where ledgers are: the directory of a store, or the metadata URL of a cluster."""


def where_of(place: StoreOrUrl, cluster_secret: bytes | Secret | None = None) -> StoreOrCluster:
    """Return where ledgers are.

    Args:
        place: A directory, or a metadata URL: ``zk://host:port/path``, ``lmdb:///path``; or that with its secret.
        cluster_secret: The cluster's, as such, or where executors find it; None for none.
    """
    if isinstance(place, StoreOrCluster):
        return place
    secret = cluster_secret if isinstance(cluster_secret, Secret) else Secret(cluster_secret)
    if "://" in place:
        return StoreOrCluster(metadata_uri=place, secret=secret)
    return StoreOrCluster(path=place)


def cluster_of(place: StoreOrUrl, cluster_secret: bytes | Secret | None, what: str) -> StoreOrCluster:
    """Return where a cluster's ledgers are.

    Raises:
        UsageError: It is a directory; ``what`` says what only a cluster can.
    """
    where = where_of(place, cluster_secret)
    if where.metadata_uri is None:
        raise UsageError(f"{where} is a directory, which one process writes, and {what}: give a cluster's metadata URL")
    return where


def secret_of(password: bytes | Secret | None) -> Secret:
    """Return a password as it is sent to executors."""
    return password if isinstance(password, Secret) else Secret(password)


def selected_ledgers(
    where: StoreOrCluster, ledgers: Iterable[int] | None = None, ledger_type: str | None = None, *, system: bool = False
) -> list[LedgerMetadata]:
    """Return the ledgers that a job is about, by ascending id.

    Args:
        where: Where they are.
        ledgers: Their ids; None for all.
        ledger_type: Only those of this type; None for all.
        system: Also those of the system's own types.

    Raises:
        NoSuchLedgerError: One that was named is not there.
        UsageError: It is the directory of a bookie.
    """
    found = connection(where)
    manager = found.manager
    if ledgers is not None:
        metadata = [manager.ledger_metadata(ledger_id) for ledger_id in sorted(set(ledgers))]
    else:
        found.backend.catch_up()
        metadata = list(found.backend.ledgers())
    if where.path is not None and any(
        each.ledger_type in (LedgerType.BOOKIE, LedgerType.FENCE) or Extent.of(each) is not None for each in metadata
    ):
        raise UsageError(f"{where} is the directory of a bookie; give the metadata URL of its cluster")
    wanted = None if ledger_type is None else LedgerType(ledger_type)
    return [
        each
        for each in metadata
        if (wanted is None or each.ledger_type == wanted) and (system or not each.ledger_type.is_system)
    ]


def seal_for(found: Connection, metadata: LedgerMetadata, passwords: Passwords) -> LedgerSeal | None:
    """Return what checks a ledger's entries and seal, as ``pybk.ledger_check.find_seal`` does."""
    return find_seal(found.backend.key_ring, found.backend.verifier, passwords, metadata)


def unlocks(manager: LedgerManager, metadata: LedgerMetadata, password: bytes | None) -> bool:
    """Return whether a password, None for the empty one, is that of a ledger."""
    return manager.check_password(metadata, password or b"")


def end_of(found: Connection, metadata: LedgerMetadata, password: bytes | None) -> tuple[int, int]:
    """Return the last entry of a ledger that may be read now, -1 for none, and about its payload bytes.

    Raises:
        NoSuchLedgerError: It was deleted.
        UnauthorizedError: It is open, and the password is another.
        PybkError: It is open, and too few of its bookies answer.
    """
    if metadata.state is LedgerState.CLOSED:
        return metadata.last_entry_id, metadata.length
    with found.manager.open_ledger(metadata.ledger_id, password=password or b"", recover=False) as reader:
        return reader.last_add_confirmed, reader.length


def exact_end_of(found: Connection, metadata: LedgerMetadata, password: bytes | None) -> tuple[int, int]:
    """Return what ``end_of`` does, and exactly how many payload bytes there are up to that entry.

    Raises:
        PybkError: As ``end_of`` and reading.
    """
    if metadata.state is LedgerState.CLOSED:
        return metadata.last_entry_id, metadata.length
    with found.manager.open_ledger(metadata.ledger_id, password=password or b"", recover=False) as reader:
        last = reader.last_add_confirmed
        return last, next(reader.read(last, last)).length if last >= 0 else 0


def existing(found: Connection, ledger_ids: Iterable[int]) -> list[LedgerMetadata]:
    """Return those of some ledgers that were not deleted meanwhile, as they are now, by ascending id."""
    there = []
    for ledger_id in sorted(set(ledger_ids)):
        with suppress(NoSuchLedgerError):
            there.append(found.manager.ledger_metadata(ledger_id))
    return there
