"""Reads with locality: each task runs on an executor whose bookie has the entries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pybk.spark.connection import connection
from pybk.spark.executors.executor import ExecutorBookie, local_bookie
from pybk.spark.executors.task_placement import ask_executors, executor_locations, located_rdd, spark_context
from pybk.spark.options import source_options
from pybk.spark.source.batch_reader import BatchReader
from pybk.spark.source.columns import schema_of
from pybk.spark.source.planning import EntryRange, SizedRange, split_into_tasks
from pybk.spark.source.reading import read_ranges

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from pybk.ledger.ledger_metadata import Bookie, Fragment
    from pybk.manager.ledger_manager import LedgerManager

Locations = tuple[str, ...]
"""The preferred locations of a task, in order of name; empty if no executor's bookie has the entries."""


def read_local(spark: SparkSession, **options: str) -> DataFrame:
    """Read ledgers as ``spark.read.format("pybk")`` does, with tasks on the executors whose bookies have the entries.

    The call itself determines the entries to read and their executors. Filters are not pushed down to the ledgers: use
    the options ``startEntry`` and ``endEntry``.

    Args:
        spark: The session. With Spark Connect, or without pandas, Spark places the tasks freely.
        options: The options of the format.

    Returns:
        The rows.

    Raises:
        UsageError: An option is not valid.
        NoSuchLedgerError: A ledger that is selected by its id does not exist.
        UnauthorizedError: The password is wrong.

    Cost: One small task on each executor, which reports the executor's bookie.
    """
    found = source_options(options, streaming=False)
    sc = spark_context(spark)
    url = found.where.metadata_uri
    if sc is None or url is None or find_spec("pandas") is None:
        return spark.read.format("pybk").options(**options).load()
    schema = schema_of(found)
    groups: dict[Locations, list[SizedRange[EntryRange]]] = {}
    for locations, part in _placed_parts(
        spark, url, connection(found.where).manager, BatchReader(found, schema).ranges()
    ):
        groups.setdefault(locations, []).append(part)
    tasks = [
        (locations, entry_ranges)
        for locations, group in sorted(groups.items())
        for entry_ranges in split_into_tasks(group, found.entries_per_partition)
    ]
    items = [(b"%d" % number, locations) for number, (locations, _) in enumerate(tasks)]
    numbers = located_rdd(sc, items).map(lambda number: (int(number),))
    read = partial(_read, partial(read_ranges, found, schema), [entry_ranges for _, entry_ranges in tasks])
    return spark.createDataFrame(numbers, "task int").mapInArrow(read, schema)


def _placed_parts(
    spark: SparkSession, url: str, manager: LedgerManager, ranges: Sequence[SizedRange[EntryRange]]
) -> Iterator[tuple[Locations, SizedRange[EntryRange]]]:
    """Yield the ranges to read, each with the locations of executors whose bookies have it."""
    answers = map(json.loads, ask_executors(spark, executor_locations(spark), partial(_own_bookie, url)))
    bookies = [ExecutorBookie(**answer) for answer in answers if answer is not None]
    local = {found.bookie: found.location for found in bookies if found.location is not None}
    known: dict[int, tuple[Fragment, ...]] = {}
    for part in ranges:
        stored_in = part.entry_range.stored_in
        if stored_in not in known:
            known[stored_in] = manager.ledger_metadata(stored_in).fragments
        for locations, entry_range in split(part.entry_range, known[stored_in], local):
            yield locations, part._replace(entry_range=entry_range)


def split(
    entry_range: EntryRange, fragments: Sequence[Fragment], local: Mapping[Bookie, str]
) -> Iterator[tuple[Locations, EntryRange]]:
    """Cut a range of entries at the boundaries of fragments.

    Args:
        entry_range: The entries.
        fragments: The fragments of the ledger that has them.
        local: The locations of executors by their bookie.

    Yields:
        The parts of the range, each with the locations of its bookies.
    """
    firsts = [fragment.first_entry_id - entry_range.shift for fragment in fragments]
    ends = [*firsts[1:], entry_range.last + 1]
    for fragment, first, end in zip(fragments, firsts, ends, strict=True):
        low, high = max(entry_range.first, first), min(entry_range.last, end - 1)
        if low <= high:
            locations = sorted({local[bookie] for bookie in fragment.ensemble if bookie in local})
            yield tuple(locations), entry_range.part(low, high)


def _own_bookie(url: str) -> str:
    """Return the bookie of this task's executor as JSON; null if it has none."""
    found = local_bookie(url)
    return json.dumps(None if found is None else asdict(found))


def _read(
    read: Callable[[tuple[EntryRange, ...]], Iterator[pa.RecordBatch]],
    tasks: Sequence[tuple[EntryRange, ...]],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from read(tasks[number])
