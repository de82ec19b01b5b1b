"""Closed ledgers brought to a tier, those that a policy names, by executors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pybk.errors import NoSuchLedgerError, PybkError
from pybk.flags import StorageHint
from pybk.ledger import LedgerState
from pybk.spark.connection import StoreOrCluster, connection
from pybk.spark.jobs.ledgers import StoreOrUrl, cluster_of, secret_of, selected_ledgers, unlocks
from pybk.spark.jobs.spreading import spread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pybk.credentials import Secret
    from pybk.ledger import LedgerMetadata


@dataclass(frozen=True, slots=True)
class Tiered:
    """What a move of ledgers did, or would do.

    Attributes:
        target: The tier.
        ledgers: Ledgers that were moved, or with ``dry_run`` would be.
        bytes: Their payload bytes.
        not_opened: Ledgers whose password is another; they stay where they are.
        failed: Ledgers that could not be moved, at least not on all bookies, and why; move them again.
        dry_run: Whether nothing was done.
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
    ledgers: Iterable[int] | None = None,
    ledger_type: str | None = None,
    hint: StorageHint | None = None,
    older_than: float | None = None,
    larger_than: int | None = None,
    dry_run: bool = False,
    quiet: bool = False,
) -> Tiered:
    """Move those closed ledgers to a tier that are not there, and that all conditions hold for.

    Args:
        spark: The session whose executors ask for the moves.
        where: A cluster's metadata URL.
        target: The tier.
        cluster_secret: The cluster's.
        password: The ledgers'; None stands for the empty one.
        ledgers: Only ledgers of these ids.
        ledger_type: Only those of this type.
        hint: Only those created with this hint.
        older_than: Only those created more than so many seconds ago.
        larger_than: Only those of more payload bytes than this.
        dry_run: Only say which they are.
        quiet: Show no progress.

    Raises:
        NoSuchLedgerError: A ledger that was named is not there.
        UsageError: It is a store, which only the process that writes it can move ledgers of.
        PybkError: The cluster cannot be reached.

    Durability: Ledgers that are returned as moved are durable in their new tier on all their bookies.
    """
    place = cluster_of(where, cluster_secret, "only that process moves its ledgers")
    target = StorageHint(target)
    secret = secret_of(password)
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
    opened = {each.ledger_id: unlocks(manager, each, secret.read()) for each in wanted}
    movable = [each for each in wanted if opened[each.ledger_id]]
    failed = {} if dry_run else _moved(spark, place, secret, movable, target, quiet)
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
    password: Secret,
    movable: list[LedgerMetadata],
    target: StorageHint,
    quiet: bool,
) -> dict[int, str]:
    """Move ledgers; return those that were not, and why: for no reason those that were deleted meanwhile."""
    ids = [each.ledger_id for each in movable]
    reasons = spread(
        spark,
        partial(_move, where, password, target),
        ids,
        sizes=[each.length for each in movable],
        what=f"pybk: move to {target.value} {where}",
        quiet=quiet,
    )
    return {ledger_id: reason for ledger_id, reason in zip(ids, reasons, strict=True) if reason is not None}


def _move(where: StoreOrCluster, password: Secret, target: StorageHint, ledger_id: int) -> str | None:
    """Move a ledger, asked for by an executor; return why that failed."""
    try:
        connection(where).manager.move_ledger(ledger_id, target, password=password.read() or b"")
    except NoSuchLedgerError:
        return ""
    except PybkError as error:
        return str(error)
    return None
