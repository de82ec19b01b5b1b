"""Selection of the ledgers of a job, and their ends and passwords."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from pybk.credentials import Credentials, Passwords, Secret
from pybk.errors import (
    CorruptError,
    MetadataForgedError,
    NoSuchLedgerError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.flags import LedgerType
from pybk.ledger.keys import LedgerSeal
from pybk.ledger.ledger_check import find_seal
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.spark.connection import Connection, StoreOrCluster, connection, refuse_bookie_directory
from pybk.spark.sink.manifest import places_in_merged

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager


StoreOrUrl = str | StoreOrCluster
"""The location of ledgers: the directory of a store, or the metadata URL of a cluster."""


def where_of(place: StoreOrUrl, cluster_secret: bytes | Secret | None = None) -> StoreOrCluster:
    """Return a location with its secret.

    Args:
        place: A directory, or a metadata URL such as ``zk://host:port/path`` or ``lmdb:///path``; a ``StoreOrCluster``
            is returned unchanged.
        cluster_secret: The secret of the cluster, or its source on executors; None if the cluster has none.
    """
    if isinstance(place, StoreOrCluster):
        return place
    secret = cluster_secret if isinstance(cluster_secret, Secret) else Secret(cluster_secret)
    if "://" in place:
        return StoreOrCluster(metadata_uri=place, secret=secret)
    return StoreOrCluster(path=place)


def cluster_of(place: StoreOrUrl, cluster_secret: bytes | Secret | None, what: str) -> StoreOrCluster:
    """Return the location of a cluster with its secret.

    Raises:
        UsageError: The location is a directory; the message contains ``what``, the reason why it needs a cluster.
    """
    where = where_of(place, cluster_secret)
    if where.metadata_uri is None:
        raise UsageError(f"{where} is a directory, which one process writes, and {what}: give a cluster's metadata URL")
    return where


def selected_ledgers(
    where: StoreOrCluster, ledgers: Iterable[int] | None = None, ledger_type: str | None = None, *, system: bool = False
) -> list[LedgerMetadata]:
    """Return the metadata of the ledgers of a job, by ascending id.

    Args:
        where: The store or cluster.
        ledgers: Ids of ledgers; None for all.
        ledger_type: Return only ledgers of this type; None for all types.
        system: Also return ledgers of pybk's own types.

    Raises:
        NoSuchLedgerError: A ledger of ``ledgers`` does not exist; the error names the merged one that has its entries.
        UsageError: ``where`` is the directory of a bookie.
    """
    found = connection(where)
    if ledgers is not None:
        metadata = [_named(found, ledger_id) for ledger_id in sorted(set(ledgers))]
    else:
        found.backend.catch_up()
        metadata = list(found.backend.ledgers())
    refuse_bookie_directory(where, metadata)
    wanted = None if ledger_type is None else LedgerType(ledger_type)
    return [
        each
        for each in metadata
        if (wanted is None or each.ledger_type == wanted) and (system or not each.ledger_type.is_system)
    ]


def _named(found: Connection, ledger_id: int) -> LedgerMetadata:
    """Return the metadata of a ledger that is named; raises NoSuchLedgerError."""
    try:
        return found.manager.ledger_metadata(ledger_id)
    except NoSuchLedgerError as error:
        try:
            place = places_in_merged(found, [ledger_id]).get(ledger_id)
        except (CorruptError, MetadataForgedError, UnsupportedFormatError) as unreadable:
            raise NoSuchLedgerError(
                f"{error}; whether a merged ledger has its entries is not known: {unreadable}"
            ) from unreadable
        if place is None:
            raise
        raise NoSuchLedgerError(
            f"ledger {ledger_id} was merged: ledger {place.holder} of sink {place.sink!r:.100} has its entries, from"
            f" entry {place.first} on; give that number, which stands for all that were merged there, or a type"
        ) from error


def seal_for(found: Connection, metadata: LedgerMetadata, passwords: Passwords) -> LedgerSeal | None:
    """Return the verifier of a ledger's entries and seal, as ``pybk.ledger.ledger_check.find_seal`` does."""
    return find_seal(found.backend.key_ring, found.backend.verifier, passwords, metadata)


def unlocks(manager: LedgerManager, metadata: LedgerMetadata, given: Credentials) -> bool:
    """Return whether a password or secret is that of a ledger."""
    return manager.check_password(metadata, given.password, secret=given.secret)


def end_of(found: Connection, metadata: LedgerMetadata, given: Credentials) -> tuple[int, int]:
    """Return the last entry of a ledger that can be read now, -1 for none, and the approximate payload bytes up to it.

    Raises:
        NoSuchLedgerError: The ledger was deleted.
        UnauthorizedError: The ledger is open, and the password is wrong.
        PybkError: The ledger is open, and too few of its bookies answer.
    """
    if metadata.state is LedgerState.CLOSED:
        return metadata.last_entry_id, metadata.length
    with found.manager.open_ledger(
        metadata.ledger_id, password=given.password, secret=given.secret, recover=False
    ) as reader:
        return reader.last_add_confirmed, reader.length


def exact_end_of(found: Connection, metadata: LedgerMetadata, given: Credentials) -> tuple[int, int]:
    """Return the same as ``end_of``, but with the exact payload bytes up to the last entry.

    Raises:
        PybkError: As ``end_of``, or the last entry cannot be read.
    """
    if metadata.state is LedgerState.CLOSED:
        return metadata.last_entry_id, metadata.length
    with found.manager.open_ledger(
        metadata.ledger_id, password=given.password, secret=given.secret, recover=False
    ) as reader:
        last = reader.last_add_confirmed
        return last, next(reader.read(last, last)).length if last >= 0 else 0


def existing(found: Connection, ledger_ids: Iterable[int]) -> list[LedgerMetadata]:
    """Return the present metadata of the given ledgers that still exist, by ascending id."""
    there = []
    for ledger_id in sorted(set(ledger_ids)):
        with suppress(NoSuchLedgerError):
            there.append(found.manager.ledger_metadata(ledger_id))
    return there
