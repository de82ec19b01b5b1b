"""A copy of ledgers in another cluster: a backup, which resumes where it was interrupted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from pybk.errors import NoSuchLedgerError, PybkError, UsageError
from pybk.spark.connection import StoreOrCluster, connection
from pybk.spark.jobs.ledgers import StoreOrUrl, cluster_of, secret_of, selected_ledgers, where_of
from pybk.spark.jobs.spreading import spread
from pybk.spark.jobs.transfer import (
    COPY_OF,
    Quorums,
    TransferHeader,
    TransferPlan,
    TransferTarget,
    finish,
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
_ROUND_LEDGERS: Final = 1000
"""What is copied before it counts: an interrupted copy begins with the last round again."""

_BATCH_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy did.

    Attributes:
        ledgers: All ledgers of the source that are in the target now, with their ids there.
        copied: Those that were copied now.
        bytes: Their payload bytes.
        not_opened: Ledgers whose password is another.
        open: Ledgers that were left out because they are not closed.
        failed: Ledgers that could not be copied, and why.
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
    ledgers: Iterable[int] | None = None,
    ledger_type: str | None = None,
    open_too: bool = False,
    quorums: Quorums | None = None,
    quiet: bool = False,
) -> Copied:
    """Copy ledgers to another cluster: entries, type, hints, digest, custom metadata; their ids there are new.

    Ledgers that the target already has with as many entries and bytes are left. Copies count in rounds of
    some gigabytes: one that was interrupted resumes when this is called again.

    Args:
        spark: The session whose executors copy.
        source: A store's directory, or a cluster's metadata URL.
        target: Another cluster's metadata URL.
        cluster_secret: The source's.
        target_secret: The target's.
        password: The ledgers', here and there; None stands for the empty one.
        ledgers: Only ledgers of these ids.
        ledger_type: Only those of this type.
        open_too: Copy ledgers that are not closed, too, as far as they are confirmed now; the copies are closed. When
            such a ledger has become longer, a copy of all of it takes the place of the one before, which is deleted
            a moment after the longer one counts; readers of the target have both in between. A copy that was
            interrupted there leaves both, until copying is called again.
        quorums: Ensemble size, write quorum and ack quorum of the copies; None for those of the source's ledgers, or
            the target's defaults for those of a store.
        quiet: Show no progress.

    Raises:
        NoSuchLedgerError: A ledger that was named is not there.
        IllegalOperationError: The same is being copied by another process.
        UsageError: The target is a store, or the source itself.
        PybkError: One of the two cannot be reached, or a copy that has a longer one by now cannot be deleted.

    Durability: Ledgers that are returned as copied are durable and committed.
    """
    place = where_of(source, cluster_secret)
    there = cluster_of(target, target_secret, "nobody else makes ledgers in it")
    secret = secret_of(password)
    found = connection(place)
    origin = found.manager.store_id.hex()
    if origin == connection(there).manager.store_id.hex():
        raise UsageError(f"{there} is where the ledgers are already; a copy is made in another cluster")
    to = TransferTarget(there, secret, COPY_OF, origin)
    wanted = partial(selected_ledgers, place, None if ledgers is None else tuple(ledgers), ledger_type)
    plan = plan_transfer(found, secret.read(), wanted, open_too=open_too, quorums=quorums)
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
    """Copy the ledgers that the target lacks, round by round; return those that were copied."""
    # The number is read before the ledgers are listed, so a commit that the list misses has taken the number.
    number = to.sink.record().last + 1
    to.drop_outdated()  # an interrupted copy may have left some
    before = to.there()
    wanted = [header for header in plan.headers if not is_there(before.get(header.ledger_id), header)]
    copied: list[TransferHeader] = []
    for group in rounds(wanted, _ROUND_BYTES, _ROUND_LEDGERS):
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
    """Copy some ledgers, which count then all at once, as the commit of a number; return those that were copied."""
    done = spread(
        spark,
        partial(_copy, place, to),
        group,
        sizes=[header.length for header in group],
        what=f"pybk: copy {place} to {to.where}",
        quiet=quiet,
    )
    written: list[WrittenLedger] = []
    copied: list[TransferHeader] = []
    for header, outcome in zip(group, done, strict=True):
        if outcome is None:
            continue
        if isinstance(outcome, str):
            plan.failed.append((header.ledger_id, outcome))
        else:
            written.append(outcome)
            copied.append(header)
    if written:
        replace(to, quorums=safest_quorums(copied)).commit(number, written)
    return copied


def _copy(place: StoreOrCluster, to: TransferTarget, header: TransferHeader) -> WrittenLedger | str | None:
    """Copy one ledger, in an executor; return why that failed, or None if it was deleted meanwhile."""
    writer = None
    try:
        with connection(place).manager.open_ledger(
            header.ledger_id, password=to.password.read() or b"", recover=False
        ) as reader:
            writer = to.create(header)
            at, pending = 0, None
            while at < header.entries:
                batch = reader.read_batch(at, max_bytes=_BATCH_BYTES, last=header.entries - 1)
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
