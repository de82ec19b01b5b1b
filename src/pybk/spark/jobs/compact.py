"""Merges of small segments of logs, and of small ledgers of sinks, into few, large ledgers, copied by executors.

The driver does what ``Log.merge_segments`` does: it takes the lock of merges of the log, chooses the segments, and
lists each merged ledger by one compare-and-set of the log's record. Tasks only make the copies, each a ledger that no
log names yet. So a copy of a task that Spark repeats or that dies is a ledger without readers, which a sweep of the log
deletes. Ledgers of sinks are merged likewise (``pybk.spark.sink.ledger_merge``), and such a copy is an orphan of the
sink. Sinks of batch writes without an app id have few ledgers each, and those of ``copy`` and ``import_`` are compared
by their ledgers: neither is merged.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pybk.credentials import CredentialSources
from pybk.errors import PybkError
from pybk.manager.arguments import user_type
from pybk.spark.connection import StoreOrCluster, connection, task_connection
from pybk.spark.jobs.ledgers import StoreOrUrl, cluster_of
from pybk.spark.jobs.spreading import spread
from pybk.spark.jobs.transfer import COPY_OF, IMPORT_OF
from pybk.spark.log_source.log_catalog import spec_of_logs
from pybk.spark.sink import ledger_merge
from pybk.spark.sink.manifest import SINKS, Sink
from pybk.spark.sink.sink_record import is_one_off
from pybk.streams.ledger_steps import UNREADABLE, LedgerSteps, names_of
from pybk.streams.list_record import ListKind, checked_name
from pybk.streams.log_settings import LogSettings, RollPolicy
from pybk.streams.segment_merge import KEEP_SECONDS, checked_keep, copied, merge_segments

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pybk.credentials import Secret
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.spark.sink.sink_record import LedgerMerge
    from pybk.streams.ledger_list import Merge
    from pybk.streams.segment_merge import MergePlan


@dataclass(frozen=True, slots=True)
class CompactedLog:
    """The result of merging the segments of one log.

    Attributes:
        log: The log.
        ledgers: The number of ledgers that were written, and that the log has now.
        replaced: The number of segments in place of which it has them.
        records: The number of their records.
        bytes: Payload bytes of these ledgers.
        segments: The number of segments of the log afterwards; None if it was left out.
        failed: The reasons why the log was left out, or some of its segments were.
    """

    log: str
    ledgers: int = 0
    replaced: int = 0
    records: int = 0
    bytes: int = 0
    segments: int | None = None
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CompactedSink:
    """The result of merging ledgers of one sink.

    Attributes:
        sink: The app id of the sink.
        ledgers: The number of ledgers that were written.
        replaced: The number of ledgers in place of which the sink has them.
        entries: The number of their entries.
        bytes: Payload bytes of these ledgers.
        left: The number of ledgers that have the entries of the sink afterwards; None if it was left out.
        failed: The reasons why the sink was left out, or some of its ledgers were; and why ledgers that earlier calls
            have replaced could not be deleted.
    """

    sink: str
    ledgers: int = 0
    replaced: int = 0
    entries: int = 0
    bytes: int = 0
    left: int | None = None
    failed: tuple[str, ...] = ()


def compact(
    spark: SparkSession,
    where: StoreOrUrl,
    logs: Iterable[str] | None = None,
    *,
    cluster_secret: bytes | Secret | None = None,
    password: bytes | Secret | None = None,
    secret: bytes | Secret | None = None,
    segment_bytes: int | None = None,
    segment_age_s: float | None = None,
    segment_records: int | None = None,
    keep_s: float = KEEP_SECONDS,
    quiet: bool = False,
) -> tuple[CompactedLog, ...]:
    """Merge small segments of logs into few, large ledgers, which executors copy, while all who use the logs continue.

    Args:
        spark: The session whose executors copy records.
        where: A cluster's metadata URL.
        logs: The logs; None for all that are not sealed.
        cluster_secret: The secret of the cluster.
        password: The password of the logs; None stands for the empty one.
        secret: The secret of logs that have one. If both are given, each log takes its own.
        segment_bytes: The most bytes of a merged segment; None for the value in the settings of a log, or 64 MiB.
        segment_age_s: The longest time from the beginning of its first segment to the end of its last one, seconds;
            None likewise, with 4 hours.
        segment_records: The most records of it; None likewise, without a limit.
        keep_s: Seconds for which the ledgers that it replaces are kept for readers that have opened them.
        quiet: Do not show progress.

    Returns:
        The result for each log, in the order of their names.

    Raises:
        NoSuchLogError: A log of ``logs`` does not exist; nothing was merged.
        UsageError: A limit is not valid; or ``where`` is a store, whose logs ``pybk log merge`` merges.
        PybkError: The cluster cannot be reached.

    Durability: The merged ledgers are durable, and in their logs. Logs after each other; the copies of one at once.
    """
    keep_s = checked_keep(keep_s)
    place = cluster_of(where, cluster_secret, "its logs are merged by that process or by `pybk log merge`")
    given = CredentialSources.of(password, secret)
    asked = LogSettings(segment_bytes=segment_bytes, segment_age_s=segment_age_s, segment_records=segment_records)
    asking = partial(_asked, given, connection(place).manager)
    every = logs is None
    names = names_of(connection(place).manager, ListKind.LOG) if logs is None else sorted({*map(checked_name, logs)})
    if every:
        names = [name for name in names if _is_open(asking(name))]
    for name in () if every else names:
        with suppress(*UNREADABLE):
            asking(name).existing()
    return tuple(_compacted(spark, place, given, asking(name), asked, keep_s, quiet) for name in names)


def _asked(given: CredentialSources, manager: LedgerManager, name: str) -> LedgerSteps:
    return LedgerSteps(manager, name, spec_of_logs(ListKind.LOG, given.read()))


def _is_open(steps: LedgerSteps) -> bool:
    """Return whether a log exists, and may get records."""
    try:
        found = steps.read()
    except UNREADABLE:
        return True  # perhaps; the error is reported with the log
    return found is not None and not found.record.dropped and not found.record.sealed


def _compacted(
    spark: SparkSession,
    where: StoreOrCluster,
    given: CredentialSources,
    steps: LedgerSteps,
    asked: LogSettings,
    keep_s: float,
    quiet: bool,
) -> CompactedLog:
    failed: list[str] = []

    def copies(plans: Sequence[MergePlan]) -> Iterator[Merge | None]:
        made = spread(
            spark,
            partial(_copy, where, given, steps.name),
            plans,
            sizes=[plan.nbytes for plan in plans],
            what=f"pybk: merge segments of log {steps.name} of {where}",
            quiet=quiet,
        )
        for each in made:
            if isinstance(each, str):
                failed.append(each)
            else:
                # The time to keep begins with the listing, which is after all copies.
                yield None if each is None else each._replace(until_ns=time.time_ns() + int(keep_s * 1e9))

    try:
        steps.pin()
        steps.check_password()
        made = merge_segments(steps, RollPolicy.of(asked.over(steps.settings())), keep_s, copies)
    except PybkError as error:
        return CompactedLog(steps.name, failed=(*failed, str(error)))
    return CompactedLog(
        steps.name, made.ledgers, made.replaced, made.records, made.nbytes, made.segments, tuple(failed)
    )


def _copy(where: StoreOrCluster, given: CredentialSources, name: str, plan: MergePlan) -> Merge | str | None:
    """Copy the records of segments into one ledger; runs in an executor.

    Returns:
        The merge; None if the log does not have all of the records any more; a text with the reason of a failure.
    """
    try:
        return copied(_asked(given, task_connection(where).manager, name), plan)
    except PybkError as error:
        first, last = plan.members[0], plan.members[-1]
        return f"records {first.first_seq} to {last.last_seq} of log {name!r}: {error}"


# ---- ledgers of sinks ------------------------------------------------------------------------------------------------


def compact_ledgers(
    spark: SparkSession,
    where: StoreOrUrl,
    ledger_type: str | None = None,
    *,
    cluster_secret: bytes | Secret | None = None,
    password: bytes | Secret | None = None,
    secret: bytes | Secret | None = None,
    segment_bytes: int | None = None,
    segment_age_s: float | None = None,
    segment_records: int | None = None,
    keep_s: float = KEEP_SECONDS,
    quiet: bool = False,
) -> tuple[CompactedSink, ...]:
    """Merge small ledgers that Spark has written into few, large ones, which executors copy, while all continue.

    Ledgers of one sink are merged if they follow each other, and have the same type, hints, digest, quorums and kind of
    password. Readers see no difference: each row keeps its ledger and its entry. What earlier calls have replaced, and
    whose time is over, is deleted.

    Args:
        spark: The session whose executors copy entries.
        where: A cluster's metadata URL.
        ledger_type: The type of the ledgers; None for all.
        cluster_secret: The secret of the cluster.
        password: The password of the ledgers; None stands for the empty one.
        secret: The secret of ledgers that have one. If both are given, each ledger takes its own.
        segment_bytes: The most payload bytes of a merged ledger; None for 64 MiB.
        segment_age_s: The longest time between the creation of its first ledger and its last one, seconds; None for 4
            hours. Retention deletes a merged ledger as a whole.
        segment_records: The most entries of it; None for no limit.
        keep_s: Seconds for which the ledgers that it replaces are kept for readers that have planned to read them.
        quiet: Do not show progress.

    Returns:
        The result for each sink, in the order of their app ids.

    Raises:
        UsageError: A limit is not valid; or ``where`` is a store.
        PybkError: The cluster cannot be reached.

    Durability: The merged ledgers are durable, and named by their sinks.

    Cost: Reads the records and manifests of all sinks, and the metadata of their small ledgers.
    """
    keep_s = checked_keep(keep_s)
    place = cluster_of(where, cluster_secret, "Spark does not write ledgers to it")
    asked = LogSettings(segment_bytes=segment_bytes, segment_age_s=segment_age_s, segment_records=segment_records)
    metadata = connection(place).metadata
    assert metadata is not None, "it is named by a URL"
    names = sorted(name for name in metadata.pointer_names(SINKS) if not is_one_off(name))
    compacting = partial(
        _compacted_sink,
        spark,
        place,
        CredentialSources.of(password, secret),
        policy=RollPolicy.of(asked),
        kind=None if ledger_type is None else str(user_type(ledger_type)),
        keep_s=keep_s,
        quiet=quiet,
    )
    return tuple(compacting(name) for name in names if not name.startswith((COPY_OF, IMPORT_OF)))


def _compacted_sink(
    spark: SparkSession,
    where: StoreOrCluster,
    given: CredentialSources,
    app_id: str,
    *,
    policy: RollPolicy,
    kind: str | None,
    keep_s: float,
    quiet: bool,
) -> CompactedSink:
    failed: list[str] = []

    def copies(plans: Sequence[ledger_merge.MergePlan]) -> Iterator[LedgerMerge | None]:
        made = spread(
            spark,
            partial(_copy_ledgers, where, given, app_id),
            plans,
            sizes=[plan.nbytes for plan in plans],
            what=f"pybk: merge ledgers of sink {app_id} of {where}",
            quiet=quiet,
        )
        for each in made:
            if isinstance(each, str):
                failed.append(each)
            else:
                yield each

    found = connection(where)
    assert found.metadata is not None, "it is named by a URL"
    try:
        sink = Sink(found.manager, found.metadata, app_id, given=given.read())
        made = ledger_merge.merge_ledgers(sink, found.manager, policy, keep_s, copies, kind)
    except PybkError as error:
        return CompactedSink(app_id, failed=(*failed, str(error)))
    if made.failed:
        failed.append(made.failed)
    if made.stay:
        ledger_id, reason = made.stay[0]
        failed.append(
            f"{len(made.stay)} ledgers that earlier merges have replaced were not deleted, and the next call tries "
            f"again; the first is {ledger_id}: {reason}"
        )
    return CompactedSink(app_id, made.ledgers, made.replaced, made.entries, made.nbytes, made.left, tuple(failed))


def _copy_ledgers(
    where: StoreOrCluster, given: CredentialSources, app_id: str, plan: ledger_merge.MergePlan
) -> LedgerMerge | str | None:
    """Copy ledgers of a sink into one; runs in an executor.

    Returns:
        The merge; None if a ledger was deleted meanwhile; a text with the reason of a failure.
    """
    try:
        return ledger_merge.copied(task_connection(where).manager, given.read(), plan)
    except PybkError as error:
        first, last = plan.members[0], plan.members[-1]
        return f"ledgers {first.ledger_id} to {last.ledger_id} of sink {app_id!r}: {error}"
