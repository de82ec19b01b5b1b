"""Copies of ledgers in another cluster, as a backup; an interrupted copy resumes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from pybk.credentials import CredentialSources
from pybk.errors import NoSuchLedgerError, PybkError, UsageError
from pybk.spark.connection import StoreOrCluster, connection
from pybk.spark.jobs.ledgers import StoreOrUrl, cluster_of, selected_ledgers, where_of
from pybk.spark.jobs.spreading import spread
from pybk.spark.jobs.transfer import (
    COPY_OF,
    Quorums,
    TransferHeader,
    TransferPlan,
    TransferTarget,
    finish,
    follow_merges,
    is_there,
    plan_transfer,
    rounds,
    safest_quorums,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pybk.credentials import Secret
    from pybk.spark.sink.manifest import WrittenLedger

_ROUND_BYTES: Final = 4 << 30
ROUND_LEDGERS: Final = 1000
"""The most ledgers and bytes that are copied before a commit; an interrupted copy repeats the uncommitted round."""

_BATCH_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of a copy.

    Attributes:
        ledgers: The id of each selected source ledger that the target now has, with the id of its copy.
        copied: Source ids of the ledgers that this call copied.
        bytes: Their payload bytes.
        not_opened: Ids of ledgers left out because they have another password.
        open: Ids of ledgers left out because they are not closed.
        failed: Ids of ledgers that could not be copied, each with the reason.
    """

    ledgers: dict[int, int]
    copied: tuple[int, ...]
    bytes: int
    not_opened: tuple[int, ...]
    open: tuple[int, ...]
    failed: tuple[tuple[int, str], ...]


def copy(
    spark: SparkSession,
    source: StoreOrUrl,
    target: StoreOrUrl,
    *,
    cluster_secret: bytes | Secret | None = None,
    target_secret: bytes | Secret | None = None,
    password: bytes | Secret | None = None,
    secret: bytes | Secret | None = None,
    ledgers: Iterable[int] | None = None,
    ledger_type: str | None = None,
    open_too: bool = False,
    quorums: Quorums | None = None,
    quiet: bool = False,
) -> Copied:
    """Copy ledgers to another cluster: entries, type, hints, digest and custom metadata; the copies have new ids.

    Ledgers of which the target has a copy with as many entries and bytes are skipped. Copies are committed in rounds
    of some gigabytes, so a call after an interruption copies only the remaining ledgers.

    Args:
        spark: The session whose executors copy.
        source: A store's directory, or a cluster's metadata URL.
        target: Another cluster's metadata URL.
        cluster_secret: The secret of the source cluster.
        target_secret: The secret of the target cluster.
        password: The password of the ledgers and of their copies; None stands for the empty one.
        secret: The secret of ledgers that have one. If both are given, each ledger takes its own, and new ledgers take
            the secret.
        ledgers: Ids of the ledgers to copy; None for all.
        ledger_type: Copy only ledgers of this type.
        open_too: Also copy ledgers that are not closed, up to their last add confirmed; the copies are closed. If such
            a ledger is longer at a later call, a new copy of the whole ledger replaces the old copy, which is deleted
            just after the new one is committed; in between, readers of the target see both. If the call is interrupted
            in between, both remain until the next call.
        quorums: Ensemble size, write quorum and ack quorum of the copies; None for those of the source's ledgers, or
            for the target's defaults if the source is a store.
        quiet: Do not show progress.

    Raises:
        NoSuchLedgerError: A ledger of ``ledgers`` does not exist.
        IllegalOperationError: Another process copies from the same source to this target.
        UsageError: The target is a store, or the source itself.
        PybkError: The source or the target cannot be reached, or a copy that a longer one replaces cannot be deleted.

    Durability: On return, the ledgers in ``copied`` are durable and committed.
    """
    place = where_of(source, cluster_secret)
    there = cluster_of(target, target_secret, "other processes cannot write ledgers to it")
    given = CredentialSources.of(password, secret)
    found = connection(place)
    origin = found.manager.store_id.hex()
    if origin == connection(there).manager.store_id.hex():
        raise UsageError(f"{there} is the source itself; copy the ledgers to another cluster")
    to = TransferTarget(there, given, COPY_OF, origin)
    wanted = partial(selected_ledgers, place, None if ledgers is None else tuple(ledgers), ledger_type)
    plan = plan_transfer(found, given.read(), wanted, open_too=open_too, quorums=quorums)
    copied = _copy_all(spark, place, to, plan, quiet)
    now = to.there()
    return Copied(
        ledgers={
            header.ledger_id: now[header.ledger_id].ledger_id for header in plan.headers if header.ledger_id in now
        },
        copied=tuple(header.ledger_id for header in copied),
        bytes=sum(header.length for header in copied),
        not_opened=tuple(plan.not_opened),
        open=tuple(plan.still_open),
        failed=tuple(plan.failed),
    )


def _copy_all(
    spark: SparkSession, place: StoreOrCluster, to: TransferTarget, plan: TransferPlan, quiet: bool
) -> list[TransferHeader]:
    """Copy the ledgers that the target lacks, round by round; return the headers of those that were copied."""
    # The number is read before the ledgers are listed: a commit that the listing misses takes this number, so ours
    # is then refused.
    number = to.sink().record().last + 1
    to.drop_outdated()  # an interrupted copy may have left outdated copies
    before = to.there()
    wanted = [header for header in plan.headers if not is_there(before.get(header.ledger_id), header)]
    copied: list[TransferHeader] = []
    for group in rounds(wanted, _ROUND_BYTES, ROUND_LEDGERS):
        done = _copy_round(spark, place, to, group, plan, number, quiet)
        number += bool(done)
        copied += done
    to.drop_outdated()
    return copied


def _copy_round(
    spark: SparkSession,
    place: StoreOrCluster,
    to: TransferTarget,
    group: Sequence[TransferHeader],
    plan: TransferPlan,
    number: int,
    quiet: bool,
) -> list[TransferHeader]:
    """Copy one round of ledgers and commit them with a number; return the headers of those that were copied."""
    written: list[WrittenLedger] = []
    copied: list[TransferHeader] = []
    left = group
    while left:  # again only for ledgers that a merge has moved meanwhile
        done = spread(
            spark,
            partial(_copy, place, to),
            [(header, *plan.place(header.ledger_id)) for header in left],
            sizes=[header.length for header in left],
            what=f"pybk: copy {place} to {to.where}",
            quiet=quiet,
        )
        gone: list[TransferHeader] = []
        for header, outcome in zip(left, done, strict=True):
            if outcome is None:
                gone.append(header)
            elif isinstance(outcome, str):
                plan.failed.append((header.ledger_id, outcome))
            else:
                written.append(outcome)
                copied.append(header)
        left = gone and follow_merges(connection(place), plan, gone)
    if written:
        replace(to, quorums=safest_quorums(copied)).commit(number, written)
    return copied


def _copy(
    place: StoreOrCluster, to: TransferTarget, unit: tuple[TransferHeader, int, int]
) -> WrittenLedger | str | None:
    """Copy one ledger; runs in an executor.

    Args:
        place: The source.
        to: The target.
        unit: The header, the ledger that has the entries, and the first entry there.

    Returns:
        The copy; the reason if it failed; None if the ledger was deleted meanwhile, perhaps because it was merged.
    """
    header, stored_in, first = unit
    writer = None
    try:
        given = to.given.read()
        with connection(place).manager.open_ledger(
            stored_in, password=given.password, secret=given.secret, recover=False
        ) as reader:
            writer = to.create(header)
            at, end, pending = first, first + header.entries, None
            while at < end:
                batch = reader.read_batch(at, max_bytes=_BATCH_BYTES, last=end - 1)
                pending = writer.append_many_async([entry.payload for entry in batch])
                at += len(batch)
            return finish(writer, header, pending)
    except NoSuchLedgerError:
        outcome = None
    except PybkError as error:
        outcome = str(error)
    if writer is not None:
        to.delete(writer.ledger_id)
    return outcome
