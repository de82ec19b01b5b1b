"""The messages of tasks to the driver, and what a task knows of the streaming query that it works for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from pybk.errors import IllegalOperationError

_QUERY: Final = "sql.streaming.queryId"
_RUN: Final = "spark.jobGroup.id"  # the job group, which in a streaming query is the id of its run
_BATCH: Final = "streaming.sql.batchId"
"""Spark's names for properties of a task's job."""

Messages: TypeAlias = Sequence[WriterCommitMessage | None]
"""Messages as Spark passes them, with None for a partition without one."""

M = TypeVar("M", bound=WriterCommitMessage)


class MicroBatch(NamedTuple):
    """The micro-batch of a streaming query that a task works for.

    Attributes:
        query: The id of the query, which its checkpoint keeps.
        run: The id of its run, which each start makes.
        number: The number of the micro-batch.
    """

    query: str
    run: str
    number: int


def micro_batch() -> MicroBatch:
    """Return the micro-batch of this task.

    Raises:
        IllegalOperationError: It is not a task of a streaming query.
    """
    context = TaskContext.get()
    found = [None if context is None else context.getLocalProperty(each) for each in (_QUERY, _RUN, _BATCH)]
    query, run, number = found
    if not query or not run or not number:
        raise IllegalOperationError("a stream is written by tasks of a streaming query, and this is not one")
    return MicroBatch(query, run, int(number))


def received(messages: Messages, kind: type[M]) -> list[M]:
    """Return the messages of the tasks that sent one of a kind."""
    return [message for message in messages if isinstance(message, kind)]


def all_received(messages: Messages, kind: type[M]) -> list[M]:
    """Return the messages of all tasks; raises IllegalOperationError if one is missing."""
    found = received(messages, kind)
    if not found or len(found) != len(messages):
        raise IllegalOperationError(
            f"{len(found)} of {len(messages)} partitions reported what they wrote; nothing was committed"
        )
    return found
