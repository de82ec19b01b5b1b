"""The commit of a write in each of its logs, in the driver.

Theory of operation
-------------------

A write has a *query*, which is the id of a streaming query (after its ``appId``), ``txnAppId`` or a name of its own,
and an *epoch*, which is the number of the micro-batch or ``txnVersion``. Each log remembers the last epoch that it has
adopted of a query (rule T18), so a commit takes effect once in each log, however often it is made, by whichever driver.

1. Each task attempt writes a detached segment for each log, which no reader sees, or sends few records to the driver.
   Spark passes one attempt per partition to the driver.
2. In each log that has not adopted this epoch or a later one, the driver writes the records that tasks sent: one
   segment for those of neighbouring tasks. So segments are in the order of tasks.
3. Then each log adopts its segments, one log after the other. A driver that dies in between is started again with the
   same micro-batch, and finds that some logs have it.

Segments of this attempt that a log has not adopted are deleted, in the logs where the epoch was done before and after
an error. ``Log.discard_detached`` keeps those that the log has adopted, also if the answer was lost by which it did.
Segments of attempts whose process died are named by no message: the first commit of a query in a log on each day sweeps
those of its earlier epochs (rule T19).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql.datasource import WriterCommitMessage

from pybk.errors import IllegalOperationError, PybkError
from pybk.spark.connection import connection
from pybk.spark.log_sink.open_logs import open_log
from pybk.spark.log_source.log_catalog import spec_of_logs
from pybk.streams.detached_writer import DetachedSegment
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import ListKind

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.spark.log_sink.log_sink_options import LogSinkOptions
    from pybk.spark.log_sink.task_segments import LogPart
    from pybk.streams.log import Log

COMMIT_SECONDS: Final = 60.0
"""The seconds for which a commit waits for commits of other queries to the log."""

DAY_NS: Final = 86_400 * 10**9
"""A day; the first commit of a query in a log on each of them sweeps."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogCommitMessage(WriterCommitMessage):
    """A task's message to the driver.

    Attributes:
        partition: The number of the task.
        parts: What it wrote to each log.
        query: The streaming query; empty in a batch write.
    """

    partition: int
    parts: tuple[LogPart, ...]
    query: str = ""


class Commit(NamedTuple):
    """A commit of a write.

    Attributes:
        query: The query.
        epoch: The number of the commit.
        is_stream: Whether the number is that of a micro-batch.
        app_id: The option ``appId`` of a stream.
        remember_s: Seconds for which the logs remember it; None for as long as they remember commits.
    """

    query: str
    epoch: int
    is_stream: bool
    app_id: str | None = None
    remember_s: float | None = None


def query_of(app_id: str | None, stream: str) -> str:
    """Return the query of a stream.

    It has the id of the stream even if it has a name: micro-batches of another checkpoint have the same numbers.

    Args:
        app_id: The option ``appId``, if it is given.
        stream: The id of the stream.
    """
    return stream if app_id is None else f"{app_id}@{stream}"


class _LogCommit:
    """The commit in one log.

    Args:
        manager: The cluster's ledgers.
        options: The options of the write.
        log: The log.
        commit: The commit.
        parts: What each task wrote, by the task's number.
    """

    def __init__(
        self,
        manager: LedgerManager,
        options: LogSinkOptions,
        log: Log,
        commit: Commit,
        parts: Sequence[tuple[int, LogPart]],
    ) -> None:
        self.log: Final = log
        self._commit = commit
        self._parts = parts
        self._segments: list[DetachedSegment] = []
        """The segments that the log is to adopt, in order."""
        self._own = _segments_of(part for _, part in parts)
        """The segments of this attempt."""
        steps = LedgerSteps(manager, log.name, spec_of_logs(ListKind.LOG, options.given.read()))
        self._known: Final = steps.existing().record.producers
        """The last commits of all queries before this one."""
        self._last: Final = self._known.get(commit.query)
        """The last commit of the query before this one."""

    @property
    def _is_done(self) -> bool:
        return self._last is not None and self._last.epoch >= self._commit.epoch

    def prepare(self) -> None:
        """Write the records that tasks sent to the driver, unless the log has this commit.

        Raises:
            IllegalOperationError: Another query has the ``appId``.
        """
        commit = self._commit
        self._check_app_id()
        if self._is_done:
            self._note_skipped()
            return  # adopt() deletes what tasks wrote
        for are_few, neighbours in groupby(self._parts, key=lambda each: each[1].segment is None):
            if not are_few:
                self._segments += _segments_of(part for _, part in neighbours)
                continue
            (partition, first), *others = neighbours
            with self.log.detached_segment(query=commit.query, epoch=commit.epoch, partition=partition) as writer:
                for part in (first, *(part for _, part in others)):
                    writer.append_many(part.records)
                self._segments.append(writer.seal())
            self._own.append(self._segments[-1])

    def _check_app_id(self) -> None:
        """Refuse an ``appId`` that another query of this log has, such as that of an older checkpoint."""
        app_id, query = self._commit.app_id, self._commit.query
        other = next((each for each in self._known if each.rpartition("@")[0] == app_id and each != query), None)
        if app_id is not None and other is not None:
            raise IllegalOperationError(
                f"log {self.log.name!r} has micro-batches of appId {app_id!r} of query {other.rpartition('@')[2]}, and "
                f"this is query {query.rpartition('@')[2]}: each checkpoint needs its own; give another appId, or "
                "leave it out"
            )

    def _note_skipped(self) -> None:
        """Log that a micro-batch is skipped, unless it is the last one, which alone Spark repeats."""
        commit, last = self._commit, self._last
        if commit.is_stream and last is not None and last.epoch > commit.epoch:
            logger.warning(
                "log %r has the micro-batches of %r up to %d, and skips %d: another driver has the checkpoint, or an "
                "older one was restored",
                *(self.log.name, commit.query, last.epoch, commit.epoch),
            )

    def adopt(self) -> bool:
        """Have the log adopt the segments; return False if it had the commit before.

        Raises:
            PybkError: As ``Log.adopt``.
        """
        commit = self._commit
        is_new = (
            not self._is_done
            and self.log.adopt(
                self._segments,
                query=commit.query,
                epoch=commit.epoch,
                wait=COMMIT_SECONDS,
                remember=commit.remember_s,
            ).is_new
        )
        if not is_new:
            self.discard_unlisted()
        elif self._last is not None and self._last.time_ns // DAY_NS < time.time_ns() // DAY_NS:
            self._sweep()
        return is_new

    def discard_unlisted(self) -> None:
        """Delete the segments of this attempt that the log has not adopted; a sweep deletes what this cannot."""
        _discard(self.log, self._commit, self._own)

    def _sweep(self) -> None:
        """Delete ledgers that attempts of earlier commits left whose processes died."""
        query, log = self._commit.query, self.log
        try:
            log.sweep_detached(query)
        except PybkError as error:
            logger.warning("log %r: ledgers that %r left were not swept: %s", log.name, query, error)


def commit_in_logs(options: LogSinkOptions, commit: Commit, messages: Sequence[LogCommitMessage]) -> list[str]:
    """Commit what tasks wrote, in each log.

    Args:
        options: The options of the write.
        commit: The commit.
        messages: Those of all tasks, in their order.

    Returns:
        The logs that had the commit before; what was written for them is deleted.

    Raises:
        LogLockedError: A live writer has a log; those before it, by name, have adopted what is theirs.
        IllegalOperationError: Another query has the ``appId``; nothing was committed.
        PybkError: As ``Log.adopt``. Make the commit again; logs that have it skip it.

    Durability: The records are durable, and in the logs.
    """
    manager = connection(options.where).manager
    with ExitStack() as opened:
        commits: list[_LogCommit] = []
        try:
            for name, parts in _by_log(messages).items():
                log = opened.enter_context(open_log(options, manager, name))
                commits.append(_LogCommit(manager, options, log, commit, parts))
                commits[-1].prepare()
            return [each.log.name for each in commits if not each.adopt()]
        except PybkError:
            for each in commits:
                each.discard_unlisted()
            raise


def abort_in_logs(options: LogSinkOptions, commit: Commit, messages: Sequence[LogCommitMessage]) -> None:
    """Delete the segments that tasks wrote, except those that the logs have adopted.

    Args:
        options: The options of the write.
        commit: The commit, which is not made any more.
        messages: Those of the tasks that sent one.
    """
    manager = connection(options.where).manager
    options = replace(options, create=False)  # a log that was deleted meanwhile has nothing to delete
    for name, parts in _by_log(messages).items():
        segments = _segments_of(part for _, part in parts)
        if segments:
            try:
                with open_log(options, manager, name) as log:
                    _discard(log, commit, segments)
            except PybkError as error:
                logger.warning("segments of an attempt that failed stay in log %r: %s", name, error)


def _by_log(messages: Iterable[LogCommitMessage]) -> dict[str, list[tuple[int, LogPart]]]:
    """Return what tasks wrote to each log, by the name of the log."""
    found: dict[str, list[tuple[int, LogPart]]] = {}
    for message in messages:
        for part in message.parts:
            found.setdefault(part.log, []).append((message.partition, part))
    return dict(sorted(found.items()))


def _segments_of(parts: Iterable[LogPart]) -> list[DetachedSegment]:
    return [part.segment for part in parts if part.segment is not None]


def _discard(log: Log, commit: Commit, segments: Sequence[DetachedSegment]) -> None:
    """Delete segments that a log has not adopted; those that cannot be deleted now are left to a sweep."""
    if not segments:
        return
    try:
        log.discard_detached(segments, query=commit.query, epoch=commit.epoch)
    except PybkError as error:
        logger.warning("segments of an attempt that failed stay in log %r: %s", log.name, error)
