"""Distribution of a job's work over executors, with progress on the driver's terminal."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tqdm import tqdm

from pybk.errors import IllegalOperationError
from pybk.spark.executors.executor_python import one_line_for_other_pythons
from pybk.values import flag_of

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.accumulators import Accumulator
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

TASK_BYTES: Final = 256 << 20
"""The maximum bytes of one task, unless a single unit of work is larger."""

_TASKS_PER_CORE: Final = 4
_SHOWN_EVERY_S: Final = 0.2
_DESCRIPTION: Final = "spark.job.description"
_GROUP: Final = "spark.jobGroup.id"

U = TypeVar("U")
R = TypeVar("R")


def context_of(spark: SparkSession) -> SparkContext:
    """Return a session's SparkContext.

    Raises:
        IllegalOperationError: The session has none, because it is one of Spark Connect.
    """
    try:
        return spark.sparkContext
    except Exception as error:
        raise IllegalOperationError(
            "this session has no SparkContext, because it is a session of Spark Connect: run jobs over ledgers in a "
            "driver of the cluster"
        ) from error


def spread(
    spark: SparkSession,
    work: Callable[[U], R],
    units: Sequence[U],
    *,
    sizes: Sequence[int],
    what: str,
    quiet: bool = False,
) -> list[R]:
    """Run a function for each unit of work on executors, and return the results in the order of the units.

    Args:
        spark: The session.
        work: The function, called with one unit; it and the units are pickled and sent to executors.
        units: The units of work.
        sizes: The approximate bytes of each unit, from which tasks of similar size are formed.
        what: The description of the work, for people; must not contain secrets.
        quiet: Do not show progress on the terminal.
    """
    if not units:
        return []
    with _tasks(
        spark, lambda unit: (work(unit),), units, sizes, what, None if flag_of(quiet, "quiet") else "B"
    ) as found:
        return found.collect()


def spread_rows(
    spark: SparkSession,
    work: Callable[[U], Iterable[tuple[Any, ...]]],
    units: Sequence[U],
    schema: StructType,
    *,
    sizes: Sequence[int],
    what: str,
    quiet: bool = False,
) -> DataFrame:
    """Compute rows on executors, and return them as a data frame that is persisted there.

    Args:
        spark: The session.
        work: The function, called with one unit; it returns the rows of the unit.
        units: The units of work.
        schema: The schema of the rows.
        sizes: The number of ledgers in each unit.
        what: The description of the work, for people; must not contain secrets.
        quiet: Do not show progress on the terminal.
    """
    if not units:
        return spark.createDataFrame([], schema)
    with _tasks(spark, work, units, sizes, what, None if flag_of(quiet, "quiet") else " ledgers") as found:
        frame = spark.createDataFrame(found, schema, verifySchema=False).persist()
        frame.count()
        return frame


@contextmanager
def _tasks(
    spark: SparkSession,
    work: Callable[[U], Iterable[R]],
    units: Sequence[U],
    sizes: Sequence[int],
    what: str,
    shown_in: str | None,
) -> Iterator[RDD[R]]:
    """Yield an RDD of the units' results; while its tasks run, show progress, counted in ``shown_in`` if given."""
    context = context_of(spark)
    done: Accumulator[int] = context.accumulator(0)

    def work_on(group: list[tuple[U, int]]) -> Iterator[R]:
        for unit, size in group:
            yield from work(unit)
            done.add(size)

    groups = grouped(sizes, context.defaultParallelism)
    parts = [list(zip(units[low:high], sizes[low:high], strict=True)) for low, high in groups]
    before = context.getLocalProperty(_DESCRIPTION)
    context.setLocalProperty(_DESCRIPTION, what)
    try:
        with one_line_for_other_pythons(), _bar(lambda: (done.value, sum(sizes)), what, shown_in):
            yield context.parallelize(parts, len(parts)).flatMap(work_on)
    finally:
        context.setLocalProperty(_DESCRIPTION, before)  # type: ignore[arg-type]  # None removes it


def grouped(sizes: Sequence[int], cores: int) -> list[tuple[int, int]]:
    """Return the half-open range of units of each task; there are several tasks per core.

    Args:
        sizes: The bytes of each unit.
        cores: The number of tasks that run at once.
    """
    most = min(TASK_BYTES, max(1, sum(sizes) // (_TASKS_PER_CORE * cores)))
    groups = []
    low = held = 0
    for number, size in enumerate(sizes):
        if number > low and held + size > most:
            groups.append((low, number))
            low, held = number, 0
        held += size
    return [*groups, (low, len(sizes))] if sizes else []


@contextmanager
def _bar(progress: Callable[[], tuple[int, int]], what: str, unit: str | None) -> Iterator[None]:
    """Show a progress bar on a terminal; ``progress`` returns the done and total amounts. None as unit shows none."""
    ended = threading.Event()
    # With ``disable=None``, tqdm shows the bar only if standard error is a terminal.
    with tqdm(
        desc=what, unit=unit or "", unit_scale=True, disable=None if unit else True, file=sys.stderr, leave=False
    ) as bar:

        def look() -> None:
            while not ended.wait(_SHOWN_EVERY_S):
                done, bar.total = progress()
                bar.update(done - bar.n)

        thread = threading.Thread(target=look, name="pybk-progress", daemon=True)
        if not bar.disable:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread.ident is not None:
                thread.join()


@contextmanager
def shown_jobs(spark: SparkSession, what: str, *, quiet: bool = False) -> Iterator[None]:
    """Show on a terminal the progress of the Spark jobs that this thread starts in the context.

    Args:
        spark: The session.
        what: The description of the work, for people; must not contain secrets.
        quiet: Do not show progress.
    """
    context = context_of(spark)
    tracker = context.statusTracker()
    group = f"pybk-{secrets.token_hex(8)}"
    before = {name: context.getLocalProperty(name) for name in (_GROUP, _DESCRIPTION)}

    def tasks() -> tuple[int, int]:
        jobs = filter(None, map(tracker.getJobInfo, tracker.getJobIdsForGroup(group)))
        stages = [stage for job in jobs for stage in map(tracker.getStageInfo, job.stageIds) if stage is not None]
        return sum(stage.numCompletedTasks for stage in stages), sum(stage.numTasks for stage in stages)

    context.setLocalProperty(_GROUP, group)
    context.setLocalProperty(_DESCRIPTION, what)
    try:
        with one_line_for_other_pythons(), _bar(tasks, what, None if flag_of(quiet, "quiet") else " tasks"):
            yield
    finally:
        for name, value in before.items():
            context.setLocalProperty(name, value)  # type: ignore[arg-type]  # None removes it
