"""Merges of small segments of logs into few, large ledgers, copied by executors.

The driver does what ``Log.merge_segments`` does: it takes the lock of merges of the log, chooses the segments, and
lists each merged ledger by one compare-and-set of the log's record. Tasks only make the copies, each a ledger that no
log names yet. So a copy of a task that Spark repeats or that dies is a ledger without readers, which a sweep of the log
deletes. Ledgers of a sink, which are read by their numbers, are not compacted: the checkpoint of a query that has read
some of them does not say that a ledger in their place was read.
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
from pybk.spark.connection import StoreOrCluster, connection, task_connection
from pybk.spark.jobs.ledgers import StoreOrUrl, cluster_of
from pybk.spark.jobs.spreading import spread
from pybk.spark.log_source.log_catalog import spec_of_logs
from pybk.streams.ledger_spec import LogSettings
from pybk.streams.ledger_steps import UNREADABLE, LedgerSteps, names_of
from pybk.streams.list_record import ListKind, checked_name
from pybk.streams.list_writer import RollPolicy
from pybk.streams.segment_merge import KEEP_SECONDS, checked_keep, copied, merge_segments

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pybk.credentials import Secret
    from pybk.manager.ledger_manager import LedgerManager
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
