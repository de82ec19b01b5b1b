"""Import of the Parquet files that ``export`` wrote, exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from pybk.credentials import CredentialSources
from pybk.errors import CorruptError, IllegalOperationError, UsageError
from pybk.spark.jobs.export_layout import ENTRIES_DIRECTORY, LEDGERS, LEDGERS_DIRECTORY, header_of
from pybk.spark.jobs.formats import register_sink
from pybk.spark.jobs.ledgers import StoreOrUrl, cluster_of
from pybk.spark.jobs.spreading import context_of, shown_jobs
from pybk.spark.jobs.transfer import (
    IMPORT_OF,
    Quorums,
    TransferHeader,
    TransferTarget,
    finish,
    is_there,
    safest_quorums,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pybk.credentials import Secret
    from pybk.manager.append_future import AppendFuture
    from pybk.manager.ledger_writer import LedgerWriter
    from pybk.spark.sink.manifest import WrittenLedger

_TASKS_PER_CORE: Final = 4

_ENTRIES: Final = StructType(
    [
        StructField("ledger_id", LongType()),
        StructField("entry_id", LongType()),
        StructField("payload", BinaryType()),
    ]
)
"""Columns of the rows that a ledger is written from: its ``TransferHeader`` as entry -1, then its entries."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import.

    Attributes:
        export_id: The id of the export; empty if it has no ledgers.
        ledgers: The id of each exported ledger, with the id of its import in the cluster.
        imported: Exported ids of the ledgers that this call created; the others existed before.
        entries: The number of entries of the ledgers in ``imported``.
        bytes: Their payload bytes.
    """

    export_id: str
    ledgers: dict[int, int]
    imported: tuple[int, ...]
    entries: int
    bytes: int


def import_(
    spark: SparkSession,
    where: StoreOrUrl,
    directory: str,
    *,
    cluster_secret: bytes | Secret | None = None,
    password: bytes | Secret | None = None,
    secret: bytes | Secret | None = None,
    quorums: Quorums | None = None,
    quiet: bool = False,
) -> Imported:
    """Create the ledgers of an export: entries, type, hints, digest and custom metadata; they get new ids.

    All ledgers are committed at once. A second import of the same export into the same cluster creates no ledgers.

    Args:
        spark: The session whose executors read and write.
        where: A cluster's metadata URL.
        directory: The directory of the export.
        cluster_secret: The secret of the cluster.
        password: The password of the new ledgers; None stands for the empty one.
        secret: The secret of the new ledgers; with both, the new ledgers take the secret.
        quorums: Ensemble size, write quorum and ack quorum of the new ledgers; None for those that were exported, or
            for the cluster's defaults if the ledgers were exported from a store.
        quiet: Do not show progress.

    Raises:
        CorruptError: The export is incomplete.
        IllegalOperationError: Another process imports the same export.
        UsageError: ``where`` is a store, or the directory does not hold an export.
        PybkError: The cluster cannot be reached.

    Durability: On return, all ledgers are durable and committed. If this raises, none was committed by this call,
        unless ``outcome_unknown`` is set.
    """
    place = cluster_of(where, cluster_secret, "other processes cannot write ledgers to it")
    root = directory.rstrip("/")
    table = spark.read.parquet(f"{root}/{LEDGERS_DIRECTORY}")
    if not set(LEDGERS.fieldNames()) <= set(table.columns):
        raise UsageError(f"{root}/{LEDGERS_DIRECTORY} has other columns than an export: give a directory of `export`")
    rows = table.collect()
    if len({row.export_id for row in rows}) > 1:
        raise CorruptError(
            f"{root}/{LEDGERS_DIRECTORY} has rows of several exports; import each from its own directory"
        )
    if not rows:
        return Imported("", {}, (), 0, 0)
    headers = [header_of(row) for row in rows]
    if quorums is not None:
        headers = [replace(header, quorums=quorums) for header in headers]
    to = TransferTarget(
        place, CredentialSources.of(password, secret), IMPORT_OF, rows[0].export_id, safest_quorums(headers)
    )
    # The number is read before the ledgers are listed: a commit that the listing misses takes this number, so ours
    # is then refused.
    number = to.sink().record().last + 1
    before = to.there()
    wanted = [header for header in headers if not is_there(before.get(header.ledger_id), header)]
    if wanted:
        with shown_jobs(spark, f"pybk: import to {place}", quiet=quiet):
            _write(spark, to, root, wanted, number)
    now = to.there()
    return Imported(
        export_id=to.origin,
        ledgers={header.ledger_id: now[header.ledger_id].ledger_id for header in headers},
        imported=tuple(header.ledger_id for header in wanted),
        entries=sum(header.entries for header in wanted),
        bytes=sum(header.length for header in wanted),
    )


def _write(spark: SparkSession, to: TransferTarget, root: str, wanted: Sequence[TransferHeader], number: int) -> None:
    """Write each ledger in one task: shuffle its rows to one partition, its header first, entries in order."""
    heads = spark.createDataFrame([(header.ledger_id, -1, header.encode()) for header in wanted], _ENTRIES)
    ids = spark.createDataFrame([(header.ledger_id,) for header in wanted], _ENTRIES.fieldNames()[:1])
    entries = spark.read.parquet(f"{root}/{ENTRIES_DIRECTORY}").select(*_ENTRIES.fieldNames())
    rows = entries.join(ids.hint("broadcast"), "ledger_id", "left_semi").unionByName(heads)
    tasks = max(1, min(len(wanted), _TASKS_PER_CORE * context_of(spark).defaultParallelism))
    sorted_rows = rows.repartition(tasks, "ledger_id").sortWithinPartitions("ledger_id", "entry_id")
    sorted_rows.write.format(register_sink(spark, LedgersWriter(to, number))).mode("append").save()


@dataclass(frozen=True, slots=True)
class LedgersCommitMessage(WriterCommitMessage):
    """A task's message to the driver: the ledgers that it wrote."""

    written: tuple[WrittenLedger, ...]


Messages: TypeAlias = "Sequence[WriterCommitMessage | None]"


class LedgersWriter(DataSourceArrowWriter):
    """Writes rows of whole ledgers, each ledger's header first and its entries in order, as new ledgers."""

    def __init__(self, target: TransferTarget, number: int) -> None:
        self._target = target
        self._number = number

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task attempt."""
        making = _LedgerMaker(self._target)
        try:
            for batch in iterator:
                ledger_ids, entry_ids = (column.to_numpy() for column in batch.columns[:2])
                cuts = [0, *(np.flatnonzero(np.diff(ledger_ids)) + 1).tolist(), batch.num_rows]
                for low, high in pairwise(cuts):
                    if low < high:
                        making.take(int(ledger_ids[low]), entry_ids[low:high], batch.column(2).slice(low, high - low))
            making.finish()
        except BaseException:
            making.give_up()
            raise
        return LedgersCommitMessage(tuple(making.written))

    def commit(self, messages: Messages) -> None:
        """Commit the ledgers of all tasks."""
        received = [message for message in messages if isinstance(message, LedgersCommitMessage)]
        if len(received) != len(messages):
            raise IllegalOperationError(
                f"{len(messages) - len(received)} of {len(messages)} tasks did not report their ledgers"
            )
        self._target.commit(self._number, [each for message in received for each in message.written])

    def abort(self, messages: Messages) -> None:
        """Delete the ledgers that tasks wrote, unless they were committed."""
        received = [message for message in messages if isinstance(message, LedgersCommitMessage)]
        self._target.sink().abort([each.ledger_id for message in received for each in message.written])


class _LedgerMaker:
    """Makes the ledgers of one task, one after the other.

    Attributes:
        written: The complete ledgers.
    """

    def __init__(self, target: TransferTarget) -> None:
        self._target = target
        self._header: TransferHeader | None = None
        self._writer: LedgerWriter | None = None
        self._pending: AppendFuture[range] | None = None
        self._next = 0
        self.written: list[WrittenLedger] = []

    def take(self, ledger_id: int, entry_ids: np.ndarray[tuple[int], np.dtype[np.int64]], payloads: pa.Array) -> None:
        """Append rows of one ledger; they continue the rows of the last call, or begin with the header."""
        if entry_ids[0] == -1:
            self.finish()
            self._header = TransferHeader.decode(payloads[0].as_py())
            self._writer = self._target.create(self._header)
            entry_ids, payloads = entry_ids[1:], payloads.slice(1)
        if self._writer is None or self._header is None or self._header.ledger_id != ledger_id:
            raise CorruptError(f"there are entries of ledger {ledger_id}, but it has no header; export again")
        wrong = np.flatnonzero(entry_ids != np.arange(self._next, self._next + len(entry_ids)))
        if len(wrong):
            raise CorruptError(
                f"entry {self._next + int(wrong[0])} of ledger {ledger_id} is missing, or an earlier entry is "
                "duplicated: the export is damaged; export again"
            )
        self._next += len(entry_ids)
        if len(entry_ids):
            self._pending = self._writer.append_many_async(payloads.to_pylist())

    def finish(self) -> None:
        """Close the ledger that was being written, if one was."""
        if self._writer is not None and self._header is not None:
            self.written.append(finish(self._writer, self._header, self._pending))
        self._header = self._writer = self._pending = None
        self._next = 0

    def give_up(self) -> None:
        """Delete all ledgers that this task made."""
        for each in self.written:
            self._target.delete(each.ledger_id)
        if self._writer is not None:
            self._target.delete(self._writer.ledger_id)
