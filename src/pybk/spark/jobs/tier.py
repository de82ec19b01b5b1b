"""Moves of closed ledgers to a tier, run by executors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pybk.credentials import CredentialSources
from pybk.errors import NoSuchLedgerError, PybkError
from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import LedgerState
from pybk.spark.connection import StoreOrCluster, connection
from pybk.spark.jobs.ledgers import StoreOrUrl, cluster_of, selected_ledgers, unlocks
from pybk.spark.jobs.spreading import spread
from pybk.values import flag_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pybk.credentials import Secret
    from pybk.ledger.ledger_metadata import LedgerMetadata


@dataclass(frozen=True, slots=True)
class Tiered:
    """The result of moving ledgers.

    Attributes:
        target: The tier.
        ledgers: Ids of the ledgers that were moved, or with ``dry_run`` would be moved.
        bytes: Their payload bytes.
        not_opened: Ids of ledgers that were not moved because they have another password.
        failed: Ids of ledgers that could not be moved on all bookies, each with the reason; move them again.
        dry_run: Whether the move was only simulated.
    """

    target: StorageHint
    ledgers: tuple[int, ...]
    bytes: int
    not_opened: tuple[int, ...]
    failed: tuple[tuple[int, str], ...]
    dry_run: bool


def tier(
    spark: SparkSession,
    where: StoreOrUrl,
    target: StorageHint,
    *,
    cluster_secret: bytes | Secret | None = None,
    password: bytes | Secret | None = None,
    secret: bytes | Secret | None = None,
    ledgers: Iterable[int] | None = None,
    ledger_type: str | None = None,
    hint: StorageHint | None = None,
    older_than: float | None = None,
    larger_than: int | None = None,
    dry_run: bool = False,
    quiet: bool = False,
) -> Tiered:
    """Move the closed ledgers that satisfy all given conditions to a tier, unless they are in it already.

    Args:
        spark: The session whose executors request the moves.
        where: A cluster's metadata URL.
        target: The tier.
        cluster_secret: The secret of the cluster.
        password: The password of the ledgers; None stands for the empty one.
        secret: The secret of ledgers that have one. If both are given, each ledger takes its own.
        ledgers: Move only ledgers with these ids.
        ledger_type: Move only ledgers of this type.
        hint: Move only ledgers that were created with this hint.
        older_than: Move only ledgers that are older than this number of seconds.
        larger_than: Move only ledgers with more payload bytes than this.
        dry_run: Return the ledgers that would be moved, without moving them.
        quiet: Do not show progress.

    Raises:
        NoSuchLedgerError: A ledger of ``ledgers`` does not exist.
        UsageError: ``where`` is a store, whose ledgers only its own process can move.
        PybkError: The cluster cannot be reached.

    Durability: The ledgers of the result are durable in their new tier on all their bookies.
    """
    place = cluster_of(where, cluster_secret, "only that process moves its ledgers")
    target, dry_run = StorageHint(target), flag_of(dry_run, "dry_run")
    given = CredentialSources.of(password, secret)
    before_ns = None if older_than is None else time.time_ns() - int(older_than * 1e9)
    wanted = [
        each
        for each in selected_ledgers(place, ledgers, ledger_type)
        if each.state is LedgerState.CLOSED
        and each.tier is not target
        and (hint is None or StorageHint(hint) in each.storage_hints)
        and (before_ns is None or each.creation_time_ns < before_ns)
        and (larger_than is None or each.length > larger_than)
    ]
    manager = connection(place).manager
    opened = {each.ledger_id: unlocks(manager, each, given.read()) for each in wanted}
    movable = [each for each in wanted if opened[each.ledger_id]]
    failed = {} if dry_run else _moved(spark, place, given, movable, target, quiet)
    moved = [each for each in movable if each.ledger_id not in failed]
    return Tiered(
        target=target,
        ledgers=tuple(each.ledger_id for each in moved),
        bytes=sum(each.length for each in moved),
        not_opened=tuple(ledger_id for ledger_id, does in opened.items() if not does),
        failed=tuple((ledger_id, reason) for ledger_id, reason in failed.items() if reason),
        dry_run=dry_run,
    )


def _moved(
    spark: SparkSession,
    where: StoreOrCluster,
    given: CredentialSources,
    movable: list[LedgerMetadata],
    target: StorageHint,
    quiet: bool,
) -> dict[int, str]:
    """Move ledgers; return the reason for each that was not moved, empty if it was deleted meanwhile."""
    ids = [each.ledger_id for each in movable]
    reasons = spread(
        spark,
        partial(_move, where, given, target),
        ids,
        sizes=[each.length for each in movable],
        what=f"pybk: move to {target.value} {where}",
        quiet=quiet,
    )
    return {ledger_id: reason for ledger_id, reason in zip(ids, reasons, strict=True) if reason is not None}


def _move(where: StoreOrCluster, given: CredentialSources, target: StorageHint, ledger_id: int) -> str | None:
    """Move a ledger; runs in an executor. Returns None, the reason of a failure, or "" if the ledger was deleted."""
    try:
        found = given.read()
        connection(where).manager.move_ledger(ledger_id, target, password=found.password, secret=found.secret)
    except NoSuchLedgerError:
        return ""
    except PybkError as error:
        return str(error)
    return None
