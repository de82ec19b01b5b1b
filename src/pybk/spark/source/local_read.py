"""Tasks beside what they read: each is placed on an executor whose bookie has the entries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pybk.spark.connection import connection
from pybk.spark.executors.executor import ExecutorBookie, local_bookie
from pybk.spark.executors.placement import ask_executors, context, executor_locations, placed
from pybk.spark.options import source_options
from pybk.spark.source.batch_reader import PlainReader
from pybk.spark.source.columns import schema_of
from pybk.spark.source.planning import Part, Piece, cut
from pybk.spark.source.reading import read_pieces

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from pybk.ledger import Bookie, Fragment
    from pybk.manager import LedgerManager

Locations = tuple[str, ...]
"""Where a task had better run, in order of name; empty if nobody is beside what it reads."""


def read_local(spark: SparkSession, **options: str) -> DataFrame:
    """Read ledgers as ``spark.read.format("pybk")`` does, with tasks beside bookies that have the entries.

    Which executor has what is settled when this is called, and how much there is to read, too. Filters are not pushed
    down to the ledgers: use the options ``startEntry`` and ``endEntry``.

    Args:
        spark: The session. With Spark Connect, or where pandas is missing, tasks are placed as Spark likes.
        options: Those of the format.

    Returns:
        The rows.

    Raises:
        UsageError: An option cannot be.
        NoSuchLedgerError: A ledger that was asked for by itself is not there.
        UnauthorizedError: The password is another.

    Cost: One small task on each executor, to ask for its bookie.
    """
    found = source_options(options, streaming=False)
    sc = context(spark)
    url = found.where.metadata_uri
    if sc is None or url is None or find_spec("pandas") is None:
        return spark.read.format("pybk").options(**options).load()
    schema = schema_of(found)
    groups: dict[Locations, list[Part]] = {}
    for locations, part in _placed_parts(
        spark, url, connection(found.where).manager, PlainReader(found, schema).parts()
    ):
        groups.setdefault(locations, []).append(part)
    tasks = [
        (locations, pieces)
        for locations, group in sorted(groups.items())
        for pieces in cut(group, found.entries_per_partition)
    ]
    items = [(b"%d" % number, locations) for number, (locations, _) in enumerate(tasks)]
    numbers = placed(sc, items).map(lambda number: (int(number),))
    read = partial(_read, partial(read_pieces, found, schema), [pieces for _, pieces in tasks])
    return spark.createDataFrame(numbers, "task int").mapInArrow(read, schema)


def _placed_parts(
    spark: SparkSession, url: str, manager: LedgerManager, parts: Sequence[Part]
) -> Iterator[tuple[Locations, Part]]:
    """Yield what is to be read, and where."""
    answers = map(json.loads, ask_executors(spark, executor_locations(spark), partial(_tell, url)))
    bookies = [ExecutorBookie(**answer) for answer in answers if answer is not None]
    beside = {found.bookie: found.location for found in bookies if found.location is not None}
    known: dict[int, tuple[Fragment, ...]] = {}
    for part in parts:
        ledger_id = part.piece.ledger_id
        if ledger_id not in known:
            known[ledger_id] = manager.ledger_metadata(ledger_id).fragments
        for locations, piece in split(part.piece, known[ledger_id], beside):
            yield locations, Part(piece, part.entry_bytes)


def split(
    piece: Piece, fragments: Sequence[Fragment], beside: Mapping[Bookie, str]
) -> Iterator[tuple[Locations, Piece]]:
    """Cut entries where another ensemble has them.

    Args:
        piece: The entries.
        fragments: The ledger's.
        beside: Locations of bookies.

    Yields:
        Entries, and where their bookies are.
    """
    firsts = [fragment.first_entry_id for fragment in fragments]
    ends = [*firsts[1:], piece.last + 1]
    for fragment, first, end in zip(fragments, firsts, ends, strict=True):
        low, high = max(piece.first, first), min(piece.last, end - 1)
        if low <= high:
            locations = sorted({beside[bookie] for bookie in fragment.ensemble if bookie in beside})
            yield tuple(locations), Piece(piece.ledger_id, low, high)


def _tell(url: str) -> str:
    """Return the bookie beside this task's executor as JSON, null for none."""
    found = local_bookie(url)
    return json.dumps(None if found is None else asdict(found))


def _read(
    read: Callable[[tuple[Piece, ...]], Iterator[pa.RecordBatch]],
    tasks: Sequence[tuple[Piece, ...]],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from read(tasks[number])
